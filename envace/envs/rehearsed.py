"""The rehearsed environment: the policy itself answers, as REHEARSE; a voice says in which layout.

With `world="group"` the rollouts of a group live in one imagined world: the first to make a look-up samples its
response, the others are given those tokens. As published (`world="rollout"`) every rollout
imagines its own, and the reward drifts to easy ones.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from envace.envs.voices import Spoken, Voice
from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.scenarios import EnvironmentSpec
from envace.types import Consistency, Exchange, Learn, Segment, ToolCall


class Observer(Protocol):
    """Judges rehearsed responses against the tool contract. It never sees a task's state."""

    async def observe(self, name: str, arguments: dict[str, Any], response: Any) -> dict[str, Any]:
        """`consistency` of the response, and whether it settles a value that was open (`new`)."""


@dataclass
class GroupWorld:
    """The look-ups that a group's rollouts share: key -> the response, once somebody has sampled one."""

    known: dict[str, Spoken] = field(default_factory=dict)
    sampling: dict[str, asyncio.Future[None]] = field(default_factory=dict)
    shared_tokens: int = 0
    """Response tokens that were handed over instead of sampled (layout `shared`)."""

    async def find(self, key: str) -> Spoken | None:
        """The stored response, waited for while another rollout samples it; None makes the caller its sampler."""
        while True:
            if key in self.known:
                return self.known[key]
            if key not in self.sampling:
                self.sampling[key] = asyncio.get_running_loop().create_future()
                return None
            await asyncio.shield(self.sampling[key])

    def settle(self, key: str, spoken: Spoken | None) -> None:
        """The sampler reports: what to share, or None where it must not be shared (the next to ask samples anew)."""
        if spoken is not None:
            self.known[key] = spoken
        self.sampling.pop(key).set_result(None)


class RehearsedEnvironment:
    """One rollout's view of an imagined world."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        policy: Policy,
        voice: Voice,
        observer: Observer,
        world: GroupWorld,
        share: bool,
        anchors: bool,
    ) -> None:
        """Make one rollout's environment.

        Args:
            spec: Tools and tables.
            policy: Waits for the observer.
            voice: Says the responses.
            observer: Judges responses; opened and closed by whoever made it.
            world: The group's look-ups.
            share: Whether look-ups are shared within the group (`world: group`).
            anchors: Whether the values of well-formed look-ups get an anchor (a KL to the reference) instead of a
                policy gradient; as published they get the gradient.
        """
        self.spec, self.observer, self.voice = spec, observer, voice
        self._policy, self._world = policy, world
        self._share, self._anchors = share, anchors
        self._writes: list[str] = []

    async def open(self) -> None:
        """An imagined world needs nothing opened."""

    async def close(self) -> None:
        """Nothing was opened."""

    def own_rows(self) -> list[Segment]:
        """Those of the voice."""
        return self.voice.own_rows()

    async def respond(self, call: ToolCall, transcript: Transcript) -> Exchange | None:
        """Hand over the group's response to a known look-up, or sample one."""
        lookup = self.spec.reads(call.name)
        if lookup and self._share:
            exchange = await self._shared(call, transcript)
        else:
            exchange, _ = await self._sample(call, transcript, lookup=lookup)
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
            return await self._handed(call, known, transcript)
        keep: Spoken | None = None
        try:
            exchange, spoken = await self._sample(call, transcript, lookup=True)
            if exchange is not None and exchange.consistency is Consistency.CONSISTENT:
                keep = spoken
        finally:
            self._world.settle(key, keep)
        return exchange

    async def _handed(self, call: ToolCall, known: Spoken, transcript: Transcript) -> Exchange | None:
        """The group's response, unless this rollout's world rules it out.

        A payment may have changed an account, say, although the key could not tell.
        """
        handed, _ = await self._judged(call, known, shared=True)
        if handed.consistency is Consistency.INCONSISTENT:
            return (await self._sample(call, transcript, lookup=True))[0]
        self._world.shared_tokens += len(known.ids)
        self.voice.repeat(known, transcript, learn=Learn.ANCHOR if self._anchors else Learn.NOTHING)
        return handed

    async def _sample(
        self, call: ToolCall, transcript: Transcript, *, lookup: bool
    ) -> tuple[Exchange | None, Spoken | None]:
        spoken = await self.voice.speak(call, transcript)
        if spoken is None:
            return None, None
        exchange, new = await self._judged(call, spoken)
        if self._anchors and lookup and new and exchange.consistency is Consistency.CONSISTENT:
            spoken.segment.learn = Learn.ANCHOR
        return exchange, spoken

    async def _judged(self, call: ToolCall, spoken: Spoken, *, shared: bool = False) -> tuple[Exchange, bool]:
        """The exchange with the contract's word on it, and whether it settled something new."""
        response, broken = _load(spoken.text)
        if broken and spoken.text is not None and not self.spec.code:
            response, broken = spoken.text, False  # of tools that nobody knows, some answer in plain text
        verdict: dict[str, Any] = {"consistency": Consistency.INCONSISTENT, "new": False}
        if not broken:
            verdict = await self._policy.hold(self.observer.observe(call.name, call.arguments, response))
        exchange = Exchange(
            call=call,
            response=response,
            text=spoken.shown,
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
