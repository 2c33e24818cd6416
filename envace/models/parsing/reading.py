"""What all dialects share: how lenient a reading is, what it may still cost, and how a call is made of an object."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from envace.types import CallFailure, Json, ParsedCall, ToolCall, ToolSpec

Mode = Literal["strict", "repair"]
"""`strict` for scores and rewards, `repair` for deployment."""

MAX_CALLS = 8
"""More calls than this in one step is a flood, and a failure."""

MAX_CHARACTERS = 1_000_000
"""A longer step is a flood too and is not parsed: the time that a step may take is then bounded, about a second."""

BUDGET = 200_000
"""Characters a step that readers slower than `json` may see: Python's parser and the mending of JSON."""

DETAIL = 200
"""Length of a failure in words, at most."""


class Dialect(str, Enum):
    """How a model writes calls in its text."""

    STARTER = "starter"
    """`<|call|>name {"argument": value}`; text beside calls is malformed."""
    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""
    LLAMA = "llama"
    """The whole step is `{"name": ..., "parameters": {...}}`, several with `;` or new lines between: Llama 3."""
    PYTHONIC = "pythonic"
    """The whole step is `[name(argument="value")]`: Llama 3.2, Llama 4, Gemma as its documentation prompts it."""
    QWEN_XML = "qwen_xml"
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5."""


class Malformed(Exception):
    """Something that cannot be read, and why. It never leaves this package."""

    def __init__(self, failure: CallFailure, detail: str) -> None:
        super().__init__(detail)
        self.failure = failure
        self.detail = detail[:DETAIL]


@dataclass(kw_only=True)
class Reading:
    """One reading of one step."""

    repair: bool
    tools: Mapping[str, ToolSpec] = field(default_factory=dict)
    budget: int = BUDGET
    """Characters that slow readers may still see."""

    @classmethod
    def of(cls, mode: Mode, tools: Sequence[ToolSpec]) -> Reading:
        """A fresh reading."""
        return cls(repair=mode == "repair", tools={tool.name: tool for tool in tools})

    def spend(self, characters: int) -> None:
        """Take from the budget before something slow is done; what does not fit in is not done."""
        if characters > self.budget:
            raise Malformed(CallFailure.NOT_JSON, f"{characters} characters are too many to be read here")
        self.budget -= characters


Reader = Callable[[str, int, Reading], Iterator[ParsedCall]]
"""A dialect: the attempted calls of a text from a position on, in order, as spans that do not overlap."""

_VISIBLE = re.compile(r"[^ \t\r\n]")


def skip_space(text: str, at: int) -> int:
    """The position of the next character that is not JSON's white space."""
    found = _VISIBLE.search(text, at)
    return found.start() if found else len(text)


def failed(error: Malformed, start: int, end: int) -> ParsedCall:
    """A call that cannot be read."""
    return ParsedCall(call=None, failure=error.failure, detail=error.detail, start=start, end=end)


def noted(item: ParsedCall, *notes: str) -> ParsedCall:
    """The same call with further repairs; a call that could not be read has none."""
    return item if item.call is None else replace(item, repairs=(*item.repairs, *notes))


def amiss(item: ParsedCall, reading: Reading, failure: CallFailure, detail: str, *, note: str) -> ParsedCall:
    """The same call where something around it is not as it should be: a failure if strict, else a note."""
    if reading.repair:
        return noted(item, note)
    return item if item.call is None else replace(item, call=None, failure=failure, detail=detail[:DETAIL])


# --- from a JSON value to a call -----------------------------------------------------------------------------------

Decode = Callable[[str], tuple[Json, tuple[str, ...]]]
"""Reads a text that should be JSON: the value, and what was mended."""


AS_TEXT, NO_ARGUMENTS = "arguments as a text", "no arguments"
"""Repairs."""


def call_of(value: Json, *, keys: Sequence[str], reading: Reading, decode: Decode) -> tuple[ToolCall, tuple[str, ...]]:
    """The call that an object describes, and what was mended.

    Args:
        value: What should be an object with a name and arguments.
        keys: Where the arguments may stand; exactly one of them.
        reading: Whether other shapes than the exact one are accepted.
        decode: How arguments that came as a text are read.
    """
    try:
        return _exact(value, keys), ()
    except Malformed:
        if not reading.repair or not isinstance(value, dict):
            raise
    return mended_call(value, decode)


def _exact(value: Json, keys: Sequence[str]) -> ToolCall:
    if not isinstance(value, dict):
        raise Malformed(CallFailure.NOT_AN_OBJECT, f"a call is an object, not {kind(value)}")
    name = name_of(value.get("name"))
    present = [key for key in ("arguments", "parameters") if key in value]
    if len(present) != 1 or present[0] not in keys:
        found = " and ".join(present) or f"no {keys[0]}"
        raise Malformed(CallFailure.ARGUMENTS, f"call {name!r} has {found}")
    return ToolCall(name=name, arguments=object_of(name, value[present[0]]))


def name_of(value: Json) -> str:
    """A tool's name."""
    if not isinstance(value, str) or not value.strip():
        raise Malformed(CallFailure.NO_NAME, "a call without a name")
    return value


def object_of(name: str, value: Json) -> dict[str, Any]:
    """Arguments, if they are an object."""
    if not isinstance(value, dict):
        raise Malformed(CallFailure.ARGUMENTS, f"arguments of {name!r} are not an object but {kind(value)}")
    return value


def kind(value: Json) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def mended_call(value: dict[str, Any], decode: Decode) -> tuple[ToolCall, tuple[str, ...]]:
    """A call in one of the shapes that models confuse with their own."""
    notes: tuple[str, ...] = ()
    if isinstance(value.get("function"), dict):
        value, notes = value["function"], ("call inside `function`",)
    elif "name" not in value and "function" in value:
        value, notes = {**value, "name": value["function"]}, ("name under `function`",)
    name = name_of(value.get("name"))
    raw, moved = _arguments(name, value)
    arguments, decoded = arguments_of(name, raw, decode)
    written = (AS_TEXT,) if isinstance(raw, str) and raw.strip() else ()
    return ToolCall(name=name, arguments=arguments), (*notes, *moved, *written, *decoded)


def _arguments(name: str, value: dict[str, Any]) -> tuple[Json, tuple[str, ...]]:
    """What stands for arguments in an object; an object under an unknown key counts, so that it is not dropped."""
    present = [key for key in ("arguments", "parameters") if key in value]
    if len(present) > 1 and value["arguments"] != value["parameters"]:
        raise Malformed(CallFailure.ARGUMENTS, f"call {name!r} has arguments and other parameters")
    if present:
        notes = {("parameters",): ("parameters for arguments",), ("arguments", "parameters"): ("arguments twice",)}
        return value[present[0]], notes.get(tuple(present), ())
    others = [entry for key, entry in value.items() if key not in ("name", "type", "function")]
    if not others:
        return None, ()
    if len(others) > 1 or not isinstance(others[0], dict):
        raise Malformed(CallFailure.ARGUMENTS, f"call {name!r} has no arguments")
    return others[0], ("arguments under another key",)


def arguments_of(name: str, raw: Json, decode: Decode) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Arguments that may be missing, or a text that holds them; what does neither must be an object."""
    if raw is None or (isinstance(raw, str) and not raw.strip()):
        return {}, (NO_ARGUMENTS,)
    if not isinstance(raw, str):
        return object_of(name, raw), ()
    value, notes = decode(raw)
    if isinstance(value, str):
        value, more = decode(value)
        notes = (*notes, "a text in a text", *more)
    return object_of(name, value), notes
