"""What crosses between host and device in a round, to the byte: a trip too many shows here, without a GPU."""

from __future__ import annotations

from pathlib import Path

import gguf
import models
import pytest
from conftest import PairOf
from kind_models import ALWAYS, open_kind, write_kind

from llama_sidecar.runtime import Model, _native, load
from llama_sidecar.runtime.stats import TRAFFIC

PROMPT = list(range(20, 60))
DEPTH, N_ROUNDS = 3, 6
LOGITS = 4 * models.N_VOCAB  # bytes of a row
HIDDEN = 4 * models.N_EMBD


def rounds(model: Model, n: int = N_ROUNDS) -> list[tuple[dict[str, int], int]]:
    """What each round counted, and how many rows stood waiting for the head when it began."""
    found, n_waiting = [], 1  # the prompt's rows have been caught up on: `last` alone
    chooser = _native.greedy_chooser()
    with model.session(depth=DEPTH) as session:
        native = session._native
        native.feed(PROMPT, True)
        native.first(chooser)
        native.catch_up()
        for _ in range(n):
            before = native.traffic
            done = native.step(chooser, DEPTH, True)
            after = native.traffic
            counts = {name: getattr(after, name) - getattr(before, name) for name in TRAFFIC}
            found.append((counts, n_waiting))
            n_waiting = len(done.tokens)
    return found


@pytest.mark.parametrize("letter", ["T", "R"])
def test_a_round_of_a_head_to_the_byte(pair_of: PairOf, letter: str) -> None:
    pair = pair_of(letter)
    with load(pair.main, ctx=256, threads=1, depth=DEPTH, draft_vocab="full") as model:
        for i, (counts, n_waiting) in enumerate(rounds(model)):
            n_reused = counts.pop("n_graphs_reused")
            # The verification's shape is that of the round before; of the head's three decodes the last is like the second.
            assert n_reused >= (2 if i > 0 else 1)
            # qwen35 and glm4moe hand out the hidden rows of all of a batch, mtp.cpp says why.
            n_handed_out = n_waiting + DEPTH - 1
            assert counts == {
                "n_decodes": 1 + DEPTH,
                # of the target: its logits, and the hidden rows of the round before (of the prompt they had been read);
                # of the head: each draft's logits, and the hidden row of all but the last
                "n_syncs": 1 + (i > 0) + DEPTH + (DEPTH - 1),
                "logits_bytes": (DEPTH + 1 + DEPTH) * LOGITS,
                "hidden_bytes": (DEPTH + 1 + n_handed_out) * HIDDEN,
                "fed_bytes": (n_waiting + DEPTH - 1) * HIDDEN,
                "state_bytes": 0,
            }


def test_a_backend_that_picks_hands_out_token_ids_too(pair_of: PairOf) -> None:
    pair = pair_of("R", "Q8_0")
    texts = []
    for picks in (False, True):
        with load(pair.main, ctx=256, threads=1, depth=DEPTH, draft_vocab="full") as model:
            assert not model.picks_on_backend  # on the CPU
            model.picks_on_backend = picks
            counted = [counts for counts, _ in rounds(model)]
            expected = (DEPTH + 1) * LOGITS + DEPTH * (LOGITS + 4 * picks)
            assert {counts["logits_bytes"] for counts in counted} == {expected}
            with model.session(depth=DEPTH) as session:
                text = session.generate(PROMPT, max_tokens=48, ignore_eos=True)
                text.read()
                texts.append((text.tokens, text.stats.n_accepted, text.stats.n_rounds))
    assert texts[0] == texts[1]


def test_draws_of_the_drafter_need_its_logits(pair_of: PairOf) -> None:
    """Speculative sampling weighs the drafter's probabilities: the backend's choice makes way, and comes back later."""
    pair = pair_of("R", "Q8_0")
    with load(pair.main, ctx=512, threads=1, depth=DEPTH, draft_vocab="full") as model:
        model.picks_on_backend = True
        with model.session(depth=DEPTH) as session:
            per_draft = []
            for accept in ("match", "reject", "match"):
                text = session.generate(
                    PROMPT, max_tokens=150, temperature=1.0, seed=1, accept=accept, ignore_eos=True
                )
                text.read()
                stats = text.stats
                of_target = (stats.n_drafted + stats.n_rounds) * LOGITS
                per_draft.append((stats.logits_bytes - of_target) / stats.n_drafted)
    assert per_draft[0] == LOGITS + 4 and per_draft[1] == LOGITS
    assert LOGITS < per_draft[2] < LOGITS + 4


@pytest.mark.parametrize("kind", ALWAYS)
def test_every_kind_drafts_the_same_where_the_backend_picks(kind: str, tmp_path: Path) -> None:
    main, options = write_kind(kind, tmp_path)
    found = []
    for picks in (False, True):
        with open_kind(main, options) as model:
            model.picks_on_backend = picks
            with model.session() as session:
                text = session.generate(PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
                text.read()
                found.append((text.tokens, text.stats.n_accepted, text.stats.n_rounds))
                assert text.stats.n_syncs > 0 and text.stats.logits_bytes > 0
    assert found[0] == found[1]


def test_a_checkpoint_in_place_of_slots_is_counted(pair_of: PairOf) -> None:
    pair = pair_of("R")
    with load(pair.main, ctx=256, threads=1, depth=DEPTH, draft_vocab="full") as model:
        for n_slots, crosses in ((DEPTH, False), (0, True)):
            with model.session(depth=DEPTH, n_slots=n_slots) as session:
                text = session.generate(PROMPT, max_tokens=20, ignore_eos=True)
                text.read()
                assert (text.stats.state_bytes > 0) is crosses


def test_plain_rounds_move_one_row_and_wait_once(pair_of: PairOf) -> None:
    pair = pair_of("T", "Q8_0")
    with load(pair.main, ctx=256, threads=1) as model, model.session(depth=0) as session:
        text = session.generate(PROMPT, max_tokens=20, ignore_eos=True)
        text.read()
        stats = text.stats
        n = stats.n_rounds
        assert (stats.n_decodes, stats.n_syncs, stats.logits_bytes) == (n, n, n * LOGITS)
        assert (stats.hidden_bytes, stats.fed_bytes, stats.state_bytes) == (0, 0, 0)
        both = type(stats)(None, "off", "", 0)
        both.include(stats)
        both.include(stats)
        assert both.logits_bytes == 2 * n * LOGITS and both.to_json()["n_syncs"] == 2 * n


def test_the_smallest_vocabulary_is_the_head_s(tmp_path: Path) -> None:
    """A head with more rows than the target has tokens picks on the host, where those rows are left out."""
    pair = models.write_pair(
        tmp_path, recurrent=False, sidecar_padding=32, type=gguf.GGMLQuantizationType.Q8_0
    )
    with load(pair.main, ctx=256, threads=1, depth=DEPTH, draft_vocab="full") as model:
        model.picks_on_backend = True
        counts, _ = rounds(model, 1)[0]
        assert counts["logits_bytes"] == (DEPTH + 1) * LOGITS + DEPTH * (LOGITS + 4 * 32)
