"""Calls of the judge on recorded conversations: one a turn against one a (step, item), the released code's way.

Both modes judge the same conversations in one run, through HTTP to a judge on 127.0.0.1 that answers by a rule, so what
is compared is the number of calls and the text they carry, not anybody's model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from envace.jobs.data import recorded
from envace.jobs.judges import open_judge
from envace.rewards.checklists import checklist_reward
from envace.rewards.judge import Judge, JudgeSection
from envace.rewards.verdicts import checklist_verdicts
from envace.scenarios import opening
from envace.scenarios.datasets import Dataset, load_dataset

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))  # the server is that of the tests, which are no package

from support.loopback import Asked, Loopback, Reply  # noqa: E402

SAMPLE = TESTS / "data" / "cm2_row.json"


class Counting:
    """A judge that passes everything, and counts the characters it is asked with."""

    def __init__(self) -> None:
        self.characters = 0

    def __call__(self, asked: Asked) -> Reply:
        """All ids of the prompt's questions pass."""
        prompt = asked.json["messages"][0]["content"]
        self.characters += len(prompt)
        lines = (
            json.loads(line) for line in prompt.splitlines() if line.startswith('{"id": ') and '"question"' in line
        )
        found = [{"id": line["id"], "reason": "", "verdict": "pass"} for line in lines]
        message = {"role": "assistant", "content": json.dumps({"verdicts": found})}
        return Reply({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


def judge(arguments: Sequence[str] = ()) -> None:
    """Judge a data file's recorded conversations in both modes; by default the row that the tests hold."""
    dataset = load_dataset(arguments[0] if arguments else SAMPLE)
    found = {mode: asyncio.run(_mode(dataset, mode)) for mode in ("turn", "item")}
    print(f"{'mode':<6}{'calls':>8}{'characters':>12}{'mean reward':>13}")
    for mode, counted in found.items():
        print(f"{mode:<6}{counted['calls']:>8}{counted['characters']:>12}{counted['reward']:>13.3f}")
    ratio = round(found["item"]["calls"] / found["turn"]["calls"], 2)
    print(json.dumps({"bench": "judge", "conversations": len(dataset.scenarios), **found, "fewer_calls": ratio}))


async def _mode(dataset: Dataset, mode: Literal["turn", "item"]) -> dict[str, Any]:
    server, answers = Loopback(), Counting()
    await server.start()
    server.answers(answers)
    section = JudgeSection(model=f"{server.url}#rule", mode=mode)
    try:
        async with open_judge(section) as opened:
            rewards = [await _reward(opened, dataset, number) for number in range(len(dataset.scenarios))]
    finally:
        await server.stop()
    known = [reward for reward in rewards if reward is not None]
    mean = sum(known) / len(known) if known else float("nan")
    return {"calls": opened.counters.calls, "characters": answers.characters, "reward": mean}


async def _reward(opened: Judge, dataset: Dataset, number: int) -> float | None:
    scenario = dataset.scenarios[number]
    assert scenario.checklist is not None
    spec = dataset.specs[scenario.id]
    records = await checklist_verdicts(
        opened, scenario.checklist, recorded(scenario), opening=opening(spec, scenario), tools=spec.tools
    )
    return checklist_reward(scenario.checklist, records, reached=scenario.checklist.turns)
