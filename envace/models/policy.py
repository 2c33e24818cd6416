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
