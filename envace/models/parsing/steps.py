"""From a step's text to what it says: reasoning, calls in the model's own dialect or another, and the text beside them.

Strict and repair read each call by the letter first, so a step that strict parsing accepts means the same to both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from envace.models.parsing.dialects import CALL, CLOSE, OPEN, hermes, llama, pythonic, starter
from envace.models.parsing.qwen import qwen_xml
from envace.models.parsing.reading import MAX_CALLS, MAX_CHARACTERS, Dialect, Mode, Reader, Reading, noted
from envace.types import CallFailure, Parsed, ParsedCall, ToolSpec

THINK = ("<think>", "</think>")
"""The tags of reasoning in every family that we know."""

MAX_COUNTED = 100
"""Calls beyond the limit that are counted; more are told as "more than" that."""

_READERS: dict[Dialect, Reader] = {
    Dialect.HERMES: hermes,
    Dialect.QWEN_XML: qwen_xml,
    Dialect.LLAMA: llama,
    Dialect.PYTHONIC: pythonic,
}
"""All but the starter's, in the order in which a step is tried for another dialect than its own."""
_TAGGED = (Dialect.HERMES, Dialect.QWEN_XML)
"""Dialects that allow text beside calls."""
_VISIBLE = re.compile(r"\S")
_FENCE = re.compile(r"```\w{0,20}\Z")
_AROUND = (("[", "a list"), (OPEN, "tags of another dialect"))
_CLOSING = re.compile(rf"[\s,;]*(?P<tag>{CLOSE})?\s*(?P<bracket>\])?\s*(?P<fence>```)?")


def parse(
    text: str,
    dialect: Dialect,
    *,
    mode: Mode = "strict",
    tools: Sequence[ToolSpec] = (),
    max_calls: int = MAX_CALLS,
    reasoning_tags: tuple[str, str] | None = THINK,
) -> Parsed:
    """Parse a decoded step.

    Args:
        text: The step without its end-of-turn token; positions in the result are positions in it.
        dialect: How the model writes calls. In `STARTER`, every `<|call|>` in the text counts as the control token;
            where ids are at hand, `parse_starter` tells the token from its letters.
        mode: `strict`: one malformed call makes the step malformed, with the first one's failure. `repair`: only an
            empty step, unclosed reasoning and a text that is too long are; calls keep their own failures.
        tools: What the model was offered. They type the values of `QWEN_XML` (in both modes; without them every value
            is a text); in repair, they also tell calls in another dialect from text that looks like one. A call of
            a tool that does not exist is no failure here: the environment answers it.
        max_calls: Calls beyond this are not read; one item of failure FLOOD stands for all of them.
        reasoning_tags: What encloses reasoning, or None where the model has none. An orphaned closing tag ends
            reasoning too, unless it stands inside a well-formed call; calls inside reasoning are no calls.
    """
    if dialect is Dialect.STARTER:
        reader = starter([found.start() for found in re.finditer(re.escape(CALL), text)])
    else:
        reader = _READERS[dialect]
    settings = _Settings(dialect=dialect, max_calls=max_calls, tags=reasoning_tags)
    return _step(text, reader, Reading.of(mode, tools), settings)


def parse_starter(
    texts: Sequence[str],
    *,
    mode: Mode = "strict",
    tools: Sequence[ToolSpec] = (),
    max_calls: int = MAX_CALLS,
) -> Parsed:
    """Parse a step of the starter's dialect that was cut at its call tokens.

    Args:
        texts: The text before the first `<|call|>` token (all of it where there is none), then one text a token.
        mode: As for `parse`.
        tools: As for `parse`.
        max_calls: As for `parse`.

    Returns:
        Positions are those in the texts joined by `<|call|>`. The starter has no reasoning.
    """
    cuts, at = [], len(texts[0]) if texts else 0
    for text in texts[1:]:
        cuts.append(at)
        at += len(CALL) + len(text)
    settings = _Settings(dialect=Dialect.STARTER, max_calls=max_calls, tags=None)
    return _step(CALL.join(texts), starter(cuts), Reading.of(mode, tools), settings)


