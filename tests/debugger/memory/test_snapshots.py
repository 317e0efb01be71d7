"""Snapshots in PyTorch's format, of an allocator that knows what it did: all of that is found again."""

from __future__ import annotations

import gzip
import pickle
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from fourfold.debugger.memory.history import BEFORE, History
from fourfold.debugger.memory.peaks import summarise
from fourfold.debugger.memory.snapshots import read_snapshot
from tests.debugger.memory.allocator import Allocator

MIB = 1 << 20
OURS = "/home/me/job/model/mlp.py:12:forward"
LIBRARY = "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py:134:forward"
FOURFOLD = "/env/lib/python3.11/site-packages/fourfold/parallel/tensor.py:40:apply"
PLACES = ["/a/job/one.py:1:f", "/a/job/two.py:2:g", "/a/job/three.py:3:h"]


def random_allocator(seed: int) -> Allocator:
    """Some hundred requests on two streams, some freed late, with the device's memory returned now and then."""
    random, allocator = Random(seed), Allocator()
    live: list[int] = []
    waiting: list[int] = []

    def step() -> None:
        what = random.random()
        if what < 0.5 or not live:
            size = random.choice([random.randint(1, 2000), random.randint(1, 3 * MIB)])
            live.append(allocator.alloc(size, LIBRARY, random.choice(PLACES), stream=random.choice([0, 0, 8])))
        elif what < 0.9:
            address = live.pop(random.randrange(len(live)))
            wait = random.random() < 0.2
            allocator.free(address, wait=wait)
            waiting.extend([address] * wait)
        elif what < 0.95 and waiting:
            allocator.complete(waiting.pop(0))
        elif what < 0.97:
            allocator.empty_cache()
        else:
            allocator.fail(random.randint(1, 9 * MIB), random.randint(0, MIB), OURS, stream=random.choice([0, 8]))

    for _ in range(40):
        step()
    allocator.record()
    for _ in range(200):
        step()
    return allocator


def read(allocator: Allocator, folder: Path, *, forget: int = 0) -> History:
    (history,) = read_snapshot(allocator.write(folder / "memory-00000.pickle", forget=forget), 0)
    return history


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("forget", [0, 77])
def test_what_was_alive_and_reserved_after_every_event(tmp_path: Path, seed: int, forget: int) -> None:
    allocator = random_allocator(seed)
    history = read(allocator, tmp_path, forget=forget)
    truths = allocator.truths[forget:]
    assert history.num_events == len(allocator.events) - forget
    assert history.live().tolist() == [sum(truth.live.values()) for truth in truths]
    assert history.reserved.tolist() == [truth.reserved for truth in truths]
    for point, truth in enumerate(truths):
        rows = history.rows_at(point)
        found = dict(zip(history.blocks.address[rows].tolist(), history.blocks.size[rows].tolist(), strict=True))
        assert found == truth.live
    if not forget:
        assert history.waiting().tolist() == [sum(t.live[a] for a in t.given_back) for t in truths]
        assert history.notes == ()


@pytest.mark.parametrize("seed", range(4))
def test_the_peak_and_whose_it_is(tmp_path: Path, seed: int) -> None:
    allocator = random_allocator(seed)
    found = summarise(read(allocator, tmp_path))
    highest = max(sum(truth.live.values()) for truth in allocator.truths)
    truth = next(truth for truth in allocator.truths if sum(truth.live.values()) == highest)
    assert (found.peak.bytes, found.peak.reserved) == (highest, truth.reserved)
    assert found.most_reserved == max(truth.reserved for truth in allocator.truths)
    recorded = {event["addr"] for event in allocator.events if event["action"] == "alloc"}
    by_place = {one.what: one.bytes for one in found.peak.by_place}
    assert sum(by_place.values()) == highest
    assert sum(one.blocks for one in found.peak.by_place) == len(truth.live)
    # What was there before has no stack. Addresses are used again, so only those never seen are surely from before.
    assert by_place.get(BEFORE, 0) >= sum(size for address, size in truth.live.items() if address not in recorded)
    assert max(found.curve) == highest


