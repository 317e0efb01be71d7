"""Fourfold plans, simulates, trains and debugs Llama-style models with four kinds of parallelism at once."""

__version__ = "0.1.0"
