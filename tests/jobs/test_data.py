"""`envace data`: what it says of a file, to people and to programs, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from envace.cli.app import app
from envace.errors import ConfigError, DataError
from envace.jobs.data import check_data, convert_data
from envace.scenarios.datasets import load_dataset

CM2 = Path(__file__).parents[1] / "data" / "cm2_row.json"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """The published row, one without tools, five without a checklist, and one that is mended."""
    row = json.loads(CM2.read_text(encoding="utf-8"))[0]
    bare = {key: value for key, value in row.items() if key != "checklists"}
    mended = {**row, "uuid": "mended", "tools": [{"type": "function", "function": {"name": "ping"}}]}
    listed = [
        row,
        {**row, "uuid": "no-tools\x1b[31m", "tools": []},
        *({**bare, "uuid": f"b{n}"} for n in range(5)),
        mended,
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in listed), encoding="utf-8")
    return path


def test_check_counts_every_row(rows: Path) -> None:
    result = check_data(rows)
    assert (result["rows"], result["kept"], result["mended"]) == (8, 2, 1)
    assert result["dropped"] == {"no_checklist": 5, "no_tools": 1}
    shown = [(one["reason"], one["row"]) for one in result["examples"]]
    assert shown == [("no_checklist", 2), ("no_checklist", 3), ("no_checklist", 4), ("no_tools", 1), ("mended", None)]
    assert result["turns"] == {"min": 3, "mean": 3.0, "median": 3, "max": 3}
    assert result["items"]["mean"] == 14.0
    # 2 steps x 6 items, then 1 x 4 and 1 x 4.
    assert result["judge_calls"]["turn"]["max"] == 3
    assert result["judge_calls"]["item"]["max"] == 20


def test_check_counts_prompts_with_a_models_tokenizer(rows: Path) -> None:
    tokens = check_data(rows, model="starter", max_prompt=100)["prompt_tokens"]
    assert tokens["over"] == sum(length > 100 for length in (tokens["min"], tokens["max"]))
    assert 50 < tokens["min"] < tokens["max"] < 1000
    assert check_data(rows, model="starter")["prompt_tokens"]["over"] is None
    with pytest.raises(ConfigError, match="needs --model"):
        check_data(rows, max_prompt=100)


def test_convert_writes_what_can_be_used(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    result = convert_data(rows, out)
    assert (result["kept"], result["written"]) == (2, str(out))
    assert load_dataset(out).scenarios == load_dataset(rows).scenarios
    with pytest.raises(DataError, match="there already"):
        convert_data(rows, out)
    with pytest.raises(DataError, match="ends in none of"):
        convert_data(rows, tmp_path / "out.csv")


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["data", *map(str, arguments)])


def test_the_verb_prints_a_table_or_json(rows: Path) -> None:
    shown = run("check", rows)
    assert shown.exit_code == 0
    assert "dropped: no_checklist" in shown.stdout
    assert "\x1b[31m" not in shown.stdout  # of a row's own id
    assert json.loads(run("check", rows, "--json").stdout)["kept"] == 2


def test_the_exit_code_is_1_when_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n[]\n", encoding="utf-8")
    assert run("check", path).exit_code == 1
    result = run("convert", path, tmp_path / "out.jsonl", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["written"] is None
    assert not (tmp_path / "out.jsonl").exists()
