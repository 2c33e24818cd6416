"""Tools of every dialect become one kind of schema, which allows what it allowed before. Field cases: S3, S5, S7."""

from __future__ import annotations

import copy
import json
import re
import types
from typing import Annotated, Any, Literal

import pytest
from jsonschema.validators import Draft202012Validator
from pydantic import BaseModel, Field

from envace.errors import DataError
from envace.scenarios.arguments import argument_problems
from envace.scenarios.tools import (
    normalise,
    read_tools,
    to_openai,
    tool_from_callable,
    tools_from_bfcl,
    tools_from_mcp,
    tools_from_openai,
    tools_from_source,
    wire_name,
)
from envace.types import ToolSpec

OPEN = {"type": "object", "properties": {}}
ID = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}


def made(schema: Any) -> dict[str, Any]:
    return normalise(schema, where="tool 'x'")


def allows(schema: Any, value: Any) -> bool:
    return Draft202012Validator(schema).is_valid(value)


# S3: what is missing


@pytest.mark.parametrize(
    "missing", [None, "", "  ", {}, [], True, {"type": "object"}, {"properties": None}, '{"a": 1}']
)
def test_S3_a_missing_schema_is_one_of_an_object_without_properties(missing: Any) -> None:
    assert made(missing)["type"] == "object"
    assert made(missing)["properties"] == {}
    assert allows(made(missing), {"anything": 1})  # missing is not closed


def test_S3_a_missing_type_or_null_keywords_are_mended() -> None:
    schema = {"properties": {"a": {"type": "string", "description": None, "enum": None}}, "required": None}
    assert made(schema) == {"type": "object", "properties": {"a": {"type": "string"}}}


def test_S3_a_null_default_or_const_is_a_value_and_stays() -> None:
    assert made({"properties": {"a": {"default": None}, "b": {"const": None}}})["properties"] == {
        "a": {"default": None},
        "b": {"const": None},
    }


def test_S3_the_order_of_keys_stays_since_prompts_are_rendered_from_it() -> None:
    schema = {"properties": {"b": {}, "a": {}}, "required": ["b"], "type": "object", "description": "x"}
    assert json.dumps(made(schema)) == json.dumps(schema)


@pytest.mark.parametrize("item", [{"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": ""}])
def test_S3_a_tool_without_parameters_takes_none(item: dict[str, Any]) -> None:
    [tool] = tools_from_openai([item])
    assert (tool.description, tool.parameters) == ("", OPEN)


# S5: never tightened, never loosened


def test_S5_additional_properties_are_not_defaulted() -> None:
    nested = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {"type": "integer"}}}}}
    assert made(nested) == nested
    assert made({**nested, "additionalProperties": False})["additionalProperties"] is False


def test_S5_a_nested_schema_without_a_type_stays_open() -> None:
    # A type would refuse the list that this allows.
    assert allows(made({"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}), {"a": [1]})


def test_S5_a_required_name_without_a_property_is_kept() -> None:
    assert made({"type": "object", "properties": {}, "required": ["ghost"]})["required"] == ["ghost"]


@pytest.mark.parametrize("home", ["$defs", "definitions"])
def test_S5_references_within_the_schema_are_put_in_place(home: str) -> None:
    schema = {
        "type": "object",
        "properties": {"to": {"$ref": f"#/{home}/Address"}, "by": {"$ref": f"#/{home}/Address", "description": "mine"}},
        home: {
            "Address": {"type": "object", "properties": {"zip": {"$ref": f"#/{home}/Zip"}}, "required": ["zip"]},
            "Zip": {"type": "string", "pattern": "^[0-9]{5}$"},
        },
    }
    address = {
        "type": "object",
        "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["zip"],
    }
    assert made(schema) == {
        "type": "object",
        "properties": {"to": address, "by": {**address, "description": "mine"}},
    }


@pytest.mark.parametrize(("there", "beside"), [(9, 5), (5, 9)])
def test_S5_what_stands_beside_a_reference_still_holds(there: int, beside: int) -> None:
    definitions = {"N": {"type": "integer", "maximum": there}}
    schema = made({"properties": {"n": {"$ref": "#/$defs/N", "maximum": beside}}, "$defs": definitions})
    assert [allows(schema, {"n": n}) for n in (5, 6, 10, "5")] == [True, False, False, False]


def test_S5_a_root_that_is_a_reference_is_opened_so_that_templates_see_its_properties() -> None:
    schema = {"$ref": "#/definitions/Order", "$schema": "http://json-schema.org/draft-07/schema#", "definitions": {}}
    schema["definitions"] = {"Order": ID}  # the form of zod-to-json-schema
    assert made(schema) == ID


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"value": {"$ref": "#/$defs/Value"}, "kids": {"items": {"$ref": "#/$defs/Node"}}},
            "required": ["value"],
        },
        "Value": {"type": "integer"},
        "Unused": {"type": "string"},
    },
}


