"""The report page: one self-contained HTML file made from run folders alone.

What tools, users and the policy wrote is hostile: the template escapes everything, and the page's policy
forbids scripts and every load from outside.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from envace.errors import RunError
from envace.report.plots import PANELS, Curve, Panel, curves, draw, swatch
from envace.report.reading import RunRecord, number, read_runs, section
from envace.report.rehearsals import RehearsalView, pick, rehearsal_views, trajectory_views
from envace.report.tables import COLUMNS, MISSING, Outcome, breakdowns, percent, result_rows
from envace.runs import RunFolder

TEMPLATE = "page.html.j2"
NOT_RECORDED = "not recorded"


@dataclass(frozen=True, kw_only=True)
class PlotView:
    """A drawn panel."""

    panel: Panel
    svg: Markup
    legend: Sequence[tuple[Markup, str]]


def report(runs: Sequence[Path], *, out: Path | None = None) -> Path:
    """Write the page of one run, or a comparison of several.

    Args:
        runs: Run folders; unfinished ones too.
        out: Where to write. By default `report.html` in the only run folder, or `comparison.html` beside the
            first of several.

    Returns:
        The path of the page.

    Raises:
        RunError: A folder is not a run, is damaged, or the page cannot be written.
    """
    records = read_runs(runs)
    path = _target(records, out)
    _write(path, render(records))
    return path


def render(runs: Sequence[RunRecord]) -> str:
    """The page as text. Pure."""
    views = [view for run in runs for view in rehearsal_views(run.rehearsals, run=run.label)]
    plots = _plots(runs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=_title(runs),
        several=len(runs) > 1,
        labels=[run.label for run in runs],
        recipes=_recipes(runs),
        headline=_headline(runs),
        facts=_facts(runs),
        missing=[(run.label, note) for run in runs for note in missing(run)],
        columns=COLUMNS,
        rows=result_rows([_outcome(run) for run in runs]),
        breakdowns=[(run.label, breakdowns(run.results)) for run in runs if breakdowns(run.results)],
        plots=plots,
        run_legend=_run_legend(runs),
        undrawn=[p.title for p in PANELS if p.kind != "sft" and p not in [plot.panel for plot in plots]],
        rehearsals=pick(views),
        rehearsal_summary=_rehearsal_summary(views),
        groups=[(run.label, _update_of(run), trajectory_views(run.group)) for run in runs if run.group],
        settings=[(run.label, json.dumps(run.config, indent=2, ensure_ascii=False)) for run in runs],
        differences=_differences(runs),
    )


def recipe_line(config: dict[str, Any]) -> str:
    """A recipe in one line: what is trained, how, and for how long."""
    names = (
        ("arm", "{}"),
        ("reward", "reward {}"),
        ("updates", "{} updates"),
        ("scenarios_per_update", "{} scenarios each"),
        ("group_size", "groups of {}"),
        ("learning_rate", "rate {}"),
        ("temperature", "temperature {}"),
        ("model", "model {}"),
        ("world", "world {}"),
    )
    return ", ".join(text.format(_words(config[key])) for key, text in names if config.get(key) is not None)


def missing(run: RunRecord) -> list[str]:
    """What this run has not, or not yet, said; in plain words."""
    updates, planned = run.of_kind("update"), number(run.config, "updates")
    done = max((number(record, "update") or 0.0 for record in updates), default=0.0)
    notes = []
    if updates and planned is not None and done < planned:
        notes.append(f"{done:.0f} of {planned:.0f} updates are logged: the run goes on, or was stopped.")
    if not run.results:
        notes.append("There is no results.json yet: the before/after table is empty.")
    elif lacking := _lacking(run.results):
        notes.append(f"Not measured: {', '.join(lacking)}.")
    absent = {
        "There is no env.json: versions and code revision are unknown.": run.environment,
        "No update is logged: there are no training curves.": updates,
        "No evaluation during training is logged: there is no curve of real success.": run.of_kind("eval"),
        "No rehearsal is recorded: nothing to set beside real answers.": run.rehearsals,
        "No training trajectory is recorded.": run.group,
    }
    notes += [note for note, there in absent.items() if not there]
    notes += [f"The last line of {name} was cut off and is left out." for name in run.torn]
    return notes


def _lacking(results: dict[str, Any]) -> list[str]:
    """Names of what results.json leaves open in the before/after table."""
    wanted = (
        ("success", ("success",)),
        ("fidelity", ("fidelity", "values")),
        ("unseen domain", ("unseen", "success")),
    )
    return [
        f"{name} {stage}"
        for key, stage in (("warm_up", "of the warm-up"), ("trained", "after training"))
        for name, path in wanted
        if number(results, key, *path) is None
    ]


def _title(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return f"Comparison of {len(runs)} runs"
    name = runs[0].config.get("name")
    return f"Run {name if isinstance(name, str) else runs[0].label}"


def _outcome(run: RunRecord) -> Outcome:
    recipe = {key: value for key, value in run.config.items() if key not in ("seed", "name")}
    return Outcome(label=run.label, results=run.results, recipe=json.dumps(recipe, sort_keys=True))


def _headline(runs: Sequence[RunRecord]) -> str:
    """Before and after in one sentence, for one run that has both."""
    before, after = (number(runs[0].results, stage, "success") for stage in ("warm_up", "trained"))
    if len(runs) > 1 or before is None or after is None:
        return ""
    text = f"Real success: {percent(before)} after the warm-up, {percent(after)} after training"
    calls = _real_calls(runs[0])
    return f"{text}, with {calls} real calls in training."


def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """What produced each run, one row a fact."""
    columns = [_run_facts(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    return [(name, [column.get(name, MISSING) for column in columns]) for name in names]


def _run_facts(run: RunRecord) -> dict[str, str]:
    packages = section(run.environment, "packages")
    revision = run.environment.get("revision")
    facts = {
        "Seed": _words(run.config.get("seed")),
        "Real calls in training": _real_calls(run),
        "Wall time": _wall_time(run),
        "Feasible share": _feasible(run),
        "Warm-up": _sft(run),
        "Code revision": _words(revision or None),
        "Versions": ", ".join(f"{name} {_words(version)}" for name, version in packages.items()) or NOT_RECORDED,
        "Python": _words(run.environment.get("python")),
        "Platform": _words(run.environment.get("platform")),
    }
    return {name: value for name, value in facts.items() if value}


def _real_calls(run: RunRecord) -> str:
    calls = number(run.results, "real_calls_in_training")
    if calls is not None:
        return f"{calls:,.0f}"
    logged = [record for record in run.of_kind("update") if number(record, "real_calls") is not None]
    if not logged:
        return NOT_RECORDED
    total = sum(number(record, "real_calls") or 0.0 for record in logged)
    return f"{total:,.0f} up to update {_words(logged[-1].get('update'))}"


def _wall_time(run: RunRecord) -> str:
    seconds = number(run.results, "seconds")
    if seconds is not None:
        return _duration(seconds)
    parts = [number(r, name) for r in run.of_kind("update") for name in ("seconds_rollout", "seconds_update")]
    known = [part for part in parts if part is not None]
    return f"{_duration(sum(known))} in the logged updates" if known else NOT_RECORDED


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _feasible(run: RunRecord) -> str:
    """First and last of the run, as results.json gives them."""
    shares = run.results.get("feasible_share")
    if not isinstance(shares, list) or len(shares) != 2:
        return ""
    first, last = (percent(number({"share": share}, "share")) for share in shares)
    return f"{first} at first, {last} at last"


def _sft(run: RunRecord) -> str:
    """Steps, loss and tokens of a supervised warm-up that this folder logged; empty where it logged none."""
    steps = run.of_kind("sft")
    losses = [loss for loss in (number(step, "loss") for step in steps) if loss is not None]
    if not losses:
        return ""
    tokens = sum(number(step, "tokens") or 0.0 for step in steps)
    fall = f"loss {losses[0]:.2f} to {losses[-1]:.2f} nats a token"
    return f"{len(steps)} logged steps, {fall}, {tokens:,.0f} tokens in them"


def _words(value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    if isinstance(value, list):
        return " + ".join(map(_words, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plots(runs: Sequence[RunRecord]) -> list[PlotView]:
    """All panels that have a curve."""
    labels = [run.label for run in runs]
    views = []
    for panel in PANELS:
        if shown := curves(panel, [run.metrics for run in runs]):
            svg = draw(shown, ylabel=panel.ylabel, xlabel=panel.x, share=panel.share)
            views.append(PlotView(panel=panel, svg=Markup(svg), legend=_legend(shown, labels)))
    return views


def _legend(shown: Sequence[Curve], labels: Sequence[str]) -> list[tuple[Markup, str]]:
    """Colours by series where there are several, else by run; a lone curve needs no legend."""
    series = {curve.name: curve.colour for curve in shown}
    if len(series) > 1:
        return [(Markup(swatch(colour=colour, dash=0)), name) for name, colour in series.items()]
    if len(labels) < 2:
        return []
    return [(Markup(swatch(colour=curve.colour, dash=curve.dash)), labels[curve.dash]) for curve in shown]


def _run_legend(runs: Sequence[RunRecord]) -> list[tuple[Markup, str]]:
    """Dash patterns of several runs."""
    if len(runs) < 2:
        return []
    return [(Markup(swatch(colour=None, dash=number)), run.label) for number, run in enumerate(runs)]


def _recipes(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Recipes in one line each, with the runs that share it."""
    found: dict[str, list[str]] = {}
    for run in runs:
        found.setdefault(recipe_line(run.config), []).append(run.label)
    return [(", ".join(labels), line) for line, labels in found.items()]


