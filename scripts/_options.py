"""Options that several commands share: how a model is loaded, and how its next token is chosen. No command itself.

The names are llama.cpp's, with its short forms, so that its users need not learn others.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from llama_sidecar.runtime import Model, PromptError, cache_folder, load
from llama_sidecar.runtime._native import survive_bus_errors
from llama_sidecar.runtime.costs import remembered
from llama_sidecar.runtime.drafter_choice import OTHERS
from llama_sidecar.runtime.exactness import recall
from llama_sidecar.runtime.heads import counts_for
from llama_sidecar.runtime.kernel_choice import DEFAULT as KERNELS_DEFAULT
from llama_sidecar.runtime.placement import CACHE_TYPES, FLASH_ATTN, idle_gpu_hint
from llama_sidecar.runtime.sampling import ACCEPT, MAX_SEED, WHOLE
from llama_sidecar.runtime.weights import KERNELS, MAX_DEPTH, N_BATCH
from llama_sidecar.sidecars import KINDS, read_model
from llama_sidecar.sidecars.hub import fetch
from llama_sidecar.sidecars.memory import DEFAULT_CHECKPOINTS

from ._show import note

Command = Callable[..., None]
Loader = Callable[[], Model]
SPEC_TYPES = [
    "auto",
    "none",
    *(name for kind in KINDS.values() for name in (kind.name, kind.llama_name)),
    *(name for ours, (llama_name, _) in OTHERS.items() for name in (ours, llama_name)),
]


class GroupedCommand(click.Command):
    """A command whose help has the options of a model and those of sampling in sections of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(_GROUPS.get(str(param.name), "Options"), []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class NumberOr(click.ParamType):  # type: ignore[type-arg]  # generic for the type checker alone in older releases
    """A number of `what`, `least` to `most`, or one of the words.

    >>> NumberOr("layers", "auto").convert("12", None, None)
    12
    """

    def __init__(self, what: str, *words: str, least: int = 0, most: int | None = None) -> None:
        self.name = "|".join(["N", *words])
        self._what, self._words, self._least, self._most = what, words, least, most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        word = str(value)
        if word in self._words:
            return word
        if not word.isdecimal():
            self.fail(
                f"{word!r} is neither a number of {self._what} nor {' or '.join(self._words)}", param, ctx
            )
        if int(word) < self._least or (self._most is not None and int(word) > self._most):
            most = "" if self._most is None else f" and at most {self._most}"
            self.fail(f"{word} {self._what}: at least {self._least}{most}", param, ctx)
        return int(word)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Several numbers of `what`, comma separated, 0 to `most`, each once.

    >>> Numbers("depths", int, most=64).convert("3,1,3", None, None)
    (3, 1)
    """

    name = "numbers"

    def __init__(self, what: str, number: type[int] | type[float], *, most: float) -> None:
        self._what, self._number, self._most = what, number, most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(dict.fromkeys(self._number(word) for word in str(value).split(",")))
        except ValueError:
            found = (-1,)
        if not all(0 <= number <= self._most for number in found):
            self.fail(f"{value!r} are not {self._what}, 0 to {self._most:g}, with commas between", param, ctx)
        return found


class LogitBias(click.ParamType):  # type: ignore[type-arg]
    """A token id and what is added to its logit, as llama.cpp spells them.

    >>> LogitBias().convert("15043-1.5", None, None)
    (15043, -1.5)
    """

    name = "ID(+/-)X"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        found = re.fullmatch(r"(\d+)([+-](?:inf|\d+(?:\.\d*)?|\.\d+))", str(value))
        if not found:
            self.fail(
                f"{value!r} is not a token id and a bias, such as 15043+1, 15043-1.5 or 15043-inf", param, ctx
            )
        return int(found[1]), float(found[2])


_LOAD_OPTIONS = (
    click.argument("main", type=click.Path(path_type=Path)),
    click.option(
        "-md",
        "--sidecar",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The sidecar GGUF with the draft head, or a smaller model of the same vocabulary that drafts; here or hf://ORG/NAME[:TYPE].  [default: a sidecar found beside MAIN, or the head inside it]",
    ),
    click.option(
        "--spec-type",
        type=click.Choice(SPEC_TYPES, case_sensitive=False),
        default="auto",
        help=f"What drafts: {', '.join(SPEC_TYPES)}; a kind that is asked for must be there.  [default: auto]",
        metavar="KIND",
    ),
    click.option(
        "--depth",
        type=NumberOr("tokens", "auto", least=1, most=MAX_DEPTH),
        default="auto",
        show_default=True,
        help="Tokens drafted per round; auto: what is fastest here, round by round, 0 included.",
    ),
    click.option(
        "-ngl",
        "--gpu-layers",
        type=NumberOr("layers", "auto"),
        default="auto",
        show_default=True,
        help="Layers on the GPU; auto takes as many as fit its free memory.",
    ),
    click.option("-dev", "--device", metavar="NAMES", help="llama.cpp's devices, comma separated, or none."),
    click.option(
        "-t",
        "--threads",
        type=click.IntRange(1),
        metavar="N",
        help="CPU threads.  [default: the physical cores]",
    ),
    click.option(
        "-c",
        "--ctx",
        type=NumberOr("tokens", "auto", least=1),
        help="Context in tokens; auto: the largest that fits the memory that is left.  [default: the model's own, at most 8192]",
    ),
    click.option(
        "-b",
        "--batch",
        type=click.IntRange(1),
        metavar="N",
        default=N_BATCH,
        show_default=True,
        help="Prompt tokens per decode.",
    ),
    click.option(
        "-fa",
        "--flash-attn",
        type=click.Choice([*FLASH_ATTN], case_sensitive=False),
        default="auto",
        show_default=True,
        help="Flash attention.",
    ),
    click.option(
        "-ctk",
        "--cache-type-k",
        type=click.Choice([*CACHE_TYPES], case_sensitive=False),
        default="f16",
        metavar="TYPE",
        help=f"Type of the KV cache's keys: {', '.join(CACHE_TYPES)}.  [default: f16]",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        type=click.Choice([*CACHE_TYPES], case_sensitive=False),
        default="f16",
        metavar="TYPE",
        help="Type of the KV cache's values.  [default: f16]",
    ),
    click.option(
        "--kernels",
        type=click.Choice([*KERNELS]),
        default=KERNELS_DEFAULT,
        show_default=True,
        help="What computes products of up to 8 rows on the CPU: llama.cpp (stock), kernels whose rows are equal to the bit at every width (ours), or the faster (auto).",
    ),
    click.option(
        "--draft-vocab",
        type=NumberOr("rows", "auto", "full", least=1),
        default="auto",
        show_default=True,
        help="Rows of the vocabulary to draft with; auto cuts large ones to 32,768.",
    ),
    click.option(
        "--learn/--no-learn",
        default=True,
        show_default=True,
        help="Count which tokens the model writes (never its text), to draft with those; kept in the cache folder.",
    ),
    click.option(
        "--exact",
        is_flag=True,
        help="Decode only as many rows at once as agree to the bit here, measured once: the text is the plain one by construction.",
    ),
    click.option(
        "--min-confidence",
        type=click.FloatRange(0, 1),
        metavar="P",
        default=0.0,
        help="Of a DSpark sidecar with a confidence head: end a draft before a token less likely to stand.  [default: 0]",
    ),
    click.option(
        "--ngram/--no-ngram",
        default=True,
        show_default=True,
        help="Where pace chooses the depth: look up in the text itself what may follow, too, when that is faster.",
    ),
    click.option(
        "--mmap/--no-mmap",
        "use_mmap",
        default=True,
        show_default=True,
        help="Map the files; without, they are read into memory, which is faster where the system maps by 4 KB (most Linux file systems).",
    ),
    click.option(
        "--mlock",
        "use_mlock",
        is_flag=True,
        help="Keep the weights from being swapped out, if the system lets it.",
    ),
    click.option(
        "--memory-check/--no-memory-check",
        default=True,
        show_default=True,
        help="Refuse what this machine's memory is too small for.",
    ),
    click.option(
        "--checkpoints",
        type=click.IntRange(0),
        metavar="N",
        default=DEFAULT_CHECKPOINTS,
        show_default=True,
        help="States that a recurrent or hybrid model keeps, one where each message ends, so that the next prompt goes on from there.",
    ),
    click.option("--no-spec", is_flag=True, help="Decode plainly: the same as --spec-type none."),
    click.option("--force", is_flag=True, help="Use a sidecar although it was made for another model."),
    click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's own log."),
)

_CHOICE_OPTIONS = (
    click.option(
        "--temp",
        "temperature",
        type=click.FloatRange(0),
        metavar="T",
        help="Temperature; 0 is greedy.  [default: the file's own, else 0]",
    ),
    click.option(
        "-s", "--seed", type=click.IntRange(0, MAX_SEED), metavar="N", help="Seed.  [default: a fresh one]"
    ),
    click.option(
        "--accept",
        type=click.Choice([*ACCEPT]),
        default="auto",
        show_default=True,
        help="Which drafts stand above temperature 0: those that plain decoding draws (match), by speculative sampling (reject, the same distribution), or what is faster here; match where a seed is given (auto).",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the text before this string; may be repeated."
    ),
)

_SHAPING_OPTIONS = (
    click.option(
        "--top-k",
        type=click.IntRange(0),
        metavar="K",
        help="Choose among the K likeliest; 0: all.  [default: the file's own, else 40]",
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="... of total probability P.  [default: the file's own, else 0.95]",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="... of at least P times the likeliest's.  [default: the file's own, else 0.05]",
    ),
    click.option(
        "--typical",
        "--typical-p",
        "typical_p",
        type=click.FloatRange(0, 1),
        metavar="P",
        help="... as surprising as is to be expected, of total probability P.  [default: 1, off]",
    ),
    click.option(
        "--repeat-last-n",
        type=click.IntRange(WHOLE),
        metavar="N",
        help="Tokens that the penalties look at; -1: the whole context.  [default: the file's own, else 64]",
    ),
    click.option(
        "--repeat-penalty",
        type=float,
        metavar="X",
        help="Divide the logits of tokens that occur there.  [default: the file's own, else 1, off]",
    ),
    click.option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        help="Take X from their logits each time they occur.  [default: 0]",
    ),
    click.option(
        "--presence-penalty", type=float, metavar="X", help="Take X from their logits once.  [default: 0]"
    ),
    click.option(
        "--penalize-prompt/--no-penalize-prompt",
        default=None,
        help="Whether penalties and DRY look at the prompt, too.  [default: they do]",
    ),
    click.option(
        "--dry-multiplier",
        type=click.FloatRange(0),
        metavar="X",
        help="Penalise going on with what was said before (DRY).  [default: 0, off]",
    ),
    click.option(
        "--dry-base",
        type=click.FloatRange(1),
        metavar="X",
        help="... by multiplier * X ^ (length - allowed length).  [default: 1.75]",
    ),
    click.option(
        "--dry-allowed-length",
        type=click.IntRange(1),
        metavar="N",
        help="... beyond N tokens.  [default: 2]",
    ),
    click.option(
        "--dry-penalty-last-n",
        type=click.IntRange(WHOLE),
        metavar="N",
        help="... within the last N tokens; -1: the whole context.  [default: -1]",
    ),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        help='... but not across TEXT; may be repeated; none: across all.  [default: line end : " *]',
    ),
    click.option(
        "-l",
        "--logit-bias",
        multiple=True,
        type=LogitBias(),
        metavar="ID(+/-)X",
        help="Add X to a token's logit; -inf bans it; may be repeated.",
    ),
    click.option("--grammar", metavar="GBNF", help="Write a sentence of this grammar."),
    click.option(
        "--grammar-file", type=click.Path(path_type=Path), metavar="FILE", help="... of the one in FILE."
    ),
    click.option(
        "-j", "--json-schema", metavar="SCHEMA", help="Write JSON of this schema; {} is any JSON object."
    ),
    click.option(
        "-jf",
        "--json-schema-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="... of the one in FILE.",
    ),
)


def _declared(options: Sequence[Callable[[Command], Command]]) -> list[click.Parameter]:
    """The parameters that these decorators add."""

    def nothing() -> None: ...

    return click.command()(_add(nothing, options)).params


def _add(command: Command, options: Sequence[Callable[[Command], Command]]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command


_GROUPS = {
    str(param.name): title
    for title, options in (
        ("Sampling", (*_CHOICE_OPTIONS, *_SHAPING_OPTIONS)),
        ("Model", _LOAD_OPTIONS),
    )
    for param in _declared(options)
}


def load_options(function: Command) -> Command:
    """Adds MAIN and the options of `load`; the command is called with `open_model`, which loads what they say."""

    @functools.wraps(function)
    def command(main: Path, spec_type: str, no_spec: bool, **values: Any) -> None:
        options = {name: values.pop(name) for name in signature(load).parameters if name in values}
        options["spec_type"] = "none" if no_spec else spec_type
        function(open_model=functools.partial(_open, main, options), **values)

    return _add(command, _LOAD_OPTIONS)


def main_optional(command: Command) -> Command:
    """For a command with `load_options` that does not always load something: MAIN may be left out until it does."""
    main = next(param for param in vars(command)["__click_params__"] if param.name == "main")
    main.required = False
    return command


def length_option(n: int) -> Callable[[Command], Command]:
    """Adds -n, the length (by default `n`) of texts that are measured."""
    return click.option(
        "-n",
        "--n-predict",
        "n",
        type=click.IntRange(2),
        metavar="N",
        default=n,
        show_default=True,
        help="Tokens per text.",
    )


def seed_option(help: str) -> Callable[[Command], Command]:
    """Adds --seed, 0 by default, so that what is measured can be measured again."""
    return click.option(
        "-s", "--seed", type=click.IntRange(0, MAX_SEED), default=0, show_default=True, help=help
    )


def budget_option(seconds: float, help: str) -> Callable[[Command], Command]:
    """Adds --budget, the seconds that a command may take."""
    return click.option(
        "--budget",
        type=click.FloatRange(min=0, min_open=True),
        metavar="SECONDS",
        default=seconds,
        show_default=True,
        help=help,
    )


def text_options(n: int) -> Callable[[Command], Command]:
    """Adds -n and --temp, the length (by default `n`) and temperature of texts that are measured."""
    options = (
        length_option(n),
        click.option(
            "--temp",
            "temperature",
            type=click.FloatRange(0),
            metavar="T",
            default=0.0,
            show_default=True,
            help="Temperature; 0 is greedy.",
        ),
    )
    return lambda function: _add(function, options)


def shaping_options(function: Command) -> Command:
    """Adds what makes some tokens likelier than the model does; the command is called with it as `shaping`."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        names = [param.name for param in _declared(_SHAPING_OPTIONS)]
        function(shaping=_shaping({name: values.pop(name) for name in names}), **values)

    return _add(command, _SHAPING_OPTIONS)


def sampling_options(function: Command) -> Command:
    """Adds the options of sampling and stopping; the command is called with them as `sampling`."""

    @functools.wraps(function)
    def command(shaping: dict[str, Any], **values: Any) -> None:
        names = [param.name for param in _declared(_CHOICE_OPTIONS)]
        function(sampling={name: values.pop(name) for name in names} | shaping, **values)

    return _add(shaping_options(command), _CHOICE_OPTIONS)


def _shaping(values: dict[str, Any]) -> dict[str, Any]:
    """The options as `Sampling` takes them: files read, repeated options gathered."""
    for name in ("grammar", "json_schema"):
        file = values.pop(f"{name}_file")
        if file is not None and values[name] is not None:
            raise click.UsageError(f"two of --{name.replace('_', '-')}: the option and the file")
        if file is not None:
            values[name] = _read_text(file)
    biases, breakers = values["logit_bias"], values["dry_sequence_breakers"]
    values["logit_bias"] = dict(biases) or None
    values["dry_sequence_breakers"] = [text for text in breakers if text != "none"] if breakers else None
    return values


def read_prompt(text: str | None, file: Path | None) -> str:
    """The text of `-p TEXT` (`-`: stdin), of `-f FILE`, or of the pipe there is when neither is given.

    Raises click.UsageError for both or none of them, PromptError for a file that is no readable text.
    """
    if text is not None and file is not None:
        raise click.UsageError("-p and -f are both given: which text is meant?")
    if text is not None and text != "-":
        return text
    if text is None and file is None and sys.stdin.isatty():
        raise click.UsageError("there is no text to complete: give -p TEXT, -f FILE or a pipe")
    return _read_text(file)


def _read_text(file: Path | None) -> str:
    try:
        data = file.read_bytes() if file else sys.stdin.buffer.read()
        return data.decode("utf-8")
    except OSError as error:
        raise PromptError(f"{file or 'stdin'}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{file or 'stdin'}: not UTF-8 text (byte {error.start})") from error


def _open(main: Path | None, options: dict[str, Any]) -> Model:
    if main is None:
        raise click.UsageError("Missing argument 'MAIN'.")
    main = fetch(main, options["spec_type"] if options["sidecar"] is None else "none")
    if options.get("exact") and not recall(read_model(main)):
        note(
            f"measuring how many rows agree to the bit here (seconds, for a large model minutes), {_how_often()}"
        )
    survive_bus_errors()
    model = load(main, **options)
    if hint := idle_gpu_hint():
        note(hint)
    if model.paced and model.kind and remembered(model) is None:
        note(f"measuring what drafting costs on this machine (a few seconds), {_how_often()}")
    if model.exact:
        rows = " or ".join(map(str, model.widths(model.n_ctx)))
        alone = "" if model.widths(model.n_ctx)[0] == 1 else ", plain rounds too"
        note(f"exact: every decode has {rows} rows{alone}, whose logits agree to the bit here")
    if isinstance(options.get("draft_vocab"), int) and model.kind and model.n_draft_vocab is None:
        note(f"--draft-vocab changes nothing: {model.draft_vocab_why}")
    if model.learns and not counts_for(model.main).any():
        note(
            "which tokens the model writes is counted from now on (never its text), to draft with those; --no-learn turns it off"
        )
    if model.speculation.path and model.speculation.match in (
        "same family, unverified",
        "unverified",
        "forced",
    ):
        sidecar = model.speculation.path.name
        note(
            f"nothing proves that {sidecar} was made for {main.name} ({model.speculation.match}); the text is right all the same"
        )
    return model


def _how_often() -> str:
    """How often something is measured that the cache folder keeps."""
    problem = cache_folder.problem()
    return f"at every run, for {problem}" if problem else "once"
