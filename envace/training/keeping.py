"""The best weights so far, by the evaluations during training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envace.runs import RunFolder

BEST_FOLDER = "best"
"""Where a run folder keeps them: a model folder like any other."""
NOTE = "best.json"
"""In it: which evaluation it is of."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best evaluation so far."""

    update: int
    metric: str
    """`success`, or where no evaluation has one, `reward`."""
    value: float


def best_of(evaluations: Sequence[dict[str, Any]]) -> Best | None:
    """The best of a run's evaluation records, the earliest of equal ones; None where none has a number."""
    for metric in ("success", "reward"):
        known = [record for record in evaluations if isinstance(record.get(metric), int | float)]
        if known:
            best = max(known, key=lambda record: float(record[metric]))  # the first of equals
            return Best(update=int(best["update"]), metric=metric, value=float(best[metric]))
    return None


class Keeper:
    """Writes the weights whenever the last evaluation is the best of all.

    A trainer writes a checkpoint first where `due`: a run that is killed then goes on from there or later, and never
    has weights in `best/` of an update that it is yet to make.
    """

    def __init__(self, folder: RunFolder, save: Callable[[Path, dict[str, str]], None], *, enabled: bool) -> None:
        """Make one.

        Args:
            folder: The run.
            save: Writes the present weights as a model folder, whole or not at all, with these further text files.
            enabled: Whether anything is kept.
        """
        self._folder, self._save, self._enabled = folder, save, enabled
        self.path = folder.path / BEST_FOLDER

    def due(self, update: int) -> bool:
        """Whether the weights after this update are the best so far and not kept yet."""
        best = self._best()
        return best is not None and best.update == update and self._kept() != best

    def keep(self, update: int) -> None:
        """Keep the present weights where they are `due`. Raises RunError when the disk refuses; the older ones stay."""
        best = self._best()
        if best is None or not self.due(update):
            return
        self._save(self.path, {NOTE: json.dumps(asdict(best))})
        self._folder.write_json(self._folder.results_file, {**self._folder.results(), "best": asdict(best)})

    def _best(self) -> Best | None:
        return best_of(self._folder.metrics("eval")) if self._enabled else None

    def _kept(self) -> Best | None:
        """What `best/` holds and `results.json` says; None where they do not agree."""
        try:
            note = json.loads((self.path / NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return Best(**note) if note == self._folder.results().get("best") else None
