"""Tasks of the retail domain."""

from __future__ import annotations

import random
from typing import Any

from envace.starter.world import drafts
from envace.starter.world.drafts import Domain, Draft, Kind, Scene

# fmt: off
ITEMS = (
    "lamp", "desk", "chair", "mug", "kettle", "jacket", "bag", "camera", "phone", "tent", "radio", "watch",
)
# fmt: on
ORDER_STATUSES = ("pending", "shipped", "delivered", "cancelled", "returned")


def draw(rng: random.Random, split: str) -> Draft:
    """Draw one task."""
    return drafts.draw(DOMAIN, rng, split)


def _purchase(scene: Scene, status: str = "", customer: str = "", left: int | None = None) -> dict[str, Any]:
    """Add a customer, the customer's last order and the stock of its item; return the order."""
    order = scene.put(
        "orders",
        "order_id",
        order_id=scene.new_id("#W"),
        customer_id=scene.new_id("CU"),
        item=_item(scene, left),
        status=status or scene.pick(ORDER_STATUSES),
        total=scene.rng.randint(10, 999),
    )
    scene.put(
        "customers",
        "customer_id",
        customer_id=order["customer_id"],
        last_order=order["order_id"],
        status=customer or scene.pick(("active", "active", "blocked")),
    )
    return order


def _item(scene: Scene, left: int | None = None) -> str:
    """Add an item to the stock, with some or none left; return its name."""
    count = scene.pick((0, scene.rng.randint(1, 9))) if left is None else left
    record = scene.put("stock", "item", item=scene.fresh(ITEMS), count=count, price=scene.rng.randint(10, 999))
    return str(record["item"])


def _unready(scene: Scene, branch: str, right: str) -> str:
    """Draw an order's status: the right one, or in the branch "status" one of the others."""
    others = [status for status in ORDER_STATUSES if status != right]
    return scene.pick(others) if branch == "status" else right


def _to_cancel(scene: Scene, branch: str) -> dict[str, Any]:
    return {"order": _purchase(scene, _unready(scene, branch, "pending"))["order_id"]}


def _to_cancel_last(scene: Scene, branch: str) -> dict[str, Any]:
    return {"customer": _purchase(scene, _unready(scene, branch, "pending"))["customer_id"]}


def _delivery(scene: Scene, branch: str) -> dict[str, Any]:
    customer = "blocked" if branch == "blocked" else "active"
    return _purchase(scene, _unready(scene, branch, "delivered"), customer)


def _to_return(scene: Scene, branch: str) -> dict[str, Any]:
    return {"order": _delivery(scene, branch)["order_id"]}


def _to_return_last(scene: Scene, branch: str) -> dict[str, Any]:
    return {"customer": _delivery(scene, branch)["customer_id"]}


def _to_swap(scene: Scene, branch: str) -> dict[str, Any]:
    order = _purchase(scene, _unready(scene, branch, "pending"))
    left = 0 if branch == "stock" else scene.rng.randint(1, 9)
    return {"order": order["order_id"], "item": _item(scene, left)}


def _to_price(scene: Scene, branch: str) -> dict[str, Any]:
    left = 0 if branch == "stock" else scene.rng.randint(1, 9)
    return {"order": _purchase(scene, left=left)["order_id"]}


KINDS = {
    "cancel": Kind(
        build=_to_cancel,
        subject=("order", "orders"),
        obstacles=("status",),
        train=(
            "cancel order {order}",
            "call off order {order}",
            "stop order {order} before it leaves",
            "cancel my order {order} and refund it",
            "drop order {order}, I changed my mind",
            "make sure that order {order} is cancelled",
        ),
        heldout=(
            "stop my order {order}, I changed my mind",
            "call off order {order} before it leaves",
            "drop my order {order} and refund it",
        ),
    ),
    "return": Kind(
        build=_to_return,
        subject=("order", "orders"),
        obstacles=("status", "blocked"),
        train=(
            "return order {order}",
            "take back order {order}",
            "send back order {order} and refund it",
            "start a return for order {order}",
            "let me return order {order}, it came broken",
            "let me give back my order {order}",
        ),
        heldout=(
            "take my order {order} back and refund it",
            "start a return, order {order} came broken",
            "let me send back order {order}",
        ),
    ),
    "swap": Kind(
        build=_to_swap,
        subject=("order", "orders"),
        obstacles=("status", "stock"),
        train=(
            "swap order {order} to a {item}",
            "change order {order} into a {item}",
            "make order {order} a {item} instead",
            "replace what is in order {order} by a {item}",
            "put a {item} in order {order} instead",
            "switch order {order} over to a {item}",
        ),
        heldout=(
            "replace order {order} by a {item} instead",
            "put a {item} into order {order} instead",
            "switch my order {order} into a {item}",
        ),
    ),
    "cancel_last": Kind(
        build=_to_cancel_last,
        subject=("customer", "customers"),
        obstacles=("status",),
        train=(
            "cancel the last order of customer {customer}",
            "call off the latest order of customer {customer}",
            "stop what customer {customer} ordered last",
            "drop the newest order by customer {customer}",
            "cancel what customer {customer} ordered last",
            "make sure that the last order of customer {customer} is cancelled",
        ),
        heldout=(
            "stop the latest order by customer {customer}",
            "call off what customer {customer} ordered last",
        ),
    ),
    "return_last": Kind(
        build=_to_return_last,
        subject=("customer", "customers"),
        obstacles=("status", "blocked"),
        train=(
            "return the last order of customer {customer}",
            "take back the latest order of customer {customer}",
            "send back what customer {customer} ordered last",
            "return the newest order by customer {customer}",
            "start a return for the last order of customer {customer}",
            "let customer {customer} give back the latest order",
        ),
        heldout=(
            "take back what customer {customer} ordered last",
            "let customer {customer} return the newest order",
        ),
    ),
    "price": Kind(
        build=_to_price,
        subject=("order", "orders"),
        obstacles=("stock",),
        train=(
            "tell me the price to buy order {order} again",
            "tell me what the item in order {order} costs now",
            "find out what another one like order {order} costs",
            "give me the price of the item in order {order}",
            "check the price of another item like order {order}",
            "say how much the item in order {order} costs",
        ),
        heldout=(
            "find out how much it costs to buy order {order} again",
            "say what another one like order {order} costs now",
            "check what the item in order {order} costs",
        ),
    ),
}

DOMAIN = Domain(
    tables=("orders", "customers", "stock"),
    kinds=KINDS,
    pairs=(
        ("cancel", "return"),
        ("return", "swap"),
        ("swap", "cancel_last"),
        ("price", "cancel"),
        ("return_last", "price"),
    ),
    heldout_pairs=(("cancel", "swap"), ("return", "price"), ("return_last", "cancel")),
    bystander=_purchase,
)
