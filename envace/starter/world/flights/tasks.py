"""Tasks of the flights domain."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

from envace.starter.world import drafts
from envace.starter.world.drafts import Domain, Draft, Kind, Scene

CITIES = ("oslo", "rome", "paris", "london", "berlin", "madrid", "vienna", "dublin")
ROUTES = tuple(permutations(CITIES, 2))
FARES = ("basic", "saver", "flex")
MILES = tuple(range(50, 1000, 50))
"""In steps of 50, so that a small model can learn which of them pay an upgrade."""


def draw(rng: random.Random, split: str) -> Draft:
    """Draw one task."""
    return drafts.draw(DOMAIN, rng, split)


def _trip(
    scene: Scene, status: str = "", fares: tuple[str, ...] = FARES, miles: tuple[int, ...] = MILES
) -> dict[str, Any]:
    """Add a member, the member's booking and its flight; return the booking and the member's id."""
    booking = scene.put(
        "bookings",
        "booking_id",
        booking_id=scene.new_id("BK"),
        flight_id=_flight(scene, scene.fresh(ROUTES))["flight_id"],
        fare=scene.pick(fares),
        price=scene.rng.randint(10, 999),
        status=status or scene.pick(("open", "flown", "cancelled")),
    )
    member = scene.put(
        "members",
        "member_id",
        member_id=scene.new_id("MB"),
        booking_id=booking["booking_id"],
        miles=scene.pick(miles),
    )
    return {**booking, "member_id": member["member_id"]}


def _flight(scene: Scene, route: tuple[str, str], seats: int | None = None, flight_id: str = "") -> dict[str, Any]:
    """Add a flight on a route, sometimes full unless told otherwise."""
    return scene.put(
        "flights",
        "flight_id",
        flight_id=flight_id or scene.new_id("FL"),
        origin=route[0],
        destination=route[1],
        day=scene.rng.randint(10, 30),
        seats=scene.rng.randint(0, 9) if seats is None else seats,
    )


def _closed(scene: Scene, branch: str) -> str:
    """Draw a booking's status: open, or in the branch "status" one of the others."""
    return scene.pick(("flown", "cancelled")) if branch == "status" else "open"


def _to_move(scene: Scene, branch: str) -> dict[str, Any]:
    """Add a trip that can be moved, unless the branch forbids it."""
    fares = ("basic",) if branch == "fare" else ("saver", "flex")
    return _trip(scene, _closed(scene, branch), fares if branch != "status" else FARES)


def _to_change(scene: Scene, branch: str) -> dict[str, Any]:
    booking = _to_move(scene, branch)
    seats = {"done": scene.rng.randint(1, 9), "seats": 0}.get(branch)
    flight = _flight(scene, scene.fresh(ROUTES), seats)
    return {"booking": booking["booking_id"], "flight": flight["flight_id"]}


def _to_reroute(scene: Scene, branch: str) -> dict[str, Any]:
    booking, route = _to_move(scene, branch), scene.fresh(ROUTES)
    # In order of their ids, so that a state whose keys were sorted on its way lists them the same.
    flight_ids = sorted(scene.new_id("FL") for _ in range(scene.rng.randint(1, 2)))
    # In the branch "done" some may be full, but never all.
    free = "" if branch == "seats" else scene.pick(flight_ids)
    for flight_id in flight_ids:
        full = flight_id != free and (not free or scene.pick((True, False)))
        _flight(scene, route, 0 if full else scene.rng.randint(1, 9), flight_id)
    return {"booking": booking["booking_id"], "origin": route[0], "destination": route[1]}


def _flexible(scene: Scene, branch: str) -> dict[str, Any]:
    """Add a trip that can be cancelled, unless the branch forbids it."""
    fares = {"done": ("flex",), "fare": ("basic", "saver")}.get(branch, FARES)
    return _trip(scene, _closed(scene, branch), fares)


def _to_cancel(scene: Scene, branch: str) -> dict[str, Any]:
    return {"booking": _flexible(scene, branch)["booking_id"]}


def _to_cancel_trip(scene: Scene, branch: str) -> dict[str, Any]:
    return {"member": _flexible(scene, branch)["member_id"]}


def _to_upgrade(scene: Scene, branch: str) -> dict[str, Any]:
    fares = ("flex",) if branch == "fare" else ("basic", "saver")
    miles = tuple(value for value in MILES if (value < 300) == (branch == "miles"))
    return {"member": _trip(scene, _closed(scene, branch), fares, miles)["member_id"]}


