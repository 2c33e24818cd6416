"""Scenarios, and the packages that hold an environment with its scenarios."""

from envace.scenarios.packages import EnvironmentSpec, Package, load_package, read_environment, read_scenarios
from envace.scenarios.schema import Expected, Scenario, outcome_of, reply_holds

__all__ = [
    "EnvironmentSpec",
    "Expected",
    "Package",
    "Scenario",
    "load_package",
    "outcome_of",
    "read_environment",
    "read_scenarios",
    "reply_holds",
]
