"""The bundled world: four service domains with tools, rules, an oracle and as many tasks as one likes.

It is executable and needs no language model, so that a small policy can be trained and judged in minutes.
"""

from __future__ import annotations

import random
from pathlib import Path

from envace.starter.world.bank import tasks as bank
from envace.starter.world.calendar import tasks as calendar
from envace.starter.world.drafts import Draft
from envace.starter.world.flights import tasks as flights
from envace.starter.world.retail import tasks as retail

TRAINED = ("retail", "flights", "bank")
"""Domains with tasks to train on."""
UNSEEN = ("calendar",)
"""Domains that no training ever sees: the same style of tools under other names."""
DOMAINS = TRAINED + UNSEEN
SPLITS = ("train", "heldout")

_DRAW = {"retail": retail.draw, "flights": flights.draw, "bank": bank.draw, "calendar": calendar.draw}

__all__ = ["DOMAINS", "SPLITS", "TRAINED", "UNSEEN", "Draft", "draw", "folder"]


def draw(domain: str, split: str, seed: int, index: int) -> Draft:
    """Draw a task; the same arguments give the same task, on every machine.

    The split is part of the generator's seed, so train and held-out tasks never coincide.

    Raises:
        ValueError: The domain or the split does not exist.
    """
    if domain not in DOMAINS or split not in SPLITS:
        raise ValueError(
            f"There is no domain {domain!r} with a split {split!r}. "
            f"Domains: {', '.join(DOMAINS)}; splits: {', '.join(SPLITS)}."
        )
    return _DRAW[domain](random.Random(f"{domain}/{split}/{seed}/{index}"), split)


def folder(domain: str) -> Path:
    """Return the folder in which a domain's environment.py lies."""
    return Path(__file__).parent / domain
