"""Speculative sampling (`reject`): its distribution is plain decoding's, exactly, whatever the drafter's is.

Case 24 of the project's list of what broke other tools. A vocabulary of eight and tables of logits stand in for the models, so
that the joint of three tokens is known exactly; rules that are wrong on purpose show that the tests would notice. Then drafters of
every kind with tiny models, against plain draws.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PairOf
from kind_models import ALWAYS, open_kind, write_kind, write_near

from llama_sidecar.runtime import Model, PromptError, Sampling, _native, load
from llama_sidecar.runtime.library import llama
from llama_sidecar.runtime.sampling import _truncating, address, rule_of
from llama_sidecar.runtime.verification import same_distribution

N_VOCAB, N_TEXT, DEPTH = 8, 3, 2
SAMPLING = Sampling(temperature=0.7, top_k=4, top_p=1.0, min_p=0.0)
N_DRAWS = 20_000
P_FAULT, P_SOUND = 1e-6, 1e-3

Rows = np.ndarray  # logits (n_vocab, n_vocab): of the token after each token
Text = tuple[int, ...]


def tables(seed: int, apart: float) -> tuple[Rows, Rows]:
    """The target's and the drafter's logits; `apart` says how far the drafter is off."""
    rng = np.random.default_rng(seed)
    target = 1.5 * rng.standard_normal((N_VOCAB, N_VOCAB))
    return target, target + apart * rng.standard_normal((N_VOCAB, N_VOCAB))


def probabilities(row: Rows) -> Rows:
    """Of the tokens after top-k and temperature, in plain numpy."""
    kept = np.sort(row)[-SAMPLING.top_k]
    weights = np.where(row >= kept, np.exp((row - row.max()) / SAMPLING.temperature), 0.0)
    return weights / weights.sum()


def joint(target: Rows, presence: float = 0.0) -> dict[Text, float]:
    """The exact probability of every text of N_TEXT tokens after token 0, with a presence penalty if given."""
    found = {}
    for text in itertools.product(range(N_VOCAB), repeat=N_TEXT):
        p, before = 1.0, [0]
        for token in text:
            row = target[before[-1]].copy()
            row[list(set(before))] -= presence
            p *= probabilities(row)[token]
            before.append(token)
        if p > 0:
            found[text] = p
    return found


def goodness(texts: Sequence[Text], expected: dict[Text, float]) -> float:
    """Chi-square against exact probabilities: p by Wilson and Hilferty's approximation. 0 where an impossible text occurs."""
    counts = Counter(texts)
    if counts.keys() - expected.keys():
        return 0.0
    rare = [text for text, p in expected.items() if len(texts) * p < 5]
    cells = [(counts[text], len(texts) * p) for text, p in expected.items() if text not in set(rare)]
    if rare:
        cells.append((sum(counts[t] for t in rare), len(texts) * sum(expected[t] for t in rare)))
    statistic = sum((n - wanted) ** 2 / wanted for n, wanted in cells)
    k = len(cells) - 1
    z = ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))
    return 0.5 * math.erfc(z / math.sqrt(2))


@contextmanager
def native_chooser(seed: int, presence: float = 0.0, rules: Any = None) -> Iterator[Any]:
    """The speculative chooser over llama.cpp's samplers; its history is token 0."""
    lib = llama()
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    penalties = [lib.llama_sampler_init_penalties(N_VOCAB, 64, 1.0, 0.0, presence)] if presence else []
    for part in [*penalties, *_truncating(SAMPLING)]:
        lib.llama_sampler_chain_add(chain, part)
    lib.llama_sampler_accept(chain, 0)
    chooser = _native.speculative_chooser(address(chain), presence != 0, 0, seed, rules)
    yield chooser
    del chooser
    lib.llama_sampler_free(chain)


def draw(chooser: Any, target: list[list[float]], drafter: list[list[float]]) -> tuple[Text, int, int]:
    """A text by rounds of DEPTH drafts; the drafts judged, and those that stood."""
    text, n_judged, n_stood = [0], 0, 0
    while len(text) <= N_TEXT:
        chooser.begin_draft()
        draft = [text[-1]]
        while len(draft) <= DEPTH:
            draft.append(chooser.pick(drafter[draft[-1]]))
        for drafted in [*draft[1:], -1]:
            text.append(chooser.choose(target[text[-1]], drafted))
            n_judged += drafted >= 0
            if text[-1] != drafted:
                break
            n_stood += 1
    return tuple(text[1 : N_TEXT + 1]), n_judged, n_stood


