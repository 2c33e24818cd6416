"""Learning curves as SVG text: records in, text out. Pure.

The SVG holds no text of a run, only numbers and the words of this file; names of series and runs stand in the
page's legends. Its colours are CSS variables of the page, so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, MultipleLocator, PercentFormatter

from envace.report.reading import interval, number

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a7a7a", "#a89a00")
"""Okabe and Ito's palette, its black and its yellow made visible on both grounds."""
DASHES: tuple[tuple[float, ...], ...] = ((), (4, 2), (1, 1.4), (6, 1.6, 1, 1.6), (8, 3), (2, 3))
"""Dash patterns that tell runs apart where colour tells series apart."""
INK, LINE = "#010203", "#040506"
"""Stand for the page's text and rule colours."""
MAX_MARKED = 15
"""Curves of so few points get a mark on each."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One line. Values that are missing are NaN and leave a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    """Bounds of a band, as long as `y`, or empty."""
    colour: int = 0
    dash: int = 0


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What one small plot shows."""

    title: str
    kind: str
    """Kind of the metric records."""
    names: Mapping[str, str]
    """Metric -> its name in the legend. A metric that ends in `/` stands for all that begin so."""
    ylabel: str
    about: str
    """What it is, and what to look for."""
    share: bool = False
    """Whether the axis is that of a share, from 0 to 100 %."""
    band: bool = False
    """Whether records hold a confidence interval (`ci`)."""
    x: str = "update"
    skip: Sequence[str] = field(default=())
    """Metrics to leave out of those that begin so."""


PANELS = (
    Panel(
        title="Real success",
        kind="eval",
        names={"success": "success"},
        ylabel="share of scenarios",
        share=True,
        band=True,
        about="Share of held-out scenarios that end right in the real environment, with its 95 % interval. "
        "It should rise and stay up; if it falls while the reward rises, the reward is being "
        "exploited.",
    ),
    Panel(
        title="Do and decline",
        kind="eval",
        names={"do": "do", "decline": "decline"},
        ylabel="share of scenarios",
        share=True,
        about="Real success where the request can be done, and where the right act is to decline it. Both "
        "should rise; one bought with the other means the policy only learned to always act or always"
        " refuse.",
    ),
    Panel(
        title="Reward",
        kind="update",
        names={"reward": "reward"},
        ylabel="mean reward",
        about="Mean reward of the update's trajectories, in [0, 1], over those that could be scored. "
        "Compare its rise with that of real success: only the latter counts.",
    ),
    Panel(
        title="Parts of the reward",
        kind="update",
        names={"part/": ""},
        ylabel="mean part",
        about="Mean of each component of the reward, in [0, 1]. A part that lags behind says what is still hard.",
    ),
    Panel(
        title="Feasible share",
        kind="update",
        names={"feasible_share": "feasible"},
        ylabel="share of worlds",
        share=True,
        about="Share of worlds met in training in which the request can be done, among those where that is "
        "determined. A fall towards 0 means the policy imagines easy refusals.",
    ),
    Panel(
        title="Consistent share",
        kind="update",
        names={"consistent_share": "consistent"},
        ylabel="share of responses",
        share=True,
        about="Share of rehearsed responses that the tools' rules allow, among those they can judge. It "
        "should stay near 100 %.",
    ),
    Panel(
        title="Entropy by role",
        kind="update",
        names={"entropy/act": "act", "entropy/rehearse": "rehearse"},
        ylabel="nats a token",
        about="Mean entropy of the policy at the tokens it learns from. A slow fall is learning; a plunge "
        "to 0 ends exploration.",
    ),
    Panel(
        title="Distance from the start",
        kind="update",
        names={"kl": "KL", "anchor_kl": "KL on look-up values"},
        ylabel="nats a token",
        about="KL to the starting policy on tokens with a policy gradient, and on look-up values that are "
        "only anchored. The first grows with learning; the second should stay small.",
    ),
    Panel(
        title="Tokens by role",
        kind="update",
        names={"tokens_per_trajectory/act": "act", "tokens_per_trajectory/rehearse": "rehearse"},
        ylabel="tokens a trajectory",
        about="Tokens sampled in each role, mean of the update's trajectories. Steady is good; growth "
        "without success is rambling, a collapse is giving up.",
    ),
    Panel(
        title="Clipped and flat",
        kind="update",
        names={"clip_share": "clipped tokens", "flat_cells": "flat cells"},
        ylabel="share",
        about="Share of tokens whose probability ratio leaves the clip range, and of (scenario, role) cells"
        " whose rewards are all equal, which teach nothing. Many flat cells mean the scenarios have "
        "become too easy, or are too hard.",
    ),
    Panel(
        title="Failed stops",
        kind="update",
        names={"stop/": ""},
        skip=("stop/replied",),
        ylabel="share of trajectories",
        about="Share of trajectories that ended otherwise than by a reply: parse errors, limits on steps "
        "and length, failures of the infrastructure. All should go to 0.",
    ),
    Panel(
        title="Speed",
        kind="update",
        names={"rollout_tokens_per_s": "sampling", "update_tokens_per_s": "updating"},
        ylabel="tokens a second",
        about="Tokens sampled, and tokens trained on, in a second of wall-clock time. A sudden fall is a busy machine.",
    ),
    Panel(
        title="Warm-up loss",
        kind="sft",
        names={"loss": "loss"},
        ylabel="nats a token",
        x="step",
        about="Mean negative log-likelihood of the demonstrations' learned tokens. It should fall and flatten.",
    ),
)
"""All plots of a page, in order."""


