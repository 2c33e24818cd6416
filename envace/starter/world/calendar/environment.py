"""The calendar domain: its tools and rules, and the oracle that uses them. Standard library only."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
Slip = Callable[[str], bool]
Solver = Callable[[Call, dict[str, Any], Slip], dict[str, Any]]


class Calendar:
    """Events, rooms and people of an office calendar."""

    RULES = (
        "An id is EV (event), RM (room) or PE (person) and six digits.",
        "Only a planned event can be cancelled, moved or joined, and its city be told.",
        "An event can be moved only to an open room with seats left.",
        "A person who is away joins no event, and nobody joins in a room without seats left.",
    )
    STATE = {
        "events": {
            "key": "event_id",
            "record": {
                "type": "object",
                "properties": {
                    "event_id": {"type": "string", "pattern": "^EV[0-9]{6}$"},
                    "room_id": {"type": "string", "pattern": "^RM[0-9]{6}$"},
                    "day": {"type": "integer", "minimum": 10, "maximum": 30},
                    "status": {"type": "string", "enum": ["planned", "held", "cancelled"]},
                },
                "required": ["event_id", "room_id", "day", "status"],
                "additionalProperties": False,
            },
        },
        "rooms": {
            "key": "room_id",
            "record": {
                "type": "object",
                "properties": {
                    "room_id": {"type": "string", "pattern": "^RM[0-9]{6}$"},
                    "city": {
                        "type": "string",
                        "enum": ["oslo", "rome", "paris", "london", "berlin", "madrid", "vienna", "dublin"],
                    },
                    "seats": {"type": "integer", "minimum": 0, "maximum": 9},
                    "status": {"type": "string", "enum": ["open", "closed"]},
                },
                "required": ["room_id", "city", "seats", "status"],
                "additionalProperties": False,
            },
        },
        "people": {
            "key": "person_id",
            "record": {
                "type": "object",
                "properties": {
                    "person_id": {"type": "string", "pattern": "^PE[0-9]{6}$"},
                    "event_id": {"type": "string", "pattern": "^EV[0-9]{6}$"},
                    "status": {"type": "string", "enum": ["active", "away"]},
                },
                "required": ["person_id", "event_id", "status"],
                "additionalProperties": False,
            },
        },
    }
    LOOKUPS = {"get_event": "events", "get_room": "rooms", "get_person": "people"}

    def __init__(self, init_config: dict[str, Any] | None = None) -> None:
        tables = copy.deepcopy(init_config or {})
        self.events: dict[str, dict[str, Any]] = tables.get("events", {})
        self.rooms: dict[str, dict[str, Any]] = tables.get("rooms", {})
        self.people: dict[str, dict[str, Any]] = tables.get("people", {})

    def get_event(self, event_id: str) -> dict[str, Any]:
        """Show an event."""
        return dict(self._event(event_id))

    def get_room(self, room_id: str) -> dict[str, Any]:
        """Show a room."""
        return dict(self._room(room_id))

    def get_person(self, person_id: str) -> dict[str, Any]:
        """Show a person and the person's next event."""
        return dict(self._person(person_id))

    def cancel_event(self, event_id: str) -> dict[str, Any]:
        """Cancel a planned event."""
        event = self._event(event_id)
        error = event.get("error") or _not_planned(event)
        if error:
            return {"error": error}
        event["status"] = "cancelled"
        return {"status": "cancelled"}

    def move_event(self, event_id: str, room_id: str) -> dict[str, Any]:
        """Move a planned event to another room."""
        event = self._event(event_id)
        error = event.get("error") or _not_planned(event)
        if error:
            return {"error": error}
        room = self._room(room_id)
        error = room.get("error") or _closed(room) or _no_seats(room)
        if error:
            return {"error": error}
        event["room_id"] = room_id
        return {"room_id": room_id}

    def join_event(self, person_id: str, event_id: str) -> dict[str, Any]:
        """Give a person a seat at a planned event."""
        person = self._person(person_id)
        error = person.get("error") or _away(person)
        if error:
            return {"error": error}
        event = self._event(event_id)
        error = event.get("error") or _not_planned(event)
        if error:
            return {"error": error}
        room = self._room(event["room_id"])
        error = room.get("error") or _no_seats(room)
        if error:
            return {"error": error}
        room["seats"] -= 1
        person["event_id"] = event_id
        return {"event_id": event_id}

    def _event(self, event_id: str) -> dict[str, Any]:
        return _malformed("EV", event_id) or self.events.get(event_id) or {"error": "not_found"}

    def _room(self, room_id: str) -> dict[str, Any]:
        return _malformed("RM", room_id) or self.rooms.get(room_id) or {"error": "not_found"}

    def _person(self, person_id: str) -> dict[str, Any]:
        return _malformed("PE", person_id) or self.people.get(person_id) or {"error": "not_found"}


