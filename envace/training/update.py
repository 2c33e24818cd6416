"""One optimiser step over the rows of an update."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from envace.errors import TrainingError
from envace.models.ragged import buckets
from envace.training.batches import Row, pad
from envace.training.lora import has_lora, without_lora
from envace.training.losses import entropy, kl_full, kl_k3, policy_loss


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """What the loss is made of; aggregation is the token mean over the whole update."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 3.0
    kl: float = 1e-4
    """Weight of the k3 KL to the reference on tokens with a policy gradient."""
    anchor_kl: float = 0.1
    """Weight of the full KL to the reference on look-up tokens."""
    max_grad_norm: float = 1.0
    max_batch_tokens: int = 2048
    """Padded tokens that go through the model at once."""


@dataclass
class Sums:
    """Running sums of a loss and its diagnostics over micro-batches."""

    values: dict[str, float]

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the sum of a tensor."""
        self.values[name] = self.values.get(name, 0.0) + float(tensor.detach().sum())


def hidden_states(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Last hidden states (B, T, d) of right-padded rows; padding cannot reach the tokens before it."""
    output: Tensor = model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
    return output


def scaled(model: PreTrainedModel, logits: Tensor) -> Tensor:
    """What some families do to their head's output before it is a logit: scale it (Cohere, Granite), cap it (Gemma)."""
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:  # a product with 1 would cost as much as any
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return cap * torch.tanh(logits / cap) if cap else logits


def log_probabilities(model: PreTrainedModel, hidden_ND: Tensor, temperature: float) -> Tensor:
    """Log-softmax over the vocabulary at the sampling temperature, only for the tokens asked for. Shape (N, V)."""
    logits = scaled(model, model.get_output_embeddings()(hidden_ND).float())
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)


Reference = Callable[[Tensor, Tensor, float], Tensor]
"""From ids (B, T), which of them are wanted (B, T), and a temperature, to log-probabilities (N, V)."""


def reference_of(model: PreTrainedModel) -> Reference:
    """The policy as it is now, for KLs: a copy, or for a model with adapters the model without them."""
    adapted = has_lora(model)
    frozen = model if adapted else copy.deepcopy(model).eval()

    def reference(ids_BT: Tensor, wanted_BT: Tensor, temperature: float) -> Tensor:
        with torch.no_grad(), without_lora(model) if adapted else nullcontext():
            return log_probabilities(frozen, hidden_states(frozen, ids_BT)[wanted_BT], temperature)

    return reference


def update(
    model: PreTrainedModel,
    reference: Reference | None,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    *,
    settings: LossSettings,
    temperature: float,
    pad_id: int,
) -> dict[str, float]:
    """Accumulate gradients over all rows, clip, step. Returns the loss and its diagnostics (docs/metrics.md).

    Raises:
        TrainingError: The loss or the gradient is not finite; the weights are then as before.
    """
    if temperature <= 0:
        raise TrainingError("Training samples at a temperature above 0: at 0 there is no distribution to learn.")
    counts = {
        "policy": max(1, sum(int(row.policy[1:].sum()) for row in rows)),
        "anchor": max(1, sum(int(row.anchor[1:].sum()) for row in rows)),
    }
    sums = Sums({})
    model.train()
    optimizer.zero_grad(set_to_none=True)
    for batch in buckets([len(row.ids) for row in rows], max_tokens=settings.max_batch_tokens):
        loss = _loss(model, reference, [rows[i] for i in batch], settings, temperature, counts, sums, pad_id)
        if loss is not None:
            loss.backward()
            sums.add("loss", loss)
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
    if not np.isfinite(norm) or not np.isfinite(sums.values.get("loss", 0.0)):
        raise TrainingError(
            f"The loss is {sums.values.get('loss')} and the gradient norm {norm}: not finite, no step taken."
        )
    optimizer.step()
    return _metrics(sums.values, counts, norm, sum(len(row.ids) for row in rows))


