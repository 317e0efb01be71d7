"""Why a job stands still: from reports of our watchdog, dumps of PyTorch's flight recorder, or action logs."""

from fourfold.debugger.hangs.reports import (
    Entry,
    Line,
    RankReport,
    Wait,
    Way,
    read_reports,
    report_file,
)
from fourfold.debugger.hangs.sources import Source, find_hang, hang_source, is_hang_source
from fourfold.debugger.hangs.waits import NO_REPORT, Cause, Hang, Stuck, call_text, diagnose

__all__ = [
    "NO_REPORT",
    "Cause",
    "Entry",
    "Hang",
    "Line",
    "RankReport",
    "Source",
    "Stuck",
    "Wait",
    "Way",
    "call_text",
    "diagnose",
    "find_hang",
    "hang_source",
    "is_hang_source",
    "read_reports",
    "report_file",
]
