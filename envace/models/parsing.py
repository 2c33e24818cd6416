"""Strict parsing of an acting step in the starter format: calls, or a reply.

`<|call|>name {"argument": value}` makes a call, several in a row make several; a step without `<|call|>` is a reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from envace.types import ToolCall

MAX_CALLS = 8
"""More calls than this in one step is a flood, and a parse failure."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a step says: calls, or a reply, or why it is neither."""

    calls: tuple[ToolCall, ...] = ()
    reply: str | None = None
    failure: str | None = None


def parse_step(texts: Sequence[str]) -> Parsed:
    """Parse the texts of a step that stand after its start and after each `<|call|>` token.

    Args:
        texts: The text before the first call token (the whole step where there is none), then one text a call token.

    Returns:
        `calls` if there is a call token, else `reply`; `failure` says in words what is malformed.
    """
    before, *bodies = texts
    if not bodies:
        return Parsed(reply=before.strip()) if before.strip() else Parsed(failure="an empty step")
    if before.strip():
        return Parsed(failure="text before a call")
    if len(bodies) > MAX_CALLS:
        return Parsed(failure=f"{len(bodies)} calls in one step, at most {MAX_CALLS} are allowed")
    calls = []
    for body in bodies:
        call = _parse_call(body)
        if isinstance(call, str):
            return Parsed(failure=call)
        calls.append(call)
    return Parsed(calls=tuple(calls))


def _parse_call(body: str) -> ToolCall | str:
    """A call, or what is wrong with it."""
    name, space, rest = body.strip().partition(" ")
    if not name:
        return "a call without a name"
    if not space:
        return f"call {name!r} has no arguments object"
    try:
        arguments = json.loads(rest)
    except (ValueError, RecursionError) as error:
        return f"arguments of {name!r} are not JSON: {error}"[:200]
    if not isinstance(arguments, dict):
        return f"arguments of {name!r} are not an object"
    return ToolCall(name=name, arguments=arguments)
