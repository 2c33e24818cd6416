"""The dialects whose calls are JSON or Python: one small function each, from a text to the calls attempted in it.

Facts on the formats, as checked in vLLM's parsers and in the models' templates: Hermes and Qwen may speak before and
between calls; Llama 3 is asked for nothing but the object, and writes `parameters`; Llama 4 may put its list between
`<|python_start|>` and `<|python_end|>`.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from envace.models.parsing.reading import (
    NO_ARGUMENTS,
    Malformed,
    Reader,
    Reading,
    amiss,
    call_of,
    failed,
    noted,
    object_of,
    skip_space,
)
from envace.models.parsing.values import (
    Code,
    Read,
    decode,
    escape_lines,
    expression,
    literal,
    read_json,
    read_value,
    repair_value,
    scan_code,
)
from envace.types import CallFailure, Json, ParsedCall, ToolCall

CALL = "<|call|>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, PYTHON_START, PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"

MAX_CANDIDATES = 100
"""Objects in a text that are looked at as possible calls; each that is not JSON costs a pass over the text."""


def _item(read: Read, *, keys: Sequence[str], start: int, reading: Reading) -> ParsedCall:
    """The call that a value describes, or why it describes none."""
    try:
        call, notes = call_of(read.value, keys=keys, reading=reading, decode=partial(decode, reading=reading))
    except Malformed as error:
        return failed(error, start, read.end)
    return ParsedCall(call=call, start=start, end=read.end, repairs=(*read.repairs, *notes))


# --- starter -------------------------------------------------------------------------------------------------------

_STARTER_NAME = re.compile(r"\s*([^\s{]+)\s*")


def starter(cuts: Sequence[int]) -> Reader:
    """The starter's dialect where the control tokens stand at the positions `cuts`."""

    def read(text: str, begin: int, reading: Reading) -> Iterator[ParsedCall]:
        starts = [cut for cut in cuts if cut >= begin]
        for start, end in pairwise([*starts, len(text)]):
            yield _starter_call(text[start:end], start, reading)

    return read


def _starter_call(text: str, start: int, reading: Reading) -> ParsedCall:
    """One call token and what follows it."""
    try:
        return _starter_exact(text, start)
    except Malformed as error:
        item = _starter_mended(text, start, reading) if reading.repair else None
        return item or failed(error, start, start + len(text))


def _starter_exact(text: str, start: int) -> ParsedCall:
    name, space, rest = text[len(CALL) :].strip().partition(" ")
    if not name:
        raise Malformed(CallFailure.NO_NAME, "a call without a name")
    if not space:
        raise Malformed(CallFailure.ARGUMENTS, f"call {name!r} has no arguments object")
    try:
        value, _ = decode(rest, Reading(repair=False))
    except Malformed as error:
        raise Malformed(error.failure, f"arguments of {name!r} are not JSON: {error.detail}") from None
    return ParsedCall(call=ToolCall(name=name, arguments=object_of(name, value)), start=start, end=start + len(text))


def _starter_mended(text: str, start: int, reading: Reading) -> ParsedCall | None:
    """A call with other space, no arguments, arguments to be mended, or text after them."""
    found = _STARTER_NAME.match(text, len(CALL))
    if found is None:
        return None
    name, end = found.group(1), start + len(text)
    if found.end() == len(text):
        return ParsedCall(call=ToolCall(name=name, arguments={}), start=start, end=end, repairs=(NO_ARGUMENTS,))
    try:
        read = read_value(text, found.end(), stop=len(text), closed=True, reading=reading)
        call = ToolCall(name=name, arguments=object_of(name, read.value))
    except Malformed:
        return None
    beside = text[read.end :].strip() != ""
    return ParsedCall(
        call=call,
        start=start,
        end=start + read.end if beside else end,
        repairs=(*read.repairs, "text after the call") if beside else read.repairs or ("space around the name",),
    )


# --- hermes --------------------------------------------------------------------------------------------------------

_TAG = re.compile(f"{OPEN}|{CLOSE}")
_BETWEEN_OBJECTS = re.compile(r"(?:[\s,;\[\]]|```\w*)*")


