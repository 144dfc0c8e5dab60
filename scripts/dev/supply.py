"""What the project is made from: hashed locks of its tools, a bill of materials of its wheel, and the same wheel built twice.

    python3 scripts/dev/supply.py lock [--upgrade] | sbom | reproduce

uv and cyclonedx-bom, which do the first two, are kept in an environment of their own. Needs only the standard library; `sbom` and
`reproduce` need the `.venv` that setup_venv.py makes. Looks for no known vulnerabilities.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from machine_check import Problem
from setup_venv import (
    BUILD,
    CONSTRAINTS,
    LOCK,
    ROOT,
    VENV,
    WHEELS,
    dependencies,
    locked,
    package_name,
    pyproject,
    run,
    wheel_sources,
)

TOOLS = BUILD / "supply"
TOOLS_IN, TOOLS_LOCK = ROOT / "requirements" / "supply.in", ROOT / "requirements" / "supply.lock"
OLDEST_PYTHON = "3.10"
HEAD = "# Made by `make lock` from {source}: do not edit.\n"
SCHEMA = "1.6"  # of CycloneDX

NEEDS = """
import json
from importlib.metadata import distributions
from packaging.requirements import Requirement
def needs(distribution):
    found = map(Requirement, distribution.requires or [])
    return [one.name for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]
print(json.dumps({one.metadata["Name"]: needs(one) for one in distributions()}))
"""

# What is compiled into the native module: nothing that is installed says so.
COMPILED_IN = (("nanobind", "BSD-3-Clause"), ("robin-map", "MIT"))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Locks, a bill of materials, and the wheel built twice.")
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("lock", help="resolve and hash what development needs").add_argument(
        "--upgrade", action="store_true", help="take the newest versions that constraints.txt allows"
    )
    steps.add_parser("sbom", help="write the wheel's bill of materials into dist/")
    steps.add_parser("reproduce", help="build the wheel twice, in two places, and compare")
    options = parser.parse_args(argv)
    try:
        if options.step == "lock":
            lock(options.upgrade)
        elif options.step == "sbom":
            print(sbom())
        else:
            print(reproduce())
    except Problem as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


def lock(upgrade: bool) -> None:
    """Writes both locks; versions that are in one stay unless they must change, or with `upgrade`."""
    tools = tools_venv()
    again = ["--upgrade"] if upgrade else []
    for path, source, arguments in (
        (LOCK, "pyproject.toml", ["pyproject.toml", "--extra", "dev", "-c", CONSTRAINTS.name]),
        (TOOLS_LOCK, "requirements/supply.in", ["requirements/supply.in"]),
    ):
        fresh = BUILD / path.name
        fresh.unlink(missing_ok=True)
        if path.exists():
            shutil.copy(path, fresh)
        options = [
            "--universal",
            "--python-version",
            OLDEST_PYTHON,
            "--generate-hashes",
            "--no-header",
            "--quiet",
        ]
        os.chdir(ROOT)  # uv writes names of files into comments as they are given
        run(
            [str(tools / "uv"), "pip", "compile", *options, *again, *arguments, "-o", str(fresh)],
            "uv pip compile",
        )
        path.write_text(HEAD.format(source=source) + without_head(fresh.read_text()))
        fresh.unlink()
        print(f"{path.relative_to(ROOT)}: {len(locked(path.read_text()))} packages")


def without_head(text: str) -> str:
    return re.sub(r"^(#.*\n)+", "", text)


def tools_venv() -> Path:
    """The programs of uv and cyclonedx-bom, installed at first use and when their lock has changed."""
    source = TOOLS_LOCK if TOOLS_LOCK.exists() else TOOLS_IN
    wanted, stamp = sha256(source.read_bytes()).hexdigest(), TOOLS / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(TOOLS)], f"making {TOOLS.relative_to(ROOT)}")
        python = str(TOOLS / "bin/python")
        hashes = ["--require-hashes", "--no-deps"] if source == TOOLS_LOCK else []
        run([python, "-m", "pip", "-qq", "install", *hashes, "-r", str(source)], "pip install")
        stamp.write_text(wanted)
    return TOOLS / "bin"


def sbom() -> Path:
    """The bill of materials of the wheel: what it requires, as installed in `.venv`, and what is compiled into it."""
    tools = tools_venv()
    whole = BUILD / "environment.cdx.json"
    options = [
        "--output-reproducible",
        "--sv",
        SCHEMA,
        "--mc-type",
        "library",
        "--pyproject",
        "pyproject.toml",
    ]
    os.chdir(ROOT)
    command = [str(tools / "cyclonedx-py"), "environment", *options, "-o", str(whole), str(VENV)]
    run(command, "cyclonedx-py", SOURCE_DATE_EPOCH="")
    required, optional = (
        set(map(package_name, part)) for part in (dependencies(pyproject()), user_extras(pyproject()))
    )
    bill = what_is_required(json.loads(whole.read_text()), installed_needs(), required, optional)
    bill = with_compiled_in(bill)
    path = WHEELS / f"llama-sidecar-{bill['metadata']['component']['version']}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    check = (
        "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator as V; "
        f"sys.exit(V(SchemaVersion.V{SCHEMA.replace('.', '_')}).validate_str(open(sys.argv[1]).read()))"
    )
    run([str(tools / "python"), "-c", check, str(path)], "checking the bill of materials")
    return path


def what_is_required(
    bill: dict[str, Any], needs: dict[str, list[str]], required: set[str], optional: set[str]
) -> dict[str, Any]:
    """A bill of an environment, without what only tests and builds the project.

    `needs` are the names of what each package needs without extras, which the bill does not tell from those with; `required` and
    `optional` the names of what the project asks for by itself and in extras.
    """
    always, found = _reached(required, needs), _reached(required | optional, needs)
    root = bill["metadata"]["component"]["bom-ref"]
    named = {one["bom-ref"]: package_name(one["name"]) for one in bill["components"]}
    components = [
        one if named[one["bom-ref"]] in always else {**one, "scope": "optional"}
        for one in bill["components"]
        if named[one["bom-ref"]] in found
    ]
    dependencies = []
    for one in bill["dependencies"]:
        own = required | optional if one["ref"] == root else needs.get(named[one["ref"]], [])
        if one["ref"] == root or named[one["ref"]] in found:
            dependencies.append(
                {**one, "dependsOn": [to for to in one.get("dependsOn", []) if named.get(to) in own]}
            )
    return {**bill, "components": components, "dependencies": dependencies}


def _reached(start: set[str], needs: dict[str, list[str]]) -> set[str]:
    found, to_do = set(start), list(start)
    while to_do:
        more = set(needs.get(to_do.pop(), ())) - found
        found |= more
        to_do += more
    return found


def installed_needs() -> dict[str, list[str]]:
    """What each package in `.venv` needs there without any of its extras, by name."""
    found = subprocess.run(
        [str(VENV / "bin/python"), "-c", NEEDS], check=True, capture_output=True, text=True
    ).stdout
    return {
        package_name(name): [package_name(need) for need in needs]
        for name, needs in json.loads(found).items()
    }


def user_extras(text: str) -> list[str]:
    """The requirements of pyproject.toml's extras that make up `all`: those that a user may want."""
    names = re.search(r'^all = \["llama-sidecar\[([\w,-]+)\]"\]$', text, re.MULTILINE)
    if not names:
        raise Problem(
            'pyproject.toml has no line `all = ["llama-sidecar[...]"]` among its optional dependencies'
        )
    found = re.findall(rf"^(?:{names[1].replace(',', '|')}) = (\[.*\])$", text, re.MULTILINE)
    return [requirement for extra in found for requirement in ast.literal_eval(extra)]


