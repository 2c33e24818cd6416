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
from envace.models.policy import Policy
from envace.prompts import load_prompts
from envace.rewards.judge import Judge
from envace.rollout.groups import Collector
from envace.runs import RunFolder
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario
from envace.training.alarms import Watch
from envace.training.arms import REHEARSE
from envace.training.batches import training_rows
from envace.training.checkpoints import Loaded, latest, prune, save_checkpoint, save_model, set_aside
from envace.training.demonstrations import SupervisedRow
from envace.training.keeping import Keeper
from envace.training.learner import Learner
from envace.training.metrics import group_metrics, is_flat, judge_metrics, renumbered
from envace.training.recipe import Recipe
from envace.types import Group

Evaluate = Callable[[Loaded, int], Awaitable[dict[str, Any]]]
"""Evaluates a model after so many updates; given by whoever starts the training."""

Teach = Callable[[Sequence[Scenario], int], Awaitable["Lesson"]]
"""Records conversations in scenarios, for an update; given by whoever starts the training."""

SECOND = "rehearser"
"""Where checkpoints and runs keep a second policy."""
GB = 1e9

MIN_SCORED_SHARE = 0.5
"""With fewer scored trajectories in an update than this share, the run ends: it would train on survivors."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Recorded conversations to imitate."""

    rows: Sequence[SupervisedRow]
    reward: float | None
    """Share of them that end as they should; None where that is not known."""
    real_calls: int
    """Calls that were executed to record them."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The groups of an update, and what they took."""

    groups: list[Group]
    resampled: int
    """Groups without spread that were put aside."""
    sampled_tokens: int
    shared_tokens: int


