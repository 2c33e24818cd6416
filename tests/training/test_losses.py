"""Losses, token by token, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from envace.training.forward import WIDE, read_tokens
from envace.training.losses import SampledKl, kl_full, kl_sampled, policy_loss


def loss(ratio: float, advantage: float, **settings: float | None) -> float:
    """The loss of one token whose likelihood ratio is given."""
    found = policy_loss(torch.tensor([math.log(ratio)]), torch.tensor([0.0]), torch.tensor([advantage]), **settings)  # type: ignore[arg-type]
    return float(found)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # at the old policy the loss is -A
        (1.1, 1.0, -1.1),  # within the clip: -rho A
        (1.5, 1.0, -1.2),  # a good token may not gain beyond 1 + .2
        (0.5, 1.0, -0.5),  # but may always be brought back
        (0.5, -1.0, 0.8),  # a bad token may not lose beyond 1 - .2
        (1.5, -1.0, 1.5),  # but may always be brought back
        (5.0, -1.0, 3.0),  # up to the dual clip, 3 |A|
        (5.0, -2.0, 6.0),
        (5.0, 1.0, -1.2),  # which is for bad tokens only
        (7.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, expected: float) -> None:
    assert loss(ratio, advantage) == pytest.approx(expected, abs=1e-5)


def test_each_clip_distance_is_its_own() -> None:
    assert loss(2.0, 1.0, clip_low=0.1, clip_high=0.4) == pytest.approx(-1.4, abs=1e-5)
    assert loss(0.1, -1.0, clip_low=0.1, clip_high=0.4) == pytest.approx(0.9, abs=1e-5)
    assert loss(9.0, -1.0, dual_clip=5.0) == pytest.approx(5.0, abs=1e-5)


def gradient(ratio: float, advantage: float) -> float:
    now = torch.tensor([math.log(ratio)], requires_grad=True)
    policy_loss(now, torch.tensor([0.0]), torch.tensor([advantage])).sum().backward()
    assert now.grad is not None
    return float(now.grad)


def test_a_step_against_the_gradient_raises_good_tokens_and_lowers_bad_ones() -> None:
    assert gradient(1.0, 1.0) == pytest.approx(-1.0)
    assert gradient(1.0, -1.0) == pytest.approx(1.0)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0), (5.0, -1.0)])
def test_clipped_tokens_have_no_gradient(ratio: float, advantage: float) -> None:
    assert gradient(ratio, advantage) == 0.0


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_k3_is_never_negative(now: float, reference: float) -> None:
    assert float(kl_sampled(torch.tensor([now]), torch.tensor([reference]))) >= -1e-6


def test_k3_is_zero_at_equality_and_known_elsewhere() -> None:
    assert float(kl_sampled(torch.tensor([-1.3]), torch.tensor([-1.3]))) == 0.0
    # reference / policy = .5 / .25 = 2: 2 - 1 - log 2.
    assert float(kl_sampled(torch.log(torch.tensor([0.25])), torch.log(torch.tensor([0.5])))) == pytest.approx(
        1 - math.log(2), abs=1e-6
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_estimators_are_right_on_average(estimator: SampledKl) -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    exact = float((policy * (policy / reference).log()).sum())
    expected = float((policy * kl_sampled(policy.log(), reference.log(), estimator)).sum())
    assert expected == pytest.approx(exact, abs=1e-6)
    assert float(kl_full(policy.log(), reference.log())) == pytest.approx(exact, abs=1e-6)


def test_k2_has_the_gradient_of_the_kl_on_average_and_k1_has_none() -> None:
    reference, found = torch.tensor([0.3, 0.3, 0.4]).log(), {}
    for estimator in ("k1", "k2", "full"):
        logits = torch.tensor([0.7, 0.2, 0.1]).log().requires_grad_()
        log = torch.log_softmax(logits, -1)
        if estimator == "full":
            kl_full(log, reference).backward()
        else:  # the average over what the policy would sample
            (log.detach().exp() * kl_sampled(log, reference, estimator)).sum().backward()  # type: ignore[arg-type]
        found[estimator] = logits.grad
    torch.testing.assert_close(found["k2"], found["full"])
    torch.testing.assert_close(found["k1"], torch.zeros(3), atol=1e-6, rtol=0)


def distribution(*shares: float) -> Tensor:
    return torch.tensor([shares]).log()


def test_full_kl_by_hand_weighs_by_its_first() -> None:
    # KL(p || q) = .5 log(.5 / .25) + .5 log(.5 / .75) = .5 log(4 / 3)
    found = float(kl_full(distribution(0.5, 0.5), distribution(0.25, 0.75)))
    assert found == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)
    assert float(kl_full(distribution(0.25, 0.75), distribution(0.25, 0.75))) == pytest.approx(0.0, abs=1e-7)


def test_full_kl_pulls_the_policy_to_the_reference() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    kl_full(distribution(0.8, 0.1, 0.1), torch.log_softmax(logits, -1)).sum().backward()
    assert logits.grad is not None
    # d/dlogit = policy - reference = 1/3 - (.8, .1, .1): a step against it raises the first.
    torch.testing.assert_close(-logits.grad, torch.tensor([[0.8 - 1 / 3, 0.1 - 1 / 3, 0.1 - 1 / 3]]))


def test_entropy_of_a_fair_choice_of_four_is_log_four() -> None:
    chosen, entropy = read_tokens(distribution(0.25, 0.25, 0.25, 0.25), torch.tensor([2]))
    assert float(entropy) == pytest.approx(math.log(4), abs=1e-6)
    assert float(chosen) == pytest.approx(-math.log(4), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [7, WIDE])
@pytest.mark.parametrize("use", ["chosen", "entropy", "both"])
def test_reading_a_token_has_the_value_and_gradient_of_the_plain_way(use: str, vocabulary: int) -> None:
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 6, 3, 3, 1])

    def total(chosen: Tensor, entropy: Tensor) -> Tensor:
        weights = torch.arange(1.0, 6.0)
        return (weights * {"chosen": chosen, "entropy": entropy, "both": chosen + 2 * entropy}[use]).sum()

    ours, plain = (logits.clone().requires_grad_() for _ in range(2))
    log = torch.log_softmax(plain, -1)
    found = total(*read_tokens(ours, targets))
    expected = total(log.gather(1, targets[:, None])[:, 0], -(log.exp() * log).sum(-1))
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_ratio_beyond_all_floats_leaves_loss_and_gradient_finite() -> None:
    # exp(200) is infinite; a gradient of 0 times it would be no number.
    now = torch.tensor([0.0, 0.0], requires_grad=True)
    policy_loss(now, torch.tensor([-200.0, -200.0]), torch.tensor([1.0, -1.0])).sum().backward()
    kl_sampled(now, torch.tensor([200.0, -200.0])).sum().backward()
    assert now.grad is not None
    assert torch.isfinite(now.grad).all()


def test_dual_clip_can_be_switched_off() -> None:
    assert loss(9.0, -1.0, dual_clip=None) == pytest.approx(9.0, abs=1e-5)