def test_S5_a_reference_that_recurs_is_kept_and_still_checks_at_every_depth() -> None:
    schema = made(TREE)
    assert list(schema["$defs"]) == ["Node"]  # Value is in its place, Unused is gone
    good = {"root": {"value": 1, "kids": [{"value": 2, "kids": [{"value": 3}]}]}}
    bad = {"root": {"value": 1, "kids": [{"value": 2, "kids": [{"value": "3"}]}]}}
    assert (allows(schema, good), allows(schema, bad)) == (True, False)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"me": {"$ref": "#"}, "n": {"type": "integer"}}},
        {"properties": {"me": {"$ref": "#/properties/twin"}, "twin": {"properties": {"n": {"$ref": "#/properties/n"}}}}
         | {"n": {"type": "integer"}}},
        {"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"me": {"$ref": "#/definitions/A"},
                                                                         "n": {"type": "integer"}}}}},
    ],
)  # fmt: skip
def test_S5_a_reference_by_any_path_holds(schema: dict[str, Any]) -> None:
    assert allows(made(schema), {"me": {"n": 1}})
    assert not allows(made(schema), {"me": {"n": "1"}})


def test_S5_a_path_may_be_escaped() -> None:
    schema = {"properties": {"a": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": {"type": "integer"}}}
    assert made(schema)["properties"] == {"a": {"type": "integer"}}


def test_S5_doubling_references_stay_references() -> None:
    # Each of 40 levels names the next twice: put in place they would be a schema of 2**40 parts.
    levels = {f"L{n}": {"properties": {"a": {"$ref": f"#/$defs/L{n + 1}"}, "b": {"$ref": f"#/$defs/L{n + 1}"}}}
              for n in range(40)}  # fmt: skip
    schema = made({"properties": {"x": {"$ref": "#/$defs/L0"}}, "$defs": {**levels, "L40": {"type": "integer"}}})
    assert len(json.dumps(schema)) < 10_000
    value: Any = "1"
    for _ in range(40):
        value = {"a": value}
    assert not allows(schema, {"x": value})


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("https://example.com/schema.json", "nothing is fetched"),
        ("other.json#/a", "nothing is fetched"),
        ("#anchor", "nothing is fetched"),
        ("#/$defs/absent", "points to nothing"),
        ("#/properties/a", "refers to itself without end"),
    ],
)
def test_S5_a_reference_that_cannot_be_followed_is_refused(reference: str, says: str) -> None:
    with pytest.raises(DataError, match=rf"tool 'x'.*{re.escape(reference)}.*{says}"):
        made({"properties": {"a": {"$ref": reference}}})


def test_S5_only_schemas_hold_references() -> None:
    # A property called $ref is a property, and a default or a choice is a value.
    schema = {
        "type": "object",
        "properties": {"$ref": {"type": "string"}, "a": {"default": {"$ref": "http://x"}, "enum": [{"$ref": "y"}]}},
    }
    assert made(schema) == schema


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": ["string", "null"], "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"nullable": True}, {"nullable": True}),  # OpenAPI: no effect without a type
        ({"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMinimum": 1}),
        ({"maximum": 1, "exclusiveMaximum": False}, {"maximum": 1}),
        (
            {"items": [{"type": "string"}], "additionalItems": False},
            {"prefixItems": [{"type": "string"}], "items": False},
        ),
        ({"items": []}, {}),
        ({"dependencies": {"a": ["b"]}}, {"dependentRequired": {"a": ["b"]}}),
        ({"dependencies": {"a": {"required": ["b"]}}}, {"dependentSchemas": {"a": {"required": ["b"]}}}),
    ],
)
def test_S5_older_drafts_and_openapi_keep_their_meaning(older: dict[str, Any], newer: dict[str, Any]) -> None:
    assert made({"properties": {"a": older}})["properties"]["a"] == newer


