"""The page at `/` in a real browser, before a server that is made up: what it shows of an answer. Needs Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SERVER = """
<script>
const chunks = %s;
window.fetch = async path => path === "v1/models"
  ? new Response(JSON.stringify({data: [{id: "tiny", n_ctx: 512, drafter: "mtp"}]}))
  : new Response(chunks.map(chunk => `data: ${JSON.stringify(chunk)}\\n\\n`).join("") + "data: [DONE]\\n\\n");
</script>
"""
ASK = '<script>text.value = "Why?"; at("ask").requestSubmit();</script>'


def chunk(delta: dict[str, str], *tokens: tuple[str, str]) -> dict[str, Any]:
    lens = [{"text": text, "origin": origin} for text, origin in tokens]
    return {"choices": [{"delta": delta, "lens": lens}], "drafts": {"n_drafted": 4, "n_accepted": 3}}


def shown(folder: Path, chunks: list[dict[str, Any]]) -> dict[str, list[tuple[str, str]]]:
    """The colours and texts of an answer's reasoning and of what it says."""
    assert CHROMIUM is not None
    page = files("llama_sidecar.runtime.server").joinpath("page.html").read_text(encoding="utf-8")
    server = SERVER % json.dumps(chunks).replace("<", "\\u003c")
    page = page.replace("<script>", server + "<script>", 1).replace("</body>", ASK + "</body>")
    (folder / "page.html").write_text(page, encoding="utf-8")
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
    ]
    options = ["--virtual-time-budget=5000", "--dump-dom", (folder / "page.html").as_uri()]
    dom = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300).stdout
    found = {}
    for kind in ("reasoning", "said"):
        box = re.search(rf'<article class="assistant">.*?<div class="{kind}">(.*?)</div>', dom, re.DOTALL)
        found[kind] = re.findall(r'<span class="(\w+)">(.*?)</span>', box[1], re.DOTALL) if box else []
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_lens_colours_what_is_said_and_not_the_marks_between(tmp_path: Path) -> None:
    chunks = [
        chunk({"content": ""}),
        chunk({}, ("<think>", "plain"), ("\n", "drafted")),
        chunk({"reasoning_content": "so"}, ("so", "corrected"), (" it", "drafted")),
        chunk({"reasoning_content": " it is"}, (" is", "ngram"), ("</", "plain"), ("think", "drafted")),
        chunk({"content": "Yes"}, (">\n\nYes", "drafted"), (" <", "plain")),
        chunk({"content": " <b>"}, ("b>", "corrected")),
        chunk({"content": "."}),
    ]
    assert shown(tmp_path, chunks) == {
        "reasoning": [("corrected", "so"), ("drafted", " it"), ("ngram", " is")],
        "said": [("drafted", "Yes"), ("plain", " &lt;"), ("corrected", "b&gt;"), ("plain", ".")],
    }
