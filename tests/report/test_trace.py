"""Traces read back: against the Trace Event Format's rules, the schedule, the engine's times and the planted faults."""

from __future__ import annotations

import gzip
import json
import resource
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.layout import Grid, Kind, generate
from fourfold.layout.actions import COMPUTE
from fourfold.layout.labels import DIMENSIONS, Label, parse_label
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.exact import stages_of
from fourfold.planner.search.own import OwnLayout
from fourfold.planner.search.problem import Problem
from fourfold.report.trace import MOST_RANKS, TRUTH, check_traces, parse_ranks, write_traces
from fourfold.report.trace_groups import Sizes
from fourfold.report.trace_step import Step
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import compile_graph
from fourfold.simulator.scenario import Scenario
from fourfold.simulator.work import Layer, Work
from tests.simulator.small_cases import NOTHING, case, loads

FOUR_D = Grid(tp=2, cp=2, pp=2, dp=2)
FORWARD = Layer(compute=3e-3, before=5e-4, attention=1e-3, tp=8e-4, cp=2e-4, dp=0.0)
BACKWARD = Layer(compute=6e-3, before=4e-3, attention=2.5e-3, tp=9e-4, cp=3e-4, dp=0.0)
DOCUMENTS = loads(np.linspace(0.6, 1.4, 16).reshape(2, 4, 2))
SIZES = Sizes(activation=4096, keys_values=512, parameters=(100, 200, 300, 400))


def scenario(
    grid: Grid = FOUR_D, *, v: int = 2, nmb: int = 4, kind: str = "flexible", zero: int = 1, **changes
) -> Scenario:
    """A layout with times of milliseconds, a head that is an eighth of a layer, and collectives of all dimensions."""
    schedule = generate(pp=grid.pp, v=v, num_micro_batches=nmb, kind=kind, zero=zero)
    number = schedule.num_stages
    layers = changes.pop("layers", (2,) * number)
    half = replace(BACKWARD, compute=3e-3, before=2e-3)
    weight = replace(NOTHING, compute=3e-3)
    layer = {Kind.FORWARD: FORWARD, Kind.BACKWARD: BACKWARD, Kind.INPUT: half, Kind.WEIGHT: weight}
    free = {"tp": 0.0} if grid.tp == 1 else {}
    free |= {"cp": 0.0} if grid.cp == 1 else {}
    free |= {"dp": 2e-4} if zero == 3 else {}
    layer = {kind: replace(one, **free) if kind is not Kind.WEIGHT else one for kind, one in layer.items()}
    events = 0.0 if zero == 3 or grid.dp * grid.cp == 1 else 4e-3
    work = Work(
        layers=layers,
        layer=layer,
        ends=dict.fromkeys(COMPUTE, (5e-4,) + (0.0,) * (number - 2) + (5e-4,) * (number > 1)),
        pairs=1.0,
        message=1e-4,
        gather=(events,) * number,
        reduce=(2 * events,) * number,
        contention=changes.pop("contention", 0.0),
        optimizer=2e-3,
        fixed=1e-3,
    )
    return case(schedule, work, grid=grid, **changes)


class Trace:
    """One file, read back. Times are integer nanoseconds."""

    def __init__(self, path: Path) -> None:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt") as file:
            self.data = json.load(file)
        self.events = self.data["traceEvents"]
        self.spans = [self.Span(event) for event in self.events if event["ph"] == "X"]
        self.arrows = [event for event in self.events if event["ph"] in ("s", "f")]

    class Span:
        def __init__(self, event: dict) -> None:
            self.start = round(event["ts"] * 1000)
            self.end = self.start + round(event["dur"] * 1000)
            self.name, self.category, self.args = event["name"], event["cat"], event["args"]
            self.track = (event["pid"], event["tid"])
            self.label = parse_label(self.name)

        @property
        def lasts(self) -> int:
            return self.end - self.start

    @property
    def kernels(self) -> list[Span]:
        return [span for span in self.spans if span.category == "kernel"]

    @property
    def labels(self) -> list[Label]:
        ranges = sorted((s for s in self.spans if s.category == "user_annotation"), key=lambda s: (s.start, -s.end))
        return [span.label for span in ranges if span.label is not None]

    def computations(self) -> Iterator[tuple[Label, Span, list[Span]]]:
        """Each computation on the GPU: its label, its range, and its kernels with TP's and CP's."""
        inner = [k for k in self.kernels if k.args.get("Process Group Description") in (None, "mesh_tp", "mesh_cp")]
        starts = np.array([kernel.start for kernel in inner])
        order = np.argsort(starts, kind="stable")
        for span in self.spans:
            if span.category == "gpu_user_annotation":
                assert span.label is not None
                low, high = np.searchsorted(starts[order], (span.start, span.end))
                yield span.label, span, [inner[i] for i in order[low:high]]


