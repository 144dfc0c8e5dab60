"""Checkpoints on the Hub: the same files as from a folder, no byte read that is not needed, one line for what goes wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint, tiny_config, write_json, write_tokenizer
from click.testing import CliRunner
from hub_server import COMMIT, REPOSITORY, HubServer, hub
from sparse import n_bytes, write_sparse

from llama_sidecar.converter import convert
from llama_sidecar.converter.errors import HubFailed, NotACheckpoint, UnsupportedModel
from llama_sidecar.converter.places import MAX_SMALL_BYTES, parse
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import open_sidecar
from llama_sidecar.sidecars.fingerprint import N_SAMPLED_ROWS, N_SAMPLED_TENSORS


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


LARGE = {
    "hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 4096, "head_dim": 128, "num_attention_heads": 16,
    "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "num_hidden_layers": 64, "layer_types": None,
}  # fmt: skip


def test_a_sidecar_alone_costs_no_trunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 layers in 8 shards only headers, norms and the rows of the fingerprint are read, and what the sidecar holds."""
    folder = tmp_path / "Large"
    folder.mkdir()
    config = tiny_config("qwen35", "tied") | LARGE
    sources = write_sparse(folder, config, n_shards=8)
    write_json(folder / "config.json", config)
    write_tokenizer(folder)
    (folder / "vocab.json").write_text("{}" * 1000)
    written = {s: n_bytes(source) for s, source in sources.items() if not s.startswith("layers.")}
    norms = sum(n_bytes(source) for source in sources.values() if len(source.shape) == 1)
    rows = N_SAMPLED_TENSORS * N_SAMPLED_ROWS * 2 * 6144
    headers = sum(8 + int.from_bytes(f.open("rb").read(8), "little") for f in folder.glob("*.safetensors"))
    with hub(folder, monkeypatch, tmp_path / "cache") as server:
        result = convert(f"hf://{REPOSITORY}", tmp_path / "out", None)
        sent, total = server.n_sent(), sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert "vocab.json" not in [file for file, *_ in server.sent]
    assert result.main is None and result.sidecar and open_sidecar(result.sidecar).rows
    assert (result.read_bytes, result.checkpoint_bytes) == (sent, total)
    assert 0 <= sent - headers - sum(written.values()) <= norms + rows
    assert total > 6e9 and sent < 0.03 * total


def test_the_command_says_how_much_was_read(server: HubServer, tmp_path: Path) -> None:
    arguments = [REPOSITORY, "--sidecar-only", "--out", str(tmp_path / "out")]
    run = CliRunner().invoke(command, arguments, catch_exceptions=False)
    lines = run.output.splitlines()
    assert (
        lines[0].startswith("sidecar ") and lines[1].startswith("read ") and "of the checkpoint's" in lines[1]
    )
    run = CliRunner().invoke(command, [*arguments, "--main-type", "F16"])
    assert run.exit_code == 2 and "contradict" in run.output


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ((403, "GatedRepo"), "is gated: accept its terms at"),
        ((404, "RepoNotFound"), "has no such model, or it is private"),
        ((404, "RevisionNotFound"), "there is no revision 'v9' of it"),
        ((400, "Strange"), "cannot be read from http"),
    ],
)
def test_what_the_hub_refuses(
    error: tuple[int, str], message: str, server: HubServer, tmp_path: Path
) -> None:
    server.error = error
    with pytest.raises(HubFailed, match=message) as caught:
        convert(f"hf://{REPOSITORY}@v9", tmp_path / "out")
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"hf://{REPOSITORY}@v9")
    assert not (tmp_path / "out").exists()


def test_a_server_without_ranges(server: HubServer, tmp_path: Path) -> None:
    server.has_ranges = False
    with pytest.raises(HubFailed, match="expected a server that answers with ranges"):
        convert(f"hf://{REPOSITORY}", tmp_path / "out")


def test_no_server(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubFailed, match="cannot be read from http"):
        convert(f"hf://{REPOSITORY}", tmp_path / "out")


def test_weights_that_cannot_be_read_in_ranges(server: HubServer, tmp_path: Path) -> None:
    (server.folder / "model.safetensors").rename(server.folder / "pytorch_model.bin")
    with pytest.raises(
        UnsupportedModel, match=r"pytorch_model\.bin, which can only be read whole: hf download"
    ):
        convert(f"hf://{REPOSITORY}", tmp_path / "out")


def test_a_repository_that_is_no_checkpoint(server: HubServer, tmp_path: Path) -> None:
    (server.folder / "config.json").unlink()
    with pytest.raises(NotACheckpoint, match=r"has no config\.json"):
        convert(f"hf://{REPOSITORY}", tmp_path / "out")


def test_a_small_file_that_is_none_is_not_downloaded(server: HubServer, tmp_path: Path) -> None:
    os.truncate(server.folder / "tokenizer.json", MAX_SMALL_BYTES + 1)
    with pytest.raises(NotACheckpoint, match=r"tokenizer\.json has 67,108,865 bytes; at most 67,108,864"):
        convert(f"hf://{REPOSITORY}", tmp_path / "out")
    assert server.sent == []


def test_a_folder_that_is_mistyped_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/none", "none", "./a/b", "hf://none"):
        with pytest.raises(NotACheckpoint, match="expected"):
            convert(name, tmp_path / "out")
