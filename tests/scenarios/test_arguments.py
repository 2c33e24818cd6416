"""Arguments against schemas: problems in few words, defaults, and conversions. Cases: S1, S2, S5 of the field cases."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.validators import Draft202012Validator

from envace.envs import invalid_call
from envace.errors import DataError
from envace.scenarios import EnvironmentSpec
from envace.scenarios.arguments import argument_problems, coerce, with_defaults
from envace.scenarios.tools import normalise
from envace.types import ToolCall, ToolSpec

HUGE = 10**5000
"""An integer that Python refuses to write in digits."""


def tool(**schema: Any) -> ToolSpec:
    return ToolSpec(name="f", description="", parameters=normalise(schema, where="tool 'f'"))


def of(**properties: Any) -> ToolSpec:
    """A tool of some optional arguments."""
    return tool(properties=properties)


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


UNMEASURED = {
    "long": "x" * 1_000_000,
    "brackets": "[" * 1_000_000,
    "digits": "9" * 1_000_000,
    "huge": HUGE,
    "minus": -HUGE,
    "infinite": math.inf,
    "nan": math.nan,
    "deep": deep(100_000),
    "wide": ["x"] * 3_000,
    "key": {"k" * 500: 1},
    "surrogate": "\ud800",
}
"""Values to test patience with, by name: as text, some cannot even be written into a test's name."""

NODE = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/Node"}}]}
INTEGERS = {"type": "array", "items": {"type": "integer"}}
ORDER = tool(
    properties={
        "id": {"type": "string", "pattern": "^#W"},
        "limit": {"type": "integer", "minimum": 1},
        "sort": {"enum": ["up", "down"]},
        "items": {
            "type": "array",
            "items": {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]},
        },
        "closed": {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "never": False,
    },
    required=["id"],
)


# Problems


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, 'arguments: missing "id"'),
        ({"id": "#W1", "limit": "500"}, 'limit: must be integer, not string "500"'),
        ({"id": "#W1", "limit": True}, "limit: must be integer, not boolean true"),
        ({"id": "#W1", "limit": None}, "limit: must be integer, not null"),
        ({"id": "#W1", "limit": [1, 2]}, "limit: must be integer, not array of 2"),
        ({"id": "#W1", "limit": 0}, "limit: must keep to minimum 1, not integer 0"),
        ({"id": "W1"}, 'id: must keep to pattern "^#W", not string "W1"'),
        ({"id": "#W1", "sort": "Up"}, 'sort: must be one of "up", "down", not string "Up"'),
        ({"id": "#W1", "items": [{"sku": "a"}, {"sku": 5}]}, "items[1].sku: must be string, not integer 5"),
        ({"id": "#W1", "items": [{}]}, 'items[0]: missing "sku"'),
        ({"id": "#W1", "closed": {"a": 1, "b": 2}}, 'closed: unknown "b"; known are "a"'),
        ({"id": "#W1", "never": 1}, "arguments: integer 1 is given where nothing is allowed"),
    ],
)
def test_a_problem_is_one_line_that_begins_with_its_path(arguments: dict[str, Any], problem: str) -> None:
    assert argument_problems(ORDER, arguments) == [problem]


@pytest.mark.parametrize("arguments", [{"id": "#W1"}, {"id": "#W1", "extra": 1}, {"id": "#W1", "either": None}])
def test_valid_arguments_have_no_problem(arguments: dict[str, Any]) -> None:
    assert argument_problems(ORDER, arguments) == []


@pytest.mark.parametrize("arguments", ["{}", [], None, 5])
def test_S1_arguments_that_are_no_object_are_a_problem(arguments: Any) -> None:
    # Strict scoring does not open a string, even one that holds an object.
    [problem] = argument_problems(of(), arguments)
    assert problem.startswith("arguments: must be an object, not ")


def test_S2_strict_checks_convert_nothing() -> None:
    assert len(argument_problems(of(a={"type": "integer"}, b={"type": "string"}), {"a": "500", "b": 1.0})) == 2


@pytest.mark.parametrize("name", UNMEASURED)
def test_problems_stay_few_and_short_whatever_the_value(name: str) -> None:
    properties = {f"{'p' * 60}{n}": {"type": "boolean"} for n in range(9)}
    problems = argument_problems(tool(properties=properties), dict.fromkeys(properties, UNMEASURED[name]))
    assert 1 <= len(problems) <= 5
    assert all(len(problem) <= 160 for problem in problems)


