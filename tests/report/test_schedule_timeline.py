"""What pictures and pages of a schedule show: boxes and waits as played, causes, and true sentences."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fourfold.layout import Action, Kind, Schedule, generate, play
from fourfold.layout.actions import COMPUTE, ENDS
from fourfold.report.drawing import KINDS, Timeline
from fourfold.report.schedule import schedule_page, schedule_timeline

SCHEDULES = {
    "figure 2": generate(pp=3, v=2, num_micro_batches=6),
    "remainder": generate(pp=4, v=2, num_micro_batches=9),
    "fallback": generate(pp=4, v=2, num_micro_batches=3),
    "afab zero 3": generate(pp=3, v=2, num_micro_batches=6, kind="afab", zero=3),
    "1f1b": generate(pp=4, num_micro_batches=12, kind="1f1b"),
    "zb-h1": generate(pp=4, num_micro_batches=8, kind="zb-h1"),
    "one rank": generate(pp=1, v=2, num_micro_batches=2),
    "frozen": generate(pp=2, v=2, num_micro_batches=4, num_frozen_stages=2),
    "frozen rank": generate(pp=4, num_micro_batches=6, num_frozen_stages=2),
    "all frozen": generate(pp=2, v=2, num_micro_batches=4, num_frozen_stages=4),
}

# Figure 2 of the paper (facts 2.2) by hand: micro-batch.chunk, F for 1 and B for 2 units of time, a dot for 1 of idle.
FIGURE_2 = (
    "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 . . B0.1 F5.0 B1.1 F3.1 B2.1 F4.1 B0.0 F5.1 B1.0 . B2.0 . B3.1 . B4.1 . "
    "B5.1 B3.0 B4.0 B5.0",
    ". F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 . B0.1 F3.0 B1.1 F4.0 B2.1 F5.0 B0.0 F3.1 B1.0 F4.1 B2.0 F5.1 B3.1 . B4.1 . B5.1 "
    "B3.0 B4.0 B5.0 . .",
    ". . F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.0 B0.0 F4.0 B1.0 F5.0 B2.0 F3.1 B3.1 F4.1 B4.1 F5.1 B5.1 B3.0 "
    "B4.0 B5.0 . . . .",
)


def boxes_of(timeline: Timeline) -> list[tuple[int, str, int, int, float, float, float, str]]:
    """(row, kind, stage, micro-batch, start, end, wait, cause) of every box."""
    boxes = timeline.boxes
    columns = (boxes.row, boxes.kind, boxes.stage, boxes.micro_batch, boxes.start, boxes.end, boxes.wait, boxes.cause)
    return [
        (row, KINDS[kind], stage, micro_batch, start, end, wait, "" if cause < 0 else timeline.causes[cause])
        for row, kind, stage, micro_batch, start, end, wait, cause in zip(*(c.tolist() for c in columns), strict=True)
    ]


def test_boxes_of_figure_2_by_hand() -> None:
    expected = []
    for rank, row in enumerate(FIGURE_2):
        now = wait = 0.0
        for entry in row.split():
            if entry == ".":
                now, wait = now + 1, wait + 1
                continue
            kind, (micro_batch, chunk) = entry[0], map(int, entry[1:].split("."))
            end = now + {"F": 1, "B": 2}[kind]
            expected.append((rank, kind, chunk * 3 + rank, micro_batch, now, end, wait))
            now, wait = end, 0.0
        assert now == 42
    timeline = schedule_timeline(SCHEDULES["figure 2"])
    assert [box[:-1] for box in boxes_of(timeline)] == expected
    assert (timeline.unit, timeline.rows, timeline.num_chunks, timeline.pp) == ("F", ("pp 0", "pp 1", "pp 2"), 2, 3)
    assert timeline.span == 42
    assert timeline.lanes is None


def test_causes_of_figure_2_by_hand() -> None:
    causes = {(row, start): cause for row, *_, start, _, _, cause in boxes_of(schedule_timeline(SCHEDULES["figure 2"]))}
    # The first forward of rank 2 waits for that of rank 1; the first backward of rank 0 for that of rank 1.
    assert causes[2, 2.0] == "waits for the output of stage 1 for micro-batch 0 (1F0 on pipeline rank 1)"
    assert causes[0, 10.0] == "waits for the gradient of stage 4 for micro-batch 0 (4B0 on pipeline rank 1)"
    assert causes[1, 8.0] == "waits for the gradient of stage 5 for micro-batch 0 (5B0 on pipeline rank 2)"
    assert causes[0, 0.0] == ""


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
class TestEach:
    def test_boxes_are_what_is_played(self, schedule: Schedule) -> None:
        played = play(schedule)
        found = boxes_of(schedule_timeline(schedule))
        expected = {}
        for rank, actions in enumerate(schedule.actions):
            expected |= {action: (rank, *played.span(action)) for action in actions if action.kind in COMPUTE}
        assert {Action(Kind(k), s, m): (r, start, end) for r, k, s, m, start, end, *_ in found} == expected
        assert len(found) == len(expected)

    def test_every_wait_ends_when_its_cause_does(self, schedule: Schedule) -> None:
        played = play(schedule)
        free = dict.fromkeys(range(schedule.pp), 0.0)
        for row, kind, stage, micro_batch, start, end, wait, cause in boxes_of(schedule_timeline(schedule)):
            assert wait == start - free[row]
            assert bool(cause) == (wait > 0)
            free[row] = end
            if not cause:
                continue
            match = re.search(r"\((\w+) on pipeline rank (\d+)\)", cause)
            assert match is not None
            needed = Action.parse(match[1])
            assert played.span(needed)[1] == start
            assert int(match[2]) == schedule.rank_of(needed.stage)
            assert (needed.micro_batch, needed.stage) == (micro_batch, stage + (-1 if kind == "F" else 1))

    def test_memory_counts_what_is_in_flight(self, schedule: Schedule) -> None:
        played = play(schedule)
        memory = schedule_page(schedule).memory
        assert memory is not None
        assert memory.quantity != "bytes"
        for rank, actions in enumerate(schedule.actions):
            trained = [a for a in actions if a.kind in COMPUTE and a.stage >= schedule.num_frozen_stages]
            begun = [played.span(a)[0] for a in trained if a.kind is Kind.FORWARD]
            done = [played.span(a)[1] for a in trained if a.kind in ENDS]
            times, counts = memory.times[rank], memory.bytes[rank]
            assert counts.shape == (1, len(times))
            assert (np.diff(times) > 0).all()
            for time, count in zip(times, counts[0], strict=True):
                assert count == sum(t <= time for t in begun) - sum(t <= time for t in done)
            assert counts.max(initial=0) == schedule.in_flight_peak[rank]

    def test_idle_times_of_the_table_add_up(self, schedule: Schedule) -> None:
        played = play(schedule)
        (table,) = schedule_page(schedule).tables
        assert len(table.rows) == schedule.pp
        for rank, (name, *cells) in enumerate(table.rows):
            compute, *idle = (float(cell.removesuffix(" F")) for cell in cells[:4])
            assert (name, compute, sum(idle)) == (str(rank), played.compute[rank], played.idle[rank])
            assert min(idle) >= 0
            assert cells[4:] == [str(schedule.warmup[rank]), str(schedule.in_flight_peak[rank])]


def test_findings_of_figure_2_by_hand() -> None:
    page = schedule_page(SCHEDULES["figure 2"])
    # 36 F of work and 6 F of idle time on each of 3 ranks: 6/36 and 6/42.
    assert page.findings[0] == (
        "The step takes 42 F. A rank computes for 36 F of them and idles for 6 F: 16.67% of computing time, 14.29% of "
        "all time. That is (pp - 1) / (micro-batches x chunks) = 16.67%, the bubble of a full pipeline."
    )
    # Counted in FIGURE_2: 2 dots before the first B in each row, none up to the last F, then 4.
    assert page.findings[1].startswith("Of all idle time, 33% is before a rank's first backward")
    assert "0% between that and its last forward (steady state), and 67% after both" in page.findings[1]
    assert page.findings[2] == (
        "The longest idle stretch is 4 F at the end of pipeline rank 2, which has nothing left to do."
    )
    assert page.findings[3] == (
        "Pipeline rank 0 holds most activations, 8 (micro-batch, chunk) pairs; the least that a rank holds is 4. "
        "A rank runs 7 (rank 0) to 3 (rank 2) forwards before its first backward, the earlier the more."
    )
    assert page.memory is not None
    assert page.memory.peaks[0] == "at most 8 pairs, first at 7 F, when 8 forwards have begun and 0 backwards are done"
    assert page.title == "flexible, pp 3, v 2, 6 micro-batches in rounds of 3"
    assert dict(page.summary)["bubble, idle over all time"] == "14.29%"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("fallback", "This is not what was asked for: 3 micro-batches are fewer than pp = 4"),
        ("fallback", "A full pipeline would have (pp - 1) / (micro-batches x chunks) = 50.00%."),
        ("one rank", "No rank ever waits: there is no bubble."),
        ("afab zero 3", "All ranks hold as much: at most 12 (micro-batch, chunk) pairs. No backward begins before"),
        ("zb-h1", "With whole backwards it would be (pp - 1) / (micro-batches x chunks) = 37.50% of computing time."),
        (
            "zb-h1",
            "The longest idle stretch is 3 F on pipeline rank 0, up to 7 F: 0I0 waits for the gradient of stage 1",
        ),
        ("frozen", "The first 2 of 4 stages have no backward."),
        ("frozen rank", "Stages that are not trained hold none."),
        ("all frozen", "No activations are held: nothing is trained."),
    ],
)
def test_sentences(name: str, sentence: str) -> None:
    assert sentence in " ".join(schedule_page(SCHEDULES[name]).findings)


def test_published_peaks_in_flight() -> None:
    # facts 2.2, simulated there: 143 .. 113 for pp 16, v 8, 32 micro-batches, and 5.86 % of computing time.
    page = schedule_page(generate(pp=16, v=8, num_micro_batches=32, messages=False))
    assert page.memory is not None
    assert [counts.max() for counts in page.memory.bytes] == list(range(143, 112, -2))
    assert dict(page.summary)["bubble, idle over computing"] == "5.86%"
