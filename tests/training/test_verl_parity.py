"""Advantages, losses and aggregation against verl's own, on random numbers; where ours differ, a test says how.

verl works on padded (rows, tokens) tensors, where a row is one sequence; so here an output is a trajectory and a row.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from envace.training.advantages import AdvantageSettings, Outputs, advantages
from envace.training.aggregation import Aggregation, token_weights
from envace.training.losses import MAX_LOG_RATIO, SampledKl, kl_sampled, policy_loss

SEEDS = range(5)


@pytest.fixture(scope="module")
def verl() -> ModuleType:
    """verl's core algorithms; nothing of it is started."""
    os.environ.setdefault("VERL_USE_EXTERNAL_PLUGINS", "none")
    return importlib.import_module("verl.trainer.ppo.core_algos")


@dataclass
class Batch:
    """Rows of tokens, some of which are sampled."""

    mask_BT: Tensor
    rewards_B: Tensor
    groups_B: np.ndarray  # type: ignore[type-arg]
    now_BT: Tensor
    old_BT: Tensor
    token_advantages_BT: Tensor

    def token_rewards_BT(self) -> Tensor:
        """The reward of a row at its last sampled token, where verl has it."""
        rewards_BT = torch.zeros_like(self.mask_BT)
        last_B = (self.mask_BT * torch.arange(1, self.mask_BT.shape[1] + 1)).argmax(1)
        rewards_BT[torch.arange(len(last_B)), last_B] = self.rewards_B
        return rewards_BT

    def outputs(self) -> Outputs:
        size = len(self.rewards_B)
        return Outputs(
            rewards_B=self.rewards_B.double().numpy(),
            groups_B=self.groups_B,
            roles_B=np.zeros(size, dtype=np.int64),
            trajectories_B=np.arange(size),
            tokens_B=self.mask_BT.sum(1).numpy().astype(np.int64),
        )


def draw(seed: int, *, flat: bool = False, lone: bool = False) -> Batch:
    """Groups of four, two and three rows with gaps in their masks; if told, a flat group of three, and one of one."""
    random = torch.Generator().manual_seed(seed)
    groups = [0] * 4 + [1] * 2 + [2] * 3 + [3] * 3 * flat + [4] * lone
    size, length = len(groups), 12
    mask_BT = (torch.rand(size, length, generator=random) < 0.6).float()
    mask_BT[:, 3] = 1.0  # no row is empty
    rewards_B = torch.randperm(20, generator=random)[:size] / 20  # no two alike
    rewards_B[torch.tensor(groups) == 3] = 0.4
    now_BT = -3 * torch.rand(size, length, generator=random)
    return Batch(
        mask_BT=mask_BT,
        rewards_B=rewards_B,
        groups_B=np.array(groups, dtype=np.int64),
        now_BT=now_BT,
        old_BT=now_BT + torch.randn(size, length, generator=random),
        token_advantages_BT=torch.randn(size, length, generator=random),
    )


