"""How many groups will be dead is known before a run."""

from __future__ import annotations

from itertools import product

import pytest

from envace.training.group_size import dead_group_share, dead_group_table, dead_groups_line, measured_line


def test_g5_small_groups_are_dead_by_arithmetic() -> None:
    # The field case: two rollouts of a task solved 18 times in a hundred.
    assert dead_group_share(0.18, 2) == pytest.approx(0.7048)
    # Counted out: every outcome of three rollouts at p = 0.3.
    outcomes = [o for o in product((0, 1), repeat=3) if len(set(o)) == 1]
    assert dead_group_share(0.3, 3) == pytest.approx(sum(0.3 ** sum(o) * 0.7 ** (3 - sum(o)) for o in outcomes))


def test_a_policy_that_always_or_never_succeeds_makes_dead_groups_only() -> None:
    assert dead_group_share(0.0, 8) == dead_group_share(1.0, 8) == 1.0


def test_the_table_is_for_a_range_of_chances() -> None:
    table = dead_group_table(8)
    assert [row["success"] for row in table] == [0.05, 0.1, 0.2, 0.5, 0.8, 0.95]
    assert table[0]["dead"] == pytest.approx(0.95**8 + 0.05**8)
    assert "0.05: 66%" in dead_groups_line(8)


def test_a_run_is_warned_when_most_groups_would_be_dead() -> None:
    assert measured_line(0.05, 8).startswith("warning: ")
    assert "a longer warm-up" in measured_line(0.05, 8)
    assert "harder scenarios" in measured_line(0.97, 8)
    assert "warning" not in measured_line(0.375, 8)
