"""Data sets without an environment: every form is read, nothing is dropped without a reason, rows round-trip."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envace.errors import DataError
from envace.scenarios.conversations import read_messages
from envace.scenarios.datasets import Dataset, Reason, load_dataset, write_rows
from envace.types import Author

CM2 = Path(__file__).parents[1] / "data" / "cm2_row.json"


@pytest.fixture
def row() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(CM2.read_text(encoding="utf-8"))[0]
    return value


Load = Callable[..., Dataset]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads rows out of a file."""

    def build(*rows: Any, **options: Any) -> Dataset:
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(list(rows)), encoding="utf-8")
        return load_dataset(path, **options)

    return build


def verl(row: dict[str, Any]) -> dict[str, Any]:
    """The row as CM2's conversion for verl writes it."""
    keywords = {"name": "checklist", "checklist_list": row["checklists"]}
    extra = {
        "messages": row["messages"],
        "tools": json.dumps(row["tools"]),
        "interaction_kwargs": keywords,
        "need_tools_kwargs": False,
        "original_index": row["uuid"],
    }
    first = [{"role": "user", "content": row["messages"][0]["content"]}]
    return {"messages": first, "data_source": "nvidia_nemotron_checklist", "extra_info": extra}


def test_the_published_row_becomes_a_scenario() -> None:
    dataset = load_dataset(CM2)
    assert (dataset.rows, dataset.dropped, dataset.mended) == (1, [], {})
    (scenario,) = dataset.scenarios
    spec = dataset.specs[scenario.id]
    assert scenario.id == scenario.environment == spec.id == "fbf37337-8d84-4c39-82b2-b8c3a16d1b83"
    assert scenario.instruction.startswith("Hey there! I've been meaning")
    assert [turn[:12] for turn in scenario.turns] == ["I'm not sure", "Let me help "]
    assert scenario.system == ""
    assert [tool.name for tool in spec.tools] == ["get_the_last_games_of_a_football_team"]
    assert (spec.code, spec.has_oracle, spec.lookups) == ("", False, {})
    assert scenario.checklist is not None
    assert scenario.checklist.turns == 3


def test_reasoning_is_set_apart_in_the_reference() -> None:
    (scenario,) = load_dataset(CM2).scenarios
    said = scenario.reference
    assert "<think>" not in json.dumps(said)
    assert said[1]["reasoning_content"].startswith("Okay, the user wants to know how")
    assert said[1]["content"] == ""
    assert said[3]["content"].startswith("It looks like there was an issue")
    messages = read_messages(said)
    assert [m.author for m in messages].count(Author.USER) == 3
    assert messages[1].calls[0].arguments == {"teamid": "Washington Huskies"}


def test_p10_empty_lists_of_calls_are_no_key(load: Load, row: dict[str, Any]) -> None:
    (scenario,) = load(row).scenarios
    assert [list(m) for m in scenario.reference if m["role"] == "user"] == [["role", "content"]] * 3
    assert all(message.get("tool_calls", ["one"]) for message in scenario.reference)
    # A tool's answer is linked to its call, although the row does not say which it answers.
    assert scenario.reference[2]["tool_call_id"] == scenario.reference[1]["tool_calls"][0]["id"]


def test_p10_empty_tools_are_no_tools(load: Load, row: dict[str, Any]) -> None:
    for tools in ([], None, "[]", ""):
        (dropped,) = load({**row, "tools": tools}).dropped
        assert dropped.reason is Reason.NO_TOOLS


def test_s3_a_tool_without_a_schema_is_mended_and_counted(load: Load, row: dict[str, Any]) -> None:
    for parameters in (None, {}, {"type": "object"}, {"properties": {}}, {"type": "object", "required": None}):
        tool = {"type": "function", "function": {"name": "ping", "description": "", "parameters": parameters}}
        dataset = load({**row, "tools": [tool]})
        assert dataset.dropped == []
        assert list(dataset.mended) == [row["uuid"]]
        assert dataset.specs[row["uuid"]].tools[0].parameters == {"type": "object", "properties": {}}


def test_the_form_for_verl_is_the_same_scenario(load: Load, row: dict[str, Any]) -> None:
    published, converted = load(row), load(verl(row))
    assert converted.scenarios == published.scenarios
    assert converted.specs[row["uuid"]].tools == published.specs[row["uuid"]].tools