def ours(batch: Batch, **settings: object) -> Tensor:
    """Advantages (B, T), each output's on its tokens."""
    values_B = advantages(batch.outputs(), AdvantageSettings(**settings)).values_B  # type: ignore[arg-type]
    return torch.from_numpy(values_B).float()[:, None] * batch.mask_BT


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", ["none", "std"])
def test_cells_are_its_grpo_zero_variance_groups_included(verl: ModuleType, seed: int, scale: str) -> None:
    batch = draw(seed, flat=True)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        batch.token_rewards_BT(), batch.mask_BT, batch.groups_B, norm_adv_by_std_in_grpo=scale == "std"
    )
    # It adds 1e-6 to a standard deviation of some tenths.
    torch.testing.assert_close(ours(batch, scale=scale), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lone_group_gets_zero_here_and_its_raw_reward_there(verl: ModuleType, seed: int) -> None:
    batch = draw(seed, lone=True)
    theirs, _ = verl.compute_grpo_outcome_advantage(
        batch.token_rewards_BT(), batch.mask_BT, batch.groups_B, norm_adv_by_std_in_grpo=False
    )
    torch.testing.assert_close(ours(batch)[:-1], theirs[:-1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(theirs[-1], batch.rewards_B[-1] * batch.mask_BT[-1])
    assert not ours(batch)[-1].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_global_is_its_reinforce_plus_plus(verl: ModuleType, seed: int) -> None:
    batch = draw(seed, flat=True, lone=True)  # neither means anything where all are compared with all
    theirs, _ = verl.compute_reinforce_plus_plus_outcome_advantage(
        batch.token_rewards_BT(), batch.mask_BT, config=SimpleNamespace(gamma=1.0)
    )
    torch.testing.assert_close(ours(batch, kind="global"), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_global_baseline_is_its_reinforce_plus_plus_baseline(verl: ModuleType, seed: int) -> None:
    batch = draw(seed)
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_rewards_BT(), batch.mask_BT, batch.groups_B
    )
    torch.testing.assert_close(ours(batch, kind="global-baseline"), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_global_baseline_leaves_flat_and_lone_groups_at_zero_and_all_others_as_there(
    verl: ModuleType, seed: int
) -> None:
    batch = draw(seed, flat=True, lone=True)
    # There a flat group gets minus the mean over tokens, and a lone one is whitened from its raw reward. Here both are
    # 0, before whitening and after; with a lone reward of 0, statistics are the same.
    batch.rewards_B[-1] = 0.0
    theirs, _ = verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
        batch.token_rewards_BT(), batch.mask_BT, batch.groups_B
    )
    found = ours(batch, kind="global-baseline")
    torch.testing.assert_close(found[:9], theirs[:9], rtol=1e-4, atol=1e-5)
    assert not found[9:].any()
    assert theirs[9:].any()


AGGREGATIONS: list[tuple[str, Aggregation, int | None]] = [
    ("token-mean", "token-mean", None),
    ("seq-mean-token-mean", "sequence-mean", None),
    ("seq-mean-token-sum-norm", "constant", 12),  # its length is the width of the batch unless told
    ("seq-mean-token-sum", "constant", 1),
]


def aggregated(batch: Batch, losses_BT: Tensor, aggregation: Aggregation, length: int | None) -> Tensor:
    tokens_B = batch.outputs().tokens_B
    weights_B = token_weights(
        tokens_B, np.arange(len(tokens_B)), tokens_B >= 0, aggregation=aggregation, constant_length=length
    )
    return (losses_BT * batch.mask_BT * torch.from_numpy(weights_B).float()[:, None]).sum()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("theirs", "aggregation", "length"), AGGREGATIONS)
def test_aggregation_is_its_agg_loss(
    verl: ModuleType, seed: int, theirs: str, aggregation: Aggregation, length: int | None
) -> None:
    batch = draw(seed)
    batch.mask_BT[2] = 0.0  # a sequence without a token is none
    expected = verl.agg_loss(batch.now_BT, batch.mask_BT, theirs)
    torch.testing.assert_close(aggregated(batch, batch.now_BT, aggregation, length), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dual_clip", [1.5, 3.0])
@pytest.mark.parametrize(("theirs", "aggregation", "length"), AGGREGATIONS)
def test_policy_loss_and_its_gradient_are_those_of_its_vanilla_loss(
    verl: ModuleType, seed: int, dual_clip: float, theirs: str, aggregation: Aggregation, length: int | None
) -> None:
    batch = draw(seed)
    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": dual_clip}
    config = SimpleNamespace(**settings, global_batch_info={}, get=settings.get)
    now, same = (batch.now_BT.clone().requires_grad_() for _ in range(2))
    expected, metrics = verl.get_policy_loss_fn("vanilla")(
        batch.old_BT, now, batch.token_advantages_BT, batch.mask_BT, loss_agg_mode=theirs, config=config
    )
    assert metrics["actor/pg_clipfrac"] > 0  # the clip binds, the dual clip too
    assert metrics["actor/pg_clipfrac_lower"] > 0
    losses_BT = policy_loss(
        same, batch.old_BT, batch.token_advantages_BT, clip_low=0.1, clip_high=0.3, dual_clip=dual_clip
    )
    found = aggregated(batch, losses_BT, aggregation, length)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    torch.testing.assert_close(same.grad, now.grad)


def test_log_ratios_are_bounded_as_there(verl: ModuleType) -> None:
    now, old, advantage, mask = (torch.tensor([[value]]) for value in (0.0, -30.0, -1.0, 1.0))
    # Without a bound on either the loss would be exp(30); the largest dual clip lets exp(20) through.
    expected, *_ = verl.compute_policy_loss(old, now, advantage, mask, cliprange=0.2, clip_ratio_c=1e12)
    found = policy_loss(now, old, advantage, dual_clip=None)
    assert float(found) == pytest.approx(float(np.exp(MAX_LOG_RATIO)), rel=1e-5)
    torch.testing.assert_close(found[0, 0], expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("estimator", "theirs"),
    [("k1", "kl"), ("k1", "k1"), ("k2", "mse"), ("k2", "k2"), ("k3", "low_var_kl"), ("k3", "k3")],
)
def test_kl_estimates_are_its_kl_penalties(verl: ModuleType, seed: int, estimator: SampledKl, theirs: str) -> None:
    batch = draw(seed)
    now, same = (batch.now_BT.clone().requires_grad_() for _ in range(2))
    reference_BT = (batch.now_BT + batch.old_BT) / 2  # below where its k3 is cut, see the next test
    expected, found = verl.kl_penalty(now, reference_BT, theirs), kl_sampled(same, reference_BT, estimator)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(same.grad, now.grad)


def test_k3_is_not_cut_at_ten_here(verl: ModuleType) -> None:
    # Cut, it would not pull at all on a policy that has lost a token which the reference likes.
    now, reference = torch.tensor([-6.0]), torch.tensor([0.0])
    assert float(verl.kl_penalty(now, reference, "k3")) == 10.0
    assert float(kl_sampled(now, reference, "k3")) == pytest.approx(np.exp(6) - 1 - 6, rel=1e-5)


def test_it_has_no_full_kl(verl: ModuleType) -> None:
    with pytest.raises(NotImplementedError):
        verl.kl_penalty(torch.zeros(1, 3), torch.zeros(1, 3), "full")
