"""The page of a diagnosis: what it says of jobs whose times were written down by hand, and what a browser shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.debugger.reading.trace import RankTrace, Work
from fourfold.debugger.slow import Diagnosis, diagnose_traces, judge_ranks
from fourfold.debugger.slow.accounts import AWAITED, HOST, Accounts
from fourfold.debugger.slow.idle import cut
from fourfold.debugger.slow.places import Layout
from fourfold.debugger.slow.verdict import judge
from fourfold.debugger.slow.whatif import Computed, make_replay
from fourfold.layout import Action, Grid, Kind
from fourfold.report import drawing
from fourfold.report.diagnosis import diagnosis_page
from fourfold.report.diagnosis.around import MOST_ROWS, around, worst_step
from fourfold.report.drawing import KINDS, Table, Timeline
from fourfold.report.page import page_html, write_page
from tests.debugger import jobs
from tests.debugger.hand import pipeline, replicas

MESSAGE = "Waits for a message from rank 0; that waited for rank 1 (tp); rank 1 computes longer."


def diagnosed(traces: list[RankTrace]) -> Diagnosis:
    return judge_ranks([cut(trace) for trace in traces], path=Path("job"))


def unlabelled(trace: RankTrace) -> RankTrace:
    none = np.empty(0, dtype=np.int64)
    columns = dict.fromkeys(("start", "end", "group", "stage", "micro_batch", "sequence"), none)
    return replace(
        trace, labels=replace(trace.labels, dimension=(), kind=(), on_device=np.empty(0, dtype=bool), **columns)
    )


def table(page: drawing.Page, title: str) -> Table:
    return next(one for one in page.tables if one.title.startswith(title))


def row_of(timeline: Timeline, rank: int, *, lanes: bool = False) -> list[tuple[Any, ...]]:
    """(kind, stage, micro-batch, start, end, wait before, its cause) of a rank's boxes, in milliseconds."""
    row = next(i for i, label in enumerate(timeline.rows) if label.startswith(f"rank {rank} "))
    boxes = timeline.lanes if lanes else timeline.boxes
    assert boxes is not None
    out = []
    for i in np.flatnonzero(boxes.row == row).tolist():
        cause = timeline.causes[boxes.cause[i]] if boxes.cause[i] >= 0 else ""
        times = [round(1e3 * float(column[i]), 6) for column in (boxes.start, boxes.end, boxes.wait)]
        out.append((KINDS[boxes.kind[i]], int(boxes.stage[i]), int(boxes.micro_batch[i]), *times, cause))
    return out


def test_who_is_to_blame_comes_first() -> None:
    page = diagnosis_page(diagnosed(pipeline(skew=60)))
    assert page.title == "job: rank 1 to blame"
    assert dict(page.summary)["answer"] == "slow rank"
    assert page.warnings == ("answer",)
    assert page.findings[0].startswith("Rank 1 (dp 0, pp 0, cp 0, tp 1) holds up the others")
    # Ranks 0 to 3 wait for 40, 10, 41 and 41 ms. Of that 30 + 30 + 41 end at rank 1, but for 1 ms of its transfer, and
    # at the end ranks 0 and 1 wait for the two that have computed.
    assert page.findings[1].startswith("In step 7 all ranks together wait 132 ms; ")
    assert "is, in the end, for rank 1" in page.findings[1]
    assert page.findings[2] == (
        "The chain from rank 2: it waits 41 ms for messages from rank 0; 30 ms of it because rank 0 waited in TP's "
        "all-reduce for rank 1, which computes longer."
    )
    chain = table(page, "Who waits for whom in step 7")
    assert chain.columns[2] == "because of rank 1"
    rows = {row[0].replace("\N{NO-BREAK SPACE}", " "): row[1:] for row in chain.rows}
    assert rows["rank 3 (dp 0 pp 1 cp 0 tp 1)"] == (
        "41 ms",
        "41 ms",
        "41 ms for messages from rank 1, which computes longer",
    )
    assert rows["rank 2 (dp 0 pp 1 cp 0 tp 0)"][:2] == ("41 ms", "30 ms")
    ends = table(page, "Whom all ranks wait for in the end")
    assert ends.rows[0][:2] == ("rank 1 (dp 0 pp 0 cp 0 tp 1)", "computes longer")
    assert table(page, "How the search came to rank 1").rows[-1][:2] == ("tp", "1")


