"""Compact heads in use: cheaper drafts, the same text, and rows for the tokens that turn up."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from kind_models import write_kind

from llama_sidecar.runtime import Model, Session, heads, kernels, load
from llama_sidecar.runtime._native import DraftVocab
from llama_sidecar.runtime.draft_vocab import make_draft_vocab
from llama_sidecar.runtime.errors import LoadError
from llama_sidecar.runtime.library import set_verbose
from llama_sidecar.runtime.reference import Context, contexts
from llama_sidecar.runtime.sampling import address
from llama_sidecar.runtime.weights import Weights, make_draft_context
from llama_sidecar.sidecars import MainFile, Sidecar, open_main, open_sidecar, read_header
from llama_sidecar.sidecars.compact import open_compact, write_compact
from llama_sidecar.sidecars.errors import PairMismatch

PROMPT = list(b"hello world, this is where it starts")
N = 48


@pytest.fixture(scope="module", params=[True, False], ids=["R", "T"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> models.Pair:
    folder = tmp_path_factory.mktemp("pair")
    # Q4_0 is the type that a head's vocabulary is cut to: its rows are then those of the sidecar to the bit.
    return models.write_pair(folder, recurrent=request.param, type=GGMLQuantizationType.Q4_0)


@pytest.fixture(scope="module")
def compact(pair: models.Pair) -> Iterator[Model]:
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        yield model


def run(model: Model, **options: object) -> tuple[list[int], float | None]:
    with model.session(**options) as session:  # type: ignore[arg-type]
        generation = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
        return generation.tokens, generation.stats.coverage


def test_text_is_the_same_with_half_of_the_vocabulary(compact: Model) -> None:
    plain, no_coverage = run(compact, spec_type="none")
    tokens, coverage = run(compact)
    assert tokens == plain
    assert no_coverage is None
    assert coverage is not None and 0 < coverage < 1, "both sorts of token must occur for it to mean anything"


def test_drafts_are_the_full_head_s_best_among_the_rows(pair: models.Pair, compact: Model) -> None:
    """Fed with tokens it has, the compact head's first draft is the arg-max of the full head's logits over its rows."""
    from llama_sidecar.runtime import _native
    from llama_sidecar.runtime.reference import contexts

    assert compact.draft_vocab is not None
    ids = compact.draft_vocab.ids
    prompt = [ids[i] for i in range(3, 60, 3)]
    with compact.session() as session:
        native, chooser = session._native, _native.greedy_chooser()
        native.feed(prompt, True)
        last = native.first(chooser)
        drafts = native.step(chooser, 1, True).drafts
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab="full") as full:
        target, head = contexts(full, depth=1)
        target.decode(prompt, 0, [len(prompt) - 1])
        fed = last if last in ids else ids[0]
        hidden = [[0.0] * head.n_embd, *(target.hidden(i) for i in range(len(prompt)))]
        head.decode([*prompt, fed], 0, [len(prompt)], hidden)
        logits = head.logits(len(prompt))
        target.close()
        head.close()
    assert drafts == [ids[int(logits[ids].argmax())]]


# Spare rows.


@contextmanager
def spare(
    source: Sidecar | MainFile,
    folder: Path,
    rows: Sequence[int] = range(128),
    counts: Any = None,
    **options: Any,
) -> Iterator[DraftVocab]:
    """A head of some rows, an eighth of which are spare, loaded."""
    path = folder / "compact-x.gguf"
    write_compact(source, rows, path, **options)
    weights = Weights(path, with_head=True, n_gpu_layers=0, device=None, writable=True)
    with closing(weights):
        yield make_draft_vocab(source, open_compact(path), weights, counts)


def test_a_token_gets_the_spare_row_that_was_used_least_recently(pair: models.Pair, tmp_path: Path) -> None:
    with spare(open_sidecar(pair.sidecar), tmp_path) as vocab:
        vocab.adopt([5, 127, 5])  # 127, used now, is no longer the first to go
        assert vocab.ids == list(range(128))
        vocab.adopt([200, 5, 201, 200])
        assert vocab.ids[124:] == [124, 201, 200, 127]
        vocab.adopt([200, 201, 126])  # which has lost its row, and gets another
        assert vocab.ids[124:] == [126, 201, 200, 127]
        vocab.adopt(list(range(128, 256)))  # more than there are rows: the last ones
        assert sorted(vocab.ids) == [*range(112), *range(240, 256)]


def test_the_tokens_seen_least_lose_their_rows_first(pair: models.Pair, tmp_path: Path) -> None:
    counts = np.bincount(range(60, 128), minlength=256)
    with spare(open_sidecar(pair.sidecar), tmp_path, counts=counts) as vocab:
        vocab.adopt([200])
        assert vocab.ids[59] == 200


def test_a_file_that_became_shorter_leaves_rows_as_they_are(pair: models.Pair, tmp_path: Path) -> None:
    path = tmp_path / "mtp-main.gguf"
    path.write_bytes(pair.sidecar.read_bytes())
    with spare(open_sidecar(path), tmp_path) as vocab:
        os.truncate(path, 100)
        vocab.adopt([200])
        path.write_bytes(pair.sidecar.read_bytes())
        vocab.adopt([200])
        assert vocab.ids == list(range(128))


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_rows_of_more_tokens_are_those_of_a_head_that_has_them(
    type: str, narrow: bool, tmp_path: Path
) -> None:
    written = models.write_pair(tmp_path, type=GGMLQuantizationType[type])
    source = open_sidecar(written.sidecar)
    write_compact(source, range(256), tmp_path / "all.gguf", narrow=narrow)
    every = read_header(tmp_path / "all.gguf").tensor_bytes("token_embd.weight").reshape(256, -1)
    with spare(source, tmp_path, narrow=narrow) as vocab:
        for token in range(256):
            assert vocab.read("token_embd.weight", token) == every[token].tobytes()


@pytest.mark.parametrize("own", [False, True])
def test_the_main_file_has_the_rows_of_a_head_without_matrices_of_its_own(tmp_path: Path, own: bool) -> None:
    name = "blk.4.nextn.embed_tokens.weight"

    def own_embeddings(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = np.random.default_rng(4).random(tensors["token_embd.weight"].shape, np.float32)

    written = models.write_pair(tmp_path, edit=own_embeddings if own else None)
    sidecar, main = open_sidecar(written.sidecar), open_main(written.main)
    with spare(sidecar, tmp_path) as vocab:
        assert bool(vocab.read(name, 5)) == own
        head = open_compact(tmp_path / "compact-x.gguf")
        with closing(
            Weights(head.path, with_head=True, n_gpu_layers=0, device=None, writable=True)
        ) as weights:
            of_main = make_draft_vocab(main, head, weights)
            of_main.adopt([200])
            assert (200 in of_main.ids) == (not own)
            row = of_main.read("token_embd.weight", 5)
            assert row == (b"" if own else vocab.read("token_embd.weight", 5))


def test_rows_and_tokens_that_are_not_there_are_refused(pair: models.Pair, tmp_path: Path) -> None:
    with spare(open_sidecar(pair.sidecar), tmp_path) as vocab:
        for wrong in ([256], [-1]):
            with pytest.raises(IndexError):
                vocab.adopt(wrong)
    for ids, rows in (([], []), ([256], []), ([0], [1])):
        with pytest.raises(ValueError):
            DraftVocab(0, 256, ids, rows, [])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_a_head_that_is_refused_leaves_no_file_open(pair: models.Pair) -> None:
    with load(pair.main, pair.sidecar, ctx=256, threads=1, draft_vocab="full") as model:
        head = address(model.head_weights.model)
        before = len(list(Path("/proc/self/fd").iterdir()))
        matrices = [(name, str(pair.main), 0, 64, 0, 0, 16) for name in ("token_embd.weight", "none.weight")]
        with pytest.raises(ValueError, match=r"none\.weight"):
            DraftVocab(head, 256, list(range(256)), [0], matrices)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("computing", ["stock", "ours"])
def test_adopted_rows_are_drafted_with(pair: models.Pair, computing: str) -> None:
    """A head of half of the vocabulary drafts, token by token, what the full one does among the rows that it has by then."""
    if computing == "ours" and kernels.problem():
        pytest.skip("our kernels are not to be had here")
    with (
        load(
            pair.main, ctx=256, threads=1, depth=3, draft_vocab=128, kernels=computing, flash_attn="off"
        ) as half,
        load(pair.main, ctx=256, threads=1, depth=3, draft_vocab="full", flash_attn="off") as full,
    ):
        assert half.draft_vocab is not None
        outside = [t for t in range(256) if t not in half.draft_vocab.ids]
        prompt = outside[:12]
        with half.session() as session:
            generation = session.generate(prompt, max_tokens=2, temperature=0, ignore_eos=True, depth=1)
            generation.read()
            ids, tokens = list(half.draft_vocab.ids), generation.tokens
        assert set(prompt) <= set(ids)
        target, head = contexts(full, depth=1)
        target.decode(prompt, 0, [len(prompt) - 1])
        hidden = [np.zeros(head.n_embd), *(target.hidden(i) for i in range(len(prompt)))]
        head.decode([*prompt, tokens[0]], 0, [len(prompt)], hidden)
        with closing(
            Context(make_draft_context(half.head_weights, half.settings, n_ctx=64), masked=True)
        ) as small:
            small.decode([ids.index(t) for t in (*prompt, tokens[0])], 0, [len(prompt)], hidden)
            expected = head.logits(len(prompt))[ids]  # by kernels that round otherwise
            np.testing.assert_allclose(small.logits(len(prompt)), expected, atol=5e-3)
        target.close()
        head.close()


def test_sessions_share_rows_and_know_of_each_other_s(pair: models.Pair) -> None:
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        assert model.draft_vocab is not None
        outside = [t for t in range(256) if t not in model.draft_vocab.ids]
        with model.session() as one, model.session() as other, model.session(spec_type="none") as plain:

            def texts(session: Session, prompt: list[int]) -> list[int]:
                generation = session.generate(prompt, max_tokens=24, temperature=0, ignore_eos=True)
                generation.read()
                return generation.tokens

            for prompt in (outside[:16], outside[16:32], outside[:16]):
                assert texts(one, prompt) == texts(other, prompt) == texts(plain, prompt)
            one_round = one.generate(outside[:16], max_tokens=24, temperature=0, ignore_eos=True)
            next(one_round)
            other.generate(outside[32:48], max_tokens=2, temperature=0).read()  # takes all spare rows
            one_round.read()
            assert one_round.tokens == texts(plain, outside[:16])


@pytest.mark.parametrize("depth", [0, 3])
def test_tokens_of_a_text_that_was_left_get_rows_with_the_next_prompt(pair: models.Pair, depth: int) -> None:
    """Also those of a text without drafts: what the session holds of them is not part of the next prompt's new tokens."""
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:  # 16 spare rows
        assert model.draft_vocab is not None
        with model.session() as session:
            left = session.generate(PROMPT, max_tokens=N, temperature=0, ignore_eos=True, depth=depth)
            for _ in range(8):
                next(left)
            left.close()
            new = set(left.tokens) - set(model.draft_vocab.ids)
            assert new or depth, "choose another prompt"
            again = session.generate([*PROMPT, *left.tokens], max_tokens=1, temperature=0, ignore_eos=True)
            again.read()
            assert again.stats.n_reused and set(left.tokens) <= set(model.draft_vocab.ids)


