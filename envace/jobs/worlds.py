"""Opening a recipe's world: environments by name, and scenarios by purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from envace.errors import ConfigError, DataError
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Package, Scenario, load_package
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
    packages: Sequence[Package] | None
    """None for the starter world, which draws its scenarios."""
    recipe: Recipe
    worker: Worker

    async def scenarios(self, purpose: str, count: int) -> list[Scenario]:
        """Scenarios for `train`, `sft`, `heldout`, `tuning` (evaluation during training) or `unseen`."""
        if self.packages is None:
            return await self._drawn(purpose, count)
        if purpose == "unseen":
            return []
        wanted = "train" if purpose in ("train", "sft") else "heldout"
        chosen = [s for package in self.packages for s in _split(package.scenarios, wanted)]
        if not chosen:
            raise DataError(f"The world {self.recipe.world} has no {wanted} scenario.")
        return await complete(self.worker, self.specs, chosen[:count])

    async def _drawn(self, purpose: str, count: int) -> list[Scenario]:
        domains: tuple[str, ...] = UNSEEN if purpose == "unseen" else TRAINED
        split = "train" if purpose in ("train", "sft") else "heldout"
        seed = self.recipe.data.seed + SEEDS.get(purpose, 0)
        if count == 0:
            return []
        return await starter_scenarios(self.worker, domains=domains, split=split, seed=seed, count=count)


@asynccontextmanager
async def open_world(recipe: Recipe) -> AsyncIterator[World]:
    """Open a recipe's world with a worker of its own.

    Raises:
        ConfigError: The world is neither `starter` nor a package folder.
        DataError: A package cannot be loaded.
    """
    packages = _packages(recipe)
    specs = starter_specs() if packages is None else {package.spec.id: package.spec for package in packages}
    async with Worker([spec.definition() for spec in specs.values()]) as worker:
        world = World(specs=specs, packages=packages, recipe=recipe, worker=worker)
        yield await _with_examples(world) if recipe.shots else world


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


def _packages(recipe: Recipe) -> list[Package] | None:
    names = [recipe.world] if isinstance(recipe.world, str) else recipe.world
    if names == [STARTER]:
        return None
    if not names or STARTER in names:
        raise ConfigError(f"world is {recipe.world!r}: name `starter`, or one or more package folders.")
    packages = [load_package(Path(name)) for name in names]
    twice = {p.spec.id for p in packages if sum(q.spec.id == p.spec.id for q in packages) > 1}
    if twice:
        raise ConfigError(f"world names two packages {sorted(twice)[0]!r}; the folder's name is the id, so rename one.")
    return packages


def _split(scenarios: Sequence[Scenario], wanted: str) -> list[Scenario]:
    """Scenarios of a split; where the file marks none, the last fifth is held out."""
    if any(scenario.split is not None for scenario in scenarios):
        return [scenario for scenario in scenarios if (scenario.split or "train") == wanted]
    border = len(scenarios) - max(1, len(scenarios) // 5)
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
