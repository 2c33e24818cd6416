"""Trackers get what metrics.jsonl gets, for real: event files, an offline run, a local database are read back."""

from __future__ import annotations

import importlib.util
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envace.errors import ConfigError
from envace.jobs.sft import sft
from envace.jobs.train import train
from envace.runs import RunFolder
from envace.runs import trackers as module
from envace.runs.trackers import Guard, check_tracker, numbers_of, tracking
from envace.training.recipe import load_recipe

SECRET = "Bearer sk-not-to-be-told"
NAMES = ("tensorboard", "wandb", "trackio")


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing leaves this machine."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["envace", "train", f"endpoint.headers.Authorization={SECRET}"])


@pytest.fixture(scope="module", autouse=True)
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trackio reads its folder's name when it is imported."""
    import os

    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)
    return folder


def config() -> dict[str, Any]:
    recipe = load_recipe({"seed": 7, "endpoint": {"headers": {"Authorization": SECRET}}})
    return recipe.model_dump(mode="json")


def log(out: Path, name: Any, numbers: range, *, done: int = 0) -> None:
    folder = RunFolder.create(out, {}, resume=out.exists())
    with tracking(folder, name, config=config(), done=done) as guard:
        for number in numbers:
            folder.log({"kind": "update", "update": number, "part/answer": number / 10, "note": "text", "none": None})
        folder.log({"kind": "eval", "update": numbers[-1], "success": 0.5, "by_kind": {"cancel": {"n": 3}}})
    assert guard is not None
    assert guard.failures == 0


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def log_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after wandb's own header of seven bytes: blocks of 32 KiB, each chunk with a header of
    a checksum (4), its length (2) and its type (1: whole, 2: first, 3: middle, 4: last)."""
    at, held = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        held = content[at + 7 : at + 7 + length] if kind in (1, 2) else held + content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield held


def offline_rows(out: Path) -> list[dict[str, str]]:
    """Histories of offline runs in the order of the runs, by wandb's own messages."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(out.rglob("*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: item.value_json for item in items})
    return rows


def test_only_numbers_go_to_a_tracker_under_their_own_names() -> None:
    record = {"kind": "eval", "update": 3, "part/answer": 0.5, "by": {"bank": {"n": 2}}, "none": None, "text": "x"}
    assert numbers_of({**record, "ci": [0.1, 0.2], "nan": float("nan")}) == {"part/answer": 0.5, "by/bank/n": 2.0}
    assert numbers_of({"kind": "alarm", "update": 3, "alarm": "kl", "value": 2.0, "limit": 0.5}) == {"alarm/kl": 2.0}


def test_tensorboard_event_files_are_read_back(tmp_path: Path) -> None:
    log(tmp_path / "run", "tensorboard", range(1, 4))
    assert scalars(tmp_path / "run") == {
        "part/answer": [(1, 0.1), (2, 0.2), (3, 0.3)],
        "success": [(3, 0.5)],
        "by_kind/cancel/n": [(3, 3.0)],
    }


