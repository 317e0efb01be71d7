"""Llama 3 as plain PyTorch: the mathematics, its initial weights and its file format. It knows nothing of ranks."""

from fourfold.model.attention import attention
from fourfold.model.batch import Batch
from fourfold.model.init import fill, initialise
from fourfold.model.llama import PLAIN, Layer, Llama, Ops, Rope

__all__ = ["PLAIN", "Batch", "Layer", "Llama", "Ops", "Rope", "attention", "fill", "initialise"]
