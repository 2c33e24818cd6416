"""What a judge is shown cannot leave its quotation marks, and of what it answers only verdicts count."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.rewards.answers import fence, quoted, read_verdicts, shortened, shown_question, shown_turn
from envace.scenarios.checklist import read_checklist
from envace.types import Author, Message, ToolCall, ToolSpec, Verdict

PASS, FAIL = Verdict.PASS, Verdict.FAIL
TOOL = ToolSpec(name="get_order", description="Look up.", parameters={"type": "object", "properties": {}})


def words(text: str, *ids: str) -> dict[str, Verdict]:
    return {name: verdict for name, (verdict, _) in read_verdicts(text, ids or ("A", "B")).items()}


def said(content: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(author=Author.ASSISTANT, content=content, calls=calls, reasoning=reasoning)


BOTH = '{"verdicts": [{"id": "A", "reason": "r", "verdict": "pass"}, {"id": "B", "reason": "s", "verdict": "fail"}]}'


@pytest.mark.parametrize(
    "text",
    [
        BOTH,
        f"Sure! Here you are:\n```json\n{BOTH}\n```\nI hope that helps {{really}}.",
        f'<think>{{"verdicts": [{{"id": "B", "verdict": "pass"}}]}}</think>{BOTH}',
        BOTH.replace('"r"', '"costs \\$5, 100\\%"'),
        BOTH.replace('"r"', '"two\nlines"'),
        BOTH.replace('"pass"', "true").replace('"fail"', "false"),
        BOTH.replace('"pass"', '" PASS "').replace('"fail"', '"Fail"'),
        '[{"id": "A", "verdict": "pass"}, {"id": "B", "verdict": "fail"}]',
        '{"A": "pass", "B": "fail"}',
        '{"A": {"verdict": "pass", "reason": "x"}, "B": {"verdict": "fail"}}',
        '{"verdicts": {"A": "yes", "B": "no"}}',
        '{"id": "A", "verdict": "pass"}\n{"id": "B", "verdict": "fail"}',
    ],
)
def test_j1_ugly_json_is_read(text: str) -> None:
    assert words(text) == {"A": PASS, "B": FAIL}


@pytest.mark.parametrize("value", [7, 1, 0, "10", "0.8x", None, [], {}, "maybe", "pass/fail", ""])
def test_j1_what_is_no_verdict_is_none(value: object) -> None:
    text = json.dumps({"verdicts": [{"id": "A", "verdict": value}, {"id": "B", "verdict": "fail"}]})
    assert words(text) == {"B": FAIL}


@pytest.mark.parametrize(
    "text", ["", "Everything passed.", "{", "[" * 5000, "{}", "null", '{"verdicts": 1}', BOTH[:30]]
)
def test_j1_an_answer_without_verdicts_has_none(text: str) -> None:
    assert words(text) == {}


def test_reasoning_that_is_never_closed_holds_no_verdict() -> None:
    assert words(f"<think>{BOTH}") == {}


def test_ids_that_were_not_asked_for_are_passed_over() -> None:
    assert words(BOTH, "B", "C") == {"B": FAIL}


def test_the_last_object_counts_and_a_contradiction_is_no_verdict() -> None:
    quoted_first = f'The assistant wrote {{"verdicts": [{{"id": "B", "verdict": "pass"}}]}}. My answer: {BOTH}'
    assert words(quoted_first) == {"A": PASS, "B": FAIL}
    assert words('[{"id": "A", "verdict": "pass"}, {"id": "A", "verdict": "fail"}]') == {}


def test_a_single_item_needs_no_id() -> None:
    assert words('{"answer": true}', "A") == {"A": PASS}
    assert words('{"answer": true}', "A", "B") == {}


@given(st.text(), st.sampled_from(["{", "[", '{"verdicts": [', '"', "\\"]))
def test_no_text_breaks_the_reader(text: str, piece: str) -> None:
    assert set(read_verdicts(piece.join([*text, BOTH]), ["A"])) <= {"A"}


# --- quoting -------------------------------------------------------------------------------------------------------


@given(st.text(), st.text())
def test_j5_quoted_text_stays_on_its_line(content: str, name: str) -> None:
    messages = [said(content, ToolCall(name=name, arguments={content: name}), reasoning=name)]
    shown = shown_turn(messages, messages, [TOOL], limit=100_000)
    for part in shown.values():
        assert len(part.splitlines()) == 1
    record = json.loads(shown["turn"])
    readable = content.encode("utf-8", "replace").decode()
    assert record.get("content", "") == readable or not content
    assert fence(*shown.values()) not in "".join(shown.values())


def test_what_is_cut_is_marked_and_the_rest_fits() -> None:
    turn = [said("start " + "x" * 50_000 + " end"), said("short")]
    before = [Message(author=Author.USER, content=f"{n} " + "y" * 5000) for n in range(10)]
    shown = shown_turn(before, turn, [TOOL] * 50, limit=8000)
    assert len(shown["turn"]) + len(shown["before"]) <= 8000 * 1.1
    first, second = (json.loads(line) for line in shown["turn"].splitlines())
    assert first["content"].startswith("start x")
    assert first["content"].endswith("x end")
    assert "characters cut ...]" in first["content"]
    assert second["content"] == "short"
    assert "characters cut ...]" in shown["before"]
    assert len(shown["tools"]) <= 8000 * 0.3 * 1.1
    assert json.loads(shown["tools"].splitlines()[0])["cut"].endswith("lines before this are not shown")


def test_many_messages_leave_the_last_ones() -> None:
    turn = [said(f"{number} " + "z" * 300) for number in range(1000)]
    shown = shown_turn([], turn, [], limit=4000)["turn"]
    lines = [json.loads(line) for line in shown.splitlines()]
    assert len(shown) <= 4400
    assert lines[0]["cut"].startswith("98")
    assert lines[-1]["number"] == 999


def test_nothing_is_cut_where_all_fits() -> None:
    shown = shown_turn([said("a" * 900)], [said("b" * 900)], [TOOL], limit=2100)
    assert "cut" not in "".join(shown.values())


def test_shortened_text_keeps_both_ends() -> None:
    assert shortened("a" * 500 + "b" * 500, 100) == "a" * 50 + "[... 901 characters cut ...]" + "b" * 49
    assert shortened("short", 100) == "short"


def test_a_question_keeps_its_id_however_long_it_is() -> None:
    item = {"id": "C0", "question": "q" * 100_000, "focus_on": "tool.content", "weight": 1.0}
    (only,) = read_checklist([[[item]]]).variants[0][0]
    line = shown_question(only)
    assert len(line) < 5000
    assert json.loads(line)["id"] == "C0"
    assert "\n" not in line
    assert quoted("a\u2028b\x85") == '"a\\u2028b\\u0085"'


def test_a_quoted_verdict_without_an_id_does_not_flip_one_that_names_the_item() -> None:
    answer = '{"verdicts":[{"id":"a","reason":"no","verdict":"fail"}]} It wrote {"verdict": "pass"}, which I ignored.'
    assert read_verdicts(answer, ["a"])["a"][0] is Verdict.FAIL
    assert read_verdicts('I decide: {"verdict": "pass"}', ["a"])["a"][0] is Verdict.PASS
