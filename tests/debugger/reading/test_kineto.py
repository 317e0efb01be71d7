"""Columns of a rank against the same events read one by one: simulated traces, real ones, and odd ones made by hand."""

import gzip
import json
import random
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.reading.kineto import read
from fourfold.debugger.reading.trace import UNKNOWN, Call, Host, RankTrace, Work
from fourfold.layout import Grid, parse_label
from fourfold.report.trace import write_traces
from fourfold.simulator.engine import simulate
from tests.report.test_trace import SIZES, scenario

DATA = Path(__file__).parent / "data"
KINDS = {
    "allreduce": Call.ALL_REDUCE,
    "_allgather_base": Call.ALL_GATHER,
    "_reduce_scatter_base": Call.REDUCE_SCATTER,
    "broadcast": Call.BROADCAST,
    "send": Call.SEND,
    "recv": Call.RECV,
}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory) -> Path:
    """A folder with the traces of 16 ranks and, in a folder in it, one file of all."""
    folder = tmp_path_factory.mktemp("simulated")
    what = scenario()
    played = simulate(what, keep=True)
    write_traces(folder / "ranks", what, played, steps=2, sizes=SIZES)
    write_traces(folder / "merged", what, played, steps=2, sizes=SIZES, merged=True)
    return folder


def plain(path: Path) -> dict:
    text = path.read_bytes()
    return json.loads(gzip.decompress(text) if path.suffix == ".gz" else text, parse_float=Fraction)


def complete(path: Path, *categories: str) -> list[dict]:
    return [e for e in plain(path)["traceEvents"] if e["ph"] == "X" and e["cat"] in categories]


def ns(event: dict, zero: int = 0) -> tuple[int, int]:
    start = int(Fraction(event["ts"]) * 1000)
    return start - zero, start + int(Fraction(event["dur"]) * 1000) - zero


