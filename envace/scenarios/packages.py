"""Environment packages: a folder with `environment.py` (one class) and `scenarios.jsonl` (one scenario a line).

The class is read with `ast`, never executed here: its tools, rules and tables are what the text says. It runs only in
the worker process.

    class Shop:
        \"\"\"One line of introduction.\"\"\"
        RULES = ("Only a pending order can be cancelled.",)
        STATE = {"orders": {"key": "order_id", "record": {... JSON Schema of one record ...}}}
        LOOKUPS = {"get_order": "orders"}          # tools that only read -> the table whose records they return

        def get_order(self, order_id: str) -> dict:
            \"\"\"Show an order.\"\"\"

    def solve(call, goal, slip=lambda name: False): ...       # optional: the oracle program
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from envace.errors import DataError
from envace.scenarios.schema import Scenario
from envace.scenarios.tools import public_methods, tool_from_method
from envace.types import Author, Message, ToolSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvironmentSpec:
    """An environment as data (the `envpkg/1` shape): what it is, its tools, and its code as text."""

    id: str
    entry: str
    """Name of the class in `code`."""
    introduction: str
    rules: tuple[str, ...]
    tables: dict[str, Any]
    """Table name -> `key` (field that identifies a record) and `record` (JSON Schema)."""
    lookups: dict[str, str]
    """Tool that only reads -> table whose full records it returns."""
    tools: tuple[ToolSpec, ...]
    code: str
    has_oracle: bool
    """Whether the code defines `solve`."""
    examples: tuple[Message, ...] = ()
    """Worked conversations that every prompt shows before its own instruction."""

    def definition(self) -> dict[str, Any]:
        """What the worker process needs to run it."""
        return {
            "environment": self.id,
            "code": self.code,
            "entry": self.entry,
            "tables": self.tables,
            "lookups": self.lookups,
            "tools": [tool.name for tool in self.tools],
        }

    def reads(self, name: str) -> bool:
        """Whether a tool only looks up; of an unknown one nothing is presumed."""
        tool = self.tool(name)
        return tool is not None and tool.effect == "query"

    def tool(self, name: str) -> ToolSpec | None:
        """The tool of that name, if there is one."""
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Package:
    """An environment and its scenarios."""

    spec: EnvironmentSpec
    scenarios: tuple[Scenario, ...]


def load_package(folder: Path) -> Package:
    """Load a package folder. Raises DataError naming file, line and remedy."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. An environment package holds environment.py and scenarios.jsonl.")
    folder = folder.resolve()
    spec = read_environment(folder / "environment.py", name=folder.name)
    read = read_scenarios(folder / "scenarios.jsonl")
    scenarios = tuple(s if s.environment else s.model_copy(update={"environment": spec.id}) for s in read)
    for scenario in scenarios:
        if scenario.environment != spec.id:
            raise DataError(
                f"{folder}/scenarios.jsonl: scenario {scenario.id!r} names environment {scenario.environment!r}, "
                f"the package is {spec.id!r}. Leave `environment` out: it is the folder's name."
            )
    return Package(spec=spec, scenarios=scenarios)


def read_scenarios(path: Path) -> Iterator[Scenario]:
    """Read scenarios, one JSON object a line. Raises DataError with the line number."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON text may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            scenario = Scenario.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise DataError(f"{path}:{number}: {where}: {first['msg']}.") from None
        if scenario.id in seen:
            raise DataError(f"{path}:{number}: scenario id {scenario.id!r} is used twice.")
        seen.add(scenario.id)
        yield scenario


def write_scenarios(path: Path, scenarios: list[Scenario]) -> None:
    """Write scenarios, one JSON object a line."""
    path.write_text("".join(scenario.model_dump_json() + "\n" for scenario in scenarios), encoding="utf-8")


def read_environment(path: Path, *, name: str) -> EnvironmentSpec:
    """Read an environment class from its source text, without running it. Raises DataError."""
    try:
        code = path.read_text(encoding="utf-8")
        tree = ast.parse(code)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    if len(classes) != 1:
        found = ", ".join(node.name for node in classes) or "none"
        raise DataError(f"{path} must define exactly one public class; found: {found}.")
    entry = classes[0]
    tables, lookups = _literal(path, entry, "STATE", {}), _literal(path, entry, "LOOKUPS", {})
    tools = tuple(
        tool_from_method(node, effect="query" if node.name in lookups else "state_change")
        for node in public_methods(entry)
    )
    _check_names(path, tables, lookups, tools)
    return EnvironmentSpec(
        id=name,
        entry=entry.name,
        introduction=ast.get_docstring(entry) or "",
        rules=tuple(_literal(path, entry, "RULES", ())),
        tables=tables,
        lookups=lookups,
        tools=tools,
        code=code,
        has_oracle=any(isinstance(node, ast.FunctionDef) and node.name == "solve" for node in tree.body),
    )


def _check_names(path: Path, tables: dict[str, Any], lookups: dict[str, str], tools: tuple[ToolSpec, ...]) -> None:
    names = {tool.name for tool in tools}
    if not names:
        raise DataError(f"{path}: the class has no public method, so it offers no tool.")
    for table, description in tables.items():
        if not isinstance(description, dict) or {"key", "record"} - set(description):
            raise DataError(f'{path}: STATE["{table}"] needs "key" and "record" (a JSON Schema).')
    for tool, table in lookups.items():
        if tool not in names or table not in tables:
            raise DataError(f'{path}: LOOKUPS["{tool}"] = "{table}" must name a method and a table of STATE.')


def _literal(path: Path, entry: ast.ClassDef, name: str, default: Any) -> Any:
    for node in entry.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                value = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            except (ValueError, TypeError):
                raise DataError(f"{path}:{node.lineno}: {name} must be a literal; it is read, not run.") from None
            if not isinstance(value, type(default) if isinstance(default, dict) else (tuple, list)):
                kind = "a mapping" if isinstance(default, dict) else "a tuple of sentences"
                raise DataError(f"{path}:{node.lineno}: {name} must be {kind}, not a {type(value).__name__}.")
            return value
    return default


def opening(spec: EnvironmentSpec, scenario: Scenario) -> list[Message]:
    """The messages before the first acting step: what the environment is and demands, examples, the instruction."""
    rules = "\n".join(f"- {rule}" for rule in spec.rules)
    parts = (spec.introduction, rules and f"Rules:\n{rules}", scenario.system)
    system = "\n\n".join(part for part in parts if part)
    said = Message(author=Author.USER, content=scenario.instruction)
    told = [Message(author=Author.SYSTEM, content=system)] if system else []
    return [*told, *spec.examples, said]


def dump_line(value: Any) -> str:
    """One compact JSON line, as tool results are shown to a policy; what UTF-8 cannot write is escaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text if text.isprintable() or _writable(text) else json.dumps(value, separators=(",", ":"))


def _writable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
