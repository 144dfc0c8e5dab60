#!/usr/bin/env bash
# Packs what gpu_run.sh needs on a machine with a GPU and no network: into .gpu/, which git ignores.
#
#   scripts/dev/gpu_pack.sh [LLAMA_CPP_PYTHON_SDIST]
#
# In the pack: llama.cpp's sources as far as libllama with CPU, CUDA or Vulkan needs them, llama_cpp's Python part, this project's
# sources without the demo checkpoint, wheels of what both need to build and run, the demo model, and gpu_run.sh. It needs `make demo`
# once before (.venv, with pip and the converter) and a package index, or the sdist of the pinned release as its argument.
#
# Settings:
#   PYTHON_VERSION=3.12      the Python over there (default: this one's)
#   ARCH=x86_64|aarch64      its processor (default: this one's)
#   SKIP="numpy ..."         packages that are installed there and need not travel
#   PYTHON=.venv/bin/python  the one that packs
set -euo pipefail
cd "$(dirname "$0")/../.."

PYTHON=${PYTHON:-.venv/bin/python}
command -v "$PYTHON" > /dev/null || { echo "error: $PYTHON is not there: make demo first, or PYTHON=... names one" >&2; exit 1; }
PYTHON_VERSION=${PYTHON_VERSION:-$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}
ARCH=${ARCH:-$(uname -m)}
OUT=.gpu
LIBRARY=$(sed -n 's/^ *"\(llama-cpp-python==[0-9.]*\)",$/\1/p' pyproject.toml)
# To build, beside compilers and CMake, which a machine with a GPU's toolkit has: nanobind, scikit-build-core and what it needs. To run: what runtime/, sidecars/ and scripts/ import, and llama_cpp.
BUILD="ninja nanobind scikit-build-core packaging pathspec"
RUN="numpy gguf pyyaml tqdm click rich markdown-it-py mdurl pygments jinja2 markupsafe diskcache typing-extensions"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$OUT" && mkdir -p "$OUT/wheels"

if [ $# -gt 0 ]; then
    sdist=$1
else
    echo "fetching the sources of $LIBRARY"
    "$PYTHON" -m pip download -q --no-deps --no-build-isolation --no-binary llama-cpp-python -d "$work" "$LIBRARY"
    sdist=$(echo "$work"/llama_cpp_python-*.tar.gz)
fi
[ "$(basename "$sdist")" = "llama_cpp_python-${LIBRARY#*==}.tar.gz" ] || {
    echo "error: $sdist is not the sdist of $LIBRARY, which pyproject.toml pins" >&2; exit 1; }
tar -xzf "$sdist" -C "$work" --strip-components 1 --wildcards --exclude='*/vendor/llama.cpp/ggml/src/ggml-*/*/kleidiai' \
    '*/LICENSE.md' '*/llama_cpp/*.py' \
    '*/vendor/llama.cpp/'{LICENSE,CMakeLists.txt} '*/vendor/llama.cpp/'{cmake,include,src}/'*' \
    '*/vendor/llama.cpp/ggml/'{CMakeLists.txt,cmake/'*',include/'*'} '*/vendor/llama.cpp/ggml/src/'{CMakeLists.txt,'*.in','*.c','*.cpp','*.h'} \
    '*/vendor/llama.cpp/ggml/src/ggml-'{cpu,cuda,vulkan}/'*'
mv "$work/vendor/llama.cpp" "$work/llama.cpp"
(cd "$work/llama.cpp/ggml/src" && find . -mindepth 2 -path './ggml-*' ! -path './ggml-cpu/*' ! -path './ggml-cuda/*' ! -path './ggml-vulkan/*' -delete)
rm -rf "$work/llama.cpp/vendor" && mkdir "$work/llama.cpp/vendor" && : > "$work/llama.cpp/vendor/CMakeLists.txt"  # its parts serve the tools, which are not built
tar -cJf "$OUT/library.tar.xz" -C "$work" LICENSE.md llama_cpp llama.cpp

git ls-files -z converter runtime scripts sidecars pyproject.toml constraints.txt README.md LICENSE NOTICE |
    grep -zv '^sidecars/demo/' | tar -cJf "$OUT/project.tar.xz" --null -T -

echo "fetching wheels for Python $PYTHON_VERSION on $ARCH"
wanted=
for name in $BUILD $RUN; do
    locked=$(grep -io "^$name==[^ ;]*" requirements/dev.lock || true)
    [ "$(echo "$locked" | wc -w)" = 1 ] || locked=$name  # several: by Python, which pip knows
    case " ${SKIP:-} " in *" $name "*) ;; *) wanted="$wanted $locked" ;; esac
done
platforms=
for n in 2_17 2_24 2_26 2_27 2_28 2_31 2_34 2_35; do platforms="$platforms --platform manylinux_${n}_$ARCH"; done
# shellcheck disable=SC2086
"$PYTHON" -m pip download -q --no-deps --only-binary :all: --implementation cp --python-version "$PYTHON_VERSION" \
    --platform "manylinux2014_$ARCH" $platforms -d "$OUT/wheels" $wanted

echo "converting the demo model"
"$PYTHON" -m llama_sidecar.scripts convert sidecars/demo --out "$work/demo" --main-type Q4_0 > "$work/convert.log" 2>&1 ||
    { cat "$work/convert.log" >&2; exit 1; }
cp "$work"/demo/*.gguf "$OUT/"

cp scripts/dev/gpu_run.sh "$OUT/"
printf '%s\n' "python $PYTHON_VERSION" "arch $ARCH" "library $LIBRARY" "skipped ${SKIP:-}" \
    "commit $(git rev-parse --short HEAD 2> /dev/null || echo unknown)" > "$OUT/manifest"
du -ah "$OUT" | sort -h | tail -8
bytes=$(du -sb "$OUT" | cut -f1)
[ "$bytes" -lt $((60 << 20)) ] || { echo "error: the pack has $((bytes >> 20)) MiB, more than 60: SKIP what is there already" >&2; exit 1; }
echo "packed: $((bytes >> 20)) MiB in $OUT; over there: bash $OUT/gpu_run.sh"
