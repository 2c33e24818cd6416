"""The parts that every reward is made of, and their weights. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from envace.types import ToolCall

WEIGHTS: dict[str, float] = {"calls": 0.2, "state": 0.15, "outcome": 0.2, "answer": 0.3, "consistent": 0.15}
"""Weight of each part; parts that a reward does not have leave the rest to share theirs.

The values are those of the small-scale study that the starter world comes from; `answer` weighs most since it needs
the others.
"""


def combine(parts: Mapping[str, float], weights: Mapping[str, float] = WEIGHTS) -> float:
    """Weighted mean of the parts there are, in [0, 1]."""
    total = sum(weights[name] for name in parts)
    return sum(weights[name] * value for name, value in parts.items()) / total


def call_overlap(made: Iterable[ToolCall], expected: Iterable[Mapping[str, Any]]) -> float:
    """F1 of the calls made against the expected ones, as multisets; 1 when both are empty."""
    ours = Counter(call.key() for call in made)
    theirs = Counter(ToolCall(name=call["name"], arguments=dict(call["arguments"])).key() for call in expected)
    size = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / size if size else 1.0
