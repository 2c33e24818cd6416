"""Every recipe of examples/ can be read, opens with its command, and says what of it was run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from envace.training.arms import ARMS
from envace.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "examples").rglob("*.yaml"))


def head(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_can_be_read_and_opens_with_its_command(path: Path) -> None:
    recipe = load_recipe(path)
    assert str(path.relative_to(ROOT)) in head(path)
    assert "envace train " in head(path) or "envace sft " in head(path)
    assert recipe.name in (path.stem, path.parent.name, "gym")


@pytest.mark.parametrize("path", [path for path in RECIPES if path.name != "recipe.yaml"], ids=lambda path: path.stem)
def test_it_says_what_was_run_and_what_never(path: Path) -> None:
    assert "run" in head(path).lower()
    if load_recipe(path).device == "cuda":
        assert "Never run" in head(path)


def test_the_papers_settings_are_those_of_the_paper() -> None:
    # arXiv:2608.06197, settings: 470 updates, 1e-6, 0.01, 16 x 4, 12,000 + 8,000 tokens, 30 steps, KL 1e-4.
    for size in ("1.7b", "4b", "8b"):
        recipe = load_recipe(ROOT / "examples" / f"paper-{size}.yaml")
        assert recipe.model == f"Qwen/Qwen3-{size.upper()}"
        assert (recipe.updates, recipe.learning_rate, recipe.weight_decay) == (470, 1e-6, 0.01)
        assert (recipe.scenarios_per_update, recipe.group_size, recipe.temperature) == (16, 4, 1.0)
        assert (recipe.limits.max_length, recipe.limits.max_step_tokens, recipe.limits.max_steps) == (20_000, 8_000, 30)
        assert (recipe.loss.kl, recipe.loss.kl_estimator, recipe.loss.max_grad_norm) == (1e-4, "k3", 1.0)
        assert (recipe.loss.clip_low, recipe.loss.clip_high, recipe.loss.dual_clip) == (0.2, 0.2, 3.0)
        assert recipe.judge is not None
        assert (recipe.judge.temperature, recipe.judge.top_p) == (0.6, 0.8)
        assert (recipe.arm, recipe.layout, recipe.scale, recipe.baseline) == (
            "published",
            "prompted",
            "none",
            "outputs",
        )


def test_every_arm_is_one_word_of_the_starter_recipe() -> None:
    for arm in ARMS:
        assert load_recipe(ROOT / "examples" / "starter.yaml", [f"arm={arm}"]).arm == arm
