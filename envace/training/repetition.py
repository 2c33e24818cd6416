"""Whether outputs repeat themselves: a cheap measure over token ids that sees a collapse which entropy does not. Pure.

Source of the cases: a policy whose every output is one character over and over, while its entropy stays stable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from envace.types import Group, Role, Trajectory

WIDTH = 4
"""Tokens of an n-gram. JSON repeats its keys, so that shorter ones would repeat in healthy outputs."""


def repetition_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`repetition/act` and `repetition/rehearse`: the share of trajectories that repeat themselves in a role.

    A role in which no trajectory sampled anything has no entry.
    """
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    metrics = {}
    for role in Role:
        told = [verdict for trajectory in everyone if (verdict := repeats(trajectory, role)) is not None]
        if told:
            metrics[f"repetition/{role.value}"] = sum(told) / len(told)
    return metrics


def repeats(trajectory: Trajectory, role: Role) -> bool | None:
    """Whether more than half of a role's outputs are repetitive, or, in ACT, equal to the output before.

    None where the trajectory has no output in that role. A rehearsed response may well be the one before: two look-ups
    of one record get one answer.
    """
    outputs = [segment.ids for segment in trajectory.segments if segment.role is role and segment.ids]
    if not outputs:
        return None
    same = [False, *(role is Role.ACT and a == b for a, b in pairwise(outputs))]
    bad = [repetitive(ids) or again for ids, again in zip(outputs, same, strict=True)]
    return 2 * sum(bad) > len(bad)


def repetitive(ids: Sequence[int]) -> bool:
    """Whether one id makes up more than half of an output, or more than half of its 4-grams stood in it before.

    Outputs of fewer than four tokens are too short to tell.
    """
    if len(ids) < WIDTH:
        return False
    if 2 * max(Counter(ids).values()) > len(ids):
        return True
    grams = [tuple(ids[i : i + WIDTH]) for i in range(len(ids) - WIDTH + 1)]
    return 2 * (len(grams) - len(set(grams))) > len(grams)
