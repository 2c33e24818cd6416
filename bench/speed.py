"""Rollout and update speed against what one would write with transformers alone.

Both sides use the same weights, prompts, limits and thread count, and alternate within one process, so that a noisy
machine slows both. The peers: `model.generate` on left-padded prompts, which prefills the whole transcript again at
every turn; and training rows that hold one output each, with its whole context (the layout of the released code).
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable

import torch

from envace.jobs.models import load
from envace.jobs.worlds import open_world
from envace.models.formats import Format
from envace.models.local import LocalPolicy
from envace.rollout.groups import Collector
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.training.batches import Row, training_rows
from envace.training.checkpoints import Loaded
from envace.training.recipe import LossSection, Recipe
from envace.training.update import update as optimiser_step
from envace.types import Group

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
REPEATS = 5
SCENARIOS, SIZE = 16, 8


def rollout() -> None:
    """Sampled tokens/s of rehearsed rollouts, 16 scenarios x 8, temperature 1, contract checks included on our side."""
    torch.set_num_threads(THREADS)
    recipe, loaded = Recipe(world_sharing="rollout"), load("starter")
    scenarios, specs = _scenarios(recipe)
    ours, peer = [], []
    for repeat in range(REPEATS):
        ours.append(_rate(lambda r=repeat: _ours(recipe, loaded, scenarios, r)))
        peer.append(_rate(lambda r=repeat: _generate(recipe, loaded, scenarios, specs, r)))
    _print("rollout", "sampled tokens/s", ours, peer, "generate, re-prefill each turn")


def update() -> None:
    """Trained (learned) tokens/s of an optimiser step, one row a trajectory against one row an output."""
    torch.set_num_threads(THREADS)
    recipe, loaded = Recipe(arm="published"), load("starter")
    scenarios, _ = _scenarios(recipe)
    groups = asyncio.run(_groups(recipe, loaded, scenarios, 0))
    rows = training_rows(groups).rows
    single = [part for row in rows for part in _outputs(row)]
    ours, peer = [], []
    _step(loaded, rows)  # the first step of a process pays for the allocator's first pages
    for _ in range(REPEATS):
        ours.append(_rate(lambda: _step(loaded, rows)))
        peer.append(_rate(lambda: _step(loaded, single)))
    _print("update", "learned tokens/s", ours, peer, "one row an output")


def _scenarios(recipe: Recipe) -> tuple[list[Scenario], dict[str, EnvironmentSpec]]:
    async def draw() -> tuple[list[Scenario], dict[str, EnvironmentSpec]]:
        async with open_world(recipe) as world:
            return [s.public() for s in await world.scenarios("train", SCENARIOS)], dict(world.specs)

    return asyncio.run(draw())


async def _groups(recipe: Recipe, loaded: Loaded, scenarios: list[Scenario], seed: int) -> list[Group]:
    loaded.model.eval()
    async with open_world(recipe) as world:
        await world.worker.ask("imagine", session="warm", environment=scenarios[0].environment)
        policy = LocalPolicy(loaded.model, loaded.format)
        collector = Collector(policy, world.worker, world.specs, recipe.setting())
        return await collector.groups(scenarios, size=SIZE, seed=(seed,))


def _ours(recipe: Recipe, loaded: Loaded, scenarios: list[Scenario], seed: int) -> tuple[int, float]:
    """Sampled tokens and seconds; the worker is started before the clock."""

    async def job() -> tuple[int, float]:
        async with open_world(recipe) as world:
            await world.worker.ask("imagine", session="warm", environment=scenarios[0].environment)
            policy = LocalPolicy(loaded.model, loaded.format)
            collector = Collector(policy, world.worker, world.specs, recipe.setting())
            started = time.perf_counter()
            await collector.groups(scenarios, size=SIZE, seed=(seed,))
            return policy.sampled_tokens, time.perf_counter() - started

    loaded.model.eval()
    return asyncio.run(job())


@torch.inference_mode()
def _generate(
    recipe: Recipe, loaded: Loaded, scenarios: list[Scenario], specs: dict[str, EnvironmentSpec], seed: int
) -> tuple[int, float]:
    """The same rollouts with `generate`: all transcripts act, then all that called a tool rehearse, and so on."""
    form, model = loaded.format, loaded.model
    model.eval()
    torch.manual_seed(seed)
    opened = [form.open(specs[s.environment].tools, opening(specs[s.environment], s)) for s in scenarios]
    transcripts = [list(ids) for ids in opened for _ in range(SIZE)]
    active, sampled = list(range(len(transcripts))), 0
    started = time.perf_counter()
    for _ in range(recipe.limits.max_steps):
        sampled += _turn(recipe, loaded, transcripts, active)
        steps = {i: form.parse(_last_step(form, transcripts[i])) for i in active}
        active = [i for i in active if steps[i].calls and len(transcripts[i]) < recipe.limits.max_length - 1]
        if not active:
            break
        for i in active:
            transcripts[i] += form.encode([form.tool_header()])
        sampled += _turn(recipe, loaded, transcripts, active)
        active = [i for i in active if len(transcripts[i]) < recipe.limits.max_length - 1]
        for i in active:
            transcripts[i] += form.encode([form.act_header()])
    return sampled, time.perf_counter() - started


def _last_step(form: Format, ids: list[int]) -> list[int]:
    (header,) = form.encode([form.act_header()])
    start = len(ids) - ids[::-1].index(header)
    return ids[start:]


def _turn(recipe: Recipe, loaded: Loaded, transcripts: list[list[int]], active: list[int]) -> int:
    """One `generate` call over the active transcripts; returns how many tokens it sampled."""
    if not active:
        return 0
    pad, stop = loaded.format.pad_id, sorted(loaded.format.stop_ids())
    longest = max(len(transcripts[i]) for i in active)
    ids = torch.tensor([[pad] * (longest - len(transcripts[i])) + transcripts[i] for i in active])
    out = loaded.model.generate(
        input_ids=ids,
        attention_mask=(
            torch.arange(longest) >= torch.tensor([longest - len(transcripts[i]) for i in active])[:, None]
        ).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=recipe.limits.max_step_tokens,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    count = 0
    for row, i in enumerate(active):
        new = out[row, longest:].tolist()
        end = next((k for k, token in enumerate(new) if token in stop), len(new) - 1)
        transcripts[i] += new[: end + 1]
        count += end + 1
    return count


def _outputs(row: Row) -> list[Row]:
    """One row an output: its context, and only itself learned."""
    edges = [t for t in range(1, len(row.ids)) if row.policy[t] and not row.policy[t - 1]]
    parts = []
    for start in edges:
        end = start
        while end < len(row.ids) and row.policy[end]:
            end += 1
        learned = row.policy[:end].copy()
        learned[:start] = False
        parts.append(
            Row(
                ids=row.ids[:end],
                policy=learned,
                anchor=row.anchor[:end] & False,
                advantages=row.advantages[:end],
                weights=row.weights[:end],
                logprobs=row.logprobs[:end],
                rehearse=row.rehearse[:end],
            )
        )
    return parts


def _step(loaded: Loaded, rows: list[Row]) -> tuple[int, float]:
    optimizer = torch.optim.SGD(loaded.model.parameters(), lr=0.0)
    started = time.perf_counter()
    optimiser_step(
        loaded.model,
        None,
        optimizer,
        rows,
        settings=LossSection(kl=0.0, anchor_kl=0.0),
        temperature=1.0,
        pad_id=0,
    )
    return sum(int(row.policy.sum()) for row in rows), time.perf_counter() - started


def _rate(job: Callable[[], tuple[int, float]]) -> float:
    tokens, seconds = job()
    return tokens / seconds


def _print(name: str, unit: str, ours: list[float], peer: list[float], what: str) -> None:
    """Medians, and the ratio pair by pair."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    print(f"{name}: {unit}, {REPEATS} pairs, {THREADS} thread(s)")
    print(f"  envace                          median {statistics.median(ours):8.0f}")
    print(f"  {what:<31} median {statistics.median(peer):8.0f}")
    print(f"  ratio   median {statistics.median(ratios):.2f}, min {min(ratios):.2f}, max {max(ratios):.2f}")
    print(json.dumps({"bench": name, "envace": ours, "peer": peer, "ratio": ratios, "threads": THREADS}))
