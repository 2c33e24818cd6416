"""One optimiser step: what it does to a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from envace.errors import TrainingError
from envace.training.batches import Row, training_rows
from envace.training.forward import Reference
from envace.training.recipe import LossSection
from envace.training.update import plan, update
from envace.types import Author, Group, Learn, Role, Segment, Trajectory

New = Callable[..., LlamaForCausalLM]


def logprobs_of(model: LlamaForCausalLM, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token given those before; 0 for the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def row(
    model: LlamaForCausalLM,
    ids: list[int],
    *,
    policy: list[int] = (),  # type: ignore[assignment]
    anchor: list[int] = (),  # type: ignore[assignment]
    advantage: float = 0.0,
    temperature: float = 1.0,
) -> Row:
    """A row whose tokens at given positions were sampled from (or anchored to) the model as it is."""
    masks = np.zeros((2, len(ids)), dtype=np.bool_)
    masks[0, list(policy)], masks[1, list(anchor)] = True, True
    return Row(
        ids=np.array(ids),
        policy=masks[0],
        anchor=masks[1],
        advantages=np.where(masks[0], advantage, 0).astype(np.float32),
        weights=np.zeros(len(ids), dtype=np.float32),
        logprobs=(logprobs_of(model, ids, temperature).numpy() * masks[0]).astype(np.float32),
        rehearse=np.zeros(len(ids), dtype=np.bool_),
    )


def token_mean(rows: list[Row]) -> list[Row]:
    """The rows with every token weighing the same among those of its kind."""
    policy, anchors = (max(1, sum(int(getattr(row, kind).sum()) for row in rows)) for kind in ("policy", "anchor"))
    return [replace(row, weights=(row.policy / policy + row.anchor / anchors).astype(np.float32)) for row in rows]


def step(
    model: LlamaForCausalLM,
    rows: list[Row],
    *,
    reference: LlamaForCausalLM | None = None,
    lr: float = 0.05,
    temperature: float = 1.0,
    **settings: float,
) -> dict[str, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return update(
        model,
        None if reference is None else Reference(reference),
        optimizer,
        token_mean(rows),
        settings=LossSection(**settings),  # type: ignore[arg-type]
        temperature=temperature,
        pad_id=0,
    )


def weights(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def some_rows(model: LlamaForCausalLM) -> list[Row]:
    """Seven rows of lengths 4 to 22 with unequal numbers of trained tokens, two of them anchored too."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(7):
        ids = rng.integers(10, 300, 4 + 3 * number).tolist()
        anchor = [1] if number % 3 == 0 else []
        policy = list(range(2, len(ids), 1 + number % 2))
        rows.append(row(model, ids, policy=policy, anchor=anchor, advantage=(-1.0) ** number * (number + 1) / 7))
    return rows


@pytest.mark.parametrize("max_batch_tokens", [1, 40, 100])
def test_update_does_not_depend_on_how_rows_are_cut_into_batches(new_tiny: New, max_batch_tokens: int) -> None:
    # Aggregation is the mean over the tokens of the whole update; a mean of batch means would differ, since batches
    # hold unequal numbers of trained tokens.
    whole, cut, reference = new_tiny(1), new_tiny(1), new_tiny(2)
    rows = some_rows(whole)
    together = step(whole, rows, reference=reference, kl=0.1, max_batch_tokens=10**6, max_grad_norm=1e9)
    apart = step(cut, rows, reference=reference, kl=0.1, max_batch_tokens=max_batch_tokens, max_grad_norm=1e9)
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights(whole), weights(new_tiny(1)), atol=1e-4)
    assert apart == pytest.approx(together, rel=1e-4, abs=1e-5)


def test_loss_is_the_mean_over_the_trained_tokens_of_the_update(new_tiny: New) -> None:
    # At the sampling policy a token's loss is -A: 3 tokens with A = 1 and one with A = -2 make (-3 + 2) / 4 = -1/4.
    model = new_tiny()
    rows = [
        row(model, [5, 6, 7, 8, 9], policy=[2, 3, 4], advantage=1.0),
        row(model, [5, 6, 7], policy=[2], advantage=-2.0),
    ]
    metrics = step(model, rows)
    assert metrics["loss"] == pytest.approx(-0.25, abs=1e-5)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["clip_share"] == 0.0
    assert metrics["tokens/act"] == 4
    assert metrics["trained_tokens"] == 8


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_positive_advantage_raises_the_probability_and_negative_lowers_it(new_tiny: New, advantage: float) -> None:
    model, ids = new_tiny(), [5, 6, 7, 8]
    before = logprobs_of(model, ids)[2:].sum()
    step(model, [row(model, ids, policy=[2, 3], advantage=advantage)], lr=0.01)
    assert (logprobs_of(model, ids)[2:].sum() - before) * advantage > 0