def with_compiled_in(bill: dict[str, Any]) -> dict[str, Any]:
    """A bill with COMPILED_IN as parts of the project itself."""
    nanobind = re.search(r"==([\w.]+)", locked(LOCK.read_text())["nanobind"])
    assert nanobind
    parts = []
    for name, licence in COMPILED_IN:
        part = {
            "type": "library",
            "bom-ref": f"compiled-in:{name}",
            "name": name,
            "licenses": [{"license": {"id": licence}}],
        }
        if name == "nanobind":
            part |= {"version": nanobind[1], "purl": f"pkg:pypi/nanobind@{nanobind[1]}"}
        else:
            part["description"] = f"as it comes with nanobind {nanobind[1]}"
        parts.append(part)
    root = {**bill["metadata"]["component"], "components": parts}
    return {**bill, "metadata": {**bill["metadata"], "component": root}}


def reproduce() -> str:
    """Builds the wheel in two folders under other circumstances; its hash, or a Problem that names the files that differ."""
    wheels = []
    for name, environment in (
        ("here", {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"}),
        ("in another place", {"TZ": "Pacific/Auckland", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"}),
    ):
        folder = BUILD / "reproduce" / name
        shutil.rmtree(folder, ignore_errors=True)
        for source in wheel_sources(ROOT):
            copy = folder / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
        out = folder / "dist"
        command = [str(VENV / "bin/python"), "-m", "pip", "-q", "wheel", "--no-build-isolation", "--no-deps"]
        run([*command, "-w", str(out), str(folder)], f"building the wheel {name}", **environment)
        wheels.append(next(out.glob("*.whl")))
    one, other = wheels
    if one.read_bytes() != other.read_bytes():
        raise Problem(f"two builds differ in {', '.join(differences(one, other)) or 'the archive itself'}")
    return f"{sha256(one.read_bytes()).hexdigest()}  {one.name}, twice"


def differences(one: Path, other: Path) -> list[str]:
    """The files of two wheels that are not the same in both."""
    with zipfile.ZipFile(one) as a, zipfile.ZipFile(other) as b:
        theirs = [
            {info.filename: (info.CRC, info.date_time, info.external_attr) for info in z.infolist()}
            for z in (a, b)
        ]
    return sorted(
        name for name in theirs[0].keys() | theirs[1].keys() if theirs[0].get(name) != theirs[1].get(name)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
