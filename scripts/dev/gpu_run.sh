#!/usr/bin/env bash
# Builds what gpu_pack.sh has packed for the GPU that is here, without network, and checks it within a time limit.
#
#   bash .gpu/gpu_run.sh [--limit SECONDS] [--out FOLDER] [--work FOLDER] [MODEL.gguf ...]
#
# Checks the models given (their sidecars lie beside them), else the demo, then random weights in the shapes of Qwen3.5-0.8B and 9B at Q4_K_M
# and BF16. Each check gets its share of the time that is left and writes check-NAME.json and check-NAME.txt into FOLDER (default:
# gpu-results) as it goes: a run that is stopped leaves what it has. Exit code 0 only if every check was whole and lossless.
#
# Settings:
#   BACKEND=cuda|vulkan|cpu  (default: cuda)
#   PYTHON=python3, CMAKE_ARGS, CC, CXX, CUDACXX; CHECKS="demo 0.8B:Q4_K_M ..." in place of those above
set -euo pipefail
pack=$(cd "$(dirname "$0")" && pwd)
limit=3000 out=gpu-results work= models=()
while [ $# -gt 0 ]; do
    case $1 in
        --limit) limit=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --work) work=$2; shift 2 ;;
        -*) echo "error: unknown option $1 (there are --limit, --out, --work)" >&2; exit 2 ;;
        *) models+=("$(realpath "$1")"); shift ;;
    esac
done
mkdir -p "$out" && out=$(cd "$out" && pwd)
ours=
[ -n "$work" ] || { work=$(mktemp -d) && ours=$work; }
mkdir -p "$work" && work=$(cd "$work" && pwd)
jobs_started=()
finish() {
    local job
    for job in "${jobs_started[@]}"; do kill -- "-$job" 2> /dev/null || true; done  # each with all that it has started
    [ -z "$ours" ] || rm -rf "$ours"
}
trap finish EXIT
trap 'exit 130' INT TERM
PYTHON=${PYTHON:-python3}
BACKEND=${BACKEND:-cuda}
left() { echo $((limit - SECONDS)); }
step() { echo "[$SECONDS s] $*" | tee -a "$out/run.log"; }
fail() { echo "error: $*" | tee -a "$out/run.log" >&2; exit 1; }

: > "$out/run.log"
[ -f "$pack/manifest" ] || fail "no pack lies in $pack: scripts/dev/gpu_pack.sh makes one, .gpu, with a gpu_run.sh in it"
packed() { sed -n "s/^$1 //p" "$pack/manifest"; }
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || fail "no $PYTHON: PYTHON=... names one"
[ "$version" = "$(packed python)" ] ||
    fail "$PYTHON is Python $version, the pack is for $(packed python): pack with PYTHON_VERSION=$version, or PYTHON=... names another"
[ "$(uname -m)" = "$(packed arch)" ] || fail "this machine is $(uname -m), the pack is for $(packed arch): pack with ARCH=$(uname -m)"
"$PYTHON" -m pip --version > /dev/null 2>&1 || fail "$PYTHON has no pip: install it (Debian: python3-pip), or PYTHON=... names another"
n_mib=1000
case $BACKEND in
    cuda) backend_args="-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-native}" n_mib=4000 ;;
    vulkan) backend_args="-DGGML_VULKAN=ON" ;;
    cpu) backend_args= ;;
    *) fail "BACKEND=$BACKEND is none of cuda, vulkan, cpu" ;;
esac
n_free=$(df -Pm "$work" | awk 'NR == 2 { print $4 }')
[ "$n_free" -ge "$n_mib" ] || fail "$work has $n_free MiB free and building takes $n_mib: --work names another folder"
step "Python $version, backend $BACKEND, $(nproc) processors, limit $limit s"

