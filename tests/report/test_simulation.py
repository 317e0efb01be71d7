"""A simulated step as timeline, page, text and JSON: against the engine's arrays, and by hand."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from fourfold.layout import Grid, generate
from fourfold.layout.actions import COMPUTE
from fourfold.report import drawing
from fourfold.report.page import page_html
from fourfold.report.simulation import (
    path_split,
    pipeline_table,
    print_simulation,
    rank_heat_maps,
    simulation_json,
    simulation_page,
    simulation_text,
    simulation_timeline,
    step_split,
    what_if_table,
    worst_replica,
)
from fourfold.report.simulation.findings import findings, slowest_rank
from fourfold.simulator.causes import causes
from fourfold.simulator.critical import CriticalPath, critical_path
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.live import StepMemory, step_memory, timeline_of
from fourfold.simulator.played import CLASSES, Played
from fourfold.simulator.scenario import Scenario, scenario
from fourfold.simulator.whatif import Gain, what_if
from tests.planner.jobs_of_tests import job
from tests.simulator.small_cases import case, even_work, loads, random_case


class Step(NamedTuple):
    """A step with all that is said of it."""

    scenario: Scenario
    played: Played
    gains: tuple[Gain, ...]
    path: CriticalPath
    memory: StepMemory | None = None

    @property
    def told(self) -> dict[str, Any]:
        return {"gains": self.gains, "path": self.path, "memory": self.memory}

    def page(self, **more: Any) -> drawing.Page:
        return simulation_page(self.scenario, self.played, **self.told, **more)

    def text(self, **more: Any) -> str:
        return simulation_text(self.scenario, self.played, **self.told, **more)

    def json(self, **more: Any) -> dict[str, Any]:
        return simulation_json(self.scenario, self.played, **self.told, **more)


def step_of(what: Scenario) -> Step:
    played = simulate(what)
    return Step(what, played, what_if(what, played), critical_path(what, played))


@cache
def planned() -> Step:
    """Llama 3 8B on four pipeline ranks, with the planner's costs, and memory."""
    from fourfold.planner.search.exact import schedule_of, stages_of
    from fourfold.planner.timing.stack import load_stack

    stack = load_stack("standard")
    one = job("8b", tp=2, pp=4, dp=2, v=2, sequences=16, nc=4, order=2, zero=1, shards=2).replace(**stack.columns())
    stages = stages_of(one)
    step = step_of(scenario(one, stack, schedule_of(one), stages))
    return step._replace(memory=step_memory(one, timeline_of(step.played), stages, stack))


@cache
def slow() -> Step:
    """Rank 5, which is pipeline rank 2 of the first replica and tp 1, takes half as long again."""
    schedule = generate(pp=4, num_micro_batches=6, kind="1f1b")
    work = even_work(schedule, message=0.1, optimizer=0.5, reduce=(0.5,) * 4)
    return step_of(case(schedule, work, grid=Grid(pp=4, tp=2, dp=2), faults=Faults(ranks={5: 1.5})))


