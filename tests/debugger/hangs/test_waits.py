"""From the reports of ranks to the rank to blame: chains, circles, silence, disagreement, and how it is printed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fourfold.debugger.hangs import Entry, Line, RankReport, Wait, diagnose, read_reports
from fourfold.debugger.hangs import report_file as path_of
from fourfold.layout import Grid, join_ranks
from fourfold.report.hangs import hang_text

Place = tuple[str, tuple[int, int]]


def report(
    rank: int,
    *,
    started: dict[Place, int] | None = None,
    waits: tuple[Place, ...] = (),
    kind: str = "all_gather",
    where: str = "",
    doing: str = "step 7",
) -> RankReport:
    """A rank that has started so many collectives of each group, and waits for the last one of some.

    A place is a dimension and the first and last rank of a group, or "send" or "receive" and the ends of a message.
    """
    lines, waiting = [], []
    for place, count in (started or {}).items():
        name, ranks = place
        way: Any = name if name in ("send", "receive") else ""
        dimension = "pp" if way else name
        entry = {
            "kind": way or kind, "number": count - 1, "stage": 2, "micro_batch": 5, "tensor": "[8] float32",
            "seconds": 30.0 + rank, "ended": place not in waits,
        }  # fmt: skip
        lines.append(Line(dimension, ranks, way, count, (Entry(**entry),) if count else ()))
        if place in waits:
            waiting.append(Wait(**entry, dimension=dimension, ranks=ranks, way=way))
    where = where or f"work.py:{rank} f"
    return RankReport(rank, "host", 1, doing, 31.0, where, tuple(waiting), tuple(lines))


def by_rank(*found: RankReport) -> dict[int, RankReport]:
    return {r.rank: r for r in found}


def causes(reports: dict[int, RankReport], grid: Grid) -> list[tuple[int, str, int]]:
    return [(cause.rank, cause.what, cause.num_waiting) for cause in diagnose(reports, grid).causes]


WORLD = ("world", (0, 3))


def test_who_has_not_started_a_collective_is_the_cause() -> None:
    reports = by_rank(
        *(report(r, started={WORLD: 4}, waits=(WORLD,)) for r in (0, 1, 3)), report(2, started={WORLD: 3})
    )
    assert causes(reports, Grid(dp=4)) == [(2, "work.py:2 f", 3)]
    (stuck,) = diagnose(reports, Grid(dp=4)).stuck
    assert (stuck.missing, stuck.started, stuck.calls) == ((2,), {0: 30, 1: 31, 3: 33}, {})


def test_who_has_started_nothing_at_all_is_missing_too() -> None:
    reports = by_rank(report(0, started={("tp", (0, 1)): 1}, waits=(("tp", (0, 1)),)), report(1))
    assert causes(reports, Grid(tp=2)) == [(1, "work.py:1 f", 1)]


def chain() -> dict[int, RankReport]:
    """P74, tp2 pp4: rank 0 waits for the second stage, that for the third, that for the fourth, where 7 is missing."""
    fourth = ("tp", (6, 7))
    reports = [report(7, started={fourth: 8})]
    reports.append(report(6, started={fourth: 9, ("send", (6, 4)): 2}, waits=(fourth,)))
    for rank in (4, 2, 0):
        ahead = ("receive", (rank + 2, rank))
        started = {ahead: 3, ("send", (rank, rank - 2)): 2}
        reports.append(report(rank, started=started, waits=(ahead,)))
    return by_rank(*reports, *(report(rank, started={}, where="elsewhere") for rank in (1, 3, 5)))


def test_a_chain_of_waits_is_followed_to_its_end() -> None:
    assert causes(chain(), Grid(tp=2, pp=4)) == [(7, "work.py:7 f", 4)]
    assert diagnose(chain(), Grid(tp=2, pp=4)).stuck[0].missing == (7,)


def test_a_rank_that_is_gone_ends_the_chain() -> None:
    """P74: the first stage has died, and others wait for it, directly or not."""
    reports = chain()
    del reports[6]
    assert causes(reports, Grid(tp=2, pp=4)) == [(6, "no report: dead or frozen", 3)]
    assert causes({}, Grid(dp=2)) == [(0, "no report: dead or frozen", 0), (1, "no report: dead or frozen", 0)]


def test_the_silent_come_before_the_busy_and_those_for_whom_most_wait_first() -> None:
    """tp2 cp2 dp2: of the pairs in tp, 1, 3 and 5 are late; 5 makes 4 late in cp, and 4 makes 6 wait, too."""
    tp = [("tp", (r, r + 1)) for r in range(0, 8, 2)]
    cp = ("cp", (4, 6))
    reports = by_rank(
        report(0, started={tp[0]: 2}, waits=(tp[0],)), report(1, started={tp[0]: 1}),
        report(2, started={tp[1]: 2}, waits=(tp[1],)), report(3, started={tp[1]: 1}),
        report(4, started={tp[2]: 2}, waits=(tp[2],)), report(5, started={tp[2]: 1}),
        report(6, started={cp: 1}, waits=(cp,)), report(7),
    )  # fmt: skip
    grid = Grid(tp=2, cp=2, dp=2)
    assert [(rank, waiting) for rank, _, waiting in causes(reports, grid)] == [(5, 2), (1, 1), (3, 1)]
    del reports[3]
    assert [(rank, waiting) for rank, _, waiting in causes(reports, grid)] == [(3, 1), (5, 2), (1, 1)]


def test_ranks_that_wait_for_one_another_are_all_named() -> None:
    """Two groups entered in another order: a deadlock. Rank 4 only waits for them."""
    first, second, outside = ("tp", (0, 1)), ("cp", (0, 2)), ("dp", (0, 4))
    third, fourth = ("tp", (2, 3)), ("cp", (1, 3))
    reports = by_rank(
        report(0, started={first: 1}, waits=(first,)),
        report(1, started={fourth: 1}, waits=(fourth,)),
        report(2, started={second: 1}, waits=(second,)),
        report(3, started={third: 1}, waits=(third,)),
        report(4, started={outside: 1}, waits=(outside,)),
    )
    assert causes(reports, Grid(tp=2, cp=2, dp=2)) == [
        (0, "waits in all_gather [8] float32 of tp 0-1 for 1", 4),
        (1, "waits in all_gather [8] float32 of cp 1, 3 for 3", 4),
        (2, "waits in all_gather [8] float32 of cp 0, 2 for 0", 4),
        (3, "waits in all_gather [8] float32 of tp 2-3 for 2", 4),
    ]


def test_ranks_that_call_different_things_are_all_shown_the_few_first() -> None:
    reports = by_rank(*(report(r, started={WORLD: 4}, waits=(WORLD,)) for r in (0, 1, 3)))
    reports[2] = report(2, started={WORLD: 4}, waits=(WORLD,), kind="all_reduce", where="mine.py:8 g")
    hang = diagnose(reports, Grid(dp=4))
    assert [cause.rank for cause in hang.causes] == [2, 0, 1, 3]
    assert hang.causes[0].what == "calls all_reduce [8] float32 at mine.py:8 g"
    text = hang_text(hang, head="")
    assert "all_gather [8] float32 by 0-1, 3 but all_reduce [8] float32 by 2" in text


def test_a_rank_waits_for_all_that_must_take_its_messages() -> None:
    ahead, behind = ("send", (1, 2)), ("send", (1, 0))
    reports = by_rank(
        report(0, started={("receive", (1, 0)): 4}),
        report(1, started={ahead: 4, behind: 4}, waits=(ahead, behind)),
        report(2, started={("receive", (1, 2)): 3}),
    )
    assert causes(reports, Grid(pp=3)) == [(2, "work.py:2 f", 1)]


def test_a_message_that_was_sent_makes_nobody_wait_for_its_sender() -> None:
    message = ("receive", (0, 1))
    reports = by_rank(report(0, started={("send", (0, 1)): 4}), report(1, started={message: 4}, waits=(message,)))
    assert causes(reports, Grid(pp=2)) == [(0, "work.py:0 f", 0)]


def test_all_have_started_and_nothing_moves() -> None:
    reports = by_rank(*(report(r, started={WORLD: 4}, waits=(WORLD,)) for r in range(4)))
    hang = diagnose(reports, Grid(dp=4))
    assert hang.causes == ()
    lines = hang_text(hang, head="head").splitlines()
    assert lines[2] == "All ranks wait, and have started what they wait for: a link, or a device, stands still."
    assert lines[-1].endswith("0-3 (33.0 s)     none")


def test_where_nobody_waits_those_who_compute_are_named() -> None:
    assert causes(by_rank(report(0)), Grid()) == [(0, "work.py:0 f", 0)]
    assert causes(by_rank(report(0, doing="what follows step 6")), Grid()) == [
        (0, "work.py:0 f (what follows step 6)", 0)
    ]


def test_the_text() -> None:
    text = hang_text(diagnose(chain(), Grid(tp=2, pp=4)), head="HANG: step 7 has taken 31.0 s.")
    assert (
        text
        == """\