def _not_planned(event: dict[str, Any]) -> str:
    """Name the error of an event that is over, or nothing."""
    return "" if event["status"] == "planned" else f"already_{event['status']}"


def _closed(room: dict[str, Any]) -> str:
    """Name the error of a room that takes no events, or nothing."""
    return "closed" if room["status"] == "closed" else ""


def _no_seats(room: dict[str, Any]) -> str:
    """Name the error of a full room, or nothing."""
    return "" if room["seats"] else "no_seats"


def _away(person: dict[str, Any]) -> str:
    """Name the error of a person who cannot come, or nothing."""
    return "away" if person["status"] == "away" else ""


def solve(call: Call, goal: dict[str, Any], slip: Slip = lambda name: False) -> dict[str, Any]:
    """Carry out a request as a careful clerk: look up, check the rules, then write or decline.

    It sees only what its calls return, so it is right in any world, also in an imagined one. `slip(name)` is
    asked where a careless demonstrator would go wrong.
    """
    solvers: dict[str, Solver] = {
        "cancel": _solve_cancel,
        "cancel_next": _solve_cancel_next,
        "move": _solve_move,
        "join": _solve_join,
        "where": _solve_where,
    }
    return _each_part(call, goal, slip, solvers)


def _solve_cancel(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the event the user named."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "cancel_event", "event_id", "EV", goal["event"]))
    return _cancel(call, slip, _ask(call, slip, "get_event", "event_id", "EV", goal["event"]))


def _cancel(call: Call, slip: Slip, event: dict[str, Any]) -> dict[str, Any]:
    """Cancel an event that was looked up, if it is still planned."""
    if "error" in event:
        return _declined(event["error"])
    success = _done(f"day {event['day']}", event["day"])
    return _write(call, slip, _not_planned(event), success, "cancel_event", event_id=event["event_id"])


def _solve_cancel_next(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the next event of a person."""
    person = _ask(call, slip, "get_person", "person_id", "PE", goal["person"])
    if "error" in person:
        return _declined(person["error"])
    event_id = person["event_id"]
    if slip("skip_lookup"):
        return _blind(slip, call("cancel_event", event_id=event_id))
    return _cancel(call, slip, call("get_event", event_id=event_id))


def _solve_move(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Move an event to the room the user named; the reply names the city."""
    room_id = _marked("RM", goal["room"])
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "move_event", "event_id", "EV", goal["event"], room_id=room_id))
    event = _ask(call, slip, "get_event", "event_id", "EV", goal["event"])
    if "error" in event:
        return _declined(event["error"])
    problem, success = _not_planned(event), _done()
    if not problem:
        room = _ask(call, slip, "get_room", "room_id", "RM", goal["room"])
        problem = room.get("error") or _closed(room) or _no_seats(room)
        success = success if "error" in room else _done(f"city {room['city']}", room["city"])
    return _write(call, slip, problem, success, "move_event", event_id=event["event_id"], room_id=room_id)