def test_tokens_outside_the_mask_are_not_trained(new_tiny: New) -> None:
    # The same mask and prefix, another tail: what follows the trained tokens has no part in the step.
    one, two = new_tiny(), new_tiny()
    step(one, [row(one, [5, 6, 7, 8], policy=[2], advantage=1.0)])
    step(two, [row(two, [5, 6, 7, 99], policy=[2], advantage=1.0)])
    torch.testing.assert_close(weights(one), weights(two))


def test_zero_advantage_without_kl_changes_nothing(new_tiny: New) -> None:
    model = new_tiny()
    before = weights(model)
    step(model, [row(model, [5, 6, 7, 8], policy=[1, 2, 3], advantage=0.0)])
    assert torch.equal(weights(model), before)


def test_anchor_pulls_only_towards_the_reference(new_tiny: New) -> None:
    model, reference, ids = new_tiny(1), new_tiny(2), [5, 6, 7, 8]
    rows = [row(model, ids, anchor=[2, 3])]
    first = step(model, rows, reference=reference, anchor_kl=1.0, lr=0.01)["anchor_kl"]
    second = step(model, rows, reference=reference, anchor_kl=1.0, lr=0.01)["anchor_kl"]
    assert 0 < second < first
    # Anchored to itself, it stays where it is.
    same = new_tiny(1)
    before = weights(same)
    step(same, [row(same, ids, anchor=[2, 3])], reference=new_tiny(1), anchor_kl=1.0, lr=0.01)
    torch.testing.assert_close(weights(same), before, atol=1e-6, rtol=0)


def test_anchor_has_no_policy_gradient(new_tiny: New) -> None:
    model = new_tiny()
    before = weights(model)
    metrics = step(model, [row(model, [5, 6, 7, 8], anchor=[2, 3], advantage=1.0)])
    assert torch.equal(weights(model), before)
    assert metrics["loss"] == 0.0


def test_ratio_is_taken_at_the_sampling_temperature(new_tiny: New) -> None:
    model, ids = new_tiny(), [5, 6, 7, 8]
    metrics = step(model, [row(model, ids, policy=[2, 3], advantage=1.0, temperature=0.5)], temperature=0.5)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_temperature_zero_is_refused(new_tiny: New) -> None:
    model = new_tiny()
    with pytest.raises(TrainingError, match="above 0"):
        step(model, [row(model, [5, 6, 7], policy=[2], advantage=1.0)], temperature=0.0)


def test_no_step_is_taken_on_numbers_that_are_not_finite(new_tiny: New) -> None:
    model = new_tiny()
    before = weights(model)
    bad = row(model, [5, 6, 7, 8], policy=[2, 3], advantage=1.0)
    bad.logprobs[2] = np.nan
    with pytest.raises(TrainingError, match="not finite, no step taken"):
        step(model, [bad, row(model, [5, 6, 7], policy=[2], advantage=1.0)])
    assert torch.equal(weights(model), before)


def test_gradient_is_clipped_to_its_norm(new_tiny: New) -> None:
    # SGD moves by lr times the gradient, whose norm is clipped to .5: lr * .5 = .005.
    model = new_tiny()
    before = weights(model)
    metrics = step(model, [row(model, [5, 6, 7, 8], policy=[2, 3], advantage=100.0)], lr=0.01, max_grad_norm=0.5)
    assert metrics["grad_norm"] > 0.5
    assert float((weights(model) - before).norm()) == pytest.approx(0.005, rel=1e-2)


