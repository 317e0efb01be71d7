"""How far apart two tensors may be that differ in the order of sums only.

The unit is the rounding of a dtype, u = 2^-p where p bits are kept: fp32 2^-24, bf16 2^-8. Errors of n roundings that
are independent add as squares, to u sqrt(n). What is allowed is ``FACTOR`` times that. Layouts of models of 2, 4
and 12 layers make up to a fifth of it in bf16 and a fifteenth in fp32, and of a first step of AdamW up to two fifths.
"""

from __future__ import annotations

import math

from fourfold.debugger.numerics.comparison import SCALAR
from fourfold.debugger.numerics.order import roundings_before
from fourfold.debugger.numerics.records import Kind

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
SUMS = "float32"  # what all sums are made in, whatever the dtype of the tensors
FACTOR = 4.0
DRIFT = 8.0  # relative error of what a step computes over that of the weights it began with, at most
_MEAN = 16.0  # a loss or a norm is a mean over 256 values at least, whose errors are independent
_ROUNDED_BETWEEN: dict[str, tuple[str, ...]] = {
    Kind.OUTPUT: ("attend",),
    Kind.ARRIVING: ("attention_norm", "ffn_norm", "norm", "wo", "w2", "tok_embeddings"),
}
"""Last parts of names of what is summed with roundings to the dtype of computation between: attention, whose kernels go
block by block, and gradients of what several operations have read."""


def unit_of(kind: str, dtype: str, compute: str) -> float:
    """The rounding in which an error is told: of an operation that of its result, else that of computation."""
    return ROUNDING.get(dtype if kind in (Kind.OUTPUT, Kind.ARRIVING) else compute, ROUNDING[SUMS])


def limit_of_layouts(kind: str, name: str, compute: str, *, num_layers: int, terms: int) -> float:
    """Largest |a - b| / |b| that layouts explain in a step that begins with the same weights.

    n is the number of operations in a row before the tensor. Each rounds its result to the dtype of computation, and
    makes sums of up to ``terms`` terms in fp32.

    Weights come out of the optimizer. One that divides by the size of the gradient, as Adam does, takes a full step of
    the wrong sign where a gradient is smaller than its own error e; such are about e of all, and make sqrt(e).
    """
    n = roundings_before(kind, name, num_layers)
    limit = FACTOR * math.sqrt(n) * (ROUNDING[compute] + ROUNDING[SUMS] * math.sqrt(terms))
    if kind == SCALAR:
        return limit / _MEAN
    return math.sqrt(limit) if kind == Kind.WEIGHT else limit


def limit_of_one_sum(kind: str, name: str, dtype: str, compute: str, *, terms: int) -> float:
    """Largest |a - b| / |b| that another order explains where all that goes into a tensor is the same to the bit.

    That is the error e of a sum in fp32. Where the result is rounded to a coarser dtype, or the terms are sums that
    were, e rarely matters: it makes a value round the other way once in u / e, and wrong by u where it does, which is
    sqrt(e u) in all.
    """
    error = ROUNDING[SUMS] * math.sqrt(terms)
    coarsest = max(ROUNDING.get(dtype, 0.0), ROUNDING[compute])
    last = name.rpartition(".")[2]
    if last.isdecimal() or last in _ROUNDED_BETWEEN.get(kind, ()):
        return FACTOR * (error + coarsest)
    return FACTOR * (math.sqrt(error * coarsest) if coarsest > ROUNDING[SUMS] else error)