@dataclass(frozen=True, kw_only=True)
class _Settings:
    dialect: Dialect
    max_calls: int
    tags: tuple[str, str] | None


def _step(text: str, reader: Reader, reading: Reading, settings: _Settings) -> Parsed:
    if len(text) > MAX_CHARACTERS:
        detail = f"{len(text)} characters in one step, at most {MAX_CHARACTERS} are parsed"
        return Parsed(text=text, failure=CallFailure.FLOOD, detail=detail)
    thought = split_reasoning(text, settings.tags, reader)
    if not thought.closed:
        detail = "reasoning that is never closed"
        return Parsed(reasoning=thought.text, failure=CallFailure.UNCLOSED_REASONING, detail=detail)
    items = _items(text, thought.end, reader, reading, settings)
    beside = _beside(text, thought.end, items)
    failure, detail = step_failure(items, beside, reading)
    if items and beside and settings.dialect not in _TAGGED and not reading.repair:
        failure, detail = CallFailure.STRAY_TEXT, "text beside a call"
    return Parsed(items=tuple(items), text=beside, reasoning=thought.text, failure=failure, detail=detail)


def step_failure(items: Sequence[ParsedCall], beside: str, reading: Reading) -> tuple[CallFailure | None, str]:
    """Why a step as a whole is malformed, as far as its calls tell: too many of them before any that is malformed."""
    if not items and not beside:
        return CallFailure.EMPTY, "an empty step"
    if reading.repair or not items:
        return None, ""
    flooded = items[-1].failure is CallFailure.FLOOD
    first = items[-1] if flooded else next((item for item in items if item.failure is not None), items[0])
    return first.failure, first.detail


def _beside(text: str, begin: int, items: Sequence[ParsedCall]) -> str:
    """The text that is in no call, each piece on lines of its own."""
    starts, ends = [item.start for item in items], [item.end for item in items]
    pieces = [text[a:b].strip() for a, b in zip([begin, *ends], [*starts, len(text)], strict=True)]
    return "\n".join(piece for piece in pieces if piece)


# --- calls ---------------------------------------------------------------------------------------------------------


def _items(text: str, begin: int, reader: Reader, reading: Reading, settings: _Settings) -> list[ParsedCall]:
    """The calls of a step; in repair, those in another dialect where none is written in its own."""
    items = _limited(text, begin, reader, reading, settings.max_calls)
    if not reading.repair:
        return items
    items = _unwrapped(text, begin, items) if settings.dialect not in _TAGGED else items
    if any(item.call is not None for item in items):
        return items
    return _foreign(text, begin, reading, settings) or items


def _limited(text: str, begin: int, reader: Reader, reading: Reading, limit: int) -> list[ParsedCall]:
    """At most `limit` calls, and one item for those beyond."""
    found = reader(text, begin, reading)
    items = list(islice(found, limit))
    beyond = list(islice(found, MAX_COUNTED + 1))
    if not beyond:
        return items
    counted = len(beyond) <= MAX_COUNTED
    end = beyond[-1].end if counted else len(text)
    number = f"{len(beyond)}" if counted else f"more than {MAX_COUNTED}"
    return [*items, flood(limit, number, start=beyond[0].start, end=end)]


def flood(limit: int, number: str, *, start: int = 0, end: int = 0) -> ParsedCall:
    """What stands for the calls beyond the limit."""
    detail = f"{number} more than the {limit} calls that are allowed in one step"
    return ParsedCall(call=None, failure=CallFailure.FLOOD, detail=detail, start=start, end=end)