def changed(row: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    made = copy.deepcopy(row)
    change(made)
    return made


@pytest.mark.parametrize(
    ("change", "reason", "said"),
    [
        (lambda r: r.update(tools=[{"type": "function", "function": {}}]), Reason.INVALID_SCHEMA, "no name"),
        (lambda r: r["tools"][0]["function"]["parameters"].update(type="array"), Reason.INVALID_SCHEMA, "object"),
        (lambda r: r.update(tools=r["tools"] * 2), Reason.INVALID_SCHEMA, "used twice"),
        (lambda r: r.update(tools="{not json"), Reason.INVALID_SCHEMA, "no JSON"),
        (lambda r: r.update(messages=[]), Reason.NO_MESSAGES, "messages"),
        (lambda r: r["messages"][0].update(role="robot"), Reason.BAD_MESSAGE, "'robot'"),
        (lambda r: r["messages"][0].update(content=[{"type": "image"}]), Reason.BAD_MESSAGE, "no text"),
        (lambda r: r["messages"][0].update(content=" "), Reason.BAD_MESSAGE, "empty"),
        (lambda r: r["messages"][3].update(content="<think> for ever"), Reason.BAD_MESSAGE, "never closed"),
        (
            lambda r: r["messages"][1]["tool_calls"][0]["function"].update(arguments="[1]"),
            Reason.BAD_MESSAGE,
            "not an object",
        ),
        (lambda r: r["messages"].pop(0), Reason.BAD_ROLES, "begin with a user"),
        (lambda r: r["messages"].pop(2), Reason.BAD_ROLES, "no answer"),
        (lambda r: r["messages"].insert(5, {"role": "tool", "content": "{}"}), Reason.BAD_ROLES, "answers no call"),
        (lambda r: r["messages"].insert(1, {"role": "user", "content": "and"}), Reason.BAD_ROLES, "without a reply"),
        (lambda r: r["messages"].insert(2, {"role": "system", "content": "x"}), Reason.BAD_ROLES, "beginning"),
        (lambda r: r.pop("checklists"), Reason.NO_CHECKLIST, "no checklist"),
        (lambda r: r.update(checklists=[]), Reason.INVALID_CHECKLIST, "empty"),
        (lambda r: r["checklists"][0][0][0].update(weight=3), Reason.INVALID_CHECKLIST, "weights sum to"),
        (lambda r: r["checklists"][0].pop(), Reason.TURNS, "2 turns, the user of 3"),
    ],
)
def test_a_row_is_dropped_for_a_typed_reason(
    load: Load, row: dict[str, Any], change: Callable[[dict[str, Any]], Any], reason: Reason, said: str
) -> None:
    dataset = load(changed(row, change), row)
    assert [scenario.id for scenario in dataset.scenarios] == [row["uuid"]]  # the good row beside it is kept
    (dropped,) = dataset.dropped
    assert (dropped.row, dropped.reason) == (0, reason)
    assert said in dropped.detail


def test_rows_are_never_lost_silently(load: Load, row: dict[str, Any]) -> None:
    dataset = load(row, row, 7, None, {"uuid": "x"}, {**row, "uuid": None})
    assert dataset.rows == 6
    assert [d.reason for d in dataset.dropped] == [
        Reason.DUPLICATE, Reason.UNREADABLE, Reason.UNREADABLE, Reason.NO_TOOLS,
    ]  # fmt: skip
    assert [scenario.id for scenario in dataset.scenarios] == [row["uuid"], "row-5"]


def test_rows_without_a_checklist_may_be_asked_for(load: Load, row: dict[str, Any]) -> None:
    row.pop("checklists")
    (scenario,) = load(row, require_checklist=False).scenarios
    assert scenario.checklist is None


def test_weights_may_be_normalised(load: Load, row: dict[str, Any]) -> None:
    row["checklists"][0][0][0]["weight"] = 0.5  # the turn now sums to 1.25
    (scenario,) = load(row, normalise=True).scenarios
    assert scenario.checklist is not None
    assert scenario.checklist.variants[0][0][0].weight == pytest.approx(0.4)


def test_a_line_that_is_no_json_is_one_dropped_row(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{json.dumps(row)}\n{{"uuid": \n\n[]\n', encoding="utf-8")
    dataset = load_dataset(path)
    assert len(dataset.scenarios) == 1
    assert [(d.row, d.reason) for d in dataset.dropped] == [(1, Reason.UNREADABLE), (2, Reason.UNREADABLE)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_our_own_form_round_trips_exactly(tmp_path: Path, load: Load, row: dict[str, Any], suffix: str) -> None:
    other = copy.deepcopy(row)
    other.update(uuid="other", messages=[{"role": "system", "content": "Be kind. Ünï\u2028code"}, *row["messages"]])
    other["tools"] = json.loads(json.dumps(row["tools"]))
    other["tools"][0]["function"]["parameters"]["properties"] = {
        "teamid": {"type": ["string", "null"], "default": None}
    }
    other["tools"][0]["effect"] = "query"
    check = {"call": "get_the_last_games_of_a_football_team", "arguments": {"a": None, "b": [1, {"c": 2.5}]}}
    other["checklists"][0][0][0]["check"] = check
    dataset = load(row, other)
    assert dataset.dropped == []
    path = tmp_path / f"out{suffix}"
    write_rows(path, dataset)
    again = load_dataset(path)
    assert again.dropped == []
    assert again.scenarios == dataset.scenarios
    assert [again.specs[s.id].tools for s in again.scenarios] == [dataset.specs[s.id].tools for s in dataset.scenarios]
    assert again.specs["other"].tools[0].effect == "query"
    write_rows(tmp_path / f"twice{suffix}", again)
    if suffix == ".jsonl":
        assert (tmp_path / "twice.jsonl").read_bytes() == path.read_bytes()


def test_published_rows_in_parquet_lose_the_nulls_that_arrow_adds(tmp_path: Path, row: dict[str, Any]) -> None:
    other = {**copy.deepcopy(row), "uuid": "other"}
    tool = {
        "name": "other_tool",
        "description": "",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
    other["tools"] = [{"type": "function", "function": tool}]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, other]), path)
    dataset = load_dataset(path)
    assert dataset.dropped == []
    # In Arrow both schemas have the properties of both tools, those of the other being null.
    assert list(dataset.specs["other"].tools[0].parameters["properties"]) == ["n"]
    assert list(dataset.specs[row["uuid"]].tools[0].parameters["properties"]) == ["teamid"]
    assert dataset.scenarios[0].checklist == load_dataset(CM2).scenarios[0].checklist
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([verl(row)]), path)
    assert load_dataset(path).scenarios == load_dataset(CM2).scenarios


def test_a_source_that_cannot_be_read_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe")
    for name in ("bad.json", "bad.parquet", "bytes.jsonl", "missing.json", "data.csv"):
        with pytest.raises(DataError, match=name):
            load_dataset(tmp_path / name)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        load_dataset(tmp_path / "empty")


def test_a_folder_is_all_of_its_files(tmp_path: Path, row: dict[str, Any]) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "uuid": name}), encoding="utf-8")
    (tmp_path / "README.md").write_text("not data", encoding="utf-8")
    assert [scenario.id for scenario in load_dataset(tmp_path).scenarios] == ["a", "b"]


