"""Jobs that are played by hand in `jobs.py`, with something slow in them: the answers that other tools get wrong.

The cases are those of the table in peers-measured.md 2.5, and a few more.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fourfold.debugger.slow import Diagnosis, diagnose_traces
from fourfold.layout import Grid
from tests.debugger.jobs import Job, Style, play, write

OLD = "ncclKernel_{}_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)"


def diagnosed(job: Job, folder: Path, style: Style | None = None, layout: Grid | None = None) -> Diagnosis:
    return diagnose_traces(write(job, folder, style), layout=layout, workers=1)


def blamed(found: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    return [(culprit.kind, culprit.ranks) for culprit in found.verdict.culprits]


@pytest.mark.parametrize(
    ("job", "style", "culprit"),
    [
        (Job(tp=2, dp=4, slow={7: 1.5}), Style(names=OLD), 7),
        (Job(tp=2, dp=4, slow={7: 1.5}), Style(), 7),
        (Job(tp=2, dp=4, slow={7: 1.5}), Style(skew_us={2: 60_000.0, 3: 60_000.0}), 7),
        (Job(tp=2, pp=2, dp=2, slow={5: 1.5}), Style(), 5),
        (Job(tp=2, pp=4, dp=2, slow={12: 1.5}), Style(), 12),
        (Job(pp=4, dp=2, slow={5: 1.5}), Style(), 5),
        (Job(tp=2, dp=4, slow={7: 1.5}), Style(distributed=False), 7),
        (Job(tp=2, dp=4, slow={0: 1.5}), Style(compress=True), 0),
        (Job(tp=2, pp=2, dp=2, slow={5: 1.5}), Style(sequence=False), 5),
    ],
    ids=["old names", "new names", "skew", "pp 2", "pp 4", "no tp", "no info", "packed", "by order"],
)
def test_slow_rank_is_found(tmp_path: Path, job: Job, style: Style, culprit: int) -> None:
    found = diagnosed(job, tmp_path, style)
    assert found.verdict.answer == "slow rank"
    assert blamed(found) == [("compute", (culprit,))]
    assert found.verdict.culprits[0].factor == pytest.approx(1.5, rel=0.03)


@pytest.mark.parametrize("job", [Job(tp=2, dp=4), Job(tp=2, pp=2, dp=2), Job(pp=4, dp=2), Job(dp=8, layers=2)])
@pytest.mark.parametrize("seed", range(3))
def test_healthy_job_has_no_culprit(tmp_path: Path, job: Job, seed: int) -> None:
    job.seed = seed
    assert diagnosed(job, tmp_path).verdict.answer == "healthy"


def test_a_collective_that_is_a_thousandth_of_the_step_tells_as_much(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, dp=4, layers=300, micro_batches=1, steps=2, slow={7: 1.5}), tmp_path)
    assert blamed(found) == [("compute", (7,))]


@pytest.mark.parametrize("layout", [Grid(tp=2, dp=4), Grid(tp=2, pp=2, dp=2)])
def test_groups_that_no_trace_names_are_found_by_the_layout(tmp_path: Path, layout: Grid) -> None:
    job = Job(tp=layout.tp, pp=layout.pp, dp=layout.dp, slow={5: 1.5})
    found = diagnosed(job, tmp_path, Style(arguments=False, sequence=False), layout)
    assert blamed(found) == [("compute", (5,))]


def test_layout_is_inferred_from_groups(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, pp=4, dp=2), tmp_path)
    assert found.layout.source == "groups"
    assert found.accounts.grid == Grid(tp=2, pp=4, dp=2)


def test_pauses_of_a_host_are_no_slow_gpu(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, pp=2, dp=2, pause_us={3: 3_000.0}), tmp_path)
    (culprit,) = found.verdict.culprits
    assert (culprit.kind, culprit.ranks) == ("cpu", (3,))
    assert culprit.excess == pytest.approx(3e-3, rel=0.02)


def test_two_slow_ranks_are_both_found(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, pp=2, dp=2, slow={1: 1.4, 6: 1.5}), tmp_path)
    assert found.verdict.answer == "several"
    assert sorted(blamed(found)) == [("compute", (1,)), ("compute", (6,))]


def test_a_culprit_that_changes_is_called_rotating(tmp_path: Path) -> None:
    slow = {(0, 1): 1.5, (1, 6): 1.5, (2, 3): 1.5, (3, 4): 1.5}
    found = diagnosed(Job(tp=2, pp=2, dp=2, steps=4, slow_in_step=slow), tmp_path)
    assert found.verdict.answer == "rotating"
    assert [*found.verdict.rotating] == [(step + 1, rank) for step, rank in slow]


def test_a_long_stage_is_no_slow_rank(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, pp=4, dp=2, head=1.25), tmp_path)
    assert found.verdict.answer == "partition"
    assert not found.verdict.culprits
    stage = found.verdict.stage
    assert stage is not None
    assert stage.pp_rank == 3
    assert stage.ratio == pytest.approx(1.25, rel=0.03)


def test_a_cut_file_is_used_up_to_the_cut(tmp_path: Path) -> None:
    folder = write(Job(tp=2, dp=4, slow={7: 1.5}), tmp_path)
    path = folder / "rank-4.json"
    text = path.read_text()
    path.write_text(text[: 2 * len(text) // 3])
    found = diagnose_traces(folder, workers=1)
    assert blamed(found) == [("compute", (7,))]
    assert found.ranks == tuple(range(8))
    assert any("rank 4" in note or "rank-4" in note for note in found.notes)


def test_missing_ranks_are_named_and_worked_around(tmp_path: Path) -> None:
    folder = write(Job(tp=2, dp=4, slow={7: 1.5}), tmp_path)
    (folder / "rank-2.json").unlink()
    found = diagnose_traces(folder, workers=1)
    assert blamed(found) == [("compute", (7,))]
    assert any("1 of 8 ranks" in note and "(2)" in note for note in found.notes)


def test_accounts_of_a_rank_sum_to_its_step(tmp_path: Path) -> None:
    found = diagnosed(Job(tp=2, pp=2, dp=2, slow={5: 1.3}), tmp_path)
    accounts = found.accounts
    whole = accounts.own + accounts.transfer.sum(axis=2) + accounts.wait.sum(axis=2)
    starts, ends = (np.stack([getattr(one, name) for one in found.traces], axis=1) for name in ("start", "end"))
    np.testing.assert_allclose(whole, (ends - starts) / 1e9, atol=5e-9)


def test_computing_and_waits_are_those_that_were_played(tmp_path: Path) -> None:
    job = Job(tp=2, dp=2, slow={3: 1.5})
    found = diagnosed(job, tmp_path)
    events, _ = play(job)
    for rank, own in enumerate(events):
        computed = sum(e.end - e.start for e in own if not e.ranks) / job.steps / 1e6
        assert found.accounts.work[:, rank].sum(axis=1).mean() == pytest.approx(computed, rel=1e-4)
        shortest = [min(o.end - o.start for other in events for o in other if _same(e, o)) for e in own if e.ranks]
        took = [e.end - e.start for e in own if e.ranks]
        waited = (sum(took) - sum(shortest)) / job.steps / 1e6
        assert found.accounts.wait[:, rank].sum(axis=1).mean() == pytest.approx(waited, rel=1e-3, abs=1e-8)


def _same(one: object, other: object) -> bool:
    return [getattr(one, n) for n in ("ranks", "number", "what")] == [
        getattr(other, n) for n in ("ranks", "number", "what")
    ]


def test_clocks_are_aligned_by_the_ends_of_collectives(tmp_path: Path) -> None:
    skew = {rank: 1e3 * rank * rank for rank in range(8)}
    found = diagnosed(Job(tp=2, pp=2, dp=2), tmp_path, Style(skew_us=skew))
    assert found.clocks is not None
    np.testing.assert_allclose(found.clocks.wrong, [1e3 * skew[rank] for rank in range(8)], atol=2)
    assert found.clocks.residual < 10


def test_what_would_help_is_what_a_job_without_it_takes(tmp_path: Path) -> None:
    slow, normal = (play(Job(dp=4, jitter=0.0, slow=s))[1] for s in ({2: 1.5}, {}))
    found = diagnosed(Job(dp=4, jitter=0.0, slow={2: 1.5}), tmp_path)
    cost = (slow[1][1] - slow[1][0] - (normal[1][1] - normal[1][0])) / 1e6
    assert found.verdict.culprits[0].gain == pytest.approx(cost, rel=0.01)


def test_a_rank_alone_is_not_judged(tmp_path: Path) -> None:
    folder = write(Job(dp=4), tmp_path)
    for rank in (1, 2, 3):
        (folder / f"rank-{rank}.json").unlink()
    found = diagnose_traces(folder, workers=1)
    assert found.verdict.answer == "no single culprit"
    assert "one rank of 4" in found.verdict.reason


def test_traces_of_different_runs_are_refused(tmp_path: Path) -> None:
    folder = write(Job(dp=4), tmp_path)
    for rank, dp in ((0, 4), (1, 2)):
        path = folder / f"rank-{rank}.json"
        document = json.loads(path.read_text())
        path.write_text(json.dumps({**document, "fourfold": {"grid": {"tp": 1, "cp": 1, "pp": 4 // dp, "dp": dp}}}))
    with pytest.raises(ValueError, match="runs with different layouts"):
        diagnose_traces(folder, workers=1)


def test_a_layout_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--layout: tp=2 cp=1 pp=1 dp=8 are 16 ranks, but the traces are of 4"):
        diagnosed(Job(dp=4), tmp_path, layout=Grid(tp=2, dp=8))