def traces_of(folder: Path, what: Scenario, **options) -> dict[int, Trace]:
    paths = write_traces(folder, what, simulate(what), **options)
    read = [Trace(path) for path in paths]
    return {trace.data["distributedInfo"]["rank"]: trace for trace in read}


def check_format(trace: Trace) -> None:
    """The Trace Event Format: complete events have a name, a time, a duration and a thread, and those of one thread
    nest: of two that overlap, one holds the other. Viewers draw nothing sensible otherwise."""
    assert isinstance(trace.events, list)
    for event in trace.events:
        assert event["ph"] in ("X", "M", "s", "f")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            continue
        if event["ph"] != "X":
            assert event["cat"] == event["name"] == "ac2g"
            assert event.get("bp") == ("e" if event["ph"] == "f" else None)
            continue
        assert event["dur"] >= 0
        assert isinstance(event["args"], dict)
    tracks = defaultdict(list)
    for span in trace.spans:
        tracks[span.track].append(span)
    for spans in tracks.values():
        open_ranges: list[Trace.Span] = []
        for span in sorted(spans, key=lambda s: (s.start, -s.end)):
            while open_ranges and open_ranges[-1].end <= span.start:
                open_ranges.pop()
            if open_ranges:
                assert span.end <= open_ranges[-1].end, (span.name, open_ranges[-1].name)
            open_ranges.append(span)


def check_streams(trace: Trace) -> None:
    """A stream runs one kernel after the other, each launched once and before it runs."""
    streams = defaultdict(list)
    for kernel in trace.kernels:
        streams[kernel.track].append(kernel)
    for kernels in streams.values():
        kernels.sort(key=lambda k: (k.start, k.end))
        assert all(one.end <= other.start for one, other in pairwise(kernels))
    launched = {s.args["correlation"]: s for s in trace.spans if s.category == "cuda_runtime"}
    assert sorted(launched) == sorted(kernel.args["correlation"] for kernel in trace.kernels)
    assert all(launched[kernel.args["correlation"]].start < kernel.start for kernel in trace.kernels)
    # An arrow from each launch to its kernel, as the profiler writes them.
    ends = {"s": launched.values(), "f": trace.kernels}
    for phase, spans in ends.items():
        found = [(e["id"], e["pid"], e["tid"], round(e["ts"] * 1000)) for e in trace.arrows if e["ph"] == phase]
        assert sorted(found) == sorted((span.args["correlation"], *span.track, span.start) for span in spans)


def check_labels(trace: Trace, what: Scenario, *, steps: int = 1) -> None:
    """Actions are those of the schedule, and each dimension's ranges are counted from 0."""
    rank = trace.data["distributedInfo"]["rank"]
    actions = what.schedule.actions[what.grid.coordinates(rank).pp]
    written = [(label.kind, label.stage, label.micro_batch) for label in trace.labels if label.dimension == "pp"]
    assert written == [(kind.value, s, m) for kind, s, m in actions if m >= 0] * steps
    events = sorted(label.kind for label in trace.labels if label.dimension == "fsdp" and label.kind.isupper())
    assert events == sorted(kind.value for kind, _, m in actions * steps if m < 0)
    dims = {"pp": ("pp",), "fsdp": ("cp", "dp"), "tp": ("tp",), "cp": ("cp",), "world": DIMENSIONS[:4]}
    for dimension, along in dims.items():
        labels = [label for label in trace.labels if label.dimension == dimension]
        assert [label.sequence for label in labels] == [*range(len(labels))]
        group = what.grid.group_of(rank, *along) if dimension != "world" else [0]
        assert {label.group for label in labels} <= {group[0]}


def listed(ranks: list[int]) -> str:
    """As the profiler does: of many, the first 30."""
    return f"[{', '.join(map(str, ranks[:30]))}{', ...' if len(ranks) > 30 else ''}]"


