"""`envace data`: what of a data set can be used, and why the rest cannot; and the same rows in our own form."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envace.errors import ConfigError, DataError
from envace.jobs.endpoints import tokenizer_format
from envace.jobs.models import resolve
from envace.rewards.checklists import turns_of
from envace.scenarios import Scenario, opening
from envace.scenarios.conversations import read_messages
from envace.scenarios.datasets import Dataset, drop_counts, load_dataset, write_rows
from envace.types import Author, Message

EXAMPLES = 3
"""Dropped rows of each reason that are shown."""


def check_data(
    source: str | Path,
    *,
    model: str | None = None,
    max_prompt: int | None = None,
    normalise: bool = False,
    sft: bool = False,
) -> dict[str, Any]:
    """Load a data set and say what is in it.

    Args:
        source: A .json, .jsonl or .parquet file, a folder of them, or `hub:owner/name[/split]`.
        model: Whose tokenizer counts prompts: `starter`, a model folder, or a hub name.
        max_prompt: Tokens that a prompt may have.
        normalise: Scale the weights of a turn instead of leaving the row out.
        sft: Rows are to be imitated, and need no checklist.

    Returns:
        `rows`, `kept`, `mended`, `dropped` by reason, `examples` of dropped and mended rows, distributions of `turns`,
        `tools` and `items` a row, `judge_calls` a trajectory like the recorded ones, and `prompt_tokens`.

    Raises:
        ConfigError: A limit without a model whose tokens it counts.
        DataError: The source cannot be read as a whole.
        ModelError: The model's tokenizer cannot be loaded.
    """
    if max_prompt is not None and model is None:
        raise ConfigError("--max-prompt counts tokens, so it needs --model, whose tokenizer makes them.")
    dataset = load_dataset(source, normalise=normalise, require_checklist=not sft)
    result = {
        "source": str(source),
        "rows": dataset.rows,
        "kept": len(dataset.scenarios),
        "mended": len(dataset.mended),
        "dropped": drop_counts(dataset),
        "examples": _examples(dataset),
        **_distributions(dataset),
        "judge_calls": _judge_calls(dataset.scenarios),
    }
    if model is not None:
        result["prompt_tokens"] = _prompts(dataset, model, max_prompt)
    return result


def convert_data(source: str | Path, out: Path, *, normalise: bool = False, sft: bool = False) -> dict[str, Any]:
    """Write what can be used of a data set in our own form.

    Args:
        source: As for `check_data`.
        out: A .jsonl or .parquet file; one that is there is not written over.
        normalise: As for `check_data`.
        sft: As for `check_data`.

    Returns:
        `rows`, `kept`, `mended`, `dropped` by reason, and `written`, the file; null where nothing could be used, and
        nothing was written.

    Raises:
        DataError: The source cannot be read, or the file not be written.
    """
    if out.exists():
        raise DataError(f"{out} is there already; name another file, or remove it.")
    dataset = load_dataset(source, normalise=normalise, require_checklist=not sft)
    if dataset.scenarios:
        write_rows(out, dataset)
    return {
        "source": str(source),
        "written": str(out) if dataset.scenarios else None,
        "rows": dataset.rows,
        "kept": len(dataset.scenarios),
        "mended": len(dataset.mended),
        "dropped": drop_counts(dataset),
        "examples": _examples(dataset),
    }


def _examples(dataset: Dataset) -> list[dict[str, Any]]:
    """The first few rows of each reason, and of the mended."""
    shown: list[dict[str, Any]] = []
    for reason in drop_counts(dataset):
        rows = [dropped for dropped in dataset.dropped if dropped.reason == reason]
        shown += [{"row": d.row, "id": d.id, "reason": reason, "detail": d.detail} for d in rows[:EXAMPLES]]
    mended = list(dataset.mended.items())[:EXAMPLES]
    return shown + [{"row": None, "id": name, "reason": "mended", "detail": detail} for name, detail in mended]


def _distributions(dataset: Dataset) -> dict[str, Any]:
    scenarios = dataset.scenarios
    items = [
        sum(len(turn) for turn in variant)
        for scenario in scenarios
        if scenario.checklist is not None
        for variant in scenario.checklist.variants
    ]
    return {
        "turns": _spread([1 + len(scenario.turns) for scenario in scenarios]),
        "tools": _spread([len(dataset.specs[scenario.id].tools) for scenario in scenarios]),
        "items": _spread(items),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """Least, mean, median and greatest; None of nothing."""
    if not values:
        return None
    mean = round(statistics.fmean(values), 2)
    return {"min": min(values), "mean": mean, "median": statistics.median(values), "max": max(values)}


def _judge_calls(scenarios: Sequence[Scenario]) -> dict[str, Any] | None:
    """Calls that judging the recorded conversations would take at most, by mode; rows without a recording excluded."""
    counted = [calls for scenario in scenarios if (calls := judge_calls(scenario)) is not None]
    if not counted:
        return None
    return {"turn": _spread([turn for turn, _ in counted]), "item": _spread([item for _, item in counted])}


def judge_calls(scenario: Scenario) -> tuple[int, int] | None:
    """Calls at most for the recorded conversation, one a turn and one a (step, item); None without a recording."""
    if scenario.checklist is None or not scenario.reference:
        return None
    turns = turns_of(recorded(scenario))
    steps = [sum(message.author is Author.ASSISTANT for message in turn) for turn in turns]
    judged = [[sum(item.judged for item in turn) for turn in variant] for variant in scenario.checklist.variants]
    per_turn = sum(bool(count and step) for counts in judged for count, step in zip(counts, steps, strict=False))
    return per_turn, sum(count * step for counts in judged for count, step in zip(counts, steps, strict=False))


def recorded(scenario: Scenario) -> list[Message]:
    """What was said in the recorded conversation after its opening, as a trajectory's messages."""
    messages = read_messages(scenario.reference)
    first = next((number for number, m in enumerate(messages) if m.author is Author.USER), len(messages) - 1)
    return messages[first + 1 :]


def _prompts(dataset: Dataset, model: str, limit: int | None) -> dict[str, Any]:
    """Tokens of the opening prompts, tools included, and how many are longer than the limit."""
    form = tokenizer_format(str(resolve(model)))
    specs = dataset.specs
    lengths = [len(form.open(specs[s.id].tools, opening(specs[s.id], s))) for s in dataset.scenarios]
    over = None if limit is None else sum(length > limit for length in lengths)
    return {"model": model, "limit": limit, "over": over, **(_spread(lengths) or {})}