@pytest.mark.parametrize(
    "schema",
    [
        TREE,
        {"properties": None, "required": None},
        {"properties": {"a": {"nullable": True, "type": "string", "default": []}}},
    ],
)
def test_the_given_schema_is_left_as_it_is(schema: dict[str, Any]) -> None:
    before = copy.deepcopy(schema)
    result = made(schema)
    result["properties"]["new"] = {}
    for part in result["properties"].values():
        part.setdefault("default", []).append(1)
    assert schema == before


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"properties": {"a": {"type": "dict"}}}, "parameters.properties.a.type .*'dict'"),
        ({"properties": {"a": 5}}, "parameters.properties.a "),
        ({"properties": [1]}, "parameters.properties "),
        ({"required": "a"}, "parameters.required "),
        ({"type": "string"}, "must have type 'object', not 'string'"),
        ({"type": "dict"}, "tools_from_bfcl"),
        ({"properties": {"a": {"patternProperties": {"(": {}}}}}, "is no pattern"),
        ({"properties": {"a": {"$dynamicRef": "#x"}}}, "dynamic"),
        (False, "not False"),
        (7, "not 7"),
        ("nonsense", "no JSON"),
    ],
)
def test_an_invalid_schema_names_tool_and_path(schema: Any, says: str) -> None:
    with pytest.raises(DataError, match=f"^tool 'x': .*{says}"):
        made(schema)


def test_a_schema_nested_without_bound_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    with pytest.raises(DataError, match="nested too deeply"):
        made(deep)


def test_a_pattern_of_another_language_is_kept_and_not_enforced() -> None:
    [tool] = tools_from_openai([{"name": "f", "parameters": {"properties": {"a": {"pattern": r"^\p{L}+$"}}}}])
    assert tool.parameters["properties"]["a"]["pattern"] == r"^\p{L}+$"
    assert argument_problems(tool, {"a": "1"}) == []


# Dialects


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": ID, "strict": True}},
        {"type": "function", "name": "f", "description": "d", "parameters": ID},
        {"name": "f", "description": "d", "parameters": ID},
        {"name": "f", "description": "d", "parameters": json.dumps(ID)},
    ],
)
def test_every_form_on_the_openai_wire_is_read(item: dict[str, Any]) -> None:
    before = copy.deepcopy(item)
    expected = (ToolSpec(name="f", description="d", parameters=ID),)
    assert tools_from_openai([item]) == read_tools([item]) == expected
    assert item == before


def test_what_goes_to_the_wire_comes_back_the_same() -> None:
    tools = tools_from_openai([{"name": "f", "description": "d", "parameters": ID}, {"name": "g"}])
    assert read_tools([to_openai(tool) for tool in tools]) == tools


def test_parameters_on_the_wire_always_describe_an_object() -> None:
    bare = ToolSpec(name="f", description="", parameters={})
    assert to_openai(bare) == {"type": "function", "function": {"name": "f", "description": "", "parameters": OPEN}}


class ListedTool(BaseModel):
    """What a client of an MCP server gives for a tool."""

    name: str
    input_schema: dict[str, Any] = Field(alias="inputSchema")
    description: str | None = None
    title: str | None = None
    annotations: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("hints", "effect"),
    [
        (None, "state_change"),
        ({}, "state_change"),
        ({"readOnlyHint": False}, "state_change"),
        ({"readOnlyHint": True}, "query"),
    ],
)
def test_an_mcp_tool_is_read_as_dict_and_as_object(hints: Any, effect: str) -> None:
    item = {"name": "f", "title": "Find", "inputSchema": ID, "annotations": hints}
    expected = (ToolSpec(name="f", description="Find", parameters=ID, effect=effect),)
    assert tools_from_mcp([item]) == tools_from_mcp([ListedTool(**item)]) == expected
    assert read_tools({"tools": [item]}) == read_tools([ListedTool(**item)]) == expected


