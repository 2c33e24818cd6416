"""Rewards: what a trajectory earned, in parts that are each in [0, 1]."""

from envace.rewards.checklist import SchemaObserver, checklist_parts, trusting_parts
from envace.rewards.checks import Check, success, task_checks, task_parts
from envace.rewards.contract import contract_parts
from envace.rewards.parts import WEIGHTS, call_overlap, combine

__all__ = [
    "WEIGHTS",
    "Check",
    "SchemaObserver",
    "call_overlap",
    "checklist_parts",
    "combine",
    "contract_parts",
    "success",
    "task_checks",
    "task_parts",
    "trusting_parts",
]