@pytest.mark.parametrize("logit_chunk", [1, 7])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_update_does_not_depend_on_how_logits_are_cut_into_chunks(
    new_tiny: New, logit_chunk: int, estimator: str
) -> None:
    whole, cut, reference = new_tiny(1), new_tiny(1), new_tiny(2)
    rows, settings = some_rows(whole), {"kl": 0.1, "entropy": 0.2, "kl_estimator": estimator, "max_grad_norm": 1e9}
    together = step(whole, rows, reference=reference, logit_chunk=10**6, **settings)  # type: ignore[arg-type]
    apart = step(cut, rows, reference=reference, logit_chunk=logit_chunk, **settings)  # type: ignore[arg-type]
    torch.testing.assert_close(weights(cut), weights(whole), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights(whole), weights(new_tiny(1)), atol=1e-4)
    assert apart == pytest.approx(together, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_the_step_is_that_of_the_whole_loss_written_out(new_tiny: New, share: bool) -> None:
    # Without cuts: all logits of a row at once, every term by torch's own functions, one way back.
    model, plain, reference = new_tiny(1), new_tiny(1), new_tiny(2)
    loss = LossSection(
        kl=0.3, anchor_kl=0.2, entropy=0.1, max_grad_norm=1e9, logit_chunk=5, max_batch_tokens=90, share_prompts=share
    )
    rows = training_rows(sampled_groups(model), loss=loss).rows
    total = torch.zeros(())
    for made in rows:
        ids, after = torch.from_numpy(made.ids), slice(1, None)
        now, was = (torch.log_softmax(m(ids[None]).logits[0, :-1] / 0.7, -1) for m in (plain, reference))
        chosen, before = (log.gather(1, ids[after, None])[:, 0] for log in (now, was.detach()))
        ratio = torch.exp(chosen - torch.from_numpy(made.logprobs[after]))
        advantage, weight = (torch.from_numpy(array[after]) for array in (made.advantages, made.weights))
        worse = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        surrogate = -torch.where(advantage < 0, torch.maximum(worse, 3 * advantage), worse)
        k3 = torch.exp(before - chosen) - 1 - (before - chosen)
        entropy = -(now.exp() * now).sum(-1)
        anchor = torch.nn.functional.kl_div(now, was.detach(), log_target=True, reduction="none").sum(-1)
        policy = torch.from_numpy(made.policy[after])
        token = torch.where(policy, surrogate + 0.3 * k3 - 0.1 * entropy, 0.2 * anchor)
        total = total + (weight * token).sum()
    total.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    metrics = update(model, Reference(reference), optimizer, rows, settings=loss, temperature=0.7, pad_id=0)
    assert metrics["loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    moved = weights(plain) - weights(model)
    gradient = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(moved, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("settings", [
    {"aggregation": "token-mean"},
    {"aggregation": "sequence-mean", "unit": "output"},
    {"aggregation": "sequence-mean", "unit": "trajectory", "flat": "drop"},
    {"aggregation": "constant", "constant_length": 20, "flat": "mask"},
])  # fmt: skip
def test_no_aggregation_depends_on_how_rows_are_cut_into_batches(new_tiny: New, settings: dict[str, object]) -> None:
    found = []
    for max_batch_tokens in (1, 60, 10**6):
        model = new_tiny(1)
        loss = LossSection(max_batch_tokens=max_batch_tokens, kl=0.1, max_grad_norm=1e9, **settings)  # type: ignore[arg-type]
        rows = training_rows(sampled_groups(model), loss=loss).rows
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        update(model, Reference(new_tiny(2)), optimizer, rows, settings=loss, temperature=1.0, pad_id=0)
        found.append(weights(model))
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1], found[2], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found[2], weights(new_tiny(1)), atol=1e-4)


def sampled_groups(model: LlamaForCausalLM) -> list[Group]:
    """Three groups of three trajectories with prompts of their own; one group is flat. Lengths differ."""
    rng, groups = np.random.default_rng(3), []
    for number, rewards in enumerate(([1.0, 0.5, 0.0], [0.25] * 3, [0.0, 0.0, 1.0])):
        prompt, made = rng.integers(10, 300, 20 + number).tolist(), []
        for index, reward in enumerate(rewards):
            trajectory = Trajectory(
                scenario_id="s", environment_id="e", kind="k", group=number, index=index, reward=reward
            )
            trajectory.segments = [Segment(ids=prompt, author=Author.USER)]
            for turn, role in enumerate((Role.ACT, Role.REHEARSE, Role.ACT)):
                held = [token for segment in trajectory.segments for token in segment.ids]
                ids = rng.integers(10, 300, 2 + (index + turn) % 4).tolist()
                logprobs = logprobs_of(model, held + ids)[len(held) :].tolist()
                author = Author.ASSISTANT if role is Role.ACT else Author.TOOL
                sampled = Segment(ids=ids, author=author, role=role, learn=Learn.POLICY, logprobs=logprobs)
                anchored = Segment(ids=[7 + turn, 8], author=Author.TOOL, learn=Learn.ANCHOR)
                trajectory.segments += [sampled, anchored]
            made.append(trajectory)
        groups.append(Group(scenario_id="s", trajectories=made))
    return groups


@pytest.mark.parametrize("max_batch_tokens", [30, 10**6])
def test_a_common_prompt_that_is_read_once_gives_the_same_update(new_tiny: New, max_batch_tokens: int) -> None:
    found, metrics = [], []
    for share in (False, True):
        model = new_tiny(1)
        loss = LossSection(share_prompts=share, max_batch_tokens=max_batch_tokens, kl=0.1, max_grad_norm=1e9)
        rows = training_rows(sampled_groups(model), loss=loss).rows
        shared = [prefix for _, prefix in plan(rows, max_tokens=max_batch_tokens, share=share) if prefix]
        assert bool(shared) == (share and max_batch_tokens > 30)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        metrics.append(update(model, Reference(new_tiny(2)), optimizer, rows, settings=loss, temperature=0.7, pad_id=0))
        found.append(weights(model))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-5)


