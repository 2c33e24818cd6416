"""Checkpoints are whole or absent."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from envace.errors import ModelError, RunError
from envace.models.formats import StarterFormat
from envace.training.checkpoints import (
    MANIFEST,
    STATE,
    Loaded,
    latest,
    load_model,
    load_state,
    prune,
    save_checkpoint,
    save_model,
    set_aside,
    verify,
)


@pytest.fixture
def loaded(new_tiny: Callable[..., Any], form: StarterFormat) -> Loaded:
    return Loaded(model=new_tiny(), format=form)


def optimizer_of(loaded: Loaded) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-3)
    loaded.model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def save(folder: Path, loaded: Loaded, update: int) -> Path:
    path = folder / f"update-{update:06d}"
    save_checkpoint(path, loaded, optimizer_of(loaded), {"updates": update})
    return path


def weights(loaded: Loaded) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in loaded.model.parameters()])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def flip(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position if position >= 0 else len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_was_saved_comes_back(tmp_path: Path, loaded: Loaded) -> None:
    path = save(tmp_path, loaded, 3)
    back = load_model(path)
    assert torch.equal(weights(back), weights(loaded))
    text = "order #W482913 <|end|>"
    assert back.format.encode([text]) == loaded.format.encode([text])
    assert back.format.stop_ids() == loaded.format.stop_ids()
    state = load_state(path)
    assert state["updates"] == 3
    fresh = torch.optim.AdamW(back.model.parameters(), lr=1.0)
    fresh.load_state_dict(state["optimizer"])
    assert fresh.param_groups[0]["lr"] == 1e-3
    assert len(fresh.state) == len(list(back.model.parameters()))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", STATE])
def test_a_flipped_bit_is_an_error_that_names_the_file(tmp_path: Path, loaded: Loaded, name: str) -> None:
    path = save(tmp_path, loaded, 1)
    flip(path / name)
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        verify(path)
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        load_model(path)
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        load_state(path)


def test_a_missing_file_is_named(tmp_path: Path, loaded: Loaded) -> None:
    path = save(tmp_path, loaded, 1)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        verify(path)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_manifest_is_a_model_error(tmp_path: Path, loaded: Loaded, text: bytes) -> None:
    path = save(tmp_path, loaded, 1)
    (path / MANIFEST).write_bytes(text)
    with pytest.raises(ModelError, match="damaged"):
        verify(path)


def test_latest_passes_over_a_damaged_one(tmp_path: Path, loaded: Loaded) -> None:
    paths = [save(tmp_path, loaded, update) for update in (5, 10, 15)]
    assert latest(tmp_path) == paths[2]
    flip(paths[2] / "model.safetensors")
    assert latest(tmp_path) == paths[1]
    flip(paths[1] / STATE)
    assert latest(tmp_path) == paths[0]
    shutil.rmtree(paths[0])
    assert latest(tmp_path) is None


def test_latest_of_nothing_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None


def test_what_a_killed_save_leaves_behind_is_no_checkpoint(tmp_path: Path, loaded: Loaded) -> None:
    # Killed after the state was begun and before the manifest: a neighbour folder with everything but that.
    whole = save(tmp_path, loaded, 5)
    torn = tmp_path / "update-000010.partial"
    shutil.copytree(whole, torn)
    (torn / MANIFEST).unlink()
    (torn / STATE).write_bytes((torn / STATE).read_bytes()[:100])
    assert latest(tmp_path) == whole


def test_a_save_that_fails_in_the_middle_leaves_the_older_one(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, loaded, 5)
    before = contents(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RunError, match=r"cannot write .*update-000010.*No space left.*intact"):
        save(tmp_path, loaded, 10)
    with pytest.raises(RunError):
        save(tmp_path, loaded, 5)  # the same name again
    assert contents(tmp_path) == before
    assert latest(tmp_path) == path


def test_a_save_that_fails_at_the_last_moment_leaves_the_older_one(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "model", loaded)
    before = contents(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(RunError):
        save_model(tmp_path / "model", loaded)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("limit", [2_000, 300_000])
def test_a_full_disk_is_a_run_error_and_leaves_the_older_one(tmp_path: Path, loaded: Loaded, limit: int) -> None:
    # A real limit on the size of files, in a child process: too small for the weights, or for the optimizer only.
    path = save(tmp_path, loaded, 5)
    assert (path / "model.safetensors").stat().st_size < 300_000 < (path / STATE).stat().st_size
    before, optimizer = contents(tmp_path), optimizer_of(loaded)
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        code = 1
        try:
            save_checkpoint(tmp_path / "update-000010", loaded, optimizer, {"updates": 10})
        except RunError:
            code = 17
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert contents(tmp_path) == before


def test_a_new_save_replaces_the_old_one_entirely(tmp_path: Path, loaded: Loaded) -> None:
    save_model(tmp_path / "model", loaded)
    (tmp_path / "model" / "stray").write_text("x")
    save_model(tmp_path / "model", loaded, dtype=torch.bfloat16)
    assert not (tmp_path / "model" / "stray").exists()
    back = load_model(tmp_path / "model")
    assert next(back.model.parameters()).dtype == torch.float32
    torch.testing.assert_close(weights(back), weights(loaded), rtol=0.01, atol=0.01)


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for update in (5, 10, 15, 100):
        (tmp_path / f"update-{update:06d}").mkdir()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["update-000015", "update-000100"]


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere is not a model folder"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ModelError, match="cannot load a model"):
        load_model(tmp_path)


def test_damaged_checkpoints_are_set_aside_and_stand_in_nobodys_way(tmp_path: Path, loaded: Loaded) -> None:
    paths = [save(tmp_path, loaded, number) for number in (4, 5, 6)]
    for path in paths[1:]:
        flip(path / STATE)
    moved = set_aside(tmp_path)
    assert [path.name for path in moved] == ["update-000006.damaged", "update-000005.damaged"]
    assert latest(tmp_path) == paths[0]
    again = save(tmp_path, loaded, 5)
    prune(tmp_path, 1)
    assert latest(tmp_path) == again
    assert set_aside(tmp_path) == []


def test_where_all_are_damaged_the_next_ones_are_kept(tmp_path: Path, loaded: Loaded) -> None:
    flip(save(tmp_path, loaded, 9) / STATE)
    assert len(set_aside(tmp_path)) == 1
    first = save(tmp_path, loaded, 1)
    prune(tmp_path, 2)
    assert latest(tmp_path) == first
