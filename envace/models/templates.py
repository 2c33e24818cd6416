"""A tokenizer's chat template as a function from messages to text, for models with and without templates for tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from envace.errors import ModelError
from envace.scenarios.tools import to_openai
from envace.types import Author, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_PROMPT = (
    "You can call tools. To call one, write\n"
    '<tool_call>\n{"name": "the tool", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
    "and nothing else; a message may hold several such blocks. What a tool returns comes back {where}. "
    "When there is nothing left to call, reply in plain words.\n"
    "The tools:\n<tools>\n{tools}\n</tools>"
)
"""How tools are told to a model whose template knows none."""


class Template:
    """Renders conversations as text, control tokens included.

    Where the template knows no tools (`native` False), calls are written into the contents of assistant
    messages, in the Hermes way, and the tools into the system message; responses come from the author `tool` if the
    template lets any author speak, else within tags from the user.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        native: bool,
        quotes: bool = False,
        speaks: bool = False,
        options: Mapping[str, Any],
    ) -> None:
        """Make one.

        Args:
            tokenizer: Its own template is used.
            native: Whether the template is trusted with tools, calls and responses.
            quotes: Whether the template writes a tool's text as a JSON string; JSON is then handed over parsed.
            speaks: Whether a template that knows no tools lets the author `tool` speak.
            options: Further variables of the template, e.g. `enable_thinking`.
        """
        if not tokenizer.chat_template:
            raise ModelError(
                "The tokenizer has no chat template. Use the instruct model, or put its chat_template.jinja beside it."
            )
        self._tokenizer, self._options = tokenizer, dict(options)
        self.native, self.quotes, self.speaks = native, quotes, speaks
        self.trims = False
        """Whether the template takes white space off a tool's text; learned from it."""
        self.trims_user = False
        """The same of a user's text."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, open: bool) -> str:
        """The text of a conversation; `open` adds the header of the next acting step.

        Raises:
            ModelError: The template refuses the conversation.
        """
        wire = [self._native(m) for m in messages] if self.native else _merged(self._plain(messages, tools))
        listed: Any = [to_openai(tool) for tool in tools] if self.native and tools else None
        try:
            text = self._tokenizer.apply_chat_template(
                wire, tools=listed, tokenize=False, add_generation_prompt=open, **self._options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(
                f"The chat template refuses the conversation: {type(error).__name__}: {error}"[:300]
            ) from None
        return str(text)

    def shown(self, text: str) -> str:
        """A tool's text as the template writes it."""
        if not self.quotes:
            return text.strip() if self.trims else text
        return json.dumps(_structure(text), ensure_ascii=False)

    def _native(self, message: Message) -> dict[str, Any]:
        """A message as templates expect it; keys that hold nothing are left out, since templates ask for presence."""
        content: Any = message.content
        if message.author is Author.TOOL and self.quotes:
            content = _structure(content)
        wire: dict[str, Any] = {"role": message.author.value, "content": content}
        if message.calls:
            wire["tool_calls"] = [_call(call, number) for number, call in enumerate(message.calls)]
        if message.reasoning is not None:
            wire["reasoning_content"] = message.reasoning
        if message.author is Author.TOOL:
            wire |= {"name": message.name or "tool", "tool_call_id": message.call_id or _call_id(0)}
        return wire

    def _plain(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        system = [m.content for m in messages if m.author is Author.SYSTEM]
        if tools:
            listed = "\n".join(json.dumps(to_openai(tool)["function"], ensure_ascii=False) for tool in tools)
            where = "as the next message" if self.speaks else "within <tool_response></tool_response>"
            system.append(TOOL_PROMPT.replace("{where}", where).replace("{tools}", listed))
        wire = [{"role": "system", "content": "\n\n".join(system)}] if system else []
        for message in messages:
            if message.author is Author.TOOL and not self.speaks:
                wire.append({"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"})
            elif message.author is not Author.SYSTEM:
                wire.append({"role": message.author.value, "content": _told(message)})
        return wire


def _call(call: ToolCall, number: int) -> dict[str, Any]:
    """Arguments stay an object: some templates encode a text a second time, others refuse it."""
    return {
        "type": "function",
        "id": call.id or _call_id(number),
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_id(number: int) -> str:
    """Nine letters and digits, as the strictest templates (Mistral's) demand."""
    return f"call{number:05d}"


def _structure(text: str) -> Any:
    """An object or array that the text writes down, else the text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, (dict, list)) else text


def _told(message: Message) -> str:
    """Reasoning, text and calls as one content."""
    parts = [f"<think>\n{message.reasoning}\n</think>\n"] if message.reasoning is not None else []
    if message.content:
        parts.append(message.content)
    for call in message.calls:
        written = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    return "\n".join(parts)


def _merged(wire: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one author as one message: some templates demand that user and assistant alternate."""
    merged: list[dict[str, Any]] = []
    for message in wire:
        if merged and merged[-1]["role"] == message["role"] != Author.TOOL.value:
            merged[-1] = {**message, "content": f"{merged[-1]['content']}\n{message['content']}"}
        else:
            merged.append(message)
    return merged
