"""Accuracy of tables: the right rows in the right sets, figures that follow from the rows, halves apart."""

from __future__ import annotations

import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fourfold.planner.measured.accuracy import Accuracy, accuracy_json, score_tables
from fourfold.planner.measured.memory_accuracy import PeakPrediction, score_memory
from fourfold.planner.measured.scores import kendall_tau
from fourfold.planner.measured.tables import MEASUREMENTS

PUBLISHED = MEASUREMENTS / "published.csv"


@cache
def everything() -> Accuracy:
    return score_tables(half="both")


@cache
def published() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_no_row_is_lost() -> None:
    found = score_tables([PUBLISHED])
    assert len(found.rows) + sum(found.unscored.values()) == 1083
    halves = {half: score_tables([PUBLISHED], half=half) for half in ("reported", "calibrated")}
    assert {len(half.rows) + sum(half.unscored.values()) for half in halves.values()} == {1083}
    reported, calibrated = ({row.id for row in half.rows} for half in halves.values())
    assert not reported & calibrated
    assert reported | calibrated == {row.id for row in found.rows}


def test_sets_are_those_of_the_columns() -> None:
    dense = [row for row in published() if row["quality"] == "A" and not row["n_experts"]]
    sixteen = ("bf16", "bf16 (amp)", "bf16 (fp32 grad accumulation)", "fp16")
    bar = [row for row in dense if row["precision"] in sixteen and row["gpu"][:4] in ("A100", "H100")]
    bar = [row for row in bar if int(row["gpu_count"]) >= 8]
    sets = everything().sets
    assert sets["all_dense_A"].rows == len(dense) == 632
    assert sets["fp8"].rows == sum("fp8" in row["precision"] for row in dense)
    assert sets["bar_rows"].rows == len(bar)
    assert sets["a100_multi_node"].rows == 109
    assert sets["a100_one_node"].rows == 1440


def test_figures_follow_from_the_rows() -> None:
    found: dict[str, Any] = json.loads(json.dumps(accuracy_json(everything())))
    ids = {row["id"] for row in published() if row["quality"] == "A" and not row["n_experts"]}
    rows = [row for row in found["rows"] if row["id"] in ids]
    errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in rows]
    assert found["all_dense_A"]["mape_percent"] == pytest.approx(100 * sum(map(abs, errors)) / len(errors))
    assert found["all_dense_A"]["bias_percent"] == pytest.approx(100 * sum(errors) / len(errors))
    inside = [row["low_seconds"] <= row["measured_seconds"] <= row["high_seconds"] for row in rows]
    assert found["all_dense_A"]["in_band_percent"] == pytest.approx(100 * sum(inside) / len(inside))
    sources = Counter(row["source"] for row in rows)
    assert {name: found["sources"][name]["rows"] for name in sources} == dict(sources)
    mean = sum(found["sources"][name]["mape_percent"] for name in sources) / len(sources)
    assert found["all_dense_A"]["macro_mape_percent"] == pytest.approx(mean)


def test_groups_follow_from_the_rows() -> None:
    groups = [group for group in everything().groups if group.table == "a100_multi_node"]
    assert sorted(group.rows for group in groups) == [15, 21, 26, 47]
    for group in groups:
        rows = [row for row in everything().rows if row.setting == group.setting]
        predicted, measured = zip(*((row.predicted_seconds, row.measured_seconds) for row in rows), strict=True)
        assert group.kendall_tau == pytest.approx(kendall_tau(predicted, measured))
        chosen = measured[predicted.index(min(predicted))]
        assert group.regret_percent == pytest.approx(100 * (chosen / min(measured) - 1), abs=0.02)
    assert all(group.layouts >= 5 for group in everything().groups)


def test_the_half_by_default() -> None:
    own = score_tables()
    assert own.half == "reported"
    assert {row.half for row in own.rows} == {"reported"}
    assert score_tables([PUBLISHED]).half == "both"


MISSED = {"a100_multi_node least tau": 0.63, "a100_multi_node largest regret %": 4.71}
"""Not met, as docs/planning.md says: a dozen of the 109 runs contradict their neighbours (24 s beside 15 s and 20 s of
layouts between which it lies). Whoever changes these figures, for better or worse, says so there."""


def test_what_must_be_shown_is_shown() -> None:
    bars = score_tables().bars
    assert all(bar.ok is not None for bar in bars)
    missed = {bar.name: bar.value for bar in bars if not bar.ok}
    assert missed == pytest.approx(MISSED, rel=0.02)


def test_a_table_of_others(tmp_path: Path) -> None:
    """One copied row: its own figures, no bars of tables that are not there, and it is in all its sets."""
    row = next(
        row
        for row in published()
        if row["source_key"] == "dgxc-benchmarking" and row["quality"] == "A" and row["precision"] == "bf16"
    )
    path = tmp_path / "mine.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerow(row)
    found = score_tables([path])
    assert [row.id for row in found.rows] == [row["id"]]
    assert found.unscored == {}
    assert {bar.name for bar in found.bars if bar.value is not None} <= {
        "bar_rows MAPE %", "bar_rows macro MAPE %", "all_dense_A MAPE %", "all_dense_A in band %"}  # fmt: skip


def test_memory_score_by_hand() -> None:
    peaks = [PeakPrediction("", "", "0", predicted, 100.0) for predicted in (101.0, 98.5, 100.0, 103.0)]
    found = score_memory(peaks)
    assert found.rows == 4
    assert found.mape_percent == pytest.approx((1 + 1.5 + 0 + 3) / 4)
    assert found.bias_percent == pytest.approx((1 - 1.5 + 0 + 3) / 4)
    assert found.max_error_percent == pytest.approx(3)
    assert found.max_low_percent == pytest.approx(1.5)


def test_layouts_that_ran_stand_beside_those_that_did_not() -> None:
    ran = sum(row["source_key"] == "aleph-alpha-layouts" for row in published())
    for fits in (everything().fits, score_tables([MEASUREMENTS / "out_of_memory.csv"]).fits):
        assert (fits.ran, fits.out_of_memory, fits.rows) == (ran, 321, ran + 321)
        wrong = fits.ran_predicted_not_to_fit + fits.out_of_memory_predicted_to_fit
        assert fits.right_percent == pytest.approx(100 * (1 - wrong / fits.rows))


def test_memory_says_that_it_is_in_sample(tmp_path: Path) -> None:
    """The saved sets were chosen on these very rows; of a file of somebody else nothing is claimed."""
    mine = tmp_path / "mine.csv"
    mine.write_bytes((MEASUREMENTS / "b200_rank_memory.csv").read_bytes())
    for found, seen in ((score_tables([MEASUREMENTS / "b200_rank_memory.csv"]), True), (score_tables([mine]), False)):
        table = accuracy_json(found)["memory"]
        assert [table[name]["in_sample"] for name in ("rank_memory", "peak_memory", "fits")] == [seen] * 3
        bars = [bar["name"] for bar in accuracy_json(found)["bars"]]
        names = [name for name in bars if "memory" in name or "fits" in name]
        assert {name.endswith(", in sample") for name in names} == {seen}
        assert len([bar for bar in found.bars if bar.name.endswith("in sample")]) == 5 * seen


def test_memory_alone_is_scored_without_times() -> None:
    found = score_tables([MEASUREMENTS / "b200_rank_memory.csv"])
    assert found.rows == ()
    assert {peak.source for peak in found.peaks} == {"simumax-b200"}
    assert found.rank_memory.rows == len(found.peaks) > 11
