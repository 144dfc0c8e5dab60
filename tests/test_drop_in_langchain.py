"""LangChain's ChatLlamaCpp with the drop-in as its client: frameworks written for llama-cpp-python go on working."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llama_sidecar.converter import convert
from llama_sidecar.runtime import Llama

pytest.importorskip("langchain_community", reason="LangChain is in the dev extra")

DEMO = Path(__file__).resolve().parents[1] / "sidecars" / "demo"
QUESTION = [("system", "Be brief."), ("human", "Open a socket.")]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """ChatLlamaCpp, which makes a llama_cpp.Llama by itself, and is then given ours."""
    from langchain_community.chat_models import ChatLlamaCpp

    main = convert(DEMO, tmp_path_factory.mktemp("demo"), main_type="F32", sidecar_type="F32").main
    model = ChatLlamaCpp(
        model_path=str(main),
        n_ctx=512,
        n_threads=1,
        temperature=0.0,
        max_tokens=48,
        rope_freq_base=0.0,  # the file's: its own defaults override them
        rope_freq_scale=0.0,
        verbose=False,
    )
    theirs = model.client
    expected = model.invoke(QUESTION).content
    with Llama(str(main), n_ctx=512, n_threads=1, verbose=False, depth=3, kernels="stock") as ours:
        model.client = ours
        model.metadata = {"expected": expected}
        yield model
    theirs.close()


def test_invoke_and_stream_say_what_llama_cpp_says(chat: Any) -> None:
    assert chat.invoke(QUESTION).content == chat.metadata["expected"]
    pieces = [chunk.content for chunk in chat.stream(QUESTION)]
    assert "".join(pieces) == chat.metadata["expected"] and len(pieces) > 8
    assert chat.client.stats.n_accepted > 0


def test_structured_output_and_a_tool_that_is_called(chat: Any) -> None:
    from pydantic import BaseModel

    class Place(BaseModel):
        """Where it is."""

        row: int
        on: bool

    found = chat.with_structured_output(Place).invoke(QUESTION)
    assert isinstance(found, Place)
    for choice in ("Place", True, {"type": "function", "function": {"name": "Place"}}):
        message = chat.bind_tools([Place], tool_choice=choice).invoke(QUESTION)
        assert [call["name"] for call in message.tool_calls] == ["Place"]
