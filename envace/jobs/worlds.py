"""Opening a recipe's world: environments by name, and scenarios by purpose.

A world is the starter world, packages of environments, or data sets, whose rows bring tools and a checklist but nothing
that could be executed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envace.errors import ConfigError, DataError
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, load_package
from envace.scenarios.datasets import load_dataset
from envace.scenarios.sources import is_dataset
from envace.starter.scenarios import starter_scenarios, starter_specs
from envace.starter.world import TRAINED, UNSEEN
from envace.training.demonstrations import conversation, demonstrate, expected_of
from envace.training.recipe import Recipe

STARTER = "starter"
SEEDS = {"train": 0, "sft": 1000, "heldout": 0, "tuning": 1}
"""Offsets to `data.seed`: scenarios of different purposes never coincide."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Environments and where their scenarios come from."""

    specs: Mapping[str, EnvironmentSpec]
    given: Sequence[Sequence[Scenario]] | None
    """The scenarios of each package or data set; None for the starter world, which draws its own."""
    recipe: Recipe
    worker: Worker
    dropped: int = 0
    """Rows of data sets that cannot be used."""

    @property
    def drawn(self) -> bool:
        """Whether scenarios are drawn as they are asked for."""
        return self.given is None

    def lacking(self, has: Callable[[Scenario], object]) -> str | None:
        """Names the first scenario without something, or the world where it draws its own; None where all have it."""
        if self.given is None:
            return f"world {self.recipe.world}"
        without = (scenario for scenarios in self.given for scenario in scenarios if not has(scenario))
        return next((f"scenario {scenario.id!r}" for scenario in without), None)

    @property
    def executable(self) -> bool:
        """Whether every environment has code to run."""
        return all(spec.code for spec in self.specs.values())

    async def scenarios(self, purpose: str, count: int) -> list[Scenario]:
        """Scenarios for `train`, `sft`, `heldout`, `tuning` (evaluation during training) or `unseen`."""
        if self.given is None:
            return await self._drawn(purpose, count)
        if purpose == "unseen":
            return []
        wanted = "train" if purpose in ("train", "sft") else "heldout"
        held = None if self.executable else self.recipe.data.heldout
        chosen = [scenario for scenarios in self.given for scenario in _split(scenarios, wanted, held)]
        if not chosen:
            raise DataError(f"The world {self.recipe.world} has no {wanted} scenario.")
        if purpose == "tuning":  # from the other end: an evaluation after training has others as far as there are any
            chosen.reverse()
        return await complete(self.worker, self.specs, chosen[:count]) if self.executable else chosen[:count]

    async def _drawn(self, purpose: str, count: int) -> list[Scenario]:
        domains: tuple[str, ...] = UNSEEN if purpose == "unseen" else TRAINED
        split = "train" if purpose in ("train", "sft") else "heldout"
        seed = self.recipe.data.seed + SEEDS.get(purpose, 0)
        if count == 0:
            return []
        return await starter_scenarios(self.worker, domains=domains, split=split, seed=seed, count=count)


@asynccontextmanager
async def open_world(recipe: Recipe, *, like: World | None = None) -> AsyncIterator[World]:
    """Open a recipe's world with a worker of its own; `like` is one that was opened and need not be read again.

    Raises:
        ConfigError: The world is neither `starter` nor a package folder.
        DataError: A package cannot be loaded.
    """
    specs, given, dropped = _sources(recipe) if like is None else (dict(like.specs), like.given, like.dropped)
    async with Worker([spec.definition() for spec in specs.values() if spec.code]) as worker:
        world = World(specs=specs, given=given, recipe=recipe, worker=worker, dropped=dropped)
        yield await _with_examples(world) if recipe.shots and like is None else world


SHOTS_FROM = 64
"""Scenarios of the warm-up that examples are taken from, a shot."""


