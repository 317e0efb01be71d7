"""Pictures: pixels are those of the data, texts are there, equal input gives equal bytes, mistakes are named."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as MatplotlibFigure
from PIL import Image

from fourfold.layout import Grid, Schedule, generate
from fourfold.recipe.write import write_whole
from fourfold.report.drawing import KINDS, Boxes, HeatMap, Memory, Timeline
from fourfold.report.files import check_target
from fourfold.report.palette import ALARM, IDLE, KIND_NAMES, colour, ink_on
from fourfold.report.pictures import write_figure, write_heat_map, write_memory, write_timeline
from fourfold.report.pictures.canvas import DPI, text_width
from fourfold.report.pictures.strips import mixed
from fourfold.report.schedule import schedule_page, schedule_timeline
from fourfold.simulator.figures.figure import Figure, Panel, Series

GIB = 2**30
FIGURE_2 = generate(pp=3, v=2, num_micro_batches=6)
SCHEDULES = [FIGURE_2, generate(pp=4, v=2, num_micro_batches=9), generate(pp=4, num_micro_batches=8, kind="zb-h1")]

MEMORY = Memory(
    unit="s",
    rows=("rank 0", "rank 8"),
    parts=("weights", "activations", "never alive"),
    times=(np.array([0.0, 0.1, 0.3]), np.array([0.0, 0.2])),
    bytes=(np.array([[6, 6, 6], [1, 9, 2], [0, 0, 0]]) * GIB, np.array([[6, 6], [1, 5], [0, 0]]) * GIB),
    peaks=("15.0 GiB at 0.1 s, of which 9.00 GiB activations", "11.0 GiB at 0.2 s"),
    capacity=16.0 * GIB,
)

FIGURE = Figure(
    number="9",
    title="pipeline schedules",
    panels=(
        Panel(
            title="(a) throughput",
            unit="TFLOPs",
            x="schedule",
            series=(Series("all", {"AFAB": 401.9, "1F1B": 398.5}, {"AFAB": 402.3, "1F1B": None}),),
            reading_error=0.4,
        ),
        Panel(
            title="(b) relative speed",
            unit="%",
            x="tokens",
            series=(
                Series("cp 2", {"4K": 74.2, "8K": 82.1}, {"4K": 75.0, "8K": 83.0}),
                Series("cp 4", {"4K": 49.9, "8K": None}, {"4K": 51.0, "8K": 68.0}),
            ),
            reading_error=0.5,
            kind="lines",
        ),
    ),
    assumptions=(),
    differences=(),
)
HEAT_MAP = HeatMap("time of a step", "s", np.arange(16.0).reshape(2, 2, 2, 2), marked=((1, 0, 1, 1),))

WRITERS: dict[str, Callable[[Path], None]] = {
    "timeline": lambda path: write_timeline(path, schedule_timeline(FIGURE_2), schedule_page(FIGURE_2).memory),
    "memory": lambda path: write_memory(path, MEMORY),
    "heat map": lambda path: write_heat_map(path, HEAT_MAP),
    "figure": lambda path: write_figure(path, FIGURE),
}
each_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def pixels(path: Path) -> np.ndarray:
    """uint8 [height, width, 3]."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def rgb(colour_: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour_[1:]))


