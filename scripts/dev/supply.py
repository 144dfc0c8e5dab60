"""What the project is made from: hashed locks of its tools, a bill of materials of its wheel, and the same wheel built twice.

    python3 scripts/dev/supply.py lock [--upgrade] | sbom | reproduce

uv and cyclonedx-bom, which do the first two, are kept in an environment of their own. Needs only the standard library; `sbom` and
`reproduce` need the `.venv` that setup_venv.py makes. Looks for no known vulnerabilities.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from machine_check import Problem
from setup_venv import BUILD, CONSTRAINTS, LOCK, ROOT, VENV, WHEELS, locked, run, wheel_sources

TOOLS = BUILD / "supply"
TOOLS_IN, TOOLS_LOCK = ROOT / "requirements" / "supply.in", ROOT / "requirements" / "supply.lock"
OLDEST_PYTHON = "3.10"
HEAD = "# Made by `make lock` from {source}: do not edit.\n"
SCHEMA = "1.6"  # of CycloneDX

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
    bill = with_compiled_in(what_is_required(json.loads(whole.read_text())))
    path = WHEELS / f"llama-sidecar-{bill['metadata']['component']['version']}.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    check = (
        "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator as V; "
        f"sys.exit(V(SchemaVersion.V{SCHEMA.replace('.', '_')}).validate_str(open(sys.argv[1]).read()))"
    )
    run([str(tools / "python"), "-c", check, str(path)], "checking the bill of materials")
    return path


def what_is_required(bill: dict[str, Any]) -> dict[str, Any]:
    """A bill of an environment, without what the project does not require to run: the tools that test and build it."""
    root = bill["metadata"]["component"]
    requires = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    found, to_do = {root["bom-ref"]}, [root["bom-ref"]]
    while to_do:
        more = set(requires.get(to_do.pop(), ())) - found
        found |= more
        to_do += more
    components = [one for one in bill["components"] if one["bom-ref"] in found]
    dependencies = [one for one in bill["dependencies"] if one["ref"] in found]
    return {**bill, "components": components, "dependencies": dependencies}


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
