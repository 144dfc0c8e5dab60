"""Which tensor gets which type: llama-quantize's choices, from the stored answers in tests/data/types, and its bytes.

scripts/dev/type_listings.py stores them. With PEER_DIR set (shared/peer/build_peer.sh) llama-quantize itself is asked too.
"""

from __future__ import annotations

import json
import os
import platform
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import LOGITS_PROMPT, VARIANTS, has_head, listing, make_checkpoint, tiny_tensors
from click.testing import CliRunner
from gguf import GGMLQuantizationType as GGMLType
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from type_cases import CASES, WITH_BYTES, case_config, digest_of, make_case, quantize, types_of, write_imatrix

from llama_sidecar.converter import TYPES, convert
from llama_sidecar.converter.config import Config
from llama_sidecar.converter.errors import BadImatrix, UnknownType
from llama_sidecar.converter.families import families
from llama_sidecar.converter.imatrix import read_imatrix
from llama_sidecar.converter.recipe import Model, main_recipe, model_of, sidecar_recipe
from llama_sidecar.runtime import random_model
from llama_sidecar.scripts.convert import command
from llama_sidecar.sidecars import keys, read_header

LISTINGS = Path(__file__).parent / "data" / "types"
VOCABULARY = ("token_embd.weight", "output.weight")
MATRIX, DENSE = (64, 256), Model(n_layers=24, n_experts=0, n_gqa=1)
# Elsewhere compilers fuse multiplications and additions, which moves a search for the best scale by a bit now and then.
SAME_ARITHMETIC = platform.machine() in ("x86_64", "AMD64")
FITTED = [kind for kind in TYPES if GGML_QUANT_SIZES[main_recipe(kind).base][0] > 1 and kind != "Q8_0"]

needs_peer = pytest.mark.skipif(
    "PEER_DIR" not in os.environ, reason="asks llama-quantize itself, where PEER_DIR says it is"
)


def llama_quantize() -> Path:
    return Path(os.environ["PEER_DIR"]) / "build" / "bin" / "llama-quantize"


