"""The command line as its user and its user's programs see it: output, exit codes, one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import models
import numpy as np
import pytest
from checkpoints import make_checkpoint
from click.testing import CliRunner, Result
from conftest import PairOf

from llama_sidecar import sidecars
from llama_sidecar.runtime import Generation, Stats
from llama_sidecar.scripts import __main__ as entry
from llama_sidecar.scripts import _show
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import KINDS, LlamaSidecarError

COMMAND = [sys.executable, "-m", "llama_sidecar.scripts"]
STATS = {
    *("kind", "speculation", "why", "depth", "n_rounds", "n_tokens", "n_drafted", "n_accepted"),
    *("accepted_per_position", "prompt_s", "generate_s", "tok_s"),
}


@pytest.fixture(scope="module")
def main(pair_of: PairOf) -> Path:
    return pair_of("R").main


def call(*arguments: object, input: str = "") -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], input=input)


def run_json(*arguments: object, input: str = "") -> dict[str, object]:
    result = call("run", *arguments, "--json", input=input)
    assert result.exit_code == 0, result.output
    data: dict[str, object] = json.loads(result.stdout)
    return data


def test_run_prints_the_text_and_then_what_it_cost(main: Path) -> None:
    result = call("run", main, "-p", "def f", "-n", 12, "--depth", 3)
    data = run_json(main, "-p", "def f", "-n", 12)
    assert result.exit_code == 0 and result.stdout.rstrip("\n") == str(data["text"]).rstrip("\n")
    assert "12 tokens" in result.stderr and "accepted" in result.stderr and "tok/s" in result.stderr


def test_run_json_is_the_published_object(main: Path) -> None:
    data = run_json(main, "-p", "def f", "-n", 12)
    assert set(data) == {"schema", "text", "tokens", "finish_reason", "stats"}
    assert data["schema"] == 1 and data["finish_reason"] == "length" and len(data["tokens"]) == 12
    assert set(data["stats"]) >= STATS
    assert data["stats"]["kind"] == "mtp" and data["stats"]["speculation"] == "on"


def test_plain_speculative_and_other_depths_write_the_same(main: Path) -> None:
    spec = run_json(main, "-p", "def f", "-n", 20)
    for options in (["--no-spec"], ["--spec-type", "none"], ["--depth", 1], ["--spec-type", "draft-mtp"]):
        assert run_json(main, "-p", "def f", "-n", 20, *options)["tokens"] == spec["tokens"]
    off = run_json(main, "-p", "def f", "-n", 20, "--no-spec")["stats"]
    assert off["speculation"] == "off" and off["why"] and off["n_drafted"] == 0


def test_the_sidecar_can_be_named_in_both_spellings(pair_of: PairOf) -> None:
    pair = pair_of("R")
    for option in ("--sidecar", "-md"):
        assert run_json(pair.main, option, pair.sidecar, "-p", "a", "-n", 3)["stats"]["kind"] == "mtp"


def test_the_prompt_comes_from_an_option_a_file_or_a_pipe(main: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("hällo\n", encoding="utf-8")
    wanted = run_json(main, "-p", "hällo\n", "-n", 5)["tokens"]
    assert run_json(main, "-f", file, "-n", 5)["tokens"] == wanted
    assert run_json(main, "-n", 5, input="hällo\n")["tokens"] == wanted
    assert run_json(main, "-p", "-", "-n", 5, input="hällo\n")["tokens"] == wanted


def test_sampling_options_reach_the_sampler(main: Path) -> None:
    sampled = [main, "-p", "a", "-n", 16, "--temp", 1.5, "--top-k", 0, "--top-p", 1, "--min-p", 0]
    assert run_json(*sampled, "--seed", 1)["tokens"] == run_json(*sampled, "--seed", 1)["tokens"]
    assert run_json(*sampled, "--seed", 1)["tokens"] != run_json(*sampled, "--seed", 2)["tokens"]
    greedy = run_json(main, "-p", "a", "-n", 16)["tokens"]
    assert run_json(*sampled[:-6], "--top-k", 1)["tokens"] == greedy


def test_a_stop_string_ends_the_text(main: Path) -> None:
    text = str(run_json(main, "-p", "def f", "-n", 20)["text"])
    stopped = run_json(main, "-p", "def f", "-n", 20, "--stop", "never there", "--stop", text[4:6])
    assert stopped["finish_reason"] == "stop" and stopped["text"] == text[: text.index(text[4:6])]


def test_bench_prints_a_table_that_can_be_pasted(main: Path) -> None:
    result = call("bench", main, "-n", 8, "--depth", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert all(line.startswith("|") and line.endswith("|") for line in lines if line)
    rows = ("speed-up", "L / v(3)", "equal in all", "mtp-main.gguf", "hardware", "prose", "code", "c = ")
    assert all(row in result.stdout for row in rows)
    assert "2 of 10 (the file has no chat template" in result.stderr  # the built-in chat prompts


def test_bench_json_is_one_object_and_says_that_coins_are_coins(main: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    prompts.write_text("Once upon a time")
    result = call(
        *("bench", main, "-n", 8, "--depth", 2, "--prompts", prompts, "--synthetic-length", 2, "--json"),
    )
    data = json.loads(result.stdout)
    assert data["schema"] == 1 and data["tokens_equal"] is None and data["synthetic_length"] == 2
    assert list(data["tasks"]) == ["mine"]
    table = call("bench", main, "-n", 8, "--depth", 2, "--prompts", prompts, "--synthetic-length", 2).stdout
    assert "meaningless" in table and "not compared" in table


@pytest.mark.parametrize("name", ["run", "chat", "bench", "demo", "convert", "inspect"])
def test_every_command_explains_itself(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0 and len(result.output.splitlines()) > 8
    assert name in call("--help").output
    if name in ("run", "chat", "bench"):
        options = (
            "--spec-type",
            "--sidecar",
            "-md",
            "--depth",
            "--gpu-layers",
            "--device",
            "--threads",
            "--ctx",
        )
        more = (
            "--batch",
            "--flash-attn",
            "--cache-type-k",
            "--cache-type-v",
            "--verbose",
            "--force",
            "--json",
        )
        assert all(option in result.output for option in (*options, *more))
        assert all(kind.name in result.output for kind in KINDS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none.gguf", "-p", "a"], "none.gguf"),
        (["run", "{sidecar}", "-p", "a"], "not a main"),
        (["run", "{main}", "-md", "{main}", "-p", "a"], "main model itself"),
        (["run", "{main}", "-md", "none.gguf", "-p", "a"], "none.gguf"),
        (["run", "{main}", "--spec-type", "eagle3", "-p", "a"], "eagle3"),
        (["run", "{main}", "--no-spec", "-md", "{sidecar}", "-p", "a"], "contradict"),
        (["run", "{main}", "-p", ""], "the prompt is empty"),
        (["run", "{main}", "-p", "too long", "--ctx", "4"], "the context holds"),
        (["run", "{main}", "-p", "a", "--top-p", "0"], "top_p"),
        (["run", "{main}", "-p", "a", "--device", "nonsense"], "nonsense"),
        (["run", "{main}", "-f", "none.txt"], "none.txt"),
        (["run", "{main}", "-f", "{main}"], "not UTF-8"),
        (["chat", "{main}", "-m", "a"], "no chat template"),
        (["bench", "{main}", "--prompts", "none.jsonl"], "none.jsonl"),
        (["bench", "{main}", "--no-spec"], "nothing to compare"),
        (["bench", "{main}", "--depth", "3", "--synthetic-length", "9"], "between 1 and 4"),
        (["bench", "{main}", "--synthetic-length", "2"], "name it with --depth"),
        (["bench", "{main}", "--budget", "nan"], "no time at all"),
        (["run", "{main}", "-p", "a", "--temp", "nan"], "temperature"),
        (["run", "{main}", "-p", "a", "--batch", "1"], "a batch of 1 has no room for drafts"),
        (["tune", "{main}", "--budget", "nan"], "no time at all"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    pair_of: PairOf,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    pair = pair_of("R")
    words = [word.format(main=pair.main, sidecar=pair.sidecar) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["llama-sidecar", *words])
    with pytest.raises(SystemExit) as end:
        entry.main()
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert end.value.code == 1 and out == ""
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "{main}", "-p", "a", "-f", "b"],
        ["run", "{main}", "-p", "a", "-n", "0"],
        ["run", "{main}", "-p", "a", "--depth", "65"],
        ["run", "{main}", "-p", "a", "--spec-type", "telepathy"],
        ["run", "{main}", "-p", "a", "--gpu-layers", "many"],
        ["run", "{main}", "-p", "a", "--cache-type-k", "q9"],
        ["bench", "{main}", "-n", "1"],
        ["no-such-command"],
    ],
)
def test_wrong_usage_is_exit_code_2(main: Path, arguments: list[str]) -> None:
    result = call(*(word.format(main=main) for word in arguments))
    assert result.exit_code == 2 and "Error: " in result.stderr


def test_without_text_and_without_a_pipe_run_says_what_it_needs(
    main: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_sidecar.scripts import _options

    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(_options.sys, "stdin", Terminal())
    with pytest.raises(Exception, match="-p TEXT, -f FILE or a pipe"):
        _options.read_prompt(None, None)


def test_what_a_file_is_called_reaches_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    stats = Stats(None, "off", "dflash-\x1b[31m\n.gguf is a dflash sidecar", 0)
    line = _show.stats_line(cast(Generation, SimpleNamespace(stats=stats, finish_reason="stop")))
    _show.note("mtp-\x1b[31m\n.gguf")
    shown = (
        line + _show.table(["", ""], [("model", "\x1b[31m\n.gguf")]) + capsys.readouterr().err.rstrip("\n")
    )
    assert "\x1b" not in shown and shown.count("\n") == 2 and shown.count("\\x1b[31m\\n.gguf") == 3


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A main file whose greedy text never ends by itself."""

    def never_end(tensors: dict[str, np.ndarray]) -> None:
        tensors["token_embd.weight"][0] = 0  # token 0 ends a text, and its logit is then never the largest

    return models.write_pair(tmp_path, edit=never_end).main


