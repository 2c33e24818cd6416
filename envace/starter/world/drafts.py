"""From a domain's kinds of request to a draft: instruction, goal and opening state of one task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from envace.starter.world import wording

T = TypeVar("T")

SHARE_DONE = 0.58
"""Share of requests that can be carried out; a policy that always declines, or never, fails often."""
SHARE_NOT_FOUND = 0.07
"""Share of requests about a thing that does not exist."""
SHARE_COMPOUND = 0.15
"""Share of tasks that ask for two things."""


@dataclass(frozen=True)
class Draft:
    """One task, before a package turns it into a scenario."""

    kind: str
    """The kind of request, for example "cancel" or, for two of them, "cancel+return"."""
    instruction: str
    """What the user says."""
    goal: dict[str, Any]
    """What the instruction says, for `solve`: kind, ids as the user wrote them, items, amounts."""
    state: dict[str, dict[str, dict[str, Any]]]
    """The opening state: table, key, record."""


class Scene:
    """An opening state being drawn; everything it hands out is used once, so parts of a task never meet."""

    def __init__(self, rng: random.Random, tables: Sequence[str]) -> None:
        self.rng = rng
        self.state: dict[str, dict[str, dict[str, Any]]] = {table: {} for table in tables}
        self._used: set[object] = set()

    def new_id(self, prefix: str) -> str:
        """Draw an id whose six digits no other id of the scene has."""
        return f"{prefix}{self.fresh(range(100_000, 1_000_000))}"

    def fresh(self, values: Sequence[T]) -> T:
        """Draw a value that was not drawn before."""
        while True:
            value = self.rng.choice(values)
            if value not in self._used:
                self._used.add(value)
                return value

    def pick(self, values: Sequence[T]) -> T:
        """Draw a value that may come again."""
        return self.rng.choice(values)

    def put(self, table: str, key: str, **fields: Any) -> dict[str, Any]:
        """Add a record, which holds its own key."""
        record = {key: fields[key], **fields}
        self.state[table][fields[key]] = record
        return record


@dataclass(frozen=True)
class Kind:
    """A kind of request: how to draw a state for it, and how users word it."""

    build: Callable[[Scene, str], dict[str, Any]]
    """Adds the records for a branch ("done", or one of `obstacles`) to the scene; returns the goal's values.

    It draws what the instruction will say the same way in every branch, so that nobody can guess the branch.
    """
    subject: tuple[str, str]
    """The goal's field with the first id, and the table it belongs to: what "not found" leaves out."""
    obstacles: tuple[str, ...]
    """Reasons of the state why the request must be declined."""
    train: tuple[str, ...]
    """Wordings of the request, with the goal's values as fields."""
    heldout: tuple[str, ...]
    """Other wordings, made of words that occur in train wordings."""


@dataclass(frozen=True)
class Domain:
    """All that is needed to draw tasks of a domain."""

    tables: tuple[str, ...]
    kinds: Mapping[str, Kind]
    pairs: tuple[tuple[str, str], ...]
    """Compounds seen in training."""
    heldout_pairs: tuple[tuple[str, str], ...]
    """Compounds of known kinds that only held-out tasks ask for."""
    bystander: Callable[[Scene], object]
    """Adds one record to each table that no request is about."""


def draw(domain: Domain, rng: random.Random, split: str) -> Draft:
    """Draw one task of a domain."""
    names = _draw_kinds(domain, rng, split)
    scene = Scene(rng, domain.tables)
    # Both parts of a compound must succeed for it to be done, so each has to succeed more often.
    share_done = SHARE_DONE ** (1 / len(names))
    goals: list[dict[str, Any]] = []
    branches: list[str] = []
    for name in names:
        branches.append(_draw_branch(domain.kinds[name], rng, share_done, branches))
        goals.append({"kind": name, **_build(domain.kinds[name], scene, branches[-1])})
    for _ in range(rng.randint(1, 3)):
        domain.bystander(scene)
    kind = "+".join(names)
    return Draft(
        kind=kind,
        instruction=_word([domain.kinds[name] for name in names], goals, rng, split),
        goal=goals[0] if len(goals) == 1 else {"kind": kind, "parts": goals},
        state=scene.state,
    )


def _draw_kinds(domain: Domain, rng: random.Random, split: str) -> tuple[str, ...]:
    """Draw one kind, or a pair; half of the held-out pairs never occur in training."""
    if rng.random() >= SHARE_COMPOUND:
        return (rng.choice(list(domain.kinds)),)
    unseen = split == "heldout" and rng.random() < 0.5
    return rng.choice(domain.heldout_pairs if unseen else domain.pairs)


def _build(kind: Kind, scene: Scene, branch: str) -> dict[str, Any]:
    """Draw the records of one request; return its goal with ids as the user writes them."""
    goal = kind.build(scene, "done" if branch == "not_found" else branch)
    if branch == "not_found":
        field, table = kind.subject
        del scene.state[table][goal[field]]
    return {field: _as_written(value, scene.rng) for field, value in goal.items()}


def _draw_branch(kind: Kind, rng: random.Random, share_done: float, taken: Sequence[str]) -> str:
    """Draw whether the request can be done, and else why not.

    Two parts of a task never fail for the same reason: one "shipped" in the reply would then speak for both.
    """
    if rng.random() < share_done:
        return "done"
    obstacles = [obstacle for obstacle in kind.obstacles if obstacle not in taken]
    missing = "not_found" not in taken and rng.random() < SHARE_NOT_FOUND / (1 - SHARE_DONE)
    return "not_found" if missing or not obstacles else rng.choice(obstacles)


def _as_written(value: Any, rng: random.Random) -> Any:
    """Write an id as users do, often without its mark; leave other values alone."""
    if not isinstance(value, str) or not re.fullmatch("#?[A-Z]+[0-9]{6}", value):
        return value
    careless = value[1:] if value.startswith("#") else value.lower()
    return rng.choices((value, careless, value[-6:]), weights=(4, 3, 3))[0]


def _word(kinds: Sequence[Kind], goals: Sequence[dict[str, Any]], rng: random.Random, split: str) -> str:
    """Word a task: one request with a closing phrase, or two joined."""
    requests = [
        rng.choice(kind.train if split == "train" else kind.heldout).format(**goal)
        for kind, goal in zip(kinds, goals, strict=True)
    ]
    return wording.sentence(requests, rng, split)
