"""Values as models write them: strict JSON first, then, where repair is asked for, what they write instead of it.

The readers of `json` are tried before Python's own parser, and both before the text is changed: a text that one of them
accepts means what it says, while a mended text is a guess. A guess is made only where the text ends as a complete
value does, for a call that was cut in the middle of an argument must not be run with half of it.

The package `json-repair` was measured and left out: 2,000 hostile characters keep it busy for more than a second, and
20,000 for more than a minute, while everything here takes time in proportion to the text.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from envace.models.parsing.reading import Malformed, Reading, skip_space
from envace.types import CallFailure, Json

MAX_DEPTH = 100
"""Deeper nesting is not read: what comes after us copies and prints arguments recursively."""

MAX_DIGITS = 4300
"""Of an integer; Python neither reads nor prints more by default."""


@dataclass(frozen=True, kw_only=True)
class Read:
    """A value, where it ends, and what was mended."""

    value: Json
    end: int
    repairs: tuple[str, ...] = ()


def read_value(text: str, at: int, *, stop: int, closed: bool, reading: Reading) -> Read:
    """Read the value at a position.

    Args:
        text: The text of the step.
        at: Where the value begins.
        stop: Where it ends at the latest if it must be mended; a value that can be read as it is may be longer.
        closed: Whether the model itself marked `stop` as the end, so that a missing bracket is no cut.
        reading: Strict or repair.

    Raises:
        Malformed: Why the text is not strict JSON.
    """
    try:
        return read_json(text, at)
    except Malformed:
        found = repair_value(text, at, stop=stop, closed=closed, reading=reading) if reading.repair else None
        if found is None:
            raise
        return found


def decode(text: str, reading: Reading, *, closed: bool = True) -> tuple[Json, tuple[str, ...]]:
    """Read a whole text that should be one value, and say what was mended. `closed` as for `read_value`."""
    at = skip_space(text, 0)
    read = read_value(text, at, stop=len(text), closed=closed, reading=reading)
    if text[read.end :].strip():
        raise Malformed(CallFailure.NOT_JSON, f"more text after the value, at character {read.end}")
    return read.value, read.repairs


# --- JSON ----------------------------------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
)
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer)


def read_json(text: str, at: int) -> Read:
    """The JSON value at a position, by the letter: no key twice, no NaN, no control characters."""
    return _decoded(_STRICT, text, at)


def _decoded(decoder: json.JSONDecoder, text: str, at: int) -> Read:
    try:
        value, end = decoder.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise Malformed(CallFailure.NOT_JSON, f"{error.msg}, at character {error.pos}") from None
    except ValueError as error:
        raise Malformed(CallFailure.NOT_JSON, str(error)) from None
    except RecursionError:
        raise Malformed(CallFailure.NOT_JSON, f"nested deeper than {MAX_DEPTH}") from None
    return Read(value=_shallow(value), end=end)


def _shallow(value: Json) -> Json:
    """The value, if it is not nested too deep; level by level, for recursion would fail on what it looks for."""
    layer = [value]
    for _ in range(MAX_DEPTH + 1):
        layer = [child for node in layer for child in _children(node) if isinstance(child, (dict, list))]
        if not layer:
            return value
    raise Malformed(CallFailure.NOT_JSON, f"nested deeper than {MAX_DEPTH}")


def _children(node: Json) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


# --- repairs, the surest first -------------------------------------------------------------------------------------


def repair_value(text: str, at: int, *, stop: int, closed: bool, reading: Reading) -> Read | None:
    """The object or list at a position, mended; None if that cannot be done. Arguments as for `read_value`."""
    if not text.startswith(("{", "["), at):
        return None
    ways: tuple[Callable[[], Read], ...] = (
        lambda: _loosely(text, at),
        lambda: _as_python(text, at, reading),
        lambda: _mended(text, at, stop, closed=closed, reading=reading),
    )
    for way in ways:
        try:
            return way()
        except Malformed:
            continue
    return None


def _loosely(text: str, at: int) -> Read:
    read = _decoded(_LENIENT, text, at)
    return Read(value=read.value, end=read.end, repairs=("control characters or a key twice",))


_JSON_SLASH = re.compile(r"(?<!\\)((?:\\\\)*)\\/")
"""The one escape of JSON that Python does not know."""


def _as_python(text: str, at: int, reading: Reading) -> Read:
    """A Python literal, in which JSON's `true`, `false` and `null` may stand as well."""
    code = scan_code(text, at, stop=min(len(text), at + reading.budget))
    reading.spend(code.read)
    if code.end is None:
        raise Malformed(CallFailure.NOT_JSON, "a bracket is never closed")
    if any(not text[one[1] : two[0]].strip() for one, two in pairwise(code.texts)):
        raise Malformed(CallFailure.NOT_JSON, "two texts side by side")  # Python would glue them: a comma is missing
    source = _JSON_SLASH.sub(r"\1/", text[at : code.end])
    value = literal(expression(source), lenient=True)
    return Read(value=value, end=code.end, repairs=("Python literals",))