def test_a_reader_that_leaves_early_causes_no_traceback(endless: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(endless), "-p", "a", "-n", "4000", "--temp", "0", "--depth", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(60) == 1 and "Traceback" not in errors and "Exception ignored" not in errors


def test_ctrl_c_ends_run_quietly(endless: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(endless), "-p", "a", "-n", "4000", "--temp", "0", "--depth", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # jobs in the background inherit "ignored"
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted" in errors and b"Traceback" not in errors


def test_ctrl_c_finds_no_imports_before_it_is_looked_after() -> None:
    program = (
        f"import sys, {entry.__name__}; print(*(m for m in ('numpy', 'gguf', 'rich') if m in sys.modules))"
    )
    assert not subprocess.check_output([sys.executable, "-c", program], text=True).strip()


def test_ctrl_c_while_modules_are_imported_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(command: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_run", interrupt)
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130 and capsys.readouterr().err == "\ninterrupted\n"


def test_a_draft_vocabulary_that_changes_nothing_is_said(main: Path) -> None:
    result = call("run", main, "-p", "a", "-n", 3, "--draft-vocab", 99999)
    assert result.exit_code == 0 and "--draft-vocab changes nothing: a vocabulary of 256" in result.stderr


@pytest.mark.parametrize("command", ["run", "inspect", "convert", "cache", "--help"])
def test_output_that_cannot_be_written_is_one_line(main: Path, tmp_path: Path, command: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no full device here")
    arguments = {
        "run": ["run", main, "-p", "a", "-n", "3"],
        "inspect": ["inspect", main],
        "convert": ["convert", make_checkpoint(tmp_path), "--out", tmp_path / "out"],
    }.get(command, [command])
    for unbuffered in ("", "1"):
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                [*COMMAND, *map(str, arguments), *(["--force"] if command == "convert" else [])],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            )
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1].startswith("error: the output cannot be written: No space left")
        assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr


def test_a_reader_that_is_gone_at_the_end_causes_no_complaint(main: Path) -> None:
    script = '"$@" | (exec <&-; sleep 2); exit "${PIPESTATUS[0]}"'
    result = subprocess.run(
        ["bash", "-c", script, "bash", *COMMAND, "cache"],
        capture_output=True,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
    )
    assert result.returncode == 1 and not result.stderr


def test_closed_standard_streams_are_no_reason_to_stop(main: Path, tmp_path: Path) -> None:
    folder, out = make_checkpoint(tmp_path), tmp_path / "out"

    def closed(redirections: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
        script = f'exec "$@" {redirections}'
        return subprocess.run(
            ["sh", "-c", script, "sh", *COMMAND, *map(str, arguments)], capture_output=True, check=False
        )

    assert closed("<&- >&- 2>&-", "convert", folder, "--out", out).returncode == 0
    assert closed("<&- >&- 2>&-", "inspect", out / "tiny-qwen35-tied-Q8_0.gguf").returncode == 0
    assert closed("2>&-", "run", main, "-p", "a", "-n", 3, "--verbose").returncode == 0
    empty = closed("<&-", "run", main)
    assert empty.returncode == 1 and empty.stderr.endswith(b"error: the prompt is empty\n")
    assert closed("<&-", "chat", out / "tiny-qwen35-tied-Q8_0.gguf").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_conversion_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    arguments = [
        "llama-sidecar",
        "convert",
        str(make_checkpoint(tmp_path)),
        "--out",
        str(tmp_path / "new" / "out"),
    ]
    program = (
        "import os, signal, sys, time\n"
        "from llama_sidecar.converter import writer\n"
        "from llama_sidecar.scripts.__main__ import main\n"
        "kills, write = [1], writer._write_slice\n"
        "def slow(*part):\n"
        f"    if kills: kills.pop(); os.kill(os.getpid(), {int(number)}); time.sleep(0.3)\n"
        "    return write(*part)\n"
        f"writer._write_slice, sys.argv = slow, {arguments!r}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # nohup, around the tests, has it ignored
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 128 + number and "Traceback" not in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_terminal_without_the_characters_gets_question_marks(main: Path) -> None:
    result = subprocess.run(
        [*COMMAND, "run", str(main), "-p", "hello world", "-n", "20"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert result.returncode == 0 and b"?" in result.stdout


def test_demo_without_its_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sidecars, "__file__", str(tmp_path / "sidecars" / "__init__.py"))
    result = call("demo")
    assert isinstance(result.exception, LlamaSidecarError)
    assert "ships with the source tree" in str(result.exception) and "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_demo_goes_the_whole_way(tmp_path: Path) -> None:
    if not (Path(__file__).parent.parent / "sidecars" / "demo" / "config.json").exists():
        pytest.skip("the demo checkpoint is not here")
    result = call("demo", "--out", tmp_path / "models", "-n", 16)
    assert result.exit_code == 0, result.output
    written = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert written == ["demo-Q4_0.gguf", "mtp-demo-Q8_0.gguf"]
    assert "token ids equal" in result.stdout and "speed-up" in result.stdout
    assert f"llama-sidecar chat {tmp_path / 'models' / 'demo-Q4_0.gguf'}" in result.stdout
