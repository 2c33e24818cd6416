"""The judge: a model that decides the items of a checklist which no program can decide.

What it cannot decide is UNAVAILABLE: a judge that is down, slow or unreadable never becomes a FAIL.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envace.errors import ConfigError, ContextOverflow, EndpointError, ModelError, RunError
from envace.models.http import HttpSettings
from envace.models.transcripts import Transcript, random_stream
from envace.models.wire import parse_address
from envace.prompts import Prompts, load_prompts
from envace.rewards.answers import fence, read_verdicts, shown_question, shown_turn
from envace.rewards.checklists import MAX_REASON, Decision
from envace.runs.lines import append_lines, read_lines
from envace.scenarios.checklist import Item
from envace.types import Author, Message, Role, Step, ToolSpec, Usage, Verdict

if TYPE_CHECKING:
    from envace.models.policy import Policy

REFUSED = frozenset({"status_400", "status_404", "status_415", "status_422", "status_501"})
"""Causes that may mean that an endpoint does not take a `response_format`."""
ANSWERED = frozenset({"content_filter", "prompt_changed", "status_400", "status_413", "status_422", "too_large"})
"""Causes of an endpoint that is there, and only refuses this one question."""

VERDICTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "verdicts": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "reason": {"type": "string"},
                    "verdict": {"type": "string", "enum": ["pass", "fail"]},
                },
                "required": ["id", "reason", "verdict"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["verdicts"],
    "additionalProperties": False,
}
"""JSON Schema of an answer."""


def refuse_secrets(model: str, key: str) -> None:
    """Raise ConfigError where an address holds credentials or a query."""
    if model.startswith(("http://", "https://")):
        address = parse_address(model)
        if address.user or address.query:
            raise ConfigError(f"{key} holds credentials or a query, and would be written; set ENVACE_API_KEY.")


class JudgeSection(BaseModel):
    """Who decides the items of checklists, and how it is asked."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: str
    """`URL#NAME` of an OpenAI-compatible endpoint, or a model as elsewhere: a folder, a hub name, `starter`."""
    mode: Literal["turn", "item"] = "turn"
    """`turn`: one call for all items of a user turn. `item`: one for each step and item, as the released code asks."""
    temperature: float = Field(0.6, ge=0)
    """The paper's."""
    top_p: float = Field(0.8, gt=0, le=1)
    """The paper's; for endpoints only."""
    seed: int = Field(0, ge=0)
    """Of the judge's own sampling, with each question's text; apart from the run's."""
    max_tokens: int = Field(2048, ge=16)
    """Tokens of an answer, reasoning included."""
    retries: int = Field(2, ge=0)
    """Further calls for items that an answer left undecided."""
    backoff: float = Field(0.5, ge=0)
    """Seconds before the first of them; doubled for each further one."""
    deadline: float = Field(120.0, gt=0)
    """Seconds for one call, the endpoint's own retries included."""
    concurrency: int = Field(16, ge=1)
    """Calls under way at once."""
    max_characters: int = Field(24_000, ge=2000)
    """Characters of a conversation that are shown; what is cut is marked."""
    structured: bool = True
    """Ask an endpoint for JSON by `response_format`; where it refuses that it is asked without."""
    breaker: int = Field(3, ge=1)
    """Calls that fail in a row, by the connection or the deadline, after which nothing is asked for a while."""
    pause: float = Field(30.0, ge=0)
    """Seconds of that while; then one call tries again."""
    endpoint: HttpSettings = Field(default_factory=lambda: HttpSettings(max_retries=2))
    """How an endpoint is asked; its concurrency, top_p and seed are set by the keys above unless given here."""

    @field_validator("model")
    @classmethod
    def _no_secrets(cls, model: str) -> str:
        """Recipes are written into run folders, so an address in one holds no credentials. Raises ConfigError."""
        refuse_secrets(model, "judge.model")
        return model

    def http(self, *, structured: bool) -> HttpSettings:
        """The settings of the endpoint."""
        given = self.endpoint.model_fields_set
        ours: dict[str, Any] = {"concurrency": self.concurrency, "top_p": self.top_p, "seed": True}
        made = {key: value for key, value in ours.items() if key not in given}
        if structured:
            schema = {"name": "verdicts", "strict": True, "schema": VERDICTS_SCHEMA}
            asked = {"response_format": {"type": "json_schema", "json_schema": schema}}
            made["extra_body"] = {**asked, **self.endpoint.extra_body}
        return self.endpoint.model_copy(update=made)


