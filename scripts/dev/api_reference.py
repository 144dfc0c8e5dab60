"""Writes docs/API.md, the reference of the Python API, from the sources.

    scripts/dev/api_reference.py

What is public is what the packages export (`__all__`). griffe reads signatures and docstrings without importing anything;
tests/test_docs.py sees to it that the page is up to date.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "API.md"
PACKAGES = ("runtime", "converter", "sidecars")
MAX_COLUMNS = 100
INTRODUCTION = """# Python API

Made from the docstrings by `scripts/dev/api_reference.py`. Start with [`load`](#load) and [docs/PYTHON.md](PYTHON.md). Every error is a
`LlamaSidecarError` with one line that says what was found, what was expected and what to do.
"""


def page() -> str:
    """The whole page."""
    logging.getLogger("griffe").setLevel(logging.CRITICAL)  # arguments that share a line are no mistake
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "llama_sidecar"
        package.mkdir()
        for name in PACKAGES:
            (package / name).symlink_to(ROOT / name, target_is_directory=True)
        loader = griffe.GriffeLoader(search_paths=[folder], allow_inspection=False)
        modules = [loader.load(f"llama_sidecar.{name}") for name in PACKAGES]
        loader.resolve_aliases()
        parts = [INTRODUCTION]
        for module in modules:
            parts += of_module(
                module, [exported(name, module, loader.modules_collection) for name in module.exports or []]
            )
    return "\n".join(parts).rstrip() + "\n"


def exported(name: Any, module: Any, collection: Any) -> Any:
    """What a package means by a name that it exports; a module of it may have the same."""
    found = collection[module.imports.get(str(name), f"{module.path}.{name}")]
    found = found.final_target if found.is_alias else found
    return exported(found.name, found.parent, collection) if found.is_module else found


def of_module(module: Any, members: list[Any]) -> Iterator[str]:
    """A package: what it is for, then what it exports, functions first, errors last."""
    yield f"## llama_sidecar.{module.name}\n"
    yield from of_docstring(module)
    for member in sorted(members, key=rank):
        yield from of_object(member)


def rank(member: Any) -> tuple[int, str]:
    order = (member.is_function, member.is_class and not is_error(member), member.is_attribute, True)
    return order.index(True), str(member.name)


def is_error(member: Any) -> bool:
    names = {str(base).rpartition(".")[2] for base in member.bases}
    return any(name.endswith(("Error", "Exception")) for name in names)


def of_object(member: Any, owner: str = "") -> Iterator[str]:
    name = f"{owner}{member.name}"
    yield f"{'####' if owner else '###'} {name}\n"
    if member.is_function or member.is_class:
        yield f"```python\n{signature(member)}\n```\n"
    elif (about := str(member.annotation or member.value)) and len(about) <= MAX_COLUMNS:
        yield f"`{about}`\n"
    yield from of_docstring(member)
    if member.is_class and not is_error(member):
        for inner in member.members.values():
            if inner.docstring is not None and not inner.name.startswith("_"):
                yield from of_object(inner, f"{member.name}.")


def signature(member: Any) -> str:
    """As it stands in the source, in one line where that is short enough."""
    parameters = [p for p in member.parameters if p.name not in ("self", "cls")]
    spelled = list(spelled_parameters(parameters))
    if member.is_class:
        bases = ", ".join(map(str, member.bases))
        is_made_elsewhere = any(": _" in parameter for parameter in spelled)
        if is_error(member) or is_made_elsewhere or not spelled:
            return f"class {member.name}" + (f"({bases})" if bases else "")
        head, result = str(member.name), ""
    else:
        head = f"def {member.name}"
        result = f" -> {member.returns}" if member.returns is not None else ""
    line = f"{head}({', '.join(spelled)}){result}"
    return line if len(line) <= MAX_COLUMNS else f"{head}(\n    " + ",\n    ".join(spelled) + f",\n){result}"


def spelled_parameters(parameters: list[Any]) -> Iterator[str]:
    starred = False
    for parameter in parameters:
        kind = parameter.kind
        if kind is griffe.ParameterKind.keyword_only and not starred:
            starred = True
            yield "*"
        prefix = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            kind, ""
        )
        starred |= prefix == "*"
        annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
        has_default = parameter.default is not None and not prefix
        equals = " = " if annotation else "="
        yield f"{prefix}{parameter.name}{annotation}" + (
            f"{equals}{parameter.default}" if has_default else ""
        )


def of_docstring(member: Any) -> Iterator[str]:
    if member.docstring is None:
        return
    for section in member.docstring.parse("google"):
        yield from of_section(section)


def of_section(section: Any) -> Iterator[str]:
    kind, value = section.kind.value, section.value
    if kind == "text":
        yield f"{code_apart(value)}\n"
    elif kind in ("parameters", "attributes"):
        yield "\n".join(f"- `{item.name}`: {flat(item.description)}" for item in value) + "\n"
    elif kind == "raises":
        yield "Raises:\n"
        yield "\n".join(f"- `{item.annotation}`: {flat(item.description)}" for item in value) + "\n"
    elif kind == "returns":
        yield "Returns: " + " ".join(flat(item.description) for item in value) + "\n"
    elif kind == "admonition":
        text = value.contents if kind == "admonition" else value
        yield f"```python\n{plain_example(text)}\n```\n"
    else:
        raise ValueError(f"a docstring has a section {kind!r}, for which this script has no form")


def flat(text: str) -> str:
    return " ".join(text.split())


def code_apart(text: str) -> str:
    """Text in which lines of a Python session stand in a block of their own."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        is_code = paragraph.lstrip().startswith(">>>")
        found.append(f"```python\n{plain_example(paragraph)}\n```" if is_code else flat(paragraph))
    return "\n\n".join(found)


def plain_example(text: str) -> str:
    """Without what is meant for doctest alone."""
    lines = [re.sub(r"\s*# doctest: .*", "", line).rstrip() for line in text.splitlines()]
    indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
    return "\n".join(line[indent:] for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
