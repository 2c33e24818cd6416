"""Checklists decided turn by turn: what ends a conversation, and what nobody could decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from envace.envs import ScriptedUser
from envace.rewards.checklists import Decision
from envace.rollout.grading import GatedUser, Grading
from envace.scenarios import EnvironmentSpec, Scenario, opening
from envace.scenarios.checklist import Item, read_checklist
from envace.types import Author, Message, StopReason, Trajectory, Verdict


class Says:
    """A judge that says one thing of everything."""

    class settings:
        mode = "turn"

    def __init__(self, verdict: Verdict) -> None:
        self.verdict, self.asked = verdict, 0

    async def decide(self, items: Sequence[Item], **shown: Any) -> dict[str, Decision]:
        self.asked += 1
        return {item.id: Decision(verdict=self.verdict, by="judge", reason="so it is") for item in items}


def scenario(*, weight: float) -> Scenario:
    """Two turns with a programmed item each; going on needs a judged one, of some weight."""
    gate = {
        "id": "gate",
        "question": "May it go on?",
        "focus_on": "assistant.content.user_visible_reply",
        "weight": weight,
        "required_for_next_turn": True,
    }
    said = {"id": "said", "check": {"reply_contains": "done"}, "weight": 1 - weight}
    checklist = read_checklist([[[said, gate], [{**said, "weight": 1.0}]]])
    return Scenario(id="s", environment="retail", instruction="hello", turns=("and now?",), checklist=checklist)


def reply(text: str) -> Message:
    return Message(author=Author.ASSISTANT, content=text)


async def played(
    retail: EnvironmentSpec, judge: Says, *, weight: float, stop: StopReason = StopReason.REPLIED
) -> tuple[str | StopReason | None, Trajectory]:
    """What the user answers the first reply, and the graded trajectory."""
    task = scenario(weight=weight)
    assert task.checklist is not None
    told = opening(retail, task)
    grading = Grading(task.checklist, judge, opening=told, tools=retail.tools)  # type: ignore[arg-type]
    user = GatedUser(ScriptedUser(task.turns), grading)
    messages = [reply("done")]
    answer = await user.answer([*told, *messages])
    if not isinstance(answer, StopReason) and answer is not None:
        messages += [Message(author=Author.USER, content=answer), reply("done")]
    made = Trajectory(scenario_id="s", environment_id="retail", kind="k", group=0, index=0, messages=messages)
    made.stop = answer if isinstance(answer, StopReason) else stop
    await grading.grade(made)
    return answer, made


async def test_a_turn_that_passed_lets_the_user_speak(retail: EnvironmentSpec) -> None:
    answer, made = await played(retail, Says(Verdict.PASS), weight=0.5)
    assert (answer, made.reward, made.error) == ("and now?", 1.0, None)
    assert [record["turn"] for record in made.verdicts] == [0, 0, 1]


async def test_a_failed_requirement_ends_it_and_later_turns_count_0(retail: EnvironmentSpec) -> None:
    answer, made = await played(retail, Says(Verdict.FAIL), weight=0.5)
    assert answer is StopReason.GATED
    assert made.reward == pytest.approx((0.5 + 0) / 2)


@pytest.mark.parametrize("weight", [0.5, 0.0])
async def test_j2_a_requirement_that_nobody_could_decide_is_no_zero(retail: EnvironmentSpec, weight: float) -> None:
    answer, made = await played(retail, Says(Verdict.UNAVAILABLE), weight=weight)
    assert answer is StopReason.GATED
    assert made.reward is None
    assert made.error == "judge: 1 items could not be decided, the first: so it is"


async def test_a_turn_that_an_invalid_call_ended_earns_nothing(retail: EnvironmentSpec) -> None:
    _, made = await played(retail, Says(Verdict.PASS), weight=0.5, stop=StopReason.INVALID_CALL)
    assert made.reward == pytest.approx(0.5)


async def test_what_was_decided_is_not_asked_again(retail: EnvironmentSpec) -> None:
    judge = Says(Verdict.PASS)
    await played(retail, judge, weight=0.5)
    assert judge.asked == 1