# The rule against exact probabilities


@pytest.mark.parametrize(("seed", "apart"), [(0, 0.0), (1, 0.5), (2, 1.5), (3, 4.0)])
def test_the_joint_of_three_tokens_is_the_targets(seed: int, apart: float) -> None:
    """Case 24. Far apart, some of the target's tokens have no mass with the drafter, and the other way round."""
    target, drafter = tables(seed, apart)
    with native_chooser(seed) as chooser:
        found = [draw(chooser, target.tolist(), drafter.tolist()) for _ in range(N_DRAWS)]
    texts = [text for text, _, _ in found]
    expected = joint(target)
    assert goodness(texts, expected) > P_SOUND
    for n in (1, 2):
        marginal: Counter[Text] = Counter()
        for text, p in expected.items():
            marginal[text[:n]] += p  # type: ignore[assignment]
        assert goodness([text[:n] for text in texts], dict(marginal)) > P_SOUND
    if apart == 0.0:
        assert all(n_judged == n_stood for _, n_judged, n_stood in found)
    if apart == 4.0:
        p, q = (np.array([probabilities(row) for row in rows]) for rows in (target, drafter))
        assert ((p > 0) & (q == 0)).any() and ((q > 0) & (p == 0)).any()


def test_as_many_drafts_stand_as_the_distributions_have_in_common() -> None:
    """Their overlap, the sum of min(p, q): more than the target gives the drafter's best token."""
    target, drafter = tables(1, 0.5)
    p, q = probabilities(target[0]), probabilities(drafter[0])
    with native_chooser(0) as chooser:
        stood = 0
        for _ in range(N_DRAWS):
            chooser.begin_draft()
            drafted = chooser.pick(drafter[0].tolist())
            stood += chooser.choose(target[0].tolist(), drafted) == drafted
    overlap = float(np.minimum(p, q).sum())
    assert stood / N_DRAWS == pytest.approx(overlap, abs=4 * math.sqrt(overlap / N_DRAWS))
    assert overlap > p[int(np.argmax(drafter[0]))]


def test_penalties_look_at_what_was_drafted_before_and_never_at_what_fell() -> None:
    target, drafter = tables(5, 1.0)
    texts = []
    for seed in range(6000):
        with native_chooser(seed, presence=1.5) as chooser:
            texts.append(draw(chooser, target.tolist(), drafter.tolist())[0])
    assert goodness(texts, joint(target, presence=1.5)) > P_SOUND
    assert goodness(texts, joint(target)) < P_FAULT


def test_changing_the_rule_from_round_to_round_changes_no_distribution() -> None:
    target, drafter = tables(2, 1.5)
    rules = _native.RuleChoice()
    with native_chooser(0, rules=rules) as chooser:
        found, used = [], set()
        for _ in range(N_DRAWS):
            used.add(rules.rejects)
            text, n_judged, n_stood = draw(chooser, target.tolist(), drafter.tolist())
            rules.observe(n_stood + 1, 1.0 + 0.1 * n_judged)
            found.append(text)
    assert used == {True, False}
    assert goodness(found, joint(target)) > P_SOUND


def test_a_token_that_no_picker_took_is_our_own_bug() -> None:
    with native_chooser(0) as chooser:
        chooser.begin_draft()
        with pytest.raises(RuntimeError, match="did not take"):
            chooser.choose([0.0] * N_VOCAB, 3)
        chooser.begin_draft()
        taken = chooser.pick([0.0] * N_VOCAB)
        with pytest.raises(RuntimeError, match="did not take"):
            chooser.choose([0.0] * N_VOCAB, N_VOCAB - 1 - taken)


# Power: the same test, sizes and tables with rules that are wrong on purpose

Rule = Callable[[Rows, Rows, int, np.random.Generator], int]