def first(path: Path) -> int:
    kept = ("kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "user_annotation", "gpu_user_annotation", "cpu_op")
    return min(ns(event)[0] for event in complete(path, *kept))


@pytest.mark.parametrize("rank", [0, 5, 14])
def test_a_simulated_rank(simulated, rank):
    path = simulated / "ranks" / f"rank-{rank:05d}.json"
    trace = read(path)[0]
    zero = first(path)
    assert (trace.rank, trace.world_size, trace.device, trace.notes) == (rank, 16, "gpu", ())
    assert trace.grid == Grid(tp=2, cp=2, pp=2, dp=2)
    assert sum(trace.shares) == pytest.approx(1)
    assert trace.origin == plain(path)["baseTimeNanoseconds"] + zero

    marks = [e for e in complete(path, "user_annotation") if e["name"].startswith("ProfilerStep")]
    assert trace.steps.number.tolist() == [1, 2]
    assert [*zip(trace.steps.start, trace.steps.end, strict=True)] == [ns(e, zero) for e in marks]

    launches = {e["args"]["correlation"]: ns(e, zero)[0] for e in complete(path, "cuda_runtime")}
    kernels = complete(path, "kernel")
    works = sorted((*ns(e, zero), e["name"], e["tid"], launches[e["args"]["correlation"]]) for e in kernels
                   if "Collective name" not in e["args"])  # fmt: skip
    found = trace.works
    names = [trace.names[name] for name in found.name]
    assert sorted(zip(found.start, found.end, names, found.stream, found.launched, strict=True)) == works
    assert np.all(np.diff(found.start) >= 0)
    assert Counter(found.step.tolist()) == {0: len(works) // 2, 1: len(works) // 2}
    attention = {"Flash" in name for name, kind in zip(names, found.kind, strict=True) if kind == Work.ATTENTION}
    assert attention == {True}

    calls = sorted(
        (*ns(e, zero), KINDS[e["args"]["Collective name"]], e["args"]["Seq"], e["args"]["Process Group Name"],
         e["args"].get("Dst Rank", e["args"].get("Src Rank", UNKNOWN)), launches[e["args"]["correlation"]],
         max(e["args"].get("In msg nelems", -1), e["args"].get("Out msg nelems", -1)), e["tid"])
        for e in kernels if "Collective name" in e["args"]
    )  # fmt: skip
    found = trace.calls
    groups = [trace.groups[group].name.partition("@")[0] for group in found.group]
    assert sorted(zip(found.start, found.end, found.kind, found.sequence, groups, found.peer, found.launched,
                      found.elements, found.stream, strict=True)) == calls  # fmt: skip
    assert not found.blocks.any()
    listed = {c["pg_name"]: tuple(c["ranks"]) for c in plain(path)["distributedInfo"]["pg_config"]}
    assert {group.ranks for group in trace.groups} <= {*listed.values()}
    assert all(rank in (group.ranks or ()) for group in trace.groups)

    labels = sorted(
        (*ns(e, zero), label) for e in complete(path, "user_annotation", "gpu_user_annotation")
        if (label := parse_label(e["name"])) is not None
    )  # fmt: skip
    found = trace.labels
    assert sorted(zip(found.start, found.end, zip(found.dimension, found.kind, found.group, found.stage,
                      found.micro_batch, found.sequence, strict=True), strict=True)) == labels  # fmt: skip
    assert found.on_device.sum() == len(complete(path, "gpu_user_annotation"))
    assert [Host(kind) for kind in trace.ranges.kind] == [Host.OPTIMIZER] * 2


def test_one_file_of_all_ranks_holds_the_same(simulated):
    together = read(simulated / "merged" / "merged.json")
    assert [trace.rank for trace in together] == [*range(16)]
    for trace in together:
        alone = read(simulated / "ranks" / f"rank-{trace.rank:05d}.json")[0]
        for table in ("works", "calls", "labels", "steps"):
            for name, column in vars(getattr(alone, table)).items():
                if name not in ("group", "name"):
                    assert np.array_equal(column, getattr(getattr(trace, table), name)), (trace.rank, table, name)
        assert trace.groups == alone.groups


@pytest.mark.parametrize("strip", ["arguments", "correlation", "groups", "labels", "distributedInfo", "all"])
def test_what_is_stripped_is_made_up_from_what_is_left(simulated, tmp_path, strip):
    path = simulated / "ranks" / "rank-00005.json"
    whole = read(path)[0]
    said = json.loads(path.read_text())
    for event in said["traceEvents"]:
        arguments = event.get("args", {})
        if strip in ("arguments", "all"):
            event["args"] = {}
        if strip == "correlation":
            arguments.pop("correlation", None)
        if strip in ("groups", "all"):
            for key in [key for key in arguments if key.startswith("Process Group") or key == "Seq"]:
                del arguments[key]
    if strip in ("labels", "all"):
        said["traceEvents"] = [e for e in said["traceEvents"] if not e["name"].startswith("ff:")]
    if strip in ("distributedInfo", "all"):
        del said["distributedInfo"]
        said["traceEvents"] = [e for e in said["traceEvents"] if e["ph"] != "M"]
    target = tmp_path / "x.json"
    target.write_text(json.dumps(said))
    trace = read(target)[0]
    assert np.array_equal(trace.works.start, whole.works.start)
    assert np.array_equal(trace.works.launched, whole.works.launched)
    assert np.array_equal(trace.calls.start, whole.calls.start)
    if strip != "all":
        assert trace.rank == 5
        assert np.array_equal(trace.calls.kind, whole.calls.kind)
        ranks = [trace.groups[group].ranks for group in trace.calls.group]
        assert ranks == [whole.groups[group].ranks for group in whole.calls.group]
    else:
        assert (trace.rank, trace.grid) == (0, whole.grid)
        assert "taken for rank 0" in trace.notes[-1]


def test_dates_with_three_decimals_are_exact(simulated, tmp_path):
    path = simulated / "ranks" / "rank-00005.json"
    text = re.sub(r'"ts":\s*(\d+)', lambda m: f'"ts":{int(m[1]) + 1711964610000000}', path.read_text())
    (tmp_path / "rank5.json").write_text(text)
    whole, moved = read(path)[0], read(tmp_path / "rank5.json")[0]
    assert np.array_equal(moved.works.start - moved.works.start[0], whole.works.start - whole.works.start[0])
    assert np.array_equal(moved.calls.end - moved.calls.end[0], whole.calls.end - whole.calls.end[0])
    assert moved.origin == 1711964610000000000 + first(path)


def test_the_order_of_events_does_not_matter(simulated, tmp_path):
    path = simulated / "ranks" / "rank-00003.json"
    said = json.loads(path.read_text())
    random.Random(1).shuffle(said["traceEvents"])
    said["traceEvents"] = [dict(reversed(event.items())) for event in said["traceEvents"]]
    (tmp_path / "rank-3.json").write_text(json.dumps(dict(reversed(said.items())), indent=1))
    a, b = read(path)[0], read(tmp_path / "rank-3.json")[0]
    assert np.array_equal(a.works.start, b.works.start)
    assert np.array_equal(a.calls.sequence, b.calls.sequence)
    assert a.labels.kind == b.labels.kind


# Real traces ---------------------------------------------------------------------------------------------------------


def test_two_ranks_with_nccl():
    path = DATA / "nccl_data.json.gz"
    trace = read(path)[0]
    calls, kernels = trace.calls, complete(path, "kernel", "gpu_memcpy", "gpu_memset")
    said = [e for e in kernels if "Collective name" in e["args"]]
    assert Counter(Call(kind) for kind in calls.kind) == Counter(KINDS[e["args"]["Collective name"]] for e in said)
    assert sorted(calls.elements.tolist()) == sorted(e["args"]["In msg nelems"] for e in said)
    assert len(trace.works.start) == len(kernels) - len(said)
    assert (trace.rank, trace.world_size, trace.steps.number.tolist()) == (0, 2, [4, 5, 6])
    assert [(group.description, group.ranks) for group in trace.groups] == [("default_pg", (0, 1))]
    assert (calls.sequence == UNKNOWN).all()
    assert (calls.launched >= 0).all()


def test_a_rank_of_a_large_job_whose_kernels_do_not_say_what_they_do():
    path = DATA / "sampled_rank-0.json.gz"
    trace = read(path)[0]
    # Ten kernels of one name: what each does is in the ranges around their launches.
    around = Counter(e["name"] for e in complete(path, "user_annotation") if e["name"].startswith("nccl:"))
    assert {Call(k).name: n for k, n in Counter(trace.calls.kind.tolist()).items()} == {
        "ALL_REDUCE": around["nccl:all_reduce"],
        "ALL_TO_ALL": around["nccl:all_to_all"],
        "ALL_GATHER": around["nccl:_all_gather_base"],
    }
    assert trace.calls.group.tolist() == [UNKNOWN] * 10
    assert (trace.rank, trace.world_size, trace.origin) == (0, 128, 1682725898079292000)


def test_an_amd_device():
    trace = read(DATA / "mi250_minitoy_train_ROCm6_2_kineto.json.gz")[0]
    assert (trace.device, trace.rank, len(trace.works.start)) == ("gpu", 0, 16)
    assert "taken for rank 0" in trace.notes[0]
    assert trace.works.step.tolist() == [0] * 16  # launched in step 1, though run after its mark on the device
    assert (trace.works.kind == Work.GEMM).sum() == 2


def test_a_cpu_of_a_large_job():
    trace = read(DATA / "rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz")[0]
    assert (trace.device, trace.rank, trace.world_size) == ("cpu", 34, 300)
    assert [Call(kind) for kind in trace.calls.kind] == [Call.ALL_REDUCE] * 10
    assert trace.calls.elements[0] == 321271
    assert trace.calls.blocks.all()


@pytest.mark.parametrize("rank", range(4))
def test_our_labels_on_gloo(rank):
    """See make_gloo_traces.py for what the ranks do."""
    path = DATA / f"gloo-rank-{rank}.json.gz"
    trace, zero = read(path)[0], first(path)
    calls, labels = trace.calls, complete(path, "user_annotation")
    assert (trace.device, trace.host, trace.shares, trace.processor) == ("cpu", "here", (0.4, 0.6), (1234, 5678))
    assert trace.steps.number.tolist() == [7, 8]
    message = Call.SEND if rank < 2 else Call.RECV
    assert Counter(Call(kind) for kind in calls.kind) == {Call.ALL_GATHER: 4, Call.ALL_REDUCE: 2, message: 4}
    # A gather lasts as long as it is waited for.
    gathers = calls.kind == Call.ALL_GATHER
    waits = [ns(e, zero) for e in labels if e["name"].startswith("ff:tp:wait")]
    starts = [ns(e, zero)[0] for e in labels if e["name"].startswith("ff:tp:all_gather")]
    assert [*zip(calls.start[gathers], calls.end[gathers], strict=True)] == waits
    assert calls.launched[gathers].tolist() == starts
    assert calls.sequence[gathers].tolist() == [0, 1, 2, 3]
    assert {trace.groups[g].ranks for g in calls.group[gathers]} == {(0, 1) if rank < 2 else (2, 3)}
    # Both ends of a message have one number, and know each other.
    messages = calls.kind == message
    assert set(calls.peer[messages]) == {(rank + 2) % 4}
    other = read(DATA / f"gloo-rank-{(rank + 2) % 4}.json.gz")[0].calls
    there = np.isin(other.kind, (Call.SEND, Call.RECV))
    assert sorted(calls.sequence[messages]) == sorted(other.sequence[there])
    assert len(set(calls.sequence[messages])) == 4
    assert calls.blocks[messages].all() == (rank >= 2)
    assert Counter(Host(kind) for kind in trace.ranges.kind) == {Host.LOADER: 2, Host.GARBAGE: 2}
    # Nothing is computed while the rank waits, and all products are there.
    works, blocking = trace.works, calls.blocks
    for start, end in zip(calls.start[blocking], calls.end[blocking], strict=True):
        assert not ((works.start < end) & (works.end > start)).any()
    products = [ns(e, zero) for e in complete(path, "cpu_op") if e["name"] == "aten::matmul"]
    assert [*zip(works.start[works.kind == Work.GEMM], works.end[works.kind == Work.GEMM], strict=True)] == products


# Odd ones ------------------------------------------------------------------------------------------------------------


def kernel(start: float, took: float = 5, name: str = "gemm", number: int | None = None, **arguments: object) -> dict:
    args = arguments if number is None else {"correlation": number, **arguments}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start, "dur": took, "args": args}


def on_host(cat: str, name: str, start: float, took: float, **more: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": 100, "ts": start, "dur": took, "args": {}, **more}


def write(path: Path, events: list, **header: object) -> Path:
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


def test_steps_of_kernels_that_run_late_and_of_those_without_a_launch(tmp_path):
    path = write(tmp_path / "rank0.json", [
        on_host("user_annotation", "ProfilerStep#3", 0, 100),
        on_host("user_annotation", "ProfilerStep#4", 100, 100),
        on_host("cuda_runtime", "cudaLaunchKernel", 90, 5, args={"correlation": 1}),
        kernel(150, number=1),  # launched in step 3
        kernel(160, number=2),  # its launch is lost: by the marks on the device step 3, too
        kernel(190),
        kernel(500),
        {**on_host("gpu_user_annotation", "ProfilerStep#3", 20, 160), "pid": 0, "tid": 7},
        {**on_host("gpu_user_annotation", "ProfilerStep#4", 180, 60), "pid": 0, "tid": 7},
    ])  # fmt: skip
    trace = read(path)[0]
    assert trace.works.step.tolist() == [0, 0, 1, UNKNOWN]
    assert trace.works.launched.tolist() == [90_000, -1, -1, -1]


def test_values_of_any_type(tmp_path):
    path = write(tmp_path / "rank_2.json", [
        kernel(1.5), {**kernel(2), "pid": "GPU 0", "tid": "stream 7"}, {**kernel(3), "pid": [1], "tid": {"a": 1}},
        {**kernel(4), "dur": None}, {**kernel(5), "dur": -3}, {**kernel(6), "ts": "7"}, {**kernel(6), "ts": None},
        {**kernel(7), "args": None}, {**kernel(8), "name": 17}, {**kernel(9), "name": None},
        {**kernel(10), "args": {"correlation": "x", "Collective name": 5, "Process Group Ranks": [0, "b"], "Seq": "4"}},
        {"ph": "X"}, {}, {"ph": None, "cat": 3}, {**kernel(11), "args": {"External id": -1, "correlation": 2**70}},
    ], distributedInfo="none", baseTimeNanoseconds="x", fourfold=[1])  # fmt: skip
    trace = read(path)[0]
    assert trace.rank == 2
    assert len(trace.works.start) + len(trace.calls.start) == 10
    assert "2 events without a time were left out" in trace.notes
    assert trace.calls.sequence.tolist() == [4]


def test_pseudo_events_are_no_work_and_annotations_are_counted_once(tmp_path):
    path = write(tmp_path / "rank0.json", [
        kernel(10), {**kernel(20, 50, "Stream Sync"), "cat": "cuda_sync"}, kernel(30, 40, "Event Sync"),
        kernel(40, 5, "ncclDevKernel_Generic(x)", 1),
        on_host("cuda_runtime", "cudaLaunchKernel", 5, 1, args={"correlation": 1}),
        on_host("cpu_op", "record_param_comms", 4, 4, args={"Collective name": "allreduce", "Seq": 9,
                "Process Group Name": "3", "Process Group Ranks": "[0, 1]", "Group size": 2, "In msg nelems": 64}),
        on_host("user_annotation", "nccl:all_reduce", 4.5, 3),
        {**on_host("gpu_user_annotation", "nccl:all_reduce", 40, 5), "pid": 0, "tid": 7},
    ])  # fmt: skip
    trace = read(path)[0]
    assert len(trace.works.start) == 1
    assert [Call(kind) for kind in trace.calls.kind] == [Call.ALL_REDUCE]
    assert (trace.calls.sequence[0], trace.calls.elements[0]) == (9, 64)
    assert trace.groups[0].ranks == (0, 1)


def test_operators_of_a_cpu_are_cut_where_they_communicate(tmp_path):
    path = write(tmp_path / "rank0.json", [
        on_host("cpu_op", "MyFunctionBackward", 0, 100), on_host("cpu_op", "aten::mm", 1, 30),
        on_host("user_annotation", "ff:tp:all_reduce:group=0:stage=0:mb=0:seq=5", 50, 20),
        on_host("cpu_op", "c10d::allreduce_", 51, 3), {**on_host("cpu_op", "aten::add", 50, 100), "tid": 200},
        on_host("cpu_op", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 300, 10),
    ])  # fmt: skip
    trace = read(path)[0]
    names = [trace.names[name] for name in trace.works.name]
    assert [*zip(trace.works.start, trace.works.end, names, strict=True)][:3] == [
        (0, 50_000, "MyFunctionBackward"),
        (50_000, 150_000, "aten::add"),
        (70_000, 100_000, "MyFunctionBackward"),
    ]
    # Of its own 80 us most... 30 us of 80 are a product: by name and time it waits for memory.
    assert trace.works.kind.tolist()[:3] == [Work.MEMORY] * 3
    assert [Host(kind) for kind in trace.ranges.kind] == [Host.LOADER]
    assert (trace.calls.sequence.tolist(), trace.calls.blocks.tolist()) == ([5], [True])


@pytest.mark.parametrize(
    ("header", "name", "rank", "note"),
    [
        ({"distributedInfo": {"rank": 3, "world_size": 8}}, "rank5.json", 3, "by its name the file is of rank 5"),
        ({"distributedInfo": {"rank": 3}}, "x.json", 3, None),
        ({"distributedInfo": {"pg_config": [{"ranks": [0, 1, 2, 3]}, {"ranks": [2, 6]}]}}, "x.json", 2, "in common"),
        ({}, "worker_rank-12.x.json", 12, "is from its name"),
        ({}, "host_4711.1690000000.pt.trace.json", 0, "taken for rank 0"),
    ],
)
def test_which_rank(tmp_path, header, name, rank, note):
    trace = read(write(tmp_path / name, [kernel(1)], **header))[0]
    assert trace.rank == rank
    assert note is None or note in " ".join(trace.notes)


def test_no_events_and_a_copy_for_viewers_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x\.json: no event of a profiler is in it"):
        read(write(tmp_path / "x.json", [{"ph": "M", "name": "process_name", "args": {"name": "a"}}]))
    with pytest.raises(ValueError, match="give the traces themselves"):
        read(write(tmp_path / "x.json", [kernel(1)], fourfold={"reduced": {}}))


def test_a_layout_that_is_none_is_passed_over(tmp_path):
    trace = read(write(tmp_path / "rank0.json", [kernel(1)], fourfold={"grid": {"tp": 0}, "shares": [1, -1]}))[0]
    assert (trace.grid, trace.shares) == (None, ())
    assert "its layout is none: tp = 0" in trace.notes[1]


@pytest.mark.parametrize(
    "name", ["nccl_data.json.gz", "gloo-rank-2.json.gz", "mi250_minitoy_train_ROCm6_2_kineto.json.gz"]
)
def test_damaged_at_random_there_is_always_an_answer_or_a_sentence(tmp_path, name):
    good = gzip.decompress((DATA / name).read_bytes())
    path = tmp_path / "rank0.json"
    for seed in range(25):
        rng = random.Random(seed)
        bad = bytearray(good)
        for _ in range(rng.choice((1, 3, 30))):
            at = rng.randrange(len(bad))
            bad[at : at + rng.choice((0, 1, 9, 400))] = bytes(
                rng.choices(b'"{}[],:\\\x00\xff1a', k=rng.choice((0, 1, 5)))
            )
        path.write_bytes(bytes(bad[: rng.choice((len(bad), rng.randrange(1, len(bad))))]))
        answer = answer_of(path)
        assert (str(path) in answer) if isinstance(answer, str) else answer[0].notes


def answer_of(path: Path) -> list[RankTrace] | str:
    try:
        return read(path)
    except ValueError as error:
        return str(error)


def test_ranks_with_30_and_more_in_a_group(tmp_path):
    cut = str([*range(0, 120, 4)])[:-1] + ", ...]"
    said = {"Collective name": "allreduce", "Process Group Name": "7", "Process Group Ranks": cut, "Group size": 64}
    config = [{"pg_name": "7", "pg_desc": "mesh_dp", "pg_size": 64, "ranks": [*range(0, 256, 4)]}]
    events = [kernel(1, 5, "ncclDevKernel_AllReduce", **said)]
    alone = read(write(tmp_path / "rank0.json", events))[0].groups[0]
    assert (alone.ranks, alone.size, alone.first) == (None, 64, tuple(range(0, 120, 4)))
    listed = read(write(tmp_path / "rank0.json", events, distributedInfo={"rank": 0, "pg_config": config}))[0].groups[0]
    assert listed == replace(alone, description="mesh_dp", ranks=tuple(range(0, 256, 4)), first=())
