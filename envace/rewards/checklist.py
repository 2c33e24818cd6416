"""Rewards that run no environment: the `checklist` reward, and `trusting`, a checklist that can be hacked.

They know the procedure (the oracle program, with the rules an agent must look at), and take responses as they stand.

Both ask what a CM2-style list could ask from the instruction and the rehearsed responses: did the calls follow from
what the responses said, and does the reply. `checklist` also asks of each response whether it has the shape of the
tool's records.
`trusting` never asks what the environment would have said: it takes a rehearsed success for a success. It is here to be
measured (docs/log.md), not to be used.
"""

from __future__ import annotations

from typing import Any

from jsonschema.validators import Draft202012Validator

from envace.rewards.contract import all_consistent
from envace.rewards.parts import call_overlap
from envace.scenarios import EnvironmentSpec, outcome_of, reply_holds
from envace.types import Consistency, Trajectory, is_error


class SchemaObserver:
    """Judges a response by the schema of the tool's records, and by whether it shows the record asked for."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._spec = spec
        self._validators = {name: Draft202012Validator(table["record"]) for name, table in spec.tables.items()}

    async def observe(self, name: str, arguments: dict[str, Any], response: Any) -> dict[str, Any]:
        """CONSISTENT for an error, a well-formed record, or what is read where no table is known.

        Responses of changing tools cannot be judged.
        """
        table = self._spec.lookups.get(name)
        if is_error(response) or (table is None and self._spec.reads(name)):
            return {"consistency": Consistency.CONSISTENT.value, "new": True}
        if table is None:
            return {"consistency": Consistency.UNDETERMINED.value, "new": False}
        rows = response if isinstance(response, list) else [response]
        shaped = all(isinstance(row, dict) and self._validators[table].is_valid(row) for row in rows)
        if not isinstance(response, list) and shaped:
            shaped = response.get(self._spec.tables[table]["key"]) in arguments.values()
        consistency = Consistency.CONSISTENT if shaped else Consistency.INCONSISTENT
        return {"consistency": consistency.value, "new": True}


def checklist_parts(
    trajectory: Trajectory, procedure: dict[str, Any], spec: EnvironmentSpec
) -> tuple[dict[str, float], bool | None]:
    """Parts of the `checklist` reward.

    Args:
        trajectory: A finished rehearsal.
        procedure: What the oracle program does when its calls get the responses in this transcript.
        spec: Tells which tools change state.
    """
    parts = {
        "calls": call_overlap(trajectory.calls, procedure["calls"]),
        "state": 0.0,
        "outcome": 0.0,
        "answer": 0.0,
        "consistent": float(all_consistent(trajectory)),
    }
    if not procedure["determined"]:
        return parts, None
    asked = {f"{call['name']} {call['arguments']}" for call in procedure["calls"]}
    changes = [call for call in trajectory.calls if call.name not in spec.lookups]
    parts["state"] = float(all(f"{call.name} {call.arguments}" in asked for call in changes))
    if trajectory.reply is not None:
        parts["outcome"] = float(outcome_of(trajectory.reply) == procedure["outcome"])
        parts["answer"] = float(reply_holds(trajectory.reply, outcome=procedure["outcome"], facts=procedure["facts"]))
    return parts, procedure["outcome"] == "done"


def trusting_parts(
    trajectory: Trajectory, procedure: dict[str, Any], spec: EnvironmentSpec
) -> tuple[dict[str, float], bool | None]:
    """Parts of the `trusting` reward: the request was carried out, a response confirmed it, the user was told.

    `procedure` must come from an oracle that ignores the rules (`slips=["ignore_rule"]`), so that a refusal earns
    nothing.
    """
    parts, feasible = checklist_parts(trajectory, procedure, spec)
    done = bool(feasible)
    for name in ("outcome", "answer"):
        parts[name] = parts[name] if done else 0.0
    return parts, feasible
