"""Rows of the before/after table, for the page and for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from envace.report.reading import interval, number, section

STAGES = (
    ("warm_up", "Warm-up"),
    ("trained", "Trained"),
    ("grpo_real", "GRPO in the real environment"),
    ("evaluated", "Evaluated"),
)
COLUMNS = ("Real success", "Do", "Decline", "Error recall", "Values", "Unseen domain")
MISSING = "—"
"""Stands for a number that was not measured."""
EVERY_RUN = "all runs"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The results of one run, and what tells its row from others."""

    label: str
    results: Mapping[str, Any]
    recipe: str = ""
    """Equal for runs that differ in their seed alone; only those are averaged."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number as text."""

    text: str
    detail: str = ""
    """Interval and sample size."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the before/after table."""

    stage: str
    run: str
    cells: Sequence[Cell]
    """One for each of COLUMNS."""
    mean: bool = False


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Success of one run by domain or by kind of task, one column a stage."""

    title: str
    stages: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def percent(value: float | None) -> str:
    """A share as a percentage; MISSING for None."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def share_cell(record: Mapping[str, Any]) -> Cell:
    """Success with its 95 % interval, n, and how many could not be decided."""
    success, bounds, n, undecided = (
        number(record, "success"),
        interval(record),
        number(record, "n"),
        number(record, "undecided"),
    )
    if success is None:
        return Cell(text=MISSING)
    parts = [f"{100 * bounds[0]:.1f}–{100 * bounds[1]:.1f}"] if bounds else []
    parts += [f"n\u00a0=\u00a0{n:.0f}"] if n is not None else []
    parts += [f"{undecided:.0f} undecided"] if undecided else []
    return Cell(text=percent(success), detail=", ".join(parts))


def result_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Stage by stage one row a run, and the mean with its range where runs differ in their seed alone.

    Warm-up and trained have a row, so that what was not measured shows, unless only other things were; the others have
    one where they ran.
    """
    rows = []
    measured = {key for key, _ in STAGES if any(section(outcome.results, key) for outcome in outcomes)}
    optional = {"grpo_real", "evaluated"}
    if measured and not measured & {"warm_up", "trained"}:
        optional |= {"warm_up", "trained"}
    for key, name in STAGES:
        stage = [(outcome, section(outcome.results, key)) for outcome in outcomes]
        if key in optional:
            stage = [(outcome, result) for outcome, result in stage if result]
        if len(stage) > 1 and all(result and result == stage[0][1] for _, result in stage):
            rows.append(Row(stage=name, run=EVERY_RUN, cells=_cells(stage[0][1])))
            continue
        rows += [Row(stage=name, run=outcome.label, cells=_cells(result)) for outcome, result in stage]
        rows += _mean_rows(name, stage)
    return rows


def breakdowns(results: Mapping[str, Any]) -> list[Breakdown]:
    """Success by domain, by kind, and stops of one run; those there are."""
    stages = [(name, section(results, key)) for key, name in STAGES if section(results, key)]
    tables = [
        Breakdown(title=title, stages=[name for name, _ in stages], rows=_breakdown_rows(stages, key))
        for title, key in (
            ("By domain", "by_domain"),
            ("By kind of task", "by_kind"),
            ("Why attempts stopped", "stops"),
        )
    ]
    return [table for table in tables if table.rows]


def results_table(results: Mapping[str, Any]) -> Table:
    """The before/after table of one run, for the terminal."""
    return comparison_table([Outcome(label="", results=results)])


def comparison_table(outcomes: Sequence[Outcome]) -> Table:
    """The before/after table of several runs, for the terminal."""
    table = Table(caption=f"Shares with 95 % intervals. {MISSING} was not measured.", caption_justify="left")
    several = len(outcomes) > 1
    for heading in ("", *(["Run"] if several else []), *COLUMNS):
        table.add_column(heading)
    for row in result_rows(outcomes):
        names = [row.stage, row.run] if several else [row.stage]
        style = "bold" if row.mean else ""
        table.add_row(*(Text(name, style=style) for name in names), *(_terminal(cell, style) for cell in row.cells))
    return table


def _terminal(cell: Cell, style: str) -> Text:
    text = Text(cell.text, style=style)
    return text.append(f"\n{cell.detail}", style="dim") if cell.detail else text


def _cells(result: Mapping[str, Any]) -> list[Cell]:
    fidelity = section(result, "fidelity")
    return [
        share_cell(result),
        Cell(text=percent(number(result, "do"))),
        Cell(text=percent(number(result, "decline"))),
        Cell(
            text=percent(number(fidelity, "error_recall")),
            detail=_count(fidelity, "error_recall", "n_determined"),
        ),
        Cell(text=percent(number(fidelity, "values")), detail=_count(fidelity, "values", "n_determined")),
        share_cell(section(result, "unseen")),
    ]


def _count(fidelity: Mapping[str, Any], name: str, count: str) -> str:
    """The size of the sample; `error_recall` speaks of the errors in it, whose number is not recorded."""
    n = number(fidelity, count)
    if n is None or number(fidelity, name) is None:
        return ""
    return f"errors among {n:.0f}" if name == "error_recall" else f"n\u00a0=\u00a0{n:.0f}"


def _mean_rows(stage: str, results: Sequence[tuple[Outcome, Mapping[str, Any]]]) -> list[Row]:
    """A mean for every recipe with two measured runs or more."""
    recipes: dict[str, list[tuple[Outcome, Mapping[str, Any]]]] = {}
    for outcome, result in results:
        if result:
            recipes.setdefault(outcome.recipe, []).append((outcome, result))
    rows = []
    for members in recipes.values():
        if len(members) > 1:
            whose = f"mean of {len(members)}"
            if len(recipes) > 1:
                whose += f": {', '.join(outcome.label for outcome, _ in members)}"
            rows.append(Row(stage=stage, run=whose, cells=_mean_cells([r for _, r in members]), mean=True))
    return rows


def _mean_cells(results: Sequence[Mapping[str, Any]]) -> list[Cell]:
    paths = (
        ("success",),
        ("do",),
        ("decline",),
        ("fidelity", "error_recall"),
        ("fidelity", "values"),
        ("unseen", "success"),
    )
    return [_mean_cell([number(result, *path) for result in results]) for path in paths]


def _mean_cell(values: Sequence[float | None]) -> Cell:
    """Mean and range of the values there are, and of how many runs when not of all."""
    known = [value for value in values if value is not None]
    if not known:
        return Cell(text=MISSING)
    detail = f"{100 * min(known):.1f}\u00a0to\u00a0{100 * max(known):.1f}"
    if len(known) < len(values):
        detail += f", {len(known)} of {len(values)} runs"
    return Cell(text=percent(sum(known) / len(known)), detail=detail)


def _breakdown_rows(stages: Sequence[tuple[str, Mapping[str, Any]]], key: str) -> list[tuple[str, Sequence[Cell]]]:
    names = sorted({name for _, result in stages for name in section(result, key)})
    cell = _stop_cell if key == "stops" else _part_cell
    return [(name, [cell(section(result, key), name) for _, result in stages]) for name in names]


def _part_cell(parts: Mapping[str, Any], name: str) -> Cell:
    return share_cell(section(parts, name))


def _stop_cell(stops: Mapping[str, Any], name: str) -> Cell:
    """A count; a reason that others met and this stage did not is a counted 0, unless nothing was counted."""
    count = number(stops, name)
    if count is None:
        return Cell(text="0" if stops and name not in stops else MISSING)
    return Cell(text=f"{count:.0f}")
