"""A fixed probe set: recorded real episodes, whose every response a policy rehearses anew given the true history.

Fidelity on a policy's own calls moves when its calls move; on recorded calls it moves only when the rehearser does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envace.envs import invalid_call
from envace.envs.voices import rehearsal_prompt, result_of
from envace.fidelity.compare import Comparison, Probe
from envace.models.policy import Policy
from envace.models.transcripts import Transcript, random_stream
from envace.prompts import Prompts
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.scenarios.packages import dump_line
from envace.types import Author, Message, Role, Step, ToolCall, Trajectory, is_error


async def record_probes(worker: Worker, spec: EnvironmentSpec, episode: Sequence[Mapping[str, Any]]) -> list[Probe]:
    """Probes of one recorded episode (`name`, `arguments`, `response` of each call, in order)."""
    world = await worker.imagine(spec.id)
    probes, changed = [], False
    for step in episode:
        call = ToolCall(name=step["name"], arguments=dict(step["arguments"]))
        determined = await world.determined(call.name, call.arguments)
        probes.append(Probe(call=call, real=step["response"], determined=determined, after_change=changed))
        await world.observe(call.name, call.arguments, step["response"])
        changed = changed or (call.name not in spec.lookups and not is_error(step["response"]))
    await world.close()
    return probes


async def measure(
    policy: Policy,
    episodes: Sequence[tuple[Scenario, EnvironmentSpec, Sequence[Probe]]],
    *,
    max_tokens: int,
    prompts: Prompts | None = None,
) -> list[Comparison]:
    """Rehearse greedily the response to every probe, each after the true history.

    Args:
        policy: Rehearses.
        episodes: Recorded probes of each scenario.
        max_tokens: Limit of a response.
        prompts: Of layout `prompted`; None continues the transcript (layout `shared`).
    """
    jobs = [
        _rehearse(policy, scenario, spec, probes[: position + 1], max_tokens, prompts)
        for scenario, spec, probes in episodes
        for position in range(len(probes))
    ]
    return list(await asyncio.gather(*jobs))


async def _rehearse(
    policy: Policy,
    scenario: Scenario,
    spec: EnvironmentSpec,
    probes: Sequence[Probe],
    max_tokens: int,
    prompts: Prompts | None,
) -> Comparison:
    """The last of the probes: the history as given tokens, then one sampled response."""
    if prompts is None:
        text = await _continued(policy, scenario, spec, probes, max_tokens)
    else:
        text = await _prompted(policy, scenario, spec, probes, max_tokens, prompts)
    try:
        return Comparison(probe=probes[-1], rehearsed=json.loads(text or ""), readable=True)
    except (ValueError, RecursionError):
        return Comparison(probe=probes[-1], rehearsed=None, readable=False)


async def _continued(
    policy: Policy, scenario: Scenario, spec: EnvironmentSpec, probes: Sequence[Probe], max_tokens: int
) -> str | None:
    form = policy.format
    transcript = Transcript(form.open(spec.tools, opening(spec, scenario)), random=random_stream(0))
    for number, probe in enumerate(probes, 1):
        transcript.settle(form)
        transcript.give(form.written(_called(probe)), Author.ASSISTANT)
        transcript.say(form.tool_header())
        if number < len(probes):
            transcript.say(*form.answer(dump_line(probe.real)), form.act_header())
    transcript.settle(form)
    step = await _sampled(policy, transcript, Role.REHEARSE, max_tokens)
    return form.response_text(step.ids)


async def _prompted(
    policy: Policy,
    scenario: Scenario,
    spec: EnvironmentSpec,
    probes: Sequence[Probe],
    max_tokens: int,
    prompts: Prompts,
) -> str | None:
    history = opening(spec, scenario)
    for probe in probes[:-1]:
        answer = Message(author=Author.TOOL, content=dump_line(probe.real), name=probe.call.name)
        history += [_called(probe), answer]
    messages = rehearsal_prompt(spec, prompts, probes[-1].call, [*history, _called(probes[-1])])
    transcript = Transcript(policy.format.open((), messages), random=random_stream(0), messages=messages)
    step = await _sampled(policy, transcript, Role.ACT, max_tokens)
    return result_of(step.parsed or policy.format.parse(step.ids))


def _called(probe: Probe) -> Message:
    return Message(author=Author.ASSISTANT, calls=(probe.call,))


async def _sampled(policy: Policy, transcript: Transcript, role: Role, max_tokens: int) -> Step:
    policy.begin(transcript)
    try:
        return await policy.sample(transcript, role, max_tokens=max_tokens, temperature=0.0)
    finally:
        policy.end(transcript)


async def replay(worker: Worker, spec: EnvironmentSpec, scenario: Scenario, trajectory: Trajectory) -> list[Any]:
    """The real responses to the calls of a trajectory, on the scenario's own opening state."""
    assert scenario.state is not None
    session = await worker.open(spec.id, scenario.state)
    responses = []
    for call in trajectory.calls:
        invalid = invalid_call(spec, call)
        responses.append(invalid if invalid is not None else await session.call(call.name, call.arguments))
    await session.close()
    return responses
