"""`envace sft`: supervised warm-up on demonstrations."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envace.errors import DataError, RunError
from envace.jobs.display import Display, Silent
from envace.jobs.models import MODEL_FOLDER, load
from envace.jobs.worlds import World, open_world
from envace.models.formats import StarterFormat, listing
from envace.models.transcripts import random_stream
from envace.prompts import load_prompts
from envace.runs import RunFolder
from envace.runs.trackers import check_tracker, tracking
from envace.scenarios import Scenario
from envace.scenarios.conversations import recorded_conversation
from envace.scenarios.packages import dump_line
from envace.starter.policy import new_model, new_tokenizer
from envace.training.checkpoints import (
    Loaded,
    latest,
    load_state,
    load_weights,
    prune,
    save_checkpoint,
    save_model,
    set_aside,
)
from envace.training.demonstrations import (
    Style,
    SupervisedRow,
    demonstrated,
    demonstrations_of,
    rows_of_all,
    under_fresh_ids,
)
from envace.training.recipe import Recipe
from envace.training.sft import MuonAdam, batches, sft_step
from envace.types import Author, Message, Role

LOG_EVERY = 10
TOKENIZER_LESSONS = 4000
"""Conversations that a new tokenizer is trained on."""
CHECKPOINT_EVERY = 200


def sft(
    recipe: Recipe, *, out: Path | None = None, resume: bool = False, display: Display | None = None
) -> dict[str, Any]:
    """Warm a model up on demonstrations of the recipe's world, and write it to the run folder.

    `model: new` makes a fresh starter model with a tokenizer trained on the demonstrations.

    Returns:
        `run`, `model` (paths), `loss` (nats a learned token, mean of the last tenth), `steps`, `seconds`,
        `tokens_per_s`.

    Raises:
        EnvaceError: As its subclasses say.
    """
    return asyncio.run(_sft(recipe, out or Path("runs") / recipe.name, resume, display or Silent()))


async def _sft(recipe: Recipe, out: Path, resume: bool, display: Display) -> dict[str, Any]:
    torch.set_num_threads(recipe.threads)
    started = time.perf_counter()
    check_tracker(recipe.tracker)
    async with open_world(recipe) as world:
        folder = RunFolder.create(out, recipe.model_dump(mode="json"), resume=resume)
        if (folder.path / MODEL_FOLDER).exists():
            raise RunError(f"{out} is finished: all {recipe.sft.steps} steps are done. Ask for more in another run.")
        lessons = await _lessons(recipe, world, display)
        loaded = _student(recipe, world, lessons)
        rows = rows_of_all(loaded.format, world.specs, lessons, style_of(recipe))
    tokens, losses = _train(recipe, folder, loaded, rows, display)
    save_model(folder.path / MODEL_FOLDER, loaded, dtype=torch.bfloat16 if recipe.model == "new" else torch.float32)
    prune(folder.checkpoints, 0, prefix="sft")
    seconds = time.perf_counter() - started
    return {
        "run": str(folder.path),
        "model": str(folder.path / MODEL_FOLDER),
        "loss": float(np.mean(losses[-max(1, len(losses) // 10) :])) if losses else None,
        "steps": recipe.sft.steps,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds),
    }


Lesson = tuple[Scenario, list[Message]]
"""A scenario, and a conversation in it after the opening."""


def style_of(recipe: Recipe) -> Style:
    """How the recipe turns conversations into rows."""
    return Style(
        rows=recipe.sft.rows,
        thinking=recipe.sft.thinking,
        roles=frozenset([Role.ACT]) if recipe.sft.roles == "act" else frozenset(Role),
        layout=recipe.layout,
        prompts=load_prompts(recipe.prompts),
    )


async def _lessons(recipe: Recipe, world: World, display: Display) -> list[Lesson]:
    """Conversations to learn from: recorded ones, or where there is an oracle, its careless demonstrations."""
    wanted = recipe.sft.demonstrations
    if not world.executable:
        scenarios = await world.scenarios("sft", wanted)
        display.say(f"learning from {len(scenarios)} recorded conversations")
        return [(scenario, recording_of(scenario)) for scenario in scenarios]
    display.say(f"drawing {wanted} demonstrations")
    scenarios = await _repeated(recipe, world, wanted)
    demonstrations = await demonstrations_of(
        world.worker, world.specs, scenarios, carelessness=recipe.sft.carelessness, seed=recipe.data.seed + 1
    )
    return [(scenario, demonstrated(made)) for scenario, made in zip(scenarios, demonstrations, strict=True)]


def recording_of(scenario: Scenario) -> list[Message]:
    """What was said after the opening. Raises DataError where nothing was recorded."""
    said = recorded_conversation(scenario.reference)
    if not said:
        raise DataError(f"Scenario {scenario.id!r} has no recorded conversation (`reference`) to learn from.")
    return said


async def _repeated(recipe: Recipe, world: World, wanted: int) -> list[Scenario]:
    """So many scenarios; a world with fewer repeats them, renamed."""
    distinct = await world.scenarios("sft", wanted)
    scenarios = [distinct[i % len(distinct)] for i in range(wanted)]
    if recipe.sft.fresh_ids:
        for i in range(len(distinct), wanted):
            scenarios[i] = under_fresh_ids(scenarios[i], random_stream(recipe.data.seed, i))
    return scenarios


def _student(recipe: Recipe, world: World, lessons: list[Lesson]) -> Loaded:
    if recipe.model != "new":
        return load(recipe.model, recipe)
    tokenizer = new_tokenizer(_texts(world, lessons[:TOKENIZER_LESSONS]))
    return Loaded(model=new_model(tokenizer, seed=recipe.seed), format=StarterFormat(tokenizer))


def _texts(world: World, lessons: list[Lesson]) -> list[str]:
    """What the tokenizer is trained on."""
    texts = []
    for scenario, said in lessons:
        texts += [listing(world.specs[scenario.environment].tools), scenario.instruction, said[-1].content]
        for message in said:
            texts += [f"{call.name} {dump_line(call.arguments)}" for call in message.calls]
            texts += [message.content] if message.author is Author.TOOL else []
    return texts


def _train(
    recipe: Recipe, folder: RunFolder, loaded: Loaded, rows: list[SupervisedRow], display: Display
) -> tuple[float, list[float]]:
    """Every step of the warm-up that is not done yet. Returns tokens seen and losses."""
    settings = recipe.sft
    optimizer = MuonAdam(loaded.model, matrix_lr=settings.matrix_lr, lr=settings.lr)
    done = _resume(folder, loaded, optimizer)
    with tracking(
        folder,
        recipe.tracker,
        config=recipe.model_dump(mode="json"),
        done=done,
        project=recipe.tracker_project,
        say=display.say,
    ):
        return _steps(recipe, folder, loaded, optimizer, rows, done, display)


def _steps(
    recipe: Recipe,
    folder: RunFolder,
    loaded: Loaded,
    optimizer: MuonAdam,
    rows: list[SupervisedRow],
    done: int,
    display: Display,
) -> tuple[float, list[float]]:
    """The steps after `done`."""
    settings = recipe.sft
    tokens, losses = 0.0, []
    display.start("warm-up", settings.steps)
    for step, batch in enumerate(batches(rows, size=settings.batch_size, steps=settings.steps, seed=recipe.seed), 1):
        if step <= done:
            continue
        record = sft_step(
            loaded.model, optimizer, batch, step=step - 1, steps=settings.steps, pad_id=loaded.format.pad_id
        )
        tokens += record["tokens"]
        losses.append(record["loss"])
        if step % LOG_EVERY == 0 or step == settings.steps:
            folder.log({"kind": "sft", "update": 0, "step": step, **record})
        if step % CHECKPOINT_EVERY == 0 and step < settings.steps:
            save_checkpoint(folder.checkpoints / f"sft-{step:06d}", loaded, optimizer, {"step": step})
            prune(folder.checkpoints, 1, prefix="sft")
        display.advance("warm-up", step, f"loss {record['loss']:.3f}")
    display.finish("warm-up")
    return tokens, losses


def _resume(folder: RunFolder, loaded: Loaded, optimizer: MuonAdam) -> int:
    """Go back to the newest whole checkpoint of the warm-up; returns the step it holds."""
    set_aside(folder.checkpoints, prefix="sft")
    path = latest(folder.checkpoints, prefix="sft")
    if path is None:
        folder.rewind_steps(0)
        return 0
    state = load_state(path)
    load_weights(loaded.model, path)
    optimizer.load_state_dict(state["optimizer"])
    folder.rewind_steps(int(state["step"]))
    return int(state["step"])
