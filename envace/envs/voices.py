"""How a rehearsed response comes about: the two context layouts of the rehearser.

`shared`: it continues the actor's own transcript inside the tool message, so nothing is read twice and a trajectory is
one row of training. `prompted` (the paper's): it is asked in a prompt of its own, with instruction, tools, history and
the call; each response is a row of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from envace.models.formats import Format
from envace.models.policy import Policy
from envace.models.transcripts import Transcript
from envace.prompts import Prompts
from envace.scenarios import EnvironmentSpec
from envace.scenarios.packages import dump_line
from envace.scenarios.tools import to_openai
from envace.types import Author, Learn, Message, Parsed, Role, Segment, ToolCall

RESULT = re.compile(r"<execution_result>\s*(.*?)\s*</execution_result>", re.DOTALL)
"""What a prompted response stands in."""
UNREADABLE = dump_line({"error": "unreadable_response", "message": "The tool gave no readable response."})
"""What the actor is shown in place of a prompted response that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """A response as it was sampled."""

    text: str | None
    """None where it is not written as a response is."""
    shown: str
    """As it stands in the actor's transcript."""
    ids: list[int]
    """The same as ids, where it was sampled there."""
    segment: Segment
    """What was sampled, for its place in training."""


class Voice(Protocol):
    """Says responses for one rollout."""

    async def speak(self, call: ToolCall, transcript: Transcript) -> Spoken | None:
        """Sample the response to a call and append it to the transcript; None where it did not come to its end."""

    def repeat(self, spoken: Spoken, transcript: Transcript, *, learn: Learn) -> None:
        """Append a response that another rollout sampled."""

    def own_rows(self) -> list[Segment]:
        """What was sampled outside of the transcript."""


@dataclass(kw_only=True)
class Continued:
    """Layout `shared`."""

    policy: Policy
    temperature: float
    max_tokens: int
    """Of one response."""
    max_length: int
    """Of the whole transcript."""

    async def speak(self, call: ToolCall, transcript: Transcript) -> Spoken | None:
        """Sampled in the transcript, after the tool header."""
        transcript.settle(self.policy.format)
        room = min(self.max_tokens, self.max_length - len(transcript))
        if room <= 0:
            return None
        step = await self.policy.sample(transcript, Role.REHEARSE, max_tokens=room, temperature=self.temperature)
        segment = transcript.take(step, Role.REHEARSE)
        if not step.stopped:
            return None
        text = self.policy.format.response_text(step.ids)
        shown = self.policy.format.decode(step.ids[:-1]) if text is None else text
        return Spoken(text=text, shown=shown, ids=segment.ids, segment=segment)

    def repeat(self, spoken: Spoken, transcript: Transcript, *, learn: Learn) -> None:
        """The same ids."""
        transcript.settle(self.policy.format)
        transcript.give(spoken.ids, Author.TOOL, learn=learn)

    def own_rows(self) -> list[Segment]:
        """None: all of it stands in the transcript."""
        return []


