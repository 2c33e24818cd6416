"""Scenarios out of data sets, without an environment: each row brings its own tools, and a checklist.

Three forms of rows are recognised: CM2's published one (`messages`, `tools`, `checklists`), CM2's for verl
(everything within `extra_info`), and our own (a scenario's fields and `tools`). Files are .json, .jsonl and .parquet.
"""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator
from pydantic import ValidationError

from envace.errors import DataError
from envace.scenarios.checklist import Checklist, read_checklist
from envace.scenarios.conversations import check_order, read_messages, write_messages
from envace.scenarios.packages import EnvironmentSpec, dump_line
from envace.scenarios.schema import Scenario
from envace.scenarios.sources import Unreadable, arrow_modules, read_rows
from envace.scenarios.tools import read_tools, to_openai
from envace.types import Author, Message, ToolSpec

T = TypeVar("T")

MAX_DETAIL = 300
"""Characters of what is said of a dropped row."""
MAX_ID = 200
"""Characters of a row's id."""
AS_JSON = ("goal", "state", "expected", "checklist", "reference", "tools")
"""Columns of our Parquet form that hold JSON text: Arrow would fill missing keys with nulls."""


class Reason(str, Enum):
    """Why a row is left out."""

    UNREADABLE = "unreadable"
    """No JSON, or no object."""
    NO_MESSAGES = "no_messages"
    """Neither a conversation nor an instruction."""
    BAD_MESSAGE = "bad_message"
    """A message that cannot be read: an unknown role, no text, arguments that are no object."""
    BAD_ROLES = "bad_roles"
    """Messages in an order that no conversation has."""
    NO_TOOLS = "no_tools"
    INVALID_SCHEMA = "invalid_schema"
    """A tool that cannot be brought to a JSON Schema."""
    NO_CHECKLIST = "no_checklist"
    INVALID_CHECKLIST = "invalid_checklist"
    TURNS = "turns"
    """The checklist speaks of another number of turns than the user."""
    DUPLICATE = "duplicate_id"
    INVALID_FIELD = "invalid_field"
    """A field of our own form with a wrong value, or one that we do not know."""


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A row that was left out, and why."""

    row: int
    """Its number in the source, from 0."""
    id: str
    reason: Reason
    detail: str


@dataclass(kw_only=True)
class Dataset:
    """What a source holds. `rows` is the sum of scenarios and dropped rows."""

    specs: dict[str, EnvironmentSpec] = field(default_factory=dict)
    """Scenario id -> its environment, which is tools only."""
    scenarios: list[Scenario] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    mended: dict[str, str] = field(default_factory=dict)
    """Scenario id -> what of its tools a strict validator refuses; they were brought into form."""

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return len(self.scenarios) + len(self.dropped)


class _Drop(Exception):
    """A row is left out."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


READING = re.compile(r"(?i:get|list|search|find|read|show|look_?up|describe|view|retrieve)(?![a-z])")
"""How names of tools that only look up begin."""
SECOND_VERB = re.compile(r"(_and_|And[A-Z])")
"""Such a name does something else as well."""


def tools_only(id: str, tools: Sequence[ToolSpec]) -> EnvironmentSpec:
    """An environment of which nothing is known but its tools; nothing can be executed in it."""
    return EnvironmentSpec(
        id=id,
        entry="",
        introduction="",
        rules=(),
        tables={},
        lookups={},
        tools=tuple(tools),
        code="",
        has_oracle=False,
    )


def load_dataset(source: str | Path, *, normalise: bool = False, require_checklist: bool = True) -> Dataset:
    """Load rows; one that cannot be used is left out, and told with its reason.

    Args:
        source: A .json, .jsonl or .parquet file, a folder of them, or `hub:owner/name[/split]`.
        normalise: Scale the weights of a turn to a sum of 1 instead of leaving the row out.
        require_checklist: Leave out rows without a checklist.

    Raises:
        DataError: The source as a whole cannot be read, or a package for it is missing.
    """
    dataset = Dataset()
    for number, row in enumerate(read_rows(source)):
        try:
            scenario, tools, notes = _read_row(row, number, normalise)
            _check_named(scenario, tools)
            _accept(scenario, dataset, require_checklist)
        except _Drop as drop:
            detail = str(drop)[:MAX_DETAIL]
            dataset.dropped.append(Dropped(row=number, id=_id(row, number), reason=drop.reason, detail=detail))
            continue
        dataset.scenarios.append(scenario)
        dataset.specs[scenario.id] = tools_only(scenario.id, tools)
        if notes:
            dataset.mended[scenario.id] = notes
    return dataset


