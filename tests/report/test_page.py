"""The HTML page: its numbers come back as they were, nothing leaves it, and a browser shows what it should."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fourfold.layout import Action, compile_program, generate
from fourfold.layout.actions import COMPUTE, Kind
from fourfold.report.drawing import KINDS, Boxes, HeatMap, Memory, Page, Split, Table, Timeline
from fourfold.report.page import page_html, write_page
from fourfold.report.page.words import quantity
from fourfold.report.palette import IDLE, colour
from fourfold.report.scale import heat_scale

PP, V, MICRO_BATCHES = 16, 8, 32
EVIL = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'> \"' & \u2028"


@cache
def program():
    return compile_program(generate(pp=PP, v=V, num_micro_batches=MICRO_BATCHES, kind="interleaved"))


@cache
def played():
    """Forward 4 ms, backward 8 ms, a message 0.5 ms; the stages of pp 5 take a tenth longer."""
    slow = 1 + 0.1 * (np.arange(PP * V) % PP == 5)
    return program().play(forward=4e-3 * slow, backward=8e-3 * slow, message=0.5e-3)


@cache
def timeline() -> Timeline:
    """8,192 boxes, and a message for every computation that needs one from another rank."""
    times = played()
    boxes, lanes = [], []
    causes = {}
    for i, action in enumerate(program().actions):
        if action.kind not in COMPUTE:
            continue
        before, need = program().previous[i], program().needs[i]
        wait = times.start[i] - (times.end[before] if before < len(times.end) else 0.0)
        sentence = f"Waits for {program().actions[need]}." if wait > 1e-12 else ""
        cause = causes.setdefault(sentence, len(causes)) if sentence else -1
        row, kind = int(program().pp_rank[i]), KINDS.index(action.kind.value)
        boxes.append((row, kind, action.stage, action.micro_batch, times.start[i], times.end[i], wait, cause))
        if times.delay[i]:
            sent, sender = program().actions[need], int(program().pp_rank[need])
            kind = KINDS.index(f"SEND_{sent.kind.value}")
            end = times.end[need]
            lanes.append((sender, kind, sent.stage, sent.micro_batch, end, end + times.delay[i], 0.0, -1))
    return Timeline(
        title="interleaved",
        unit="s",
        rows=tuple(f"pp {rank}" for rank in range(PP)),
        num_chunks=V,
        pp=PP,
        boxes=Boxes(*map(np.array, zip(*boxes, strict=True))),
        lanes=Boxes(*map(np.array, zip(*lanes, strict=True))),
        causes=tuple(causes),
        span=times.step_time,
    )


@cache
def memory() -> Memory:
    """Two parts: weights that stay, and 0.3 GiB for each pair in flight."""
    times, held = [], []
    for rank in range(PP):
        at, live = played().live_chunks(rank)
        last = np.append(at[1:] != at[:-1], True)
        times.append(at[last])
        held.append(np.array([np.full(last.sum(), 8.0 * 2**30), live[last] * 0.3 * 2**30]))
    peaks = tuple(f"{rank} has its reason" for rank in range(PP))
    return Memory(
        "s", timeline().rows, ("weights", "activations"), tuple(times), tuple(held), peaks, capacity=60 * 2**30
    )


@cache
def chunks() -> Memory:
    """0.3 GiB for each pair in flight, by the chunk of its stage."""
    held = []
    for rank, times in enumerate(memory().times):
        by_chunk = np.zeros((V, len(times)))
        for chunk in range(V):
            for batch in range(MICRO_BATCHES):
                stage = chunk * PP + rank
                first, last = (played().span(Action(kind, stage, batch)) for kind in (Kind.FORWARD, Kind.BACKWARD))
                by_chunk[chunk] += (first[0] <= times) & (times < last[1])
        held.append(by_chunk * 0.3 * 2**30)
    parts = tuple(f"chunk {chunk}" for chunk in range(V))
    peaks = tuple(f"{rank} by chunk" for rank in range(PP))
    return Memory("s", timeline().rows, parts, memory().times, tuple(held), peaks, by_chunk=True)


@cache
def heat_map(dp: int = 128, pp: int = 16, cp: int = 1, tp: int = 8) -> HeatMap:
    values = 1 + 0.01 * np.random.default_rng(0).standard_normal((dp, pp, cp, tp))
    values[dp // 2, pp // 2, cp - 1, tp - 1] = 1.5
    return HeatMap("compute", "s", values, ((dp // 2, pp // 2, cp - 1, tp - 1),))


@cache
def page() -> Page:
    return Page(
        "One step",
        (("step time", "3.1 s"),),
        ("pp 5 is slow.",),
        timeline(),
        memory(),
        (Split("Where time goes", "s", (("compute", 3.0), ("wait", 1.0))),),
        (heat_map(),),
        (Table("What would help", ("change", "step"), (("pp 5 as fast", "2.9 s"), ("no messages", "3.05 s"))),),
        ("Messages are free.",),
        chunks=chunks(),
    )


# The document.


def decoded(html: str) -> tuple[dict[str, Any], Any]:
    """The page's data, and how to read a column of it; written against docs of the format, not with its code."""
    data, columns = (
        re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', html, re.DOTALL)[1]
        for name in ("data", "columns")
    )
    raw = zlib.decompress(base64.b64decode(columns))

    def column(what: dict[str, Any]) -> np.ndarray:
        dtype = np.dtype(
            {"Int8Array": "i1", "Int16Array": "<i2", "Int32Array": "<i4", "Float32Array": "<f4"}[what["type"]]
        )
        values = np.frombuffer(raw, dtype, count=what["length"], offset=what["at"])
        return np.cumsum(values.astype(np.int64)) * what["scale"] if "scale" in what else values

    return json.loads(data), column