def test_a_list_may_mix_dialects() -> None:
    def ping() -> str:
        """Ping."""
        return "pong"

    mixed = [
        {"type": "function", "function": {"name": "a"}},
        {"name": "b", "inputSchema": {}},
        {"name": "c", "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}}},
        ping,
        ToolSpec(name="e", description="", parameters={}),
    ]
    tools = read_tools(mixed)
    assert [tool.name for tool in tools] == ["a", "b", "c", "ping", "e"]
    assert all(tool.parameters["type"] == "object" for tool in tools)
    assert tools[2].parameters["properties"]["x"]["type"] == "number"


@pytest.mark.parametrize("empty", [[], (), None, "[]", {"tools": []}])
def test_no_tools_are_fine(empty: Any) -> None:
    assert read_tools(empty) == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("not json", "no JSON"),
        (5, "must be a list, not a int"),
        ({"name": "f"}, "must be a list, not a dict"),
        ([5], "tool 1 is a int"),
        ([{"name": "a"}, {"type": "web_search"}], "tool 2 has type 'web_search'"),
        ([{"description": "d"}], "tool 1 has no name"),
        ([{"name": "  "}], "tool 1 has no name"),
        ([{"name": "a", "description": ["d"]}], "tool 'a': its description must be text"),
        ([{"name": "a"}, {"name": "b"}, {"name": "a"}], "first: 'a'"),
    ],
)
def test_what_is_no_list_of_tools_is_refused(value: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_tools(value)


@pytest.mark.parametrize(
    "convert", [tools_from_openai, lambda items: tools_from_bfcl(items), lambda items: read_tools(items)]
)
def test_two_tools_of_one_name_are_refused(convert: Any) -> None:
    with pytest.raises(DataError, match="used twice, first: 'f'"):
        convert([{"name": "f"}, {"name": "g"}, {"name": "f"}])


# S7: BFCL


def bfcl(kind: Any, **more: Any) -> dict[str, Any]:
    """One property after its conversion from BFCL's dialect."""
    parameters = {"type": "dict", "properties": {"x": {"type": kind, **more}}, "required": ["x"]}
    [tool] = tools_from_bfcl([{"name": "f", "description": "d", "parameters": parameters}])
    assert (tool.parameters["type"], tool.parameters["required"]) == ("object", ["x"])
    found: dict[str, Any] = tool.parameters["properties"]["x"]
    return found


@pytest.mark.parametrize(
    ("kind", "converted"),
    [
        ("dict", "object"),
        ("HashMap", "object"),
        ("tuple", "array"),
        ("ArrayList", "array"),
        ("long", "integer"),
        ("double", "number"),
        ("bool", "boolean"),
        ("String", "string"),
        ("char", "string"),
        ("Boolean", "string"),  # upstream's table has no such name, and what it lacks is a string
        ("", "string"),
        ("integer", "integer"),
    ],
)
def test_S7_type_names_are_converted_as_upstream_does(kind: str, converted: str) -> None:
    assert bfcl(kind, description="an x") == {"type": converted, "description": "an x"}


def test_S7_a_float_is_a_number_with_a_note() -> None:
    assert bfcl("float", description="The price.") == {
        "type": "number",
        "format": "float",
        "description": "The price. (a float)",
    }
    assert allows(bfcl("float"), 3)  # an integer is accepted for a float


@pytest.mark.parametrize("kind", ["any", "Any"])
def test_S7_any_is_open(kind: str) -> None:
    assert "type" not in bfcl(kind)
    assert all(allows(bfcl(kind), value) for value in ("a", 1, [1], {"a": None}))


def test_S7_types_are_converted_at_any_depth() -> None:
    inner = {"type": "dict", "properties": {"type": {"type": "tuple", "items": {"type": "float"}}}}
    found = bfcl("array", items={"type": "array", "items": inner})
    point = found["items"]["items"]["properties"]["type"]  # a property may be called `type`
    assert (found["items"]["items"]["type"], point["type"], point["items"]["type"]) == ("object", "array", "number")


@pytest.mark.parametrize("language", ["java", "javascript"])
def test_S7_every_argument_of_java_and_javascript_is_text(language: Any) -> None:
    properties = {
        "n": {"type": "integer", "description": "How many."},
        "all": {"type": "any", "description": "All."},
        "names": {"type": "ArrayList", "items": {"type": "String"}, "description": "Names."},
        "size": {"type": "dict", "properties": {"w": {"type": "float"}}, "description": "Size."},
    }
    item = {"name": "f", "description": "", "parameters": {"type": "dict", "properties": properties}}
    before = copy.deepcopy(item)
    [tool] = tools_from_bfcl([item], language=language)
    found = tool.parameters["properties"]
    assert item == before
    assert {name: part["type"] for name, part in found.items()} == dict.fromkeys(properties, "string")
    assert not any("items" in part or "properties" in part for part in found.values())
    assert re.search("Java.* integer", found["n"]["description"])
    assert "String" in found["names"]["description"]
    assert language != "javascript" or '"w"' in found["size"]["description"]


def test_S7_the_dialect_is_recognised_by_its_type_names() -> None:
    item = {"name": "f", "description": "", "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}}}
    assert read_tools([item]) == read_tools([{"type": "function", "function": item}]) == tools_from_bfcl([item])


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("get_order", "get_order"),
        ("math.factorial", "math_factorial"),
        ("a.b.c-d", "a_b_c-d"),
        ("ns/tool name", "ns_tool_name"),
        ("x" * 64, "x" * 64),
        ("_", "_"),
    ],
)
def test_S7_names_keep_their_dots_and_have_another_form_for_the_wire(name: str, wire: str) -> None:
    [tool] = tools_from_bfcl([{"name": name, "description": "", "parameters": {"type": "dict", "properties": {}}}])
    assert (tool.name, wire_name(name)) == (name, wire)


