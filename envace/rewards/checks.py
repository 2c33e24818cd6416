"""Checks of a real episode: final state, calls and reply against what the scenario expects. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from envace.errors import DataError
from envace.rewards.parts import call_overlap
from envace.scenarios import EnvironmentSpec, Expected, Scenario, outcome_of, reply_holds
from envace.scenarios.schema import Call
from envace.types import ToolCall, Trajectory, Verdict, is_error


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question about a real episode, and its verdict."""

    id: Literal["state", "calls", "reply"]
    question: str
    verdict: Verdict


def task_checks(
    scenario: Scenario, trajectory: Trajectory, final_state: dict[str, Any] | None, spec: EnvironmentSpec
) -> list[Check]:
    """The three checks of a scenario. A final state that could not be read makes the state check UNAVAILABLE."""
    expected = _expected(scenario)
    state = Verdict.UNAVAILABLE if final_state is None else _verdict(final_state == expected.final_state)
    holds = reply_holds(trajectory.reply, outcome=expected.outcome, facts=expected.facts)
    return [
        Check(id="state", question="Are all tables as the oracle leaves them?", verdict=state),
        Check(
            id="calls",
            question="Were the necessary calls made?",
            verdict=_verdict(_necessary(trajectory, expected, spec)),
        ),
        Check(id="reply", question="Does the reply have the right outcome and facts?", verdict=_verdict(holds)),
    ]


def success(checks: list[Check]) -> bool | None:
    """True when all pass, None when one is unavailable and none fails."""
    verdicts = {check.verdict for check in checks}
    if Verdict.FAIL in verdicts:
        return False
    return None if Verdict.UNAVAILABLE in verdicts else True


def task_parts(
    scenario: Scenario, trajectory: Trajectory, final_state: dict[str, Any]
) -> tuple[dict[str, float], bool | None]:
    """The reward of `grpo-real`: the parts of the contract reward, on the real state. It has no `consistent` part."""
    expected = _expected(scenario)
    reply = trajectory.reply
    parts = {
        "calls": call_overlap(trajectory.calls, [call.model_dump() for call in expected.calls]),
        "state": float(final_state == expected.final_state),
        "outcome": float(reply is not None and outcome_of(reply) == expected.outcome),
        "answer": float(reply_holds(reply, outcome=expected.outcome, facts=expected.facts)),
    }
    return parts, expected.outcome == "done"


def necessary_calls(expected: Expected, spec: EnvironmentSpec) -> list[Call]:
    """The oracle's successful changes, and the last look-up it made: the evidence for what its reply says."""
    changes = [c for c in expected.calls if c.name not in spec.lookups and not is_error(c.response)]
    lookups = [c for c in expected.calls if c.name in spec.lookups]
    return changes + lookups[-1:]


def _necessary(trajectory: Trajectory, expected: Expected, spec: EnvironmentSpec) -> bool:
    made = {call.key() for call in trajectory.calls}
    return all(
        ToolCall(name=call.name, arguments=call.arguments).key() in made for call in necessary_calls(expected, spec)
    )


def _verdict(holds: bool) -> Verdict:
    return Verdict.PASS if holds else Verdict.FAIL


def _expected(scenario: Scenario) -> Expected:
    if scenario.expected is None:
        raise DataError(f"Scenario {scenario.id!r} is public: what it expects is withheld, so it cannot be checked.")
    return scenario.expected
