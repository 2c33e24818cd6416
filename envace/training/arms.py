"""The arms: controlled comparisons, each one setting of the one trainer.

| arm | who answers calls | what is trained |
|---|---|---|
| `envace` | the policy itself, one imagined world a group | both roles, role-wise baselines |
| `published` | the policy itself, one imagined world a rollout | both roles, every sampled token, as the paper has it |
| `grpo-real` | the executable environment | acting |
| `grpo-simulator` | another model, which stays as it is | acting |
| `per-role` | a second policy, which is trained too | each policy its own role |
| `shared-baseline` | the policy itself, one imagined world a group | both roles, one baseline a group |
| `reinforce++` | the executable environment | acting, advantages normalised over the batch |
| `sft` | recorded | the teacher's conversations, by imitation |

Source: arXiv:2608.06197 sections 4 and 5 (EnvACE and its ablations); EnvScaler for `reinforce++` and `sft`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from envace.training.advantages import AdvantageKind
from envace.types import Role

Arm = Literal["envace", "published", "grpo-real", "grpo-simulator", "per-role", "shared-baseline", "reinforce++", "sft"]
BOTH = frozenset(Role)
ACT = frozenset([Role.ACT])
REHEARSE = frozenset([Role.REHEARSE])


@dataclass(frozen=True, kw_only=True)
class ArmFacts:
    """What an arm sets."""

    answers: Literal["rehearsed", "executable", "recorded"] = "rehearsed"
    rehearser: Literal["policy", "second", "simulator"] = "policy"
    """Who plays the environment where it is rehearsed: the policy, a second policy in training, or a fixed model."""
    trains: frozenset[Role] = BOTH
    """Roles whose outputs the (first) policy learns from."""
    anchors: bool = True
    """Whether look-up values are anchored by a KL instead of getting a policy gradient."""
    shares_world: bool = True
    """Whether a group lives in one imagined world."""
    advantage: AdvantageKind = "cells"
    """What a reward is compared with."""
    role_wise: bool = True
    """Whether the roles of a group are compared apart."""


ARMS: dict[str, ArmFacts] = {
    "envace": ArmFacts(),
    "published": ArmFacts(anchors=False, shares_world=False),
    "grpo-real": ArmFacts(answers="executable", trains=ACT, anchors=False, shares_world=False),
    "grpo-simulator": ArmFacts(rehearser="simulator", trains=ACT, anchors=False, shares_world=False),
    "per-role": ArmFacts(rehearser="second", trains=ACT),
    "shared-baseline": ArmFacts(role_wise=False),
    "reinforce++": ArmFacts(answers="executable", trains=ACT, anchors=False, shares_world=False, advantage="global"),
    "sft": ArmFacts(answers="recorded", anchors=False, shares_world=False),
}
