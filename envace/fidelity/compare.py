"""Comparing a rehearsed response with the real one. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from envace.types import ToolCall, is_error


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A recorded call with its real response, and what came before it."""

    call: ToolCall
    real: Any
    determined: bool
    """Whether the response follows from the history and the tools' rules; else its values cannot be known."""
    after_change: bool
    """Whether a call before it changed the state."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A probe and what a policy rehearsed for it."""

    probe: Probe
    rehearsed: Any
    readable: bool
    """Whether the rehearsed text was JSON."""


def error_class(response: Any) -> str | None:
    """The error that a response reports; None for a response that is no error."""
    return str(response.get("error", "unsuccessful")) if is_error(response) else None


def shape(response: Any) -> Any:
    """The keys of a response, with those of its first element for a list."""
    if isinstance(response, dict):
        return sorted(response)
    if isinstance(response, list):
        return ["list", shape(response[0]) if response else None]
    return type(response).__name__


def fidelity_scores(comparisons: Sequence[Comparison]) -> dict[str, float | int | None]:
    """Shares in [0, 1] over the comparisons each speaks of; None where there is none.

    `error_class`: same error, or no error in both, where the response is determined. `error_recall`: of real errors
    that are determined, how many were rehearsed as the same error. `false_alarms`: of determined real successes, how
    many were rehearsed as an error. `keys`: same keys, where neither is an error. `values`: equal, where determined.
    `state`: equal, where determined and after a change of state.
    """
    determined = [c for c in comparisons if c.probe.determined]
    errors = [c for c in determined if error_class(c.probe.real) is not None]
    successes = [c for c in determined if error_class(c.probe.real) is None]
    answered = [c for c in comparisons if error_class(c.probe.real) is None and error_class(c.rehearsed) is None]
    return {
        "error_class": _share([_same_error(c) for c in determined]),
        "error_recall": _share([_same_error(c) for c in errors]),
        "false_alarms": _share([error_class(c.rehearsed) is not None for c in successes]),
        "keys": _share([c.readable and shape(c.rehearsed) == shape(c.probe.real) for c in answered]),
        "values": _share([_equal(c) for c in determined]),
        "state": _share([_equal(c) for c in determined if c.probe.after_change]),
        "n": len(comparisons),
        "n_determined": len(determined),
    }


def _same_error(comparison: Comparison) -> bool:
    return comparison.readable and error_class(comparison.rehearsed) == error_class(comparison.probe.real)


def _equal(comparison: Comparison) -> bool:
    rehearsed, real = (json.dumps(v, sort_keys=True) for v in (comparison.rehearsed, comparison.probe.real))
    return comparison.readable and rehearsed == real


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
