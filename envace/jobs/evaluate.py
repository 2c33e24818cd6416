"""`envace eval`: success in the real environment, rehearsal fidelity, and references that need no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from envace.benchmarks import evaluate_policy, summarise, summarise_judged
from envace.benchmarks.real import Attempt
from envace.errors import ConfigError, RunError
from envace.fidelity import fidelity_scores, measure, record_probes, replay
from envace.jobs.display import Display, Silent
from envace.jobs.endpoints import is_endpoint, open_endpoint
from envace.jobs.judges import judge_of
from envace.jobs.models import load
from envace.jobs.worlds import World, open_world
from envace.models.formats import TOOL, Format
from envace.models.http import HttpPolicy
from envace.models.policy import Policy, ScriptedPolicy
from envace.prompts import load_prompts
from envace.rewards.judge import Judge
from envace.rollout.groups import Collector
from envace.runs import RunFolder
from envace.scenarios import Scenario
from envace.training.checkpoints import Loaded
from envace.training.demonstrations import demonstrate
from envace.training.grpo import MIN_SCORED_SHARE, SECOND
from envace.training.recipe import Recipe
from envace.types import Author, Message, Role, ToolCall, Trajectory, is_error

BATCH = 128
"""Scenarios tried at once."""
PROBE_SEED = 99
Source = Loaded | HttpPolicy | str
"""What is evaluated: a loaded model, an endpoint, or the name of a reference."""
REFERENCES = ("gold", "nothing")
"""Models that need no weights: the oracle replayed, and the floor."""


def evaluate(
    recipe: Recipe, *, model: str | None = None, out: Path | None = None, display: Display | None = None
) -> dict[str, Any]:
    """Evaluate a model on the recipe's held-out scenarios, in the real environment.

    Args:
        recipe: Says the world, the number of scenarios, limits and sampling.
        model: `starter`, a model or run folder, an endpoint (`URL#NAME`), `gold` (replays the oracle) or `nothing`
            (the floor); None takes the recipe's.
        out: A run folder to add the results to; None takes the model's own, where the model is a run.
        display: Who watches.

    Returns:
        Success with interval, `do`, `decline`, by domain and kind, `fidelity` (of local models), `unseen`, `endpoint`
        (what an endpoint was asked and what it cost) (docs/metrics.md).
    """
    name = model or recipe.model
    endpoint = open_endpoint(name, settings=recipe.endpoint) if is_endpoint(name) else None
    source: Source = endpoint or (name if name in REFERENCES else load(name, recipe))
    name = str(endpoint.address) if endpoint else name
    # Opened first: after the evaluation it would be too late to say that there is no such run.
    folder = RunFolder.open(out) if out is not None else _own_folder(name)

    async def job() -> dict[str, Any]:
        async with open_world(recipe) as world, endpoint or nullcontext(), judge_of(recipe) as judge:
            result = await full_evaluation(
                recipe, world, source, rehearser=_second(recipe, name), judge=judge, display=display or Silent()
            )
            return {**result, "endpoint": endpoint.counters.to_json()} if endpoint else result

    result = asyncio.run(job())
    if folder is not None:
        folder.write_json(folder.results_file, {**folder.results(), "evaluated": {"model": name, **result}})
    return result


def _second(recipe: Recipe, name: str) -> Loaded | None:
    """The rehearsing policy of a run of arm `per-role`, where the model is one."""
    folder = Path(name) / SECOND
    return load(str(folder), recipe) if recipe.facts.rehearser == "second" and folder.is_dir() else None


def _own_folder(name: str) -> RunFolder | None:
    """The run that a model's name names, if it names one."""
    path = Path(name)
    return RunFolder.open(path) if (path / "metrics.jsonl").exists() and (path / "config.json").exists() else None


async def full_evaluation(
    recipe: Recipe,
    world: World,
    source: Source,
    *,
    rehearser: Loaded | None = None,
    judge: Judge | None = None,
    display: Display,
) -> dict[str, Any]:
    """Held-out success, the unseen domain, and fidelity on the fixed probe.

    Where nothing can be executed, held-out scenarios are rehearsed and judged by their checklists. `rehearser` is the
    second policy of arm `per-role`.
    """
    torch.set_num_threads(recipe.threads)
    heldout = await world.scenarios("heldout", recipe.data.heldout)
    if not world.executable:
        second = None if rehearser is None else rehearser.policy()
        return await judged_evaluation(recipe, world, source, heldout, judge=judge, rehearser=second, display=display)
    unseen = await world.scenarios("unseen", recipe.data.unseen)
    summary = summarise(await try_scenarios(recipe, world, source, heldout, display=display))
    if unseen:
        attempts = await try_scenarios(
            recipe, world, source, unseen, display=display, task="unseen domain", first=len(heldout)
        )
        kept = ("success", "n", "ci", "do", "decline")
        summary["unseen"] = {key: value for key, value in summarise(attempts).items() if key in kept}
    if isinstance(source, Loaded) and recipe.eval.fidelity:
        summary["fidelity"] = await fidelity(recipe, world, rehearser or source, heldout[: recipe.eval.fidelity])
    return summary


