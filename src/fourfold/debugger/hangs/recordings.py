"""Dumps of PyTorch's flight recorder, a file per rank: the last calls that it made, on any back end.

PyTorch writes pickles, by itself when its watchdog ends a job and through ``_dump_fr_trace``, and JSON through
``_dump_fr_trace_json``; schemas 2.x differ in which keys there are. Pickles of strangers may run whatever code they
hold, so nothing is read that is more than dicts, lists, tuples, numbers and strings.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fourfold.debugger.pickles import unpickled

_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle|pt|bin|dump|gz))*$")
_DIRECTION = re.compile(r"(send|recv) (\d+)(->|<-)(\d+)")
KEPT = 16  # last calls of each group, and last calls of all that keep their stacks
_HEAD = 1 << 16  # bytes in which a file says what it is
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Int": "int32",
           "Long": "int64", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool",
           "Float8_e4m3fn": "float8_e4m3fn", "Float8_e5m2": "float8_e5m2"}  # fmt: skip
_KINDS = {"_all_gather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter", "all_gather_single": "all_gather",
          "reduce_scatter_single": "reduce_scatter", "_broadcast_oop": "broadcast", "_reduce_oop": "reduce",
          "all_reduce_barrier": "barrier", "all_to_all_single": "all_to_all"}  # fmt: skip
_UNLIKE = {"all_to_all", "all_to_all_v_single", "gather", "scatter", "all_gather_v", "reduce_scatter_v"}  # in size


class _Frame(msgspec.Struct, gc=False):
    name: str = ""
    filename: str = ""
    line: int = 0


class _Entry(msgspec.Struct):
    """One call, as PyTorch writes it; what is not used is left out, and what older schemas lack has a default."""

    profiling_name: str
    state: str
    record_id: int = 0
    pg_id: int = -1
    process_group: tuple[str, str] | None = None
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    op_id: int = 0
    time_created_ns: int = 0
    input_sizes: Sequence[Any] = ()
    input_dtypes: Sequence[str] = ()
    output_sizes: Sequence[Any] = ()
    output_dtypes: Sequence[str] = ()
    retired: bool = False
    is_p2p: bool = False
    frames: Any = ()


class _Group(msgspec.Struct):
    name: str = ""
    desc: str = ""
    ranks: str | Sequence[int] = ""


class _Status(msgspec.Struct):
    last_completed_collective: int = -1


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    Attributes:
        group: name and description of its process group, which are alike on its members, though not always unique.
        kind: such as all_reduce, without the back end's prefix.
        number: counts the collectives of the group from 1, alike on its members; of a message, not at all.
        batch: of messages, alike for those that were started together.
        others: how many calls were made on the group before, of any kind, recorded or not; -1 if unknown.
        ends: of a message, source and destination within its group.
        tensor: elements and dtype; empty where members may well differ in it.
        factor: elements that come out for one that goes in: the size of the group, where one gathers; its inverse,
            where one scatters; else 0.
        created: nanoseconds since 1970.
        begun: whether the device has begun it. None where that was not recorded.
        ended: whether it has, or has failed, which gloo's calls do not tell apart.
    """

    group: tuple[str, str]
    back_end: str
    kind: str
    number: int
    batch: int
    others: int
    ends: tuple[int, int] | None
    tensor: str
    factor: float
    created: int
    begun: bool | None
    ended: bool
    where: str
    stack: tuple[str, ...]


@dataclass(frozen=True)
class Dump:
    """What one rank has left.

    Attributes:
        calls: in order; of the collectives of a group that have ended, the last few.
        groups: name and description of process groups -> their ranks, where the dump says it.
        cut: whether calls before the first were forgotten.
    """

    path: Path
    rank: int
    calls: tuple[Call, ...]
    groups: Mapping[tuple[str, str], tuple[int, ...]]
    cut: bool
    notes: tuple[str, ...] = ()


def rank_in_name(path: Path) -> int | None:
    """The rank in a dump's name, such as nccl_trace_rank_12 or fr12.json."""
    match = _RANK.search(path.name)
    return int(match[1]) if match else None