def test_many_of_a_kind_are_named_together() -> None:
    closed = tool(properties={"a": {}}, required=["a", "b"], additionalProperties=False)
    assert argument_problems(closed, {f"x{n}": n for n in range(9)}) == [
        'arguments: missing "a", "b"',
        'arguments: unknown "x0", "x1", "x2", "x3", "x4" and 4 more; known are "a"',
    ]


def test_a_tool_is_checked_by_its_own_schema_though_another_has_its_name() -> None:
    integer, string = of(a={"type": "integer"}), of(a={"type": "string"})
    for _ in range(2):
        assert argument_problems(integer, {"a": 1}) == argument_problems(string, {"a": "1"}) == []
        assert argument_problems(integer, {"a": "1"}) and argument_problems(string, {"a": 1})


@pytest.mark.parametrize("schema", [{"type": "dict"}, {"$ref": "http://127.0.0.1:9/schema"}, {"$ref": "#/$defs/no"}])
def test_a_schema_that_was_not_normalised_is_named_and_nothing_is_fetched(schema: dict[str, Any]) -> None:
    raw = ToolSpec(name="f", description="", parameters={"type": "object", "properties": {"a": schema}})
    for check in (argument_problems, coerce):
        with pytest.raises(DataError, match="normalise"):
            check(raw, {"a": 1})


def test_an_invalid_call_is_answered_with_a_code_and_what_to_do_better(retail: EnvironmentSpec) -> None:
    unknown = invalid_call(retail, ToolCall(name="get_ordr", arguments={}))
    assert unknown is not None
    assert unknown["error"] == "unknown_tool"
    assert unknown["message"].startswith("There is no tool 'get_ordr'. Available: get_")
    assert unknown["message"].endswith(f"{retail.tools[-1].name}.")
    assert invalid_call(retail, ToolCall(name="get_order", arguments={"order": 1})) == {
        "error": "invalid_arguments",
        "message": 'arguments: missing "order_id"; arguments: unknown "order"; known are "order_id"',
    }


def test_the_answer_to_an_unknown_tool_is_bounded(retail: EnvironmentSpec) -> None:
    tools = tuple(ToolSpec(name=f"t{n}", description="", parameters={}) for n in range(30))
    answer = invalid_call(replace(retail, tools=tools), ToolCall(name="x" * 10_000, arguments={}))
    assert answer is not None
    assert answer["message"] == (
        f"There is no tool '{'x' * 77}...'. Available: {', '.join(f't{n}' for n in range(20))} and 10 more."
    )


# Defaults


def test_defaults_fill_what_is_absent_and_optional() -> None:
    spec = tool(
        properties={
            "a": {"type": "integer", "default": 1},
            "b": {"type": "integer", "default": 2},
            "c": {"type": "integer", "default": 3},
            "d": {"type": ["string", "null"], "default": None},
            "e": {"type": "integer"},
        },
        required=["c"],
    )
    given = {"a": 9}
    assert with_defaults(spec, given) == {"a": 9, "b": 2, "d": None}
    assert given == {"a": 9}


def test_defaults_reach_objects_that_are_there_and_make_none() -> None:
    inner = {"type": "object", "properties": {"n": {"default": 1}}}
    spec = of(
        here={"type": "object", "properties": {"deeper": inner}},
        absent=inner,
        rows={"type": "array", "items": inner},
        maybe={"anyOf": [inner, {"type": "null"}]},
        both={"allOf": [inner]},
    )
    given = {"here": {"deeper": {}}, "rows": [{}, {"n": 5}], "maybe": {}, "both": {}}
    before = copy.deepcopy(given)
    assert with_defaults(spec, given) == {
        "here": {"deeper": {"n": 1}},
        "rows": [{"n": 1}, {"n": 5}],
        "maybe": {"n": 1},
        "both": {"n": 1},
    }
    assert given == before


def test_a_default_is_copied() -> None:
    spec = of(a={"default": []})
    with_defaults(spec, {})["a"].append(1)
    assert with_defaults(spec, {}) == {"a": []}


@pytest.mark.parametrize(
    "spec",
    [
        of(a={"type": "string", "default": None}),  # BFCL has these by the hundred
        tool(properties={"a": {"default": 1}}, dependentRequired={"a": ["b"]}),
        tool(properties={"a": {"default": 1}}, maxProperties=0),
    ],
)
def test_a_default_that_would_make_a_valid_call_invalid_is_left_out(spec: ToolSpec) -> None:
    assert with_defaults(spec, {}) == {}


