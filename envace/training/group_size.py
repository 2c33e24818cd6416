"""What a group size means before a run: how many groups will teach nothing. Pure."""

from __future__ import annotations

SHOWN = (0.05, 0.1, 0.2, 0.5, 0.8, 0.95)
"""Chances of success that are shown."""
TOO_MANY = 0.5
"""More dead groups than this share are warned about."""


def dead_group_share(p: float, n: int) -> float:
    """The chance that all of n rollouts earn the same, where each succeeds with chance p and earns 0 or 1.

    Such a group has no spread, so that every advantage in it is 0: p^n + (1-p)^n.
    """
    return p**n + (1 - p) ** n


def dead_group_table(n: int) -> list[dict[str, float]]:
    """`success` and `dead` (share of groups) for a range of chances."""
    return [{"success": p, "dead": dead_group_share(p, n)} for p in SHOWN]


def dead_groups_line(n: int) -> str:
    """One line for the start of a run."""
    shares = ", ".join(f"{p:g}: {dead_group_share(p, n):.0%}" for p in SHOWN)
    return f"group_size {n}: groups without spread, by chance of success ({shares}), where a reward is 0 or 1"


def measured_line(p: float, n: int) -> str:
    """One line once the starting policy's success is known; a warning when most groups would be dead.

    Scenarios differ, and p^n + (1-p)^n is convex: at one chance for all it is the least that it can be.
    """
    dead = dead_group_share(p, n)
    line = f"at a success of {p:.3f}, at least {dead:.0%} of groups of {n} have no spread, where a reward is 0 or 1"
    if dead <= TOO_MANY:
        return line
    advice = "a longer warm-up, easier scenarios" if p < 0.5 else "harder scenarios"
    return f"warning: {line}: they teach nothing. Try {advice}, a larger group_size, or a reward with parts"