def is_dump(path: Path) -> bool:
    """Whether a file looks like a dump of the flight recorder, whole or not."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        if head[:2] == b"\x1f\x8b":
            head = zlib.decompressobj(31).decompress(head, _HEAD)
    except (OSError, zlib.error):
        return False
    if head[:1] == b"\x80":
        return b"pg_config" in head or b"profiling_name" in head or b"nccl_comm_state" in head
    is_object = head.lstrip()[:1] == b"{" and b'"traceEvents"' not in head
    return is_object and b'"entries"' in head and (b'"profiling_name"' in head or b'"pg_config"' in head)


def read_dump(path: Path, rank: int) -> Dump:
    """Reads one rank's dump.

    Raises:
        ValueError: it is damaged, or no dump.
        OSError: it cannot be read.
    """
    content = _content(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("entries", []), list | tuple):
        raise ValueError(f"{path} is no dump of the flight recorder: it holds no entries")
    notes = []
    entries = [entry for entry in map(_entry, content.get("entries", ())) if entry is not None]
    skipped = len(content.get("entries", ())) - len(entries)
    if skipped:
        notes.append(f"{path.name}: {skipped} entries are damaged and were left out")
    entries.sort(key=lambda entry: entry.record_id)
    entries = _without_batches(entries)
    completed = _completed(content)
    marks = any(entry.state == "started" for entry in entries)  # else a started call is called scheduled, too
    retires = any(entry.retired for entry in entries)
    calls = []
    kept: Counter[tuple[str, str]] = Counter()
    for i, entry in reversed([*enumerate(entries)]):
        ended = entry.state == "completed"
        if not entry.is_p2p:
            ended = ended or entry.collective_seq_id <= completed.get(str(entry.pg_id), -1)
        if entry.profiling_name.startswith("gloo:"):
            # gloo never says that a call has completed, but PyTorch 2.13 retires it then. Where nothing is retired, the
            # last call is the one that may not have ended.
            ended = ended or (entry.retired if retires else i < len(entries) - 1)
        # Collectives say their number, messages have to be counted: of those that have ended, some are enough.
        group = entry.process_group or (str(entry.pg_id), "")
        if ended and not entry.is_p2p and kept[group] >= KEPT:
            continue
        kept[group] += 1
        calls.append(_call(entry, group, ended=ended, marks=marks, stack=not ended or len(entries) - i <= KEPT))
    cut = bool(entries) and entries[0].record_id > 0
    return Dump(path, rank, tuple(calls[::-1]), _groups(content), cut, tuple(notes))


def _without_batches(entries: Sequence[_Entry]) -> list[_Entry]:
    """Gives messages that were posted together the state of their batch, whose entry is left out.

    PyTorch records them one by one and the batch after them, and only the batch is ever marked.
    """
    batches: dict[tuple[Any, int], _Entry] = {}
    rest = []
    for entry in entries:
        if entry.is_p2p and entry.profiling_name.endswith(":coalesced"):
            batches[entry.process_group, entry.p2p_seq_id] = entry
        else:
            rest.append(entry)
    for entry in rest:
        batch = batches.get((entry.process_group, entry.p2p_seq_id))
        if batch is not None and entry.is_p2p:
            entry.state, entry.retired = batch.state, batch.retired
    return rest


def _content(path: Path) -> Any:
    data = path.read_bytes()
    if not data:
        raise ValueError(f"{path} is empty")
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        if data.lstrip()[:1] in (b"{", b"["):
            return msgspec.json.decode(data)
        return unpickled(io.BytesIO(data))
    except MemoryError:
        raise ValueError(f"{path} is damaged: it asks for more memory than there is") from None
    except Exception as error:  # what a damaged pickle raises is not limited to anything
        raise ValueError(f"{path} is damaged: {str(error) or type(error).__name__}") from None


def _entry(raw: Any) -> _Entry | None:
    try:
        return msgspec.convert(raw, _Entry, strict=False)
    except msgspec.ValidationError:
        if not isinstance(raw, Mapping):
            return None
    # Stacks, sizes and times are not worth losing a call for.
    needed = {key: raw[key] for key in ("profiling_name", "state", "record_id", "pg_id", "process_group",
                                        "collective_seq_id", "is_p2p", "retired") if key in raw}  # fmt: skip
    try:
        return msgspec.convert(needed, _Entry, strict=False)
    except msgspec.ValidationError:
        return None


def _call(entry: _Entry, group: tuple[str, str], *, ended: bool, marks: bool, stack: bool) -> Call:
    back_end, _, name = entry.profiling_name.rpartition(":")
    kind = name.split(" ")[0]
    kind = _KINDS.get(kind, kind)
    ends = None
    if match := _DIRECTION.fullmatch(name):
        here, there = int(match[2]), int(match[4])
        ends = (here, there) if match[1] == "send" else (there, here)
    given, made = _elements(entry.input_sizes), _elements(entry.output_sizes)
    factor = made / given if given and made and kind in ("all_gather", "reduce_scatter") else 0.0
    elements = max(given, made) if kind in ("all_gather", "reduce_scatter", "broadcast") else given or made
    dtype = next(iter([*entry.input_dtypes, *entry.output_dtypes]), "")
    tensor = f"[{elements}] {_DTYPES.get(dtype, dtype)}".rstrip() if elements and kind not in _UNLIKE else ""
    frames = _frames(entry.frames) if stack else ()
    return Call(
        group=group,
        back_end=back_end,
        kind=kind,
        number=entry.collective_seq_id,
        batch=entry.p2p_seq_id,
        others=entry.op_id - 1 if entry.op_id else -1,
        ends=ends,
        tensor="" if kind == "barrier" else tensor,
        factor=factor,
        created=entry.time_created_ns,
        begun=True if entry.state in ("started", "completed") or back_end == "gloo" else False if marks else None,
        ended=ended,
        where=next((line for line in reversed(frames) if not _is_library(line)), frames[-1] if frames else ""),
        stack=frames,
    )


def _frames(raw: Any) -> tuple[str, ...]:
    """A stack as lines, outermost first; empty if it is damaged."""
    try:
        frames = msgspec.convert(raw, list[_Frame], strict=False)
    except msgspec.ValidationError:
        return ()
    return tuple(f"{frame.filename}:{frame.line} {frame.name}" for frame in reversed(frames))


def _is_library(line: str) -> bool:
    """Whether a frame is PyTorch's or Python's own."""
    return any(part in line for part in ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen", "<string>"))


def _elements(sizes: Sequence[Any]) -> int:
    """Of all tensors of a call. A list of tensors that is gathered into is written as one, or as many."""
    shapes = sizes if all(isinstance(size, list | tuple) for size in sizes) else [sizes]
    return sum(math.prod(shape) for shape in shapes if shape and all(isinstance(extent, int) for extent in shape))


def _completed(content: Mapping[Any, Any]) -> dict[str, int]:
    """pg_id -> the last collective that its status says has ended."""
    return {str(key): status.last_completed_collective for key, status in _values(content, "pg_status", _Status)}


def _groups(content: Mapping[Any, Any]) -> dict[tuple[str, str], tuple[int, ...]]:
    """The process groups of a dump whose ranks it tells, under (name, description)."""
    found = {}
    for key, group in _values(content, "pg_config", _Group):
        listed = re.findall(r"\d+", group.ranks) if isinstance(group.ranks, str) else group.ranks
        if listed and "..." not in group.ranks:  # a list that was cut
            found[group.name or str(key), group.desc] = tuple(sorted(map(int, listed)))
    return found


def _values(content: Mapping[Any, Any], key: str, kind: type[Any]) -> Iterator[tuple[Any, Any]]:
    values = content.get(key)
    for name, raw in values.items() if isinstance(values, Mapping) else ():
        try:
            yield name, msgspec.convert(raw, kind, strict=False)
        except msgspec.ValidationError:
            continue
