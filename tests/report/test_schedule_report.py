"""What `fourfold schedule` prints: the JSON object's keys are a format, and the drawing is the played schedule."""

from __future__ import annotations

import json
import re

import pytest

from fourfold.layout import Action, Schedule, generate, play
from fourfold.layout.actions import COMPUTE
from fourfold.report.schedule import schedule_json, schedule_text

SCHEDULES = [
    generate(pp=4, v=2, num_micro_batches=9),
    generate(pp=4, v=2, num_micro_batches=3),
    generate(pp=3, v=2, num_micro_batches=6, kind="afab", zero=3),
    generate(pp=2, num_micro_batches=12, kind="1f1b"),
    generate(pp=1, num_micro_batches=1),
    generate(pp=2, v=2, num_micro_batches=4, num_frozen_stages=2),
    generate(pp=4, num_micro_batches=6, kind="zb-h1"),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"pp{s.pp}-v{s.v}-nmb{s.num_micro_batches}-{s.kind}")
class TestEach:
    def test_json_has_exactly_the_documented_keys(self, schedule: Schedule) -> None:
        found = json.loads(json.dumps(schedule_json(schedule)))
        timeline = play(schedule)
        assert found == {
            "pp": schedule.pp,
            "v": schedule.v,
            "nmb": schedule.num_micro_batches,
            "kind": schedule.kind,
            "nc": schedule.nc,
            "rounds": list(schedule.rounds),
            "zero": schedule.zero,
            "bubble_over_compute": timeline.bubble_over_compute,
            "bubble_over_total": timeline.bubble_over_total,
            "in_flight_peak": list(schedule.in_flight_peak),
            "warmup": list(schedule.warmup),
            "reduce_scatters": list(schedule.reduce_scatters),
            "fallback": schedule.fallback,
            "actions": found["actions"],
        }
        assert tuple(tuple(map(Action.parse, actions)) for actions in found["actions"]) == schedule.actions

    def test_drawn_rows_are_what_is_played(self, schedule: Schedule) -> None:
        lines = schedule_text(schedule).splitlines()
        rows = lines[-schedule.pp :]
        width = len(f"F{schedule.num_micro_batches - 1}.{schedule.v - 1} ")
        timeline = play(schedule)
        for pp_rank, row in enumerate(rows):
            assert int(row[:4]) == pp_rank
            drawn = row[6:].ljust(width * round(timeline.step_time))
            cells = [drawn[i : i + width].strip() for i in range(0, len(drawn), width)]
            starts = {
                round(timeline.span(action)[0]): f"{action.kind}{action.micro_batch}.{action.stage // schedule.pp}"
                for action in schedule.actions[pp_rank]
                if action.kind in COMPUTE
            }
            assert {time: cell for time, cell in enumerate(cells) if cell not in ("", "--", ".")} == starts
            assert cells.count(".") == timeline.idle[pp_rank]

    def test_table_per_rank(self, schedule: Schedule) -> None:
        lines = schedule_text(schedule).splitlines()
        head = lines.index("rank  warm-up  in flight  reduce-scatters")
        for pp_rank in range(schedule.pp):
            assert list(map(int, lines[head + 1 + pp_rank].split())) == [
                pp_rank,
                schedule.warmup[pp_rank],
                schedule.in_flight_peak[pp_rank],
                schedule.reduce_scatters[pp_rank],
            ]


def test_zero_bubble_as_drawn() -> None:
    # By hand: the first rank waits for 3 units for the first gradient, the others before their first forward or after.
    text = schedule_text(generate(pp=4, num_micro_batches=4, kind="zb-h1")).splitlines()
    rows = [re.sub(" +", " ", row) for row in text[-4:]]
    assert rows[0] == " 0 F0.0 F1.0 F2.0 F3.0 . . . I0.0 W0.0 I1.0 W1.0 I2.0 W2.0 I3.0 W3.0"
    assert rows[3] == " 3 . . . F0.0 I0.0 F1.0 I1.0 F2.0 I2.0 F3.0 I3.0 W0.0 W1.0 W2.0 W3.0"
    assert "computations in time, F, I or W (backward's halves) with micro-batch.chunk" in "\n".join(text)
    assert "(backward = 2 forwards in equal halves, messages free)" in text[1]


def test_figure_2_as_drawn() -> None:
    # By hand from Figure 2: rank 2 begins its first backward at 6, rank 1 at 8, rank 0 at 10 after a wait from 8 on.
    rows = [re.sub(" +", " ", row) for row in schedule_text(generate(pp=3, v=2, num_micro_batches=6)).splitlines()[-3:]]
    assert rows[0].startswith(" 0 F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 . . B0.1 -- F5.0 B1.1 -- F3.1 B2.1")
    assert rows[2].startswith(" 2 . . F0.0 F1.0 F2.0 F0.1 B0.1 -- F1.1 B1.1 -- F2.1 B2.1 -- F3.0 B0.0")


def test_head_says_what_runs_and_why() -> None:
    lines = schedule_text(generate(pp=4, v=2, num_micro_batches=9, zero=2)).splitlines()
    assert lines[0] == "flexible: pp 4, v 2, 9 micro-batches in rounds of 5+4, ZeRO-2"
    assert lines[1].startswith("bubble: idle/compute 16.67%, idle/total 14.29%")
    lines = schedule_text(generate(pp=4, v=2, num_micro_batches=9, nc=2)).splitlines()
    assert lines[0] == "afab: pp 4, v 2, 9 micro-batches in rounds of 9, ZeRO-1"
    assert lines[1] == (
        "note: nc = 2 is smaller than pp = 4: such rounds would deadlock, so all forwards run first (afab)"
    )


def test_folded_drawing_has_all_of_it_in_lines_that_fit() -> None:
    schedule = generate(pp=4, v=2, num_micro_batches=9)
    whole = schedule_text(schedule).splitlines()[-4:]
    folded = schedule_text(schedule, width=80).splitlines()
    drawing = folded[next(i for i, line in enumerate(folded) if line.startswith("computations")) + 1 :]
    assert max(map(len, drawing)) <= 80
    for rank, row in enumerate(whole):
        blocks = [line[6:] for line in drawing if line.startswith(f"{rank:>4}  ")]
        assert len(blocks) > 2
        assert "".join(block.ljust((80 - 6) // 5 * 5) for block in blocks).rstrip() == row[6:]


def test_rounds_of_another_size_than_asked_are_named() -> None:
    schedule = generate(pp=4, v=2, num_micro_batches=9, nc=4)
    assert "note: nc = 4 would leave a short round" in schedule_text(schedule, asked_nc=4)
    assert "note" not in schedule_text(schedule, asked_nc=5)