def _rehearsal_summary(views: Sequence[RehearsalView]) -> str:
    """How the rehearsals shown relate to all that were recorded."""
    if not views:
        return ""
    outcomes = Counter(view.success for view in views)
    faulty = sum(view.faulty for view in views)
    undecided = f", {outcomes[None]} undecided" if outcomes[None] else ""
    return (
        f"Recorded: {len(views)}. Real execution passed all checks in {outcomes[True]}, failed one or more "
        f"in {outcomes[False]}{undecided}; {faulty} rehearsed an answer that is wrong. Shown below: one that "
        "succeeded by doing, one that succeeded by declining, and one with a wrong answer, as far as there "
        "are such; the first of each, else the first of the rest."
    )


def _update_of(run: RunRecord) -> str:
    return _words(run.group[0].get("update"))


def _differences(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Settings in which several runs differ."""
    flat = [_flat(run.config) for run in runs]
    names = list(dict.fromkeys(name for settings in flat for name in settings))
    rows = [(name, [settings.get(name, MISSING) for settings in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    settings: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            settings |= _flat(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = json.dumps(value, ensure_ascii=False)
    return settings


def _target(runs: Sequence[RunRecord], out: Path | None) -> Path:
    """Where the page goes; a folder gets the page's usual name in it."""
    name = RunFolder(runs[0].path).report_file.name if len(runs) == 1 else "comparison.html"
    if out is not None:
        return out / name if out.is_dir() else out
    return (runs[0].path if len(runs) == 1 else runs[0].path.parent) / name


def _write(path: Path, page: str) -> None:
    """Write the page whole or not at all. Half a surrogate pair, which no file can hold, becomes `?`."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(page.encode("utf-8", "replace"))
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}. Name another place with --out.") from error
