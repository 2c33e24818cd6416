"""The run folder: what was written stays readable, whatever ends the process or fills the disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from envace.errors import RunError
from envace.runs import RunFolder, append_lines, environment_facts, read_lines, truncate_lines
from envace.runs.folder import data_hash

ONE, TWO, THREE = {"update": 1, "x": "é"}, {"update": 2}, {"update": 3}


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    append_lines(path, [ONE, TWO])
    return path


def full_disk(*args: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_lines_come_back_in_order(lines: Path) -> None:
    append_lines(lines, [THREE])
    append_lines(lines, [])
    assert list(read_lines(lines)) == [ONE, TWO, THREE]
    assert list(read_lines(lines.with_name("nothing.jsonl"))) == []


@pytest.mark.parametrize("text", ["a\nb", "\u2028", "\x85", '"', "\ud800", "\x00"])
def test_any_text_is_written(lines: Path, text: str) -> None:
    # "\ud800" is half a surrogate pair, which a policy can write in JSON as six plain characters.
    append_lines(lines, [{"text": text}])
    assert list(read_lines(lines)) == [ONE, TWO, {"text": text}]


def test_a_torn_last_line_is_passed_over(lines: Path) -> None:
    whole = lines.read_bytes()
    append_lines(lines, [{"update": 3, "text": "a longer record"}])
    torn = lines.read_bytes()
    for size in range(len(whole), len(torn)):
        lines.write_bytes(torn[:size])
        assert list(read_lines(lines)) == [ONE, TWO]


def test_a_line_torn_inside_a_character_is_passed_over(lines: Path) -> None:
    whole = lines.read_bytes()
    lines.write_bytes(whole + '{"text": "é'.encode()[:-1])
    assert list(read_lines(lines)) == [ONE, TWO]


def test_what_is_appended_after_a_torn_line_is_whole(lines: Path) -> None:
    with lines.open("a") as file:
        file.write('{"update": 3, "te')
    append_lines(lines, [THREE])
    assert list(read_lines(lines)) == [ONE, TWO, THREE]


@pytest.mark.parametrize("damage", [b"{not json}\n", b"\n", b"[1]\n", b"3\n", b"null\n", b'{"a": "\xff"}\n'])
def test_a_damaged_line_in_the_middle_is_named(lines: Path, damage: bytes) -> None:
    first, second = lines.read_bytes().splitlines(keepends=True)
    lines.write_bytes(first + damage + second)
    with pytest.raises(RunError, match=r"metrics\.jsonl:2 "):
        list(read_lines(lines))


def test_a_full_disk_leaves_the_file_as_it_was(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(RunError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        append_lines(lines, [THREE])
    assert lines.read_bytes() == before
    monkeypatch.undo()
    append_lines(lines, [THREE])
    assert list(read_lines(lines)) == [ONE, TWO, THREE]


def test_a_disk_that_is_full_in_the_middle_of_a_record_leaves_the_file_as_it_was(lines: Path) -> None:
    # A real limit on the size of files, in a child process: half of the record fits.
    before = lines.read_bytes()
    child = os.fork()
    if not child:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 1000, -1))
        try:
            append_lines(lines, [{"text": "x" * 20_000}])
        except RunError:
            os._exit(17)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert lines.read_bytes() == before


def test_truncating_keeps_the_old_file_until_the_new_one_is_whole(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lines.read_bytes()
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises((RunError, OSError)):
        truncate_lines(lines, lambda record: False)
    assert lines.read_bytes() == before


def test_a_full_disk_while_truncating_is_a_run_error(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(RunError, match="No space left"):
        truncate_lines(lines, lambda record: False)


def test_truncating_drops_a_torn_end(lines: Path) -> None:
    with lines.open("a") as file:
        file.write('{"upd')
    truncate_lines(lines, lambda record: record["update"] < 2)
    assert lines.read_text() == json.dumps(ONE, ensure_ascii=False) + "\n"


# The folder


CONFIG: dict[str, Any] = {"updates": 3, "loss": {"kl": 0.1, "clip": 0.2}, "world": "starter"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "one", CONFIG, resume=False)


def test_a_new_run_explains_itself(run: RunFolder) -> None:
    assert run.config() == CONFIG
    facts = json.loads((run.path / "env.json").read_text())
    assert set(facts) == {"python", "platform", "packages", "revision", "inputs"}
    assert facts["packages"]["torch"] != "not installed"
    assert facts == {**environment_facts(), "inputs": {}}
    assert not list(run.path.glob("*.partial"))


def test_a_run_is_not_overwritten(run: RunFolder) -> None:
    with pytest.raises(RunError, match=r"already holds a run.*--resume"):
        RunFolder.create(run.path, CONFIG, resume=False)


def test_resuming_with_the_same_recipe_goes_on(run: RunFolder) -> None:
    run.log({"update": 1})
    again = RunFolder.create(run.path, dict(reversed(CONFIG.items())), resume=True)
    assert again.metrics() == [{"update": 1}]


def test_resuming_with_another_recipe_names_the_keys_that_differ(run: RunFolder) -> None:
    other = {**CONFIG, "loss": {"kl": 0.5, "clip": 0.2}, "seed": 1}
    with pytest.raises(RunError) as caught:
        RunFolder.create(run.path, other, resume=True)
    assert "loss.kl (0.1 there, 0.5 here)" in str(caught.value)
    assert "seed (None there, 1 here)" in str(caught.value)
    assert "clip" not in str(caught.value)
    assert run.config() == CONFIG


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"has no config\.json"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_config_is_named(run: RunFolder, text: str) -> None:
    run.config_file.write_text(text)
    with pytest.raises(RunError, match=r"config\.json"):
        run.config()
    with pytest.raises(RunError, match=r"config\.json"):
        RunFolder.create(run.path, CONFIG, resume=True)


def test_rewinding_forgets_what_came_after_the_checkpoint(run: RunFolder) -> None:
    for update in range(5):
        run.log({"kind": "update" if update else "eval", "update": update})
    run.log_trajectories([{"update": 1}, {"update": 4}])
    run.log({"kind": "eval", "update": 4})
    run.rewind(2)
    assert [record["update"] for record in run.metrics()] == [0, 1, 2]
    assert [record["update"] for record in run.trajectories()] == [1]
    assert run.metrics("eval") == [{"kind": "eval", "update": 0}]
    run.rewind(-1)
    assert run.metrics() == run.trajectories() == []


def test_rewinding_an_empty_run_is_harmless(run: RunFolder) -> None:
    run.rewind(3)
    assert run.metrics() == []


def test_results_are_empty_before_there_are_any(run: RunFolder) -> None:
    assert run.results() == {}
    run.write_json(run.results_file, {"success": 0.5})
    assert run.results() == {"success": 0.5}


def test_a_full_disk_leaves_results_as_they_were(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_json(run.results_file, {"success": 0.5})
    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(RunError, match=r"cannot write .*results\.json: No space left"):
        run.write_json(run.results_file, {"success": 0.9})
    assert run.results() == {"success": 0.5}
    assert not list(run.path.glob("*.partial"))


def test_data_hash_knows_where_one_text_ends() -> None:
    assert data_hash(["ab", "c"]) != data_hash(["a", "bc"])
    assert data_hash(["ab", "c"]) == data_hash(["ab", "c"])
    assert len(data_hash([])) == 16


@pytest.mark.parametrize("writes", [1, 2])
def test_a_run_killed_while_its_folder_is_made_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    # Killed after so many of the two files that make a folder: with both it is a run, with one it is none yet.
    done = 0
    write = RunFolder.write_json

    def limited(self: RunFolder, path: Path, value: dict[str, Any]) -> None:
        nonlocal done
        if done == writes:
            raise KeyboardInterrupt
        write(self, path, value)
        done += 1

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_json", limited)
        try:
            RunFolder.create(tmp_path / "run", {"a": 1}, resume=False, inputs={"x": "1"})
        except KeyboardInterrupt:
            assert writes == 1
    folder = RunFolder.create(tmp_path / "run", {"a": 1}, resume=True, inputs={"x": "1"})
    assert folder.config() == {"a": 1}
    assert (tmp_path / "run" / "env.json").exists()