@pytest.mark.parametrize("name", ["", "x" * 65, "获取", "查询", "😀", "\ud800", "y" * 500])
def test_S7_every_name_has_a_form_for_the_wire(name: str) -> None:
    assert re.fullmatch("[a-zA-Z0-9_-]{1,64}", wire_name(name))
    assert wire_name(wire_name(name)) == wire_name(name)


def test_S7_names_that_differ_late_or_have_no_letter_stay_distinct() -> None:
    names = ["x" * 70 + "a", "x" * 70 + "b", "获取", "查询"]
    assert len(set(map(wire_name, names))) == 4


# Source text

SHOP = '''
from typing import Any, Dict, List, Literal, Optional, TypedDict, Union
import typing as t

raise RuntimeError("never run")


class Address(TypedDict):
    city: str
    zip: "Optional[int]"


class Person(Address, total=False):
    name: Required[str]
    friends: List["Person"]


class Shop:
    """A shop."""

    def __init__(self, init_config):
        self.pattern = "\\d"

    def annotate(self, {arguments}):
        """Show."""

    def _hidden(self):
        """No tool."""

    @property
    def size(self):
        """No tool either."""
'''


def argument(text: str) -> dict[str, Any]:
    """The schema of the one argument `x`, and that its tool is the only one."""
    [tool] = tools_from_source(SHOP.replace("{arguments}", text))
    assert tool.name == "annotate"
    assert tool.parameters["additionalProperties"] is False  # the signature takes nothing else
    assert tool.parameters["required"] == ([] if "=" in text else ["x"])
    found: dict[str, Any] = tool.parameters["properties"]["x"]
    return found


INTS = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        ("str", {"type": "string"}),
        ("float", {"type": "number"}),
        ("'int'", {"type": "integer"}),
        ("list", {"type": "array"}),
        ("List", {"type": "array"}),
        ("list[int]", INTS),
        ("t.List[int]", INTS),
        ("set[int]", INTS),
        ("tuple[int, ...]", INTS),
        ("Sequence[Any]", {"type": "array"}),
        ("tuple[int, str]", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}],
                             "minItems": 2, "maxItems": 2}),
        ("dict", {"type": "object"}),
        ("Dict[str, Any]", {"type": "object"}),
        ("Dict[str, List[int]]", {"type": "object", "additionalProperties": INTS}),
        ("Optional[int]", {"type": ["integer", "null"]}),
        ("int | None", {"type": ["integer", "null"]}),
        ("'int | None'", {"type": ["integer", "null"]}),
        ("Union[int, str, int]", {"type": ["integer", "string"]}),
        ("Union[int, None, list[int]]", {"anyOf": [{"type": "integer"}, {"type": "null"}, INTS]}),
        ("Union[int, Any]", {}),
        ("Literal['a', 'b']", {"type": "string", "enum": ["a", "b"]}),
        ("Literal[1, 'b']", {"enum": [1, "b"]}),
        ("Optional[Literal['a']]", {"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "null"}]}),
        ("Annotated[int, 'of something']", {"type": "integer"}),
        ("Any", {}),
        ("datetime", {}),
        ("'not ) python'", {}),
        ("Address", {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": ["integer", "null"]}},
                     "required": ["city", "zip"]}),
    ],
)  # fmt: skip
def test_S5_an_annotation_is_read_off_the_text(annotation: str, schema: dict[str, Any]) -> None:
    assert argument(f"x: {annotation}") == schema


