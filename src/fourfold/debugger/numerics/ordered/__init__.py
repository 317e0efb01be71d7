"""The ordered reference: one process makes, in the same order, every sum that the ranks of a layout make together."""

from fourfold.debugger.numerics.ordered.reference import OrderedReference

__all__ = ["OrderedReference"]
