"""A fixed probe set: recorded real episodes, whose every response a policy rehearses anew given the true history.

Fidelity on a policy's own calls moves when its calls move; on recorded calls it moves only when the rehearser does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from envace.envs import invalid_call
from envace.fidelity.compare import Comparison, Probe
from envace.models.policy import Policy
from envace.models.transcripts import Transcript, random_stream
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.scenarios.packages import dump_line
from envace.types import Author, Message, Role, ToolCall, Trajectory, is_error


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
) -> list[Comparison]:
    """Rehearse greedily the response to every probe, each after the true history."""
    jobs = [
        _rehearse(policy, scenario, spec, probes, position, max_tokens)
        for scenario, spec, probes in episodes
        for position in range(len(probes))
    ]
    return list(await asyncio.gather(*jobs))


async def _rehearse(
    policy: Policy,
    scenario: Scenario,
    spec: EnvironmentSpec,
    probes: Sequence[Probe],
    position: int,
    max_tokens: int,
) -> Comparison:
    """One probe: the history as given tokens, then one sampled response."""
    form = policy.format
    transcript = Transcript(form.open(spec.tools, opening(spec, scenario)), random=random_stream(0))
    for number, probe in enumerate(probes[: position + 1]):
        transcript.settle(form)
        transcript.give(form.written(Message(author=Author.ASSISTANT, calls=(probe.call,))), Author.ASSISTANT)
        transcript.say(form.tool_header())
        if number < position:
            transcript.say(*form.answer(dump_line(probe.real)), form.act_header())
    transcript.settle(form)
    policy.begin(transcript)
    step = await policy.sample(transcript, Role.REHEARSE, max_tokens=max_tokens, temperature=0.0)
    policy.end(transcript)
    text = form.response_text(step.ids)
    try:
        return Comparison(probe=probes[position], rehearsed=json.loads(text or ""), readable=True)
    except (ValueError, RecursionError):
        return Comparison(probe=probes[position], rehearsed=None, readable=False)


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
