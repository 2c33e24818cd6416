"""Checklists in the form of CM2 (arXiv:2602.12268): weighted yes/no items, for each user turn, in one or more variants.

An item is decided by a judge, or, which is ours, by a small program (`check`) that needs none.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from graphlib import CycleError, TopologicalSorter
from typing import Any

import regex
from pydantic import Field, RootModel, ValidationError, model_serializer, model_validator

from envace.errors import DataError
from envace.scenarios.strict import Strict

WEIGHT_TOLERANCE = 1e-3
"""How far the weights of a turn may be from 1 in sum: labelled data is rounded."""
MAX_PATTERN = 200
"""Characters of a pattern."""
MAX_REPEATS = 1000
"""Product of all counts of a pattern, such as `{3}`."""
ANY_TOOL = "*"
"""Stands for every tool in `no_call`."""


class Focus(str, Enum):
    """What of a turn an item asks about. Where a turn has none of it, the item fails without being asked."""

    CALLS = "assistant.tool_calls"
    THINKING = "assistant.content.thinking"
    REPLY = "assistant.content.user_visible_reply"
    RESPONSE = "tool.content"


class Evidence(Strict):
    """Where the recorded conversation passes an item."""

    turn: int = 0
    """User turn, from 0."""
    step: int = 0
    """Message within the turn, the user's being 0."""
    source: str = Field("", alias="from")
    """What of the message; `from` in files."""
    snippet: str = ""

    @model_serializer
    def _written(self) -> dict[str, Any]:
        return {"turn": self.turn, "step": self.step, "from": self.source, "snippet": self.snippet}