def _to_tell_day(scene: Scene, branch: str) -> dict[str, Any]:
    return {"booking": _trip(scene, _closed(scene, branch))["booking_id"]}


KINDS = {
    "change": Kind(
        build=_to_change,
        subject=("booking", "bookings"),
        obstacles=("fare", "status", "seats"),
        train=(
            "move booking {booking} to flight {flight}",
            "change booking {booking} to flight {flight}",
            "put booking {booking} on flight {flight}",
            "switch booking {booking} over to flight {flight}",
            "let booking {booking} take flight {flight} instead",
            "rebook booking {booking} on flight {flight}",
        ),
        heldout=(
            "switch booking {booking} to flight {flight} instead",
            "make booking {booking} take flight {flight}",
            "take booking {booking} over to flight {flight}",
        ),
    ),
    "reroute": Kind(
        build=_to_reroute,
        subject=("booking", "bookings"),
        obstacles=("fare", "status", "seats"),
        train=(
            "move booking {booking} to a flight from {origin} to {destination}",
            "change booking {booking} to any flight from {origin} to {destination}",
            "put booking {booking} on a flight from {origin} to {destination}",
            "find a flight from {origin} to {destination} for booking {booking}",
            "rebook booking {booking} from {origin} to {destination}",
            "let booking {booking} fly from {origin} to {destination} instead",
        ),
        heldout=(
            "switch booking {booking} to any flight from {origin} to {destination}",
            "let booking {booking} take any flight from {origin} to {destination}",
        ),
    ),
    "cancel": Kind(
        build=_to_cancel,
        subject=("booking", "bookings"),
        obstacles=("fare", "fare", "status"),
        train=(
            "cancel booking {booking}",
            "call off booking {booking}",
            "cancel booking {booking} and refund it",
            "drop booking {booking}, I cannot fly",
            "refund booking {booking}, my plans changed",
            "make sure that booking {booking} is cancelled",
        ),
        heldout=(
            "call off booking {booking}, my plans changed",
            "drop my booking {booking} and refund it",
            "cancel my booking {booking}, I cannot fly",
        ),
    ),
    "cancel_trip": Kind(
        build=_to_cancel_trip,
        subject=("member", "members"),
        obstacles=("fare", "fare", "status"),
        train=(
            "cancel the trip of member {member}",
            "call off the trip of member {member}",
            "drop the booking of member {member}",
            "refund the trip that member {member} booked",
            "cancel what member {member} booked",
            "make sure that the trip of member {member} is cancelled",
        ),
        heldout=(
            "call off what member {member} booked",
            "drop the trip that member {member} booked",
            "cancel the booking of member {member} and refund it",
        ),
    ),
    "upgrade": Kind(
        build=_to_upgrade,
        subject=("member", "members"),
        obstacles=("miles", "fare", "status"),
        train=(
            "upgrade member {member} with miles",
            "use the miles of member {member} to upgrade",
            "upgrade the booking of member {member} with miles",
            "spend miles of member {member} on an upgrade",
            "let member {member} pay an upgrade with miles",
            "make the trip of member {member} flex with miles",
        ),
        heldout=(
            "use miles to upgrade the trip of member {member}",
            "let member {member} spend miles on an upgrade",
        ),
    ),
    "day": Kind(
        build=_to_tell_day,
        subject=("booking", "bookings"),
        obstacles=("status",),
        train=(
            "tell me the day of booking {booking}",
            "tell me what day booking {booking} flies",
            "find out the flight day for booking {booking}",
            "say on which day booking {booking} leaves",
            "check what day the flight of booking {booking} is",
            "give me the flight day of booking {booking}",
        ),
        heldout=(
            "find out on which day booking {booking} flies",
            "say what day the flight of booking {booking} leaves",
            "check the flight day for booking {booking}",
        ),
    ),
}

DOMAIN = Domain(
    tables=("bookings", "flights", "members"),
    kinds=KINDS,
    pairs=(
        ("change", "cancel"),
        ("cancel", "day"),
        ("upgrade", "change"),
        ("day", "reroute"),
        ("cancel_trip", "upgrade"),
    ),
    heldout_pairs=(("cancel", "upgrade"), ("change", "day"), ("cancel_trip", "reroute")),
    bystander=_trip,
)
