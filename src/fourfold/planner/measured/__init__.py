"""Measured runs, predictions scored against them, and constants fitted to them."""
