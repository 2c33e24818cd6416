"""What a message of an OpenAI-compatible endpoint says.

Endpoints differ, so both modes accept: arguments as a text (the protocol) or as an object; for a call without
arguments none at all, null or an empty text (vLLM reads them back as `{}`, and many servers send them); calls in
`tool_calls` or, from older servers, in `function_call`; reasoning in a field of either name, or still in the content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from envace.models.parsing.reading import (
    AS_TEXT,
    MAX_CALLS,
    NO_ARGUMENTS,
    Malformed,
    Mode,
    Reading,
    failed,
    kind,
    mended_call,
    name_of,
    object_of,
)
from envace.models.parsing.steps import THINK, flood, split_reasoning, step_failure
from envace.models.parsing.values import decode
from envace.types import CallFailure, Json, Parsed, ParsedCall, ToolCall, ToolSpec


def parse_wire(
    message: Mapping[str, Any],
    *,
    mode: Mode = "strict",
    tools: Sequence[ToolSpec] = (),
    max_calls: int = MAX_CALLS,
    reasoning_tags: tuple[str, str] | None = THINK,
) -> Parsed:
    """Parse the assistant's message of a chat completion.

    Args:
        message: `choices[i].message`.
        mode: As for `parse`.
        tools: What the model was offered.
        max_calls: As for `parse`.
        reasoning_tags: What encloses reasoning in the content, where the endpoint left it there.

    Returns:
        Calls have the ids that the endpoint gave them; positions are 0, for there is no one text.
    """
    reading = Reading.of(mode, tools)
    items = _items(message, reading, max_calls)
    spoken, thought = _content(message)
    if thought is None:
        found = split_reasoning(spoken, reasoning_tags)
        spoken, thought = spoken[found.end :].strip(), found.text
        if not found.closed and not items:
            detail = "reasoning that is never closed"
            return Parsed(reasoning=thought, failure=CallFailure.UNCLOSED_REASONING, detail=detail)
    failure, detail = step_failure(items, spoken, reading)
    return Parsed(items=tuple(items), text=spoken, reasoning=thought, failure=failure, detail=detail)


# --- calls ---------------------------------------------------------------------------------------------------------


def _items(message: Mapping[str, Any], reading: Reading, limit: int) -> list[ParsedCall]:
    entries = _entries(message)
    items = [_call(entry, reading) for entry in entries[:limit]]
    return [*items, flood(limit, f"{len(entries) - limit}")] if len(entries) > limit else items


def _entries(message: Mapping[str, Any]) -> list[Json]:
    """All calls of a message; an empty list and null are none."""
    listed = message.get("tool_calls") or []
    entries = listed if isinstance(listed, list) else [listed]
    older = message.get("function_call")
    return entries if not older or any(_same(entry, older) for entry in entries) else [*entries, {"function": older}]


def _same(entry: Json, function: Json) -> bool:
    """Whether a server has written a call in both places."""
    try:
        return isinstance(entry, dict) and entry.get("function") == function
    except RecursionError:
        return False


def _call(entry: Json, reading: Reading) -> ParsedCall:
    try:
        call, notes = _exact(entry, reading)
    except Malformed as error:
        try:
            call, notes = _mended(entry, reading)
        except Malformed:
            return replace(failed(error, 0, 0), id=_id(entry))
    return ParsedCall(call=replace(call, id=_id(entry)), id=_id(entry), repairs=notes)


def _exact(entry: Json, reading: Reading) -> tuple[ToolCall, tuple[str, ...]]:
    if not isinstance(entry, dict):
        raise Malformed(CallFailure.NOT_AN_OBJECT, f"a call is an object, not {kind(entry)}")
    function = entry.get("function")
    if not isinstance(function, dict):
        raise Malformed(CallFailure.NO_NAME, "a call without a function")
    name, raw = name_of(function.get("name")), function.get("arguments")
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return ToolCall(name=name, arguments={}), (NO_ARGUMENTS,) if reading.repair else ()
    value, _ = decode(_text_of(name, raw), Reading(repair=False))
    return ToolCall(name=name, arguments=object_of(name, value)), ()


def _text_of(name: str, raw: Json) -> str:
    """Arguments as the protocol has them. An object is held to the same rules as a text: no NaN, no deep nesting."""
    if isinstance(raw, str):
        return raw
    try:
        return json.dumps(object_of(name, raw))
    except (TypeError, ValueError, RecursionError) as error:
        raise Malformed(CallFailure.ARGUMENTS, f"arguments of {name!r} are not JSON: {error}") from None


def _mended(entry: Json, reading: Reading) -> tuple[ToolCall, tuple[str, ...]]:
    """A call whose arguments must be mended, or that stands without `function` around it."""
    if not reading.repair or not isinstance(entry, dict):
        raise Malformed(CallFailure.NOT_AN_OBJECT, "not to be mended")
    function = entry.get("function")
    inner = function if isinstance(function, dict) else {key: entry[key] for key in entry if key not in ("id", "index")}
    # Not closed: an endpoint that stopped in the middle of a call may send what it has.
    call, notes = mended_call(inner, partial(decode, reading=reading, closed=False))
    decode(_text_of(call.name, call.arguments), Reading(repair=False))
    return call, tuple(note for note in notes if note != AS_TEXT) or ("a call without `function`",)


def _id(entry: Json) -> str:
    found = entry.get("id") if isinstance(entry, dict) else None
    return "" if found is None else str(found)


# --- what is said --------------------------------------------------------------------------------------------------


def _content(message: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the message says, and the reasoning that the endpoint set apart."""
    pieces = [*_pieces(message.get("content")), *_pieces(message.get("refusal"))]
    said = [piece for thought, piece in pieces if not thought]
    fields = [message.get("reasoning_content"), message.get("reasoning")]
    thoughts = [value for value in fields if isinstance(value, str) and value.strip()][:1]
    thoughts += [piece for thought, piece in pieces if thought]
    return "\n".join(said).strip(), "\n".join(thoughts).strip() if thoughts else None


def _pieces(content: Json) -> list[tuple[bool, str]]:
    """The parts of a content, and whether each is reasoning."""
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return [_piece(part) for part in parts]


def _piece(part: Json) -> tuple[bool, str]:
    if isinstance(part, str):
        return False, part
    for key in ("text", "refusal", "thinking", "reasoning") if isinstance(part, dict) else ():
        if isinstance(part.get(key), str):
            return key in ("thinking", "reasoning") or part.get("type") in ("thinking", "reasoning"), part[key]
    try:
        return False, json.dumps(part, default=str)  # nothing is lost, whatever it is
    except (TypeError, ValueError, RecursionError):
        return False, f"[{kind(part)} that cannot be shown]"
