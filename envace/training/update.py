"""One optimiser step over the rows of an update.

Rows go through the model in batches of like length, and what the head says of a batch in chunks of tokens: a chunk's
gradient is taken before the next chunk's logits are made, so memory holds one chunk's distributions, whatever the
vocabulary. Every token has its weight in the loss from the start, so no cut changes the update.

Letters: B rows, T tokens, N the tokens that take part, P a common prompt, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from envace.errors import TrainingError
from envace.models.ragged import buckets, keeps_all
from envace.training.batches import Row, pad
from envace.training.forward import Reference, hidden_states, log_probabilities, logits_at, read_tokens
from envace.training.losses import kl_full, kl_sampled, policy_loss
from envace.training.recipe import LossSection

MIN_SHARED = 16
"""Tokens from which on a common prompt is worth a pass of its own."""


@dataclass
class Sums:
    """Running sums of a loss and its diagnostics over micro-batches."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add the sum of a tensor, where it is: a number on the host would wait for the device."""
        total = tensor.detach().sum().double()
        self.tensors[name] = self.tensors[name] + total if name in self.tensors else total

    def numbers(self) -> dict[str, float]:
        """The sums so far."""
        return {name: float(total) for name, total in self.tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows that go through the model at once, on its device. Index t of (B, T) reads t and predicts what follows."""

    ids_BT: Tensor
    wanted_BT: Tensor
    """Where what follows takes part: with `policy` or as `anchor`."""
    prompt_P: Tensor | None
    """What all rows begin with, if it is read apart; the rows then begin after it."""
    targets_N: Tensor
    policy_N: Tensor
    rehearse_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    old_N: Tensor


@dataclass(frozen=True, kw_only=True)
class Work:
    """What stays the same over an update."""

    model: PreTrainedModel
    reference: Reference | None
    settings: LossSection
    temperature: float
    sums: Sums


def update(
    model: PreTrainedModel,
    reference: Reference | None,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[Row],
    *,
    settings: LossSection,
    temperature: float,
    pad_id: int,
) -> dict[str, float]:
    """Accumulate gradients over all rows, clip, step. Returns the loss and its diagnostics (docs/metrics.md).

    Raises:
        TrainingError: The loss or the gradient is not finite; the weights are then as before.
    """
    if temperature <= 0:
        raise TrainingError("Training samples at a temperature above 0: at 0 there is no distribution to learn.")
    learned = [cut for cut in map(_cut, rows) if cut is not None]
    work = Work(model=model, reference=reference, settings=settings, temperature=temperature, sums=Sums())
    model.train()
    if settings.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer.zero_grad(set_to_none=True)
    share = settings.share_prompts and not settings.recompute and keeps_all(model.config.get_text_config())
    for picked, shared in plan(learned, max_tokens=settings.max_batch_tokens, share=share):
        _accumulate(work, _batch([learned[i] for i in picked], shared, pad_id=pad_id, device=model.device))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm))
    sums = work.sums.numbers()
    loss, bad = sums.get("loss", 0.0), int(sums.get("bad", 0))
    if not np.isfinite(norm) or not np.isfinite(loss):
        raise TrainingError(
            f"The loss is {loss} ({bad} of its tokens are not finite) and the gradient norm {norm}: not finite, no "
            f"step taken. Lower learning_rate."
        )
    optimizer.step()
    kls = {} if reference is None else {"kl": 0.0, "anchor_kl": 0.0}
    return _metrics({**kls, **sums}, norm, sum(len(row.ids) for row in learned))


def _cut(row: Row) -> Row | None:
    """A row up to the last token that takes part, since nothing after it can matter; None if none takes part."""
    (taking,) = np.nonzero(row.policy[1:] | row.anchor[1:])
    if not len(taking):
        return None
    end = int(taking[-1]) + 2
    arrays = {name: value[:end] for name, value in vars(row).items() if isinstance(value, np.ndarray)}
    return Row(**arrays, prompt=row.prompt)


def plan(rows: Sequence[Row], *, max_tokens: int, share: bool) -> Iterator[tuple[list[int], int]]:
    """Batches of rows, and how many tokens all rows of a batch begin with that are to be read once.

    The last token of a prompt is left to each row: what it predicts is the row's own.
    """
    together: dict[bytes, list[int]] = {}
    for number, row in enumerate(rows):
        shareable = share and row.prompt > MIN_SHARED
        together.setdefault(row.ids[: row.prompt].tobytes() if shareable else b"", []).append(number)
    alone = together.pop(b"", [])
    for members in together.values():
        prefix = rows[members[0]].prompt - 1
        lengths = [len(rows[i].ids) - prefix for i in members]
        for batch in buckets(lengths, max_tokens=max(1, max_tokens - prefix)):
            if len(batch) == 1:
                alone.append(members[batch[0]])
            else:
                yield [members[i] for i in batch], prefix
    for batch in buckets([len(rows[i].ids) for i in alone], max_tokens=max_tokens):
        yield [alone[i] for i in batch], 0


def _batch(rows: Sequence[Row], shared: int, *, pad_id: int, device: torch.device) -> Batch:
    def padded(name: str, value: int = 0) -> Tensor:
        return torch.from_numpy(pad([getattr(row, name)[shared:] for row in rows], value)).to(device)

    ids_BT, policy_BT = padded("ids", pad_id), padded("policy")[:, 1:]
    wanted_BT = policy_BT | padded("anchor")[:, 1:]
    taking = {name: padded(name)[:, 1:][wanted_BT] for name in ("rehearse", "advantages", "weights", "logprobs")}
    return Batch(
        ids_BT=ids_BT[:, :-1],
        wanted_BT=wanted_BT,
        prompt_P=torch.from_numpy(rows[0].ids[:shared]).to(device) if shared else None,
        targets_N=ids_BT[:, 1:][wanted_BT],
        policy_N=policy_BT[wanted_BT],
        rehearse_N=taking["rehearse"],
        advantages_N=taking["advantages"],
        weights_N=taking["weights"],
        old_N=taking["logprobs"],
    )


def _accumulate(work: Work, batch: Batch) -> None:
    """Add a batch's gradient to the model's.

    The body is run once; below its hidden states the graph is cut, each chunk of the head goes forward and back by
    itself, and the gradients of all chunks then go back through the body together.
    """
    before_ND = None
    if work.reference is not None:  # first, as it leaves no graph behind
        before_ND = work.reference.hidden_states(batch.ids_BT, batch.prompt_P)[batch.wanted_BT]
    body_ND = hidden_states(work.model, batch.ids_BT, batch.prompt_P)[batch.wanted_BT]
    cut_ND = body_ND.detach().requires_grad_()
    for kind, term in ((batch.policy_N, _policy_term), (~batch.policy_N, _anchor_term)):
        for chunk_n in kind.nonzero()[:, 0].split(work.settings.logit_chunk):
            loss = term(work, batch, chunk_n, cut_ND[chunk_n], None if before_ND is None else before_ND[chunk_n])
            if loss is not None:
                loss.backward()
                work.sums.add("loss", loss)
    if cut_ND.grad is not None and body_ND.requires_grad:
        body_ND.backward(cut_ND.grad)


def _policy_term(work: Work, batch: Batch, chunk_n: Tensor, hidden_nD: Tensor, before_nD: Tensor | None) -> Tensor:
    """Share in the loss of tokens with a policy gradient."""
    settings, targets_n = work.settings, batch.targets_N[chunk_n]
    was = _before(work, before_nD, targets_n)  # first, so that its logits are gone when the policy's are made
    logits_nV = logits_at(work.model, hidden_nD, work.temperature)
    now_n, entropy_n = read_tokens(logits_nV, targets_n)
    old_n, advantages_n, weights_n = batch.old_N[chunk_n], batch.advantages_N[chunk_n], batch.weights_N[chunk_n]
    token_n = policy_loss(
        now_n,
        old_n,
        advantages_n,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    if settings.entropy:
        token_n = token_n - settings.entropy * entropy_n
    if was is not None:
        kl_n = _kl(settings, logits_nV, now_n, was)
        token_n = token_n + settings.kl * kl_n
        work.sums.add("kl", kl_n)
    _diagnose(work, token_n, now_n - old_n, entropy_n, batch.rehearse_N[chunk_n])
    return (weights_n * token_n).sum()


def _before(work: Work, before_nD: Tensor | None, targets_n: Tensor) -> Tensor | None:
    """The reference's log-probabilities: over the vocabulary (n, V) for a full KL, else of the targets (n,)."""
    if work.reference is None or before_nD is None:
        return None
    was_nV = work.reference.log_probabilities(before_nD, work.temperature)
    return was_nV if work.settings.kl_estimator == "full" else was_nV.gather(1, targets_n[:, None])[:, 0]


def _kl(settings: LossSection, logits_nV: Tensor, now_n: Tensor, was: Tensor) -> Tensor:
    if settings.kl_estimator == "full":
        return kl_full(torch.log_softmax(logits_nV, -1), was)
    return kl_sampled(now_n, was, settings.kl_estimator)


def _anchor_term(
    work: Work, batch: Batch, chunk_n: Tensor, hidden_nD: Tensor, before_nD: Tensor | None
) -> Tensor | None:
    """Share in the loss of look-up tokens."""
    work.sums.add("anchors", torch.ones_like(chunk_n))
    if work.reference is None or before_nD is None:
        return None
    was_nV = work.reference.log_probabilities(before_nD, work.temperature)
    kl_n = kl_full(was_nV, log_probabilities(work.model, hidden_nD, work.temperature))
    work.sums.add("anchor_kl", kl_n)
    work.sums.add("bad", ~torch.isfinite(kl_n))
    return work.settings.anchor_kl * (batch.weights_N[chunk_n] * kl_n).sum()


@torch.no_grad()
def _diagnose(work: Work, token_n: Tensor, log_ratio_n: Tensor, entropy_n: Tensor, rehearse_n: Tensor) -> None:
    ratio_n = torch.exp(log_ratio_n)
    for role, mask_n in (("act", ~rehearse_n), ("rehearse", rehearse_n)):
        work.sums.add(f"entropy_{role}", torch.where(mask_n, entropy_n, 0.0))
        work.sums.add(f"tokens_{role}", mask_n)
    outside_n = (ratio_n < 1 - work.settings.clip_low) | (ratio_n > 1 + work.settings.clip_high)
    work.sums.add("clipped", outside_n.float())
    work.sums.add("ratio", ratio_n)
    work.sums.add("bad", ~torch.isfinite(token_n))


def _metrics(sums: dict[str, float], norm: float, tokens: int) -> dict[str, float]:
    """Means over tokens, named as docs/metrics.md defines them."""
    roles = {role: sums.get(f"tokens_{role}", 0.0) for role in ("act", "rehearse")}
    policy, anchors = max(1.0, sum(roles.values())), max(1.0, sums.get("anchors", 0.0))
    return {
        "loss": sums.get("loss", 0.0),
        "grad_norm": norm,
        **{name: sums[name] / over for name, over in (("kl", policy), ("anchor_kl", anchors)) if name in sums},
        "clip_share": sums.get("clipped", 0.0) / policy,
        "ratio": sums.get("ratio", 0.0) / policy,
        "trained_tokens": float(tokens),
        **{f"tokens/{role}": count for role, count in roles.items()},
        **{f"entropy/{role}": sums[f"entropy_{role}"] / count for role, count in roles.items() if count},
    }
