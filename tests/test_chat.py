"""Conversations: what is remembered, what the session re-uses, Ctrl-C, and the chat command as its user sees it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
from click.testing import CliRunner, Result

from llama_sidecar.runtime import Model, PromptError, load
from llama_sidecar.runtime.conversation import Conversation
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.scripts._chat.talk import stopped_by_ctrl_c

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The main file of a tiny pair with a chat template."""
    return models.write_pair(tmp_path_factory.mktemp("chat"), template=TEMPLATE).main


@pytest.fixture(scope="module")
def model(main: Path) -> Iterator[Model]:
    with load(main, ctx=512) as model:
        yield model


def chat(main: Path, *arguments: str, input: str = "") -> Result:
    return CliRunner().invoke(
        cli, ["chat", str(main), "-n", "6", "--temp", "0", "--depth", "3", *arguments], input=input
    )


def test_answers_become_part_of_the_conversation(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session, "Be brief.")
        first = talk.ask("Hello", max_tokens=5).read()
        assert talk.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": first},
        ]
        talk.clear()
        assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_a_second_question_re_uses_all_that_the_session_holds(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        first = talk.ask("Hello", max_tokens=9, ignore_eos=True)
        first.read()
        second = talk.ask("And?", max_tokens=3, ignore_eos=True)
        second.read()
    held = first.stats.n_prompt + len(first.tokens) - 1  # the last token was not decoded
    assert second.stats.n_reused == held


def test_an_answer_keeps_the_ids_it_was_generated_in(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        first = talk.ask("Hello", max_tokens=9, ignore_eos=True)
        first.read()
        if "\ufffd" not in first.text:
            pytest.skip("the random model happened to write valid UTF-8")
        second = talk.ask("And?", max_tokens=3)
        assert second.stats.n_prompt == first.stats.n_prompt + 9 + len("\n<user>And?\n<assistant>")
        second.read()
        assert second.stats.n_reused > first.stats.n_prompt


def test_a_stop_string_does_not_leak_into_the_next_prompt(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        text = talk.ask("Hello", max_tokens=9, ignore_eos=True).read()
        stop = text[3:5]
        talk.clear()
        first = talk.ask("Hello", max_tokens=9, stop=[stop])
        assert stop not in first.read()
        talk.ask("And?", max_tokens=3).read()
        assert talk.messages[1]["content"] == first.text


def test_a_conversation_that_outgrew_the_context_is_still_a_conversation(model: Model) -> None:
    with model.session(ctx=64) as session:
        talk = Conversation(session)
        answer = talk.ask("Hi", max_tokens=4, ignore_eos=True).read()
        with pytest.raises(PromptError, match="the context holds 64"):
            talk.ask("x" * 100)
        assert [m["content"] for m in talk.messages] == ["Hi", answer]
        assert talk.ask("Hm?", max_tokens=2, ignore_eos=True).read()


def test_a_question_without_an_answer_is_dropped(model: Model) -> None:
    with model.session() as session:
        talk = Conversation(session)
        talk.ask("Hello", max_tokens=5).close()
        assert talk.messages == []


def test_ctrl_c_stops_the_answer_and_nothing_else(model: Model) -> None:
    before = signal.getsignal(signal.SIGINT)
    with model.session() as session:
        talk = Conversation(session)
        with stopped_by_ctrl_c(session):
            answer = talk.ask("Hello", max_tokens=400, ignore_eos=True)
            next(answer)
            os.kill(os.getpid(), signal.SIGINT)
            answer.read()
        assert answer.finish_reason == "cancelled" and 0 < len(answer.tokens) < 400
        assert signal.getsignal(signal.SIGINT) is before
        again = talk.ask("Go on", max_tokens=3, ignore_eos=True)
        assert again.read() and again.stats.n_reused > 0


def test_outside_the_main_thread_signals_stay_as_they_are(model: Model) -> None:
    handlers = []

    def run() -> None:
        with model.session() as session, stopped_by_ctrl_c(session):
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    before = signal.getsignal(signal.SIGINT)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_lines_from_a_pipe_are_questions(main: Path) -> None:
    result = chat(main, input="Hello\n\nsecond \\\nline\n/clear\nthird\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert result.stderr.count("tok/s") == 3  # speed and acceptance after each answer
    assert "accepted" in result.stderr and ">" not in result.stderr.split("accepted")[0].splitlines()[0]


def test_a_pipe_that_is_no_text_is_one_line(main: Path) -> None:
    result = chat(main, input=b"Hello \xff\n")
    assert result.exit_code != 0 and "stdin: not UTF-8 text" in str(result.exception)


def test_a_message_is_answered_and_that_is_all(main: Path) -> None:
    answer = chat(main, "-m", "Hello")
    assert answer.exit_code == 0 and answer.stderr.count("tok/s") == 1
    data = json.loads(chat(main, "-m", "Hello", "--json").stdout)
    assert data["schema"] == 1 and len(data["tokens"]) <= 6 and data["stats"]["kind"] == "mtp"
    assert answer.stdout.rstrip("\n") == data["text"].rstrip("\n")
    piped = chat(main, "-m", "-", "--json", input="Hello")
    assert json.loads(piped.stdout)["tokens"] == data["tokens"]
    plain = chat(main, "-m", "Hello", "--json", "--no-spec")
    assert json.loads(plain.stdout)["tokens"] == data["tokens"]
    system = chat(main, "-m", "Hello", "--json", "--system", "Shout.")
    assert json.loads(system.stdout)["stats"]["n_prompt"] == data["stats"]["n_prompt"] + len(
        "<system>Shout.\n"
    )


def test_json_needs_a_message(main: Path) -> None:
    assert chat(main, "--json").exit_code == 2


def test_a_prompt_too_long_is_one_line_and_the_chat_goes_on_and_a_pipe_ends_with_1(main: Path) -> None:
    result = chat(main, "--ctx", "64", input=f"{'x' * 100}\nHi\n")
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "the context holds 64" in errors[0] and "/clear" in errors[0]
    assert result.stderr.count("tok/s") == 1


def test_a_file_without_a_template_says_so_at_once(tmp_path: Path) -> None:
    result = chat(models.write_pair(tmp_path).main, input="Hello\n")
    assert isinstance(result.exception, PromptError) and "no chat template" in str(result.exception)
    assert "tok/s" not in result.stderr


@pytest.mark.parametrize("stdin", ["<&-", "< /dev/null"])
def test_a_chat_without_questions_ends_at_once(main: Path, stdin: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m llama_sidecar.scripts chat "$1" --no-spec {stdin}', sys.executable, str(main)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "") and "Traceback" not in done.stderr


def test_a_chat_whose_input_cannot_be_read_says_so(main: Path) -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            '"$0" -m llama_sidecar.scripts chat "$1" --no-spec 0> /dev/null',
            sys.executable,
            str(main),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "error: stdin: Bad file descriptor" in done.stderr


def test_ctrl_c_ends_a_chat_that_a_pipe_feeds(main: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "llama_sidecar.scripts", "chat", str(main), "--temp", "0", "--no-spec"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdin and process.stdout
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    process.stdout.read(1)  # it answers
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and b"interrupted" in said and b"Ctrl-D" not in said


READY = b"\x1b[?2004h"  # the editor waits for a message


class Chat:
    """A chat in a pseudo-terminal of 60 columns."""

    def __init__(self, main: Path, state: Path, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "llama_sidecar.scripts", "chat", str(main), "--temp", "0", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "XDG_STATE_HOME": str(state)},
        )
        self.theirs = theirs
        self.screen = b""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: bytes, n: int = 1) -> None:
        self.wait_until(lambda: self.screen.count(text) >= n)

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_done():
            assert time.monotonic() < deadline, self.screen.decode(errors="replace")
            if select.select([self._ours], [], [], 1)[0]:
                self.screen += os.read(self._ours, 4096)

    def is_echoing(self) -> bool:
        return bool(termios.tcgetattr(self.theirs)[3] & termios.ECHO)

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


def test_in_a_terminal_ctrl_c_keeps_the_session_and_ctrl_d_leaves(main: Path, tmp_path: Path) -> None:
    with Chat(main, tmp_path, "-n", "4000") as chat:
        chat.wait_for(READY)
        chat.type("Hello\r")
        chat.wait_for(b"tok/s")  # the status line of an answer that runs
        assert not chat.is_echoing()
        chat.type("\x03/undo\r")  # what is typed ahead shows later
        chat.wait_for(b"[stopped]")
        chat.wait_for(b"taken back: Hello")
        chat.wait_for(READY, 3)
        chat.type("\x03")
        chat.wait_for(b"Ctrl-D leaves")
        chat.wait_for(READY, 4)
        chat.type("\x04")
        assert chat.process.wait(60) == 0 and chat.is_echoing()
        assert b"Traceback" not in chat.screen


def test_a_chat_that_is_ended_leaves_the_terminal_in_order(main: Path, tmp_path: Path) -> None:
    with Chat(main, tmp_path, "-n", "4000", "--no-spec") as chat:
        chat.wait_for(READY)
        assert not chat.is_echoing()
        chat.type("Hello\r")
        chat.wait_for(b"tok/s")
        chat.process.send_signal(signal.SIGTERM)
        assert chat.process.wait(60) == 128 + signal.SIGTERM and chat.is_echoing()
        assert b"Traceback" not in chat.screen
