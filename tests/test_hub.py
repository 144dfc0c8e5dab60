"""Checkpoints on the Hub: the same files as from a folder, no byte read that is not needed, one line for what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from hub_server import COMMIT, REPOSITORY, HubServer, hub

from llama_sidecar.converter import convert
from llama_sidecar.converter.places import parse


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    folder = make_checkpoint(tmp_path, name="Tiny-1B")
    with hub(folder, monkeypatch, tmp_path / "cache") as serving:
        yield serving


@pytest.mark.parametrize("name", [f"hf://{REPOSITORY}", REPOSITORY, f"hf://{REPOSITORY}@{COMMIT}"])
def test_the_files_are_those_of_the_folder(name: str, server: HubServer, tmp_path: Path) -> None:
    got = convert(name, tmp_path / "got")
    expected = convert(server.folder, tmp_path / "expected")
    for one, other in ((got.main, expected.main), (got.sidecar, expected.sidecar)):
        assert one and other and one.name == other.name and one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://org/name", ("org/name", None)),
        ("hf://org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("https://huggingface.co/org/name/", ("org/name", None)),
        ("https://huggingface.co/org/name/tree/v1", ("org/name", "v1")),
        ("org/name", ("org/name", None)),
        ("org/name@v1", ("org/name", "v1")),
        *(
            (text, None)
            for text in ("name", "a/b/c", "./a/b", "../b", "/a/b", "hf://name", "https://other.org/a/b")
        ),
    ],
)
def test_names(text: str, expected: tuple[str, str | None] | None) -> None:
    assert parse(text) == expected