def check_groups(traces: dict[int, Trace], grid: Grid) -> None:
    """Members of a group agree on what they do, in which order, and when it ends."""
    seen = defaultdict(dict)
    for rank, trace in traces.items():
        config = {group["pg_name"]: group for group in trace.data["distributedInfo"]["pg_config"]}
        for kernel in trace.kernels:
            if "Collective name" in kernel.args:
                group = config[kernel.args["Process Group Name"]]
                assert group["pg_desc"] == kernel.args["Process Group Description"]
                assert kernel.args["Process Group Ranks"] == listed(group["ranks"])
                assert rank in group["ranks"]
                assert kernel.args["Group size"] == group["pg_size"] == len(group["ranks"])
                ends = rank, kernel.args.get("Src Rank", kernel.args.get("Dst Rank"))
                ends = ends if kernel.args["Collective name"] == "send" else ends[::-1]
                pair = ends if "Rank" in kernel.args else tuple(group["ranks"])
                seen[pair, group["pg_name"], kernel.args["Seq"]][rank] = kernel
        counted = defaultdict(list)
        for kernel in sorted(trace.kernels, key=lambda kernel: kernel.start):
            if "Collective name" in kernel.args and "Rank" not in kernel.args:
                counted[kernel.args["Process Group Name"]].append(kernel.args["Seq"])
        assert all(numbers == [*range(1, len(numbers) + 1)] for numbers in counted.values())
    assert seen or grid.size == 1
    for (ranks, _, _), kernels in seen.items():
        assert sorted(kernels) == sorted(ranks)
        assert len({kernel.end for kernel in kernels.values()}) == 1
        names = {kernel.args["Collective name"] for kernel in kernels.values()}
        assert len(names) == 1 or names == {"send", "recv"}
        for rank, kernel in kernels.items():
            if "Src Rank" in kernel.args or "Dst Rank" in kernel.args:
                peer = kernel.args.get("Src Rank", kernel.args.get("Dst Rank"))
                assert peer in kernels
                assert peer != rank


def check_times(traces: dict[int, Trace], what: Scenario) -> None:
    """The kernels of each computation fill it, but for what they wait for ZeRO's weights; both are the engine's."""
    played = simulate(what)
    lanes, begins = played.lanes, min(t.spans[0].start for t in traces.values())
    origin = None
    for rank, trace in traces.items():
        at = what.grid.coordinates(rank)
        lane = (at.dp % lanes.dp, at.cp % lanes.cp, at.tp % lanes.tp)
        found = 0
        for label, span, kernels in trace.computations():
            i = played.graph.where[next(a for a in what.schedule.actions[at.pp] if a == (label.kind, *label[3:5]))]
            start, end = played.start[i][lane], played.end[i][lane]
            origin = span.start - round(start * 1e9) if origin is None else origin
            assert span.start - origin == pytest.approx(start * 1e9, abs=2)
            assert kernels[0].start == span.start
            assert kernels[-1].end == span.end
            assert span.end <= origin + round(end * 1e9) + 2
            gaps = sum(b.start - a.end for a, b in pairwise(kernels))
            assert all(b.start >= a.end for a, b in pairwise(kernels))
            busy = sum(kernel.lasts for kernel in kernels)
            unfilled = round((end - start) * 1e9) - busy
            allowed = gaps + (origin + round(end * 1e9) - span.end)
            assert unfilled == pytest.approx(allowed, abs=2)
            if what.schedule.zero < 3 and not what.faults and not what.work.contention:
                assert unfilled <= 2 or played.graph.nodes[i].gate >= 0
            found += 1
        assert found == len(played.graph.on_rank[at.pp])
    assert begins >= 0


CASES: dict[str, dict[str, Any]] = {
    "healthy": {},
    "all ranks": {"all_ranks": True},
    "one layer": {"layers": (1,) * 4},
    "slow rank": {"faults": Faults(ranks={5: 1.5})},
    "one late and another slow": {"faults": Faults(ranks={5: 5.0, 6: 20.0})},
    "slow host": {"faults": Faults(cpus={6: 2e-3})},
    "slow TP link": {"faults": Faults(links={(0, 1): 3.0})},
    "slow CP link": {"faults": Faults(links={(4, 6): 3.0})},
    "slow message": {"faults": Faults(links={(3, 7): 30.0})},
    "slow FSDP link": {"faults": Faults(links={(0, 8): 5.0})},
    "jitter": {"faults": Faults(ranks={5: 1.3}, cpus={9: 1e-3}, jitter=0.02), "contention": 0.2},
    "contention": {"contention": 0.3, "nmb": 5, "zero": 2},
    "documents": {"loads": DOCUMENTS},
    "zero-bubble": {"kind": "zb-h1", "v": 1, "nmb": 4},
    "ZeRO-3": {"zero": 3},
    "ZeRO-3 with a slow rank": {"zero": 3, "faults": Faults(ranks={5: 1.5}, cpus={11: 1e-3}, jitter=0.02)},
    "ZeRO-3 and zero-bubble": {"zero": 3, "kind": "zb-h1", "v": 1, "faults": Faults(ranks={9: 1.3})},
    "ZeRO-3 on a slow FSDP link": {"zero": 3, "faults": Faults(links={(0, 8): 5.0})},
    "ZeRO-3 of one replica": {"grid": Grid(tp=2, pp=2), "zero": 3},
    "one queue": {"receives": "in-order"},
    "no pipeline": {"grid": Grid(tp=2, dp=2), "v": 1, "kind": "afab"},
    "one rank": {"grid": Grid(), "v": 1, "kind": "afab"},
    "no TP": {"grid": Grid(cp=2, pp=2, dp=2), "faults": Faults(ranks={3: 1.4}, jitter=0.01)},
    "three stages": {"grid": Grid(pp=3, dp=2), "nmb": 6, "kind": "interleaved"},
    "a stage of a head alone": {"layers": (3, 2, 2, 0)},
    "a slow head alone": {"layers": (3, 2, 2, 0), "faults": Faults(ranks={5: 1.5}, cpus={13: 1e-3})},
}


