"""Tools from every dialect that users have, brought to one: a name, a description, a JSON Schema of the arguments.

Every schema ends as Draft 2020-12 of an object, with nothing to look up outside of it. What it allows is what it
allowed before: nothing is tightened, nothing loosened.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal
from urllib.parse import unquote

from docstring_parser import DocstringStyle, ParseError
from docstring_parser import parse as parse_docstring
from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator
from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from envace.errors import DataError
from envace.types import Json, ToolSpec

Schema = dict[str, Any]

MAX_INLINED = 10_000
"""Schemas within a schema beyond which its references stay references: doubling ones would grow without bound."""

SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas")
LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMAS = (
    "items",
    "contains",
    "unevaluatedItems",
    "additionalProperties",
    "propertyNames",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
)
IN_PLACE = ("allOf", "anyOf", "oneOf", "dependentSchemas", "not", "if", "then", "else")
"""Keywords whose schemas speak of the same value, not of a part of it."""
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
"""Keywords that say something of a value and forbid none."""
LEFT_OUT = {"$defs", "definitions", "$schema", "$id"}
"""Keywords that serve references, or name the draft; once references are resolved they would only mislead."""


# One list, any dialect


def read_tools(value: Any) -> tuple[ToolSpec, ...]:
    """The tools of a list in any dialect, one item at a time: OpenAI, MCP, BFCL, functions, ToolSpecs.

    Also read: the list as JSON text, the list under `tools`, and None for no tools. Raises DataError naming the tool.
    """
    if isinstance(value, str):
        value = _from_text(value, "the tools")
    if isinstance(value, Mapping) and "tools" in value:
        value = value["tools"]
    if value is None:
        return ()
    if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
        raise DataError(f"tools must be a list, not a {type(value).__name__}. Give a list of tools, empty for none.")
    return _distinct(_read_tool(item, number) for number, item in enumerate(value, 1))


def _read_tool(item: Any, number: int) -> ToolSpec:
    if isinstance(item, ToolSpec):
        return replace(item, parameters=normalise(item.parameters, where=f"tool {item.name!r}"))
    if inspect.isroutine(item):
        return tool_from_callable(item)
    record = _record(item, number)
    if "inputSchema" in record or "input_schema" in record:
        return _from_mcp(record, number)
    if _speaks_bfcl(_function(record, number).get("parameters")):
        return _from_bfcl(record, number, "python")
    return _from_openai(record, number)


def tools_from_openai(items: Iterable[Any]) -> tuple[ToolSpec, ...]:
    """Tools as OpenAI's endpoints take them: under `function`, flat (Responses), or bare. Raises DataError."""
    return _distinct(_from_openai(_record(item, number), number) for number, item in enumerate(items, 1))


def _from_openai(record: Schema, number: int) -> ToolSpec:
    body = _function(record, number)
    return _spec(body, body.get("parameters"), number)


def tools_from_mcp(items: Iterable[Any]) -> tuple[ToolSpec, ...]:
    """Tools as an MCP server lists them, as dicts or as objects of a client. Raises DataError.

    A tool that announces `readOnlyHint` only reads; every other is taken to change the state, as MCP's default is.
    """
    return _distinct(_from_mcp(_record(item, number), number) for number, item in enumerate(items, 1))


def _from_mcp(record: Schema, number: int) -> ToolSpec:
    hints = record.get("annotations")
    reads = isinstance(hints, Mapping) and hints.get("readOnlyHint") is True
    body = {**record, "description": record.get("description") or record.get("title")}
    parameters = record.get("inputSchema", record.get("input_schema"))
    return _spec(body, parameters, number, effect="query" if reads else "state_change")


