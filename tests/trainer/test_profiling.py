"""The traces of a run: which steps and ranks, what is in them, held against the action log; and what a resume keeps."""

from __future__ import annotations

import gzip
import inspect
import json
import math
import socket
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fourfold.debugger.memory import has_memory
from fourfold.debugger.memory.peaks import summarise
from fourfold.debugger.memory.traces import read_trace
from fourfold.layout import Doing, Label, parse_label
from fourfold.parallel import connect
from fourfold.recipe import RunPlan, check, from_table, load
from fourfold.simulator.replay import read_action_logs
from fourfold.trainer.prepare import has_snapshots
from fourfold.trainer.profiling import Profiling, shares
from fourfold.trainer.ranks import fork_ranks
from tests.trainer.runs import train, write_recipe

Range = tuple[str, int, int]  # name, start and end in nanoseconds
CLOSE = 50_000  # nanoseconds by which two clocks may disagree on how long something was


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps on four ranks; three ranks record the third and the fourth, in which garbage is collected."""
    folder = tmp_path_factory.mktemp("profile")
    write_recipe(folder)
    done = train(
        folder, "layout.tp=2", "layout.pp=2", "train.steps=5", "train.gc_every=4", "data.prefetch=0", "model.tied=true",
        "output.action_log_every=1", 'profile.steps="3-4"', 'profile.ranks="0,2-3"',
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "Profiler: 2 steps from 3 on, on 3 ranks, to profile/" in done.out
    # The profiler has nothing to say on a terminal; but in this process one may have run before, and its library reads
    # its level of logging once.
    assert not [line for line in done.err.splitlines() if not line.startswith("USDT:")]
    return folder / "runs" / "tiny"


def read(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def ranges(trace: dict[str, Any]) -> list[Range]:
    """Of the main thread, by start."""
    events = [e for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    (thread,) = {e["tid"] for e in events if e["name"].startswith("ProfilerStep#")}
    mine = [
        (e["name"], round(1000 * e["ts"]), round(1000 * (e["ts"] + e["dur"]))) for e in events if e["tid"] == thread
    ]
    return sorted(mine, key=lambda one: (one[1], -one[2]))


def plan_of(run: Path) -> RunPlan:
    return check(load(run / "recipe.toml"))


def test_steps_and_ranks_are_those_of_the_recipe(run: Path) -> None:
    files = sorted(path.name for path in (run / "profile").iterdir())
    assert files == [f"rank-{rank:05d}.json.gz" for rank in (0, 2, 3)]
    for rank in (0, 2, 3):
        trace = read(run / "profile" / f"rank-{rank:05d}.json.gz")
        assert trace["distributedInfo"]["rank"] == rank
        groups = {tuple(group["ranks"]): group["pg_desc"] for group in trace["distributedInfo"]["pg_config"]}
        tp = tuple(plan_of(run).grid.group_of(rank, "tp"))
        assert groups[tp] == "mesh_tp"
        ours = trace["fourfold"]
        assert (ours["format"], ours["host"]) == (1, socket.gethostname())
        assert ours["grid"] == {"tp": 2, "cp": 1, "pp": 2, "dp": 1}
        assert len(ours["shares"]) == 2
        assert math.isclose(sum(ours["shares"]), 1)
        steps = {name: end - start for name, start, end in ranges(trace) if name.startswith("ProfilerStep#")}
        assert [*steps] == ["ProfilerStep#3", "ProfilerStep#4"]
        assert [*ours["processor_ns"]] == ["3", "4"]
        for step, used in ours["processor_ns"].items():
            assert 0 < used < steps[f"ProfilerStep#{step}"]


def test_a_trace_and_the_action_log_say_the_same(run: Path) -> None:
    """Of every action and everything else in both steps: when it began, as each has its clock, and what was waited."""
    for rank in (0, 2, 3):
        found = ranges(read(run / "profile" / f"rank-{rank:05d}.json.gz"))
        for step in (3, 4):
            ((_, begin, end),) = [one for one in found if one[0] == f"ProfilerStep#{step}"]
            inside = [one for one in found if begin < one[1] < end]
            log = read_action_logs(run, step).ranks[rank]
            kinds = {str(a.kind) for a in log.actions}
            labelled = [(label, s, e) for name, s, e in inside if (label := parse_label(name)) is not None]
            actions = [(x, s, e) for x, s, e in labelled if x.dimension in ("pp", "fsdp") and x.kind in kinds]
            assert [(x.kind, x.stage, x.micro_batch) for x, _, _ in actions] == [tuple(a) for a in log.actions]
            waits = waits_in(labelled, actions)
            # Clocks are read one after the other, and a rank may lose its processor between any two readings: what
            # lies inside of the other is never longer, and most of the time they are close.
            offset = np.median([log.start[i] - start for i, (_, start, _) in enumerate(actions)])
            assert np.median([abs(start + offset - log.start[i]) for i, (_, start, _) in enumerate(actions)]) < 1e6
            assert all(e - s <= log.end[i] - log.start[i] + CLOSE for i, (_, s, e) in enumerate(actions))
            messages = np.array([log.wait[i] - waits["pp"][i] for i in range(len(actions))])
            ties = np.array([waits["tp"][i] - log.tied[i] for i in range(len(actions))])
            assert log.tied.sum() > 0
            for inside_of in (messages, ties):
                assert np.all(inside_of > -CLOSE)
                assert np.median(inside_of) < 1e6
            doings = [(name, s) for name, s, _ in inside if parse_label(name) is None and name.startswith("ff:")]
            assert [name for name, _ in doings] == [extra.doing.range for extra in log.extra]
            late = [s + offset - extra.start for (_, s), extra in zip(doings, log.extra, strict=True)]
            assert np.median(np.abs(late)) < 1e6
            assert (Doing.GC in {extra.doing for extra in log.extra}) == (step == 4)


def waits_in(
    labelled: list[tuple[Label, int, int]], actions: list[tuple[Label, int, int]]
) -> dict[str, defaultdict[int, int]]:
    """By dimension and number of the action: nanoseconds in ranges that wait."""
    waits: dict[str, defaultdict[int, int]] = {"pp": defaultdict(int), "tp": defaultdict(int)}
    for label, start, end in labelled:
        if label.kind in ("wait", "WAIT_F", "WAIT_B"):
            inside = [i for i, (_, s, e) in enumerate(actions) if s <= start and end <= e]
            if inside:  # else it is in a sum at the end of the step
                waits[label.dimension][inside[0]] += end - start
    return waits


def test_what_is_started_is_waited_for_once_and_later(run: Path) -> None:
    started: dict[tuple[str, int], int] = {}
    for name, start, end in ranges(read(run / "profile" / "rank-00003.json.gz")):
        label = parse_label(name)
        if label is None or label.dimension != "tp" or label.kind == "all_reduce":
            continue
        key = label.dimension, label.sequence
        if label.kind == "wait":
            assert start >= started.pop(key)
        else:
            started[key] = end
    assert started == {}


def test_expected_shares() -> None:
    """Layers of 3 and 1, and a head as wide as half a layer, without attention: (3, 1 + 1/2) of 4 1/2."""
    table = {
        "model": {"dim": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "ffn_dim": 128, "vocab_size": 320,
                  "vocab_multiple": 16},
        "layout": {"pp": 2}, "pipeline": {"split": [3, 1]}, "batch": {"seq_len": 1},
    }  # fmt: skip
    layer, head = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64 + 64 * 2, 320 * 64 + 64  # a token sees itself: 2 per head_dim
    first, last = shares(check(from_table(table)))
    assert first == pytest.approx(3 * layer / (4 * layer + head), rel=1e-12)
    assert first + last == pytest.approx(1)


def test_a_resumed_run_keeps_what_it_has_and_records_what_comes(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    steps = lambda name: [  # noqa: E731
        int(one[0].rpartition("#")[2])
        for one in ranges(read(tmp_path / "runs" / "tiny" / name / "rank-00000.json.gz"))
        if one[0].startswith("ProfilerStep#")
    ]
    assert train(tmp_path, 'profile.steps="2-3"').code == 0
    assert steps("profile") == [2, 3]
    # All of these steps are made: nothing is recorded, and nothing touched.
    assert train(tmp_path, "train.steps=4", 'profile.steps="2-3"', resume=True).code == 0
    assert steps("profile") == [2, 3]
    # Some are made, and some are not.
    assert train(tmp_path, "train.steps=6", 'profile.steps="3-5"', "layout.dp=2", resume=True).code == 0
    assert steps("profile") == [5]
    assert steps("profile-1") == [2, 3]
    assert sorted(path.name for path in (tmp_path / "runs" / "tiny" / "profile").iterdir()) == [
        "rank-00000.json.gz", "rank-00001.json.gz",
    ]  # fmt: skip


def test_a_full_disk_does_not_stop_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = check(from_table({"profile": {"steps": "1"}}))

    def work(rank: int) -> None:
        with Profiling(plan, tmp_path, connect(plan.grid, "cpu"), torch.device("cpu"), after_step=0) as profiling:
            profiling.step_begins(1)
            (tmp_path / "profile").rename(tmp_path / "elsewhere")  # nothing can be written to where it was
            profiling.step_ended(1)

    fork_ranks(1, work, timeout=60)
    assert "rank 0: its trace could not be written" in capfd.readouterr().out
    assert [*(tmp_path / "elsewhere").iterdir()] == []


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_inside_of_the_range(tmp_path: Path, *, fails: bool) -> None:
    """It writes what it has if it was stopped, and nothing if it failed."""
    plan = check(from_table({"profile": {"steps": "2-9"}}))

    def work(rank: int) -> list[str]:
        try:
            profiling = Profiling(plan, tmp_path, connect(plan.grid, "cpu"), torch.device("cpu"), after_step=0)
            with profiling:
                for step in (1, 2, 3):
                    profiling.step_begins(step)
                    torch.ones(3).sum()
                    assert not fails or step < 3
                    profiling.step_ended(step)
        except AssertionError:
            pass
        return [path.name for path in (tmp_path / "profile").iterdir()]

    assert fork_ranks(1, work, timeout=60) == [[] if fails else ["rank-00000.json.gz"]]
    if not fails:
        marks = [name for name, _, _ in ranges(read(tmp_path / "profile" / "rank-00000.json.gz"))]
        assert [name for name in marks if name.startswith("Prof")] == ["ProfilerStep#2", "ProfilerStep#3"]


def test_memory_on_a_cpu(tmp_path: Path) -> None:
    """Of one rank, without threads of others: what is read back is what PyTorch counted after every event."""
    write_recipe(tmp_path)
    done = train(tmp_path, "train.steps=4", 'profile.steps="2-4"', "profile.memory=true", "data.prefetch=0")
    assert done.code == 0, done.err
    assert "Profiler, with memory: 3 steps from 2 on, on 1 ranks, to profile/" in done.out
    path = tmp_path / "runs" / "tiny" / "profile" / "rank-00000.json.gz"
    assert [path] == [*path.parent.iterdir()]
    assert has_memory(path)
    events = [event for event in read(path)["traceEvents"] if event["name"] == "[memory]"]
    counted = [event["args"] for event in sorted(events, key=lambda event: event["ts"])]
    before = counted[0]["Total Allocated"] - counted[0]["Bytes"]  # a profiler that this process had may have left some
    totals = [one["Total Allocated"] - before for one in counted]
    (history,) = read_trace(path)
    assert history.live()[1:].tolist() == totals
    found = summarise(history)
    assert found.peak.bytes == max(totals)
    assert found.growth.steps == (2, 3, 4)
    assert found.growth.leaks == 0
    assert {one.what for one in found.peak.by_doing} >= {"F of stage 0"}


class Recorded:
    """Stands for PyTorch's two functions on a machine without a GPU. It takes what they take, and nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, full: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self._signatures = {
            name: inspect.signature(getattr(torch.cuda.memory, name))
            for name in ("_record_memory_history", "_dump_snapshot")
        }
        self._full = full
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", self._dump)

    def _record(self, *args: Any, **options: Any) -> None:
        self.calls.append(self._signatures["_record_memory_history"].bind(*args, **options).arguments)

    def _dump(self, *args: Any, **options: Any) -> None:
        file = self._signatures["_dump_snapshot"].bind(*args, **options).arguments["filename"]
        Path(file).write_bytes(b"half of it")
        if self._full:
            raise OSError(28, "No space left on device")
        self.calls.append({"file": Path(file).name})