def leviathan(p: Rows, q: Rows, drafted: int, rng: np.random.Generator) -> int:
    if rng.random() * q[drafted] < p[drafted]:
        return drafted
    rest = np.maximum(p - q, 0.0)
    return pick(rest / rest.sum(), rng)


def inverted(p: Rows, q: Rows, drafted: int, rng: np.random.Generator) -> int:
    """min(1, q / p)."""
    if rng.random() * p[drafted] < q[drafted]:
        return drafted
    rest = np.maximum(p - q, 0.0)
    return pick(rest / rest.sum(), rng) if rest.sum() > 0 else pick(p, rng)


def not_normalised(p: Rows, q: Rows, drafted: int, rng: np.random.Generator) -> int:
    """The random number runs past the residual's mass, to the last token of it."""
    if rng.random() * q[drafted] < p[drafted]:
        return drafted
    rest = np.maximum(p - q, 0.0)
    return pick(rest, rng)


def from_the_target(p: Rows, q: Rows, drafted: int, rng: np.random.Generator) -> int:
    """A rejected draft is replaced from p instead of the residual."""
    return drafted if rng.random() * q[drafted] < p[drafted] else pick(p, rng)


def pick(weights: Rows, rng: np.random.Generator) -> int:
    ends = np.cumsum(weights)
    last = int(np.flatnonzero(weights)[-1])
    return min(int(np.searchsorted(ends, rng.random(), side="right")), last)


def by_rule(rule: Rule, target: Rows, drafter: Rows, *, row_off: int = 0, n: int = N_DRAWS) -> list[Text]:
    """Texts by a rule in Python; with `row_off` each draft is judged by the row that many further on."""
    p, q = (np.array([probabilities(row) for row in rows]) for rows in (target, drafter))
    rng = np.random.default_rng(0)
    found = []
    for _ in range(n):
        text = [0]
        while len(text) <= N_TEXT:
            draft = [text[-1]]
            while len(draft) <= DEPTH:
                draft.append(pick(q[draft[-1]], rng))
            for i, drafted in enumerate(draft[1:]):
                seen = draft[min(i + row_off, DEPTH)]
                text.append(rule(p[seen], q[draft[i]], drafted, rng))
                if text[-1] != drafted:
                    break
            else:
                text.append(pick(p[draft[-1]], rng))
        found.append(tuple(text[1 : N_TEXT + 1]))
    return found


def test_the_rule_in_python_passes() -> None:
    target, drafter = tables(2, 1.5)
    assert goodness(by_rule(leviathan, target, drafter), joint(target)) > P_SOUND


@pytest.mark.parametrize("rule", [inverted, not_normalised, from_the_target])
def test_a_wrong_rule_is_caught(rule: Rule) -> None:
    target, drafter = tables(2, 1.5)
    assert goodness(by_rule(rule, target, drafter, n=4000), joint(target)) < P_FAULT


def test_a_row_too_far_is_caught() -> None:
    target, drafter = tables(2, 1.5)
    assert goodness(by_rule(leviathan, target, drafter, row_off=1, n=4000), joint(target)) < P_FAULT


def test_the_two_sample_test_catches_them_too() -> None:
    """As drafters of every kind are tested below: two samples, neither of them exact."""
    target, drafter = tables(2, 1.5)
    plain, n = by_rule(leviathan, target, target), 2000
    sound = by_rule(leviathan, target, drafter, n=n)
    assert same_distribution(plain[:n], sound)[1] > P_SOUND
    for rule, row_off in ((inverted, 0), (not_normalised, 0), (leviathan, 1)):
        wrong = by_rule(rule, target, drafter, row_off=row_off, n=n)
        assert same_distribution(plain[:n], wrong)[1] < 1e-4


# Drafters of every kind

PROMPT = list(range(20, 28))
N_KIND_DRAWS = 300


@pytest.fixture(scope="module", params=ALWAYS)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with open_kind(*write_kind(request.param, tmp_path_factory.mktemp("reject"))) as model:
        yield model