def _mended(text: str, at: int, stop: int, *, closed: bool, reading: Reading) -> Read:
    """JSON after quotes were escaped, commas dropped and brackets closed."""
    reading.spend(stop - at)
    mender = _Mender(text, at, stop)
    end = mender.run(may_close=closed or text[at:stop].rstrip().endswith(("}", "]")))
    source = "".join(mender.out)
    read = _decoded(_LENIENT, source, 0)
    if read.end != len(source):
        raise Malformed(CallFailure.NOT_JSON, "more text after the value")
    return Read(value=read.value, end=end, repairs=tuple(dict.fromkeys(mender.notes)))


class _Mender:
    """Copies almost-JSON and mends it on the way, in one pass.

    A quote inside a string ends it only where JSON can go on after it; any other is text that should have been escaped.
    """

    _MARK = re.compile(r'\\.|["{}\[\],:]|\b(?:True|False|None)\b', re.DOTALL)
    _CONSTANTS = {"True": "true", "False": "false", "None": "null"}  # noqa: RUF012
    _AFTER_KEY = re.compile(r"\s*:")
    _AFTER_VALUE = re.compile(r'\s*(?:[}\]][\s}\]]*(?:[,;<]|\Z)|,\s*(?:\}|"[^"]*"\s*:))')
    _AFTER_ELEMENT = re.compile(r'\s*(?:[}\]][\s}\]]*(?:[,;<]|\Z)|,\s*[\]"{\[\dtfnTFN-])')

    def __init__(self, text: str, start: int, stop: int) -> None:
        self.text, self.start, self.stop = text, start, stop
        self.out: list[str] = []
        self.notes: list[str] = []
        self._copied = start
        """Everything before this position is in `out`, as it is or mended."""
        self._open: list[str] = []
        self._in_key = self._in_text = False
        self._comma: int | None = None
        """Position of the last mark if that was a comma."""

    def run(self, *, may_close: bool) -> int:
        """Mend the value and return where it ends; missing brackets are added only if `may_close`."""
        for mark in self._MARK.finditer(self.text, self.start, self.stop):
            if self._in_text:
                self._inside(mark)
            elif self._outside(mark):
                self._put(mark.end(), mark.end(), "")
                return mark.end()
        if self._in_text or not may_close:
            raise Malformed(CallFailure.NOT_JSON, "the value is cut")
        closers = "".join("}" if bracket == "{" else "]" for bracket in reversed(self._open))
        self._put(self.stop, self.stop, closers, "missing brackets")
        return self.stop

    def _put(self, start: int, end: int, instead: str, *notes: str) -> None:
        """Copy up to `start`, then write something instead of what stands up to `end`."""
        self.out += [self.text[self._copied : start], instead]
        self._copied = end
        self.notes += notes

    def _inside(self, mark: re.Match[str]) -> None:
        found = mark.group()
        if found == '"':
            if self._ends_text(mark.end()):
                self._in_text = False
            else:
                self._put(mark.start(), mark.end(), '\\"', "unescaped quotes")
        elif found[0] == "\\" and found[1] not in '"\\/bfnrtu':
            kept = found[1] if found[1] == "'" else "\\" + found
            self._put(mark.start(), mark.end(), kept, "unknown escapes")

    def _ends_text(self, at: int) -> bool:
        after = self._AFTER_ELEMENT if self._open[-1] == "[" else self._AFTER_VALUE
        return (self._AFTER_KEY if self._in_key else after).match(self.text, at, self.stop) is not None

    def _outside(self, mark: re.Match[str]) -> bool:
        """Follow the structure; true where the outermost bracket closes."""
        found, comma, self._comma = mark.group(), self._comma, None
        if found in self._CONSTANTS:
            self._put(mark.start(), mark.end(), self._CONSTANTS[found], "Python literals")
        elif found == '"':
            self._in_text = True
        elif found in "{[":
            self._open.append(found)
            self._in_key = found == "{"
        elif found in "}]":
            return self._close(mark.start(), comma)
        elif found == ",":
            self._in_key, self._comma = self._open[-1] == "{", mark.start()
        elif found == ":":
            self._in_key = False
        return False

    def _close(self, at: int, comma: int | None) -> bool:
        if comma is not None and not self.text[comma + 1 : at].strip():
            self._put(comma, at, "", "trailing commas")
        self._open.pop()
        return not self._open


