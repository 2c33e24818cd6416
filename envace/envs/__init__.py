"""Whatever answers tool calls and final replies: an executable environment, the policy itself, a scripted user."""

from envace.envs.base import Environment, invalid_call
from envace.envs.executable import ExecutableEnvironment
from envace.envs.rehearsed import GroupWorld, RehearsedEnvironment
from envace.envs.users import ScriptedUser, User
from envace.envs.voices import Continued, Prompted, Voice

__all__ = [
    "Continued",
    "Environment",
    "ExecutableEnvironment",
    "GroupWorld",
    "Prompted",
    "RehearsedEnvironment",
    "ScriptedUser",
    "User",
    "Voice",
    "invalid_call",
]
