"""A probe that an optimiser step reached the weights that sample: training that changes nothing is otherwise silent."""

from __future__ import annotations

import torch
from torch import nn

from envace.errors import TrainingError


class WeightProbe:
    """Compares what is trained before and after the first step that has a gradient."""

    def __init__(self) -> None:
        self._before: list[tuple[float, float]] | None = None
        self.passed = False
        """Whether a step was seen to change the weights; after that nothing is compared."""

    def before(self, model: nn.Module) -> None:
        """Remember the weights, before a step."""
        if not self.passed:
            self._before = fingerprint(model)

    def after(self, model: nn.Module, grad_norm: float) -> None:
        """Compare them, after it; a step with no gradient at all proves nothing.

        Raises:
            TrainingError: The gradient is not zero, and the weights are what they were.
        """
        if self.passed or grad_norm == 0:
            return
        if fingerprint(model) == self._before:
            raise TrainingError(
                f"The first step had a gradient of norm {grad_norm:.3g} and changed no weight of the policy: the "
                "learning rate is too small for the precision of the weights, or the optimizer holds others."
            )
        self.passed = True


@torch.no_grad()
def fingerprint(model: nn.Module) -> list[tuple[float, float]]:
    """Sum and sum of squares of each trained tensor, in double precision."""
    return [
        (float(tensor.double().sum()), float(tensor.double().square().sum()))
        for tensor in model.parameters()
        if tensor.requires_grad
    ]
