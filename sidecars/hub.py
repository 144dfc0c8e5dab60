"""A model and its sidecar as GGUF files on the Hugging Face Hub: which of a repository's files, and fetching them.

`hf://ORG/NAME[:TYPE][@REVISION]` is a repository's model of a type, chosen by the files' names as llama.cpp's `-hf` chooses it: without a
type Q4_K_M, then Q8_0, then the first. The sidecar is the one that discover.py would choose beside it, as far as names tell: the
others are not fetched. `hf://ORG/NAME/FILE.gguf` is that file.

Files go to huggingface_hub's own cache, where they lie beside each other as in the repository, and whatever opens them there does as
with any files. So HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold here, too. huggingface_hub is imported at the first address.
Knows names and no headers: what does not belong together is told when it is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llama_sidecar.sidecars.discover import AUTO, KIND_WORD, TYPE_WORD, base_name
from llama_sidecar.sidecars.errors import LlamaSidecarError, listed
from llama_sidecar.sidecars.kinds import KINDS
from llama_sidecar.sidecars.shards import shard_name

# One slash, too: pathlib makes one of two.
_SCHEME = re.compile(r"hf:/{1,2}(?!/)")
_ADDRESS = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[^:@]+\.gguf))?(?::(?P<type>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_USUAL_TYPES = ("Q4_K_M", "Q8_0")  # llama.cpp's, where none is named
_NO_MODELS = re.compile("mmproj|imatrix|" + "|".join(f"{kind}-" for kind in KINDS))


class HubFailed(LlamaSidecarError):
    """The Hugging Face Hub cannot be reached, has no such model, or refuses to give it."""


@dataclass(frozen=True)
class Address:
    """What an `hf://` address says; `type` is a quantisation's name, `file` a path in the repository."""

    repository: str
    file: str | None = None
    type: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        parts = (("/", self.file), (":", self.type), ("@", self.revision))
        return f"hf://{self.repository}" + "".join(sign + part for sign, part in parts if part)


def fetch(path: str | os.PathLike[str], spec_type: str = AUTO) -> Path:
    """Return a path as it is, or of an `hf://` address the main model's path in huggingface_hub's cache, its sidecar beside it.

    Args:
        path: a file's path, or `hf://ORG/NAME[:TYPE][@REVISION]` or `hf://ORG/NAME/FILE.gguf`.
        spec_type: of which kind the sidecar is to be: "auto" takes the best there is; of anything that is no kind of sidecar none is
            fetched.

    Raises:
        HubFailed: it is no such address; the Hub cannot be reached, has no such model or type, or refuses to give it.

    Example:
        >>> fetch("models/NAME-Q8_0.gguf").name
        'NAME-Q8_0.gguf'
        >>> fetch("hf://ORG/NAME-GGUF:Q8_0").name                                # doctest: +SKIP
        'NAME-Q8_0.gguf'
    """
    address = parse(path)
    if address is None:
        return Path(path)
    repository = _Repository(address)
    main = address.file or choose_model(repository.names, address.type)
    if main is None:
        raise repository.has_no("model")
    if not (address.file and _kind(main)):
        sidecar = choose_sidecar(beside(repository.names, main), main, address.type, spec_type)
        if sidecar is not None:
            repository.fetch(sidecar)
    return repository.fetch(main)


def fetch_sidecar(path: str | os.PathLike[str], spec_type: str = AUTO) -> Path:
    """Return a path as it is, or of an `hf://` address that of the repository's sidecar in huggingface_hub's cache; where it has
    none, of its model, which may draft, too.

    Args and what it raises are as of `fetch`; of several kinds the best is taken.

    Example:
        >>> fetch_sidecar("hf://ORG/NAME-GGUF:Q8_0").name                        # doctest: +SKIP
        'mtp-NAME-Q8_0.gguf'
    """
    address = parse(path)
    if address is None:
        return Path(path)
    repository = _Repository(address)
    found = address.file or choose_sidecar(repository.names, None, address.type, spec_type)
    found = found or choose_model(repository.names, address.type)
    if found is None:
        raise repository.has_no("sidecar")
    return repository.fetch(found)