@pytest.mark.parametrize("name", ["boxes", "lanes"])
def test_boxes_come_back(name: str) -> None:
    data, column = decoded(page_html(page()))
    shown, boxes = data["timeline"][name], getattr(timeline(), name)
    order = np.lexsort((boxes.start, boxes.row))
    rows = np.repeat(np.arange(PP), np.diff(column(shown["first"])))
    np.testing.assert_array_equal(rows, boxes.row[order])
    for field, key in (("kind", "kind"), ("stage", "stage"), ("micro_batch", "microBatch"), ("cause", "cause")):
        np.testing.assert_array_equal(column(shown[key]), getattr(boxes, field)[order])
    for field in ("start", "end", "wait"):
        np.testing.assert_allclose(
            column(shown[field]), getattr(boxes, field)[order], rtol=0, atol=2e-9 * timeline().span
        )
    assert tuple(data["timeline"]["causes"]) == timeline().causes


def test_memory_and_heat_map_come_back() -> None:
    data, column = decoded(page_html(page()))
    shown = data["memory"][0]
    first, times, held = column(shown["first"]), column(shown["times"]), column(shown["bytes"])
    for row in range(PP):
        begin, end = first[row], first[row + 1]
        np.testing.assert_allclose(times[begin:end], memory().times[row], rtol=0, atol=1e-8)
        np.testing.assert_allclose(held[2 * begin : 2 * end].reshape(2, -1), memory().bytes[row], rtol=1e-7)
    values = column(data["heatMaps"][0]["values"]).reshape(data["heatMaps"][0]["shape"])
    np.testing.assert_allclose(values, heat_map().values, rtol=1e-7)


def test_texts_cannot_break_out() -> None:
    evil = replace(
        page(),
        title=EVIL,
        summary=((EVIL, EVIL),),
        findings=(EVIL,),
        timeline=replace(timeline(), title=EVIL, rows=(EVIL,) * PP, causes=(EVIL,) * len(timeline().causes)),
        memory=replace(memory(), rows=(EVIL,) * PP, parts=(EVIL,) * 2, peaks=(EVIL,) * PP),
        chunks=replace(chunks(), rows=(EVIL,) * PP, parts=(EVIL,) * V, peaks=(EVIL,) * PP),
        splits=(Split(EVIL, EVIL, ((EVIL, 1.0),)),),
        heat_maps=(HeatMap(EVIL, EVIL, np.ones((1, 1, 1, 1))),),
        tables=(Table(EVIL, (EVIL,), ((EVIL,),), EVIL),),
        notes=(EVIL,),
        planted=(EVIL,),
    )
    html = page_html(evil)
    assert "<script>window.broken" not in html
    assert "<img" not in html
    assert decoded(html)[0]["timeline"]["rows"] == [EVIL] * PP
    assert html.count("<script") == html.count("</script>") == 3


def test_no_address_is_in_it() -> None:
    html = page_html(page())
    assert not re.search(r"https?:|\bsrc=|url\(|@import|\bimport\(", html)
    assert re.findall(r'href="([^"]*)"', html) == ["data:,"]
    assert "default-src 'none'" in html


def test_parts_that_are_not_there_are_left_out() -> None:
    html = page_html(Page("Nothing", ()))
    assert "<h1>Nothing</h1>" in html
    assert "<section" not in html
    html = page_html(replace(page(), memory=None, chunks=None))
    assert 'id="memory"' not in html
    assert 'id="timeline"' in html


def test_extremes_of_a_heat_map_are_named() -> None:
    html = page_html(Page("Map", (), heat_maps=(heat_map(),)))
    # 1.5 s at dp 64, pp 8, cp 0, tp 7: 7 + 8 x (0 + 1 x (8 + 16 x 64)) = 8263.
    assert "Highest 1.5 s: rank 8263 (dp 64 pp 8 cp 0 tp 7)." in html
    values = np.full((1, 1, 1, 2), np.nan)
    assert "No rank has a value." in page_html(Page("Map", (), heat_maps=(HeatMap("m", "s", values),)))


