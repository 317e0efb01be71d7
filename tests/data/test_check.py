"""Reading token files through: damage by file and byte, ids by token and document, counts and lengths as by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fourfold.data import check, sidecar
from fourfold.data.check import Document, check_files, open_files
from fourfold.data.indexed import TokenFile
from tests.data.files import write_tokens


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 bytes, 8 ids, and bites of 3 ids within them."""
    monkeypatch.setattr(sidecar, "BLOCK", 16)
    monkeypatch.setattr(check, "BLOCK", 16)
    monkeypatch.setattr(check, "CHUNK", 3)


def problems(paths: list[Path], vocab_size: int | None = None) -> list[tuple[str, int, str]]:
    files, faults = open_files([str(path) for path in paths])
    found = (*faults, *check_files(files, vocab_size).problems)
    return [(problem.path.name, problem.offset, problem.rule) for problem in found]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:offset] + data + content[offset + len(data) :])


def without_sidecar(prefix: Path) -> None:
    prefix.with_suffix(".json").unlink()


def test_sound_files(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[1, 2, 2], [0] * 9, [1]])
    write_tokens(tmp_path / "b", [[3] * 9, [70_000]], 70_001)
    without_sidecar(tmp_path / "b")
    files, faults = open_files([str(tmp_path)])
    heard = []
    report = check_files(files, 70_001, row_length=8, progress=lambda *bytes_read: heard.append(bytes_read))
    assert (faults, report.problems) == ([], ())
    assert (report.num_files, report.num_documents, report.num_tokens, report.num_checksummed) == (2, 5, 23, 1)
    assert report.max_id == 70_000
    first = Document(tmp_path / "a.bin", 6, 1, 9)
    assert (report.longest, report.num_long, report.first_long) == (first, 2, first)
    assert report.counts is not None
    assert {i: n for i, n in enumerate(report.counts.tolist()) if n} == {0: 9, 1: 2, 2: 2, 3: 9, 70_000: 1}
    assert heard[-1] == (26 + 40, 26 + 40)
    assert heard == sorted(heard)


def test_without_a_vocabulary_there_are_no_counts(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[1, 2, 2]])
    without_sidecar(tmp_path / "a")
    report = check_files([TokenFile(tmp_path / "a")], None)
    assert (report.counts, report.num_long, report.first_long) == (None, 0, None)


def test_a_flipped_bit_is_found_in_its_block(tmp_path: Path) -> None:
    for name in "ab":
        write_tokens(tmp_path / name, [list(range(30))])
    overwrite(tmp_path / "b.bin", 37, b"\1")
    overwrite(tmp_path / "b.bin", 48, b"\7")
    rule = "bytes from here on are not those that were written (CRC-32)"
    wrong_id = "token 18, in document 0, is 274: the vocabulary has 256 entries"
    assert problems([tmp_path]) == [
        ("b.bin", 32, f"the 16 {rule}"),
        ("b.bin", 48, f"the 12 {rule}"),
        ("b.bin", 36, wrong_id),
    ]


@pytest.mark.parametrize("wrong", [5, 77, 255])
def test_ids_beyond_the_vocabulary_are_named_by_token_and_document(tmp_path: Path, wrong: int) -> None:
    write_tokens(tmp_path / "a", [[1, 2], [], [4] * 10, [0, wrong], [wrong]])
    rule = f"token 13, in document 3, is {wrong}: the vocabulary has 5 entries; so are 1 more"
    assert problems([tmp_path], 5) == [("a.bin", 26, rule)]
    assert problems([tmp_path]) == []  # its sidecar says 256
    report = check_files([TokenFile(tmp_path / "a")], 5)
    assert report.counts is not None
    assert report.counts.tolist() == [1, 1, 1, 0, 10]  # those that mean something


def test_negative_ids_are_wrong_in_any_vocabulary(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[1, 2, 3], [4, 5]], 2**20)
    without_sidecar(tmp_path / "a")
    overwrite(tmp_path / "a.bin", 12, np.array([-2], dtype="<i4").tobytes())
    assert problems([tmp_path]) == [("a.bin", 12, "token 3, in document 1, is -2: an id cannot be negative")]
    assert problems([tmp_path], 10) == [("a.bin", 12, "token 3, in document 1, is -2: the vocabulary has 10 entries")]


def test_files_that_cannot_be_opened_do_not_hide_the_others(tmp_path: Path) -> None:
    for name in "abc":
        write_tokens(tmp_path / name, [[1], [2]])
    (tmp_path / "a.idx").unlink()
    overwrite(tmp_path / "b.idx", 9, b"\2")
    overwrite(tmp_path / "c.bin", 0, b"\3")
    assert [(name, at) for name, at, _ in problems([tmp_path])] == [("a.idx", 0), ("b.idx", 9), ("c.bin", 0)]


def test_a_sidecar_of_other_files(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a", [[1], [2]])
    write_tokens(tmp_path / "b", [[1, 2, 3]])
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    (found,) = problems([tmp_path])
    assert found[:2] == ("b.json", 0)
    assert "it says (2 documents, 2 tokens, 4 bytes in blocks of 16), but they hold (1 documents, 3" in found[2]
    (tmp_path / "b.json").write_text('{"format": "fourfold-tokens"')
    assert "is damaged" in problems([tmp_path])[0][2]


def test_a_disk_that_fails_is_a_problem_by_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "a", [list(range(20))])
    file, read = TokenFile(tmp_path / "a"), np.fromfile

    def failing(path: Path, *, dtype: np.dtype, count: int, offset: int) -> np.ndarray:
        if offset == 16:
            raise OSError(5, "Input/output error")
        return read(path, dtype=dtype, count=count, offset=offset)

    monkeypatch.setattr(np, "fromfile", failing)
    (problem,) = check_files([file], 256).problems
    assert str(problem) == f"{tmp_path / 'a.bin'}, byte 16: cannot be read: Input/output error"
    monkeypatch.setattr(np, "fromfile", read)
    (tmp_path / "a.bin").write_bytes(b"\0" * 18)
    assert "was longer a moment ago" in str(check_files([file], 256).problems[-1])


def test_paths_without_token_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a folder with token files"):
        open_files([str(tmp_path)])
    with pytest.raises(ValueError, match="name a folder"):
        open_files([])
