"""The bank domain: its tools and rules, and the oracle that uses them. Standard library only."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
Slip = Callable[[str], bool]
Solver = Callable[[Call, dict[str, Any], Slip], dict[str, Any]]


class Bank:
    """Accounts, cards and bills of a bank."""

    RULES = (
        "An id is AC (account), CA (card) or BL (bill) and six digits.",
        "A frozen account neither pays nor receives.",
        "A transfer, a bill or a card limit may not exceed the balance.",
        "A bill can be paid once.",
        "A blocked card stays blocked; it gets no limit and tells no balance.",
    )
    STATE = {
        "accounts": {
            "key": "account_id",
            "record": {
                "type": "object",
                "properties": {
                    "account_id": {"type": "string", "pattern": "^AC[0-9]{6}$"},
                    "owner": {
                        "type": "string",
                        "enum": [
                            "anna", "ben", "carla", "david", "emma", "felix",
                            "grace", "hugo", "iris", "jonas", "lena", "maria",
                        ],
                    },
                    "card_id": {"type": "string", "pattern": "^CA[0-9]{6}$"},
                    # An account opens with 999 at most; a transfer may add as much.
                    "balance": {"type": "integer", "minimum": 0, "maximum": 1998},
                    "status": {"type": "string", "enum": ["open", "frozen"]},
                },
                "required": ["account_id", "owner", "card_id", "balance", "status"],
                "additionalProperties": False,
            },
        },
        "cards": {
            "key": "card_id",
            "record": {
                "type": "object",
                "properties": {
                    "card_id": {"type": "string", "pattern": "^CA[0-9]{6}$"},
                    "account_id": {"type": "string", "pattern": "^AC[0-9]{6}$"},
                    "limit": {"type": "integer", "minimum": 0, "maximum": 999},
                    "status": {"type": "string", "enum": ["active", "blocked"]},
                },
                "required": ["card_id", "account_id", "limit", "status"],
                "additionalProperties": False,
            },
        },
        "bills": {
            "key": "bill_id",
            "record": {
                "type": "object",
                "properties": {
                    "bill_id": {"type": "string", "pattern": "^BL[0-9]{6}$"},
                    "account_id": {"type": "string", "pattern": "^AC[0-9]{6}$"},
                    "amount": {"type": "integer", "minimum": 0, "maximum": 999},
                    "status": {"type": "string", "enum": ["due", "paid"]},
                },
                "required": ["bill_id", "account_id", "amount", "status"],
                "additionalProperties": False,
            },
        },
    }  # fmt: skip
    LOOKUPS = {"get_account": "accounts", "get_card": "cards", "get_bill": "bills"}

    def __init__(self, init_config: dict[str, Any] | None = None) -> None:
        tables = copy.deepcopy(init_config or {})
        self.accounts: dict[str, dict[str, Any]] = tables.get("accounts", {})
        self.cards: dict[str, dict[str, Any]] = tables.get("cards", {})
        self.bills: dict[str, dict[str, Any]] = tables.get("bills", {})

    def get_account(self, account_id: str) -> dict[str, Any]:
        """Show an account."""
        return dict(self._account(account_id))

    def get_card(self, card_id: str) -> dict[str, Any]:
        """Show a card."""
        return dict(self._card(card_id))

    def get_bill(self, bill_id: str) -> dict[str, Any]:
        """Show a bill."""
        return dict(self._bill(bill_id))

    def transfer(self, source: str, target: str, amount: int) -> dict[str, Any]:
        """Send money from one account to another."""
        account = self._account(source)
        error = account.get("error") or _bad_amount(amount) or _cannot_pay(account, amount)
        if error:
            return {"error": error}
        receiver = self._account(target)
        error = receiver.get("error") or _frozen(receiver)
        if error:
            return {"error": error}
        account["balance"] -= amount
        receiver["balance"] += amount
        return {"sent": amount}

    def pay_bill(self, bill_id: str) -> dict[str, Any]:
        """Pay a due bill from its account."""
        bill = self._bill(bill_id)
        error = bill.get("error") or _paid(bill)
        if error:
            return {"error": error}
        account = self._account(bill["account_id"])
        error = account.get("error") or _cannot_pay(account, bill["amount"])
        if error:
            return {"error": error}
        account["balance"] -= bill["amount"]
        bill["status"] = "paid"
        return {"status": "paid"}

    def block_card(self, card_id: str) -> dict[str, Any]:
        """Block an active card."""
        card = self._card(card_id)
        error = card.get("error") or _already_blocked(card)
        if error:
            return {"error": error}
        card["status"] = "blocked"
        return {"status": "blocked"}

    def set_limit(self, card_id: str, limit: int) -> dict[str, Any]:
        """Set the limit of an active card."""
        card = self._card(card_id)
        error = card.get("error") or _bad_amount(limit) or _blocked(card)
        if error:
            return {"error": error}
        account = self._account(card["account_id"])
        error = account.get("error") or _cannot_pay(account, limit)
        if error:
            return {"error": error}
        card["limit"] = limit
        return {"limit": limit}

    def _account(self, account_id: str) -> dict[str, Any]:
        return _malformed("AC", account_id) or self.accounts.get(account_id) or {"error": "not_found"}

    def _card(self, card_id: str) -> dict[str, Any]:
        return _malformed("CA", card_id) or self.cards.get(card_id) or {"error": "not_found"}

    def _bill(self, bill_id: str) -> dict[str, Any]:
        return _malformed("BL", bill_id) or self.bills.get(bill_id) or {"error": "not_found"}


def _bad_amount(amount: object) -> str:
    """Name the error of an amount that is no whole number from 1 to 999, or nothing."""
    # `type`, because True and False are ints for isinstance.
    return "" if type(amount) is int and 1 <= amount <= 999 else "invalid_amount"


def _frozen(account: dict[str, Any]) -> str:
    """Name the error of an account that moves no money, or nothing."""
    return "frozen" if account["status"] == "frozen" else ""


def _cannot_pay(account: dict[str, Any], amount: int) -> str:
    """Name the error of an account that cannot bear an amount, or nothing."""
    return _frozen(account) or ("" if account["balance"] >= amount else "insufficient_funds")


def _paid(bill: dict[str, Any]) -> str:
    """Name the error of a bill that needs no paying, or nothing."""
    return "already_paid" if bill["status"] == "paid" else ""


def _blocked(card: dict[str, Any]) -> str:
    """Name the error of a card that may not be used, or nothing."""
    return "blocked" if card["status"] == "blocked" else ""


def _already_blocked(card: dict[str, Any]) -> str:
    """Name the error of a card that cannot be blocked again, or nothing."""
    return "already_blocked" if card["status"] == "blocked" else ""


def solve(call: Call, goal: dict[str, Any], slip: Slip = lambda name: False) -> dict[str, Any]:
    """Carry out a request as a careful clerk: look up, check the rules, then write or decline.

    It sees only what its calls return, so it is right in any world, also in an imagined one. `slip(name)` is
    asked where a careless demonstrator would go wrong.
    """
    solvers: dict[str, Solver] = {
        "transfer": _solve_transfer,
        "pay": _solve_pay,
        "block": _solve_block,
        "block_for": _solve_block_for,
        "limit": _solve_limit,
        "balance": _solve_balance,
    }
    return _each_part(call, goal, slip, solvers)


def _solve_transfer(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Send money between two accounts the user named; the reply names who got it."""
    target, amount = _marked("AC", goal["target"]), goal["amount"]
    if slip("skip_lookup"):
        others = {"target": target, "amount": amount}
        return _blind(slip, _ask(call, slip, "transfer", "source", "AC", goal["source"], **others))
    account = _ask(call, slip, "get_account", "account_id", "AC", goal["source"])
    if "error" in account:
        return _declined(account["error"])
    problem, success = _cannot_pay(account, amount), _done()
    if not problem:
        receiver = _ask(call, slip, "get_account", "account_id", "AC", goal["target"])
        problem = receiver.get("error") or _frozen(receiver)
        success = success if "error" in receiver else _done(f"sent to {receiver['owner']}", receiver["owner"])
    ids = {"source": account["account_id"], "target": target, "amount": amount}
    return _write(call, slip, problem, success, "transfer", **ids)


