"""Who answers a final reply: nobody, or the scenario's script. Nobody plays the user in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from envace.types import Message, StopReason


class User(Protocol):
    """Answers the final replies of one rollout."""

    async def answer(self, said: Sequence[Message]) -> str | StopReason | None:
        """The next message; None when there is none; a stop reason where the conversation is broken off.

        Args:
            said: The whole conversation, the reply included.
        """


class ScriptedUser:
    """Says the scenario's turns one after another, whatever is replied."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._left = list(turns)

    async def answer(self, said: Sequence[Message]) -> str | None:
        """The next turn of the script."""
        return self._left.pop(0) if self._left else None
