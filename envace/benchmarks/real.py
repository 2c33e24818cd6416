"""Success in the executable environment: scenarios tried once each, checked on state, calls and reply."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envace.benchmarks.intervals import wilson
from envace.envs import ExecutableEnvironment, ScriptedUser
from envace.errors import SandboxError
from envace.models.policy import Policy
from envace.models.transcripts import open_transcript, random_stream
from envace.rewards import Check, success, task_checks
from envace.rollout import Limits, rollout
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.types import StopReason, Trajectory, Verdict


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One scenario tried for real."""

    scenario: Scenario
    trajectory: Trajectory
    checks: list[Check]

    @property
    def success(self) -> bool | None:
        """True, False, or None when it could not be decided."""
        return success(self.checks)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All attempts of an evaluation."""

    attempts: list[Attempt]


async def evaluate_policy(
    policy: Policy,
    scenarios: Sequence[Scenario],
    specs: Mapping[str, EnvironmentSpec],
    worker: Worker,
    *,
    limits: Limits,
    temperature: float,
    seed: int = 0,
    first: int = 0,
) -> Evaluation:
    """Try every scenario once in the executable environment; `first` numbers the first one in a larger evaluation."""
    attempts = [
        _attempt(policy, scenario, specs[scenario.environment], worker, limits, temperature, (seed, index))
        for index, scenario in enumerate(scenarios, first)
    ]
    return Evaluation(attempts=list(await asyncio.gather(*attempts)))


async def _attempt(
    policy: Policy,
    scenario: Scenario,
    spec: EnvironmentSpec,
    worker: Worker,
    limits: Limits,
    temperature: float,
    seed: tuple[int, ...],
) -> Attempt:
    transcript = open_transcript(policy.format, spec, scenario, random=random_stream(*seed))
    environment = ExecutableEnvironment(spec, scenario, worker=worker, policy=policy)
    user = ScriptedUser(scenario.turns) if scenario.turns else None
    trajectory = await rollout(
        policy, environment, scenario, transcript, limits=limits, temperature=temperature, user=user
    )
    final_state: dict[str, Any] | None = None
    if trajectory.stop is not StopReason.INFRASTRUCTURE and environment.session is not None:
        try:
            final_state = await policy.hold(environment.session.state())
        except SandboxError as error:
            trajectory.stop, trajectory.error = StopReason.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
    with contextlib.suppress(SandboxError):
        await environment.close()
    checks = task_checks(scenario, trajectory, final_state, spec)
    if trajectory.stop is StopReason.INFRASTRUCTURE:  # nobody's fault but ours: no verdict on the policy
        checks = [Check(id=check.id, question=check.question, verdict=Verdict.UNAVAILABLE) for check in checks]
    return Attempt(scenario=scenario, trajectory=trajectory, checks=checks)


def summarise(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Success with its 95 % Wilson interval, by feasibility, environment and kind, and why attempts stopped.

    Attempts that could not be decided are counted as `undecided`, and stand in no share.
    """
    decided = [attempt for attempt in attempts if attempt.success is not None]
    by_environment, by_kind = defaultdict(list), defaultdict(list)
    for attempt in decided:
        by_environment[attempt.scenario.environment].append(attempt)
        by_kind[attempt.scenario.kind].append(attempt)
    return {
        **_share(decided),
        "do": _share([a for a in decided if a.scenario.feasible])["success"],
        "decline": _share([a for a in decided if not a.scenario.feasible])["success"],
        "undecided": len(attempts) - len(decided),
        "by_domain": {name: _share(group) for name, group in sorted(by_environment.items())},
        "by_kind": {name: _share(group) for name, group in sorted(by_kind.items())},
        "stops": dict(Counter(attempt.trajectory.stop.value for attempt in attempts)),
    }


def _share(attempts: Sequence[Attempt]) -> dict[str, Any]:
    wins = sum(attempt.success is True for attempt in attempts)
    return {
        "success": wins / len(attempts) if attempts else None,
        "n": len(attempts),
        "ci": [round(bound, 4) for bound in wilson(wins, len(attempts))],
    }
