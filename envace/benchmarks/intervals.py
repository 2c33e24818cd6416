"""Confidence intervals."""

from __future__ import annotations

import math
from statistics import NormalDist


def wilson(successes: int, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a share; (0, 1) for n = 0.

    It assumes independent scenarios, each tried once.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927).
    """
    if n == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
