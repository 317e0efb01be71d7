"""Folders of traces: which files are found, read in processes, kept as columns, and merged for viewers."""

import gzip
import json
import os
import signal
import time
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.reading import columns, ranks
from fourfold.debugger.reading.folder import find, read_all
from fourfold.debugger.reading.groups import Listed
from fourfold.debugger.reading.kineto import read
from fourfold.debugger.reading.merged import joined, write_merged
from fourfold.debugger.reading.trace import RankTrace
from fourfold.layout import join_ranks

DATA = Path(__file__).parent / "data"


def write(path: Path, rank: int | None, *, start: float = 0.0, world: int = 4) -> Path:
    """A rank that computes for 2 x 5 us, and then meets the others."""
    meets = {"Collective name": "allreduce", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3]", "Seq": 1}
    does = [("gemm", {}), ("gemm", {}), ("add", {}), ("ncclDevKernel_AllReduce", meets)]
    kernels = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start + 6 * i, "dur": 5, "args": args}
        for i, (name, args) in enumerate(does)
    ]
    said = {"world_size": world} | ({} if rank is None else {"rank": rank})
    path.parent.mkdir(exist_ok=True, parents=True)
    text = json.dumps({"distributedInfo": said, "traceEvents": kernels}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def rank_of(trace: RankTrace) -> tuple[int, int]:
    return trace.rank, os.getpid()


def same(a: object, b: object) -> bool:
    if is_dataclass(a):
        return all(same(getattr(a, entry.name), getattr(b, entry.name)) for entry in fields(a))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def test_what_is_found(tmp_path):
    one, two = write(tmp_path / "rank-0.json", 0), write(tmp_path / "rank-1.json.gz", 1)
    for name in ("truth.json", "plan.json", "rank-2.json.partial", "notes.txt", "rank-0.json.columns.npz"):
        (tmp_path / name).write_text('{"a": 1}')
    write_merged(tmp_path / "all.json", read(one))
    write_merged(tmp_path / "all2.json.gz", read(one))
    assert find(tmp_path) == [one, two]
    assert find(str(tmp_path / "rank-*.gz")) == [two]
    assert find(one) == [one]
    run = tmp_path / "run"
    (run / "hangs").mkdir(parents=True)
    (run / "hangs" / "rank-00000.json").write_text("{}")
    inside = write(run / "profile" / "rank-00000.json.gz", 0)
    assert find(run) == [inside]
    apart = write(tmp_path / "apart" / "rank3" / "trace.json", None)
    assert find(tmp_path / "apart") == [apart]
    assert ranks.from_name(apart) == 3


@pytest.mark.parametrize("name", ["nothing", "empty", "x*.json"])
def test_nothing_is_found(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=str(tmp_path)):
        find(tmp_path / name)


@pytest.mark.parametrize("workers", [1, 3])
def test_all_are_read_in_the_order_of_ranks(tmp_path, workers):
    files = [write(tmp_path / f"x{i}.json.gz", 3 - i) for i in range(4)]
    told: list[tuple[int, int]] = []
    offset = 10  # a closure travels, too
    found = read_all(
        files,
        reduce=lambda trace: (trace.rank + offset, os.getpid()),
        workers=workers,
        progress=lambda *a: told.append(a),
    )
    assert [rank for rank, _ in found] == [10, 11, 12, 13]
    assert (os.getpid() in {pid for _, pid in found}) == (workers == 1)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("workers", [1, 2])
def test_clashes_and_files_without_a_rank_are_refused(tmp_path, workers):
    one, two = write(tmp_path / "rank0.json", 1), write(tmp_path / "rank1.json", 1)
    with pytest.raises(ValueError, match="are both of rank 1") as error:
        read_all([one, two], reduce=rank_of, workers=workers)
    assert str(one) in str(error.value)
    assert str(two) in str(error.value)
    nobody = write(tmp_path / "host_77.123.pt.trace.json", None)
    with pytest.raises(ValueError, match=r"host_77.*which rank it is of"):
        read_all([one, nobody], reduce=rank_of, workers=workers)
    assert read_all([nobody], reduce=rank_of, workers=workers)[0][0] == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_cannot_be_read(tmp_path, workers):
    good, bad = write(tmp_path / "rank0.json", 0), tmp_path / "rank1.json"
    bad.write_bytes(b"")
    with pytest.raises(ValueError, match=r"rank1\.json: the file is empty"):
        read_all([good, bad], reduce=rank_of, workers=workers)
    said: list[str] = []
    assert [rank for rank, _ in read_all([good, bad], reduce=rank_of, workers=workers, failed=said.append)] == [0]
    assert said == [f"{bad}: the file is empty"]
    with pytest.raises(ValueError, match="the file is empty"):
        read_all([bad], reduce=rank_of, workers=workers, failed=said.append)


def test_a_process_that_dies_and_an_error_in_what_is_wanted(tmp_path):
    files = [write(tmp_path / f"rank{i}.json", i) for i in range(4)]

    def dies(trace: RankTrace) -> int:
        if trace.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace.rank

    with pytest.raises(ValueError, match=r"rank2\.json: the process that read it ended with SIGKILL"):
        read_all(files, reduce=dies, workers=2)


def test_ctrl_c_ends_at_once(tmp_path):
    files = [write(tmp_path / f"rank{i}.json", i) for i in range(4)]

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def slow(trace: RankTrace) -> int:
        time.sleep(60 * (trace.rank > 0))
        return 0

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read_all(files, reduce=slow, workers=2, progress=interrupted)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", ["nccl_data.json.gz", "gloo-rank-1.json.gz"])
def test_a_kept_copy_is_the_same_until_the_file_changes(tmp_path, name):
    path = tmp_path / "rank-1.json.gz"
    path.write_bytes((DATA / name).read_bytes())
    first = read_all([path], reduce=lambda trace: trace, keep=True, workers=1)[0]
    assert columns.place(path).exists()
    (again,) = columns.load(path) or ()
    assert same(first, again)
    assert same(first, read_all([path], reduce=lambda trace: trace, workers=1)[0])
    os.utime(path, ns=(1, 1))
    assert columns.load(path) is None


def test_a_copy_that_is_damaged_or_cannot_be_written_does_no_harm(tmp_path):
    path = write(tmp_path / "rank0.json", 0)
    assert columns.save(path, read(path))
    whole = columns.place(path).read_bytes()
    for content in (
        b"",
        b"no zip",
        whole[: len(whole) // 2],
        whole.replace(b'"format": 1', b'"format": 9'),
        whole[:300] + whole[310:],
    ):
        columns.place(path).write_bytes(content)
        assert columns.load(path) is None
        assert [rank for rank, _ in read_all([path], reduce=rank_of, workers=1)] == [0]
    columns.place(path).unlink()
    columns.place(path).with_name("rank0.json.columns.npz.partial").mkdir()
    assert not columns.save(path, read(path))


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("sampled_rank-0.json.gz", 0),
        ("rank34.json", 34),
        ("rank_7.json", 7),
        ("rank0_trace.json", 0),
        ("trace_3.json", 3),
        ("trace-12.json.gz", 12),
        ("5.json", 5),
        ("iteration_100_rank_6.json", 6),
        ("ranks.json", -1),
        ("crank7x.json", -1),
        ("host_4711.1690000000000.pt.trace.json", -1),
        ("node1-gpu.pt.trace.json.gz", -1),
        ("merged.json", -1),
    ],
)
def test_ranks_in_names(name, rank):
    assert ranks.from_name(Path("somewhere") / name) == rank