# --- Python literals -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Code:
    """A bracketed piece of Python code."""

    end: int | None
    """Position after the bracket that closes the first one; None if none does."""
    read: int
    """Characters outside strings, which is what parsing it costs."""
    texts: tuple[tuple[int, int], ...] = ()
    """Spans of its strings in single quotes of either kind, the quotes included."""


_CODE = re.compile(r"""\\.|\"{3}|'{3}|["'(){}\[\]]""", re.DOTALL)


def scan_code(text: str, at: int, *, stop: int) -> Code:
    """Find where the bracket at a position closes, without a look at what stands in strings."""
    depth, opened, read, seen = 0, None, 0, at
    texts: list[tuple[int, int]] = []
    for mark in _CODE.finditer(text, at, stop):
        found = mark.group()
        if opened is not None:
            if found == opened.group() or (found[0] == opened.group() and len(found) == 3):
                texts.append((opened.start(), mark.end()))
                opened, seen = None, mark.end()
        elif found[0] in "\"'":
            opened, read = mark, read + mark.start() - seen
        elif found[0] != "\\":
            depth += 1 if found in "([{" else -1
            if depth <= 0:
                single = tuple(span for span in texts if text[span[0] : span[0] + 3] not in ('"""', "'''"))
                return Code(end=mark.end(), read=read + mark.end() - seen, texts=single)
    return Code(end=None, read=read + stop - seen)


def escape_lines(text: str, at: int, code: Code) -> str:
    """The code with the raw line breaks inside its strings escaped; Python allows none there."""
    parts, copied = [], at
    for start, end in code.texts:
        parts += [text[copied:start], text[start:end].replace("\r", "\\r").replace("\n", "\\n")]
        copied = end
    return "".join([*parts, text[copied : code.end]])


def expression(source: str) -> ast.expr:
    """The syntax tree of an expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape in a string is the model's business, not our user's
        try:
            return ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
            raise Malformed(CallFailure.NOT_JSON, f"not a Python expression: {reason}") from None


_JSON_NAMES = {"true": True, "false": False, "null": None}


def literal(node: ast.expr, *, lenient: bool, depth: int = 0) -> Json:
    """The JSON value of a literal; tuples and JSON's own constants count only if `lenient`."""
    if depth >= MAX_DEPTH:
        raise Malformed(CallFailure.NOT_JSON, f"nested deeper than {MAX_DEPTH}")
    match node:
        case ast.Constant(value=value):
            return _plain(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -_plain(value)
        case ast.List(elts=elements):
            return [literal(element, lenient=lenient, depth=depth + 1) for element in elements]
        case ast.Tuple(elts=elements) if lenient:
            return [literal(element, lenient=lenient, depth=depth + 1) for element in elements]
        case ast.Dict(keys=keys, values=values):
            pairs = [(_key(k), literal(v, lenient=lenient, depth=depth + 1)) for k, v in zip(keys, values, strict=True)]
            return dict(pairs) if lenient else _unique_literal(pairs)
        case ast.Name(id=name) if lenient and name in _JSON_NAMES:
            return _JSON_NAMES[name]
    raise Malformed(CallFailure.NOT_JSON, f"not a literal but a {type(node).__name__}")


def _unique_literal(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    try:
        return _unique(pairs)
    except ValueError as error:
        raise Malformed(CallFailure.NOT_JSON, str(error)) from None


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return whole(node.value)
    raise Malformed(CallFailure.NOT_JSON, "a key is not a text")


def _plain(value: Any) -> Any:
    """A constant, if JSON has it and Python can print it."""
    if isinstance(value, str):
        return whole(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() < 3 * MAX_DIGITS:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise Malformed(CallFailure.NOT_JSON, f"JSON has no such {type(value).__name__}")


_SURROGATE = re.compile("[\ud800-\udfff]")


def whole(text: str) -> str:
    """The text with each pair of surrogates as the one character that it stands for, as JSON reads it."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
