"""How the losses of single tokens become one number. Pure functions on arrays.

Every way is a weighted sum over the tokens of the update, and all tokens of an output weigh the same. The weights are
made before rows are cut into batches, so how they are cut cannot matter.

Letters: B outputs (sampled segments).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from envace.errors import TrainingError
from envace.training.advantages import Bools, Floats, Ints

Aggregation = Literal["token-mean", "sequence-mean", "constant"]


def token_weights(
    tokens_B: Ints,
    units_B: Ints,
    counted_B: Bools,
    *,
    aggregation: Aggregation = "token-mean",
    constant_length: int | None = None,
) -> Floats:
    """The weight of each token of an output in the loss.

    - `token-mean`: every token alike, whatever it belongs to: 1 / tokens.
    - `sequence-mean`: the mean over sequences of the mean over their tokens: 1 / (sequences x tokens of its sequence).
      A token of a short sequence weighs more.
    - `constant`: the sum over tokens by sequences and one length for all: 1 / (sequences x constant_length).

    Args:
        tokens_B: Tokens of each output.
        units_B: Which sequence an output belongs to.
        counted_B: Outputs that take part; others weigh 0 and count nowhere, nor does a sequence of others alone.
        aggregation: Which of them.
        constant_length: Tokens, of `constant` only.

    Raises:
        TrainingError: `constant` without a length.

    Source: token mean, DAPO (arXiv:2503.14476, eq. 8); sequence mean, GRPO (arXiv:2402.03300, eq. 3); constant,
    Dr. GRPO (arXiv:2503.20783).
    """
    tokens_B = np.where(counted_B, tokens_B, 0)
    _, index_B = np.unique(units_B, return_inverse=True)
    lengths_B = np.bincount(index_B, weights=tokens_B)[index_B] if len(tokens_B) else np.zeros(0)
    sequences = len(np.unique(index_B[lengths_B > 0]))
    if aggregation == "token-mean":
        totals_B = np.full(len(tokens_B), float(tokens_B.sum()))
    elif aggregation == "sequence-mean":
        totals_B = sequences * lengths_B
    elif constant_length is None:
        raise TrainingError("loss.aggregation: constant needs loss.constant_length, the tokens to divide by.")
    else:
        totals_B = np.full(len(tokens_B), float(sequences * constant_length))
    weights_B = np.zeros(len(tokens_B))
    taking_B = tokens_B > 0
    weights_B[taking_B] = 1 / totals_B[taking_B]
    return weights_B
