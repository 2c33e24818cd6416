"""Formats: how messages become token ids and sampled ids become messages.

A transcript is built by appending ids, so a format never renders a conversation twice. The loop asks it for the ids of
the opening, of the headers between messages, and of texts that others wrote; the latter can never encode to a control
token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from envace.errors import ModelError
from envace.models.parsing import Parsed, parse_step
from envace.types import ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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


class Format(Protocol):
    """What the rollout loop needs to know of a model's way of writing."""

    pad_id: int

    def open(self, tools: Sequence[ToolSpec], instruction: str) -> list[int]:
        """Ids of a new transcript, up to where the policy acts."""

    def tool_header(self) -> list[int]:
        """Ids that stand before a tool's response."""

    def act_header(self) -> list[int]:
        """Ids that stand before the next acting step."""

    def response(self, text: str) -> list[int]:
        """Ids of a tool response that somebody else wrote, with its end token."""

    def call(self, name: str, arguments: str) -> list[int]:
        """Ids of an acting step with one call, as demonstrations write it."""

    def reply(self, text: str) -> list[int]:
        """Ids of an acting step that replies."""

    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a sampled step."""

    def parse(self, ids: Sequence[int]) -> Parsed:
        """What a sampled acting step says."""

    def response_text(self, ids: Sequence[int]) -> str | None:
        """Text of a rehearsed response; None where it did not end as one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Readable text with control tokens, for people."""


class StarterFormat:
    """The starter policy's format: one control token before and one after each message."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        missing = [token for token in CONTROL_TOKENS if token not in tokenizer.get_vocab()]
        if missing:
            raise ModelError(f"The tokenizer lacks the control tokens {missing}; it is not one of the starter format.")
        self.tokenizer = tokenizer
        ids: dict[str, int] = {token: tokenizer.get_vocab()[token] for token in CONTROL_TOKENS}
        self.pad_id, self._end, self._call = ids[PAD], ids[END], ids[CALL]
        self._headers = {token: [ids[token]] for token in (SYSTEM, USER, ASSISTANT, TOOL)}
        self._control = frozenset(ids.values())

    def text(self, text: str) -> list[int]:
        """Ids of a text of others: what looks like a control token in it stays text."""
        writable = text.encode("utf-8", "replace").decode()
        ids: list[int] = self.tokenizer.encode(writable, add_special_tokens=False, split_special_tokens=True)
        return ids

    def open(self, tools: Sequence[ToolSpec], instruction: str) -> list[int]:
        """Tools as `name(argument,...)`, then the instruction, then the header of an acting step."""
        return [
            *self._headers[SYSTEM], *self.text(listing(tools)), self._end,
            *self._headers[USER], *self.text(instruction), self._end,
            *self.act_header(),
        ]  # fmt: skip

    def act_header(self) -> list[int]:
        """`<|assistant|>`."""
        return list(self._headers[ASSISTANT])

    def tool_header(self) -> list[int]:
        """`<|tool|>`."""
        return list(self._headers[TOOL])

    def response(self, text: str) -> list[int]:
        """The text and `<|end|>`."""
        return [*self.text(text), self._end]

    def call(self, name: str, arguments: str) -> list[int]:
        """An acting step with one call, as demonstrations write it."""
        return [self._call, *self.text(f"{name} {arguments}"), self._end]

    def reply(self, text: str) -> list[int]:
        """An acting step that replies."""
        return [*self.text(text), self._end]

    def stop_ids(self) -> frozenset[int]:
        """Every control token but `<|call|>` ends a step; all but `<|end|>` make it malformed."""
        return self._control - {self._call}

    def parse(self, ids: Sequence[int]) -> Parsed:
        """Calls or a reply; a step that does not end in `<|end|>` is malformed."""
        if not ids or ids[-1] != self._end:
            return Parsed(failure="the step does not end with its end token")
        return parse_step([self.decode(part) for part in _split(ids[:-1], self._call)])

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
