"""What a report needs of a run folder. A run may be unfinished: everything but the recipe can be missing."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envace.errors import RunError
from envace.runs import RunFolder, read_lines

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run, as its folder tells it."""

    label: str
    """Name of the folder; with its parents where that is not unique."""
    path: Path
    config: Record
    environment: Record
    """env.json; empty where there is none."""
    metrics: Sequence[Record]
    results: Record
    """results.json; empty before the run has any."""
    group: Sequence[Record]
    """Training trajectories of the last recorded group."""
    rehearsals: Sequence[Record]
    """Rehearsals of the last update that has any."""
    torn: Sequence[str]
    """Files whose last line was cut off and left out."""

    def of_kind(self, kind: str) -> list[Record]:
        """Metric records of a kind (`sft`, `update`, `eval`), in order."""
        return [record for record in self.metrics if record.get("kind") == kind]


def number(record: Any, *keys: str) -> float | None:
    """The finite number at nested keys; None where there is none, so that nothing missing is shown as 0."""
    value = record
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def interval(record: Any) -> tuple[float, float] | None:
    """The `ci` of a record; None where there is none."""
    bounds = record.get("ci") if isinstance(record, dict) else None
    if not isinstance(bounds, list) or len(bounds) != 2:
        return None
    low, high = (number({"bound": bound}, "bound") for bound in bounds)
    return None if low is None or high is None else (low, high)


def section(record: Any, key: str) -> Record:
    """The object at a key; empty where there is none."""
    value = record.get(key) if isinstance(record, dict) else None
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Record]:
    """The objects in what should be a list of objects."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def read_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read run folders; one named twice is read once.

    Raises:
        RunError: There is none, one is not a run folder, or a file in it is damaged.
    """
    unique = list(dict.fromkeys(path.resolve() for path in paths))
    if not unique:
        raise RunError("A report needs at least one run folder.")
    return [read_run(path, label) for path, label in zip(unique, _labels(unique), strict=True)]


def read_run(path: Path, label: str) -> RunRecord:
    """Read one run folder. Raises RunError when it is none, or damaged."""
    folder = RunFolder.open(path)
    environment = path / "env.json"
    trajectories = list(_records(folder.trajectories_file))
    last = _last_update(r for r in trajectories if r.get("kind") == "train")
    return RunRecord(
        label=label,
        path=path,
        config=folder.config(),
        environment=_object(environment) if environment.exists() else {},
        metrics=list(_records(folder.metrics_file)),
        results=folder.results(),
        group=[record for record in last if record.get("group") == last[0].get("group")],
        rehearsals=_last_update(r for r in trajectories if r.get("kind") == "rehearsal"),
        torn=[file.name for file in (folder.metrics_file, folder.trajectories_file) if _is_torn(file)],
    )


def _records(path: Path) -> Iterator[Record]:
    """Every whole record; a last line cut off within a character counts as cut off, not as damage."""
    line = 0
    try:
        for line, record in enumerate(read_lines(path), 1):
            if not isinstance(record, dict):
                raise RunError(f"{path}:{line} is not a JSON object; the run folder is damaged.")
            yield record
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            raise RunError(f"{path} is not UTF-8 after line {line}; the run folder is damaged.") from None
    except RecursionError:
        raise RunError(f"{path}:{line + 1} is nested too deeply to be read; the run folder is damaged.") from None


def _object(path: Path) -> Record:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from None
    return value if isinstance(value, dict) else {}


def _last_update(records: Iterable[Record]) -> list[Record]:
    """The records of the highest update, in order."""
    found = list(records)
    last = max((number(record, "update") or 0.0 for record in found), default=0.0)
    return [record for record in found if (number(record, "update") or 0.0) == last]


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read() != b"\n"


def _labels(paths: Sequence[Path]) -> list[str]:
    """The shortest tails of the paths that tell them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        labels = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(labels)) == len(paths):
            break
    return labels
