"""One scenario: an instruction, and, kept apart from it, the opening state and what a right ending looks like."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from envace.scenarios.checklist import Checklist
from envace.scenarios.strict import Strict

Outcome = Literal["done", "declined"]

DECLINE_WORDS = re.compile(r"\b(sorry|cannot|can't|could not|couldn't|unable|not possible|declined?)\b", re.IGNORECASE)
"""A reply with one of these words declines (part of) the request."""

MAX_REPLY_CHARACTERS = 400
"""A longer reply fails its check: naming every value there is must not pass for an answer."""


class Call(Strict):
    """A recorded call, with its response where that was recorded too."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    response: Any = None


class Expected(Strict):
    """What a right ending looks like in the scenario's own opening state; the checks compare with it."""

    outcome: Outcome
    """`done`, or `declined` where the right end is to refuse (part of) the request."""
    reply: str
    """A right reply, as the oracle gives it."""
    facts: tuple[str, ...] = ()
    """Strings that a right reply contains."""
    calls: tuple[Call, ...] = ()
    """The oracle's calls and their responses, in order."""
    final_state: dict[str, Any]
    """Every table after the oracle's calls."""


class Scenario(Strict):
    """A task in an environment.

    `state` and `expected` belong to the real environment. `public()` is what a rehearsal gets: a scenario without both.
    """

    id: str
    environment: str = ""
    """Id of the environment package; empty takes that of the package it stands in."""
    kind: str = "task"
    """Which sort of task it is; results are broken down by it."""
    split: Literal["train", "heldout"] | None = None
    """Which split it belongs to; where no scenario of a package says so, the last fifth is held out."""
    instruction: str
    """What the user says first."""
    turns: tuple[str, ...] = ()
    """What the user says next, one message after each final reply; nobody plays the user in training."""
    system: str = ""
    """A system message of its own, after what the environment says of itself."""
    goal: dict[str, Any] = Field(default_factory=dict)
    """What the instruction says, as data for the oracle program; nothing of the state."""
    state: dict[str, Any] | None = None
    """Opening tables; None in a public scenario."""
    expected: Expected | None = None
    """The right ending; None in a public scenario."""
    checklist: Checklist | None = None
    """Weighted questions about each turn; what a reward is made of where no environment can be run."""
    reference: tuple[dict[str, Any], ...] = ()
    """The recorded conversation that the scenario comes from, as OpenAI messages; no policy is shown it but a
    rehearser with `grounding: reference`."""

    @model_validator(mode="after")
    def _turn_by_turn(self) -> Scenario:
        if self.checklist is not None and self.checklist.turns != 1 + len(self.turns):
            said = f"the checklist speaks of {self.checklist.turns} turns, the user of {1 + len(self.turns)}"
            raise ValueError(said)
        return self

    def public(self) -> Scenario:
        """The scenario without its opening state and its right ending."""
        return self.model_copy(update={"state": None, "expected": None})

    @property
    def feasible(self) -> bool | None:
        """Whether the request can be done in the real opening state; None when that is withheld."""
        return None if self.expected is None else self.expected.outcome == "done"


def outcome_of(reply: str) -> Outcome:
    """Read from a reply whether it says that (part of) the request was declined."""
    return "declined" if DECLINE_WORDS.search(reply) else "done"


def reply_holds(reply: str | None, *, outcome: str, facts: tuple[str, ...] | list[str]) -> bool:
    """Whether a reply has the right outcome and contains every fact as a whole word."""
    if reply is None or len(reply) > MAX_REPLY_CHARACTERS or outcome_of(reply) != outcome:
        return False
    return all(re.search(rf"(?<![\w#]){re.escape(fact)}(?!\w)", reply) for fact in facts)