def parse(path: str | os.PathLike[str]) -> Address | None:
    """Read an `hf://` address; None for any other path. Raises HubFailed for one that is broken.

    >>> str(parse("hf://ORG/NAME:Q8_0@main")), parse("models/NAME.gguf")
    ('hf://ORG/NAME:Q8_0@main', None)
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return None
    found = _ADDRESS.fullmatch(text[scheme.end() :])
    if found is None or (found["file"] and found["type"]):
        raise HubFailed(
            f"{text} names no model on the Hub; expected hf://ORG/NAME, hf://ORG/NAME:TYPE or hf://ORG/NAME/FILE.gguf, "
            "and a revision after @ if need be"
        )
    return Address(found["repository"], found["file"], found["type"], found["revision"])


# Choosing, by names


def choose_model(names: Sequence[str], type: str | None) -> str | None:
    """Choose a repository's model as llama.cpp does (common/download.cpp): of a type, or of the usual ones, or the first; of shards the first.

    >>> choose_model(["A-F16.gguf", "A-Q8_0.gguf", "mtp-A-Q4_K_M.gguf"], None)
    'A-Q8_0.gguf'
    """
    models = [name for name in names if _is_first(name) and not _NO_MODELS.search(PurePosixPath(name).name)]
    for wanted in [type] if type else _USUAL_TYPES:
        pattern = re.compile(f"{re.escape(wanted)}[.-]", re.IGNORECASE)
        if found := next((name for name in models if pattern.search(name)), None):
            return found
    return models[0] if models and not type else None


def choose_sidecar(names: Sequence[str], main: str | None, type: str | None, spec_type: str) -> str | None:
    """Choose a sidecar: by the rank of its kind, then a namesake of `main`, then one beside it, then of the type, then the nearest one.

    >>> choose_sidecar(["eagle3-A-Q8_0.gguf", "mtp-A-Q8_0.gguf", "mtp-A-F16.gguf"], "A-Q4_0.gguf", None, "auto")
    'mtp-A-Q8_0.gguf'
    """
    wanted = {kind.name for kind in KINDS.values() if spec_type in (AUTO, kind.name, kind.llama_name)}
    bits = _bits(f"-{type}.gguf" if type else main or f"-{_USUAL_TYPES[-1]}.gguf")

    def order(name: str) -> tuple[int, bool, bool, bool, int]:
        is_namesake = main is not None and base_name(Path(name)) == base_name(Path(main))
        is_of_type = type is not None and f"-{type}.".lower() in name.lower()
        is_below = PurePosixPath(name).parent.name.lower() in KINDS
        rank, distance = KINDS[str(_kind(name))].rank, abs(_bits(name) - bits)
        return rank, not is_namesake, is_below, not is_of_type, distance

    return min((n for n in names if _is_first(n) and _kind(n) in wanted), key=order, default=None)


def beside(names: Sequence[str], main: str) -> list[str]:
    """List the files that lie where discover.py looks for a sidecar of this one: beside it, or in a folder called as a kind is.

    >>> beside(["MTP/a.gguf", "mtp-A.gguf", "other/mtp-B.gguf"], "A.gguf")
    ['MTP/a.gguf', 'mtp-A.gguf']
    """
    folder = PurePosixPath(main).parent
    folders = {folder} if shard_name(main) is None else {folder, folder.parent}

    def is_beside(name: str) -> bool:
        parent = PurePosixPath(name).parent
        return parent in folders or (parent.name.lower() in KINDS and parent.parent in folders)

    return [name for name in names if name != main and is_beside(name)]


def _kind(name: str) -> str | None:
    """What the folder's name or the file's says that it is; None: no sidecar."""
    path = PurePosixPath(name)
    if path.parent.name.lower() in KINDS:
        return path.parent.name.lower()
    word = KIND_WORD.search(path.name)
    return word[0].lower() if word else None


def _is_first(name: str) -> bool:
    shard = shard_name(name)
    return name.lower().endswith(".gguf") and (shard is None or shard[1] == 1)


def _bits(name: str) -> int:
    """The number in a type's name: Q4_K_M -> 4, F16 -> 16; 0 where there is none."""
    found = TYPE_WORD.findall(PurePosixPath(name).name)
    digits = re.search(r"\d+", found[-1]) if found else None
    return int(digits[0]) if digits else 0


