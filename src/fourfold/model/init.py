"""Initial weights that are the same whatever the layout.

A number depends on the seed, the parameter's name, and its place in the whole parameter only. Rows are drawn in
blocks, each from a generator of its own, so a rank draws the blocks that its shard touches and nothing else.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from fourfold.model.llama import Llama
from fourfold.recipe import ModelConfig

_BLOCK_ROWS = 64
_STD = 0.02


def fill(
    name: str,
    shape: tuple[int, ...],
    seed: int,
    config: ModelConfig,
    *,
    rows: slice = slice(None),
    columns: slice = slice(None),
) -> Tensor:
    """Initial values of the named parameter, or of a part of it: fp32 on CPU, equal bit for bit to the same part of
    the whole.

    name: as in `Llama.named_parameters()`; shape: of the whole parameter; rows, columns: the part wanted, step 1.

    Normal with standard deviation 0.02, and 0.02 / sqrt(2 num_layers) for the two projections that add to the hidden
    state (wo, w2).
    Norms are 1, padded rows of the vocabulary 0. The head of a tied model is drawn as the embedding that it is.
    """
    first, last, _ = rows.indices(shape[0])
    if len(shape) == 1:
        return torch.ones(last - first)
    first_column, last_column, _ = columns.indices(shape[1])
    if config.tied and name == "output.weight":
        name = "tok_embeddings.weight"
    std = _STD / math.sqrt(2 * config.num_layers) if name.endswith((".wo.weight", ".w2.weight")) else _STD
    num_real_rows = config.vocab_size if name in ("tok_embeddings.weight", "output.weight") else shape[0]

    out = torch.zeros(last - first, last_column - first_column)
    values = out.numpy()
    last = max(first, min(last, num_real_rows))
    for block in range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
        start = block * _BLOCK_ROWS
        top, bottom = max(first, start), min(last, start + _BLOCK_ROWS)
        drawn = _draw(seed, name, block, shape[1])[top - start : bottom - start, first_column:last_column]
        np.multiply(drawn, np.float32(std), out=values[top - first : bottom - first])
    return out


def _draw(seed: int, name: str, block: int, num_columns: int) -> np.ndarray:
    """Standard normal numbers of one whole block, float32 [_BLOCK_ROWS, num_columns].

    From NumPy, not torch: a torch generator on CPU keeps 32 bits of its seed only, so that among the 400,000 blocks of
    a 405B model some would repeat; and its numbers depend on the vector instructions of the machine.
    """
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64DXSM(int.from_bytes(digest, "big")))
    return generator.standard_normal((_BLOCK_ROWS, num_columns), dtype=np.float32)


@torch.no_grad()
def initialise(model: Llama, seed: int) -> None:
    """Fill a plain Llama, or a stretch of one, in place: any device and dtype, but whole parameters (not DTensors)."""
    for name, parameter in model.named_parameters():
        parameter.copy_(fill(name, tuple(parameter.shape), seed, model.config))
