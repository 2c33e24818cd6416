"""Where an evaluation is kept, and what is refused before anything is measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from envace.errors import DataError, RunError
from envace.jobs.demo import demo
from envace.jobs.evaluate import evaluate
from envace.jobs.train import train
from envace.runs import RunFolder
from envace.scenarios import load_package
from envace.training.recipe import load_recipe

EXAMPLE = Path(__file__).parents[2] / "examples" / "my_environment"
TINY = [
    "updates=1", "scenarios_per_update=2", "group_size=2", "data.train=4", "data.heldout=4", "data.unseen=2",
    "eval.every=0", "eval.scenarios=2", "eval.fidelity=0", "limits.max_length=120",
]  # fmt: skip


def test_an_evaluation_of_a_run_is_kept_in_its_folder(tmp_path: Path) -> None:
    recipe = load_recipe({}, TINY)
    train(recipe, out=tmp_path / "run")
    result = evaluate(recipe, model=str(tmp_path / "run"))
    assert RunFolder.open(tmp_path / "run").results()["evaluated"]["success"] == result["success"]
    assert result["unseen"]["n"] == 2


def test_a_folder_that_is_no_run_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envace.jobs.evaluate.full_evaluation", lambda *a, **k: pytest.fail("it was measured"))
    (tmp_path / "demo" / "envace").mkdir(parents=True)
    (tmp_path / "demo" / "envace" / "env.json").write_text("{}")
    with pytest.raises(RunError, match=r"not a run folder.*These within are: .*envace"):
        evaluate(load_recipe({}, TINY), model="nothing", out=tmp_path / "demo")


def test_a_demo_that_is_there_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envace.jobs.demo.evaluate", lambda *a, **k: pytest.fail("it was measured"))
    (tmp_path / "envace").mkdir()
    (tmp_path / "envace" / "config.json").write_text("{}")
    with pytest.raises(RunError, match="already holds a run"):
        demo(out=tmp_path, quick=True)


def test_a_file_in_the_place_of_a_run_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="is a file"):
        train(load_recipe({}, TINY), out=tmp_path / "run")


def test_a_copy_of_the_example_under_another_name_loads(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "my_gym")
    package = load_package(tmp_path / "my_gym")
    assert {scenario.environment for scenario in package.scenarios} == {"my_gym"}


def test_a_scenario_of_another_package_says_the_way_out(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "my_gym")
    file = tmp_path / "my_gym" / "scenarios.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(first), "environment": "other"}), *rest]))
    with pytest.raises(DataError, match="Leave `environment` out"):
        load_package(tmp_path / "my_gym")
