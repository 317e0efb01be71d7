"""One rank of a run of any size, in one process, on tensors without numbers: what it holds and what it sends.

The real model, the real parallel code and the real schedule run a training step; collectives return at once, and every
operator only says what shape its result has. So the figures are those of the code that trains, not of formulas, and a
rank of sixteen thousand takes seconds on a laptop.
"""
