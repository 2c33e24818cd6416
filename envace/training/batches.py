"""Training rows out of trajectories, and padded batches out of rows. Pure.

In the `shared` layout a trajectory is one row: both roles sampled in one growing sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envace.errors import TrainingError
from envace.training.advantages import Advantages, AdvantageSettings, Outputs, advantages
from envace.training.aggregation import token_weights
from envace.training.recipe import LossSection
from envace.types import Group, Learn, Role, Segment, Trajectory


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
    weights: NDArray[np.float32]
    """Share of the token in the mean over the update's tokens of its kind, `policy` or `anchor`; else 0."""
    logprobs: NDArray[np.float32]
    """Log-probability when it was sampled; 0 for given tokens."""
    rehearse: NDArray[np.bool_]
    """Sampled in the role REHEARSE."""
    prompt: int = 0
    """Given tokens that it begins with. Rows with equal ones can be read as one."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The rows of one update, and the advantages they hold."""

    rows: list[Row]
    advantages: Advantages
    dropped: int
    """Trajectories without a reward, which train nothing."""
    not_finite: int
    """Trajectories with a reward and a log-probability that is not finite, which train nothing either."""

    def metrics(self) -> dict[str, float]:
        """As docs/metrics.md defines them."""
        return {**self.advantages.metrics(), "dropped": self.dropped, "not_finite": self.not_finite}


@dataclass(frozen=True, kw_only=True)
class _Output:
    """Where a trained output is, and what its tokens get."""

    trajectory: int
    """Number among those that train."""
    position: int
    """Of the segment in its trajectory."""
    row: int
    """Number over all rows of the update."""
    segment: Segment


@dataclass(frozen=True, kw_only=True)
class _Credit:
    """What the tokens of an output get."""

    advantage: float
    weight: float
    trained: bool
    """False for outputs of lone and flat cells where `loss.flat` takes them out."""


def training_rows(
    groups: Sequence[Group],
    *,
    advantage: AdvantageSettings | None = None,
    loss: LossSection | None = None,
    roles: Collection[Role] = frozenset(Role),
) -> Training:
    """One row a rewarded trajectory (more where a prompt was rewritten), each output with its advantage and weight.

    Anchored outputs (look-up values of the imagined world) belong to no cell, and are the rehearsing role's to learn.
    A trajectory with a sampled log-probability that is not finite leaves its group and is counted.

    Args:
        groups: Of one update.
        advantage: What a reward is compared with.
        loss: How tokens are weighed.
        roles: Whose outputs are learned from.

    Raises:
        TrainingError: A segment has more or fewer log-probabilities than ids; or those of most trajectories are not
            finite.
    """
    loss = loss or LossSection()
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    rewarded = [trajectory for trajectory in everyone if trajectory.reward is not None]
    usable = [trajectory for trajectory in rewarded if _finite(trajectory)]
    _check_usable(rewarded, usable)
    parts = [part for number, trajectory in enumerate(usable) for part in _parts(number, trajectory)]
    outputs = [
        _Output(trajectory=number, position=position, row=row, segment=usable[number].segments[position])
        for row, (number, part) in enumerate(parts)
        for position in part
        if usable[number].segments[position].learn is Learn.POLICY and usable[number].segments[position].role in roles
    ]
    found = advantages(_columns(usable, outputs), advantage or AdvantageSettings())
    credit = _credit(outputs, found, loss)
    anchors = max(1, sum(len(s.ids) for t in usable for s in t.segments if s.learn is Learn.ANCHOR))
    anchor_weight = 1 / anchors if Role.REHEARSE in roles else 0.0
    rows = [_row(number, usable[number], part, credit, anchor_weight=anchor_weight) for number, part in parts]
    return Training(
        rows=rows,
        advantages=found,
        dropped=len(everyone) - len(rewarded),
        not_finite=len(rewarded) - len(usable),
    )


def _finite(trajectory: Trajectory) -> bool:
    held = (segment.logprobs for segment in trajectory.segments if segment.learn is Learn.POLICY and segment.logprobs)
    return all(np.isfinite(logprobs).all() for logprobs in held)


def _check_usable(rewarded: Sequence[Trajectory], usable: Sequence[Trajectory]) -> None:
    """What is left of an update must not be the survivors."""
    if 2 * len(usable) < len(rewarded):
        first = next(trajectory for trajectory in rewarded if not _finite(trajectory))
        raise TrainingError(
            f"{len(rewarded) - len(usable)} of {len(rewarded)} trajectories have log-probabilities that are not "
            f"finite, the first is rollout {first.index} of {first.scenario_id}: the model has diverged, or its server "
            f"is broken."
        )


