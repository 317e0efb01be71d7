"""Finds what is slow in a run, or stuck: `ask` is the question; `reading`, `slow`, `tables` and `hangs` answer it."""
