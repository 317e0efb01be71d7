"""Calibration: planted constants are found again, what runs do not determine stays, files are read as written."""

from __future__ import annotations

import tomllib
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fourfold.planner.jobs import Jobs
from fourfold.planner.machines.cluster import CHIPS, chip_index
from fourfold.planner.measured.calibrate import NINETY, band, calibrate_files, fit, fit_project, run_weights, runs_of
from fourfold.planner.measured.priors import PRIORS
from fourfold.planner.measured.rows import MeasuredRow
from fourfold.planner.measured.stack_file import chips_text, stack_text
from fourfold.planner.timing.stack import load_stack, parse_stack
from fourfold.planner.timing.step import step_time
from tests.planner.jobs_of_tests import job

STANDARD = load_stack("standard")


def measured(jobs: Jobs, seconds: float, **values) -> MeasuredRow:
    columns = {field.name: getattr(jobs, field.name).item() for field in fields(Jobs)}
    row = MeasuredRow(
        id="run", source="here", quality="A", group=str(sorted(columns.items())), setting="", stack="here",
        saved_set="standard", columns=columns, precision="bf16", gpu="H100", seconds=seconds,
    )  # fmt: skip
    return replace(row, **values)


def runs_under(stack, **noise) -> list[MeasuredRow]:
    """A sweep of layouts, and the seconds that this stack predicts for them."""
    layouts = [
        job(
            "70b",
            tp=tp,
            pp=pp,
            dp=dp,
            micro_batch=micro_batch,
            sequences=dp * micro_batch * 8,
            zero=zero,
            seq_len=seq_len,
        )
        for tp, pp, dp, zero in ((8, 1, 4, 1), (4, 4, 2, 1), (1, 1, 64, 3), (2, 2, 16, 1), (8, 4, 1, 1))
        for micro_batch in (1, 2)
        for seq_len in (512, 4096, 16384)
    ]
    random = np.random.default_rng(0)
    scatter = np.exp(noise.get("deviation", 0.0) * random.normal(size=len(layouts)))
    return [measured(j, float(step_time(j, stack).seconds) * s) for j, s in zip(layouts, scatter, strict=True)]


def planted(**values: float):
    return replace(STANDARD, constants=replace(STANDARD.constants, **{k: np.asarray(v) for k, v in values.items()}))


class TestFit:
    def test_planted_constants_are_found(self):
        truth = {"matmul": 0.92, "attention": 0.7, "launch": 2.5e-3}
        found = fit(runs_under(planted(**truth)), STANDARD, name="mine")
        for name, value in truth.items():
            assert float(getattr(found.stack.constants, name)) == pytest.approx(value, rel=0.1), name
            before = float(getattr(STANDARD.constants, name))
            assert abs(getattr(found.stack.constants, name) - value) < 0.3 * abs(before - value)
        assert found.mean_error < 0.01
        assert (found.stack.name, found.runs, found.sources) == ("mine", 30, "here (30)")

    def test_nothing_new_changes_nothing(self):
        found = fit(runs_under(STANDARD), STANDARD, name="mine")
        for name in PRIORS:
            assert float(getattr(found.stack.constants, name)) == pytest.approx(
                float(getattr(STANDARD.constants, name)), rel=1e-3
            )

    def test_what_runs_do_not_speak_about_stays_open(self):
        """No run of these has 8-bit products or unfused attention."""
        found = fit(runs_under(planted(attention=0.7)), STANDARD, name="mine")
        for name in ("cast", "scores"):
            assert float(getattr(found.stack.constants, name)) == pytest.approx(
                float(getattr(STANDARD.constants, name))
            )
            assert found.open[name] == pytest.approx(1.5 * PRIORS[name].own, rel=0.01)
        assert found.open["attention"] < 0.8 * 1.5 * PRIORS["attention"].own

    def test_a_run_far_off_moves_little(self):
        rows = runs_under(STANDARD, deviation=0.02)
        spoilt = [replace(rows[0], seconds=3 * rows[0].seconds), *rows[1:]]
        clean, robust = (fit(r, STANDARD, name="mine").stack for r in (rows, spoilt))
        jobs = job("70b", tp=8, pp=2, dp=4, sequences=64)
        assert step_time(jobs, robust).seconds == pytest.approx(float(step_time(jobs, clean).seconds), rel=0.03)

    def test_one_run_is_enough_to_move_the_whole(self):
        rows = runs_under(STANDARD)[:1]
        found = fit([replace(rows[0], seconds=1.2 * rows[0].seconds)], STANDARD, name="mine")
        assert found.mean_error < 0.1

    def test_no_runs(self):
        with pytest.raises(ValueError, match="none has a step time"):
            fit([replace(runs_under(STANDARD)[0], seconds=None)], STANDARD, name="mine")


