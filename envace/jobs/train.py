"""`envace train`: role-wise GRPO on a recipe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envace.benchmarks import summarise
from envace.envs.voices import rehearsal_prompt
from envace.errors import ConfigError, RunError
from envace.jobs.display import Display, Silent
from envace.jobs.endpoints import is_endpoint
from envace.jobs.evaluate import judged_evaluation, rehearsals, try_scenarios
from envace.jobs.judges import judge_of
from envace.jobs.models import MODEL_FOLDER, load, resolve
from envace.jobs.sft import recording_of, style_of
from envace.jobs.worlds import World, open_world
from envace.models.http import HttpPolicy
from envace.models.policy import Policy
from envace.models.wire import parse_address
from envace.prompts import load_prompts
from envace.rewards.judge import Judge
from envace.runs import RunFolder
from envace.runs.folder import data_hash
from envace.runs.trackers import check_tracker, tracking
from envace.scenarios import Scenario, opening
from envace.training.checkpoints import Loaded, file_hash, save_model
from envace.training.demonstrations import SupervisedRow, demonstrated, demonstrations_of, ends_well, rows_of_all
from envace.training.group_size import dead_groups_line, measured_line
from envace.training.grpo import SECOND, Lesson, Teach, Trainer
from envace.training.recipe import Recipe
from envace.training.sft import held_out_loss
from envace.types import Message, ToolCall

SHOWN_REHEARSALS = 8
"""Held-out scenarios rehearsed after training, for the report."""


VERDICTS = "judge.jsonl"
"""Where a run keeps what the judge decided; an identical question is not asked again."""


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
    async with (
        open_world(recipe) as world,
        open_world(recipe, like=world) as real,
        judge_of(recipe, cache=out / VERDICTS) as judge,
    ):
        check_world(recipe, world)
        if recipe.layout == "prompted" and not recipe.executes:
            _check_room(recipe, world, loaded, *await real.scenarios("train", 1))
        # The folder comes last: a mistake in the recipe leaves nothing behind.
        folder = RunFolder.create(out, recipe.model_dump(mode="json"), resume=resume, inputs=_inputs(recipe, world))
        trainer = await _trainer(recipe, folder, loaded, world, real, judge, display)
        done = trainer.resume()
        if done >= recipe.updates and (folder.path / MODEL_FOLDER).exists():
            raise RunError(f"{out} is finished: all {recipe.updates} updates are done. Ask for more in another run.")
        for path in trainer.set_aside:
            display.say(f"a checkpoint is damaged and was set aside: {path}")
        if resume:
            display.say(
                f"going on after update {done}" if done else "no whole checkpoint yet: starting from the first update"
            )
        if recipe.arm != "sft":
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
            try:
                await trainer.run()
            finally:
                if isinstance(trainer.simulator, HttpPolicy):
                    await trainer.simulator.aclose()
        display.finish("training")
        save_model(folder.path / MODEL_FOLDER, loaded)
        if trainer.second is not None:
            save_model(folder.path / SECOND, trainer.second)
        if real.executable:
            shown = await real.scenarios("heldout", SHOWN_REHEARSALS)
            records = await rehearsals(recipe, real, loaded, shown, update=recipe.updates, rehearser=trainer.second)
            folder.log_trajectories(records)
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
    scenarios = [scenario.model_dump_json() for source in world.given or () for scenario in source]
    tools = [str(tool) for spec in world.specs.values() if not spec.code for tool in spec.tools]
    hashes = {
        "environments": data_hash([*(spec.code for spec in world.specs.values()), *tools]),
        "scenarios": data_hash(scenarios),
        "model": _model_hash(resolve(recipe.model)),
        "prompts": data_hash(list(load_prompts(recipe.prompts).texts.values())),
    }
    simulated = recipe.simulator.model if recipe.facts.rehearser == "simulator" else None
    for name, model in (("rehearser", recipe.rehearser), ("simulator", simulated)):
        if model is not None and not is_endpoint(model):
            hashes[name] = _model_hash(resolve(model))
    return hashes


def _model_hash(model: Path | str) -> str:
    """Of a model of the hub, only its name: its files are the hub's to vouch for."""
    if isinstance(model, str):
        return data_hash([model])
    return data_hash([file_hash(file) for file in sorted(model.glob("*.safetensors"))])


