"""Demonstrations: recorded calls, responses and replies, as supervised rows for both roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envace.models.formats import StarterFormat
from envace.sandbox import Worker
from envace.scenarios import EnvironmentSpec, Expected, Scenario
from envace.scenarios.packages import dump_line
from envace.scenarios.schema import Call

BATCH = 500
"""Demonstrations a request to the worker."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRow:
    """Ids of one demonstration and which of them are learned. Shapes (T,)."""

    ids: NDArray[np.int64]
    learn: NDArray[np.bool_]


async def demonstrate(
    worker: Worker, environment: str, items: Sequence[dict[str, Any]], *, carelessness: float, seed: int
) -> list[dict[str, Any]]:
    """Run an environment's oracle program on `items` (`state`, `goal`), slipping with a given chance a decision."""
    results: list[dict[str, Any]] = []
    for start in range(0, len(items), BATCH):
        batch = [
            {
                "state": item["state"],
                "goal": item["goal"],
                "seed": seed * 1_000_003 + start + n,
                "carelessness": carelessness,
            }
            for n, item in enumerate(items[start : start + BATCH])
        ]
        results += await worker.ask("demonstrate", environment=environment, items=batch, seconds=60.0)
    return results


def expected_of(demonstration: dict[str, Any]) -> Expected:
    """What a scenario expects, from a demonstration of the oracle in it."""
    return Expected(
        outcome=demonstration["outcome"],
        reply=demonstration["reply"],
        facts=tuple(demonstration["facts"]),
        calls=tuple(Call(**call) for call in demonstration["calls"]),
        final_state=demonstration["final_state"],
    )


def supervised_row(
    format: StarterFormat, spec: EnvironmentSpec, scenario: Scenario, demonstration: dict[str, Any]
) -> SupervisedRow:
    """One row: acting steps and responses are learned, headers and prompt are not."""
    parts: list[tuple[list[int], bool]] = [(format.open(spec.tools, scenario.instruction), False)]
    for call in demonstration["calls"]:
        parts += [
            (format.call(call["name"], dump_line(call["arguments"])), True),
            (format.tool_header(), False),
            (format.response(dump_line(call["response"])), True),
            (format.act_header(), False),
        ]
    parts.append((format.reply(demonstration["reply"]), True))
    return SupervisedRow(
        ids=np.array([token for ids, _ in parts for token in ids], dtype=np.int64),
        learn=np.array([learn for ids, learn in parts for _ in ids], dtype=np.bool_),
    )