class TestFiles:
    """`fourfold calibrate`, on lines of a table as a user has them."""

    HEADER = "framework,gpu,gpu_count,layers,hidden,ffn_hidden,heads,vocab,seq_len,global_batch,micro_batch,tp,pp,dp"
    RUN = "mine,H100-80GB-SXM,8,32,4096,14336,32,128256,8192,64,1,1,1,8"

    def table(self, tmp_path: Path, seconds: str, run: str = RUN) -> Path:
        path = tmp_path / "mine.csv"
        path.write_text(f"{self.HEADER},measured_step_time_s\n{run},{seconds}\n")
        return path

    def test_makes_a_stack_that_loads(self, tmp_path: Path) -> None:
        out = tmp_path / "mine.toml"
        calibrate_files([self.table(tmp_path, "9.0")], out=out, base="standard", name="mine")
        assert load_stack(out).name == "mine"

    def test_never_over_another_file(self, tmp_path: Path) -> None:
        rows = self.table(tmp_path, "9.0")
        out = tmp_path / "mine.toml"
        out.write_text("precious")
        for path, words in ((out, "exists"), (rows, "must be|is a .toml")):
            before = path.read_text()
            with pytest.raises(ValueError, match=words):
                calibrate_files([rows], out=path, base="standard", name="mine")
            assert path.read_text() == before

    @pytest.mark.parametrize(
        ("seconds", "words"),
        [
            ("-5", r"line 2, column measured_step_time_s: -5 must be greater than 0"),
            ("0.5", r"of the dense peak of H100-80GB-SXM; must be below 100%"),
            ("", r"no run can be fitted: no step time and no token rate \(1 rows\)"),
        ],
    )
    def test_nonsense_is_refused(self, tmp_path: Path, seconds: str, words: str) -> None:
        out = tmp_path / "mine.toml"
        with pytest.raises(ValueError, match=words):
            calibrate_files([self.table(tmp_path, seconds)], out=out, base="standard", name="mine")
        assert not out.exists()

    def test_the_true_reason(self, tmp_path: Path) -> None:
        rows = self.table(tmp_path, "9.0", self.RUN.replace("H100-80GB-SXM", "GTX 1080"))
        with pytest.raises(ValueError, match=r"no run can be fitted: .*GTX 1080"):
            calibrate_files([rows], out=tmp_path / "mine.toml", base="standard", name="mine")


class TestProject:
    def test_stacks_and_chips_together(self):
        """A stack without runs gets what is common; a chip's share is found under several stacks."""
        rows = [replace(row, stack=name) for row in runs_under(STANDARD) for name in ("one", "two")]
        rows = [replace(row, group=f"{row.group} {row.stack}") for row in rows]
        names = ["one", "two", "none"]
        traits = {"portable": [False] * 3, "pxn": [True] * 3, "pp_inside": [True] * 3}
        found = fit_project(runs_of(rows, names), traits=traits, known={(0, "dp_hidden"): 0.02})
        assert np.mean(np.abs(found.residuals(runs_of(rows, names)))) < 0.02
        assert found.constants["dp_hidden"][0] == pytest.approx(0.02)
        assert found.constants["matmul"][2] == 1
        h100 = chip_index("h100")
        assert found.sustained.matmul_16[h100] == pytest.approx(STANDARD.constants.sustained.matmul_16[h100], rel=0.1)
        assert found.open_shares["matmul_16"][h100] < found.open_shares["matmul_16"][chip_index("v5p")]
        counted = np.bincount([h100] * len(rows), minlength=len(CHIPS))
        table = tomllib.loads(chips_text(found, source="test", runs={"matmul_16": counted}))
        assert (table["h100"]["matmul_16"]["runs"], table["v5p"]["matmul_16"]["runs"]) == (len(rows), 0)


class TestBand:
    def test_holds_nine_of_ten(self):
        residual = 0.05 * np.random.default_rng(1).normal(size=1000)
        low, high = band(residual, np.ones(1000), 0.1)
        inside = np.mean((np.exp(-residual) > low) & (np.exp(-residual) < high))
        assert 0.9 < inside < 0.96
        assert low * high == pytest.approx(1)

    def test_without_runs_it_is_what_is_expected(self):
        assert band(np.zeros(0), np.zeros(0), 0.1)[1] == pytest.approx(np.exp(NINETY * 0.1))

    def test_few_runs_narrow_it_little(self):
        few, many = (band(np.full(n, 0.01), np.ones(n), 0.1)[1] for n in (2, 200))
        assert np.exp(NINETY * 0.1) > few > many > 1.01


def test_weights():
    """Four runs of a source count as two; two of one configuration as 1.7 of one."""
    assert run_weights(["a"] * 4 + ["b"], ["1", "2", "3", "4", "5"]) == pytest.approx([0.5] * 4 + [1])
    assert run_weights(["a"] * 2, ["1", "1"]) == pytest.approx([2**-0.75] * 2)


def test_a_stack_is_read_as_it_was_written():
    found = fit(runs_under(planted(elementwise=2.0)), STANDARD, name='my "own"')
    again = parse_stack(stack_text(found), origin="mine")
    assert (again.name, again.saved_set, again.fused_attention) == ('my "own"', "standard", True)
    assert again.band == pytest.approx(found.stack.band, abs=1e-3)
    for name in PRIORS:
        assert float(getattr(again.constants, name)) == pytest.approx(
            float(getattr(found.stack.constants, name)), rel=1e-3
        )


def test_shipped_constants_are_those_of_the_calibration_half():
    """benchmarks/calibrate.py writes what lies in stacks/: nobody edits it by hand."""
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
    try:
        import calibrate as benchmark
    finally:
        sys.path.pop(0)
    rows = [row for row in (*benchmark.measured_rows(), *benchmark.llama3_rows()) if benchmark.is_fitted(row)]
    found = benchmark.fit_rows(rows)
    for index, name in enumerate(benchmark.NAMES):
        shipped = load_stack(name)
        for constant in PRIORS:
            fresh = float(found.constants[constant][index])
            assert float(getattr(shipped.constants, constant)) == pytest.approx(fresh, rel=0.05), (name, constant)
