"""Loads broken models until one ends the process: valid tiny files of every family, changed by a few edits each.

Every case runs as a user's would (`load`, then some tokens of text) in a process of its own, with bounded memory and time. A
case may be refused by our own error or may run; a signal, a hang, or any other exception is a fault, and is kept as JSON (the
seed's name and the edits). Which keys and tensors llama.cpp knows is read from its library's strings. Knows no rule that files
must keep: those are in sidecars/.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
os.environ["GGML_NO_BACKTRACE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import click
import gguf_edit
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as V
from gguf_edit import Edit, File

from llama_sidecar.sidecars.gguf_header import BLOCK_SIZES

ROOT = Path(__file__).resolve().parents[3]
MEMORY_BYTES = 6 << 30
CASE_SECONDS = 20  # of computing; a busy machine may take six times as long
PROMPT = "Hello, wörld!\n\n  1234 \u4f60\u597d <|im_end|> \x00\t'll"


@dataclass
class Seed:
    """A sound model; what is edited is the main file, or the sidecar."""

    name: str
    main: Path
    sidecar: Path | None
    edited: File


# Sound files


def seeds(folder: Path, known: Collection[str] = ()) -> Iterator[Seed]:
    """A model of each family, with its sidecar where it has one, and those that runtime's tests are made of."""
    import drafts
    import models
    from checkpoints import VARIANTS, has_head, make_checkpoint

    from llama_sidecar.converter import convert

    def both(name: str, main: Path, sidecar: Path | None) -> Iterator[Seed]:
        yield Seed(name, main, None, gguf_edit.read(main))
        if sidecar:
            yield Seed(f"{name} sidecar", main, sidecar, gguf_edit.read(sidecar))

    wanted: dict[str, Callable[[], tuple[Path, Path | None]]] = {}
    for letter, recurrent in (("R", True), ("T", False)):
        wanted[letter] = lambda r=recurrent, n=letter: _pair(models.write_pair(folder / n, recurrent=r))
    for arch in ("llama", "qwen3"):
        wanted[arch] = lambda a=arch: (drafts.write_target(folder / a, a), None)
    wanted["eagle3"] = lambda: _drafter(folder / "e", drafts.write_eagle3, layers=(1, 2, 3))
    wanted["dflash"] = lambda: _drafter(folder / "df", drafts.write_dflash)
    wanted["dflash2"] = lambda: _drafter(folder / "d2", drafts.write_dflash, selector=True)
    wanted["dspark"] = lambda: _drafter(folder / "ds", drafts.write_dflash, markov=True)
    for arch, variant in VARIANTS:
        wanted[f"{arch}-{variant}"] = lambda a=arch, v=variant: _converted(
            convert(
                make_checkpoint(folder, a, v), folder / f"{a}-{v}", "Q8_0", "Q8_0" if has_head(a, v) else None
            )
        )
    for name, make in wanted.items():
        if name not in known:
            shutil.rmtree(folder / f"tiny-{name}", ignore_errors=True)  # of a run that was cut short
            yield from both(name, *make())


def _pair(pair: Any) -> tuple[Path, Path | None]:
    return pair.main, pair.sidecar


def _drafter(folder: Path, write: Callable[..., Path], **options: Any) -> tuple[Path, Path | None]:
    import drafts

    main = drafts.write_target(folder, "qwen3")
    return main, write(folder, **options)


def _converted(result: Any) -> tuple[Path, Path | None]:
    return result.main, result.sidecar


# Edits


def vocabulary() -> tuple[list[str], list[str]]:
    """Names of keys (with {arch}) and of tensors (with {i}) in llama.cpp's library."""
    import llama_cpp

    library = next((Path(llama_cpp.__file__).parent / "lib").glob("libllama.*"))
    texts = {text.decode() for text in re.findall(rb"[\x20-\x7e]{4,80}", library.read_bytes())}
    arch_keys = sorted("{arch}" + t[2:] for t in texts if re.fullmatch(r"%s\.[a-z0-9_.]+", t))
    others = sorted(t for t in texts if re.fullmatch(r"(tokenizer|general)\.[a-z0-9_.]+", t))
    tensors = sorted(t.replace("%d", "{i}") for t in texts if re.fullmatch(r"blk\.%d\.[a-z0-9_.]+", t))
    return arch_keys + others, [
        *tensors,
        "output",
        "output_norm",
        "rope_freqs",
        "token_embd_norm",
        "token_types",
    ]


