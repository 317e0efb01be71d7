"""`fourfold simulate` and `fourfold figures` as their users meet them: what is printed, written and refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fourfold.cli.simulating import Conditions, Drawings, Traces, figures, simulate
from fourfold.layout import Action, Grid, Kind, generate
from fourfold.recipe import check, load
from tests.answers import printed

RECIPES = Path(__file__).parents[1] / "recipes"
DEMO = RECIPES / "demo.toml"
ON_H100: dict[str, Any] = {"gpu": "h100"}


class TestStep:
    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, **ON_H100, conditions=Conditions(slow=("rank=5:1.5",))) == 0
        text = printed(capsys)
        assert "Step of demo on 16 ranks" in text
        assert "rank 5 computes 1.5 times as long" in text
        for title in ("The critical path", "What would help", "Memory of every pipeline rank"):
            assert title in text

    def test_json_says_the_same(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, **ON_H100, as_json=True) == 0
        found = json.loads(printed(capsys))
        assert found["format"] == 1
        assert sum(found["spent"].values()) == pytest.approx(found["step_seconds"])
        assert found["bubble_over_total"] == pytest.approx(
            found["bubble_over_compute"] / (1 + found["bubble_over_compute"])
        )

    def test_twice_the_same(self, capsys: pytest.CaptureFixture[str]) -> None:
        conditions = Conditions(jitter=0.05, seed=3, documents="mean=64,dist=exponential")
        assert simulate(DEMO, **ON_H100, conditions=conditions, as_json=True) == 0
        once = printed(capsys)
        assert simulate(DEMO, **ON_H100, conditions=conditions, as_json=True) == 0
        assert printed(capsys) == once

    def test_files(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page, picture, heat, traces = (tmp_path / name for name in ("step.html", "step.svg", "ranks.png", "traces"))
        drawings = Drawings(html=page, svg=picture, heat_map=heat)
        assert simulate(DEMO, **ON_H100, drawings=drawings, traces=Traces(trace=traces, skew_ms=60.0)) == 0
        text = printed(capsys)
        for path in (page, picture, heat, traces):
            assert str(path) in text
            assert path.exists()
        assert "What would help" in page.read_text(encoding="utf-8")
        assert len(list(traces.glob("rank-*.json"))) == 16
        assert json.loads((traces / "truth.json").read_text())["skew_ms"] == 60

    def test_compare(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, **ON_H100, compare=True, as_json=True) == 0
        found = json.loads(printed(capsys))
        assert {one["kind"] for one in found} >= {"afab", "1f1b", "zb-h1", "interleaved", "flexible"}
        assert simulate(DEMO, **ON_H100, compare=True) == 0
        text = printed(capsys)
        assert "zb-h1" in text
        assert "1f1b" in text

    def test_all_in_one_queue_may_deadlock(self, capsys: pytest.CaptureFixture[str]) -> None:
        overrides = ("layout.pp=4", "layout.tp=1", "model.num_layers=8", "pipeline.nc=4", "batch.sequences=16")
        assert simulate(DEMO, **ON_H100, overrides=overrides, conditions=Conditions(receives="as-posted")) == 2
        assert "deadlock: pipeline ranks 0 and 3 wait for each other: " in capsys.readouterr().err


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "cluster.gpu: the recipe does not say on which GPUs it runs"),
            ({"gpu": "h900"}, 'gpu = "h900": must be one of'),
            (ON_H100 | {"stack": "metta"}, 'nearest legal: "meta"'),
            (ON_H100 | {"conditions": Conditions(slow=("rank=16:2",))}, "--slow rank=16: there are ranks 0 to 15"),
            (ON_H100 | {"conditions": Conditions(slow=("disk=1:2",))}, "--slow disk=1:2: must be rank=RANK:FACTOR"),
            (
                ON_H100 | {"conditions": Conditions(documents="means=3")},
                "documents: means: unknown key; nearest legal: mean",
            ),
            (ON_H100 | {"conditions": Conditions(jitter=-1.0)}, "--jitter -1: must be at least 0"),
            (ON_H100 | {"overrides": ("layout.tp=3",)}, "layout.tp = 3"),
            ({"log": Path("/nowhere")}, "/nowhere: no action logs"),
            # What would have no effect
            (ON_H100 | {"compare": True}, "--html: has no effect with --compare; leave one of them out"),
            ({"log": Path("/nowhere"), **ON_H100}, "--gpu: has no effect with --log"),
            (
                {"log": Path("/nowhere"), "conditions": Conditions(slow=("rank=1:2",))},
                "--slow: has no effect with --log",
            ),
            (ON_H100 | {"log_step": 3}, "--log-step: has no effect without --log"),
            (ON_H100 | {"traces": Traces(skew_ms=5.0)}, "--skew-ms: has no effect without --trace"),
            (ON_H100 | {"traces": Traces(merged=True)}, "--merged: has no effect without --trace"),
            (ON_H100 | {"conditions": Conditions(seed=3)}, "--seed: has no effect without --jitter"),
            (ON_H100 | {"conditions": Conditions(seed=-1, jitter=0.1)}, "--seed -1: must be at least 0"),
        ],
    )
    def test_before_anything_is_written(
        self, options: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = tmp_path / "page.html"
        assert simulate(DEMO, **options, drawings=Drawings(html=page)) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert message in captured.err
        assert not list(tmp_path.iterdir())

    def test_traces_of_ranks_that_are_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, **ON_H100, traces=Traces(trace=tmp_path / "t", trace_ranks="0-99")) == 2
        assert "--trace-ranks 0-99" in capsys.readouterr().err
        assert not (tmp_path / "t").exists()


class TestLog:
    """A run whose actions all take what is written here."""

    SECONDS = 0.002

    def run(self, folder: Path) -> Path:
        """Action logs of 2 pipeline ranks and 2 micro-batches, as the trainer writes them: F 2 ms, B 4 ms, else 0."""
        schedule = generate(pp=2, num_micro_batches=2, kind="afab", zero=1)
        (folder / "actions").mkdir(parents=True)
        ends: dict[Action, int] = {}
        clocks = [0, 0]
        lines: list[list[str]] = [[], []]
        left = [list(actions) for actions in schedule.actions]
        while any(left):
            for rank in (0, 1):
                while left[rank]:
                    action = left[rank][0]
                    need = self.needs(action)
                    if need is not None and need not in ends:
                        break
                    start = clocks[rank]
                    arrived = max(start, ends[need]) if need is not None else start
                    long = {Kind.FORWARD: 2_000_000, Kind.BACKWARD: 4_000_000}.get(action.kind, 0)
                    end = arrived + long
                    clocks[rank] = ends[action] = end
                    entry = {"step": 1, "action": str(action), "start": start, "end": end, "wait": arrived - start}
                    lines[rank].append(json.dumps(entry))
                    left[rank].pop(0)
        for rank in (0, 1):
            (folder / "actions" / f"rank-{rank:05d}.jsonl").write_text("\n".join(lines[rank]) + "\n")
        return folder

    @staticmethod
    def needs(action: Action) -> Action | None:
        if action.kind is Kind.FORWARD and action.stage == 1:
            return Action(Kind.SEND_FORWARD, 0, action.micro_batch)
        if action.kind is Kind.BACKWARD and action.stage == 0:
            return Action(Kind.SEND_BACKWARD, 1, action.micro_batch)
        return None

    OVERRIDES = (
        "layout.pp=2",
        "layout.tp=1",
        "layout.cp=1",
        "layout.dp=1",
        "batch.sequences=2",
        "pipeline.virtual_stages=1",
        "pipeline.schedule=afab",
        "pipeline.nc=2",
        "layout.zero=1",
    )

    def test_as_measured(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = self.run(tmp_path / "run")
        plan = check(load(DEMO, self.OVERRIDES))
        assert plan.grid == Grid(pp=2)
        drawings = Drawings(html=tmp_path / "page.html")
        assert simulate(DEMO, overrides=self.OVERRIDES, log=run, as_json=True, drawings=drawings) == 0
        found = json.loads(printed(capsys))
        # Two forwards, one more on rank 1, then two backwards there and the last on rank 0: 2 + 2 x 2 + 2 x 4 + 4 ms.
        assert found["measured_seconds"] == pytest.approx(0.018)
        assert found["played_seconds"] == pytest.approx(0.018)
        assert math.isclose(found["error"], 0, abs_tol=1e-9)
        assert (tmp_path / "page.html").exists()

    def test_text(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, overrides=self.OVERRIDES, log=self.run(tmp_path / "run")) == 0
        text = printed(capsys)
        assert "measured   18 ms" in text
        assert "played     18 ms" in text

    def test_of_another_layout(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert simulate(DEMO, log=self.run(tmp_path / "run")) == 2
        assert "rank" in capsys.readouterr().err


class TestFigures:
    def test_chosen(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, page = tmp_path / "pictures", tmp_path / "figures.md"
        assert figures(only=("4", "3"), out=out, page=page) == 0
        text = printed(capsys)
        assert text.index("Figure 3:") < text.index("Figure 4:")
        assert "\nFigure 9:" not in text
        assert sorted(path.name for path in out.iterdir()) == ["figure-3.png", "figure-4.png"]
        assert "![Figure 4: published values beside ours](pictures/figure-4.png)" in page.read_text()

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert figures(only=("4",), as_json=True) == 0
        (figure,) = json.loads(printed(capsys))
        assert figure["number"] == "4"
        reductions = figure["panels"][0]["series"][0]
        assert list(reductions["published"].values()) == list(reductions["ours"].values()) == [4, 4, 4, 8]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"only": ("5",)}, "--only 5: must be one of 3, 4, 9, 10, 11, 12, 13, 14"),
            ({"page": Path("a.md")}, "--page: shows the pictures, so it needs --out"),
        ],
    )
    def test_refused(self, options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert figures(**options) == 2
        assert message in capsys.readouterr().err

    def test_a_file_where_the_folder_should_be(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "taken").write_text("")
        assert figures(only=("4",), out=tmp_path / "taken") == 2
        assert "taken: is a file; give a folder" in capsys.readouterr().err

    def test_the_documentation_has_every_figure(self) -> None:
        """docs/figures.md names every figure, and its pictures are there. `fourfold figures` writes both."""
        docs = Path(__file__).parents[1] / "docs"
        text = (docs / "figures.md").read_text(encoding="utf-8")
        for number in (3, 4, 9, 10, 11, 12, 13, 14):
            assert f"## Figure {number}: " in text
            assert (docs / "figures" / f"figure-{number}.png").stat().st_size > 10_000
