"""The one rollout loop."""

from envace.rollout.loop import Limits, rollout

__all__ = ["Limits", "rollout"]
