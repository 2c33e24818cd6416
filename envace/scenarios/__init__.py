"""Scenarios, the packages that hold an environment with its scenarios, and tools with the checks of their calls."""

from envace.scenarios.arguments import argument_problems, coerce, with_defaults
from envace.scenarios.packages import EnvironmentSpec, Package, load_package, opening, read_environment, read_scenarios
from envace.scenarios.schema import Expected, Scenario, outcome_of, reply_holds
from envace.scenarios.tools import (
    normalise,
    read_tools,
    to_openai,
    tool_from_callable,
    tools_from_bfcl,
    tools_from_mcp,
    tools_from_openai,
    tools_from_source,
    wire_name,
)

__all__ = [
    "EnvironmentSpec",
    "Expected",
    "Package",
    "Scenario",
    "argument_problems",
    "coerce",
    "load_package",
    "normalise",
    "opening",
    "outcome_of",
    "read_environment",
    "read_scenarios",
    "read_tools",
    "reply_holds",
    "to_openai",
    "tool_from_callable",
    "tools_from_bfcl",
    "tools_from_mcp",
    "tools_from_openai",
    "tools_from_source",
    "wire_name",
    "with_defaults",
]