async def _with_examples(world: World) -> World:
    """The world with `shots` worked examples in each environment that has an oracle and scenarios to learn from."""
    scenarios = await world.scenarios("sft", SHOTS_FROM * world.recipe.shots)
    specs = dict(world.specs)
    for name, spec in world.specs.items():
        own = [scenario for scenario in scenarios if scenario.environment == name][: world.recipe.shots]
        if not own or not spec.has_oracle:
            continue
        items = [{"state": scenario.state, "goal": scenario.goal} for scenario in own]
        shown = await demonstrate(world.worker, name, items, carelessness=0.0, seed=0)
        pairs = zip(own, shown, strict=True)
        examples = [said for scenario, made in pairs for said in conversation(made, scenario.instruction)]
        specs[name] = replace(spec, examples=tuple(examples))
    return replace(world, specs=specs)


def _sources(recipe: Recipe) -> tuple[dict[str, EnvironmentSpec], list[Sequence[Scenario]] | None, int]:
    """Environments, their scenarios by source (None: drawn), and how many rows cannot be used."""
    names = [recipe.world] if isinstance(recipe.world, str) else recipe.world
    if names == [STARTER]:
        return starter_specs(), None, 0
    if not names or STARTER in names:
        raise ConfigError(f"world is {recipe.world!r}: name `starter`, or one or more package folders or data files.")
    specs: dict[str, EnvironmentSpec] = {}
    given: list[Sequence[Scenario]] = []
    dropped = 0
    for name in names:
        found, scenarios, lost = _source(name, require_checklist=recipe.reward == "judged" and recipe.arm != "sft")
        twice = sorted(set(found) & set(specs))
        if twice:
            raise ConfigError(f"world names two environments {twice[0]!r}: a folder's name is its id, so rename one.")
        specs |= found
        given.append(scenarios)
        dropped += lost
    return specs, given, dropped


def _source(name: str, *, require_checklist: bool) -> tuple[dict[str, EnvironmentSpec], Sequence[Scenario], int]:
    """A package folder, or a data set.

    Raises:
        DataError: Neither can be loaded, or no row of the data set can be used.
    """
    if not is_dataset(name):
        package = load_package(Path(name))
        return {package.spec.id: package.spec}, package.scenarios, 0
    dataset = load_dataset(name, require_checklist=require_checklist)
    if not dataset.scenarios:
        first = f"; the first: {dataset.dropped[0].detail}" if dataset.dropped else ""
        raise DataError(f"No row of {name} can be used{first}. See: envace data check {name}")
    return dataset.specs, dataset.scenarios, len(dataset.dropped)


def _split(scenarios: Sequence[Scenario], wanted: str, most: int | None = None) -> list[Scenario]:
    """Scenarios of a split; where the file marks none, the last fifth (or at `most` so many) is held out.

    A single scenario is both.
    """
    if len(scenarios) == 1:
        return list(scenarios)
    if any(scenario.split is not None for scenario in scenarios):
        return [scenario for scenario in scenarios if (scenario.split or "train") == wanted]
    border = len(scenarios) - min(max(1, len(scenarios) // 5), most or len(scenarios))
    return list(scenarios[:border] if wanted == "train" else scenarios[border:])


async def complete(
    worker: Worker, specs: Mapping[str, EnvironmentSpec], scenarios: Sequence[Scenario]
) -> list[Scenario]:
    """Add what the oracle does to scenarios that do not say what they expect.

    Raises:
        DataError: A scenario has no opening state, or says nothing of what it expects in an environment without an
            oracle.
    """
    done = []
    for scenario in scenarios:
        if scenario.state is None:
            raise DataError(f"Scenario {scenario.id!r} has no opening state.")
        if scenario.expected is None:
            if not specs[scenario.environment].has_oracle:
                raise DataError(
                    f"Scenario {scenario.id!r} has no `expected`, and environment "
                    f"{scenario.environment!r} defines no `solve` to work it out. Give one of the two."
                )
            scenario = await _expect(worker, scenario)
        done.append(scenario)
    return done


async def _expect(worker: Worker, scenario: Scenario) -> Scenario:
    item = {"state": scenario.state, "goal": scenario.goal}
    (answer,) = await demonstrate(worker, scenario.environment, [item], carelessness=0.0, seed=0)
    return scenario.model_copy(update={"expected": expected_of(answer)})
