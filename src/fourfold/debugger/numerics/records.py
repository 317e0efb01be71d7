"""The numbers of a run, by step and rank: fingerprints of tensors, its loss and norm. docs/formats.md has the files.

Rows are numbered whatever the layout: a row of a weight by its place in the whole weight, a token by its sequence in
the step's batch and its place in that sequence (:func:`token_numbers`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from fourfold.debugger.numerics.comparison import SEQUENCE_BITS
from fourfold.debugger.numerics.fingerprints import Fingerprint, Fingerprinter
from fourfold.layout import Grid

FORMAT = 1
FOLDER = "numerics"  # of a run
PADDING = -1  # number of a row that is padding


class Kind(StrEnum):
    """What a tensor is, in the order in which a step makes them."""

    OUTPUT = "output"  # of an operation, in a forward
    ARRIVING = "arriving"  # gradient that reaches an operation's output, in a backward
    GRADIENT = "gradient"  # of a weight, finished: all sums made, not clipped
    WEIGHT = "weight"  # after the step


@dataclass(frozen=True)
class Seen:
    """One tensor of one rank, or the part of it that the rank holds.

    Attributes:
        kind: what it is.
        name: of the weight; or of the operation, which is named as its weight is, or as it is called: attend, swiglu.
        rows: int64 [r], their numbers.
        fingerprint: of the rows.
        dtype: of the tensor, as "bfloat16".
        first, features, width: the columns first to first + features of ``width`` in all.
        micro_batch: within the rank's data-parallel group; -1 where there is none.
        values: the tensor itself, [r, features], where it was kept.
    """

    kind: Kind
    name: str
    rows: Tensor
    fingerprint: Fingerprint
    dtype: str
    first: int
    features: int
    width: int
    micro_batch: int = -1
    values: Tensor | None = None


@dataclass(frozen=True)
class RankStep:
    """What was recorded of one step on one rank.

    Attributes:
        step: its number, from 1.
        rank: global.
        grid: the layout of the run.
        scalars: "loss" and "grad_norm" of the step, fp64, the same on all ranks.
        seen: in the order in which it was seen.
        positions: place in its document of every token of a micro-batch that the rank holds, by micro-batch: (numbers
            of tokens, positions), int64 [m] each.
    """

    step: int
    rank: int
    grid: Grid
    scalars: dict[str, float] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    positions: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(
        self,
        maker: Fingerprinter,
        kind: Kind,
        name: str,
        tensor: Tensor,
        *,
        rows: Tensor,
        first: int = 0,
        width: int | None = None,
        micro_batch: int = -1,
        keep: bool = False,
    ) -> None:
        """Records a tensor [r, ...], whose columns begin with number ``first`` of ``width`` (default: all it has)."""
        matrix = tensor.detach().reshape(tensor.shape[0], -1)
        features = matrix.shape[1]
        seen = Seen(
            kind=kind,
            name=name,
            rows=rows,
            fingerprint=maker.of(matrix, first=first),
            dtype=str(tensor.dtype).removeprefix("torch."),
            first=first,
            features=features,
            width=features if width is None else width,
            micro_batch=micro_batch,
            values=matrix.cpu().clone() if keep else None,
        )
        self.seen.append(seen)


def token_numbers(rows: Sequence[Sequence[int]], *, first_sequence: int) -> Tensor:
    """int64 [n]: number of every token of a micro-batch, whose rows hold documents of the given lengths.

    first_sequence: number of its first row among all sequences of the step.
    """
    lengths = [sum(row) for row in rows]
    return torch.cat(
        [
            torch.arange(length) + ((first_sequence + i) << SEQUENCE_BITS)
            for i, length in enumerate(lengths)
        ]
    )  # fmt: skip


def step_folder(folder: Path, step: int) -> Path:
    """Where a step's files are, in a run's ``numerics`` folder."""
    return folder / f"step-{step:06d}"


def recorded_steps(folder: Path) -> list[int]:
    """Steps that have files, ascending."""
    found = [path.name.removeprefix("step-") for path in folder.glob("step-*") if any(path.glob("rank-*.safetensors"))]
    return sorted(int(number) for number in found if number.isdecimal())


def write(record: RankStep, folder: Path) -> None:
    """Writes one rank's step into a run's ``numerics`` folder; OSError."""
    place = step_folder(folder, record.step)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"rank-{record.rank:05d}.safetensors"
    partial = path.with_suffix(".partial")
    try:
        partial.write_bytes(_encode(record))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _encode(record: RankStep) -> bytes:
    tensors: dict[str, Tensor] = {}
    places: dict[int, int] = {}  # of row numbers that several tensors share, by identity
    entries = []
    for number, seen in enumerate(record.seen):
        key = places.setdefault(id(seen.rows), len(places))
        tensors[f"rows/{key}"] = seen.rows
        entry: dict[str, Any] = {name: getattr(seen, name) for name in _PLAIN}
        entries.append({**entry, "rows": key, "count": len(seen.rows), "kept": seen.values is not None})
        if seen.values is not None:
            tensors[f"values/{number}"] = seen.values.contiguous()
    if record.seen:
        for column in Fingerprint._fields:
            tensors[column] = torch.cat([getattr(seen.fingerprint, column) for seen in record.seen]).cpu()
    for micro_batch, (tokens, positions) in record.positions.items():
        tensors[f"tokens/{micro_batch}"], tensors[f"positions/{micro_batch}"] = tokens, positions
    about = {
        "format": FORMAT, "step": record.step, "rank": record.rank, "grid": asdict(record.grid),
        "scalars": record.scalars, "seen": entries,
    }  # fmt: skip
    return save(tensors, {"fourfold": json.dumps(about)})


_PLAIN = ("kind", "name", "dtype", "first", "features", "width", "micro_batch")


def read(path: Path) -> RankStep:
    """One rank's step. ValueError, naming the file: it is damaged, of another kind, or of a later format."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["fourfold"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
        if about["format"] != FORMAT:
            raise ValueError(f"format {about['format']}; this version reads {FORMAT}")
        return _decode(about, tensors)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except Exception as error:  # safetensors has an error of its own; whatever is missing in a file of ours is damage
        raise ValueError(f"{path}: is not a file of recorded numbers: {error}") from None


