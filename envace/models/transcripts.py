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
    """Segments of ids, only ever appended to; a prompt that rewrites what stood before it opens a new row."""

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
        """All ids of its present row, in order."""
        self.random = random
        """Source of the uniform numbers that sampling consumes, one a token."""
        self.tools = tuple(tools)
        """The tools that its prompt shows."""
        self.messages = list(messages)
        """The conversation as messages, for policies that speak in them; the ids are what was read and sampled."""
        self.row = 0
        """Number of its present row of training; `ids` are that row's."""
        self._used = 0
        self._pending: list[str] = []
        self._open_row(prompt)

    def _open_row(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)
        """The ids that its present row began with."""
        self.ids = []
        self.give(prompt, Author.USER).opens_row = True

    def go_on(self, prompt: Sequence[int]) -> None:
        """Go on from a prompt that was rendered again, say for a user's next turn. Messages are the caller's.

        Where the prompt extends the ids so far, the rest is given. Where the template has rewritten them (Qwen3 drops
        earlier reasoning), a new row of training begins: what was sampled stays as it was sampled.
        """
        self._pending.clear()  # the prompt holds what was said
        same = len(self.ids)
        if list(prompt[:same]) == self.ids:
            self.give(prompt[same:], Author.USER)
        else:
            self.row += 1
            self._open_row(prompt)

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
        usage = step.usage
        if usage is not None and usage.prompt_tokens is not None and usage.sampled_tokens is not None:
            self._used = usage.prompt_tokens + usage.sampled_tokens
        return segment

    def _append(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.ids.extend(segment.ids)

    def __len__(self) -> int:
        """Tokens that the model has to read; where only an endpoint knows them, those that it last counted."""
        return max(len(self.ids), self._used)


def _copy(values: list[float] | None) -> list[float] | None:
    return None if values is None else list(values)
