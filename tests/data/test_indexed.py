"""Token files: places in them are found as by counting, and every structural fault is named by file and byte."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.data.indexed import TokenFile, TokenFileError, find_token_files
from tests.data.files import write_tokens

DOCUMENTS = [[5, 6, 7], [1], [9, 8, 7, 6], [2, 2]]


@given(
    lengths=st.lists(st.integers(0, 5), max_size=12),
    start=st.integers(0, 40),
    count=st.integers(0, 40),
)
def test_documents_are_found_as_by_counting(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], start: int, count: int
) -> None:
    owner = [document for document, length in enumerate(lengths) for _ in range(length)]
    prefix = tmp_path_factory.mktemp("tokens") / "x"
    write_tokens(prefix, [[document] * length for document, length in enumerate([*lengths, 1])], 256)
    owner.append(len(lengths))
    file = TokenFile(prefix)
    assert file.read(0, file.num_tokens).tolist() == owner
    assert [file.document_at(token) for token in range(len(owner))] == owner
    firsts = [i for i in range(len(owner)) if i == 0 or owner[i] != owner[i - 1]]
    assert file.starts_between(start, start + count).tolist() == [i for i in firsts if start <= i < start + count]


def test_places_outside_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS)
    file = TokenFile(tmp_path / "x")
    assert file.read(10, 0).tolist() == []
    for start, count in ((-1, 2), (9, 2), (11, 0), (0, -1)):
        with pytest.raises(ValueError, match=r"holds 10"):
            file.read(start, count)
    for token in (-1, 10):
        with pytest.raises(ValueError, match=f"no token {token}"):
            file.document_at(token)


IDX, BIN = "x.idx", "x.bin"
# Four sequences: header 34 bytes, sizes at 34, pointers at 50, document index at 82, end at 122.
FAULTS = [
    (IDX, lambda data: b"NOTMIDX\0\0" + data[9:], IDX, 0, "must begin with"),
    (IDX, lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], IDX, 9, "version must be 1, not 2"),
    (IDX, lambda data: data[:17] + b"\7" + data[18:], IDX, 17, "must be that of an integer"),
    (IDX, lambda data: data[:17] + b"\0" + data[18:], IDX, 17, "not 0"),
    (IDX, lambda data: data[:18] + struct.pack("<Q", 2**60) + data[26:], IDX, 122, "must have"),
    (IDX, lambda data: data[:26] + struct.pack("<Q", 0) + data[34:], IDX, 26, "must have an entry"),
    (IDX, lambda data: data[:33], IDX, 33, "ends here, in the 34 bytes of its header"),
    (IDX, lambda data: b"", IDX, 0, "ends here"),
    (IDX, lambda data: data[:121], IDX, 121, "must have 122 bytes"),
    (IDX, lambda data: data + b"\0", IDX, 122, "must have 122 bytes"),
    (IDX, lambda data: data[:38] + struct.pack("<i", -1) + data[42:], IDX, 38, "sequence 1 cannot have -1 tokens"),
    (IDX, lambda data: data[:38] + struct.pack("<i", 2) + data[42:], IDX, 66, "sequence 2 begins at byte 10 of the"),
    (IDX, lambda data: data[:50] + struct.pack("<q", 2) + data[58:], IDX, 50, "by the sizes, not 2"),
    (IDX, lambda data: data[:66] + struct.pack("<q", 4) + data[74:], IDX, 66, "by the sizes, not 4"),
    (
        IDX,
        lambda data: data[:90] + struct.pack("<q", 3) + data[98:],
        IDX,
        98,
        "document 2 cannot begin with .* 2",
    ),
    (
        IDX,
        lambda data: data[:82] + struct.pack("<q", 1) + data[90:],
        IDX,
        82,
        "entry 0 of the .* must be 0",
    ),
    (IDX, lambda data: data[:82] + struct.pack("<q", -1) + data[90:], IDX, 82, "document 0 cannot begin with"),
    (
        IDX,
        lambda data: data[:114] + struct.pack("<q", 5) + data[122:],
        IDX,
        114,
        "entry 4 of the .* must be 4",
    ),
    (BIN, lambda data: data[:-1], BIN, 19, "ends here, but its index speaks of 20 bytes"),
    (BIN, lambda data: data + b"ab", BIN, 20, "goes on to byte 22"),
    (BIN, lambda data: b"", BIN, 0, "ends here"),
    (BIN, None, BIN, 0, "is missing"),
    (IDX, None, IDX, 0, "is missing"),
]


@pytest.mark.parametrize(("name", "damage", "at", "offset", "rule"), FAULTS)
def test_every_fault_is_named_by_file_and_byte(
    tmp_path: Path, name: str, damage, at: str, offset: int, rule: str
) -> None:
    write_tokens(tmp_path / "x", DOCUMENTS)
    file = tmp_path / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TokenFileError, match=rule) as caught:
        TokenFile(tmp_path / "x")
    assert (caught.value.path, caught.value.offset) == (tmp_path / at, offset)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / at}, byte {offset}: ")


def test_a_fault_beyond_the_first_bite_of_the_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "x", [[1]] * 10)
    monkeypatch.setattr("fourfold.data.indexed.SCAN", 3)
    assert TokenFile(tmp_path / "x").num_documents == 10
    data = (tmp_path / IDX).read_bytes()
    at = 34 + 40 + 8 * 7
    (tmp_path / IDX).write_bytes(data[:at] + struct.pack("<q", 15) + data[at + 8 :])
    with pytest.raises(TokenFileError, match="sequence 7 begins at byte 14"):
        TokenFile(tmp_path / "x")


def test_which_token_files_a_path_means(tmp_path: Path) -> None:
    for name in ("b.v1", "a"):
        write_tokens(tmp_path / name, DOCUMENTS)
    assert find_token_files(tmp_path) == [tmp_path / "a", tmp_path / "b.v1"]
    for path in ("b.v1", "b.v1.idx", "b.v1.bin"):
        assert find_token_files(tmp_path / path) == [tmp_path / "b.v1"]
    assert find_token_files(tmp_path / "c") == []
    (tmp_path / "half.bin").write_bytes(b"")
    assert find_token_files(tmp_path) == [tmp_path / "a", tmp_path / "b.v1", tmp_path / "half"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").write_bytes(b"")
    assert find_token_files(tmp_path / "other") == []