class TestTimeline:
    @pytest.mark.parametrize("seed", range(16))
    def test_boxes_are_what_was_played(self, seed: int) -> None:
        step = step_of(random_case(random.Random(seed)))
        at = worst_replica(step.played)
        timeline = simulation_timeline(step.scenario, step.played)
        boxes, nodes = timeline.boxes, step.played.graph.nodes
        expected = sorted(
            (node.pp_rank, float(step.played.start[i][at]), float(step.played.end[i][at]), str(node.kind))
            for i, node in enumerate(nodes)
            if node.kind in COMPUTE
        )
        over = [(pp, step.played.pipeline_seconds, step.played.step_seconds, "STEP") for pp in range(timeline.pp)]
        kinds = [drawing.KINDS[kind] for kind in boxes.kind]
        shown = sorted(zip(boxes.row.tolist(), boxes.start.tolist(), boxes.end.tolist(), kinds, strict=True))
        assert shown == sorted([*expected, *over])
        assert timeline.span == step.played.step_seconds
        # A row is boxes and waits, without a gap and without overlap.
        for row in range(timeline.pp):
            mine = boxes.row == row
            starts, ends = boxes.start[mine], boxes.end[mine]
            assert starts - boxes.wait[mine] == pytest.approx(np.concatenate([[0.0], ends[:-1]]))
            assert ends[-1] == timeline.span
        assert {int(cause) for cause in boxes.cause} - {-1} == {*range(len(timeline.causes))}
        assert all((cause >= 0) == (wait > 0) for cause, wait in zip(boxes.cause, boxes.wait, strict=True))

    def test_messages_and_collectives_are_beside(self) -> None:
        step = slow()
        lanes = simulation_timeline(step.scenario, step.played).lanes
        assert lanes is not None
        number = {kind: int((lanes.kind == drawing.KINDS.index(kind)).sum()) for kind in drawing.KINDS}
        assert number == dict.fromkeys(drawing.KINDS, 0) | {"SEND_F": 18, "SEND_B": 18, "REDUCE": 4}
        alone = step_of(case(generate(pp=1, num_micro_batches=2)))
        assert simulation_timeline(alone.scenario, alone.played).lanes is None

    def test_rows_name_ranks_where_replicas_differ(self) -> None:
        step = slow()
        assert worst_replica(step.played) == (0, 0, 1)
        timeline = simulation_timeline(step.scenario, step.played)
        assert timeline.rows[2] == "rank 5 (dp 0 pp 2 cp 0 tp 1)"
        assert timeline.title == "One step, the replica that ends last, dp 0 cp 0 tp 1"
        other = simulation_timeline(step.scenario, step.played, replica=(1, 0, 0))
        assert other.rows[2] == "rank 12 (dp 1 pp 2 cp 0 tp 0)"
        alike = step_of(case(generate(pp=2, num_micro_batches=2), grid=Grid(pp=2, dp=4)))
        timeline = simulation_timeline(alike.scenario, alike.played)
        assert timeline.rows == ("pp 0", "pp 1")
        assert timeline.title == "One step, one of 4 replicas that are all alike"


class TestHeatMaps:
    def test_values_and_marks(self) -> None:
        step = slow()
        computing, waiting = rank_heat_maps(step.scenario, step.played)
        assert computing.values.shape == (2, 4, 1, 2)
        assert computing.values[0, 2, 0, 1] == pytest.approx(27.0)
        assert float(np.sum(computing.values)) == pytest.approx(15 * 18 + 27)
        assert computing.marked == waiting.marked == ((0, 2, 0, 1),)
        # Whatever is neither computing nor waiting is messages' and collectives' own time, and the optimizer's.
        own = computing.values + waiting.values
        assert (own <= step.played.step_seconds).all()

    def test_replicas_that_are_alike_are_shown_all(self) -> None:
        step = step_of(case(generate(pp=2, num_micro_batches=2), grid=Grid(pp=2, dp=3, cp=2, tp=4)))
        for heat_map in rank_heat_maps(step.scenario, step.played):
            assert heat_map.values.shape == (3, 2, 2, 4)

    def test_attention_where_it_differs(self) -> None:
        schedule = generate(pp=1, num_micro_batches=1)
        layers = {kind: type(one)(1.0, 0.0, 1.0, 0.0, 0.0, 0.0) for kind, one in even_work(schedule).layer.items()}
        step = step_of(
            case(schedule, even_work(schedule, layer=layers), grid=Grid(cp=2, tp=2), loads=loads([[[1, 3]]]))
        )
        titles = [heat_map.title for heat_map in rank_heat_maps(step.scenario, step.played)]
        assert titles[-1] == "Attention of every rank"
        assert rank_heat_maps(step.scenario, step.played)[-1].values[0, 0].tolist() == [[2, 2], [6, 6]]
        assert slowest_rank(step.scenario, step.played) == (
            "Rank 2 (dp 0 pp 0 cp 1 tp 0) computes longest: 8 s, 1.33 times the middle rank. "
            "Its documents have 1.50 times the mean attention."
        )


class TestSplits:
    @pytest.mark.parametrize("seed", range(6))
    def test_they_sum_to_the_step(self, seed: int) -> None:
        step = step_of(random_case(random.Random(seed), contention=True))
        for split in (step_split(step.played), path_split(step.path)):
            assert sum(seconds for _, seconds in split.parts) == pytest.approx(step.played.step_seconds)
            assert len({name for name, _ in split.parts}) == len(split.parts)


