"""Rewards of checklists: weights, dependence, turns that were not reached, and verdicts that nobody could give."""

from __future__ import annotations

from typing import Any

import pytest

from envace.rewards.checklists import (
    Decision,
    checklist_reward,
    decided_without_judge,
    may_go_on,
    resolve,
    turn_score,
    turns_of,
    within,
)
from envace.scenarios.checklist import Checklist, Item, read_checklist
from envace.types import Author, Message, ToolCall, Verdict

PASS, FAIL, LOST = Verdict.PASS, Verdict.FAIL, Verdict.UNAVAILABLE
CALL = ToolCall(name="get_order", arguments={"id": "#W1", "deep": {"a": 1, "b": [1, 2]}, "flag": True})


def items(*given: dict[str, Any]) -> tuple[Item, ...]:
    whole = [{"question": "?", "focus_on": "assistant.tool_calls", **one} for one in given]
    return read_checklist([[whole]], normalise=True).variants[0][0]


def said(content: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(author=Author.ASSISTANT, content=content, calls=calls, reasoning=reasoning)


def user(content: str) -> Message:
    return Message(author=Author.USER, content=content)


def tool(content: str) -> Message:
    return Message(author=Author.TOOL, content=content, name="get_order")


TURN = [said("", CALL), tool('{"status": "Pending"}'), said("It is pending, refund 12.")]


def test_a_users_message_begins_a_turn() -> None:
    more = [user("and?"), said("That is all.")]
    assert turns_of([*TURN, *more]) == [TURN, more]
    assert turns_of([]) == [[]]


# --- score ---------------------------------------------------------------------------------------------------------


def test_the_score_is_the_weight_that_passed() -> None:
    turn = items({"id": "A", "weight": 0.5}, {"id": "B", "weight": 0.3}, {"id": "C", "weight": 0.2})
    assert turn_score(turn, {"A": PASS, "B": FAIL, "C": PASS}) == pytest.approx(0.7)
    assert turn_score(turn, dict.fromkeys("ABC", PASS)) == 1.0
    assert turn_score(turn, dict.fromkeys("ABC", FAIL)) == 0.0


def test_j2_an_item_without_a_verdict_is_no_zero() -> None:
    turn = items({"id": "A", "weight": 0.5}, {"id": "B", "weight": 0.5}, {"id": "C", "weight": 0.0})
    assert turn_score(turn, {"A": PASS, "B": LOST, "C": PASS}) is None
    assert turn_score(turn, {"A": PASS, "C": PASS}) is None  # missing altogether
    assert turn_score(turn, {"A": PASS, "B": FAIL, "C": LOST}) == 0.5  # an item without a weight does not matter


def of(verdicts: dict[str, Verdict], *, variant: int = 0, turn: int = 0) -> list[dict[str, Any]]:
    return [{"variant": variant, "turn": turn, "id": name, "verdict": v.value} for name, v in verdicts.items()]


def two_turns(variants: int = 1) -> Checklist:
    one = [{"id": "A", "question": "?", "focus_on": "tool.content", "weight": 1.0}]
    return read_checklist([[one, one]] * variants)


def test_a_turn_that_was_not_reached_counts_zero() -> None:
    checklist = two_turns()
    assert checklist_reward(checklist, of({"A": PASS}), reached=1) == 0.5
    assert checklist_reward(checklist, [*of({"A": PASS}), *of({"A": PASS}, turn=1)], reached=2) == 1.0


def test_variants_are_averaged() -> None:
    records = [
        *of({"A": PASS}), *of({"A": PASS}, turn=1),
        *of({"A": FAIL}, variant=1), *of({"A": PASS}, variant=1, turn=1),
    ]  # fmt: skip
    assert checklist_reward(two_turns(2), records, reached=2) == 0.75  # (1 + 1 + 0 + 1) / 4


def test_j2_a_reward_with_an_undecided_item_is_none() -> None:
    records = [*of({"A": PASS}), *of({"A": LOST}, turn=1)]
    assert checklist_reward(two_turns(), records, reached=2) is None
    assert checklist_reward(two_turns(), of({"A": PASS}), reached=2) is None
    assert checklist_reward(two_turns(), [], reached=0) == 0.0  # nothing was begun, which is known


# --- dependence ----------------------------------------------------------------------------------------------------


def judged(**verdicts: Verdict) -> dict[str, Decision]:
    return {name: Decision(verdict=verdict, by="judge") for name, verdict in verdicts.items()}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(PASS, PASS, PASS), (PASS, FAIL, FAIL), (FAIL, PASS, FAIL), (LOST, PASS, LOST), (PASS, LOST, LOST)],
)
def test_an_item_passes_only_with_what_it_depends_on(first: Verdict, second: Verdict, expected: Verdict) -> None:
    turn = items({"id": "B", "weight": 0.5, "dependence": ["A"]}, {"id": "A", "weight": 0.5})
    found = resolve(turn, judged(A=first, B=second))
    assert found["B"].verdict is expected
    assert list(found) == ["B", "A"]
    assert (found["B"].by == "dependence") == (first is not PASS)


