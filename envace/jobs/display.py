"""What a job tells whoever watches."""

from __future__ import annotations

from typing import Protocol


class Display(Protocol):
    """Shows progress; jobs never print."""

    def start(self, task: str, total: int) -> None:
        """A piece of work of `total` units begins."""

    def advance(self, task: str, done: int, note: str = "") -> None:
        """So many units are done; `note` shows current numbers."""

    def finish(self, task: str) -> None:
        """The piece is complete."""

    def say(self, text: str) -> None:
        """One line that stays."""


class Silent:
    """Shows nothing."""

    def start(self, task: str, total: int) -> None:
        """Nothing."""

    def advance(self, task: str, done: int, note: str = "") -> None:
        """Nothing."""

    def finish(self, task: str) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""
