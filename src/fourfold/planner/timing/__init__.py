"""Seconds per step: layers, collectives, what is exposed, and the constants of software stacks."""
