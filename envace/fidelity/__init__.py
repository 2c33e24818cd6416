"""Rehearsal fidelity: rehearsed responses against real responses to the same calls."""

from envace.fidelity.compare import Comparison, Probe, fidelity_scores
from envace.fidelity.probe import measure, record_probes, replay

__all__ = ["Comparison", "Probe", "fidelity_scores", "measure", "record_probes", "replay"]
