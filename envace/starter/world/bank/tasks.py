"""Tasks of the bank domain."""

from __future__ import annotations

import random
from typing import Any

from envace.starter.world import drafts
from envace.starter.world.drafts import Domain, Draft, Kind, Scene

# fmt: off
OWNERS = (
    "anna", "ben", "carla", "david", "emma", "felix", "grace", "hugo", "iris", "jonas", "lena", "maria",
)
# fmt: on
BALANCES = tuple(range(0, 1000, 50))
"""In steps of 50, so that a small model can learn which balance bears which amount."""
AMOUNTS = tuple(range(100, 850, 50))
"""Every amount leaves balances on both sides of it, so that no amount gives the branch away."""


def draw(rng: random.Random, split: str) -> Draft:
    """Draw one task."""
    return drafts.draw(DOMAIN, rng, split)


def _client(
    scene: Scene,
    *,
    account: str = "",
    card: str = "",
    bill: str = "",
    balances: tuple[int, ...] = BALANCES,
    amount: int | None = None,
    limits: tuple[int, ...] = AMOUNTS,
) -> dict[str, Any]:
    """Add an account, its card and a bill of it; return the three ids and the owner."""
    account_id, card_id, bill_id = scene.new_id("AC"), scene.new_id("CA"), scene.new_id("BL")
    scene.put(
        "accounts",
        "account_id",
        account_id=account_id,
        owner=scene.pick(OWNERS),
        card_id=card_id,
        balance=scene.pick(balances),
        status=account or scene.pick(("open", "open", "frozen")),
    )
    scene.put(
        "cards",
        "card_id",
        card_id=card_id,
        account_id=account_id,
        limit=scene.pick(limits),
        status=card or scene.pick(("active", "active", "blocked")),
    )
    scene.put(
        "bills",
        "bill_id",
        bill_id=bill_id,
        account_id=account_id,
        amount=amount or scene.pick(AMOUNTS),
        status=bill or scene.pick(("due", "paid")),
    )
    return {"account": account_id, "card": card_id, "bill": bill_id}


def _balances(branch: str, amount: int) -> tuple[int, ...]:
    """List the balances that bear an amount, or in the branch "funds" those that do not."""
    return tuple(balance for balance in BALANCES if (balance < amount) == (branch == "funds"))


def _account(branch: str) -> str:
    return "frozen" if branch == "frozen" else "open"


def _to_transfer(scene: Scene, branch: str) -> dict[str, Any]:
    amount = scene.pick(AMOUNTS)
    # Either account may be the frozen one.
    sides = ("frozen", "open") if branch == "frozen" else ("open", "open")
    payer, receiver = scene.rng.sample(sides, 2)
    source = _client(scene, account=payer, balances=_balances(branch, amount))
    # The receiver's balance stays below 1000, where numbers are one token for the starter policy.
    room = tuple(balance for balance in BALANCES if balance + amount < 1000)
    target = _client(scene, account=receiver, balances=room)
    return {"source": source["account"], "target": target["account"], "amount": amount}


def _to_pay(scene: Scene, branch: str) -> dict[str, Any]:
    amount = scene.pick(AMOUNTS)
    bill = "paid" if branch == "paid" else "due"
    balances = _balances(branch, amount)
    client = _client(scene, account=_account(branch), bill=bill, balances=balances, amount=amount)
    return {"bill": client["bill"]}


def _card(branch: str) -> str:
    return "blocked" if branch == "blocked" else "active"


def _to_block(scene: Scene, branch: str) -> dict[str, Any]:
    return {"card": _client(scene, card=_card(branch))["card"]}


def _to_block_for(scene: Scene, branch: str) -> dict[str, Any]:
    return {"account": _client(scene, card=_card(branch))["account"]}


def _to_limit(scene: Scene, branch: str) -> dict[str, Any]:
    amount = scene.pick(AMOUNTS)
    balances, limits = _balances(branch, amount), tuple(limit for limit in AMOUNTS if limit != amount)
    client = _client(scene, account=_account(branch), card=_card(branch), balances=balances, limits=limits)
    return {"card": client["card"], "amount": amount}


