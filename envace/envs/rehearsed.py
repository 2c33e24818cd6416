"""The rehearsed environment: the policy itself answers, as REHEARSE, in the same transcript (layout `shared`).

With `world="group"` the rollouts of a group live in one imagined world: the first to make a look-up samples its
response, the others are given those tokens. As published (`world="rollout"`) every rollout
imagines its own, and the reward drifts to easy ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.scenarios import EnvironmentSpec
from envace.types import Author, Consistency, Exchange, Learn, Role, Step, ToolCall


class Observer(Protocol):
    """Judges rehearsed responses against the tool contract. It never sees a task's state."""

    async def observe(self, name: str, arguments: dict[str, Any], response: Any) -> dict[str, Any]:
        """`consistency` of the response, and whether it settles a value that was open (`new`)."""


@dataclass
class GroupWorld:
    """The look-ups that a group's rollouts share: key -> the response's ids, once somebody has sampled one."""

    known: dict[str, list[int]] = field(default_factory=dict)
    sampling: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    shared_tokens: int = 0
    """Response tokens that were handed over instead of sampled."""

    async def find(self, key: str) -> list[int] | None:
        """The stored ids, waiting while another rollout samples them; None makes the caller the sampler of this key."""
        while True:
            if key in self.known:
                return self.known[key]
            if key not in self.sampling:
                self.sampling[key] = asyncio.get_running_loop().create_future()
                return None
            await asyncio.shield(self.sampling[key])

    def settle(self, key: str, ids: list[int] | None) -> None:
        """The sampler reports: ids to share, or None where they must not be shared (the next to ask samples anew)."""
        if ids is not None:
            self.known[key] = ids
        self.sampling.pop(key).set_result(None)


class RehearsedEnvironment:
    """One rollout's view of an imagined world."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        policy: Policy,
        observer: Observer,
        world: GroupWorld,
        share: bool,
        lookup_gradient: bool,
        temperature: float,
        max_tokens: int,
        max_length: int,
    ) -> None:
        """Make one rollout's environment.

        Args:
            spec: Tools and tables.
            policy: Plays REHEARSE.
            observer: Judges responses; opened and closed by whoever made it.
            world: The group's look-ups.
            share: Whether look-ups are shared within the group (`world: group`).
            lookup_gradient: Whether values of well-formed look-ups get a policy gradient (as published) or only an
                anchor.
            temperature: Sampling temperature of responses.
            max_tokens: Limit of one response.
            max_length: Limit of the whole transcript.
        """
        self.spec, self.observer = spec, observer
        self._policy, self._world = policy, world
        self._share, self._lookup_gradient = share, lookup_gradient
        self._temperature, self._max_tokens, self._max_length = temperature, max_tokens, max_length
        self._writes: list[str] = []

    async def open(self) -> None:
        """An imagined world needs nothing opened."""

    async def close(self) -> None:
        """Nothing was opened."""

    async def respond(self, call: ToolCall, transcript: Transcript) -> Exchange | None:
        """Hand over the group's response to a known look-up, or sample one."""
        transcript.settle(self._policy.format)
        lookup = call.name in self.spec.lookups
        if not (lookup and self._share):
            exchange = await self._sample(call, transcript, lookup=lookup)
        else:
            exchange = await self._shared(call, transcript)
        if not lookup and exchange is not None:
            self._writes.append(f"{call.key()} -> {exchange.text}")
        return exchange

    def _key(self, call: ToolCall) -> str:
        """Two rollouts share a look-up while neither has changed what it looks at.

        What it looks at is told by its argument values: a change counts when one of them stands in the changing call.
        """
        values = [json.dumps(value) for value in call.arguments.values()]
        touched = [write for write in self._writes if any(value in write for value in values)]
        return json.dumps([call.key(), *touched])

    async def _shared(self, call: ToolCall, transcript: Transcript) -> Exchange | None:
        key = self._key(call)
        known = await self._world.find(key)
        if known is not None:
            handed, _ = await self._judged(call, known, shared=True)
            if handed.consistency is Consistency.INCONSISTENT:
                # What this rollout has done or seen rules the response out (a payment changed the account, say),
                # although the key could not tell.
                return await self._sample(call, transcript, lookup=True)
            self._world.shared_tokens += len(known)
            transcript.give(known, Author.TOOL, learn=Learn.NOTHING if self._lookup_gradient else Learn.ANCHOR)
            return handed
        keep: list[int] | None = None
        try:
            exchange = await self._sample(call, transcript, lookup=True)
            if exchange is not None and exchange.consistency is Consistency.CONSISTENT:
                keep = transcript.segments[-1].ids
        finally:
            self._world.settle(key, keep)
        return exchange

    async def _sample(self, call: ToolCall, transcript: Transcript, *, lookup: bool) -> Exchange | None:
        room = min(self._max_tokens, self._max_length - len(transcript))
        if room <= 0:
            return None
        step: Step = await self._policy.sample(
            transcript, Role.REHEARSE, max_tokens=room, temperature=self._temperature
        )
        segment = transcript.take(step, Role.REHEARSE)
        if not step.stopped:
            return None
        exchange, new = await self._judged(call, step.ids)
        if lookup and new and exchange.consistency is Consistency.CONSISTENT and not self._lookup_gradient:
            segment.learn = Learn.ANCHOR
        return exchange

    async def _judged(self, call: ToolCall, ids: Sequence[int], *, shared: bool = False) -> tuple[Exchange, bool]:
        """The exchange with the contract's word on it, and whether it settled something new."""
        text = self._policy.format.response_text(ids)
        response, broken = _load(text)
        verdict: dict[str, Any] = {"consistency": Consistency.INCONSISTENT, "new": False}
        if not broken:
            verdict = await self._policy.hold(self.observer.observe(call.name, call.arguments, response))
        exchange = Exchange(
            call=call,
            response=response,
            text=self._policy.format.decode(ids[:-1]) if text is None else text,
            consistency=Consistency(verdict["consistency"]),
            shared=shared,
        )
        return exchange, verdict["new"]


def _load(text: str | None) -> tuple[Any, bool]:
    """Parsed JSON, and whether there is none."""
    if text is None:
        return None, True
    try:
        return json.loads(text), False
    except (ValueError, RecursionError):
        return None, True