def test_defaults_of_a_schema_within_itself_come_to_an_end() -> None:
    spec = tool(
        properties={"kid": {"$ref": "#/$defs/Kid"}},
        **{"$defs": {"Kid": {"properties": {"kid": {"$ref": "#/$defs/Kid"}, "n": {"default": 1}}}}},
    )
    assert with_defaults(spec, {"kid": {"kid": {}}}) == {"kid": {"kid": {"n": 1}, "n": 1}}
    assert with_defaults(of(a={"default": 1}), {"b": deep(100_000)})["a"] == 1


# S2: conversions


@pytest.mark.parametrize(
    ("schema", "value", "mended"),
    [
        ({"type": "integer"}, "500", 500),
        ({"type": "integer"}, " -5 ", -5),
        ({"type": "integer"}, "+5", 5),
        ({"type": "integer"}, "1.0", 1),
        ({"type": "integer"}, "1e3", 1000),
        ({"type": "integer"}, 1.0, 1),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, ".5", 0.5),
        ({"type": "number"}, "500", 500),
        ({"type": "number"}, "-2.5e-1", -0.25),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "string"}, 1.0, "1.0"),
        ({"type": "string"}, 12345, "12345"),
        ({"type": "string"}, True, "true"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, ' {"n": "1"}', {"n": 1}),
        (INTEGERS, "[1, 2]", [1, 2]),
        (INTEGERS, ["1", 2], [1, 2]),
        (INTEGERS, 3, [3]),
        (INTEGERS, "3", [3]),
        ({"type": "array", "items": {"type": "string"}}, "a", ["a"]),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, "7", 7),
        ({"oneOf": [{"type": "boolean"}, INTEGERS]}, "7", [7]),
        ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "7", 7),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": "5"}, 5, "5"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, ["1", 2], [1, "2"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "1"}, {"a": 1}),
        (
            {"type": "object", "patternProperties": {"^n": {"type": "integer"}}},
            {"n": "1", "s": "1"},
            {"n": 1, "s": "1"},
        ),
    ],
)
def test_S2_a_wrong_type_is_converted_as_the_schema_asks(schema: dict[str, Any], value: Any, mended: Any) -> None:
    spec, given = of(x=schema), {"x": value}
    result, changes = coerce(spec, given)
    assert (result, argument_problems(spec, result)) == ({"x": mended}, [])
    assert type(result["x"]) is type(mended)  # 1 is not 1.0, nor True
    assert changes and all(change.startswith("x") for change in changes)
    assert given == {"x": value} and type(given["x"]) is type(value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string"}, "500"),
        ({"type": ["string", "integer"]}, "500"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "500"),
        ({"const": "500"}, "500"),
        ({"enum": ["1", 1]}, "1"),
        ({"enum": ["null", None]}, "null"),
        ({"enum": [1.0]}, 1.0),
        ({}, "500"),
        (True, '{"a": 1}'),
        ({"type": "number"}, 1.0),
        ({"type": "array"}, ["500"]),
    ],
)
def test_S2_a_valid_value_stays(schema: Any, value: Any) -> None:
    result, changes = coerce(of(x=schema), {"x": value})
    assert (result, changes) == ({"x": value}, ())
    assert type(result["x"]) is type(value)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, "many"),
        ({"type": "integer"}, ""),
        ({"type": "integer"}, "1.5"),
        ({"type": "integer"}, 1.5),
        ({"type": "integer"}, "1_000"),
        ({"type": "integer"}, "0x10"),
        ({"type": "integer"}, "٣"),
        ({"type": "integer"}, True),
        ({"type": "integer"}, None),
        ({"type": "integer"}, math.inf),
        ({"type": "integer", "maximum": 5}, "6"),
        ({"type": "integer", "maximum": 5}, 6.0),
        ({"allOf": [{"type": "integer"}], "maximum": 5}, "6"),
        pytest.param({"type": "integer"}, "9" * 10_000, id="digits"),
        ({"type": "number"}, "nan"),
        ({"type": "number"}, "Infinity"),
        ({"type": "number"}, "1e999"),
        ({"type": "boolean"}, "yes"),
        ({"type": "boolean"}, 1),
        ({"type": "string"}, math.inf),
        pytest.param({"type": "string"}, HUGE, id="huge"),
        ({"type": "string"}, None),
        ({"type": "string"}, {"a": 1}),
        ({"type": "string", "pattern": "^#W"}, 123),
        ({"type": "integer"}, "null"),
        ({"type": "object"}, "[1]"),
        ({"type": "object"}, "{'a': 1}"),
        ({"type": "object"}, '{"a": NaN}'),
        ({"type": "object", "required": ["b"]}, '{"a": 1}'),
        (INTEGERS, "many"),
        (INTEGERS, "[1, 2"),
        (INTEGERS, None),
        ({"type": "array", "items": INTEGERS}, 1),  # a value is made a list, not a list of lists
        ({"enum": [1, 2]}, "3"),
        ({"enum": ["up"]}, "UP"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "maybe"),
        (False, "1"),
        pytest.param({"type": "object"}, "[" * 100_000, id="brackets"),
    ],
)
def test_S2_what_no_conversion_makes_valid_stays_and_is_told(schema: Any, value: Any) -> None:
    spec = of(x=schema)
    result, changes = coerce(spec, {"x": value})
    assert (result, changes) == ({"x": value}, ())
    assert argument_problems(spec, result)


