"""A step that changes nothing is an error, not a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from envace.errors import TrainingError
from envace.training.probe import WeightProbe


def step(model: LlamaForCausalLM, parameters: list[torch.nn.Parameter], lr: float) -> float:
    """One real step on some parameters; returns the gradient norm of the model."""
    ids = torch.tensor([[5, 6, 7, 8]])
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(parameters, lr=lr).step()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def test_c3_a_step_that_reaches_no_weight_is_an_error(new_tiny: Callable[..., LlamaForCausalLM]) -> None:
    model, other = new_tiny(), new_tiny(1)
    probe = WeightProbe()
    probe.before(model)
    norm = step(model, list(other.parameters()), lr=0.1)  # the optimizer holds the weights of another model
    with pytest.raises(TrainingError, match="changed no weight"):
        probe.after(model, norm)


def test_c3_a_step_too_small_for_the_precision_is_an_error(new_tiny: Callable[..., LlamaForCausalLM]) -> None:
    model = new_tiny().to(torch.bfloat16)
    probe = WeightProbe()
    probe.before(model)
    norm = step(model, list(model.parameters()), lr=1e-12)
    with pytest.raises(TrainingError, match="too small for the precision"):
        probe.after(model, norm)


def test_c3_a_step_that_changes_the_weights_passes_once_and_for_all(
    new_tiny: Callable[..., LlamaForCausalLM],
) -> None:
    model = new_tiny()
    probe = WeightProbe()
    probe.before(model)
    probe.after(model, 0.0)  # no gradient, no proof
    assert not probe.passed
    probe.before(model)
    probe.after(model, step(model, list(model.parameters()), lr=0.1))
    assert probe.passed
