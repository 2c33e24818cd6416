"""Advantages. Pure functions on arrays.

Letters: B outputs (sampled segments), C cells (outputs that are compared with one another).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envace.errors import TrainingError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

AdvantageKind = Literal["cells", "global", "global-baseline"]

FLAT = 1e-6
"""Rewards of a cell that lie within this of one another are equal: the rest is the noise of adding floats."""

ROLES = ("act", "rehearse")
"""Names of the roles 0 and 1 in metrics."""


@dataclass(frozen=True, kw_only=True)
class AdvantageSettings:
    """What an output's reward is compared with."""

    kind: AdvantageKind = "cells"
    """`cells`: centred on the output's own cell. `global`: whitened over all tokens of the update. `global-baseline`:
    centred on the cell, then whitened."""
    role_wise: bool = True
    """Whether the roles are compared apart: cells are (group, role), and each role is whitened by itself."""
    baseline: Literal["outputs", "trajectories"] = "outputs"
    """A cell's mean over `outputs`, where a long trajectory weighs more, or over `trajectories`, each weighing once."""
    scale: Literal["none", "std"] = "none"
    """`std` divides by the cell's standard deviation, over what `baseline` says. `global` has no cells."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of an update, one column a fact."""

    rewards_B: Floats
    """Reward of the output's trajectory, in [0, 1]."""
    groups_B: Ints
    roles_B: Ints
    """0 for ACT, 1 for REHEARSE."""
    trajectories_B: Ints
    tokens_B: Ints
    """Sampled tokens."""


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of an update's outputs, and what to know of them."""

    values_B: Floats
    """In reward units; in standard deviations with `scale="std"` and with the global kinds."""
    dead_B: Bools
    """Outputs of lone and flat cells: advantage exactly 0."""
    cells: int
    lone_cells: int
    """Cells whose outputs are all of one trajectory: nothing to compare with."""
    flat_cells: int
    """Cells of several trajectories whose rewards are all equal."""
    flat_share: dict[str, float]
    """By role: the share of the cells with outputs of this role that are flat. Roles without a cell are absent."""

    def metrics(self) -> dict[str, float]:
        """As docs/metrics.md defines them."""
        return {
            "flat_cells": self.flat_cells / max(1, self.cells),
            **{f"flat_cells/{role}": share for role, share in self.flat_share.items()},
            "lone_cells": self.lone_cells,
        }


def advantages(outputs: Outputs, settings: AdvantageSettings) -> Advantages:
    """Compare each output's reward with those of its cell, or of the whole update.

    With cells made of (group, role) this is role-wise GRPO: acting and rehearsing outputs differ in mean reward, so
    one shared baseline would credit a role for being easy rather than for doing well.

    Raises:
        TrainingError: A reward is not finite, or lengths differ.

    Source: role-wise GRPO, arXiv:2608.06197 section 4.2, without a division by the standard deviation, as its code
    runs it (arXiv:2503.20783); with it arXiv:2402.03300. The global kinds: REINFORCE++, arXiv:2501.03262.
    """
    _check(outputs)
    cells_B = _cells(outputs, settings)
    size = len(outputs.rewards_B)
    values_B, dead_B = np.zeros(size), np.zeros(size, dtype=np.bool_)
    lone, flat = [], []
    members_C = [np.flatnonzero(cells_B == cell) for cell in np.unique(cells_B)]
    for members in members_C:
        rewards, trajectories = outputs.rewards_B[members], outputs.trajectories_B[members]
        lone.append(len(np.unique(trajectories)) == 1)
        flat.append(not lone[-1] and bool(np.ptp(rewards) <= FLAT))
        dead_B[members] = lone[-1] or flat[-1]
        if not dead_B[members[0]]:
            values_B[members] = _compared(rewards, trajectories, settings)
    if settings.kind != "cells":
        parts_B = outputs.roles_B if settings.role_wise else np.zeros_like(outputs.roles_B)
        values_B = np.where(dead_B, 0.0, _whitened(values_B, outputs.tokens_B, parts_B))
    return Advantages(
        values_B=values_B,
        dead_B=dead_B,
        cells=len(members_C),
        lone_cells=sum(lone),
        flat_cells=sum(flat),
        flat_share=_flat_share(members_C, flat, outputs.roles_B),
    )


def _check(outputs: Outputs) -> None:
    columns = {name: len(column) for name, column in vars(outputs).items()}
    if len(set(columns.values())) > 1:
        raise TrainingError(f"Columns of outputs have lengths {columns}: lengths differ.")
    bad = int((~np.isfinite(outputs.rewards_B)).sum())
    if bad:
        raise TrainingError(f"{bad} of {len(outputs.rewards_B)} rewards are not finite.")


def _cells(outputs: Outputs, settings: AdvantageSettings) -> Ints:
    """Which outputs are compared: those of one group, or with `global` all, and of one role where roles are apart."""
    groups_B = np.zeros_like(outputs.groups_B) if settings.kind == "global" else outputs.groups_B
    return groups_B * 2 + outputs.roles_B if settings.role_wise else groups_B


def _compared(rewards: Floats, trajectories: Ints, settings: AdvantageSettings) -> Floats:
    """A cell's rewards against its baseline."""
    if settings.kind == "global":
        return rewards
    basis = rewards
    if settings.baseline == "trajectories":
        _, first = np.unique(trajectories, return_index=True)
        basis = rewards[first]
    # n - 1, as in the published implementations of GRPO.
    spread = float(basis.std(ddof=1)) if settings.scale == "std" else 1.0
    return (rewards - float(basis.mean())) / spread


def _whitened(values_B: Floats, tokens_B: Ints, parts_B: Ints) -> Floats:
    """Each part with mean 0 and variance 1 over its tokens, every token bearing the value of its output."""
    whitened_B = np.zeros_like(values_B)
    for part in np.unique(parts_B):
        values, tokens = values_B[parts_B == part], tokens_B[parts_B == part]
        count = tokens.sum()
        if count < 2:
            continue
        centred = values - (values * tokens).sum() / count
        variance = (centred**2 * tokens).sum() / (count - 1)
        whitened_B[parts_B == part] = centred / np.sqrt(variance + 1e-8)
    return whitened_B


def _flat_share(members_C: list[Ints], flat: list[bool], roles_B: Ints) -> dict[str, float]:
    shares = {}
    for role, name in enumerate(ROLES):
        having = [is_flat for members, is_flat in zip(members_C, flat, strict=True) if (roles_B[members] == role).any()]
        if having:
            shares[name] = sum(having) / len(having)
    return shares