def test_coverage_counts_the_tokens_that_had_a_row_when_they_came(pair: models.Pair) -> None:
    with load(
        pair.main, ctx=256, threads=1, depth=3, draft_vocab=224
    ) as model:  # as many spare rows as tokens outside: 28
        assert model.draft_vocab is not None
        before = set(model.draft_vocab.ids)
        tokens, first = run(model)
        assert first is not None and first < 1 and set(tokens) - before
        assert run(model) == (tokens, 1.0)
        with model.session() as session:
            ended = session.generate(PROMPT, max_tokens=3, temperature=0)
            ended.read()
            assert (ended.tokens, ended.stats.coverage) == (tokens[:3], 1.0)


def test_the_default_drafts_a_small_vocabulary_whole_and_says_so(pair: models.Pair) -> None:
    with load(pair.main, ctx=256, threads=1, depth=3) as model:
        assert model.draft_vocab is None
        assert "256 tokens is drafted whole" in model.draft_vocab_why


def test_learning_counts_what_is_written_and_not_without_being_asked(pair: models.Pair) -> None:
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        run(model)
        assert heads.counts_for(model.main).sum() == 0
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128, learn=True) as model:
        tokens, _ = run(model)
        counts = heads.counts_for(model.main)
        assert counts.sum() == len(tokens)
        assert all(counts[t] == tokens.count(t) for t in set(tokens))


