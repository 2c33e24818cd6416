"""The run folder: everything that explains a run, written so that nothing half-written is taken for whole."""

from envace.runs.folder import RunFolder, environment_facts
from envace.runs.lines import append_lines, read_lines, truncate_lines

__all__ = ["RunFolder", "append_lines", "environment_facts", "read_lines", "truncate_lines"]
