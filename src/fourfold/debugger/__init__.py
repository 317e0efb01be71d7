"""Finds what is slow in a run: from traces, logs and operation tables to who holds up the others, and why."""

from fourfold.debugger.diagnosis import Diagnosis, diagnose_traces, join_ranks, judge_ranks
from fourfold.debugger.verdict import Culprit, Verdict

__all__ = ["Culprit", "Diagnosis", "Verdict", "diagnose_traces", "join_ranks", "judge_ranks"]
