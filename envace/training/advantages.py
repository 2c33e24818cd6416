"""Advantages. Pure functions on arrays.

Letters: B outputs (sampled segments), G groups, R roles, C cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envace.errors import TrainingError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of a batch of outputs, and what to know of them."""

    values_B: Floats
    """Reward minus the baseline of its cell, in reward units (or in standard deviations with `scale="std"`)."""
    lone_cells: int
    """Cells with one output: no baseline, advantage exactly 0."""
    flat_cells: int
    """Cells whose rewards are all equal: advantage exactly 0."""
    cells: int


def cell_advantages(
    rewards_B: Floats,
    cells_B: Ints,
    trajectories_B: Ints,
    *,
    baseline: Literal["outputs", "trajectories"] = "outputs",
    scale: Literal["none", "std"] = "none",
) -> Advantages:
    """Centre each output's reward on the mean of its own cell.

    With cells made of (group, role) this is role-wise GRPO: acting and rehearsing outputs differ in mean reward, so
    one shared baseline would credit a role for being easy rather than for doing well.

    Args:
        rewards_B: Reward of the output's trajectory, in [0, 1]. Shape (B,).
        cells_B: Cell id of each output. Shape (B,).
        trajectories_B: Trajectory id of each output. Shape (B,).
        baseline: `outputs`: the mean over outputs, where a long trajectory weighs more (the paper and its code).
            `trajectories`: each trajectory of the cell weighs once.
        scale: `none`, or `std` to divide by the cell's standard deviation (a cell without spread stays 0).

    Raises:
        TrainingError: A reward is not finite, or lengths differ.

    Source: role-wise GRPO, arXiv:2608.06197 section 4.2; no division by the standard deviation, as its code runs it.
    """
    if not len(rewards_B) == len(cells_B) == len(trajectories_B):
        raise TrainingError(
            f"{len(rewards_B)} rewards, {len(cells_B)} cells, {len(trajectories_B)} trajectories: lengths differ."
        )
    if not np.isfinite(rewards_B).all():
        raise TrainingError(f"{int((~np.isfinite(rewards_B)).sum())} of {len(rewards_B)} rewards are not finite.")
    values_B = np.zeros(len(rewards_B))
    lone = flat = 0
    cells = np.unique(cells_B)
    for cell in cells:
        members = np.flatnonzero(cells_B == cell)
        rewards = rewards_B[members]
        lone += len(members) == 1
        flat += len(members) > 1 and np.ptp(rewards) == 0
        if len(members) == 1 or np.ptp(rewards) == 0:
            continue
        if baseline == "trajectories":
            _, first = np.unique(trajectories_B[members], return_index=True)
            centre = rewards[first].mean()
        else:
            centre = rewards.mean()
        spread = rewards.std() if scale == "std" else 1.0
        values_B[members] = (rewards - centre) / spread
    return Advantages(values_B=values_B, lone_cells=lone, flat_cells=flat, cells=len(cells))


def cells_of(groups_B: Ints, roles_B: Ints, *, role_wise: bool = True) -> Ints:
    """Cell ids: one a (group, role), or one a group for the shared-baseline ablation. Shape (B,)."""
    return groups_B * 2 + roles_B if role_wise else groups_B