def _foreign(text: str, begin: int, reading: Reading, settings: _Settings) -> list[ParsedCall]:
    """Calls in another dialect, if it reads all of them and each is of a tool that was offered.

    Where no tags set calls off, they must also be all that the step says: text that explains a call is no call.
    """
    for dialect, reader in _READERS.items():
        if dialect is settings.dialect:
            continue
        items = _limited(text, begin, reader, reading, settings.max_calls)
        if dialect not in _TAGGED:
            items = _unwrapped(text, begin, items)
        offered = items and all(item.call is not None and item.call.name in reading.tools for item in items)
        if offered and (dialect in _TAGGED or not _beside(text, begin, items)):
            return [noted(item, f"written in the dialect {dialect.value}") for item in items]
    return []


def _unwrapped(text: str, begin: int, items: Sequence[ParsedCall]) -> list[ParsedCall]:
    """The calls with the fences, brackets and foreign tags around them, which are no text beside them."""
    wrapped, before = [], begin
    for item, after in zip(items, [*(item.start for item in items[1:]), len(text)], strict=False):
        start, opened = _wrapping_before(text, before, item.start)
        end, closed = _wrapping_after(text, item.end, after)
        wrapped.append(noted(replace(item, start=start, end=end), *dict.fromkeys([*opened, *closed])))
        before = end
    return wrapped


def _wrapping_before(text: str, begin: int, end: int) -> tuple[int, list[str]]:
    notes: list[str] = []
    gap = text[begin:end].rstrip()
    for mark, note in _AROUND:
        if gap.endswith(mark):
            notes, gap = [*notes, note], gap.removesuffix(mark).rstrip()
    fence = _FENCE.search(gap, max(0, len(gap) - 30))
    if fence:
        notes, gap = [*notes, "code fence"], gap[: fence.start()]
    return (begin + len(gap) if notes else end), notes


def _wrapping_after(text: str, begin: int, end: int) -> tuple[int, list[str]]:
    found = _CLOSING.match(text, begin, end)
    if found is None or not found.group().strip():
        return begin, []
    names = {"tag": "tags of another dialect", "bracket": "a list", "fence": "code fence"}
    return found.end(), [note for group, note in names.items() if found.group(group)]


# --- reasoning -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Thought:
    """Reasoning at the start of a step, and where the rest begins."""

    text: str | None = None
    end: int = 0
    closed: bool = True


def split_reasoning(text: str, tags: tuple[str, str] | None, reader: Reader | None = None) -> Thought:
    """Find the reasoning of a step: the blocks it begins with, or all before an orphaned closing tag.

    Args:
        text: The step.
        tags: The opening and the closing tag, or None for no reasoning.
        reader: The model's dialect; a closing tag inside one of its well-formed calls is an argument's.
    """
    if tags is None or not all(tags) or (tags[1] not in text and tags[0] not in text):
        return Thought()
    opening, closing = tags
    blocks: list[str] = []
    end = 0
    while text.startswith(opening, at := _visible(text, end)):
        close = text.find(closing, at)
        if close < 0:
            return Thought(text="\n".join([*blocks, text[at + len(opening) :].strip()]), end=len(text), closed=False)
        blocks.append(text[at + len(opening) : close].strip())
        end = close + len(closing)
    if blocks:
        return Thought(text="\n".join(block for block in blocks if block), end=end)
    return _orphaned(text, closing, reader)


def _visible(text: str, at: int) -> int:
    found = _VISIBLE.search(text, at)
    return found.start() if found else len(text)


def _orphaned(text: str, closing: str, reader: Reader | None) -> Thought:
    calls = islice(reader(text, 0, Reading(repair=False)), MAX_CALLS) if reader else ()
    at = _outside(text, closing, [item for item in calls if item.call is not None])
    return Thought() if at is None else Thought(text=text[:at].strip(), end=at + len(closing))


def _outside(text: str, closing: str, calls: Iterable[ParsedCall]) -> int | None:
    """The first closing tag that is in none of the calls."""
    at = text.find(closing)
    for call in calls:
        if 0 <= at < call.start:
            return at
        if call.start < at < call.end:
            at = text.find(closing, call.end)
    return at if at >= 0 else None
