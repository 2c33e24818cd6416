"""Arguments against the schema of their tool: what is wrong with them, and what they can be mended to.

Scores and rewards are strict and only ask for the problems. `coerce` is for deployment, where a call that means the
right thing in the wrong type should not fail.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

from jsonschema import TypeChecker
from jsonschema.exceptions import UnknownType, ValidationError, best_match
from jsonschema.validators import Draft202012Validator, extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from envace.errors import DataError
from envace.types import Json, ToolSpec

Schema = dict[str, Any]

MAX_PROBLEMS = 5
MAX_PROBLEM_CHARACTERS = 160
MAX_DEPTH = 32
"""Schemas within schemas, beyond which nothing is mended."""
MAX_VISITS = 20_000
"""Values that are looked at to mend arguments, or to fill them in; alternatives within alternatives multiply."""
MAX_DIGITS = 400
"""A longer text is not read as a number: Python refuses some thousands of digits, and a double holds 309."""

UNCHECKABLE = (RecursionError, ValueError, ArithmeticError)
"""What the validator raises on values beyond its means: very deep ones, integers of thousands of digits."""
UNUSABLE = (UnknownType, Unresolvable)
"""What it raises on schemas that did not pass through `normalise`."""


# Problems


def argument_problems(tool: ToolSpec, arguments: Json) -> list[str]:
    """What is wrong with the arguments of a call, at most 5 short sentences that begin with a path; none if valid.

    Strict: nothing is converted. A pattern that Python cannot compile is not enforced. Raises DataError where the
    schema itself cannot be used, which `normalise` tells earlier.
    """
    if not isinstance(arguments, dict):
        return [f"arguments: must be an object, not {_kind(arguments)}"]
    problems: dict[str, None] = {}
    try:
        for error in _validator(_ById(tool)).iter_errors(arguments):
            problems[_problem(error)] = None
            if len(problems) == MAX_PROBLEMS:
                break
    except UNCHECKABLE:
        return ["arguments: a value is too large or too deeply nested to be checked"]
    except UNUSABLE as error:
        _refuse_schema(error)
    return list(problems)


def _refuse_schema(error: Exception) -> NoReturn:
    raise DataError(
        f"the schema of a tool cannot be used: {str(error)[:160]}. Pass it through normalise, which names the tool."
    ) from None


def _problem(error: ValidationError) -> str:
    error = best_match([error])
    text = f"{_place(error.absolute_path)}: {_say(error)}"
    return text if len(text) <= MAX_PROBLEM_CHARACTERS else f"{text[: MAX_PROBLEM_CHARACTERS - 3]}..."


def _say(error: ValidationError) -> str:
    """An error in few words. The library's own begin with the value, however long that is."""
    found: Any = error.instance
    wanted: Any = error.validator_value
    if error.validator == "type":
        return f"must be {wanted if isinstance(wanted, str) else ' or '.join(wanted)}, not {_describe(found)}"
    if error.validator == "required":
        return f"missing {_names([name for name in wanted if name not in found])}"
    if error.validator == "additionalProperties" and wanted is False:
        return _say_unknown(found, error.schema)
    if error.validator == "enum":
        return f"must be one of {', '.join(map(_show, wanted))}, not {_describe(found)}"
    if error.validator in ("anyOf", "oneOf"):
        return f"{_describe(found)} must fit {'one' if error.validator == 'oneOf' else 'any'} of {len(wanted)} forms"
    if error.schema is False:
        return f"{_describe(found)} is given where nothing is allowed"  # the library does not tell its path
    return f"must keep to {error.validator} {_show(wanted)}, not {_describe(found)}"


def _say_unknown(found: dict[str, Any], schema: Any) -> str:
    known, patterns = list(schema.get("properties", {})), schema.get("patternProperties", {})
    extra = [name for name in found if name not in known and not any(re.search(pattern, name) for pattern in patterns)]
    return f"unknown {_names(extra)}; known are {_names(known) or 'none'}"