def test_numbers_of_a_table_are_aligned_right() -> None:
    table = Table("T", ("name", "time", "share", "rate"), (("a", "2.9 s", "9.2 %", "-"), ("7B", "-", "12%", "3 GB/s")))
    html = page_html(Page("P", (), tables=(table,)))
    assert re.findall(r"<th( class=\"number\")?>(\w+)</th>", html) == [
        ("", "name"),
        *((' class="number"', name) for name in ("time", "share", "rate")),
    ]


def test_bad_values_stand_out_and_only_few_findings_come_first() -> None:
    summary = (("step time", "3.1 s"), ("peak memory", "90 GiB"))
    html = page_html(replace(page(), summary=summary, warnings=("peak memory",), findings=tuple("abcde"), more=("f",)))
    assert re.findall(r'<div class="bad"><dt>(.*?)</dt>', html) == ["peak memory"]
    first, rest = html.split('id="timeline"')
    assert re.findall(r"<li>(\w)</li>", first) == list("abcd")
    assert re.findall(r"<li>(\w)</li>", rest.split('id="memory"')[0]) == list("ef")
    assert "More findings (2)" in rest


def test_ranks_with_the_same_peak_share_a_row() -> None:
    times = (np.array([0.0, 1.0]),) * 3
    small = np.array([[8.0, 8.0], [1.0, 2.0], [0.0, 0.01]]) * 2**30
    large = small * np.array([[1.0], [2.0], [1.0]])
    what = Memory("s", ("pp 0", "pp 1", "pp 2"), ("w", "a", "b"), times, (small, small, large), ("",) * 3, 10 * 2**30)
    html = page_html(Page("P", (), memory=what))
    rows = re.findall(r'<tr data-row="(\d)" data-last="(\d)">(.*?)</tr>', html, re.DOTALL)
    cells = [(first, last, re.findall(r'<td class="number">(.*?)</td>', row)) for first, last, row in rows]
    # 8 + 2 and 8 + 4 GiB at 1 s; b is too little for a column of its own: 0.01 GiB are 10.2 MiB.
    assert cells == [
        ("0", "1", ["10.0 GiB", "100.1%", "1 s", "8.00 GiB", "2.00 GiB", "10.2 MiB"]),
        ("2", "2", ["12.0 GiB", "120.1%", "1 s", "8.00 GiB", "4.00 GiB", "10.2 MiB"]),
    ]
    assert "pp 0 to pp 1" in html


def test_a_colour_means_the_same_in_every_bar() -> None:
    splits = (
        Split("A", "s", (("x", 1.0), ("y", 2.0), ("z", 3.0)), ("compute", "tp", "tp_wait")),
        Split("B", "s", (("u", 1.0), ("v", 2.0)), ("tp", "compute")),
    )
    found = re.findall(
        r'class="part( striped)?" title="(\w).*?background-color:(#\w+)', page_html(Page("P", (), splits=splits))
    )
    of = {name: (striped, shade) for striped, name, shade in found}
    assert of["x"] == of["v"]
    assert of["y"] == of["u"] != of["x"]
    assert of["z"] == (" striped", of["y"][1])


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1.0, 2.0, 3.0], (1, 3)),
        ([*range(1, 9), 100.0], (1, 8)),  # far above all others
        ([-50.0, *range(1, 9)], (1, 8)),
        ([*range(1, 9), 11.0], (1, 11)),  # not that far
        ([2.0] * 20, (2, 2)),
        ([2.0] * 20 + [3.0], (2, 2)),
        ([2.0] * 20 + [2.01], (2, 2.01)),  # nobody is far from anybody
        ([0.0] * 50 + [1.0] * 50, (0, 1)),
        ([np.nan], (0, 0)),
    ],
)
def test_few_outliers_do_not_rule_the_scale_of_a_heat_map(values: list[float], scale: tuple[float, float]) -> None:
    assert heat_scale(np.array(values)) == pytest.approx(scale)