def check_world(recipe: Recipe, world: World) -> None:
    """What the arm needs of the world is there.

    Raises:
        ConfigError: An oracle is missing, or code to execute, a checklist, or a judge for its items.
    """
    if recipe.facts.answers == "executable" and not world.executable:
        raise ConfigError(f"arm {recipe.arm} executes calls, and {recipe.world} has tools but no code. Try arm=envace.")
    _check_references(recipe, world)
    if recipe.facts.answers == "rehearsed" and recipe.reward == "judged":
        _check_checklists(recipe, world)
        return
    lacking = [name for name, spec in world.specs.items() if not spec.has_oracle]
    if not lacking or recipe.facts.answers == "executable":
        return
    if recipe.arm == "sft":
        if world.executable:
            raise ConfigError(f"arm sft imitates the oracle, and environment {lacking[0]!r} defines no `solve`.")
        return
    hint = "Write one, or train with arm=grpo-real." if world.executable else "Set reward=judged."
    raise ConfigError(
        f"arm {recipe.arm} with reward {recipe.reward} needs an oracle, and environment {lacking[0]!r} defines no "
        f"`solve`. {hint}"
    )


def _check_references(recipe: Recipe, world: World) -> None:
    lacking = world.lacking(lambda scenario: scenario.reference) if recipe.grounding == "reference" else None
    if lacking is not None:
        raise ConfigError(f"grounding=reference shows recorded calls, and {lacking} has no recorded conversation.")


def _check_checklists(recipe: Recipe, world: World) -> None:
    lacking = world.lacking(lambda scenario: scenario.checklist)
    if lacking is not None:
        raise ConfigError(f"reward=judged needs a checklist, and {lacking} has none.")
    if recipe.judge is None and world.lacking(lambda scenario: scenario.checklist and not scenario.checklist.judged):
        raise ConfigError("reward=judged: some items need a judge, and there is none. Set judge.model=URL#NAME.")


async def _trainer(
    recipe: Recipe,
    folder: RunFolder,
    loaded: Loaded,
    world: World,
    real: World,
    judge: Judge | None,
    display: Display,
) -> Trainer:
    # Drawing scenarios runs the oracle on their states. Another worker does it, so that the one that training talks to
    # has never held a state.
    purpose = "sft" if recipe.arm == "sft" else "train"
    scenarios = await real.scenarios(purpose, recipe.data.train)
    if not recipe.executes:
        scenarios = [scenario.public() for scenario in scenarios]
    tuning = await real.scenarios("tuning", recipe.eval.scenarios)

    second, simulator = _second(recipe), _simulator(recipe, loaded)
    if real.dropped:
        display.say(f"{real.dropped} rows of {recipe.world} cannot be used; envace data check says why")
    if not real.drawn:
        display.say(f"{len(scenarios)} scenarios to train on")

    async def evaluate(model: Loaded, update: int) -> dict[str, Any]:
        if real.executable:
            return summarise(await try_scenarios(recipe, real, model, tuning, display=Silent()))
        if recipe.arm == "sft":
            return _held_out(recipe, real, model, tuning)
        rehearser = simulator if second is None else second.policy()
        return await judged_evaluation(recipe, real, model, tuning, judge=judge, rehearser=rehearser, display=Silent())

    return Trainer(
        recipe=recipe,
        folder=folder,
        loaded=loaded,
        specs=world.specs,
        scenarios=scenarios,
        worker=world.worker,
        evaluate=evaluate,
        judge=judge,
        second=second,
        simulator=simulator,
        teach=_teacher(recipe, world, loaded) if recipe.arm == "sft" else None,
        progress=lambda record: _show(recipe, real, record, display),
    )


def _check_room(recipe: Recipe, world: World, loaded: Loaded, first: Scenario) -> None:
    """A rehearser that has no room to answer would end every rollout at its first call.

    Raises:
        ConfigError: Its prompt fills `limits.max_length`.
    """
    spec = world.specs[first.environment]
    call = ToolCall(name=spec.tools[0].name, arguments={})
    asked = rehearsal_prompt(spec, load_prompts(recipe.prompts), call, opening(spec, first))
    length, limit = len(loaded.format.open((), asked)), recipe.limits.max_length
    if length >= limit:
        raise ConfigError(
            f"layout=prompted: the rehearser's prompt begins at {length} tokens, and limits.max_length is {limit}. "
            f"Set it to {2 * length} or more."
        )


def _second(recipe: Recipe) -> Loaded | None:
    """The rehearsing policy of arm `per-role`."""
    return load(recipe.rehearser or recipe.model, recipe) if recipe.facts.rehearser == "second" else None


def _simulator(recipe: Recipe, loaded: Loaded) -> Policy | None:
    """The fixed model of arm `grpo-simulator`.

    Raises:
        ConfigError: In layout `shared` it would have to continue ids of another tokenizer.
    """
    if recipe.facts.rehearser != "simulator":
        return None
    name, prompted = recipe.simulator.model or recipe.model, recipe.layout == "prompted"
    if is_endpoint(name):
        # In a prompt of its own it speaks in messages; to continue the actor's transcript it must speak in ids.
        form = None if prompted else loaded.format
        return HttpPolicy(parse_address(name), form, settings=recipe.simulator.endpoint)
    model = load(name, recipe)
    if not prompted and model.format.tokenizer.get_vocab() != loaded.format.tokenizer.get_vocab():
        raise ConfigError(
            f"simulator.model {name} has another tokenizer than {recipe.model}, so it cannot continue its transcripts. "
            "Set layout=prompted."
        )
    return model.policy()


