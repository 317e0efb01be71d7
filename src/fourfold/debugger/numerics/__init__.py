"""Numbers of runs: what tensors were, the same sums in one process, and whether a difference is a bug or order."""
