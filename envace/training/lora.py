"""Low-rank adapters: put on, read, put back, and merged into plain weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from envace.errors import ConfigError, TrainingError
from envace.training.recipe import LoraSection

MARK = "lora_"
"""Stands in the names of all parameters of adapters, and in no other."""


def add_lora(model: PreTrainedModel, settings: LoraSection, *, seed: int) -> None:
    """Put fresh adapters on a model, in place, and freeze everything else.

    Raises:
        ConfigError: peft is not installed, or no module bears a name in `targets`.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise ConfigError("lora needs the package peft. Run: pip install peft") from None
    torch.manual_seed(seed)
    config = LoraConfig(r=settings.rank, lora_alpha=settings.alpha, target_modules=settings.targets)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ConfigError(f"lora.targets = {settings.targets!r}: {error}"[:300]) from None
    for tensor in model.parameters():
        if tensor.requires_grad:  # small steps are lost in bfloat16
            tensor.data = tensor.data.float()


def has_lora(model: PreTrainedModel) -> bool:
    """Whether a model bears adapters."""
    return any(MARK in name for name, _ in model.named_parameters())


def lora_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The adapters' own tensors, by name."""
    return {name: tensor for name, tensor in model.state_dict().items() if MARK in name}


def load_lora(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Put adapters' tensors back.

    Raises:
        TrainingError: They are not those of this model.
    """
    own = lora_state(model)
    if set(own) != set(state):
        raise TrainingError(
            f"The checkpoint has {len(state)} adapter tensors, the model {len(own)}: another lora section."
        )
    model.load_state_dict(dict(state), strict=False)


@contextmanager
def without_lora(model: PreTrainedModel) -> Iterator[None]:
    """The model as it was before its adapters: the reference of a run that trains them."""
    _switch(model, on=False)
    try:
        yield
    finally:
        _switch(model, on=True)


def _switch(model: PreTrainedModel, *, on: bool) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(on)


def merged_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Plain weights under plain names, the adapters added to them in float32; the model stays as it is."""
    state = model.state_dict()
    plain = {name: tensor for name, tensor in state.items() if MARK not in name}
    for name, module in model.named_modules():
        added: Any = getattr(module, "get_delta_weight", None)
        if added is not None:
            weight, delta = f"{name}.base_layer.weight", added("default")
            plain[weight] = plain[weight].float() + delta.float()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in plain.items()}