def _solve_pay(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Pay a bill from the account it belongs to."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "pay_bill", "bill_id", "BL", goal["bill"]))
    bill = _ask(call, slip, "get_bill", "bill_id", "BL", goal["bill"])
    if "error" in bill:
        return _declined(bill["error"])
    problem = _paid(bill)
    if not problem:
        account = call("get_account", account_id=bill["account_id"])
        problem = account.get("error") or _cannot_pay(account, bill["amount"])
    success = _done(f"amount {bill['amount']}", bill["amount"])
    return _write(call, slip, problem, success, "pay_bill", bill_id=bill["bill_id"])


def _solve_block(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Block the card the user named; the reply names its account."""
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "block_card", "card_id", "CA", goal["card"]))
    card = _ask(call, slip, "get_card", "card_id", "CA", goal["card"])
    if "error" in card:
        return _declined(card["error"])
    success = _done(f"account {card['account_id']}", card["account_id"])
    return _write(call, slip, _already_blocked(card), success, "block_card", card_id=card["card_id"])


def _solve_block_for(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Block the card of an account; the reply names the card."""
    account = _ask(call, slip, "get_account", "account_id", "AC", goal["account"])
    if "error" in account:
        return _declined(account["error"])
    card_id = account["card_id"]
    if slip("skip_lookup"):
        return _blind(slip, call("block_card", card_id=card_id))
    card = call("get_card", card_id=card_id)
    if "error" in card:
        return _declined(card["error"])
    success = _done(f"card {card_id}", card_id)
    return _write(call, slip, _already_blocked(card), success, "block_card", card_id=card_id)


def _solve_limit(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Set the limit of a card, if its account can bear it; the reply names the old limit."""
    limit = goal["amount"]
    if slip("skip_lookup"):
        return _blind(slip, _ask(call, slip, "set_limit", "card_id", "CA", goal["card"], limit=limit))
    card = _ask(call, slip, "get_card", "card_id", "CA", goal["card"])
    if "error" in card:
        return _declined(card["error"])
    problem = _blocked(card)
    if not problem:
        account = call("get_account", account_id=card["account_id"])
        problem = account.get("error") or _cannot_pay(account, limit)
    success = _done(f"limit was {card['limit']}", card["limit"])
    return _write(call, slip, problem, success, "set_limit", card_id=card["card_id"], limit=limit)


def _solve_balance(call: Call, goal: dict[str, Any], slip: Slip) -> dict[str, Any]:
    """Tell the balance of the account behind a card that is not blocked."""
    card = _ask(call, slip, "get_card", "card_id", "CA", goal["card"])
    if "error" in card:
        return _declined(card["error"])
    if _blocked(card) and not slip("ignore_rule"):
        return _declined(_blocked(card))
    account = call("get_account", account_id=card["account_id"])
    if "error" in account:
        return _declined(account["error"])
    return _done(f"balance {account['balance']}", account["balance"])


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
