"""A training that is killed and resumed ends with the weights of one that never stopped."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from envace.errors import RunError
from envace.jobs.models import resolve
from envace.jobs.train import train
from envace.runs import RunFolder
from envace.training.arms import ARMS
from envace.training.recipe import Recipe, load_recipe

TINY = (
    "updates=16", "scenarios_per_update=2", "group_size=2", "data.train=7", "eval.every=3", "eval.scenarios=2",
    "checkpoint_every=1", "trajectories_every=2", "limits.max_length=120", "limits.max_step_tokens=24",
)  # fmt: skip
"""Small enough for a second; passes over its seven scenarios more than four times."""


def tiny(arm: str) -> Recipe:
    return load_recipe(None, [*TINY, f"arm={arm}"])


def weights(run: Path, model: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / model / "model.safetensors")


def child_at_work(recipe: Recipe, out: Path) -> multiprocessing.process.BaseProcess:
    """A forked process that trains, or goes on training."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=train, args=(recipe,), kwargs={"out": out, "resume": out.exists()})
    child.start()
    return child


def train_and_kill(recipe: Recipe, out: Path, *, progress: bool, seconds: float) -> None:
    """Train in a child and kill it after a while; with `progress`, count from its first logged update.

    Wall-clock time alone would not do: on a busy machine every child would be killed before it came to work.
    """
    logged = len(RunFolder(out).metrics("update"))
    child = child_at_work(recipe, out)
    while progress and child.is_alive() and len(RunFolder(out).metrics("update")) <= logged:
        time.sleep(0.001)
    time.sleep(seconds)
    assert child.is_alive()  # it died of the kill, not of an end or a fault of its own
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("arm", "kills", "updates"), [("envace", 10, 16), *((arm, 2, 4) for arm in ARMS if arm != "envace")]
)
def test_kills_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str, kills: int, updates: int
) -> None:
    monkeypatch.setattr("envace.jobs.train.SHOWN_REHEARSALS", 1)
    recipe = tiny(arm).model_copy(update={"updates": updates})
    started = time.perf_counter()
    train(recipe, out=tmp_path / "whole")
    length = time.perf_counter() - started

    rng = random.Random(3)
    for kill in range(kills):
        seconds = rng.uniform(0, 0.7) * length / updates
        train_and_kill(recipe, tmp_path / "killed", progress=kill % 2 == 1, seconds=seconds)
    # It was killed in the middle, not only at the start.
    assert RunFolder(tmp_path / "killed").metrics("update")
    last = child_at_work(recipe, tmp_path / "killed")
    last.join()
    assert last.exitcode == 0

    for model in ("model", "rehearser") if arm == "per-role" else ("model",):
        whole, killed = weights(tmp_path / "whole", model), weights(tmp_path / "killed", model)
        assert all(torch.equal(whole[name], killed[name]) for name in whole)
    left, right = (RunFolder(tmp_path / name).metrics("update") for name in ("whole", "killed"))
    assert [record["update"] for record in right] == list(range(1, updates + 1))
    assert [record["reward"] for record in left] == [record["reward"] for record in right]


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    recipe = tiny("envace").model_copy(update={"updates": 1})
    train(recipe, out=tmp_path / "run")

    with pytest.raises(RunError, match="is finished"):
        train(recipe, out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match="already holds a run"):
        train(recipe, out=tmp_path / "run")


def test_a_run_of_another_recipe_is_not_resumed(tmp_path: Path) -> None:
    train(tiny("envace").model_copy(update={"updates": 1}), out=tmp_path / "run")

    with pytest.raises(RunError, match="learning_rate"):
        train(
            tiny("envace").model_copy(update={"updates": 1, "learning_rate": 1e-3}), out=tmp_path / "run", resume=True
        )


def test_training_by_rehearsal_makes_no_real_call(tmp_path: Path) -> None:
    summary = train(tiny("envace").model_copy(update={"updates": 2}), out=tmp_path / "run")
    real = train(tiny("grpo-real").model_copy(update={"updates": 1}), out=tmp_path / "real")

    assert summary["real_calls_in_training"] == 0
    assert real["real_calls_in_training"] > 0  # the counter counts


def test_a_run_does_not_go_on_from_another_model(tmp_path: Path) -> None:
    shutil.copytree(resolve("starter"), tmp_path / "model")
    recipe = tiny("envace").model_copy(update={"updates": 1, "model": str(tmp_path / "model")})
    train(recipe, out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    state = load_file(tmp_path / "model" / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in state.items()}, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "manifest.json").unlink()

    with pytest.raises(RunError, match="model changed since the run was started"):
        train(recipe, out=tmp_path / "run", resume=True)
