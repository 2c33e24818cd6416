"""Scenarios and packages: read without running, and errors that name file and line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator

from envace.errors import DataError
from envace.scenarios import EnvironmentSpec, Scenario, load_package, read_environment, read_scenarios
from envace.scenarios.packages import dump_line, write_scenarios

ENVIRONMENT = '''
class Shop:
    """A small shop.

    More about it.
    """

    RULES = ("Be kind.",)
    STATE = {"orders": {"key": "id", "record": {"type": "object"}}}
    LOOKUPS = {"show": "orders"}

    def __init__(self):
        self.orders = {}

    def show(self, id: str, verbose: bool = False, *, limit: int, tags: list[str] = ()):
        """Show an order.

        At length.
        """

    def change(self, id: str, value, note: str | None = None):
        """Change an order."""

    def _hidden(self):
        """Not a tool."""


raise RuntimeError("this file must never be run to be read")
'''

LINE = {"id": "a", "environment": "shop", "instruction": "please"}


def package(folder: Path, *lines: Any, code: str = ENVIRONMENT) -> Path:
    shop = folder / "shop"
    shop.mkdir()
    (shop / "environment.py").write_text(code)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (shop / "scenarios.jsonl").write_text("".join(text + "\n" for text in texts))
    return shop


def read(folder: Path, code: str) -> EnvironmentSpec:
    path = folder / "environment.py"
    path.write_text(code)
    return read_environment(path, name="shop")


def test_a_package_is_read_without_running_it(tmp_path: Path) -> None:
    loaded = load_package(package(tmp_path, LINE, "", {**LINE, "id": "b"}))
    assert (loaded.spec.id, loaded.spec.entry, loaded.spec.rules) == ("shop", "Shop", ("Be kind.",))
    assert [tool.name for tool in loaded.spec.tools] == ["show", "change"]
    assert [tool.effect for tool in loaded.spec.tools] == ["query", "state_change"]
    assert loaded.spec.tools[0].description == "Show an order."
    assert not loaded.spec.has_oracle
    assert [scenario.id for scenario in loaded.scenarios] == ["a", "b"]


def test_arguments_with_a_default_are_not_required(tmp_path: Path) -> None:
    show, change = read(tmp_path, ENVIRONMENT).tools
    assert show.parameters["required"] == ["id", "limit"]
    assert show.parameters["properties"] == {
        "id": {"type": "string"},
        "verbose": {"type": "boolean"},
        "limit": {"type": "integer"},
        "tags": {"type": "array"},
    }
    assert change.parameters["required"] == ["id", "value"]
    assert change.parameters["properties"] == {"id": {"type": "string"}, "value": {}, "note": {}}


@pytest.mark.parametrize(
    ("arguments", "valid"),
    [
        ({"id": "a", "limit": 1}, True),
        ({"id": "a", "limit": 1, "verbose": True, "tags": []}, True),
        ({"id": "a"}, False),
        ({"id": "a", "limit": "1"}, False),
        ({"id": "a", "limit": True}, False),
        ({"id": "a", "limit": 1, "more": 1}, False),
    ],
)
def test_tool_schemas_are_enforceable(tmp_path: Path, arguments: dict[str, Any], valid: bool) -> None:
    show = read(tmp_path, ENVIRONMENT).tools[0]
    assert Draft202012Validator(show.parameters).is_valid(arguments) is valid


def test_arguments_of_every_kind_are_seen(tmp_path: Path) -> None:
    spec = read(tmp_path, 'class Shop:\n    def show(self, id: str, /, more: int = 1):\n        """Show."""\n')
    assert spec.tools[0].parameters["properties"] == {"id": {"type": "string"}, "more": {"type": "integer"}}
    assert spec.tools[0].parameters["required"] == ["id"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "Invalid JSON"),
        ('"a text"', "the line: Input should be an object"),
        ({"id": "b", "environment": "shop"}, "instruction: Field required"),
        ({**LINE, "id": "b", "instructions": "x"}, "instructions: Extra inputs are not permitted"),
        ({**LINE, "id": "b", "expected": {"outcome": "maybe", "reply": "", "final_state": {}}}, "expected.outcome"),
        (LINE, "scenario id 'a' is used twice"),
    ],
)
def test_a_bad_scenario_names_its_file_and_line(tmp_path: Path, line: Any, message: str) -> None:
    shop = package(tmp_path, LINE, "", line)
    with pytest.raises(DataError, match=rf"{re.escape(str(shop / 'scenarios.jsonl'))}:3: .*{re.escape(message)}"):
        load_package(shop)


def test_a_scenario_of_another_environment_is_named(tmp_path: Path) -> None:
    shop = package(tmp_path, {**LINE, "environment": "bank"})
    with pytest.raises(DataError, match=r"scenarios\.jsonl.*'a' names environment 'bank', the package is 'shop'"):
        load_package(shop)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a folder"):
        load_package(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty/environment\.py"):
        load_package(tmp_path / "empty")
    (tmp_path / "empty" / "environment.py").write_text(ENVIRONMENT)
    with pytest.raises(DataError, match=r"empty/scenarios\.jsonl"):
        load_package(tmp_path / "empty")


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"environment\.py: .*line 2"):
        read(tmp_path, "class Shop:\n    def show(self:\n")


TOOL = '    def show(self, id: str):\n        """Show."""\n'


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", "exactly one public class; found: none"),
        ("class A:\n    pass\nclass B:\n    pass\n", "exactly one public class; found: A, B"),
        ("class Shop:\n    pass\n", "no public method"),
        ("class Shop:\n    STATE = dict()\n" + TOOL, r":2: STATE must be a literal; it is read, not run"),
        ("class Shop:\n    STATE: dict = {'a': open('x')}\n" + TOOL, r":2: STATE must be a literal"),
        ("class Shop:\n    STATE = {'a': {'key': 'id'}}\n" + TOOL, r'STATE\["a"\] needs "key" and "record"'),
        ("class Shop:\n    LOOKUPS = {'show': 'orders'}\n" + TOOL, r'LOOKUPS\["show"\] = "orders" must name'),
        ("class Shop:\n    LOOKUPS = {'shows': 'orders'}\n" + TOOL, r'LOOKUPS\["shows"\]'),
        # Literals of a wrong kind.
        ("class Shop:\n    STATE = 3\n" + TOOL, "STATE"),
        ("class Shop:\n    LOOKUPS = ['show']\n" + TOOL, "LOOKUPS"),
        ("class Shop:\n    STATE = {[]: 1}\n" + TOOL, "STATE"),
    ],
)
def test_a_bad_environment_is_a_data_error_that_names_the_file(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"environment\.py.*{message}"):
        read(tmp_path, code)


def test_private_classes_and_functions_beside_the_environment_are_allowed(tmp_path: Path) -> None:
    spec = read(tmp_path, "class _Helper:\n    pass\n\nclass Shop:\n" + TOOL + "\ndef solve(call, goal):\n    pass\n")
    assert spec.entry == "Shop"
    assert spec.has_oracle


def test_a_public_scenario_has_neither_state_nor_expected(cancel_task: Callable[..., Scenario]) -> None:
    scenario = cancel_task()
    public = scenario.public()
    assert (public.state, public.expected, public.feasible) == (None, None, None)
    assert (public.id, public.instruction, public.goal) == (scenario.id, scenario.instruction, scenario.goal)
    secrets = ("CU222222", "lamp", "customers", "refund")
    assert not any(secret in public.model_dump_json() for secret in secrets)
    assert scenario.state is not None  # the original keeps its own


def test_feasible_is_what_is_expected(cancel_task: Callable[..., Scenario]) -> None:
    assert cancel_task("pending").feasible is True
    assert cancel_task("shipped").feasible is False


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 🙂", 'a\nb\t"c"\\', "a\u2028b", "a\x85b", "a\x0cb", "\x00"])
def test_scenarios_round_trip_whatever_their_text(
    tmp_path: Path, cancel_task: Callable[..., Scenario], text: str
) -> None:
    scenarios = [cancel_task().model_copy(update={"instruction": text}), cancel_task("shipped")]
    write_scenarios(tmp_path / "scenarios.jsonl", scenarios)
    assert list(read_scenarios(tmp_path / "scenarios.jsonl")) == scenarios


def test_tool_results_are_one_compact_line() -> None:
    assert dump_line({"a": [1, "é\n"], "b": None}) == '{"a":[1,"é\\n"],"b":null}'
