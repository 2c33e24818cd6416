"""Alarms go off on a collapse, and only then; they follow from the records alone."""

from __future__ import annotations

from typing import Any

import pytest

from envace.errors import TrainingError
from envace.training.alarms import Watch, alarms_of
from envace.training.recipe import AlarmsSection, load_recipe
from envace.training.repetition import repeats, repetition_metrics, repetitive
from envace.types import Author, Group, Role, Segment, StopReason, Trajectory

HEALTHY: dict[str, Any] = {
    "kind": "update",
    "entropy/act": 0.12,
    "entropy/rehearse": 0.3,
    "repetition/act": 0.0,
    "repetition/rehearse": 0.02,
    "stop/length": 0.0,
    "tokens_per_trajectory/act": 27.0,
    "tokens_per_trajectory/rehearse": 10.0,
    "flat_cells": 0.1,
    "unscored": 0.0,
    "grad_norm": 0.05,
    "kl": 0.01,
}


def updates(count: int, **last: float) -> list[dict[str, Any]]:
    """So many healthy updates and then three with other numbers."""
    changed = {name.replace("__", "/"): value for name, value in last.items()}
    records = [dict(HEALTHY) for _ in range(count)] + [{**HEALTHY, **changed} for _ in range(3)]
    return [{**record, "update": number} for number, record in enumerate(records, 1)]


def names(records: list[dict[str, Any]], settings: AlarmsSection | None = None) -> list[str]:
    return [alarm.name for alarm in alarms_of(records, settings or AlarmsSection())]


@pytest.mark.parametrize(
    ("last", "name"),
    [
        ({"entropy__act": 0.009}, "entropy"),
        ({"entropy__rehearse": 0.02}, "entropy"),  # above the floor, below a tenth of 0.3
        ({"repetition__act": 0.6}, "repetition"),
        ({"repetition__rehearse": 1.0}, "repetition"),
        ({"stop__length": 0.7}, "length"),
        ({"tokens_per_trajectory__act": 150.0}, "length"),
        ({"flat_cells": 1.0}, "flat"),
        ({"unscored": 0.3}, "unscored"),
        ({"grad_norm": 0.6}, "grad_norm"),
        ({"kl": 0.8}, "kl"),
    ],
)
def test_each_threshold_sets_off_its_own_alarm(last: dict[str, float], name: str) -> None:
    assert names(updates(10, **last)) == [name]
    assert names(updates(10, **last)[:-1]) == []  # two in a row are not three


def test_a_healthy_run_sets_off_none() -> None:
    records = updates(20)
    assert [names(records[:i]) for i in range(1, len(records) + 1)] == [[]] * len(records)


def test_an_alarm_goes_off_once_until_the_metric_has_recovered() -> None:
    bad, good = {**HEALTHY, "kl": 2.0}, HEALTHY
    run = [good, bad, bad, bad, bad, bad, good, bad, bad, bad]
    records = [{**record, "update": number} for number, record in enumerate(run, 1)]
    assert [len(names(records[:i])) for i in range(1, 11)] == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_actions_are_for_all_or_for_single_alarms() -> None:
    settings = AlarmsSection(action="off", actions={"kl": "stop"})
    assert names(updates(10, kl=2.0, repetition__act=1.0), settings) == ["kl"]
    (alarm,) = alarms_of(updates(10, kl=2.0, repetition__act=1.0), settings)
    assert alarm.action == "stop"
    assert alarm.record() == {
        "kind": "alarm", "update": 13, "alarm": "kl", "metric": "kl", "value": 2.0, "limit": 0.5, "action": "stop",
    }  # fmt: skip
    assert "kl is 2, the limit 0.5, 3 updates in a row" in str(alarm)


def test_an_unknown_alarm_is_refused() -> None:
    from envace.errors import ConfigError

    with pytest.raises(ConfigError, match=r"alarms\.actions"):
        load_recipe({"alarms": {"actions": {"boredom": "stop"}}})


def test_missing_and_null_metrics_set_off_nothing() -> None:
    assert names([{"kind": "update", "update": number, "kl": None} for number in range(1, 9)]) == []


def test_a_resumed_watch_is_the_one_that_never_stopped() -> None:
    records = updates(6, kl=2.0)
    watch = Watch(AlarmsSection())
    watch.resume([*records[:-1], {"kind": "eval", "update": 5}])
    assert [alarm.name for alarm in watch.see(records[-1])] == ["kl"]


def test_a_run_that_an_alarm_stopped_does_not_go_on() -> None:
    records = updates(6, kl=2.0)
    (alarm,) = alarms_of(records, AlarmsSection(action="stop"))
    with pytest.raises(TrainingError, match="stopped by the alarm kl"):
        Watch(AlarmsSection(action="stop")).resume([*records, alarm.record()])
    Watch(AlarmsSection()).resume([*records, {**alarm.record(), "action": "warn"}])


# --- repetition -------------------------------------------------------------------------------------------------


def said(*outputs: list[int], role: Role = Role.ACT) -> Trajectory:
    segments = [Segment(ids=[1, 2, 3], author=Author.USER)]
    segments += [Segment(ids=ids, author=Author.ASSISTANT, role=role) for ids in outputs]
    return Trajectory(
        scenario_id="s", environment_id="e", kind="k", group=0, index=0, segments=segments, stop=StopReason.REPLIED
    )


def test_repetitive_is_one_token_or_one_ngram_over_and_over() -> None:
    assert repetitive([7] * 6)
    assert repetitive([1, 2, 3, 4] * 4)  # 13 4-grams, 4 distinct
    assert not repetitive(list(range(20)))
    assert not repetitive([7, 7, 7])  # too short to tell
    assert not repetitive([1, 2, 9, 4, 1, 2, 8, 4, 1, 2, 7, 4])  # the keys of a list of objects, with other values


def test_saying_the_same_again_is_repetition_in_acting_only() -> None:
    go = [4, 5, 6, 7, 8]
    assert repeats(said(go, go, go, go), Role.ACT)
    assert not repeats(said(go, [9, 8, 7, 6, 5], go), Role.ACT)
    assert not repeats(said(go, go, go, role=Role.REHEARSE), Role.REHEARSE)
    assert repeats(said(go), Role.REHEARSE) is None


def test_g7_a_collapse_is_seen_while_entropy_is_stable() -> None:
    """All outputs become `!!!!!!` after some updates; the entropy that is logged does not move."""
    exclamation = 33

    def update(number: int, collapsed: bool) -> dict[str, Any]:
        outputs = [[exclamation] * 6] * 2 if collapsed else [[10, 11, 12, 13, 14], [20, 21, 22, 23]]
        groups = [Group(scenario_id="s", trajectories=[said(*outputs) for _ in range(4)])]
        record = {key: value for key, value in HEALTHY.items() if not key.startswith("repetition/")}
        return {**record, "update": number, **repetition_metrics(groups)}

    watch = Watch(AlarmsSection(actions={"repetition": "stop"}))
    raised = {number: watch.see(update(number, collapsed=number > 63)) for number in range(1, 70)}
    assert {number for number, alarms in raised.items() if alarms} == {66}
    (alarm,) = raised[66]
    assert (alarm.name, alarm.action, alarm.finding.value) == ("repetition", "stop", 1.0)


def test_g1_a_run_in_which_every_cell_is_flat_is_told() -> None:
    records = [{**HEALTHY, "update": number, "flat_cells": 1.0, "grad_norm": 0.0} for number in range(1, 5)]
    assert [names(records[:i]) for i in range(1, 5)] == [[], [], ["flat"], []]
