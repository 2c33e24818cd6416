"""Resolving what a user names as a model."""

from __future__ import annotations

from pathlib import Path

from envace.errors import ModelError
from envace.starter.policy import SHIPPED
from envace.training.checkpoints import Loaded, load_model

MODEL_FOLDER = "model"
"""Where a run folder keeps its final weights."""


def resolve(name: str) -> Path:
    """The folder of a model: `starter`, a model folder, or a run folder (its final weights).

    Raises:
        ModelError: There is no such folder, or a run folder has no final weights yet.
    """
    if name == "starter":
        return SHIPPED
    path = Path(name)
    if (path / "metrics.jsonl").exists() or (path / "env.json").exists():
        if not (path / MODEL_FOLDER).exists():
            raise ModelError(
                f"The run {path} has no final weights yet. Finish it by --resume, or name one of its checkpoints."
            )
        return path / MODEL_FOLDER
    if not path.is_dir():
        raise ModelError(f"There is no model folder {name!r}. Name `starter`, a model folder, or a run folder.")
    return path


def load(name: str) -> Loaded:
    """Load what `resolve` finds."""
    return load_model(resolve(name))
