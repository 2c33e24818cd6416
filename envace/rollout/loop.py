"""The loop, written for one trajectory. Concurrency belongs to the policy, answers belong to the environment."""

from __future__ import annotations

from dataclasses import dataclass

from envace.envs import Environment, invalid_call
from envace.errors import ModelError, SandboxError
from envace.models.parsing import Parsed
from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.scenarios import Scenario
from envace.scenarios.packages import dump_line
from envace.types import Author, Exchange, Role, StopReason, ToolCall, Trajectory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a rollout ends if it does not end by itself, checked in this order before each acting step."""

    max_steps: int = 10
    """Acting steps."""
    max_length: int = 256
    """Tokens of the whole transcript, prompt included."""
    max_step_tokens: int = 64
    """Tokens of one sampled step, in either role."""


async def rollout(
    policy: Policy,
    environment: Environment,
    scenario: Scenario,
    transcript: Transcript,
    *,
    limits: Limits,
    temperature: float,
    group: int = 0,
    index: int = 0,
) -> Trajectory:
    """Act until a final reply or a limit, the environment answering each call.

    A failure of worker or policy becomes the trajectory's stop reason INFRASTRUCTURE with its text; nothing is raised
    for it, so one bad rollout never ends a batch.
    """
    trajectory = Trajectory(
        scenario_id=scenario.id,
        environment_id=scenario.environment,
        kind=scenario.kind,
        group=group,
        index=index,
    )
    policy.begin(transcript)
    try:
        await environment.open()
        trajectory.stop = await _act(policy, environment, transcript, trajectory, limits, temperature)
    except (SandboxError, ModelError) as error:
        trajectory.stop, trajectory.error = StopReason.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
    finally:
        policy.end(transcript)
        trajectory.segments = transcript.segments
    return trajectory


async def _act(
    policy: Policy,
    environment: Environment,
    transcript: Transcript,
    trajectory: Trajectory,
    limits: Limits,
    temperature: float,
) -> StopReason:
    """Step after step; returns why it stopped."""
    for _ in range(limits.max_steps):
        room = min(limits.max_step_tokens, limits.max_length - len(transcript))
        if room <= 0:
            return StopReason.LENGTH
        step = await policy.sample(transcript, Role.ACT, max_tokens=room, temperature=temperature)
        transcript.take(step, Role.ACT)
        if not step.stopped:
            return StopReason.LENGTH
        parsed: Parsed = policy.format.parse(step.ids)
        if parsed.failure is not None:
            trajectory.error = parsed.failure
            return StopReason.PARSE
        if parsed.reply is not None:
            trajectory.reply = parsed.reply
            return StopReason.REPLIED
        for call in parsed.calls:
            transcript.give(policy.format.tool_header(), Author.TOOL)
            exchange = await _answer(policy, environment, call, transcript)
            if exchange is None:
                return StopReason.LENGTH
            trajectory.exchanges.append(exchange)
        transcript.give(policy.format.act_header(), Author.ASSISTANT)
    return StopReason.STEPS


async def _answer(policy: Policy, environment: Environment, call: ToolCall, transcript: Transcript) -> Exchange | None:
    """An invalid call is answered here; a valid one by the environment."""
    invalid = invalid_call(environment.spec, call)
    if invalid is None:
        return await environment.respond(call, transcript)
    text = dump_line(invalid)
    transcript.give(policy.format.response(text), Author.TOOL)
    return Exchange(call=call, response=invalid, text=text)