def test_S5_a_typed_dict_has_its_keys_at_every_depth() -> None:
    person = argument("x: Person")
    assert list(person["properties"]) == ["city", "zip", "name", "friends"]
    assert person["required"] == ["city", "zip", "name"]
    assert person["properties"]["friends"]["items"] == {"type": "object"}  # a person within a person ends


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ("x: int = 5", {"type": "integer", "default": 5}),
        ("x: int = -5", {"type": "integer", "default": -5}),
        ("x: bool = False", {"type": "boolean", "default": False}),
        ("x: list[int] = ()", {**INTS, "default": []}),
        ("x: Optional[int] = None", {"type": ["integer", "null"], "default": None}),
        ("x: str = None", {"type": ["string", "null"], "default": None}),  # the code itself passes None
        ("x = None", {"default": None}),
        ("x: float = float('inf')", {"type": "number"}),  # optional, though its default is no data
        ("x: list = list()", {"type": "array"}),
        ("x: float = 1e999", {"type": "number"}),
        ("x: set = {1}", {"type": "array"}),
        ("*, x: int = 5", {"type": "integer", "default": 5}),
    ],
)
def test_a_default_makes_an_argument_optional_and_is_shown(text: str, schema: dict[str, Any]) -> None:
    # EnvScaler's own extraction ignores defaults: there `x: int = 5` is required.
    assert argument(text) == schema


@pytest.mark.parametrize("text", ["x", "x, /", "*, x", "x: int, /", "*values, x"])
def test_an_argument_without_a_default_is_required(text: str) -> None:
    assert argument(text) in ({}, {"type": "integer"})


def test_a_method_that_takes_any_keyword_stays_open() -> None:
    [tool] = tools_from_source(SHOP.replace("{arguments}", "x, **more"))
    assert argument_problems(tool, {"x": 1, "y": 2}) == []


DOCUMENTED = '''
class Shop:
    def find(self, product_id: str, limit: int = 5) -> dict:
        """
        Find a product.

        It must be for sale.

        Args:
            product_id (str): The id, with its '#'.
                Never empty.
            limit (int, optional): How many.

        Returns:
            dict: {"success": True}

        Constraints:
            - Only products: of this shop.
        """

    @staticmethod
    def plain(a: int):
        """Add.

        :param a: the first
        """

    @classmethod
    def none(cls): ...

    def find2(self): "old"

    def find2(self, x: int): "new"
'''


def test_words_come_from_the_docstring_and_none_is_lost() -> None:
    find, plain, none, find2 = tools_from_source(DOCUMENTED, "Shop")
    assert find.parameters["properties"] == {
        "product_id": {"type": "string", "description": "The id, with its '#'. Never empty."},
        "limit": {"type": "integer", "default": 5, "description": "How many."},
    }
    assert "Args" not in find.description and "How many" not in find.description
    # Sections that no parser knows say what a call may not do.
    for part in (
        "Find a product.\n\nIt must be for sale.",
        'dict: {"success": True}',
        "- Only products: of this shop.",
    ):
        assert part in find.description
    assert plain.parameters["properties"] == {"a": {"type": "integer", "description": "the first"}}
    assert (none.description, none.parameters["properties"]) == ("", {})
    assert (find2.description, list(find2.parameters["properties"])) == ("new", ["x"])


@pytest.mark.parametrize(
    ("code", "entry", "says"),
    [
        ("class A:\n  def f(self): ...\nclass B:\n  def f(self): ...", None, "found 2. Its classes: A, B"),
        ("class A:\n  pass", None, "found 0. Its classes: A"),
        ("class A:\n  def f(self): ...", "B", "called 'B', found 0"),
        ("x = 1", None, "Its classes: none"),
        ("class A(", None, "cannot be read as Python"),
        ("\0", None, "cannot be read as Python"),
        pytest.param("-" * 100_000 + "1", None, "cannot be read as Python", id="unary"),
        pytest.param(f"class A:\n  def f(self, x: {'int | ' * 2000}None): ...", None, "cannot be read", id="union"),
    ],
)
def test_source_without_the_class_is_refused(code: str, entry: str | None, says: str) -> None:
    with pytest.raises(DataError, match=says):
        tools_from_source(code, entry)


