"""The best evaluation's weights are kept, whole, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envace.errors import RunError
from envace.runs import RunFolder
from envace.training.keeping import NOTE, Best, Keeper, best_of


def folder_at(path: Path) -> RunFolder:
    return RunFolder.create(path, {}, resume=path.exists())


def writer(path: Path, notes: dict[str, str]) -> None:
    path.mkdir(exist_ok=True)
    for name, text in notes.items():
        (path / name).write_text(text)


def evaluate(folder: RunFolder, update: int, success: float | None, **others: float) -> None:
    folder.log({"kind": "eval", "update": update, "success": success, **others})


def test_the_best_is_the_first_of_the_highest() -> None:
    records = [{"update": n, "success": value} for n, value in enumerate([0.1, 0.5, None, 0.5, 0.2])]
    assert best_of(records) == Best(update=1, metric="success", value=0.5)
    assert best_of([]) is None
    assert best_of([{"update": 0, "success": None}]) is None


def test_without_any_success_the_reward_decides() -> None:
    records = [{"update": 0, "success": None, "reward": 0.4}, {"update": 5, "success": None, "reward": 0.6}]
    assert best_of(records) == Best(update=5, metric="reward", value=0.6)
    assert best_of([*records, {"update": 6, "success": 0.0}]) == Best(update=6, metric="success", value=0.0)


def test_weights_are_written_only_when_an_evaluation_is_better_than_ever(tmp_path: Path) -> None:
    folder, saved = folder_at(tmp_path / "run"), []

    def save(path: Path, notes: dict[str, str]) -> None:
        saved.append(json.loads(notes[NOTE])["update"])
        writer(path, notes)

    keeper = Keeper(folder, save, enabled=True)
    for update, success in enumerate([0.2, 0.1, 0.6, 0.6, 0.5]):
        evaluate(folder, update, success)
        keeper.keep(update)
    assert saved == [0, 2]
    assert folder.results()["best"] == {"update": 2, "metric": "success", "value": 0.6}


def test_a_switched_off_keeper_writes_nothing(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "run")
    evaluate(folder, 0, 1.0)
    Keeper(folder, writer, enabled=False).keep(0)
    assert not (tmp_path / "run" / "best").exists()


def test_killed_between_the_checkpoint_and_the_best_it_is_kept_on_resuming(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "run")
    evaluate(folder, 4, 0.6)  # logged, checkpoint written, killed here
    Keeper(folder_at(tmp_path / "run"), writer, enabled=True).keep(4)
    assert json.loads((tmp_path / "run" / "best" / NOTE).read_text())["update"] == 4


def test_killed_between_the_weights_and_the_results_it_is_kept_again(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "run")
    evaluate(folder, 4, 0.6)
    writer(tmp_path / "run" / "best", {NOTE: '{"update": 4, "metric": "success", "value": 0.6}'})
    keeper = Keeper(folder, writer, enabled=True)
    assert keeper.due(4)
    keeper.keep(4)
    assert folder.results()["best"]["update"] == 4
    assert not keeper.due(4)


def test_a_full_disk_leaves_the_older_best(tmp_path: Path) -> None:
    folder = folder_at(tmp_path / "run")

    def full(path: Path, notes: dict[str, str]) -> None:
        raise RunError(f"cannot write {path}: No space left on device.")

    evaluate(folder, 0, 0.1)
    Keeper(folder, writer, enabled=True).keep(0)
    evaluate(folder, 5, 0.9)
    with pytest.raises(RunError, match="No space left"):
        Keeper(folder, full, enabled=True).keep(5)
    assert folder.results()["best"]["update"] == json.loads((tmp_path / "run/best" / NOTE).read_text())["update"] == 0
