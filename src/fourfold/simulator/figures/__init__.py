"""The figures of the paper, recomputed: a module per figure."""
