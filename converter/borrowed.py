"""A head out of another checkpoint: for one that lost its own when it was quantised or fine-tuned.

Checks that both are of one family, of the same sizes and with the same tokens, and tells where the head comes from. Does not
know what a family's tensors are called, nor whether the head still suits a trunk that was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from llama_sidecar.converter.checkpoint import Checkpoint
from llama_sidecar.converter.config import Key
from llama_sidecar.converter.errors import HeadMismatch, NoHead
from llama_sidecar.converter.families import Family, family_of
from llama_sidecar.converter.fingerprints import fingerprint_keys
from llama_sidecar.converter.plan import canonical_tensors
from llama_sidecar.converter.shards import Tensor
from llama_sidecar.converter.tokenizer import vocabulary_keys
from llama_sidecar.sidecars import keys as published

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")


def with_head_of(
    base: Checkpoint, opened: Checkpoint, family: Family, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A checkpoint's tensors, by canonical names, and those of the base's head that nothing of a trunk is made of.

    Raises NoHead for a base without one, and HeadMismatch for a base of another family, size or vocabulary, or where the
    checkpoint has a head of its own.
    """
    own = family.layout(opened.config, tensors.keys())
    if own.head:
        raise HeadMismatch(
            f"{opened.place} has a head of its own ({own.head_names}): leave --mtp-from out to convert that"
        )
    other = family_of(base.config)
    if other is not family:
        raise HeadMismatch(
            f"{base.place} is {base.config.architecture}, {opened.place} {opened.config.architecture}: expected the base model of it"
        )
    differing = [
        f"{name} is {base.config.get(name)} there, {opened.config.get(name)} here"
        for name in SIZES
        if base.config.get(name) != opened.config.get(name)
    ]
    if differing:
        raise HeadMismatch(f"the head of {base.place} does not fit {opened.place}: {', '.join(differing)}")
    found = canonical_tensors(base.tensors, family)
    layout = family.layout(base.config, found.keys())
    if not layout.head:
        raise NoHead(
            f"{base.place} holds no draft head either: no tensor in any of its files is called {layout.head_names}"
        )
    trunk = {source.name for place in layout.shared + layout.trunk for source in place.sources}
    head = {source.name for place in layout.head for source in place.sources} - trunk
    return {**tensors, **{name: tensor for name, tensor in found.items() if name in head}}


def origin_keys(
    base: Checkpoint, family: Family, common: Mapping[str, Key], n_threads: int
) -> dict[str, Key]:
    """The keys of a sidecar that say where its head comes from; `common` are the vocabulary and fingerprints of its main file.

    Raises HeadMismatch where the base has other tokens.
    """
    split = common.get("tokenizer.ggml.pre")  # given for both, where it was
    found_keys = vocabulary_keys(base, family.VOCABULARY, split if isinstance(split, str) else None)
    tokens, ours = found_keys[published.TOKENS], common[published.TOKENS]
    assert isinstance(tokens, list) and isinstance(ours, list)
    pairs = enumerate(zip_longest(ours, tokens))
    differing = next(((i, mine, theirs) for i, (mine, theirs) in pairs if mine != theirs), None)
    if differing:
        i, mine, theirs = differing
        raise HeadMismatch(
            f"token {i} is {theirs!r} in {base.place} and {mine!r} here: expected the same vocabulary"
        )
    found = canonical_tensors(base.tensors, family)
    layout = family.layout(base.config, found.keys())
    prints = fingerprint_keys(layout, found, base.config, tokens, n_threads)
    keys: dict[str, Key] = {published.MTP_FROM: base.name}
    if any(
        prints[name] != common[name] for name in (published.FINGERPRINT_TRUNK, published.FINGERPRINT_ROWS)
    ):
        keys[published.GRAFT_TRUNK] = prints[published.FINGERPRINT_TRUNK]
    return keys
