"""Rows: exactly the sampled tokens are trained, each with the advantage of its own role's cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.errors import TrainingError
from envace.models.ragged import buckets
from envace.training.advantages import AdvantageSettings
from envace.training.batches import Row, Training, pad, training_rows
from envace.training.recipe import LossSection, Recipe
from envace.types import Author, Group, Learn, Role, Segment, StopReason, Trajectory


def prompt(*ids: int) -> Segment:
    return Segment(ids=list(ids), author=Author.USER)


def header(*ids: int) -> Segment:
    return Segment(ids=list(ids), author=Author.ASSISTANT)


def real(*ids: int) -> Segment:
    return Segment(ids=list(ids), author=Author.TOOL)


def handed_over(*ids: int) -> Segment:
    return Segment(ids=list(ids), author=Author.TOOL, learn=Learn.ANCHOR)


def sampled(role: Role, *ids: int, learn: Learn = Learn.POLICY) -> Segment:
    author = Author.ASSISTANT if role is Role.ACT else Author.TOOL
    return Segment(ids=list(ids), author=author, role=role, learn=learn, logprobs=[-i / 10 for i in ids])


def acted(*ids: int) -> Segment:
    return sampled(Role.ACT, *ids)


def rehearsed(*ids: int) -> Segment:
    return sampled(Role.REHEARSE, *ids)


def trajectory(*segments: Segment, reward: float | None, group: int = 0) -> Trajectory:
    return Trajectory(
        scenario_id="s",
        environment_id="e",
        kind="k",
        group=group,
        index=0,
        segments=list(segments),
        reward=reward,
        stop=StopReason.REPLIED,
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(scenario_id="s", trajectories=list(trajectories))


def trained(row: Row) -> list[int]:
    return row.ids[row.policy].tolist()


def test_only_sampled_tokens_are_trained() -> None:
    # Ids tell the segments apart: 1x prompt, 2x acted, 3x headers, 4x rehearsed, 5x real response.
    good = trajectory(
        prompt(10, 11), acted(20, 21), header(30), rehearsed(40, 41), header(31), real(50), acted(22), reward=1.0
    )
    bad = trajectory(prompt(10, 11), acted(23), reward=0.0)
    rows = training_rows([group(good, bad)]).rows
    assert rows[0].ids.tolist() == [10, 11, 20, 21, 30, 40, 41, 31, 50, 22]
    assert trained(rows[0]) == [20, 21, 40, 41, 22]
    assert trained(rows[1]) == [23]
    # Log-probabilities stand at their own tokens, -id / 10, and nowhere else.
    np.testing.assert_allclose(rows[0].logprobs, [0, 0, -2, -2.1, 0, -4, -4.1, 0, 0, -2.2], atol=1e-6)
    assert not rows[0].anchor.any()


def test_each_token_has_the_advantage_of_its_role() -> None:
    # Reward 1: two acts, one rehearsal. Reward 0: one act, two rehearsals.
    # act: mean (1 + 1 + 0) / 3 = 2/3; rehearse: mean (1 + 0 + 0) / 3 = 1/3.
    good = trajectory(prompt(1), acted(2, 3), rehearsed(4), acted(5), reward=1.0)
    bad = trajectory(prompt(1), acted(2), rehearsed(4), rehearsed(6), reward=0.0)
    rows = training_rows([group(good, bad)]).rows
    np.testing.assert_allclose(rows[0].advantages, [0, 1 / 3, 1 / 3, 2 / 3, 1 / 3], atol=1e-6)
    np.testing.assert_allclose(rows[1].advantages, [0, -2 / 3, -1 / 3, -1 / 3], atol=1e-6)
    # One baseline for both roles would be (3 * 1 + 3 * 0) / 6 = 1/2.
    shared = training_rows([group(good, bad)], advantage=AdvantageSettings(role_wise=False)).rows
    np.testing.assert_allclose(shared[0].advantages, [0, 0.5, 0.5, 0.5, 0.5], atol=1e-6)


def test_the_masks_of_the_roles_are_disjoint() -> None:
    row = training_rows(
        [group(trajectory(prompt(1), acted(2, 3), header(4), rehearsed(5, 6), acted(7), reward=1.0))]
    ).rows[0]
    assert row.ids[row.policy & ~row.rehearse].tolist() == [2, 3, 7]
    assert row.ids[row.policy & row.rehearse].tolist() == [5, 6]
    assert not (row.policy & row.anchor).any()


def test_anchored_lookups_have_no_advantage_and_belong_to_no_cell() -> None:
    anchored = sampled(Role.REHEARSE, 40, 41, learn=Learn.ANCHOR)
    first = trajectory(prompt(1), acted(2), anchored, rehearsed(5), reward=1.0)
    second = trajectory(prompt(1), acted(2), handed_over(40, 41), rehearsed(6), rehearsed(7), reward=0.0)
    training = training_rows([group(first, second)])
    row = training.rows[0]
    assert row.ids[row.anchor].tolist() == [40, 41]
    assert training.rows[1].ids[training.rows[1].anchor].tolist() == [40, 41]
    assert row.advantages[row.anchor].tolist() == [0.0, 0.0]
    assert row.logprobs[row.anchor].tolist() == [0.0, 0.0]
    # rehearse: (1 + 0 + 0) / 3 = 1/3, so 5 gets 2/3. With the anchored output in the cell it would be (1+1+0+0)/4.
    np.testing.assert_allclose(row.advantages[row.ids == 5], 2 / 3, atol=1e-6)


def test_rehearsal_can_be_left_out_of_training() -> None:
    one = trajectory(prompt(1), acted(2), rehearsed(3), reward=1.0)
    two = trajectory(prompt(1), acted(4), rehearsed(5), reward=0.0)
    training = training_rows([group(one, two)], roles=[Role.ACT])
    assert [trained(row) for row in training.rows] == [[2], [4]]
    assert training.advantages.cells == 1


def test_unequal_logprobs_are_refused_not_padded() -> None:
    torn = acted(2, 3)
    torn.logprobs = [-0.1]
    with pytest.raises(TrainingError, match="segment 1 has 2 sampled ids but 1 log-probabilities"):
        training_rows([group(trajectory(prompt(1), torn, reward=1.0))])


def test_missing_logprobs_are_refused() -> None:
    silent = acted(2)
    silent.logprobs = None
    with pytest.raises(TrainingError, match="1 sampled ids but 0"):
        training_rows([group(trajectory(prompt(1), silent, reward=1.0))])


def test_unscored_trajectories_are_dropped_and_counted() -> None:
    # Without the unscored one the mean is (1 + 0) / 2; counted as 0 it would be 1/3.
    scored = [trajectory(prompt(1), acted(2), reward=reward) for reward in (1.0, 0.0)]
    training = training_rows([group(scored[0], trajectory(prompt(1), acted(9), reward=None), scored[1])])
    assert training.dropped == 1
    assert [row.ids.tolist() for row in training.rows] == [[1, 2], [1, 2]]
    assert [float(row.advantages[1]) for row in training.rows] == [0.5, -0.5]


def test_group_that_lost_all_but_one_trajectory_trains_nothing() -> None:
    training = training_rows(
        [group(trajectory(prompt(1), acted(2), reward=1.0), trajectory(prompt(1), acted(3), reward=None))]
    )
    assert training.rows[0].advantages.tolist() == [0.0, 0.0]
    assert training.advantages.lone_cells == 1


def test_groups_are_compared_with_nobody_else() -> None:
    easy = [trajectory(prompt(1), acted(2), reward=r, group=0) for r in (1.0, 0.8)]
    hard = [trajectory(prompt(1), acted(2), reward=r, group=1) for r in (0.2, 0.0)]
    rows = training_rows([group(*easy), group(*hard)]).rows
    np.testing.assert_allclose([row.advantages[1] for row in rows], [0.1, -0.1, 0.1, -0.1], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, -np.inf, np.inf])
def test_a_trajectory_with_a_logprob_that_is_not_finite_leaves_its_group_and_is_counted(bad: float) -> None:
    # With the bad one, which earned 1, the mean would be 2/3.
    torn = acted(9)
    torn.logprobs = [bad]
    good = [trajectory(prompt(1), acted(2), reward=reward) for reward in (1.0, 0.0)]
    training = training_rows([group(good[0], trajectory(prompt(1), torn, reward=1.0), good[1])])
    assert (training.dropped, training.not_finite) == (0, 1)
    assert [float(row.advantages[1]) for row in training.rows] == [0.5, -0.5]
    assert training.metrics()["not_finite"] == 1


def test_logprobs_that_are_mostly_not_finite_end_the_run_by_name() -> None:
    torn = [trajectory(prompt(1), acted(2), reward=1.0) for _ in range(2)]
    for made in torn:
        made.segments[1].logprobs = [np.nan]
    with pytest.raises(TrainingError, match=r"2 of 3 trajectories have .* the first is rollout 0 of s"):
        training_rows([group(*torn, trajectory(prompt(1), acted(2), reward=0.0))])


def lengthy() -> list[Group]:
    """Group 0: a short trajectory that earned 1 and a long one of two outputs that earned 0. Group 1 is flat."""
    short = trajectory(prompt(1), acted(2), reward=1.0)
    long = trajectory(prompt(1), acted(2, 3, 4), header(5), acted(6), reward=0.0)
    flat = [trajectory(prompt(1), acted(7, 8), reward=0.5, group=1) for _ in range(2)]
    return [group(short, long), group(*flat)]


def weights(training: Training) -> list[list[float]]:
    return [row.weights[row.policy].tolist() for row in training.rows]


@pytest.mark.parametrize(
    ("settings", "short", "long", "flat"),
    [
        # 1 + 4 + 2 + 2 tokens.
        ({}, 1 / 9, [1 / 9] * 4, 1 / 9),
        # Four trajectories, of which each token of the long one is a quarter.
        ({"aggregation": "sequence-mean"}, 1 / 4, [1 / 16] * 4, 1 / 8),
        # Five outputs, one of three tokens and one of one in the long trajectory.
        ({"aggregation": "sequence-mean", "unit": "output"}, 1 / 5, [1 / 15] * 3 + [1 / 5], 1 / 10),
        ({"aggregation": "sequence-mean", "unit": "row"}, 1 / 4, [1 / 16] * 4, 1 / 8),
        # Four trajectories of 10 tokens by decree.
        ({"aggregation": "constant", "constant_length": 10}, 1 / 40, [1 / 40] * 4, 1 / 40),
    ],
)
def test_g6_aggregation_is_named_and_says_what_a_token_of_a_long_sequence_weighs(
    settings: dict[str, object], short: float, long: list[float], flat: float
) -> None:
    found = weights(training_rows(lengthy(), loss=LossSection(**settings)))  # type: ignore[arg-type]
    np.testing.assert_allclose(np.concatenate(found), [short, *long, *[flat] * 4], rtol=1e-6)


def test_g6_aggregation_is_recorded_with_the_recipe_of_a_run() -> None:
    recorded = Recipe(loss=LossSection(aggregation="constant", constant_length=64)).model_dump()["loss"]
    assert (recorded["aggregation"], recorded["unit"], recorded["constant_length"]) == ("constant", "trajectory", 64)


def test_g6_a_row_is_a_sequence_of_its_own_where_a_prompt_was_rewritten() -> None:
    again = prompt(1)
    again.opens_row = True
    both = trajectory(prompt(1), acted(2), again, acted(3, 4, 5), reward=1.0)
    one = LossSection(aggregation="sequence-mean", unit="trajectory")
    two = LossSection(aggregation="sequence-mean", unit="row")
    assert weights(training_rows([group(both)], loss=one)) == [[0.25], [0.25] * 3]
    np.testing.assert_allclose(np.concatenate(weights(training_rows([group(both)], loss=two))), [1 / 2, *[1 / 6] * 3])


def test_g1_outputs_of_flat_cells_are_kept_masked_or_dropped() -> None:
    kept = training_rows(lengthy(), loss=LossSection(flat="keep"))
    masked = training_rows(lengthy(), loss=LossSection(flat="mask"))
    dropped = training_rows(lengthy(), loss=LossSection(flat="drop"))
    assert [int(row.policy.sum()) for row in kept.rows] == [1, 4, 2, 2]
    # Neither a policy gradient nor a KL on their tokens, which count among the 9, or do not.
    assert [int(row.policy.sum()) for row in masked.rows] == [1, 4, 0, 0]
    np.testing.assert_allclose(np.concatenate(weights(masked)), [1 / 9] * 5, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(weights(dropped)), [1 / 5] * 5, rtol=1e-6)
    fewer = training_rows(lengthy(), loss=LossSection(flat="drop", aggregation="sequence-mean"))
    np.testing.assert_allclose(np.concatenate(weights(fewer)), [1 / 2, *[1 / 8] * 4], rtol=1e-6)


def test_g1_an_update_of_flat_cells_alone_has_no_weight_that_is_not_a_number() -> None:
    for flat in ("keep", "mask", "drop"):
        rows = training_rows(lengthy()[1:], loss=LossSection(flat=flat)).rows  # type: ignore[arg-type]
        assert all(np.isfinite(row.weights).all() for row in rows)


def test_anchored_tokens_have_a_mean_of_their_own() -> None:
    one = trajectory(prompt(1), acted(2), handed_over(40, 41), reward=1.0)
    two = trajectory(prompt(1), acted(2), handed_over(40), reward=0.0)
    rows = training_rows([group(one, two)]).rows
    np.testing.assert_allclose(np.concatenate([row.weights[row.anchor] for row in rows]), [1 / 3] * 3, rtol=1e-6)


def test_a_row_knows_how_many_given_tokens_it_begins_with() -> None:
    row = training_rows([group(trajectory(prompt(1, 2), header(3), acted(4), header(5), acted(6), reward=1.0))]).rows[0]
    assert row.prompt == 3


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 200))
def test_buckets_never_exceed_the_limit_and_lose_nothing(lengths: list[int], max_tokens: int) -> None:
    batches = list(buckets(lengths, max_tokens=max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= max_tokens or len(batch) == 1


def test_padding_stands_on_the_right() -> None:
    padded = pad([np.array([1, 2, 3]), np.array([4])], 9)
    assert padded.tolist() == [[1, 2, 3], [4, 9, 9]]
