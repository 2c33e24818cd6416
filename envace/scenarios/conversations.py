"""Recorded conversations: OpenAI messages in the dialects of data sets, read to our own messages and written back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from envace.errors import DataError
from envace.types import Author, Message, ToolCall

AUTHORS = {
    "system": Author.SYSTEM,
    "developer": Author.SYSTEM,
    "user": Author.USER,
    "assistant": Author.ASSISTANT,
    "tool": Author.TOOL,
    "function": Author.TOOL,
}
"""What a message's `role` means."""
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
"""Reasoning at the beginning of an assistant's content."""


def read_messages(values: Iterable[Any]) -> list[Message]:
    """Messages out of OpenAI's: an empty or null `tool_calls` is none, `<think>` in a content becomes reasoning.

    Raises:
        DataError: A message cannot be read; names it by its number, from 0.
    """
    messages = [_message(value, f"message {number}") for number, value in enumerate(values)]
    return _linked(messages)


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is a {type(value).__name__}, not an object.")
    name = value.get("role")
    author = AUTHORS.get(name) if isinstance(name, str) else None
    if author is None:
        raise DataError(f"{where} has the role {name!r}; there are {', '.join(AUTHORS)}.")
    content = _content(value.get("content"), where)
    calls = tuple(_call(call, where) for call in _listed(value.get("tool_calls"), where))
    if author is not Author.ASSISTANT:
        if calls:
            raise DataError(f"{where} of author {author.value} has tool calls.")
        if author is not Author.TOOL:
            return Message(author=author, content=content)
        call_id, tool = _text(value.get("tool_call_id")), _text(value.get("name"))
        return Message(author=author, content=content, call_id=call_id, name=tool)
    thought, said = _reasoning(content, where)
    given = _text(value.get("reasoning_content")) or _text(value.get("reasoning"))
    return Message(author=author, content=said, calls=calls, reasoning=given.strip() or thought)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _listed(value: Any, where: str) -> Sequence[Any]:
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        raise DataError(f"{where}: tool_calls is a {type(value).__name__}, not a list.")
    return value


def _content(value: Any, where: str) -> str:
    """Text, text in parts, or, as some tools' responses are recorded, a JSON object."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in value] if _is_list(value) else [None]
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise DataError(f"{where}: its content is no text.")
    return "\n".join(texts)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _reasoning(content: str, where: str) -> tuple[str | None, str]:
    found = THOUGHT.match(content)
    if found:
        return found.group(1).strip() or None, content[found.end() :].rstrip()
    if content.lstrip().startswith("<think>"):
        raise DataError(f"{where}: its reasoning is opened and never closed.")
    return None, content


def _call(value: Any, where: str) -> ToolCall:
    body = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str) or not body["name"].strip():
        raise DataError(f"{where}: a tool call has no function with a name.")
    arguments = body.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise DataError(f"{where}: the arguments of {body['name']!r} are no JSON.") from None
    if not isinstance(arguments, Mapping):
        raise DataError(f"{where}: the arguments of {body['name']!r} are a {type(arguments).__name__}, not an object.")
    return ToolCall(name=body["name"], arguments=dict(arguments), id=_text(value.get("id")))


def answered_calls(messages: Iterable[Message]) -> list[ToolCall | None]:
    """For each message the call that it answers: the one of its id, else the first of the step that has no answer yet.

    None for messages that are no tool's, or answer nothing.
    """
    found: list[ToolCall | None] = []
    waiting: list[ToolCall] = []
    for message in messages:
        call = None
        if message.author is Author.ASSISTANT:
            waiting = list(message.calls)
        elif message.author is Author.TOOL and waiting:
            named = [call for call in waiting if call.id and call.id == message.call_id]
            call = waiting.pop(waiting.index(named[0]) if named else 0)
        found.append(call)
    return found


def _linked(messages: list[Message]) -> list[Message]:
    """Each tool's message with the id and the name of its call, where those were recorded in order and not named."""
    return [
        message
        if call is None
        else replace(message, call_id=message.call_id or call.id, name=message.name or call.name)
        for message, call in zip(messages, answered_calls(messages), strict=True)
    ]


def check_order(messages: Sequence[Message]) -> None:
    """Whether each author may speak where it does: a system message, then user, assistant and tools in turns.

    Raises:
        DataError: Who speaks out of order, and where.
    """
    spoken = list(messages)
    begins = next((number for number, m in enumerate(spoken) if m.author is not Author.SYSTEM), len(spoken))
    if begins == len(spoken) or spoken[begins].author is not Author.USER:
        raise DataError("the conversation does not begin with a user, or with a system message and a user.")
    owed = 0
    before = Author.ASSISTANT
    for number, message in enumerate(spoken[begins:], begins):
        problem = _out_of_order(message, before, owed)
        if problem:
            raise DataError(f"message {number} of author {message.author.value}: {problem}.")
        owed = len(message.calls) if message.author is Author.ASSISTANT else max(0, owed - 1)
        before = message.author
    if owed:
        raise DataError(f"{owed} of the last calls have no answer.")


def _out_of_order(message: Message, before: Author, owed: int) -> str | None:
    author = message.author
    if author is Author.SYSTEM:
        return "a system message stands only at the beginning"
    if author is Author.TOOL:
        return None if owed else "it answers no call"
    if owed:
        return f"{owed} calls before it have no answer"
    if author is Author.USER:
        return None if before is Author.ASSISTANT else f"it follows the {before.value}, without a reply between"
    return "it follows an assistant's reply" if before is Author.ASSISTANT else None


def write_messages(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as OpenAI has them; reasoning under `reasoning_content`, and no key that would be empty."""
    return tuple(_written(message) for message in messages)


def _written(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.author.value, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.calls:
        made["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.calls
        ]
    if message.author is Author.TOOL:
        made |= {key: value for key, value in (("tool_call_id", message.call_id), ("name", message.name)) if value}
    return made


def recorded_calls(reference: Iterable[Any]) -> list[dict[str, Any]]:
    """Calls of a recorded conversation with their responses: `name`, `arguments`, `response` (parsed where it is JSON).

    Calls that got no response are left out.
    """
    messages = read_messages(reference)
    return [
        {"name": call.name, "arguments": call.arguments, "response": _parsed(message.content)}
        for message, call in zip(messages, answered_calls(messages), strict=True)
        if call is not None
    ]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def recorded_conversation(reference: Iterable[Any]) -> list[Message]:
    """What a recorded conversation says after its opening: the system message and the first user message."""
    messages = read_messages(reference)
    first = next((number for number, message in enumerate(messages) if message.author is Author.USER), -1)
    return messages[first + 1 :]
