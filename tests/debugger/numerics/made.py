"""Records of a step that were never computed: whole tensors, laid over the ranks of any layout by hand.

Tokens are four sequences of twelve, each of a first document of eight and a second of four. Sequences go to
data-parallel groups in turn of two halves; a context-parallel rank has every other token, a tensor-parallel rank a part
of the columns of everything that is not a vector. Weights are cut by rows over dp x cp, and by columns over TP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.records import Kind, RankStep
from fourfold.layout import Coordinates, Grid

SEQUENCES, LENGTH, FIRST_DOCUMENT = 4, 12, 8
DIM, VOCAB, PADDED = 16, 20, 24
LAYERS = 2
IN_LAYER = ("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.attend", "attention.wo")
OPERATIONS = (
    "tok_embeddings",
    *(f"layers.{layer}.{name}" for layer in range(LAYERS) for name in IN_LAYER),
    "norm",
    "output",
)
VECTORS = ("attention_norm", "norm")
TOKENS = torch.tensor([(sequence << 32) + place for sequence in range(SEQUENCES) for place in range(LENGTH)])
PLACES = torch.arange(LENGTH).repeat(SEQUENCES)
POSITIONS = torch.where(PLACES < FIRST_DOCUMENT, PLACES, PLACES - FIRST_DOCUMENT)
SEQUENCE_OF = torch.arange(SEQUENCES).repeat_interleave(LENGTH)

Name = tuple[Kind, str]
Change = Callable[[Tensor], Tensor]


def is_vector(name: str) -> bool:
    return name.removesuffix(".weight").rpartition(".")[2] in VECTORS


def whole_step(seed: int = 0) -> dict[Name, Tensor]:
    """Every tensor of a step, [rows, features]."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(rows: int, features: int) -> Tensor:
        return torch.randn(rows, features, generator=generator)

    tensors: dict[Name, Tensor] = {}
    for kind in (Kind.OUTPUT, Kind.ARRIVING):
        tensors |= {(kind, name): numbers(len(TOKENS), DIM) for name in OPERATIONS}
    for kind in (Kind.GRADIENT, Kind.WEIGHT):
        for name in OPERATIONS:
            if not name.endswith("attend"):
                rows = PADDED if name in ("tok_embeddings", "output") else DIM
                tensors[kind, f"{name}.weight"] = numbers(rows, 1 if is_vector(name) else DIM)
        for name in ("tok_embeddings", "output"):
            tensors[kind, f"{name}.weight"][VOCAB:] = 0.0
    return tensors


@dataclass
class Made:
    """A step to be laid over ranks.

    Attributes:
        grid: the layout.
        tensors: whole.
        per_dp_group: micro-batches of a data-parallel group.
        scalars: of the step.
        step: its number.
        changes: to what one rank has of a tensor, by (kind, name, rank).
        positions: of all tokens; None: not recorded.
    """

    grid: Grid = field(default_factory=Grid)
    tensors: Mapping[Name, Tensor] = field(default_factory=whole_step)
    per_dp_group: int = 2
    scalars: dict[str, float] = field(default_factory=lambda: {"loss": 3.0, "grad_norm": 1.5})
    step: int = 1
    changes: Mapping[tuple[Kind, str, int], Change] = field(default_factory=dict)
    positions: Tensor | None = field(default_factory=lambda: POSITIONS)

    def records(self) -> list[RankStep]:
        """Of all ranks. All have all layers: the pipeline is not laid out."""
        return [self._rank(rank) for rank in range(self.grid.size)]

    def _rank(self, rank: int) -> RankStep:
        place, maker = self.grid.coordinates(rank), Fingerprinter()
        record = RankStep(self.step, rank, self.grid, dict(self.scalars))
        for (kind, name), whole in self.tensors.items():
            pieces = self._of_tokens(place) if kind in (Kind.OUTPUT, Kind.ARRIVING) else self._of_weight(place, whole)
            columns = range(whole.shape[1])
            if whole.shape[1] > 1:
                share = whole.shape[1] // self.grid.tp
                columns = range(place.tp * share, (place.tp + 1) * share)
            for micro_batch, rows in pieces:
                part = whole[rows][:, columns.start : columns.stop]
                part = self.changes.get((kind, name, rank), lambda x: x)(part)
                numbers = TOKENS[rows] if micro_batch >= 0 else rows
                record.see(
                    maker, kind, name, part, rows=numbers, first=columns.start, width=whole.shape[1],
                    micro_batch=micro_batch,
                )  # fmt: skip
        if self.positions is not None:
            for micro_batch, rows in self._of_tokens(place):
                record.positions[micro_batch] = TOKENS[rows], self.positions[rows]
        return record

    def _of_tokens(self, place: Coordinates) -> list[tuple[int, Tensor]]:
        """(micro-batch, rows) of a rank."""
        per_group = SEQUENCES // self.grid.dp
        size = per_group // self.per_dp_group
        pieces = []
        for micro_batch in range(self.per_dp_group):
            first = place.dp * per_group + micro_batch * size
            mine = (SEQUENCE_OF // size == first // size) & (PLACES % self.grid.cp == place.cp)
            pieces.append((micro_batch, mine.nonzero()[:, 0]))
        return pieces

    def _of_weight(self, place: Coordinates, whole: Tensor) -> list[tuple[int, Tensor]]:
        rows = torch.arange(len(whole)).chunk(self.grid.dp * self.grid.cp)
        return [(-1, rows[place.dp * self.grid.cp + place.cp])]


def slightly(x: Tensor, by: float = 2e-7, seed: int = 1) -> Tensor:
    """Another order of sums: relative errors of this size."""
    return x * (1 + by * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
