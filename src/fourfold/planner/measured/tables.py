"""Tables of measured runs into jobs: `published.csv` and every table with its columns; others through `adapters`.

The kind of a table is known by its header. Columns are found whatever their case and order, missing ones take defaults,
and what a row lacks to be predicted is said in `Unscored`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourfold.planner.jobs import Order, Precision, Recompute, Split
from fourfold.planner.machines.cluster import CHIPS, Chip, Cluster, find_chip
from fourfold.planner.measured import adapters, wording
from fourfold.planner.measured.rows import (
    Cells,
    Measured,
    MeasuredRow,
    MemoryKind,
    Unscored,
    hashed_group,
    header,
    read_cells,
)

MEASUREMENTS = Path(__file__).parent / "measurements"
"""Tables that come with the project."""

NEEDED = ("gpu", "layers", "hidden", "heads", "seq_len", "global_batch", "micro_batch", "tp", "pp")
"""Columns that a table of a user's runs cannot do without; beside them gpu_count or dp, and what was measured."""
_MODEL = ("layers", "hidden", "heads", "seq_len")
_LAYOUT = ("global_batch", "micro_batch", "tp", "pp")


class _UnscoredError(Exception):
    """Why a row cannot be predicted."""


def read(path: str | Path) -> Measured:
    """A table of any kind that the planner knows. ValueError if it is none, or a cell is malformed."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give its CSV files")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    columns = set(header(path))
    readers: tuple[tuple[set[str], Callable[[Path], Measured]], ...] = (
        ({"parameters (billion)", "iteration time (ms)", "micro batch"}, adapters.read_steps),
        ({"iteration time (ms)", "micro batch"}, adapters.read_steps),
        ({"case", "allocated_mb_rank0"}, adapters.read_rank_memory),
        ({"outcome", "hidden"}, adapters.read_out_of_memory),
        ({*NEEDED}, read_published),
    )
    for needed, reader in readers:
        if needed <= columns:
            measured = reader(path)
            if not measured.rows and not measured.unscored:
                raise ValueError(f"{path.name}: has a header and no rows")
            return measured
    raise ValueError(f"{path.name}: not a table of measured runs. {_lacks(columns, [names for names, _ in readers])}")


def _lacks(columns: set[str], kinds: Sequence[set[str]]) -> str:
    """What a header lacks to be of a kind that it has something of."""
    near = [names for names in kinds if 2 * len(names & columns) > len(names)]
    has = f"it has {', '.join(sorted(columns)[:8]) or 'none'}"
    if not near:
        return f"Its header must have at least {', '.join(NEEDED)}; {has}"
    lacks = [
        f"{', '.join(sorted(names - columns))}, to be a table with {', '.join(sorted(names & columns))}"
        for names in near
    ]
    return f"Its header lacks {'; or '.join(lacks)}; {has}. docs/formats.md, Accuracy, says what they mean"


def read_published(path: str | Path) -> Measured:
    """A table with the columns of published.csv."""
    rows: list[MeasuredRow] = []
    unscored: list[Unscored] = []
    for number, cells in enumerate(read_cells(Path(path)), start=1):
        name = cells.text("id", f"row {number}")
        try:
            rows.append(_row(cells, name))
        except _UnscoredError as error:
            unscored.append(Unscored(name, str(error)))
    return Measured("published", tuple(rows), tuple(unscored))


def _row(cells: Cells, name: str) -> MeasuredRow:
    if (cells.number("n_experts") or 0) > 1:
        raise _UnscoredError("mixture of experts")
    task = cells.text("task", "pretrain").lower()
    if not re.match(r"(pre-?)?train", task) or "average" in task:
        raise _UnscoredError(f"task: {task}")
    year = cells.count("year")
    software = wording.framework(cells.text("framework"), year=year)
    precision = wording.precision(cells.text("precision"), year=year)
    if precision is None:
        raise _UnscoredError(f"precision: {cells.text('precision')}")
    layout = _layout(cells)
    columns = (
        _model(cells, software=software, tp=layout["tp"])
        | layout
        | _software(cells, software=software, layout=layout)
        | {"precision": precision}
        | _hardware(
            cells, software, precision=precision, gpus=layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"]
        )
    )
    columns |= _sharding(cells, columns, default=software.zero)
    columns["pairs"] = columns["seq_len"] * (columns["seq_len"] + 1) // 2
    memory, kind = _memory(cells)
    return MeasuredRow(
        id=name,
        source=cells.text("source_key", "unnamed"),
        quality=cells.text("quality").upper(),
        group=cells.text("config_group") or hashed_group([columns[key] for key in sorted(columns)]),
        setting=_setting(cells),
        stack=software.stack,
        saved_set=wording.saved_set(software, chip=CHIPS[columns["chip"]].name),
        columns=columns,
        precision=cells.text("precision"),
        gpu=cells.text("gpu"),
        seconds=_seconds(cells, columns),
        memory=memory,
        memory_kind=kind,
    )


def _needed(cells: Cells, names: tuple[str, ...]) -> dict[str, int]:
    values = {name: cells.count(name) for name in names}
    missing = [name for name, value in values.items() if value is None]
    if missing:
        raise _UnscoredError(f"not stated: {', '.join(missing)}")
    return {name: value for name, value in values.items() if value is not None}


def _model(cells: Cells, *, software: wording.Framework, tp: int) -> dict[str, Any]:
    """The model's columns. Where a table is silent: heads of dim / heads, no GQA, tied tables unless SwiGLU."""
    known = _needed(cells, _MODEL)
    dim, heads, name = known["hidden"], known["heads"], cells.text("model_name").lower()
    vocab = cells.count("vocab") or wording.vocabulary(name)
    gated = cells.flag("gated_mlp", "llama" in name)
    multiple = 128 * tp if software.padded else tp
    learned = bool(re.search(r"gpt|mpt|opt\b", name)) and not gated
    return {
        "layers": known["layers"],
        "dim": dim,
        "heads": heads,
        "kv_heads": cells.count("kv_heads", heads),
        "head_dim": cells.count("head_dim", max(1, dim // heads)),
        "ffn_dim": cells.count("ffn_hidden", -(-8 * dim // 3 // 256) * 256 if gated else 4 * dim),
        "gated": gated,
        "vocab": vocab,
        "padded_vocab": -(-vocab // multiple) * multiple,
        "tied": cells.flag("tied_embeddings", not gated),
        "positions": known["seq_len"] if learned else 0,
        "seq_len": known["seq_len"],
    }


def _layout(cells: Cells) -> dict[str, Any]:
    known = _needed(cells, _LAYOUT)
    tp, pp, cp = known["tp"], known["pp"], cells.count("cp", 1) or 1
    gpus, dp = cells.count("gpu_count"), cells.count("dp")
    if dp is None:
        if gpus is None:
            raise _UnscoredError("not stated: gpu_count and dp")
        dp = gpus // (tp * pp * cp)
    if gpus is not None and tp * pp * cp * dp != gpus:
        raise _UnscoredError("gpu_count is not tp x cp x pp x dp")
    v = cells.count("vpp", 1) or 1
    words = cells.text("pp_schedule")
    v = v if pp > 1 else 1
    order = wording.order(words, pp=pp, v=v)
    micro_batches = max(1, round(known["global_batch"] / (dp * known["micro_batch"])))
    rounds = re.search(r"(\d+)[- ]micro", words.lower())
    nc = int(rounds[1]) if rounds else pp
    layers = cells.count("layers", 0) or 0
    asymmetric = "asymmetric" in words.lower() or "type:transformer|embedding" in cells.text("notes").lower()
    only_legal = layers % (pp * v) != 0 and (layers + 2) % (pp * v) == 0  # else stages would have unequal counts
    return {
        "sequences": known["global_batch"],
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "dp": dp,
        "v": v,
        "nc": min(nc, micro_batches) if order is Order.FLEXIBLE else pp,
        "micro_batch": known["micro_batch"],
        "order": order,
        "split": Split.ENDS_LIGHT if pp > 1 and (asymmetric or only_legal) else Split.EVEN,
    }


def _software(cells: Cells, *, software: wording.Framework, layout: dict[str, Any]) -> dict[str, Any]:
    kind, share = wording.recompute(cells.text("recompute"))
    flags = cells.text("overlap_flags")
    sums = 2 if "bf16 grad reduce" in flags.lower() else software.gradient_bytes
    if "fp32 grad" in cells.text("precision").lower():
        sums = 4
    return {
        "sequence_parallel": layout["tp"] > 1 and cells.flag("sequence_parallel", software.sequence_parallel),
        "recompute": kind,
        "recomputed_layers": share if kind is not Recompute.NONE else 0.0,
        "gradient_bytes": sums,
        "reduce_bytes": min(sums, software.reduce_bytes) if sums == 2 else max(software.reduce_bytes, 2),
        "fused_attention": wording.fused_attention(cells.text("attention_impl"), default=software.flash),
        "fused_norms": wording.fused_norms(cells.text("attention_impl"), default=software.fused_norms),
        "compiled": cells.flag("compile", software.compiled) or software.compiled,
        "cuda_graphs": "cuda graph" in flags.lower(),
        "tp_overlap": layout["tp"] > 1 and wording.overlaps_tp(flags),
    }


def _hardware(cells: Cells, software: wording.Framework, *, precision: Precision, gpus: int) -> dict[str, Any]:
    name = wording.chip(cells.text("gpu"))
    if name is None:
        raise _UnscoredError(f"no numbers of the chip: {cells.text('gpu') or 'not stated'}")
    chip = find_chip(name)
    inside, between = cells.text("intra_node_bw_note"), cells.text("inter_node_bw_note")
    node = cells.count("gpus_per_node", chip.gpus_per_node) or chip.gpus_per_node
    # A domain of several trays is the chip's; else it ends with the node.
    domain = chip.domain if chip.domain > chip.gpus_per_node else node
    try:
        return _cluster(
            chip,
            gpus=gpus,
            domain=domain,
            node=node,
            link=wording.links(inside),
            nic=wording.network(between, gpus_per_node=node) or (software.network and software.network / node),
            oversubscription=wording.oversubscription(between),
        ).columns(precision)
    except ValueError:
        raise _UnscoredError(f"{chip.name} cannot multiply in {precision.name.lower()}") from None


def _cluster(
    chip: Chip, *, gpus: int, domain: int, node: int, link: float | None, nic: float | None, oversubscription: float
) -> Cluster:
    tier = min(gpus, 3072) if oversubscription > 1 else gpus  # the pods of the one source that states it
    return Cluster(
        name=chip.name,
        chip=chip,
        gpus=gpus,
        domain=domain,
        gpus_per_node=node,
        link=link or chip.link,
        nic=nic or chip.nic,
        tier=tier,
        oversubscription=oversubscription,
    )


def _sharding(cells: Cells, columns: dict[str, Any], *, default: int) -> dict[str, int]:
    ranks = columns["dp"] * columns["cp"]
    node = max(1, (cells.count("gpus_per_node") or 8) // columns["tp"])
    stage, shards = wording.sharding(cells.text("sharding"), ranks=ranks, node=node, default=default)
    return {"zero": stage, "shards": shards}


def _seconds(cells: Cells, columns: dict[str, Any]) -> float | None:
    """Per step: as measured, else from the rate that the table gives."""
    seconds = cells.positive("measured_step_time_s")
    if seconds:
        return seconds
    rate = cells.positive("tokens_per_s_per_gpu") or cells.positive("measured_tokens_per_s_per_gpu")
    if not rate:
        raise _UnscoredError("no step time and no token rate")
    gpus = columns["tp"] * columns["cp"] * columns["pp"] * columns["dp"]
    return columns["sequences"] * columns["seq_len"] / (rate * gpus)


def _memory(cells: Cells) -> tuple[float | None, MemoryKind]:
    peak = cells.positive("peak_memory_gb")
    unit, kind = wording.memory(cells.text("notes"), framework=cells.text("framework"))
    return (peak * unit if peak else None), kind


def _setting(cells: Cells) -> str:
    """Model, cluster, batch and software, for people to read."""
    names = (
        "source_key",
        "framework",
        "model_name",
        "layers",
        "global_batch",
        "seq_len",
        "precision",
        "gpu_count",
        "gpu",
    )
    text = {name: cells.text(name, "-") for name in names}
    return (
        "{source_key}, {framework}: {model_name} of {layers} layers, {global_batch} x {seq_len}, {precision}, "
        "{gpu_count} {gpu}".format(**text)
    )