def _decode(about: dict[str, Any], tensors: dict[str, Tensor]) -> RankStep:
    record = RankStep(about["step"], about["rank"], Grid(**about["grid"]), about["scalars"])
    start = 0
    for number, entry in enumerate(about["seen"]):
        stop = start + entry["count"]
        plain: dict[str, Any] = {name: entry[name] for name in _PLAIN} | {"kind": Kind(entry["kind"])}
        record.seen.append(
            Seen(
                **plain,
                rows=tensors[f"rows/{entry['rows']}"],
                fingerprint=Fingerprint(*(tensors[column][start:stop] for column in Fingerprint._fields)),
                values=tensors[f"values/{number}"] if entry["kept"] else None,
            )
        )
        start = stop
    for key, tokens in tensors.items():
        kind, _, micro_batch = key.partition("/")
        if kind == "tokens":
            record.positions[int(micro_batch)] = tokens, tensors[f"positions/{micro_batch}"]
    return record


def read_step(folder: Path, step: int) -> list[RankStep]:
    """All ranks of one step, by rank. ValueError as for `read`, or a rank is missing."""
    files = sorted(step_folder(folder, step).glob("rank-*.safetensors"))
    found = [read(file) for file in files]
    wanted = found[0].grid.size if found else 1
    missing = sorted({*range(wanted)} - {record.rank for record in found})
    if missing:
        raise ValueError(f"{step_folder(folder, step)}: no numbers of rank {', '.join(map(str, missing))}")
    return found
