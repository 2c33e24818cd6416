"""Rows: exactly the sampled tokens are trained, each with the advantage of its own role's cell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.errors import TrainingError
from envace.models.ragged import buckets
from envace.training.batches import Row, pad, training_rows
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
    shared = training_rows([group(good, bad)], advantage="group").rows
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
