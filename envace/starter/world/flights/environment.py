"""The flights domain: its tools and rules, and the oracle that uses them. Standard library only."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
Slip = Callable[[str], bool]
Solver = Callable[[Call, dict[str, Any], Slip], dict[str, Any]]


class Flights:
    """Bookings, flights and members of an airline."""

    RULES = (
        "An id is BK (booking), FL (flight) or MB (member) and six digits.",
        "Only an open booking can be changed, cancelled or upgraded, and its day be told.",
        "A basic fare cannot be changed.",
        "Only a flex fare can be cancelled.",
        "A booking can be changed only to a flight with seats left.",
        "A basic or saver booking can be upgraded to flex for 300 miles of its member.",
    )
    STATE = {
        "bookings": {
            "key": "booking_id",
            "record": {
                "type": "object",
                "properties": {
                    "booking_id": {"type": "string", "pattern": "^BK[0-9]{6}$"},
                    "flight_id": {"type": "string", "pattern": "^FL[0-9]{6}$"},
                    "fare": {"type": "string", "enum": ["basic", "saver", "flex"]},
                    "price": {"type": "integer", "minimum": 0, "maximum": 999},
                    "status": {"type": "string", "enum": ["open", "flown", "cancelled"]},
                },
                "required": ["booking_id", "flight_id", "fare", "price", "status"],
                "additionalProperties": False,
            },
        },
        "flights": {
            "key": "flight_id",
            "record": {
                "type": "object",
                "properties": {
                    "flight_id": {"type": "string", "pattern": "^FL[0-9]{6}$"},
                    "origin": {
                        "type": "string",
                        "enum": ["oslo", "rome", "paris", "london", "berlin", "madrid", "vienna", "dublin"],
                    },
                    "destination": {
                        "type": "string",
                        "enum": ["oslo", "rome", "paris", "london", "berlin", "madrid", "vienna", "dublin"],
                    },
                    "day": {"type": "integer", "minimum": 10, "maximum": 30},
                    "seats": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["flight_id", "origin", "destination", "day", "seats"],
                "additionalProperties": False,
            },
        },
        "members": {
            "key": "member_id",
            "record": {
                "type": "object",
                "properties": {
                    "member_id": {"type": "string", "pattern": "^MB[0-9]{6}$"},
                    "booking_id": {"type": "string", "pattern": "^BK[0-9]{6}$"},
                    "miles": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["member_id", "booking_id", "miles"],
                "additionalProperties": False,
            },
        },
    }
    LOOKUPS = {
        "get_booking": "bookings",
        "get_flight": "flights",
        "get_member": "members",
        "find_flights": "flights",
    }

    def __init__(self, init_config: dict[str, Any] | None = None) -> None:
        tables = copy.deepcopy(init_config or {})
        self.bookings: dict[str, dict[str, Any]] = tables.get("bookings", {})
        self.flights: dict[str, dict[str, Any]] = tables.get("flights", {})
        self.members: dict[str, dict[str, Any]] = tables.get("members", {})

    def get_booking(self, booking_id: str) -> dict[str, Any]:
        """Show a booking."""
        return dict(self._booking(booking_id))

    def get_flight(self, flight_id: str) -> dict[str, Any]:
        """Show a flight."""
        return dict(self._flight(flight_id))

    def get_member(self, member_id: str) -> dict[str, Any]:
        """Show a member and the member's booking."""
        return dict(self._member(member_id))

    def find_flights(self, origin: str, destination: str) -> list[dict[str, Any]]:
        """List up to two flights on a route."""
        route = (origin, destination)
        # In the order in which they came: a world imagined from a list then shows that list again.
        flights = self.flights.values()
        return [dict(flight) for flight in flights if (flight["origin"], flight["destination"]) == route][:2]

    def change_flight(self, booking_id: str, flight_id: str) -> dict[str, Any]:
        """Move an open booking to another flight."""
        booking = self._booking(booking_id)
        error = booking.get("error") or _not_changeable(booking)
        if error:
            return {"error": error}
        flight = self._flight(flight_id)
        error = flight.get("error") or _no_seats(flight)
        if error:
            return {"error": error}
        flight["seats"] -= 1
        booking["flight_id"] = flight_id
        return {"flight_id": flight_id}

    def cancel_booking(self, booking_id: str) -> dict[str, Any]:
        """Cancel an open flex booking."""
        booking = self._booking(booking_id)
        error = booking.get("error") or _not_refundable(booking)
        if error:
            return {"error": error}
        booking["status"] = "cancelled"
        return {"status": "cancelled"}

    def use_miles(self, member_id: str) -> dict[str, Any]:
        """Upgrade a member's booking to flex for 300 miles."""
        member = self._member(member_id)
        error = member.get("error") or _too_few_miles(member)
        if error:
            return {"error": error}
        booking = self._booking(member["booking_id"])
        error = booking.get("error") or _not_upgradable(booking)
        if error:
            return {"error": error}
        member["miles"] -= 300
        booking["fare"] = "flex"
        return {"fare": "flex"}

    def _booking(self, booking_id: str) -> dict[str, Any]:
        return _malformed("BK", booking_id) or self.bookings.get(booking_id) or {"error": "not_found"}

    def _flight(self, flight_id: str) -> dict[str, Any]:
        return _malformed("FL", flight_id) or self.flights.get(flight_id) or {"error": "not_found"}

    def _member(self, member_id: str) -> dict[str, Any]:
        return _malformed("MB", member_id) or self.members.get(member_id) or {"error": "not_found"}


def _not_open(booking: dict[str, Any]) -> str:
    """Name the error of a booking that is over, or nothing."""
    return "" if booking["status"] == "open" else f"already_{booking['status']}"