def hermes(text: str, begin: int, reading: Reading) -> Iterator[ParsedCall]:
    """One object between `<tool_call>` and `</tool_call>`; in repair, as many as stand there."""
    start = text.find(OPEN, begin)
    while start >= 0:
        end = start
        for item in _tagged(text, start, reading):
            yield item
            end = item.end
        start = text.find(OPEN, end)


def _tagged(text: str, start: int, reading: Reading) -> Iterator[ParsedCall]:
    at = _object_start(text, start + len(OPEN), reading)
    item = _tagged_object(text, start, at, reading)
    while reading.repair and item.call is not None:
        at = _object_start(text, item.end, reading)
        if not text.startswith("{", at):
            break
        yield noted(item, "several calls between the tags")
        item = _tagged_object(text, item.end, at, reading)
    yield _closed(text, item, reading)


def _object_start(text: str, at: int, reading: Reading) -> int:
    """The next object of a call; in repair, brackets and commas of a list around several are passed over."""
    found = _BETWEEN_OBJECTS.match(text, at) if reading.repair else None
    return found.end() if found and text.startswith("{", found.end()) else skip_space(text, at)


def _tagged_object(text: str, start: int, at: int, reading: Reading) -> ParsedCall:
    """What stands at a position as a call, up to its own end, or up to the next tag if that cannot be told."""
    stop = _next_tag(text, at)
    try:
        read = read_value(text, at, stop=stop, closed=text.startswith(CLOSE, stop), reading=reading)
    except Malformed as error:
        return failed(error, start, stop)
    return _item(read, keys=("arguments",), start=start, reading=reading)


def _next_tag(text: str, at: int) -> int:
    found = _TAG.search(text, at)
    return found.start() if found else len(text)


def _closed(text: str, item: ParsedCall, reading: Reading) -> ParsedCall:
    """The call with its closing tag. Text before that tag is inside the call; where there is no tag, beside it."""
    stop = _next_tag(text, item.end)
    if not text.startswith(CLOSE, stop):
        item = amiss(item, reading, CallFailure.UNCLOSED_CALL, f"a call without {CLOSE}", note="missing closing tag")
        return item if item.call else replace(item, failure=CallFailure.UNCLOSED_CALL)
    if text[item.end : stop].strip():
        detail = f"text between a call and {CLOSE}"
        item = amiss(item, reading, CallFailure.STRAY_TEXT, detail, note="text before the closing tag")
    return replace(item, end=stop + len(CLOSE))


# --- llama ---------------------------------------------------------------------------------------------------------

_KEYED = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']\s*:""")
_NEXT_LINE = re.compile(r"""[;\n][ \t]*\{\s*["'](?:name|type|function|parameters|arguments)["']\s*:""")
_WITH_ARGUMENTS = re.compile(r"""["'](?:parameters|arguments)["']\s*:""")
_SEMICOLONS = re.compile(r"(?:\s*;)*")
_LLAMA_KEYS = ("parameters", "arguments")


def llama(text: str, begin: int, reading: Reading) -> Iterator[ParsedCall]:
    """Objects with a name and parameters, one after the other; what else is an object is text.

    An object is an attempted call if it has parameters or names a tool, or follows `<|python_tag|>`: models also answer
    users in JSON.
    """
    tag = text.find(PYTHON_TAG, begin)
    at = begin if tag < 0 else tag + len(PYTHON_TAG)
    if tag >= 0 and not text.startswith("{", skip_space(text, at)):
        error = Malformed(CallFailure.NOT_JSON, f"no object after {PYTHON_TAG}")
        yield failed(error, tag, len(text))
        return
    start = tag if tag >= 0 else None
    landmarks = _Landmarks.of(text, at)
    for _ in range(MAX_CANDIDATES):
        found = _candidate(text, at)
        if found is None:
            return
        item = _bare_object(text, found, landmarks, reading, certain=start is not None)
        if isinstance(item, int):
            at = item
            continue
        separator = _SEMICOLONS.match(text, item.end)
        at = separator.end() if separator else item.end
        yield replace(item, start=item.start if start is None else start, end=at)
        start = None