def test_ordinary_ranks_are_no_outliers() -> None:
    values = 4.49 + 0.004 * np.random.default_rng(0).standard_normal(131072)
    values[7] = 5.6
    low, high = heat_scale(values)
    # Without noise of more than 6 sigma, all but the one are on the scale.
    assert (low, high) == pytest.approx((values.min(), np.delete(values, 7).max()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start": np.zeros(3)}, "different lengths"),
        ({"row": np.full(8192, PP)}, "row must be in 0..15"),
        ({"kind": np.full(8192, len(KINDS))}, f"kind must be in 0..{len(KINDS) - 1}"),
        ({"cause": np.full(8192, -2)}, "cause must be in -1.."),
        ({"end": np.full(8192, np.nan)}, "must be finite"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, np.ndarray], message: str) -> None:
    wrong = replace(timeline(), boxes=replace(timeline().boxes, **changes))
    with pytest.raises(ValueError, match=message):
        page_html(Page("Wrong", (), timeline=wrong))


def test_a_page_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    write_page(Page("New", ()), path)
    assert "<h1>New</h1>" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (12.3456, "s", "12.3 s"),
        (0.0123456, "s", "12.3 ms"),
        (4.2e-6, "s", "4.2 us"),
        (44.4 * 2**30, "bytes", "44.4 GiB"),
        (21.5, "F", "21.5 F"),
        (12345.6, "", "12,346"),
        (float("nan"), "s", "unknown"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


# In a browser, without a network.


class Opened:
    """A page in the browser, with all that it asked for and complained about."""

    def __init__(self, browser: Any, path: Path, what: Page, **options: Any) -> None:
        write_page(what, path)
        self.address = path.as_uri()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        options = {"viewport": {"width": 1600, "height": 1000}, **options}
        self.context = browser.new_context(offline=True, **options)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.open()

    def open(self) -> float:
        """Loads the page; milliseconds until all of it was drawn."""
        self.page.goto(self.address)
        self.page.wait_for_selector("body[data-ready]", state="attached", timeout=20_000)
        return float(self.page.evaluate("document.body.dataset.ready"))

    def shown(self, chart: str) -> dict[str, float]:
        """What a chart says of itself: the time that it shows and where that lies on it."""
        self.page.evaluate("() => new Promise(requestAnimationFrame)")
        data = self.page.locator(f"{chart} .plot").evaluate("host => ({...host.dataset})")
        return {name: float(value) for name, value in data.items()}

    def at(self, row: int, time: float) -> tuple[float, float]:
        """Where a time on a row of the timeline is in the window."""
        where, box = self.shown("#timeline"), self.page.locator("#timeline .plot").bounding_box()
        share = (time - where["from"]) / (where["to"] - where["from"])
        x = where["left"] + share * (where["right"] - where["left"])
        return box["x"] + x, box["y"] + where["top"] + (row + 0.4) * where["pitch"]

    def tip(self) -> str:
        assert self.page.locator("#tip").is_visible()
        return self.page.locator("#tip").inner_text()


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(browser, tmp_path_factory.mktemp("page") / "page.html", page())


@pytest.fixture(autouse=True)
def _as_at_first(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests share a page: each begins with the whole step, at the top, and may not make it complain."""
    if "opened" not in request.fixturenames:
        yield
        return
    shared = request.getfixturevalue("opened")
    shared.page.mouse.move(2, 2)
    shared.page.evaluate("scrollTo(0, 0)")
    if shared.page.locator("#kept").count():
        shared.page.locator("#kept button").click()
    shared.page.get_by_text("whole step", exact=True).click()
    yield
    assert shared.complaints == []


def span_of(text: str) -> tuple[int, float, float]:
    """(row, start, end) of an action, as the layout plays it."""
    action = Action.parse(text)
    return (action.stage % PP, *played().span(action))


def test_opens_quietly_and_at_once(opened: Opened) -> None:
    # Other work on the machine may hold up one opening, hardly three.
    assert any(opened.open() < 2000 for _ in range(3))
    assert opened.complaints == []
    assert set(opened.requests) <= {opened.address, "data:,"}
    shift = """() => new Promise((done) => {
        const add = (list) => done(list.getEntries().reduce((sum, entry) => sum + entry.value, 0));
        new PerformanceObserver(add).observe({ type: "layout-shift", buffered: true });
        setTimeout(() => done(0), 200);
    })"""
    assert opened.page.evaluate(shift) < 0.02


@pytest.mark.parametrize("text", ["37F7", "0F0", "15B0", "112B31"])
def test_hover_over_a_box(opened: Opened, text: str) -> None:
    row, start, end = span_of(text)
    opened.page.mouse.move(*opened.at(row, (start + end) / 2))
    tip = opened.tip()
    assert tip.startswith(text)
    assert f"pp {row}" in tip
    # The page's unit is the second, to a hundred-thousandth of a step of about 3 s.
    assert [float(found) for found in re.findall(r"([\d.]+) s$", tip, re.MULTILINE)] == pytest.approx(
        [start, end], abs=5.1e-5
    )
    i = program().where[Action.parse(text)]
    before = program().previous[i]
    wait = start - (played().end[before] if before < len(played().end) else 0.0)
    if wait > 1e-9:
        assert f"Waits for {program().actions[program().needs[i]]}." in tip
        assert quantity(wait, "s") in tip
    else:
        assert "not at all" in tip


def test_hover_over_an_empty_stretch(opened: Opened) -> None:
    row, start, _ = span_of("15F0")
    opened.page.mouse.move(*opened.at(row, start / 2))
    tip = opened.tip()
    assert tip.startswith("idle")
    assert f"lasts\n{quantity(start, 's')}" in tip.replace("\n\n", "\n")
    assert "15F0" in tip
    assert "Waits for 14F0." in tip
    last = played().end[program().pp_rank == 15].max()
    opened.page.mouse.move(*opened.at(15, (last + timeline().span) / 2))
    assert "Nothing more to do" in opened.tip()


def test_zoom_and_move_both_charts(opened: Opened) -> None:
    whole = opened.shown("#timeline")
    assert (whole["from"], whole["to"]) == (0, pytest.approx(timeline().span))
    row, start, end = span_of("37F7")
    place = opened.at(row, (start + end) / 2)
    opened.page.mouse.move(*place)
    opened.page.wait_for_timeout(320)  # a wheel that scrolls goes on scrolling for a while
    for _ in range(8):
        opened.page.mouse.wheel(0, -200)
    zoomed = opened.shown("#timeline")
    assert zoomed["to"] - zoomed["from"] < 0.1 * timeline().span
    assert opened.tip().startswith("37F7")  # what is under the pointer stays there
    below = opened.shown("#memory")
    for key in ("from", "to", "left", "right"):
        assert below[key] == zoomed[key]
    opened.page.mouse.down()
    opened.page.mouse.move(place[0] - 200, place[1], steps=3)
    opened.page.mouse.up()
    moved = opened.shown("#timeline")
    per_pixel = (zoomed["to"] - zoomed["from"]) / (zoomed["right"] - zoomed["left"])
    assert moved["from"] - zoomed["from"] == pytest.approx(200 * per_pixel, rel=1e-3)
    assert opened.shown("#memory")["from"] == moved["from"]


def test_keys(opened: Opened) -> None:
    plot = opened.page.locator("#timeline .plot")
    plot.focus()
    opened.page.keyboard.press("+")
    zoomed = opened.shown("#timeline")
    assert zoomed["to"] - zoomed["from"] == pytest.approx(0.6 * timeline().span)
    opened.page.keyboard.press("ArrowRight")
    assert opened.shown("#timeline")["from"] > zoomed["from"]
    opened.page.keyboard.press("0")
    for _ in range(PP):
        opened.page.keyboard.press("ArrowUp")
    opened.page.keyboard.press("n")
    assert opened.tip().startswith("0F0")
    opened.page.keyboard.press("n")
    assert opened.tip().startswith("0F1")
    opened.page.keyboard.press("p")
    assert opened.tip().startswith("0F0")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#tip").is_hidden()


def test_keys_are_for_the_chart_under_the_pointer(opened: Opened) -> None:
    opened.page.locator("#theme").focus()
    row, start, end = span_of("37F7")
    middle = (start + end) / 2
    opened.page.mouse.move(*opened.at(row, middle))
    for _ in range(6):
        opened.page.keyboard.press("+")
    zoomed = opened.shown("#timeline")
    assert zoomed["to"] - zoomed["from"] == pytest.approx(0.6**6 * timeline().span)
    assert zoomed["from"] < start < end < zoomed["to"]
    # What the keys selected is zoomed around, too: it stays in sight with nothing under the pointer.
    opened.page.mouse.click(*opened.at(row, middle))
    opened.page.keyboard.press("Escape")
    opened.page.keyboard.press("n")
    opened.page.mouse.move(2, 2)
    button = opened.page.locator('[data-do="in"]')
    for _ in range(6):
        button.click()
    zoomed = opened.shown("#timeline")
    assert zoomed["to"] - zoomed["from"] == pytest.approx(0.6**12 * timeline().span)
    opened.page.locator("#timeline .plot").focus()
    opened.page.keyboard.press("n")
    selected = Action.parse(opened.tip().split()[0])
    begin, until = played().span(selected)
    zoomed = opened.shown("#timeline")
    assert zoomed["from"] <= begin < until <= zoomed["to"]
    opened.page.keyboard.press("Escape")


def test_what_is_clicked_stays(opened: Opened) -> None:
    places = []
    for text in ("37F7", "15B0"):
        row, start, end = span_of(text)
        places.append(opened.at(row, (start + end) / 2))
    opened.page.mouse.click(*places[0])
    kept = opened.page.locator("#kept")
    opened.page.mouse.move(*places[1])
    assert kept.inner_text().startswith("×")
    assert "37F7" in kept.inner_text()
    assert opened.tip().startswith("15B0")
    opened.page.mouse.click(*places[1])
    assert "15B0" in kept.inner_text()
    assert opened.page.locator("#tip").is_hidden()
    kept.locator("button").click()
    assert kept.count() == 0
    opened.page.mouse.click(*places[0])
    opened.page.mouse.click(*places[0])
    assert kept.count() == 0


def test_the_tip_covers_no_row_where_there_is_room(opened: Opened) -> None:
    row, start, end = span_of("37F7")
    opened.page.mouse.move(*opened.at(row, (start + end) / 2))
    plot = opened.page.locator("#timeline .plot").bounding_box()
    assert opened.page.locator("#tip").bounding_box()["y"] >= plot["y"] + plot["height"]


def test_equal_boxes_that_are_narrower_than_pixels_look_alike(browser: Any, tmp_path: Path) -> None:
    """Half of the time busy, in boxes of about 0.6 pixels: every pixel of the row is about half way."""
    count = 1200
    start, none = np.arange(count) * 1.0, np.full(count, -1)
    zero = np.zeros(count, dtype=int)
    boxes = Boxes(zero, zero, zero, zero, start, start + 0.5, np.full(count, 0.5), none)
    what = Timeline("t", "s", ("pp 0",), 1, 1, boxes, span=float(count))
    fine = Opened(browser, tmp_path / "fine.html", Page("Fine", (), timeline=what))
    where = fine.shown("#timeline")
    line = fine.page.evaluate(
        """([x, y, width]) => [...document.querySelector("#timeline canvas").getContext("2d")
            .getImageData(x, y, width, 1).data].filter((_, i) => i % 4 === 0)""",
        [round(where["left"]) + 2, where["top"] + 4, round(where["right"] - where["left"]) - 4],
    )
    red = [int(shade[1:3], 16) for shade in (colour("F"), IDLE)]
    smooth = np.convolve(line, np.full(8, 1 / 8), "valid")
    share = (red[1] - smooth) / (red[1] - red[0])
    assert share.min() > 0.3
    assert share.max() < 0.75
    fine.context.close()


def test_a_row_that_is_clicked_shows_its_memory(opened: Opened) -> None:
    opened.page.mouse.click(*opened.at(11, 1.0))
    assert opened.page.locator("#peak").inner_text() == "11 has its reason"
    assert opened.page.locator("#rank").input_value() == "11"
    opened.page.locator("summary", has_text="Peaks of all ranks").click()
    assert opened.page.locator("#peaks tr.chosen button").inner_text() == "pp 11"
    opened.page.locator("#peaks button", has_text="pp 3").click()
    assert opened.page.locator("#peak").inner_text() == "3 has its reason"
    # Rank 3 at a time of our own choosing: 8 GiB of weights, and 0.3 GiB per pair that is in flight then.
    box, where = opened.page.locator("#memory .plot").bounding_box(), opened.shown("#memory")
    x = where["left"] + 0.4 * (where["right"] - where["left"])
    opened.page.mouse.move(box["x"] + x, box["y"] + 100)
    at, live = played().live_chunks(3)
    held = live[np.searchsorted(at, 0.4 * timeline().span, side="right") - 1]
    assert opened.tip().startswith(quantity((8 + 0.3 * held) * 2**30, "bytes"))


def test_activations_by_chunk_are_another_view(opened: Opened) -> None:
    opened.page.mouse.click(*opened.at(3, 1.0))
    opened.page.locator("#view").select_option(label="activations by chunk")
    assert opened.page.locator("#peak").inner_text() == "3 by chunk"
    assert not opened.page.locator("#peaks").is_visible()
    opened.page.locator("#memory .plot").scroll_into_view_if_needed()
    box, where = opened.page.locator("#memory .plot").bounding_box(), opened.shown("#memory")
    opened.page.mouse.move(box["x"] + where["left"] + 0.4 * (where["right"] - where["left"]), box["y"] + 100)
    at = np.searchsorted(chunks().times[3], 0.4 * timeline().span, side="right") - 1
    amounts = chunks().bytes[3][:, at]
    tip = opened.tip()
    assert tip.startswith(quantity(float(amounts.sum()), "bytes"))
    for chunk, amount in enumerate(amounts.tolist()):
        assert (f"chunk {chunk}" in tip) == (amount > 0)
    # As in the timeline: the colours of the chunks' forwards.
    shade = opened.page.locator('[data-view="1"] [data-part="2"] i').evaluate(
        "e => getComputedStyle(e).backgroundColor"
    )
    assert shade == f"rgb{tuple(bytes.fromhex(colour('F', 2, V)[1:]))}"
    opened.page.locator("#view").select_option(label="bytes by kind")
    assert opened.page.locator("#peak").inner_text() == "3 has its reason"
    assert opened.page.locator('[data-view="0"]').is_visible()
    assert not opened.page.locator('[data-view="1"]').is_visible()


def test_views_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="views must have the same rows"):
        page_html(replace(page(), chunks=replace(chunks(), rows=("another",) * PP)))


def test_messages_are_shown_when_asked_for(opened: Opened) -> None:
    low = opened.shown("#timeline")
    opened.page.locator("#lanes").check()
    assert opened.shown("#timeline")["pitch"] > low["pitch"]
    row, _, end = span_of("35F7")
    plot = opened.page.locator("#timeline .plot")
    plot.focus()
    for _ in range(9):  # until the message, of 0.5 ms, is some pixels wide
        opened.page.keyboard.press("+")
        where = opened.shown("#timeline")
        middle = (where["from"] + where["to"]) / 2
        by = (end - middle) / (where["to"] - where["from"])
        for _ in range(round(abs(by) / 0.15)):
            opened.page.keyboard.press("ArrowRight" if by > 0 else "ArrowLeft")
    x, y = opened.at(row, end + 0.25e-3)
    rows = float(plot.get_attribute("data-row-height"))
    where = opened.shown("#timeline")
    opened.page.mouse.move(x, y - 0.4 * where["pitch"] + rows)
    assert opened.tip().startswith("35SEND_F7")
    opened.page.locator("#lanes").uncheck()


def test_dark_and_light(browser: Any, opened: Opened, tmp_path: Path) -> None:
    def ground() -> str:
        return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")

    def label() -> int:
        """How light the lightest pixel left of the boxes is, where only text is drawn."""
        return opened.page.evaluate(
            """() => {
                const copy = new OffscreenCanvas(60, 200).getContext("2d");
                copy.drawImage(document.querySelector("#timeline canvas"), -20, -40);
                const { data } = copy.getImageData(0, 0, 60, 200);
                return Math.max(...data.filter((_, i) => i % 4 === 0 && data[i + 3] > 200));
            }"""
        )

    assert ground() == "rgb(255, 255, 255)"
    assert label() < 100
    opened.page.locator("#theme").click()
    opened.shown("#timeline")
    assert max(map(int, re.findall(r"\d+", ground()))) < 50
    assert label() > 200
    opened.page.locator("#theme").click()
    assert ground() == "rgb(255, 255, 255)"
    dark = Opened(browser, tmp_path / "dark.html", Page("Dark", ()), color_scheme="dark")
    assert dark.page.evaluate("document.documentElement.dataset.theme") == "dark"
    dark.context.close()


def test_hover_over_every_rank_of_a_small_heat_map(browser: Any, tmp_path: Path) -> None:
    shape = (2, 2, 2, 2)
    values = np.arange(16.0).reshape(shape) * 1e-3
    few = Opened(browser, tmp_path / "map.html", Page("Map", (), heat_maps=(HeatMap("m", "s", values),)))
    plot = few.page.locator(".heat .plot")
    box, where = plot.bounding_box(), few.shown(".heat")
    cell, line = where["cell"], 2
    assert cell == 40
    for rank in range(16):
        dp, pp, cp, tp = map(int, np.unravel_index(rank, shape))
        x = where["left"] + pp * (2 * cell + line) + (tp + 0.5) * cell
        y = where["top"] + dp * (2 * cell + line) + (cp + 0.5) * cell
        few.page.mouse.move(box["x"] + x, box["y"] + y)
        words = " ".join(few.tip().split())
        assert words == f"rank {rank} {quantity(values[dp, pp, cp, tp], 's')} dp {dp} pp {pp} cp {cp} tp {tp}"
    few.context.close()


@pytest.mark.parametrize("shape", [(128, 16, 1, 8), (64, 16, 16, 8), (2048, 1, 1, 8)])
def test_heat_maps_of_many_ranks(browser: Any, tmp_path: Path, shape: tuple[int, int, int, int]) -> None:
    what = heat_map(*shape)
    many = Opened(browser, tmp_path / "map.html", Page("Map", (), heat_maps=(what,)))
    plot = many.page.locator(".heat .plot")
    plot.scroll_into_view_if_needed()
    box, seen = plot.bounding_box(), set()
    for x, y in np.random.default_rng(1).uniform((0.0, 30.0), (1400.0, 400.0), (10, 2)):
        many.page.mouse.move(box["x"] + x, box["y"] + y)
        if many.page.locator("#tip").is_hidden():
            continue  # between blocks
        rank, value, *where = re.fullmatch(
            r"rank (\d+)\s+(\S+ m?s)\s+dp\s+(\d+)\s+pp\s+(\d+)\s+cp\s+(\d+)\s+tp\s+(\d+)", many.tip().strip()
        ).groups()
        dp, pp, cp, tp = map(int, where)
        assert int(rank) == tp + shape[3] * (cp + shape[2] * (pp + shape[1] * dp))
        assert value == quantity(np.float32(what.values[dp, pp, cp, tp]), "s")
        seen.add(rank)
    assert len(seen) > 2
    many.page.keyboard.press("Tab")
    plot.focus()
    many.page.mouse.move(1, 1)
    many.page.keyboard.press("ArrowDown")
    # One down is the next CP rank of the same block or, without CP, the next DP group.
    assert many.tip().startswith(f"rank {shape[3] * (1 if shape[2] > 1 else shape[1])}")
    assert many.complaints == []
    many.context.close()


def test_paper_shows_every_row_and_all_that_is_folded(browser: Any, tmp_path: Path) -> None:
    rows = np.arange(128)
    none = np.full(128, -1)
    boxes = Boxes(
        rows, np.zeros(128, dtype=int), rows, np.zeros(128, dtype=int), rows * 0.1, rows * 0.1 + 20, rows, none
    )
    labels = tuple(f"rank {row}" for row in rows)
    what = Page("Paper", (), timeline=Timeline("t", "s", labels, 1, 128, boxes), more=("Folded.",))
    paper = Opened(browser, tmp_path / "paper.html", what)
    plot = paper.page.locator("#timeline .plot")
    screen = plot.bounding_box()["height"]
    paper.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    top, pitch = paper.shown("#timeline")["top"], paper.shown("#timeline")["pitch"]
    assert plot.bounding_box()["height"] == top + 128 * pitch > screen
    assert paper.page.get_by_text("Folded.").is_visible()
    paper.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert plot.bounding_box()["height"] == screen
    assert paper.page.get_by_text("Folded.").is_hidden()
    paper.context.close()


def test_a_long_name_does_not_widen_the_page(browser: Any, tmp_path: Path) -> None:
    name = "n" * 300
    long = Opened(browser, tmp_path / "long.html", Page(name, ((name, name),), (name,), notes=(name,)))
    assert long.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    long.context.close()


def test_nothing_that_a_name_says_is_run(browser: Any, tmp_path: Path) -> None:
    what = replace(page(), title=EVIL, timeline=replace(timeline(), rows=(EVIL,) * PP), heat_maps=())
    evil = Opened(browser, tmp_path / "evil.html", what)
    row, start, end = span_of("37F7")
    evil.page.mouse.move(*evil.at(row, (start + end) / 2))
    assert "onerror" in evil.tip()
    assert evil.page.evaluate("window.broken") is None
    assert evil.complaints == []
    evil.context.close()


def test_more_rows_than_fit_are_scrolled(browser: Any, tmp_path: Path) -> None:
    rows = np.arange(128)
    start, none = rows * 0.1, np.full(128, -1)
    boxes = Boxes(rows, np.zeros(128, dtype=int), rows, np.zeros(128, dtype=int), start, start + 20.0, start, none)
    labels = tuple(f"rank {row}" for row in range(128))
    many = Opened(browser, tmp_path / "rows.html", Page("Many", (), timeline=Timeline("t", "s", labels, 1, 128, boxes)))
    plot = many.page.locator("#timeline .plot")
    assert plot.bounding_box()["height"] == 900
    scrolled = plot.evaluate("host => { host.scrollTop = 9999; return host.scrollTop; }")
    x, y = many.at(120, 15.0)
    many.page.mouse.move(x, y - scrolled)
    assert many.tip().startswith("120F0")
    assert "rank 120" in many.tip()
    many.context.close()


@pytest.mark.parametrize("rows", [0, 1])
def test_hardly_anything_to_show(browser: Any, tmp_path: Path, rows: int) -> None:
    none = np.zeros(0)
    one = [np.array([value]) for value in (0, KINDS.index(Kind.FORWARD), 0, 0, 0.0, 1.0, 0.0, -1)]
    boxes = Boxes(*one) if rows else Boxes(*[none.astype(int)] * 4, none, none, none, none.astype(int))
    labels = ("pp 0",) * rows
    what = Page(
        "Little",
        (),
        timeline=Timeline("t", "F", labels, 1, 1, boxes, span=float(rows)),
        memory=Memory("F", labels, ("weights",), (none,) * rows, (np.zeros((1, 0)),) * rows, ("no peak",) * rows),
        heat_maps=(HeatMap("m", "s", np.full((1, 1, 1, 1), np.nan)),),
    )
    little = Opened(browser, tmp_path / "little.html", what)
    for chart, keys in (("#timeline", ("+", "n", "ArrowDown")), ("#memory", ("ArrowDown",)), (".heat", ("ArrowDown",))):
        plot = little.page.locator(f"{chart} .plot")
        plot.hover()
        for key in keys:
            plot.press(key)
    assert little.complaints == []
    little.context.close()


def test_script_and_page_write_quantities_alike(opened: Opened) -> None:
    source = (resources.files("fourfold.report.page") / "script" / "words.js").read_text(encoding="utf-8")
    random = np.random.default_rng(0)
    values = [0.0, 0.99996, 1023.96, *(random.uniform(1, 10, 40) * 10.0 ** random.integers(-5, 6, 40)).tolist()]
    cases = [(value, unit) for value in values for unit in ("s", "F", "bytes", "")]
    written = opened.page.evaluate(f"cases => {{ {source}; return cases.map(case_ => quantity(...case_)); }}", cases)
    assert written == [quantity(value, unit) for value, unit in cases]
