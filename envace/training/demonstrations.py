"""Demonstrations: recorded calls, responses and replies, as supervised rows for both roles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envace.envs.voices import rehearsal_answer, rehearsal_prompt
from envace.models.formats import Format
from envace.prompts import Prompts, load_prompts
from envace.rollout.groups import Layout
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Expected, Scenario, opening, reply_holds
from envace.scenarios.conversations import answered_calls
from envace.scenarios.packages import dump_line
from envace.scenarios.schema import Call
from envace.types import Author, Message, Role, ToolCall

BATCH = 500
"""Demonstrations a request to the worker."""


ID = re.compile(r"(?=.*[A-Za-z])(?:.*[0-9]){3}")
"""What is taken for an id whose digits mean nothing."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRow:
    """Ids of one demonstration and which of them are learned. Shapes (T,)."""

    ids: NDArray[np.int64]
    learn: NDArray[np.bool_]


async def demonstrate(
    worker: Worker, environment: str, items: Sequence[dict[str, Any]], *, carelessness: float, seed: int
) -> list[dict[str, Any]]:
    """Run an environment's oracle program on `items` (`state`, `goal`), slipping with a given chance a decision."""
    results: list[dict[str, Any]] = []
    for start in range(0, len(items), BATCH):
        batch = [
            {
                "state": item["state"],
                "goal": item["goal"],
                "seed": seed * 1_000_003 + start + n,
                "carelessness": carelessness,
            }
            for n, item in enumerate(items[start : start + BATCH])
        ]
        results += await worker.ask("demonstrate", environment=environment, items=batch, seconds=60.0)
    return results


async def demonstrations_of(
    worker: Worker,
    environments: Iterable[str],
    scenarios: Sequence[Scenario],
    *,
    carelessness: float,
    seed: int,
) -> list[dict[str, Any]]:
    """A demonstration of each scenario, in their order."""
    made: list[dict[str, Any]] = [{} for _ in scenarios]
    for name in environments:
        own = [i for i, scenario in enumerate(scenarios) if scenario.environment == name]
        items = [{"state": scenarios[i].state, "goal": scenarios[i].goal} for i in own]
        results = await demonstrate(worker, name, items, carelessness=carelessness, seed=seed)
        for i, result in zip(own, results, strict=True):
            made[i] = result
    return made


def ends_well(scenario: Scenario, demonstration: dict[str, Any]) -> bool:
    """Whether a demonstration leaves the state that the scenario expects, and says so."""
    expected = scenario.expected
    assert expected is not None
    return demonstration["final_state"] == expected.final_state and reply_holds(
        demonstration["reply"], outcome=expected.outcome, facts=expected.facts
    )


def under_fresh_ids(scenario: Scenario, random: np.random.Generator) -> Scenario:
    """The scenario with other digits in its ids, the same ones wherever an id stands.

    Ids are the keys of the opening tables that mix a letter with three digits or more (others may be dates or
    numbers), and what the goal names that is written like one of them (a record that does not exist). A model that
    sees few scenarios many times would learn their ids by heart.
    """
    texts = scenario.model_dump(include={"instruction", "goal", "state"})
    keys = {key for table in (scenario.state or {}).values() for key in table if ID.search(key)}
    shapes = {_shape(key) for key in keys}
    named = {text for text in _strings(scenario.goal) if _shape(text) in shapes}
    renamed: dict[str, str] = {}
    for name in sorted(keys | named):
        renamed[name] = _other_digits(name, taken={*keys, *named, *renamed.values()}, random=random)
    if not renamed:
        return scenario
    whole = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in sorted(renamed, key=len, reverse=True)))
    return scenario.model_copy(update=_map_strings(texts, lambda text: whole.sub(lambda m: renamed[m[0]], text)))


def _shape(text: str) -> str:
    return re.sub("[0-9]", "0", text)


def _other_digits(name: str, *, taken: set[str], random: np.random.Generator) -> str:
    """The name with other digits, none newly led by 0; the name itself if nothing free was drawn."""
    for _ in range(100):
        drawn = re.sub("[0-9]", lambda found: _digit(found, random), name)
        if drawn not in taken:
            return drawn
    return name


def _digit(found: re.Match[str], random: np.random.Generator) -> str:
    leads = found.start() == 0 or not found.string[found.start() - 1].isdigit()
    return str(random.integers(leads and found[0] != "0", 10))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with every string, keys of objects included, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_strings(inner, change) for key, inner in value.items()}
    return [_map_strings(inner, change) for inner in value] if isinstance(value, list) else value


def expected_of(demonstration: dict[str, Any]) -> Expected:
    """What a scenario expects, from a demonstration of the oracle in it."""
    return Expected(
        outcome=demonstration["outcome"],
        reply=demonstration["reply"],
        facts=tuple(demonstration["facts"]),
        calls=tuple(Call(**call) for call in demonstration["calls"]),
        final_state=demonstration["final_state"],
    )


