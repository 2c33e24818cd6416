"""Losses, per token. Pure functions on tensors of one shape, (N,) over the tokens that take part."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

SampledKl = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within this, so that their exponential and its gradient are finite."""


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
) -> Tensor:
    """The clipped surrogate, negated: -min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most -dual_clip * A.

    Args:
        logprobs_N: Log-probability now, at the sampling temperature, nats.
        old_logprobs_N: Log-probability when it was sampled, nats.
        advantages_N: Advantage of the token's output.
        clip_low: Lower clip distance.
        clip_high: Upper clip distance.
        dual_clip: Bound of the loss of a token with a negative advantage, in units of -A; None for no bound.

    Source: PPO (arXiv:1707.06347, eq. 7); dual clip (arXiv:1912.09729).
    """
    ratio_N = torch.exp((logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped_N = torch.clamp(ratio_N, 1 - clip_low, 1 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if dual_clip is None:
        return loss_N
    bounded_N = torch.minimum(loss_N, -dual_clip * advantages_N)
    return torch.where(advantages_N < 0, bounded_N, loss_N)


def kl_sampled(logprobs_N: Tensor, reference_N: Tensor, estimator: SampledKl = "k3") -> Tensor:
    """An estimate of KL(policy || reference) from sampled tokens, with log r = log reference - log policy.

    `k1` is -log r: right on average, often negative, and on average without a gradient. `k2` is (log r)^2 / 2: never
    negative, a little off, and its gradient is right on average. `k3` is r - 1 - log r: right on average and never
    negative; its gradient pulls the probability of a sampled token to the reference's.

    Source: J. Schulman, "Approximating KL divergence" (2020).
    """
    log_ratio_N = reference_N - logprobs_N
    if estimator == "k1":
        return -log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(log_ratio_N) - 1 - log_ratio_N


def kl_full(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """KL(p || q) over the vocabulary, nats. Shapes (N, V) -> (N,)."""
    return (log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1)