def test_S2_one_wrong_value_does_not_keep_the_others_from_being_mended() -> None:
    spec = tool(properties={"a": {"type": "integer"}, "b": {"type": "integer"}, "o": ORDER.parameters}, required=["z"])
    result, changes = coerce(spec, {"a": "1", "b": "one", "o": {"limit": "2", "items": [{"sku": 3}, 4]}})
    assert result == {"a": 1, "b": "one", "o": {"limit": 2, "items": [{"sku": "3"}, 4]}}
    assert changes == (
        'a: string "1" became integer 1',
        'o.limit: string "2" became integer 2',
        'o.items[0].sku: integer 3 became string "3"',
    )


def test_S2_every_change_is_told_with_its_path() -> None:
    spec = of(f={"type": "object", "properties": {"n": {"type": "integer"}}}, tags=INTEGERS)
    _, changes = coerce(spec, {"f": '{"n": "1"}', "tags": "7"})
    assert changes == (
        "f: JSON text became object of 1",
        'f.n: string "1" became integer 1',
        'tags: string "7" became a list of it',
        'tags[0]: string "7" became integer 7',
    )


def test_S2_a_change_that_was_tried_in_vain_is_not_told() -> None:
    # The first form takes the number and then lacks `b`; the second takes the text as it is, and the boolean.
    forms = [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a", "b"]},
        {"type": "object", "properties": {"a": {"type": "string"}, "c": {"type": "boolean"}}},
    ]
    result, changes = coerce(of(x={"anyOf": forms}), {"x": {"a": "1", "c": "true"}})
    assert result == {"x": {"a": "1", "c": True}}
    assert changes == ('x.c: string "true" became boolean true',)


def test_S1_arguments_that_are_json_text_are_opened() -> None:
    text: Any = '{"id": "#W1", "limit": "5"}'
    result, changes = coerce(ORDER, text)
    assert result == {"id": "#W1", "limit": 5}
    assert changes[0] == "arguments: JSON text became object of 2"


def test_S5_conversion_follows_references_that_recur() -> None:
    spec = tool(properties={"x": {"$ref": "#/$defs/Node"}}, **{"$defs": {"Node": NODE}})
    assert coerce(spec, {"x": ["1", ["2", [3]]]})[0] == {"x": [1, [2, [3]]]}


@pytest.mark.parametrize("name", UNMEASURED)
def test_values_without_measure_are_returned_soon(name: str) -> None:
    properties = {"a": NODE, "b": INTEGERS, "c": {"enum": [[]]}, "d": {"type": "string"}, "e": {"type": "object"}}
    spec = tool(properties=properties, **{"$defs": {"Node": NODE}})
    start = time.monotonic()
    result, _ = coerce(spec, dict.fromkeys(properties, UNMEASURED[name]))
    with_defaults(spec, result)
    argument_problems(spec, result)
    assert list(result) == list(properties)
    assert time.monotonic() - start < 20  # it takes about one second


def test_time_grows_with_the_size_of_the_arguments_and_no_faster() -> None:
    def seconds(size: int) -> float:
        spec, given = of(x=INTEGERS), {"x": [str(n) for n in range(size)]}
        start = time.perf_counter()
        assert len(coerce(spec, given)[1]) == size
        return time.perf_counter() - start

    seconds(100)
    small, large = max(seconds(1000) for _ in range(3)), min(seconds(8000) for _ in range(3))
    assert large < 30 * small  # 8 where it is linear, 64 where it is quadratic