def to_openai(tool: ToolSpec) -> dict[str, Any]:
    """A tool as chat templates and endpoints take it; its parameters always describe an object."""
    parameters = {"type": "object", "properties": {}, **tool.parameters}
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def wire_name(name: str) -> str:
    """A name that OpenAI's endpoints take, 1 to 64 of `a-zA-Z0-9_-`; a name that they take already stays.

    Other characters become `_`, as BFCL does with dots. A name that is cut, or of which nothing legible is left, ends
    in a digest of the whole. Two names that differ only in such characters (`a.b`, `a_b`) still meet.
    """
    made = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    if 0 < len(made) <= 64 and (made == name or made.strip("_")):
        return made
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{made[:55]}_{digest}"


def _record(item: Any, number: int) -> Schema:
    """A tool as a dict of its own, whether it came as a mapping or as a pydantic object."""
    if isinstance(item, Mapping):
        return dict(item)
    dump = getattr(item, "model_dump", None)
    if not callable(dump):
        raise DataError(f"tool {number} is a {type(item).__name__}. Give a dict, a function or a ToolSpec.")
    return dict(dump(by_alias=True))


def _function(record: Schema, number: int) -> Schema:
    """The part of an OpenAI or BFCL tool that names and describes it."""
    kind = record.get("type") or "function"
    if kind != "function":
        raise DataError(f"tool {number} has type {kind!r}; only tools of type 'function' can be called here.")
    inner = record.get("function")
    return dict(inner) if isinstance(inner, Mapping) else record


def _spec(body: Schema, parameters: Any, number: int, *, effect: str = "state_change") -> ToolSpec:
    name, description = body.get("name"), body.get("description")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"tool {number} has no name: {_short(body)}. Give it a `name`.")
    if not isinstance(description, str | None):
        raise DataError(f"tool {name!r}: its description must be text, not a {type(description).__name__}.")
    made = normalise(parameters, where=f"tool {name!r}")
    return ToolSpec(name=name, description=description or "", parameters=made, effect=effect)


def _distinct(tools: Iterable[ToolSpec]) -> tuple[ToolSpec, ...]:
    found = tuple(tools)
    twice = [name for name, times in Counter(tool.name for tool in found).items() if times > 1]
    if twice:
        raise DataError(f"{len(twice)} tool name(s) used twice, first: {twice[0]!r}. Rename or drop one of the tools.")
    return found


def _from_text(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} are text that is no JSON ({error}): {_short(text)}.") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Schemas


def normalise(schema: Json, *, where: str) -> Schema:
    """A schema of arguments as Draft 2020-12 of an object, whole in itself; the given one is left as it is.

    Mended: a missing schema, `type` or `properties`; keywords that are null; OpenAPI's `nullable`; and what older
    drafts wrote differently (tuples in `items`, true for `exclusiveMinimum`, `dependencies`). References within it
    are put in place; where they recur, they stay, with their `$defs`.

    Raises:
        DataError: It is no JSON Schema, describes no object, or refers to something outside of it, which is never
            fetched. Begins with `where`.
    """
    try:
        made = _as_object(_References(_as_mapping(schema, where), where).resolved(), where)
        _check(made, where)
    except RecursionError:
        raise DataError(f"{where}: its schema is nested too deeply to be read. Flatten it.") from None
    return made


def _as_mapping(schema: Json, where: str) -> Schema:
    if isinstance(schema, str):
        schema = _from_text(schema, f"{where}: its parameters") if schema.strip() else None
    if schema is True or (not schema and schema is not False):
        return {}  # no schema at all: a tool that asks for nothing
    if not isinstance(schema, Mapping):
        raise DataError(f"{where}: its parameters must be a JSON Schema (an object), not {_short(schema)}.")
    return dict(schema)


def _as_object(made: Schema, where: str) -> Schema:
    kind = made.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise DataError(
            f"{where}: its parameters must have type 'object', not {_short(kind)}. Type names of other languages are "
            "read by tools_from_bfcl."
        )
    made = {**made, "type": "object"} if "type" in made else {"type": "object", **made}
    return made if "properties" in made else {**made, "properties": {}}


