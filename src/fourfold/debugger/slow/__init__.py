"""Who holds up the others: from what ranks did to the one that is slow, and what it would help to mend it."""

from fourfold.debugger.slow.culprits import Culprit
from fourfold.debugger.slow.diagnosis import Diagnosis, diagnose_traces, judge_ranks
from fourfold.debugger.slow.logs import diagnose_logs, is_logs
from fourfold.debugger.slow.verdict import Verdict

__all__ = ["Culprit", "Diagnosis", "Verdict", "diagnose_logs", "diagnose_traces", "is_logs", "judge_ranks"]