@dataclass(kw_only=True)
class JudgeCounters:
    """What a judge was asked, and what came of it."""

    calls: int = 0
    """Calls of the model, retries for undecided items included."""
    retries: int = 0
    """Of them, those that asked again."""
    decided: int = 0
    """Items that the model decided."""
    cached: int = 0
    """Items whose identical question had been decided before, or was just being asked."""
    unavailable: int = 0
    """Items that it did not decide."""
    opened: int = 0
    """Times that calls were suspended because too many failed in a row."""
    failures: Counter[str] = field(default_factory=Counter)
    """Calls without a usable answer for every item, by cause; `suspended` were not even made."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    unknown_usage: int = 0
    """Calls whose tokens nobody told."""
    cost: float = 0.0
    """US dollars, of the calls whose cost is known."""

    def add(self, usage: Usage) -> None:
        """Count what a call used."""
        self.prompt_tokens += usage.prompt_tokens or 0
        self.sampled_tokens += usage.sampled_tokens or 0
        self.unknown_usage += usage.prompt_tokens is None or usage.sampled_tokens is None
        self.cost += usage.cost or 0.0

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "failures": dict(self.failures)}


class _Failed(Exception):
    """A call without an answer; `again` where the same may be asked again."""

    def __init__(self, cause: str, *, again: bool = False) -> None:
        super().__init__(cause)
        self.cause, self.again = cause, again


@dataclass(kw_only=True)
class _Live:
    """What lives in one event loop."""

    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore
    asking: dict[str, asyncio.Task[dict[str, Decision]]] = field(default_factory=dict)


class _Question(NamedTuple):
    """A call: what is shown of the conversation, and the items to decide, each with its key in the cache."""

    prompt: str
    shown: Mapping[str, str]
    items: Mapping[str, Item]


class Judge:
    """Decides items by asking a policy that acts, in messages or in token ids.

    Identical questions are asked once. A local policy must not be the one that waits for the verdicts in `hold`, for it
    samples nothing while it holds.
    """

    def __init__(
        self,
        policy: Policy,
        settings: JudgeSection,
        *,
        plain: Policy | None = None,
        prompts: Prompts | None = None,
        cache: Path | None = None,
    ) -> None:
        """Nothing is asked yet.

        Args:
            policy: Is asked.
            settings: How; its `model` also names the judge in the cache.
            plain: Asked from then on where an endpoint refuses what `policy` sends (a `response_format`).
            prompts: The words; None for the bundled ones.
            cache: A file of JSON lines that verdicts are read from and added to.

        Raises:
            RunError: The cache is damaged.
        """
        self.settings, self.prompts = settings, prompts or load_prompts()
        self.counters = JudgeCounters()
        self._policy, self._plain = policy, plain
        self._known: dict[str, tuple[Verdict, str]] = {}
        self._cache = cache
        self._live: _Live | None = None
        self._row = 0
        """Calls in a row that failed by the connection or the deadline."""
        self._closed_until = 0.0
        if cache is not None:
            self._known |= _read_cache(cache)

    async def decide(
        self, items: Sequence[Item], *, before: Sequence[Message], turn: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> dict[str, Decision]:
        """Decide judged items of a turn. Nothing is raised for a judge that fails: its items are UNAVAILABLE.

        Args:
            items: Of one turn, with ids of their own. Their `dependence` is left to the caller.
            before: What was said before the turn.
            turn: The messages of the turn.
            tools: What the assistant could call.

        Returns:
            A decision for each id.
        """
        if self.settings.mode == "turn":
            return await self._asked("judge_turn", items, before, turn, tools)
        steps = [self._asked("judge_item", [item], before, turn[:end], tools) for item in items for end in _ends(turn)]
        answers = await asyncio.gather(*steps)
        return {item.id: _any_step([a[item.id] for a in answers if item.id in a]) for item in items}

    # --- what was asked before --------------------------------------------------------------------------------------

    async def _asked(
        self,
        prompt: str,
        items: Sequence[Item],
        before: Sequence[Message],
        turn: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> dict[str, Decision]:
        """Decisions out of the cache, and of one call for all others."""
        shown = shown_turn(before, turn, tools, limit=self.settings.max_characters)
        context = _digest(
            self.settings.model,
            f"{self.settings.temperature} {self.settings.seed}",
            self.prompts.texts[prompt],
            *shown.values(),
        )
        keys = {item.id: _digest(context, shown_question(item)) for item in items}
        found = {name: Decision(verdict=self._known[key][0], by="cache", reason=self._known[key][1])
                 for name, key in keys.items() if key in self._known}  # fmt: skip
        self.counters.cached += len(found)
        open_items = {keys[item.id]: item for item in items if item.id not in found}
        if open_items:
            found |= await self._once(_Question(prompt, shown, open_items))
        return found

    async def _once(self, question: _Question) -> dict[str, Decision]:
        """Ask, or wait for the answer to the same question. Whoever asked first may be cancelled without the others."""
        live, key = self._here(), _digest(*sorted(question.items))
        task = live.asking.get(key)
        if task is None:
            task = live.asking[key] = asyncio.create_task(self._ask(question))
            task.add_done_callback(lambda _: live.asking.pop(key, None))
            return await asyncio.shield(task)
        self.counters.cached += len(question.items)
        return await asyncio.shield(task)

    def _keep(self, decided: Mapping[str, Decision]) -> None:
        """Remember verdicts by their keys."""
        self._known |= {key: (decision.verdict, decision.reason) for key, decision in decided.items()}
        if self._cache is not None and decided:
            append_lines(
                self._cache, ({"key": k, "verdict": d.verdict.value, "reason": d.reason} for k, d in decided.items())
            )

    # --- asking -----------------------------------------------------------------------------------------------------

    async def _ask(self, question: _Question) -> dict[str, Decision]:
        """Ask until every item is decided or the retries are used up."""
        left, cause = dict(question.items), "missing"
        found: dict[str, Decision] = {}
        for attempt in range(1 + self.settings.retries):
            if attempt:
                self.counters.retries += 1
                await asyncio.sleep(self.settings.backoff * 2.0 ** (attempt - 1))
            try:
                text = await self._call(question._replace(items=left), attempt)
            except _Failed as failure:
                cause = failure.cause
                self.counters.failures[cause] += 1
                if failure.again:
                    continue
                break
            said = read_verdicts(text, [item.id for item in left.values()])
            decided = {
                key: Decision(verdict=said[item.id][0], by="judge", reason=said[item.id][1][:MAX_REASON])
                for key, item in left.items()
                if item.id in said
            }
            self._keep(decided)
            found |= {left[key].id: decision for key, decision in decided.items()}
            left = {key: item for key, item in left.items() if key not in decided}
            if not left:
                break
            cause = "missing" if said else "unreadable"
            self.counters.failures[cause] += 1
        self.counters.decided += len(found)
        self.counters.unavailable += len(left)
        missing = Decision(verdict=Verdict.UNAVAILABLE, by="judge", reason=f"no verdict of the judge: {cause}")
        return found | {item.id: missing for item in left.values()}

    async def _call(self, question: _Question, attempt: int) -> str:
        """The text of one answer."""
        questions = "\n".join(shown_question(item) for item in question.items.values())
        words = {**question.shown, "questions": questions}
        prompt = self.prompts.fill(question.prompt, fence=fence(*words.values()), **words)
        live = self._here()
        async with live.slots:
            self._check_open(live)
            self.counters.calls += 1
            step = await self._watched(prompt, attempt, live)
        self.counters.add(step.usage or Usage())
        if not step.stopped:
            raise _Failed("truncated", again=True)
        return step.parsed.text if step.parsed is not None else self._policy.format.decode(step.ids)

    def _check_open(self, live: _Live) -> None:
        """Refuse at once while calls are suspended; when the while is over, one call goes through to try."""
        if self._row < self.settings.breaker:
            return
        if live.loop.time() < self._closed_until:
            raise _Failed("suspended")
        self._closed_until = live.loop.time() + self.settings.pause

    async def _watched(self, prompt: str, attempt: int, live: _Live) -> Step:
        """A step within the deadline; what fails is counted, and too much of it in a row suspends further calls."""
        try:
            step = await asyncio.wait_for(self._sample(prompt, attempt), self.settings.deadline)
        except asyncio.TimeoutError:
            raise self._down("deadline", live) from None
        except EndpointError as error:
            if error.cause in ANSWERED:
                raise _Failed(error.cause) from error
            raise self._down(error.cause, live) from error
        except ContextOverflow as error:
            raise _Failed("context_overflow") from error
        except ModelError as error:
            raise _Failed("model") from error
        self._row = 0
        return step

    def _down(self, cause: str, live: _Live) -> _Failed:
        self._row += 1
        if self._row >= self.settings.breaker:
            self.counters.opened += self._row == self.settings.breaker
            self._closed_until = live.loop.time() + self.settings.pause
        return _Failed(cause)

    async def _sample(self, prompt: str, attempt: int) -> Step:
        """One step; where the endpoint refuses the wish for JSON, once more without it, and from then on."""
        policy, plain = self._policy, self._plain
        try:
            return await self._step(policy, prompt, attempt)
        except EndpointError as error:
            if plain is None or error.cause not in REFUSED:
                raise
            step = await self._step(plain, prompt, attempt)
            if self._policy is policy:
                self.counters.failures["no_response_format"] += 1
                self._policy, self._plain = plain, None
            return step

    async def _step(self, policy: Policy, prompt: str, attempt: int) -> Step:
        messages = [Message(author=Author.USER, content=prompt)]
        # The stream depends on what is asked alone; which items are asked together depends on what is decided already.
        digest = int(_digest(prompt)[:15], 16)
        stream = random_stream(self.settings.seed, digest, attempt)
        transcript = Transcript(policy.format.open((), messages), random=stream, messages=messages)
        policy.begin(transcript)
        try:
            return await policy.sample(
                transcript, Role.ACT, max_tokens=self.settings.max_tokens, temperature=self.settings.temperature
            )
        finally:
            policy.end(transcript)

    def _here(self) -> _Live:
        """Slots and running questions of the running loop."""
        loop = asyncio.get_running_loop()
        if self._live is None or self._live.loop is not loop:
            self._live = _Live(loop=loop, slots=asyncio.Semaphore(self.settings.concurrency))
            self._closed_until = 0.0  # another loop's clock
        return self._live


def _read_cache(path: Path) -> dict[str, tuple[Verdict, str]]:
    try:
        return {line["key"]: (Verdict(line["verdict"]), str(line["reason"])) for line in read_lines(path)}
    except (KeyError, TypeError, ValueError):
        raise RunError(f"{path} holds a line that is no verdict; remove the file, and all is asked again.") from None


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def _ends(turn: Sequence[Message]) -> list[int]:
    """Where each step of a turn ends: after an assistant's message and the answers to its calls."""
    starts = [number for number, message in enumerate(turn) if message.author is Author.ASSISTANT]
    return [*starts[1:], len(turn)] if starts else []


def _any_step(decisions: Sequence[Decision]) -> Decision:
    """An item passes where it passes at any step."""
    nothing = Decision(verdict=Verdict.FAIL, by="focus", reason="the turn has no step")
    for verdict in (Verdict.PASS, Verdict.UNAVAILABLE):
        found = [decision for decision in decisions if decision.verdict is verdict]
        if found:
            return found[0]
    return decisions[0] if decisions else nothing
