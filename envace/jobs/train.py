"""`envace train`: role-wise GRPO on a recipe."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import torch

from envace.benchmarks import summarise
from envace.errors import ConfigError, RunError
from envace.jobs.display import Display, Silent
from envace.jobs.evaluate import rehearsals, try_scenarios
from envace.jobs.models import MODEL_FOLDER, load, resolve
from envace.jobs.worlds import World, open_world
from envace.runs import RunFolder
from envace.runs.folder import data_hash
from envace.runs.trackers import check_tracker, tracking
from envace.training.checkpoints import Loaded, file_hash, save_model
from envace.training.group_size import dead_groups_line, measured_line
from envace.training.grpo import Trainer
from envace.training.recipe import Recipe

SHOWN_REHEARSALS = 8
"""Held-out scenarios rehearsed after training, for the report."""


def train(
    recipe: Recipe, *, out: Path | None = None, resume: bool = False, display: Display | None = None
) -> dict[str, Any]:
    """Train the recipe's model by the recipe's arm, and write everything to the run folder.

    Returns:
        `arm`, `updates`, `reward` (mean of the last update), `loss` (of the last), `success` (first and last
        evaluation), `feasible_share` (first and last), `real_calls_in_training`, `tokens_per_s` (sampled),
        `update_tokens_per_s` (through the optimiser step), `memory_gb` (peak), `seconds`, `alarms` (names of those that
        went off), `best` (evaluation that `best/` holds the weights of), `run`, `tracker_failures` (with a tracker).

    Raises:
        EnvaceError: As its subclasses say.
    """
    return asyncio.run(_train(recipe, out or Path("runs") / recipe.name, resume, display or Silent()))


async def _train(recipe: Recipe, out: Path, resume: bool, display: Display) -> dict[str, Any]:
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    check_precision(recipe)
    check_tracker(recipe.tracker)
    loaded = load(recipe.model, recipe)
    async with open_world(recipe) as world, open_world(recipe) as judge:
        check_oracle(recipe, world)
        # The folder comes last: a mistake in the recipe leaves nothing behind.
        folder = RunFolder.create(out, recipe.model_dump(mode="json"), resume=resume, inputs=_inputs(recipe, world))
        trainer = await _trainer(recipe, folder, loaded, world, judge, display)
        done = trainer.resume()
        if done >= recipe.updates and (folder.path / MODEL_FOLDER).exists():
            raise RunError(f"{out} is finished: all {recipe.updates} updates are done. Ask for more in another run.")
        for path in trainer.set_aside:
            display.say(f"a checkpoint is damaged and was set aside: {path}")
        if resume:
            display.say(
                f"going on after update {done}" if done else "no whole checkpoint yet: starting from the first update"
            )
        display.say(dead_groups_line(recipe.group_size))
        display.start("training", recipe.updates)
        with tracking(
            folder,
            recipe.tracker,
            config=recipe.model_dump(mode="json"),
            done=done,
            project=recipe.tracker_project,
            say=display.say,
        ) as tracker:
            await trainer.run()
        display.finish("training")
        save_model(folder.path / MODEL_FOLDER, loaded)
        shown = await judge.scenarios("heldout", SHOWN_REHEARSALS)
        folder.log_trajectories(await rehearsals(recipe, judge, loaded, shown, update=recipe.updates))
    summary = train_summary(recipe, folder, time.perf_counter() - started)
    return {**summary, "tracker_failures": tracker.failures} if tracker else summary


def check_precision(recipe: Recipe) -> None:
    """Steps of a small rate are lost where a weight has eight bits of mantissa."""
    if recipe.dtype == "bfloat16" and recipe.lora is None:
        raise ConfigError(
            "dtype=bfloat16 would train weights in bfloat16, which loses most steps of a small learning rate. Use "
            "dtype=float32, or lora, whose adapters stay in float32."
        )


def _inputs(recipe: Recipe, world: World) -> dict[str, str]:
    """Hashes of what the recipe names by a path."""
    scenarios = [s.model_dump_json() for package in world.packages or () for s in package.scenarios]
    return {
        "environments": data_hash([spec.code for spec in world.specs.values()]),
        "scenarios": data_hash(scenarios),
        "model": _model_hash(resolve(recipe.model)),
    }


def _model_hash(model: Path | str) -> str:
    """Of a model of the hub, only its name: its files are the hub's to vouch for."""
    if isinstance(model, str):
        return data_hash([model])
    return data_hash([file_hash(file) for file in sorted(model.glob("*.safetensors"))])