def texts(path: Path) -> list[str]:
    """Of all text elements of an SVG."""
    return ["".join(node.itertext()) for node in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


class TestTimeline:
    @pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}-{s.num_micro_batches}")
    def test_rows_of_pixels_are_the_played_rows(self, schedule: Schedule, tmp_path: Path) -> None:
        timeline = schedule_timeline(schedule)
        write_timeline(tmp_path / "a.png", timeline)
        colours = {rgb(colour(kind, c, schedule.v)): (kind, c) for kind in "FBIW" for c in range(schedule.v)}
        colours[rgb(IDLE)] = ("idle", 0)
        drawn = set()
        for line in pixels(tmp_path / "a.png"):
            known = [colours[pixel] for pixel in map(tuple, line.tolist()) if pixel in colours]
            drawn.add(tuple(key for key, _ in groupby(known)))
        for row in range(schedule.pp):
            assert tuple(self.expected(timeline, row)) in drawn

    @staticmethod
    def expected(timeline: Timeline, row: int) -> list[tuple[str, int]]:
        """What is seen from left to right."""
        boxes = timeline.boxes
        seen = []
        for i in np.flatnonzero(boxes.row == row).tolist():
            seen += [("idle", 0)] if boxes.wait[i] else []
            seen.append((KINDS[boxes.kind[i]], int(boxes.stage[i]) // timeline.pp))
        seen += [("idle", 0)] if boxes.end[boxes.row == row].max() < timeline.span else []
        return [key for key, _ in groupby(seen)]

    def test_length_of_boxes(self, tmp_path: Path) -> None:
        # The first row of Figure 2: 8 units of forwards, 2 of idle time, then a backward of 2; 42 in all.
        write_timeline(tmp_path / "a.png", schedule_timeline(FIGURE_2))
        image = pixels(tmp_path / "a.png").astype(int)
        # The first line of pixels that is mostly box or idle and not white is the upper end of the first row.
        busy = (image.sum(axis=2) < 3 * 250).sum(axis=1)
        line = image[int(np.flatnonzero(busy > image.shape[1] * 0.75)[0]) + 2]
        inside = np.flatnonzero(line.sum(axis=1) < 3 * 250)
        unit = (inside[-1] - inside[0]) / 42
        grey = np.flatnonzero((line == rgb(IDLE)).all(axis=1))
        first = grey[: int(np.argmax(np.diff(grey) > 1)) + 1]
        assert (first[0] - inside[0]) / unit == pytest.approx(8, abs=0.1)
        assert (first[-1] - inside[0]) / unit == pytest.approx(10, abs=0.1)

    def test_svg_says_each_micro_batch(self, tmp_path: Path) -> None:
        write_timeline(tmp_path / "a.svg", schedule_timeline(FIGURE_2))
        found = Counter(texts(tmp_path / "a.svg"))
        # 2 chunks on 3 ranks, forward and backward: 12 boxes per micro-batch. 0 and 5 are on the axis, 0 and 1 in the
        # legend, too: forward and backward.
        extra = Counter({"0": 3, "5": 1, "1": 2})
        assert {m: found[m] - extra[m] for m in map(str, range(6))} == dict.fromkeys(map(str, range(6)), 12)
        assert {"pp 0", "pp 1", "pp 2", "forward, by chunk", "backward, by chunk", "idle"} <= set(found)
        assert any("idle for 16.67% of computing time" in text for text in found)

    def test_long_schedule_is_fast_and_has_no_numbers(self, tmp_path: Path) -> None:
        timeline = schedule_timeline(generate(pp=16, v=8, num_micro_batches=128, messages=False))
        assert len(timeline.boxes.row) == 32_768
        start = time.process_time()
        write_timeline(tmp_path / "a.svg", timeline)
        write_timeline(tmp_path / "a.png", timeline)
        assert time.process_time() - start < 6  # a good second each
        assert "127" not in texts(tmp_path / "a.svg")
        assert "number in a box: micro-batch" not in texts(tmp_path / "a.svg")
        assert (tmp_path / "a.svg").stat().st_size < 8e6

    def test_a_row_has_all_numbers_or_none(self, tmp_path: Path) -> None:
        # Forwards in which one digit would fit, and two do not: 0 to 9 alone would look like all there are.
        timeline = schedule_timeline(generate(pp=1, v=1, num_micro_batches=60, kind="1f1b"))
        write_timeline(tmp_path / "a.svg", timeline)
        found = Counter(texts(tmp_path / "a.svg"))
        assert {number: found[str(number)] for number in (1, 9, 11, 59)} == dict.fromkeys((1, 9, 11, 59), 1)

    @pytest.mark.parametrize("suffix", ["png", "svg"])
    def test_no_wider_than_a_slide_shows(self, suffix: str, tmp_path: Path) -> None:
        page = schedule_page(generate(pp=16, v=8, num_micro_batches=32))
        assert page.timeline is not None
        rows = tuple(f"rank {8 * row} (dp 0 pp {row} cp 0 tp 0)" for row in range(16))
        write_timeline(tmp_path / f"a.{suffix}", replace(page.timeline, rows=rows), page.memory, heading=page.heading)
        if suffix == "svg":
            head = (tmp_path / "a.svg").read_text()[:600]
            assert 'width="1440pt"' in head  # 20 inches
        else:
            height, width, _ = pixels(tmp_path / "a.png").shape
            assert width == 20 * DPI
            assert height < width

    def test_heading_says_what_it_is_of(self, tmp_path: Path) -> None:
        page = replace(schedule_page(FIGURE_2), planted=("Slow on purpose: rank 77 computes 1.5 times as long.",))
        assert page.timeline is not None
        write_timeline(tmp_path / "a.svg", page.timeline, page.memory, heading=page.heading)
        found = [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts(tmp_path / "a.svg")]
        assert found.count(page.title) == 1
        assert not any(text.startswith(f"{page.title}:") for text in found)  # the timeline's own title
        assert "Slow on purpose: rank 77 computes 1.5 times as long." in found
        assert any("step 42 F" in text for text in found)

    def test_no_text_is_cut_off(self, tmp_path: Path) -> None:
        page = schedule_page(generate(pp=16, v=8, num_micro_batches=16))
        assert page.timeline is not None
        assert page.memory is not None
        peaks = tuple("holds (micro-batch, chunk) pairs, 39.4 GiB of them; " * 12 for _ in page.memory.rows)
        heading = (page.title, "exposed communication 12.3% of the step, tokens/s 2.04 M; " * 12)
        path = tmp_path / "a.png"
        write_timeline(path, page.timeline, replace(page.memory, peaks=peaks), heading=heading)
        image = pixels(path)
        assert (image[:, -int(0.1 * DPI) :] == 255).all()

    def test_equal_boxes_that_are_narrower_than_pixels_look_alike(self, tmp_path: Path) -> None:
        count = 2000
        start, zero, none = np.arange(count) * 1.0, np.zeros(count, dtype=int), np.full(count, -1)
        narrow = Boxes(zero, zero, zero, zero, start, start + 0.5, np.full(count, 0.5), none)
        write_timeline(tmp_path / "a.png", Timeline("t", "F", ("pp 0",), 1, 1, narrow, span=float(count)))
        image = pixels(tmp_path / "a.png").astype(int)
        red = [rgb(colour("F"))[0], rgb(IDLE)[0]]
        busy = np.abs(image[:, :, 0] - np.mean(red)) < 0.3 * (red[1] - red[0])
        line = image[int(busy.sum(axis=1).argmax()), :, 0]
        inside = line[400:-100]  # right of the label
        smooth = np.convolve(inside, np.full(14, 1 / 14), "valid")  # over ten boxes
        assert np.ptp(smooth) < 0.15 * (red[1] - red[0])

    def test_numbers_that_do_not_fit_are_left_out_alone(self, tmp_path: Path) -> None:
        timeline = schedule_timeline(generate(pp=1, num_micro_batches=2))  # F0 B0 F1 B1
        start, end = np.array([0.0, 1.0, 3.0, 3.001]), np.array([1.0, 3.0, 3.001, 5.0])
        timeline = replace(timeline, boxes=replace(timeline.boxes, start=start, end=end), span=5.0)
        write_timeline(tmp_path / "a.svg", timeline)
        numbers = [text for text in texts(tmp_path / "a.svg") if text in ("0", "1")]
        # F0, B0 and B1; 0 and 1 on the axis.
        assert Counter(numbers) == {"0": 3, "1": 2}

    def test_lanes_and_what_follows_the_pipeline(self, tmp_path: Path) -> None:
        timeline = schedule_timeline(FIGURE_2)
        lanes = boxes((0, "SEND_F", 0, 0, 1.0, 2.0), (1, "GATHER", 1, -1, 0.0, 3.0), (2, "REDUCE", 2, -1, 38.0, 42.0))
        step = boxes((0, "STEP", -1, -1, 42.0, 44.0))
        both = Boxes(**{n: np.concatenate([getattr(timeline.boxes, n), v]) for n, v in vars(step).items()})
        write_timeline(tmp_path / "a.svg", replace(timeline, boxes=both, lanes=lanes, span=44.0, unit="s"))
        write_timeline(tmp_path / "a.png", replace(timeline, boxes=both, lanes=lanes, span=44.0, unit="s"))
        found = texts(tmp_path / "a.svg")
        assert {KIND_NAMES[kind] for kind in ("SEND_F", "GATHER", "REDUCE", "STEP")} <= set(found)
        assert KIND_NAMES["SEND_B"] not in found
        assert "time (s)" in found
        image = pixels(tmp_path / "a.png")
        width = {k: int((image == rgb(colour(k))).all(axis=2).sum(axis=1).max()) for k in ("GATHER", "REDUCE")}
        assert width["REDUCE"] / width["GATHER"] == pytest.approx(4 / 3, rel=0.05)

    @pytest.mark.parametrize(("span", "label"), [(2e-5, "time (µs)"), (0.25, "time (ms)"), (3.0, "time (s)")])
    def test_seconds_in_a_unit_that_reads_well(self, span: float, label: str, tmp_path: Path) -> None:
        timeline = schedule_timeline(generate(pp=1, num_micro_batches=1))
        part = replace(timeline.boxes, start=timeline.boxes.start * span / 3, end=timeline.boxes.end * span / 3)
        write_timeline(tmp_path / "a.svg", replace(timeline, boxes=part, span=span, unit="s"))
        assert label in texts(tmp_path / "a.svg")


def test_pixels_have_the_mean_colour_of_what_is_on_them() -> None:
    """Against a thousand samples per pixel."""
    random = np.random.default_rng(0)
    edges = np.sort(random.uniform(0, 30, 60))
    edges[20:22] = edges[19], edges[19] + 5.0  # narrow ones, wide ones, and some that touch
    edges = np.maximum.accumulate(edges)
    left, right = edges[::2], np.maximum(edges[1::2], edges[::2] + 0.7)
    left = np.maximum.accumulate(np.append(left[:1], np.maximum(left[1:], right[:-1])))
    right = np.minimum(np.maximum(right, left + 0.7), left + 4.0)
    keep = np.append(left[1:] >= right[:-1], True) & (right < 30)
    left, right = left[keep], right[keep]
    colours, ground = random.random((len(left), 3)), np.full(3, 0.9)
    at = (np.arange(30_000) + 0.5) / 1000
    samples = np.tile(ground, (len(at), 1))
    for one, other, shade in zip(left, right, colours, strict=True):
        samples[(at >= one) & (at < other)] = shade
    expected = samples.reshape(30, 1000, 3).mean(axis=1)
    np.testing.assert_allclose(mixed(left, right, colours, ground, 30), expected, atol=3e-3)


@pytest.mark.parametrize("size", [5.0, 8.0, 12.7, 16.0])
def test_texts_are_as_wide_as_measured(size: float) -> None:
    text = "peaks at 48.1 GiB in 113B0 (backward of micro-batch 0 in stage 113), 2.62 s into the step"
    figure = MatplotlibFigure(dpi=DPI)
    drawn = figure.text(0, 0, text, size=size)
    extent = drawn.get_window_extent(FigureCanvasAgg(figure).get_renderer())
    assert text_width(text, size) == pytest.approx(extent.width / DPI, rel=2e-3)


def boxes(*entries: tuple[int, str, int, int, float, float]) -> Boxes:
    row, kind, stage, micro_batch, start, end = map(np.array, zip(*entries, strict=True))
    kind = np.array([KINDS.index(k) for k in kind])
    none = np.full(len(row), -1)
    return Boxes(row, kind, stage, micro_batch, start, end, wait=np.zeros(len(row)), cause=none)


class TestMemory:
    def test_texts(self, tmp_path: Path) -> None:
        write_memory(tmp_path / "a.svg", MEMORY)
        found = texts(tmp_path / "a.svg")
        assert "rank 0: 15.0 GiB at 0.1 s, of which 9.00 GiB activations" in found  # of the row that peaks
        assert {"rank 0", "rank 8", "weights", "activations", "capacity", "GiB", "time (ms)"} <= set(found)
        assert "never alive" not in found

    def test_counts_have_no_bytes(self, tmp_path: Path) -> None:
        page = schedule_page(FIGURE_2)
        assert page.memory is not None
        write_memory(tmp_path / "a.svg", page.memory)
        found = texts(tmp_path / "a.svg")
        assert any("(micro-batch, chunk) pairs in flight" in text for text in found)
        assert not any("iB" in text for text in found)

    def test_areas_are_bytes_times_seconds(self, tmp_path: Path) -> None:
        # Of rank 0: weights 6 GiB for 0.3 s; activations 1 for 0.1 s and 9 for 0.2 s, the last point being the end.
        write_memory(tmp_path / "a.png", replace(MEMORY, capacity=None))
        image = pixels(tmp_path / "a.png")
        weights, activations = (int((image == rgb(c)).all(axis=2).sum()) for c in ("#0072b2", "#e69f00"))
        assert activations / weights == pytest.approx((0.1 * 1 + 0.2 * 9) / (0.3 * 6), rel=0.05)

    def test_many_rows_name_some(self, tmp_path: Path) -> None:
        page = schedule_page(generate(pp=32, num_micro_batches=64, kind="1f1b"))
        assert page.memory is not None
        write_memory(tmp_path / "a.svg", page.memory)
        named = [text for text in texts(tmp_path / "a.svg") if text.startswith("pp ") and ":" not in text]
        assert named[0] == "pp 0"
        assert named[-1] == "pp 31"
        assert len(named) < 12


class TestHeatMap:
    def test_every_rank_is_where_it_should_be(self, tmp_path: Path) -> None:
        write_heat_map(tmp_path / "a.png", replace(HEAT_MAP, marked=()))
        image = pixels(tmp_path / "a.png")
        shades = (matplotlib.colormaps["viridis"](np.arange(16) / 15)[:, :3] * 255).round().astype(int)
        centre = []
        for shade in shades:
            y, x = np.nonzero(np.abs(image.astype(int) - shade).max(axis=2) <= 1)
            centre.append((np.median(x), np.median(y)))
        x, y = np.array(centre).T.reshape(2, 2, 2, 2, 2)  # [dp, pp, cp, tp]
        cell = x[0, 0, 0, 1] - x[0, 0, 0, 0]
        assert cell > 20
        near = {"abs": 2.0}
        assert x[..., 1] - x[..., 0] == pytest.approx(np.full((2, 2, 2), cell), **near)  # tp: next to each other
        assert x[:, :, 1] - x[:, :, 0] == pytest.approx(np.full((2, 2, 2), 2 * cell), **near)  # cp: after all tp
        assert y[:, 1] - y[:, 0] == pytest.approx(np.full((2, 2, 2), cell), **near)  # pp: below each other
        assert x[:, 1] - x[:, 0] == pytest.approx(np.zeros((2, 2, 2)), **near)
        assert (x[1] - x[0] > 4 * cell).all()  # dp: another block
        assert y[1] - y[0] == pytest.approx(np.zeros((2, 2, 2)), **near)

    def test_marked_ranks_are_framed_and_named(self, tmp_path: Path) -> None:
        write_heat_map(tmp_path / "a.svg", HEAT_MAP)
        rank = Grid(tp=2, cp=2, pp=2, dp=2).rank(dp=1, pp=0, cp=1, tp=1)
        assert f"1: rank {rank} (dp 1, pp 0, cp 1, tp 1), 11 s" in texts(tmp_path / "a.svg")
        write_heat_map(tmp_path / "a.png", HEAT_MAP)
        assert (pixels(tmp_path / "a.png") == rgb(ALARM)).all(axis=2).sum() > 100

    def test_one_slow_rank_does_not_make_the_others_look_alike(self, tmp_path: Path) -> None:
        values = 1 + 0.1 * np.arange(128.0).reshape(4, 4, 1, 8) / 127
        values[2, 1, 0, 3] = 5.0
        write_heat_map(tmp_path / "a.png", HeatMap("t", "s", values))
        found = {tuple(pixel) for pixel in pixels(tmp_path / "a.png").reshape(-1, 3).tolist()}
        known = matplotlib.colormaps["viridis"](np.linspace(0, 1, 256))[:, :3]
        assert len(found & {tuple(shade) for shade in (known * 255).round().astype(int).tolist()}) > 100
        assert rgb("#e8382c") in found
        write_heat_map(tmp_path / "a.svg", HeatMap("t", "s", values), heading=("a model", "step 3 s"))
        rank = Grid(tp=8, cp=1, pp=4, dp=4).rank(dp=2, pp=1, cp=0, tp=3)
        said = texts(tmp_path / "a.svg")
        assert f"Red: far above all others, rank {rank} (dp 2, pp 1, cp 0, tp 3), 5 s" in said
        assert {"a model", "step 3 s", "t"} <= set(said)

    @pytest.mark.parametrize(
        "shape", [(8, 16, 16, 8), (128, 16, 1, 8), (64, 16, 16, 8), (1, 1, 1, 1), (1, 1, 1, 8), (7, 3, 1, 1)]
    )
    def test_all_sizes(self, shape: tuple[int, int, int, int], tmp_path: Path) -> None:
        write_heat_map(tmp_path / "a.png", HeatMap("t", "s", np.random.default_rng(0).random(shape)))
        height, width, _ = pixels(tmp_path / "a.png").shape
        assert 600 < width < 1700
        assert 150 < height < 1700

    def test_labels_of_16384_ranks(self, tmp_path: Path) -> None:
        write_heat_map(tmp_path / "a.svg", HeatMap("t", "s", np.zeros((8, 16, 16, 8))))
        found = set(texts(tmp_path / "a.svg"))
        assert {f"dp {i}" for i in range(8)} | {f"cp {i}" for i in range(16)} | {"pp 0", "pp 8"} <= found
        assert any(text.startswith("16,384 ranks: a block per DP group") for text in found)


class TestFigure:
    def test_texts(self, tmp_path: Path) -> None:
        write_figure(tmp_path / "a.svg", FIGURE)
        found = texts(tmp_path / "a.svg")
        assert "Figure 9: pipeline schedules" in found
        assert {"401.9", "398.5", "402.3"} <= set(found)  # to a tenth, as the published values are read
        assert {"AFAB", "1F1B", "TFLOPs", "schedule", "4K", "8K", "cp 2", "cp 4", "tokens", "Fourfold"} <= set(found)
        assert "nan" not in found

    def test_size_for_the_documentation(self, tmp_path: Path) -> None:
        write_figure(tmp_path / "a.png", FIGURE)
        assert pixels(tmp_path / "a.png").shape[1] == 900
        assert (tmp_path / "a.png").stat().st_size < 150_000

    def test_bars_are_as_high_as_their_values(self, tmp_path: Path) -> None:
        series = Series("x", {"a": None, "b": None}, {"a": 4.0, "b": 1.0})
        panel = Panel("t", "u", "x", (series,), reading_error=0.0)
        write_figure(tmp_path / "a.png", replace(FIGURE, panels=(panel,)))
        ours = (pixels(tmp_path / "a.png") == rgb("#0072b2")).all(axis=2)
        heights = ours.sum(axis=0)
        high, low = heights[heights > 0.9 * heights.max()], heights[(heights > 10) & (heights < 0.5 * heights.max())]
        assert np.median(high) / np.median(low) == pytest.approx(4, rel=0.05)

    @pytest.mark.parametrize(
        ("error", "values", "printed"),
        [
            (0.05, (100.05, 99.2), {"100.05", "99.20"}),
            (1.0, (319.4, 340.0), {"319", "340"}),
            (0.1, (4.0, 8.0), {"4", "8"}),
        ],
    )
    def test_values_are_as_exact_as_they_were_read(
        self, error: float, values: tuple[float, float], printed: set[str], tmp_path: Path
    ) -> None:
        series = Series("x", dict(zip("ab", values, strict=True)), {})
        panel = Panel("t", "u", "x", (series,), reading_error=error)
        write_figure(tmp_path / "a.svg", replace(FIGURE, panels=(panel,)))
        assert printed <= set(texts(tmp_path / "a.svg"))

    def test_many_points_and_long_labels(self, tmp_path: Path) -> None:
        ranks = {str(i): float(i % 7) for i in range(2000)}
        words = {f"a long name, number {i}": 1.0 + i for i in range(6)}
        lines = Panel("lines", "s", "rank", (Series("x", ranks, ranks),), reading_error=0.1, kind="lines")
        bars = Panel("bars", "s", "", (Series("x", words, words), Series("y", words, words)), reading_error=0.0)
        write_figure(tmp_path / "a.png", replace(FIGURE, panels=(lines, bars)))
        assert pixels(tmp_path / "a.png").shape[1] == 900
        write_figure(tmp_path / "a.svg", replace(FIGURE, panels=(lines, bars)))
        found = texts(tmp_path / "a.svg")
        assert all(any(f"number {i}" in text for text in found) for i in range(6))
        assert 10 < sum(text in ranks for text in found) < 60  # with values of the bars


class TestFiles:
    @each_writer
    @pytest.mark.parametrize("suffix", [".png", ".svg", ".PNG"])
    def test_same_input_same_bytes_whatever_the_users_style(
        self, write: Callable[[Path], None], suffix: str, tmp_path: Path
    ) -> None:
        write(tmp_path / f"a{suffix}")
        with matplotlib.rc_context({"font.size": 20.0, "axes.facecolor": "black", "svg.fonttype": "path"}):
            before = dict(matplotlib.rcParams)
            write(tmp_path / f"b{suffix}")
            assert dict(matplotlib.rcParams) == before
        data = (tmp_path / f"a{suffix}").read_bytes()
        assert data == (tmp_path / f"b{suffix}").read_bytes()
        assert b"Software" not in data
        assert b"<dc:date>" not in data
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"a{suffix}", f"b{suffix}"]

    def test_same_bytes_in_another_process(self, tmp_path: Path) -> None:
        program = (
            "import sys; from pathlib import Path; from fourfold.layout import generate\n"
            "from fourfold.report.pictures import write_timeline; from fourfold.report.schedule import schedule_page\n"
            "page = schedule_page(generate(pp=3, v=2, num_micro_batches=6))\n"
            "write_timeline(Path(sys.argv[1]), page.timeline, page.memory)\n"
            "assert 'matplotlib.pyplot' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program, tmp_path / "a.svg"], check=True, env={"PYTHONHASHSEED": "7"})
        WRITERS["timeline"](tmp_path / "b.svg")
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    @each_writer
    def test_wrong_ending(self, write: Callable[[Path], None], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"a\.jpg: ends in '\.jpg'; must end in \.png or \.svg, such as .*a\.png"):
            write(tmp_path / "a.jpg")
        with pytest.raises(ValueError, match=r"has no ending; must end in \.png or \.svg"):
            write(tmp_path / "a")
        assert not list(tmp_path.iterdir())

    def test_folders(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").mkdir()
        with pytest.raises(ValueError, match=r"a\.png: is a folder; give the name of a file"):
            check_target(tmp_path / "a.png", (".png",))
        with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
            check_target(tmp_path / "nowhere" / "a.png", (".png",))

    def test_folder_without_permission(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.access", lambda *_: False)  # whoever runs the tests may be allowed everything
        with pytest.raises(ValueError, match="cannot be written to"):
            check_target(tmp_path / "a.png", (".png",))

    def test_without_matplotlib(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec

        def without(name: str, *rest: Any) -> Any:
            return None if name == "matplotlib" else find(name, *rest)

        monkeypatch.setattr("fourfold.report.pictures.find_spec", without)
        with pytest.raises(ValueError, match=r'not installed: pip install "fourfold\[report\]"'):
            write_heat_map(tmp_path / "a.png", HEAT_MAP)

    def test_whole_or_as_it_was(self, tmp_path: Path) -> None:
        write_whole(tmp_path / "a", b"old")
        write_whole(tmp_path / "a", b"new")
        assert (tmp_path / "a").read_bytes() == b"new"
        (tmp_path / "folder" / "inside").mkdir(parents=True)
        with pytest.raises(OSError, match="folder") as caught:
            write_whole(tmp_path / "folder", b"data")
        assert caught.value.filename == str(tmp_path / "folder")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "folder"]


class TestPalette:
    @pytest.mark.parametrize("num_chunks", [1, 2, 7, 16])
    def test_chunks_differ_and_get_darker(self, num_chunks: int) -> None:
        for kind in "FBIW":
            brightness = [sum(rgb(colour(kind, chunk, num_chunks))) for chunk in range(num_chunks)]
            assert sorted(set(brightness), reverse=True) == brightness
        everything = {colour(kind, chunk, num_chunks) for kind in KINDS for chunk in range(num_chunks)}
        assert len(everything) == 4 * num_chunks + len(KINDS) - 4

    def test_numbers_are_readable_on_every_box(self) -> None:
        def luminance(text: str) -> float:  # WCAG 2
            parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(text)]
            return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

        for kind in KINDS:
            for chunk in range(8):
                box = colour(kind, chunk, 8)
                low, high = sorted((luminance(box), luminance(ink_on(box))))
                assert (high + 0.05) / (low + 0.05) >= 4  # 3 is asked of large text, 4.5 of small

    def test_all_kinds_have_names(self) -> None:
        assert set(KIND_NAMES) == set(KINDS)