def test_an_unusable_cache_means_the_full_head_and_a_reason(
    pair: models.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(blocked / "cache"))
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128, learn=True) as model:
        assert model.draft_vocab is None
        assert "compact head" in model.draft_vocab_why
        assert run(model)[0] == run(model, spec_type="none")[0]


def test_a_head_that_another_process_removes_means_the_full_head_and_a_reason(
    pair: models.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = heads.compact_head

    def removed(*args: Any, **options: Any) -> Path:
        path = real(*args, **options)
        path.unlink()
        return path

    monkeypatch.setattr(heads, "compact_head", removed)
    with load(pair.main, ctx=256, threads=1, depth=3, draft_vocab=128) as model:
        assert model.draft_vocab is None
        assert "no such file" in model.draft_vocab_why
        assert run(model)[1] is None


# A compact sidecar that is given by name.


@pytest.fixture
def given(pair: models.Pair, tmp_path: Path) -> Path:
    path = tmp_path / "compact-main-100.gguf"
    write_compact(open_sidecar(pair.sidecar), range(20, 120), path)
    return path


def test_a_compact_sidecar_given_by_name_is_used_as_it_is(
    pair: models.Pair, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_SIDECAR_CACHE", str(tmp_path / "cache"))
    main = tmp_path / "alone" / "main.gguf"  # nothing but the compact sidecar has a head
    main.parent.mkdir()
    main.write_bytes(pair.main.read_bytes())
    with load(main, given, ctx=256, threads=1, depth=3, learn=True) as model:
        assert (model.kind, model.speculation.path) == ("mtp", given)
        assert model.speculation.match == "unverified"  # the source has no fingerprint
        assert model.head_weights.path == given
        assert model.draft_vocab is not None and model.draft_vocab.ids == list(range(20, 120))
        assert not model.learns
        tokens, coverage = run(model)
        assert tokens == run(model, spec_type="none")[0]
        assert coverage is not None and 0 < coverage < 1
        assert set(tokens[-5:]) <= set(model.draft_vocab.ids)  # rows out of the main file
    assert not (tmp_path / "cache" / "heads").exists()
    with load(pair.main, pair.sidecar, ctx=256, threads=1, draft_vocab=100) as model:
        assert model.draft_vocab is not None and model.draft_vocab.ids != list(range(20, 120))


@pytest.mark.parametrize("rows", [64, "full"])
def test_a_compact_sidecar_and_a_number_of_rows_contradict_each_other(
    pair: models.Pair, given: Path, rows: int | str
) -> None:
    with pytest.raises(LoadError, match="100 rows it has"):
        load(pair.main, given, draft_vocab=rows)


@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_a_number_of_rows_is_refused_where_nothing_can_be_cut(kind: str, tmp_path: Path) -> None:
    main, options = write_kind(kind, tmp_path)
    with pytest.raises(
        LoadError, match=f"draft vocabulary 64: what drafts here is of kind {kind} and has no"
    ):
        load(main, **{**options, "draft_vocab": 64})


def test_a_compact_sidecar_of_another_model_is_refused(pair: models.Pair, tmp_path: Path) -> None:
    recurrent = "qwen35" in str(read_header(pair.main).arch)

    def compact_of(name: str, rows: range, n_vocab: int = 256, **options: Any) -> Path:
        other = models.write_pair(tmp_path / name, n_vocab=n_vocab, **({"recurrent": recurrent} | options))
        path = tmp_path / f"compact-{name}.gguf"
        write_compact(open_sidecar(other.sidecar), rows, path)
        return path

    def texts(path: Path, old: bytes, new: bytes) -> Path:
        data = path.read_bytes()
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, new))
        return path

    refused = [
        (compact_of("arch", range(64), recurrent=not recurrent), "architecture"),
        (compact_of("layers", range(64), layers=8), "trunk layers"),
        (compact_of("padding", range(250, 300), n_vocab=300), "last token id"),
        (
            texts(compact_of("text", range(256, 259), n_vocab=300), "Ġ257".encode(), "Ġ2_7".encode()),
            "last token",
        ),
    ]
    for path, what in refused:
        with pytest.raises(PairMismatch, match=what) as error:
            load(pair.main, path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
    large = models.write_pair(tmp_path / "large", n_vocab=300, recurrent=recurrent)
    with pytest.raises(PairMismatch, match="vocabulary's size is 256, the main model's is 300"):
        load(large.main, compact_of("small", range(64)))
    with pytest.raises(PairMismatch, match="text of token 257"):
        load(large.main, tmp_path / "compact-text.gguf")


def test_the_draft_context_takes_one_layer_s_cells_and_one_row_of_logits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By llama.cpp's own log. With an output row for each of a batch's 128 rows, logits alone would be 34 MB."""
    pair = models.write_pair(tmp_path, layers=4, n_vocab=66_000)
    with load(pair.main, ctx=4096, threads=1, depth=3, draft_vocab="full", flash_attn="on") as model:
        set_verbose(True)
        capfd.readouterr()
        with closing(
            Context(make_draft_context(model.head_weights, model.settings, n_ctx=4096), masked=True)
        ):
            log = capfd.readouterr().err
        set_verbose(False)
    sizes = {what: float(mib) for what, mib in re.findall(r"(\w+) buffer size = +([0-9.]+) MiB", log)}
    cells = 4096 * 2 * models.N_KV * models.HEAD_DIM * 2 / 2**20  # K and V, two bytes each
    assert sizes["KV"] == pytest.approx(cells, rel=0.01)
    assert sizes["output"] < 1 and sizes["compute"] < 4