class TestTables:
    def test_what_would_help(self) -> None:
        table = what_if_table(slow().gains)
        assert table.rows[0][0] == "rank 5 computed as it should"
        assert len(table.rows) == len(slow().gains)
        assert {len(row) for row in table.rows} == {len(table.columns)}

    def test_pipeline_ranks(self) -> None:
        """1F1B of four ranks and six micro-batches, all even: the triangles at both ends."""
        step = step_of(case(generate(pp=4, num_micro_batches=6, kind="1f1b")))
        table = pipeline_table(step.scenario, step.played, step.path)
        waits = [row[1:5] for row in table.rows]
        assert waits == [
            ("18 s", "6 s", "0 s", "3 s"),
            ("18 s", "5 s", "0 s", "4 s"),
            ("18 s", "4 s", "0 s", "5 s"),
            ("18 s", "3 s", "0 s", "6 s"),
        ]


class TestFindings:
    def test_a_slow_rank(self) -> None:
        step = slow()
        said = findings(
            step.scenario, step.played, gains=step.gains, path=step.path, found=causes(step.scenario, step.played)
        )
        text = " ".join(said)
        assert "Rank 5 (dp 0 pp 2 cp 0 tp 1) computes longest: 27 s, 1.50 times the middle rank." in text
        assert "All that it computes takes 1.5 times as long." in text
        assert "What would help most: if rank 5 computed as it should, the step would take" in text
        assert "of it is on rank 5" in text

    def test_where_the_bubble_is(self) -> None:
        step = step_of(case(generate(pp=4, num_micro_batches=6, kind="1f1b")))
        said = findings(step.scenario, step.played, gains=step.gains, path=step.path)
        assert said[0] == (
            "The step takes 27 s. The mean rank computes for 18 s of it and waits for other pipeline ranks for 9 s: "
            "a bubble of 50.0% of computing time, 33.3% of both."
        )
        assert said[1] == (
            "Of the bubble, 50% is before a rank's first backward, while the pipeline fills; 0% is between that and "
            "its last forward; 50% comes after, while it drains. All pipeline ranks wait as long, 9 s."
        )

    def test_without_a_pipeline(self) -> None:
        step = step_of(case(generate(pp=1, num_micro_batches=3)))
        said = findings(step.scenario, step.played, gains=step.gains, path=step.path)
        assert said[0].endswith("and never waits for another pipeline rank: there is no bubble.")
        assert "none: no rank waits for another pipeline rank" in step.text()

    def test_the_head(self) -> None:
        schedule = generate(pp=4, num_micro_batches=8, kind="1f1b")
        ends = dict.fromkeys(COMPUTE, (0.0, 0.0, 0.0, 0.5))
        step = step_of(case(schedule, even_work(schedule, ends=ends)))
        assert slowest_rank(step.scenario, step.played) == (
            "Pipeline rank 3 computes longest: 32 s, 1.33 times the middle rank. It has the head and the loss."
        )


class TestPage:
    def test_of_a_planned_step(self) -> None:
        step = planned()
        assert step.memory is not None
        page = step.page(name="llama3-8b", tokens=16 * 8192, notes=("All is modelled.",))
        names = [name for name, _ in page.summary]
        assert names == ["step", "bubble", "exposed communication", "peak memory", "tokens/s", "ranks"]
        assert page.memory is not None
        assert page.timeline is not None
        assert page.memory.rows == page.timeline.rows
        assert page.notes == ("All is modelled.",)
        assert any("peaks at" in finding for finding in page.findings)
        assert all(finding[0].isupper() and finding.endswith(".") for finding in page.findings)
        assert page.tables[1].columns[-1] == "peak memory"
        assert len(page_html(page)) < 1_000_000

    @pytest.mark.parametrize("seed", range(12))
    def test_any_step_has_one(self, seed: int) -> None:
        """Also of one rank, of more ranks than micro-batches, of frozen stages, of ZeRO-3 and of halves."""
        page = step_of(random_case(random.Random(100 + seed))).page()
        assert page_html(page).startswith("<!DOCTYPE html>")

    @pytest.mark.parametrize(
        "given",
        [
            {"pp": 1, "num_micro_batches": 1},
            {"pp": 4, "num_micro_batches": 2, "kind": "afab"},
            {"pp": 2, "num_micro_batches": 3, "zero": 3},
            {"pp": 3, "num_micro_batches": 3, "kind": "zb-h1"},
            {"pp": 2, "num_micro_batches": 2, "num_frozen_stages": 1},
            {"pp": 2, "num_micro_batches": 2, "num_frozen_stages": 2},
        ],
    )
    def test_edges(self, given: dict[str, Any]) -> None:
        step = step_of(case(generate(**given)))
        assert page_html(step.page()).startswith("<!DOCTYPE html>")
        assert "Step of" in step.text()
        assert json.loads(json.dumps(step.json()))["step_seconds"] == step.played.step_seconds

    def test_slow_things_are_marked_as_such(self) -> None:
        assert slow().page().notes == ("Slow on purpose: rank 5 computes 1.5 times as long.",)


