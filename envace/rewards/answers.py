"""What a judge is shown, and what its answer says. Pure.

Everything that users, policies and tools wrote is shown as JSON objects, a line each, so that no text can end the line
it stands on, between fences whose name is a digest of what they hold, so that no text can contain it. What is cut is
marked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from envace.scenarios.checklist import Item
from envace.scenarios.tools import to_openai
from envace.types import Author, Json, Message, ToolSpec, Verdict

TURN_SHARE = 0.7
"""Of the characters that may be shown, what the turn may take at least; context takes what is left."""
TOOLS_SHARE = 0.3
"""Of the characters of the conversation, what tools may take in addition."""
MAX_QUESTION = 4000
"""Characters of a question."""
SMALLEST = 200
"""Characters below which no message is cut; where even these are too many, whole messages are left out."""
MAX_ANSWER = 200_000
"""Characters of an answer that are read, from its end."""
MAX_OBJECTS = 200
"""Places in an answer where an object is looked for."""

LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Ends of lines that JSON leaves as they are."""


# --- quoting -------------------------------------------------------------------------------------------------------


def quoted(value: Json) -> str:
    """JSON on one line."""
    text = json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode().translate(LINE_ENDS)


def fence(*texts: str) -> str:
    """A name that none of the texts contains: it would have to contain its own digest."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return f"DATA-{digest[:24]}"


def shown_turn(
    before: Sequence[Message], turn: Sequence[Message], tools: Sequence[ToolSpec], *, limit: int
) -> dict[str, str]:
    """The conversation and the tools as a judge is shown them, within a limit of characters.

    Args:
        before: What was said before the turn, from the system message on.
        turn: The messages of the turn.
        tools: What the assistant could call.
        limit: Characters of the conversation; tools may take TOOLS_SHARE of it again.
    """
    now = [_fields(message) for message in turn]
    earlier = [_fields(message) for message in before]
    reserved = min(_size(earlier), int(limit * (1 - TURN_SHARE)))
    spoken = _fitted(now, limit - reserved)
    context = _fitted(earlier, max(0, limit - _length(spoken)))
    offered = _fitted([{"tool": quoted(to_openai(tool)["function"])} for tool in tools], int(limit * TOOLS_SHARE))
    return {"before": "\n".join(context), "turn": "\n".join(spoken), "tools": "\n".join(offered)}


def shown_question(item: Item) -> str:
    """An item as a judge is shown it: a JSON object on one line. No question is ever left out, only shortened."""
    made = _question(item)
    line = quoted(made)
    return line if len(line) <= MAX_QUESTION else quoted({**_cut(made, MAX_QUESTION), "id": item.id})


def _question(item: Item) -> dict[str, Any]:
    assert item.focus_on is not None
    snippets = [evidence.snippet for evidence in item.evidence if evidence.snippet]
    made = {
        "id": item.id,
        "focus_on": item.focus_on.value,
        "question": item.question,
        "pass_condition": item.pass_condition,
        "failure_examples": list(item.failure_examples),
        "reference": snippets,
    }
    return {key: value for key, value in made.items() if value}


def _fields(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"author": message.author.value}
    if message.author is Author.TOOL and message.name:
        made["tool"] = message.name
    if message.reasoning:
        made["reasoning"] = message.reasoning
    if message.content or not message.calls:
        made["content"] = message.content
    if message.calls:
        made["tool_calls"] = [quoted({"name": call.name, "arguments": call.arguments}) for call in message.calls]
    return made


def _size(records: Iterable[Mapping[str, Any]]) -> int:
    return sum(len(quoted(record)) + 1 for record in records)


def _length(lines: Iterable[str]) -> int:
    return sum(len(line) + 1 for line in lines)


def _fitted(records: Sequence[Mapping[str, Any]], limit: int) -> list[str]:
    """A numbered line a record; long texts are cut in their middle, and where that is not enough the first left out."""
    lines = [quoted({"number": number, **record}) for number, record in enumerate(records)]
    if _length(lines) <= limit:
        return lines
    each = _longest([len(line) for line in lines], limit)
    lines = [quoted({"number": n, **_cut(record, each)}) for n, record in enumerate(records)]
    left_out, size = 0, _length(lines)
    while left_out < len(lines) and size > limit:
        size -= len(lines[left_out]) + 1
        left_out += 1
    note = [quoted({"cut": f"{left_out} lines before this are not shown"})] if left_out else []
    return [*note, *lines[left_out:]]


def _longest(sizes: Sequence[int], limit: int) -> int:
    """The length at which lines must be cut so that all fit: short ones leave their share to long ones."""
    left, each = limit, limit
    for done, size in enumerate(sorted(sizes)):
        each = left // (len(sizes) - done)
        if size > each:
            break
        left -= size
    return max(SMALLEST, each)


def _cut(value: Any, limit: int) -> Any:
    """A record whose line is about `limit` long: its texts share that evenly."""
    texts = list(_texts(value))
    spare = sum(len(quoted(text)) for text in texts)
    rest = len(quoted(value)) - spare + 40 * len(texts)
    each = _longest([len(quoted(text)) for text in texts], max(SMALLEST, limit - rest)) if texts else 0
    return _map_texts(value, each)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _map_texts(value: Any, limit: int) -> Any:
    if isinstance(value, str):
        return shortened(value, limit)
    if isinstance(value, Mapping):
        return {key: _map_texts(inner, limit) for key, inner in value.items()}
    return [_map_texts(inner, limit) for inner in value] if isinstance(value, list) else value


def shortened(text: str, limit: int) -> str:
    """A text of which, when its JSON is longer than `limit`, the middle is cut and marked."""
    size = len(quoted(text))
    if size <= limit:
        return text
    keep = max(2, int(len(text) * limit / size))  # escapes take more room than what they stand for
    head, tail = text[: keep - keep // 2], text[len(text) - keep // 2 :]
    return f"{head}[... {len(text) - keep} characters cut ...]{tail}"


# --- answers -------------------------------------------------------------------------------------------------------

THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
ESCAPE = re.compile(r'\\(\\|["/bfnrt]|u[0-9a-fA-F]{4})|\\')
"""A JSON escape, or a backslash that begins none, as in `\\$`."""
PASSES = frozenset({"pass", "passed", "yes", "true"})
FAILS = frozenset({"fail", "failed", "no", "false"})
VERDICT_KEYS = ("verdict", "answer", "passed")
OPENING = re.compile(r"[{\[]")
_DECODER = json.JSONDecoder(strict=False)


def read_verdicts(text: str, ids: Iterable[str]) -> dict[str, tuple[Verdict, str]]:
    """The verdicts, with their reasons, that an answer gives on the items asked for.

    Read are objects of the form that was asked for, and a list or mapping of ids to verdicts, with whatever text
    around them; of several the last that says something of an item counts. What is no yes or no (7, "10", "0.8x") is no
    verdict, and an item whose verdicts contradict each other within one object has none.
    """
    wanted = set(ids)
    values = list(_values(ESCAPE.sub(_escaped, THOUGHT.sub("", text[-MAX_ANSWER:]))))
    found: dict[str, tuple[Verdict, str]] = {}
    for value in values:
        found |= _verdicts(_pairs(value), wanted)
    if not found and len(wanted) == 1:
        # Only where nothing names the item: quoted text may hold such an object too.
        for value in values:
            found |= _verdicts(_unnamed(value, next(iter(wanted))), wanted)
    return found


def _values(text: str) -> Iterator[Json]:
    """JSON objects and lists in a text, from the outermost; what lies within one is not looked at again."""
    at = 0
    for _ in range(MAX_OBJECTS):
        found = OPENING.search(text, at)
        if found is None:
            return
        try:
            value, at = _DECODER.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            at = found.end()
        else:
            yield value


def _escaped(found: re.Match[str]) -> str:
    return found.group() if found.group(1) else "\\\\"


def _verdicts(pairs: Iterable[tuple[str, Json]], wanted: set[str]) -> dict[str, tuple[Verdict, str]]:
    found: dict[str, tuple[Verdict, str]] = {}
    contradicted: set[str] = set()
    for name, given in pairs:
        verdict = _verdict(given)
        if name not in wanted or verdict is None:
            continue
        if name in found and found[name][0] is not verdict[0]:
            contradicted.add(name)
        found[name] = verdict
    return {name: verdict for name, verdict in found.items() if name not in contradicted}


def _unnamed(value: Json, name: str) -> list[tuple[str, Json]]:
    """A verdict without an id, where one item was asked for."""
    inner = value.get("verdicts", value) if isinstance(value, dict) else value
    is_verdict = isinstance(inner, dict) and any(key in inner for key in VERDICT_KEYS)
    return [(name, inner)] if is_verdict else []


def _pairs(value: Json) -> list[tuple[str, Json]]:
    """Ids with what is said of them."""
    inner = value.get("verdicts", value) if isinstance(value, dict) else value
    if isinstance(inner, list):
        return [(each["id"], each) for each in inner if isinstance(each, dict) and isinstance(each.get("id"), str)]
    if not isinstance(inner, dict):
        return []
    if isinstance(inner.get("id"), str):
        return [(inner["id"], inner)]
    return list(inner.items())


def _verdict(given: Json) -> tuple[Verdict, str] | None:
    said, reason = given, ""
    if isinstance(given, dict):
        said = next((given[key] for key in VERDICT_KEYS if key in given), None)
        reason = given["reason"] if isinstance(given.get("reason"), str) else ""
    word = str(said).strip().casefold() if isinstance(said, str | bool) else ""
    if word in PASSES or word in FAILS:
        return (Verdict.PASS if word in PASSES else Verdict.FAIL), reason
    return None
