"""How users open, join and close their requests. Held-out phrases are new, but made of known words."""

from __future__ import annotations

import random
from collections.abc import Sequence

MIN_WORDS = 8
"""Single requests get an opener and a closer that bring them to this length at least, where any do."""
MAX_WORDS = 14
"""And to this length at most; compounds get no closer, but are longer."""

OPENERS = {
    "train": ("Please", "Can you", "Could you", "Hi, please", "Hello, could you", "Hi, I need you to"),
    "heldout": ("Hello, please", "Hi, can you", "Hi, could you", "I need you to"),
}
CLOSERS = {
    "train": (" today", " for me", " right now", ", thank you", " if you can", " as soon as you can"),
    "heldout": (" for me today", " now if you can", ", thank you for now"),
}
JOINERS = {
    "train": (" and then ", ", then ", ", and after that "),
    "heldout": (", and then ", ", after that "),
}


def sentence(requests: Sequence[str], rng: random.Random, split: str) -> str:
    """Make one sentence of one or two requests."""
    if len(requests) == 1:
        return rng.choice(_fitting(requests[0], split)) + "."
    return f"{rng.choice(OPENERS[split])} {rng.choice(JOINERS[split]).join(requests)}."


def _fitting(request: str, split: str) -> list[str]:
    """List the sentences about a request that have a fitting length; all of them if none has."""
    # A request that ends in a reason ("..., I lost it") takes no closing phrase.
    closers = ("",) if "," in request else ("", *CLOSERS[split])
    every = [f"{opener} {request}{closer}" for opener in OPENERS[split] for closer in closers]
    fitting = [text for text in every if MIN_WORDS <= len(text.split()) <= MAX_WORDS]
    return fitting or every
