"""Held-out scenarios that nothing can execute: rehearsed, and judged by their checklists."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from envace.benchmarks.intervals import wilson
from envace.types import Trajectory

FULL = 1 - 1e-9


def summarise_judged(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """`reward`, the mean, and `full_marks`, the share with its 95 % Wilson interval, by kind; why rehearsals stopped.

    There is no `success`: what a checklist says of a rehearsal is no proof that anything would have worked.
    Trajectories that could not be judged are counted as `undecided`, and stand in no share.
    """
    judged = [trajectory for trajectory in trajectories if trajectory.reward is not None]
    by_kind: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in judged:
        by_kind[trajectory.kind].append(trajectory)
    return {
        "success": None,
        **_share(judged),
        "reward": float(np.mean([trajectory.reward for trajectory in judged])) if judged else None,
        "undecided": len(trajectories) - len(judged),
        "by_kind": {kind: _share(group) for kind, group in sorted(by_kind.items())},
        "stops": dict(Counter(trajectory.stop.value for trajectory in trajectories)),
    }


def _share(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    wins = sum((trajectory.reward or 0.0) >= FULL for trajectory in trajectories)
    return {
        "full_marks": wins / len(trajectories) if trajectories else None,
        "n": len(trajectories),
        "ci": [round(bound, 4) for bound in wilson(wins, len(trajectories))],
    }