def test_alternatives_within_alternatives_do_not_multiply_without_bound() -> None:
    lists = [{"type": "array", "items": {"$ref": "#/$defs/N"}, "title": title} for title in "ab"]
    node = {"anyOf": [{"type": "integer"}, *lists]}
    spec = tool(properties={"x": {"$ref": "#/$defs/N"}}, **{"$defs": {"N": node}})
    value: Any = "z"
    for _ in range(8):
        value = [value]
    start = time.monotonic()
    assert coerce(spec, {"x": value}) == ({"x": value}, ())
    assert time.monotonic() - start < 20  # well below one second; without a bound it takes minutes


# Properties

PLAIN = st.sampled_from(
    [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null", "array", "object")]
    + [{}, True, False, {"type": ["integer", "null"]}, {"enum": ["1", 2, None, "true"]}, {"const": "5"}, {"minimum": 3}]
    + [{"type": "string", "maxLength": 2}, {"type": "integer", "default": 7, "maximum": 9}]
)
NAMES = st.sampled_from("abc")


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda part: {"type": "array", "items": part}, inner),
        st.builds(lambda parts: {"prefixItems": parts}, lists),
        st.builds(
            lambda parts, needed, rest: {"properties": parts, "required": needed, "additionalProperties": rest},
            st.dictionaries(NAMES, inner, max_size=3),
            st.lists(NAMES, unique=True, max_size=2),
            inner,
        ),
        st.builds(lambda key, parts: {key: parts}, st.sampled_from(["anyOf", "oneOf", "allOf"]), lists),
        st.just({"$ref": "#/$defs/Node"}),
    )


SPECS = st.builds(
    lambda parts: tool(properties=parts, **{"$defs": {"Node": NODE}}),
    st.dictionaries(NAMES, st.recursive(PLAIN, larger, max_leaves=8), max_size=3),
)
TEXTS = st.sampled_from(
    ["1", "5", "1.5", "true", "null", "", "[1]", '["1", null]', '{"a": "1"}', "[", "nan", "9" * 9999]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=10,
)
ARGUMENTS = st.dictionaries(NAMES, VALUES, max_size=3)


def valid(spec: ToolSpec, arguments: Any) -> bool:
    try:
        return bool(Draft202012Validator(spec.parameters).is_valid(arguments))
    except ValueError:  # the library itself fails to write a huge integer into its message
        return False


@settings(max_examples=400, deadline=None)
@given(spec=SPECS, arguments=ARGUMENTS)
def test_S2_coerce_never_raises_never_mutates_and_never_spoils(spec: ToolSpec, arguments: dict[str, Any]) -> None:
    before = copy.deepcopy(arguments)
    was_valid = valid(spec, arguments)
    result, changes = coerce(spec, arguments)
    assert arguments == before or repr_of(arguments) == repr_of(before)
    assert result is not arguments
    if was_valid:
        assert valid(spec, result)
        assert result == arguments  # at most a 1.0 became the 1 that it equals
    elif not changes:
        assert result == arguments or repr_of(result) == repr_of(arguments)
    assert all(isinstance(change, str) and len(change) < 300 for change in changes)
    # What was mended once needs no mending again.
    assert valid(spec, result) <= (coerce(spec, result)[1] == ())


@settings(max_examples=200, deadline=None)
@given(spec=SPECS, arguments=ARGUMENTS)
def test_problems_agree_with_the_library_and_defaults_never_spoil(spec: ToolSpec, arguments: dict[str, Any]) -> None:
    before = copy.deepcopy(arguments)
    problems = argument_problems(spec, arguments)
    assert (problems == []) == valid(spec, arguments)
    assert len(problems) <= 5 and all(len(problem) <= 160 for problem in problems)
    filled = with_defaults(spec, arguments)
    assert arguments == before or repr_of(arguments) == repr_of(before)
    assert set(arguments) <= set(filled)
    if not problems:
        assert argument_problems(spec, filled) == []


def repr_of(value: Any) -> str:
    """The text of a value; NaN is not equal to itself, and a huge integer has no text."""
    return json.dumps(value, default=str, skipkeys=True) if not holds_huge(value) else "huge"


def holds_huge(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(holds_huge, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and value == HUGE
