"""What the rollout loop asks of a policy, and a scripted one for tests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from envace.models.formats import Format
from envace.models.transcripts import Transcript
from envace.types import Role, Step

T = TypeVar("T")


class Policy(Protocol):
    """Samples steps, in either role."""

    format: Format

    def begin(self, transcript: Transcript) -> None:
        """Announce a transcript that will ask for steps."""

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """Sample one step that continues the transcript; the caller appends it. Temperature 0 is greedy."""

    async def hold(self, outside: Awaitable[T]) -> T:
        """Await something that is not a step (a tool, a grader), without batching on without this transcript."""

    def end(self, transcript: Transcript) -> None:
        """Free what is kept for a transcript."""


class RolePolicies:
    """Two policies on the same transcripts: one acts, the other rehearses. Their formats are the same."""

    def __init__(self, act: Policy, rehearse: Policy) -> None:
        self.format = act.format
        self._act, self._rehearse = act, rehearse
        self._begun: set[Transcript] = set()
        """Transcripts that the rehearser has been told of; it reads those that it answers in, and no others."""

    def begin(self, transcript: Transcript) -> None:
        """The actor's; the rehearser begins when it is first asked."""
        self._act.begin(transcript)

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """By whoever plays the role."""
        if role is Role.ACT:
            return await self._act.sample(transcript, role, max_tokens=max_tokens, temperature=temperature)
        if transcript not in self._begun:
            self._begun.add(transcript)
            self._rehearse.begin(transcript)
        return await self._rehearse.sample(transcript, role, max_tokens=max_tokens, temperature=temperature)

    async def hold(self, outside: Awaitable[T]) -> T:
        """Neither batches on meanwhile."""
        return await self._act.hold(self._rehearse.hold(outside))

    def end(self, transcript: Transcript) -> None:
        """Both free what they keep."""
        self._act.end(transcript)
        if transcript in self._begun:
            self._begun.remove(transcript)
            self._rehearse.end(transcript)


class ScriptedPolicy:
    """Plays back texts chosen by a function of (text so far, role). For tests and references."""

    def __init__(self, format: Format, script: Callable[[str, Role], list[int]]) -> None:
        self.format, self._script = format, script

    def begin(self, transcript: Transcript) -> None:
        """Nothing is kept."""

    async def sample(self, transcript: Transcript, role: Role, *, max_tokens: int, temperature: float) -> Step:
        """The script's ids, cut at the limit, with log-probability 0."""
        ids = self._script(self.format.decode(transcript.ids), role)
        kept = ids[:max_tokens]
        tag = self.format.stop_text(role)
        stopped = bool(kept) and (kept[-1] in self.format.stop_ids() or (tag or "\0") in self.format.decode(kept))
        return Step(ids=kept, logprobs=[0.0] * len(kept), stopped=stopped)

    async def hold(self, outside: Awaitable[T]) -> T:
        """Await it."""
        return await outside

    def end(self, transcript: Transcript) -> None:
        """Nothing was kept."""
