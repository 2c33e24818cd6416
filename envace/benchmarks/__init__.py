"""Evaluation in real environments, with intervals and floors."""

from envace.benchmarks.intervals import wilson
from envace.benchmarks.judged import summarise_judged
from envace.benchmarks.real import Evaluation, evaluate_policy, summarise

__all__ = ["Evaluation", "evaluate_policy", "summarise", "summarise_judged", "wilson"]