class Prompted:
    """Layout `prompted`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        form: Format,
        policy: Policy,
        prompts: Prompts,
        references: Sequence[Mapping[str, Any]] = (),
        temperature: float,
        max_tokens: int,
        max_length: int,
    ) -> None:
        """Make one rollout's voice.

        Args:
            spec: Its tools are shown.
            form: Of the actor, in whose transcript the response is given.
            policy: Whoever rehearses; it may be another than acts.
            prompts: `rehearse_system` and `rehearse_user` are used.
            references: Recorded calls with their responses (`name`, `arguments`, `response`), shown as examples:
                `grounding: reference`.
            temperature: Of sampling.
            max_tokens: Limit of one response, reasoning included.
            max_length: Limit of one prompt with its response.
        """
        self.spec, self.form, self.policy, self._prompts = spec, form, policy, prompts
        self._references = [dict(reference) for reference in references]
        self._temperature, self._max_tokens, self._max_length = temperature, max_tokens, max_length
        self._rows: list[Segment] = []

    async def speak(self, call: ToolCall, transcript: Transcript) -> Spoken | None:
        """Asked in a conversation of its own, which shows the one so far."""
        messages = rehearsal_prompt(self.spec, self._prompts, call, transcript.messages, references=self._references)
        asked = Transcript(self.policy.format.open((), messages), random=transcript.random, messages=messages)
        room = min(self._max_tokens, self._max_length - len(asked))
        if room <= 0:
            return None
        self.policy.begin(asked)
        try:
            # It writes an ordinary message there: what ends it is what ends an acting step.
            step = await self.policy.sample(asked, Role.ACT, max_tokens=room, temperature=self._temperature)
        finally:
            self.policy.end(asked)
        segment = asked.take(step, Role.REHEARSE)
        self._rows += asked.segments
        if not step.stopped:
            return None
        text = result_of(step.parsed or self.policy.format.parse(step.ids))
        shown = UNREADABLE if text is None else as_text(text)
        transcript.say(*self.form.answer(shown))
        return Spoken(text=text, shown=shown, ids=[], segment=segment)

    def repeat(self, spoken: Spoken, transcript: Transcript, *, learn: Learn) -> None:
        """The same text, given."""
        transcript.say(*self.form.answer(spoken.shown))

    def own_rows(self) -> list[Segment]:
        """A row for every response that was sampled."""
        return self._rows


def rehearsal_prompt(
    spec: EnvironmentSpec,
    prompts: Prompts,
    call: ToolCall,
    history: Sequence[Message],
    *,
    references: Sequence[Mapping[str, Any]] = (),
) -> list[Message]:
    """The prompt of layout `prompted`. Everything in it that others wrote is JSON, which cannot end its own string.

    Args:
        spec: Its tools and rules are shown.
        prompts: `rehearse_system` and `rehearse_user` are used.
        call: To be answered.
        history: The conversation so far; the actor's thoughts are left out.
        references: Recorded calls with their responses, shown as examples.
    """
    values = {
        "tools": [to_openai(tool)["function"] for tool in spec.tools],
        "rules": list(spec.rules),
        "history": [_told(message) for message in history if message.author is not Author.SYSTEM],
        "call": {"name": call.name, "arguments": call.arguments},
    }
    texts = {name: dump_line(value) for name, value in values.items()}
    texts["references"] = dump_line(list(references)) if references else ""
    system, user = (prompts.fill(name, **texts) for name in ("rehearse_system", "rehearse_user"))
    return [Message(author=Author.SYSTEM, content=system), Message(author=Author.USER, content=user)]


def rehearsal_answer(text: str) -> Message:
    """A response as it is written there: JSON, plain text as a JSON string."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        text = dump_line(text)
    return Message(author=Author.ASSISTANT, content=f"<execution_result>\n{text}\n</execution_result>")


def as_text(result: str) -> str:
    """A result as a tool's message holds it: JSON, but a JSON string as the plain text that it is."""
    value = json.loads(result)
    return value if isinstance(value, str) else result


def _told(message: Message) -> dict[str, Any]:
    """A message as the rehearser sees it; private thoughts are not shown to it."""
    told: dict[str, Any] = {"from": message.author.value}
    if message.content:
        told["content"] = message.content
    if message.calls:
        told["calls"] = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
    return told


def result_of(parsed: Parsed) -> str | None:
    """The response in a prompted step, as one JSON line; None where there is none.

    It stands between its tags, as any JSON; without tags the whole reply counts if it is an object or an array.
    """
    if parsed.reply is None:
        return None
    found = RESULT.search(parsed.reply)
    try:
        value = json.loads(found[1] if found else parsed.reply.strip())
    except (ValueError, RecursionError):
        return None
    return dump_line(value) if found or isinstance(value, (dict, list)) else None
