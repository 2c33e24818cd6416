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
    INVALID_CALL = "invalid_call"
    """A call that names no tool or breaks its schema, where the setting ends the rollout at one."""
    GATED = "gated"
    """A turn failed an item that its checklist requires for the next, so the user did not speak again."""
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
    """Whether a tool's response reports an error: an object with `error` or `error_tool_call`, or `success` false."""
    return isinstance(response, dict) and (
        "error" in response or "error_tool_call" in response or response.get("success") is False
    )


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
    id: str = field(default="", compare=False)
    """What an endpoint named the call, to be named again by its answer; empty where calls have no ids."""

    def key(self) -> str:
        """A canonical text: equal for equal calls, whatever the order of arguments."""
        return f"{self.name} {json.dumps(self.arguments, sort_keys=True, separators=(',', ':'))}"


class CallFailure(str, Enum):
    """Why a step, or one call in it, is not well-formed. The value is what the policy may be told."""

    EMPTY = "empty_step"
    """Neither a call nor any text."""
    NO_END = "no_end_of_turn"
    """The step did not end with its end-of-turn token."""
    UNCLOSED_REASONING = "unclosed_reasoning"
    """The reasoning was opened and never closed, so there is no reply."""
    UNCLOSED_CALL = "unclosed_call"
    """A call was opened and never closed."""
    STRAY_TEXT = "stray_text"
    """Text where the dialect allows none, e.g. between a call's object and its closing tag."""
    NOT_JSON = "not_json"
    NOT_AN_OBJECT = "not_an_object"
    """JSON, but no object."""
    NO_NAME = "no_name"
    """No tool name, or one that is not a text."""
    ARGUMENTS = "arguments_not_an_object"
    FLOOD = "too_many_calls"
    """More calls in one step than are allowed."""


@dataclass(frozen=True, kw_only=True)
class ParsedCall:
    """One call as it stands in a step: read, or the reason why it could not be."""

    call: ToolCall | None
    failure: CallFailure | None = None
    detail: str = ""
    """The failure in words; at most 200 characters."""
    start: int = 0
    """Position of its first character in the step's text."""
    end: int = 0
    """Position after its last character."""
    id: str = ""
    """What an endpoint named it, so that even a call that cannot be read is answered under its name."""
    repairs: tuple[str, ...] = ()
    """What was mended to read it, in the order it was done; empty in strict parsing."""


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a step says. Nothing of the step is lost: what is in no call and is no reasoning is `text`."""

    items: tuple[ParsedCall, ...] = ()
    """Every call that was attempted, in order."""
    text: str = ""
    """Text beside the calls; where there is no call, the reply."""
    reasoning: str | None = None
    failure: CallFailure | None = None
    """Why the step as a whole is malformed; None where each item speaks for itself."""
    detail: str = ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls that could be read."""
        return tuple(item.call for item in self.items if item.call is not None)

    @property
    def reply(self) -> str | None:
        """The final reply; None where the step calls, or is malformed."""
        return None if self.items or self.failure is not None else self.text


@dataclass(frozen=True, kw_only=True)
class Message:
    """One message of a conversation, as chat templates and endpoints know it."""

    author: Author
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant's message."""
    reasoning: str | None = None
    """An assistant's thinking, without its tags."""
    call_id: str = ""
    """Of a tool's message: the id of the call that it answers."""
    name: str = ""
    """Of a tool's message: the tool."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a step cost. None is not known, which is never the same as 0."""

    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    cost: float | None = None
    """US dollars."""


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
    invalid: bool = False
    """True where the call broke its schema and was answered before any environment."""
    repairs: tuple[str, ...] = ()
    """What was mended in the call before it was made; empty in strict reading."""


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
    opens_row: bool = False
    """Whether it is a prompt that does not extend what stood before it: a new row of training begins with it."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One sampled message."""

    ids: list[int]
    """Exactly the ids that were sampled; empty where an endpoint does not tell them."""
    logprobs: list[float] | None
    """One a sampled id, nats; None where they are not known, and the step then trains nothing."""
    stopped: bool
    """True when it ended at a stop token, False when a limit cut it."""
    parsed: Parsed | None = None
    """What an endpoint that speaks in messages says the step says; None where the ids are to be parsed."""
    usage: Usage | None = None


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
    messages: list[Message] = field(default_factory=list)
    """What was said after the opening, by every author, in order; a user's message begins a new turn."""
    reply: str | None = None
    """The last final reply."""
    stop: StopReason = StopReason.INFRASTRUCTURE
    malformed: int = 0
    """Calls that could not be read and were answered with an error; only repairing formats go on after one."""
    error: str | None = None
    """What went wrong, for PARSE and INFRASTRUCTURE."""
    reward: float | None = None
    """In [0, 1]; None when it could not be scored (never 0 for that)."""
    parts: dict[str, float] = field(default_factory=dict)
    """The components of the reward, each in [0, 1]."""
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    """What a checklist decided, an item each: `turn`, `id`, `verdict`, `weight` and who decided it."""
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