def test_timelines_are_aligned_and_say_what_was_waited_for() -> None:
    timeline = diagnosis_page(diagnosed(pipeline(skew=60))).timeline
    assert timeline is not None
    assert timeline.rows == (
        "rank 1 (dp 0 pp 0 cp 0 tp 1), culprit",
        "rank 0 (dp 0 pp 0 cp 0 tp 0), tp peer",
        "rank 3 (dp 0 pp 1 cp 0 tp 1), pp peer",
        "rank 2 (dp 0 pp 1 cp 0 tp 0)",
    )
    assert timeline.span == pytest.approx(54e-3)
    # The culprit never waits inside of its forward; its transfer is part of that.
    assert row_of(timeline, 1)[0] == ("F", 0, 0, 0, 41, 0, "")
    # Its peer's forward is in two parts, with the wait between.
    tp = "Waits in TP's all-reduce for rank 1; rank 1 computes longer."
    assert row_of(timeline, 0)[:2] == [("F", 0, 0, 0, 10, 0, ""), ("F", 0, 0, 40, 41, 30, tp)]
    # Then it waits for the last collective, which takes 2 ms.
    assert row_of(timeline, 0)[2][:5] == ("DP", -1, -1, 52, 54)
    message, forward, last = row_of(timeline, 2)
    assert message == ("PP", -1, -1, 41, 42, 41, MESSAGE)
    assert forward == ("F", 1, 0, 42, 52, 0, "")
    assert last == ("DP", -1, -1, 52, 54, 0, "")
    lanes = row_of(timeline, 2, lanes=True)
    assert lanes[0] == ("PP", -1, -1, 41, 42, 0, "A message from rank 0.")
    assert row_of(timeline, 1, lanes=True)[0][-1] == "TP's all-reduce: this rank is the last to come."
    assert row_of(timeline, 0, lanes=True)[0] == (
        "TP",
        -1,
        -1,
        10,
        41,
        0,
        "TP's all-reduce: rank 1 is the last to come.",
    )


def test_without_labels_it_is_computing_and_transfers() -> None:
    timeline = diagnosis_page(diagnosed([unlabelled(trace) for trace in pipeline()])).timeline
    assert timeline is not None
    assert [box[:1] + box[3:6] for box in row_of(timeline, 0)] == [
        ("WORK", 0, 10, 0),
        ("TP", 40, 41, 30),
        ("DP", 52, 54, 11),
    ]
    assert timeline.num_chunks == 1


def test_a_pause_of_the_host() -> None:
    page = diagnosis_page(diagnosed(pipeline(garbage=True)))
    assert page.timeline is not None
    assert row_of(page.timeline, 1)[0] == ("F", 0, 0, 30, 41, 30, "Nothing runs: the rank collects garbage.")
    assert "Pauses of the host" in {one.title.split(",")[0] for one in page.heat_maps}
    assert page.findings[2].endswith("for rank 1, which collects garbage.")


def test_heat_maps_have_all_ranks_in_their_order() -> None:
    found = diagnosed(replicas())
    page = diagnosis_page(found)
    titles = [one.title for one in page.heat_maps]
    assert titles[:3] == [
        f"{what}, seconds per step" for what in ("Longer than its peers", "Computing", "Waiting for other ranks")
    ]
    computing, waiting = page.heat_maps[1], page.heat_maps[2]
    assert computing.values.shape == (2, 1, 1, 2)
    assert computing.values.ravel() == pytest.approx([60e-3, 90e-3, 60e-3, 60e-3])
    assert waiting.values.ravel() == pytest.approx([30e-3, 0, 30e-3, 30e-3])
    assert all(one.marked == ((0, 0, 0, 1),) for one in page.heat_maps)


def test_a_rank_without_a_trace_is_left_out() -> None:
    page = diagnosis_page(diagnosed([trace for trace in pipeline() if trace.rank != 0]))
    assert page.timeline is not None
    assert not any(label.startswith("rank 0 ") for label in page.timeline.rows)
    assert np.isnan(page.heat_maps[-1].values[0, 0, 0, 0])
    assert any("rank 0, which has no trace" in cell for row in table(page, "Who waits").rows for cell in row)
    page_html(page)


@pytest.mark.parametrize(
    ("job", "answer"),
    [
        (jobs.Job(tp=2, dp=2), "healthy"),
        (jobs.Job(tp=2, dp=4, slow={1: 1.6, 6: 1.4}), "several culprits"),
        (jobs.Job(tp=1, dp=8, steps=6, slow_in_step={(i, i): 2.0 for i in range(6)}), "rotating"),
        (jobs.Job(pp=4, dp=2, head=1.6), "uneven partition"),
        (jobs.Job(), "healthy"),
    ],
)
def test_every_answer_has_a_page(job: jobs.Job, answer: str, tmp_path: Path) -> None:
    found = diagnose_traces(jobs.write(job, tmp_path), workers=1)
    page = diagnosis_page(found)
    assert page.timeline is not None
    assert page.findings
    page_html(page)
    if job.size > 1:
        assert dict(page.summary)["answer"] == answer
        assert page.timeline.boxes.row.max() == job.size - 1


def test_the_worst_step_is_shown(tmp_path: Path) -> None:
    job = jobs.Job(tp=2, dp=2, steps=5, slow={3: 1.3}, slow_in_step={(1, 3): 1.5})
    found = diagnose_traces(jobs.write(job, tmp_path), workers=1)
    assert worst_step(found) == 2
    assert diagnosis_page(found).timeline.title == "Step 2: all ranks"