@dataclass(frozen=True, kw_only=True)
class _Landmarks:
    """Positions that are looked up for every object; found in one pass, for objects may be many."""

    lines: list[int]
    """Where a line begins with what may be a call."""
    arguments: list[int]
    """Where a key stands that holds arguments."""

    @classmethod
    def of(cls, text: str, at: int) -> _Landmarks:
        lines, arguments = _NEXT_LINE.finditer(text, at), _WITH_ARGUMENTS.finditer(text, at)
        return cls(lines=[found.start() for found in lines], arguments=[found.start() for found in arguments])


def _after(positions: Sequence[int], at: int, default: int) -> int:
    """The first of the positions that is not before `at`."""
    index = bisect_left(positions, at)
    return positions[index] if index < len(positions) else default


def _candidate(text: str, at: int) -> int | None:
    """Where the next object begins that may be a call: at once, or with a key that calls have."""
    at = skip_space(text, at)
    if text.startswith("{", at):
        return at
    found = _KEYED.search(text, at)
    return found.start() if found else None


def _bare_object(text: str, at: int, landmarks: _Landmarks, reading: Reading, *, certain: bool) -> ParsedCall | int:
    """The call at a position, or, where nothing tries to be one, the position to go on from."""
    stop = _after(landmarks.lines, at + 1, len(text))
    try:
        read = read_json(text, at)
    except Malformed as error:
        # Decided before anything is mended, so that both modes take the same objects for attempts.
        if not certain and _after(landmarks.arguments, at, stop) >= stop:
            return at + 1
        mended = repair_value(text, at, stop=stop, closed=False, reading=reading) if reading.repair else None
        if mended is None:
            return failed(error, at, at + len(text[at:stop].rstrip()))
        read, certain = mended, True
    if not (certain or _like_a_call(read.value, reading)):
        return read.end
    return _item(read, keys=_LLAMA_KEYS, start=at, reading=reading)


def _like_a_call(value: Json, reading: Reading) -> bool:
    if not isinstance(value, dict):
        return False
    name = value.get("name")
    named = isinstance(name, str) and name in reading.tools
    return named or isinstance(value.get("function"), dict) or any(key in value for key in _LLAMA_KEYS)


# --- pythonic ------------------------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_][\w.\-]*"
_KEYWORDS = r"\(\s*(?:\)|[A-Za-z_]\w*\s*=(?!=))"
_MARK = rf"(?:(?:{re.escape(PYTHON_TAG)}|{re.escape(PYTHON_START)})\s*)?"
_CALLED = re.compile(rf"({_NAME})\s*(?=\()")
_AT_ONCE = re.compile(rf"[\s;,]*({_MARK}(?:(\[)\s*(?={_NAME}\s*\()|(?={_NAME}{_KEYWORDS})))")
_LISTED = re.compile(rf"({_MARK}(\[)\s*(?={_NAME}\s*{_KEYWORDS}))")
_POSITIONAL = re.compile(rf"[\s;,]*((?=({_NAME})\())")
_FENCED = re.compile(rf"```(\w*)\s*(?=({_NAME}){_KEYWORDS})")
_CALL_FENCES = ("tool_code", "tool_call")
_COMMA = re.compile(r"\s*,\s*")
_LIST_END = re.compile(rf"\s*,?\s*\](?:\s*{re.escape(PYTHON_END)})?")


def pythonic(text: str, begin: int, reading: Reading) -> Iterator[ParsedCall]:
    """A list of calls with named arguments, or one call without the brackets.

    More lists, and more calls without brackets, are attempted calls as well, which strict parsing refuses. A call
    without brackets, or a list in the middle of a text, is told from prose and Markdown by a named argument or none at
    all; the former by the name of a tool as well.
    """
    at, first = begin, True
    while (group := _group(text, at, reading)) is not None:
        for item in _group_calls(text, *group, reading):
            at = item.end
            detail = "calls after the list of calls"
            yield item if first else amiss(item, reading, CallFailure.STRAY_TEXT, detail, note="several lists of calls")
        first = False