def _check(schema: Schema, where: str) -> None:
    """Refuse what is no JSON Schema. A pattern that only other languages can compile may stay: it is not enforced."""
    try:
        Draft202012Validator.check_schema(schema, format_checker=FormatChecker(()))
    except SchemaError as error:
        path = ".".join(map(str, ("parameters", *error.absolute_path)))
        raise DataError(
            f"{where}: {path} is no JSON Schema (Draft 2020-12): {error.message[:160]}. Mend it where it is defined."
        ) from None
    _each(schema, lambda node: _check_patterns(node, where))


def _check_patterns(node: Schema, where: str) -> None:
    # Which properties a name pattern speaks of decides what the others may be, so this one cannot be passed over.
    for pattern in node.get("patternProperties", {}):
        try:
            re.compile(pattern)
        except (re.error, OverflowError) as error:
            raise DataError(f"{where}: patternProperties {_short(pattern)} is no pattern: {error}.") from None


def _mapped(node: Schema, change: Callable[[Any], Any]) -> Schema:
    """A copy of a schema with each schema directly within it changed. Values, e.g. a default, are no schemas."""
    made: Schema = {}
    for key, value in node.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            made[key] = {name: change(part) for name, part in value.items()}
        elif key in LISTS_OF_SCHEMAS and isinstance(value, list):
            made[key] = [change(part) for part in value]
        else:
            made[key] = change(value) if key in SCHEMAS else copy.deepcopy(value)
    return made


def _each(node: Any, look: Callable[[Schema], None], *, keys: Iterable[str] | None = None) -> None:
    """Look at a schema and at every one within it; with `keys`, only at those under these keywords."""
    if not isinstance(node, dict):
        return
    look(node)
    inner = node if keys is None else {key: node[key] for key in keys if key in node}
    _mapped(inner, lambda part: _each(part, look, keys=keys))


def _modern(node: Schema) -> Schema:
    """A schema's own keywords as Draft 2020-12 writes them; the schemas within it are left alone."""
    made = {key: value for key, value in node.items() if value is not None or key in ("default", "const")}
    if isinstance(kind := made.get("type"), (str, list)) and made.pop("nullable", False) is True:
        kinds = [kind] if isinstance(kind, str) else kind
        made["type"] = kinds if "null" in kinds else [*kinds, "null"]
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(made.get(exclusive), bool) and made.pop(exclusive) and bound in made:
            made[exclusive] = made.pop(bound)
    if isinstance(made.get("items"), list):
        first, rest = made.pop("items"), made.pop("additionalItems", None)
        made |= {"prefixItems": first} if first else {}
        made |= {"items": rest} if rest is not None else {}
    if isinstance(dependencies := made.pop("dependencies", None), dict):
        needs = {name: need for name, need in dependencies.items() if isinstance(need, list)}
        parts = {name: need for name, need in dependencies.items() if not isinstance(need, list)}
        made |= {"dependentRequired": needs} if needs else {}
        made |= {"dependentSchemas": parts} if parts else {}
    return made


class _TooLarge(Exception):
    """Putting every reference in place would take more than MAX_INLINED schemas."""


