import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from envace.report import comparison_table, results_table
from envace.report.tables import Outcome, breakdowns, result_rows


def results(path: Path) -> dict[str, Any]:
    return json.loads((path / "results.json").read_text())


def printed(table: Any) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def outcome(success: float | None, *, label: str, recipe: str = "") -> Outcome:
    trained = {"success": success, "n": 10, "do": None, "decline": 0.0}
    return Outcome(label=label, recipe=recipe, results={"trained": trained})


def test_a_terminal_gets_both_rows(run: Path):
    text = printed(results_table(results(run)))

    assert "Warm-up" in text
    assert "83.0 %" in text
    assert "n\xa0=\xa0400" in text


def test_names_are_no_markup():
    text = printed(comparison_table([outcome(0.5, label="[bold]a[/]"), outcome(0.7, label="[/nope]")]))

    assert "[bold]a[/]" in text
    assert "[/nope]" in text


def test_missing_is_a_dash_and_zero_is_zero():
    (warm_up, trained) = result_rows([outcome(None, label="a")])

    assert {cell.text for cell in warm_up.cells} == {"—"}
    assert [cell.text for cell in trained.cells] == ["—", "—", "0.0 %", "—", "—", "—"]
    assert "—" in printed(results_table({}))


def test_a_mean_is_over_what_was_measured():
    rows = result_rows([outcome(0.2, label="a"), outcome(0.6, label="b"), outcome(None, label="c")])

    (mean,) = [row for row in rows if row.mean]
    # (0.2 + 0.6) / 2; the third is not a 0.
    assert mean.cells[0].text == "40.0 %"
    assert mean.cells[0].detail == "20.0\xa0to\xa060.0, 2 of 3 runs"


def test_only_runs_of_one_recipe_are_averaged():
    rows = result_rows([outcome(s, label=r, recipe=r) for s, r in ((0.2, "envace"), (0.6, "published"))])

    assert not [row for row in rows if row.mean]


def test_equal_results_share_a_row():
    rows = result_rows([outcome(0.5, label="a"), outcome(0.5, label="b")])

    assert [row.run for row in rows if row.stage == "Trained"] == ["all runs"]


def test_stops_that_one_stage_never_met_are_a_counted_zero():
    stages = {"warm_up": {"stops": {"replied": 9, "parse": 1}}, "trained": {"stops": {"replied": 10}}}
    (table,) = breakdowns(stages)

    assert [name for name, _ in table.rows] == ["parse", "replied"]
    assert [cell.text for cell in table.rows[0][1]] == ["1", "0"]
