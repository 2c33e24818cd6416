"""Metrics of the groups of an update; docs/metrics.md defines each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from envace.rewards.judge import Judge
from envace.training.advantages import FLAT
from envace.training.repetition import repetition_metrics
from envace.types import Consistency, Group, Learn, Role, StopReason, Trajectory


def group_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Rewards and their parts, feasible share, consistency, tokens by role, and why trajectories stopped."""
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    scored = [trajectory for trajectory in everyone if trajectory.reward is not None]
    rewards = np.array([trajectory.reward for trajectory in scored])
    stops = Counter(trajectory.stop for trajectory in everyone)
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        **{f"part/{name}": value for name, value in _mean_parts(scored).items()},
        "feasible_share": feasible_share(everyone),
        "consistent_share": consistent_share(everyone),
        "tokens_per_trajectory/act": float(np.mean([t.count(Role.ACT) for t in everyone])),
        "tokens_per_trajectory/rehearse": float(np.mean([t.count(Role.REHEARSE) for t in everyone])),
        "anchored_tokens": sum(len(s.ids) for t in everyone for s in t.segments if s.learn is Learn.ANCHOR),
        "calls_per_trajectory": float(np.mean([len(t.exchanges) for t in everyone])),
        **repetition_metrics(groups),
        "unscored": 1 - len(scored) / len(everyone),
        **{f"stop/{reason.value}": stops[reason] / len(everyone) for reason in StopReason},
    }


def is_flat(group: Group) -> bool:
    """Whether all of a group was scored, and alike: it cannot teach anything."""
    rewards = [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]
    return len(rewards) == len(group.trajectories) and max(rewards) - min(rewards) <= FLAT


def renumbered(groups: Sequence[Group]) -> list[Group]:
    """The groups of an update, each trajectory bearing its group's place among them."""
    for number, group in enumerate(groups):
        for trajectory in group.trajectories:
            trajectory.group = number
    return list(groups)


JUDGE = ("calls", "retries", "decided", "cached", "unavailable", "prompt_tokens", "sampled_tokens", "cost")
"""What of a judge's counters is logged."""


def judge_metrics(judge: Judge | None) -> dict[str, float]:
    """What a judge was asked so far; empty where there is none."""
    if judge is None:
        return {}
    counters = judge.counters
    counted = {f"judge/{name}": float(getattr(counters, name)) for name in JUDGE}
    return {**counted, "judge/failures": float(counters.failures.total())}


def _mean_parts(scored: Sequence[Trajectory]) -> dict[str, float]:
    names = scored[0].parts if scored else {}
    return {name: float(np.mean([trajectory.parts[name] for trajectory in scored])) for name in names}


def feasible_share(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of worlds in which the request can be done, among those where that is determined; None if there is none."""
    known = [trajectory.feasible for trajectory in trajectories if trajectory.feasible is not None]
    return float(np.mean(known)) if known else None


def consistent_share(trajectories: Sequence[Trajectory]) -> float | None:
    """Share of consistent responses among those the contract could judge; None if there is none."""
    judged = [
        exchange.consistency is Consistency.CONSISTENT
        for trajectory in trajectories
        for exchange in trajectory.exchanges
        if exchange.consistency not in (None, Consistency.UNDETERMINED)
    ]
    return float(np.mean(judged)) if judged else None
