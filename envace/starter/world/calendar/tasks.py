"""Tasks of the calendar domain, which no training ever sees; so both splits share their wordings."""

from __future__ import annotations

import random
from typing import Any

from envace.starter.world import drafts
from envace.starter.world.drafts import Domain, Draft, Kind, Scene

CITIES = ("oslo", "rome", "paris", "london", "berlin", "madrid", "vienna", "dublin")


def draw(rng: random.Random, split: str) -> Draft:
    """Draw one task."""
    return drafts.draw(DOMAIN, rng, split)


def _meeting(scene: Scene, *, status: str = "", person: str = "", seats: int | None = None) -> dict[str, Any]:
    """Add a person, the person's next event and its room; return the event and the person's id."""
    event = scene.put(
        "events",
        "event_id",
        event_id=scene.new_id("EV"),
        room_id=_room(scene, seats=seats)["room_id"],
        day=scene.rng.randint(10, 30),
        status=status or scene.pick(("planned", "held", "cancelled")),
    )
    guest = scene.put(
        "people",
        "person_id",
        person_id=scene.new_id("PE"),
        event_id=event["event_id"],
        status=person or scene.pick(("active", "away")),
    )
    return {**event, "person_id": guest["person_id"]}


def _room(scene: Scene, *, status: str = "", seats: int | None = None) -> dict[str, Any]:
    """Add a room."""
    return scene.put(
        "rooms",
        "room_id",
        room_id=scene.new_id("RM"),
        city=scene.pick(CITIES),
        seats=scene.rng.randint(0, 9) if seats is None else seats,
        status=status or scene.pick(("open", "open", "closed")),
    )


def _over(scene: Scene, branch: str) -> str:
    """Draw an event's status: planned, or in the branch "status" one of the others."""
    return scene.pick(("held", "cancelled")) if branch == "status" else "planned"


def _seats(scene: Scene, branch: str) -> int:
    return 0 if branch == "seats" else scene.rng.randint(1, 9)


def _to_cancel(scene: Scene, branch: str) -> dict[str, Any]:
    return {"event": _meeting(scene, status=_over(scene, branch))["event_id"]}


def _to_cancel_next(scene: Scene, branch: str) -> dict[str, Any]:
    return {"person": _meeting(scene, status=_over(scene, branch))["person_id"]}


def _to_move(scene: Scene, branch: str) -> dict[str, Any]:
    event = _meeting(scene, status=_over(scene, branch))
    status = "closed" if branch == "closed" else "open"
    room = _room(scene, status=status, seats=_seats(scene, branch))
    return {"event": event["event_id"], "room": room["room_id"]}


def _to_join(scene: Scene, branch: str) -> dict[str, Any]:
    guest = _meeting(scene, person="away" if branch == "away" else "active")
    event = _meeting(scene, status=_over(scene, branch), seats=_seats(scene, branch))
    return {"person": guest["person_id"], "event": event["event_id"]}


def _to_tell_city(scene: Scene, branch: str) -> dict[str, Any]:
    return {"event": _meeting(scene, status=_over(scene, branch))["event_id"]}


_CANCEL = ("cancel event {event}", "call off event {event}", "make sure that event {event} is cancelled")
_CANCEL_NEXT = (
    "cancel the next event of person {person}",
    "call off the next event of person {person}",
    "drop what person {person} has next",
)
_MOVE = (
    "move event {event} to room {room}",
    "put event {event} in room {room}",
    "switch event {event} over to room {room}",
)
_JOIN = (
    "let person {person} join event {event}",
    "put person {person} on event {event}",
    "find a seat for person {person} at event {event}",
)
_WHERE = (
    "tell me the city of event {event}",
    "find out where event {event} is",
    "say in which city event {event} is",
)

KINDS = {
    "cancel": Kind(_to_cancel, ("event", "events"), ("status",), _CANCEL, _CANCEL),
    "cancel_next": Kind(_to_cancel_next, ("person", "people"), ("status",), _CANCEL_NEXT, _CANCEL_NEXT),
    "move": Kind(_to_move, ("event", "events"), ("status", "closed", "seats"), _MOVE, _MOVE),
    "join": Kind(_to_join, ("person", "people"), ("away", "status", "seats"), _JOIN, _JOIN),
    "where": Kind(_to_tell_city, ("event", "events"), ("status",), _WHERE, _WHERE),
}

DOMAIN = Domain(
    tables=("events", "rooms", "people"),
    kinds=KINDS,
    pairs=(("cancel", "where"), ("move", "cancel_next"), ("where", "move")),
    heldout_pairs=(("cancel", "join"), ("where", "cancel_next")),
    bystander=_meeting,
)
