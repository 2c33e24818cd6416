"""The environment protocol, and the check of a call against its schema that precedes every environment."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from jsonschema.validators import Draft202012Validator

from envace.models.transcripts import Transcript
from envace.scenarios import EnvironmentSpec
from envace.types import Exchange, ToolCall


class Environment(Protocol):
    """Answers the calls of one rollout. One object a rollout."""

    spec: EnvironmentSpec

    async def open(self) -> None:
        """Make ready for the first call."""

    async def respond(self, call: ToolCall, transcript: Transcript) -> Exchange | None:
        """Answer a well-formed call and append the answer's tokens, after the tool header, to the transcript.

        Returns None when the answer did not come to an end within the transcript's limits.
        """

    async def close(self) -> None:
        """Free what was opened."""


@lru_cache(maxsize=256)
def _validator(spec: EnvironmentSpec, name: str) -> Draft202012Validator:
    tool = spec.tool(name)
    assert tool is not None
    return Draft202012Validator(tool.parameters)


def invalid_call(spec: EnvironmentSpec, call: ToolCall) -> dict[str, Any] | None:
    """The observation for a call that names no tool or breaks its schema; None for a valid call.

    It is checked before any environment, so that a rehearsal can never hide a wrong argument (method: validation
    before rehearsal).
    """
    if spec.tool(call.name) is None:
        return {"error": "unknown_tool"}
    if not _validator(spec, call.name).is_valid(call.arguments):
        return {"error": "invalid_arguments"}
    return None