def conversation(demonstration: dict[str, Any], instruction: str) -> list[Message]:
    """A demonstration as messages: the instruction, calls and responses, the reply."""
    return [Message(author=Author.USER, content=instruction), *demonstrated(demonstration)]


def demonstrated(demonstration: dict[str, Any]) -> list[Message]:
    """What a demonstration says after the instruction: calls and responses, the reply."""
    messages: list[Message] = []
    for made in demonstration["calls"]:
        call = ToolCall(name=made["name"], arguments=made["arguments"])
        messages += [
            Message(author=Author.ASSISTANT, calls=(call,)),
            Message(author=Author.TOOL, content=dump_line(made["response"]), name=call.name),
        ]
    return [*messages, Message(author=Author.ASSISTANT, content=demonstration["reply"])]


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a recorded conversation becomes rows."""

    rows: Literal["conversation", "round"] = "conversation"
    """`conversation`: one row, every step of it learned. `round`: one row a step of the assistant, after what the
    template shows of all before it, and only that step is learned (EnvScaler's way)."""
    thinking: Literal["keep", "strip"] = "keep"
    """Whether recorded reasoning is learned, or left out."""
    roles: frozenset[Role] = frozenset(Role)
    """Whose steps are learned."""
    layout: Layout = "shared"
    """Where responses are learned: in the conversation, or each in a rehearser's prompt of its own."""
    prompts: Prompts = field(default_factory=load_prompts)
    """Of layout `prompted`."""


def supervised_rows(
    form: Format, spec: EnvironmentSpec, scenario: Scenario, said: Sequence[Message], style: Style
) -> list[SupervisedRow]:
    """Rows of a recorded conversation.

    Args:
        form: Of the student.
        spec: Its tools are shown.
        scenario: Its opening comes first.
        said: All after the opening.
        style: What is learned, and in which rows.
    """
    before = opening(spec, scenario)
    if style.thinking == "strip":
        said = [replace(message, reasoning=None) for message in said]
    rows = []
    if style.rows == "round":
        rows += [
            _round(form, spec, [*before, *said[:i]], m) for i, m in enumerate(said) if m.author is Author.ASSISTANT
        ]
    else:
        rows.append(_conversation(form, form.open(spec.tools, before), said, style))
    if style.layout == "prompted" and Role.REHEARSE in style.roles:
        rows += _responses(form, spec, before, said, style.prompts)
    return [row for row in rows if row.learn.any()]


def rows_of_all(
    form: Format,
    specs: Mapping[str, EnvironmentSpec],
    lessons: Iterable[tuple[Scenario, Sequence[Message]]],
    style: Style,
) -> list[SupervisedRow]:
    """Rows of many: scenarios, each with a conversation in it."""
    return [
        row
        for scenario, said in lessons
        for row in supervised_rows(form, specs[scenario.environment], scenario, said, style)
    ]


def _round(form: Format, spec: EnvironmentSpec, before: Sequence[Message], said: Message) -> SupervisedRow:
    return _row([(form.open(spec.tools, before), False), (form.written(said), True)])


def _conversation(form: Format, prompt: list[int], said: Sequence[Message], style: Style) -> SupervisedRow:
    """One growing row, as a rollout would have made it: what nobody learns is encoded together."""
    in_place = style.layout == "shared" and Role.REHEARSE in style.roles
    parts, pending = [(prompt, False)], list[str]()

    def learn(ids: list[int], learned: bool) -> None:
        parts.append((form.encode(pending), False))
        pending.clear()
        parts.append((ids, learned))

    for number, message in enumerate(said):
        if message.author is Author.ASSISTANT:
            learn(form.written(message), Role.ACT in style.roles)
        elif message.author is Author.USER:
            pending += form.user_turn(message.content)
        else:
            pending.append(form.tool_header(first=number == 0 or said[number - 1].author is not Author.TOOL))
            if in_place:
                learn(form.encode(form.answer(message.content)), True)
            else:
                pending += form.answer(message.content)
            if number + 1 < len(said) and said[number + 1].author is Author.ASSISTANT:
                pending.append(form.act_header())
    return _row(parts)


def _responses(
    form: Format, spec: EnvironmentSpec, before: Sequence[Message], said: Sequence[Message], prompts: Prompts
) -> list[SupervisedRow]:
    """Layout `prompted`: each response after a prompt of its own."""
    rows = []
    for number, (message, call) in enumerate(zip(said, answered_calls(said), strict=True)):
        if call is not None:
            asked = rehearsal_prompt(spec, prompts, call, [*before, *said[:number]])
            rows.append(_row([(form.open((), asked), False), (form.written(rehearsal_answer(message.content)), True)]))
    return rows


def _row(parts: Sequence[tuple[list[int], bool]]) -> SupervisedRow:
    return SupervisedRow(
        ids=np.array([token for ids, _ in parts for token in ids], dtype=np.int64),
        learn=np.array([learn for ids, learn in parts for _ in ids], dtype=np.bool_),
    )
