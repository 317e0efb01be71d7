"""`fourfold diagnose` as its users meet it: what is printed, written and refused."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.diagnosing import diagnose
from fourfold.layout import Grid
from fourfold.report.trace import TRUTH
from tests.answers import printed, refused
from tests.debugger import jobs
from tests.debugger.memory.allocator import Allocator
from tests.debugger.memory.test_verdict import job
from tests.debugger.slow.test_logs import Run
from tests.debugger.tables import made

DUMPS = Path(__file__).parent / "debugger" / "hangs" / "dumps"
FORMATS = Path(__file__).parents[1] / "docs" / "formats.md"
SLOW = 5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a job in which rank 5 is slow."""
    job = jobs.Job(tp=2, pp=2, dp=2, layers=2, slow={SLOW: 1.5})
    return jobs.write(job, tmp_path_factory.mktemp("job") / "traces", jobs.Style(skew_us={3: 40_000.0}))


@pytest.fixture
def traces(written: Path, tmp_path: Path) -> Path:
    """A copy, beside which files may be written."""
    return Path(shutil.copytree(written, tmp_path / "traces"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def slow(step: int, dp: int, stage: int, virtual: int, micro_batch: int) -> float:
        return 1.6 if (dp, stage) == (1, 0) else 1.0

    job = made.Job(dp=2, pp=2, micro_batches=3, steps=2, factor=slow)
    return made.write(tmp_path_factory.mktemp("table") / "job.parquet", job.rows())


def documented(heading: str) -> set[str]:
    """Keys in the table below a line of docs/formats.md."""
    text = FORMATS.read_text(encoding="utf-8")
    assert heading in text
    rows = text.partition(heading)[2].lstrip("\n").partition("\n\n")[0].splitlines()[2:]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def loaded(text: str) -> Any:
    """What is printed as JSON, which has no NaN."""

    def never(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=never)


class TestTraces:
    def test_text(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, workers=1) == 0
        text = printed(capsys)
        first = text.splitlines()[0]
        assert first.startswith("Rank 5 (dp 1, pp 0, cp 0, tp 1) holds up the others: all that it computes takes 1.5")
        for title in ("How the search came to rank 5", "What ranks did, per step", "note: traces: 8 ranks"):
            assert title in text
        assert "tp 2 cp 1 pp 2 dp 2, steps 1 to 3" in text

    def test_json_has_the_documented_keys(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, as_json=True) == 0
        found = loaded(printed(capsys))
        assert set(found) == documented("Of traces and action logs:")
        assert (found["format"], found["verdict"], found["steps"]) == (1, "slow rank", [1, 2, 3])
        (culprit,) = found["culprits"]
        assert set(culprit) == documented("A culprit:")
        assert (culprit["kind"], culprit["ranks"]) == ("compute", [SLOW])
        assert culprit["places"] == [{"tp": 1, "cp": 0, "pp": 0, "dp": 1}]
        assert culprit["factor"] == pytest.approx(1.5, rel=0.03)
        assert [level["dimension"] for level in culprit["levels"]] == ["dp", "pp", "cp", "tp"]
        assert [one["rank"] for one in found["ranks"]] == [*range(8)]
        assert found["clocks"]["ahead_ns"]["3"] == pytest.approx(40e6, abs=1_000)
        for one in found["ranks"]:
            whole = sum(sum(one[part].values()) for part in ("work", "host", "transfer", "wait"))
            assert whole == pytest.approx(found["step_seconds"], rel=0.02)

    def test_twice_the_same(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, as_json=True, workers=2) == 0
        once = printed(capsys)
        assert diagnose(traces, as_json=True, workers=1) == 0
        assert printed(capsys) == once

    def test_page(self, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "slow.html"
        assert diagnose(traces, html=page) == 0
        assert f"page: {page}" in printed(capsys)
        text = page.read_text(encoding="utf-8")
        assert "Rank 5 (dp 1, pp 0, cp 0, tp 1) holds up the others" in text
        assert sorted(path.name for path in tmp_path.iterdir()) == ["slow.html", "traces"]

    @pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
    def test_merged(self, name: str, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        merged = tmp_path / name
        assert diagnose(traces, merged=merged) == 0
        assert f"trace: {merged}" in printed(capsys)
        data = merged.read_bytes()
        events = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
        assert {event["pid"] for event in events} == {*range(8)}
        # On one clock: rank 3's was 40 ms ahead, its step now begins with that of the others.
        begins = {event["pid"]: event["ts"] for event in events if event.get("name") == "step 2"}
        assert begins[3] == pytest.approx(begins[0], abs=5)
        assert not [*tmp_path.glob("*.partial")]

    def test_json_stays_one_object(self, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page, merged = tmp_path / "slow.html", tmp_path / "all.json"
        assert diagnose(traces, as_json=True, html=page, merged=merged) == 0
        captured = capsys.readouterr()
        assert loaded(captured.out)["verdict"] == "slow rank"
        assert str(page) in captured.err
        assert str(merged) in captured.err

    def test_keep(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, keep=True, as_json=True, workers=1) == 0
        first = printed(capsys)
        kept = sorted(path.name for path in traces.glob("*.npz"))
        assert kept == [f"rank-{rank}.json.columns.npz" for rank in range(8)]
        ages = {path: path.stat().st_mtime_ns for path in traces.iterdir()}
        assert diagnose(traces, keep=True, as_json=True, workers=1) == 0
        assert printed(capsys) == first
        assert {path: path.stat().st_mtime_ns for path in traces.iterdir()} == ages
        # A trace that changes is read again.
        jobs.write(jobs.Job(tp=2, pp=2, dp=2, layers=2, slow={2: 1.5}), traces)
        assert diagnose(traces, keep=True, as_json=True, workers=1) == 0
        assert loaded(printed(capsys))["culprits"][0]["ranks"] == [2]

    def test_without_keep_nothing_is_left(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = sorted(traces.iterdir())
        assert diagnose(traces) == 0
        printed(capsys)
        assert sorted(traces.iterdir()) == before

    @pytest.mark.parametrize(("steps", "numbers"), [("2", [2]), ("2-3", [2, 3]), (" 3-99 ", [3])])
    def test_steps(self, steps: str, numbers: list[int], traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, steps=steps, as_json=True) == 0
        found = loaded(printed(capsys))
        assert found["steps"] == numbers
        assert found["culprits"][0]["ranks"] == [SLOW]

    def test_layout(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces, layout="tp=2,pp=2,dp=2", as_json=True) == 0
        assert loaded(printed(capsys))["layout"] == {"tp": 2, "cp": 1, "pp": 2, "dp": 2, "from": "given"}

    def test_some_of_the_files(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces / "rank-[0-3].json", as_json=True) == 0
        found = loaded(printed(capsys))
        assert [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
        assert any("4 of 8 ranks have no trace" in note for note in found["notes"])

    def test_one_file(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(traces / "rank-5.json") == 0
        assert printed(capsys).startswith("No single culprit: one rank of 8 has a trace")
        assert diagnose(traces / "rank-5.json", as_json=True) == 0
        assert loaded(printed(capsys))["verdict"] == "no single culprit"

    def test_a_healthy_job(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "healthy.html"
        assert diagnose(jobs.write(jobs.Job(tp=2, dp=2, layers=2), tmp_path / "traces"), html=page) == 0
        assert printed(capsys).startswith("Healthy: no rank, host or link stands out. Seen: 4 of 4 ranks")
        assert "Healthy" in page.read_text(encoding="utf-8")

    def test_what_stands_beside_traces_is_passed_over(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (traces / TRUTH).write_text("{}")
        (traces / "rank-9.json.partial").write_text("{")
        (traces / "notes.txt").write_text("")
        assert diagnose(traces, merged=traces / "all.json") == 0
        first = printed(capsys).partition("\n")[0]
        assert diagnose(traces) == 0
        assert printed(capsys).partition("\n")[0] == first


class TestLogs:
    def test_of_a_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = Run(Grid(tp=2, pp=2, dp=2), slow={6: 1.5}).write(tmp_path / "run")
        assert diagnose(run, html=tmp_path / "slow.html") == 0
        text = printed(capsys)
        assert text.startswith("Rank 6 (dp 1, pp 1, cp 0, tp 0) holds up the others")
        assert "note: action logs: 8 ranks" in text
        assert "Rank 6" in (tmp_path / "slow.html").read_text(encoding="utf-8")
        assert diagnose(run / "actions", as_json=True, steps="2") == 0
        found = loaded(printed(capsys))
        assert set(found) == documented("Of traces and action logs:")
        assert (found["source"], found["steps"], found["clocks"]) == ("action logs", [2], None)

    def test_have_no_merged_trace(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = Run(Grid(dp=2)).write(tmp_path / "run")
        assert diagnose(run, merged=tmp_path / "all.json") == 2
        assert refused(capsys) == "--merged: needs profiler traces"
        assert not (tmp_path / "all.json").exists()


class TestTable:
    def test_text(self, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(table, html=tmp_path / "table.html") == 0
        text = printed(capsys)
        assert "dp 1" in text.partition("\n")[0]
        assert "Slow-down by what is as measured" in text
        assert "Slow-down by worker" in (tmp_path / "table.html").read_text(encoding="utf-8")

    def test_json_has_the_documented_keys(self, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(table, as_json=True) == 0
        found = loaded(printed(capsys))
        assert set(found) == documented("Of a table of operations:")
        assert found["verdict"] == "workers"
        assert found["findings"][0]["workers"] == [{"dp": 1, "pp": 0}]
        assert found["slowdown"] > 1.05

    def test_one_step(self, table: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(table, as_json=True, steps="1") == 0
        assert loaded(printed(capsys))["steps"] == [1]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"merged": "all.json"}, "--merged: needs profiler traces"),
            ({"merged": "all.json", "html": "page.html"}, "--merged: needs profiler traces"),
            ({"layout": "dp=2,pp=2"}, "--layout: a table of operations says its layout itself; leave it out"),
            ({"steps": "7"}, "step"),
        ],
    )
    def test_refused(
        self, options: dict[str, str], message: str, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = {key: tmp_path / value if key in ("merged", "html") else value for key, value in options.items()}
        assert diagnose(table, **given) == 2
        assert message in refused(capsys)
        assert not [*tmp_path.iterdir()]


class TestHang:
    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(DUMPS / "skips", layout="tp=2,dp=2") == 0
        assert "rank 3" in printed(capsys)

    def test_json_has_the_documented_keys(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(DUMPS / "skips", layout="tp=2,dp=2", as_json=True) == 0
        found = loaded(printed(capsys))
        assert set(found) == documented("Of a hang:")
        assert found["verdict"] == "hang"
        assert found["causes"][0]["rank"] == 3

    def test_that_is_none(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(DUMPS / "ends_well", layout="tp=2,dp=2", as_json=True) == 0
        found = loaded(printed(capsys))
        assert (found["verdict"], found["causes"]) == ("no hang", [])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"html": "page.html"}, "--html: of a hang there is no page; the text says all"),
            ({"merged": "all.json"}, "--merged: needs profiler traces"),
        ],
    )
    def test_has_no_pictures(
        self, options: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = {key: tmp_path / value for key, value in options.items()}
        assert diagnose(DUMPS / "skips", layout="tp=2,dp=2", **given) == 2
        assert refused(capsys) == message
        assert not [*tmp_path.iterdir()]


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"layout": "tp=2,dp=2"}, "--layout: tp=2 cp=1 pp=1 dp=2 are 4 ranks, but the traces are of 8 ranks"),
            ({"layout": "tp=2,ep=4"}, "--layout tp=2,ep=4: 'ep=4' must be tp, cp, pp or dp and its size"),
            ({"steps": "4-9"}, "--steps 4-9: no such step in the traces; they have 1 to 3"),
            ({"steps": "3-2"}, "--steps 3-2 runs backwards; 2-3 is meant"),
            ({"steps": "last"}, "--steps 'last' is neither a number nor a range"),
            ({"steps": "-1"}, "--steps '-1' is neither a number nor a range"),
            ({"workers": 0}, "--workers 0: must be at least 1"),
            ({"html": "page.txt"}, "page.txt: ends in '.txt'; must end in .html or .htm"),
            ({"html": "no/page.html"}, "there is no folder"),
            ({"merged": "no/all.json"}, "there is no folder"),
            ({"merged": "all.trace"}, "all.trace: ends in '.trace'; must end in .json"),
            ({"html": "page.html", "layout": "dp=4"}, "are 4 ranks, but the traces are of 8"),
            ({"html": "page.html", "merged": "all.txt"}, "must end in .json"),
        ],
    )
    def test_before_anything_is_written(
        self, options: dict[str, Any], message: str, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = {key: tmp_path / value if key in ("merged", "html") else value for key, value in options.items()}
        assert diagnose(written, **given) == 2
        assert message in refused(capsys)
        assert not [*tmp_path.iterdir()]

    def test_no_such_path(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(tmp_path / "nowhere") == 2
        assert refused(capsys) == f"{tmp_path}/nowhere: there is no such file or folder"
        assert diagnose(tmp_path / "rank-*.json") == 2
        assert "no trace has such a name" in refused(capsys)

    def test_a_folder_with_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(tmp_path) == 2
        assert "in this folder are no traces" in refused(capsys)

    @pytest.mark.parametrize(
        "text", ["", "no JSON", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{}]}', "\x00"]
    )
    def test_files_that_are_none(self, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "rank-0.json"
        path.write_text(text)
        assert diagnose(path) == 2
        assert "rank-0.json" in refused(capsys)

    def test_two_traces_of_one_rank(self, traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.copy(traces / "rank-5.json", traces / "again.json")
        assert diagnose(traces) == 2
        error = refused(capsys)
        assert "again.json" in error
        assert "rank-5.json" in error

    def test_a_file_that_cannot_be_written(
        self, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("fourfold.debugger.reading.merged.os.replace", full)
        assert diagnose(traces, merged=tmp_path / "all.json") == 2
        assert refused(capsys) == f"{tmp_path}/all.json: No space left on device"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["traces"]


class TestMemory:
    """What stands in the answer is checked in tests/debugger/memory; here how it is said."""

    @pytest.fixture
    def snapshots(self, tmp_path: Path) -> Path:
        """Eight ranks, of which rank 6 has a cache that the others have not."""
        (tmp_path / "memory").mkdir()
        job(tmp_path / "memory", more={6: 9})
        return tmp_path / "memory"

    def test_text(self, snapshots: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(snapshots, layout="tp=2,pp=2,dp=2") == 0
        text = printed(capsys)
        assert text.startswith(
            "Rank 6 holds more than the other ranks of pipeline rank 1: 40.0 MiB at its peak, 9.00 MiB more than they, "
            "9.00 MiB of it for b/job/cache.py:2 g."
        )
        assert re.search(r"\n  6 +cuda:0 +40.0 MiB +40.0 MiB +40.0 MiB ", text)
        assert re.search(r"\n  b/job/work.py:1 f +30.0 MiB +1 +- +-\n", text)

    def test_out_of_memory(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        allocator = Allocator()
        allocator.record()
        allocator.annotate("START", "ProfilerStep#3")
        allocator.annotate("START", "ff:pp:F:group=0:stage=1:mb=2:seq=9")
        blocks = [allocator.alloc(4 << 20, "/a/b/job/work.py:1:f") for _ in range(8)]
        for address in blocks[::2]:
            allocator.free(address)
        allocator.fail(6 << 20, 1 << 20, "/a/b/job/big.py:5:g")
        assert diagnose(allocator.write(tmp_path / "memory-00004.pickle")) == 0
        first = printed(capsys).splitlines()[0]
        assert first == (
            "Rank 4 ran out of memory in step 3 at F of stage 1: b/job/big.py:5 g asked for 6.00 MiB, and cuda:0 had "
            "1.00 MiB left. The allocator held 32.0 MiB of it, 16.0 MiB of that in use: most for b/job/work.py:1 f "
            "(16.0 MiB). Its free 16.0 MiB would have been enough, but the largest piece was 4.00 MiB: memory is "
            "fragmented. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )

    def test_leak(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        allocator = Allocator()
        allocator.record()
        for step in range(1, 5):
            allocator.annotate("START", f"ProfilerStep#{step}")
            allocator.alloc(2 << 20, "/a/b/job/leak.py:7:keep")
            allocator.annotate("END", f"ProfilerStep#{step}")
        assert diagnose(allocator.write(tmp_path / "memory-00000.pickle")) == 0
        text = printed(capsys)
        assert text.startswith(
            "Rank 0 leaks: at the end of every step from 1 to 4 it holds 2.00 MiB more than at the end of the one "
            "before. What stays is that of b/job/leak.py:7 keep (2.00 MiB)."
        )
        assert re.search(r"\n  4     8.00 MiB +2.00 MiB\n?", text)

    def test_json_has_the_documented_keys(self, snapshots: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert diagnose(snapshots, layout="tp=2,pp=2,dp=2", as_json=True) == 0
        found = loaded(printed(capsys))
        assert set(found) <= documented("Of memory, from snapshots:")
        assert (found["format"], found["verdict"], found["rank"]) == (1, "memory: uneven", 6)
        known = documented("A device:\n")
        for device in found["devices"]:
            assert set(device) <= known | {"rank", "device"}
            assert {
                "bytes",
                "waiting_bytes",
                "reserved_bytes",
                "step",
                "seconds",
                "doing",
                "by_place",
                "by_doing",
            } == set(device["peak"])
        assert found["uneven"][0]["more_bytes"] == 9 << 20

    def test_page(self, snapshots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page = tmp_path / "memory.html"
        assert diagnose(snapshots, layout="tp=2,pp=2,dp=2", html=page) == 0
        assert f"page: {page}" in printed(capsys)
        text = page.read_text(encoding="utf-8")
        assert "Rank 6 holds more than the other ranks" in text
        assert "Peak of memory" in text

    def test_beside_traces(self, traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The answer is who is slow; memory is a paragraph, a key and a table more."""
        job(traces, more={6: 9})
        page = tmp_path / "slow.html"
        assert diagnose(traces, html=page) == 0
        text = printed(capsys)
        assert text.startswith("Rank 5 (dp 1, pp 0, cp 0, tp 1) holds up the others")
        assert "\n\nRank 6 holds more than the other ranks of pipeline rank 1" in text
        assert "Rank 6 holds more" in page.read_text(encoding="utf-8")
        assert diagnose(traces, as_json=True) == 0
        found = loaded(printed(capsys))
        assert (found["verdict"], found["memory"]["trouble"], found["memory"]["rank"]) == ("slow rank", "uneven", 6)

    def test_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "memory-00000.pickle").write_bytes(b"\x80\x04hello")
        assert diagnose(tmp_path) == 2
        assert "memory-00000.pickle is damaged" in refused(capsys)
        file = job(tmp_path)[0]
        assert diagnose(file, merged=tmp_path / "merged.json") == 2
        assert refused(capsys) == "--merged: needs profiler traces"
        assert diagnose(file, steps="3") == 2
        assert "nothing of steps 3 to 3 is in it" in refused(capsys)
