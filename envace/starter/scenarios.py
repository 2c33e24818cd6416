"""Scenarios of the starter world: drafts, completed by what the oracle does in them."""

from __future__ import annotations

from collections.abc import Sequence

from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Scenario, read_environment
from envace.starter.world import DOMAINS, draw, folder
from envace.training.demonstrations import demonstrate, expected_of


def starter_specs() -> dict[str, EnvironmentSpec]:
    """The four domains by name."""
    return {domain: read_environment(folder(domain) / "environment.py", name=domain) for domain in DOMAINS}


async def starter_scenarios(
    worker: Worker, *, domains: Sequence[str], split: str, seed: int, count: int
) -> list[Scenario]:
    """`count` scenarios, the domains in turn; the same arguments give the same scenarios."""
    drafts = [(domains[i % len(domains)], i, draw(domains[i % len(domains)], split, seed, i)) for i in range(count)]
    scenarios: dict[int, Scenario] = {}
    for domain in domains:
        own = [(i, draft) for name, i, draft in drafts if name == domain]
        items = [{"state": draft.state, "goal": draft.goal} for _, draft in own]
        answers = await demonstrate(worker, domain, items, carelessness=0.0, seed=0)
        for (i, draft), answer in zip(own, answers, strict=True):
            scenarios[i] = Scenario(
                id=f"{domain}-{split}-{seed}-{i}",
                environment=domain,
                kind=draft.kind,
                instruction=draft.instruction,
                goal=draft.goal,
                state=draft.state,
                expected=expected_of(answer),
            )
    return [scenarios[i] for i in range(count)]
