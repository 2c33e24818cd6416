"""A model in training: its optimizer, its reference, and the roles whose outputs it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from envace.models.local import LocalPolicy
from envace.training.batches import Row
from envace.training.checkpoints import Loaded, load_state, load_weights
from envace.training.demonstrations import SupervisedRow
from envace.training.forward import Reference
from envace.training.lora import add_lora
from envace.training.probe import WeightProbe
from envace.training.recipe import Recipe
from envace.training.sft import imitate
from envace.training.update import update
from envace.types import Role


class Learner:
    """One model that a run trains. Most arms have one; `per-role` has two."""

    def __init__(self, loaded: Loaded, recipe: Recipe, *, roles: frozenset[Role], anchored: bool) -> None:
        """Put on adapters where the recipe asks for them, and keep the reference where a KL needs one.

        Args:
            loaded: The model, which is trained in place.
            recipe: The run.
            roles: Whose outputs it learns from.
            anchored: Whether its rows may hold anchors.
        """
        self.loaded, self.roles, self._recipe = loaded, roles, recipe
        model = loaded.model
        if recipe.lora is not None:
            add_lora(model, recipe.lora, seed=recipe.seed)
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
        needed = recipe.loss.kl > 0 or (anchored and recipe.loss.anchor_kl > 0)
        self._probe = WeightProbe()
        self._reference = Reference(model) if needed and recipe.arm != "sft" else None

    def policy(self) -> LocalPolicy:
        """The model as it is now, to sample from."""
        return self.loaded.policy()

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        """One step by policy gradient. Raises TrainingError when numbers give out."""
        self._probe.before(self.loaded.model)
        losses = update(
            self.loaded.model,
            self._reference,
            self.optimizer,
            rows,
            settings=self._recipe.loss,
            temperature=self._recipe.temperature,
            pad_id=self.loaded.format.pad_id,
        )
        self._probe.after(self.loaded.model, losses["grad_norm"])
        return losses

    def imitate(self, rows: Sequence[SupervisedRow]) -> dict[str, float]:
        """One step on recorded conversations. Raises TrainingError when numbers give out."""
        self._probe.before(self.loaded.model)
        losses = imitate(
            self.loaded.model, self.optimizer, rows, settings=self._recipe.loss, pad_id=self.loaded.format.pad_id
        )
        self._probe.after(self.loaded.model, losses["grad_norm"])
        return losses

    def restore(self, path: Path) -> dict[str, Any]:
        """Go back to a checkpoint; returns its state."""
        state = load_state(path)
        load_weights(self.loaded.model, path)
        self.optimizer.load_state_dict(state["optimizer"])
        return state
