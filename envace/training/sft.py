"""Supervised warm-up on demonstrations, both roles at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from envace.errors import TrainingError
from envace.models.ragged import buckets
from envace.training.batches import pad
from envace.training.demonstrations import SupervisedRow
from envace.training.forward import hidden_states, log_probabilities, logits_at, read_tokens
from envace.training.recipe import LossSection


class MuonAdam:
    """Muon for the matrices between the layers, AdamW for embeddings, norms and biases; one schedule for both."""

    def __init__(self, model: PreTrainedModel, *, matrix_lr: float, lr: float) -> None:
        embeddings = {
            id(p) for p in (*model.get_input_embeddings().parameters(), *model.get_output_embeddings().parameters())
        }
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
        others = [p for p in model.parameters() if p.ndim != 2 or id(p) in embeddings]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self._peak = [matrix_lr, lr]

    def state_dict(self) -> dict[str, Any]:
        """State of both."""
        return {str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state[str(number)])

    def step(self, fraction: float) -> None:
        """Step both at a fraction of their peak learning rates, and clear the gradients."""
        for optimizer, peak in zip(self.optimizers, self._peak, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * fraction
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def schedule(step: int, steps: int, *, warmup: float = 0.05) -> float:
    """Linear warm-up, then a cosine to a tenth; in (0, 1]."""
    ramp = max(1, int(warmup * steps))
    if step < ramp:
        return (step + 1) / ramp
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


def batches(rows: Sequence[SupervisedRow], *, size: int, steps: int, seed: int) -> Iterator[list[SupervisedRow]]:
    """`steps` batches, every row once before any comes again, rows of like length together."""
    rng = np.random.default_rng([seed, 77])
    order: list[list[int]] = []
    for _ in range(steps):
        if not order:
            shuffled = rng.permutation(len(rows))
            chunks = [shuffled[i : i + size * 16] for i in range(0, len(rows), size * 16)]
            for chunk in chunks:
                by_length = sorted(chunk.tolist(), key=lambda i: len(rows[i].ids))
                order += [by_length[i : i + size] for i in range(0, len(by_length), size)]
            order = [order[i] for i in rng.permutation(len(order))]
        yield [rows[i] for i in order.pop()]


def sft_step(
    model: PreTrainedModel,
    optimizer: MuonAdam,
    rows: Sequence[SupervisedRow],
    *,
    step: int,
    steps: int,
    pad_id: int,
) -> dict[str, float]:
    """One step; returns its `loss` in nats a learned token, and the `tokens` that went through the model.

    Raises:
        TrainingError: The loss is not finite; no step is taken.
    """
    model.train()
    loss = supervised_loss(model, rows, pad_id)
    if not torch.isfinite(loss):
        raise TrainingError(f"The loss at step {step} is {float(loss.detach())}: lower sft.lr or sft.matrix_lr.")
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(schedule(step, steps))
    return {"loss": float(loss.detach()), "tokens": float(sum(len(row.ids) for row in rows))}


def imitate(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[SupervisedRow],
    *,
    settings: LossSection,
    pad_id: int,
) -> dict[str, float]:
    """One step on rows that may not go through the model at once; the mean is over the learned tokens of all of them.

    Returns:
        `loss` (nats a learned token), `grad_norm`, `trained_tokens` (through the model), `learned_tokens`.

    Raises:
        TrainingError: The loss or the gradient is not finite; no step is taken.
    """
    learned = sum(int(row.learn[1:].sum()) for row in rows)
    if not learned:
        raise TrainingError("No token of these recorded conversations is to be learned.")
    model.train()
    if settings.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer.zero_grad(set_to_none=True)
    total = _surprise(model, rows, settings, pad_id) / learned
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= learned
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise TrainingError(f"The loss is {total} and the gradient norm {norm}: not finite, no step taken.")
    optimizer.step()
    tokens = sum(len(row.ids) for row in rows)
    return {"loss": total, "grad_norm": norm, "trained_tokens": float(tokens), "learned_tokens": float(learned)}


def _surprise(model: PreTrainedModel, rows: Sequence[SupervisedRow], settings: LossSection, pad_id: int) -> float:
    """Negative log-likelihood of all learned tokens, nats, a bucket of rows and a chunk of logits at a time.

    With gradients enabled they are left on the model: the graph is cut at the hidden states, as in an update.
    """
    total = 0.0
    for batch in buckets([len(row.ids) for row in rows], max_tokens=settings.max_batch_tokens):
        ids_BT = torch.from_numpy(pad([rows[i].ids for i in batch], pad_id)).to(model.device)
        learn_BT = torch.from_numpy(pad([rows[i].learn for i in batch])).to(model.device)[:, 1:]
        if not learn_BT.any():
            continue
        body_ND, targets_N = hidden_states(model, ids_BT[:, :-1])[learn_BT], ids_BT[:, 1:][learn_BT]
        cut_ND = body_ND.detach().requires_grad_(torch.is_grad_enabled())
        for chunk_n in torch.arange(len(targets_N), device=model.device).split(settings.logit_chunk):
            chosen_n, _ = read_tokens(logits_at(model, cut_ND[chunk_n], 1.0), targets_N[chunk_n])
            loss = -chosen_n.sum()
            if loss.requires_grad:
                loss.backward()
            total += float(loss.detach())
        if cut_ND.grad is not None and body_ND.requires_grad:
            body_ND.backward(cut_ND.grad)
    return total


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel, rows: Sequence[SupervisedRow], *, settings: LossSection, pad_id: int
) -> float:
    """Mean negative log-likelihood of the learned tokens, nats. Raises TrainingError where there is none."""
    learned = sum(int(row.learn[1:].sum()) for row in rows)
    if not learned:
        raise TrainingError("No token of the held-out conversations is to be learned.")
    model.eval()
    return _surprise(model, rows, settings, pad_id) / learned


def supervised_loss(model: PreTrainedModel, rows: Sequence[SupervisedRow], pad_id: int) -> torch.Tensor:
    """Mean negative log-likelihood of the learned tokens, nats."""
    ids_BT = torch.from_numpy(pad([row.ids for row in rows], pad_id)).to(model.device)
    learn_BT = torch.from_numpy(pad([row.learn for row in rows])).to(model.device)[:, 1:]
    log_NV = log_probabilities(model, hidden_states(model, ids_BT[:, :-1])[learn_BT], 1.0)
    return -log_NV.gather(1, ids_BT[:, 1:][learn_BT][:, None]).mean()