async def try_scenarios(
    recipe: Recipe,
    world: World,
    source: Source,
    scenarios: Sequence[Scenario],
    *,
    display: Display,
    task: str = "evaluation",
    first: int = 0,
) -> list[Attempt]:
    """Try each scenario once for real, some at a time; `first` numbers the first one among all that are tried."""
    display.start(task, len(scenarios))
    attempts: list[Attempt] = []
    # A reference is scripted for one scenario.
    size = 1 if isinstance(source, str) else BATCH
    for start in range(0, len(scenarios), size):
        batch = scenarios[start : start + size]
        evaluation = await evaluate_policy(
            _policy(source, batch[0]),
            batch,
            world.specs,
            world.worker,
            limits=recipe.rollout_limits(),
            temperature=recipe.eval.temperature,
            seed=recipe.seed,
            first=first + start,
        )
        attempts += evaluation.attempts
        display.advance(task, len(attempts), _so_far(attempts))
    display.finish(task)
    _check_decided(attempts)
    return attempts


async def judged_evaluation(
    recipe: Recipe,
    world: World,
    source: Source,
    scenarios: Sequence[Scenario],
    *,
    judge: Judge | None,
    rehearser: Policy | None = None,
    display: Display,
) -> dict[str, Any]:
    """Rehearse each scenario once, judged by its checklist.

    `rehearser` plays the environment where that is not the policy itself (arms `per-role` and `grpo-simulator`).

    Raises:
        ConfigError: A reference is to be evaluated, which rehearses nothing.
        RunError: Most rehearsals could not be judged.
    """
    if isinstance(source, str):
        raise ConfigError(f"--model {source} replays a real environment, and {recipe.world} has none.")
    without = next((scenario.id for scenario in scenarios if scenario.checklist is None), None)
    if without is not None:
        raise ConfigError(
            f"{recipe.world} cannot be executed, and scenario {without!r} has no checklist to judge it by."
        )
    # Whatever training does with cut rollouts, here they count; and nothing recorded is shown.
    setting = replace(
        recipe.setting(),
        answers="rehearsed",
        reward="judged",
        grounded=False,
        temperature=recipe.eval.temperature,
        limits=replace(recipe.rollout_limits(), truncated="score"),
    )
    prompts = load_prompts(recipe.prompts)
    display.start("evaluation", len(scenarios))
    made: list[Trajectory] = []
    for start in range(0, len(scenarios), BATCH):
        batch = scenarios[start : start + BATCH]
        collector = Collector(
            _policy(source, batch[0]),
            world.worker,
            world.specs,
            setting,
            rehearser=rehearser,
            prompts=prompts,
            judge=judge,
        )
        groups = await collector.groups(batch, size=1, seed=(recipe.seed, 8_000_000 + start))
        made += [trajectory for group in groups for trajectory in group.trajectories]
        display.advance("evaluation", len(made))
    display.finish("evaluation")
    lost = [trajectory.error for trajectory in made if trajectory.reward is None]
    if len(lost) > (1 - MIN_SCORED_SHARE) * len(made):
        raise RunError(
            f"{len(lost)} of {len(made)} rehearsals could not be judged; the first failure: {lost[0]}{_who(recipe)}"
        )
    return summarise_judged(made)


def _who(recipe: Recipe) -> str:
    return f" (the judge is {recipe.judge.model}; is it running?)" if recipe.judge is not None else ""


def _so_far(attempts: Sequence[Attempt]) -> str:
    decided = [attempt.success for attempt in attempts if attempt.success is not None]
    return f"success {sum(decided) / len(decided):.3f}" if decided else "undecided so far"


def _check_decided(attempts: Sequence[Attempt]) -> None:
    """Where most attempts have no verdict, what is left would be the survivors.

    Raises:
        RunError: Naming the first failure.
    """
    lost = [attempt.trajectory.error for attempt in attempts if attempt.success is None]
    if len(lost) > (1 - MIN_SCORED_SHARE) * len(attempts):
        raise RunError(f"{len(lost)} of {len(attempts)} attempts have no verdict; the first failure: {lost[0]}")


def _policy(source: Source, scenario: Scenario) -> Policy:
    if isinstance(source, Loaded):
        return source.policy()
    if not isinstance(source, str):
        return source
    form = _starter_format()
    return ScriptedPolicy(form, _script(source, scenario, form))


