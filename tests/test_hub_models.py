"""Models and sidecars on the Hub: the files that llama.cpp's names mean, fetched once, and then as any files; refusals are one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import models
import pytest
import tiny_gguf
from click.testing import CliRunner
from conftest import PairOf
from hub_server import COMMIT, REPOSITORY, HubServer, hub

from llama_sidecar.runtime import load
from llama_sidecar.scripts.inspect import command as inspect_command
from llama_sidecar.scripts.run import command as run_command
from llama_sidecar.scripts.split import command as split_command
from llama_sidecar.sidecars.hub import HubFailed, choose_model, choose_sidecar, fetch, fetch_sidecar, parse

ADDRESS = f"hf://{REPOSITORY}"
PROMPT = list(b"hello world")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A repository of small files that are no models, called as people call theirs."""
    folder = tmp_path / "repository"
    names = ("A-BF16", "A-Q4_K_M", "A-Q8_0", "mtp-A-Q8_0", "mtp-A-Q4_0", "eagle3-A-Q8_0", "mmproj-A-F16")
    for name in (*names, "B-Q6_K-00001-of-00002", "B-Q6_K-00002-of-00002", "MTP/B-Q6_K"):
        path = folder / f"{name}.gguf"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    with hub(folder, monkeypatch, tmp_path / "cache") as serving:
        yield serving


def names_sent(server: HubServer) -> list[str]:
    """Since it was last asked."""
    names = sorted(file for file, *_ in server.sent)
    server.sent.clear()
    return names


# Which files


@pytest.mark.parametrize(
    ("address", "spec_type", "main", "others"),
    [
        (ADDRESS, "auto", "A-Q4_K_M.gguf", ["mtp-A-Q4_0.gguf"]),
        (f"{ADDRESS}:q8_0", "auto", "A-Q8_0.gguf", ["mtp-A-Q8_0.gguf"]),
        (f"{ADDRESS}:Q8_0@{COMMIT}", "draft-eagle3", "A-Q8_0.gguf", ["eagle3-A-Q8_0.gguf"]),
        (f"{ADDRESS}:Q8_0", "none", "A-Q8_0.gguf", []),
        (f"{ADDRESS}:Q8_0", "ngram", "A-Q8_0.gguf", []),
        (f"{ADDRESS}/A-BF16.gguf", "auto", "A-BF16.gguf", ["mtp-A-Q8_0.gguf"]),
        (f"{ADDRESS}:Q6_K", "auto", "B-Q6_K-00001-of-00002.gguf", ["B-Q6_K-00002-of-00002.gguf", "MTP/B-Q6_K.gguf"]),
        (f"{ADDRESS}/mtp-A-Q8_0.gguf", "auto", "mtp-A-Q8_0.gguf", []),
    ],
)  # fmt: skip
def test_a_model_and_the_sidecar_for_it(
    address: str, spec_type: str, main: str, others: list[str], server: HubServer
) -> None:
    for path in (address, Path(address)):  # which has lost a slash
        found = fetch(path, spec_type)
        assert found.name == main and found.read_bytes() == (server.folder / main).read_bytes()
        assert all((found.parent / name).is_file() for name in others)
        expected = sorted([main, *others])
        assert names_sent(server) == (expected if path == address else []), "fetched once"


def test_a_sidecar_alone_and_a_model_that_drafts(server: HubServer) -> None:
    assert fetch_sidecar(ADDRESS).name == "mtp-A-Q8_0.gguf"
    assert fetch_sidecar(f"{ADDRESS}:Q4_0").name == "mtp-A-Q4_0.gguf"
    assert fetch_sidecar(ADDRESS, "eagle3").name == "eagle3-A-Q8_0.gguf"
    assert fetch_sidecar(f"{ADDRESS}:Q8_0", "model").name == "A-Q8_0.gguf"
    assert fetch_sidecar(f"{ADDRESS}/A-BF16.gguf").name == "A-BF16.gguf"


def test_names_that_say_no_more() -> None:
    assert choose_model(["b/Z-F16.gguf", "A.gguf"], None) == "b/Z-F16.gguf", "the first"
    assert choose_model(["A-Q4_K_S.gguf"], "Q4_K") is None, "a type's whole name"
    assert choose_model(["A.txt", "A-00002-of-00002.gguf"], None) is None
    names = ["mtp-B-Q4_0.gguf", "mtp-A-BF16.gguf"]
    assert choose_sidecar(names, "A-Q4_0.gguf", None, "auto") == "mtp-A-BF16.gguf", "a namesake"
    assert choose_sidecar(["eagle3-A.gguf", "dspark-A.gguf"], "A.gguf", None, "auto") == "dspark-A.gguf"


