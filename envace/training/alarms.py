"""Alarms: signs of a collapse in the metrics of a run. Pure over metric records, so that they can be raised again.

A run that is resumed has the alarms of one that never stopped, as they follow from its records alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from envace.errors import TrainingError
from envace.training.recipe import AlarmAction, AlarmName, AlarmsSection
from envace.types import Role

Record = dict[str, Any]
SPIKE_OVER = 20
"""Updates before, whose median a gradient norm is compared with; five at least."""
ROLES = tuple(role.value for role in Role)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A metric of one update beyond its threshold."""

    metric: str
    value: float
    limit: float
    words: str
    """What that is, to be followed by the value."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A finding that lasted."""

    name: AlarmName
    update: int
    finding: Finding
    action: AlarmAction
    patience: int

    def __str__(self) -> str:
        found = self.finding
        return (
            f"alarm {self.name}: {found.words}: {found.metric} is {found.value:.4g}, the limit {found.limit:.4g}, "
            f"{self.patience} updates in a row"
        )

    def record(self) -> Record:
        """A record of metrics.jsonl."""
        return {
            "kind": "alarm",
            "update": self.update,
            "alarm": self.name,
            "metric": self.finding.metric,
            "value": self.finding.value,
            "limit": self.finding.limit,
            "action": self.action,
        }


class Watch:
    """Reads the records of a run one after the other, and raises alarms."""

    def __init__(self, settings: AlarmsSection) -> None:
        self._settings = settings
        self._updates: list[Record] = []

    def resume(self, records: Sequence[Record]) -> None:
        """Take over what a run has logged so far.

        Raises:
            TrainingError: It was stopped by an alarm: going on would train what is collapsing.
        """
        self._updates = [record for record in records if record["kind"] == "update"]
        done = self._updates[-1]["update"] if self._updates else 0
        for record in records:
            if record["kind"] == "alarm" and record["action"] == "stop" and record["update"] == done:
                raise TrainingError(
                    f"The run was stopped by the alarm {record['alarm']} ({record['metric']} {record['value']:.4g}) "
                    f"after update {done}, so it cannot go on. Begin another run from its best/ or a checkpoint, with "
                    "another recipe."
                )

    def see(self, record: Record) -> list[Alarm]:
        """The alarms that an update's record sets off."""
        self._updates.append(record)
        return alarms_of(self._updates, self._settings)


def alarms_of(updates: Sequence[Record], settings: AlarmsSection) -> list[Alarm]:
    """The alarms that the last of a run's update records sets off.

    An alarm goes off at the last of `patience` updates in a row beyond a threshold, once: it does so again only after
    an update that was not.
    """
    alarms = []
    for name, rule in RULES.items():
        action = settings.actions.get(name, settings.action)
        if action == "off":
            continue
        for metric, finding in _lasting(updates, settings, rule):
            if not any(found.metric == metric for found in _found(updates[: -settings.patience], settings, rule)):
                alarms.append(
                    Alarm(
                        name=name,
                        update=updates[-1]["update"],
                        finding=finding,
                        action=action,
                        patience=settings.patience,
                    )
                )
    return alarms


Rule = Callable[[Sequence[Record], AlarmsSection], Iterator[Finding]]
"""From the records up to an update, what is beyond a threshold in it."""


def _found(updates: Sequence[Record], settings: AlarmsSection, rule: Rule) -> list[Finding]:
    return list(rule(updates, settings)) if updates else []


def _lasting(updates: Sequence[Record], settings: AlarmsSection, rule: Rule) -> Iterator[tuple[str, Finding]]:
    """Findings of the last update whose metric was beyond in each of `patience` updates."""
    if len(updates) < settings.patience:
        return
    runs = [_found(updates[: len(updates) - back], settings, rule) for back in range(settings.patience)]
    for finding in runs[0]:
        if all(any(found.metric == finding.metric for found in earlier) for earlier in runs[1:]):
            yield finding.metric, finding


def _entropy(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    for role in ROLES:
        metric = f"entropy/{role}"
        value = _number(updates[-1], metric)
        if value is None:
            continue
        begun = _begun(updates, metric, settings)
        limit = max(settings.entropy, settings.entropy_drop * begun if begun is not None else 0.0)
        if value < limit:
            yield Finding(metric=metric, value=value, limit=limit, words="outputs hardly vary any more")


def _repetition(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    for role in ROLES:
        yield from _above(updates, f"repetition/{role}", settings.repetition, "outputs repeat themselves")


def _length(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    yield from _above(updates, "stop/length", settings.length, "rollouts are cut by a limit on tokens")
    for role in ROLES:
        metric = f"tokens_per_trajectory/{role}"
        begun = _begun(updates, metric, settings)
        if begun:
            yield from _above(updates, metric, settings.growth * begun, "rollouts grow longer and longer")


def _flat(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    words = "nearly all cells are dead: equal rewards teach nothing"
    yield from _above(updates, "flat_cells", settings.flat, words)


def _unscored(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    yield from _above(updates, "unscored", settings.unscored, "many trajectories could not be scored")


def _grad_norm(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    before = [value for record in updates[-SPIKE_OVER - 1 : -1] if (value := _number(record, "grad_norm")) is not None]
    if len(before) >= 5 and median(before) > 0:
        yield from _above(updates, "grad_norm", settings.grad_norm * median(before), "the gradient spikes")


def _kl(updates: Sequence[Record], settings: AlarmsSection) -> Iterator[Finding]:
    yield from _above(updates, "kl", settings.kl, "the policy is far from where it started")


RULES: dict[AlarmName, Rule] = {
    "entropy": _entropy,
    "repetition": _repetition,
    "length": _length,
    "flat": _flat,
    "unscored": _unscored,
    "grad_norm": _grad_norm,
    "kl": _kl,
}


def _above(updates: Sequence[Record], metric: str, limit: float, words: str) -> Iterator[Finding]:
    value = _number(updates[-1], metric)
    if value is not None and value > limit:
        yield Finding(metric=metric, value=value, limit=limit, words=words)


def _begun(updates: Sequence[Record], metric: str, settings: AlarmsSection) -> float | None:
    """What the run began with; None while it is beginning."""
    if len(updates) <= settings.first:
        return None
    values = [value for record in updates[: settings.first] if (value := _number(record, metric)) is not None]
    return mean(values) if values else None


def _number(record: Record, metric: str) -> float | None:
    value = record.get(metric)
    return float(value) if isinstance(value, int | float) else None
