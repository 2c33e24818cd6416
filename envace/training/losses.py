"""Losses, per token. Pure functions on tensors of one shape, (N,) over the tokens that take part."""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Tensor:
    """The clipped surrogate, negated: -min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most -dual_clip * A.

    Args:
        logprobs_N: Log-probability now, at the sampling temperature, nats.
        old_logprobs_N: Log-probability when it was sampled, nats.
        advantages_N: Advantage of the token's output.
        clip_low: Lower clip distance.
        clip_high: Upper clip distance.
        dual_clip: Bound of the loss of a token with a negative advantage, in units of -A.

    Source: PPO (arXiv:1707.06347, eq. 7); dual clip (arXiv:1912.09729).
    """
    ratio_N = torch.exp(logprobs_N - old_logprobs_N)
    clipped_N = torch.clamp(ratio_N, 1 - clip_low, 1 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    bounded_N = torch.minimum(loss_N, -dual_clip * advantages_N)
    return torch.where(advantages_N < 0, bounded_N, loss_N)


def kl_k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) from sampled tokens, never negative: r - 1 - log r with r = reference /
    policy.

    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3.
    """
    log_ratio_N = reference_N - logprobs_N
    return torch.exp(log_ratio_N) - 1 - log_ratio_N


def kl_full(log_policy_NV: Tensor, log_reference_NV: Tensor) -> Tensor:
    """KL(reference || policy) over the vocabulary, nats, for tokens not chosen. Shapes (N, V) -> (N,)."""
    return (log_reference_NV.exp() * (log_reference_NV - log_policy_NV)).sum(-1)


def entropy(log_policy_NV: Tensor) -> Tensor:
    """Entropy of the next-token distribution, nats. Shape (N, V) -> (N,)."""
    return -log_policy_NV.exp().mul_(log_policy_NV).sum(-1)
