"""The retail domain: its tools and rules, and the oracle that uses them. Standard library only."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
Slip = Callable[[str], bool]
Solver = Callable[[Call, dict[str, Any], Slip], dict[str, Any]]


class Retail:
    """Orders, customers and stock of an online shop."""

    RULES = (
        "An order id is #W and six digits; a customer id is CU and six digits.",
        "Only a pending order can be cancelled or swapped.",
        "Only a delivered order can be returned, and not by a blocked customer.",
        "An order can be swapped only to an item that is in stock.",
        "Prices are told only for items in stock.",
    )
    STATE = {
        "orders": {
            "key": "order_id",
            "record": {
                "type": "object",
                "properties": {
                    "order_id": {"type": "string", "pattern": "^#W[0-9]{6}$"},
                    "customer_id": {"type": "string", "pattern": "^CU[0-9]{6}$"},
                    "item": {
                        "type": "string",
                        "enum": [
                            "lamp", "desk", "chair", "mug", "kettle", "jacket",
                            "bag", "camera", "phone", "tent", "radio", "watch",
                        ],
                    },
                    "status": {
                        "type": "string",
                        "enum": ["pending", "shipped", "delivered", "cancelled", "returned"],
                    },
                    "total": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["order_id", "customer_id", "item", "status", "total"],
                "additionalProperties": False,
            },
        },
        "customers": {
            "key": "customer_id",
            "record": {
                "type": "object",
                "properties": {
                    "customer_id": {"type": "string", "pattern": "^CU[0-9]{6}$"},
                    "last_order": {"type": "string", "pattern": "^#W[0-9]{6}$"},
                    "status": {"type": "string", "enum": ["active", "blocked"]},
                },
                "required": ["customer_id", "last_order", "status"],
                "additionalProperties": False,
            },
        },
        "stock": {
            "key": "item",
            "record": {
                "type": "object",
                "properties": {
                    "item": {
                        "type": "string",
                        "enum": [
                            "lamp", "desk", "chair", "mug", "kettle", "jacket",
                            "bag", "camera", "phone", "tent", "radio", "watch",
                        ],
                    },
                    "count": {"type": "integer", "minimum": 0, "maximum": 999},
                    "price": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["item", "count", "price"],
                "additionalProperties": False,
            },
        },
    }  # fmt: skip
    LOOKUPS = {"get_order": "orders", "get_customer": "customers", "get_stock": "stock"}

    def __init__(self, init_config: dict[str, Any] | None = None) -> None:
        tables = copy.deepcopy(init_config or {})
        self.orders: dict[str, dict[str, Any]] = tables.get("orders", {})
        self.customers: dict[str, dict[str, Any]] = tables.get("customers", {})
        self.stock: dict[str, dict[str, Any]] = tables.get("stock", {})

    def get_order(self, order_id: str) -> dict[str, Any]:
        """Show an order."""
        return dict(self._order(order_id))

    def get_customer(self, customer_id: str) -> dict[str, Any]:
        """Show a customer and the last order."""
        return dict(self._customer(customer_id))

    def get_stock(self, item: str) -> dict[str, Any]:
        """Show the stock and price of an item."""
        return dict(self._stock(item))

    def cancel_order(self, order_id: str) -> dict[str, Any]:
        """Cancel a pending order."""
        order = self._order(order_id)
        error = order.get("error") or _not_pending(order)
        if error:
            return {"error": error}
        order["status"] = "cancelled"
        return {"status": "cancelled"}

    def return_order(self, order_id: str) -> dict[str, Any]:
        """Return a delivered order."""
        order = self._order(order_id)
        error = order.get("error") or _not_delivered(order)
        if error:
            return {"error": error}
        customer = self._customer(order["customer_id"])
        error = customer.get("error") or _blocked(customer)
        if error:
            return {"error": error}
        order["status"] = "returned"
        return {"status": "returned"}

    def swap_item(self, order_id: str, item: str) -> dict[str, Any]:
        """Swap the item of a pending order."""
        order = self._order(order_id)
        error = order.get("error") or _not_pending(order)
        if error:
            return {"error": error}
        stock = self._stock(item)
        error = stock.get("error") or _out_of_stock(stock)
        if error:
            return {"error": error}
        stock["count"] -= 1
        order.update(item=item, total=stock["price"])
        return {"item": item}

    def _order(self, order_id: str) -> dict[str, Any]:
        return _malformed("#W", order_id) or self.orders.get(order_id) or {"error": "not_found"}

    def _customer(self, customer_id: str) -> dict[str, Any]:
        return _malformed("CU", customer_id) or self.customers.get(customer_id) or {"error": "not_found"}

    def _stock(self, item: object) -> dict[str, Any]:
        if not isinstance(item, str):  # A list, say, could not even be searched for.
            return {"error": "invalid_id"}
        return self.stock.get(item) or {"error": "not_found"}


def _not_pending(order: dict[str, Any]) -> str:
    """Name the error of an order that is too far on to be cancelled or swapped, or nothing."""
    return "" if order["status"] == "pending" else f"already_{order['status']}"


def _not_delivered(order: dict[str, Any]) -> str:
    """Name the error of an order that cannot be returned, or nothing."""
    if order["status"] in ("cancelled", "returned"):
        return f"already_{order['status']}"
    return "" if order["status"] == "delivered" else "not_delivered"


def _blocked(customer: dict[str, Any]) -> str:
    """Name the error of a customer who may not return, or nothing."""
    return "blocked" if customer["status"] == "blocked" else ""


def _out_of_stock(stock: dict[str, Any]) -> str:
    """Name the error of an item that is sold out, or nothing."""
    return "" if stock["count"] else "out_of_stock"


def solve(call: Call, goal: dict[str, Any], slip: Slip = lambda name: False) -> dict[str, Any]:
    """Carry out a request as a careful clerk: look up, check the rules, then write or decline.

    It sees only what its calls return, so it is right in any world, also in an imagined one. `slip(name)` is
    asked where a careless demonstrator would go wrong.
    """
    solvers: dict[str, Solver] = {
        "cancel": _solve_cancel,
        "return": _solve_return,
        "swap": _solve_swap,
        "cancel_last": _solve_cancel_last,
        "return_last": _solve_return_last,
        "price": _solve_price,
    }
    return _each_part(call, goal, slip, solvers)


def _solve_cancel(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the order the user named."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "cancel_order", "order_id", "#W", goal["order"]))
    order = _ask(call, slip, "get_order", "order_id", "#W", goal["order"])
    return _cancel(call, slip, order)


def _cancel(call: Call, slip: Slip, order: dict[str, Any]) -> dict[str, Any]:
    """Cancel an order that was looked up, if its status allows it."""
    if "error" in order:
        return _declined(order["error"])
    success = _done(f"refund {order['total']}", order["total"])
    return _write(call, slip, _not_pending(order), success, "cancel_order", order_id=order["order_id"])


def _solve_return(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Return the order the user named, unless its customer is blocked."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "return_order", "order_id", "#W", goal["order"]))
    order = _ask(call, slip, "get_order", "order_id", "#W", goal["order"])
    if "error" in order:
        return _declined(order["error"])
    problem = _not_delivered(order)
    if not problem:
        customer = call("get_customer", customer_id=order["customer_id"])
        problem = customer.get("error") or _blocked(customer)
    success = _done(f"refund {order['total']}", order["total"])
    return _write(call, slip, problem, success, "return_order", order_id=order["order_id"])


def _solve_swap(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Swap the item of the order the user named, if the new one is in stock."""
    item = goal["item"]
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "swap_item", "order_id", "#W", goal["order"], item=item))
    order = _ask(call, slip, "get_order", "order_id", "#W", goal["order"])
    if "error" in order:
        return _declined(order["error"])
    problem, success = _not_pending(order), _done()
    if not problem:
        stock = call("get_stock", item=item)
        problem = stock.get("error") or _out_of_stock(stock)
        success = success if "error" in stock else _done(f"price {stock['price']}", stock["price"])
    return _write(call, slip, problem, success, "swap_item", order_id=order["order_id"], item=item)


