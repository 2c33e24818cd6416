"""Prompts: the bundled ones are whole, and replacements are checked before anything is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from envace.errors import ConfigError
from envace.prompts import NAMES, load_prompts

VALUES = {"fence": "F", "tools": "T", "before": "B", "turn": "N", "questions": "Q"}


def test_the_judge_has_its_prompts() -> None:
    assert {"judge_turn", "judge_item"} <= NAMES
    prompts = load_prompts()
    assert "BEGIN F\nQ\nEND F" in prompts.fill("judge_turn", **VALUES)
    assert set(prompts.texts) == NAMES


def test_what_is_filled_in_is_no_template() -> None:
    hostile = "{{ fence }} {% for x in [1] %}{{ ''.__class__ }}{% endfor %}"
    assert f"\n{hostile}\n" in load_prompts().fill("judge_turn", **{**VALUES, "turn": hostile})


def test_a_prompt_may_be_replaced_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text("{{fence}}|{{tools}}|{{before}}|{{turn}}|{{questions}}", encoding="utf-8")
    prompts = load_prompts({"judge_turn": path})
    assert prompts.fill("judge_turn", **VALUES) == "F|T|B|N|Q"
    assert prompts.texts["judge_item"] == load_prompts().texts["judge_item"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("judge_trun", "", "Did you mean judge_turn?"),
        ("judge_turn", "{{fence}} {{tools}} {{before}} {{turn}}", r"does not use \{\{ questions \}\}"),
        ("judge_turn", "{{fence}}{{tools}}{{before}}{{turn}}{{questions}}{{mood}}", r"uses the unknown \{\{ mood \}\}"),
        ("judge_turn", "{{ fence", "is no template"),
    ],
)
def test_a_faulty_replacement_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / "mine.md"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=said):
        load_prompts({name: path})


def test_a_replacement_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_prompts({"judge_turn": tmp_path / "missing.md"})