def test_the_hub_gives_the_files_of_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["README.md", "data/train-00000-of-00001.json", "data/test-00000-of-00001.json"]
    monkeypatch.setenv("HTTPS_PROXY", "http://nobody")  # the question whether the hub answers is left out
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, repo_type: files)
    asked: list[str] = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda name, file, repo_type: (asked.append(file), str(CM2))[1]
    )
    assert len(load_dataset("hub:namezz/checklist/test").scenarios) == 1
    assert asked == ["data/test-00000-of-00001.json"]
    with pytest.raises(DataError, match="no data file of split 'dev'"):
        load_dataset("hub:namezz/checklist/dev")
    with pytest.raises(DataError, match="OWNER/NAME"):
        load_dataset("hub:namezz")


def test_a_hub_that_cannot_be_reached_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, name: str, repo_type: str) -> list[str]:
        raise ConnectionError("no network")

    monkeypatch.setenv("HTTPS_PROXY", "http://nobody")
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", refuse)
    with pytest.raises(DataError, match="cannot read hub:namezz/checklist: ConnectionError: no network"):
        load_dataset("hub:namezz/checklist")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a value but the root."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*path, key)
        yield from places(inner, (*path, key))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_row_with_anything_anywhere_is_kept_or_dropped(tmp_path: Path, data: st.DataObject) -> None:
    row = json.loads(CM2.read_text(encoding="utf-8"))[0]
    (scenario,) = load_dataset(CM2).scenarios
    own = {**json.loads(scenario.model_dump_json()), "tools": row["tools"]}
    made = data.draw(st.sampled_from([row, verl(row), own]))
    *path, last = data.draw(st.sampled_from(list(places(made))))
    node = made
    for key in path:
        node = node[key]
    node[last] = data.draw(JSON)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(made), encoding="utf-8")
    dataset = load_dataset(file)
    assert dataset.rows == 1
    if dataset.scenarios:
        write_rows(tmp_path / "again.jsonl", dataset)
        assert load_dataset(tmp_path / "again.jsonl").scenarios == dataset.scenarios


@pytest.mark.parametrize(
    ("name", "effect", "reads"),
    [
        ("get_order", None, True),
        ("search", None, True),
        ("listOrders", None, True),
        ("getaway_booking", None, False),
        ("check_out", None, False),
        ("find_and_delete", None, False),
        ("getAndReset", None, False),
        ("get_order", "state_change", False),
        ("cancel_order", "query", True),
    ],
)
def test_what_a_tool_does_is_told_by_the_row_or_guessed_from_its_name(
    tmp_path: Path, name: str, effect: str | None, reads: bool
) -> None:
    tool = {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}
    row = {"id": "a", "instruction": "hello", "tools": [{**tool, **({"effect": effect} if effect else {})}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    [spec] = load_dataset(tmp_path / "rows.jsonl", require_checklist=False).specs.values()
    assert spec.reads(name) == reads


def test_a_check_of_a_tool_that_is_not_there_is_told_with_the_nearest(load: Load, row: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(row))
    changed["checklists"][0][0][0]["check"] = {"call": "get_the_last_game_of_a_football_team"}
    (dropped,) = load(changed).dropped
    assert dropped.reason is Reason.INVALID_CHECKLIST
    assert "Did you mean get_the_last_games_of_a_football_team?" in dropped.detail