def test_a_resumed_run_takes_back_what_tensorboard_has_beyond_its_checkpoint(tmp_path: Path) -> None:
    log(tmp_path / "run", "tensorboard", range(1, 6))
    log(tmp_path / "run", "tensorboard", range(3, 5), done=2)
    assert scalars(tmp_path / "run")["part/answer"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_a_run_that_begins_anew_takes_back_all_that_tensorboard_has(tmp_path: Path) -> None:
    log(tmp_path / "run", "tensorboard", range(3))
    log(tmp_path / "run", "tensorboard", range(2))
    assert scalars(tmp_path / "run")["part/answer"] == [(0, 0.0), (1, 0.1)]


def test_wandb_offline_holds_every_record_and_goes_on_as_the_same_run(tmp_path: Path) -> None:
    log(tmp_path / "run", "wandb", range(1, 3))
    log(tmp_path / "run", "wandb", range(3, 4), done=2)
    rows = offline_rows(tmp_path / "run")
    assert [(row["_step"], row["part/answer"]) for row in rows if "part/answer" in row] == [
        ("1", "0.1"),
        ("2", "0.2"),
        ("3", "0.3"),
    ]
    assert any(row.get("success") == "0.5" for row in rows)
    assert len({file.name for file in (tmp_path / "run").rglob("*.wandb")}) == 1  # one id, two sessions


def test_trackio_holds_every_record_and_goes_on_as_the_same_run(tmp_path: Path, trackio_folder: Path) -> None:
    log(tmp_path / "run", "trackio", range(1, 3))
    log(tmp_path / "run", "trackio", range(3, 4), done=2)
    with sqlite3.connect(trackio_folder / "envace.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    assert [step for _, step, metrics in rows if "part/answer" in str(metrics)] == [1, 2, 3]


QUIET = """
import sys
from pathlib import Path
from envace.runs import RunFolder
from envace.runs.trackers import tracking
folder = RunFolder.create(Path(sys.argv[1]), {}, resume=False)
with tracking(folder, sys.argv[2], config={}, done=0):
    folder.log({"kind": "update", "update": 1, "loss": 0.5})
print("result")
"""


@pytest.mark.parametrize("name", NAMES)
def test_standard_output_holds_the_result_alone(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", QUIET, str(tmp_path / "run"), name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"


@pytest.mark.parametrize("name", NAMES)
def test_no_secret_is_sent(tmp_path: Path, trackio_folder: Path, name: str) -> None:
    log(tmp_path / "run", name, range(1, 2))
    place = trackio_folder if name == "trackio" else tmp_path
    contents = [file.read_bytes() for file in place.rglob("*") if file.is_file()]
    assert not any(b"sk-not-to-be-told" in content for content in contents)
    # The rest of the config is there, so the search would have found it.
    assert any(b"scenarios_per_update" in content for content in contents)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_before_training_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find(wanted))
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        train(load_recipe({"tracker": name}), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    check_tracker("none")


def test_a_tracker_that_does_not_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable:
        def __init__(self, *arguments: Any) -> None:
            raise OSError("no\nnetwork")

    monkeypatch.setattr(module, "WandB", Unreachable)
    folder = RunFolder.create(tmp_path / "run", {}, resume=False)
    with (
        pytest.raises(ConfigError, match="wandb does not begin: OSError: no network"),
        tracking(folder, "wandb", config={}, done=0),
    ):
        pass


class Broken:
    """A tracker that fails at everything."""

    closed = 0

    def log(self, numbers: dict[str, float], step: int) -> None:
        raise ConnectionError("gone\naway")

    def close(self) -> None:
        self.closed += 1
        raise ConnectionError("gone")


def test_a_failing_tracker_is_said_once_and_counted() -> None:
    heard: list[str] = []
    guard = Guard("wandb", Broken(), heard.append)
    for number in range(3):
        guard.log({"kind": "update", "update": number, "loss": 0.1})
    guard.close()
    assert guard.failures == 4
    assert heard == [
        "tracker wandb fails (ConnectionError: gone away); the run goes on, and metrics.jsonl holds everything"
    ]


def test_a_tracker_that_never_closes_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()

    class Stuck(Broken):
        def close(self) -> None:
            release.wait(60)

    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    guard = Guard("wandb", Stuck(), lambda text: None)
    guard.close()
    release.set()
    assert guard.failures == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError, None])
def test_a_tracker_is_closed_at_every_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException] | None
) -> None:
    class Counted:
        """Remembers what it got."""

        def __init__(self) -> None:
            self.steps: list[int] = []
            self.closed = 0

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.steps.append(step)

        def close(self) -> None:
            self.closed += 1

    tracker = Counted()
    maker: Callable[..., Counted] = lambda *arguments: tracker  # noqa: E731
    monkeypatch.setattr(module, "TensorBoard", maker)
    folder = RunFolder.create(tmp_path / "run", {}, resume=False)

    def run() -> None:
        with tracking(folder, "tensorboard", config={}, done=0):
            folder.log({"kind": "update", "update": 4, "loss": 0.1})
            if end is not None:
                raise end

    if end is None:
        run()
    else:
        with pytest.raises(end):
            run()
    folder.log({"kind": "update", "update": 5, "loss": 0.1})  # nobody listens any more
    assert (tracker.steps, tracker.closed) == ([4], 1)


def test_a_whole_run_is_tracked(tmp_path: Path) -> None:
    settings = {
        "updates": 2,
        "scenarios_per_update": 2,
        "group_size": 2,
        "data": {"train": 4},
        "eval": {"every": 1, "scenarios": 2},
        "limits": {"max_length": 120, "max_step_tokens": 24},
        "tracker": "tensorboard",
    }
    summary = train(load_recipe(settings), out=tmp_path / "run")
    assert summary["tracker_failures"] == 0
    records = RunFolder.open(tmp_path / "run").metrics("update")
    assert scalars(tmp_path / "run")["reward"] == [(r["update"], pytest.approx(r["reward"], abs=1e-5)) for r in records]
    assert len(scalars(tmp_path / "run")["success"]) == 3


def test_a_warm_up_is_tracked_by_its_steps(tmp_path: Path) -> None:
    settings = {
        "model": "new",
        "sft": {"demonstrations": 8, "steps": 12, "batch_size": 2},
        "tracker": "tensorboard",
    }
    sft(load_recipe(settings), out=tmp_path / "run")
    records = RunFolder.open(tmp_path / "run").metrics("sft")
    assert scalars(tmp_path / "run")["loss"] == [(r["step"], pytest.approx(r["loss"], abs=1e-4)) for r in records]
    assert [record["step"] for record in records] == [10, 12]
