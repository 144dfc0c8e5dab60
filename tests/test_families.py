"""Every family's pair, as its users have it: the head computes what the model's own code computes, and drafts losslessly.

References are transformers' (scripts/dev/reference_logits.py); the tiny checkpoints are the families' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DRAFT_TOKEN, LOGITS_PROMPT, VARIANTS, make_checkpoint

from llama_sidecar.converter import convert
from llama_sidecar.converter.families import families
from llama_sidecar.runtime import Model, load, reference

LISTINGS = Path(__file__).parent / "data" / "listings"
HEAD_LOGITS = json.loads((LISTINGS / "reference_head_logits.json").read_text(encoding="utf-8"))
N = 24


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Model]]:
    """A variant's name and its pair, loaded to compute in F32: its arithmetic is then the same at every width."""
    pytest.importorskip("llama_cpp")
    arch, name = request.param
    folder = tmp_path_factory.mktemp("family")
    result = convert(make_checkpoint(folder, arch, name), folder / "out", "F32", "F32")
    assert result.main and result.sidecar
    exact = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attn": "off"}
    with load(result.main, result.sidecar, ctx=128, threads=1, depth=3, **exact) as model:  # type: ignore[arg-type]
        yield f"{arch}-{name}", model


def test_head_logits_equal_those_of_transformers(pair: tuple[str, Model]) -> None:
    name, model = pair
    if name not in HEAD_LOGITS:
        pytest.skip("transformers does not run this family's head")
    target, head = reference.contexts(model, 1)
    n = len(LOGITS_PROMPT)
    target.decode(LOGITS_PROMPT, 0, [n - 1])
    hidden = [target.hidden(i) for i in range(n)]
    head.decode([*LOGITS_PROMPT[1:], DRAFT_TOKEN], 1, [n - 1], hidden)
    found = head.logits(n - 1)[: len(HEAD_LOGITS[name])]
    target.close()
    head.close()
    np.testing.assert_allclose(found, HEAD_LOGITS[name], atol=1e-3)


def test_pair_drafts_and_says_what_the_main_file_says_alone(pair: tuple[str, Model]) -> None:
    _, model = pair
    with model.session(spec_type="none") as session:
        generation = session.generate(LOGITS_PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
        generation.read()
    for depth in (1, 3):
        with model.session(depth=depth) as session:
            drafted = session.generate(LOGITS_PROMPT, max_tokens=N, temperature=0, ignore_eos=True)
            drafted.read()
            assert drafted.tokens == generation.tokens
            assert drafted.stats.n_drafted > 0


def test_every_module_is_a_family_that_names_what_it_is() -> None:
    found = families()
    assert len({name for family in found.values() for name in family.CLASSES}) == sum(
        len(family.CLASSES) for family in found.values()
    )
    for family in found.values():
        assert family.CLASSES and family.TINY
