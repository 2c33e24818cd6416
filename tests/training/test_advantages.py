"""Advantages: each output against the mean of its own cell, and nothing where there is no baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.errors import TrainingError
from envace.training.advantages import Advantages, cell_advantages, cells_of

ACT, REHEARSE = 0, 1


def advantages(
    rewards: list[float], cells: list[int], trajectories: list[int] | None = None, **settings: str
) -> Advantages:
    return cell_advantages(
        np.array(rewards, dtype=np.float64),
        np.array(cells, dtype=np.int64),
        np.array(trajectories if trajectories is not None else range(len(rewards)), dtype=np.int64),
        **settings,  # type: ignore[arg-type]
    )


def test_reward_is_centred_on_the_mean_of_its_cell() -> None:
    # Cell 0 has mean (.2 + .4 + .9) / 3 = .5, cell 1 has mean (1 + 0) / 2 = .5.
    found = advantages([0.2, 0.4, 0.9, 1.0, 0.0], [0, 0, 0, 1, 1])
    np.testing.assert_allclose(found.values_B, [-0.3, -0.1, 0.4, 0.5, -0.5], atol=1e-12)
    assert (found.cells, found.lone_cells, found.flat_cells) == (2, 0, 0)


def test_roles_of_a_group_have_baselines_of_their_own() -> None:
    # Two trajectories of group 0: one earns 1 and acts 1 time, the other earns 0 and acts 3 times; both rehearse once.
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    roles = np.array([ACT, REHEARSE, ACT, ACT, ACT, REHEARSE])
    groups = np.zeros(6, dtype=np.int64)
    # Role-wise: act has mean 1/4, rehearse has mean 1/2. Shared: 2/6 for all.
    role_wise = advantages(rewards, cells_of(groups, roles).tolist())
    shared = advantages(rewards, cells_of(groups, roles, role_wise=False).tolist())
    np.testing.assert_allclose(role_wise.values_B, [0.75, 0.5, -0.25, -0.25, -0.25, -0.5], atol=1e-12)
    np.testing.assert_allclose(shared.values_B, [2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 3], atol=1e-12)
    assert (role_wise.cells, shared.cells) == (2, 1)


def test_groups_never_share_a_cell() -> None:
    groups, roles = np.array([0, 0, 1, 1, 2]), np.array([ACT, REHEARSE, ACT, REHEARSE, ACT])
    assert len(set(cells_of(groups, roles).tolist())) == 5
    assert len(set(cells_of(groups, roles, role_wise=False).tolist())) == 3


def test_lone_output_has_advantage_exactly_zero_and_is_counted() -> None:
    # The released code would give it its raw reward, 1.
    found = advantages([1.0, 0.0, 1.0], [0, 1, 1])
    assert found.values_B[0] == 0.0
    assert (found.lone_cells, found.flat_cells, found.cells) == (1, 0, 2)


def test_flat_cell_is_exactly_zero_and_is_counted() -> None:
    # .1 + .1 + .1 = .30000000000000004: a computed mean would leave a rest.
    found = advantages([0.1, 0.1, 0.1], [4, 4, 4], scale="std")
    assert found.values_B.tolist() == [0.0, 0.0, 0.0]
    assert (found.lone_cells, found.flat_cells) == (0, 1)


def test_baseline_over_outputs_weighs_a_long_trajectory_more() -> None:
    # Trajectory 0 earns 1 with three outputs, trajectory 1 earns 0 with one.
    rewards, cells, trajectories = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [0, 0, 0, 1]
    # Over outputs the mean is 3/4, over trajectories it is 1/2.
    outputs = advantages(rewards, cells, trajectories, baseline="outputs")
    once = advantages(rewards, cells, trajectories, baseline="trajectories")
    np.testing.assert_allclose(outputs.values_B, [0.25, 0.25, 0.25, -0.75], atol=1e-12)
    np.testing.assert_allclose(once.values_B, [0.5, 0.5, 0.5, -0.5], atol=1e-12)


def test_std_divides_by_the_spread_of_the_cell() -> None:
    # Cell 0: mean .5, deviations .5, std .5 -> +-1. Cell 1: mean .2, deviations .1 -> +-1.
    found = advantages([1.0, 0.0, 0.1, 0.3], [0, 0, 1, 1], scale="std")
    np.testing.assert_allclose(found.values_B, [1.0, -1.0, -1.0, 1.0], atol=1e-9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(TrainingError, match="1 of 2 rewards are not finite"):
        advantages([0.5, bad], [0, 0])


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(TrainingError, match="lengths differ"):
        advantages([0.5, 0.5], [0])


def test_nothing_in_nothing_out() -> None:
    found = advantages([], [])
    assert found.values_B.shape == (0,)
    assert found.cells == 0


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), max_size=30))
def test_every_cell_has_mean_zero_and_no_cell_moves_another(pairs: list[tuple[float, int]]) -> None:
    rewards, cells = [reward for reward, _ in pairs], [cell for _, cell in pairs]
    found = advantages(rewards, cells)
    for cell in set(cells):
        members = [i for i, other in enumerate(cells) if other == cell]
        assert abs(found.values_B[members].sum()) < 1e-9
        alone = advantages([rewards[i] for i in members], [cell] * len(members))
        np.testing.assert_array_equal(alone.values_B, found.values_B[members])