def _group(text: str, at: int, reading: Reading) -> tuple[int, int, bool] | None:
    """Where the next calls begin, where the name of the first does, and whether they are in brackets."""
    plain = _POSITIONAL.match(text, at)
    if plain and plain.group(2) in reading.tools:
        return plain.start(1), plain.end(), False
    found = _AT_ONCE.match(text, at) or _LISTED.search(text, at)
    for fence in _FENCED.finditer(text, at, found.start(1) if found else len(text)):
        # Code in a reply is not a call, unless the fence or the tool says so.
        if fence.group(1) in _CALL_FENCES or fence.group(2) in reading.tools:
            return fence.end(), fence.end(), False
    return (found.start(1), found.end(), found.group(2) is not None) if found else None


def _group_calls(text: str, start: int, at: int, listed: bool, reading: Reading) -> Iterator[ParsedCall]:
    """The calls of one list, each with the comma or bracket after it; or the one call that has no brackets."""
    while (called := _CALLED.match(text, at)) is not None:
        item = _python_call(text, start, called, reading)
        if not listed:
            yield item
            return
        if ends := _LIST_END.match(text, item.end):
            yield replace(item, end=ends.end())
            return
        comma = _COMMA.match(text, item.end)
        if comma is None or not _CALLED.match(text, comma.end()):
            yield amiss(item, reading, CallFailure.UNCLOSED_CALL, "a list of calls without `]`", note="missing `]`")
            return
        yield replace(item, end=comma.end())
        start = at = comma.end()


def _python_call(text: str, start: int, called: re.Match[str], reading: Reading) -> ParsedCall:
    name, opened = called.group(1), called.end()
    code = scan_code(text, opened, stop=len(text))
    if code.end is None:
        error = Malformed(CallFailure.UNCLOSED_CALL, f"the arguments of {name!r} are never closed")
        return failed(error, start, len(text))
    try:
        call, notes = _python_arguments(name, text, opened, code, reading)
    except Malformed as error:
        detail = f"arguments of {name!r}: {error.detail}"
        return failed(Malformed(CallFailure.ARGUMENTS, detail), start, code.end)
    return ParsedCall(call=call, start=start, end=code.end, repairs=notes)


def _python_arguments(
    name: str, text: str, opened: int, code: Code, reading: Reading
) -> tuple[ToolCall, tuple[str, ...]]:
    """The call whose arguments stand in a piece of code, and what was mended."""
    try:
        reading.spend(code.read)
        return ToolCall(name=name, arguments=_keywords(expression("f" + text[opened : code.end]))), ()
    except Malformed:
        if not reading.repair:
            raise
    reading.spend(code.read)
    node = expression("f" + escape_lines(text, opened, code))
    return ToolCall(name=name, arguments=_loose_keywords(node, _parameters(name, reading))), ("Python arguments",)


def _keywords(node: ast.expr) -> dict[str, Json]:
    """Named arguments, each a literal and each named once."""
    assert isinstance(node, ast.Call)
    if node.args:
        raise Malformed(CallFailure.ARGUMENTS, "an argument without a name")
    names = [keyword.arg for keyword in node.keywords]
    if len(set(names)) < len(names) or None in names:
        raise Malformed(CallFailure.ARGUMENTS, "an argument twice, or arguments behind `**`")
    return {keyword.arg: literal(keyword.value, lenient=False) for keyword in node.keywords if keyword.arg}


def _loose_keywords(node: ast.expr, parameters: Sequence[str]) -> dict[str, Json]:
    """Arguments without a name take the tool's parameters in their order."""
    assert isinstance(node, ast.Call)
    if len(node.args) > len(parameters):
        raise Malformed(CallFailure.ARGUMENTS, "an argument without a name")
    pairs = [(name, literal(value, lenient=True)) for name, value in zip(parameters, node.args, strict=False)]
    pairs += [(keyword.arg or "**", literal(keyword.value, lenient=True)) for keyword in node.keywords]
    found = dict(pairs)
    if len(found) < len(pairs) or "**" in found:
        raise Malformed(CallFailure.ARGUMENTS, "an argument twice, or arguments behind `**`")
    return found


def _parameters(name: str, reading: Reading) -> list[str]:
    tool = reading.tools.get(name)
    return list(tool.parameters.get("properties", {})) if tool else []