@pytest.mark.parametrize("name", CASES)
def test_every_trace_is_sound(tmp_path: Path, name: str) -> None:
    what = scenario(**CASES[name])
    traces = traces_of(tmp_path, what, sizes=SIZES if what.schedule.num_stages == 4 else None)
    assert [*traces] == [*range(what.grid.size)]
    for trace in traces.values():
        check_format(trace)
        check_streams(trace)
        check_labels(trace, what)
    check_groups(traces, what.grid)
    check_times(traces, what)


def test_seconds_by_class_are_the_engines(tmp_path: Path) -> None:
    what = scenario(faults=Faults(ranks={5: 1.5}), layers=(3,) * 4)
    traces, played = traces_of(tmp_path, what), simulate(what)
    for rank, trace in traces.items():
        at = what.grid.coordinates(rank)
        spent = {name: seconds[at.dp, at.pp, at.cp, at.tp] for name, seconds in played.spent.items()}
        seconds = defaultdict(float)
        for _, _, kernels in trace.computations():
            for kernel in kernels:
                kind = (
                    "attention" if "Flash" in kernel.name else kernel.args.get("Process Group Description", "compute")
                )
                seconds[kind] += kernel.lasts / 1e9
        assert seconds["compute"] == pytest.approx(spent["compute"], rel=1e-5)
        assert seconds["attention"] == pytest.approx(spent["attention"], rel=1e-5)
        together = spent["tp"] + spent["tp_wait"] + spent["cp"] + spent["cp_wait"]
        assert seconds["mesh_tp"] + seconds["mesh_cp"] == pytest.approx(together, rel=1e-5)
        ends = max(kernel.end for kernel in trace.kernels if "Adam" in kernel.name)
        mark = next(span for span in trace.spans if span.name == "ProfilerStep#1")
        assert mark.lasts / 1e9 == pytest.approx(played.step_seconds, abs=2e-9)
        assert ends <= mark.end + 10**6


def durations(trace: Trace, description: str) -> list[int]:
    return [k.lasts for k in trace.kernels if k.args.get("Process Group Description") == description]


def products(trace: Trace) -> list[int]:
    return sorted(k.lasts for k in trace.kernels if k.name.startswith("nvjet"))


