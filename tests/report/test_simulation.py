"""A simulated step as timeline, page, text and JSON: against the engine's arrays, and by hand."""

from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace
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
    time_table,
    what_if_table,
    worst_replica,
)
from fourfold.report.simulation.findings import Findings, findings, slowest_rank
from fourfold.report.simulation.words import bubble_words, column, grouped
from fourfold.simulator.answer import Answer
from fourfold.simulator.causes import causes, duration
from fourfold.simulator.critical import CriticalPath, Replica, critical_path
from fourfold.simulator.engine import simulate
from fourfold.simulator.faults import Faults
from fourfold.simulator.live import StepMemory, step_memory, timeline_of
from fourfold.simulator.loads import both_splits, parse_mix
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

    def findings(self, *, shown: bool = False) -> Findings:
        replica = worst_replica(self.played)
        found = causes(self.scenario, self.played, replica=replica) if shown else None
        return findings(self.scenario, self.played, **self.told, found=found)

    def timeline(self, replica: Replica | None = None) -> drawing.Timeline:
        found = causes(self.scenario, self.played, replica=replica or worst_replica(self.played))
        return simulation_timeline(self.scenario, self.played, found)

    def answer(self, **more: Any) -> Answer:
        return Answer(self.scenario, self.played, **self.told, **more)

    def page(self, notes: tuple[str, ...] = (), **more: Any) -> drawing.Page:
        return simulation_page(self.answer(**more), notes=notes)

    def text(self, **more: Any) -> str:
        return simulation_text(self.answer(**more))

    def json(self, **more: Any) -> dict[str, Any]:
        return simulation_json(self.answer(**more))


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
        timeline = step.timeline()
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
        lanes = step.timeline().lanes
        assert lanes is not None
        number = {kind: int((lanes.kind == drawing.KINDS.index(kind)).sum()) for kind in drawing.KINDS}
        assert number == dict.fromkeys(drawing.KINDS, 0) | {"SEND_F": 18, "SEND_B": 18, "REDUCE": 4}
        alone = step_of(case(generate(pp=1, num_micro_batches=2)))
        assert alone.timeline().lanes is None

    def test_rows_name_ranks_where_replicas_differ(self) -> None:
        step = slow()
        assert worst_replica(step.played) == (0, 0, 1)
        timeline = step.timeline()
        assert timeline.rows[2] == "rank 5 (dp 0 pp 2 cp 0 tp 1)"
        assert timeline.title == "One step, the replica that ends last, dp 0 cp 0 tp 1"
        other = step.timeline((1, 0, 0))
        assert other.rows[2] == "rank 12 (dp 1 pp 2 cp 0 tp 0)"
        alike = step_of(case(generate(pp=2, num_micro_batches=2), grid=Grid(pp=2, dp=4)))
        timeline = alike.timeline()
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
        scenario = case(schedule, even_work(schedule, layer=layers), grid=Grid(cp=2, tp=2), loads=loads([[[1, 3]]]))
        step = step_of(scenario)
        # Computing differs by attention alone: a map of it would look the same.
        titles = [heat_map.title for heat_map in rank_heat_maps(step.scenario, step.played)]
        assert titles == ["Computing time of every rank", "Waiting time of every rank"]
        assert slowest_rank(step.scenario, step.played) == (
            "Rank 2 (dp 0 pp 0 cp 1 tp 0) computes longest: 8 s, 1.33 times the median rank. "
            "Its documents have 1.50 times the mean attention."
        )
        step = step_of(scenario.replace(faults=Faults(ranks={1: 2.0})))
        *_, attention = rank_heat_maps(step.scenario, step.played)
        assert attention.title == "Attention of every rank"
        assert attention.values[0, 0].tolist() == [[2, 4], [6, 6]]


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
        assert table.rows[0][0] == "rank 5 ran at normal speed"
        assert len(table.rows) == len(slow().gains)
        assert {len(row) for row in table.rows} == {len(table.columns)}

    def test_pipeline_ranks(self) -> None:
        """1F1B of four ranks and six micro-batches, all even: the triangles at both ends."""
        step = step_of(case(generate(pp=4, num_micro_batches=6, kind="1f1b")))
        table = pipeline_table(step.played, step.path)
        assert table.columns[2:5] == ("bubble: warm-up", "steady state", "cool-down")
        assert [row[:5] for row in table.rows] == [
            ("0", "18.00 s", "6.00 s", "0", "3.00 s"),
            ("1", "18.00 s", "5.00 s", "0", "4.00 s"),
            ("2", "18.00 s", "4.00 s", "0", "5.00 s"),
            ("3", "18.00 s", "3.00 s", "0", "6.00 s"),
        ]

    def test_equal_pipeline_ranks_share_a_row(self) -> None:
        assert [*grouped([("a", "b"), ("a", "b"), ("a", "c"), ("a", "b")])] == [
            ("0-1", "a", "b"),
            ("2", "a", "c"),
            ("3", "a", "b"),
        ]
        step = step_of(case(generate(pp=4, num_micro_batches=4, num_frozen_stages=4)))
        rows = pipeline_table(step.played, step.path).rows
        assert len(rows) == len({row[1:] for row in rows}) <= 4

    def test_a_column_has_one_unit(self) -> None:
        assert column([4.461, 0.9863, 0.0, 1e-5]) == ["4.461 s", "0.986 s", "0", "<0.001 s"]
        assert column([0.01985, 0.00023]) == ["19.85 ms", "0.23 ms"]
        assert column([-0.5, 0.25]) == ["-500.0 ms", "250.0 ms"]
        assert column([1234.5]) == ["1,234 s"]
        assert column([0.0]) == ["0"]
        assert column([]) == []

    @pytest.mark.parametrize("seed", range(4))
    def test_where_the_time_goes(self, seed: int) -> None:
        """Both columns sum to the step, as far as their digits go."""
        step = step_of(random_case(random.Random(seed)))
        table = time_table(step.played, step.path)
        size = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
        for number in (1, 3):
            cells = [row[number] for row in table.rows if row[number] != "0" and row[number][0] != "<"]
            whole = sum(float(cell.split()[0].replace(",", "")) * size[cell.split()[1]] for cell in cells)
            assert whole == pytest.approx(step.played.step_seconds, rel=0.01)