def _solve_join(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Give a person a seat at an event; the reply names the day."""
    event_id = _marked("EV", goal["event"])
    if slip("skip_lookup"):
        written = goal["person"]
        return _blind(slip, _ask(call, slip, "join_event", "person_id", "PE", written, event_id=event_id))
    person = _ask(call, slip, "get_person", "person_id", "PE", goal["person"])
    if "error" in person:
        return _declined(person["error"])
    problem, success = _away(person), _done()
    if not problem:
        event = _ask(call, slip, "get_event", "event_id", "EV", goal["event"])
        problem = event.get("error") or _not_planned(event)
        success = success if "error" in event else _done(f"day {event['day']}", event["day"])
    if not problem:
        room = call("get_room", room_id=event["room_id"])
        problem = room.get("error") or _no_seats(room)
    ids = {"person_id": person["person_id"], "event_id": event_id}
    return _write(call, slip, problem, success, "join_event", **ids)


def _solve_where(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Tell the city in which a planned event takes place."""
    event = _ask(call, slip, "get_event", "event_id", "EV", goal["event"])
    if "error" in event:
        return _declined(event["error"])
    if _not_planned(event) and not slip("ignore_rule"):
        return _declined(_not_planned(event))
    room = call("get_room", room_id=event["room_id"])
    return _declined(room["error"]) if "error" in room else _done(f"city {room['city']}", room["city"])


# From here to the end mark every domain has the same lines: a file is shipped as text and must stand alone.
def _malformed(prefix: str, value: object) -> dict[str, Any]:
    """Return an error unless `value` is the prefix and six digits; asked before any table is opened."""
    if isinstance(value, str) and re.fullmatch(re.escape(prefix) + "[0-9]{6}", value):
        return {}
    return {"error": "invalid_id"}


def _marked(prefix: str, written: str) -> str:
    """Turn an id as a user wrote it ("482913", "w482913") into the id that the tools know."""
    return prefix + "".join(letter for letter in written if letter.isdigit())


def _unmarked(prefix: str, written: str) -> str:
    """Write an id as a careless demonstrator does: copied from the user, or without its mark."""
    right = _marked(prefix, written)
    if written != right:
        return written
    return right[1:] if right.startswith("#") else right.removeprefix(prefix)


def _ask(call: Call, slip: Slip, tool: str, field: str, prefix: str, written: str, **others: Any) -> Any:
    """Make the first call about an id the user wrote: the place where a mark gets lost."""
    if slip("drop_mark"):
        call(tool, **{field: _unmarked(prefix, written)}, **others)
        if slip("give_up"):
            return {"error": "gave_up"}
    return call(tool, **{field: _marked(prefix, written)}, **others)


def _done(text: str = "", *facts: object) -> dict[str, Any]:
    """Report success; the facts are what a right reply must contain."""
    reply = f"Done, {text}." if text else "Done."
    return {"outcome": "done", "reply": reply, "facts": [str(fact) for fact in facts]}


def _declined(error: str) -> dict[str, Any]:
    """Report a refusal in the words of its error class: already_shipped becomes "already shipped"."""
    if error == "gave_up":
        return {"outcome": "declined", "reply": "Sorry, I could not find it.", "facts": []}
    words = error.replace("_", " ")
    return {"outcome": "declined", "reply": f"Sorry, {words}.", "facts": [words.removeprefix("already ")]}


def _write(call: Call, slip: Slip, problem: str, success: dict[str, Any], tool: str, **ids: Any) -> dict[str, Any]:
    """Make a write whose look-ups are done; `problem` is the error they foretell, or empty."""
    if problem == "gave_up" or (problem and not slip("ignore_rule")):
        return _declined(problem)
    error = call(tool, **ids).get("error", "")
    if error and not (problem and slip("claim_success")):
        return _declined(problem or error)
    return success


def _blind(slip: Slip, result: dict[str, Any]) -> dict[str, Any]:
    """Report on a write made without its look-up: it can say no more than "Done."."""
    error = result.get("error", "")
    if error and (error == "gave_up" or not slip("claim_success")):
        return _declined(error)
    return _done()


def _joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the answers to the parts of a request into one; it is declined if any part is."""
    declined = any(answer["outcome"] == "declined" for answer in answers)
    return {
        "outcome": "declined" if declined else "done",
        "reply": " ".join(answer["reply"] for answer in answers),
        "facts": [fact for answer in answers for fact in answer["facts"]],
    }


def _each_part(call: Call, goal: dict[str, Any], slip: Slip, solvers: dict[str, Solver]) -> dict[str, Any]:
    """Solve the parts of a goal in their order; a careless demonstrator stops after the first."""
    answers: list[dict[str, Any]] = []
    for part in goal.get("parts", [goal]):
        if answers and slip("give_up"):
            break
        answers.append(solvers[part["kind"]](call, part, slip))
    return _joined(answers)


# End of the shared lines.