HANG: step 7 has taken 31.0 s.

cause: rank 7 (tp1 cp0 pp3 dp0): work.py:7 f; 4 wait for it

group     call                    stage  micro-batch  number  started (since)  missing
tp 6-7    all_gather [8] float32  2      5            8       6 (36.0 s)       7: work.py:7 f
pp 2 > 0  receive                 2      5            2       0 (30.0 s)       2: waits in receive of pp 4 > 2
pp 4 > 2  receive                 2      5            2       2 (32.0 s)       4: waits in receive of pp 6 > 4
pp 6 > 4  receive                 2      5            2       4 (34.0 s)       6: waits in all_gather [8] float32 of tp 6-7"""  # noqa: E501
    )


def test_damaged_and_missing_files_are_left_out(tmp_path: Path) -> None:
    one = report(1, started={WORLD: 4}, waits=(WORLD,))
    whole = msgspec.json.encode({**msgspec.to_builtins(one), "from_the_future": 1})
    path_of(tmp_path, 1).write_bytes(whole)
    path_of(tmp_path, 2).write_bytes(whole[:-20])
    path_of(tmp_path, 3).write_bytes(whole.replace(b'"pid":1', b'"pid":"x"'))
    assert read_reports(tmp_path, 5) == {1: one}


def test_sixteen_thousand_ranks_take_seconds_and_few_lines() -> None:
    grid = Grid(tp=8, pp=16, dp=128)
    everybody = ("world", (0, grid.size - 1))
    late = set(range(0, grid.size, 64))
    reports = {}
    for rank in range(grid.size):
        if rank in late:
            reports[rank] = report(rank, started={everybody: 3})
        else:
            reports[rank] = report(rank, started={everybody: 4}, waits=(everybody,))
    started = time.process_time()
    text = hang_text(diagnose(reports, grid), head="")
    assert time.process_time() - started < 5
    assert len(text.splitlines()) < 30
    assert len(text) < 100_000
    assert "and 244 more ranks" in text


@pytest.mark.parametrize(("ranks", "text"), [((), ""), ((4,), "4"), ((3, 1, 2, 0), "0-3"), ((0, 2, 3, 9), "0, 2-3, 9")])
def test_ranks_in_short(ranks: tuple[int, ...], text: str) -> None:
    assert join_ranks(ranks) == text
