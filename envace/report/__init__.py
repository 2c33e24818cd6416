"""Reports: tables for the terminal and one self-contained page, redrawn from run folders alone."""

from envace.report.page import report
from envace.report.tables import comparison_table, results_table

__all__ = ["comparison_table", "report", "results_table"]