def profiled(folder: Path, error: BaseException | None = None) -> None:
    """Two steps on one rank with a GPU, so far as profiling knows; an error in the second, if there is one."""
    plan = check(from_table({"profile": {"steps": "1-2", "memory": True}}))
    groups = connect(plan.grid, "cpu")
    with Profiling(plan, folder, groups, torch.device("cuda"), after_step=0) as profiling:
        for step in (1, 2):
            profiling.step_begins(step)
            if error is not None and step == 2:
                raise error
            profiling.step_ended(step)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_memory_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)

    def work(rank: int) -> tuple[list[dict[str, Any]], list[str]]:
        profiled(tmp_path)
        return recorded.calls, sorted(path.name for path in (tmp_path / "profile").iterdir())

    ((calls, files),) = fork_ranks(1, work, timeout=60)
    begun, dumped, ended = calls
    assert begun["global_record_annotations"] is True  # by which a reader knows steps and actions
    assert begun["clear_history"] is True
    assert dumped == {"file": "memory-00000.pickle.partial"}
    assert ended == {"enabled": None}
    assert files == ["memory-00000.pickle", "rank-00000.json.gz"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize(
    ("error", "files"), [(torch.OutOfMemoryError("no"), ["memory-00000.pickle"]), (ValueError(), [])]
)
def test_memory_of_a_run_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, files: list[str]
) -> None:
    """What filled it is written of one that had too little of it, and nothing of any other."""
    Recorded(monkeypatch)

    def work(rank: int) -> list[str]:
        with pytest.raises(type(error)):
            profiled(tmp_path, error)
        return [path.name for path in (tmp_path / "profile").iterdir()]

    assert fork_ranks(1, work, timeout=60) == [files]
    assert has_snapshots(tmp_path) == bool(files)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_full_disk_leaves_no_half_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded = Recorded(monkeypatch, full=True)

    def work(rank: int) -> tuple[list[str], dict[str, Any]]:
        profiled(tmp_path)
        return [path.name for path in (tmp_path / "profile").iterdir()], recorded.calls[-1]

    assert fork_ranks(1, work, timeout=60) == [(["rank-00000.json.gz"], {"enabled": None})]
    assert "rank 0: its memory snapshot could not be written: [Errno 28]" in capfd.readouterr().out