class TestText:
    def test_plain(self) -> None:
        step = planned()
        text = step.text(name="llama3-8b", tokens=16 * 8192)
        assert text.isascii()
        lines = text.splitlines()
        assert lines[0] == "Step of llama3-8b on 16 ranks"
        assert all(line == line.rstrip() for line in lines)
        for heading in (
            "Pipeline ranks (means of their replicas)",
            "Communication that nothing hides, of the mean rank's step",
            "The mean rank's step",
            "The critical path",
            "What would help (each alone; gains do not add up)",
            "Memory of every pipeline rank at its worst moment",
        ):
            assert heading in lines
        bubble = next(line for line in lines if line.strip().startswith("bubble"))
        assert f"{step.played.bubble_over_compute:.1%} of computing time" in bubble
        assert f"{step.played.bubble_over_total:.1%} of both" in bubble

    def test_prints_plainly_where_there_is_no_terminal(self) -> None:
        step, out = planned(), io.StringIO()
        print_simulation(step.scenario, step.played, **step.told, name="x", file=out)
        assert out.getvalue() == step.text(name="x") + "\n"

    def test_faults_are_named(self) -> None:
        assert "rank 5 computes 1.5 times as long" in slow().text()
        assert "simulated" not in slow().text()
        assert "4 of 16 ranks, which the others are like" in planned().text()


class TestJson:
    def test_keys_and_sums(self) -> None:
        step = planned()
        found = json.loads(json.dumps(step.json(name="llama3-8b", tokens=16 * 8192)))
        assert [*found] == [
            *("format", "name", "layout", "simulated", "schedule", "slow", "documents", "step_seconds"),
            *("pipeline_seconds", "tokens_per_second", "bubble_over_compute", "bubble_over_total", "exposed", "spent"),
            *("ranks", "slowest_rank", "critical_path", "gains", "memory", "findings"),
        ]
        assert [*found["spent"]] == [*CLASSES]
        assert sum(found["spent"].values()) == pytest.approx(found["step_seconds"])
        assert sum(found["critical_path"]["by_class"].values()) == pytest.approx(found["step_seconds"])
        assert found["tokens_per_second"] == pytest.approx(16 * 8192 / found["step_seconds"])
        for rank in found["ranks"]:
            assert sum(rank["spent"].values()) == pytest.approx(found["step_seconds"])
            idle = rank["idle_filling"] + rank["idle_full"] + rank["idle_draining"]
            assert idle == pytest.approx(rank["spent"]["pp_wait"] + rank["spent"]["end_wait"])
        assert step.memory is not None
        peaks = [rank.total for rank in step.memory.peaks]
        assert [rank["peak_bytes"] for rank in found["ranks"]] == peaks
        assert found["memory"]["ranks"][0]["total"] == peaks[0]
        exposed = found["exposed"]["tp"]
        assert exposed["share"] == pytest.approx(exposed["seconds"] / found["step_seconds"])

    def test_without_memory_and_tokens(self) -> None:
        found = slow().json()
        assert found["memory"] is found["tokens_per_second"] is found["documents"] is None
        assert found["slowest_rank"] == {
            "rank": 5, "dp": 0, "pp": 2, "cp": 0, "tp": 1, "computing_seconds": pytest.approx(27.0), "over_median": 1.5,
        }  # fmt: skip
        assert found["gains"][0]["what"] == "rank 5"
        assert found["slow"] == ["rank 5 computes 1.5 times as long"]
