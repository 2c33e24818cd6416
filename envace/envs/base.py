"""The environment protocol, and the check of a call against its schema that precedes every environment."""

from __future__ import annotations

from typing import Any, Protocol

from envace.models.transcripts import Transcript
from envace.scenarios import EnvironmentSpec
from envace.scenarios.arguments import argument_problems
from envace.types import Exchange, Segment, ToolCall


class Environment(Protocol):
    """Answers the calls of one rollout. One object a rollout."""

    spec: EnvironmentSpec

    async def open(self) -> None:
        """Make ready for the first call."""

    async def respond(self, call: ToolCall, transcript: Transcript) -> Exchange | None:
        """Answer a well-formed call and append the answer's tokens, after the tool header, to the transcript.

        Returns None when the answer did not come to an end within the transcript's limits.
        """

    def own_rows(self) -> list[Segment]:
        """Segments that were sampled outside of the transcript, each prompt of them opening a row of training."""

    async def close(self) -> None:
        """Free what was opened."""


MAX_NAMES = 20
"""Tools that the answer to an unknown one lists."""
MAX_NAME_CHARACTERS = 80
"""How much of an unknown name is repeated."""


def invalid_call(spec: EnvironmentSpec, call: ToolCall) -> dict[str, Any] | None:
    """The observation for a call that names no tool or breaks its schema; None for a valid call.

    It is checked before any environment, so that a rehearsal can never hide a wrong argument (method: validation
    before rehearsal). `error` is a code; `message` says what to do better.
    """
    tool = spec.tool(call.name)
    if tool is None:
        return {"error": "unknown_tool", "message": _no_such_tool(spec, call.name)}
    if problems := argument_problems(tool, call.arguments):
        return {"error": "invalid_arguments", "message": "; ".join(problems)}
    return None


def _no_such_tool(spec: EnvironmentSpec, name: str) -> str:
    shown = name if len(name) <= MAX_NAME_CHARACTERS else f"{name[: MAX_NAME_CHARACTERS - 3]}..."
    names = [tool.name for tool in spec.tools]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"There is no tool '{shown}'. Available: {', '.join(names[:MAX_NAMES])}{more}."
