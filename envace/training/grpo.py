"""The training loop: collect groups, compute advantages, step; log, checkpoint, evaluate."""

from __future__ import annotations

import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envace.errors import TrainingError
from envace.models.local import LocalPolicy
from envace.rollout.groups import Collector
from envace.runs import RunFolder
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.training.alarms import Watch
from envace.training.batches import training_rows
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
from envace.training.keeping import Keeper
from envace.training.lora import add_lora
from envace.training.metrics import group_metrics
from envace.training.probe import WeightProbe
from envace.training.recipe import Recipe
from envace.training.update import LossSettings, reference_of, update
from envace.types import Group

Evaluate = Callable[[Loaded, int], Awaitable[dict[str, Any]]]
"""Evaluates a model after so many updates; given by whoever starts the training."""

GB = 1e9

MIN_SCORED_SHARE = 0.5
"""With fewer scored trajectories in an update than this share, the run ends: it would train on survivors."""


@dataclass(kw_only=True)
class Trainer:
    """Everything that a training run holds on to."""

    recipe: Recipe
    folder: RunFolder
    loaded: Loaded
    specs: Mapping[str, EnvironmentSpec]
    scenarios: Sequence[Scenario]
    """Scenarios to train on: public ones, except for `grpo-real`."""
    worker: Worker
    evaluate: Evaluate
    progress: Callable[[dict[str, Any]], None] = lambda record: None
    """Called with the metrics of every update."""

    def __post_init__(self) -> None:
        model = self.loaded.model
        if self.recipe.lora is not None:
            add_lora(model, self.recipe.lora, seed=self.recipe.seed)
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=self.recipe.learning_rate, weight_decay=0.0)
        needs_reference = self.recipe.loss.kl > 0 or (self.recipe.anchored and self.recipe.loss.anchor_kl > 0)
        self.reference = reference_of(model) if needs_reference else None
        self.watch = Watch(self.recipe.alarms)
        self.keeper = Keeper(
            self.folder,
            lambda path, notes: save_model(path, self.loaded, notes=notes),
            enabled=self.recipe.keep_best,
        )
        self.probe = WeightProbe()
        self.done = 0
        self.set_aside: list[Path] = []
        """Damaged checkpoints that a resumed run did not go on from."""

    def resume(self) -> int:
        """Go back to the newest whole checkpoint; returns the number of updates it holds."""
        self.set_aside = set_aside(self.folder.checkpoints)
        path = latest(self.folder.checkpoints)
        if path is None:
            self.folder.rewind(-1)
            return 0
        state = load_state(path)
        load_weights(self.loaded.model, path)
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = int(state["updates"])
        self.folder.rewind(self.done)
        self.watch.resume(self.folder.metrics())
        return self.done

    async def run(self) -> None:
        """Train to the last update. Raises TrainingError when numbers or groups give out."""
        recipe = self.recipe
        if self.done == 0 and not self.folder.metrics("eval"):
            await self._evaluate(0)
        self.keeper.keep(self.done)
        for number in range(self.done + 1, recipe.updates + 1):
            record = await self._update(number)
            self.folder.log(record)
            self.progress(record)
            self.done = number
            self._alarm(record)
            last = number == recipe.updates
            if last or (recipe.eval.every and number % recipe.eval.every == 0):
                await self._evaluate(number)
            if last or number % recipe.checkpoint_every == 0 or self.keeper.due(number):
                self._checkpoint(number)
            self.keeper.keep(number)

    def _alarm(self, record: dict[str, Any]) -> None:
        """Record the alarms that an update sets off. Raises TrainingError after a checkpoint where one stops it."""
        alarms = self.watch.see(record)
        for alarm in alarms:
            self.folder.log(alarm.record())
            self.progress({**alarm.record(), "said": str(alarm)})
        stopping = next((alarm for alarm in alarms if alarm.action == "stop"), None)
        if stopping is not None:
            self._checkpoint(stopping.update)
            raise TrainingError(f"{stopping}. It is to stop the run: a checkpoint is written.")

    async def _update(self, number: int) -> dict[str, Any]:
        """One update: sample, reward, step. Returns its record."""
        recipe, started, calls_before = self.recipe, time.perf_counter(), self.worker.real_calls
        self.loaded.model.eval()
        policy = LocalPolicy(self.loaded.model, self.loaded.format)
        collector = Collector(policy, self.worker, self.specs, recipe.setting())
        picked = self._pick(number)
        groups = await collector.groups(picked, size=recipe.group_size, seed=(recipe.seed, number))
        sampled = time.perf_counter()
        self._check_scored(groups)
        training = training_rows(
            groups,
            role_wise=recipe.arm != "shared-baseline",
            train_rehearsal=recipe.arm != "grpo-real",
            baseline=recipe.baseline,
            scale=recipe.scale,
        )
        self.probe.before(self.loaded.model)
        losses = update(
            self.loaded.model,
            self.reference,
            self.optimizer,
            training.rows,
            settings=LossSettings(**recipe.loss.model_dump()),
            temperature=recipe.temperature,
            pad_id=self.loaded.format.pad_id,
        )
        self.probe.after(self.loaded.model, losses["grad_norm"])
        if number % recipe.trajectories_every == 0 or number == 1:
            self._record(groups[0], number)
        ended = time.perf_counter()
        return {
            "kind": "update",
            "update": number,
            **group_metrics(groups),
            **losses,
            "flat_cells": training.advantages.flat_cells / max(1, training.advantages.cells),
            "lone_cells": training.advantages.lone_cells,
            "dropped": training.dropped,
            "sampled_tokens": policy.sampled_tokens,
            "shared_tokens": collector.shared_tokens,
            "real_calls": self.worker.real_calls - calls_before,
            "seconds_rollout": sampled - started,
            "seconds_update": ended - sampled,
            "rollout_tokens_per_s": policy.sampled_tokens / (sampled - started),
            "update_tokens_per_s": losses["trained_tokens"] / (ended - sampled),
            "memory_gb": peak_memory(self.loaded.model.device),
        }

    def _pick(self, number: int) -> list[Scenario]:
        """The scenarios of an update: passes over shuffled scenarios, a function of (seed, update) alone."""
        size, total = self.recipe.scenarios_per_update, len(self.scenarios)
        first = (number - 1) * size
        return [self.scenarios[self._order(i // total)[i % total]] for i in range(first, first + size)]

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = (
            np.random.default_rng([self.recipe.seed, epoch, 11]).permutation(len(self.scenarios)).tolist()
        )
        return order

    def _check_scored(self, groups: Sequence[Group]) -> None:
        everyone = [trajectory for group in groups for trajectory in group.trajectories]
        scored = [trajectory for trajectory in everyone if trajectory.reward is not None]
        if len(scored) < MIN_SCORED_SHARE * len(everyone):
            first = next(trajectory.error for trajectory in everyone if trajectory.reward is None)
            raise TrainingError(
                f"Only {len(scored)} of {len(everyone)} trajectories could be scored; the first failure: {first}."
            )

    def _record(self, group: Group, number: int) -> None:
        """Record a group's trajectories, readable and exact."""
        decode = self.loaded.format.decode
        records = []
        for trajectory in group.trajectories:
            record = trajectory.to_json()
            for segment, data in zip(trajectory.segments, record["segments"], strict=True):
                data["text"] = decode(segment.ids)
            # `kind` of a record says what it is; the kind of task moves aside.
            records.append({**record, "task": record["kind"], "kind": "train", "update": number})
        self.folder.log_trajectories(records)

    async def _evaluate(self, number: int) -> None:
        self.loaded.model.eval()
        # Evaluation executes calls for real, in a worker of its own, so that the count of this one is training's alone.
        record = {"kind": "eval", "update": number, **await self.evaluate(self.loaded, number)}
        self.folder.log(record)
        self.progress(record)

    def _checkpoint(self, number: int) -> None:
        path = self.folder.checkpoints / f"update-{number:06d}"
        save_checkpoint(path, self.loaded, self.optimizer, {"updates": number})
        prune(self.folder.checkpoints, self.recipe.keep_checkpoints)


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has held so far, GB: of the GPU where the model is there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