def test_dependence_goes_through_chains_and_a_fail_goes_before_a_gap() -> None:
    turn = items(
        {"id": "A", "weight": 1},
        {"id": "B", "weight": 1, "dependence": ["A"]},
        {"id": "C", "weight": 1, "dependence": ["B", "L"]},
        {"id": "L", "weight": 1},
    )
    found = resolve(turn, judged(A=FAIL, B=PASS, C=PASS, L=LOST))
    assert [found[name].verdict for name in "ABC"] == [FAIL, FAIL, FAIL]


def test_an_item_that_nobody_decided_is_unavailable() -> None:
    assert resolve(items({"id": "A", "weight": 1}), {})["A"].verdict is LOST


def test_may_go_on_asks_the_required_items_only() -> None:
    turn = items({"id": "A", "weight": 1, "required_for_next_turn": True}, {"id": "B", "weight": 1})
    assert may_go_on({"A": PASS, "B": FAIL}, turn) is True
    assert may_go_on({"A": FAIL, "B": PASS}, turn) is False
    assert may_go_on({"A": LOST, "B": PASS}, turn) is None
    assert may_go_on({}, turn) is None
    assert may_go_on({}, items({"id": "A", "weight": 1})) is True


# --- checks --------------------------------------------------------------------------------------------------------


def check(turn: list[Message], **fields: Any) -> Verdict:
    (item,) = items({"id": "A", "weight": 0.5, "check": fields}, {"id": "B", "weight": 0.5})[:1]
    decision = decided_without_judge(item, turn)
    assert decision is not None
    assert decision.by == "check"
    return decision.verdict


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"call": "get_order"}, PASS),
        ({"call": "get"}, FAIL),
        ({"call": "get_order", "arguments": {"id": "#W1"}}, PASS),
        ({"call": "get_order", "arguments": {"deep": {"b": [1, 2]}}}, PASS),
        ({"call": "get_order", "arguments": {"deep": {"b": [1]}}}, FAIL),
        ({"call": "get_order", "arguments": {"flag": 1}}, FAIL),
        ({"call": "get_order", "arguments": {"other": None}}, FAIL),
        ({"no_call": "cancel_order"}, PASS),
        ({"no_call": "get_order"}, FAIL),
        ({"no_call": "*"}, FAIL),
        ({"reply_contains": "PENDING"}, PASS),
        ({"reply_contains": "shipped"}, FAIL),
        ({"reply_matches": r"refund \d+\.$"}, PASS),
        ({"reply_matches": r"^refund"}, FAIL),
        ({"tool_response_contains": '"status": "pending"'}, PASS),
        ({"tool_response_contains": "refund"}, FAIL),
    ],
)
def test_a_program_decides(fields: dict[str, Any], expected: Verdict) -> None:
    assert check(TURN, **fields) is expected


def test_only_the_final_reply_is_a_reply() -> None:
    assert check([said("It is pending.", CALL), tool("{}")], reply_contains="pending") is FAIL


def test_j4_a_turn_of_nothing_passes_nothing() -> None:
    for turn in ([], [user("do it")], [said("")], [said(" \n", reasoning="I shall do nothing")]):
        for fields in ({"no_call": "*"}, {"reply_matches": ".*"}, {"reply_contains": "a"}, {"call": "get_order"}):
            assert check(turn, **fields) is FAIL
        for focus in ("assistant.tool_calls", "assistant.content.user_visible_reply", "tool.content"):
            (item,) = items({"id": "A", "weight": 1, "focus_on": focus})
            decision = decided_without_judge(item, turn)
            assert decision is not None
            assert (decision.verdict, decision.by) == (FAIL, "focus")


def test_what_an_item_asks_about_must_be_there_to_be_judged() -> None:
    for focus, turn in (
        ("assistant.tool_calls", TURN),
        ("assistant.content.user_visible_reply", TURN),
        ("tool.content", TURN),
        ("assistant.content.thinking", [said("x", reasoning="why")]),
    ):
        (item,) = items({"id": "A", "weight": 1, "focus_on": focus})
        assert decided_without_judge(item, turn) is None
    (item,) = items({"id": "A", "weight": 1, "focus_on": "assistant.content.thinking"})
    assert decided_without_judge(item, TURN) is not None  # it replied and called, and thought nothing


def test_a_pattern_that_takes_years_is_undecided() -> None:
    # Without a limit this would try 2^5000 ways; the limit of the test run would end it.
    assert check([said("a" * 5000 + "!")], reply_matches="(a+)+$") is LOST


def test_json_holds_json() -> None:
    assert within({}, {"a": 1})
    assert within({"a": 1}, {"a": 1.0, "b": 2})
    assert not within({"a": True}, {"a": 1})
    assert not within({"a": None}, {})
    assert not within({"a": {}}, {"a": []})
    assert within([{"a": 1}], [{"a": 1, "b": 2}])
