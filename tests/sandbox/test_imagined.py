"""The imagined world: what a rehearsal has shown, and what the rules make of it. No opening state is ever given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envace.errors import SandboxError
from envace.sandbox import Worker
from envace.sandbox.child import Definition
from envace.sandbox.imagined import ImaginedWorld, same
from envace.scenarios import EnvironmentSpec, read_environment

ORDER = {"order_id": "#W111111", "customer_id": "CU222222", "item": "lamp", "status": "pending", "total": 120}
SHIPPED = {**ORDER, "status": "shipped"}
GOAL = {"kind": "cancel", "order": "#W111111"}

SHOP = '''
class Shop:
    """A shop whose tools list records."""

    STATE = {
        "items": {
            "key": "id",
            "record": {
                "type": "object",
                "properties": {"id": {"type": "string"}, "colour": {"type": "string"}, "left": {"type": "integer"}},
                "required": ["id", "colour", "left"],
            },
        },
        "notes": {"key": "id", "record": {"type": "object"}},
    }
    LOOKUPS = {"find": "items", "show": "items", "read": "notes"}

    def __init__(self):
        self.items, self.notes = {}, {}

    def find(self, colour: str):
        """List items of a colour."""
        return [dict(item) for item in self.items.values() if item["colour"] == colour]

    def show(self, id: str):
        """Show an item."""
        return dict(self.items[id]) if id in self.items else {"error": "not_found"}

    def buy(self, id: str):
        """Buy an item."""
        if not self.items.get(id):
            return {"error": "not_found"}
        if not self.items[id]["left"]:
            return {"error": "sold_out"}
        self.items[id]["left"] -= 1
        return {"left": self.items[id]["left"]}

    def read(self, id: str):
        """Read a note."""
        return self.notes.get(id) or {"error": "not_found"}


def solve(call, goal, slip=lambda name: False):
    left = [item["id"] for item in call("find", colour=goal["colour"]) if item["left"]]
    if not left:
        return {"outcome": "declined", "reply": "Sorry, sold out.", "facts": []}
    call("buy", id=sorted(left)[0])
    return {"outcome": "done", "reply": "Done.", "facts": []}
'''

RED = {"id": "a", "colour": "red", "left": 1}
RED_TOO = {"id": "b", "colour": "red", "left": 0}


@pytest.fixture
def world(retail: EnvironmentSpec) -> ImaginedWorld:
    return Definition(retail.definition()).imagine()


@pytest.fixture
def shop(tmp_path: Path) -> ImaginedWorld:
    path = tmp_path / "environment.py"
    path.write_text(SHOP)
    return Definition(read_environment(path, name="shop").definition()).imagine()


def verdict(world: ImaginedWorld, name: str, response: Any, **arguments: Any) -> tuple[str, bool]:
    found = world.observe(name, arguments, response)
    return found["consistency"], found["new"]


def test_a_consistent_story(world: ImaginedWorld) -> None:
    lookup = {"order_id": "#W111111"}
    assert verdict(world, "get_order", ORDER, **lookup) == ("consistent", True)
    assert verdict(world, "get_order", ORDER, **lookup) == ("consistent", False)  # nothing new in it
    assert verdict(world, "cancel_order", {"status": "cancelled"}, **lookup) == ("consistent", False)
    assert verdict(world, "get_order", {**ORDER, "status": "cancelled"}, **lookup) == ("consistent", False)
    assert verdict(world, "cancel_order", {"error": "already_cancelled"}, **lookup) == ("consistent", False)
    assert world.final_state()["orders"] == {"#W111111": {**ORDER, "status": "cancelled"}}


@pytest.mark.parametrize(
    "response",
    [
        {**ORDER, "status": "lost"},
        {**ORDER, "total": "120"},
        {**ORDER, "gift": True},
        {key: value for key, value in ORDER.items() if key != "item"},
        {**ORDER, "order_id": "#W999999"},  # a well-formed record, but of another order
        [ORDER],
        {},
        "pending",
        None,
        7,
    ],
)
def test_a_record_of_a_wrong_shape_is_inconsistent_and_forgotten(world: ImaginedWorld, response: Any) -> None:
    assert verdict(world, "get_order", response, order_id="#W111111")[0] == "inconsistent"
    assert world.final_state() == {"orders": {}, "customers": {}, "stock": {}}
    assert verdict(world, "get_order", ORDER, order_id="#W111111") == ("consistent", True)


def test_a_lookup_that_contradicts_an_earlier_one_is_inconsistent(world: ImaginedWorld) -> None:
    verdict(world, "get_order", ORDER, order_id="#W111111")
    assert verdict(world, "get_order", SHIPPED, order_id="#W111111") == ("inconsistent", False)
    assert verdict(world, "get_order", {"error": "not_found"}, order_id="#W111111") == ("inconsistent", False)
    assert world.final_state()["orders"] == {"#W111111": ORDER}


def test_a_write_that_was_not_carried_out_shows_in_the_next_lookup(world: ImaginedWorld) -> None:
    verdict(world, "get_order", ORDER, order_id="#W111111")
    verdict(world, "cancel_order", {"status": "cancelled"}, order_id="#W111111")
    assert verdict(world, "get_order", ORDER, order_id="#W111111")[0] == "inconsistent"


@pytest.mark.parametrize("response", [{"status": "cancelled"}, {"error": "already_shipped"}, {"error": "not_found"}])
def test_a_write_before_its_lookup_is_undetermined(world: ImaginedWorld, response: Any) -> None:
    assert verdict(world, "cancel_order", response, order_id="#W111111") == ("undetermined", False)


def test_a_malformed_id_needs_no_lookup(world: ImaginedWorld) -> None:
    assert verdict(world, "cancel_order", {"error": "invalid_id"}, order_id="W111111")[0] == "consistent"
    assert verdict(world, "cancel_order", {"status": "cancelled"}, order_id="W111111")[0] == "inconsistent"
    assert verdict(world, "get_order", {"error": "invalid_id"}, order_id="W111111") == ("consistent", False)
    assert verdict(world, "get_order", ORDER, order_id="111111")[0] == "inconsistent"


def test_what_was_not_found_stays_away(world: ImaginedWorld) -> None:
    missing = {"error": "not_found"}
    assert verdict(world, "get_order", missing, order_id="#W111111") == ("consistent", True)
    assert verdict(world, "get_order", missing, order_id="#W111111") == ("consistent", False)
    assert verdict(world, "get_order", ORDER, order_id="#W111111")[0] == "inconsistent"
    assert verdict(world, "cancel_order", {"status": "cancelled"}, order_id="#W111111")[0] == "inconsistent"
    assert verdict(world, "cancel_order", missing, order_id="#W111111")[0] == "consistent"


def test_a_forbidden_write_rehearsed_as_a_success_is_inconsistent(world: ImaginedWorld) -> None:
    verdict(world, "get_order", SHIPPED, order_id="#W111111")
    assert verdict(world, "cancel_order", {"status": "cancelled"}, order_id="#W111111")[0] == "inconsistent"
    assert verdict(world, "cancel_order", {"error": "already_shipped"}, order_id="#W111111")[0] == "consistent"
    assert world.final_state()["orders"] == {"#W111111": SHIPPED}


def test_an_unknown_tool_answers_as_the_environment_would(world: ImaginedWorld) -> None:
    assert verdict(world, "delete_everything", {"ok": True})[0] == "inconsistent"


def test_determined_tells_what_follows_and_changes_nothing(world: ImaginedWorld) -> None:
    lookup = {"order_id": "#W111111"}
    assert not world.determined("get_order", lookup)
    assert not world.determined("cancel_order", lookup)
    assert world.determined("get_order", {"order_id": "nonsense"})
    verdict(world, "get_order", ORDER, **lookup)
    assert world.determined("cancel_order", lookup)
    assert world.determined("get_order", lookup)
    assert not world.determined("return_order", {"order_id": "#W222222"})
    assert world.final_state()["orders"] == {"#W111111": ORDER}  # asking cancelled nothing


def test_oracle_is_determined_where_its_records_were_shown(world: ImaginedWorld) -> None:
    assert world.oracle(GOAL) == {
        "determined": False,
        "calls": [{"name": "get_order", "arguments": {"order_id": "#W111111"}}],
    }
    verdict(world, "get_order", ORDER, order_id="#W111111")
    oracle = world.oracle(GOAL)
    assert oracle["determined"]
    assert [call["name"] for call in oracle["calls"]] == ["get_order", "cancel_order"]
    assert (oracle["outcome"], oracle["facts"]) == ("done", ["120"])
    assert oracle["final_state"]["orders"]["#W111111"]["status"] == "cancelled"
    assert world.final_state()["orders"]["#W111111"]["status"] == "pending"  # it ran on a world of its own


def test_oracle_starts_from_the_opening_records_not_from_where_the_rehearsal_ended(world: ImaginedWorld) -> None:
    verdict(world, "get_order", ORDER, order_id="#W111111")
    verdict(world, "cancel_order", {"status": "cancelled"}, order_id="#W111111")
    oracle = world.oracle(GOAL)
    assert oracle["outcome"] == "done"
    assert oracle["final_state"] == world.final_state()


def test_oracle_declines_in_a_world_that_forbids_the_request(world: ImaginedWorld) -> None:
    verdict(world, "get_order", SHIPPED, order_id="#W111111")
    oracle = world.oracle(GOAL)
    assert (oracle["outcome"], oracle["facts"]) == ("declined", ["shipped"])
    assert oracle["final_state"] == world.final_state()


def test_oracle_is_determined_by_a_record_that_is_missing(world: ImaginedWorld) -> None:
    verdict(world, "get_order", {"error": "not_found"}, order_id="#W111111")
    assert world.oracle(GOAL)["outcome"] == "declined"


def test_oracle_may_need_more_than_was_shown(world: ImaginedWorld) -> None:
    # A return asks for the order and, if it was delivered, for its customer.
    goal = {"kind": "return", "order": "#W111111"}
    verdict(world, "get_order", {**ORDER, "status": "delivered"}, order_id="#W111111")
    assert not world.oracle(goal)["determined"]
    verdict(
        world,
        "get_customer",
        {"customer_id": "CU222222", "last_order": "#W111111", "status": "blocked"},
        customer_id="CU222222",
    )
    assert world.oracle(goal)["outcome"] == "declined"


def test_worlds_share_nothing(retail: EnvironmentSpec) -> None:
    definition = Definition(retail.definition())
    one, two = definition.imagine(), definition.imagine()
    verdict(one, "get_order", ORDER, order_id="#W111111")
    assert verdict(two, "get_order", SHIPPED, order_id="#W111111") == ("consistent", True)
    assert one.final_state()["orders"]["#W111111"] == ORDER


def test_a_list_shows_every_record_of_its_kind(shop: ImaginedWorld) -> None:
    assert not shop.determined("find", {"colour": "red"})
    assert verdict(shop, "find", [RED, RED_TOO], colour="red") == ("consistent", True)
    assert verdict(shop, "find", [RED_TOO, RED], colour="red") == ("consistent", False)  # order does not matter
    assert verdict(shop, "find", [RED], colour="red")[0] == "inconsistent"
    assert verdict(shop, "show", RED, id="a") == ("consistent", False)
    assert shop.determined("find", {"colour": "red"})
    assert not shop.determined("find", {"colour": "blue"})


def test_an_empty_list_is_an_answer(shop: ImaginedWorld) -> None:
    assert verdict(shop, "find", [], colour="red") == ("consistent", True)
    assert shop.determined("find", {"colour": "red"})
    assert shop.oracle({"colour": "red"})["outcome"] == "declined"


def test_a_list_with_a_record_of_another_kind_is_inconsistent_and_forgotten(shop: ImaginedWorld) -> None:
    assert verdict(shop, "find", [RED, {"id": "c", "colour": "blue", "left": 1}], colour="red")[0] == "inconsistent"
    assert verdict(shop, "find", [RED, {"id": "c"}], colour="red")[0] == "inconsistent"
    assert shop.final_state()["items"] == {}


def test_a_list_follows_the_writes(shop: ImaginedWorld) -> None:
    verdict(shop, "find", [RED], colour="red")
    assert shop.oracle({"colour": "red"})["outcome"] == "done"
    assert verdict(shop, "buy", {"left": 0}, id="a")[0] == "consistent"
    assert verdict(shop, "buy", {"error": "sold_out"}, id="a")[0] == "consistent"
    assert verdict(shop, "find", [RED], colour="red")[0] == "inconsistent"
    assert verdict(shop, "find", [{**RED, "left": 0}], colour="red")[0] == "consistent"


def test_oracle_needs_the_list_it_asks_for(shop: ImaginedWorld) -> None:
    verdict(shop, "show", RED, id="a")  # one red item is known, but not that it is the only one
    assert not shop.oracle({"colour": "red"})["determined"]


def test_a_record_that_an_earlier_list_must_have_held_is_inconsistent(shop: ImaginedWorld) -> None:
    # "All red items: a" settles that there is no other red item.
    verdict(shop, "find", [RED], colour="red")
    assert verdict(shop, "show", RED_TOO, id="b")[0] == "inconsistent"


def test_a_record_without_its_key_is_inconsistent_even_if_its_schema_allows_it(shop: ImaginedWorld) -> None:
    assert verdict(shop, "read", {"text": "hello"}, id="n")[0] == "inconsistent"
    assert verdict(shop, "read", {"id": ["n"]}, id="n")[0] == "inconsistent"


def test_equality_of_responses_knows_types() -> None:
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert same([1, 2], [2, 1])
    assert not same([1, 1], [1])
    assert not same({"a": 1}, {"a": "1"})
    assert not same({"a": 1}, {"a": True})
    assert not same([], None)


async def test_the_worker_serves_the_same_world(retail: EnvironmentSpec, worker: Worker) -> None:
    session = await worker.imagine("retail")
    lookup = {"order_id": "#W111111"}
    assert not await session.determined("cancel_order", lookup)
    found = await session.observe("get_order", lookup, SHIPPED)
    assert found == {"consistency": "consistent", "new": True}
    assert (await session.observe("cancel_order", lookup, {"status": "cancelled"}))["consistency"] == "inconsistent"
    assert await session.determined("cancel_order", lookup)
    grade = await session.grade(GOAL)
    assert grade["oracle"]["outcome"] == "declined"
    assert grade["final_state"]["orders"] == {"#W111111": SHIPPED}
    await session.close()
    assert worker.real_calls == 0


async def test_an_imagined_world_has_no_real_state_to_read_or_change(worker: Worker) -> None:
    session = await worker.imagine("retail")
    with pytest.raises(SandboxError):
        await session.state()
    with pytest.raises(SandboxError):
        await session.call("get_order", {"order_id": "#W111111"})
    assert (await session.grade(GOAL))["final_state"] == {"orders": {}, "customers": {}, "stock": {}}


@pytest.mark.parametrize("domain", ["retail", "flights", "bank", "calendar"])
async def test_real_episodes_of_every_domain_are_consistent_without_their_state(
    domain: str, starter_episodes: Callable[..., Any]
) -> None:
    # The truth is the one rehearsal that must never be called inconsistent; and where the oracle's look-ups were shown,
    # the imagined world must come to the oracle's own end.
    worker, spec, scenarios = await starter_episodes(domain, 40)
    for scenario in scenarios:
        session = await worker.imagine(domain)
        for call in scenario.expected.calls:
            found = await session.observe(call.name, call.arguments, call.response)
            assert found["consistency"] == "consistent", (scenario.id, call)
        oracle = (await session.grade(scenario.goal))["oracle"]
        assert oracle["determined"], scenario.id
        assert oracle["outcome"] == scenario.expected.outcome
        assert oracle["reply"] == scenario.expected.reply
        await session.close()
    assert worker.real_calls == 0
    assert spec.id == domain
