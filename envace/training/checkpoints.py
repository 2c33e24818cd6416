"""Checkpoints that are whole or absent: model, tokenizer, optimizer and counters, with a manifest of hashes.

Sampling and data order depend on (seed, update) alone, so weights, optimizer state and the number of the update are
all that a resumed run needs to be the run that never stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from envace.errors import ModelError, RunError
from envace.models.chat import ChatFormat
from envace.models.formats import CONTROL_TOKENS, StarterFormat
from envace.models.local import LocalPolicy
from envace.training.lora import has_lora, load_lora, lora_state, merged_state

MANIFEST = "manifest.json"
STATE = "training_state.pt"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model ready to sample and to train, with its format."""

    model: PreTrainedModel
    format: StarterFormat | ChatFormat

    def policy(self) -> LocalPolicy:
        """The model as it is now, to sample from."""
        self.model.eval()
        return LocalPolicy(self.model, self.format)


def load_model(
    path: Path | str, *, dtype: str = "float32", device: str = "cpu", thinking: bool | None = None
) -> Loaded:
    """Load a model folder (config, safetensors, tokenizer), or a model of the hub by its name.

    Args:
        path: A folder, or `owner/name`.
        dtype: `float32` or `bfloat16`.
        device: `cpu`, `cuda`, or `auto` (a GPU if there is one).
        thinking: Passed on to the chat template, for families that can think or not.

    Raises:
        ModelError: It is missing, damaged, too big for the device, or its tokenizer's template cannot be used.
    """
    local = isinstance(path, Path)
    if isinstance(path, Path):
        if not (path / "config.json").exists():
            raise ModelError(f"{path} is not a model folder: it has no config.json.")
        verify(path)
    transformers_logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), local_files_only=local)
        model = model.to(device=_device(device))
    except Exception as error:  # transformers raises many kinds for a folder it cannot read; the boundary is here
        said = " ".join(str(error).split())  # one line, whatever it was
        raise ModelError(f"cannot load a model from {path}: {type(error).__name__}: {said}"[:500]) from error
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return Loaded(model=model, format=format_of(tokenizer, ends=ends, thinking=thinking))


def format_of(
    tokenizer: PreTrainedTokenizerBase, *, ends: int | list[int] | None, thinking: bool | None = None
) -> StarterFormat | ChatFormat:
    """The starter's format for its tokenizer, else what the tokenizer's chat template says.

    Args:
        tokenizer: Of the model.
        ends: What else ends a step, as generation configs have it.
        thinking: Passed on to the chat template.
    """
    if set(CONTROL_TOKENS) <= set(tokenizer.get_vocab()):
        return StarterFormat(tokenizer)
    return ChatFormat(tokenizer, ends=[ends] if isinstance(ends, int) else ends or [], thinking=thinking)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is cuda, and torch sees no GPU. Use device=cpu, or a torch built for your driver.")
    return name


def save_model(
    path: Path, loaded: Loaded, *, dtype: torch.dtype = torch.float32, notes: Mapping[str, str] | None = None
) -> None:
    """Write a model folder whole, replacing an older one only once the new one is complete.

    `notes`: further text files, by name.
    """

    def write(folder: Path) -> None:
        _write_model(folder, loaded.model, loaded.format.tokenizer, dtype)
        for name, text in (notes or {}).items():
            (folder / name).write_text(text + "\n", encoding="utf-8")

    _whole(path, write)


def save_weights(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype = torch.float32
) -> None:
    """As `save_model`, of a model that has no format (yet)."""
    _whole(path, lambda folder: _write_model(folder, model, tokenizer, dtype))


class Stateful(Protocol):
    """An optimizer, or several behind one face."""

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs of it."""


def save_checkpoint(
    path: Path,
    loaded: Loaded,
    optimizer: Stateful,
    state: dict[str, Any],
    *,
    beside: Mapping[str, tuple[Loaded, Stateful]] | None = None,
) -> None:
    """Write a checkpoint to resume from, other models of the same run in folders within it.

    Raises:
        RunError: The disk refuses; older checkpoints stay.
    """

    def write(folder: Path) -> None:
        for name, (model, steps) in {"": (loaded, optimizer), **(beside or {})}.items():
            (folder / name).mkdir(exist_ok=True)
            _write_model(folder / name, model.model, model.format.tokenizer, torch.float32)
            adapters = lora_state(model.model)
            torch.save({"optimizer": steps.state_dict(), "adapters": adapters, **state}, folder / name / STATE)

    _whole(path, write)


def load_state(path: Path) -> dict[str, Any]:
    """Optimizer state and counters of a checkpoint."""
    verify(path)
    state: dict[str, Any] = torch.load(path / STATE, weights_only=True)
    return state


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Load a checkpoint's weights into a model of the same shape; of one with adapters, only these."""
    if has_lora(model):
        load_lora(model, load_state(path)["adapters"])
    else:
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


def set_aside(folder: Path, *, prefix: str = "update") -> list[Path]:
    """Rename checkpoints newer than the newest whole one, so that they never stand in the way of those to come.

    Returns:
        What they are called now; nothing is deleted.
    """
    whole = latest(folder, prefix=prefix)
    moved = []
    for path in _numbered(folder, prefix):
        if whole is not None and path.name <= whole.name:
            break
        target = path.with_name(f"{path.name}.damaged")
        shutil.rmtree(target, ignore_errors=True)
        moved.append(path.rename(target))
    return moved


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
            if file_hash(path / name) != expected:
                raise ModelError(
                    f"{path / name} is damaged: its content is not what was written. Use another checkpoint."
                )
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged: {error}") from None


def _write_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
    transformers_logging.disable_progress_bar()
    state = merged_state(model)
    # Tied weights must stay one tensor, or they are written twice.
    converted = {tensor.data_ptr(): tensor.to(dtype) for tensor in state.values()}
    tied = {name: converted[tensor.data_ptr()] for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=tied)
    tokenizer.save_pretrained(folder)


def _whole(path: Path, write: Any) -> None:
    """Write into a neighbour folder, add the manifest, then rename."""
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        write(partial)
        files = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        hashes = {str(file.relative_to(partial)): file_hash(file) for file in files}
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


def file_hash(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
