"""`envace audit`: proof, without a language model, that scenarios can be solved and cannot be had for free."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from envace.benchmarks.audit import Finding, audit_scenarios
from envace.jobs.display import Display, Silent
from envace.jobs.worlds import open_world
from envace.training.recipe import Recipe


def audit(world: str | Path = "starter", *, count: int = 300, display: Display | None = None) -> dict[str, Any]:
    """Audit a world's scenarios: the oracle passes, doing nothing fails, a mutated oracle fails.

    Args:
        world: `starter`, or a package folder.
        count: Scenarios of each split to audit.
        display: Who watches.

    Returns:
        `scenarios`, `solvable`, `free` (pass by doing nothing), `lenient` (a mutated oracle passes), and `findings` of
        the scenarios that fall short, each with `scenario`, `problem`, `detail`.
    """
    recipe = Recipe(world=str(world))
    findings, total = asyncio.run(_audit(recipe, count, display or Silent()))
    problems = [finding.problem for finding in findings]
    broken = {finding.scenario for finding in findings if finding.problem == "unsolvable"}
    return {
        "world": str(world),
        "scenarios": total,
        "solvable": total - len(broken),
        "free": problems.count("free"),
        "lenient": problems.count("lenient"),
        "findings": [finding.__dict__ for finding in findings],
    }


async def _audit(recipe: Recipe, count: int, display: Display) -> tuple[list[Finding], int]:
    findings: list[Finding] = []
    total = 0
    async with open_world(recipe) as world:
        for purpose in ("train", "heldout", "unseen"):
            scenarios = await world.scenarios(purpose, count)
            display.start(purpose, len(scenarios))
            for number, scenario in enumerate(scenarios, 1):
                spec = world.specs[scenario.environment]
                findings += await audit_scenarios(world.worker, spec, [scenario])
                display.advance(purpose, number)
            display.finish(purpose)
            total += len(scenarios)
    return findings, total
