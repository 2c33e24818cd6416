"""Training rows out of trajectories, and padded batches out of rows. Pure.

In the `shared` layout a trajectory is one row: both roles sampled in one growing sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envace.errors import TrainingError
from envace.training.advantages import Advantages, cell_advantages, cells_of
from envace.types import Group, Learn, Role, Trajectory


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence to train on. All arrays have its length T; index t speaks of the token at t."""

    ids: NDArray[np.int64]
    policy: NDArray[np.bool_]
    """Tokens with a policy gradient."""
    anchor: NDArray[np.bool_]
    """Tokens with a KL to the reference only."""
    advantages: NDArray[np.float32]
    """Advantage of the token's output; 0 where `policy` is False."""
    logprobs: NDArray[np.float32]
    """Log-probability when it was sampled; 0 for given tokens."""
    rehearse: NDArray[np.bool_]
    """Sampled in the role REHEARSE."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The rows of one update, and the advantages they hold."""

    rows: list[Row]
    advantages: Advantages
    dropped: int
    """Trajectories without a reward, which train nothing."""


def training_rows(
    groups: Sequence[Group],
    *,
    roles: Collection[Role] = frozenset(Role),
    advantage: str = "role-wise",
    baseline: str = "outputs",
    scale: str = "none",
) -> Training:
    """One row a rewarded trajectory (more where a prompt was rewritten), each output with the advantage of its cell.

    Anchored outputs (look-up values of the imagined world) belong to no cell, and are the rehearsing role's to learn.

    Args:
        groups: Of one update.
        roles: Whose outputs are learned from.
        advantage: What a reward is compared with.
        baseline: What a cell's mean is taken over.
        scale: Whether an advantage is divided by its cell's spread.
    """
    scored = [t for group in groups for t in group.trajectories if t.reward is not None]
    outputs = [
        (number, position)
        for number, trajectory in enumerate(scored)
        for position, segment in enumerate(trajectory.segments)
        if segment.learn is Learn.POLICY and segment.role in roles
    ]
    played = [int(scored[n].segments[p].role is Role.REHEARSE) for n, p in outputs]
    advantages = cell_advantages(
        np.array([scored[n].reward for n, _ in outputs], dtype=np.float64),
        cells_of(
            np.array([scored[n].group for n, _ in outputs], dtype=np.int64),
            np.array(played, dtype=np.int64),
            role_wise=advantage == "role-wise",
        ),
        np.array([n for n, _ in outputs], dtype=np.int64),
        baseline="trajectories" if baseline == "trajectories" else "outputs",
        scale="std" if scale == "std" else "none",
    )
    credit = {output: float(value) for output, value in zip(outputs, advantages.values_B, strict=True)}
    anchors = Role.REHEARSE in roles
    rows = [row for number, trajectory in enumerate(scored) for row in _rows(number, trajectory, credit, anchors)]
    # A row of a rehearsal is of no use to whoever learns to act alone.
    rows = [row for row in rows if row.policy.any() or row.anchor.any()]
    return Training(rows=rows, advantages=advantages, dropped=sum(len(g.trajectories) for g in groups) - len(scored))


def _rows(number: int, trajectory: Trajectory, credit: dict[tuple[int, int], float], anchors: bool) -> Iterator[Row]:
    """A row from each prompt on that does not extend what stood before it."""
    starts = [n for n, segment in enumerate(trajectory.segments) if segment.opens_row and n]
    for begin, end in zip([0, *starts], [*starts, len(trajectory.segments)], strict=True):
        yield _row(number, trajectory, range(begin, end), credit, anchors)


def _row(
    number: int, trajectory: Trajectory, part_of: range, credit: dict[tuple[int, int], float], anchors: bool
) -> Row:
    segments = [(position, trajectory.segments[position]) for position in part_of]
    length = sum(len(segment.ids) for _, segment in segments)
    ids = np.zeros(length, dtype=np.int64)
    policy, anchor, rehearse = (np.zeros(length, dtype=np.bool_) for _ in range(3))
    advantages, logprobs = (np.zeros(length, dtype=np.float32) for _ in range(2))
    start = 0
    for position, segment in segments:
        part = slice(start, start + len(segment.ids))
        start = part.stop
        ids[part] = segment.ids
        rehearse[part] = segment.role is Role.REHEARSE
        anchor[part] = anchors and segment.learn is Learn.ANCHOR
        if (number, position) in credit:
            if segment.logprobs is None or len(segment.logprobs) != len(segment.ids):
                raise TrainingError(
                    f"{trajectory.scenario_id}: segment {position} has {len(segment.ids)} sampled ids but "
                    f"{len(segment.logprobs or [])} log-probabilities; nothing is padded, so it cannot be trained on."
                )
            policy[part] = True
            advantages[part] = credit[number, position]
            logprobs[part] = segment.logprobs
    return Row(ids=ids, policy=policy, anchor=anchor, advantages=advantages, logprobs=logprobs, rehearse=rehearse)


def pad(arrays: Sequence[NDArray[np.generic]], value: int | float = 0) -> NDArray[np.generic]:
    """Stack one-dimensional arrays into (B, T), padded on the right."""
    longest = max(map(len, arrays))
    out = np.full((len(arrays), longest), value, dtype=arrays[0].dtype)
    for index, array in enumerate(arrays):
        out[index, : len(array)] = array
    return out
