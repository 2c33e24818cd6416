"""The training loop on a tiny model: resuming equals never having stopped, and nothing real is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envace.errors import TrainingError
from envace.models.formats import StarterFormat
from envace.models.local import LocalPolicy
from envace.runs import RunFolder
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.training.arms import ARMS
from envace.training.checkpoints import Loaded
from envace.training.demonstrations import SupervisedRow
from envace.training.grpo import Trainer
from envace.training.metrics import is_flat
from envace.training.recipe import Recipe, load_recipe
from envace.training.sft import MuonAdam, sft_step
from envace.types import Group, StopReason, Trajectory

TIMING = ("seconds_rollout", "seconds_update", "rollout_tokens_per_s", "update_tokens_per_s", "memory_gb")


def recipe(**changes: Any) -> Recipe:
    return load_recipe(
        {
            "updates": 4,
            "scenarios_per_update": 2,
            "group_size": 3,
            "learning_rate": 1e-2,
            "checkpoint_every": 2,
            "eval": {"every": 2},
            "limits": {"max_steps": 3, "max_length": 300, "max_step_tokens": 64},
            **changes,
        }
    )


LOOKUP = {"order_id": "#W111111"}
ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}


@pytest.fixture(scope="module")
def warm(new_tiny: Callable[..., Any], form: StarterFormat, retail: EnvironmentSpec, say: Any) -> Any:
    """A tiny model that has seen a few endings of one request, so that its rollouts differ in what they earn."""
    model = new_tiny()
    look, cancel = say.call("get_order", **LOOKUP), say.call("cancel_order", **LOOKUP)
    shipped, confirmed = say.response({**ORDER, "status": "shipped"}), say.response({"status": "cancelled"})
    endings = [
        [look, say.response(ORDER), cancel, confirmed, say.reply("Done, refund 120.")],
        [look, shipped, say.reply("Sorry, already shipped.")],
        [look, shipped, cancel, confirmed, say.reply("Done.")],
        [say.reply("Done.")],
    ]
    rows = []
    for ending in endings:
        parts = [(form.open(retail.tools, say.user("cancel order #W111111, please")), False)]
        for number, step in enumerate(ending):
            header = form.encode([form.tool_header() if number % 2 else form.act_header()])
            parts += [(step, True)] if number == 0 else [(header, False), (step, True)]
        rows.append(
            SupervisedRow(
                ids=np.array([token for ids, _ in parts for token in ids]),
                learn=np.array([learn for ids, learn in parts for _ in ids]),
            )
        )
    optimizer = MuonAdam(model, matrix_lr=0.02, lr=0.02)
    for step in range(60):
        sft_step(model, optimizer, rows, step=step, steps=60, pad_id=form.pad_id)
    return model.eval()


@pytest.fixture
def trainer(
    tmp_path: Path,
    worker: Worker,
    retail: EnvironmentSpec,
    warm: Any,
    form: StarterFormat,
    cancel_task: Callable[..., Scenario],
) -> Callable[..., Trainer]:
    """Makes a trainer of three tasks in a named run folder; its evaluation counts how often it was asked."""

    def build(name: str, settings: Recipe, *, resume: bool = False) -> Trainer:
        folder = RunFolder.create(tmp_path / name, settings.model_dump(mode="json"), resume=resume)

        async def evaluate(loaded: Loaded, number: int) -> dict[str, Any]:
            return {"success": 0.5}

        tasks = [cancel_task(status) for status in ("pending", "shipped", "delivered")]
        if not settings.executes:
            tasks = [task.public() for task in tasks]
        other = Loaded(model=copy.deepcopy(warm), format=form)
        played = settings.facts.rehearser
        return Trainer(
            recipe=settings,
            folder=folder,
            loaded=Loaded(model=copy.deepcopy(warm), format=form),
            specs={"retail": retail},
            scenarios=tasks,
            worker=worker,
            evaluate=evaluate,
            second=other if played == "second" else None,
            simulator=LocalPolicy(other.model, form) if played == "simulator" else None,
        )

    return build


def flat(loaded: Loaded | None) -> torch.Tensor:
    assert loaded is not None
    return torch.cat([p.detach().flatten() for p in loaded.model.parameters()])


def weights(trainer: Trainer) -> torch.Tensor:
    return flat(trainer.loaded)


def told(trainer: Trainer) -> list[dict[str, Any]]:
    """The metrics without those of the clock, and without the count that belongs to the worker."""
    ignored = (*TIMING, "real_calls")
    return [{k: v for k, v in record.items() if k not in ignored} for record in trainer.folder.metrics()]


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "sft"])
async def test_a_resumed_run_is_the_run_that_never_stopped(trainer: Callable[..., Trainer], arm: str) -> None:
    whole = trainer("whole", recipe(arm=arm))
    await whole.run()

    parted = trainer("parted", recipe(arm=arm))
    for number in (1, 2, 3):  # killed in the middle of update 4: update 3 was logged, the checkpoint is of update 2
        if number == 1:
            await parted._evaluate(0)
        parted.folder.log(await parted._update(number))
        if number == 2:
            await parted._evaluate(2)
            parted._checkpoint(2)
    resumed = trainer("parted", recipe(arm=arm), resume=True)
    assert resumed.resume() == 2
    await resumed.run()

    assert told(resumed) == told(whole)
    if whole.second is not None:
        assert torch.equal(flat(resumed.second), flat(whole.second))
        assert not torch.equal(flat(whole.second), weights(whole))
    assert torch.equal(weights(resumed), weights(whole))
    assert max(record["reward_std"] for record in whole.folder.metrics("update")) > 0.1
    assert not torch.equal(weights(whole), weights(trainer("fresh", recipe(arm=arm))))


async def test_a_resumed_run_draws_the_scenarios_that_the_first_would_have_drawn(
    trainer: Callable[..., Trainer],
) -> None:
    settings = recipe(group_size=2, resample=1, eval={"every": 0})
    whole, parted = trainer("whole", settings), trainer("parted", settings)
    await whole.run()
    await parted._evaluate(0)
    for number in (1, 2):
        parted.folder.log(await parted._update(number))
    parted._checkpoint(2)
    resumed = trainer("parted", settings, resume=True)
    assert resumed.resume() == 2
    assert resumed.cursor == parted.cursor
    await resumed.run()
    assert told(resumed) == told(whole)
    assert sum(record["resampled"] for record in whole.folder.metrics("update")) > 0


async def test_resuming_without_a_checkpoint_starts_anew(trainer: Callable[..., Trainer]) -> None:
    first = trainer("run", recipe(updates=2))
    await first._evaluate(0)
    first.folder.log(await first._update(1))
    again = trainer("run", recipe(updates=2), resume=True)
    assert again.resume() == 0
    await again.run()
    assert [(r["kind"], r["update"]) for r in again.folder.metrics()] == [
        ("eval", 0),
        ("update", 1),
        ("update", 2),
        ("eval", 2),
    ]


async def test_training_by_rehearsal_makes_no_real_call(trainer: Callable[..., Trainer], worker: Worker) -> None:
    for arm in ("envace", "published", "shared-baseline", "per-role", "grpo-simulator"):
        one = trainer(arm, recipe(arm=arm, updates=1))
        await one.run()
        assert one.folder.metrics("update")[0]["real_calls"] == 0
    assert worker.real_calls == 0


async def test_groups_without_spread_are_drawn_anew_with_further_scenarios(trainer: Callable[..., Trainer]) -> None:
    for seed in range(20):
        plain = trainer(f"plain-{seed}", recipe(group_size=2, seed=seed))
        as_drawn = await plain._collect(1)
        flat = sum(is_flat(group) for group in as_drawn.groups)
        assert (as_drawn.resampled, plain.cursor, len(as_drawn.groups)) == (0, 2, 2)
        if flat:
            break
    assert flat > 0  # else this would show nothing
    one = trainer("run", recipe(group_size=2, seed=seed, resample=20))
    drawn_anew = await one._collect(1)
    assert drawn_anew.resampled >= flat
    assert (one.cursor, len(drawn_anew.groups)) == (2 + drawn_anew.resampled, 2)
    assert all(not is_flat(group) for group in drawn_anew.groups)
    assert [t.group for group in drawn_anew.groups for t in group.trajectories] == [0, 0, 1, 1]


async def test_records_say_what_was_sampled_token_by_token(
    trainer: Callable[..., Trainer], form: StarterFormat
) -> None:
    one = trainer("run", recipe(updates=1))
    await one.run()
    records = one.folder.trajectories()
    assert [record["index"] for record in records] == [0, 1, 2]
    assert {record["update"] for record in records} == {1}
    for record in records:
        for segment in record["segments"]:
            assert segment["text"] == form.decode(segment["ids"])
            assert (segment["logprobs"] is None) == (segment["role"] is None)


def test_every_scenario_comes_once_before_any_comes_again(trainer: Callable[..., Trainer]) -> None:
    one = trainer("run", recipe())
    picked = [scenario.id for _ in (1, 2, 3) for scenario in one._pick(2)]  # 3 updates of 2 are 2 passes over 3
    assert sorted(picked[:3]) == sorted(picked[3:]) == sorted({s.id for s in one.scenarios})


def group(scored: int, unscored: int) -> Group:
    made = [
        Trajectory(scenario_id="s", environment_id="e", kind="k", group=0, index=index, stop=StopReason.REPLIED)
        for index in range(scored + unscored)
    ]
    for trajectory in made[:scored]:
        trajectory.reward = 0.5
    for trajectory in made[scored:]:
        trajectory.error = "WorkerDied: gone"
    return Group(scenario_id="s", trajectories=made)


def test_a_batch_of_bad_rollouts_ends_the_run_with_its_reason(trainer: Callable[..., Trainer]) -> None:
    one = trainer("run", recipe())
    one._check_scored([group(2, 2)])
    with pytest.raises(TrainingError, match="Only 1 of 4 trajectories could be scored; the first failure: WorkerDied"):
        one._check_scored([group(1, 3)])
