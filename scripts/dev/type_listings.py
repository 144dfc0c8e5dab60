"""Stores which types llama-quantize gives to the tensors of our files, for the tests to compare with.

    scripts/dev/type_listings.py LLAMA_QUANTIZE [--out tests/data/types]

Writes one file for each case of tests/type_cases.py: for every tensor that is not always F32 its types in the order of
"types", of the main file, the sidecar, and the main file with an importance matrix; of small cases also hashes of the bytes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from type_cases import CASES, WITH_BYTES, digest_of, make_case, quantize, types_of, write_imatrix  # noqa: E402

from llama_sidecar.converter import TYPES, convert  # noqa: E402


@click.command()
@click.argument("llama_quantize", type=click.Path(exists=True, resolve_path=True, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "tests/data/types")
def main(llama_quantize: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for family, name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = _list_case(llama_quantize, family, name, Path(folder))
        path = out / f"{family}-{name}.json"
        path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        print(path)


def _list_case(program: Path, family: str, name: str, folder: Path) -> dict[str, object]:
    ours = convert(make_case(folder, family, name), folder / "ours", "F32", "F32", name="m")
    assert ours.main and ours.sidecar
    imatrix = write_imatrix(folder / "imatrix.gguf", ours.main)
    sources = {"main": (ours.main, None), "sidecar": (ours.sidecar, None), "imatrix": (ours.main, imatrix)}
    listing: dict[str, object] = {"types": TYPES}
    digests = {}
    for role, (source, weights) in sources.items():
        columns = {}
        for kind in TYPES:
            written = quantize(program, source, folder / "peer.gguf", kind, weights)
            columns[kind] = types_of(written)
            if (family, name) in WITH_BYTES:
                digests[f"{role} {kind}"] = digest_of(written)
        names = sorted({name for column in columns.values() for name in column})
        listing[role] = {name: " ".join(columns[kind].get(name, "F32") for kind in TYPES) for name in names}
    return listing | ({"bytes": digests} if digests else {})


if __name__ == "__main__":
    main()
