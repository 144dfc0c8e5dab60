"""The report's charts as SVG: each takes a study's results and gives a drawing with a text that says what it shows.

Colours are those of Okabe and Ito, told apart by colour-blind people, and every series has a marker or hatching of its own besides.
In the SVG they are CSS variables, so that a page (or the figure's own style sheet) chooses light or dark. Knows matplotlib; reads
no file.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_sidecar.runtime.errors import ReportError
from llama_sidecar.sidecars.errors import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = Mapping[str, Any]
WIDTH_IN = 5.4
ROW_IN = 0.42  # of a horizontal bar or range
# What matplotlib draws with, and the variable that stands in its place in the SVG: (light, dark) in `STYLE`.
INK, FAINT = "#010203", "#040506"
SERIES = {"blue": "#0a0b01", "orange": "#0a0b02", "green": "#0a0b03", "pink": "#0a0b04"}
VARIABLES = {INK: "--ink", FAINT: "--faint", **{value: f"--{name}" for name, value in SERIES.items()}}
STYLE = """
:root { --ink: #1a1a1a; --faint: #d0d0d0; --blue: #0072b2; --orange: #d55e00; --green: #009e73; --pink: #b0588f;
        --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --faint: #4a4a4a; --blue: #56b4e9; --orange: #e69f00; --green: #2fc79c; --pink: #e39ac4;
          --paper: #16181b; }
}
"""
PARTS = (("draft", "orange", ""), ("verify", "blue", "//"), ("accept", "green", ".."), ("rest", "pink", "xx"))


@dataclass(frozen=True)
class Chart:
    """A drawing: its title, what it shows in words, and the SVG."""

    title: str
    alt: str
    svg: str


def check_drawing() -> None:
    """Raises ReportError where nothing can be drawn: to be told before minutes of measuring, not after."""
    with _drawing():
        pass


def charts(results: Results) -> list[Chart]:
    """All charts that the results have figures for.

    Raises:
        ReportError: matplotlib is not installed.
    """
    drawn = (_by_kind, _by_depth, _positions, _round_parts, _by_temperature)
    with _drawing():
        return [chart for draw in drawn if (chart := draw(results)) is not None]


def figure(results: Results) -> str:
    """The speed-up by kind of text, and by depth where it was measured, as one SVG file for light and dark pages.

    Raises:
        ReportError: matplotlib is not installed.

    Example:
        >>> figure(read_results("results.json"))[:5]                            # doctest: +SKIP
        '<?xml'
    """
    draws = [_draw_kinds, *([_draw_depths] if results["depths"] else [])]
    heights = [1.1 + ROW_IN * len(_kinds(results)), 3.2][: len(draws)]
    main = results["bench"]
    title = f"{printable(main['main']['file'])}: {main['speedup']:.2f} times plain speed"
    with _drawing():
        fig = _figure(sum(heights))
        rows = fig.subplots(len(draws), 1, squeeze=False, height_ratios=heights)
        for draw, (axes,) in zip(draws, rows, strict=True):
            draw(axes, results)
        fig.suptitle(title, fontsize=11, color=INK)
        svg = _svg(fig, "Speed-up of speculative decoding", _alt_kinds(results))
    style = f"<style>{STYLE} svg {{ background: var(--paper); }}</style>"
    return '<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("</title>", f"</title>{style}", 1)


# Charts


def _kinds(results: Results) -> dict[str, Results]:
    """All pairs together, then each kind of text."""
    return _with_tasks(results["bench"])


def _with_tasks(part: Results) -> dict[str, Results]:
    return {"all": part, **{printable(name): figures for name, figures in part["tasks"].items()}}


def _by_kind(results: Results) -> Chart | None:
    fig = _figure(1.1 + ROW_IN * len(_kinds(results)))
    _draw_kinds(fig.subplots(), results)
    title = "Speed-up by kind of text"
    return Chart(title, _alt_kinds(results), _svg(fig, title, _alt_kinds(results)))


def _draw_kinds(axes: Axes, results: Results) -> None:
    _ranges(axes, [(name, part["speedup"], part["speedup_spread"]) for name, part in _kinds(results).items()])
    axes.set_xlabel("times plain speed (median, smallest to largest pair)")


def _alt_kinds(results: Results) -> str:
    parts = [f"{name} {_times(part)}" for name, part in _kinds(results).items()]
    return f"Speed-up over plain decoding by kind of text: {'; '.join(parts)}."


def _by_temperature(results: Results) -> Chart | None:
    parts = results["temperatures"]
    if not parts:
        return None
    fig = _figure(1.1 + ROW_IN * len(parts))
    axes = fig.subplots()
    _ranges(axes, [(f"{p['temperature']:g}", p["speedup"], p["speedup_spread"]) for p in parts])
    axes.set_xlabel("times plain speed (median, smallest to largest pair)")
    axes.set_ylabel("temperature")
    said = [f"{part['temperature']:g}: {_times(part)}" for part in parts]
    alt = f"Speed-up by temperature: {'; '.join(said)}."
    title = "Speed-up by temperature"
    return Chart(title, alt, _svg(fig, title, alt))


def _by_depth(results: Results) -> Chart | None:
    if not results["depths"]:
        return None
    fig = _figure(3.2)
    _draw_depths(fig.subplots(), results)
    said = []
    for part in results["depths"]:
        predicted = "" if part.get("predicted") is None else f", predicted {part['predicted']:.2f}"
        said.append(f"depth {part['depth']}: {_times(part)}{predicted}, bound {part['bound']:.2f}")
    title = "Speed-up by depth"
    alt = f"Speed-up by tokens drafted a round: {'; '.join(said)}."
    return Chart(title, alt, _svg(fig, title, alt))


def _draw_depths(axes: Axes, results: Results) -> None:
    parts = results["depths"]
    depths = [0, *(part["depth"] for part in parts)]
    speedups = [1.0, *(part["speedup"] for part in parts)]
    low = [s - part["speedup_spread"][0] for s, part in zip(speedups[1:], parts, strict=True)]
    high = [part["speedup_spread"][1] - s for s, part in zip(speedups[1:], parts, strict=True)]
    axes.plot(
        depths,
        [1.0, *(part["bound"] for part in parts)],
        color=SERIES["green"],
        linestyle="--",
        marker="^",
        label="bound (drafts for free)",
    )
    predicted = [(part["depth"], part["predicted"]) for part in parts if part.get("predicted") is not None]
    if predicted:
        axes.plot(
            [0, *(depth for depth, _ in predicted)],
            [1.0, *(value for _, value in predicted)],
            color=SERIES["orange"],
            linestyle=":",
            marker="s",
            markerfacecolor="none",
            label="predicted",
        )
    axes.plot(depths, speedups, color=SERIES["blue"], marker="o", label="measured")
    axes.errorbar(depths[1:], speedups[1:], yerr=[low, high], color=SERIES["blue"], fmt="none", capsize=4)
    paced = results["bench"]
    if paced.get("paced"):
        label = f"depth chosen by pace: {paced['speedup']:.2f}"
        axes.axhline(paced["speedup"], color=INK, linewidth=1, linestyle="-.", label=label)
    axes.set_xticks(depths)
    axes.set_xlabel("tokens drafted a round")
    axes.set_ylabel("times plain speed")
    axes.set_ylim(bottom=0)
    _legend_above(axes, n_columns=2)


def _positions(results: Results) -> Chart | None:
    source = max([results["bench"], *results["depths"]], key=lambda part: len(part["accepted_per_position"]))
    if not source["accepted_per_position"]:
        return None
    fig = _figure(3.0)
    axes = fig.subplots()
    lines = _with_tasks(source)
    said = []
    for (name, part), (colour, marker) in zip(lines.items(), _styles(), strict=False):
        shares = part["accepted_per_position"]
        positions = range(1, len(shares) + 1)
        wide = {"linewidth": 2.5} if name == "all" else {"linewidth": 1.2, "linestyle": "--"}
        axes.plot(positions, shares, color=colour, marker=marker, label=name, **wide)
        said.append(f"{name} {', '.join(f'{share:.2f}' for share in shares)}")
    axes.set_xticks(range(1, len(source["accepted_per_position"]) + 1))
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("position of the draft in its round")
    axes.set_ylabel("share accepted")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
    title = "Accepted by position"
    alt = f"Share of drafts accepted at each position, at depth {source['depth']}: {'; '.join(said)}."
    return Chart(title, alt, _svg(fig, title, alt))


def _round_parts(results: Results) -> Chart | None:
    main = results["bench"]
    rows = [("pace" if main.get("paced") else f"depth {main['depth']}", main)]
    rows += [(f"depth {part['depth']}", part) for part in results["depths"]]
    fig = _figure(1.5 + ROW_IN * len(rows))
    axes = fig.subplots()
    names = [name for name, _ in rows]
    starts = [0.0] * len(rows)
    for part, colour, hatch in PARTS:
        widths = [1000 * row["round_s"][part] for _, row in rows]
        axes.barh(
            names,
            widths,
            left=starts,
            height=0.6,
            label=part,
            color=SERIES[colour],
            hatch=hatch,
            edgecolor=FAINT,
            linewidth=0,
        )
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.axvline(1000 * main["row_s"], color=INK, linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds a round (dashed: one plain decode)")
    _legend_above(axes, n_columns=len(PARTS))
    said = [
        f"{name}: " + ", ".join(f"{part} {1000 * row['round_s'][part]:.1f}" for part, _, _ in PARTS)
        for name, row in rows
    ]
    title = "Where a round's time goes"
    alt = f"Milliseconds of a mean round: {'; '.join(said)}; a plain decode takes {1000 * main['row_s']:.1f}."
    return Chart(title, alt, _svg(fig, title, alt))


# Drawing


def _ranges(axes: Axes, rows: Sequence[tuple[str, float, Sequence[float]]]) -> None:
    """Medians as points, with lines from the smallest to the largest; plain decoding is a line at 1."""
    axes.axvline(1.0, color=INK, linestyle="--", linewidth=1)
    for i, (_, value, (low, high)) in enumerate(rows):
        axes.plot([low, high], [i, i], color=SERIES["blue"], linewidth=5, alpha=0.45, solid_capstyle="butt")
        axes.plot([value], [i], color=SERIES["blue"], marker="o", markersize=8)
        axes.annotate(
            f"{value:.2f}",
            (value, i),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=INK,
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.set_xlim(left=min(0.9, *(low for _, _, (low, _) in rows)) - 0.05)


def _legend_above(axes: Axes, *, n_columns: int) -> None:
    axes.legend(
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=n_columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def _styles() -> Iterator[tuple[str, str]]:
    markers = iter("osD^vPX*")
    yield INK, next(markers)
    while True:
        for colour in SERIES.values():
            yield colour, next(markers, "o")


def _times(part: Mapping[str, Any]) -> str:
    low, high = part["speedup_spread"]
    return f"{part['speedup']:.2f} times ({low:.2f} to {high:.2f})"


@contextmanager
def _drawing() -> Iterator[None]:
    """While it lasts, matplotlib writes words as they are: as text in the SVG, and with no mathematics between dollar signs."""
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError as error:
        raise ReportError(
            f"drawing needs matplotlib, which cannot be imported ({error}): pip install 'llama-sidecar[report]'"
        ) from error
    settings = {"svg.fonttype": "none", "font.family": "sans-serif", "text.parse_math": False}
    with matplotlib.rc_context(settings):
        yield


def _figure(height_in: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained", facecolor="none")


def _svg(fig: Figure, title: str, alt: str) -> str:
    """The figure as an element: as wide as there is room, with its words as text, its colours as variables."""
    import matplotlib

    out = io.StringIO()
    for axes in fig.axes:
        axes.set_facecolor("none")
        axes.grid(True, color=FAINT, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelcolor=INK, labelsize=10)
        for side, spine in axes.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set_color(INK)
            label.set_fontsize(10)
    with matplotlib.rc_context({"svg.hashsalt": title}):  # the same ids each time
        fig.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = re.sub(re.escape(colour), f"var({variable})", text, flags=re.I)
    text = re.sub(r'font: ([\d.]+px) [^;"]*', r"font: \1 system-ui, sans-serif", text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # Ids are unique within one drawing: of several in one page they need its name.
    mark = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'\bid="', f'id="{mark}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{mark}-", text)
    head = f'<svg role="img" aria-label="{html.escape(alt)}"'
    text = re.sub(
        r'<svg([^>]*?) width="[^"]*"',
        r"<svg\1",
        re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1),
        count=1,
    )
    return re.sub(r"<svg([^>]*)>", lambda m: f"{head}{m[1]}><title>{html.escape(alt)}</title>", text, count=1)
