"""The audit of scenarios: the oracle passes, doing nothing fails, a mutated oracle fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envace.errors import SandboxError
from envace.rewards import success, task_checks
from envace.rewards.checks import necessary_calls
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Expected, Scenario
from envace.types import Exchange, ToolCall, Trajectory


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is wrong with a scenario."""

    scenario: str
    problem: Literal["unsolvable", "free", "lenient"]
    """`unsolvable`: the oracle fails. `free`: doing nothing passes. `lenient`: a mutated oracle passes."""
    detail: str


@dataclass(frozen=True, kw_only=True)
class Attempted:
    """A scripted attempt: calls, then a reply."""

    name: str
    calls: tuple[ToolCall, ...]
    reply: str | None


async def audit_scenarios(worker: Worker, spec: EnvironmentSpec, scenarios: Sequence[Scenario]) -> list[Finding]:
    """Audit scenarios with their opening states; returns the findings, none for sound scenarios."""
    findings = []
    for scenario in scenarios:
        assert scenario.expected is not None
        oracle = _oracle(scenario.expected)
        if not await passes(worker, spec, scenario, oracle):
            findings.append(
                Finding(scenario=scenario.id, problem="unsolvable", detail="the oracle's own calls and reply fail")
            )
            continue
        for attempt in nothing(scenario.expected):
            if await passes(worker, spec, scenario, attempt):
                findings.append(Finding(scenario=scenario.id, problem="free", detail=attempt.name))
        for attempt in mutations(scenario.expected, spec):
            if await passes(worker, spec, scenario, attempt):
                findings.append(Finding(scenario=scenario.id, problem="lenient", detail=attempt.name))
    return findings


async def passes(worker: Worker, spec: EnvironmentSpec, scenario: Scenario, attempt: Attempted) -> bool:
    """Whether a scripted attempt passes every check. An attempt that breaks the worker does not."""
    assert scenario.state is not None
    try:
        session = await worker.open(spec.id, scenario.state)
        exchanges = [await _exchange(session, call) for call in attempt.calls]
        final_state = await session.state()
        await session.close()
    except SandboxError:
        return False
    trajectory = Trajectory(
        scenario_id=scenario.id,
        environment_id=spec.id,
        kind=scenario.kind,
        group=0,
        index=0,
        exchanges=exchanges,
        reply=attempt.reply,
    )
    return success(task_checks(scenario, trajectory, final_state, spec)) is True


async def _exchange(session: Any, call: ToolCall) -> Exchange:
    return Exchange(call=call, response=await session.call(call.name, call.arguments), text="")


def _oracle(expected: Expected) -> Attempted:
    calls = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in expected.calls)
    return Attempted(name="oracle", calls=calls, reply=expected.reply)


def nothing(expected: Expected) -> Iterator[Attempted]:
    """Attempts without a call: silence, a bare promise, a bare refusal, and the oracle's reply out of thin air."""
    yield Attempted(name="no call and no reply", calls=(), reply=None)
    for reply in ("Done.", "Sorry."):
        yield Attempted(name=f"no call, reply {reply!r}", calls=(), reply=reply)
    yield Attempted(name="no call, the oracle's reply", calls=(), reply=expected.reply)


def mutations(expected: Expected, spec: EnvironmentSpec) -> Iterator[Attempted]:
    """The oracle with one necessary thing wrong."""
    oracle = _oracle(expected)
    necessary = {ToolCall(name=c.name, arguments=c.arguments).key() for c in necessary_calls(expected, spec)}
    for position, call in enumerate(oracle.calls):
        if call.key() in necessary:
            rest = tuple(other for other in oracle.calls if other.key() != call.key())
            yield Attempted(name=f"without call {position + 1}, {call.name}", calls=rest, reply=oracle.reply)
    if oracle.calls:
        yield Attempted(name="the last call with another argument", calls=_off_by_one(oracle.calls), reply=oracle.reply)
    flipped = "Done." if expected.outcome == "declined" else f"Sorry, I could not do that. {expected.reply}"
    yield Attempted(name="the reply with the other outcome", calls=oracle.calls, reply=flipped)
    for fact in expected.facts:
        wrong = oracle.reply.replace(fact, _other(fact)) if oracle.reply else None
        yield Attempted(name=f"the reply without {fact!r}", calls=oracle.calls, reply=wrong)


def _off_by_one(calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    last = calls[-1]
    arguments = {name: _other(value) for name, value in last.arguments.items()}
    return (*calls[:-1], ToolCall(name=last.name, arguments=arguments))


def _other(value: Any) -> Any:
    """A value like the given one, but not it."""
    if isinstance(value, str) and (digits := re.search(r"\d(?=\D*$)", value)):
        return value[: digits.start()] + str((int(digits.group()) + 1) % 10) + value[digits.end() :]
    if isinstance(value, bool) or value is None:
        return not value
    return value + 1 if isinstance(value, (int, float)) else f"{value}x"
