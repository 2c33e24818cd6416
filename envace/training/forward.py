"""What a model says of tokens: hidden states, logits and log-probabilities, for the update and the warm-up.

Letters: B rows, T tokens, N the tokens that take part, V vocabulary, D width.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from envace.models.ragged import cache_keyword
from envace.training.lora import has_lora, without_lora


def hidden_states(model: PreTrainedModel, ids_BT: Tensor, prompt_P: Tensor | None = None) -> Tensor:
    """Last hidden states (B, T, D) of right-padded rows; padding cannot reach the tokens before it.

    Args:
        model: A causal model.
        ids_BT: The rows; with a prompt, what follows it.
        prompt_P: A prompt that all rows begin with, which is read once and gets the gradient of all.
    """
    if prompt_P is None:
        output: Tensor = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return output
    cache = DynamicCache(config=model.config.get_text_config())
    held = {"use_cache": True, cache_keyword(model.base_model): cache}
    model.base_model(input_ids=prompt_P[None], **held)
    cache.batch_repeat_interleave(len(ids_BT))
    after: Tensor = model.base_model(input_ids=ids_BT, **held).last_hidden_state
    return after


def scaled(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What some families do to their head's output before it is a logit: scale it (Cohere, Granite), cap it (Gemma)."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:  # a product with 1 would cost as much as any
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def logits_at(model: PreTrainedModel, hidden_ND: Tensor, temperature: float) -> Tensor:
    """Logits at the sampling temperature, float32. Shape (N, V)."""
    logits = scaled(model, model.get_output_embeddings()(hidden_ND).float())
    return logits if temperature == 1.0 else logits / temperature


def log_probabilities(model: PreTrainedModel, hidden_ND: Tensor, temperature: float) -> Tensor:
    """Log-softmax over the vocabulary at the sampling temperature, only for the tokens asked for. Shape (N, V)."""
    return torch.log_softmax(logits_at(model, hidden_ND, temperature), -1)


WIDE = 8192
"""Vocabulary from which on a CPU goes row by row: a row stays in its cache, where the whole would be read from memory
twice."""


def _entropy(log_NV: Tensor) -> Tensor:
    if log_NV.device.type == "cpu" and log_NV.shape[1] >= WIDE:
        return -torch.stack([torch.dot(log_V.exp(), log_V) for log_V in log_NV])
    return -(log_NV.exp().mul_(log_NV)).sum(-1)


class _Read(torch.autograd.Function):
    """Log-probability of a token and entropy of its distribution. Keeps one (N, V) tensor, used up by the way back."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        log_NV = torch.log_softmax(logits_NV, -1)
        entropy_N = _entropy(log_NV)
        ctx.save_for_backward(log_NV, targets_N, entropy_N)
        ctx.set_materialize_grads(False)
        return log_NV.gather(1, targets_N[:, None])[:, 0], entropy_N

    @staticmethod
    def backward(ctx: Any, chosen_N: Tensor | None, spread_N: Tensor | None) -> tuple[Tensor, None]:
        """With p the distribution: d log p_t / d z = 1_t - p, and dH / dz = -p (log p + H)."""
        log_NV, targets_N, entropy_N = ctx.saved_tensors
        if spread_N is None:
            assert chosen_N is not None
            slope_NV = log_NV.exp_().mul_(-chosen_N[:, None])
        else:
            slope_NV = log_NV.exp()
            factor_NV = log_NV.add_(entropy_N[:, None]).mul_(-spread_N[:, None])
            slope_NV.mul_(factor_NV if chosen_N is None else factor_NV.sub_(chosen_N[:, None]))
        if chosen_N is not None:
            slope_NV.scatter_add_(1, targets_N[:, None], chosen_N[:, None])
        return slope_NV, None


def read_tokens(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability (N,) of each target and entropy (N,) of its distribution, nats.

    Both have gradients, which may be taken once.
    """
    chosen_N, entropy_N = _Read.apply(logits_NV, targets_N)  # type: ignore[no-untyped-call]
    return chosen_N, entropy_N


class Reference:
    """The policy as it was when this was made, for KLs: a copy, or for a model with adapters the model without them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._adapted = has_lora(model)
        self._model = model if self._adapted else copy.deepcopy(model).eval()

    def _as_it_was(self) -> AbstractContextManager[None]:
        return without_lora(self._model) if self._adapted else nullcontext()

    @torch.no_grad()
    def hidden_states(self, ids_BT: Tensor, prompt_P: Tensor | None = None) -> Tensor:
        """Last hidden states (B, T, D), as of a model."""
        with self._as_it_was():
            return hidden_states(self._model, ids_BT, prompt_P)

    @torch.no_grad()
    def log_probabilities(self, hidden_ND: Tensor, temperature: float) -> Tensor:
        """Shape (N, V), from the reference's own hidden states."""
        with self._as_it_was():
            return log_probabilities(self._model, hidden_ND, temperature)
