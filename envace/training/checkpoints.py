"""Checkpoints that are whole or absent: model, tokenizer, optimizer and counters, with a manifest of hashes.

Sampling and data order depend on (seed, update) alone, so weights, optimizer state and the number of the update are
all that a resumed run needs to be the run that never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from envace.errors import ModelError, RunError
from envace.models.formats import StarterFormat

MANIFEST = "manifest.json"
STATE = "training_state.pt"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to sample and to train, with its format."""

    model: PreTrainedModel
    format: StarterFormat


def load_model(path: Path) -> Loaded:
    """Load a model folder (config, safetensors, tokenizer) in float32.

    Raises:
        ModelError: It is missing, damaged, or its tokenizer is not of a format we know.
    """
    if not (path / "config.json").exists():
        raise ModelError(f"{path} is not a model folder: it has no config.json.")
    verify(path)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # transformers raises many kinds for a folder it cannot read; the boundary is here
        raise ModelError(f"cannot load a model from {path}: {type(error).__name__}: {error}"[:500]) from error
    return Loaded(model=model, format=StarterFormat(tokenizer))


def save_model(path: Path, loaded: Loaded, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a model folder whole, replacing an older one only once the new one is complete."""
    _whole(path, lambda folder: _write_model(folder, loaded, dtype))


class Stateful(Protocol):
    """An optimizer, or several behind one face."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs of it."""


def save_checkpoint(path: Path, loaded: Loaded, optimizer: Stateful, state: dict[str, Any]) -> None:
    """Write a checkpoint to resume from. Raises RunError when the disk refuses; older checkpoints stay."""

    def write(folder: Path) -> None:
        _write_model(folder, loaded, torch.float32)
        torch.save({"optimizer": optimizer.state_dict(), **state}, folder / STATE)

    _whole(path, write)


def load_state(path: Path) -> dict[str, Any]:
    """Optimizer state and counters of a checkpoint."""
    verify(path)
    state: dict[str, Any] = torch.load(path / STATE, weights_only=True)
    return state


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Load a checkpoint's weights into a model of the same shape."""
    safetensors.torch.load_model(model, str(path / "model.safetensors"))


def latest(folder: Path, *, prefix: str = "update") -> Path | None:
    """The newest undamaged checkpoint of a run; damaged and half-written ones are passed over."""
    for path in _numbered(folder, prefix):
        try:
            verify(path)
        except ModelError:
            continue
        if (path / STATE).exists():
            return path
    return None


def prune(folder: Path, keep: int, *, prefix: str = "update") -> None:
    """Delete all but the newest checkpoints."""
    for path in _numbered(folder, prefix)[keep:]:
        shutil.rmtree(path)


def _numbered(folder: Path, prefix: str) -> list[Path]:
    """Checkpoints of a prefix, newest first; names of half-written ones do not end in a number."""
    return sorted((path for path in folder.glob(f"{prefix}-*") if path.name[-1].isdigit()), reverse=True)


def verify(path: Path) -> None:
    """Compare a folder with its manifest, where it has one. Raises ModelError naming the damaged file."""
    manifest = path / MANIFEST
    if not manifest.exists():
        return
    try:
        hashes = json.loads(manifest.read_text())
        if not isinstance(hashes, dict):
            raise ValueError(f"{MANIFEST} is not a JSON object")
        for name, expected in hashes.items():
            if _hash(path / name) != expected:
                raise ModelError(
                    f"{path / name} is damaged: its content is not what was written. Use another checkpoint."
                )
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


def _write_model(folder: Path, loaded: Loaded, dtype: torch.dtype) -> None:
    transformers_logging.disable_progress_bar()
    state = loaded.model.state_dict()
    # Tied weights must stay one tensor, or they are written twice.
    converted = {tensor.data_ptr(): tensor.to(dtype) for tensor in state.values()}
    tied = {name: converted[tensor.data_ptr()] for name, tensor in state.items()}
    loaded.model.save_pretrained(folder, state_dict=tied)
    loaded.format.tokenizer.save_pretrained(folder)


def _whole(path: Path, write: Any) -> None:
    """Write into a neighbour folder, add the manifest, then rename."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        hashes = {file.name: _hash(file) for file in sorted(partial.iterdir()) if file.is_file()}
        (partial / MANIFEST).write_text(json.dumps(hashes, indent=1))
        _swap(partial, path)
    except (
        OSError,
        RuntimeError,
        SafetensorError,
    ) as error:  # torch and safetensors have their own words for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise RunError(f"cannot write {path}: {error}. Checkpoints written before are intact.") from error


def _swap(new: Path, path: Path) -> None:
    """Put a folder in the place of an older one, which is back if that fails."""
    older = path.with_name(path.name + ".older")
    shutil.rmtree(older, ignore_errors=True)
    if path.exists():
        os.replace(path, older)
    try:
        os.replace(new, path)
    except OSError:
        if older.exists():
            os.replace(older, path)
        raise
    shutil.rmtree(older, ignore_errors=True)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
