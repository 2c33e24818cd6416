"""A data set without an environment, end to end: the real CM2 row, a loopback judge, the whole trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.judges import by_rule, said
from support.loopback import Loopback, Reply, in_a_thread

from envace.errors import ConfigError, RunError
from envace.jobs.evaluate import evaluate
from envace.jobs.sft import sft
from envace.jobs.train import train
from envace.runs import RunFolder
from envace.training.recipe import Recipe, load_recipe

ROW = Path(__file__).parents[1] / "data" / "cm2_row.json"
TINY = (
    f"world={ROW}", "reward=judged", "updates=1", "scenarios_per_update=1", "group_size=4", "eval.every=0",
    "eval.scenarios=1", "eval.fidelity=0", "data.heldout=1", "limits.max_length=2400", "limits.max_step_tokens=400",
    "limits.max_steps=6", "checkpoint_every=1", "trajectories_every=1",
)  # fmt: skip


@pytest.fixture
def server() -> Iterator[Loopback]:
    with in_a_thread() as started:
        yield started


def recipe(server: Loopback | None, *changes: str) -> Recipe:
    judge = {} if server is None else {
        "judge": {"model": f"{server.url}#tiny", "backoff": 0.0, "retries": 0, "endpoint": {"max_retries": 0}}
    }  # fmt: skip
    return load_recipe(judge, [*TINY, *changes])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A starter model that has learned the recorded conversation, more or less: it calls, is answered and replies."""
    out = tmp_path_factory.mktemp("warm") / "run"
    result = sft(recipe(None, "sft.steps=45", "sft.batch_size=1", "sft.lr=0.02", "sft.matrix_lr=0.02"), out=out)
    assert result["loss"] < 0.5
    return str(result["model"])


def spoken(question: dict[str, Any], turn: str) -> bool:
    """Passes what asks for a reply that an even number of characters was shown with: rollouts then differ."""
    return len(turn) % 2 == 0


@pytest.mark.parametrize("gate", ["true", "false"])
def test_the_cm2_row_trains_end_to_end_with_a_loopback_judge(
    server: Loopback, warm: str, tmp_path: Path, gate: str
) -> None:
    server.answers(by_rule(spoken))
    summary = train(recipe(server, f"gate={gate}", f"model={warm}"), out=tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    updates = folder.metrics("update")
    assert (summary["updates"], summary["real_calls_in_training"]) == (1, 0)
    assert all(0 <= record["reward"] <= 1 for record in updates)
    assert updates[0]["judge/calls"] > 0
    records = [r for r in folder.trajectories() if r["kind"] == "train"]
    assert len(records) == 4
    for record in records:
        decided = record["verdicts"]
        turns = {line["turn"] for line in decided}
        assert turns == set(range(1 + sum(m["author"] == "user" for m in record["messages"])))
        # Three turns; those that were not reached count 0.
        earned = sum(line["weight"] for line in decided if line["verdict"] == "pass") / 3
        assert record["reward"] == pytest.approx(earned)
    if gate == "false":
        talked = [record for record in records if any(m["author"] == "user" for m in record["messages"])]
        assert all(record["stop"] != "gated" for record in records)
        assert talked  # the user did speak again
    # An identical question is not asked again: what was decided is kept with the run.
    kept = [json.loads(line) for line in (tmp_path / "run" / "judge.jsonl").read_text().splitlines()]
    assert kept


def test_the_same_world_is_evaluated_by_rehearsal(server: Loopback, warm: str) -> None:
    server.answers(by_rule(lambda question, turn: True))
    result = evaluate(recipe(server), model=warm)
    assert result["n"] + result["undecided"] == 1
    assert 0 <= result["reward"] <= 1


def test_j2_a_judge_that_is_down_is_no_zero_and_ends_the_run(server: Loopback, warm: str, tmp_path: Path) -> None:
    server.answers(lambda asked: Reply("down", status=503))
    with pytest.raises(RunError, match=r"1 of 1 rehearsals could not be judged.*judge: "):
        train(recipe(server, f"model={warm}"), out=tmp_path / "run")


def test_prose_for_verdicts_ends_the_run_with_its_cause(server: Loopback, warm: str, tmp_path: Path) -> None:
    server.answers(lambda asked: said("I think it went rather well."))
    with pytest.raises(RunError, match="judge: "):
        train(recipe(server, f"model={warm}"), out=tmp_path / "run")


def test_items_for_a_judge_without_one_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set judge\.model"):
        train(recipe(None), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said_so"),
    [
        (("arm=grpo-real",), "tools but no code"),
        (("reward=contract",), r"Set reward=judged"),
        (("world=starter",), "has none"),
        (("world=starter", "reward=contract", "layout=prompted", "grounding=reference"), "no recorded conversation"),
    ],
)
def test_what_a_data_set_cannot_give_is_told(tmp_path: Path, changes: tuple[str, ...], said_so: str) -> None:
    with pytest.raises(ConfigError, match=said_so):
        train(recipe(None, *changes), out=tmp_path / "run")


def test_cut_rehearsals_count_in_an_evaluation_whatever_training_does_with_them(server: Loopback, warm: str) -> None:
    server.answers(by_rule(lambda question, turn: True))
    result = evaluate(recipe(server, "limits.truncated=drop", "limits.max_steps=1"), model=warm)
    assert (result["n"], result["undecided"]) == (1, 0)


def test_arm_sft_learns_recorded_conversations_and_is_judged_by_held_out_ones(tmp_path: Path) -> None:
    row = json.loads(ROW.read_text())
    row = row[0] if isinstance(row, list) else row
    rows = [{"id": f"r{n}", "messages": row["messages"][:4], "tools": row["tools"]} for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    changes = (f"world={tmp_path}/rows.jsonl", "reward=contract", "arm=sft", "group_size=2", "learning_rate=0.01")
    summary = train(recipe(None, *changes, "updates=3"), out=tmp_path / "run")
    before, after = RunFolder.open(tmp_path / "run").metrics("eval")
    assert after["held_out_loss"] < before["held_out_loss"]
    assert (summary["arm"], summary["reward"], summary["real_calls_in_training"]) == ("sft", None, 0)


def test_a_prompted_rehearser_without_room_is_refused_with_the_size_of_its_prompt(tmp_path: Path) -> None:
    starter = load_recipe(None, ["layout=prompted", "eval.scenarios=1", "data.train=4"])
    with pytest.raises(ConfigError, match=r"begins at \d+ tokens, and limits\.max_length is 448"):
        train(starter, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
