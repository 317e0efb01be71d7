"""Reading: damaged and foreign files give an answer or one sentence."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from fourfold.debugger.tables import Worker, analyse, is_table, judge, read_table
from tests.debugger.tables.made import Job, write

DATA = Path(__file__).parent / "data"


def rows() -> list[dict[str, Any]]:
    job = Job(dp=3, pp=2, micro_batches=3, factor=lambda step, dp, stage, *_: 1.5 if (dp, stage) == (1, 1) else 1.0)
    return job.rows()


def test_order_of_rows_does_not_matter(tmp_path: Path) -> None:
    ordered = rows()
    mixed = ordered.copy()
    random.Random(3).shuffle(mixed)
    one, other = (read_table(write(tmp_path / "t.parquet", r)) for r in (ordered, mixed))
    assert one.operations == other.operations
    assert (one.start == other.start).all()
    assert (one.end == other.end).all()


def test_starts_of_any_origin(tmp_path: Path) -> None:
    moved = [row | {"start_ts": row["start_ts"] + 1.7e9 + 60 * row["step"]} for row in rows()]
    one, other = (analyse(read_table(write(tmp_path / "t.parquet", r))) for r in (rows(), moved))
    assert one.slowdown == pytest.approx(other.slowdown, rel=1e-5)


def test_missing_rows_cost_their_step(tmp_path: Path) -> None:
    damaged = rows()
    at = next(i for i, r in enumerate(damaged) if r["step"] == 1 and r["optype"] == "backward-compute")
    del damaged[at]
    table = read_table(write(tmp_path / "t.parquet", damaged))
    assert table.steps == (0, 2)
    assert table.notes == ("left out 1 of 3 steps: operations are missing in them",)


def test_messages_that_are_missing_cost_no_replica(tmp_path: Path) -> None:
    damaged = [r for r in rows() if (r["dp_rank"], r["optype"]) != (1, "forward-recv")]
    analysis = analyse(read_table(write(tmp_path / "t.parquet", damaged)))
    assert analysis.table.replicas == (0, 1, 2)
    assert judge(analysis).workers == (Worker(1, 1),)
    assert analysis.notes[1].startswith("not every forward message is in the table")


def test_a_replica_that_is_mostly_missing(tmp_path: Path) -> None:
    damaged = [r for r in rows() if (r["dp_rank"], r["optype"]) != (2, "backward-compute")]
    table = read_table(write(tmp_path / "t.parquet", damaged))
    assert table.replicas == (0, 1)
    assert table.left_out == (2,)
    assert table.notes == ("left out dp_rank 2: operations are missing there in most steps",)
    assert judge(analyse(table)).workers == (Worker(1, 1),)


def test_rows_that_are_no_numbers(tmp_path: Path) -> None:
    damaged = rows()
    damaged[5] = damaged[5] | {"duration": math.nan}
    damaged.append(damaged[0] | {"duration": -1.0})
    table = read_table(write(tmp_path / "t.parquet", damaged))
    assert "2 rows without a number" in table.notes[0]
    assert table.steps == (1, 2)
    nulls = [r | ({"mb_id": None, "optype": None} if i == 5 else {}) for i, r in enumerate(rows())]
    assert read_table(write(tmp_path / "t.parquet", nulls)).steps == (1, 2)


def test_rows_that_are_there_twice(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.parquet", [*rows(), *rows()[:4]]))
    assert table.steps == (0, 1, 2)
    assert table.notes == ("4 rows that say the same as another are left out",)


def test_all_ranks_of_tp_groups(tmp_path: Path) -> None:
    both = [row | {"rank": 2 * row["rank"] + tp} for row in rows() for tp in range(2)]
    table = read_table(write(tmp_path / "t.parquet", both))
    assert table.notes == ("there are rows of 12 ranks for 6 workers: the first rank of each is used",)
    assert judge(analyse(table)).workers == (Worker(1, 1),)


@pytest.mark.parametrize("column", ["dp_rank", "stage", "step", "optype", "start_ts", "duration"])
def test_columns_that_are_needed(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "t.parquet", rows(), without=(column,))
    with pytest.raises(ValueError, match=f"no column {column}: an operation table has dp_rank, stage"):
        read_table(path)


def test_columns_of_other_types(tmp_path: Path) -> None:
    wrong = [row | {"start_ts": "soon"} for row in rows()]
    with pytest.raises(ValueError, match="cannot be read as an operation table in Parquet: Failed to parse string"):
        read_table(write(tmp_path / "t.parquet", wrong))
    texts = [row | {"start_ts": str(row["start_ts"]), "stage": float(row["stage"])} for row in rows()]
    assert judge(analyse(read_table(write(tmp_path / "t.parquet", texts)))).workers == (Worker(1, 1),)


def test_no_rows(tmp_path: Path) -> None:
    whole = pyarrow.parquet.read_table(write(tmp_path / "t.parquet", rows()))
    pyarrow.parquet.write_table(whole.slice(0, 0), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="there is no row to analyse"):
        read_table(tmp_path / "none.parquet")


def test_what_cannot_be_analysed(tmp_path: Path) -> None:
    cases = {
        "stages go up to 9, but there is no row of stage 1": [r | {"stage": 9 * r["stage"]} for r in rows()],
        "stages go up to 1000000000000, but there is no row of stage 1": [
            r | {"stage": 10**12 * r["stage"]} for r in rows()
        ],
        "no step is whole": [r for i, r in enumerate(rows()) if i % 3],
        "are too few for": [r | {"step": i, "dp_rank": i} for i, r in enumerate(rows() * 20)],
        "all operations of the table have a duration of 0": [r | {"duration": 0.0} for r in rows()],
    }
    for sentence, damaged in cases.items():
        with pytest.raises(ValueError, match=sentence):
            analyse(read_table(write(tmp_path / "t.parquet", damaged)))


def test_files_cut_or_changed_anywhere(tmp_path: Path) -> None:
    """An answer or a sentence, whatever happens to the bytes."""
    whole = (DATA / "ST.parquet").read_bytes()
    path = tmp_path / "t.parquet"
    for part in range(10):
        path.write_bytes(whole[: part * len(whole) // 10])
        with pytest.raises(ValueError, match=r"t\.parquet: cannot be read as an operation table in Parquet: "):
            read_table(path)
    chance = random.Random(5)
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(20):
            damaged[chance.randrange(len(whole))] = chance.randrange(256)
        path.write_bytes(damaged)
        with suppress(ValueError):
            judge(analyse(read_table(path)))


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.parquet"):
        with pytest.raises(ValueError, match="cannot be read as an operation table in Parquet: "):
            read_table(path)


def test_is_table(tmp_path: Path) -> None:
    assert is_table(DATA / "ST.parquet")
    (tmp_path / "table").write_bytes((DATA / "ST.parquet").read_bytes())
    assert is_table(tmp_path / "table")
    assert not is_table(DATA / "README.md")
    assert not is_table(tmp_path)
