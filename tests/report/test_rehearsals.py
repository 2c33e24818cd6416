import json
from pathlib import Path
from typing import Any

import pytest

from envace.report.rehearsals import compare, pick, rehearsal_views, trajectory_views

ORDER = {"id": "#W1", "status": "pending"}


def marks(rehearsed: Any, real: Any, *, determined: bool) -> dict[str, str]:
    return {line.key: line.mark for line in compare(rehearsed, real, determined=determined)}


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "trajectories.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_only_a_value_that_could_be_known_is_wrong():
    other = {**ORDER, "status": "shipped"}

    assert marks(ORDER, other, determined=True) == {"id": "same", "status": "wrong"}
    assert marks(ORDER, other, determined=False) == {"id": "same", "status": "open"}


def test_the_keys_of_a_record_can_always_be_known():
    assert marks({"id": "#W1", "note": 1}, ORDER, determined=False) == {
        "id": "same",
        "status": "wrong",
        "note": "wrong",
    }


def test_whether_a_record_exists_may_be_unknown():
    assert set(marks({"error": "not_found"}, ORDER, determined=False).values()) == {"open"}
    assert set(marks({"error": "not_found"}, ORDER, determined=True).values()) == {"wrong"}


def test_rows_of_a_list_are_compared_one_by_one():
    assert marks([ORDER, ORDER], [ORDER], determined=True) == {
        "1. id": "same",
        "1. status": "same",
        "2. id": "wrong",
        "2. status": "wrong",
    }
    assert marks([], [], determined=True) == {"": "same"}


@pytest.mark.parametrize(("left", "right"), [(1, 1.0), (True, 1), ("1", 1), (None, "null")])
def test_values_of_different_types_differ(left: Any, right: Any):
    assert marks({"v": left}, {"v": right}, determined=True) == {"v": "wrong"}


def test_an_answer_that_is_no_json_is_wrong_and_shown():
    record = {
        "exchanges": [{"call": {}, "rehearsed": None, "rehearsed_text": '{"id', "real": ORDER, "determined": False}]
    }
    (view,) = rehearsal_views([record], run="r")

    assert view.faulty
    assert view.exchanges[0].lines[0].rehearsed == '{"id'


def test_without_a_real_answer_nothing_is_compared():
    (view,) = rehearsal_views([{"exchanges": [{"rehearsed": ORDER}]}], run="r")

    assert {line.mark for line in view.exchanges[0].lines} == {"unknown"}
    assert not view.faulty


def test_an_inconsistent_answer_is_faulty_though_it_could_not_be_known():
    exchange = {"rehearsed": ORDER, "real": ORDER, "determined": False, "consistency": "inconsistent"}
    (view,) = rehearsal_views([{"exchanges": [exchange]}], run="r")

    assert view.exchanges[0].mark == "wrong"


def test_the_three_shown_differ(run: Path):
    views = rehearsal_views(records(run, "rehearsal"), run="r")

    # The last is done as well, and is passed over for one that is declined and one that is wrong.
    assert [view.scenario for view in pick([views[3], *views])] == [
        "retail-heldout-21",
        "retail-heldout-9",
        "retail-heldout-17",
    ]
    assert len(pick(views[:1])) == 1
    assert pick([]) == []


def test_text_is_coloured_by_who_wrote_it(run: Path):
    first, second, failed = trajectory_views(records(run, "train"))

    assert [span.style for span in first.spans][:4] == ["given", "act", "given", "rehearse"]
    assert first.spans[3].anchored
    assert [span.style for span in second.spans][:4] == ["given", "act", "given", "handed"]
    assert failed.reward == "not scored"
    assert failed.stop == "infrastructure: WorkerDied: the worker ended with -9"


def test_long_texts_are_cut_and_say_so():
    (view,) = rehearsal_views([{"reply": "x" * 1000, "exchanges": [{"rehearsed": "y" * 1000, "real": "z"}]}], run="r")

    assert view.reply.endswith("… (400 more characters)")
    assert len(view.exchanges[0].lines[0].rehearsed) < 700