def _teacher(recipe: Recipe, world: World, loaded: Loaded) -> Teach:
    """Arm `sft` imitates recorded conversations or, where there is an oracle, its demonstrations, slips included."""
    style = style_of(recipe)

    def rows(lessons: Sequence[tuple[Scenario, list[Message]]]) -> list[SupervisedRow]:
        return rows_of_all(loaded.format, world.specs, lessons, style)

    async def recorded(scenarios: Sequence[Scenario], number: int) -> Lesson:
        return Lesson(rows=rows([(s, recording_of(s)) for s in scenarios]), reward=None, real_calls=0)

    async def demonstrations(scenarios: Sequence[Scenario], number: int) -> Lesson:
        seed, careless = recipe.seed * 1_000_003 + number, recipe.sft.carelessness
        made = await demonstrations_of(world.worker, world.specs, scenarios, carelessness=careless, seed=seed)
        return Lesson(
            rows=rows([(scenario, demonstrated(shown)) for scenario, shown in zip(scenarios, made, strict=True)]),
            reward=float(np.mean([ends_well(s, shown) for s, shown in zip(scenarios, made, strict=True)])),
            real_calls=sum(len(shown["calls"]) for shown in made),
        )

    return demonstrations if world.executable else recorded


def _held_out(recipe: Recipe, world: World, model: Loaded, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Arm `sft` where nothing can be executed: how likely the held-out recordings are to it."""
    lessons = [(scenario, recording_of(scenario)) for scenario in scenarios]
    rows = rows_of_all(model.format, world.specs, lessons, style_of(recipe))
    loss = held_out_loss(model.model, rows, settings=recipe.loss, pad_id=model.format.pad_id)
    return {"success": None, "n": len(scenarios), "held_out_loss": loss}


def _show(recipe: Recipe, world: World, record: dict[str, Any], display: Display) -> None:
    """What whoever watches is told of a record."""
    if record["kind"] == "eval":
        display.say(f"update {record['update']}: {_told(record, world)}")
        if record["update"] == 0 and record["success"] is not None and recipe.arm != "sft":
            display.say(measured_line(record["success"], recipe.group_size))
    elif record["kind"] == "alarm":
        display.say(record["said"])
    else:
        display.advance("training", record["update"], _note(record))
        if record.get("judge/failures"):
            failed, calls = record["judge/failures"], record["judge/calls"]
            display.say(f"update {record['update']}: {failed:.0f} of {calls:.0f} calls of the judge failed")


def _told(record: dict[str, Any], world: World) -> str:
    if "held_out_loss" in record:
        return f"loss {record['held_out_loss']:.3f} nats a token on {record['n']} held-out recordings"
    if not world.executable:
        return f"judged reward {record['reward']:.3f} of {record['n']} held-out rehearsals"
    share = "undecided" if record["success"] is None else f"{record['success']:.3f}"
    return f"real success {share} of {record['n']} held-out scenarios"


def _note(record: dict[str, Any]) -> str:
    if "rollout_tokens_per_s" not in record:
        return f"loss {record['loss']:.3f}, {record['update_tokens_per_s']:.0f} tokens/s"
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
        **_ends(evaluations, "reward", "held_out_reward"),
        **_ends(evaluations, "held_out_loss", "held_out_loss"),
        "feasible_share": [updates[0].get("feasible_share"), updates[-1].get("feasible_share")],
        "real_calls_in_training": sum(update["real_calls"] for update in updates),
        "tokens_per_s": _rate(updates),
        "update_tokens_per_s": round(
            sum(u["trained_tokens"] for u in updates) / sum(u["seconds_update"] for u in updates)
        ),
        "memory_gb": round(updates[-1]["memory_gb"], 2),
        "seconds": round(seconds, 1),
        "alarms": sorted({alarm["alarm"] for alarm in folder.metrics("alarm")}),
        "best": folder.results().get("best"),
        "run": str(folder.path),
    }


def _ends(evaluations: list[dict[str, Any]], key: str, name: str) -> dict[str, Any]:
    """First and last of what an evaluation without a real environment gives; nothing where there is one."""
    return {name: [evaluations[0][key], evaluations[-1][key]]} if key in evaluations[0] else {}


def _rate(updates: list[dict[str, Any]]) -> int:
    """Tokens a second: sampled ones over the time of rollouts; where nothing is sampled, those that were trained on."""
    of, over = ("sampled_tokens", "seconds_rollout")
    if not any(update["sampled_tokens"] for update in updates):
        of, over = ("trained_tokens", "seconds_update")
    rate: float = sum(update[of] for update in updates) / sum(update[over] for update in updates)
    return round(rate)
