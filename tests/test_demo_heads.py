"""The demo's heads of other kinds, converted and run: each drafts held-out code as README.md beside it says, and changes no token."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Stats, load
from llama_sidecar.sidecars.kinds import KINDS

DEMO = Path(__file__).parents[1] / "sidecars" / "demo"
HEADS = sorted(config.parent.name for config in DEMO.glob("*/config.json"))
MAX_BYTES = 12_000_000  # of all heads together
N_PROMPTS, N_TOKENS = 10, 96
FLOOR = 0.4  # of acceptance at the first position
NEAR = 0.05  # how far a machine's rounding may lead from README's figures


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = convert(DEMO, tmp_path_factory.mktemp("demo"), main_type="Q8_0", sidecar_type="Q8_0")
    assert result.main is not None
    return result.main


def promised(kind: str) -> list[float]:
    """README's acceptance by position."""
    row = re.search(rf"^\| `{kind}` \|([ 0-9.|]+)$", (DEMO / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    return [float(figure) for figure in re.findall(r"[\d.]+", row[1])]


def test_there_is_one_of_every_other_kind_and_together_they_are_small() -> None:
    assert {*HEADS, "mtp"} == set(KINDS)
    assert sum(file.stat().st_size for head in HEADS for file in (DEMO / head).iterdir()) < MAX_BYTES


@pytest.mark.parametrize("kind", HEADS)
def test_ids_are_plains_and_acceptance_is_what_readme_says(kind: str, main: Path, tmp_path: Path) -> None:
    """At the depth that README has figures of, and at 2, where a block is shorter than most that it was trained on."""
    result = convert(DEMO / kind, tmp_path, None, "Q8_0", target=DEMO)
    assert result.sidecar is not None and result.kind == kind
    lines = [json.loads(line) for line in (DEMO / "heldout.jsonl").read_text().splitlines()]
    prompts = [line["prompt"] for line in lines if line["kind"] == "code"][:N_PROMPTS]
    expected = promised(kind)
    texts: dict[int, list[list[int]]] = {}
    with load(main, result.sidecar, ctx=256, threads=1, depth=len(expected)) as model:
        assert (model.kind, model.depth) == (kind, len(expected))
        for depth in (0, 2, len(expected)):
            total, texts[depth] = Stats(kind=kind, speculation="on", why="", depth=depth), []
            with model.session(depth=depth) as session:
                for prompt in prompts:
                    generation = session.generate(prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True)
                    generation.read()
                    texts[depth].append(generation.tokens)
                    total.include(generation.stats)
            assert texts[depth] == texts[0]
            if depth:
                assert total.accepted_per_position[0] > FLOOR
    assert total.accepted_per_position == pytest.approx(expected, abs=NEAR)