def _names(names: list[str]) -> str:
    shown = ", ".join(_show(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _place(path: Any) -> str:
    """`items[2].sku`; `arguments` for the whole."""
    text = ""
    for part in path:
        key = str(part)[:40]
        text += f"[{key}]" if isinstance(part, int) else f".{key}" if text else key
    return text or "arguments"


def _show(value: Json) -> str:
    """A value as JSON, short."""
    if isinstance(value, dict | list):
        return f"{_kind(value)} of {len(value)}"
    try:
        text = json.dumps(value[:41] if isinstance(value, str) else value, ensure_ascii=False)
    except (ValueError, TypeError):  # an integer of thousands of digits; no JSON
        return "..."
    return text if len(text) <= 40 else f"{text[:37]}..."


def _describe(value: Json) -> str:
    """A value with its type."""
    return _show(value) if value is None or isinstance(value, dict | list) else f"{_kind(value)} {_show(value)}"


def _kind(value: Json) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), type(value).__name__)


# Validators


def _pattern(validator: Any, pattern: str, instance: Json, schema: Schema) -> Iterator[ValidationError]:
    """`pattern`, where Python can compile it. Some that other languages know, e.g. of Unicode classes, it cannot."""
    try:
        fits = not isinstance(instance, str) or re.search(pattern, instance)
    except (re.error, OverflowError):
        return
    if not fits:
        yield ValidationError(f"does not match {pattern!r}")


def _is_integer(checker: TypeChecker, value: Json) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


Validator: Any = extend(Draft202012Validator, {"pattern": _pattern})  # type: ignore[no-untyped-call]
Exact: Any = extend(  # type: ignore[no-untyped-call]
    Validator, type_checker=Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)
"""Does not take 1.0 for an integer. JSON Schema does, and a Python tool that gets it may not."""