def _solve_cancel_last(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Cancel the last order of a customer."""
    customer = _ask(call, slip, "get_customer", "customer_id", "CU", goal["customer"])
    if "error" in customer:
        return _declined(customer["error"])
    order_id = customer["last_order"]
    if slip("skip_lookup"):
        return _blind(slip, call("cancel_order", order_id=order_id))
    return _cancel(call, slip, call("get_order", order_id=order_id))


def _solve_return_last(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Return the last order of a customer, unless the customer is blocked."""
    customer = _ask(call, slip, "get_customer", "customer_id", "CU", goal["customer"])
    if "error" in customer:
        return _declined(customer["error"])
    order_id, problem, success = customer["last_order"], _blocked(customer), _done()
    if not problem:
        if slip("skip_lookup"):
            return _blind(slip, call("return_order", order_id=order_id))
        order = call("get_order", order_id=order_id)
        if "error" in order:
            return _declined(order["error"])
        problem, success = _not_delivered(order), _done(f"refund {order['total']}", order["total"])
    return _write(call, slip, problem, success, "return_order", order_id=order_id)


def _solve_price(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Tell what the item of an order costs now, if there is one left to buy."""
    order = _ask(call, slip, "get_order", "order_id", "#W", goal["order"])
    if "error" in order:
        return _declined(order["error"])
    stock = call("get_stock", item=order["item"])
    if "error" in stock:
        return _declined(stock["error"])
    if _out_of_stock(stock) and not slip("ignore_rule"):
        return _declined(_out_of_stock(stock))
    return _done(f"price {stock['price']}", stock["price"])


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