def test_places_are_the_innermost_lines_that_are_no_librarys(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.record()
    allocator.alloc(1000, LIBRARY, OURS, "/home/me/job/train.py:9:main")
    allocator.alloc(2000, "c10/core/x.cpp:0:new", LIBRARY, FOURFOLD, OURS)
    allocator.alloc(3000, LIBRARY)
    allocator.alloc(4000, "aten/x.cpp:0:empty")
    allocator.alloc(5000)
    found = summarise(read(allocator, tmp_path))
    assert {one.what: one.bytes for one in found.peak.by_place} == {
        "job/model/mlp.py:12 forward": 1000,
        "fourfold/parallel/tensor.py:40 apply": 2000,
        "torch/nn/modules/linear.py:134 forward": 3000,
        "no line of Python (such as a backward of PyTorch's own)": 4000,
        "a place that was not recorded": 5000,
    }


def test_ranges_say_step_action_and_collective(tmp_path: Path) -> None:
    allocator = Allocator()
    allocator.record()
    label = "ff:pp:{}:group=0:stage={}:mb={}:seq={}"
    for step in (7, 8):
        allocator.annotate("START", f"ProfilerStep#{step}")
        allocator.annotate("START", "ff:load")
        allocator.alloc(100, OURS)
        allocator.annotate("END", "ff:load")
        for micro_batch in (0, 1):
            allocator.annotate("START", label.format("F", 2, micro_batch, micro_batch))
            allocator.alloc(1000 * step, OURS)
            allocator.annotate("START", f"ff:tp:all_gather:group=0:stage=2:mb={micro_batch}:seq={micro_batch}")
            allocator.alloc(10_000, "torch/x.cpp:1:new")
            allocator.annotate("END", f"ff:tp:all_gather:group=0:stage=2:mb={micro_batch}:seq={micro_batch}")
            allocator.annotate("END", label.format("F", 2, micro_batch, micro_batch))
        allocator.annotate("END", f"ProfilerStep#{step}")
    found = summarise(read(allocator, tmp_path))
    assert {one.what: (one.bytes, one.micro_batches, one.since) for one in found.peak.by_doing} == {
        "F of stage 2": (2 * (7000 + 8000) + 40_000, 4, 7),
        "load": (200, 0, 7),
    }
    assert {one.what: one.bytes for one in found.peak.by_place} == {
        "job/model/mlp.py:12 forward": 30_200,
        "tp all_gather": 40_000,
    }
    assert (found.peak.step, found.peak.doing) == (8, "F of stage 2")
    assert found.growth.steps == (7, 8)
    assert found.growth.bytes == (100 + 14_000 + 20_000, 70_200)
    one = summarise(read(allocator, tmp_path), (7, 7))
    assert (one.peak.bytes, one.peak.step) == (34_100, 7)
    with pytest.raises(ValueError, match="nothing of steps 3 to 4 is in it"):
        summarise(read(allocator, tmp_path), (3, 4))


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_was_refused(tmp_path: Path, seed: int) -> None:
    """The last: how much, who, what was held, and the largest piece that the allocator had free for it."""
    allocator = random_allocator(seed)
    stream = seed % 2 * 8
    allocator.fail(64 * MIB, 1234, LIBRARY, OURS, stream=stream)
    at = len(allocator.events) - 1
    truth = allocator.truths[at]
    allocator.alloc(5 * MIB, OURS, stream=stream)  # the program goes on, and takes more from the device
    allocator.empty_cache()
    found = summarise(read(allocator, tmp_path))
    assert found.shortage is not None
    request, held = found.shortage
    assert (request.event, request.requested, request.device_free) == (at, 64 * MIB, 1234)
    assert request.purpose.place == "job/model/mlp.py:12 forward"
    assert request.largest == truth.free.get(stream, 0)
    assert (held.bytes, held.reserved) == (sum(truth.live.values()), truth.reserved)


def test_expandable_segments_join(tmp_path: Path) -> None:
    """Pages that are mapped side by side are one piece."""
    page = 2 * MIB
    events = [
        *({"action": "segment_map", "addr": i * page, "size": page, "stream": 0, "time_us": i} for i in range(1, 5)),
        {"action": "alloc", "addr": page, "size": page // 2, "stream": 0, "time_us": 9},
        {"action": "oom", "device_free": 0, "size": 9 * page, "stream": 0, "time_us": 10},
        {"action": "segment_unmap", "addr": 3 * page, "size": page, "stream": 0, "time_us": 11},
    ]
    segments = [
        {"device": 0, "address": page, "total_size": 2 * page, "stream": 0, "is_expandable": True, "blocks": [
            {"size": page // 2, "requested_size": page // 2, "state": "active_allocated"},
            {"size": 3 * page // 2, "state": "inactive"}]},
        {"device": 0, "address": 4 * page, "total_size": page, "stream": 0, "is_expandable": True, "blocks": [
            {"size": page, "state": "inactive"}]},
    ]  # fmt: skip
    path = tmp_path / "memory-00003.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}))
    (history,) = read_snapshot(path, 3)
    (shortage,) = history.shortages
    assert shortage.largest == 4 * page - page // 2
    assert history.reserved.tolist() == [0, page, 2 * page, 3 * page, 4 * page, 4 * page, 4 * page, 3 * page]


def test_every_device_has_its_history(tmp_path: Path) -> None:
    first, second = Allocator(0), Allocator(2)
    for allocator, size in ((first, 1000), (second, 3000)):
        allocator.record()
        allocator.alloc(size, OURS)
    content, other = first.snapshot(), second.snapshot()
    content["segments"] += other["segments"]
    content["device_traces"] = [*content["device_traces"], *other["device_traces"][1:]]
    path = tmp_path / "memory-00000.pickle"
    path.write_bytes(pickle.dumps(content))
    found = [summarise(history) for history in read_snapshot(path, 0)]
    assert [(one.device, one.peak.bytes) for one in found] == [("cuda:0", 1000), ("cuda:2", 3000)]


def test_without_a_history(tmp_path: Path) -> None:
    """`_record_memory_history` was never called: what is held is known, and where it was made if blocks say it."""
    allocator = Allocator()
    for size in (1000, 2000):
        allocator.alloc(size, OURS)
    content = allocator.snapshot()
    content["segments"][0]["blocks"][1]["frames"] = [{"filename": "/a/b/c/d.py", "line": 4, "name": "e"}]
    path = tmp_path / "memory-00000.pickle"
    path.write_bytes(pickle.dumps(content))
    (history,) = read_snapshot(path, 0)
    found = summarise(history)
    assert Counter({one.what: one.bytes for one in found.peak.by_place}) == {BEFORE: 1000, "b/c/d.py:4 e": 2000}
    assert "no history was recorded" in found.notes[0]
    assert (found.peak.step, found.peak.seconds, found.growth.steps) == (-1, 0.0, ())


def test_half_of_the_frees_left_out(tmp_path: Path) -> None:
    """`skip_actions` may leave out either half of a free."""
    allocator = random_allocator(1)
    content, first = allocator.snapshot(), allocator.truths[0]
    for left_out, gone in (("free_requested", set()), ("free_completed", first.given_back)):
        path = tmp_path / "memory-00000.pickle"
        events = [event for event in allocator.events if event["action"] != left_out]
        path.write_bytes(pickle.dumps({**content, "device_traces": [events]}))
        (history,) = read_snapshot(path, 0)
        assert history.live()[0] == sum(size for address, size in first.live.items() if address not in gone)


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "memory-00000.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(random_allocator(3).snapshot())))
    assert read_snapshot(path, 0)[0].num_events


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("harm", "w")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is damaged: it is empty"),
        (b"hello", "is damaged"),
        (b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f", "is damaged"),
        (pickle.dumps([1, 2]), "no snapshot"),
        (pickle.dumps({"entries": []}), "no snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[], []]}), "the snapshot is empty"),
        (pickle.dumps({"segments": [Evil()]}), r"is damaged: it holds \w+\.open, which is not run"),
        (b"\x1f\x8b\x08\x00garbage", "is damaged"),
    ],
)
def test_what_is_no_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "memory-00000.pickle"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_snapshot(path, 0)
    assert not (tmp_path / "harm").exists()


def test_damage_anywhere_never_raises_anything_else(tmp_path: Path) -> None:
    random, whole = Random(0), pickle.dumps(random_allocator(2).snapshot())
    path, said = tmp_path / "memory-00000.pickle", []
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        path.write_bytes(data[: random.choice([len(data), random.randrange(1, len(data))])])
        try:
            for history in read_snapshot(path, 0):
                summarise(history)
        except ValueError as error:
            said.append(str(error))
    assert len(said) > 10
    assert all(str(path) in text for text in said)


def test_strange_values(tmp_path: Path) -> None:
    """Whatever stands where a number should."""
    allocator = random_allocator(4)
    content = allocator.snapshot()
    odd = [None, "x", -5, 1.5, [], {}, 2**70, True]
    random = Random(1)
    for event in random.sample(content["device_traces"][0], 60):
        event[random.choice([*event])] = random.choice(odd)
    content["segments"][0]["blocks"][0]["size"] = "big"
    content["segments"][-1]["blocks"] = None
    content["device_traces"][0] += [None, 3, {"action": "what"}, {}]
    content["external_annotations"] = [None, {"name": 3, "stage": "END"}, {"stage": "START", "time_us": "now"}]
    path = tmp_path / "memory-00000.pickle"
    path.write_bytes(pickle.dumps(content))
    for history in read_snapshot(path, 0):
        summarise(history)
