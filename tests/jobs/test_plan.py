"""A dry run counts, measures and names what lacks, and touches nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from envace.jobs import plan as module
from envace.jobs.models import load
from envace.jobs.plan import judge_calls, judge_lacks, plan, token_counts
from envace.rewards.judge import JudgeSection
from envace.training.recipe import Recipe, load_recipe


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is not asked."""
    monkeypatch.setattr(module.constants, "HF_HUB_OFFLINE", True)


def lacking(result: dict[str, Any]) -> list[str]:
    return [lack["what"] for lack in result["missing"]]


def test_the_starter_recipe_lacks_nothing_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = plan(load_recipe({}))
    assert result["missing"] == []
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(result)) == result
    assert load_recipe(result["recipe"]) == load_recipe({})
    assert result["rollouts"] == {"update": 128, "run": 5120}
    assert result["memory"]["parameters"] == sum(p.numel() for p in load("starter").model.parameters())
    assert result["memory"]["total_gb"] == pytest.approx(sum(result["memory"]["parts_gb"].values()), abs=0.01)
    assert 20 < result["tokens"]["prompt"] < 200


def test_tokens_are_bounded_by_limits() -> None:
    recipe = load_recipe(
        {
            "scenarios_per_update": 2,
            "group_size": 3,
            "updates": 5,
            "limits": {"max_steps": 2, "max_step_tokens": 10, "max_length": 100},
        }
    )
    # Two acting steps and two responses of 10 tokens after a prompt of 50; a row each repeats 50, 60, 70, 80 and adds
    # 10: 4 * 50 + 10 + 20 + 30 + 40 = 300.
    counts = token_counts(recipe, 50.0)
    assert counts["update"] == {"sampled_max": 6 * 40, "trained_max_shared": 6 * 90, "trained_max_apart": 6 * 300}
    assert counts["run"]["sampled_max"] == 5 * 6 * 40
    # max_length leaves room for 20 only
    assert token_counts(recipe, 80.0)["update"]["sampled_max"] == 6 * 20
    # In the real environment nobody rehearses.
    real = recipe.model_copy(update={"arm": "grpo-real"})
    assert token_counts(real, 50.0)["update"]["sampled_max"] == 6 * 20
    assert token_counts(recipe, None)["prompt"] is None


def test_a_judge_is_called_once_a_turn() -> None:
    recipe = load_recipe({"scenarios_per_update": 2, "group_size": 3, "updates": 5})
    judged = recipe.model_copy(update={"judge": JudgeSection(model="starter")})
    told = judge_calls(judged, 1.5)
    assert told == {"update": 9, "run": 45, "turns": 1.5}
    assert judge_calls(recipe, 1.5) is None
    assert judge_calls(judged, None) == {"update": 6, "run": 30, "turns": None}


def test_a_judge_that_does_not_answer_or_is_not_there_is_named() -> None:
    (lack,) = judge_lacks("http://127.0.0.1:9/v1#judge")
    assert (lack.what, lack.why) == ("the judge at http://127.0.0.1:9/v1", "it does not answer")
    (lack,) = judge_lacks("nowhere")
    assert "no model 'nowhere'" in lack.why
    assert list(judge_lacks("starter")) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": "Qwen/Qwen3-4B", "lora": {}}, "model Qwen/Qwen3-4B"),
        ({"model": "nowhere"}, "model nowhere"),
        ({"model": "new"}, "a warm-up"),
        ({"world": "nowhere"}, "a world"),
        ({"dtype": "bfloat16"}, "a recipe that can run"),
        ({"group_size": 2}, "groups larger than 2"),
        ({"limits": {"max_length": 16}}, "room for rollouts"),
        ({"scenarios_per_update": 200_000}, "memory"),
        ({"world": "data.parquet"}, "a world"),
    ],
)
def test_what_lacks_is_named(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    result = plan(load_recipe(changes), out=tmp_path / "run")
    assert what in lacking(result)
    assert all(lack["why"] and lack["how"] for lack in result["missing"])


def test_a_published_size_is_known_without_its_files() -> None:
    result = plan(load_recipe({"model": "Qwen/Qwen3-8B", "lora": {}, "dtype": "bfloat16"}))
    assert result["memory"]["parameters"] == pytest.approx(8.19e9, rel=0.01)
    assert result["memory"]["parts_gb"]["weights"] == pytest.approx(16.4 + 0.17, abs=0.2)
    assert "the hub does not answer" in result["missing"][0]["why"]
    assert result["tokens"]["prompt"] is None


def test_a_model_that_nobody_knows_has_no_memory_estimate() -> None:
    assert plan(load_recipe({"model": "nobody/knows-it"}))["memory"] is None


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    gone = ("peft", "wandb", "pyarrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in gone else find(name))
    result = plan(load_recipe({"lora": {}, "tracker": "wandb", "world": "x.parquet"}))
    said = " ".join(lack["what"] + lack["why"] for lack in result["missing"])
    assert all(name in said for name in gone)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "a GPU" in lacking(plan(load_recipe({"device": "cuda"})))


def test_a_taken_run_folder_is_named(tmp_path: Path) -> None:
    from envace.runs import RunFolder

    RunFolder.create(tmp_path / "run", Recipe().model_dump(mode="json"), resume=False)
    assert "a free run folder" in lacking(plan(Recipe(), out=tmp_path / "run"))
    assert lacking(plan(Recipe(), out=tmp_path / "run", resume=True)) == []