def test_peers_of_all_dimensions_are_shown() -> None:
    grid = Grid(tp=8, cp=4, pp=16, dp=32)
    shown = around(grid, (5000,), range(grid.size))
    assert len(shown) == MOST_ROWS
    assert shown[0] == (5000, "")
    at = grid.coordinates(5000)
    for rank, relation in shown[1:]:
        other = grid.coordinates(rank)
        differ = [name for name in at._fields if getattr(at, name) != getattr(other, name)]
        assert differ == [relation.split()[0]]
    counts = {name: sum(relation == f"{name} peer" for _, relation in shown) for name in at._fields}
    assert min(counts.values()) == 3  # of cp there are no more
    assert around(grid, (5000, 7), [7, 8])[0] == (7, "")
    assert around(grid, (5000,), [7, 8]) == []


def action_logs() -> Diagnosis:
    """tp 2, pp 2, one micro-batch. Rank 1 needs 40 ms for its forward, all else takes 10; messages take 1."""
    grid = Grid(tp=2, pp=2)
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    computed = {
        rank: [
            Computed(Action(forward, stage, 0), 40e-3 if rank == 1 else 10e-3, 0.0, 0.0),
            Computed(Action(backward, stage, 0), 10e-3, 5e-3 if rank == 0 else 0.0, 0.0),
        ]
        for rank, stage in ((0, 0), (1, 0), (2, 1), (3, 1))
    }
    step = make_replay(grid, 3, 0.1, computed, {(0, 2): 1e-3, (2, 0): 1e-3, (1, 3): 1e-3, (3, 1): 1e-3})
    assert step is not None
    work = np.zeros((1, 4, len(Work)))
    work[0, :, Work.GEMM] = [20e-3, 50e-3, 20e-3, 20e-3]
    wait = np.zeros((1, 4, len(AWAITED)))
    wait[0, :, 0] = [30e-3, 0, 0, 0]
    none = np.zeros((1, 4, len(HOST))), np.zeros((1, 4, len(AWAITED)))
    accounts = Accounts(grid, (3,), work, *none, wait, attention_known=False)
    verdict, suspects = judge(accounts, replays=[step])
    return Diagnosis(
        "action logs",
        Path("run"),
        Layout(grid, "given"),
        (0, 1, 2, 3),
        verdict,
        suspects,
        accounts,
        (3,),
        replays=(step,),
        device="cpu",
    )


def test_action_logs_are_played_again() -> None:
    page = diagnosis_page(action_logs())
    assert page.title == "run: rank 1 to blame"
    timeline = page.timeline
    assert timeline is not None
    assert timeline.title.startswith("Step 3, played again from its durations")
    # Forward 40 ms with the TP peer, message 1; forward and backward 20 on the second stage, message 1; backward.
    forward, backward = row_of(timeline, 0)
    assert forward == ("F", 0, 0, 0, 10, 0, "")
    assert backward[:5] == ("B", 0, 0, 62, 72)  # its host is late while it waits: that costs nothing
    assert backward[5] == 52
    assert backward[6] == "Waits for rank 1, its TP or CP peer, which computes longer."
    assert row_of(timeline, 1)[1][6].startswith("Waits for a message from rank 3: the result of 1B0.")
    assert row_of(timeline, 2)[0] == ("F", 1, 0, 41, 51, 41, "Waits for a message from rank 0: the result of 0F0.")
    assert {one.title.split(",")[0] for one in page.heat_maps} >= {"Computing", "Waiting for other ranks"}
    assert [part[0] for part in page.splits[0].parts] == ["computing"]
    assert not any(one.title.startswith("Who waits") for one in page.tables)


def test_a_browser_shows_what_a_rank_waits_for(browser: Any, tmp_path: Path) -> None:
    write_page(diagnosis_page(diagnosed(pipeline(skew=60))), tmp_path / "page.html")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    # What is written on the timeline, and where.
    page.add_init_script(
        "window.written = []; const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        " if (this.canvas.closest('#timeline')) window.written.push([text, x, y]); write.apply(this, arguments); };"
    )
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    plot = page.locator("#timeline .plot")
    box, shown = plot.bounding_box(), plot.evaluate("host => ({...host.dataset})")

    def tip(row: int, time: float) -> str:
        start, end, left, right, top, pitch = (
            float(shown[name]) for name in ("from", "to", "left", "right", "top", "pitch")
        )
        x = left + (time - start) / (end - start) * (right - left)
        page.mouse.move(box["x"] + x, box["y"] + top + (row + 0.4) * pitch)
        return " ".join(page.locator("#tip").inner_text().split())

    assert "Waits in TP's all-reduce for rank 1; rank 1 computes longer." in tip(1, 25e-3)
    assert MESSAGE in tip(3, 25e-3)
    assert tip(0, 20e-3).startswith("0F0 forward of stage 0")
    # Every rank has one forward of micro-batch 0, be it in one part or in two: its number is there once.
    numbers = {(x, y) for text, x, y in page.evaluate("written") if text == "0" and y > float(shown["top"])}
    assert len(numbers) == len({y for _, y in numbers}) == 4
    page.check("#lanes")
    shown = plot.evaluate("host => ({...host.dataset})")
    assert "pitch" in shown
    assert complaints == []
    page.close()
