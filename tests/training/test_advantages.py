"""Advantages: each output against the mean of its own cell, and nothing where there is no baseline."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envace.errors import TrainingError
from envace.training.advantages import Advantages, AdvantageSettings, Outputs
from envace.training.advantages import advantages as compare

ACT, REHEARSE = 0, 1


def advantages(
    rewards: list[float],
    groups: list[int],
    trajectories: list[int] | None = None,
    *,
    roles: list[int] | None = None,
    tokens: list[int] | None = None,
    **settings: object,
) -> Advantages:
    def ints(values: list[int]) -> np.ndarray:  # type: ignore[type-arg]
        return np.array(values, dtype=np.int64)

    size = len(rewards)
    outputs = Outputs(
        rewards_B=np.array(rewards, dtype=np.float64),
        groups_B=ints(groups),
        roles_B=ints(roles or [ACT] * size),
        trajectories_B=ints(list(range(size)) if trajectories is None else trajectories),
        tokens_B=ints(tokens or [1] * size),
    )
    return compare(outputs, AdvantageSettings(**settings))  # type: ignore[arg-type]


def test_reward_is_centred_on_the_mean_of_its_cell() -> None:
    # Cell 0 has mean (.2 + .4 + .9) / 3 = .5, cell 1 has mean (1 + 0) / 2 = .5.
    found = advantages([0.2, 0.4, 0.9, 1.0, 0.0], [0, 0, 0, 1, 1])
    np.testing.assert_allclose(found.values_B, [-0.3, -0.1, 0.4, 0.5, -0.5], atol=1e-12)
    assert (found.cells, found.lone_cells, found.flat_cells) == (2, 0, 0)


def test_g3_the_key_is_group_and_role() -> None:
    # Two trajectories of group 0: one earns 1 and acts 1 time, the other earns 0 and acts 3 times; both rehearse once.
    rewards, trajectories = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [0, 0, 1, 1, 1, 1]
    roles = [ACT, REHEARSE, ACT, ACT, ACT, REHEARSE]
    # Role-wise: act has mean 1/4, rehearse has mean 1/2. Shared: 2/6 for all.
    role_wise = advantages(rewards, [0] * 6, trajectories, roles=roles)
    shared = advantages(rewards, [0] * 6, trajectories, roles=roles, role_wise=False)
    np.testing.assert_allclose(role_wise.values_B, [0.75, 0.5, -0.25, -0.25, -0.25, -0.5], atol=1e-12)
    np.testing.assert_allclose(shared.values_B, [2 / 3, 2 / 3, -1 / 3, -1 / 3, -1 / 3, -1 / 3], atol=1e-12)
    assert (role_wise.cells, shared.cells) == (2, 1)


def test_g3_a_trajectory_of_several_outputs_can_count_once() -> None:
    # Means: over outputs 3/4, over trajectories 1/2. Spread over the trajectories' 1 and 0 (n - 1): sqrt(1/2), where
    # over the outputs' 1, 1, 1 and 0 it would be 1/2.
    found = advantages([1.0, 1.0, 1.0, 0.0], [0] * 4, [0, 0, 0, 1], baseline="trajectories", scale="std")
    np.testing.assert_allclose(found.values_B, np.array([0.5, 0.5, 0.5, -0.5]) / np.sqrt(0.5), atol=1e-12)


def test_groups_never_share_a_cell() -> None:
    rewards, groups, roles = [1.0, 0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2], [ACT, REHEARSE, ACT, REHEARSE, ACT]
    assert advantages(rewards, groups, roles=roles).cells == 5
    assert advantages(rewards, groups, roles=roles, role_wise=False).cells == 3


@pytest.mark.parametrize("kind", ["cells", "global-baseline"])
@pytest.mark.parametrize("scale", ["none", "std"])
def test_g2_a_group_of_one_gets_exactly_zero_and_is_counted(kind: str, scale: str) -> None:
    # The released code would give it its raw reward, 1.
    found = advantages([1.0, 0.0, 1.0], [0, 1, 1], kind=kind, scale=scale)
    assert found.values_B[0] == 0.0
    assert (found.lone_cells, found.flat_cells, found.cells) == (1, 0, 2)
    assert found.dead_B.tolist() == [True, False, False]


def test_g2_several_outputs_of_one_trajectory_have_nothing_to_be_compared_with() -> None:
    found = advantages([1.0, 1.0], [0, 0], [7, 7])
    assert found.values_B.tolist() == [0.0, 0.0]
    assert (found.lone_cells, found.flat_cells) == (1, 0)


@pytest.mark.parametrize("kind", ["cells", "global", "global-baseline"])
@pytest.mark.parametrize("scale", ["none", "std"])
@pytest.mark.parametrize("rewards", [[0.4] * 8, [0.1] * 3, [0.1 + 0.2, 0.3], [1 / 3, 1 - 2 / 3]])
def test_g1_zero_variance_group(rewards: list[float], scale: str, kind: str) -> None:
    # .1 + .2 is not .3, and the mean of three .1 is not .1: neither is a difference that anyone earned.
    found = advantages(rewards, [4] * len(rewards), kind=kind, scale=scale)
    assert found.values_B.tolist() == [0.0] * len(rewards)
    assert (found.lone_cells, found.flat_cells) == (0, 1)


def test_g1_the_flat_share_is_told_by_role() -> None:
    # Group 0: acting differs, rehearsing is flat. Group 1: acting is flat, nobody rehearses. Group 2: one rehearses.
    rewards, groups = [1.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.0], [0, 0, 0, 0, 1, 1, 2]
    roles = [ACT, ACT, REHEARSE, REHEARSE, ACT, ACT, REHEARSE]
    found = advantages(rewards, groups, roles=roles)
    assert found.metrics() == {
        "flat_cells": 2 / 4,
        "flat_cells/act": 1 / 2,
        "flat_cells/rehearse": 1 / 2,
        "lone_cells": 1,
    }
    assert "flat_cells/rehearse" not in advantages([1.0, 0.0], [0, 0]).metrics()


def test_g1_a_flat_group_among_others_is_found_by_its_own_spread() -> None:
    found = advantages([0.4, 0.4, 0.9, 0.1], [0, 0, 1, 1], kind="global-baseline")
    assert found.dead_B.tolist() == [True, True, False, False]
    assert found.values_B[:2].tolist() == [0.0, 0.0]


def test_global_whitens_over_the_tokens_of_the_update() -> None:
    # Tokens 1, 1, 1, 0: mean 3/4, variance (3 / 16 + 9 / 16) / 3 = 1/4, so (1 - 3/4) / (1/2) and (0 - 3/4) / (1/2).
    found = advantages([1.0, 0.0], [0, 1], tokens=[3, 1], kind="global")
    np.testing.assert_allclose(found.values_B, [0.5, -1.5], atol=1e-6)
    assert (found.cells, found.lone_cells) == (1, 0)


def test_global_whitens_each_role_by_itself_unless_told_otherwise() -> None:
    rewards, roles = [1.0, 0.0, 0.9, 0.8], [ACT, ACT, REHEARSE, REHEARSE]
    apart = advantages(rewards, [0, 1, 0, 1], roles=roles, kind="global")
    np.testing.assert_allclose(apart.values_B[2:], [np.sqrt(0.5), -np.sqrt(0.5)], atol=1e-4)
    together = advantages(rewards, [0, 1, 0, 1], roles=roles, kind="global", role_wise=False)
    assert (together.values_B[2:] > 0).all()


def test_global_baseline_centres_before_it_whitens() -> None:
    # Centred: +-.5 in the easy group, +-.1 in the hard one; the mean over their single tokens is 0.
    found = advantages([1.0, 0.0, 0.2, 0.0], [0, 0, 1, 1], kind="global-baseline")
    centred = np.array([0.5, -0.5, 0.1, -0.1])
    np.testing.assert_allclose(found.values_B, centred / centred.std(ddof=1), atol=1e-6)


def test_baseline_over_outputs_weighs_a_long_trajectory_more() -> None:
    # Trajectory 0 earns 1 with three outputs, trajectory 1 earns 0 with one.
    rewards, cells, trajectories = [1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0], [0, 0, 0, 1]
    # Over outputs the mean is 3/4, over trajectories it is 1/2.
    outputs = advantages(rewards, cells, trajectories, baseline="outputs")
    once = advantages(rewards, cells, trajectories, baseline="trajectories")
    np.testing.assert_allclose(outputs.values_B, [0.25, 0.25, 0.25, -0.75], atol=1e-12)
    np.testing.assert_allclose(once.values_B, [0.5, 0.5, 0.5, -0.5], atol=1e-12)


def test_std_divides_by_the_spread_of_the_cell() -> None:
    # Two rewards are apart by sqrt(2) standard deviations (n - 1), however small the difference.
    found = advantages([1.0, 0.0, 0.1, 0.3], [0, 0, 1, 1], scale="std")
    np.testing.assert_allclose(found.values_B, np.array([1, -1, -1, 1]) * np.sqrt(0.5), atol=1e-9)


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


def test_a_groups_spread_is_divided_out_before_the_batch_is_whitened() -> None:
    # Two groups whose rewards differ by .1 and by .8: divided by their spread they weigh the same.
    outputs = Outputs(
        rewards_B=np.array([0.4, 0.5, 0.1, 0.9]),
        groups_B=np.array([0, 0, 1, 1]),
        roles_B=np.zeros(4, dtype=np.int64),
        trajectories_B=np.arange(4),
        tokens_B=np.ones(4, dtype=np.int64),
    )
    kinds = [AdvantageSettings(kind="global-baseline"), AdvantageSettings(kind="global-baseline", scale="std")]
    plain, scaled = (compare(outputs, settings).values_B for settings in kinds)
    assert abs(plain[0]) < abs(plain[2]) / 4
    np.testing.assert_allclose(np.abs(scaled), np.sqrt(3) / 2, atol=1e-6)