def stored(family: str, name: str) -> dict[str, Any]:
    return json.loads((LISTINGS / f"{family}-{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("role", ["main", "sidecar", "imatrix"])
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_tensor_has_the_type_that_llama_quantize_gives_it(case: tuple[str, str], role: str) -> None:
    """All types at once; in a sidecar the vocabulary's matrices keep the type that was asked for."""
    theirs = stored(*case)
    family, (config, optional) = families()[case[0]], case_config(*case)
    layout = family.layout(Config(config), optional)
    head = layout.head if role == "sidecar" else layout.trunk
    placements = layout.shared + head
    model = model_of(
        family.ARCH, family.keys(Config(config), layout.n_head_layers if role == "sidecar" else 0)
    )
    assert tuple(theirs["types"]) == TYPES
    for column, kind in enumerate(TYPES):
        recipe = sidecar_recipe(kind) if role == "sidecar" else main_recipe(kind)
        types = recipe.types([(p.name, p.shape) for p in placements], model, has_imatrix=role == "imatrix")
        expected = {p.name: theirs[role].get(p.name, "F32 " * len(TYPES)).split()[column] for p in placements}
        if role == "sidecar":
            plain = recipe.types([("blk.0.ffn_up.weight", placements[0].shape)], model)["blk.0.ffn_up.weight"]
            expected |= {name: plain.name for name in VOCABULARY if name in expected}
        assert {name: type.name for name, type in types.items()} == expected, kind
        assert theirs[role].keys() <= expected.keys()


@pytest.fixture(scope="module", params=WITH_BYTES, ids="-".join)
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param[0], make_case(tmp_path_factory.mktemp("short"), *request.param)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("F32", "F16", "BF16")])
def test_bytes_are_those_of_llama_quantize(short: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    """Straight from the checkpoint, against llama-quantize on our F32 file, with an importance matrix and without."""
    family, checkpoint = short
    result = convert(checkpoint, tmp_path, kind, kind, name="m")
    assert result.main == tmp_path / f"m-{kind}.gguf" and result.sidecar == tmp_path / f"mtp-m-{kind}.gguf"
    found = {f"main {kind}": result.main, f"sidecar {kind}": result.sidecar}
    if kind in FITTED:
        imatrix = write_imatrix(tmp_path / "imatrix.gguf", result.main)
        weighed = convert(checkpoint, tmp_path / "weighed", kind, imatrix=imatrix)
        assert weighed.main and not weighed.warnings
        found[f"imatrix {kind}"] = weighed.main
        assert digest_of(weighed.main) != digest_of(result.main)
    digests = stored(family, "short")["bytes"]
    if SAME_ARITHMETIC:
        assert {name: digest_of(path) for name, path in found.items()} == {
            name: digests[name] for name in found
        }


@pytest.mark.parametrize("kind", TYPES)
def test_llama_cpp_computes_with_every_type(short: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    main = convert(short[1], tmp_path, kind).main
    model = llama_cpp.Llama(str(main), n_ctx=32, n_threads=1, logits_all=True, verbose=False)
    model.eval(LOGITS_PROMPT)
    scores = model.scores[: len(LOGITS_PROMPT)]
    assert np.isfinite(scores).all() and np.ptp(scores) > 0
    model.close()


@needs_peer
@pytest.mark.parametrize("kind", TYPES)
def test_files_are_those_that_llama_quantize_writes_now(
    short: tuple[str, Path], kind: str, tmp_path: Path
) -> None:
    """All keys and tensors, from our F32 file and from our BF16 file."""
    program, (_, checkpoint) = llama_quantize(), short
    ours = as_ggml_sees(convert(checkpoint, tmp_path, kind, name="m").main)
    for source in ("F32", "BF16"):
        main = convert(checkpoint, tmp_path / source, source, name="m").main
        assert as_ggml_sees(quantize(program, main, tmp_path / "peer.gguf", kind)) == ours
        if kind in FITTED:
            imatrix = write_imatrix(tmp_path / "imatrix.gguf", main)
            peer = as_ggml_sees(quantize(program, main, tmp_path / "peer.gguf", kind, imatrix))
            weighed = convert(checkpoint, tmp_path / "weighed", kind, imatrix=imatrix, force=True, name="m")
            found = as_ggml_sees(weighed.main)
            file_key = "quantize.imatrix.file"  # of the path we keep the name
            assert peer["keys"].pop(file_key).endswith('/imatrix.gguf"')
            assert found["keys"].pop(file_key) == 'STRING "imatrix.gguf"'
            assert found == peer


def as_ggml_sees(path: Path | None) -> dict[str, dict[str, str]]:
    """The listing of a file, without last dimensions of 1: llama-quantize leaves them out."""
    assert path
    found = listing(path)
    found["tensors"] = {name: value.replace("x1 ", " ") for name, value in found["tensors"].items()}
    return found


@pytest.mark.parametrize("arch, variant", VARIANTS)
def test_every_family_has_types_that_fit_at_every_name(arch: str, variant: str) -> None:
    family, (root, optional) = families()[arch], families()[arch].TINY[variant]
    config = Config(root)
    layout = family.layout(config, optional | tiny_names(arch, variant))
    for part, n_head_layers in ((layout.trunk, 0), (layout.head, layout.n_head_layers)):
        shapes = [(p.name, p.shape) for p in layout.shared + part]
        model = model_of(family.ARCH, family.keys(config, n_head_layers))
        assert model.n_layers > 0 and model.n_gqa >= 0
        for kind in TYPES:
            types = main_recipe(kind).types(shapes, model)
            for name, shape in shapes:
                assert (
                    not shape or (shape[-1] if len(shape) > 1 else 1) % GGML_QUANT_SIZES[types[name]][0] == 0
                )


@needs_peer
@pytest.mark.parametrize("arch, variant", VARIANTS)
def test_every_family_has_the_types_that_llama_quantize_gives_it_now(
    arch: str, variant: str, tmp_path: Path
) -> None:
    """All but what decides more than it weighs (keys.ALWAYS_F32), which stays F32 here; llama-quantize narrows some of it."""
    head = "F32" if has_head(arch, variant) else None
    full = convert(make_checkpoint(tmp_path, arch, variant), tmp_path / "full", "F32", head, name="m")
    files = [(path, but) for path, but in ((full.main, ()), (full.sidecar, VOCABULARY)) if path]
    for kind in TYPES:
        for path, but in files:
            header = read_header(path)
            shapes = [(name, info.shape[::-1]) for name, info in header.tensors.items()]
            found = main_recipe(kind).types(shapes, model_of(header.arch, header.keys))
            theirs = types_of(quantize(llama_quantize(), path, tmp_path / "peer.gguf", kind))
            # Gemma's is narrowed at the types that llama.cpp's converter writes, as it does.
            apart = (*but, "per_layer_model_proj.weight") if kind in ("F16", "BF16", "Q8_0") else but
            ours = {n: t.name for n, t in found.items() if t != GGMLType.F32 and n not in apart}
            kept = {n: t for n, t in theirs.items() if n not in apart and not n.endswith(keys.ALWAYS_F32)}
            assert ours == kept, kind


def tiny_names(arch: str, variant: str) -> frozenset[str]:
    return frozenset(map(families()[arch].canonical, tiny_tensors(arch, variant)))


def test_small_tensors_stay_f32() -> None:
    shapes = {
        "blk.0.attn_norm.weight": (64,),
        "blk.0.ssm_a": (4,),
        "blk.0.ssm_dt.bias": (4,),
        "blk.0.ssm_conv1d.weight": MATRIX,
        "blk.0.ffn_gate_inp.weight": MATRIX,
        "blk.0.ffn_gate_inp_shexp.weight": (1, 256),
        "blk.0.one_row.weight": (1, 256),
    }
    for kind in ("Q8_0", "Q4_K_M", "Q2_K"):
        assert set(main_recipe(kind).types(shapes.items(), DENSE).values()) == {GGMLType.F32}
    assert type_in("Q8_0", "blk.0.ffn_gate_exps.weight", (4, *MATRIX)) == GGMLType.Q8_0


def type_in(kind: str, name: str, shape: tuple[int, ...] = MATRIX, model: Model = DENSE) -> GGMLType:
    return main_recipe(kind).types([("output.weight", MATRIX), (name, shape)], model)[name]


@pytest.mark.parametrize(
    "kind, n_cols, expected",
    [
        ("Q8_0", 48, "F16"), ("BF16", 48, "BF16"), ("Q4_K_S", 96, "Q5_0"), ("Q5_K_S", 96, "Q5_1"), ("Q6_K", 96, "Q8_0"),
        ("Q3_K_M", 96, "Q4_0"), ("Q2_K", 96, "Q4_0"), ("IQ4_XS", 96, "IQ4_NL"), ("Q2_K", 48, "F16"), ("Q4_0", 48, "F16"),
    ],
)  # fmt: skip
def test_a_row_that_blocks_do_not_fill_gets_the_next_type(kind: str, n_cols: int, expected: str) -> None:
    assert type_in(kind, "blk.0.ffn_up.weight", (64, n_cols)).name == expected


def test_the_output_is_q6_k_or_better_and_so_are_embeddings_that_serve_as_it() -> None:
    types = main_recipe("Q4_0").types([("token_embd.weight", MATRIX)], DENSE)
    assert types["token_embd.weight"] == GGMLType.Q6_K
    assert type_in("Q4_0", "output.weight") == GGMLType.Q6_K
    assert type_in("Q4_0", "token_embd.weight") == GGMLType.Q4_0
    assert type_in("Q4_0", "output.weight", (64, 96)) == GGMLType.Q8_0
    assert type_in("BF16", "output.weight") == GGMLType.BF16


@pytest.mark.parametrize("n_experts, wide", [(0, [8, 9, 10]), (2, [])])
def test_what_counts_is_the_tensors_before_or_with_experts_the_layer(n_experts: int, wide: list[int]) -> None:
    """Q4_K_S widens an eighth of 24 layers, of which the first eight have no such tensor here."""
    names = {f"blk.{i}.ffn_down.weight": i for i in range(8, 24)}
    model = Model(n_layers=24, n_experts=n_experts, n_gqa=1)
    types = main_recipe("Q4_K_S").types([(name, MATRIX) for name in names], model)
    assert [i for name, i in names.items() if types[name] == GGMLType.Q5_K] == wide


@pytest.mark.parametrize("kind", random_model.TYPES)
def test_random_models_for_speed_have_the_types_of_converted_ones(kind: str) -> None:
    """The runtime never imports the converter, so that the rule stands there once more."""
    for shape in random_model.SHAPES.values():
        type_of = partial(random_model.main_type, kind, shape=shape)
        made = random_model._tensors(shape, range(shape.n_layers), type_of)
        model = Model(shape.n_layers, 0, shape.n_head // shape.n_kv)
        assert main_recipe(kind).types([(t.name, t.shape) for t in made], model) == {
            t.name: t.type for t in made
        }


def test_default_sidecar_is_q8_0_with_a_q4_0_vocabulary() -> None:
    vocabulary = ("nextn.embed_tokens", "nextn.shared_head_head")  # a head may have its own
    names = ["blk.4.attn_q.weight", *VOCABULARY, *(f"blk.4.{name}.weight" for name in vocabulary)]
    shapes = [(name, MATRIX) for name in names]
    types = sidecar_recipe(None).types(shapes, DENSE)
    assert [type.name for type in types.values()] == ["Q8_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0"]
    assert set(sidecar_recipe("BF16").types(shapes, DENSE).values()) == {GGMLType.BF16}


def test_unknown_type_is_refused_with_the_known_ones() -> None:
    for recipe in (main_recipe, sidecar_recipe):
        with pytest.raises(
            UnknownType, match=r"'Q9_9'; expected one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, .*, Q2_K$"
        ):
            recipe("Q9_9")


def test_a_head_below_q4_k_is_written_when_asked_for_and_remarked_on(
    short: tuple[str, Path], tmp_path: Path
) -> None:
    _, checkpoint = short
    assert not convert(checkpoint, tmp_path / "1", "Q2_K").warnings
    assert not convert(checkpoint, tmp_path / "2", None, "IQ4_XS").warnings
    low = convert(checkpoint, tmp_path / "3", None, "Q2_K")
    assert len(low.warnings) == 1
    assert "the head's block is at Q2_K and Q3_K, below Q4_K: fewer of its drafts" in low.warnings[0]
    run = CliRunner().invoke(
        command,
        [str(checkpoint), "--out", str(tmp_path / "4"), "--main-type", "none", "--sidecar-type", "q2_k"],
    )
    assert run.exit_code == 0 and f"warning: {low.warnings[0]}" in run.output


# Importance matrices.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small checkpoint with experts, and its main file."""
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = make_checkpoint(folder, "qwen35moe", "single")
    main = convert(checkpoint, folder / "out", "BF16").main
    assert main
    return checkpoint, main


def test_both_formats_say_the_same(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    new = read_imatrix(write_imatrix(tmp_path / "imatrix.gguf", tiny[1]))
    old = read_imatrix(write_imatrix(tmp_path / "imatrix.dat", tiny[1], legacy=True))
    assert (new.dataset, new.n_chunks) == (old.dataset, old.n_chunks) == ("text.txt", 5)
    assert new.entries.keys() == old.entries.keys()
    unseen = 0
    for name, values in new.entries.items():
        if "_exps" in name:  # the older format has no word for an expert that was never chosen
            shape = read_header(tiny[1]).tensors[name].shape[::-1]
            assert (new.of(name, shape)[1] == 1).all()
            unseen += 1
        else:
            np.testing.assert_allclose(old.entries[name], values, rtol=1e-6)
    assert unseen


def test_what_was_used_is_recorded_without_the_path(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    result = convert(
        tiny[0], tmp_path, "Q4_0", imatrix=write_imatrix(tmp_path / "imatrix.dat", tiny[1], legacy=True)
    )
    found = read_header(result.main).keys
    assert {name: value for name, value in found.items() if name.startswith("quantize.")} == {
        "quantize.imatrix.file": "imatrix.dat",
        "quantize.imatrix.dataset": "text.txt",
        "quantize.imatrix.entries_count": len(read_imatrix(tmp_path / "imatrix.dat").entries),
        "quantize.imatrix.chunks_count": 5,
    }
    assert not any(name.startswith("quantize.") for name in read_header(result.sidecar).keys)


def write_entries(path: Path, entries: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in entries.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ONES, ONE = np.ones((1, 64), np.float32), np.ones((1, 1), np.float32)
UP = "blk.0.ffn_up_shexp.weight"


def test_matrices_without_an_entry_are_named_and_written_without(
    tiny: tuple[Path, Path], tmp_path: Path
) -> None:
    imatrix = write_entries(tmp_path / "imatrix.gguf", {f"{UP}.in_sum2": ONES, f"{UP}.counts": ONE})
    result = convert(tiny[0], tmp_path, "Q4_0", imatrix=imatrix)
    (warning,) = result.warnings
    assert "has no entry for" in warning and "quantised without: blk.0.attn_gate.weight, " in warning
    plain = convert(tiny[0], tmp_path / "plain", "Q4_0").main
    assert types_of(result.main) == types_of(plain)  # with 4 layers no rule asks for an importance matrix


@pytest.mark.parametrize(
    "entries, message",
    [
        ({f"{UP}.in_sum2": ONES[:, :32], f"{UP}.counts": ONE}, "has 32 values for .*, which has 64 columns: it is another model's"),
        ({"blk.90.ffn_up.weight.in_sum2": ONES, "blk.90.ffn_up.weight.counts": ONE}, "none for a matrix of this model"),
        ({f"{UP}.in_sum2": ONES}, "lacks .*counts; expected an importance matrix as llama-imatrix writes it"),
        ({f"{UP}.in_sum2": ONES.astype(np.float16), f"{UP}.counts": ONE}, "has as F16 .*in_sum2; expected"),
        ({f"{UP}.in_sum2": ONES, f"{UP}.counts": np.ones((7, 1), np.float32)}, "has 64 sums and 7 counts"),
        ({f"{UP}.in_sum2": ONES * np.inf, f"{UP}.counts": ONE}, "not finite for blk.0.ffn_up_shexp.weight"),
        ({"output.weight": ONES}, "is a GGUF file without an entry; expected an importance matrix"),
    ],
    ids=["size", "names", "counts", "type", "experts", "values", "model"],
)  # fmt: skip
def test_an_importance_matrix_that_cannot_be_used_is_refused(
    tiny: tuple[Path, Path], tmp_path: Path, entries: dict[str, np.ndarray], message: str
) -> None:
    imatrix = write_entries(tmp_path / "imatrix.gguf", entries)
    with pytest.raises(BadImatrix, match=message):
        convert(tiny[0], tmp_path / "out", "Q4_K_M", imatrix=imatrix)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{}", b"\xff" * 64, b"GGUF", (10**9).to_bytes(4, "little") * 9,
        b"\1\0\0\0" b"\4\0\0\0name" b"\1\0\0\0" b"\xff\xff\xff\x7f",
        b"\1\0\0\0" b"\4\0\0\0name" b"\1\0\0\0" b"\2\0\0\0" b"1234",
        b"\2\0\0\0" b"\4\0\0\0name" b"\1\0\0\0" b"\1\0\0\0" b"1234",
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "imatrix.dat").write_bytes(data)
    with pytest.raises(BadImatrix, match=r"imatrix\.dat"):
        read_imatrix(tmp_path / "imatrix.dat")
    for missing in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(BadImatrix, match="is no file; expected"):
            read_imatrix(missing)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", None])
def test_an_importance_matrix_without_effect_is_refused(
    tiny: tuple[Path, Path], tmp_path: Path, kind: str | None
) -> None:
    imatrix = write_imatrix(tmp_path / "imatrix.gguf", tiny[1])
    with pytest.raises(
        BadImatrix, match="so that an importance matrix has no effect: leave it out, or ask for"
    ):
        convert(tiny[0], tmp_path / "out", kind, imatrix=imatrix)
