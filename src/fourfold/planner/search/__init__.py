"""All legal layouts of a job, the best of them played, what the others lose by; and the paper's own rules."""
