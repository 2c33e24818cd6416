"""The reward of a checklist: verdicts of items to one number. Pure.

S_t is the weight of the items of turn t that passed, R the mean of S_t over the checklist's turns (one that was never
reached counts 0) and over its variants, as in CM2 (arXiv:2602.12268) and the released code of EnvACE. Unlike the
latter, `dependence` is honoured, and an item that nobody could decide never counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import regex

from envace.scenarios.checklist import ANY_TOOL, Checklist, Focus, Item, ItemCheck, deciding_order
from envace.types import Author, Json, Message, Verdict

By = Literal["check", "focus", "dependence", "judge", "cache"]
"""Who decided an item: its program, the turn that has nothing of what it asks about, an item that it depends on, the
judge, or the judge on an earlier occasion."""

MAX_REASON = 300
"""Characters of a reason that are kept."""
MAX_MATCHED = 20_000
"""Characters of a reply that a pattern is tried on, from its beginning."""
MATCH_SECONDS = 0.25
"""After which a pattern counts as undecided: patterns come from files, and some take years."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A verdict, who came to it, and why."""

    verdict: Verdict
    by: By
    reason: str = ""


# --- turns ---------------------------------------------------------------------------------------------------------


def turns_of(messages: Sequence[Message]) -> list[list[Message]]:
    """A trajectory's messages by turn: a user's message begins the next. The first turn's user stands before them."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        if message.author is Author.USER:
            turns.append([])
        turns[-1].append(message)
    return turns


def present(focus: Focus, turn: Iterable[Message]) -> bool:
    """Whether a turn has anything of what an item asks about."""
    return any(_PRESENT[focus](message) for message in turn)


_PRESENT: Mapping[Focus, Callable[[Message], bool]] = {
    Focus.CALLS: lambda message: bool(message.calls),
    Focus.THINKING: lambda message: message.author is Author.ASSISTANT and bool((message.reasoning or "").strip()),
    Focus.REPLY: lambda message: message.author is Author.ASSISTANT and bool(message.content.strip()),
    Focus.RESPONSE: lambda message: message.author is Author.TOOL,
}


def final_reply(turn: Sequence[Message]) -> str | None:
    """The reply that ended a turn; None where it ended otherwise, or said nothing."""
    spoken = [message for message in turn if message.author is not Author.USER]
    last = spoken[-1] if spoken else None
    if last is None or last.author is not Author.ASSISTANT or last.calls or not last.content.strip():
        return None
    return last.content


# --- items ---------------------------------------------------------------------------------------------------------


def decided_without_judge(item: Item, turn: Sequence[Message]) -> Decision | None:
    """What a program can say of an item; None where it is for a judge.

    A turn in which the assistant neither called nor said anything passes nothing.
    """
    if item.check is not None:
        return _checked(item.check, turn)
    assert item.focus_on is not None
    if not present(item.focus_on, turn):
        return Decision(verdict=Verdict.FAIL, by="focus", reason=f"the turn has no {item.focus_on.value}")
    return None


def _checked(check: ItemCheck, turn: Sequence[Message]) -> Decision:
    if not (present(Focus.CALLS, turn) or present(Focus.REPLY, turn)):
        return Decision(verdict=Verdict.FAIL, by="check", reason="the assistant did nothing")
    try:
        holds = _holds(check, turn)
    except TimeoutError:
        reason = f"the pattern took longer than {MATCH_SECONDS} s"
        return Decision(verdict=Verdict.UNAVAILABLE, by="check", reason=reason)
    return Decision(verdict=Verdict.PASS if holds else Verdict.FAIL, by="check", reason=f"{check.kind}")


def _holds(check: ItemCheck, turn: Sequence[Message]) -> bool:
    calls = [call for message in turn for call in message.calls]
    if check.call is not None:
        return any(call.name == check.call and within(check.arguments, call.arguments) for call in calls)
    if check.no_call is not None:
        return not any(check.no_call in (ANY_TOOL, call.name) for call in calls)
    if check.tool_response_contains is not None:
        wanted = check.tool_response_contains.casefold()
        return any(wanted in m.content.casefold() for m in turn if m.author is Author.TOOL)
    reply = final_reply(turn) or ""
    if check.reply_contains is not None:
        return check.reply_contains.casefold() in reply.casefold()
    return regex.search(check.reply_matches or "", reply[:MAX_MATCHED], timeout=MATCH_SECONDS) is not None


def within(part: Json, whole: Json) -> bool:
    """Whether JSON holds another: objects by key, all else by value. True is not 1."""
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(key in whole and within(part[key], whole[key]) for key in part)
    if isinstance(part, list):
        same = isinstance(whole, list) and len(part) == len(whole)
        return same and all(within(a, b) for a, b in zip(part, whole, strict=True))
    return bool(part == whole) and isinstance(part, bool) == isinstance(whole, bool)


def resolve(items: Sequence[Item], decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Decisions with `dependence` honoured; an item that nobody decided is UNAVAILABLE.

    An item passes only where all that it depends on pass. Where one of those failed it fails, whatever was said of
    it; where none failed and one is unavailable it is unavailable.
    """
    found: dict[str, Decision] = {}
    for item in deciding_order(items):
        missing = Decision(verdict=Verdict.UNAVAILABLE, by="judge", reason="not decided")
        found[item.id] = held_back(item, found) or decisions.get(item.id, missing)
    return {item.id: found[item.id] for item in items}