@dataclass(kw_only=True)
class Trainer:
    """Everything that a training run holds on to."""

    recipe: Recipe
    folder: RunFolder
    loaded: Loaded
    specs: Mapping[str, EnvironmentSpec]
    scenarios: Sequence[Scenario]
    """Scenarios to train on: public ones, except for arms that execute."""
    worker: Worker
    evaluate: Evaluate
    second: Loaded | None = None
    """The rehearsing policy of arm `per-role`."""
    simulator: Policy | None = None
    """Whoever plays the environment in arm `grpo-simulator`."""
    judge: Judge | None = None
    """Decides what no program can, with reward `judged`."""
    teach: Teach | None = None
    """Gives recorded conversations, in arm `sft`."""
    progress: Callable[[dict[str, Any]], None] = lambda record: None
    """Called with the metrics of every update."""

    def __post_init__(self) -> None:
        facts, anchored = self.recipe.facts, self.recipe.facts.anchors
        self.learner = Learner(self.loaded, self.recipe, roles=facts.trains, anchored=anchored)
        self.rehearser: Learner | None = None
        if facts.rehearser == "second":
            if self.second is None:
                raise TrainingError(f"arm {self.recipe.arm} trains a second policy, and there is none.")
            self.rehearser = Learner(self.second, self.recipe, roles=REHEARSE, anchored=anchored)
        self.prompts = load_prompts(self.recipe.prompts)
        self.watch = Watch(self.recipe.alarms)
        self.keeper = Keeper(
            self.folder,
            lambda path, notes: save_model(path, self.loaded, notes=notes),
            enabled=self.recipe.keep_best,
        )
        self.done = 0
        self.cursor = 0
        """Scenarios drawn so far."""
        self.set_aside: list[Path] = []
        """Damaged checkpoints that a resumed run did not go on from."""

    def resume(self) -> int:
        """Go back to the newest whole checkpoint; returns the number of updates it holds."""
        self.set_aside = set_aside(self.folder.checkpoints)
        path = latest(self.folder.checkpoints)
        if path is None:
            self.folder.rewind(-1)
            return 0
        state = self.learner.restore(path)
        if self.rehearser is not None:
            self.rehearser.restore(path / SECOND)
        self.done, self.cursor = int(state["updates"]), int(state["cursor"])
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
            record = await (self._imitation(number) if self.teach is not None else self._update(number))
            self.folder.log(record)
            self.progress(record)
            self.done = number
            self._alarm(record)
            last = number == recipe.updates
            evaluated = last or (recipe.eval.every > 0 and number % recipe.eval.every == 0)
            if evaluated:
                await self._evaluate(number)
            if last or number % recipe.checkpoint_every == 0 or (evaluated and self.keeper.due(number)):
                self._checkpoint(number)
            if evaluated:  # nothing else makes a best, and asking reads all records
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
        started, calls_before = time.perf_counter(), self.worker.real_calls
        asked_before = judge_metrics(self.judge)
        collected = await self._collect(number)
        groups, sampled = collected.groups, time.perf_counter()
        self._check_scored(groups)
        losses = self._learn(self.learner, groups)
        if self.rehearser is not None:
            second = self._learn(self.rehearser, groups)
            losses |= {f"rehearser/{name}": value for name, value in second.items()}
        if number % self.recipe.trajectories_every == 0 or number == 1:
            self._record(groups[0], number)
        ended = time.perf_counter()
        return {
            "kind": "update",
            "update": number,
            **group_metrics(groups),
            **losses,
            **{name: value - asked_before[name] for name, value in judge_metrics(self.judge).items()},
            "resampled": collected.resampled,
            "sampled_tokens": collected.sampled_tokens,
            "shared_tokens": collected.shared_tokens,
            "real_calls": self.worker.real_calls - calls_before,
            "rollout_tokens_per_s": collected.sampled_tokens / (sampled - started),
            **self._costs(losses, started=started, sampled=sampled, ended=ended),
        }

    def _costs(self, losses: dict[str, Any], *, started: float, sampled: float, ended: float) -> dict[str, float]:
        """Times, rate and memory of an update."""
        return {
            "seconds_rollout": sampled - started,
            "seconds_update": ended - sampled,
            "update_tokens_per_s": losses["trained_tokens"] / (ended - sampled),
            "memory_gb": peak_memory(self.loaded.model.device),
        }

    async def _collect(self, number: int) -> Collected:
        """The groups of an update; groups without spread are drawn anew where the recipe asks for it."""
        recipe = self.recipe
        policy = self.learner.policy()
        rehearser = self.simulator if self.rehearser is None else self.rehearser.policy()
        collector = Collector(
            policy,
            self.worker,
            self.specs,
            recipe.setting(),
            rehearser=rehearser,
            prompts=self.prompts,
            judge=self.judge,
        )
        kept: list[Group] = []
        resampled, before = 0, _sampled(policy, rehearser)
        for attempt in range(recipe.resample + 1):
            picked = self._pick(recipe.scenarios_per_update - len(kept))
            seed = (recipe.seed, number, attempt) if attempt else (recipe.seed, number)
            groups = await collector.groups(picked, size=recipe.group_size, seed=seed)
            # A group that could not be scored is kept: it is a failure to be counted, not a dull scenario.
            kept += [group for group in groups if attempt == recipe.resample or not is_flat(group)]
            if len(kept) == recipe.scenarios_per_update:
                break
            resampled += recipe.scenarios_per_update - len(kept)
        return Collected(
            groups=renumbered(kept),
            resampled=resampled,
            sampled_tokens=_sampled(policy, rehearser) - before,
            shared_tokens=collector.shared_tokens,
        )

    def _learn(self, learner: Learner, groups: Sequence[Group]) -> dict[str, Any]:
        """One step of a learner on its own roles."""
        recipe = self.recipe
        training = training_rows(groups, advantage=recipe.advantages(), loss=recipe.loss, roles=learner.roles)
        return {**learner.update(training.rows), **training.metrics()}

    async def _imitation(self, number: int) -> dict[str, Any]:
        """One step on recorded conversations. Returns its record."""
        assert self.teach is not None
        started, calls_before = time.perf_counter(), self.worker.real_calls
        lesson = await self.teach(self._pick(self.recipe.scenarios_per_update * self.recipe.group_size), number)
        taught = time.perf_counter()
        losses = self.learner.imitate(lesson.rows)
        ended = time.perf_counter()
        return {
            "kind": "update",
            "update": number,
            "reward": lesson.reward,
            **losses,
            "sampled_tokens": 0,
            "real_calls": self.worker.real_calls - calls_before + lesson.real_calls,
            **self._costs(losses, started=started, sampled=taught, ended=ended),
        }

    def _pick(self, count: int) -> list[Scenario]:
        """The next scenarios: passes over shuffled scenarios, a function of the seed and of how many were drawn."""
        first, total = self.cursor, len(self.scenarios)
        self.cursor += count
        return [self.scenarios[self._order(i // total)[i % total]] for i in range(first, self.cursor)]

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
        state = {"updates": number, "cursor": self.cursor}
        second = self.rehearser
        beside = {} if second is None else {SECOND: (second.loaded, second.optimizer)}
        save_checkpoint(path, self.loaded, self.learner.optimizer, state, beside=beside)
        prune(self.folder.checkpoints, self.recipe.keep_checkpoints)


def _sampled(*policies: Policy | None) -> int:
    """Tokens that local policies have sampled so far; a fixed simulator's count goes on over updates."""
    return sum(policy.sampled_tokens for policy in policies if isinstance(policy, LocalPolicy))


def peak_memory(device: torch.device) -> float:
    """The most memory that this process has held so far, GB: of the GPU where the model is there, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GB
    return peak_resident() / GB


def peak_resident() -> float:
    """The most resident memory of this process, bytes. `ru_maxrss` also counts the process that started this one."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return float(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
