"""Recipes: unknown keys name the nearest, bad values are refused at once, overrides reach into sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envace.errors import ConfigError
from envace.rewards import WEIGHTS, combine
from envace.training.recipe import Recipe, load_recipe


def test_the_default_is_the_starter_run() -> None:
    assert load_recipe() == Recipe()
    assert load_recipe({}) == Recipe()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"updatse": 3}, r"Unknown recipe key updatse\. Did you mean updates\?"),
        ({"learning_rat": 1}, r"Did you mean learning_rate\?"),
        ({"sft": {"step": 3}}, r"Unknown recipe key sft\.step\. Did you mean sft\.steps\?"),
        ({"loss": {"anchor": 1}}, r"loss\.anchor\. Did you mean loss\.anchor_kl\?"),
        ({"zzz": 1}, r"Unknown recipe key zzz\. Known: .*updates"),
    ],
)
def test_an_unknown_key_names_the_nearest(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(values)


@pytest.mark.parametrize(
    "override",
    [
        "updates=0",
        "updates=many",
        "updates=1.5",
        "updates=null",
        "group_size=1",
        "temperature=0",
        "learning_rate=-1",
        "learning_rate=.nan",
        "learning_rate=.inf",
        "seed=-1",
        "data.seed=-1",
        "arm=grpo",
        "reward=real",
        "device=cuda:9",
        "sft.carelessness=1.5",
        "loss.dual_clip=1",
        "loss=3",
        "data.train=0",
    ],
)
def test_a_bad_value_is_refused_by_its_name(override: str) -> None:
    name = override.split("=")[0]
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_recipe(overrides=[override])


@pytest.mark.parametrize(
    "weights",
    [
        {**WEIGHTS, "anser": 0.3},  # names no part
        dict.fromkeys(WEIGHTS, 0.0),  # a mean over nothing
        {**WEIGHTS, "calls": -1.0},  # a reward outside [0, 1]
    ],
)
def test_weights_that_cannot_be_averaged_are_refused(weights: dict[str, float]) -> None:
    # Accepted here, they would end the run at its first reward, or bend it silently.
    with pytest.raises(ConfigError, match="weights"):
        load_recipe({"weights": weights})


def test_weights_of_some_parts_are_refused_or_usable() -> None:
    try:
        weights = load_recipe({"weights": {"answer": 1.0}}).setting().weights
    except ConfigError:
        return
    assert combine(dict.fromkeys(WEIGHTS, 1.0), weights) == pytest.approx(1.0)


def test_overrides_reach_into_sections_and_are_yaml() -> None:
    recipe = load_recipe(
        {"updates": 7, "loss": {"kl": 0.5}},
        ["updates=2", "loss.anchor_kl=1e-3", "sft.steps=5", "arm=published", "world=[a, b]", "world_sharing=group"],
    )
    assert (recipe.updates, recipe.sft.steps, recipe.arm, recipe.world) == (2, 5, "published", ["a", "b"])
    assert (recipe.loss.kl, recipe.loss.anchor_kl) == (0.5, 0.001)
    assert recipe.share_world


def test_the_last_override_counts() -> None:
    assert load_recipe(overrides=["updates=2", "updates=3"]).updates == 3


def test_overrides_leave_the_given_mapping_alone() -> None:
    values = {"loss": {"kl": 0.5}}
    load_recipe(values, ["loss.kl=0.1", "updates=3"])
    assert values == {"loss": {"kl": 0.5}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("updates", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("updates.x=3", "updates.x"),
        ("sft.steps.x=3", "sft.steps"),
        ("updates=[1", "not YAML"),
        ("sft.stpes=3", r"Did you mean sft\.steps"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"updates": 1, "sft": {"steps": 1}}, [override])


def test_a_file_is_read_with_its_sections(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: mine\nlearning_rate: 1e-6\nlimits:\n  max_steps: 3\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.learning_rate, recipe.limits.max_steps) == ("mine", 1e-6, 3)
    assert recipe.limits.max_step_tokens == Recipe().limits.max_step_tokens
    assert recipe.rollout_limits().max_steps == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "holds a list; a recipe is a mapping"),
        ("a: [", "is not YAML"),
        ("updates: -1\n", r"recipe\.yaml: updates = -1"),
        ("\xff", "recipe.yaml"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        load_recipe(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*nowhere\.yaml"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("")
    assert load_recipe(tmp_path / "recipe.yaml") == Recipe()


@pytest.mark.parametrize(
    ("arm", "answers", "share", "anchors", "reward"),
    [
        ("envace", "rehearsed", True, True, "contract"),
        ("shared-baseline", "rehearsed", True, True, "contract"),
        ("per-role", "rehearsed", True, True, "contract"),
        ("published", "rehearsed", False, False, "contract"),
        ("grpo-simulator", "rehearsed", False, False, "contract"),
        ("grpo-real", "executable", False, False, "real"),
        ("reinforce++", "executable", False, False, "real"),
    ],
)
def test_each_arm_is_its_setting(arm: str, answers: str, share: bool, anchors: bool, reward: str) -> None:
    setting = load_recipe({"arm": arm}).setting()
    assert (setting.answers, setting.share_world, setting.anchors, setting.reward) == (
        answers,
        share,
        anchors,
        reward,
    )


def test_a_recipe_survives_its_own_record() -> None:
    recipe = load_recipe(overrides=["updates=3", "world=[a, b]"])
    assert load_recipe(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["grounding=reference"], "set layout=prompted"),
        (["judge={model: starter}"], "set reward=judged"),
        (["sft.rows=round"], "set sft.roles=act"),
        (["arm=sft", "resample=2"], "arm sft samples none"),
        (["simulator.model=smollm2"], "in arm grpo-simulator"),
        (["prompts.rehearse_user=mine.md"], "layout is shared"),
        (["rehearser=smollm2"], "arm per-role"),
        (["advantage=global", "scale=std"], "compares with no cell"),
        (["arm=reinforce++", "resample=1"], "learns from these too"),
        (["loss.constant_length=5"], "loss.aggregation=constant"),
    ],
)
def test_settings_that_mean_nothing_together_are_told(changes: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_recipe(None, changes)


def test_an_address_with_credentials_is_not_written_into_a_run() -> None:
    for key in ("simulator.model", "judge.model"):
        with pytest.raises(ConfigError, match=rf"{key} holds credentials"):
            load_recipe(None, ["reward=judged", f"{key}=http://me:secret@h:1/v1#m"])


def test_a_mistake_over_several_keys_does_not_show_the_recipe() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, ["endpoint.headers={Authorization: Bearer SECRET123}", "grounding=reference"])
    assert str(caught.value) == (
        "grounding=reference shows recorded results in the rehearser's prompt: set layout=prompted."
    )
