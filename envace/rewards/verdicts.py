"""Checklists decided on what was said: programs first, then dependences, then the judge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from envace.errors import ConfigError
from envace.rewards.checklists import Decision, decided_without_judge, held_back, record, resolve, turns_of
from envace.rewards.judge import Judge
from envace.scenarios.checklist import Checklist, Item, deciding_order
from envace.types import Author, Message, ToolSpec


async def checklist_verdicts(
    judge: Judge | None,
    checklist: Checklist,
    messages: Sequence[Message],
    *,
    opening: Sequence[Message],
    tools: Sequence[ToolSpec],
    first: int = 0,
) -> list[dict[str, Any]]:
    """Decide a checklist on a trajectory, all turns at once.

    Args:
        judge: Decides what no program can; None where every item has a `check`.
        checklist: Its variants are all decided.
        messages: What was said after the opening (`Trajectory.messages`).
        opening: What was said before: the system message and the instruction.
        tools: What the assistant could call.
        first: The first turn to decide; those before it were decided as they ended.

    Returns:
        A record for each item of each turn from there that was reached: `variant`, `turn`, `id`, `verdict`, `weight`,
        `by` and `reason`.

    Raises:
        ConfigError: An item needs a judge, and there is none.
    """
    turns = turns_of(messages)[: checklist.turns]
    pending, before = [], list(opening)
    for number, turn in enumerate(turns):
        if number >= first:
            pending.append(turn_verdicts(judge, checklist, number, turn, before=before, tools=tools))
        before = [*before, *turn]
    return [line for lines in await asyncio.gather(*pending) for line in lines]


async def turn_verdicts(
    judge: Judge | None,
    checklist: Checklist,
    number: int,
    turn: Sequence[Message],
    *,
    before: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> list[dict[str, Any]]:
    """Decide one turn of a checklist, in all variants; arguments and result as for `checklist_verdicts`.

    The user who began the turn may be the first of its messages or, as with the instruction, the last before it.
    """
    if before and before[-1].author is Author.USER and not (turn and turn[0].author is Author.USER):
        before, turn = before[:-1], [before[-1], *turn]
    variants = [variant[number] for variant in checklist.variants]
    decided = await asyncio.gather(*(_turn(judge, items, turn, before, tools) for items in variants))
    return [
        record(item, found[item.id], variant=variant, turn=number)
        for variant, (items, found) in enumerate(zip(variants, decided, strict=True))
        for item in items
    ]


async def _turn(
    judge: Judge | None,
    items: Sequence[Item],
    turn: Sequence[Message],
    before: Sequence[Message],
    tools: Sequence[ToolSpec],
) -> dict[str, Decision]:
    """What programs decide, then what is left for the judge, without what depends on an item that did not pass.

    One call decides a turn, dependent items with those that they depend on, whose verdicts are applied afterwards. One
    call an item is made in rounds instead, so that nothing is asked that a dependence settles.
    """
    programmed = {item.id: decided_without_judge(item, turn) for item in items}
    found = {name: decision for name, decision in programmed.items() if decision is not None}
    if judge is None and len(found) < len(items):
        raise ConfigError("The checklist has items that need a judge, and there is none; set `judge.model`.")
    while judge is not None:
        found |= _settled(items, found)
        left = [item for item in items if item.id not in found]
        if judge.settings.mode == "item":
            left = [item for item in left if all(other in found for other in item.dependence)]
        if not left:
            break
        found |= await judge.decide(left, before=before, turn=turn, tools=tools)
    return resolve(items, found)


def _settled(items: Sequence[Item], found: Mapping[str, Decision]) -> dict[str, Decision]:
    """Items that need not be asked, because one that they depend on did not pass."""
    known = dict(found)
    for item in deciding_order(items):
        held = None if item.id in known else held_back(item, known)
        if held is not None:
            known[item.id] = held
    return known