def _check_named(scenario: Scenario, tools: Sequence[ToolSpec]) -> None:
    """A programmatic check of a call that no tool could answer would never pass."""
    names = {tool.name for tool in tools}
    variants = () if scenario.checklist is None else scenario.checklist.variants
    for item in (item for variant in variants for turn in variant for item in turn):
        if item.check is not None and item.check.call is not None and item.check.call not in names:
            near = difflib.get_close_matches(item.check.call, names, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise _Drop(
                Reason.INVALID_CHECKLIST, f"item {item.id}: check.call names no tool {item.check.call!r}.{hint}"
            )


def _accept(scenario: Scenario, dataset: Dataset, require_checklist: bool) -> None:
    if scenario.id in dataset.specs:
        raise _Drop(Reason.DUPLICATE, f"the id {scenario.id!r} is that of an earlier row")
    if require_checklist and scenario.checklist is None:
        raise _Drop(Reason.NO_CHECKLIST, "no checklist, so nothing rewards it")


# --- rows of any form ----------------------------------------------------------------------------------------------


def _read_row(row: Any, number: int, normalise: bool) -> tuple[Scenario, tuple[ToolSpec, ...], str]:
    """The scenario, its tools, and what of these was mended."""
    if isinstance(row, Unreadable):
        raise _Drop(Reason.UNREADABLE, row.detail)
    if not isinstance(row, Mapping):
        raise _Drop(Reason.UNREADABLE, f"a row is an object, not a {type(row).__name__}")
    flat = _from_verl(row)
    tools, notes = _tools(flat.get("tools"))
    read = _own if "instruction" in flat else _recorded
    return read(flat, _id(row, number), normalise), tools, notes


def _id(row: Any, number: int) -> str:
    """What a row calls itself, else its number."""
    if isinstance(row, Mapping):
        extra = _opened(row.get("extra_info"))
        inner = extra.get("original_index") if isinstance(extra, Mapping) else None
        for value in (row.get("id"), row.get("uuid"), inner):
            if isinstance(value, str | int) and str(value).strip():
                return str(value)[:MAX_ID]
    return f"row-{number}"


def _from_verl(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of the form for verl as one of the published form; others as they are."""
    extra = _opened(row.get("extra_info"))
    if not isinstance(extra, Mapping) or "instruction" in row:
        return row
    keywords = _opened(extra.get("interaction_kwargs"))
    listed = keywords.get("checklist_list") if isinstance(keywords, Mapping) else None
    return {
        "messages": extra.get("messages") or row.get("messages") or row.get("prompt"),
        "tools": extra.get("tools") or row.get("tools"),
        "checklists": listed or row.get("checklists"),
    }


def _opened(value: Any) -> Any:
    """A value that may have been written as JSON text; None where it is text of another kind."""
    for _ in range(2):  # some files hold the JSON text of a JSON text
        if not isinstance(value, str):
            return value
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _staged(reason: Reason, read: Callable[[], T]) -> T:
    """What fails here drops the row for this reason."""
    try:
        return read()
    except DataError as error:
        raise _Drop(reason, str(error)) from None


def _tools(value: Any) -> tuple[tuple[ToolSpec, ...], str]:
    raw = _opened(value)
    if isinstance(value, str) and value.strip() and raw is None:
        raise _Drop(Reason.INVALID_SCHEMA, "the tools are text that is no JSON")
    tools = _staged(Reason.INVALID_SCHEMA, lambda: read_tools(raw))
    if not tools:
        raise _Drop(Reason.NO_TOOLS, "no tools")
    listed = raw["tools"] if isinstance(raw, Mapping) else raw
    found = [
        f"{tool.name}: {problem}" for tool, item in zip(tools, listed, strict=True) if (problem := _strict(item, tool))
    ]
    named = (replace(tool, effect=_effect(item, tool.name)) for tool, item in zip(tools, listed, strict=True))
    return tuple(named), "; ".join(found)[:MAX_DETAIL]


def _effect(item: Any, name: str) -> str:
    """What a row says of a tool (`effect`), else what its name is taken to mean.

    A tool that reads has its responses shared and anchored within a group; where the guess is wrong, `effect:
    state_change` in the row mends it.
    """
    told = item.get("effect") if isinstance(item, Mapping) else None
    if told in ("query", "state_change"):
        return str(told)
    return "query" if READING.match(name) and not SECOND_VERB.search(name) else "state_change"


def _strict(item: Any, tool: ToolSpec) -> str | None:
    """Why a tool is none by the letter: a function whose parameters are a Draft 2020-12 schema of an object."""
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        return "no `function`"
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return "no `parameters`"
    if parameters == tool.parameters:
        return None  # it was read without a change, so it has been checked
    if parameters.get("type") != "object" or not isinstance(parameters.get("properties"), Mapping):
        return "`parameters` without type 'object' or without `properties`"
    try:
        Draft202012Validator.check_schema(parameters, format_checker=FormatChecker(()))
    except SchemaError as error:
        return " ".join(error.message.split())[:120]
    return None


def _checklist(value: Any, normalise: bool) -> Checklist | None:
    raw = value
    if isinstance(raw, str) and not raw.strip():
        raw = None
    if raw is None:
        return None
    return _staged(Reason.INVALID_CHECKLIST, lambda: read_checklist(raw, normalise=normalise))


def _recorded(row: Mapping[str, Any], id: str, normalise: bool) -> Scenario:
    """A scenario out of a recorded conversation."""
    said = _opened(row.get("messages"))
    if not isinstance(said, Sequence) or isinstance(said, str) or not said:
        raise _Drop(Reason.NO_MESSAGES, "no `messages`")
    messages = _staged(Reason.BAD_MESSAGE, lambda: read_messages(said))
    _staged(Reason.BAD_ROLES, lambda: check_order(messages))
    checklist = _checklist(row.get("checklists", row.get("checklist")), normalise)
    first, *further = _by(messages, Author.USER)
    if not first.strip():
        raise _Drop(Reason.BAD_MESSAGE, "the user's first message is empty")
    if checklist is not None and checklist.turns != 1 + len(further):
        raise _Drop(Reason.TURNS, f"the checklist speaks of {checklist.turns} turns, the user of {1 + len(further)}")
    return Scenario(
        id=id,
        environment=id,
        instruction=first,
        turns=tuple(further),
        system="\n\n".join(text for text in _by(messages, Author.SYSTEM) if text),
        checklist=checklist,
        reference=write_messages(messages),
    )


def _by(messages: Sequence[Message], author: Author) -> list[str]:
    return [message.content for message in messages if message.author is author]


def _own(row: Mapping[str, Any], id: str, normalise: bool) -> Scenario:
    """A scenario out of a row of our own form."""
    fields = {key: value for key, value in row.items() if key not in ("tools", "environment") and value is not None}
    fields |= {key: _opened(fields[key]) for key in AS_JSON if isinstance(fields.get(key), str)}
    fields |= {"id": id, "environment": id}
    checklist = _checklist(fields.pop("checklist", None), normalise)
    turns = fields.get("turns", [])
    if checklist is not None and isinstance(turns, list) and checklist.turns != 1 + len(turns):
        raise _Drop(Reason.TURNS, f"the checklist speaks of {checklist.turns} turns, the user of {1 + len(turns)}")
    if isinstance(fields.get("reference"), list):
        reference = _staged(Reason.BAD_MESSAGE, lambda: read_messages(fields["reference"]))
        fields["reference"] = write_messages(reference)
    try:
        return Scenario.model_validate({**fields, "checklist": checklist})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the row"
        raise _Drop(Reason.INVALID_FIELD, f"{where}: {first['msg']}") from None


# --- writing -------------------------------------------------------------------------------------------------------


def write_rows(path: Path, dataset: Dataset) -> None:
    """Write scenarios with their tools in our own form, as .jsonl or .parquet; reading it gives them back exactly.

    Raises:
        DataError: The name ends otherwise, pyarrow is missing, or the disk refuses.
    """
    rows = [_row(scenario, dataset.specs[scenario.id]) for scenario in dataset.scenarios]
    try:
        if path.suffix == ".jsonl":
            path.write_text("".join(f"{dump_line(row)}\n" for row in rows), encoding="utf-8")
        elif path.suffix == ".parquet":
            _write_parquet(path, rows)
        else:
            raise DataError(f"{path} ends in none of .jsonl and .parquet, which are the forms that are written.")
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}.") from None
    except UnicodeEncodeError:
        raise DataError(f"cannot write {path}: a text holds half a character, which only .jsonl can hold.") from None


def _row(scenario: Scenario, spec: EnvironmentSpec) -> dict[str, Any]:
    """The environment is left out, for it has the scenario's name."""
    fields = scenario.model_dump(mode="json", exclude={"environment"}, exclude_none=False)
    tools = [{**to_openai(tool), "effect": tool.effect} for tool in spec.tools]
    return {**{key: value for key, value in fields.items() if value is not None}, "tools": tools}


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    arrow, parquet = arrow_modules()
    texts = ("id", "kind", "split", "instruction", "system")
    schema = arrow.schema(
        [*((name, arrow.string()) for name in (*texts, *AS_JSON)), ("turns", arrow.list_(arrow.string()))]
    )
    columns = [{**row, **{key: json.dumps(row[key]) for key in AS_JSON if row.get(key) is not None}} for row in rows]
    parquet.write_table(arrow.Table.from_pylist(columns, schema=schema), path)


def drop_counts(dataset: Dataset) -> dict[str, int]:
    """Dropped rows by reason, the commonest first."""
    return dict(Counter(dropped.reason.value for dropped in dataset.dropped).most_common())