def test_a_batch_with_a_common_prompt_keeps_within_its_tokens(new_tiny: New) -> None:
    rows = training_rows(sampled_groups(new_tiny(1))).rows
    batches = list(plan(rows, max_tokens=60, share=True))
    assert sorted(index for batch, _ in batches for index in batch) == list(range(len(rows)))
    assert any(prefix for _, prefix in batches)
    for batch, prefix in batches:
        assert prefix + len(batch) * max(len(rows[i].ids) - prefix for i in batch) <= 60


def test_g1_no_kl_pulls_on_the_tokens_of_masked_or_dropped_cells(new_tiny: New) -> None:
    for flat, moves in (("keep", True), ("mask", False), ("drop", False)):
        model = new_tiny(1)
        groups = sampled_groups(model)[1:2]
        for made in groups[0].trajectories:
            made.segments = [segment for segment in made.segments if segment.learn is not Learn.ANCHOR]
        loss = LossSection(kl=1.0, flat=flat)  # type: ignore[arg-type]
        rows = training_rows(groups, loss=loss).rows
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        metrics = update(model, Reference(new_tiny(2)), optimizer, rows, settings=loss, temperature=1.0, pad_id=0)
        assert torch.equal(weights(model), weights(new_tiny(1))) != moves
        assert (metrics["trained_tokens"] > 0) == moves


def test_entropy_bonus_raises_the_entropy(new_tiny: New) -> None:
    model, ids = new_tiny(), [5, 6, 7, 8]
    rows = [row(model, ids, policy=[2, 3], advantage=0.0)]
    first = step(model, rows, entropy=1.0, lr=0.01)["entropy/act"]
    assert step(model, rows, entropy=1.0, lr=0.01)["entropy/act"] > first


def test_what_follows_the_last_learned_token_is_not_read(new_tiny: New) -> None:
    model = new_tiny()
    rows = [row(model, [5, 6, 7, 8, 9], policy=[2], advantage=1.0), row(model, [5, 6, 7])]
    assert step(model, rows)["trained_tokens"] == 3


def test_tokens_that_are_not_finite_are_counted(new_tiny: New) -> None:
    model = new_tiny()
    bad = row(model, [5, 6, 7, 8], policy=[2, 3], advantage=1.0)
    bad.logprobs[2] = np.nan
    with pytest.raises(TrainingError, match=r"\(1 of its tokens are not finite\)"):
        step(model, [bad, row(model, [5, 6, 7], policy=[2], advantage=1.0)])


def test_recomputed_activations_give_the_same_update(new_tiny: New) -> None:
    stepped = []
    for recompute in (False, True):
        model = new_tiny()
        learned = row(model, [5, 6, 7, 8, 9], policy=[2, 3], advantage=1.0)
        rows = token_mean([learned, row(model, [4, 5, 6], anchor=[1])])
        settings = LossSection(recompute=recompute, share_prompts=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        update(model, Reference(model), optimizer, rows, settings=settings, temperature=1.0, pad_id=0)
        assert model.is_gradient_checkpointing == recompute
        stepped.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(stepped[0], stepped[1], atol=1e-6, rtol=0)
