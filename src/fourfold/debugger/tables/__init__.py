"""Operation tables of whole jobs: read, replayed with other durations, judged."""

from fourfold.debugger.tables.analysis import Removal, TableAnalysis, Worker, analyse
from fourfold.debugger.tables.table import Operation, Table, is_table, read_table
from fourfold.debugger.tables.verdict import Cause, Finding, TableVerdict, judge

__all__ = [
    "Cause",
    "Finding",
    "Operation",
    "Removal",
    "Table",
    "TableAnalysis",
    "TableVerdict",
    "Worker",
    "analyse",
    "is_table",
    "judge",
    "read_table",
]
