"""Blocks of events against what Python's own JSON reader finds, in order and damaged in every way that was seen."""

import gzip
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.debugger.reading.document import Document

NAMES = st.text(st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    [
        'a},{"ph":"X"',
        "]}",
        '"',
        "\\",
        "\\\\",
        '{"name": "x"}, {',
        '\\"}, {"ph": 1',
        "\x00\x1f",
        "void f<4>(int*)::{lambda()#3}",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"ph": st.just("X"), "name": NAMES, "ts": st.integers(0, 10**15)},
        optional={"args": st.dictionaries(NAMES, VALUES, max_size=3), "pid": st.integers() | NAMES, "cat": NAMES},
    ),
    max_size=12,
)


def event(number: int, name: str = "k", **more: object) -> dict:
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": number * 1.5, "dur": 1, **more}


def load(path: Path, piece: int = 4 << 20) -> tuple[Document, list]:
    document = Document(path, piece)
    return document, [found for block in document.blocks() for found in block.events]


def names(path: Path, piece: int = 4 << 20) -> list[str]:
    return [found.name for found in load(path, piece)[1]]


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from([None, 1, 4]), st.integers(1, 300), st.sampled_from(["before", "after", "list"]))
def test_whatever_the_form_and_the_size_of_pieces(tmp_path_factory, events, indent, piece, form):
    header = {
        "fourfold": {"grid": {"tp": 2}, "x": '"traceEvents": ['},
        "unknown": [{"ph": "X"}, {}],
        "baseTimeNanoseconds": 12,
    }
    whole: object = events if form == "list" else (
        {**header, "traceEvents": events} if form == "before" else {"traceEvents": events, **header}
    )  # fmt: skip
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(json.dumps(whole, indent=indent))
    document, found = load(path, piece)
    assert [(e.name, e.ts, e.pid, e.cat) for e in found] == [
        (e["name"], e["ts"], e.get("pid"), e.get("cat")) for e in events
    ]
    assert document.notes == ()
    if form != "list":
        assert document.header.fourfold == header["fourfold"]
        assert document.header.base == 12


def test_cut_off_anywhere(tmp_path):
    events = [event(i, f"k{i}", args={"name": "x}", "grid": [1, [2]]}) for i in range(5)]
    text = json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": events}, indent=2)
    starts = [text.rindex("{", 0, text.index(f'"k{i}"')) for i in range(5)]
    ends = [json.JSONDecoder().raw_decode(text, start)[1] for start in starts]
    path = tmp_path / "t.json"
    for cut in range(starts[0], len(text) - 6, 5):
        path.write_text(text[:cut])
        document, found = load(path, 64)
        # A piece of the last one may look like an event, but has no time.
        assert [e.name for e in found if e.ts is not None] == [f"k{i}" for i in range(5) if ends[i] <= cut]
        assert "cut off at byte" in document.notes[0]
        assert document.header.distributed == {"rank": 3}


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_cut_off_before_the_first_event(tmp_path, cut):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"distributedInfo": {"rank": 3}, "traceEvents": [event(1)]})[:cut])
    with pytest.raises(ValueError, match=rf"cut off at byte {cut}, before its"):
        load(path)


@pytest.mark.parametrize(
    ("damaged", "expected", "note"),
    [
        (b'"na\x01me', "na me", "forbids were replaced, the first near byte"),
        (b'"na\x00me', "na me", "forbids"),
        (b'"na\nme', "na me", "forbids"),
        (b'"na\xffme', "na\ufffdme", None),
        (b'"na\\xme', "na?me", "forbids"),
        (b'"na\\ud800me', "na?me", "forbids"),
    ],
)
def test_names_with_characters_that_json_forbids(tmp_path, damaged, expected, note):
    text = json.dumps([event(i, f"k{i}") for i in range(9)]).encode().replace(b'"k4', damaged)
    path = tmp_path / "t.json"
    for piece in (64, 1 << 20):
        path.write_bytes(text)
        document, found = load(path, piece)
        assert [e.name for e in found] == [f"k{i}" if i != 4 else expected for i in range(9)]
        assert (note is None) or note in " ".join(document.notes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"name": "k4"', b'"name": "k4'),  # a quote is missing
        lambda text: text.replace(b'"name": "k4"', b'"name": k4"'),
        lambda text: text.replace(b'"name": "k4"', b'"name" "k4"'),
        lambda text: text.replace(b'"name": "k4", ', b'"name": "k4", ]]} '),
        lambda text: text.replace(b'"name": "k4", "pid": 0, "tid": 7', b"\x00\x00 garbage"),
    ],
)
@pytest.mark.parametrize("piece", [50, 300, 1 << 20])
def test_an_event_that_is_none_is_skipped(tmp_path, damage, piece):
    good = json.dumps({"traceEvents": [event(i, f"k{i}") for i in range(9)], "fourfold": {"host": "h"}}).encode()
    path = tmp_path / "t.json"
    path.write_bytes(damage(good))
    document, found = load(path, piece)
    assert [e.name for e in found if e.ts is not None] == [f"k{i}" for i in range(9) if i != 4]
    at = good.index(b'{"ph"', good.index(b'"k3"'))
    assert "skipped" in document.notes[0]
    assert f"from byte {at:,} on" in document.notes[0]
    assert document.header.fourfold == {"host": "h"}


