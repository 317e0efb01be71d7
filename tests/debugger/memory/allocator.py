"""A caching allocator after PyTorch's: it hands out memory, writes snapshots in PyTorch's format, and knows the truth.

Blocks are rounded up to 512 bytes and taken first-fit from segments of their stream; a free block is split, and merged
with free neighbours. After every event it keeps what is alive, as a plain dict: what a reader has to find again.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROUND = 512
SEGMENT = 1 << 20  # bytes, at least, that are taken from the device at a time
BASE = 0x7F00_0000_0000


@dataclass
class Piece:
    """A part of a segment."""

    address: int
    size: int
    state: str = "inactive"
    requested: int = 0
    frames: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Truth:
    """After an event: bytes by address, where they were asked for, what is reserved, and free pieces by stream."""

    live: dict[int, int]
    place: dict[int, str]
    given_back: set[int]
    reserved: int
    free: dict[int, int]


class Allocator:
    """Records everything from `record` on; what is made before is there without a history."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.events: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []
        self.truths: list[Truth] = []
        self.now = 1_000_000
        self._segments: list[tuple[int, list[Piece]]] = []  # stream, pieces
        self._stacks: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        self._places: dict[int, str] = {}
        self._next = BASE
        self._records = False

    def record(self) -> None:
        """From now on there is a history."""
        self._records = True
        self.truths = [self._truth()]

    def alloc(self, size: int, *stack: str, stream: int = 0) -> int:
        """The address of a new block. `stack`: frames as file:line:function, innermost first."""
        rounded = -(-size // ROUND) * ROUND
        found = self._fitting(rounded, stream)
        if found is None:
            self._grow(max(SEGMENT, rounded), stream)
            found = self._fitting(rounded, stream)
        assert found is not None
        pieces, at = found
        piece = pieces[at]
        if piece.size > rounded:
            pieces.insert(at + 1, Piece(piece.address + rounded, piece.size - rounded))
            piece.size = rounded
        piece.state, piece.requested, piece.frames = "active_allocated", size, self._stack(stack)
        if not self._records:
            piece.frames = []
        self._places[piece.address] = stack[0] if stack else ""
        self._event("alloc", piece.address, size, stream, self._stack(stack))
        return piece.address

    def free(self, address: int, *, wait: bool = False) -> None:
        """Gives a block back; `wait`: another stream uses it until `complete`."""
        stream, _, piece = self._piece(address)
        piece.state = "active_awaiting_free"
        self._event("free_requested", address, piece.requested, stream)
        if not wait:
            self.complete(address)

    def complete(self, address: int) -> None:
        """Nobody uses a block any more."""
        stream, pieces, piece = self._piece(address)
        size = piece.requested
        piece.state, piece.requested, piece.frames = "inactive", 0, []
        at = pieces.index(piece)
        for left in (at, at - 1):
            if 0 <= left < len(pieces) - 1 and pieces[left].state == pieces[left + 1].state == "inactive":
                pieces[left].size += pieces.pop(left + 1).size
        self._event("free_completed", address, size, stream)

    def empty_cache(self) -> None:
        """Returns to the device what is wholly free."""
        for stream, pieces in [*self._segments]:
            if len(pieces) == 1 and pieces[0].state == "inactive":
                self._segments.remove((stream, pieces))
                self._event("segment_free", pieces[0].address, pieces[0].size, stream)

    def fail(self, size: int, device_free: int, *stack: str, stream: int = 0) -> None:
        """A request that the device has no memory for."""
        self._event("oom", device_free, size, stream, self._stack(stack))

    def annotate(self, stage: str, name: str) -> None:
        """The beginning (START) or end (END) of a named range."""
        self.now += 10
        entry = {"name": name, "stage": stage, "device": self.device, "time_us": self.now}
        self.annotations.append(entry)
        self.now += 10

    def snapshot(self, *, forget: int = 0) -> dict[str, Any]:
        """As `torch.cuda.memory._snapshot` returns it. `forget`: so many events have left the ring."""
        segments = [
            {
                "device": self.device,
                "address": pieces[0].address,
                "total_size": sum(piece.size for piece in pieces),
                "allocated_size": sum(p.size for p in pieces if p.state == "active_allocated"),
                "active_size": sum(p.size for p in pieces if p.state != "inactive"),
                "requested_size": sum(p.requested for p in pieces),
                "stream": stream,
                "segment_type": "large",
                "segment_pool_id": (0, 0),
                "is_expandable": False,
                "frames": [],
                "blocks": [
                    {
                        "address": p.address,
                        "size": p.size,
                        "requested_size": p.requested,
                        "state": p.state,
                        "frames": p.frames,
                    }
                    for p in pieces
                ],
            }
            for stream, pieces in self._segments
        ]
        traces: list[list[dict[str, Any]]] = [[] for _ in range(self.device + 1)]
        traces[self.device] = self.events[forget:]
        return {
            "segments": segments,
            "device_traces": traces,
            "external_annotations": self.annotations,
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False},
        }

    def write(self, path: Path, *, forget: int = 0) -> Path:
        """As `torch.cuda.memory._dump_snapshot` does."""
        path.write_bytes(pickle.dumps(self.snapshot(forget=forget)))
        return path

    def _fitting(self, size: int, stream: int) -> tuple[list[Piece], int] | None:
        for of, pieces in self._segments:
            for at, piece in enumerate(pieces):
                if of == stream and piece.state == "inactive" and piece.size >= size:
                    return pieces, at
        return None

    def _grow(self, size: int, stream: int) -> None:
        self._segments.append((stream, [Piece(self._next, size)]))
        self._event("segment_alloc", self._next, size, stream)
        self._next += size + (1 << 30)

    def _piece(self, address: int) -> tuple[int, list[Piece], Piece]:
        return next((s, pieces, p) for s, pieces in self._segments for p in pieces if p.address == address)

    def _stack(self, stack: tuple[str, ...]) -> list[dict[str, Any]]:
        """One list per stack, which all events that have it share."""
        if stack not in self._stacks:
            parts = [frame.split(":") for frame in stack]
            self._stacks[stack] = [{"filename": f, "line": int(line), "name": name} for f, line, name in parts]
        return self._stacks[stack]

    def _event(
        self, action: str, address: int, size: int, stream: int, frames: list[dict[str, Any]] | None = None
    ) -> None:
        if not self._records:
            return
        self.now += 7
        entry: dict[str, Any] = {"action": action, "device_free" if action == "oom" else "addr": address}
        entry |= {"size": size, "stream": stream, "time_us": self.now, "compile_context": "", "user_metadata": ""}
        if frames is not None:
            entry["frames"] = frames
        self.events.append(entry)
        self.truths.append(self._truth())

    def _truth(self) -> Truth:
        pieces = [(stream, piece) for stream, some in self._segments for piece in some]
        active = [piece for _, piece in pieces if piece.state != "inactive"]
        free: dict[int, int] = {}
        for stream, piece in pieces:
            if piece.state == "inactive":
                free[stream] = max(free.get(stream, 0), piece.size)
        return Truth(
            live={piece.address: piece.requested for piece in active},
            place={piece.address: self._places[piece.address] for piece in active},
            given_back={piece.address for piece in active if piece.state == "active_awaiting_free"},
            reserved=sum(piece.size for _, piece in pieces),
            free=free,
        )
