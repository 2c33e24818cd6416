"""The XML-like dialect of Qwen3-Coder and Qwen3.5.

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

A value is raw text: nothing in it is escaped, and it has no type. So a closing tag counts only where the format can go
on after it, and a value is typed by the tool's schema, without which it stays a text. The templates write objects and
lists as JSON, and other values as Python prints them, hence `True` and `None`; both are the dialect itself, no repair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envace.models.parsing.reading import Malformed, Reading, kind, name_of, skip_space
from envace.models.parsing.values import decode
from envace.types import CallFailure, Json, ParsedCall, ToolCall

MAX_CLOSERS = 100
"""Closing tags inside one value that are taken for text before the value is given up."""

MAX_PARAMETERS = 500
"""Of one call; each costs a look for its end."""

MAX_REFERENCES = 10
"""Steps from a schema to where its types stand."""

_BARE = r"<function=[^<>\n]*>\s*(?:<parameter=|</function>)"
_OPENING = re.compile(rf"<tool_call>|{_BARE}")
_BOUNDARY = re.compile(rf"</?tool_call>|{_BARE}")
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_END_PARAMETER, _END_FUNCTION, _END_CALL = "</parameter>", "</function>", "</tool_call>"
_GOES_ON = re.compile(r"\s*(?:<parameter=|</function>)")
_MAY_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_NEXT_LINE = re.compile(r"\n[ \t]*<parameter=([^<>\n]*)>")


def qwen_xml(text: str, begin: int, reading: Reading) -> Iterator[ParsedCall]:
    """`<tool_call>` with a function in it; without that tag, a function with parameters or an end is an attempt too."""
    found = _OPENING.search(text, begin)
    while found:
        item = _Walk(text, found.start(), Reading(repair=False, tools=reading.tools)).call()
        if item.call is None and reading.repair:
            item = _Walk(text, found.start(), reading).call()
        yield item
        found = _OPENING.search(text, item.end)


@dataclass
class _Walk:
    """One pass over one call."""

    text: str
    start: int
    reading: Reading
    at: int = 0
    raw: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def call(self) -> ParsedCall:
        """The call that begins at `start`."""
        self.at = self.start
        try:
            name = self._name()
            while self._parameter(name):
                pass
            self._end()
            arguments = self._typed(name)
        except Malformed as error:
            end = self._give_up()
            return ParsedCall(call=None, failure=error.failure, detail=error.detail, start=self.start, end=end)
        call = ToolCall(name=name, arguments=arguments)
        return ParsedCall(call=call, start=self.start, end=self.at, repairs=tuple(dict.fromkeys(self.notes)))

    def _amiss(self, failure: CallFailure, detail: str) -> None:
        """What strict parsing refuses and repair notes."""
        if not self.reading.repair:
            raise Malformed(failure, detail)
        self.notes.append(detail)

    def _name(self) -> str:
        if self.text.startswith("<tool_call>", self.at):
            self.at = skip_space(self.text, self.at + len("<tool_call>"))
        else:
            self._amiss(CallFailure.STRAY_TEXT, "a function outside of <tool_call>")
        found = _FUNCTION.match(self.text, self.at)
        if found is None:
            raise Malformed(CallFailure.NO_NAME, "a call without <function=name>")
        self.at = found.end()
        return name_of(found.group(1).strip())

    def _parameter(self, name: str) -> bool:
        """Read one parameter; False where there is no further one."""
        self.at = skip_space(self.text, self.at)
        found = _PARAMETER.match(self.text, self.at)
        if found is None:
            return False
        key = found.group(1).strip()
        if len(self.raw) >= MAX_PARAMETERS:
            raise Malformed(CallFailure.ARGUMENTS, f"more than {MAX_PARAMETERS} parameters")
        if key in self.raw:
            self._amiss(CallFailure.ARGUMENTS, "a parameter twice")
        self.raw[key] = ""
        value, self.at = self._value(name, found.end())
        self.raw[key] = value.removeprefix("\n").removesuffix("\n")
        return True

    def _value(self, name: str, start: int) -> tuple[str, int]:
        """The text of a value, and the position after it."""
        end = self._closer(start)
        following = self._next_parameter(name, start, self._boundary(start) if end is None else end)
        if following is not None:
            self._amiss(CallFailure.UNCLOSED_CALL, "a parameter that is not closed")
            return self.text[start:following], following
        if end is None:
            raise Malformed(CallFailure.UNCLOSED_CALL, "a parameter or its function that is not closed")
        return self.text[start:end], end + len(_END_PARAMETER)

    def _closer(self, start: int) -> int | None:
        """The closing tag of a value: the first after which the format goes on, or, in repair, the call may end."""
        at = self.text.find(_END_PARAMETER, start)
        for _ in range(MAX_CLOSERS):
            if at < 0:
                return None
            after = at + len(_END_PARAMETER)
            if _GOES_ON.match(self.text, after) or (self.reading.repair and _MAY_END.match(self.text, after)):
                return at
            at = self.text.find(_END_PARAMETER, after)
        return None

    def _next_parameter(self, name: str, start: int, stop: int) -> int | None:
        """Another parameter that begins inside a value, so that its closing tag is missing.

        What merely looks like one is text: a parameter that the tool does not have, or one that was given already.
        """
        known = _properties(name, self.reading)
        for found in _NEXT_LINE.finditer(self.text, start, stop):
            key = found.group(1).strip()
            if key not in self.raw and (known is None or key in known):
                return found.start()
        return None

    def _end(self) -> None:
        """The two closing tags."""
        for tag in (_END_FUNCTION, _END_CALL):
            self.at = skip_space(self.text, self.at)
            if self.text.startswith(tag, self.at):
                self.at += len(tag)
            elif self.text.startswith("<", self.at) or self.at == len(self.text):
                self._amiss(CallFailure.UNCLOSED_CALL, f"a call without {tag}")
            elif tag == _END_CALL and self.reading.repair:
                self.notes.append(f"a call without {tag}")
            else:
                raise Malformed(CallFailure.STRAY_TEXT, f"text where {tag} should stand")

    def _boundary(self, at: int) -> int:
        """Where a call that cannot be read ends at the latest: before its closing tag or the next opening one."""
        found = _BOUNDARY.search(self.text, at)
        return found.start() if found else len(self.text)

    def _give_up(self) -> int:
        """Where a call that cannot be read ends, its closing tag included."""
        end = self._boundary(self.at + 1)
        return end + len(_END_CALL) if self.text.startswith(_END_CALL, end) else end

    def _typed(self, name: str) -> dict[str, Json]:
        known = _properties(name, self.reading) or {}
        tool = self.reading.tools.get(name)
        schema = tool.parameters if tool else {}
        return {key: self._value_of(key, text, _types(known.get(key), schema)) for key, text in self.raw.items()}

    def _value_of(self, key: str, text: str, types: set[str]) -> Json:
        """A value as the first of its declared types that its text can be; else the text, which the tool refuses."""
        word = text.strip()
        if "null" in types and word in ("null", "None"):
            return None
        if "boolean" in types and word.lower() in ("true", "false"):
            return word.lower() == "true"
        if types & {"integer", "number"}:
            number = self._number(word)
            if number is not None:
                return number
        if types & {"object", "array"}:
            return self._container(key, text, types)
        return text

    def _number(self, word: str) -> int | float | None:
        try:
            value, _ = decode(word, Reading(repair=False))
        except Malformed:
            return None
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _container(self, key: str, text: str, types: set[str]) -> Json:
        try:
            value, notes = decode(text.strip(), self.reading)
            if isinstance(value, str):
                self._amiss(CallFailure.NOT_JSON, "a value as a text")
                value, notes = decode(value, self.reading)
        except Malformed as error:
            if "string" in types:
                return text
            raise Malformed(error.failure, f"parameter {key!r}: {error.detail}") from None
        if kind(value) not in ("an object", "a list") and "string" in types:
            return text
        self.notes += notes
        return value


def _properties(name: str, reading: Reading) -> Mapping[str, Any] | None:
    """The declared parameters of a tool; None where the tool is not known."""
    tool = reading.tools.get(name)
    if tool is None:
        return None
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _types(schema: Json, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows, as far as it names them."""
    found: set[str] = set()
    layer = [schema]
    for _ in range(MAX_REFERENCES):
        nodes = [node for node in layer if isinstance(node, dict)]
        found.update(*(_named(node) for node in nodes))
        layer = [further for node in nodes for further in _referred(node, root)]
    return found


def _named(schema: Mapping[str, Any]) -> set[str]:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else _entries(schema, "type")
    allowed = [*_entries(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    return {entry for entry in types if isinstance(entry, str)} | {names.get(type(v), "number") for v in allowed}


def _entries(schema: Mapping[str, Any], word: str) -> list[Json]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Json]:
    """Schemas that hold beside this one, or instead of it."""
    choices = [choice for word in ("anyOf", "oneOf", "allOf") for choice in _entries(schema, word)]
    reference = schema.get("$ref")
    return [*choices, _resolved(reference, root)] if isinstance(reference, str) else choices


def _resolved(reference: str, root: Mapping[str, Any]) -> Json:
    """What a reference within the tool's own schema points to; None for any other."""
    if not reference.startswith("#/"):
        return None
    node: Json = root
    for part in reference[2:].split("/"):
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node
