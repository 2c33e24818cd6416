"""The command line: one clear error for a user's mistake, one JSON object for a machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import envace
from envace.cli import main

TINY = (
    "updates=2", "scenarios_per_update=2", "group_size=2", "data.train=4", "data.heldout=4", "data.unseen=2",
    "eval.every=0", "eval.scenarios=2", "eval.fidelity=2", "limits.max_length=120",
)  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    before, sys.argv = sys.argv, ["envace", *arguments]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.argv = before
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "my.yaml"
    path.write_text("name: mine\n")
    return str(path)


def test_an_unknown_key_names_the_nearest_one(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    code, out, err = run(capsys, "train", recipe, "updats=3")

    assert code == 2
    assert "updats" in err and "Did you mean updates?" in err
    assert "Traceback" not in err and not out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "nowhere.yaml"), "nowhere.yaml"),
        (("train", "RECIPE", "model=nowhere"), "no model 'nowhere'"),
        (("train", "RECIPE", "world=nowhere"), "nowhere is not a folder"),
        (("train", "RECIPE", "group_size=1"), "group_size"),
        (("eval", "RECIPE", "--model", "nowhere"), "no model 'nowhere'"),
        (("report", "nowhere"), "nowhere"),
        (("audit", "nowhere"), "nowhere is not a folder"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    named = [recipe if argument == "RECIPE" else argument for argument in arguments]
    if named[0] == "train":
        named += ["--out", str(tmp_path / "run")]

    code, out, err = run(capsys, *named)

    assert code == 2
    assert said in err and err.startswith("error: ") and len(err.strip().splitlines()) == 1
    assert not out


def test_train_eval_and_report_end_to_end(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    out = str(tmp_path / "run")

    code, text, err = run(capsys, "train", recipe, *TINY, "--out", out, "--json")
    assert code == 0, err
    trained = json.loads(text)
    assert {"arm", "updates", "reward", "tokens_per_s", "run", "real_calls_in_training"} <= set(trained)
    assert trained["real_calls_in_training"] == 0

    code, text, err = run(capsys, "eval", recipe, *TINY, "--model", out, "--out", out, "--json")
    assert code == 0, err
    assert {"success", "do", "decline", "n", "ci", "fidelity", "unseen"} <= set(json.loads(text))

    code, text, err = run(capsys, "report", out, "--json")
    assert code == 0, err
    assert Path(json.loads(text)["report"]).stat().st_size > 10_000


def test_a_damaged_checkpoint_is_named(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(capsys, "train", recipe, *TINY, "--out", str(out), "--json")
    weights = out / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    code, _, err = run(capsys, "eval", recipe, *TINY, "--model", str(out))

    assert code == 2
    assert "model.safetensors is damaged" in err


def test_the_gold_reference_passes_and_the_floor_fails(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    _, gold, _ = run(capsys, "eval", recipe, "data.heldout=60", "data.unseen=20", "--model", "gold", "--json")
    _, floor, _ = run(capsys, "eval", recipe, "data.heldout=60", "data.unseen=20", "--model", "nothing", "--json")

    assert json.loads(gold)["success"] == 1.0 and json.loads(gold)["unseen"]["success"] == 1.0
    assert json.loads(floor)["success"] == 0.0


def test_an_interrupted_training_goes_on(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    longer = [*TINY, "updates=400", "checkpoint_every=1"]
    command = [sys.executable, "-m", "envace", "train", recipe, *longer, "--out", str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A runner in the background ignores Ctrl-C, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not list((out / "checkpoints").glob("update-*[0-9]")) and time.monotonic() < deadline:
        time.sleep(0.1)

    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()

    assert process.returncode == 130
    assert "goes on with --resume" in err and "Traceback" not in err
    assert list((out / "checkpoints").glob("update-*[0-9]"))


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--version")

    assert (code, out, err) == (0, f"envace {envace.__version__}\n", "")


def test_a_dry_run_is_a_table_or_one_object_and_ends_well_whatever_lacks(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "run")
    code, shown, _ = run(capsys, "train", recipe, "group_size=2", "--dry-run", "--out", out)
    assert code == 0
    assert "group_size: 2" in shown and "kv_cache" in shown and "missing: 1" in shown

    code, shown, _ = run(capsys, "train", recipe, "group_size=2", "--dry-run", "--json", "--out", out)
    assert code == 0
    (lack,) = json.loads(shown)["missing"]
    assert lack["what"] == "groups larger than 2"
    assert not Path(out).exists()


def test_export_says_what_it_wrote(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "exported")
    code, shown, _ = run(capsys, "export", "starter", "--out", out, "--dtype", "float16", "--json")
    assert code == 0
    assert json.loads(shown)["dtype"] == "float16"
    assert run(capsys, "export", "starter", "--out", out)[0] == 2
    assert run(capsys, "export", "starter", "--out", str(tmp_path / "other"), "--dtype", "int4")[0] == 2
