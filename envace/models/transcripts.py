"""A transcript: the token ids of one trajectory so far, exactly as they were given or sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.types import Author, Learn, Message, Role, Segment, Step, ToolSpec

if TYPE_CHECKING:
    from envace.models.formats import Format


def random_stream(*path: int) -> np.random.Generator:
    """A generator that depends on the path alone, e.g. (seed, update, scenario, rollout).

    Every trajectory draws from a stream of its own, so what it samples does not depend on which others share its
    batch, and a resumed run draws what the first would have drawn. The length of the path is part of the seed: without
    it, (3, 5) and (3, 5, 0) would be one stream.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(path), *path))))


def open_transcript(
    form: Format, spec: EnvironmentSpec, scenario: Scenario, *, random: np.random.Generator
) -> Transcript:
    """A scenario's transcript, up to where the policy acts."""
    messages = opening(spec, scenario)
    return Transcript(form.open(spec.tools, messages), random=random, tools=spec.tools, messages=messages)


class Transcript:
    """Segments of ids, only ever appended to."""

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        random: np.random.Generator,
        tools: Sequence[ToolSpec] = (),
        messages: Sequence[Message] = (),
    ) -> None:
        self.segments: list[Segment] = []
        self.ids: list[int] = []
        """All ids so far, in order."""
        self.random = random
        """Source of the uniform numbers that sampling consumes, one a token."""
        self.tools = tuple(tools)
        """The tools that its prompt shows."""
        self.messages = list(messages)
        """The conversation as messages, for policies that speak in them; the ids are what was read and sampled."""
        self._pending: list[str] = []
        self.give(prompt, Author.USER).opens_row = True

    def say(self, *pieces: str) -> None:
        """Text that nobody sampled here; it is encoded, together with what follows it, by `settle`."""
        self._pending += pieces

    def settle(self, form: Format) -> None:
        """Append what was said since the last sampled step, as one segment."""
        if self._pending:
            self.give(form.encode(self._pending), Author.TOOL)
            self._pending.clear()

    def give(self, ids: Sequence[int], author: Author, *, learn: Learn = Learn.NOTHING) -> Segment:
        """Append tokens that the policy did not sample here."""
        segment = Segment(ids=list(ids), author=author, learn=learn)
        self._append(segment)
        return segment

    def take(self, step: Step, role: Role) -> Segment:
        """Append a sampled step, as it was sampled."""
        author = Author.ASSISTANT if role is Role.ACT else Author.TOOL
        segment = Segment(
            ids=list(step.ids), author=author, role=role, learn=Learn.POLICY, logprobs=_copy(step.logprobs)
        )
        self._append(segment)
        return segment

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.ids.extend(segment.ids)

    def __len__(self) -> int:
        return len(self.ids)


def go_on(held: Transcript, prompt: Sequence[int]) -> Transcript:
    """The transcript in which a conversation goes on after its prompt was rendered again, say for a user's next turn.

    It is the same one where the prompt extends the ids that it holds. Where the template has rewritten them (Qwen3
    drops earlier reasoning), it is a new one, and so is the row of training: what was sampled stays as it was sampled.
    """
    same = len(held.ids)
    if list(prompt[:same]) == held.ids:
        held.give(prompt[same:], Author.USER)
        return held
    return Transcript(prompt, random=held.random, tools=held.tools, messages=held.messages)


def _copy(values: list[float] | None) -> list[float] | None:
    return None if values is None else list(values)
