"""How much memory a training run needs, by part, from the model's config and the recipe alone.

Estimates: how good they are stands in docs/training.md, and a test compares them with what runs took.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from envace.training.recipe import LoraSection, Recipe

GB = 1e9
CUDA_CONTEXT = 0.6 * GB
"""What a process holds of a GPU before it does anything; differs between drivers."""


def _qwen3(width: int, inner: int, layers: int, heads: int, *, tied: bool) -> PreTrainedConfig:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=tied,
    )


def published(name: str) -> PreTrainedConfig | None:
    """The config of a model that may not be here, by its name; None where it is not in this table.

    Source: config.json of each on the Hugging Face hub (Qwen/Qwen3-*, HuggingFaceTB/SmolLM2-135M-Instruct).
    """
    if name == "smollm2":
        return LlamaConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    sizes: dict[str, dict[str, Any]] = {
        "Qwen/Qwen3-1.7B": {"width": 2048, "inner": 6144, "layers": 28, "heads": 16, "tied": True},
        "Qwen/Qwen3-4B": {"width": 2560, "inner": 9728, "layers": 36, "heads": 32, "tied": True},
        "Qwen/Qwen3-8B": {"width": 4096, "inner": 12_288, "layers": 36, "heads": 32, "tied": False},
    }
    return _qwen3(**sizes[name]) if name in sizes else None


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What memory depends on in a model."""

    parameters: int
    adapters: int
    """Parameters of the recipe's adapters; 0 without."""
    layers: int
    hidden: int
    inner: int
    """Width of the feed-forward layers (for mixtures, of one expert times those that a token visits)."""
    query: int
    """Width of all query heads of a layer."""
    key_value: int
    """Width of all key heads of a layer; values are as wide."""
    vocabulary: int


def shape_of(config: PreTrainedConfig, lora: LoraSection | None = None) -> Shape:
    """Count a model's parameters without making any: its modules are made where tensors have no memory."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return Shape(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        adapters=sum(_adapter_sizes(model, lora)) if lora is not None else 0,
        layers=int(text.num_hidden_layers),
        hidden=int(text.hidden_size),
        inner=int(getattr(text, "intermediate_size", None) or 4 * text.hidden_size),
        query=heads * width,
        key_value=int(getattr(text, "num_key_value_heads", None) or heads) * width,
        vocabulary=int(text.vocab_size),
    )


def _adapter_sizes(model: Any, lora: LoraSection) -> Iterator[int]:
    """Parameters of the two matrices on each module that gets an adapter; `all-linear` leaves the head out."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        wanted = module is not head if lora.targets == "all-linear" else name.split(".")[-1] in lora.targets
        if wanted:
            yield lora.rank * (module.in_features + module.out_features)


def memory_parts(shape: Shape, recipe: Recipe, *, on_gpu: bool, prompt: float | None = None) -> dict[str, float]:
    """Bytes that a run holds at its peak, by part.

    Sampling and the optimiser step follow one another, but what a step freed is rarely given back, so parts add up.

    Args:
        shape: Of the model.
        recipe: Says precision, adapters, and how much is sampled and trained at once.
        on_gpu: Whether the model lives on a GPU.
        prompt: Mean tokens of a prompt, if known; else all of `limits.max_length` counts as sampled.

    The second policy of arm `per-role` is counted as large as the first; a fixed simulator is not counted.
    """
    size = 4 if recipe.dtype == "float32" else 2
    learned = shape.adapters if recipe.lora is not None else shape.parameters
    weights = shape.parameters * size + shape.adapters * 4
    groups = min(recipe.groups_at_once or recipe.scenarios_per_update, recipe.scenarios_per_update)
    rows, length = groups * recipe.group_size, recipe.limits.max_length
    tokens = max(recipe.loss.max_batch_tokens, length)
    wanted = min(tokens, recipe.loss.logit_chunk)
    if prompt is not None:
        wanted = min(wanted, round(tokens * max(0.0, 1 - prompt / length)))
    imitates = recipe.arm == "sft"
    referenced = not imitates and (recipe.loss.kl > 0 or (recipe.facts.anchors and recipe.loss.anchor_kl > 0))
    # In layout prompted a rollout has its own row and the rehearser's.
    caches = 0 if imitates else 2 if recipe.layout == "prompted" and not recipe.executes else 1
    second = 2 if recipe.facts.rehearser == "second" else 1
    return {
        "process": CUDA_CONTEXT if on_gpu else float(psutil.Process().memory_info().rss),
        "weights": float(second * weights),
        "gradients": second * learned * 4.0,
        "optimizer": second * 2 * learned * 4.0,
        "reference": float(second * weights) if referenced and recipe.lora is None else 0.0,
        "kv_cache": float(caches * rows * _rounded(length) * shape.layers * 2 * shape.key_value * size),
        "sampling": float(min(caches, 1) * rows * shape.vocabulary * SAMPLING_BYTES),
        "activations": float(tokens * activation_width(shape, recompute=recipe.loss.recompute) * size),
        "logits": float(wanted * shape.vocabulary * 4 * LOGIT_COPIES),
    }


def _rounded(length: int) -> int:
    """The cache grows in chunks of 64 positions."""
    return -(-length // 64) * 64


SAMPLING_BYTES = 28
"""A row's logits and log-probabilities (float32), their exponentials and cumulative sum (float64), and copies."""
LOGIT_COPIES = 5
"""Logits, log-probabilities, their gradient, the reference's, and the entropy's products."""


def activation_width(shape: Shape, *, recompute: bool = False) -> float:
    """Numbers that a training forward keeps of one token for its way back.

    A layer of the Llama kind keeps, of the hidden width, its input, two norms with what they normalised (in float32)
    and the attention's output; of the query and key widths, before and after the rotation; of the inner width, gate,
    its activation, up and their product.
    """
    layer = 10 * shape.hidden + 4 * shape.query + 5 * shape.key_value + 4 * shape.inner
    # Recomputed, each layer's input stays, and all of one layer at a time.
    kept = layer + shape.layers * shape.hidden if recompute else shape.layers * layer
    return float(kept + 4 * shape.hidden)


def available(on_gpu: bool) -> dict[str, float | None]:
    """Bytes of this machine: `ram` (free to take now) and `gpu` (free now; null where there is none)."""
    gpu = None
    if torch.cuda.is_available():
        gpu = float(torch.cuda.mem_get_info()[0])
    return {"ram": float(psutil.virtual_memory().available), "gpu": gpu}