class _References:
    """Puts what a schema refers to in its place, except where that would never end."""

    def __init__(self, root: Schema, where: str) -> None:
        self.root, self.where = root, where
        self.kept: set[str] = set()
        """Pointers that stay references."""
        self.names: dict[str, str] = {}
        """Kept pointer -> its name under `$defs`; grows as they are met."""
        self.left: float = MAX_INLINED

    def resolved(self) -> Schema:
        """The schema without references, or with those that recur kept under `$defs`. Raises DataError."""
        links = self._links(None)
        endless = _loops(self._links(IN_PLACE))
        if endless:
            raise DataError(f"{self.where}: {min(endless)} refers to itself without end. Mend that reference.")
        try:
            return self._written(_loops(links), MAX_INLINED)
        except _TooLarge:
            return self._written(set(links), float("inf"))

    def _links(self, keys: Iterable[str] | None) -> dict[str, set[str]]:
        """Each pointer that is met from the root, and the pointers in what it points to."""
        links: dict[str, set[str]] = {}
        todo = self._pointers(self.root, None)
        while todo:
            pointer = todo.pop()
            if pointer not in links:
                target = self._target(pointer)
                links[pointer] = self._pointers(target, keys)
                todo |= self._pointers(target, None)
        return links

    def _pointers(self, node: Any, keys: Iterable[str] | None) -> set[str]:
        found: set[str] = set()

        def look(part: Schema) -> None:
            if "$dynamicRef" in part or "$recursiveRef" in part:
                raise DataError(f"{self.where}: dynamic references are not supported. Use $ref with a path.")
            if isinstance(part.get("$ref"), str):
                found.add(part["$ref"])

        _each(_modern_throughout(node), look, keys=keys)
        return found

    def _target(self, pointer: str) -> Any:
        if pointer != "#" and not pointer.startswith("#/"):
            raise DataError(
                f"{self.where}: $ref {_short(pointer)} lies outside of the schema, and nothing is fetched. Put what "
                "it refers to under $defs."
            )
        node: Any = self.root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise DataError(f"{self.where}: $ref {_short(pointer)} points to nothing.") from None
        return node

    def _written(self, kept: set[str], limit: float) -> Schema:
        self.kept, self.names, self.left = kept, {}, limit
        visited = self._visit(self._unfolded())
        made: Schema = visited if isinstance(visited, dict) else {"allOf": [visited]}  # a root may refer to `true`
        definitions: dict[str, Any] = {}
        while rest := [pointer for pointer in self.names if pointer not in definitions]:
            definitions |= {pointer: self._visit(self._target(pointer)) for pointer in rest}
        if definitions:
            made["$defs"] = {self.names[pointer]: schema for pointer, schema in definitions.items()}
        return made

    def _unfolded(self) -> Schema:
        """The root, or, where it is itself a reference, what it stands for: templates read its properties."""
        node = self.root
        while isinstance(node.get("$ref"), str) and isinstance(target := self._target(node["$ref"]), dict):
            rest = {key: value for key, value in node.items() if key != "$ref" and key not in LEFT_OUT}
            node = _joined(target, rest)
        return node

    def _visit(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return copy.deepcopy(node)
        self.left -= 1
        if self.left < 0:
            raise _TooLarge
        node = _modern({key: value for key, value in node.items() if key not in LEFT_OUT})
        pointer = node.get("$ref")
        if not isinstance(pointer, str):
            return _mapped(node, self._visit)
        rest = _mapped({key: value for key, value in node.items() if key != "$ref"}, self._visit)
        target = {"$ref": self._kept(pointer)} if pointer in self.kept else self._visit(self._target(pointer))
        return _joined(target, rest)

    def _kept(self, pointer: str) -> str:
        if pointer == "#":
            return pointer
        if pointer not in self.names:
            name = re.sub(r"[^A-Za-z0-9_.-]", "_", pointer.rsplit("/", 1)[1]) or "schema"
            taken = set(self.names.values())
            numbered = (name if number == 1 else f"{name}_{number}" for number in range(1, len(taken) + 2))
            self.names[pointer] = next(each for each in numbered if each not in taken)
        return f"#/$defs/{self.names[pointer]}"


def _modern_throughout(node: Any) -> Any:
    return _mapped(_modern(node), _modern_throughout) if isinstance(node, dict) else node


def _joined(target: Any, rest: Schema) -> Any:
    """A schema and what stands beside the reference to it. Both hold, so they merge only where neither can clash."""
    if not rest:
        return target
    if isinstance(target, dict) and set(rest) <= ANNOTATIONS:
        return {**target, **rest}
    return {**rest, "allOf": [target, *rest.get("allOf", [])]}


def _loops(links: Mapping[str, set[str]]) -> set[str]:
    """The pointers from which one comes back to them."""
    found = set()
    for start in links:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = links[todo.pop()] - seen
            seen |= new
            todo += new
        if start in seen:
            found.add(start)
    return found


# BFCL

Language = Literal["python", "java", "javascript"]

BFCL_TYPES = {
    **{name: name for name in ("string", "integer", "number", "boolean", "array", "object")},
    **dict.fromkeys(("dict", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("list", "tuple", "Array", "ArrayList", "Queue", "Stack"), "array"),
    **dict.fromkeys(("byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    "bool": "boolean",
}
"""BFCL's type names; every other is a string. Source: `GORILLA_TO_OPENAPI` of bfcl-eval 2026.3.23."""


def tools_from_bfcl(items: Iterable[Any], *, language: Language = "python") -> tuple[ToolSpec, ...]:
    """Tools of the Berkeley leaderboard, with its type names. Raises DataError.

    The names keep their dots; see `wire_name`. In the Java and JavaScript categories every argument is text in that
    language, and so it is here. Where this differs from bfcl-eval: `any` is left open, there it is a string; and
    types are converted at any depth, there in the shapes that its questions have.
    """
    return _distinct(_from_bfcl(_record(item, number), number, language) for number, item in enumerate(items, 1))


def _from_bfcl(record: Schema, number: int, language: Language) -> ToolSpec:
    body = _function(record, number)
    parameters = body.get("parameters")
    if isinstance(parameters, Mapping) and language != "python":
        properties = parameters.get("properties") or {}
        texts = {name: _as_text(node, language) for name, node in properties.items()}
        parameters = {**parameters, "properties": texts}
    converted = _from_bfcl_schema(dict(parameters)) if isinstance(parameters, Mapping) else parameters
    return _spec(body, converted, number)


def _from_bfcl_schema(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    made, kind = _mapped(node, _from_bfcl_schema), node.get("type")
    if not isinstance(kind, str):
        return made
    if kind.lower() == "any":
        del made["type"]
        return made
    made["type"] = BFCL_TYPES.get(kind, "string")
    if kind == "float":
        made |= {"format": "float", "description": f"{made.get('description') or ''} (a float)".strip()}
    return made


def _as_text(node: Schema, language: Language) -> Schema:
    """An argument in Java or JavaScript: written as text, and the description says of what type."""
    name = {"java": "Java", "javascript": "JavaScript"}[language]
    kind, note = node.get("type"), f"{name} of any type" if node.get("type") == "any" else f"{name} {node.get('type')}"
    if kind in ("Array", "ArrayList", "array") and isinstance(items := node.get("items"), Mapping):
        note += f", its elements {items.get('type')}"
    if kind == "dict" and node.get("properties"):
        note += f", its entries {json.dumps(node['properties'])}"
    kept = {key: value for key, value in node.items() if key not in ("items", "properties", "required")}
    return {**kept, "type": "string", "description": f"{node.get('description') or ''} ({note}, as text)".strip()}


def _speaks_bfcl(parameters: Any) -> bool:
    """Whether a schema uses a type name that is BFCL's and not JSON Schema's."""
    kinds: set[str] = set()

    def look(node: Schema) -> None:
        if isinstance(node.get("type"), str):
            kinds.add(node["type"])

    try:
        _each(parameters, look)
    except RecursionError:
        return False  # `normalise` says what is wrong with it
    return any(kind == "any" or BFCL_TYPES.get(kind, kind) != kind for kind in kinds)


# Python


PLAIN_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
ARRAYS = {
    "list",
    "List",
    "set",
    "Set",
    "frozenset",
    "FrozenSet",
    "Sequence",
    "Collection",
    "Iterable",
    "tuple",
    "Tuple",
}
OBJECTS = {"dict", "Dict", "Mapping", "MutableMapping", "DefaultDict", "OrderedDict"}
WRAPPERS = {"Annotated", "Required", "NotRequired", "ReadOnly", "Final"}


def tools_from_source(code: str, entry: str | None = None) -> tuple[ToolSpec, ...]:
    """The public methods of a class, read off its text, which is never run.

    `entry` names the class; without it, the one public class that has public methods. Arguments with a default are
    optional. An annotation that is not understood leaves its argument open. Raises DataError.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in generated code is not the reader's to mend
            tree = ast.parse(code)
        annotations = _Annotations(tree)
        methods = public_methods(_entry(tree, entry))
        return _distinct(tool_from_method(node, annotations=annotations) for node in methods)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last: nested beyond the parser
        raise DataError(f"the source cannot be read as Python: {error or type(error).__name__}.") from None


def _entry(tree: ast.Module, name: str | None) -> ast.ClassDef:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    chosen = [node for node in classes if node.name == name]
    if name is None:
        chosen = [node for node in classes if not node.name.startswith("_") and public_methods(node)]
    if len(chosen) != 1:
        asked = f"called {name!r}" if name else "with public methods"
        found = ", ".join(node.name for node in classes) or "none"
        raise DataError(f"the source must define one class {asked}, found {len(chosen)}. Its classes: {found}.")
    return chosen[0]


def public_methods(entry: ast.ClassDef) -> list[ast.FunctionDef]:
    """The methods that a class offers as tools; of two with one name the later, as in Python."""
    methods: dict[str, ast.FunctionDef] = {}
    for node in entry.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not _is_attribute(node):
            methods[node.name] = node
    return list(methods.values())


def _is_attribute(node: ast.FunctionDef) -> bool:
    names = {_last_name(decorator) for decorator in node.decorator_list}
    return bool(names & {"property", "cached_property", "getter", "setter", "deleter"})


def tool_from_method(
    node: ast.FunctionDef, *, effect: str = "state_change", annotations: _Annotations | None = None
) -> ToolSpec:
    """A tool from the text of a method: what its signature takes, by name, and nothing else.

    Without `annotations` only plain types are read, nothing of a default but that there is one, and of the docstring
    the first paragraph: the form in which our own packages are shown.
    """
    text = ast.get_docstring(node) or ""
    description, notes = _documentation(text) if annotations else (text.split("\n\n")[0], {})
    properties: Schema = {}
    required: list[str] = []
    for argument, default in _arguments(node):
        properties[argument.arg] = made = _plain(argument.annotation)
        if annotations:
            made = annotations.argument(argument.annotation, default)
            properties[argument.arg] = _described(made, notes.get(argument.arg))
        if default is None:
            required.append(argument.arg)
    parameters: Schema = {"type": "object", "properties": properties, "required": required}
    if node.args.kwarg is None or not annotations:
        parameters["additionalProperties"] = False
    return ToolSpec(name=node.name, description=description, parameters=parameters, effect=effect)


def _arguments(node: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """The arguments that a caller may name, each with its default."""
    positional = node.args.posonlyargs + node.args.args
    given: list[ast.expr | None] = [None] * (len(positional) - len(node.args.defaults))
    found = list(zip(positional, [*given, *node.args.defaults], strict=True))
    if "staticmethod" not in {_last_name(decorator) for decorator in node.decorator_list}:
        found = found[1:]  # self, or the class
    return found + list(zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True))


def _plain(annotation: ast.expr | None) -> Schema:
    """The schema of a plain annotation; anything else is left open."""
    text = ast.unparse(annotation) if annotation is not None else ""
    base = PLAIN_TYPES.get(text.split("[")[0])
    return {"type": base} if base else {}


def _last_name(node: ast.AST) -> str:
    """`Optional` of `typing.Optional`; empty for what is no name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class _Annotations:
    """Reads schemas off the text of annotations; knows the TypedDicts of the module they stand in."""

    def __init__(self, tree: ast.Module) -> None:
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.records: dict[str, ast.ClassDef] = {}
        for name, node in classes.items():  # in order: a base stands above what is derived from it
            if any(base == "TypedDict" or base in self.records for base in map(_last_name, node.bases)):
                self.records[name] = node
        self.open: list[str] = []
        """TypedDicts that are being read, so that one within itself comes to an end."""

    def argument(self, annotation: ast.expr | None, default: ast.expr | None) -> Schema:
        """The schema of an argument. A default that is plain data becomes `default`."""
        made = self.read(annotation)
        if default is None:
            return made
        try:
            value = json.loads(json.dumps(ast.literal_eval(default), allow_nan=False))
        except (ValueError, TypeError, SyntaxError, RecursionError):
            return made  # computed, or no JSON: optional all the same
        if value is None:  # `x: int = None` takes None, whatever its annotation says
            made = _either([made, {"type": "null"}])
        return {**made, "default": value}

    def read(self, node: ast.expr | None) -> Schema:
        """The schema of an annotation, open where it is not understood."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.read(ast.parse(node.value.strip(), mode="eval").body)
            except (SyntaxError, ValueError):
                return {}
        if isinstance(node, ast.Constant) and node.value is None:
            return {"type": "null"}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            return _either([self.read(node.left), self.read(node.right)])
        if isinstance(node, ast.Subscript):
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self._generic(_last_name(node.value), parts)
        return self._named(_last_name(node)) if node is not None else {}

    def _named(self, name: str) -> Schema:
        if name in self.records:
            return self._record(name)
        if name in ARRAYS or name in OBJECTS:
            return {"type": "array" if name in ARRAYS else "object"}
        return {"type": PLAIN_TYPES[name]} if name in PLAIN_TYPES else {}

    def _generic(self, name: str, parts: list[ast.expr]) -> Schema:
        if name == "Literal":
            return _choice(parts)
        if name == "Optional":
            return _either([*map(self.read, parts), {"type": "null"}])
        if name == "Union":
            return _either([self.read(part) for part in parts])
        if name in ("tuple", "Tuple") and not (isinstance(parts[-1], ast.Constant) and parts[-1].value is ...):
            items = [self.read(part) for part in parts]
            return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
        if name in WRAPPERS or name in ARRAYS:
            inner = self.read(parts[0])
            return inner if name in WRAPPERS else {"type": "array", **({"items": inner} if inner else {})}
        if name in OBJECTS:
            inner = self.read(parts[-1])
            return {"type": "object", **({"additionalProperties": inner} if inner else {})}
        return {}

    def _record(self, name: str) -> Schema:
        if name in self.open:
            return {"type": "object"}
        self.open.append(name)
        node = self.records[name]
        made: Schema = {"type": "object", "properties": {}, "required": []}
        for base in map(_last_name, node.bases):
            if base in self.records:
                parent = self._record(base)
                made["properties"] |= parent["properties"]
                made["required"] += parent["required"]
        total = not any(word.arg == "total" and ast.unparse(word.value) == "False" for word in node.keywords)
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                made["properties"][field.target.id] = self.read(field.annotation)
                wrapper = _last_name(field.annotation.value) if isinstance(field.annotation, ast.Subscript) else ""
                if wrapper == "Required" or (total and wrapper != "NotRequired"):
                    made["required"].append(field.target.id)
        self.open.pop()
        return made


def _choice(parts: list[ast.expr]) -> Schema:
    try:
        values = [ast.literal_eval(part) for part in parts]
    except (ValueError, TypeError, SyntaxError):
        return {}
    texts = all(isinstance(value, str) for value in values)
    return {"type": "string", "enum": values} if texts else {"enum": values}


def _either(schemas: list[Schema]) -> Schema:
    """The schema of a union: a list of types where that says it all, open where one of them is open."""
    flat = [part for schema in schemas for part in schema.get("anyOf", [schema])]
    if not all(flat):
        return {}
    if any(set(part) != {"type"} for part in flat):
        return {"anyOf": [part for place, part in enumerate(flat) if part not in flat[:place]]}
    kinds = [kind for part in flat for kind in (part["type"] if isinstance(part["type"], list) else [part["type"]])]
    distinct = list(dict.fromkeys(kinds))
    return {"type": distinct if len(distinct) > 1 else distinct[0]}


def _described(schema: Schema, note: str | None) -> Schema:
    return schema if not note or schema.get("description") else {**schema, "description": note}


def _documentation(text: str) -> tuple[str, dict[str, str]]:
    """A docstring without its section of arguments, and what it says of each.

    Only a section in Google's style is taken out; the parser does not tell where those of other styles stand.
    """
    text = inspect.cleandoc(text)
    try:
        parsed = parse_docstring(text)
    except ParseError:
        return text, {}
    names = (parameter.arg_name.lstrip("-* ").strip("`") for parameter in parsed.params)
    notes = {
        name: " ".join((parameter.description or "").split())
        for name, parameter in zip(names, parsed.params, strict=True)
    }
    return _without_arguments(text) if notes and parsed.style is DocstringStyle.GOOGLE else text, notes


def _without_arguments(text: str) -> str:
    kept: list[str] = []
    inside = False
    for line in text.split("\n"):
        if re.fullmatch(r"(Args|Arguments|Parameters|Params):\s*", line):
            inside = True
        elif inside and line[:1].strip():
            inside = False
        if not inside:
            kept.append(line)
    return "\n".join(kept).strip()


class _Untitled(GenerateJsonSchema):
    """Schemas without the titles that repeat a field's name; silent about a default that is no JSON."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 - a set in pydantic too

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Whether a field gets its name as title: never."""
        return False


def tool_from_callable(function: Callable[..., Any], *, effect: str = "state_change") -> ToolSpec:
    """A tool from a typed Python function or method: its schema by pydantic, its words from the docstring.

    Raises DataError for what a call by name cannot reach (`*args`, `**kwargs`, positional-only arguments) and for an
    annotation that has no JSON Schema.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not name.isidentifier():
        raise DataError(f"{_short(function)} is no named function. Give a function defined with def, or a method.")
    _refuse_unnamed(function, f"function {name!r}")
    target: Any = function
    try:
        schema = TypeAdapter(target).json_schema(schema_generator=_Untitled)
    except (PydanticUserError, PydanticUndefinedAnnotation, NameError, TypeError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"function {name!r}: its annotations have no JSON Schema: {reason} Use plain types.") from None
    description, notes = _documentation(function.__doc__ or "")
    properties = {
        argument: _described(_untitled(made, argument), notes.get(argument))
        for argument, made in schema.get("properties", {}).items()
        if argument != "self"
    }
    schema["properties"] = properties
    schema["required"] = [argument for argument in schema.get("required", []) if argument in properties]
    parameters = normalise(schema, where=f"function {name!r}")
    return ToolSpec(name=name, description=description, parameters=parameters, effect=effect)


def _untitled(schema: Schema, name: str) -> Schema:
    """Without the title that pydantic before 2.10 gives each argument whatever the generator says."""
    repeats = schema.get("title") == name.replace("_", " ").title().strip()
    return {key: value for key, value in schema.items() if key != "title" or not repeats}


def _refuse_unnamed(function: Callable[..., Any], where: str) -> None:
    try:
        arguments = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        raise DataError(
            f"{where} has no signature that can be read. Wrap it in a function with typed arguments."
        ) from None
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    for argument in arguments:
        if argument.kind not in named and argument.name != "self":
            raise DataError(f"{where}: {argument} cannot be given by name. Spell every argument out, with its type.")