@lru_cache(maxsize=1)
def _starter_format() -> Format:
    return load("starter").format


def _script(reference: str, scenario: Scenario, form: Format) -> Callable[[str, Role], list[int]]:
    """The oracle's calls and reply in their order, or an empty promise."""
    assert scenario.expected is not None
    expected = scenario.expected

    def script(text: str, role: Role) -> list[int]:
        made = text.count(TOOL)
        if reference == "nothing":
            said = Message(author=Author.ASSISTANT, content="Done.")
        elif made == len(expected.calls):
            said = Message(author=Author.ASSISTANT, content=expected.reply)
        else:
            call = ToolCall(name=expected.calls[made].name, arguments=expected.calls[made].arguments)
            said = Message(author=Author.ASSISTANT, calls=(call,))
        return form.written(said)

    return script


async def fidelity(recipe: Recipe, world: World, loaded: Loaded, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Rehearsed against real responses on recorded, careless episodes of held-out scenarios."""
    episodes = []
    for name, spec in world.specs.items():
        own = [scenario for scenario in scenarios if scenario.environment == name]
        items = [{"state": scenario.state, "goal": scenario.goal} for scenario in own]
        if not own or not spec.has_oracle:
            continue
        demonstrations = await demonstrate(
            world.worker, name, items, carelessness=recipe.sft.carelessness, seed=PROBE_SEED
        )
        for scenario, demonstration in zip(own, demonstrations, strict=True):
            episodes.append((scenario, spec, await record_probes(world.worker, spec, demonstration["calls"])))
    prompts = load_prompts(recipe.prompts) if recipe.layout == "prompted" else None
    found = await measure(loaded.policy(), episodes, max_tokens=recipe.limits.max_step_tokens, prompts=prompts)
    return fidelity_scores(found)


async def rehearsals(
    recipe: Recipe,
    world: World,
    loaded: Loaded,
    scenarios: Sequence[Scenario],
    *,
    update: int,
    rehearser: Loaded | None = None,
) -> list[dict[str, Any]]:
    """Private rehearsals of held-out scenarios, with the same calls replayed for real, and one real execution."""
    setting = recipe.model_copy(update={"arm": "envace", "reward": "contract", "grounding": "none"}).setting()
    second = None if rehearser is None else rehearser.policy()
    prompts = load_prompts(recipe.prompts)
    collector = Collector(loaded.policy(), world.worker, world.specs, setting, rehearser=second, prompts=prompts)
    groups = await collector.groups([s.public() for s in scenarios], size=1, seed=(recipe.seed, 7_000_000))
    attempts = await try_scenarios(recipe, world, loaded, scenarios, display=Silent())
    records = []
    for scenario, group, attempt in zip(scenarios, groups, attempts, strict=True):
        (trajectory,) = group.trajectories
        spec = world.specs[scenario.environment]
        real = await replay(world.worker, spec, scenario, trajectory)
        episode = [
            {"name": e.call.name, "arguments": e.call.arguments, "response": answer}
            for e, answer in zip(trajectory.exchanges, real, strict=True)
        ]
        probes = await record_probes(world.worker, spec, [step for step in episode if not _invalid(step)])
        known = iter(probes)
        records.append(
            {
                "kind": "rehearsal",
                "update": update,
                "scenario_id": scenario.id,
                "environment_id": scenario.environment,
                "instruction": scenario.instruction,
                "reply": trajectory.reply,
                "feasible_real": scenario.feasible,
                "exchanges": [
                    {
                        "call": {"name": e.call.name, "arguments": e.call.arguments},
                        "rehearsed": e.response,
                        "rehearsed_text": e.text,
                        "real": answer,
                        "consistency": e.consistency.value if e.consistency else None,
                        "determined": True if _invalid(step) else next(known).determined,
                    }
                    for e, answer, step in zip(trajectory.exchanges, real, episode, strict=True)
                ],
                "real": _executed(attempt),
            }
        )
    return records


def _invalid(step: dict[str, Any]) -> bool:
    """Whether a call was answered before the environment."""
    return is_error(step["response"]) and step["response"].get("error") in ("unknown_tool", "invalid_arguments")


def _executed(attempt: Attempt) -> dict[str, Any]:
    return {
        "success": attempt.success,
        "reply": attempt.trajectory.reply,
        "exchanges": [
            {"call": {"name": e.call.name, "arguments": e.call.arguments}, "response": json.loads(e.text)}
            for e in attempt.trajectory.exchanges
        ],
        "checks": [
            {"id": check.id, "question": check.question, "verdict": check.verdict.value} for check in attempt.checks
        ],
    }
