"""Estimates of memory against what runs take."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from envace.jobs.memory import memory_parts, published, shape_of
from envace.starter.policy import SHIPPED
from envace.training.lora import add_lora, lora_state
from envace.training.recipe import LoraSection, Recipe, load_recipe


@pytest.mark.parametrize(
    ("name", "billions"),
    [("Qwen/Qwen3-1.7B", 1.72), ("Qwen/Qwen3-4B", 4.02), ("Qwen/Qwen3-8B", 8.19), ("smollm2", 0.1345)],
)
def test_published_configs_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    config = published(name)
    assert config is not None
    assert shape_of(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_are_counted_as_they_are_put_on(
    new_tiny: Callable[..., LlamaForCausalLM], targets: list[str] | str
) -> None:
    model, settings = new_tiny(), LoraSection(rank=4, targets=targets)
    counted = shape_of(model.config, settings).adapters
    add_lora(model, settings, seed=0)
    assert counted == sum(tensor.numel() for tensor in lora_state(model).values())


def test_adapters_need_no_reference_and_no_states_of_the_weights() -> None:
    config = published("Qwen/Qwen3-4B")
    assert config is not None
    lora = load_recipe({"lora": {}, "dtype": "bfloat16"})
    plain, adapted = Recipe(), memory_parts(shape_of(config, lora.lora), lora, on_gpu=True)
    full = memory_parts(shape_of(config), plain, on_gpu=True)
    assert adapted["reference"] == 0 < full["reference"] == full["weights"]
    assert adapted["optimizer"] == pytest.approx(8 * 33.03e6, rel=0.01)
    assert full["optimizer"] == 2 * full["gradients"] == pytest.approx(8 * 4.02e9, rel=0.01)


MEASURE = """
import json, sys
from pathlib import Path
import psutil
from envace.jobs.train import train
from envace.training.grpo import peak_resident
from envace.training.recipe import load_recipe
recipe = load_recipe(json.loads(sys.argv[1]))
before = psutil.Process().memory_info().rss
train(recipe, out=Path(sys.argv[2]))
print(round(peak_resident()) - before)
"""
"""What a run adds to the memory of a fresh process, bytes."""


def ten_million(folder: Path) -> Path:
    """A random Llama of 10 M parameters with the starter's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_estimate_is_within_a_factor_of_two_of_what_a_run_takes(tmp_path: Path) -> None:
    model = ten_million(tmp_path / "model")
    settings = {
        "model": str(model),
        "updates": 1,
        "keep_best": False,
        "data": {"train": 64},
        "eval": {"every": 0, "scenarios": 1},
        "scenarios_per_update": 2,
    }
    command = [sys.executable, "-c", MEASURE, json.dumps(settings), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = int(done.stdout)

    recipe = load_recipe(settings)
    parts = memory_parts(shape_of(AutoConfig.from_pretrained(model)), recipe, on_gpu=False)
    estimated = sum(parts.values()) - parts["process"]

    assert measured / 2 < estimated < measured * 2
