"""Prompts: the shipped ones, and what takes their place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envace.errors import ConfigError
from envace.prompts import VALUES, load_prompts

SHOWN = {"tools": "[]", "rules": "[]", "references": "", "history": "[]", "call": '{"name": "get_order"}'}


def test_every_prompt_is_there_and_can_be_filled_in() -> None:
    prompts = load_prompts()
    for name, (_, allowed) in VALUES.items():
        assert prompts.fill(name, **dict.fromkeys(allowed, "7")), name


def test_another_file_takes_the_place_of_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.md"
    mine.write_text("Answer {{ call }} now.")
    prompts = load_prompts({"rehearse_user": mine})
    assert prompts.fill("rehearse_user", **SHOWN) == 'Answer {"name": "get_order"} now.'
    assert prompts.fill("rehearse_system", **SHOWN) == load_prompts().fill("rehearse_system", **SHOWN)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rehearse_usr", "{{ call }}", "Did you mean rehearse_user"),
        ("rehearse_user", "nothing", "does not show call"),
        ("rehearse_user", "{{ call }} {{ secret }}", "asks for ['secret']"),
        ("rehearse_user", "{{ call ", "cannot use"),
        ("rehearse_user", "{{ call.__class__.__mro__ }}", "cannot be filled in"),
    ],
)
def test_a_prompt_that_cannot_be_used_says_why(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / "mine.md"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_prompts({name: path}).fill(name, **SHOWN)
    assert said in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.rehearse_user: cannot use .*none\.md"):
        load_prompts({"rehearse_user": tmp_path / "none.md"})


def test_recorded_calls_are_spoken_of_only_where_they_are_shown() -> None:
    prompts = load_prompts()
    without, shown = (prompts.fill("rehearse_user", **{**SHOWN, "references": text}) for text in ("", '[{"a": 1}]'))
    assert "Recorded" not in without
    assert json.loads(shown.split("Recorded calls with their results: ")[1].splitlines()[0]) == [{"a": 1}]


def test_the_judges_questions_stand_within_their_fence() -> None:
    values = {"fence": "F", "tools": "T", "before": "B", "turn": "N", "questions": "Q"}
    assert "BEGIN F\nQ\nEND F" in load_prompts().fill("judge_turn", **values)


def test_what_is_filled_in_is_no_template() -> None:
    hostile = "{{ call }} {% for x in [1] %}{{ ''.__class__ }}{% endfor %}"
    assert hostile in load_prompts().fill("rehearse_user", **{**SHOWN, "history": hostile})
