"""Bytes per rank: what software keeps, the peak in closed form, and walked through a schedule."""