# Fetching


class _Repository:
    """The GGUF files of one commit: as the Hub lists them, or offline as the cache has them."""

    def __init__(self, address: Address) -> None:
        import huggingface_hub
        from huggingface_hub import constants

        self.address = address
        self._cached = _cached(address) if constants.HF_HUB_OFFLINE else None
        if self._cached is not None:
            found = sorted(self._cached.rglob("*"))
            self.names = _ggufs(path.relative_to(self._cached).as_posix() for path in found)
            return
        with failures(address, address.repository, address.revision):
            info = huggingface_hub.HfApi().model_info(address.repository, revision=address.revision)
        self.commit = str(info.sha)
        self.names = _ggufs(file.rfilename for file in info.siblings or [])

    def fetch(self, name: str) -> Path:
        """The file's path in the cache; of shards the first one's, with all the others there."""
        if name not in self.names:
            raise self.has_no("file of that name")
        paths = [self._fetch(shard) for shard in self._shards(name)]
        return paths[0]

    def has_no(self, what: str) -> HubFailed:
        """What to say where it lacks something."""
        where = " in the cache (HF_HUB_OFFLINE)" if self._cached else ""
        if not self.names:
            do = f"llama-sidecar convert hf://{self.address.repository} --out models makes them of a checkpoint"
            return HubFailed(f"{self.address} has no GGUF files{where}: {do}")
        return HubFailed(f"{self.address} has no such {what}{where}; there are {listed(self.names)}")

    def _shards(self, name: str) -> list[str]:
        shard = shard_name(name)
        if shard is None:
            return [name]
        stem, _, n = shard
        return [str(PurePosixPath(name).with_name(f"{stem}-{i + 1:05}-of-{n:05}.gguf")) for i in range(n)]

    def _fetch(self, name: str) -> Path:
        import huggingface_hub

        if self._cached is not None:
            return self._cached / name
        with failures(self.address, self.address.repository, self.address.revision):
            return Path(huggingface_hub.hf_hub_download(self.address.repository, name, revision=self.commit))


def _ggufs(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(".gguf")]


def _cached(address: Address) -> Path:
    """The folder of the commit that was fetched last, of those that the address means."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        repositories = huggingface_hub.scan_cache_dir(constants.HF_HUB_CACHE).repos
    except errors.CacheNotFound:
        repositories = frozenset()
    commits = [
        commit
        for repository in repositories
        if (repository.repo_type, repository.repo_id) == ("model", address.repository)
        for commit in repository.revisions
        if address.revision in (None, commit.commit_hash, *commit.refs)
    ]
    if not commits:
        raise HubFailed(f"{address} is not in the cache, and HF_HUB_OFFLINE is set: unset it to fetch it")
    return Path(max(commits, key=lambda commit: commit.last_modified).snapshot_path)


@contextmanager
def failures(asked_for: object, repository: str, revision: str | None) -> Iterator[None]:
    """Turns what huggingface_hub and its HTTP library raise into one line of HubFailed, which begins with what was asked for."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    try:
        yield
    except LlamaSidecarError:
        raise
    except errors.GatedRepoError as error:
        raise HubFailed(
            f"{asked_for} is gated: accept its terms at {where}/{repository}, log in with `hf auth login`, and try again"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubFailed(
            f"{asked_for}: {where} has no such model, or it is private: check the spelling, or log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubFailed(f"{asked_for}: there is no revision {revision!r} of it at {where}") from error
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        raise HubFailed(f"{asked_for} cannot be read from {where}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says first."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