@dataclass(frozen=True, eq=False)
class _ById:
    """A tool as a key: it holds a dict, so it has no hash, and to make one of its text would cost a check."""

    tool: ToolSpec

    def __hash__(self) -> int:
        return id(self.tool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.tool is other.tool


@lru_cache(maxsize=1024)
def _validator(key: _ById, exact: bool = False) -> Any:
    # An empty registry: the one that jsonschema brings fetches what a reference names.
    return (Exact if exact else Validator)(key.tool.parameters, registry=Registry())


def _fits(validator: Any, value: Json, schema: Any) -> bool:
    try:
        return bool(validator.evolve(schema=schema).is_valid(value))
    except UNCHECKABLE:
        return False
    except UNUSABLE as error:
        _refuse_schema(error)


def _followed(validator: Any, schema: Any) -> Schema:
    """A schema, or what it refers to; an open one for what is no object, or refers to nothing or in a circle."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, dict):
            break
        if "$ref" not in schema:
            return schema
        pointer, schema = schema["$ref"], validator.schema
        for key in pointer.split("/")[1:]:  # normalised: `#`, or `#/$defs/name` with nothing to unescape
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


# Defaults


def with_defaults(tool: ToolSpec, arguments: dict[str, Any]) -> dict[str, Any]:
    """A copy in which optional properties that are absent have their `default`, in nested objects as well.

    A default that its own schema refuses is left out, and all are where they would make valid arguments invalid.
    """
    validator = _validator(_ById(tool))
    made: dict[str, Any] = _copy(arguments)
    _fill(validator, made, tool.parameters)
    harmed = _fits(validator, arguments, tool.parameters) and not _fits(validator, made, tool.parameters)
    return _copy(arguments) if harmed else made


def _fill(validator: Any, arguments: dict[str, Any], parameters: Schema) -> None:
    todo: list[tuple[Any, Any]] = [(arguments, parameters)]
    for _ in range(MAX_VISITS):
        if not todo:
            return
        value, schema = todo.pop()
        schema = _followed(validator, schema)
        if not schema or not isinstance(value, dict | list):
            continue
        todo += [(value[key], part) for key, part in _within(value, schema) if isinstance(value[key], dict | list)]
        todo += [(value, part) for part in schema.get("allOf", [])]
        forms = schema.get("anyOf") or schema.get("oneOf") or []
        todo += [(value, form) for form in forms if _fits(validator, value, form)][:1]
        if isinstance(value, dict):
            value.update(_absent(validator, value, schema))


def _absent(validator: Any, value: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The defaults of an object's own optional properties that it lacks."""
    required = schema.get("required", [])
    return {
        name: _copy(part["default"])
        for name, part in schema.get("properties", {}).items()
        if name not in value and name not in required and isinstance(part, dict) and "default" in part
        if _fits(validator, part["default"], part)
    }


def _copy(value: Json) -> Any:
    """A deep copy of JSON data, of any depth."""
    holder = [value]
    todo: list[tuple[Any, Any]] = [(holder, 0)]
    while todo:
        within, key = todo.pop()
        item = within[key]
        if isinstance(item, dict | list):
            within[key] = made = item.copy()
            todo += [(made, inner) for inner in (made if isinstance(made, dict) else range(len(made)))]
    return holder[0]


# Coercion


def coerce(tool: ToolSpec, arguments: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A copy of the arguments with values of the wrong type converted as the schema asks, and what was converted.

    A value that is valid stays, as does one that no conversion makes valid. Converted are: text that is a number, a
    boolean, null, or the JSON of an object or array; a number where text is asked for; 1.0 where an integer is; and a
    single value where a list of such is. Never raises on account of the arguments.
    """
    mending = _Coercion(_validator(_ById(tool), exact=True))
    value, changes = mending.fit(_copy(arguments), tool.parameters, (), 0)
    return value, tuple(changes)


Path = tuple[str | int, ...]
Fitted = tuple[Any, list[str]]
"""A value, and in words what was changed to make it."""


class _Coercion:
    """One coercion, with the count of what it has looked at."""

    def __init__(self, validator: Any) -> None:
        self.validator = validator
        self.left = MAX_VISITS
        self.wrapping = False
        """Whether a single value is being made a list: its item is not made one again."""
        self.hopeless: dict[tuple[int, int, bool], Json] = {}
        """What could not be mended, by identity of value and schema; holds the values, so that no identity recurs."""

    def fit(self, value: Json, schema: Any, path: Path, depth: int) -> Fitted:
        """The value as the schema asks for it, as far as that can be had."""
        seen = (id(value), id(schema), self.wrapping)
        self.left -= 1
        if depth > MAX_DEPTH or self.left < 0 or seen in self.hopeless or self.fits(value, schema):
            return value, []
        made, changes = self._mended(value, _followed(self.validator, schema), path, depth)
        if not changes:
            self.hopeless[seen] = value
        return made, changes

    def _mended(self, value: Json, schema: Schema, path: Path, depth: int) -> Fitted:
        made, changes = self._parts(value, schema, path, depth)
        if not changes:
            made, changes = self._converted(value, schema, path, depth)
        for part in schema.get("allOf", []):
            made, more = self.fit(made, part, path, depth + 1)
            changes = changes + more
        for key in ("anyOf", "oneOf"):
            made, more = self._alternative(made, schema, schema.get(key, []), path, depth)
            changes = changes + more
        # Each value of a container was mended for itself; a value that was converted must fit as a whole.
        kept = isinstance(value, dict | list) and type(made) is type(value)
        return (made, changes) if kept or (changes and self.fits(made, schema)) else (value, [])

    def fits(self, value: Json, schema: Any) -> bool:
        """Whether the value is valid, where 1.0 is no integer."""
        return _fits(self.validator, value, schema)

    def _alternative(self, value: Json, schema: Schema, branches: list[Any], path: Path, depth: int) -> Fitted:
        """The first alternative that the value can be made to fit; none is tried where it fits one already."""
        if any(self.fits(value, branch) for branch in branches):
            return value, []
        for branch in branches:
            made, changes = self.fit(value, branch, path, depth + 1)
            if changes and self.fits(made, branch) and self.fits(made, schema):
                return made, changes
        return value, []

    def _parts(self, value: Json, schema: Schema, path: Path, depth: int) -> Fitted:
        """A container with each of its values made to fit, whether or not that mends the whole."""
        if not isinstance(value, dict | list):
            return value, []
        made: Any = value.copy()
        changes: list[str] = []
        for key, part in _within(value, schema):
            made[key], more = self.fit(value[key], part, (*path, key), depth + 1)
            changes += more
        return (made, changes) if changes else (value, [])

    def _converted(self, value: Json, schema: Schema, path: Path, depth: int) -> Fitted:
        """The first conversion that is valid."""
        kinds, place = _kinds(schema), _place(path)
        for made in _conversions(value, kinds):
            if self.fits(made, schema):
                return made, [f"{place}: {_describe(value)} became {_describe(made)}"]
        read = _read(value) if kinds & {"object", "array"} else None
        if read is not None and _kind(read) in kinds:
            made, changes = self.fit(read, schema, path, depth + 1)
            if self.fits(made, schema):
                return made, [f"{place}: JSON text became {_describe(made)}", *changes]
        if "array" in kinds and isinstance(value, str | int | float) and not self.wrapping:
            self.wrapping = True
            made, changes = self._parts([value], schema, path, depth)
            self.wrapping = False
            if self.fits(made, schema):
                return made, [f"{place}: {_describe(value)} became a list of it", *changes]
        return value, []


def _within(value: Any, schema: Schema) -> Iterator[tuple[Any, Any]]:
    """The key of each value in a container, with its schema."""
    if isinstance(value, list):
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        for place in range(len(value)):
            yield place, first[place] if place < len(first) else rest
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key in value:
        matched = (part for pattern, part in patterns.items() if re.search(pattern, key))
        yield key, named[key] if key in named else next(matched, schema.get("additionalProperties", True))


def _kinds(schema: Schema) -> set[str]:
    """The types that a schema allows by its own words: `type`, else those of `enum` or `const`."""
    kind = schema.get("type")
    if kind is not None:
        return {kind} if isinstance(kind, str) else set(kind)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {_kind(value) for value in values}


def _conversions(value: Json, kinds: set[str]) -> Iterator[Json]:
    """What a single value may have been meant as, of the types asked for."""
    if isinstance(value, str):
        yield from _from_text(value.strip(), kinds)
    elif isinstance(value, bool):
        if "string" in kinds:
            yield "true" if value else "false"
    elif isinstance(value, int):
        if "string" in kinds and value.bit_length() <= 3 * MAX_DIGITS:
            yield str(value)
    elif isinstance(value, float) and math.isfinite(value):
        if "integer" in kinds and value.is_integer():
            yield int(value)
        if "string" in kinds:
            yield json.dumps(value)


def _from_text(text: str, kinds: set[str]) -> Iterator[Json]:
    if "null" in kinds and text == "null":
        yield None
    if "boolean" in kinds and text.lower() in ("true", "false"):
        yield text.lower() == "true"
    if len(text) > MAX_DIGITS or not kinds & {"integer", "number"}:
        return
    # ASCII digits only: int() and float() also read `1_000`, other scripts and words such as `nan`.
    whole = re.fullmatch(r"([+-]?[0-9]+)(\.0*)?", text)
    if whole and ("integer" in kinds or not whole[2]):
        yield int(whole[1])
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) and math.isfinite(float(text)):
        number = float(text)
        yield int(number) if "number" not in kinds and number.is_integer() else number


def _read(text: Json) -> Json:
    """The object or array that a text holds as JSON; None for any other value."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
