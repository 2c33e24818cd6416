import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from envace.report.plots import PANELS, Curve, Panel, curves, draw


def panel(title: str) -> Panel:
    return next(panel for panel in PANELS if panel.title == title)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_missing_value_leaves_a_gap(run: Path):
    (curve,) = curves(panel("Feasible share"), [metrics(run)])

    assert math.isnan(curve.y[curve.x.index(7)])
    assert sum(map(math.isnan, curve.y)) == 1


def test_success_has_its_interval(run: Path):
    (curve,) = curves(panel("Real success"), [metrics(run)])

    assert curve.x == [0, 10, 20, 30, 40]
    assert all(low < y < high for low, y, high in zip(curve.low, curve.y, curve.high, strict=True))


def test_a_prefix_stands_for_all_that_begin_so(run: Path):
    names = [curve.name for curve in curves(panel("Failed stops"), [metrics(run)])]

    assert names == ["parse", "steps", "length", "infrastructure"]


def test_runs_are_told_apart_by_dashes_and_lone_series_by_colour_too(run: Path):
    runs = [metrics(run), metrics(run)]

    assert [(c.colour, c.dash) for c in curves(panel("Reward"), runs)] == [(0, 0), (1, 1)]
    assert [(c.colour, c.dash) for c in curves(panel("Entropy by role"), runs)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_nothing_logged_is_no_curve():
    assert [curves(panel, [[]]) for panel in PANELS] == [[] for _ in PANELS]
    assert curves(panel("Reward"), [[{"kind": "update", "update": 1, "reward": float("nan")}]]) == []


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("y", [[0.5], [0.5, math.nan, 0.7], [0.5, 0.5, 0.5], [1e300, -1e300, 0]])
def test_a_drawing_is_well_formed_and_takes_the_colours_of_its_page(y: list[float], share: bool):
    curve = Curve(name="<b>", x=list(range(len(y))), y=y, low=y, high=y, dash=1)

    svg = draw([curve], ylabel="share", xlabel="update", share=share)

    ET.fromstring(svg)
    assert "var(--ink)" in svg
    assert "var(--c0, #0072b2)" in svg
    assert "<b>" not in svg
    assert "width=" not in svg.split(">")[0]