def held_back(item: Item, decisions: Mapping[str, Decision]) -> Decision | None:
    """What the items that it depends on make of an item; None where they let it be decided, or are not yet decided."""
    verdicts = {other: decisions[other].verdict for other in item.dependence if other in decisions}
    for verdict in (Verdict.FAIL, Verdict.UNAVAILABLE):
        stopped = [other for other, said in verdicts.items() if said is verdict]
        if stopped:
            said = "failed" if verdict is Verdict.FAIL else "could not be decided"
            return Decision(verdict=verdict, by="dependence", reason=f"{stopped[0]}, which it depends on, {said}")
    return None


# --- rewards -------------------------------------------------------------------------------------------------------


def turn_score(items: Sequence[Item], verdicts: Mapping[str, Verdict]) -> float | None:
    """Weight of the items that pass, in [0, 1]; None where one with a weight is unavailable or missing."""
    weighed = [item for item in items if item.weight > 0]
    if not weighed or any(verdicts.get(item.id, Verdict.UNAVAILABLE) is Verdict.UNAVAILABLE for item in weighed):
        return None
    passed = sum(item.weight for item in weighed if verdicts[item.id] is Verdict.PASS)
    return passed / sum(item.weight for item in weighed)


def may_go_on(verdicts: Mapping[str, Verdict], items: Sequence[Item]) -> bool | None:
    """Whether all of a turn's items that the next turn requires passed; None where that is not known."""
    required = {verdicts.get(item.id, Verdict.UNAVAILABLE) for item in items if item.required_for_next_turn}
    if Verdict.FAIL in required:
        return False
    return None if Verdict.UNAVAILABLE in required else True


def checklist_reward(checklist: Checklist, records: Iterable[Mapping[str, Any]], *, reached: int) -> float | None:
    """The reward of a trajectory.

    Args:
        checklist: What was asked.
        records: One for each decided item, with `variant`, `turn`, `id` and `verdict`.
        reached: Turns that were begun; the others count 0.

    Returns:
        In [0, 1]; None where an item that matters is unavailable or has no record.
    """
    verdicts: dict[tuple[int, int], dict[str, Verdict]] = {}
    for record in records:
        verdicts.setdefault((record["variant"], record["turn"]), {})[record["id"]] = Verdict(record["verdict"])
    scores = list(_turn_scores(checklist, verdicts, reached))
    known = [score for score in scores if score is not None]
    return sum(known) / len(scores) if scores and len(known) == len(scores) else None


def _turn_scores(
    checklist: Checklist, verdicts: Mapping[tuple[int, int], Mapping[str, Verdict]], reached: int
) -> Iterator[float | None]:
    """Variants have equally many turns, so the mean over all of these is the mean over turns, then variants."""
    for variant, turns in enumerate(checklist.variants):
        for number, items in enumerate(turns):
            yield turn_score(items, verdicts.get((variant, number), {})) if number < reached else 0.0


def record(item: Item, decision: Decision, *, variant: int, turn: int) -> dict[str, Any]:
    """A decided item as it is kept with its trajectory."""
    return {
        "variant": variant,
        "turn": turn,
        "id": item.id,
        "verdict": decision.verdict.value,
        "weight": item.weight,
        "by": decision.by,
        "reason": decision.reason[:MAX_REASON],
    }