def _loss(
    model: PreTrainedModel,
    reference: Reference | None,
    rows: list[Row],
    settings: LossSettings,
    temperature: float,
    counts: dict[str, int],
    sums: Sums,
    pad_id: int,
) -> Tensor | None:
    """The share of one micro-batch in the loss of the update."""
    device = model.device
    ids_BT = torch.from_numpy(pad([row.ids for row in rows], pad_id)).to(device)
    policy_BT, anchor_BT, rehearse_BT, advantages_BT, old_BT = (
        torch.from_numpy(pad([getattr(row, name) for row in rows])).to(device)[:, 1:]
        for name in ("policy", "anchor", "rehearse", "advantages", "logprobs")
    )
    wanted_BT = policy_BT | anchor_BT
    if not wanted_BT.any():
        return None
    inputs_BT, targets_N = ids_BT[:, :-1], ids_BT[:, 1:][wanted_BT]
    log_NV = log_probabilities(model, hidden_states(model, inputs_BT)[wanted_BT], temperature)
    reference_NV = None
    if reference is not None:
        reference_NV = reference(inputs_BT, wanted_BT, temperature)
    policy_N, anchor_N = policy_BT[wanted_BT], anchor_BT[wanted_BT]
    chosen_N = log_NV.gather(1, targets_N[:, None])[:, 0]
    old_N, advantages_N = old_BT[wanted_BT], advantages_BT[wanted_BT]
    token_N = policy_loss(
        chosen_N[policy_N],
        old_N[policy_N],
        advantages_N[policy_N],
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    loss = token_N.sum() / counts["policy"]
    if reference_NV is not None:
        kl_N = kl_k3(chosen_N[policy_N], reference_NV.gather(1, targets_N[:, None])[:, 0][policy_N])
        anchor_kl_N = kl_full(log_NV[anchor_N], reference_NV[anchor_N])
        loss = loss + settings.kl * kl_N.sum() / counts["policy"]
        loss = loss + settings.anchor_kl * anchor_kl_N.sum() / counts["anchor"]
        sums.add("kl", kl_N)
        sums.add("anchor_kl", anchor_kl_N)
    _diagnose(sums, log_NV, chosen_N, old_N, policy_N, rehearse_BT[wanted_BT], settings)
    return loss


def _diagnose(
    sums: Sums,
    log_NV: Tensor,
    chosen_N: Tensor,
    old_N: Tensor,
    policy_N: Tensor,
    rehearse_N: Tensor,
    settings: LossSettings,
) -> None:
    with torch.no_grad():
        entropy_N = entropy(log_NV)
        ratio_N = torch.exp(chosen_N - old_N)[policy_N]
        for role, mask_N in (("act", policy_N & ~rehearse_N), ("rehearse", policy_N & rehearse_N)):
            sums.add(f"entropy_{role}", entropy_N[mask_N])
            sums.add(f"tokens_{role}", mask_N)
        sums.add("clipped", ((ratio_N < 1 - settings.clip_low) | (ratio_N > 1 + settings.clip_high)).float())
        sums.add("ratio", ratio_N)


def _metrics(sums: dict[str, float], counts: dict[str, int], norm: float, tokens: int) -> dict[str, float]:
    """Means over tokens, named as docs/metrics.md defines them."""
    metrics = {
        "loss": sums.get("loss", 0.0),
        "grad_norm": norm,
        **{
            name: sums[name] / counts[over]
            for name, over in (("kl", "policy"), ("anchor_kl", "anchor"))
            if name in sums
        },
        "clip_share": sums.get("clipped", 0.0) / counts["policy"],
        "ratio": sums.get("ratio", 0.0) / counts["policy"],
        "trained_tokens": float(tokens),
    }
    for role in ("act", "rehearse"):
        count = sums.get(f"tokens_{role}", 0.0)
        metrics[f"tokens/{role}"] = count
        if count:
            metrics[f"entropy/{role}"] = sums[f"entropy_{role}"] / count
    return metrics
