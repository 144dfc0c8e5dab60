"""A checkpoint on the Hugging Face Hub: its small files in the Hub's own cache, its weights read in the ranges asked for.

Through huggingface_hub, so that HF_ENDPOINT, HF_TOKEN, HF_HOME and its retries hold here as they do there. The commit is
fixed when the repository is opened. No file of weights is ever downloaded whole; nothing of them is kept. Knows no format.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import huggingface_hub
import numpy as np
from huggingface_hub import constants, errors, utils

from llama_sidecar.converter.errors import HubFailed, NotACheckpoint, UnsupportedModel
from llama_sidecar.converter.places import MAX_SMALL_BYTES, U8, Meter, Reading, WeightFile
from llama_sidecar.sidecars.hub import failures, first_line

# Its tries, by eight threads at once, are no news: what fails for good is raised.
logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)

# What is read beside the weights, where it is there.
SMALL = (
    *("config.json", "generation_config.json", "README.md", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    *("hf_quant_config.json", "quantize_config.json", "additional_chat_templates/*.jinja"),
)

FAR = Reading(
    8, 1 << 23
)  # an answer takes its time and the Hub counts requests: fewer of them, 16 MB each at two bytes


class Hub:
    """One commit of a model's repository, `ORG/NAME` at a revision (None: its main branch)."""

    def __init__(self, repository: str, revision: str | None = None):
        self.repository, self.revision = repository, revision
        self.meter, self.reading = Meter(), FAR
        with self._failures():
            found = huggingface_hub.HfApi().model_info(repository, revision=revision, files_metadata=True)
        self.commit = str(found.sha)
        self._sizes = {file.rfilename: file.size or 0 for file in found.siblings or []}
        small = [name for name in self._sizes if any(fnmatch.fnmatchcase(name, known) for known in SMALL)]
        if "config.json" not in small:
            raise NotACheckpoint(f"{self} has no config.json; expected a Hugging Face checkpoint")
        for name in small:
            if self._sizes[name] > MAX_SMALL_BYTES:
                raise NotACheckpoint(
                    f"{self}: {name} has {self._sizes[name]:,} bytes; at most {MAX_SMALL_BYTES:,} are read"
                )
        with self._failures(), _quietly(), ThreadPoolExecutor(4) as pool:
            paths = dict(zip(small, pool.map(self._download, small), strict=True))
        self.folder = paths["config.json"].parent
        self._headers = utils.build_hf_headers()

    def __str__(self) -> str:
        return f"hf://{self.repository}" + (f"@{self.revision}" if self.revision else "")

    @property
    def name(self) -> str:
        return self.repository.split("/")[1]

    def names(self, pattern: str) -> list[str]:
        """Of the files beside config.json."""
        return sorted(name for name in self._sizes if "/" not in name and fnmatch.fnmatchcase(name, pattern))

    def has(self, name: str) -> bool:
        return name in self._sizes

    def path(self, name: str) -> Path:
        raise UnsupportedModel(
            f"{self} has its weights in {name}, which can only be read whole: "
            f"hf download {self.repository} --local-dir FOLDER, and convert that folder"
        )

    def open(self, name: str, files: ExitStack) -> WeightFile:
        """Nothing is kept open: each read is a request of its own, of exactly the bytes asked for."""
        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.commit)
        self.meter.opened(name, self._sizes[name], self.commit)

        def read_into(offset: int, buffer: U8) -> None:
            if buffer.nbytes:
                buffer[:] = np.frombuffer(self._range(url, name, offset, offset + buffer.nbytes), np.uint8)

        return WeightFile(name, f"{self}/{name}", self._sizes[name], read_into)

    def _range(self, url: str, name: str, start: int, stop: int) -> bytes:
        headers = {**self._headers, "range": f"bytes={start}-{stop - 1}"}
        with self._failures():
            reply = utils.http_backoff("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT)
            utils.hf_raise_for_status(reply)
        data: bytes = reply.content
        self.meter.read(len(data))
        if reply.status_code != 206 or len(data) != stop - start:
            raise HubFailed(
                f"{self}/{name}: bytes {start} to {stop - 1} were asked for and {len(data)} came; "
                f"expected a server that answers with ranges: hf download {self.repository}, and convert the folder"
            )
        return data

    def _download(self, name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(self.repository, name, revision=self.commit))

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turns what huggingface_hub and its HTTP library raise into one line."""
        with failures(self, self.repository, self.revision):
            try:
                yield
            except errors.HFValidationError as error:
                raise NotACheckpoint(f"{self} cannot be the name of a model: {first_line(error)}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without huggingface_hub's own progress bars."""
    shown = not utils.are_progress_bars_disabled()
    if shown:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            utils.enable_progress_bars()
