"""The report's page: a study's results, its charts and its tables in one HTML file that needs nothing else.

The results are in the page as JSON, so that it can be drawn again from itself. Knows the template (page.html.j2); draws nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from .charts import STYLE, charts

Results = Mapping[str, Any]
TEMPLATE = Path(__file__).with_name("page.html.j2")


def page(results: Results) -> str:
    """Draws the page, from what `run_study` or `read_results` gives.

    Raises:
        ReportError: matplotlib is not installed.

    Example:
        >>> page(read_results("results.json"))[:15]                             # doctest: +SKIP
        '<!doctype html>'
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    data = json.dumps(results).replace("<", "\\u003c")  # nothing in it ends the script
    main = results["bench"]
    return template.render(
        style=STYLE,
        charts=charts(results),
        main=main,
        verdict=_verdict(main),
        tiles=list(_tiles(main)),
        tables=list(_tables(results)),
        facts=list(_facts(main)),
        warnings=_warnings(results),
        command=results["command"],
        data=data,
    )


def _verdict(main: Results) -> str:
    if main.get("tokens_equal") is False:
        return "The texts were not all equal: see below."
    if main["speedup"] < 1.0:
        return "Speculation does not pay here."
    return f"{main['speedup']:.2f} times as fast as plain decoding."


def _tiles(main: Results) -> Iterator[tuple[str, str, str]]:
    low, high = main["speedup_spread"]
    yield (
        "speed-up",
        f"{main['speedup']:.2f}",
        f"median; {low:.2f} to {high:.2f} over {main['n_pairs']} pairs",
    )
    yield "speculative", f"{main['spec_tok_s']:.1f}", "tokens a second"
    yield "plain", f"{main['plain_tok_s']:.1f}", "tokens a second"
    yield (
        "accepted length",
        f"{main['mean_accepted_length']:.2f}",
        "tokens a round, the target's own included",
    )
    share = main.get("share_of_bound")
    reached = f"; reached: {100 * share:.0f} %" if share is not None else ""
    yield "bound", f"{main['bound']:.2f}", f"with drafts for free{reached}"
    yield (
        "token ids",
        {True: "equal", False: "differ", None: "not compared"}[main.get("tokens_equal")],
        _apart(main),
    )


def _apart(main: Results) -> str:
    apart = main.get("first_divergence")
    if main.get("tokens_equal"):
        return "plain and speculative, in every pair"
    return (
        f"first at token {apart['token']} of pair {apart['pair'] + 1}"
        if apart
        else "coins stand in for verification"
    )


def _tables(results: Results) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows: what the charts show, in numbers."""
    main = results["bench"]
    columns = ["plain tok/s", "speculative tok/s", "speed-up", "smallest to largest", "accepted length"]
    yield (
        "By kind of text",
        ["kind", "pairs", *columns],
        [
            [name, str(part["n_pairs"]), *_speeds(part)]
            for name, part in {"all": main, **main["tasks"]}.items()
        ],
    )
    if results["depths"]:
        yield (
            "By depth",
            ["depth", *columns, "predicted", "bound", "reached"],
            [
                [
                    str(part["depth"]),
                    *_speeds(part),
                    _number(part.get("predicted")),
                    f"{part['bound']:.2f}",
                    _share(part),
                ]
                for part in results["depths"]
            ],
        )
    if results["temperatures"]:
        yield (
            "By temperature",
            ["temperature", *columns],
            [[f"{part['temperature']:g}", *_speeds(part)] for part in results["temperatures"]],
        )
    runs = {"as it is used": main, **{f"depth {part['depth']}": part for part in results["depths"]}}
    yield (
        "A round, in milliseconds",
        ["run", "draft", "verify", "accept", "rest", "one plain decode"],
        [
            [name, *(f"{1000 * seconds:.2f}" for seconds in (*_parts_s(part), part["row_s"]))]
            for name, part in runs.items()
        ],
    )


def _parts_s(part: Results) -> list[float]:
    return [part["round_s"][name] for name in ("draft", "verify", "accept", "rest")]


def _speeds(part: Results) -> list[str]:
    low, high = part["speedup_spread"]
    speeds = [f"{part['plain_tok_s']:.1f}", f"{part['spec_tok_s']:.1f}", f"{part['speedup']:.2f}"]
    return [*speeds, f"{low:.2f} to {high:.2f}", f"{part['mean_accepted_length']:.2f}"]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _share(part: Results) -> str:
    share = part.get("share_of_bound")
    return "" if share is None else f"{100 * share:.0f} %"


def _facts(main: Results) -> Iterator[tuple[str, str]]:
    """Model, machine and build: what is needed to believe the figures, and to get them again."""
    model, drafter, machine, library = (main[name] for name in ("main", "drafter", "machine", "llama_cpp"))
    yield "model", _file(model)
    yield (
        "drafter",
        f"{drafter.get('kind')}, {_file(drafter)}" if "file" in drafter else str(drafter.get("kind")),
    )
    yield "depth", f"chosen by pace, at most {main['depth']}" if main.get("paced") else str(main["depth"])
    cores = f"{machine.get('n_cores')} cores, {main.get('threads')} threads"
    yield "machine", f"{machine.get('cpu')}, {cores}; {machine.get('os')}"
    yield "backend", str(main.get("backend"))
    kernels = main.get("kernels") or {}
    yield "kernels", str(kernels.get("chosen", "unknown"))
    yield (
        "software",
        (
            f"llama-sidecar {main.get('version')}, llama-cpp-python {library.get('llama_cpp_python')} "
            f"(llama.cpp {library.get('commit')})"
        ),
    )
    yield "system info", str(library.get("system_info"))
    yield (
        "context",
        (
            f"{main.get('ctx')} tokens, batch {main.get('batch')}, flash attention {main.get('flash_attn')}, "
            f"KV {main.get('cache_type_k')} and {main.get('cache_type_v')}"
        ),
    )
    sampling = (
        "greedy"
        if not main["temperature"]
        else f"temperature {main['temperature']:g}, seed {main.get('seed')}"
    )
    prompts = main["prompts"]
    yield (
        "prompts",
        (
            f"{', '.join(main['tasks'])}: {main['n_pairs']} pairs of {main['n']} tokens, {sampling}, "
            f"sha256 {str(prompts.get('sha256'))[:8]}"
        ),
    )


def _file(facts: Results) -> str:
    hashes = ", ".join(str(one.get("sha256"))[:16] for one in facts.get("files", ()))
    size = f"{facts['bytes'] / 1e6:,.1f} MB" if isinstance(facts.get("bytes"), int) else "size unknown"
    return f"{facts.get('file')} ({facts.get('arch')}, {facts.get('type')}, {size}, sha256 {hashes or 'unknown'})"


def _warnings(results: Results) -> list[str]:
    """Of all parts, each once, with the parts that have it."""
    found: dict[str, list[str]] = {text: [] for text in results["warnings"]}
    parts = [("", results["bench"])]
    parts += [(f"depth {part['depth']}", part) for part in results["depths"]]
    parts += [(f"temperature {part['temperature']:g}", part) for part in results["temperatures"]]
    for name, part in parts:
        for text in part.get("warnings", ()):
            found.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text}" if all(names) and names else text for text, names in found.items()]
