"""Whatever answers tool calls: an executable environment, or the policy itself."""

from envace.envs.base import Environment, invalid_call
from envace.envs.executable import ExecutableEnvironment
from envace.envs.rehearsed import GroupWorld, RehearsedEnvironment

__all__ = ["Environment", "ExecutableEnvironment", "GroupWorld", "RehearsedEnvironment", "invalid_call"]