def check_oracle(recipe: Recipe, world: World) -> None:
    """Rehearsed arms are rewarded by what the oracle program would have done."""
    lacking = [name for name, spec in world.specs.items() if not spec.has_oracle]
    if lacking and recipe.arm != "grpo-real":
        raise ConfigError(
            f"arm {recipe.arm} with reward {recipe.reward} needs an oracle, and environment {lacking[0]!r} defines "
            "no `solve`. Write one, or train with arm=grpo-real."
        )


async def _trainer(
    recipe: Recipe, folder: RunFolder, loaded: Loaded, world: World, judge: World, display: Display
) -> Trainer:
    # Drawing scenarios runs the oracle on their states. The judge's worker does it, so that the one that training
    # talks to has never held a state.
    scenarios = await judge.scenarios("train", recipe.data.train)
    if recipe.arm != "grpo-real":
        scenarios = [scenario.public() for scenario in scenarios]
    tuning = await judge.scenarios("tuning", recipe.eval.scenarios)

    async def evaluate(model: Loaded, update: int) -> dict[str, Any]:
        return summarise(await try_scenarios(recipe, judge, model, tuning, display=Silent()))

    def progress(record: dict[str, Any]) -> None:
        if record["kind"] == "eval":
            share = "undecided" if record["success"] is None else f"{record['success']:.3f}"
            display.say(f"update {record['update']}: real success {share} of {record['n']} held-out scenarios")
            if record["update"] == 0 and record["success"] is not None:
                display.say(measured_line(record["success"], recipe.group_size))
        elif record["kind"] == "alarm":
            display.say(record["said"])
        else:
            display.advance("training", record["update"], _note(record))

    return Trainer(
        recipe=recipe,
        folder=folder,
        loaded=loaded,
        specs=world.specs,
        scenarios=scenarios,
        worker=world.worker,
        evaluate=evaluate,
        progress=progress,
    )


def _note(record: dict[str, Any]) -> str:
    return f"reward {record['reward']:.3f}, {record['rollout_tokens_per_s']:.0f} tokens/s"


def train_summary(recipe: Recipe, folder: RunFolder, seconds: float) -> dict[str, Any]:
    """The last words of a run, from its records."""
    updates, evaluations = folder.metrics("update"), folder.metrics("eval")
    return {
        "arm": recipe.arm,
        "updates": len(updates),
        "reward": updates[-1]["reward"],
        "loss": updates[-1]["loss"],
        "success": [evaluations[0]["success"], evaluations[-1]["success"]],
        "feasible_share": [updates[0]["feasible_share"], updates[-1]["feasible_share"]],
        "real_calls_in_training": sum(update["real_calls"] for update in updates),
        "tokens_per_s": round(sum(u["sampled_tokens"] for u in updates) / sum(u["seconds_rollout"] for u in updates)),
        "update_tokens_per_s": round(
            sum(u["trained_tokens"] for u in updates) / sum(u["seconds_update"] for u in updates)
        ),
        "memory_gb": round(updates[-1]["memory_gb"], 2),
        "seconds": round(seconds, 1),
        "alarms": sorted({alarm["alarm"] for alarm in folder.metrics("alarm")}),
        "best": folder.results().get("best"),
        "run": str(folder.path),
    }