def test_a_class_without_tools_is_an_empty_list_where_it_is_named() -> None:
    assert tools_from_source("class A:\n  pass", "A") == ()


def test_an_odd_escape_in_generated_code_does_not_warn() -> None:
    assert "\\d" in SHOP  # warnings are errors here
    assert tools_from_source('class A:\n  def f(self):\n    return "\\d"')[0].name == "f"


def test_schemas_from_source_are_valid() -> None:
    for code in (DOCUMENTED, SHOP.replace("{arguments}", "a: Person, b: tuple[int, str] = (1, 'a')")):
        for tool in tools_from_source(code, "Shop"):
            assert normalise(tool.parameters, where=tool.name) == tool.parameters


# Functions


class Line(BaseModel):
    sku: str
    amount: int = 1


class Node(BaseModel):
    value: int
    kids: list[Node] = []


class Desk:
    def book(self, nights: int, room: Literal["single", "double"] = "single") -> str:
        """Book a room.

        Args:
            nights: How long.
        """
        return "done"


def order(lines: list[Line], note: Annotated[str | None, Field(description="For the shop.")] = None, *, rush=False):
    """Order.

    Args:
        lines: What to order.
        note: Ignored, the annotation says more.
    """


def test_S5_a_function_gives_nested_schemas_with_their_keys() -> None:
    tool = tool_from_callable(order)
    assert (tool.name, tool.description, tool.effect) == ("order", "Order.", "state_change")
    lines, note, rush = (tool.parameters["properties"][name] for name in ("lines", "note", "rush"))
    assert lines["description"] == "What to order."
    assert {name: part["type"] for name, part in lines["items"]["properties"].items()} == {
        "sku": "string",
        "amount": "integer",
    }
    assert lines["items"]["required"] == ["sku"]
    assert (note["description"], note["default"]) == ("For the shop.", None)
    assert rush == {"default": False}
    assert tool.parameters["required"] == ["lines"]


@pytest.mark.parametrize("function", [Desk.book, Desk().book])
def test_self_is_no_argument(function: Any) -> None:
    tool = tool_from_callable(function, effect="query")
    assert tool.parameters["properties"] == {
        "nights": {"type": "integer", "description": "How long."},
        "room": {"type": "string", "enum": ["single", "double"], "default": "single"},
    }
    assert (tool.parameters["required"], tool.effect) == (["nights"], "query")


def test_a_model_within_itself_is_kept_as_a_reference() -> None:
    def grow(tree: Node) -> None:
        """Grow."""

    grow.__annotations__["tree"] = Node
    tool = tool_from_callable(grow)
    assert argument_problems(tool, {"tree": {"value": 1, "kids": [{"value": 2}]}}) == []
    assert argument_problems(tool, {"tree": {"value": 1, "kids": [{"value": "two"}]}}) != []


def unbounded(*values: int) -> None: ...
def keywords(**more: int) -> None: ...
def by_place(a: int, /) -> None: ...
def unknown(a: NoSuchType) -> None: ...  # noqa: F821
def unspeakable(a: types.CodeType) -> None: ...


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (unbounded, r"\*values: int cannot be given by name|\*values.*cannot be given by name"),
        (keywords, r"\*\*more.*cannot be given by name"),
        (by_place, "cannot be given by name"),
        (unknown, "function 'unknown': its annotations"),
        (unspeakable, "function 'unspeakable': its annotations"),
        (lambda a: a, "no named function"),
        (Desk, "no named function"),
        (5, "no named function"),
    ],
)
def test_a_function_that_no_call_by_name_can_reach_is_refused(function: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        tool_from_callable(function)


def test_a_default_that_is_no_json_is_left_out_without_a_warning() -> None:
    def f(a: int = object()) -> None:  # type: ignore[assignment]
        """F."""

    f.__annotations__.clear()
    assert tool_from_callable(f).parameters["properties"] == {"a": {}}
