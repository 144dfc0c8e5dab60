"""GGUF files from GGUF files, no checkpoint needed: split a head off, merge one in, graft it onto a fine-tune, change its type.

>>> from llama_sidecar.converter.edit import split
>>> split("NAME-Q8_0.gguf", "apart").sidecar               # doctest: +SKIP
PosixPath('apart/mtp-NAME-Q8_0.gguf')
"""

from __future__ import annotations

from llama_sidecar.converter.edit.graft import graft
from llama_sidecar.converter.edit.merge import merge
from llama_sidecar.converter.edit.output import EditResult
from llama_sidecar.converter.edit.requant import requant
from llama_sidecar.converter.edit.split import split

__all__ = ["EditResult", "graft", "merge", "requant", "split"]
