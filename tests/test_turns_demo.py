"""Ten turns with the demo model, a hybrid, through a chat template that drops the reasoning of earlier answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Model, load

DEMO = Path(__file__).parents[1] / "sidecars" / "demo"
THINKS = "<think>\n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n" + THINKS + "{% endif %}"
)
N_TURNS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The demo with that template; in pieces of 32 tokens, as test_turns.py, by llama.cpp's kernels.

    Ours compute up to 8 rows otherwise than the CPU backend computes more, and pieces of prompts have both."""
    folder = tmp_path_factory.mktemp("demo")
    checkpoint = folder / "demo"
    shutil.copytree(DEMO, checkpoint, ignore=lambda *_: ["eagle3", "dflash", "dspark"])
    path = checkpoint / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    main = convert(checkpoint, folder / "out", "Q8_0", "Q8_0").main
    assert main
    with load(main, ctx=1024, threads=1, depth=3, batch=32, learn=False, kernels="stock") as opened:
        yield opened


def test_turn_10_decodes_only_what_is_new(model: Model) -> None:
    """That is: what the template shows of the answer before, the new question, and the opening of the answer."""
    messages: list[dict[str, str]] = []
    with model.session() as session:
        behind = 0  # the last question of the turn before
        for turn in range(N_TURNS):
            messages.append({"role": "user", "content": f"What is function no. {turn}?"})
            prompt = model.vocab.chat_tokens(messages)
            text = session.chat(messages, max_tokens=12, temperature=0, ignore_eos=True)
            text.read()
            if turn > 4:
                assert text.stats.n_reused == behind
                assert text.stats.n_prompt_decoded == len(prompt) - behind < 40
                assert text.stats.first_s > 0
            opening = model.vocab.tokenize("\n<|im_start|>assistant\n" + THINKS, add_special=False)
            assert prompt[-len(opening) :] == opening
            behind = len(prompt) - len(opening)
            shown = model.vocab.text_of(text.tokens)
            messages.append({"role": "assistant", "content": f"{shown[:-4]}</think>{shown[-4:]}"})
        assert len(prompt) < 256, len(prompt)  # where one row is still computed as several are
        state = session._native.state()
    with model.session() as cold:
        alone = cold.chat(messages[:-1], max_tokens=12, temperature=0, ignore_eos=True)
        alone.read()
        assert (alone.stats.n_reused, alone.tokens) == (0, text.tokens)
        assert cold._native.state() == state
