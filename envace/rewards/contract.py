"""The `contract` reward: checks on the imagined state, by the tools' rules, never by a task's database.

What it knows: the environment class (its rules) and the oracle program, both run on the records that this rehearsal
has shown. What it never sees: the scenario's opening state, its oracle calls, or any real response.
"""

from __future__ import annotations

from typing import Any

from envace.rewards.parts import call_overlap
from envace.scenarios import outcome_of, reply_holds
from envace.types import Consistency, Trajectory


def contract_parts(trajectory: Trajectory, grade: dict[str, Any]) -> tuple[dict[str, float], bool | None]:
    """Parts of the reward, and whether the request is feasible in the imagined world.

    Args:
        trajectory: A finished rehearsal.
        grade: The worker's word on its imagined world: the `oracle`'s doing there and the `final_state` the calls left.

    Returns:
        The parts; where the oracle needs a record that was never looked up, `state`, `outcome` and `answer` are 0 and
        feasibility is None.
    """
    oracle = grade["oracle"]
    parts = {
        "calls": call_overlap(trajectory.calls, oracle["calls"]),
        "state": 0.0,
        "outcome": 0.0,
        "answer": 0.0,
        "consistent": float(all_consistent(trajectory)),
    }
    if not oracle["determined"]:
        return parts, None
    parts["state"] = float(grade["final_state"] == oracle["final_state"])
    if trajectory.reply is not None:
        parts["outcome"] = float(outcome_of(trajectory.reply) == oracle["outcome"])
        parts["answer"] = float(reply_holds(trajectory.reply, outcome=oracle["outcome"], facts=oracle["facts"]))
    return parts, oracle["outcome"] == "done"


def all_consistent(trajectory: Trajectory) -> bool:
    """Whether no response broke the contract, a broken last one included."""
    return all(exchange.consistency is not Consistency.INCONSISTENT for exchange in trajectory.exchanges)