def _not_changeable(booking: dict[str, Any]) -> str:
    """Name the error of a booking that must keep its flight, or nothing."""
    return _not_open(booking) or ("not_changeable" if booking["fare"] == "basic" else "")


def _not_refundable(booking: dict[str, Any]) -> str:
    """Name the error of a booking that cannot be cancelled, or nothing."""
    return _not_open(booking) or ("" if booking["fare"] == "flex" else "not_refundable")


def _not_upgradable(booking: dict[str, Any]) -> str:
    """Name the error of a booking that cannot become flex, or nothing."""
    return _not_open(booking) or ("already_flex" if booking["fare"] == "flex" else "")


def _no_seats(flight: dict[str, Any]) -> str:
    """Name the error of a full flight, or nothing."""
    return "" if flight["seats"] else "no_seats"


def _too_few_miles(member: dict[str, Any]) -> str:
    """Name the error of a member who cannot pay an upgrade, or nothing."""
    return "" if member["miles"] >= 300 else "too_few_miles"


def solve(call: Call, goal: dict[str, Any], slip: Slip = lambda name: False) -> dict[str, Any]:
    """Carry out a request as a careful clerk: look up, check the rules, then write or decline.

    It sees only what its calls return, so it is right in any world, also in an imagined one. `slip(name)` is
    asked where a careless demonstrator would go wrong.
    """
    solvers: dict[str, Solver] = {
        "change": _solve_change,
        "reroute": _solve_reroute,
        "cancel": _solve_cancel,
        "cancel_trip": _solve_cancel_trip,
        "upgrade": _solve_upgrade,
        "day": _solve_day,
    }
    return _each_part(call, goal, slip, solvers)


def _solve_change(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Move a booking to the flight the user named, if it has seats."""
    flight_id = _marked("FL", goal["flight"])
    if slip("skip_lookup"):
        other = {"flight_id": flight_id}
        return _blind(slip, _ask(call, slip, "change_flight", "booking_id", "BK", goal["booking"], **other))
    booking = _ask(call, slip, "get_booking", "booking_id", "BK", goal["booking"])
    if "error" in booking:
        return _declined(booking["error"])
    problem, success = _not_changeable(booking), _done()
    if not problem:
        flight = _ask(call, slip, "get_flight", "flight_id", "FL", goal["flight"])
        problem = flight.get("error") or _no_seats(flight)
        success = success if "error" in flight else _done(f"day {flight['day']}", flight["day"])
    ids = {"booking_id": booking["booking_id"], "flight_id": flight_id}
    return _write(call, slip, problem, success, "change_flight", **ids)


def _solve_reroute(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Move a booking to the first flight with seats on the route the user named."""
    booking = _ask(call, slip, "get_booking", "booking_id", "BK", goal["booking"])
    if "error" in booking:
        return _declined(booking["error"])
    problem = _not_changeable(booking)
    if problem and not slip("ignore_rule"):
        return _declined(problem)
    flights = call("find_flights", origin=goal["origin"], destination=goal["destination"])
    free = [flight for flight in flights if not _no_seats(flight)]
    if not free:  # With nothing to move to there is no write to try, so no place to slip either.
        return _declined(problem or "no_seats")
    success = _done(f"day {free[0]['day']}", free[0]["day"])
    ids = {"booking_id": booking["booking_id"], "flight_id": free[0]["flight_id"]}
    # A rule that was ignored above stays ignored: slipping is asked only once a place.
    return _write(call, _sure(slip), problem, success, "change_flight", **ids)


def _sure(slip: Slip) -> Slip:
    """Keep to a rule that is already being ignored; other slips stay open."""
    return lambda name: name == "ignore_rule" or slip(name)


def _solve_cancel(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the booking the user named."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "cancel_booking", "booking_id", "BK", goal["booking"]))
    booking = _ask(call, slip, "get_booking", "booking_id", "BK", goal["booking"])
    return _cancel(call, slip, booking)


def _cancel(call: Call, slip: Slip, booking: dict[str, Any]) -> dict[str, Any]:
    """Cancel a booking that was looked up, if its fare allows it."""
    if "error" in booking:
        return _declined(booking["error"])
    success = _done(f"refund {booking['price']}", booking["price"])
    problem = _not_refundable(booking)
    return _write(call, slip, problem, success, "cancel_booking", booking_id=booking["booking_id"])


def _solve_cancel_trip(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the booking of a member."""
    member = _ask(call, slip, "get_member", "member_id", "MB", goal["member"])
    if "error" in member:
        return _declined(member["error"])
    booking_id = member["booking_id"]
    if slip("skip_lookup"):
        return _blind(slip, call("cancel_booking", booking_id=booking_id))
    return _cancel(call, slip, call("get_booking", booking_id=booking_id))


def _solve_upgrade(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Upgrade the booking of a member, if the miles suffice."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "use_miles", "member_id", "MB", goal["member"]))
    member = _ask(call, slip, "get_member", "member_id", "MB", goal["member"])
    if "error" in member:
        return _declined(member["error"])
    problem = _too_few_miles(member)
    if not problem:
        booking = call("get_booking", booking_id=member["booking_id"])
        problem = booking.get("error") or _not_upgradable(booking)
    success = _done(f"booking {member['booking_id']}", member["booking_id"])
    return _write(call, slip, problem, success, "use_miles", member_id=member["member_id"])


def _solve_day(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Tell the day on which an open booking flies."""
    booking = _ask(call, slip, "get_booking", "booking_id", "BK", goal["booking"])
    if "error" in booking:
        return _declined(booking["error"])
    if _not_open(booking) and not slip("ignore_rule"):
        return _declined(_not_open(booking))
    flight = call("get_flight", flight_id=booking["flight_id"])
    return _declined(flight["error"]) if "error" in flight else _done(f"day {flight['day']}", flight["day"])


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
