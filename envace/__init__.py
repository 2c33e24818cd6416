"""Train and run tool-using LLM agents without needing an environment."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

# Loaded on first use, so that the worker process and `envace --help` never import torch.
_PUBLIC = {
    "load_recipe": "envace.training.recipe",
    "sft": "envace.jobs.sft",
    "train": "envace.jobs.train",
    "evaluate": "envace.jobs.evaluate",
    "audit": "envace.jobs.audit",
    "write_report": "envace.report.page",
    "demo": "envace.jobs.demo",
    "doctor": "envace.jobs.doctor",
    "check_data": "envace.jobs.data",
    "convert_data": "envace.jobs.data",
    "plan": "envace.jobs.plan",
    "export": "envace.jobs.export",
}

__all__ = ["__version__", *sorted(_PUBLIC)]  # pyright: ignore


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        # The package `envace.report` already has the name of its verb.
        return getattr(importlib.import_module(_PUBLIC[name]), name.removeprefix("write_"))
    raise AttributeError(f"module 'envace' has no attribute {name!r}")