def _parts(number: int, trajectory: Trajectory) -> Iterator[tuple[int, range]]:
    """The segments of each row: one from each prompt on that does not extend what stood before it."""
    starts = [n for n, segment in enumerate(trajectory.segments) if segment.opens_row and n]
    for begin, end in zip([0, *starts], [*starts, len(trajectory.segments)], strict=True):
        yield number, range(begin, end)


def _columns(usable: Sequence[Trajectory], outputs: Sequence[_Output]) -> Outputs:
    def ints(values: Iterable[int]) -> NDArray[np.int64]:
        return np.array(list(values), dtype=np.int64)

    return Outputs(
        rewards_B=np.array([usable[output.trajectory].reward for output in outputs], dtype=np.float64),
        groups_B=ints(usable[output.trajectory].group for output in outputs),
        roles_B=ints(output.segment.role is Role.REHEARSE for output in outputs),
        trajectories_B=ints(output.trajectory for output in outputs),
        tokens_B=ints(len(output.segment.ids) for output in outputs),
    )


def _credit(outputs: Sequence[_Output], found: Advantages, loss: LossSection) -> dict[tuple[int, int], _Credit]:
    """By trajectory and position of the segment."""
    units = {
        "output": list(range(len(outputs))),
        "trajectory": [output.trajectory for output in outputs],
        "row": [output.row for output in outputs],
    }[loss.unit]
    trained_B = ~found.dead_B | (loss.flat == "keep")
    weights_B = token_weights(
        np.array([len(output.segment.ids) for output in outputs], dtype=np.int64),
        np.array(units, dtype=np.int64),
        trained_B | (loss.flat != "drop"),
        aggregation=loss.aggregation,
        constant_length=loss.constant_length,
    )
    return {
        (output.trajectory, output.position): _Credit(advantage=float(value), weight=float(weight), trained=bool(live))
        for output, value, weight, live in zip(outputs, found.values_B, weights_B, trained_B, strict=True)
    }


def _row(
    number: int,
    trajectory: Trajectory,
    part_of: range,
    credit: dict[tuple[int, int], _Credit],
    *,
    anchor_weight: float,
) -> Row:
    segments = [(position, trajectory.segments[position]) for position in part_of]
    length = sum(len(segment.ids) for _, segment in segments)
    ids = np.zeros(length, dtype=np.int64)
    policy, anchor, rehearse = (np.zeros(length, dtype=np.bool_) for _ in range(3))
    values, weights, logprobs = (np.zeros(length, dtype=np.float32) for _ in range(3))
    start = 0
    for position, segment in segments:
        part = slice(start, start + len(segment.ids))
        start = part.stop
        ids[part] = segment.ids
        rehearse[part] = segment.role is Role.REHEARSE
        if segment.learn is Learn.ANCHOR and anchor_weight:
            anchor[part], weights[part] = True, anchor_weight
        given = credit.get((number, position))
        if given is None:
            continue
        if segment.logprobs is None or len(segment.logprobs) != len(segment.ids):
            raise TrainingError(
                f"{trajectory.scenario_id}: segment {position} has {len(segment.ids)} sampled ids but "
                f"{len(segment.logprobs or [])} log-probabilities; nothing is padded, so it cannot be trained on."
            )
        logprobs[part] = segment.logprobs
        if given.trained:
            policy[part], values[part], weights[part] = True, given.advantage, given.weight
    return Row(
        ids=ids,
        policy=policy,
        anchor=anchor,
        advantages=values,
        weights=weights,
        logprobs=logprobs,
        rehearse=rehearse,
        prompt=_prompt([segment for _, segment in segments]),
    )


def _prompt(segments: Sequence[Segment]) -> int:
    """Tokens before the first that anything is learned from."""
    given = itertools.takewhile(lambda segment: segment.role is None and segment.learn is Learn.NOTHING, segments)
    return sum(len(segment.ids) for segment in given)


def pad(arrays: Sequence[NDArray[np.generic]], value: int | float = 0) -> NDArray[np.generic]:
    """Stack one-dimensional arrays into (B, T), padded on the right."""
    longest = max(map(len, arrays))
    out = np.full((len(arrays), longest), value, dtype=arrays[0].dtype)
    for index, array in enumerate(arrays):
        out[index, : len(array)] = array
    return out
