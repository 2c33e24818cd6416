"""Groups: several rollouts of each scenario, answered and rewarded as a setting says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from envace.envs import (
    Continued,
    Environment,
    ExecutableEnvironment,
    GroupWorld,
    Prompted,
    RehearsedEnvironment,
    ScriptedUser,
    User,
    Voice,
)
from envace.errors import SandboxError
from envace.models.policy import Policy, RolePolicies
from envace.models.transcripts import Transcript, random_stream
from envace.prompts import Prompts, load_prompts
from envace.rewards import (
    WEIGHTS,
    SchemaObserver,
    checklist_parts,
    combine,
    contract_parts,
    task_parts,
    trusting_parts,
)
from envace.rewards.judge import Judge
from envace.rollout.grading import GatedUser, Grading
from envace.rollout.loop import Limits, rollout
from envace.sandbox import Session, Worker
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.scenarios.conversations import recorded_calls
from envace.types import Group, StopReason, Trajectory

RewardName = Literal["contract", "checklist", "trusting", "real", "judged"]
Layout = Literal["shared", "prompted"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Who answers the calls, and what is rewarded."""

    answers: Literal["rehearsed", "executable"] = "rehearsed"
    layout: Layout = "shared"
    """What the rehearser sees: the actor's own transcript, or a prompt of its own."""
    share_world: bool = True
    """One imagined world per group, instead of one per rollout."""
    anchors: bool = True
    """Whether look-up values are anchored by a KL instead of getting a policy gradient (as published)."""
    reward: RewardName = "contract"
    gate: bool = True
    """With reward `judged`: whether the user speaks again only after a turn that passed what its checklist requires."""
    groups_at_once: int | None = None
    """None is all."""
    grounded: bool = False
    """In layout `prompted`: whether the rehearser is shown the scenario's recorded calls with their results."""
    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    limits: Limits = field(default_factory=Limits)
    temperature: float = 1.0
    rehearse_temperature: float = 1.0