def test_ranks_by_groups_and_missing_ones():
    groups = [
        Listed("0", "", 4, (0, 1, 2, 3)),
        Listed("1", "", 2, (2, 3)),
        Listed("2", "", 2, (1, 3)),
        Listed("3", "", 9, None),
    ]
    assert ranks.from_groups(groups) == 3
    assert ranks.from_groups(groups[:2]) == -1
    assert ranks.from_groups([]) == -1
    assert ranks.missing([0, 1, 5], 8) == ("of 8 ranks there are traces of 3; missing: 2-4, 6-7",)
    assert ranks.missing(range(8), 8) == ranks.missing([1], 0) == ()
    assert join_ranks(range(0, 40, 2), 8) == "0, 2, 4, 6, 8, 10, 12, 14 and 12 more stretches"


def test_neighbours_are_joined():
    start, end = np.array([0, 10, 20, 40]), np.array([9, 19, 30, 50])
    kind = np.array([0, 0, 1, 1], dtype=np.int8)
    a, b, k, n = joined(start, end, kind, 1)
    assert [*zip(a, b, k, n, strict=True)] == [(0, 19, 0, 2), (20, 30, 1, 1), (40, 50, 1, 1)]
    assert joined(start, end, kind, 10)[3].tolist() == [2, 2]
    assert len(joined(start[:0], end[:0], kind[:0], 1)[0]) == 0


def test_all_ranks_in_one_file_on_one_clock(tmp_path):
    traces = [read(write(tmp_path / f"rank{i}.json", i, start=100.0 * i))[0] for i in range(4)]
    notes = write_merged(tmp_path / "all.json", traces, offsets={i: 1_000_000 * (i + 1) for i in range(4)})
    said = json.loads((tmp_path / "all.json").read_text())
    assert said["fourfold"]["reduced"] == {"ranks": 4, "notes": list(notes)}
    spans = [e for e in said["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1, 2, 3}
    for rank in range(4):
        mine = {e["name"]: e for e in spans if e["pid"] == rank}
        assert mine["gemm"]["ts"] == mine["step 0"]["ts"] == 1000 * rank
        assert (mine["gemm"]["dur"], mine["gemm"]["args"]) == (11, {"kernels": 2})
        assert mine["memory"]["args"] == {"kernels": 1}
        assert mine["all_reduce 0@0"]["args"] == {"group": "0@0", "seq": 1}
        names = {
            e["name"]: e["args"]["name"]
            for e in said["traceEvents"]
            if e["ph"] == "M" and e["pid"] == rank and "name" in e["args"]
        }
        assert names["process_name"] == f"rank {rank}"


def test_a_size_is_kept_and_what_it_costs_is_said(tmp_path):
    traces = read(DATA / "nccl_data.json.gz")
    path = tmp_path / "all.json"
    for largest in (2_000, 10_000):
        notes = write_merged(path, traces, largest=largest)
        assert path.stat().st_size < largest + 2_000
        assert "left out" in notes[-1]
    assert len(write_merged(path, traces)) == 1
    with pytest.raises(ValueError, match="No such file"):
        write_merged(tmp_path / "no" / "all.json", traces)
