"""The words of the library as plain data: no torch, no I/O.

A *trajectory* is a list of *segments* of token ids. Each segment says who spoke, which role of the policy sampled it
(if any), and what training may do with it. A *group* holds the trajectories of one scenario and one policy version.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

Json = Any
"""A value that came from or goes to JSON."""


class Role(str, Enum):
    """The side that the one policy plays."""

    ACT = "act"
    """Chooses tool calls and writes the final reply."""
    REHEARSE = "rehearse"
    """Plays the environment: writes the response to a call."""


class Author(str, Enum):
    """Who speaks in a chat message; what chat templates call its role."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Learn(str, Enum):
    """What training may do with the tokens of a segment."""

    NOTHING = "nothing"
    """Given tokens: prompts, headers, real responses."""
    POLICY = "policy"
    """Sampled by the policy: policy gradient."""
    ANCHOR = "anchor"
    """Look-up values of an imagined world: no policy gradient, only a KL to the reference."""


class StopReason(str, Enum):
    """Why a trajectory ended. Only REPLIED is an end that the policy chose."""

    REPLIED = "replied"
    """A final reply without a tool call."""
    PARSE = "parse"
    """A step that is neither a reply nor a well-formed call."""
    STEPS = "steps"
    """The limit on acting steps was reached."""
    LENGTH = "length"
    """The limit on tokens was reached in the middle of a step or before it."""
    INFRASTRUCTURE = "infrastructure"
    """The worker or the policy failed; nobody's reward is touched."""


class Verdict(str, Enum):
    """What a check says. A check that could not be decided is never a FAIL."""

    PASS = "pass"
    FAIL = "fail"
    UNAVAILABLE = "unavailable"


class Consistency(str, Enum):
    """Whether a rehearsed response is one that the tool contract allows."""

    CONSISTENT = "consistent"
    INCONSISTENT = "inconsistent"
    UNDETERMINED = "undetermined"
    """It depends on records that this rehearsal has never shown."""


def is_error(response: Json) -> bool:
    """Whether a tool's response reports an error: an object with `error`, or with `success` false."""
    return isinstance(response, dict) and ("error" in response or response.get("success") is False)


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """One tool as the policy sees it."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""
    effect: str = "state_change"
    """`query` for tools that only read, else `state_change`."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A parsed call."""

    name: str
    arguments: dict[str, Any]

    def key(self) -> str:
        """A canonical text: equal for equal calls, whatever the order of arguments."""
        return f"{self.name} {json.dumps(self.arguments, sort_keys=True, separators=(',', ':'))}"


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A call and the response it got."""

    call: ToolCall
    response: Json
    """Parsed response; None where the text was not JSON."""
    text: str
    """The response as it stood in the transcript."""
    consistency: Consistency | None = None
    """For rehearsed responses: what the tool contract says of it."""
    shared: bool = False
    """True where the tokens were handed over from the group's imagined world."""


@dataclass(kw_only=True)
class Segment:
    """A run of token ids with one author."""

    ids: list[int]
    author: Author
    role: Role | None = None
    """The role that sampled it; None for given tokens."""
    learn: Learn = Learn.NOTHING
    logprobs: list[float] | None = None
    """Log-probability of each id under the sampling distribution, nats; None for given tokens."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One sampled message."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool
    """True when it ended at a stop token, False when a limit cut it."""


@dataclass(kw_only=True)
class Trajectory:
    """All segments of one attempt at a scenario, why it ended, and what it earned."""

    scenario_id: str
    environment_id: str
    kind: str
    group: int
    """Index of its group within the update or evaluation."""
    index: int
    """Index within the group."""
    segments: list[Segment] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    reply: str | None = None
    stop: StopReason = StopReason.INFRASTRUCTURE
    error: str | None = None
    """What went wrong, for PARSE and INFRASTRUCTURE."""
    reward: float | None = None
    """In [0, 1]; None when it could not be scored (never 0 for that)."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of the reward, each in [0, 1]."""
    feasible: bool | None = None
    """Whether the request can be done in the world it met; None when that is not determined."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls made, in order."""
        return [exchange.call for exchange in self.exchanges]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that holds everything."""
        return asdict(self)

    def count(self, role: Role) -> int:
        """Tokens sampled in a role."""
        return sum(len(segment.ids) for segment in self.segments if segment.role is role)


@dataclass(kw_only=True)
class Group:
    """The trajectories of one scenario under one policy version."""

    scenario_id: str
    trajectories: list[Trajectory]
