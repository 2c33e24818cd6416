"""One rollout's checklist, decided turn by turn: a failed requirement can end the conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from envace.envs import User
from envace.rewards.checklists import checklist_reward, may_go_on, turns_of
from envace.rewards.judge import Judge
from envace.rewards.verdicts import checklist_verdicts
from envace.scenarios.checklist import Checklist
from envace.types import Message, StopReason, ToolSpec, Trajectory, Verdict


class Grading:
    """Decides the items of a scenario's checklist as its turns end."""

    def __init__(
        self, checklist: Checklist, judge: Judge | None, *, opening: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> None:
        """Make one rollout's.

        Args:
            checklist: The scenario's.
            judge: Decides what no program can.
            opening: What is said before the first acting step.
            tools: What the policy could call.
        """
        self.checklist, self._judge = checklist, judge
        self._opening, self._tools = opening, tools
        self.records: list[dict[str, Any]] = []
        """What was decided, an item each."""
        self._decided = 0
        self._gate: bool | None = True
        """Whether the last turn passed what the next requires; None where nobody could say."""

    async def may_go_on(self, said: Sequence[Message]) -> bool:
        """Decide the turn that just ended; False where it failed, or nobody could say, what the next one requires.

        Args:
            said: The whole conversation, the opening included.
        """
        number = self._decided
        records = await self._decide(said[len(self._opening) :])
        passed = [
            may_go_on(_verdicts(records, variant), items[number])
            for variant, items in enumerate(self.checklist.variants)
        ]
        self._gate = False if False in passed else None if None in passed else True
        return self._gate is True

    async def grade(self, trajectory: Trajectory) -> None:
        """Decide what is left and set the reward; it stays None where an item that matters could not be decided.

        A turn that an invalid call ended earns nothing, as in the released code of EnvACE.
        """
        turns = turns_of(trajectory.messages)[: self.checklist.turns]
        reached = len(turns) - (trajectory.stop is StopReason.INVALID_CALL)
        if reached > self._decided:
            await self._decide([message for turn in turns[:reached] for message in turn])
        trajectory.verdicts = self.records
        reward = checklist_reward(self.checklist, self.records, reached=reached)
        # Where nobody could say whether the next turn may come, nobody knows what it would have earned.
        trajectory.reward = None if trajectory.stop is StopReason.GATED and self._gate is None else reward
        if trajectory.reward is None:
            lost = [record for record in self.records if record["verdict"] == Verdict.UNAVAILABLE.value]
            trajectory.error = f"judge: {len(lost)} items could not be decided, the first: {lost[0]['reason']}"
        else:
            trajectory.parts = {"items": trajectory.reward}

    async def _decide(self, said: Sequence[Message]) -> list[dict[str, Any]]:
        """Decide the turns of what was said that are not decided yet."""
        records = await checklist_verdicts(
            self._judge, self.checklist, said, opening=self._opening, tools=self._tools, first=self._decided
        )
        self.records += records
        self._decided = len(turns_of(said))
        return records


def _verdicts(records: Sequence[dict[str, Any]], variant: int) -> dict[str, Verdict]:
    return {record["id"]: Verdict(record["verdict"]) for record in records if record["variant"] == variant}


class GatedUser:
    """A user who speaks again only where the turn passed what its checklist requires for the next."""

    def __init__(self, user: User, grading: Grading) -> None:
        self._user, self._grading = user, grading

    async def answer(self, said: Sequence[Message]) -> str | StopReason | None:
        """The user's message, or GATED."""
        text = await self._user.answer(said)
        if text is None or await self._grading.may_go_on(said):
            return text
        return StopReason.GATED
