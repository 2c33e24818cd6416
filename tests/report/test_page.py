import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from envace.errors import RunError
from envace.report import report

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>$\\frac{</pre></style>"


class Tags(HTMLParser):
    """Collects what a browser would take for elements, and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def page_of(*runs: Path) -> str:
    return report(list(runs)).read_text(encoding="utf-8")


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file, or every line of a JSON lines file."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        return
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def poison(value: Any) -> Any:
    """The same structure with hostile keys and texts, but for the words that give a record its place."""
    if isinstance(value, dict):
        kept = {"kind", "role", "learn", "consistency", "verdict"}
        return {
            (key if key in KNOWN else key + HOSTILE): (item if key in kept and isinstance(item, str) else poison(item))
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [poison(item) for item in value]
    return value + HOSTILE if isinstance(value, str) else value


# fmt: off
KNOWN = {
    "kind", "update", "scenario_id", "environment_id", "instruction", "reply", "feasible_real", "exchanges",
    "call", "name", "arguments", "rehearsed", "rehearsed_text", "real", "consistency", "determined",
    "success", "response", "checks", "id", "question", "verdict", "group", "index", "reward", "parts",
    "stop", "error", "segments", "text", "role", "learn", "author", "ids", "warm_up", "trained", "by_domain",
    "by_kind", "stops", "fidelity", "ci", "n", "packages", "revision", "python", "platform", "seed", "arm",
    "model",
}
# fmt: on


def test_a_page_stands_alone(run: Path):
    page = page_of(run)

    tags = Tags(page)
    assert not {"script", "link", "iframe", "object", "base"} & set(tags.tags)
    assert not [value for name, value in tags.attributes if name in ("src", "href") and not value.startswith("#")]
    assert not re.findall(r"url\((?!#)|@import", page)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]


def test_it_shows_both_ends_and_the_real_calls(run: Path):
    page = page_of(run)

    assert "41.0 % after the warm-up, 83.0 % after training, with 0 real calls in training" in page
    assert "79.3–86.7, n\xa0=\xa0400" in page
    assert "Unseen domain" in page
    assert page.count("<figure>") == 13


@pytest.mark.parametrize("name", ["trajectories.jsonl", "results.json", "config.json", "env.json", "metrics.jsonl"])
def test_hostile_text_stays_text(run: Path, name: str):
    clean = Tags(page_of(run)).tags

    def change(record: dict[str, Any]) -> None:
        hostile = poison(record)
        record.clear()
        record.update(hostile)
        if record.get("kind") == "update":
            record[f"part/{HOSTILE}"] = 0.5

    edit(run / name, change)
    page = page_of(run)

    tags = Tags(page)
    assert "alert(1)" in page
    assert not {"script", "img"} & set(tags.tags)
    assert not [name for name, _ in tags.attributes if name.startswith("on")]
    assert set(tags.tags) <= set(clean)


def test_a_script_in_a_tool_answer_can_be_read(run: Path):
    def change(record: dict[str, Any]) -> None:
        if record["kind"] == "rehearsal" and record["exchanges"]:
            record["exchanges"][0]["real"] = {"note": "<script>x</script>"}

    edit(run / "trajectories.jsonl", change)

    assert "&lt;script&gt;x&lt;/script&gt;" in page_of(run)


def test_what_no_file_can_hold_does_not_stop_the_page(run: Path):
    # Half a surrogate pair is valid JSON, but no UTF-8.
    edit(run / "trajectories.jsonl", lambda record: record.update(reply="\ud800 end", instruction="\ud800"))

    assert "? end" in page_of(run)


def test_an_unfinished_run_says_what_is_missing(run: Path):
    (run / "results.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["update"] <= 12))

    page = page_of(run)

    assert "12 of 40 updates are logged" in page
    assert "There is no results.json yet" in page
    assert "0 up to update 12" in page
    assert "0.0 %" not in page


def test_a_bare_folder_makes_a_page(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")

    page = page_of(tmp_path)

    assert "No update is logged" in page
    assert "Not logged: Real success," in page
    assert "No rehearsal is recorded" in page
    assert "<figure>" not in page
    assert not re.search(r"\b0(\.0)? %", page)


def test_what_was_not_measured_is_no_zero(run: Path):
    def change(results: dict[str, Any]) -> None:
        results["trained"] = None
        results["warm_up"] |= {"success": None, "fidelity": None, "unseen": {"success": None, "n": 0, "ci": [0, 1]}}
        results["real_calls_in_training"] = results["seconds"] = None

    edit(run / "results.json", change)
    page = page_of(run)

    assert "Not measured: success of the warm-up, fidelity of the warm-up, unseen domain of the warm-up" in page
    assert "success after training" in page
    assert "0.0 %" not in page


@pytest.mark.parametrize("junk", [None, 3, "x", [], {}, [1, None, "x"], float("nan"), 10**400, True])
def test_junk_in_place_of_a_value_does_not_stop_the_page(run: Path, junk: Any):
    places = {"warm_up", "trained", "feasible_share", "success", "ci", "exchanges", "real", "segments", "packages"}
    places |= {"revision", "parts", "index", "group", "seconds", "reply"}

    def change(record: dict[str, Any]) -> None:
        record.update(dict.fromkeys(places & set(record), junk))

    for name in ("results.json", "metrics.jsonl", "trajectories.jsonl", "env.json"):
        edit(run / name, change)

    assert "Before and after" in page_of(run)


def test_a_torn_last_line_is_left_out_and_named(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "update", "update": 41, "rew')

    assert "The last line of metrics.jsonl was cut off and is left out." in page_of(run)


def test_a_line_torn_within_a_character_is_a_torn_line(run: Path):
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write('{"kind": "train", "reply": "caf\u00e9'.encode()[:-1])

    assert "The last line of trajectories.jsonl was cut off" in page_of(run)


@pytest.mark.parametrize("damage", ['{"kind": "upd', "17", '"text"'])
def test_a_damaged_line_is_named(run: Path, damage: str):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[4] = damage
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    with pytest.raises(RunError, match=r"metrics\.jsonl:5 is not"):
        report([run])
    assert not (run / "report.html").exists()


def test_bytes_that_are_no_text_are_named(run: Path):
    file = run / "trajectories.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"\xff\xfe\n" + b"".join(rest))

    with pytest.raises(RunError, match=r"trajectories\.jsonl:\d+ is not UTF-8"):
        report([run])


def test_several_runs_are_compared(make_run: Callable[..., Path]):
    runs = [make_run(f"demo/seed-{seed}", seed=seed) for seed in range(3)]

    path = report(runs)
    page = path.read_text(encoding="utf-8")

    assert path == runs[0].parent / "comparison.html"
    # 83, 84 and 85 %.
    assert "mean of 3" in page
    assert "84.0 %" in page
    assert "83.0\xa0to\xa085.0" in page
    assert all(page.count(f"seed-{seed}") > 5 for seed in range(3))
    assert page.count("<figure>") == 13


def test_runs_of_one_name_are_told_apart(make_run: Callable[..., Path]):
    page = page_of(make_run("a/run"), make_run("b/run", seed=1))

    assert "a/run" in page
    assert "b/run" in page


def test_a_run_named_twice_is_one_run(run: Path):
    assert report([run, run]) == run / "report.html"


def test_the_page_goes_where_it_is_told(run: Path, tmp_path: Path):
    assert report([run], out=tmp_path / "new" / "page.html").exists()
    assert report([run], out=tmp_path) == tmp_path / "report.html"


def test_a_place_that_cannot_be_written_is_a_run_error(run: Path):
    with pytest.raises(RunError, match="cannot write"):
        report([run], out=run / "config.json" / "page.html")


def test_no_run_and_no_run_folder_are_run_errors(tmp_path: Path):
    with pytest.raises(RunError, match="at least one"):
        report([])
    with pytest.raises(RunError, match="not a run folder"):
        report([tmp_path])


def test_a_page_is_a_function_of_its_folder(run: Path):
    assert page_of(run) == page_of(run)