INTS = [
    0,
    1,
    2,
    3,
    5,
    7,
    31,
    63,
    64,
    65,
    127,
    255,
    256,
    257,
    511,
    512,
    513,
    1000,
    65535,
    10**6,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 1e20, -1e-3]
STRINGS = ["", "x", "none", "linear", "yarn", "longrope", "gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "no_vocab", "test",
           "default", "qwen2", "llama-bpe", "chatglm-bpe", "\ufffd" * 9, "a" * 5000, "{% for i in range(9) %}{{i}}{% endfor %}", "\x00"]  # fmt: skip
SCALARS = [
    "UINT32",
    "INT32",
    "FLOAT32",
    "BOOL",
    "STRING",
    "UINT64",
    "INT64",
    "UINT16",
    "UINT8",
    "FLOAT64",
    "INT8",
]
WORDS = [0, 0x7FC00000, 0x7F800000, 0xFF800000, 0xFFFFFFFF, 0x7F7FFFFF, 1, 0x80000001]


class Editor:
    """Random edits of one seed."""

    def __init__(self, seed: Seed, names: tuple[list[str], list[str]], rng: random.Random) -> None:
        self.file, self.rng = seed.edited, rng
        self.arch = str(self.file.keys["general.architecture"].value)
        self.known_keys = [name.replace("{arch}", self.arch) for name in names[0]]
        self.known_tensors = names[1]

    def edits(self) -> list[Edit]:
        kinds = [
            self.change,
            self.change,
            self.add_key,
            self.tensor,
            self.retype,
            self.drop,
            self.add_tensor,
            self.item,
        ]
        return [self.rng.choice(kinds)() for _ in range(self.rng.choice([1, 1, 1, 1, 2, 2, 3]))]

    def key(self) -> str:
        return self.rng.choice(list(self.file.keys))

    def value(self, type: str) -> Any:
        if type in ("FLOAT32", "FLOAT64"):
            return self.rng.choice(FLOATS)
        if type == "STRING":
            return self.rng.choice(STRINGS)
        if type == "BOOL":
            return self.rng.choice([False, True])
        bits, signed = int(re.sub(r"\D", "", type)), type.startswith("I")
        value = self.rng.choice(INTS)
        if signed and self.rng.random() < 0.5:
            value = -value
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        return max(low, min(high, value))

    def change(self) -> Edit:
        name = self.key()
        key = self.file.keys[name]
        if key.type[0] == V.ARRAY:
            if self.rng.random() < 0.5 and key.value:
                n = self.rng.choice([0, 1, len(key.value) - 1, len(key.value) // 2])
                return ["value", name, key.value[:n]]
            return ["value", name, [*key.value, *key.value[:1]] * self.rng.choice([1, 2])]
        type = key.type[0].name
        value = self.value(type)
        if isinstance(key.value, int) and not isinstance(key.value, bool) and self.rng.random() < 0.4:
            value = max(
                0,
                self.rng.choice([key.value - 1, key.value + 1, key.value * 2, key.value // 2, key.value * 3]),
            )
        return ["set", name, type, value]

    def item(self) -> Edit:
        arrays = [name for name, key in self.file.keys.items() if key.type[0] == V.ARRAY and key.value]
        if not arrays:
            return self.change()
        name = self.rng.choice(arrays)
        key = self.file.keys[name]
        i = self.rng.randrange(len(key.value))
        value = self.value(key.type[1].name)
        if key.type[1] == V.STRING and self.rng.random() < 0.5:
            value = self.rng.choice(
                [
                    "a b c",
                    "a",
                    " ",
                    "  ",
                    "\u0120 ",
                    "<0x0A>",
                    "[EMPTY_3]",
                    "<|im_end|>",
                    "\u0120",
                    "a\u0120 b",
                ]
            )
        return ["item", name, i, value]

    def add_key(self) -> Edit:
        name = self.rng.choice(self.known_keys)
        type = self.rng.choice(
            [
                "UINT32",
                "UINT32",
                "UINT32",
                "FLOAT32",
                "BOOL",
                "STRING",
                "ARRAY UINT32",
                "ARRAY INT32",
                "ARRAY BOOL",
                "ARRAY FLOAT32",
                "ARRAY STRING",
            ]
        )
        if not type.startswith("ARRAY"):
            return ["set", name, type, self.value(type)]
        item = type.split()[1]
        return [
            "set",
            name,
            type,
            [self.value(item) for _ in range(self.rng.choice([0, 1, 2, 3, 4, 5, 6, 257]))],
        ]

    def retype(self) -> Edit:
        name = self.key()
        type = self.rng.choice(SCALARS)
        if self.rng.random() < 0.5:
            return ["set", name, type, self.value(type)]
        return [
            "set",
            name,
            f"ARRAY {type}",
            [self.value(type) for _ in range(self.rng.choice([0, 1, 4, 5, 300]))],
        ]

    def drop(self) -> Edit:
        return (
            ["drop", self.key()]
            if self.rng.random() < 0.5
            else ["remove", self.rng.choice(list(self.file.tensors))]
        )

    def tensor(self) -> Edit:
        name = self.rng.choice(list(self.file.tensors))
        tensor = self.file.tensors[name]
        what = self.rng.randrange(4)
        if what == 0:
            return ["fill", name, self.rng.choice(WORDS)]
        if what == 1:
            kinds = [kind for kind, (per, _) in BLOCK_SIZES.items() if tensor.shape[0] % per == 0]
            return ["shape", name, tensor.shape, int(self.rng.choice(kinds))]
        if what == 2:
            return [
                "rename",
                name,
                self.rng.choice(self.known_tensors).replace("{i}", str(self.rng.randrange(6))) + ".weight",
            ]
        shape = list(tensor.shape)
        i = self.rng.randrange(len(shape))
        shape[i] = max(1, self.rng.choice([shape[i] - 1, shape[i] + 1, 2 * shape[i], shape[i] // 2, 1]))
        how = self.rng.randrange(4)
        if how == 0:
            shape = shape[::-1]
        elif how == 1 and len(shape) < 4:
            shape.append(self.rng.choice([1, 2]))
        return ["shape", name, shape, int(Type.F32)]

    def add_tensor(self) -> Edit:
        old = self.rng.choice(list(self.file.tensors))
        suffix = self.rng.choice([".weight", ".weight", ".bias", ".scale", ""])
        new = self.rng.choice(self.known_tensors).replace("{i}", str(self.rng.randrange(6))) + suffix
        return ["copy", old, new]


# Cases


@dataclass
class Outcome:
    """`fault` is None where the file was refused or ran."""

    text: str
    fault: str | None
    ours: bool = False


def run(main: Path, sidecar: Path | None, stderr: Path) -> Outcome:
    """Uses a model in a child process. The parent has loaded llama.cpp and never computes with it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (CASE_SECONDS, CASE_SECONDS))
        signal.alarm(6 * CASE_SECONDS)
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.write(write, _use(main, sidecar).encode("utf-8", "replace")[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode("utf-8", "replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        found = re.search(r"[\w.-]+:\d+: .*", stderr.read_text(errors="replace"))
        return Outcome(said, f"{name} {found[0] if found else ''}".strip())
    if said.startswith("raised"):
        return Outcome(said, said.split("\n")[0])
    return Outcome(said, None, ours=said.startswith("refused") and "llama.cpp" not in said)


def _use(main: Path, sidecar: Path | None) -> str:
    from llama_sidecar.runtime import load
    from llama_sidecar.sidecars import LlamaSidecarError

    try:
        spec = "auto" if sidecar else "none"
        options: dict[str, Any] = {"ctx": 64, "batch": 16, "threads": 1, "kernels": "stock", "gpu_layers": 0}
        with load(
            main, sidecar, spec_type=spec, depth=2, draft_vocab="full", learn=False, **options
        ) as model:
            for token in range(model.vocab.n_tokens):
                model.vocab.piece(token)
            model.generate(PROMPT, max_tokens=8, temperature=0, ignore_eos=True).read()
            return "ran"
    except LlamaSidecarError as error:
        return f"refused {type(error).__name__}: {error}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})\n{traceback.format_exc()}"


def signature(fault: str, edits: list[Edit]) -> str:
    """What makes two faults one."""
    where = fault if ":" in fault else f"{fault} {' '.join(sorted(str(edit[1]) for edit in edits))}"
    return re.sub(r"0x[0-9a-f]+|\d{5,}", "N", where)


def smaller(
    seed: Seed, edits: list[Edit], fault: str, try_: Callable[[Seed, list[Edit]], Outcome]
) -> list[Edit]:
    """The edits that the fault needs."""
    for edit in list(edits):
        rest = [other for other in edits if other is not edit]
        found = try_(seed, rest).fault if rest else None
        if found and found.split(" ")[0] == fault.split(" ")[0]:
            edits = rest
    return edits


class Tally:
    """What became of the cases, and one of each kind of fault."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "models.json"
        self.counts, self.faults = Counter[str](), dict[str, Any]()

    def __str__(self) -> str:
        parts = [f"{n:,} {what}" for what, n in self.counts.most_common()]
        return f"{sum(self.counts.values()):,} models: {', '.join(parts)}; {len(self.faults)} kinds of fault"

    def is_new(self, outcome: Outcome, edits: list[Edit]) -> bool:
        ended = (
            "refused by us" if outcome.ours else "ran" if outcome.text == "ran" else "refused by llama.cpp"
        )
        self.counts["ended the process" if outcome.fault else ended] += 1
        return outcome.fault is not None and signature(outcome.fault, edits) not in self.faults

    def keep(self, seed: Seed, edits: list[Edit], outcome: Outcome) -> None:
        fault = {"seed": seed.name, "edits": edits, "fault": str(outcome.fault)[:300]}
        self.faults[signature(str(outcome.fault), edits)] = fault
        print(json.dumps(fault)[:600], flush=True)
        self.file.write_text("\n".join(map(json.dumps, self.faults.values())) + "\n")


@click.command()
@click.option("--seconds", type=float, default=60, show_default=True)
@click.option("--only", default="", help="A pattern that the names of seeds must contain.")
@click.option("--seed", "number", type=int, default=0, show_default=True, help="Of the random numbers.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=ROOT / ".build" / "fuzz",
    show_default=True,
    help="Where faults are kept, and the sound models.",
)
@click.option(
    "--again",
    type=click.Path(exists=True, path_type=Path),
    help="Run the kept cases in this file, and nothing else.",
)
def command(seconds: float, only: str, number: int, keep: Path, again: Path | None) -> None:
    """Edit models and load them; exits with 1 where a fault was found."""
    from llama_sidecar.runtime import load  # noqa: F401  (imported here, not in every child)
    from llama_sidecar.runtime.library import llama

    llama()
    keep.mkdir(parents=True, exist_ok=True)
    rng, names = random.Random(number), vocabulary()
    found = _kept_seeds(keep / "seeds", only)
    with tempfile.TemporaryDirectory() as name:
        case, stderr = Path(name) / "case.gguf", Path(name) / "stderr"
        os.environ["LLAMA_SIDECAR_CACHE"] = str(Path(name) / "cache")

        def attempt(seed: Seed, edits: list[Edit]) -> Outcome:
            edited = gguf_edit.read(seed.sidecar or seed.main)
            try:
                edited.apply(*edits).write(case)
            except (KeyError, IndexError, TypeError, struct.error):
                # An earlier edit took away what this one changes, or its type.
                return Outcome("", None)
            return run(seed.main, case, stderr) if seed.sidecar else run(case, None, stderr)

        if again:
            _again(again, {seed.name: seed for seed in found}, attempt)
        tally = Tally(keep)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # with the tally so far
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                seed = rng.choice(found)
                edits = Editor(seed, names, rng).edits()
                outcome = attempt(seed, edits)
                if tally.is_new(outcome, edits):
                    tally.keep(seed, smaller(seed, edits, outcome.fault or "", attempt), outcome)
        finally:
            print(tally, flush=True)
    sys.exit(1 if tally.faults else 0)


def _again(path: Path, found: dict[str, Seed], attempt: Callable[[Seed, list[Edit]], Outcome]) -> None:
    cases = [json.loads(line) for line in path.read_text().splitlines()]
    n_faults = 0
    for kept in cases:
        if kept["seed"] in found:
            outcome = attempt(found[kept["seed"]], kept["edits"])
            n_faults += outcome.fault is not None
            print(
                kept["seed"],
                json.dumps(kept["edits"])[:200],
                "->",
                (outcome.fault or outcome.text)[:250],
                flush=True,
            )
    print(f"{len(cases)} cases, {n_faults} faults")
    sys.exit(1 if n_faults else 0)


def _kept_seeds(folder: Path, only: str) -> list[Seed]:
    """The sound models, of which those that are not there yet are written by a process of its own: one that has computed cannot fork
    safely."""
    names = folder / "seeds.json"
    made: list[list[str]] = json.loads(names.read_text()) if names.exists() else []
    child = os.fork()
    if child == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for seed in seeds(folder, {name for name, *_ in made}):
                made.append([seed.name, str(seed.main), str(seed.sidecar or "")])
                names.write_text(json.dumps(made))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        sys.exit("error: the sound models could not be written")
    return [
        Seed(name, Path(main), Path(sidecar) if sidecar else None, gguf_edit.read(Path(sidecar or main)))
        for name, main, sidecar in json.loads(names.read_text())
        if re.search(only, name)
    ]


if __name__ == "__main__":
    command()
