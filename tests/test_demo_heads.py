"""The demo's heads of other kinds, converted and run: each drafts held-out code as its training promises, and changes no token of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Stats, load
from llama_sidecar.sidecars.kinds import KINDS

DEMO = Path(__file__).parents[1] / "sidecars" / "demo"
HEADS = sorted(config.parent.name for config in DEMO.glob("*/config.json"))
MAX_BYTES = 12_000_000  # of all heads together
N_PROMPTS, N_TOKENS, MAX_DEPTH = 10, 96, 7


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = convert(DEMO, tmp_path_factory.mktemp("demo"), main_type="Q8_0", sidecar_type="Q8_0")
    assert result.main is not None
    return result.main


def test_they_are_of_other_kinds_and_together_small() -> None:
    assert HEADS and {*HEADS, "mtp"} <= set(KINDS)
    assert sum(file.stat().st_size for head in HEADS for file in (DEMO / head).iterdir()) < MAX_BYTES


@pytest.mark.parametrize("kind", HEADS)
def test_ids_are_plains_and_the_first_guess_stands_more_often_than_promised(
    kind: str, main: Path, tmp_path: Path
) -> None:
    """At the kind's own depth, and at depth 2, where a block is shorter than most that it was trained on."""
    result = convert(DEMO / kind, tmp_path, None, "Q8_0", target=DEMO)
    assert result.sidecar is not None and result.kind == kind
    lines = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in lines if line["kind"] == "code"][:N_PROMPTS]
    with load(main, result.sidecar, ctx=256, threads=1, depth=MAX_DEPTH) as model:
        assert model.kind == kind
        texts: dict[int, list[list[int]]] = {}
        for depth in (0, 2, model.depth):
            total = Stats(kind=kind, speculation="on", why="", depth=depth)
            with model.session(depth=depth) as session:
                texts[depth] = []
                for prompt in prompts:
                    generation = session.generate(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
                    generation.read()
                    texts[depth].append(generation.tokens)
                    total.include(generation.stats)
            assert texts[depth] == texts[0]
            if depth:
                assert total.accepted_per_position[0] > 0.4