@pytest.mark.parametrize("options", [{"top_k": 5}, {"top_k": 6, "presence_penalty": 1.0}])
def test_every_kind_draws_as_plain_decoding_does(drafting: Model, options: dict[str, Any]) -> None:
    settings = {"temperature": 0.8, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True, **options}
    samples: list[list[Text]] = []
    n_drafted = 0
    for spec_type, accept in (("none", "match"), (None, "reject")):
        with drafting.session(spec_type=spec_type) as session:
            sample = []
            for seed in range(N_KIND_DRAWS):
                n = 2 + seed % 3  # so that rounds have 1, 2 and 3 drafts
                text = session.generate(PROMPT, max_tokens=n, accept=accept, seed=seed, **settings)  # type: ignore[arg-type]
                text.read()
                sample.append(tuple(text.tokens[:3]))
                n_drafted += text.stats.n_drafted
            samples.append(sample)
    assert n_drafted > N_KIND_DRAWS
    assert same_distribution(*samples)[1] > P_SOUND


def test_a_draft_model_like_the_target_stands_more_often_than_by_match(
    pair_of: PairOf, tmp_path: Path
) -> None:
    stood = {}
    main = pair_of("T", "Q8_0").main
    with (
        load(main, write_near(tmp_path, recurrent=False), ctx=256, threads=1, depth=3) as model,
        model.session() as session,
    ):
        for accept in ("match", "reject"):
            text = session.generate(
                PROMPT, max_tokens=200, temperature=1.0, seed=1, accept=accept, ignore_eos=True
            )
            text.read()
            stood[accept] = text.stats.mean_accepted_length
            assert text.stats.accept == accept
    assert stood["reject"] > stood["match"] + 0.1


# Which rule


def test_greedy_and_seeds_are_match_unless_told_otherwise(pair_of: PairOf) -> None:
    warm, seeded = Sampling(temperature=1.0), Sampling(temperature=1.0, seed=1)
    assert rule_of("reject", Sampling()) == "match" and rule_of("auto", Sampling(top_k=1)) == "match"
    assert rule_of("auto", warm) == "auto" and rule_of("auto", seeded) == "match"
    assert rule_of("reject", seeded) == "reject" and rule_of("match", warm) == "match"
    with pytest.raises(PromptError, match="auto, match, reject"):
        rule_of("always", warm)
    with load(pair_of("T", "Q8_0").main, ctx=64, threads=1, depth=2) as model, model.session() as session:
        text = session.generate(PROMPT, max_tokens=30, temperature=1.0, ignore_eos=True)
        text.read()
        assert text.stats.accept in ("auto, now match", "auto, now reject")
        one, two = (
            session.generate(PROMPT, max_tokens=30, temperature=1.0, seed=3, accept="reject", ignore_eos=True)
            for _ in range(2)
        )
        two.read()
        assert one.finished and one.tokens == []  # the second text ended the first, which never ran
        again = session.generate(
            PROMPT, max_tokens=30, temperature=1.0, seed=3, accept="reject", ignore_eos=True
        )
        assert again.read() == two.text


@pytest.mark.parametrize(("match_s", "reject_s", "faster"), [(1.0, 2.0, False), (2.0, 1.0, True)])
def test_the_faster_rule_gets_most_rounds_and_the_other_is_tried_again(
    match_s: float, reject_s: float, faster: bool
) -> None:
    rules = _native.RuleChoice()
    used = []
    for _ in range(1000):
        used.append(rules.rejects)
        rules.observe(2, reject_s if used[-1] else match_s)
    assert used[0] is True and used.count(faster) > 900
    assert (not faster) in used[100:]


def test_a_round_that_was_held_up_does_not_decide() -> None:
    rules, used = _native.RuleChoice(), []
    for i in range(400):
        used.append(rules.rejects)
        held_up = 60.0 if i == 0 else 0.0  # the first round builds graphs, and any may wait for the machine
        rules.observe(3 if used[-1] else 2, 1.0 + held_up)
    assert used[40:].count(True) > 300


def test_another_rule_becomes_faster() -> None:
    rules = _native.RuleChoice()
    used = []
    for i in range(2000):
        used.append(rules.rejects)
        rules.observe(2, (1.0 if i < 500 else 3.0) if not used[-1] else 2.0)
    assert used[:500].count(True) < 70 and used[1000:].count(True) > 850