class ItemCheck(Strict):
    """A check that a program makes of a turn. Exactly one of its kinds is set."""

    call: str | None = Field(None, min_length=1)
    """A tool that is called at least once."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of `call`: arguments that the call has among others, as equal values."""
    no_call: str | None = Field(None, min_length=1)
    """A tool that is never called; `*` for no call at all."""
    reply_contains: str | None = None
    """Text in the final reply, whatever its case."""
    reply_matches: str | None = Field(None, max_length=MAX_PATTERN)
    """Pattern (Python's, as the package `regex` reads it) found in the final reply; matching has a time limit."""
    tool_response_contains: str | None = None
    """Text in the response to some call, whatever its case."""

    @model_validator(mode="after")
    def _one_kind(self) -> ItemCheck:
        if self.kind is None:
            raise ValueError(f"a check has exactly one of {', '.join(KINDS)}")
        if self.arguments and self.call is None:
            raise ValueError("arguments belong to `call`")
        if not str(getattr(self, self.kind)).strip():
            raise ValueError(f"{self.kind} is empty, so anything would pass it")
        _compiles(self.reply_matches)
        return self

    @property
    def kind(self) -> str | None:
        """Which of KINDS it is; None where none or several are set."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        return given[0] if len(given) == 1 else None


KINDS = ("call", "no_call", "reply_contains", "reply_matches", "tool_response_contains")
"""The kinds of checks."""


def _compiles(pattern: str | None) -> None:
    """Whether a pattern is one, and small: nested counts take gigabytes before anything is matched."""
    if pattern is None:
        return
    if regex.search(r"(?<!\\)\{(?!\d{1,4}(,\d{0,4})?\})", pattern):
        raise ValueError("reply_matches has a brace that counts nothing; write it as \\{")
    counts = [int(number) for number in regex.findall(r"[{,](\d+)(?=[,}])", pattern)]
    if math.prod(count for count in counts if count) > MAX_REPEATS:
        raise ValueError(f"reply_matches repeats more than {MAX_REPEATS} times in all")
    try:
        regex.compile(pattern)
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"reply_matches is no pattern: {error}") from None


class Item(Strict):
    """One yes/no question about a turn. The fields are CM2's but for `check`."""

    id: str = Field(min_length=1, max_length=100)
    """Its name within the turn."""
    evidence: tuple[Evidence, ...] = ()
    focus_on: Focus | None = None
    """What of the turn it asks about; a judged item has one."""
    question: str = ""
    pass_condition: str = ""
    failure_examples: tuple[str, ...] = ()
    required_for_next_turn: bool = False
    """Whether the user only goes on where it passed, if a run asks for that."""
    dependence: tuple[str, ...] = ()
    """Items of the same turn that must have passed for this one to pass."""
    weight: float = Field(ge=0, allow_inf_nan=False)
    """Share of the turn's score, in [0, 1]."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    check: ItemCheck | None = None
    """Decides the item instead of a judge."""

    @model_validator(mode="after")
    def _decidable(self) -> Item:
        if self.check is None and not (self.question.strip() and self.focus_on):
            raise ValueError("an item needs `question` and `focus_on` for a judge, or a `check`")
        return self

    @property
    def judged(self) -> bool:
        """Whether only a judge can decide it."""
        return self.check is None


Turn = tuple[Item, ...]


class Checklist(RootModel[tuple[tuple[Turn, ...], ...]]):
    """Variants x turns x items; in files the nested lists that CM2 calls `checklists`."""

    model_config = {"frozen": True}

    @model_validator(mode="after")
    def _sound(self) -> Checklist:
        for problem in _problems(self.root):
            raise ValueError(problem)
        return self

    @property
    def variants(self) -> tuple[tuple[Turn, ...], ...]:
        """The variants: each is a whole checklist of the conversation."""
        return self.root

    @property
    def turns(self) -> int:
        """How many user turns it speaks of."""
        return len(self.root[0])

    @property
    def judged(self) -> bool:
        """Whether any item needs a judge."""
        return any(item.judged for variant in self.root for turn in variant for item in turn)


def deciding_order(items: Sequence[Item]) -> list[Item]:
    """The items of a turn, each after those that it depends on."""
    found = {item.id: item for item in items}
    return [found[name] for name in TopologicalSorter({item.id: item.dependence for item in items}).static_order()]


def _problems(variants: Sequence[Sequence[Turn]]) -> Iterator[str]:
    if not variants:
        yield "it is empty: without items nothing can be passed"
    sizes = {len(variant) for variant in variants}
    if len(sizes) > 1:
        yield f"its variants have different numbers of turns ({', '.join(map(str, sorted(sizes)))})"
    for number, variant in enumerate(variants):
        if not variant:
            yield f"variant {number} has no turn"
        for place, turn in enumerate(variant):
            for problem in _turn_problems(turn):
                yield f"variant {number}, turn {place}: {problem}"


def _turn_problems(turn: Turn) -> Iterator[str]:
    if not turn:
        yield "it has no item, and a turn without items cannot be passed"
        return
    names = Counter(item.id for item in turn)
    for name, times in names.items():
        if times > 1:
            yield f"the id {name!r} is used {times} times"
    for item in turn:
        for other in item.dependence:
            if other not in names:
                yield f"item {item.id!r} depends on {other!r}, which the turn does not have"
    yield from _cycle(turn)
    total = sum(item.weight for item in turn)
    if not math.isclose(total, 1.0, abs_tol=WEIGHT_TOLERANCE):
        yield f"the weights sum to {total:.6g} instead of 1; `normalise` would scale them"
    if all(item.check is not None and item.check.no_call is not None for item in turn if item.weight > 0):
        yield "every item with a weight is a `no_call`, so doing nothing would pass it"


def _cycle(turn: Turn) -> Iterator[str]:
    try:
        TopologicalSorter({item.id: item.dependence for item in turn}).prepare()
    except CycleError as error:
        yield f"items depend on each other in a circle: {' -> '.join(error.args[1])}"


def read_checklist(value: Any, *, normalise: bool = False) -> Checklist:
    """Read a checklist: the nested lists, or their JSON text.

    Keys of an item that CM2 does not have are kept in its `extra_info`; a key that is null counts as missing, which is
    how Parquet writes it.

    Args:
        value: Variants x turns x items.
        normalise: Scale the weights of each turn to a sum of 1 instead of refusing others.

    Raises:
        DataError: What is wrong, and in which variant, turn and item.
    """
    try:
        raw = json.loads(value) if isinstance(value, str) else value
        return Checklist.model_validate(_read(raw, normalise))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        said = first["msg"].removeprefix("Value error, ").removesuffix(".")
        if "tuple" in said:
            said = "a list was expected: a checklist is a list of variants, each a list of turns, each a list of items"
        raise DataError(f"checklist: {_where(first['loc'])}{said}.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"checklist: it is text that is no JSON ({error}).") from None


def _where(path: tuple[int | str, ...]) -> str:
    names = ("variant", "turn", "item")
    words = [f"{name} {part}" for name, part in zip(names, path, strict=False)]
    field = ".".join(map(str, path[3:]))
    return "".join(f"{word}, " for word in words)[:-2] + (f", {field}: " if field else ": " if words else "")


def _read(value: Any, normalise: bool) -> Any:
    """The nested lists with each item as a plain dict. What is no list is left for the validator to refuse."""
    if not _is_list(value):
        return value
    made: list[Any] = []
    for variant in value:
        turns = [_turn(turn, normalise) for turn in variant] if _is_list(variant) else variant
        made.append(turns)
    return made


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _turn(turn: Any, normalise: bool) -> Any:
    if not _is_list(turn):
        return turn
    items = [_item(item) if isinstance(item, Mapping) else item for item in turn]
    weights = [item.get("weight") if isinstance(item, Mapping) else None for item in items]
    numbers = [weight for weight in weights if isinstance(weight, int | float) and weight >= 0]
    total = sum(numbers)
    if normalise and len(numbers) == len(items) and 0 < total < math.inf:
        items = [{**item, "weight": item["weight"] / total} for item in items]
    return items


def _item(item: Mapping[str, Any]) -> dict[str, Any]:
    given = {str(key): value for key, value in item.items() if value is not None}
    foreign = {key: given.pop(key) for key in set(given) - set(Item.model_fields)}
    if foreign:
        extra = given.get("extra_info")
        given["extra_info"] = {**(extra if isinstance(extra, Mapping) else {}), **foreign}
    return given
