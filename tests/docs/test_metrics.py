"""Every number that a run writes is defined in docs/metrics.md, and nothing is defined there that no code writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envace.fidelity import fidelity_scores
from envace.jobs.audit import audit
from envace.jobs.data import check_data, convert_data
from envace.jobs.demo import demo
from envace.report.plots import PANELS
from envace.rewards import WEIGHTS
from envace.runs import RunFolder
from envace.types import Role, StopReason

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
NAMED = ("by_domain", "by_kind", "stops")
"""Sections whose keys are names of environments, kinds and stop reasons."""
TINY = (
    "threads=1",
    "sft.steps=2",
    "sft.demonstrations=12",
    "sft.batch_size=4",
    "updates=2",
    "scenarios_per_update=2",
    "group_size=2",
    "eval.every=1",
    "eval.scenarios=2",
    "eval.fidelity=2",
    "data.train=4",
    "data.heldout=3",
    "data.unseen=1",
    "limits.max_steps=2",
    "limits.max_step_tokens=8",
)


def documented() -> set[str]:
    """Names in the first column of the page's tables."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def keys(value: Any) -> Iterator[str]:
    """All keys of nested objects, but those that are names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from (keys(list(inner.values())) if key in NAMED else keys(inner))
    elif isinstance(value, list):
        for item in value:
            yield from keys(item)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records and results of a tiny but whole run: a fresh policy, warm-up, training, evaluations, report."""
    out = tmp_path_factory.mktemp("run")
    result = demo(out=out, from_scratch=True, overrides=TINY)
    folder, warm_up = RunFolder.open(out / "envace"), RunFolder.open(out / "warm-up")
    assert [record["update"] for record in folder.metrics("update")] == [1, 2]
    assert warm_up.metrics("sft")
    assert folder.metrics("eval")
    return [*folder.metrics(), *warm_up.metrics(), folder.results(), json.loads(json.dumps(result))]


def test_every_key_that_a_run_writes_is_defined(written: list[dict[str, Any]]) -> None:
    assert set(keys(written)) - documented() == set()


def test_keys_that_a_tiny_run_may_lack_are_defined() -> None:
    # Two untrained updates need not reach every role, part and stop.
    roles = {f"{name}/{role.value}" for role in Role for name in ("entropy", "tokens", "tokens_per_trajectory")}
    others = {f"part/{name}" for name in WEIGHTS} | {f"stop/{reason.value}" for reason in StopReason}
    assert (roles | others | set(fidelity_scores([]))) - documented() == set()


def test_outputs_of_the_other_verbs_are_defined() -> None:
    assert set(keys(audit("starter", count=1))) - documented() == set()
    for verb in ("train", "sft"):
        source = (ROOT / "envace" / "jobs" / f"{verb}.py").read_text(encoding="utf-8")
        summary = source.split("def train_summary")[-1]  # where there is none, all of it
        returned = re.findall(r'^        "(\w+)":', summary, re.MULTILINE)
        assert len(returned) > 4
        assert set(returned) - documented() == set()


def test_outputs_of_data_are_defined(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("7\n", encoding="utf-8")
    row = ROOT / "tests" / "data" / "cm2_row.json"
    checked = [check_data(row, model="starter", max_prompt=9), check_data(tmp_path / "bad.jsonl")]
    written = [*checked, convert_data(row, tmp_path / "rows.jsonl")]
    assert checked[1].pop("dropped") == {"unreadable": 1}
    names = set(keys(written)) - documented()
    section = PAGE.split("### envace data")[1].split("\n`eval`")[0]
    assert [name for name in names if f"`{name}`" not in section] == []


def test_every_plotted_metric_is_defined() -> None:
    for name in (name for panel in PANELS for name in panel.names):
        assert any(known.startswith(name) if name.endswith("/") else known == name for known in documented())


def test_every_defined_name_is_written_by_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "envace").rglob("*.py"))
    for name in documented():
        stem, _, leaf = name.rpartition("/")
        assert re.search(rf'["\'](?:{re.escape(name)}["\']|{re.escape(stem)}/\{{)|\b{leaf}\b', code), name
        assert not stem or f"{stem}/" in code or f"{stem}_" in code, name
