"""Checklists: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from envace.errors import DataError
from envace.scenarios import Scenario
from envace.scenarios.checklist import Checklist, Focus, deciding_order, read_checklist

ROW = json.loads((Path(__file__).parents[1] / "data" / "cm2_row.json").read_text(encoding="utf-8"))[0]


def item(id: str = "C0", weight: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {"id": id, "question": "Is it so?", "focus_on": "assistant.tool_calls", "weight": weight, **fields}


def test_the_published_row_is_read_with_every_field() -> None:
    checklist = read_checklist(ROW["checklists"])
    assert (len(checklist.variants), checklist.turns) == (1, 3)
    assert [len(turn) for turn in checklist.variants[0]] == [6, 4, 4]
    dumped = [[[{k: v for k, v in one.items() if k != "check"} for one in turn] for turn in variant]
              for variant in checklist.model_dump(mode="json")]  # fmt: skip
    assert dumped == ROW["checklists"]
    first = checklist.variants[0][0][0]
    assert first.focus_on is Focus.CALLS
    assert first.evidence[0].source == "assistant.tool_calls"


def test_it_round_trips_through_json() -> None:
    checklist = read_checklist(ROW["checklists"])
    assert Checklist.model_validate_json(checklist.model_dump_json()) == checklist
    assert read_checklist(checklist.model_dump_json()) == checklist


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "empty"),
        ([[]], "variant 0 has no turn"),
        ([[[]]], "variant 0, turn 0: it has no item"),
        ([[[item()], []]], "variant 0, turn 1: it has no item"),
        ([[[item()]], [[item()], [item()]]], "different numbers of turns"),
        ([[[item(weight=0.5), item(weight=0.5)]]], "'C0' is used 2 times"),
        ([[[item(weight=0.4)]]], "the weights sum to 0.4"),
        ([[[item(weight=-1.0)]]], "greater than or equal to 0"),
        ([[[item(weight=float("nan"))]]], "finite"),
        ([[[item(dependence=["C9"])]]], "depends on 'C9'"),
        ([[[item("A", 0.5, dependence=["B"]), item("B", 0.5, dependence=["A"])]]], "circle"),
        ([[[item(dependence=["C0"])]]], "circle"),
        ([[[item(focus_on="assistant.mood")]]], "assistant.tool_calls"),
        ([[[{"id": "C0", "weight": 1.0}]]], "`question` and `focus_on`"),
        ([[["C0"]]], "variant 0, turn 0, item 0"),
        ({"a": 1}, "a list was expected"),
        (7, "a list was expected"),
        ("[[[", "no JSON"),
    ],
)
def test_a_faulty_checklist_is_refused_in_words(value: Any, said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        read_checklist(value)


def test_j4_a_checklist_that_doing_nothing_passes_is_refused() -> None:
    for value in ([], [[]], [[[]]], [[[item(check={"no_call": "*"})]]]):
        with pytest.raises(DataError):
            read_checklist(value)
    with pytest.raises(DataError, match="doing nothing would pass"):
        read_checklist([[[item("A", 1.0, check={"no_call": "x"}), item("B", 0.0)]]])
    read_checklist([[[item("A", 0.5, check={"no_call": "x"}), item("B", 0.5)]]])


def test_weights_are_scaled_only_when_asked() -> None:
    value = [[[item("A", 3), item("B", 1)]]]
    checklist = read_checklist(value, normalise=True)
    assert [one.weight for one in checklist.variants[0][0]] == [0.75, 0.25]
    read_checklist(
        [[[item("A", 0.3333), item("B", 0.3333), item("C", 0.3333)]]]
    )  # rounded labels are 1 to a thousandth


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({}, "exactly one of"),
        ({"call": "a", "no_call": "b"}, "exactly one of"),
        ({"reply_contains": " "}, "is empty"),
        ({"reply_contains": "a", "arguments": {"x": 1}}, "belong to `call`"),
        ({"reply_matches": "(a"}, "no pattern"),
        ({"reply_matches": "a" * 201}, "at most 200"),
        ({"reply_matches": "((a{1000}){1000}){1000}"}, "repeats more than"),  # compiling it would take gigabytes
        ({"reply_matches": "(?:a{99}){99}"}, "repeats more than"),
        ({"reply_matches": "a{e<=3}"}, "counts nothing"),
        ({"rings": "a bell"}, "rings"),
    ],
)
def test_a_faulty_check_is_refused_in_words(check: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        read_checklist([[[item(check=check)]]])


def test_a_key_that_cm2_lacks_is_kept_and_a_null_is_none() -> None:
    (only,) = read_checklist([[[item(level="hard", check=None, evidence=None, extra_info={"price_usd": 1})]]]).root[0][
        0
    ]
    assert only.extra_info == {"price_usd": 1, "level": "hard"}
    assert only.check is None
    assert only.evidence == ()


def test_items_are_decided_after_what_they_depend_on() -> None:
    items = read_checklist([[[item("A", 0.5, dependence=["B"]), item("B", 0.25), item("C", 0.25, dependence=["A"])]]])
    order = [one.id for one in deciding_order(items.variants[0][0])]
    assert order.index("B") < order.index("A") < order.index("C")


def test_a_scenario_has_as_many_turns_as_its_checklist() -> None:
    scenario = Scenario(id="a", instruction="go", turns=("on",), checklist=read_checklist([[[item()], [item()]]]))
    assert Scenario.model_validate_json(scenario.model_dump_json()) == scenario
    with pytest.raises(ValidationError, match="the checklist speaks of 1 turns, the user of 2"):
        Scenario(id="a", instruction="go", turns=("on",), checklist=read_checklist([[[item()]]]))
