"""Where a head comes from, as the `sidecar.*` keys of a file tell it: kept through every edit, made anew only where it is proven.

A main file's own fingerprints speak of its trunk, a sidecar's of the trunk that its head belongs to. Inside one file the two
would be taken for the same, so a head that is not proven to belong there keeps its own beside them. FORMAT.md has the keys.
"""

from __future__ import annotations

from llama_sidecar.converter.edit.header import Keys, text, texts, uint
from llama_sidecar.sidecars import GGUFHeader, MainFile, Sidecar, keys
from llama_sidecar.sidecars.sidecar import head_fingerprints, own_fingerprint

MERGED = (keys.MERGED_TRUNK, keys.MERGED_ROWS)  # a head's own fingerprints, in a main file


def without_head(main: Keys) -> Keys:
    """A main file's keys without those that speak of the head it had."""
    return {name: value for name, value in main.items() if name not in (*keys.OF_HEAD, *MERGED)}


def of_split(whole_keys: Keys, whole: MainFile) -> Keys:
    """The keys of a sidecar that was inside a main file: its own fingerprints where it has any, else the main file's.

    Raises WrongKey and BadFingerprint.
    """
    return _with_fingerprints(whole_keys, *head_fingerprints(whole))


def of_merge(joined: Keys, main: MainFile, sidecar: Sidecar, sidecar_keys: Keys) -> Keys:
    """The keys of a main file with a head that was a sidecar: what is known of the head, where the main file does not say the same."""
    result = without_head(joined)
    result |= {name: value for name, value in sidecar_keys.items() if name in keys.OF_HEAD}
    for name, ours, theirs in (
        (keys.MERGED_TRUNK, main.trunk, sidecar.trunk),
        (keys.MERGED_ROWS, main.rows, sidecar.rows),
    ):
        if ours != theirs:
            result[name] = text(theirs or "")
    return result


def of_graft(sidecar_keys: Keys, main: MainFile, sidecar: Sidecar) -> Keys:
    """The keys of a head on another trunk than it was trained with: it fits that one, and says which one it comes from.

    Raises WrongKey and BadFingerprint.
    """
    first = own_fingerprint(sidecar.header, keys.GRAFT_TRUNK, sidecar.trunk)
    return _with_fingerprints(sidecar_keys, main.trunk, main.rows) | {keys.GRAFT_TRUNK: text(first or "")}


def of_requant(sidecar_keys: Keys, header: GGUFHeader, steps: list[str]) -> Keys:
    """A sidecar's keys with the types its values have been through, such as "Q8_0 -> Q4_K", after those of earlier times.

    Raises WrongKey.
    """
    if not steps:
        return sidecar_keys
    earlier = header.strings(keys.REQUANT_FROM) if keys.REQUANT_FROM in header.keys else ()
    told = {keys.FORMAT: uint(keys.FORMAT_VERSION), keys.REQUANT_FROM: texts([*earlier, *steps])}
    return sidecar_keys | told


def _with_fingerprints(file_keys: Keys, trunk: str | None, rows: str | None) -> Keys:
    own = (keys.FORMAT, keys.FINGERPRINT_TRUNK, keys.FINGERPRINT_ROWS, *MERGED)
    result = {name: value for name, value in file_keys.items() if name not in own}
    known = {keys.FINGERPRINT_TRUNK: trunk, keys.FINGERPRINT_ROWS: rows}
    added = {name: text(value) for name, value in known.items() if value}
    has_any = bool(added) or any(name.startswith("sidecar.") for name in result)
    return result | ({keys.FORMAT: uint(keys.FORMAT_VERSION)} if has_any else {}) | added