class Collector:
    """Collects groups from one policy, one worker and a set of environments."""

    def __init__(
        self,
        policy: Policy,
        worker: Worker,
        specs: Mapping[str, EnvironmentSpec],
        setting: Setting,
        *,
        rehearser: Policy | None = None,
        prompts: Prompts | None = None,
        judge: Judge | None = None,
    ) -> None:
        """Make one.

        Args:
            policy: Acts.
            worker: Runs environments and grades.
            specs: The environments by name.
            setting: Who answers, and what is rewarded.
            rehearser: Plays the environment in place of the policy; in layout `shared` it must be of the same format.
            prompts: Of layout `prompted`.
            judge: Decides the items of checklists that no program can.
        """
        self.policy = policy if rehearser is None else RolePolicies(policy, rehearser)
        self._rehearser = rehearser or policy
        self._prompts = prompts or load_prompts()
        self._judge = judge
        self.worker, self.specs, self.setting = worker, specs, setting
        self.shared_tokens = 0
        """Look-up tokens handed over within groups so far."""

    async def groups(self, scenarios: Sequence[Scenario], *, size: int, seed: tuple[int, ...]) -> list[Group]:
        """Roll out every scenario `size` times, so many groups at once as the setting says.

        Trajectory j of scenario i samples from the stream (seed..., i, j), so the result does not depend on timing.
        """
        worlds = [GroupWorld() for _ in scenarios]
        prompts = [self._prompt(scenario) for scenario in scenarios]
        at_once = self.setting.groups_at_once or max(1, len(scenarios))
        made: list[Group] = []
        for start in range(0, len(scenarios), at_once):
            batch = range(start, min(start + at_once, len(scenarios)))
            tasks = [
                self._one(scenarios[i], prompts[i], worlds[i], group=i, index=j, seed=(*seed, i, j))
                for i in batch
                for j in range(size)
            ]
            trajectories = await asyncio.gather(*tasks)
            made += [
                Group(scenario_id=scenarios[i].id, trajectories=list(trajectories[n * size : (n + 1) * size]))
                for n, i in enumerate(batch)
            ]
        self.shared_tokens += sum(world.shared_tokens for world in worlds)
        return made

    def _prompt(self, scenario: Scenario) -> list[int]:
        """What all rollouts of a scenario begin with; a chat template is rendered for it, so it is made once."""
        spec = self.specs[scenario.environment]
        return self.policy.format.open(spec.tools, opening(spec, scenario))

    async def _one(
        self,
        scenario: Scenario,
        prompt: Sequence[int],
        world: GroupWorld,
        *,
        group: int,
        index: int,
        seed: tuple[int, ...],
    ) -> Trajectory:
        """One rollout, graded. What fails before, within or after it is its own stop reason."""
        spec, setting = self.specs[scenario.environment], self.setting
        messages = opening(spec, scenario)
        transcript = Transcript(prompt, random=random_stream(*seed), tools=spec.tools, messages=messages)
        try:
            session = await self._imagine(spec)
        except SandboxError as error:
            return _failed(scenario, error, group=group, index=index)
        environment = self._environment(spec, scenario, world, session)
        grading = None
        if setting.reward == "judged":
            assert scenario.checklist is not None
            grading = Grading(scenario.checklist, self._judge, opening=messages, tools=spec.tools)
        trajectory = await rollout(
            self.policy,
            environment,
            scenario,
            transcript,
            limits=setting.limits,
            temperature=setting.temperature,
            user=self._user(scenario, grading),
            group=group,
            index=index,
        )
        try:
            if grading is not None and trajectory.stop is not StopReason.INFRASTRUCTURE:
                # Nobody waits for it: the transcript has ended, so the others sample on.
                await grading.grade(trajectory)
            elif trajectory.stop is not StopReason.INFRASTRUCTURE:
                await self._grade(scenario, spec, trajectory, environment, session)
        except SandboxError as error:
            trajectory.stop, trajectory.error = StopReason.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
            trajectory.reward = None
        finally:
            await self._close(environment, session)
        _weigh_truncation(trajectory, setting.limits.truncated)
        return trajectory

    async def _close(self, environment: Environment, session: Session | None) -> None:
        """Free the worker's side; a worker that is gone has freed it already."""
        with contextlib.suppress(SandboxError):
            await environment.close()
            if session is not None:
                await self.policy.hold(session.close())

    async def _imagine(self, spec: EnvironmentSpec) -> Session | None:
        """The imagined world that judges this rollout's responses, where the setting has one."""
        if self.setting.answers == "executable" or self.setting.reward != "contract":
            return None
        return await self.policy.hold(self.worker.imagine(spec.id))

    def _environment(
        self, spec: EnvironmentSpec, scenario: Scenario, world: GroupWorld, session: Session | None
    ) -> Environment:
        setting = self.setting
        if setting.answers == "executable":
            return ExecutableEnvironment(spec, scenario, worker=self.worker, policy=self.policy)
        return RehearsedEnvironment(
            spec,
            policy=self.policy,
            voice=self._voice(spec, scenario),
            observer=session or SchemaObserver(spec),
            world=world,
            share=setting.share_world,
            anchors=setting.anchors,
        )

    def _voice(self, spec: EnvironmentSpec, scenario: Scenario) -> Voice:
        limits, temperature = self.setting.limits, self.setting.rehearse_temperature
        sampling: dict[str, Any] = {
            "temperature": temperature,
            "max_tokens": limits.max_step_tokens,
            "max_length": limits.max_length,
        }
        if self.setting.layout == "shared":
            return Continued(policy=self.policy, **sampling)
        return Prompted(
            spec,
            form=self.policy.format,
            policy=self._rehearser,
            prompts=self._prompts,
            references=recorded_calls(scenario.reference) if self.setting.grounded else (),
            **sampling,
        )

    def _user(self, scenario: Scenario, grading: Grading | None) -> User | None:
        if not scenario.turns:
            return None
        user = ScriptedUser(scenario.turns)
        return user if grading is None or not self.setting.gate else GatedUser(user, grading)

    async def _grade(
        self,
        scenario: Scenario,
        spec: EnvironmentSpec,
        trajectory: Trajectory,
        environment: Environment,
        session: Session | None,
    ) -> None:
        """Set the trajectory's parts, reward and feasibility."""
        parts, trajectory.feasible = await self._parts(scenario, spec, trajectory, environment, session)
        trajectory.parts = parts
        trajectory.reward = combine(parts, self.setting.weights)

    async def _parts(
        self,
        scenario: Scenario,
        spec: EnvironmentSpec,
        trajectory: Trajectory,
        environment: Environment,
        session: Session | None,
    ) -> tuple[dict[str, float], bool | None]:
        if isinstance(environment, ExecutableEnvironment):
            assert environment.session is not None
            return task_parts(scenario, trajectory, await self.policy.hold(environment.session.state()))
        if session is not None:
            return contract_parts(trajectory, await self.policy.hold(session.grade(scenario.goal)))
        trusting = self.setting.reward == "trusting"
        procedure = await self.policy.hold(self._procedure(scenario, spec, trajectory, trusting=trusting))
        judge = trusting_parts if trusting else checklist_parts
        return judge(trajectory, procedure, spec)

    async def _procedure(
        self, scenario: Scenario, spec: EnvironmentSpec, trajectory: Trajectory, *, trusting: bool
    ) -> dict[str, Any]:
        exchanges = [
            {"name": e.call.name, "arguments": e.call.arguments, "response": e.response} for e in trajectory.exchanges
        ]
        procedure: dict[str, Any] = await self.worker.ask(
            "procedure",
            environment=spec.id,
            goal=scenario.goal,
            exchanges=exchanges,
            slips=["ignore_rule"] if trusting else [],
        )
        return procedure


TRUNCATED = (StopReason.LENGTH, StopReason.STEPS)


def _weigh_truncation(trajectory: Trajectory, earns: str) -> None:
    """A rollout that a limit cut keeps its reward, loses it, or gets 0, as the setting says."""
    if trajectory.stop not in TRUNCATED or trajectory.reward is None or earns == "score":
        return
    trajectory.reward = 0.0 if earns == "zero" else None
    if trajectory.reward is None:
        trajectory.error = f"truncated by {trajectory.stop.value}, and limits.truncated is drop"


def _failed(scenario: Scenario, error: Exception, *, group: int, index: int) -> Trajectory:
    """A trajectory that never began."""
    return Trajectory(
        scenario_id=scenario.id,
        environment_id=scenario.environment,
        kind=scenario.kind,
        group=group,
        index=index,
        error=f"{type(error).__name__}: {error}",
    )