class TestMeetingsOfZero3:
    def test_they_show_who_is_late(self, tmp_path: Path) -> None:
        """Two replicas, one of which takes half as long again: the other waits for half of every computation."""
        what = scenario(Grid(dp=2), v=1, nmb=2, kind="afab", layers=(1,), zero=3, faults=Faults(ranks={1: 1.5}))
        traces = traces_of(tmp_path, what)
        forward, backward = (
            round(0.5e9 * (what.work.ends[kind][0] + layer.compute + layer.attention))
            for kind, layer in ((Kind.FORWARD, FORWARD), (Kind.BACKWARD, BACKWARD))
        )
        waits = [0, forward, forward, backward, backward]
        assert durations(traces[0], "mesh_fsdp") == pytest.approx(waits, abs=2)
        assert durations(traces[1], "mesh_fsdp") == [0] * 5
        names = [k.args["Collective name"] for k in traces[0].kernels if "mesh_fsdp" in k.args.values()]
        assert names == ["_allgather_base"] * 4 + ["_reduce_scatter_base"]

    def test_they_last_as_long_as_the_engine_lets_replicas_wait(self, tmp_path: Path) -> None:
        what = scenario(Grid(cp=2, dp=2), v=1, nmb=4, zero=3, faults=Faults(ranks={1: 1.2}, jitter=0.05))
        traces, waited = traces_of(tmp_path, what), simulate(what).spent["dp_wait"]
        assert waited.max() > 1e-3
        for rank, trace in traces.items():
            at = what.grid.coordinates(rank)
            shown = sum(durations(trace, "mesh_fsdp")) / 1e9
            assert shown == pytest.approx(waited[at.dp, at.pp, at.cp, at.tp], abs=1e-7)

    def test_a_gather_is_asked_for_before_its_computation(self, tmp_path: Path) -> None:
        what = scenario(zero=3)
        for trace in traces_of(tmp_path, what, ranks=[0, 5]).values():
            kinds = [label.kind for label in trace.labels if label.kind in ("GATHER", "F", "B")]
            assert kinds[::2] == ["GATHER"] * (len(kinds) // 2)
            assert "GATHER" not in kinds[1::2]


class TestFaults:
    def test_a_slow_rank_has_longer_kernels_and_the_shortest_collectives(self, tmp_path: Path) -> None:
        traces = traces_of(tmp_path, scenario(faults=Faults(ranks={5: 1.5})))
        ratio = np.array(products(traces[5])) / products(traces[4])
        assert ratio == pytest.approx(1.5, rel=1e-4)
        assert products(traces[4]) == products(traces[7]) == products(traces[13])
        assert sum(durations(traces[5], "mesh_tp")) < 0.5 * sum(durations(traces[4], "mesh_tp"))
        assert sum(durations(traces[5], "mesh_cp")) < 0.5 * sum(durations(traces[7], "mesh_cp"))
        assert sum(durations(traces[5], "mesh_fsdp")) < 0.9 * sum(durations(traces[13], "mesh_fsdp"))
        # Its CP peer comes late to its own TP group, which seems to wait for it (ISCA'25 Figure 8).
        assert sum(durations(traces[7], "mesh_tp")) < 0.8 * sum(durations(traces[6], "mesh_tp"))

    def test_nobody_seems_slow_where_nobody_is(self, tmp_path: Path) -> None:
        traces = traces_of(tmp_path, scenario())
        for pair in ((0, 1), (4, 5), (0, 8), (6, 15)):
            one, other = (traces[rank] for rank in pair)
            assert products(one) == pytest.approx(products(other), abs=2)
            assert durations(one, "mesh_tp") == pytest.approx(durations(other, "mesh_tp"), abs=2)

    def test_a_slow_link_makes_collectives_longer_though_all_are_there(self, tmp_path: Path) -> None:
        traces = traces_of(tmp_path, scenario(faults=Faults(links={(0, 1): 3.0})))
        last = {
            ranks: np.min([durations(traces[rank], "mesh_tp") for rank in ranks], axis=0).sum()
            for ranks in FOUR_D.groups("tp")
        }
        slow = last.pop((0, 1))
        assert slow == pytest.approx(3 * last[8, 9], rel=1e-4)
        assert [*last.values()] == pytest.approx([last[8, 9]] * 7, rel=1e-4)
        assert products(traces[0]) == products(traces[8])

    def test_a_late_host_launches_right_before_its_kernels(self, tmp_path: Path) -> None:
        traces = traces_of(tmp_path, scenario(faults=Faults(cpus={6: 2e-3})))
        assert products(traces[6]) == products(traces[4])
        for rank, trace in traces.items():
            launched = {s.args["correlation"]: s.start for s in trace.spans if s.category == "cuda_runtime"}
            spans = [(span, kernels) for _, span, kernels in trace.computations()]
            ahead = [span.start - launched[kernels[0].args["correlation"]] for span, kernels in spans]
            if rank == 6:
                assert max(ahead) < 100_000
                gaps = [b.start - a.end for (a, _), (b, _) in pairwise(spans)]
                assert min(gaps) >= 2_000_000 - 2
            else:
                assert np.median(ahead) > 1_000_000


def test_a_messages_receive_is_as_long_as_it_waits(tmp_path: Path) -> None:
    what = scenario(Grid(pp=2), v=1, nmb=2, kind="afab")
    traces = traces_of(tmp_path, what)
    received = [k for k in traces[1].kernels if k.args.get("Collective name") == "recv"]
    sent = [k for k in traces[0].kernels if k.args.get("Collective name") == "send"]
    forward = 2 * (FORWARD.compute + FORWARD.attention) + 5e-4
    assert received[0].lasts == pytest.approx((forward + what.work.message) * 1e9, abs=2)
    assert sent[0].lasts == pytest.approx(what.work.message * 1e9, abs=2)
    assert [k.args["Src Rank"] for k in received] == [0, 0]
    assert [k.args["Dst Rank"] for k in sent] == [1, 1]


def test_clocks_of_hosts_are_wrong_as_truth_json_says(tmp_path: Path) -> None:
    what = scenario(faults=Faults(ranks={5: 1.5}, links={(0, 1): 2.0}))
    right = traces_of(tmp_path / "right", what, gpus_per_node=4)
    wrong = traces_of(tmp_path / "wrong", what, gpus_per_node=4, skew_ms=60, seed=3)
    truth = json.loads((tmp_path / "wrong" / "truth.json").read_text())
    offsets = truth["clock_offsets_ns"]
    assert len({*offsets}) == 4
    assert max(map(abs, offsets)) <= 60e6
    assert max(offsets) - min(offsets) > 1e6
    shifts = {}
    for rank, trace in wrong.items():
        moved = {a.start - b.start for a, b in zip(trace.spans, right[rank].spans, strict=True)}
        assert len(moved) == 1
        shifts[rank] = moved.pop()
        assert [s.lasts for s in trace.spans] == [s.lasts for s in right[rank].spans]
        check_format(trace)
    assert {rank: shift - shifts[0] for rank, shift in shifts.items()} == {
        rank: offsets[rank // 4] - offsets[0] for rank in shifts
    }
    assert truth["faults"]["ranks"] == {"5": 1.5}
    assert truth["faults"]["links"] == [[0, 1, 2.0]]
    assert truth["step_seconds"] == [simulate(what).step_seconds]
    again = traces_of(tmp_path / "again", what, gpus_per_node=4, skew_ms=60, seed=3)
    assert [s.start for s in again[9].spans] == [s.start for s in wrong[9].spans]


def test_steps_follow_one_another(tmp_path: Path) -> None:
    what = scenario(Grid(tp=2, pp=2), faults=Faults(jitter=0.05, seed=7))
    traces = traces_of(tmp_path, what, steps=3, compress=True)
    truth = json.loads((tmp_path / "truth.json").read_text())
    assert len({*truth["step_seconds"]}) == 3
    for trace in traces.values():
        check_format(trace)
        check_streams(trace)
        check_labels(trace, what, steps=3)
        marks = [span for span in trace.spans if span.name.startswith("ProfilerStep#")]
        assert [mark.name for mark in marks] == [f"ProfilerStep#{number}" for number in (1, 2, 3)]
        assert all(one.end == other.start for one, other in pairwise(marks))
        assert [mark.lasts / 1e9 for mark in marks] == pytest.approx(truth["step_seconds"], abs=2e-9)
    check_groups(traces, what.grid)


def test_merged_has_a_process_per_rank(tmp_path: Path) -> None:
    what = scenario()
    (path,) = write_traces(tmp_path / "merged", what, simulate(what), merged=True, ranks=[3, 12, 9])
    merged = Trace(path)
    check_format(merged)
    assert {span.track[0] for span in merged.spans} == {3, 9, 12}
    alone = traces_of(tmp_path / "alone", what, ranks=[9])
    times = sorted((s.start, s.end, s.name) for s in merged.spans if s.track[0] == 9)
    assert times == sorted((s.start, s.end, s.name) for s in alone[9].spans)
    assert "rank" not in merged.data["distributedInfo"]
    assert merged.data["distributedInfo"]["world_size"] == 16


def test_arrows_of_one_trace_do_not_cross(tmp_path: Path) -> None:
    """They are found by their number alone, whatever their process."""
    what = scenario(Grid(tp=2, pp=2))
    (path,) = write_traces(tmp_path, what, simulate(what), merged=True)
    merged = Trace(path)
    assert {*Counter(arrow["id"] for arrow in merged.arrows).values()} == {2}
    process = {arrow["id"]: arrow["pid"] for arrow in merged.arrows if arrow["ph"] == "s"}
    assert all(process[arrow["id"]] == arrow["pid"] for arrow in merged.arrows)
    assert {*process.values()} == {0, 1, 2, 3}


def test_compressed_traces_are_the_same(tmp_path: Path) -> None:
    what = scenario(Grid(tp=2, pp=2))
    played = simulate(what)
    plain = write_traces(tmp_path / "plain", what, played)
    packed, again = (write_traces(tmp_path / name, what, played, compress=True) for name in ("packed", "again"))
    assert [path.name for path in packed] == [f"{path.name}.gz" for path in plain]
    for one, other, more in zip(plain, packed, again, strict=True):
        events = Trace(one).data["traceEvents"]
        assert Trace(other).data["traceEvents"] == events
        assert other.read_bytes() == more.read_bytes()
        unpacker = zlib.decompressobj(wbits=31)
        assert unpacker.decompress(other.read_bytes()) == gzip.decompress(other.read_bytes())
        assert unpacker.eof  # one piece: some viewers read no further than the first
        assert unpacker.unused_data == b""


def test_descriptions_of_groups_are_documented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    section = " ".join(text.partition("## Simulated traces")[2].partition("\n## ")[0].split())
    found = set()
    for receives in ("asynchronous", "in-order"):
        folder = tmp_path / receives
        for trace in traces_of(folder, scenario(receives=receives), ranks=[0]).values():
            found |= {group["pg_desc"] for group in trace.data["distributedInfo"]["pg_config"]}
    assert found == {"default_pg", "undefined", "mesh_tp", "mesh_cp", "mesh_pp", "mesh_dp", "mesh_fsdp"}
    assert all(f"`{name}`" in section for name in found)


def test_sizes_of_messages(tmp_path: Path) -> None:
    traces = traces_of(tmp_path, scenario(), sizes=SIZES, ranks=[4])
    found = {
        (k.args["Process Group Description"], k.args["Collective name"]): (
            k.args["In msg nelems"],
            k.args["Out msg nelems"],
            k.args["dtype"],
        )
        for k in traces[4].kernels
        if "Collective name" in k.args
    }
    assert found["mesh_tp", "_allgather_base"] == (2048, 4096, "BFloat16")
    assert found["mesh_tp", "_reduce_scatter_base"] == (4096, 2048, "BFloat16")
    assert found["mesh_cp", "_allgather_base"] == (256, 512, "BFloat16")
    assert found["undefined", "send"] == (2048, 2048, "BFloat16")
    assert found["mesh_fsdp", "_reduce_scatter_base"] in ((400, 100, "Float"), (200, 50, "Float"))
    assert found["default_pg", "allreduce"] == (1, 1, "Float")


def test_sizes_of_a_job() -> None:
    """Llama 3 8B on tp 4, cp 2: 4096 wide, 32 heads and 8 of keys and values of 128, 14336 in the feed-forward."""
    problem = Problem.of(model="llama3-8b", cluster=cluster("h100", 8), seq_len=8192, tokens=8192 * 4, stack="meta")
    job = OwnLayout(tp=4, cp=2).job(problem)
    sizes = Sizes.of(job, stages_of(job))
    assert sizes.activation == 4096 * 4096
    assert sizes.keys_values == 2 * 8192 * 2 * 128
    layer = (4096 * 128 * 2 * (32 + 8) + 3 * 4096 * 14336) // 4 + 2 * 4096
    assert sizes.parameters == (32 * layer + 2 * 128256 * 4096 // 4,)
    assert 4 * sizes.parameters[0] == pytest.approx(8.03e9, rel=1e-3)


def test_long_groups_are_cut_as_the_profiler_cuts_them(tmp_path: Path) -> None:
    traces = traces_of(tmp_path, scenario(Grid(dp=40), v=1, nmb=1, kind="afab", layers=(1,)), ranks=[39])
    (kernel,) = [k for k in traces[39].kernels if k.args.get("Collective name") == "allreduce"]
    assert kernel.args["Process Group Ranks"].endswith("28, 29, ...]")
    assert len(traces[39].data["distributedInfo"]["pg_config"][0]["ranks"]) == 40


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestWholeOrNotAtAll:
    WHAT = scenario(Grid(tp=2, pp=2))
    FASTER = scenario(Grid(tp=2, pp=2), layers=(1,) * 4)

    def test_what_is_checked_is_what_is_written(self, tmp_path: Path) -> None:
        several: list[dict[str, Any]] = [{}, {"merged": True}, {"ranks": [3, 1], "compress": True}]
        for number, options in enumerate(several):
            folder = tmp_path / f"{number}" / "deep"
            paths = check_traces(folder, 4, **options)
            assert [*folder.iterdir()] == []
            assert {*write_traces(folder, self.WHAT, simulate(self.WHAT), **options)} == {*paths.values()}
            assert {*folder.iterdir()} == {*paths.values(), folder / TRUTH}

    @pytest.mark.parametrize("has_traces", [False, True])
    def test_an_interrupt_leaves_the_folder_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_traces: bool
    ) -> None:
        write = Step.write

        def interrupted(step: Step, traces: list, put) -> None:
            if traces[0].groups.rank == 2:
                raise KeyboardInterrupt
            write(step, traces, put)

        if has_traces:
            write_traces(tmp_path, self.FASTER, simulate(self.FASTER))
        before, played = held(tmp_path), simulate(self.WHAT)
        monkeypatch.setattr(Step, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_traces(tmp_path, self.WHAT, played)
        assert held(tmp_path) == before
        monkeypatch.undo()
        write_traces(tmp_path, self.WHAT, played)
        assert len(held(tmp_path)) == 5
        assert json.loads((tmp_path / TRUTH).read_text())["step_seconds"] == [played.step_seconds]

    def test_a_full_disk_is_named_and_leaves_nothing(self, tmp_path: Path) -> None:
        played = simulate(self.WHAT)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                write_traces(tmp_path, self.WHAT, played)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.filename == str(tmp_path / "rank-00000.json")
        assert held(tmp_path) == {}

    def test_no_truth_of_others_beside_new_traces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_traces(tmp_path, self.FASTER, simulate(self.FASTER), skew_ms=5)
        rename = Path.replace

        def fails_at_one(path: Path, to: Path) -> Path:
            if to.name == "rank-00002.json":
                raise OSError(5, "Input/output error")
            return rename(path, to)

        monkeypatch.setattr(Path, "replace", fails_at_one)
        with pytest.raises(OSError, match=r"Input/output error: '\S*rank-00002\.json'"):
            write_traces(tmp_path, self.WHAT, simulate(self.WHAT))
        assert sorted(held(tmp_path)) == [f"rank-{rank:05d}.json" for rank in range(4)]

    def test_what_a_killed_run_has_left_is_no_trace(self, tmp_path: Path) -> None:
        for name in ("rank-00000.json.partial", "rank-00099.json.gz.partial", "merged.json.partial"):
            (tmp_path / name).write_text("half of a trace")
        traces = traces_of(tmp_path, self.WHAT)
        assert [*traces] == [0, 1, 2, 3]
        assert not (tmp_path / "rank-00000.json.partial").exists()


class TestRefused:
    def test_more_files_than_anybody_wants(self, tmp_path: Path) -> None:
        what = scenario(Grid(tp=8, dp=2048), v=1, nmb=1, kind="afab")
        with pytest.raises(ValueError, match="16,384 ranks would be 16,384 traces; choose some with --trace-ranks"):
            write_traces(tmp_path / "all", what, simulate(what))
        assert not (tmp_path / "all").exists()
        assert what.grid.size > MOST_RANKS

    def test_ranks_that_are_not_there(self, tmp_path: Path) -> None:
        what = scenario()
        with pytest.raises(ValueError, match="--trace-ranks: rank 16: there are ranks 0 to 15"):
            write_traces(tmp_path, what, simulate(what), ranks=[3, 16])

    def test_traces_of_others_in_the_folder(self, tmp_path: Path) -> None:
        what = scenario()
        write_traces(tmp_path, what, simulate(what), ranks=[0, 1])
        write_traces(tmp_path, what, simulate(what), ranks=[0, 1])
        with pytest.raises(ValueError, match=r"other traces in it, such as rank-00001\.json"):
            write_traces(tmp_path, what, simulate(what), ranks=[0])
        assert not [*tmp_path.glob("*.partial")]

    def test_a_step_without_its_times(self, tmp_path: Path) -> None:
        what = scenario()
        with pytest.raises(ValueError, match="keep=True"):
            write_traces(tmp_path, what, simulate(what, keep=False))

    def test_another_scenarios_step(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="not this scenario"):
            write_traces(tmp_path, scenario(), simulate(scenario(faults=Faults(ranks={1: 2.0}))))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"steps": 0}, "--trace-steps 0: must be at least 1"),
            ({"gpus_per_node": 0}, "cluster.gpus_per_node: 0: must be at least 1"),
            ({"skew_ms": -1.0}, "--skew-ms -1: must be between 0 and 3600000, an hour"),
            ({"skew_ms": float("nan")}, "--skew-ms nan: must be"),
            ({"skew_ms": float("inf")}, "--skew-ms inf: must be"),
            ({"skew_ms": 3.7e6}, "--skew-ms 3.7e[+]06: must be"),
            ({"ranks": [1, 4]}, "--trace-ranks: rank 4: there are ranks 0 to 3"),
            ({"ranks": []}, "--trace-ranks: rank none: there are ranks 0 to 3"),
        ],
    )
    def test_options(self, tmp_path: Path, options: dict, message: str) -> None:
        what = scenario(Grid(tp=2, dp=2), v=1, kind="afab")
        with pytest.raises(ValueError, match=message):
            check_traces(tmp_path / "new", what.grid.size, **options)
        with pytest.raises(ValueError, match=message):
            write_traces(tmp_path / "new", what, simulate(what), **options)
        assert not (tmp_path / "new").exists()

    def test_a_file_for_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=r"--trace \S*/file: is a file; give a folder"):
            check_traces(tmp_path / "file", 4)
        with pytest.raises(ValueError, match=r"--trace \S*/file/in: this folder cannot be made: Not a directory"):
            check_traces(tmp_path / "file" / "in", 4)

    def test_one_trace_that_nobody_can_open(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="--trace: 512 ranks would be one trace that no viewer can open"):
            check_traces(tmp_path, 512, merged=True)

    def test_a_schedule_without_messages(self, tmp_path: Path) -> None:
        what = scenario(Grid(pp=2))
        bare = generate(pp=2, v=2, num_micro_batches=4, messages=False)
        what = what.replace(graph=compile_graph(bare))
        with pytest.raises(ValueError, match="messages=True"):
            write_traces(tmp_path, what, simulate(what))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("x", "must be ranks and ranges of them"),
            ("3-", "must be ranks and ranges of them"),
            ("", "must be ranks and ranges of them"),
            ("7-3", "runs backwards; 3-7 is meant"),
            ("0-16", "there are ranks 0 to 15"),
        ],
    )
    def test_lists_of_ranks(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_ranks(text, 16)


def test_lists_of_ranks() -> None:
    assert parse_ranks("0-3, 9,2", 16) == (0, 1, 2, 3, 9)
