"""Opening the judge that a recipe names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from envace.jobs.endpoints import is_endpoint, open_endpoint
from envace.jobs.models import load
from envace.prompts import Prompts, load_prompts
from envace.rewards.judge import Judge, JudgeSection
from envace.training.recipe import Recipe


@asynccontextmanager
async def open_judge(
    section: JudgeSection, *, recipe: Recipe | None = None, prompts: Prompts | None = None, cache: Path | None = None
) -> AsyncIterator[Judge]:
    """A judge on an endpoint, or on a model loaded here.

    Args:
        section: Which, and how it is asked.
        recipe: Says device and precision of a model that is loaded here.
        prompts: The words; None for the bundled ones.
        cache: A file of verdicts to read and add to, e.g. in the run folder.

    Raises:
        ConfigError: The address cannot be read.
        ModelError: The model cannot be loaded.
        RunError: The cache is damaged.
    """
    async with AsyncExitStack() as stack:
        if not is_endpoint(section.model):
            yield Judge(load(section.model, recipe).policy(), section, prompts=prompts, cache=cache)
            return
        plain = await stack.enter_async_context(open_endpoint(section.model, settings=section.http(structured=False)))
        if not section.structured:
            yield Judge(plain, section, prompts=prompts, cache=cache)
            return
        asked = await stack.enter_async_context(open_endpoint(section.model, settings=section.http(structured=True)))
        yield Judge(asked, section, plain=plain, prompts=prompts, cache=cache)


@asynccontextmanager
async def judge_of(recipe: Recipe, *, cache: Path | None = None) -> AsyncIterator[Judge | None]:
    """The judge that a recipe names, where its reward asks one; else None."""
    if recipe.judge is None or recipe.reward != "judged":
        yield None
        return
    async with open_judge(recipe.judge, recipe=recipe, prompts=load_prompts(recipe.prompts), cache=cache) as judge:
        yield judge
