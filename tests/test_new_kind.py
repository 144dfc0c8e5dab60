"""The architecture's promise: a kind of sidecar is one Python and one C++ file, and everything else finds it by itself.

A copy of the source tree gets both, is built, and drafts with it. Needs what building needs, and about a minute on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import drafts
import pytest

ROOT = Path(__file__).resolve().parents[1]

KIND = '''"""A toy: a Qwen 3 model with a key of its own, that drafts one token over and over."""

from llama_sidecar.sidecars import keys
from llama_sidecar.sidecars.kind import Kind, Target, check_tensors


def is_sidecar(header):
    return "qwen3.toy" in header.keys


def check(header):
    check_tensors(header, {keys.OUTPUT_NORM: (header.uint(keys.EMBEDDING_LENGTH),)})


def target(header):
    return Target(width=header.uint(keys.EMBEDDING_LENGTH))


KIND = Kind(
    name="toy",
    title="Toy",
    rank=9,
    prefix="toy-",
    llama_name="draft-toy",
    is_sidecar=is_sidecar,
    check=check,
    target=target,
    max_depth=lambda header: 2,
)
'''

DRAFTER = r"""// A toy: always the same token.
#include <stdexcept>

#include "../drafter.h"

namespace sidecar {

namespace {

class Toy final : public Drafter {
  public:
    explicit Toy(const DrafterOptions & options) {
        if (options.ctx == nullptr) throw std::invalid_argument("the toy drafter needs a draft context");
    }
    void begin() override {}
    void observe(int32_t, const llama_token *, const float *, int32_t) override {}
    void propose(llama_token, int32_t n, Picker & picker, std::vector<llama_token> & out) override {
        for (int32_t i = 0; i < n; ++i) {
            out.push_back(7);
            picker.take(7);
        }
    }
    void go_back(int32_t, const std::vector<uint8_t> &) override {}
    std::vector<int32_t> layers() const override { return {}; }
    int32_t max_depth() const override { return 2; }
};

const Registered registered("toy", [](const DrafterOptions & options) -> std::unique_ptr<Drafter> {
    return std::make_unique<Toy>(options);
});

}  // namespace

}  // namespace sidecar
"""

COPY = """# The copy, and not what is installed, be that a wheel or the source tree itself.
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__name__.startswith("ScikitBuild")]
sys.path.insert(0, {folder!r})
import llama_sidecar.sidecars
assert llama_sidecar.sidecars.__file__.startswith({folder!r})
"""
USE = """
from click.testing import CliRunner
from llama_sidecar.runtime import load
from llama_sidecar.scripts.__main__ import cli
from llama_sidecar.sidecars import discover

main = sys.argv[1]
found = discover(main)
assert (found.kind, found.path.name) == ("toy", "toy-main.gguf"), found
with load(main, ctx=128, threads=1, depth=3) as model:
    assert (model.kind, model.depth) == ("toy", 2)
    texts = []
    for spec_type in ("auto", "none"):
        with model.session(spec_type=spec_type) as session:
            text = session.generate(list(b"hello"), max_tokens=24, temperature=0, ignore_eos=True)
            text.read()
            texts.append(text)
    assert texts[0].tokens == texts[1].tokens
    assert texts[0].stats.n_drafted > 0 and texts[0].stats.kind == "toy"
output = CliRunner().invoke(cli, ["run", "--help"]).output
assert "toy" in output and "draft-toy" in output, output
output = CliRunner().invoke(cli, ["inspect", main]).output
assert "toy-main.gguf" in output and "Toy" in CliRunner().invoke(cli, ["inspect", str(found.path)]).output
print("drafted with it")
"""


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_kind_is_one_python_and_one_cpp_file(tmp_path: Path) -> None:
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            pytest.skip(f"building needs {tool}")
    pytest.importorskip("nanobind")
    package = tmp_path / "llama_sidecar"
    for room in ("converter", "sidecars", "runtime", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "demo", "_native*")
        shutil.copytree(ROOT / room, package / room, ignore=ignored)
    (package / "sidecars" / "kinds" / "toy.py").write_text(KIND)
    (package / "runtime" / "native" / "drafters" / "toy.cpp").write_text(DRAFTER)

    build = tmp_path / "build"
    options = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", f"-DPython_EXECUTABLE={sys.executable}"]
    run("cmake", "-S", package / "runtime" / "native", "-B", build, *options, "-DCMAKE_CXX_FLAGS=-O0 -g0")
    run("cmake", "--build", build, "--target", "_native")
    for module in build.glob("_native*"):
        if module.suffix in (".so", ".dylib"):
            shutil.copy(module, package / "runtime")

    main = drafts.write_target(tmp_path / "models", "qwen3")
    random = drafts.Random(1)
    tensors = {
        "token_embd.weight": random.matrix(drafts.N_VOCAB, drafts.N_EMBD),
        "output_norm.weight": random.norm(),
    }
    tensors |= random.block("blk.0.", with_norms=True)
    keys = drafts.block_keys(1) | {"toy": True}
    drafts.write(tmp_path / "models" / "toy-main.gguf", "qwen3", keys, tensors, drafts.T.F32)
    use = tmp_path / "use.py"
    use.write_text(COPY.format(folder=str(tmp_path)) + USE)
    assert "drafted with it" in run(sys.executable, use, main)
