"""Metrics of a group, by hand."""

from __future__ import annotations

import pytest

from envace.training.metrics import consistent_share, feasible_share, group_metrics, is_flat
from envace.types import (
    Author,
    Consistency,
    Exchange,
    Group,
    Learn,
    Role,
    Segment,
    StopReason,
    ToolCall,
    Trajectory,
)


def exchange(consistency: Consistency | None) -> Exchange:
    return Exchange(call=ToolCall(name="get", arguments={}), response={}, text="{}", consistency=consistency)


def trajectory(reward: float | None, stop: StopReason, *, feasible: bool | None = None) -> Trajectory:
    made = Trajectory(scenario_id="s", environment_id="e", kind="k", group=0, index=0, reward=reward, stop=stop)
    made.feasible = feasible
    if reward is not None:
        made.parts = {"calls": reward, "answer": reward / 2}
    return made


def test_metrics_of_a_group_by_hand() -> None:
    good, bad = trajectory(1.0, StopReason.REPLIED, feasible=True), trajectory(0.5, StopReason.PARSE, feasible=False)
    dead = trajectory(None, StopReason.INFRASTRUCTURE)
    good.segments = [
        Segment(ids=[1, 2, 3], author=Author.USER),
        Segment(ids=[4, 5], author=Author.ASSISTANT, role=Role.ACT, learn=Learn.POLICY, logprobs=[0, 0]),
        Segment(ids=[6, 7, 8, 9], author=Author.TOOL, role=Role.REHEARSE, learn=Learn.ANCHOR, logprobs=[0] * 4),
    ]
    bad.segments = [Segment(ids=[6, 7, 8, 9], author=Author.TOOL, learn=Learn.ANCHOR)]
    good.exchanges = [exchange(Consistency.CONSISTENT), exchange(Consistency.INCONSISTENT)]
    found = group_metrics([Group(scenario_id="s", trajectories=[good, bad, dead])])
    # The unscored trajectory is in no mean of rewards: (1 + .5) / 2.
    assert found["reward"] == pytest.approx(0.75)
    assert found["reward_std"] == pytest.approx(0.25)
    assert (found["part/calls"], found["part/answer"]) == (pytest.approx(0.75), pytest.approx(0.375))
    assert found["feasible_share"] == 0.5
    assert found["consistent_share"] == 0.5
    assert found["tokens_per_trajectory/act"] == pytest.approx(2 / 3)
    assert found["tokens_per_trajectory/rehearse"] == pytest.approx(4 / 3)
    assert found["anchored_tokens"] == 8  # sampled and handed over
    assert found["calls_per_trajectory"] == pytest.approx(2 / 3)
    assert found["stop/infrastructure"] == pytest.approx(1 / 3)
    assert sum(found[f"stop/{reason.value}"] for reason in StopReason) == pytest.approx(1.0)


def test_shares_of_nothing_are_none_not_zero() -> None:
    assert feasible_share([trajectory(1.0, StopReason.REPLIED)]) is None
    made = trajectory(1.0, StopReason.REPLIED)
    made.exchanges = [exchange(Consistency.UNDETERMINED), exchange(None)]
    assert consistent_share([made]) is None


def test_a_group_that_could_not_be_scored_is_not_flat() -> None:
    def group(*rewards: float | None) -> Group:
        made = [
            Trajectory(scenario_id="s", environment_id="e", kind="k", group=0, index=i, reward=reward)
            for i, reward in enumerate(rewards)
        ]
        return Group(scenario_id="s", trajectories=made)

    assert is_flat(group(0.5, 0.5))
    assert is_flat(group(0.1 + 0.2, 0.3))
    assert not is_flat(group(0.5, 0.6))
    assert not is_flat(group(0.5, None))
    assert not is_flat(group(None, None))
