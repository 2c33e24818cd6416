"""Formats: how messages become token ids and sampled ids become messages.

A transcript is built by appending ids, so a format never renders a conversation twice. The loop asks it for the ids of
the opening, of the headers between messages, and of texts that others wrote; the latter can never encode to a control
token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from envace.errors import ModelError
from envace.models.parsing import Mode, parse_starter
from envace.scenarios.packages import dump_line
from envace.types import Author, CallFailure, Message, Parsed, Role, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM, USER, ASSISTANT, TOOL, CALL, END, PAD = (
    "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|call|>", "<|end|>", "<|pad|>",
)  # fmt: skip
CONTROL_TOKENS = (PAD, END, SYSTEM, USER, ASSISTANT, TOOL, CALL)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{%- if message.get('tool_calls') -%}"
    "{%- for call in message['tool_calls'] -%}"
    "{{ '<|call|>' + call['function']['name'] + ' ' + call['function']['arguments'] }}"
    "{%- endfor -%}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}"
    "{{ '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


class Glue(str):
    """Text of the format itself, in which control tokens count; a plain `str` beside it is somebody's text."""


class Format(Protocol):
    """What the rollout loop needs to know of a model's way of writing.

    Everything between two sampled steps is given as pieces (`Glue` and texts of others) and encoded in one go, so that
    it becomes the ids that the template's own text would become.
    """

    pad_id: int
    mode: Mode
    """How steps are read: `strict` for scores and rewards, `repair` for deployment."""

    def open(self, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[int]:
        """Ids of a new transcript, up to where the policy acts. `messages`: what comes before, system and user."""

    def tool_header(self, *, first: bool = True) -> Glue:
        """What stands before a tool's response; another than the first answers the same step as the one before it."""

    def answer(self, text: str) -> tuple[str, ...]:
        """A tool's response that somebody else wrote, with its end."""

    def act_header(self) -> Glue:
        """What stands between the last response to a step and the next acting step."""

    def user_turn(self, text: str) -> tuple[str, ...]:
        """A user's next message after a final reply, from the end of that reply to where the policy acts."""

    def written(self, message: Message) -> list[int]:
        """Ids of an assistant's message as the policy would sample it, with its end: for demonstrations."""

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Ids of consecutive pieces. Nothing in a text of others becomes a control token."""

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sampled step."""

    def stop_text(self, role: Role) -> str | None:
        """A text that ends a sampled step of this role as well; None where tokens tell."""

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Parsed:
        """What a sampled acting step says; the tools that were offered tell apart what their schemas decide."""

    def response_text(self, ids: Sequence[int]) -> str | None:
        """Text of a rehearsed response; None where it did not end as one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text with control tokens, for people."""


class SafeEncoder:
    """Encodes pieces so that a control token comes from glue alone.

    Where the letters of a control token stand in a text of others, or come together across pieces, the text is cut
    after the first of them and both parts are encoded on their own, which no tokenizer can join again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: Iterable[str]) -> None:
        self.tokenizer = tokenizer
        self.control = frozenset(token for token in control if token)
        self._lengths = sorted({len(token) for token in self.control}, reverse=True)
        first = "".join(sorted({token[0] for token in self.control}))
        self._start = re.compile(f"[{re.escape(first)}]") if first else None

    def __call__(self, pieces: Iterable[str]) -> list[int]:
        """Ids of the pieces, encoded together."""
        glue, text = _spans(pieces)
        cuts = [start + 1 for start, end in self.occurrences(text) if not any(a <= start and end <= b for a, b in glue)]
        ids: list[int] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            if text[begin:end]:
                ids += self.tokenizer.encode(text[begin:end], add_special_tokens=False)
        return ids

    def occurrences(self, text: str) -> list[tuple[int, int]]:
        """Where the letters of a control token stand, overlaps included, by their start."""
        if self._start is None:
            return []
        found = []
        for match in self._start.finditer(text):
            start = match.start()
            token = next(
                (text[start : start + n] for n in self._lengths if text[start : start + n] in self.control), ""
            )
            if token:
                found.append((start, start + len(token)))
        return found


def _spans(pieces: Iterable[str]) -> tuple[list[tuple[int, int]], str]:
    """The joined text, and which parts of it are glue. What UTF-8 cannot write is replaced."""
    spans: list[tuple[int, int]] = []
    text = ""
    for piece in pieces:
        start, text = len(text), text + piece.encode("utf-8", "replace").decode()
        if isinstance(piece, Glue):
            spans = (
                [*spans[:-1], (spans[-1][0], len(text))]
                if spans and spans[-1][1] == start
                else [*spans, (start, len(text))]
            )
    return spans, text


class StarterFormat:
    """The starter policy's format: one control token before and one after each message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = tokenizer.get_vocab()
        missing = [token for token in CONTROL_TOKENS if token not in vocabulary]
        if missing:
            raise ModelError(f"The tokenizer lacks the control tokens {missing}; it is not one of the starter format.")
        self.tokenizer = tokenizer
        self.mode: Mode = "strict"
        self.pad_id, self._end, self._call = vocabulary[PAD], vocabulary[END], vocabulary[CALL]
        self._control = frozenset(vocabulary[token] for token in CONTROL_TOKENS)
        self.encode = SafeEncoder(tokenizer, CONTROL_TOKENS)

    def open(self, tools: Sequence[ToolSpec], messages: Sequence[Message]) -> list[int]:
        """Tools as `name(argument,...)`, then what is said (a system message is not), then an acting step's header."""
        pieces: list[str] = [Glue(SYSTEM), listing(tools), Glue(END)]
        for message in messages:
            if message.author is not Author.SYSTEM:
                pieces += [Glue(f"<|{message.author.value}|>"), *self._said(message)]
        return self.encode([*pieces, Glue(ASSISTANT)])

    def act_header(self) -> Glue:
        """`<|assistant|>`."""
        return Glue(ASSISTANT)

    def tool_header(self, *, first: bool = True) -> Glue:
        """`<|tool|>`."""
        return Glue(TOOL)

    def answer(self, text: str) -> tuple[str, ...]:
        """The text and `<|end|>`."""
        return text, Glue(END)

    def user_turn(self, text: str) -> tuple[str, ...]:
        """`<|user|>`, the text, `<|end|>`, and an acting step's header."""
        return Glue(USER), text, Glue(END + ASSISTANT)

    def written(self, message: Message) -> list[int]:
        """`<|call|>name {arguments}` a call, or the reply, and `<|end|>`."""
        return self.encode(self._said(message))

    def _said(self, message: Message) -> list[str]:
        calls: list[str] = []
        for call in message.calls:
            calls += [Glue(CALL), f"{call.name} {dump_line(call.arguments)}"]
        return [*(calls or [message.content]), Glue(END)]

    def stop_ids(self) -> frozenset[int]:
        """Every control token but `<|call|>` ends a step; all but `<|end|>` make it malformed."""
        return self._control - {self._call}

    def stop_text(self, role: Role) -> str | None:
        """None: tokens tell."""
        return None

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSpec] = ()) -> Parsed:
        """Calls or a reply; a step that does not end in `<|end|>` is malformed."""
        if not ids or ids[-1] != self._end:
            return Parsed(failure=CallFailure.NO_END, detail="the step does not end with its end token")
        return parse_starter([self.decode(part) for part in _split(ids[:-1], self._call)])

    def response_text(self, ids: Sequence[int]) -> str | None:
        """Text of a rehearsed response that holds no control token but its end."""
        if not ids or ids[-1] != self._end or any(token in self._control for token in ids[:-1]):
            return None
        return self.decode(ids[:-1])

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text with control tokens."""
        return str(self.tokenizer.decode(list(ids)))


def listing(tools: Sequence[ToolSpec]) -> str:
    """The tools as a prompt of the starter format shows them."""
    return " ".join(f"{tool.name}({','.join(tool.parameters['properties'])})" for tool in tools)


def _split(ids: Sequence[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts
