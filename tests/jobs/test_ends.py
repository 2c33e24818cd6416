"""How runs end and go on: halves equal a whole, the best weights survive a kill, alarms stop, mistakes are named."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from envace.errors import ConfigError, RunError, TrainingError
from envace.jobs import train as jobs_train
from envace.jobs.display import Silent
from envace.jobs.models import load
from envace.jobs.train import train
from envace.runs import RunFolder
from envace.training import checkpoints
from envace.training.recipe import Recipe, load_recipe

TINY = (
    "updates=4", "scenarios_per_update=2", "group_size=4", "data.train=4", "eval.every=1", "eval.scenarios=6",
    "checkpoint_every=2", "limits.max_length=120", "limits.max_step_tokens=24", "limits.max_steps=2",
    "learning_rate=1.0e-3",
)  # fmt: skip
CLOCK = ("seconds_rollout", "seconds_update", "rollout_tokens_per_s", "update_tokens_per_s", "memory_gb")


def tiny(*changes: str) -> Recipe:
    return load_recipe(None, [*TINY, *changes])


class Interrupted(Silent):
    """Ctrl-C once so many updates are done; what was said is kept."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.said = after, []

    def advance(self, task: str, done: int, note: str = "") -> None:
        if task == "training" and done == self.after:
            raise KeyboardInterrupt

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module", autouse=True)
def few_rehearsals() -> Iterator[None]:
    """What a run shows at its end is not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs_train, "SHOWN_REHEARSALS", 1)
        yield


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def records(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in CLOCK} for record in RunFolder(run).metrics()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never stopped."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(tiny(), out=out)
    return out


def interrupted(out: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), out=out, display=Interrupted(after))


@pytest.mark.parametrize("after", [2, 3])
def test_c1_two_halves_equal_one_whole_and_keep_the_same_best(tmp_path: Path, whole: Path, after: int) -> None:
    # An epoch is two updates here. Stopped before the checkpoint at its end, and after it.
    out = tmp_path / "halves"
    interrupted(out, after)
    train(tiny(), out=out, resume=True)

    assert records(out) == records(whole)
    assert equal(weights(out / "model"), weights(whole / "model"))
    assert equal(weights(out / "best"), weights(whole / "best"))
    assert RunFolder(out).results() == RunFolder(whole).results()


def test_c1_resuming_a_finished_run_trains_nothing_and_says_so(whole: Path) -> None:
    with pytest.raises(RunError, match="is finished: all 4 updates are done"):
        train(tiny(), out=whole, resume=True)


def test_c4_the_same_seed_is_the_same_run_and_another_is_not(tmp_path: Path, whole: Path) -> None:
    train(tiny("updates=1"), out=tmp_path / "again")
    train(tiny("updates=1", "seed=1"), out=tmp_path / "other")

    again, other = (records(tmp_path / name) for name in ("again", "other"))
    assert again == records(whole)[: len(again)]
    assert len(again) == 3
    assert other[1]["reward"] != again[1]["reward"]
    assert not equal(weights(tmp_path / "other" / "model"), weights(tmp_path / "again" / "model"))


def test_the_best_is_that_of_the_evaluations_and_is_a_model(whole: Path) -> None:
    best, evaluations = RunFolder(whole).results()["best"], RunFolder(whole).metrics("eval")
    assert len(evaluations) == 5
    assert best["value"] == max(record["success"] for record in evaluations)
    assert next(r["update"] for r in evaluations if r["success"] == best["value"]) == best["update"]
    assert json.loads((whole / "best" / "best.json").read_text()) == best
    state = load(str(whole / "best")).model.state_dict()
    kept = whole / "checkpoints" / f"update-{best['update']:06d}"
    if kept.exists():  # the same as its checkpoint, where that is still there
        assert equal(weights(whole / "best"), weights(kept))
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(whole / "best").items())


def test_no_best_is_kept_where_none_is_wanted(tmp_path: Path) -> None:
    summary = train(tiny("updates=1", "keep_best=false"), out=tmp_path / "run")
    assert summary["best"] is None
    assert not (tmp_path / "run" / "best").exists()


def test_a_full_disk_while_the_best_is_written_is_one_error_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write = tmp_path / "run", checkpoints._write_model

    def full(folder: Path, *arguments: Any) -> None:
        write(folder, *arguments)
        if folder.name.startswith("best"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "_write_model", full)
    with pytest.raises(RunError, match=r"cannot write .*best: .*No space left"):
        train(tiny("updates=1"), out=out)
    assert not list(out.glob("best*"))

    monkeypatch.setattr(checkpoints, "_write_model", write)
    train(tiny("updates=1"), out=out, resume=True)
    assert (out / "best" / "config.json").exists()


ALARMED = ("alarms.patience=2", "alarms.kl=1.0e-9", "loss.kl=1.0e-4", "keep_best=false")
"""Any movement is too far."""


def test_an_alarm_that_warns_is_said_and_recorded(tmp_path: Path) -> None:
    display = Interrupted()
    summary = train(tiny(*ALARMED, "updates=3", "eval.every=0"), out=tmp_path / "run", display=display)
    (alarm,) = RunFolder(tmp_path / "run").metrics("alarm")
    assert (alarm["alarm"], alarm["action"], alarm["metric"]) == ("kl", "warn", "kl")
    assert summary["alarms"] == ["kl"]
    assert [line for line in display.said if line.startswith("alarm kl: ")]
    assert any(line.startswith("group_size 4: groups without spread") for line in display.said)
    assert any("at a success of" in line and "groups of 4" in line for line in display.said)


def test_an_alarm_that_stops_leaves_a_checkpoint_and_no_way_on(tmp_path: Path) -> None:
    recipe = tiny(*ALARMED, "eval.every=0", "alarms.actions={kl: stop}", "checkpoint_every=100")
    with pytest.raises(TrainingError, match=r"alarm kl: .*a checkpoint is written"):
        train(recipe, out=tmp_path / "run")
    (alarm,) = RunFolder(tmp_path / "run").metrics("alarm")
    assert (tmp_path / "run" / "checkpoints" / f"update-{alarm['update']:06d}").exists()

    with pytest.raises(TrainingError, match="was stopped by the alarm kl"):
        train(recipe, out=tmp_path / "run", resume=True)
    with pytest.raises(RunError, match=r"another recipe; different: alarms\.actions"):
        train(tiny(*ALARMED, "eval.every=0", "checkpoint_every=100"), out=tmp_path / "run", resume=True)


def test_g2_a_group_of_one_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"group_size = 1: .*greater than or equal to 2"):
        tiny("group_size=1")
