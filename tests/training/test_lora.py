"""Low-rank adapters: only they are trained, the reference is the model without them, and they can be merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from envace.errors import ConfigError, TrainingError
from envace.models.formats import StarterFormat
from envace.training.checkpoints import Loaded, load_model, load_weights, save_checkpoint, save_model
from envace.training.forward import Reference
from envace.training.lora import add_lora, load_lora, lora_state, merged_state
from envace.training.recipe import LoraSection

New = Callable[..., LlamaForCausalLM]
IDS = torch.tensor([[5, 6, 7, 8, 9]])
ALL = torch.ones_like(IDS, dtype=torch.bool)


@pytest.fixture
def adapted(new_tiny: New) -> LlamaForCausalLM:
    """A tiny model with adapters that do something."""
    model = new_tiny()
    add_lora(model, LoraSection(rank=4), seed=0)
    with torch.no_grad():
        for tensor in lora_state(model).values():
            tensor.normal_(std=0.5)
    return model


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_only_adapters_are_trained_and_fresh_ones_change_nothing(new_tiny: New) -> None:
    model = new_tiny()
    before = logits(model)
    add_lora(model, LoraSection(rank=4), seed=0)
    assert torch.allclose(logits(model), before)
    learned = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert learned
    assert all("lora_" in name for name in learned)
    assert {name.split(".lora_")[0].split(".")[-1] for name in learned} >= {"q_proj", "v_proj", "down_proj"}


def test_the_reference_is_the_model_without_its_adapters(new_tiny: New, adapted: LlamaForCausalLM) -> None:
    def said(reference: Reference) -> torch.Tensor:
        return reference.log_probabilities(reference.hidden_states(IDS)[ALL], 1.0)

    plain = said(Reference(new_tiny()))
    assert torch.allclose(said(Reference(adapted)), plain, atol=1e-5)
    assert not torch.allclose(torch.log_softmax(logits(adapted)[0], -1), plain, atol=1e-2)  # they are back on


def test_merged_weights_are_a_plain_model_that_says_the_same(
    adapted: LlamaForCausalLM, new_tiny: New, form: StarterFormat, tmp_path: Path
) -> None:
    assert set(merged_state(adapted)) == set(new_tiny().state_dict())
    save_model(tmp_path / "model", Loaded(model=adapted, format=form))
    assert torch.allclose(logits(load_model(tmp_path / "model").model), logits(adapted), atol=1e-4)
    assert not list((tmp_path / "model").glob("adapter*"))


def test_a_checkpoint_brings_the_adapters_back(
    adapted: LlamaForCausalLM, new_tiny: New, form: StarterFormat, tmp_path: Path
) -> None:
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad])
    save_checkpoint(tmp_path / "update-000001", Loaded(model=adapted, format=form), optimizer, {"updates": 1})
    fresh = new_tiny()
    add_lora(fresh, LoraSection(rank=4), seed=1)
    load_weights(fresh, tmp_path / "update-000001")
    assert torch.equal(logits(fresh), logits(adapted))


def test_adapters_of_another_shape_are_refused(adapted: LlamaForCausalLM, new_tiny: New) -> None:
    other = new_tiny()
    add_lora(other, LoraSection(rank=4, targets=["q_proj"]), seed=0)
    with pytest.raises(TrainingError, match="another lora section"):
        load_lora(other, lora_state(adapted))


def test_targets_that_no_module_bears_are_named(new_tiny: New) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets = \['nonsense'\]"):
        add_lora(new_tiny(), LoraSection(targets=["nonsense"]), seed=0)