@pytest.mark.parametrize("text", ["a.gguf", "org/name", "/hf:/org/name", "models/hf://x"])
def test_paths_are_paths(text: str) -> None:
    assert parse(text) is None and fetch(text) == Path(text) == fetch_sidecar(text)


@pytest.mark.parametrize(
    "text", ["hf://name", "hf://a/b/c", "hf://a/b:", "hf://a/b/c.gguf:Q8_0", "hf:///a/b", "hf://"]
)
def test_addresses_that_are_none_ask_nobody(text: str) -> None:
    if text == "hf:///a/b":
        assert parse(text) is None
        return
    with pytest.raises(HubFailed, match="expected hf://ORG/NAME"):
        fetch(text)


def test_what_is_not_there_is_said_with_what_is(server: HubServer) -> None:
    with pytest.raises(HubFailed, match=r"org/Tiny-1B:Q5_K_M has no such model; there are A-BF16.gguf, "):
        fetch(f"{ADDRESS}:Q5_K_M")
    with pytest.raises(HubFailed, match="no such file of that name"):
        fetch(f"{ADDRESS}/C.gguf")
    with pytest.raises(HubFailed, match="no such sidecar"):
        fetch_sidecar(f"{ADDRESS}:Q5_K_M", "dspark")
    for path in server.folder.rglob("*.gguf"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(HubFailed, match=r"has no GGUF files: llama-sidecar convert hf://org/Tiny-1B"):
        fetch(ADDRESS)
    server.error = (403, "GatedRepo")
    with pytest.raises(HubFailed, match="is gated"):
        fetch(ADDRESS)


def test_offline_it_is_what_the_cache_has(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    main = fetch(f"{ADDRESS}:Q8_0")
    names_sent(server)
    server.error = (500, "Strange")
    with pytest.raises(HubFailed, match="cannot be read from http"):
        fetch(f"{ADDRESS}:Q8_0")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch(f"{ADDRESS}:Q8_0") == fetch(f"{ADDRESS}:Q8_0@{COMMIT}") == main and main.is_file()
    with pytest.raises(
        HubFailed, match=r"no such model in the cache \(HF_HUB_OFFLINE\); there are A-Q8_0.gguf"
    ):
        fetch(f"{ADDRESS}:BF16")
    with pytest.raises(HubFailed, match="not in the cache, and HF_HUB_OFFLINE is set"):
        fetch("hf://org/other")


# With models


@pytest.fixture
def pair_there(
    pair_of: PairOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[models.Pair, HubServer]]:
    pair, folder = pair_of("R", "Q8_0"), tmp_path / "repository"
    folder.mkdir()
    shutil.copy(pair.main, folder / "tiny-Q8_0.gguf")
    shutil.copy(pair.sidecar, folder / "mtp-tiny-Q8_0.gguf")
    tiny_gguf.sidecar(folder / "eagle3-tiny-Q8_0.gguf", "eagle3")
    with hub(folder, monkeypatch, tmp_path / "cache") as server:
        yield pair, server


def test_it_loads_with_the_sidecar_that_lies_beside_it_there(
    pair_there: tuple[models.Pair, HubServer], tmp_path: Path
) -> None:
    pair, server = pair_there
    texts = []
    for main, sidecar in ((ADDRESS, None), (pair.main, f"{ADDRESS}:Q8_0"), (pair.main, pair.sidecar)):
        with load(main, sidecar, ctx=64, threads=1, depth=3) as model:
            assert model.kind == "mtp"
            text = model.generate(PROMPT, max_tokens=16, temperature=0, ignore_eos=True)
            text.read()
            texts.append((text.tokens, text.stats.n_accepted))
    assert texts[0] == texts[1] == texts[2]
    assert names_sent(server) == ["mtp-tiny-Q8_0.gguf", "tiny-Q8_0.gguf"]


def test_commands_take_it(pair_there: tuple[models.Pair, HubServer], tmp_path: Path) -> None:
    options = ["-p", "hello", "-n", "8", "--temp", "0", "--depth", "3", "-c", "64", "-t", "1"]
    ran = CliRunner().invoke(run_command, [ADDRESS, *options], catch_exceptions=False)
    assert ran.exit_code == 0 and "mtp depth 3" in ran.output
    shown = CliRunner().invoke(inspect_command, [ADDRESS, "--json"], catch_exceptions=False)
    assert '"role": "main"' in shown.output and "mtp-tiny-Q8_0.gguf" in shown.output
    refused = CliRunner().invoke(split_command, [ADDRESS, "--out", str(tmp_path / "out")])
    assert refused.exception is not None and "tiny-Q8_0.gguf" in str(refused.exception)