def test_things_that_are_no_events_and_commas_too_many(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[{"name": "a"},, null, 17, {"name": "b", "args": [1]}, {"name": "c"},\n]')
    assert names(path) == ["a", "c"]
    path.write_text('{"traceEvents": [{"name": "a"}, {"name": "b"},], "fourfold": 1}')
    document, found = load(path)
    assert [e.name for e in found] == ["a", "b"]
    assert document.header.fourfold == 1
    assert document.notes == ()


@pytest.mark.parametrize("piece", [1 << 15, 1 << 17, 1 << 22])
def test_events_larger_than_any_that_was_seen(tmp_path, piece):
    large = event(1, "large", args={"x": [{"name": "}{", "id": i} for i in range(20_000)]})
    path = tmp_path / "t.json"
    text = json.dumps([event(0), large, event(2), event(3, "y" * 300_000), event(4)])
    path.write_text(text.replace('"}{", "id": 7}', '"}{", "id": nan}'))
    assert [name[:5] for name in names(path, piece)] == ["k", "large", "k", "yyyyy", "k"]


def test_a_file_full_of_damage_is_read_to_its_end(tmp_path):
    text = json.dumps([event(i, f"k{i}", args={"grid": [1, 2]}) for i in range(30_000)])
    path = tmp_path / "t.json"
    path.write_text(re.sub(r'"k(\d+)00"', r'"k\g<1>00', text))
    document, found = load(path)
    assert sum(e.ts is not None for e in found) == 29_701
    assert document.notes[0].startswith("299 damaged places skipped")


def test_garbage_without_end_is_not_kept(tmp_path):
    path = tmp_path / "t.json"
    with path.open("wb") as file:
        file.write(json.dumps([event(0)]).encode()[:-1] + b",")
        file.write(bytes(range(256)) * 20_000)
        file.write(b"," + json.dumps([event(1)]).encode()[1:])
    document, found = load(path, 1 << 16)
    assert [e.ts for e in found] == [0, 1.5]
    assert "one damaged place skipped, 5,1" in document.notes[0]


def test_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [{"name": "a: nan", "x": -nan, "y": [Infinity, NaN]}, {"name": "b"}]}')
    assert names(path) == ["a: nan", "b"]


def test_a_damaged_header_keeps_what_can_be_had(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"deviceProperties": [{"id": 0, "x": oops}], "distributedInfo": {"rank": 5}, "traceEvents": [{"name": "a"}]}'
    )
    document, found = load(path)
    assert [e.name for e in found] == ["a"]
    assert document.header.distributed == {"rank": 5}
    path.write_bytes(b'{"traceEvents": [{"name": "a"}], "x": oops, "distributedInfo": {"rank": 5}, "cut": {')
    document, found = load(path)
    assert document.header.distributed == {"rank": 5}


def test_gzip_in_several_members_cut_and_damaged(tmp_path):
    text = json.dumps([event(i, f"k{i}") for i in range(2000)]).encode()
    path = tmp_path / "named_wrongly.json"
    path.write_bytes(gzip.compress(text[:5000]) + gzip.compress(text[5000:]) + b"\0\0")
    document, found = load(path, 999)
    assert (len(found), document.notes) == (2000, ())
    packed = gzip.compress(text)
    path.write_bytes(packed[: len(packed) // 2])
    document, found = load(path)
    assert [e.name for e in found] == [f"k{i}" for i in range(len(found))]
    assert 500 < len(found) < 2000
    assert "cut off" in document.notes[0]
    path.write_bytes(packed[:3000] + b"\xff\x00\xff\x00" * 50 + packed[3200:])
    document, found = load(path)
    assert document.notes[0].startswith("the gzip file is damaged; ")
    assert len(found) > 400


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"hello", "begins with neither"),
        (b'\xff\xfe{\x00"\x00', "UTF-16"),
        (b'{"a": 1}', 'has no "traceEvents"'),
        (b"{}", 'has no "traceEvents"'),
        (b'{"a": [1, 2', "cut off at byte 11"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)


def test_a_byte_order_mark_and_no_file(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b'\xef\xbb\xbf \n[{"name": "a"}]')
    assert names(path) == ["a"]
    with pytest.raises(ValueError, match="No such file"):
        load(tmp_path / "none.json")