class TestFindings:
    def test_a_slow_rank_comes_first(self) -> None:
        step = slow()
        first, more = step.findings(shown=True)
        normal = simulate(step.scenario.replace(faults=Faults())).step_seconds
        share = 1 - normal / step.played.step_seconds
        assert first[0] == (
            "Straggler: rank 5 (dp 0 pp 2 cp 0 tp 1) computes 1.5 times as long as normal. If rank 5 ran at normal "
            f"speed, the step would take {duration(normal)}: {share:.1%} shorter."
        )
        assert more[-2] == (
            "Rank 5 (dp 0 pp 2 cp 0 tp 1) computes longest: 27 s, 1.50 times the median rank. "
            "It computes 1.5 times as long as normal."
        )
        assert "of it is on rank 5" in more[-1]
        assert len(first) <= 4

    def test_several_slow_things(self) -> None:
        """Rank 5's gain is the largest alone; a link and a host are slow as well."""
        schedule = generate(pp=4, num_micro_batches=6, kind="1f1b")
        faults = Faults(ranks={5: 1.5}, links={(0, 2): 2.0}, cpus={9: 0.25})
        step = step_of(case(schedule, even_work(schedule, message=0.1), grid=Grid(pp=4, tp=2, dp=2), faults=faults))
        gains = {gain.what: gain for gain in step.gains}
        said = step.findings().first[0]
        assert said.startswith(
            "Stragglers: 1 rank, 1 link and 1 host are slow. If all slow ranks, links and hosts ran "
        )
        assert said.endswith(f"alone: if rank 5 ran at normal speed, {gains['rank 5'].share:.1%} shorter.")
        others = [gain for gain in step.gains if gain.what in ("rank 5", "link 0-2", "cpu 9") and gain.share >= 0.01]
        assert others
        for gain in others:
            assert any(text.endswith(gain.sentence) for text in step.findings().more)

    @pytest.mark.parametrize(
        ("faults", "said"),
        [
            (
                Faults(links={(0, 1): 30.0}),
                "Slow link: what goes between ranks 0 and 1 takes 30 times as long as normal.",
            ),
            (
                Faults(cpus={2: 0.5}),
                "Slow host: that of rank 2 (dp 1 pp 0 cp 0 tp 0) launches each computation 500 ms late.",
            ),
            (Faults(jitter=0.2), "Chance: computing times vary by 20.0%."),
        ],
    )
    def test_what_else_is_slow(self, faults: Faults, said: str) -> None:
        schedule = generate(pp=2, num_micro_batches=4)
        step = step_of(case(schedule, even_work(schedule, message=0.1), grid=Grid(pp=2, dp=8), faults=faults))
        gain = next(gain for gain in step.gains if gain.what in ("link 0-1", "cpu 2", "jitter"))
        assert step.findings().first[0] == f"{said} {gain.sentence}"

    def test_uneven_documents(self) -> None:
        schedule = generate(pp=1, num_micro_batches=1)
        layers = {kind: replace(one, attention=1.0) for kind, one in even_work(schedule).layer.items()}
        step = step_of(
            case(schedule, even_work(schedule, layer=layers), grid=Grid(cp=2, dp=2), loads=loads([[[1, 1]], [[1, 3]]]))
        )
        assert (
            step.findings()
            .first[0]
            .startswith(
                "Uneven documents: dp 1 cp 1 has 2.00 times the mean attention. If every rank had the mean attention "
            )
        )

    def test_what_is_slow_but_in_nobodys_way_comes_later(self) -> None:
        step = step_of(slow().scenario.replace(faults=Faults(ranks={5: 1.001})))
        first, more = step.findings()
        assert first[0].startswith("What would help most: if ")
        assert more[0].startswith("Straggler: rank 5 ")

    def test_where_the_bubble_is(self) -> None:
        step = step_of(case(generate(pp=4, num_micro_batches=6, kind="1f1b")))
        first, more = step.findings()
        assert first == (
            "Bubble, mean of all ranks: 9 s, 33.3% of the step (50.0% of forwards and backwards), of that 50% in "
            "warm-up and 50% in cool-down. The schedule alone makes 50.0% of forwards and backwards (even stages, "
            "B = 2 F, free messages).",
        )
        assert more[:2] == (
            "Computing, mean of all ranks: 18 s of the step's 27 s, 66.7%.",
            "Bubble by pipeline rank, means of their replicas: all wait as long, 9 s.",
        )

    @pytest.mark.parametrize("seed", range(24))
    def test_numbers_are_those_of_the_engine(self, seed: int) -> None:
        step = step_of(random_case(random.Random(seed)))
        played, length = step.played, step.played.step_seconds
        text = "\n".join(step.findings(shown=True).first)
        dp, cp, tp = worst_replica(played)

        def share(name: str) -> float:
            return float(played.spent[name].mean()) / length

        idle = sum(float(played.spent[name].mean()) for name in ("pp_wait", "end_wait"))
        inside = sum(share(name) for name in ("compute", "attention", "tp", "tp_wait", "cp", "cp_wait")) * length
        if played.graph.schedule.pp > 1 and idle > 1e-9 * length:
            found = re.search(r"ranks: (.*?), (\S+)% of the step \((\S+)% of forwards", text)
            assert found is not None
            assert found[1] == duration(idle)
            assert float(found[2].lstrip("<")) == pytest.approx(100 * idle / length, abs=0.11)
            assert float(found[3].lstrip("<")) == pytest.approx(100 * idle / inside, abs=0.11)
        shown = re.search(r"In the replica shown \(dp (\d+) cp (\d+) tp (\d+)\) it is (\S+)% of the step", text)
        if shown is not None:
            own = played.spent["pp_wait"][dp, :, cp, tp] + played.spent["end_wait"][dp, :, cp, tp]
            assert tuple(map(int, shown.groups()[:3])) == (dp, cp, tp)
            assert float(shown[4].lstrip("<")) == pytest.approx(100 * own.mean() / length, abs=0.11)
        for words, names in (("transfers", ("tp", "cp", "dp")), ("slower peers", ("tp_wait", "cp_wait", "dp_wait"))):
            exposed = re.search(rf"Exposed.*{words} ([^;\n]*?)[.;](?:\n|$| )", text)
            said = {} if exposed is None else dict(part.split(" ") for part in exposed[1].split(", "))
            for name, label in zip(names, ("TP", "CP", "FSDP"), strict=True):
                assert (label in said) == (share(name) >= 0.0005)
                if label in said:
                    assert float(said[label].strip("%")) == pytest.approx(100 * share(name), abs=0.051)

    def test_the_replica_shown(self) -> None:
        """Its waits behind rank 5 are counted one by one; gaps are those of the phase that has most of the waiting."""
        step = slow()
        at = worst_replica(step.played)
        found = causes(step.scenario, step.played, replica=at)
        waits = [*found.before.values(), *found.at_end]
        whole = sum(cause.wait for cause in waits)
        behind = sum(cause.wait for cause in waits if cause.behind.startswith("rank 5 "))
        text = "\n".join(step.findings(shown=True).first)
        assert (f"; behind {behind / whole:.0%} of all its waiting: rank 5" in text) == (behind >= 0.5 * whole)
        assert re.search(r"of it in (warm-up|steady state|cool-down): \d+ gaps, [\d.]+ m?s in the median", text)

    def test_without_a_pipeline(self) -> None:
        step = step_of(case(generate(pp=1, num_micro_batches=3)))
        assert "There is no bubble: no rank waits for another pipeline rank." in step.findings().first
        assert bubble_words(step.played) == "none"
        step = step_of(case(generate(pp=1, num_micro_batches=3), grid=Grid(dp=2), faults=Faults(ranks={0: 2.0})))
        idle = step.played.bubble_seconds
        assert [text for text in step.findings().first if text.startswith("There is one pipeline rank")] == (
            [
                "There is one pipeline rank, and no bubble but at the end: the mean rank waits "
                f"{duration(idle)}, {idle / step.played.step_seconds:.1%} of the step, for the last to end."
            ]
            if idle
            else []
        )

    def test_the_head(self) -> None:
        schedule = generate(pp=4, num_micro_batches=8, kind="1f1b")
        ends = dict.fromkeys(COMPUTE, (0.0, 0.0, 0.0, 0.5))
        step = step_of(case(schedule, even_work(schedule, ends=ends)))
        assert slowest_rank(step.scenario, step.played) == (
            "Pipeline rank 3 computes longest: 32 s, 1.33 times the median rank. It has the head and the loss."
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
        assert len(page.findings) == 4
        assert page.findings[1].startswith("Memory fits: pipeline rank ")
        assert not page.warnings
        assert any("peaks at" in finding for finding in page.more)
        assert all(finding[0].isupper() and finding.endswith(".") for finding in (*page.findings, *page.more))
        assert page.tables[1].columns[-1] == "peak memory"
        assert len(page_html(page)) < 1_000_000

    def test_too_much_memory_is_a_warning(self) -> None:
        step = planned()
        assert step.memory is not None
        page = step._replace(memory=replace(step.memory, capacity=2.0**34)).page()
        assert page.warnings == ("peak memory",)
        assert dict(page.summary)["peak memory"].endswith(" of 15.0 GiB usable")
        assert page.findings[1].startswith("Memory does not fit: pipeline rank ")

    def test_bars_call_the_same_the_same(self) -> None:
        """Colours go by name: both bars have the same names for what is in both."""
        step = slow()
        spent, path = (dict(split.parts) for split in (step_split(step.played), path_split(step.path)))
        assert {"computing, without attention", "exposed FSDP transfers"} <= {*spent} & {*path}

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
        assert slow().page().planted == ("Slow on purpose: rank 5 computes 1.5 times as long.",)


class TestText:
    def test_plain(self) -> None:
        step = planned()
        text = step.text(name="llama3-8b", tokens=16 * 8192)
        assert text.isascii()
        lines = text.splitlines()
        assert lines[0] == "Step of llama3-8b on 16 ranks"
        assert all(line == line.rstrip() for line in lines)
        for heading in (
            "Findings",
            "Where the time goes: mean of all ranks, and the critical path",
            "Pipeline ranks (means of their replicas)",
            "What would help (each alone; gains do not add up)",
            "Memory of every pipeline rank at its worst moment",
        ):
            assert heading in lines
        bubble = next(line for line in lines if line.strip().startswith("bubble"))
        idle = float(step.played.idle.mean())
        assert f"{duration(idle)}, {idle / step.played.step_seconds:.1%} of the step" in bubble
        assert f"({step.played.bubble_over_compute:.1%} of forwards and backwards)" in bubble

    @pytest.mark.parametrize("seed", range(6))
    def test_fits_120_columns(self, seed: int) -> None:
        for step in (planned(), slow(), step_of(random_case(random.Random(seed)))):
            assert max(map(len, step.text(name="a-recipe-with-a-name", tokens=1 << 24).splitlines())) <= 120

    def test_prints_plainly_where_there_is_no_terminal(self) -> None:
        step, out = planned(), io.StringIO()
        print_simulation(step.answer(name="x"), file=out)
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
            *("format", "name", "layout", "simulated", "schedule", "slow", "documents", "cp_splits", "step_seconds"),
            *("pipeline_seconds", "tokens_per_second", "bubble_over_compute", "bubble_over_total"),
            *("bubble_seconds", "bubble_share_of_step", "exposed", "spent"),
            *("ranks", "slowest_rank", "critical_path", "gains", "memory", "findings"),
        ]
        assert [*found["spent"]] == [*CLASSES]
        assert found["bubble_seconds"] == pytest.approx(found["spent"]["pp_wait"] + found["spent"]["end_wait"])
        assert found["bubble_share_of_step"] == pytest.approx(found["bubble_seconds"] / found["step_seconds"])
        assert found["findings"][:2] == [*step.findings().first[:2]]
        assert sum(found["spent"].values()) == pytest.approx(found["step_seconds"])
        assert sum(found["critical_path"]["by_class"].values()) == pytest.approx(found["step_seconds"])
        assert found["tokens_per_second"] == pytest.approx(16 * 8192 / found["step_seconds"])
        for rank in found["ranks"]:
            assert sum(rank["spent"].values()) == pytest.approx(found["step_seconds"])
            idle = rank["bubble_warm_up"] + rank["bubble_steady_state"] + rank["bubble_cool_down"]
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


class TestDocuments:
    def test_both_splits(self) -> None:
        """Documents of 4 and 12 tokens, cp 2 (algorithms.md 3.7): 52 and 36 pairs by rows, 44 and 44 by document."""
        mix = parse_mix("lengths=4,12")
        splits = both_splits(mix, seq_len=16, dp=1, micro_batches=1, cp=2)
        step = slow()
        found = step.json(splits=splits)["cp_splits"]
        assert [one["strategy"] for one in found] == ["head_tail", "per_document"]
        assert [one["slowest_over_mean"] for one in found] == [pytest.approx(52 / 44), 1.0]
        assert [one["slowest_over_fastest"] for one in found] == [pytest.approx(52 / 36), 1.0]
        assert [one["waiting_share"] for one in found] == [pytest.approx(8 / 52), 0.0]
        text = step.text(splits=splits)
        assert "Attention by split of context parallelism: lengths=4,12" in text
        assert "head-tail" in text
        assert any(table.title.startswith("Attention by split") for table in step.page(splits=splits).tables)
        assert "Attention by split" not in step.text()
