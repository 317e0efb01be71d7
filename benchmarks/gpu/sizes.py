"""How large everything is: on a GPU, and at tiny sizes on a CPU, where only that it runs can be seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fourfold.simulator.figures.cp_attention import Heads


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the parts work on.

    Attributes:
        heads: of the CP part; those of a GPU of Llama 3 405B with tp 8.
        seq_lens: tokens of a row, in the CP part.
        document: mean tokens of a document there; lengths are exponential.
        document_rows: rows over which a value with documents is a mean.
        repeats: of a timed call.
        oracle_heads: of the kernel part, query heads and those of keys and values.
        oracle_dim: channels of a head there.
        oracle_tokens: of a micro-batch there, at most.
        oracle_cases: random micro-batches there.
        model: hyper-parameters of the step; ``num_layers`` comes from ``layers``.
        layers: numbers of layers, the first of which fits is taken.
        seq_len: tokens of a row of the step.
        rows: micro-batches of a step, a row and a document each.
        steps: timed, of every variant.
        matrix: rows and columns of the matrices of the machine's own speed.
        copied: bytes of the copy that tells the speed of its memory.
    """

    heads: Heads
    seq_lens: tuple[int, ...]
    document: int
    document_rows: int
    repeats: int
    oracle_heads: tuple[int, int]
    oracle_dim: int
    oracle_tokens: int
    oracle_cases: int
    model: dict[str, Any]
    layers: tuple[int, ...]
    seq_len: int
    rows: int
    steps: int
    matrix: int
    copied: int


ON_GPU = Sizes(
    heads=Heads(),
    seq_lens=tuple(4096 << doubling for doubling in range(6)),
    document=1024,
    document_rows=4,
    repeats=7,
    oracle_heads=(16, 4),
    oracle_dim=128,
    oracle_tokens=1536,
    oracle_cases=4,
    model={"preset": "llama3-8b"},
    layers=(8, 6, 4, 2, 1),
    seq_len=8192,
    rows=2,
    steps=6,
    matrix=8192,
    copied=4 << 30,
)
TINY = Sizes(
    heads=Heads(query=4, kv=1, dim=16),
    seq_lens=(128, 256),
    document=32,
    document_rows=2,
    repeats=3,
    oracle_heads=(4, 2),
    oracle_dim=16,
    oracle_tokens=96,
    oracle_cases=2,
    model={"dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 128, "vocab_size": 256},
    layers=(2,),
    seq_len=64,
    rows=2,
    steps=3,
    matrix=256,
    copied=1 << 20,
)
