"""A gym, as a user would write an environment: one class with tools, and (optionally) the oracle program `solve`.

It runs in envace's worker process, is read as text, and needs nothing of envace.
"""

import re


class Gym:
    """Members and classes of a gym."""

    RULES = (
        "Only an active member can be booked into a class.",
        "A full class takes nobody.",
        "A member on the basic plan cannot take a premium class.",
        "A paused member cannot be paused again.",
    )
    STATE = {
        "members": {
            "key": "member_id",
            "record": {
                "type": "object",
                "properties": {
                    "member_id": {"type": "string", "pattern": "^MB[0-9]{6}$"},
                    "plan": {"enum": ["basic", "premium"]},
                    "status": {"enum": ["active", "paused"]},
                },
                "required": ["member_id", "plan", "status"],
                "additionalProperties": False,
            },
        },
        "classes": {
            "key": "class_id",
            "record": {
                "type": "object",
                "properties": {
                    "class_id": {"type": "string", "pattern": "^CL[0-9]{6}$"},
                    "plan": {"enum": ["basic", "premium"]},
                    "seats": {"type": "integer", "minimum": 0, "maximum": 99},
                    "day": {"type": "integer", "minimum": 1, "maximum": 31},
                },
                "required": ["class_id", "plan", "seats", "day"],
                "additionalProperties": False,
            },
        },
    }
    LOOKUPS = {"get_member": "members", "get_class": "classes"}

    def __init__(self):
        self.members = {}
        self.classes = {}

    def get_member(self, member_id: str) -> dict:
        """Show a member."""
        return dict(_find(self.members, member_id, "MB"))

    def get_class(self, class_id: str) -> dict:
        """Show a class."""
        return dict(_find(self.classes, class_id, "CL"))

    def book_class(self, class_id: str, member_id: str) -> dict:
        """Book a member into a class."""
        member = _find(self.members, member_id, "MB")
        lesson = _find(self.classes, class_id, "CL")
        problem = member.get("error") or lesson.get("error") or _cannot_book(member, lesson)
        if problem:
            return {"error": problem}
        lesson["seats"] -= 1
        return {"status": "booked"}

    def pause_member(self, member_id: str) -> dict:
        """Pause a membership."""
        member = _find(self.members, member_id, "MB")
        problem = member.get("error") or ("already_paused" if member["status"] == "paused" else "")
        if problem:
            return {"error": problem}
        member["status"] = "paused"
        return {"status": "paused"}


def _find(table, key, prefix):
    if not re.fullmatch(prefix + "[0-9]{6}", key):
        return {"error": "invalid_id"}
    return table.get(key, {"error": "not_found"})


def _cannot_book(member, lesson):
    if member["status"] != "active":
        return "paused"
    if lesson["plan"] == "premium" and member["plan"] == "basic":
        return "wrong_plan"
    return "" if lesson["seats"] > 0 else "full"


def solve(call, goal, slip=lambda name: False):
    """The oracle: it sees only what its calls return, so it works in any gym, an imagined one included.

    `slip(name)` is always False for the oracle; for a careless demonstration it is sometimes True.
    """
    member = call("get_member", member_id=goal["member"])
    if "error" in member:
        return _declined(member["error"])
    if goal["kind"] == "pause":
        problem = "already_paused" if member["status"] == "paused" else ""
        return _act(call, slip, problem, {}, "pause_member", member_id=goal["member"])
    lesson = call("get_class", class_id=goal["class"])
    if "error" in lesson:
        return _declined(lesson["error"])
    ids = {"class_id": goal["class"], "member_id": goal["member"]}
    return _act(call, slip, _cannot_book(member, lesson), {"day": lesson["day"]}, "book_class", **ids)


def _act(call, slip, problem, facts, tool, **ids):
    if problem and not slip("ignore_rule"):
        return _declined(problem)
    result = call(tool, **ids)
    if "error" in result and not slip("claim_success"):
        return _declined(result["error"])
    reply = "Done" + "".join(f", {name} {value}" for name, value in facts.items()) + "."
    return {"outcome": "done", "reply": reply, "facts": [str(value) for value in facts.values()]}


def _declined(error):
    words = error.replace("_", " ")
    return {"outcome": "declined", "reply": f"Sorry, {words}.", "facts": [words]}
