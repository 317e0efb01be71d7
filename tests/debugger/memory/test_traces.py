"""Memory in profiler traces: some written by hand, and some that PyTorch's profiler makes of what is known."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fourfold.debugger.memory import has_memory
from fourfold.debugger.memory.history import BEFORE
from fourfold.debugger.memory.peaks import summarise
from fourfold.debugger.memory.traces import read_trace

KIB = 1 << 10


class Trace:
    """A trace that grows by events, in microseconds."""

    def __init__(self, *, gpu: bool = False, before: int = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self.live: list[int] = [before]
        self._gpu = gpu

    def memory(self, ts: float, address: int, size: int, *, tid: int = 1, seen: bool = True) -> None:
        """A block is made, or freed if `size` is negative. `seen`: the profiler notices it."""
        self.live.append(self.live[-1] + size)
        if seen:
            self.events.append(
                {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 1, "tid": tid, "ts": ts,
                 "args": {"Total Reserved": 9 * KIB * self._gpu, "Total Allocated": self.live[-1], "Bytes": size,
                          "Device Id": 0 if self._gpu else -1, "Device Type": int(self._gpu), "Addr": address}}
            )  # fmt: skip

    def range(self, name: str, start: float, end: float, *, cat: str = "user_annotation", tid: int = 1) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start})

    def write(self, path: Path, rank: int | None = 3) -> Path:
        head: dict[str, Any] = {"schemaVersion": 1, "profile_memory": 1}
        if rank is not None:
            head["distributedInfo"] = {"rank": rank, "world_size": 8}
        path.write_text(json.dumps({**head, "traceEvents": self.events}))
        return path


def label(kind: str, micro_batch: int, dimension: str = "pp") -> str:
    return f"ff:{dimension}:{kind}:group=0:stage=1:mb={micro_batch}:seq=0"


def test_operator_action_and_collective(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("ProfilerStep#4", 0, 1000)
    trace.range(label("F", 0), 10, 100)
    trace.range("Linear", 20, 30, cat="cpu_op")
    trace.range("aten::empty", 21, 22, cat="cpu_op")
    trace.memory(21.5, 0xA, 4 * KIB)
    trace.range(label("all_gather", 0, "tp"), 40, 60)
    trace.range("aten::empty", 41, 42, cat="cpu_op")
    trace.memory(41.5, 0xB, 3 * KIB)
    trace.range(label("B", 0), 200, 300)
    trace.range("autograd::engine::evaluate_function: MmBackward0", 210, 220, cat="cpu_op")
    trace.memory(215, 0xC, 2 * KIB)
    trace.memory(230, 0xA, -4 * KIB)
    trace.memory(240, 0xD, KIB, tid=2)  # another thread, in no operator; the rank is in its backward
    trace.range("ff:step", 400, 500)
    trace.memory(450, 0xE, KIB)
    trace.memory(460, 0xB, -3 * KIB)
    (history,) = read_trace(trace.write(tmp_path / "rank-00003.json"))
    assert (history.rank, history.device, history.is_whole, history.source) == (3, "cpu", False, "trace")
    assert history.live().tolist() == trace.live
    assert history.steps == ((4, 0),)
    found = summarise(history)
    assert (found.peak.bytes, found.peak.step, found.peak.doing) == (9 * KIB, 4, "B of stage 1")
    assert found.peak.seconds == pytest.approx(215e-6)
    assert found.peak.reserved == found.most_reserved == -1
    assert {one.what: one.bytes for one in found.peak.by_place} == {
        "Linear": 4 * KIB, "tp all_gather": 3 * KIB, "MmBackward0": 2 * KIB,
    }  # fmt: skip
    assert {one.what: one.bytes for one in found.peak.by_doing} == {"F of stage 1": 7 * KIB, "B of stage 1": 2 * KIB}
    assert history.doings[history.doing[-1]] == "step"


def test_a_gpu_knows_what_was_there_before(tmp_path: Path) -> None:
    trace = Trace(gpu=True, before=100 * KIB)
    trace.memory(10, 0xA, 5 * KIB)
    trace.memory(20, 0xF, -30 * KIB)  # made before
    trace.memory(30, 0xB, 2 * KIB)
    (history,) = read_trace(trace.write(tmp_path / "rank-00000.json"))
    assert (history.device, history.is_whole) == ("cuda:0", True)
    assert history.live().tolist() == trace.live == [100 * KIB, 105 * KIB, 75 * KIB, 77 * KIB]
    found = summarise(history)
    assert {one.what: one.bytes for one in found.peak.by_place} == {
        BEFORE: 100 * KIB, "outside of all operators": 5 * KIB,
    }  # fmt: skip
    assert found.most_reserved == 9 * KIB


def test_blocks_that_other_threads_free(tmp_path: Path) -> None:
    """A message of each step is freed where the profiler does not look: its memory does not seem to pile up, and what
    really stays is still seen."""
    trace = Trace()
    for step in range(4):
        at = 1000 * step
        trace.range(f"ProfilerStep#{step}", at, at + 900)
        trace.range(label("B", step), at, at + 500)
        trace.range("Send", at + 10, at + 20, cat="cpu_op")
        trace.memory(at + 15, 0xA if step < 2 else 0xB + step, 8 * KIB)  # twice at one address, then elsewhere
        trace.memory(at + 30, 0xA, -8 * KIB, seen=False)
        trace.range("Keep", at + 40, at + 50, cat="cpu_op")
        trace.memory(at + 45, 0x100 + step, KIB)
        trace.memory(at + 800, 0x999, 16)
        trace.memory(at + 810, 0x999, -16)
    (history,) = read_trace(trace.write(tmp_path / "rank-00000.json"))
    found = summarise(history)
    assert found.growth.bytes == (KIB, 2 * KIB, 3 * KIB, 4 * KIB)
    assert found.peak.bytes == 4 * KIB + 8 * KIB + 16
    assert "of 4 blocks the end was not seen" in found.notes[-1]


@pytest.mark.parametrize("seed", range(3))
def test_random_blocks(tmp_path: Path, seed: int) -> None:
    """Events that are not in order in the file."""
    random, trace = Random(seed), Trace()
    live: dict[int, int] = {}
    for at in range(300):
        if live and random.random() < 0.45:
            address = random.choice([*live])
            trace.memory(at, address, -live.pop(address))
        else:
            address = random.choice([a for a in range(1, 400) if a not in live])
            live[address] = random.randint(1, 99)
            trace.memory(at, address, live[address])
    random.shuffle(trace.events)
    (history,) = read_trace(trace.write(tmp_path / "rank-00000.json"))
    assert history.live().tolist() == trace.live


def test_what_pytorch_writes(tmp_path: Path) -> None:
    """Tensors of known sizes, in a program whose peak is known."""
    path = tmp_path / "rank-00002.json"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = []
        for step in (1, 2, 3, 4):
            with record_function(f"ProfilerStep#{step}"):
                with record_function(label("F", 0)):
                    a = torch.ones(256, 1024)  # 1 MiB
                    b = a * 2  # 1 MiB
                with record_function(label("B", 0)):
                    c = torch.cat([a, b])  # 2 MiB
                    del a, b
                    kept.append(c[:1].clone().expand(64, 1024).contiguous())  # 4 KiB for a moment, and 256 KiB
                    del c
    profiler.export_chrome_trace(str(path))
    assert has_memory(path)
    (history,) = read_trace(path)
    found = summarise(history)
    assert found.rank == 2
    assert found.peak.bytes == (3 * 256 + 4096) * KIB
    assert (found.peak.step, found.peak.doing) == (4, "B of stage 1")
    assert {one.what: one.bytes for one in found.peak.by_place} == {
        "aten::cat": 2 << 20, "aten::ones": 1 << 20, "aten::mul": 1 << 20, "aten::contiguous": 3 * 256 * KIB,
    }  # fmt: skip
    assert found.growth.bytes == tuple(n * 256 * KIB for n in (1, 2, 3, 4))
    assert found.growth.leaks == 256 * KIB
    assert [(one.what, one.bytes, one.blocks) for one in found.growth.holders] == [("aten::contiguous", 256 * KIB, 1)]


def test_without_memory(tmp_path: Path) -> None:
    trace = Trace()
    trace.range("ProfilerStep#1", 0, 10)
    assert read_trace(trace.write(tmp_path / "rank-00000.json")) == []


def test_rank_by_name_or_none(tmp_path: Path) -> None:
    trace = Trace()
    trace.memory(1, 2, 3)
    assert read_trace(trace.write(tmp_path / "rank-00005.json", rank=None))[0].rank == 5
    (history,) = read_trace(trace.write(tmp_path / "some.json", rank=None))
    assert history.rank == 0
    assert "taken for rank 0" in history.notes[0]


def test_damage(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(1, 9):
        trace.memory(i, i, 100)
    for i, (key, value) in enumerate({"Bytes": "x", "Addr": None, "Device Type": [], "Device Id": {}}.items()):
        trace.events[i]["args"][key] = value
    trace.events[4]["ts"] = None
    del trace.events[5]["args"]
    trace.events[6]["tid"] = [1]
    path = trace.write(tmp_path / "rank-00000.json")
    (history,) = read_trace(path)
    assert history.live().tolist() == [0, 100, 200, 300, 400]
    assert "4 events of memory are damaged" in history.notes[0]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 400])
    assert "cut off" in read_trace(path)[0].notes[0]
    path.write_text("hello")
    with pytest.raises(ValueError, match="no trace"):
        read_trace(path)
