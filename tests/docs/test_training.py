"""docs/training.md lists every key of a recipe with its default, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from envace.models.http import HttpSettings
from envace.rewards.judge import JudgeSection
from envace.training.arms import Arm
from envace.training.recipe import Recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")


def rows() -> dict[str, Any]:
    """Key -> default, of the page's recipe tables."""
    recipe = PAGE.split("\n## Recipe\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([\w.]+)` \| `([^`]*)` \|", recipe, re.MULTILINE)
    assert len(found) == len(dict(found)), "a key is listed twice"
    return {key: yaml.safe_load(default) for key, default in found}


def defaults(section: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> default."""
    flat: dict[str, Any] = {}
    for key in type(section).model_fields:
        value = getattr(section, key)
        if prefix and isinstance(value, HttpSettings):
            continue  # listed once, under `endpoint`
        flat |= defaults(value, f"{prefix}{key}.") if isinstance(value, BaseModel) else {f"{prefix}{key}": value}
    return flat


def test_every_key_is_listed_with_its_default() -> None:
    assert rows() == defaults(Recipe())


def test_every_key_of_the_judge_is_listed_with_its_default() -> None:
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| judge\.(\w+) \| ([^|]*) \|", page, re.MULTILINE))
    section = JudgeSection(model="starter")
    assert set(listed) == set(JudgeSection.model_fields)
    for key in set(listed) - {"model", "endpoint"}:
        assert yaml.safe_load(listed[key].strip("`")) == getattr(section, key), key
    assert listed["endpoint"] == f"{section.endpoint.max_retries} retries"


def test_every_arm_has_a_row() -> None:
    arms = PAGE.split("\n## Arms\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w+-]+)` \| the ", arms, re.MULTILINE)) == set(get_args(Arm))


def test_the_table_of_arms_says_what_the_recipe_does() -> None:
    arms = PAGE.split("\n## Arms\n")[1].split("\n## ")[0]
    for arm in get_args(Arm):
        (line,) = [line for line in arms.splitlines() if line.startswith(f"| `{arm}` |")]
        if arm == "sft":  # it rolls nothing out
            continue
        setting = Recipe(arm=arm).setting()
        assert ("executable" in line) == (setting.answers == "executable")
        if setting.answers == "rehearsed" and arm != "grpo-simulator":
            assert ("one a group" in line) == setting.share_world
            assert ("policy gradient" in line) != setting.anchors