def curves(panel: Panel, runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[Curve]:
    """The lines of a panel that have a value: colour tells series apart, or runs where there is one series.

    Args:
        panel: What to show.
        runs: The metric records of each run.
    """
    names = _series(panel, runs)
    found = []
    for run, records in enumerate(runs):
        chosen = [r for r in records if r.get("kind") == panel.kind and number(r, panel.x) is not None]
        for position, (metric, name) in enumerate(names.items()):
            colour = run if len(names) == 1 else position
            found.append(_curve(panel, chosen, metric=metric, name=name, colour=colour, dash=run))
    return [curve for curve in found if any(math.isfinite(value) for value in curve.y)]


def draw(shown: Sequence[Curve], *, ylabel: str, xlabel: str, share: bool) -> str:
    """One small plot as an SVG element without text of its own but numbers and axis labels."""
    figure = Figure(figsize=(3.3, 2.1), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for curve in shown:
        colour = COLOURS[curve.colour % len(COLOURS)]
        (line,) = axes.plot(curve.x, curve.y, color=colour, linewidth=1.5)
        if DASHES[curve.dash % len(DASHES)]:
            line.set_dashes(DASHES[curve.dash % len(DASHES)])
        if len(curve.x) <= MAX_MARKED:
            line.set(marker="o", markersize=3)
        if curve.low:
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.18, linewidth=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    if share:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_locator(MultipleLocator(0.25))
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    return _svg(figure)


def swatch(*, colour: int | None, dash: int) -> str:
    """A piece of a line, for a legend; in the colour of text where colour says nothing (None)."""
    dashes = " ".join(f"{1.5 * length:g}" for length in DASHES[dash % len(DASHES)])
    stroke = "var(--ink)" if colour is None else _variable(colour % len(COLOURS))
    return (
        '<svg class="swatch" viewBox="0 0 30 8" aria-hidden="true">'
        f'<path d="M1 4H29" stroke-dasharray="{dashes or "none"}" style="stroke: {stroke}"/></svg>'
    )


def _series(panel: Panel, runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, str]:
    """Metric -> name, with prefixes replaced by the metrics that begin so."""
    names: dict[str, str] = {}
    for metric, name in panel.names.items():
        if not metric.endswith("/"):
            names[metric] = name
            continue
        for record in (r for records in runs for r in records if r.get("kind") == panel.kind):
            names |= {key: key[len(metric) :] for key in record if key.startswith(metric) and key not in panel.skip}
    return names


def _curve(
    panel: Panel, records: Sequence[Mapping[str, Any]], *, metric: str, name: str, colour: int, dash: int
) -> Curve:
    bounds = [interval(record) if panel.band else None for record in records]
    banded = any(bound is not None for bound in bounds)
    return Curve(
        name=name,
        x=[number(record, panel.x) or 0.0 for record in records],
        y=[_or_nan(number(record, metric)) for record in records],
        low=[bound[0] if bound else math.nan for bound in bounds] if banded else (),
        high=[bound[1] if bound else math.nan for bound in bounds] if banded else (),
        colour=colour,
        dash=dash,
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _svg(figure: Figure) -> str:
    """The figure as an SVG element whose colours are the page's and whose size is its container's."""
    for axes in figure.axes:
        axes.grid(True, color=LINE, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=7.5, length=2)
        axes.xaxis.label.set(color=INK, fontsize=8)
        axes.yaxis.label.set(color=INK, fontsize=8)
        for side, spine in axes.spines.items():
            spine.set(visible=side in ("left", "bottom"), color=INK, linewidth=0.6)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "envace"}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    return _page_colours(buffer.getvalue())


def _page_colours(svg: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", svg)  # several drawings share a page; nothing refers to these
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace(INK, "var(--ink)").replace(LINE, "var(--line)")
    for index, colour in enumerate(COLOURS):
        svg = svg.replace(colour, _variable(index))
    return re.sub(r"\n\s*", "\n", svg).strip()


def _variable(index: int) -> str:
    return f"var(--c{index}, {COLOURS[index]})"
