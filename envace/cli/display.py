"""What the terminal shows: bars with rates and time left, or plain lines where there is no terminal."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import yaml
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from envace.jobs.display import Display
from envace.report.tables import results_table

PLAIN_EVERY = 10.0
"""Seconds between plain progress lines."""


def display_for(as_json: bool) -> Display:
    """Bars on a terminal, plain lines elsewhere; always on standard error."""
    console = Console(stderr=True)
    return Bars(console) if console.is_terminal and not as_json else Plain()


class Bars:
    """Rich progress bars."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def start(self, task: str, total: int) -> None:
        """Show a bar."""
        if self._progress is None:
            self._progress = Progress(
                TextColumn("{task.description:<12}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._progress.start()
        self._tasks[task] = self._progress.add_task(task, total=total, note="")

    def advance(self, task: str, done: int, note: str = "") -> None:
        """Move the bar."""
        if self._progress is not None:
            self._progress.update(self._tasks[task], completed=done, note=note)

    def finish(self, task: str) -> None:
        """Take the bars down once none is running."""
        self._tasks.pop(task, None)
        if self._progress is not None and not self._tasks:
            self._progress.stop()
            self._progress = None

    def say(self, text: str) -> None:
        """A line above the bars."""
        (self._progress.console if self._progress else self._console).print(text, markup=False, highlight=False)


class Plain:
    """One line every few seconds."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[int, float]] = {}
        self._last = 0.0

    def start(self, task: str, total: int) -> None:
        """Remember the total."""
        self._totals[task] = total, time.monotonic()

    def advance(self, task: str, done: int, note: str = "") -> None:
        """Print, unless a line was printed just now."""
        total, started = self._totals[task]
        now = time.monotonic()
        if now - self._last < PLAIN_EVERY and done < total:
            return
        self._last = now
        left = (now - started) / max(1, done) * (total - done)
        self.say(f"{task} {done}/{total} ({left:.0f} s left) {note}".rstrip())

    def finish(self, task: str) -> None:
        """Nothing to take down."""

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=sys.stderr, flush=True)


def show(result: dict[str, Any], as_json: bool, *, kind: str) -> None:
    """The result: one JSON object, or a table and the next command."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
        return
    console = Console()
    if kind == "plan":
        console.print(
            yaml.safe_dump(result["recipe"], sort_keys=False, allow_unicode=True), markup=False, highlight=False
        )
    for table in _tables(result, kind):
        console.print(table)
    for line in _next(result, kind):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tables(result: dict[str, Any], kind: str) -> list[Table]:
    if kind == "demo":
        return [results_table(run) for run in result.get("runs", [result])]
    if kind == "eval" and "full_marks" not in result:
        return [results_table({"evaluated": result})]
    if kind == "plan":
        return plan_tables(result)
    table = Table(show_header=False, box=None)
    if kind == "doctor":
        for check in result["checks"]:
            mark = Text("holds", style="green") if check["ok"] else Text("does not hold", style="red")
            table.add_row(mark, Text(check["name"]), Text(check["detail"]))
        return [table]
    if kind == "data":
        return _data_tables(result)
    for key, value in result.items():
        if key != "findings":
            table.add_row(key, Text(_cell(value)))
    findings = Table("scenario", "problem", "detail")
    for finding in result.get("findings", [])[:20]:
        findings.add_row(finding["scenario"], finding["problem"], finding["detail"])
    return [table, findings] if result.get("findings") else [table]


def _cell(value: Any) -> str:
    """A result as a person reads it: four digits, lists and objects without their brackets."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(inner)}" for name, inner in value.items()) or "none"
    return "—" if value is None else str(value)


def _data_tables(result: dict[str, Any]) -> list[Table]:
    """What is kept, how it is spread, and rows that are not kept."""
    table = Table(show_header=False, box=None)
    for key in ("source", "written", "rows", "kept", "mended"):
        if key in result:
            table.add_row(key, Text(str(result[key])))
    for reason, count in result["dropped"].items():
        table.add_row(f"dropped: {reason}", str(count))
    calls = result.get("judge_calls") or {}
    rows = {name: result.get(name) for name in ("turns", "tools", "items", "prompt_tokens")}
    rows |= {f"judge calls, one a {mode}": spread for mode, spread in calls.items()}
    spreads = Table("a row", "min", "mean", "median", "max", "over the limit")
    for name, spread in rows.items():
        if spread:
            over = "" if spread.get("over") is None else f"{spread['over']} ({spread['limit']})"
            spreads.add_row(name, *(str(spread.get(key, "")) for key in ("min", "mean", "median", "max")), over)
    examples = Table("row", "id", "reason", "detail")
    for shown in result["examples"]:
        row = "" if shown["row"] is None else str(shown["row"])
        examples.add_row(row, _plain(shown["id"][:40]), shown["reason"], _plain(shown["detail"]))
    return [table, *(each for each in (spreads, examples) if each.row_count)]


def _plain(text: str) -> Text:
    """Text of a data set, without what would steer a terminal."""
    return Text("".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text))


def plan_tables(result: dict[str, Any]) -> list[Table]:
    """A dry run: what it would take, what groups would be dead, and what lacks."""
    takes = Table("of a run", "an update", "in all", box=None)
    takes.add_row("rollouts", *(f"{result['rollouts'][of]:,}" for of in ("update", "run")))
    tokens = result["tokens"]
    for name, words in TOKENS.items():
        takes.add_row(words, *(f"{tokens[of][name]:,}" for of in ("update", "run")))
    takes.add_row("tokens of a prompt", "unknown" if tokens["prompt"] is None else f"{tokens['prompt']:g}", "")
    calls = result["judge_calls"] or {"update": "none", "run": "none", "turns": 0}
    a_turn = " (a user turn: the data is not here)" if calls["turns"] is None else ""
    takes.add_row(f"calls to the judge, at most{a_turn}", str(calls["update"]), str(calls["run"]))
    memory = Table("memory", "GB", box=None)
    if result["memory"] is None:
        memory.add_row("unknown", "")
    else:
        for name, size in result["memory"]["parts_gb"].items():
            memory.add_row(name, f"{size:.3f}")
        memory.add_row("all", f"{result['memory']['total_gb']:.3f}")
        for name, size in result["memory"]["available_gb"].items():
            memory.add_row(f"free: {name}", "none" if size is None else f"{size:.3f}")
    dead = Table("chance of success", "groups without spread (rewards 0 or 1)", box=None)
    for row in result["dead_groups"]:
        dead.add_row(f"{row['success']:g}", f"{row['dead']:.0%}")
    lacks = Table("missing", "why", "how to get it")
    for lack in result["missing"]:
        lacks.add_row(*(Text(lack[key]) for key in ("what", "why", "how")))
    return [takes, memory, dead, *([lacks] if result["missing"] else [])]


TOKENS = {
    "sampled_max": "tokens sampled, at most",
    "trained_max_shared": "tokens trained, at most",
    "trained_max_apart": "the same, a row an output",
}


def _next(result: dict[str, Any], kind: str) -> list[str]:
    """What to run next."""
    if kind == "demo":
        calls = result.get("real_calls_in_training")
        return [
            f"real environment calls in training: {calls}; {result['seconds']} s",
            f"look at {result['report']}",
            "next: envace recipe > my.yaml; envace train my.yaml updates=100",
        ]
    if kind == "doctor":
        fails = sum(not check["ok"] for check in result["checks"])
        return [f"{len(result['checks']) - fails} of {len(result['checks'])} hold on {result['model']}"]
    if kind == "sft":
        return [f"next: envace train RECIPE model={result['run']}"]
    if kind == "plan":
        return [f"missing: {len(result['missing'])}" if result["missing"] else "nothing is missing"]
    if kind == "train":
        return [f"next: envace eval RECIPE --model {result['run']}; envace report {result['run']}"]
    return []
