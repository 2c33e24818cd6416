"""The loop, written for one trajectory. Concurrency belongs to the policy, answers belong to the environment."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any, Literal

from envace.envs import Environment, User, invalid_call
from envace.errors import ContextOverflow, ModelError, SandboxError
from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.scenarios import Scenario
from envace.scenarios.arguments import coerce
from envace.scenarios.packages import dump_line
from envace.types import Author, Exchange, Message, Parsed, ParsedCall, Role, StopReason, Trajectory


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a rollout ends if it does not end by itself, checked in this order before each acting step."""

    max_steps: int = 10
    """Acting steps."""
    max_length: int = 256
    """Tokens of the whole transcript, prompt included."""
    max_step_tokens: int = 64
    """Tokens of one sampled step, in either role."""
    invalid_calls: Literal["observe", "end"] = "observe"
    """What a call that breaks its schema does: it is answered with the error and the rollout goes on, or (as in the
    released code of EnvACE) the rollout ends."""
    truncated: Literal["score", "drop", "zero"] = "score"
    """What a rollout earns that a limit on steps or tokens cut: what it did so far, nothing at all (it leaves its group
    and is counted), or 0."""
    deadline: float | None = None
    """Seconds for the whole rollout, by the clock; None is no limit."""
    history: Literal["kept", "template"] = "kept"
    """How a user's next message goes on: appended to the ids as they are, or after the template's own rendering of what
    was said, which may drop earlier reasoning and then begins a new row of training."""


async def rollout(
    policy: Policy,
    environment: Environment,
    scenario: Scenario,
    transcript: Transcript,
    *,
    limits: Limits,
    temperature: float,
    user: User | None = None,
    group: int = 0,
    index: int = 0,
) -> Trajectory:
    """Act until a final reply that no user answers, or a limit, the environment answering each call.

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
    opening = len(transcript.messages)
    try:
        await environment.open()
        acting = _act(policy, environment, user, transcript, trajectory, limits, temperature)
        trajectory.stop = await asyncio.wait_for(acting, limits.deadline)
    except asyncio.TimeoutError:
        trajectory.error = f"DeadlineError: the rollout took longer than limits.deadline, {limits.deadline:g} s"
    except ContextOverflow as error:
        # Before anything was sampled it is no end that a policy brought about, but a limit set too high.
        acted = any(segment.role is not None for segment in transcript.segments)
        trajectory.stop = StopReason.LENGTH if acted else StopReason.INFRASTRUCTURE
        trajectory.error = str(error)
    except (SandboxError, ModelError) as error:
        trajectory.stop, trajectory.error = StopReason.INFRASTRUCTURE, f"{type(error).__name__}: {error}"
    finally:
        policy.end(transcript)
        transcript.settle(policy.format)
        trajectory.segments = [*transcript.segments, *environment.own_rows()]
        trajectory.messages = transcript.messages[opening:]
    return trajectory


async def _act(
    policy: Policy,
    environment: Environment,
    user: User | None,
    transcript: Transcript,
    trajectory: Trajectory,
    limits: Limits,
    temperature: float,
) -> StopReason:
    """Step after step; returns why it stopped."""
    for _ in range(limits.max_steps):
        transcript.settle(policy.format)
        room = min(limits.max_step_tokens, limits.max_length - len(transcript))
        if room <= 0:
            return StopReason.LENGTH
        step = await policy.sample(transcript, Role.ACT, max_tokens=room, temperature=temperature)
        transcript.take(step, Role.ACT)
        if not step.stopped:
            return StopReason.LENGTH
        parsed = step.parsed or policy.format.parse(step.ids, environment.spec.tools)
        transcript.messages.append(_message(parsed))
        if parsed.failure is not None:
            trajectory.error = f"{parsed.failure.value}: {parsed.detail}"
            return StopReason.PARSE
        if parsed.reply is not None:
            trajectory.reply = parsed.reply
            said = None if user is None else await user.answer(transcript.messages)
            if said is None:
                return StopReason.REPLIED
            if isinstance(said, StopReason):
                return said
            _user_turn(policy, transcript, said, limits.history)
            continue
        stop = await _answer_all(policy, environment, parsed, transcript, trajectory, limits)
        if stop is not None:
            return stop
        transcript.say(policy.format.act_header())
    return StopReason.STEPS


async def _answer_all(
    policy: Policy,
    environment: Environment,
    parsed: Parsed,
    transcript: Transcript,
    trajectory: Trajectory,
    limits: Limits,
) -> StopReason | None:
    """Every call of a step gets its answer, in order; returns why the rollout ends, if it does."""
    for number, item in enumerate(parsed.items):
        transcript.say(policy.format.tool_header(first=number == 0))
        if item.call is None:
            trajectory.malformed += 1
            _observe(policy, transcript, _complaint(item), call_id=item.id)
            continue
        exchange = await _answer(policy, environment, item, transcript)
        if exchange is None:
            return StopReason.LENGTH
        trajectory.exchanges.append(exchange)
        if exchange.invalid and limits.invalid_calls == "end":
            trajectory.error = f"invalid call: {exchange.text}"
            return StopReason.INVALID_CALL
    return None


def _user_turn(policy: Policy, transcript: Transcript, said: str, history: str) -> None:
    """The user speaks again."""
    transcript.messages.append(Message(author=Author.USER, content=said))
    if history == "template":
        transcript.go_on(policy.format.open(transcript.tools, transcript.messages))
    else:
        transcript.say(*policy.format.user_turn(said))


def _message(parsed: Parsed) -> Message:
    return Message(author=Author.ASSISTANT, content=parsed.text, calls=parsed.calls, reasoning=parsed.reasoning)


def _complaint(item: ParsedCall) -> dict[str, str]:
    """What a call that could not be read is answered with, so that every call has its answer."""
    assert item.failure is not None
    return {"error": item.failure.value, "message": item.detail}


async def _answer(
    policy: Policy, environment: Environment, item: ParsedCall, transcript: Transcript
) -> Exchange | None:
    """An invalid call is answered here; a valid one by the environment. Only a repairing format has types mended."""
    assert item.call is not None
    call, repairs = item.call, item.repairs
    tool = environment.spec.tool(call.name)
    if policy.format.mode == "repair" and tool is not None:
        arguments, mended = coerce(tool, call.arguments)
        call, repairs = replace(call, arguments=arguments), (*repairs, *mended)
    invalid = invalid_call(environment.spec, call)
    if invalid is not None:
        text = _observe(policy, transcript, invalid, call_id=call.id, name=call.name)
        return Exchange(call=call, response=invalid, text=text, repairs=repairs, invalid=True)
    exchange = await environment.respond(call, transcript)
    if exchange is None:
        return None
    transcript.messages.append(_tool_message(exchange.text, call_id=call.id, name=call.name))
    return replace(exchange, repairs=repairs)


def _observe(policy: Policy, transcript: Transcript, response: dict[str, Any], *, call_id: str, name: str = "") -> str:
    """Give a response that the loop itself makes; returns its text."""
    text = dump_line(response)
    transcript.say(*policy.format.answer(text))
    transcript.messages.append(_tool_message(text, call_id=call_id, name=name))
    return text


def _tool_message(text: str, *, call_id: str, name: str) -> Message:
    return Message(author=Author.TOOL, content=text, call_id=call_id, name=name)