def _to_tell_balance(scene: Scene, branch: str) -> dict[str, Any]:
    # Not 0 and 50: as a fact a balance should be hard to hit by chance.
    return {"card": _client(scene, card=_card(branch), balances=BALANCES[2:])["card"]}


KINDS = {
    "transfer": Kind(
        build=_to_transfer,
        subject=("source", "accounts"),
        obstacles=("frozen", "frozen", "funds"),
        train=(
            "send {amount} from account {source} to account {target}",
            "transfer {amount} from account {source} to account {target}",
            "move {amount} out of account {source} into account {target}",
            "pay {amount} from account {source} to account {target}",
            "take {amount} from account {source} for account {target}",
            "put {amount} from account {source} into account {target}",
        ),
        heldout=(
            "move {amount} from account {source} to account {target}",
            "take {amount} out of account {source} for account {target}",
            "send {amount} out of account {source} into account {target}",
        ),
    ),
    "pay": Kind(
        build=_to_pay,
        subject=("bill", "bills"),
        obstacles=("frozen", "funds", "paid"),
        train=(
            "pay bill {bill}",
            "settle bill {bill}",
            "take care of bill {bill}",
            "pay bill {bill} from its account",
            "pay off bill {bill}",
            "make sure that bill {bill} is paid",
        ),
        heldout=(
            "settle bill {bill} from its account",
            "take care to pay bill {bill}",
            "make sure to settle bill {bill}",
        ),
    ),
    "block": Kind(
        build=_to_block,
        subject=("card", "cards"),
        obstacles=("blocked",),
        train=(
            "block card {card}",
            "lock card {card}",
            "stop card {card}, I lost it",
            "block card {card}, somebody took it",
            "shut off card {card}",
            "make sure that card {card} is blocked",
        ),
        heldout=(
            "lock card {card}, somebody took it",
            "make sure to block card {card}",
            "shut off my card {card}, I lost it",
        ),
    ),
    "block_for": Kind(
        build=_to_block_for,
        subject=("account", "accounts"),
        obstacles=("blocked",),
        train=(
            "block the card of account {account}",
            "lock the card of account {account}",
            "stop the card of account {account}, I lost it",
            "block the card that account {account} can use",
            "shut off the card for account {account}",
            "make sure that the card of account {account} is blocked",
        ),
        heldout=(
            "lock the card that account {account} can use",
            "stop the card for account {account}, somebody took it",
        ),
    ),
    "limit": Kind(
        build=_to_limit,
        subject=("card", "cards"),
        obstacles=("frozen", "funds", "blocked"),
        train=(
            "set the limit of card {card} to {amount}",
            "change the limit of card {card} to {amount}",
            "let card {card} spend up to {amount}",
            "make {amount} the limit of card {card}",
            "put a limit of {amount} on card {card}",
            "give card {card} a limit of {amount}",
        ),
        heldout=(
            "put the limit of card {card} to {amount}",
            "set a limit of {amount} on card {card}",
            "give a limit of {amount} to card {card}",
        ),
    ),
    "balance": Kind(
        build=_to_tell_balance,
        subject=("card", "cards"),
        obstacles=("blocked",),
        train=(
            "tell me the balance behind card {card}",
            "tell me how much money card {card} can use",
            "find out the balance of the account of card {card}",
            "say how much is left behind card {card}",
            "check what money is left for card {card}",
            "give me the account balance for card {card}",
        ),
        heldout=(
            "find out how much money is left for card {card}",
            "say what the balance behind card {card} is",
            "check the account balance of card {card}",
        ),
    ),
}

DOMAIN = Domain(
    tables=("accounts", "cards", "bills"),
    kinds=KINDS,
    pairs=(
        ("transfer", "block"),
        ("pay", "balance"),
        ("block", "limit"),
        ("limit", "pay"),
        ("balance", "transfer"),
    ),
    heldout_pairs=(("pay", "block"), ("transfer", "limit"), ("block_for", "pay")),
    bystander=_client,
)