# One folder on PYTHONPATH in place of a virtual environment: many machines have no ensurepip. What is in the pack comes first.
site=$work/site
export PYTHONPATH=$site PATH=$site/bin:$PATH PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export XDG_CACHE_HOME=$work/cache
mkdir -p "$site" "$work/library" "$work/project"
tar -xJf "$pack/library.tar.xz" -C "$work/library"
tar -xJf "$pack/project.tar.xz" -C "$work/project"
compilers=$("$PYTHON" "$work/project/scripts/dev/machine_check.py" "$BACKEND" 2> "$work/machine.log") || {
    hint=
    [ "$BACKEND" != cuda ] || hint="; BACKEND=cpu checks the processor alone, BACKEND=vulkan other GPUs"
    fail "$(sed 's/^error: //' "$work/machine.log" | tail -1)$hint"
}
[ ! -s "$work/machine.log" ] || step "$(tail -1 "$work/machine.log")"
while IFS= read -r line; do export "${line?}"; done <<< "$compilers"
pip() { "$PYTHON" -m pip --disable-pip-version-check --no-input "$@"; }
pip install -q --no-index --no-deps --no-compile --target "$site" "$pack"/wheels/*.whl > "$work/wheels.log" 2>&1 || fail "$(tail -1 "$work/wheels.log")"
cp -r "$work/library/llama_cpp" "$site/" && mkdir -p "$site/llama_cpp/lib"
command -v ninja > /dev/null || fail "no ninja here and none in the pack"

step "compiling llama.cpp ($BACKEND) and llama-sidecar"
no_amx=; [ "$(uname -m)" = x86_64 ] && no_amx=-U__AMX_INT8__  # scripts/dev/setup_venv.py says why
build_library() {
    # shellcheck disable=SC2086
    cmake -G Ninja -S "$work/library/llama.cpp" -B "$work/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
        -DCMAKE_C_FLAGS="${CFLAGS:-} $no_amx" -DCMAKE_CXX_FLAGS="${CXXFLAGS:-} $no_amx" \
        -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF \
        $backend_args ${CMAKE_ARGS:-} && cmake --build "$work/build" --target llama ggml
}
build_project() {
    pip wheel -q --no-index --no-deps --no-build-isolation -w "$work/dist" "$work/project" &&
        pip install -q --no-index --no-deps --no-compile --target "$site" "$work"/dist/*.whl
}
built() {  # PID NAME LOG
    wait "$1" && return
    [ "$(left)" -gt 0 ] || fail "not built within $limit s: give it more, --limit"
    fail "$2 does not build: $(grep -m1 -iE 'error|fatal' "$out/$3" || tail -1 "$out/$3")"
}
set -m  # a process group each
build_project > "$out/build-project.log" 2>&1 & project=$!
build_library > "$out/build-library.log" 2>&1 & library=$!
watch() {  # says how far it is, and stops it when the time is up
    while [ "$(left)" -gt 0 ]; do
        sleep $(($(left) < 30 ? $(left) : 30))
        step "compiling $(grep -oE '^\[[0-9]+/[0-9]+\]' "$out/build-library.log" | tail -1)"
    done
    kill -- "-$library" "-$project" 2> /dev/null
}
watch & watch=$!
set +m
jobs_started=("$project" "$library" "$watch")
wait -n "$project" "$library" || true  # whichever ends first may have failed: no need to wait for the other
kill -0 "$library" 2> /dev/null || built "$library" llama.cpp build-library.log
built "$project" llama-sidecar build-project.log
built "$library" llama.cpp build-library.log
kill -- "-$watch" 2> /dev/null || true
jobs_started=()
find "$work/build" -name 'lib*.so*' -exec cp -P {} "$site/llama_cpp/lib/" \;
devices=$("$PYTHON" -c 'from llama_sidecar.runtime import placement; print(*(f"{gpu.name}: {gpu.free_bytes >> 20} MiB free" for gpu in placement.gpus()), sep=", ")' \
    2> "$work/devices.log") || fail "llama-sidecar does not start: $(tail -1 "$work/devices.log")"
[ -n "$devices" ] || [ "$BACKEND" = cpu ] ||
    fail "llama.cpp was built for $BACKEND and finds no GPU: $(grep -im1 "ggml_$BACKEND" "$work/devices.log" || echo "it does not say why")"
step "built: ${devices:-the processor alone}"

checks=()
if [ ${#models[@]} -gt 0 ]; then
    checks=("${models[@]}")
else
    read -ra checks <<< "${CHECKS:-demo 0.8B:Q4_K_M 0.8B:BF16 9B:Q4_K_M 9B:BF16}"
fi
bad=0 n_left=${#checks[@]}
for check in "${checks[@]}"; do
    share=$(($(left) / n_left))
    n_left=$((n_left - 1))
    if [ "$share" -lt 10 ]; then step "$check: no time left"; bad=1; continue; fi
    case $check in
        demo) what=("$(ls "$pack"/*.gguf | grep -v '/mtp-')") ;;
        *.gguf) what=("$check") ;;
        *:*) what=("$work/models" --shape "${check%%:*}" --type "${check##*:}") ;;
        *) fail "check $check is neither demo, nor SHAPE:TYPE, nor a GGUF file" ;;
    esac
    name=$(basename "$check" .gguf | tr ':' '-')
    step "checking $name ($share s at most)"
    # shellcheck disable=SC2086
    if "$PYTHON" "$work/project/scripts/dev/gpu_check.py" "${what[@]}" --limit "$share" --budget $((share / 3 + 1)) \
        --json-out "$out/check-$name.json" ${CHECK_ARGS:-} 2>&1 | tee "$out/check-$name.txt"; then
        step "$name: whole and lossless"
    else
        step "$name: see $out/check-$name.txt"
        bad=1
    fi
done
step "results in $out: check-*.json is what to send"
exit $bad
