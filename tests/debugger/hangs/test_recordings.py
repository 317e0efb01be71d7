"""Dumps of the flight recorder: what is read of them, and that nothing else ever is."""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from fourfold.debugger.hangs.recordings import Dump, is_dump, rank_in_name, read_dump

DUMPS = Path(__file__).parent / "dumps"


def entry(**changes: Any) -> dict[str, Any]:
    """As NCCL's recorder writes one in schema 2.10."""
    return {
        "record_id": 0, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0,
        "op_id": 1, "profiling_name": "nccl:all_reduce", "time_created_ns": 17, "duration_ms": None,
        "input_sizes": [[8, 4]], "input_dtypes": ["BFloat16"], "output_sizes": [[8, 4]],
        "output_dtypes": ["BFloat16"], "state": "completed", "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": False, "timeout_ms": 600_000, "is_p2p": False, "frames": [],
        **changes,
    }  # fmt: skip


def dump(tmp_path: Path, *entries: Any, form: str = "pickle", **rest: Any) -> Dump:
    content = {"version": "2.10", "entries": list(entries), **rest}
    data = pickle.dumps(content, protocol=2) if form == "pickle" else json.dumps(content).encode()
    path = tmp_path / "nccl_trace_rank_3"
    path.write_bytes(gzip.compress(data) if form == "gz" else data)
    assert is_dump(path)
    return read_dump(path, 3)


def test_pickles_and_json_of_the_same_rank_say_the_same() -> None:
    for rank in range(4):
        a = read_dump(DUMPS / "skips" / f"nccl_trace_rank_{rank}", rank)
        b = read_dump(DUMPS / "skips_json" / f"rank{rank}.json", rank)
        shown = [[(c.group, c.kind, c.number, c.tensor, c.begun, c.created) for c in x.calls] for x in (a, b)]
        assert shown[0] == shown[1]
        assert all(call.where.endswith("two_steps") for call in a.calls)
        assert not any(call.stack for call in b.calls)  # PyTorch writes none into JSON


def test_what_gloo_retires_has_ended() -> None:
    calls = read_dump(DUMPS / "sleeps" / "nccl_trace_rank_0", 0).calls
    assert [call.ended for call in calls] == [True] * 6 + [False]
    assert {call.begun for call in calls} == {True}
    assert calls[0].tensor == "[32] float32"


@pytest.mark.parametrize("form", ["pickle", "json", "gz"])
def test_an_entry_of_nccl(tmp_path: Path, form: str) -> None:
    read = dump(
        tmp_path,
        entry(record_id=5, profiling_name="nccl:_all_gather_base", input_sizes=[[4]], output_sizes=[[4, 4]]),
        entry(record_id=4, profiling_name="nccl:recv 2<-1", is_p2p=True, p2p_seq_id=9, state="scheduled"),
        form=form,
        pg_config={"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}, "7": "not a group"},
        pg_status={"0": {"last_completed_collective": 1}},
    )
    message, gather = read.calls
    assert (message.kind, message.ends, message.batch, message.ended, message.begun) == ("recv", (1, 2), 9, False, None)
    assert (gather.kind, gather.tensor, gather.factor, gather.ended) == ("all_gather", "[16] bfloat16", 4.0, True)
    assert read.groups == {("0", "default_pg"): (0, 1, 2, 3)}
    assert read.cut


def test_what_has_completed_the_status_of_a_group_knows_as_well(tmp_path: Path) -> None:
    entries = [entry(record_id=i, collective_seq_id=i + 1, state="scheduled") for i in range(3)]
    calls = dump(tmp_path, *entries, pg_status={"0": {"last_completed_collective": 2}}).calls
    assert [call.ended for call in calls] == [True, True, False]


def test_where_gloo_retires_nothing_the_last_call_may_not_have_ended(tmp_path: Path) -> None:
    entries = [
        entry(record_id=i, collective_seq_id=i + 1, state="scheduled", profiling_name="gloo:all_reduce")
        for i in range(3)
    ]
    assert [call.ended for call in dump(tmp_path, *entries).calls] == [True, True, False]


def test_older_schemas_lack_keys_and_odd_values_cost_only_themselves(tmp_path: Path) -> None:
    old = {"record_id": 0, "pg_id": 2, "profiling_name": "nccl:all_reduce", "state": "started"}
    odd = entry(record_id=1, frames="no list", input_sizes="[8]", time_created_ns="late")
    read = dump(tmp_path, old, odd, entry(record_id=2, state=None), "no entry", {"state": "completed"})
    assert [(call.group, call.kind) for call in read.calls] == [
        (("2", ""), "all_reduce"), (("0", "default_pg"), "all_reduce"),
    ]  # fmt: skip
    assert read.notes == ("nccl_trace_rank_3: 3 entries are damaged and were left out",)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(Path(__file__).parent / "touched"), "w")


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(pickle.dumps({"entries": [], "pg_config": Evil()}, protocol=2))
    with pytest.raises(ValueError, match=r"is damaged: it holds \w+\.open"):
        read_dump(file, 0)
    file.write_bytes(b"\x80\x02}(X\x07\x00\x00\x00entriesX\x01\x00\x00\x00aQu.")  # BINPERSID
    with pytest.raises(ValueError, match="refers to something outside"):
        read_dump(file, 0)
    assert not (Path(__file__).parent / "touched").exists()


@pytest.mark.parametrize("name", ["skips/nccl_trace_rank_0", "skips_json/rank0.json"])
def test_a_dump_that_is_cut_off_anywhere_is_named(tmp_path: Path, name: str) -> None:
    whole = (DUMPS / name).read_bytes()
    file = tmp_path / "nccl_trace_rank_0"
    for length in range(0, len(whole), 97):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"nccl_trace_rank_0 is (damaged|empty)"):
            read_dump(file, 0)


def test_a_changed_byte_never_gives_a_traceback(tmp_path: Path) -> None:
    whole = (DUMPS / "skips/nccl_trace_rank_0").read_bytes()
    file = tmp_path / "nccl_trace_rank_0"
    for at in range(0, len(whole), 17):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(ValueError):  # or some of its calls are read
            assert read_dump(file, 0).rank == 0


@pytest.mark.parametrize("content", [[], 7, {"entries": 3}, "text"])
def test_other_content_is_no_dump(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "rank0"
    file.write_bytes(pickle.dumps(content, protocol=2))
    assert not is_dump(file)
    with pytest.raises(ValueError, match="is no dump of the flight recorder"):
        read_dump(file, 0)


def test_a_trace_of_the_profiler_is_no_dump(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.json"
    file.write_text('{"schemaVersion": 1, "distributedInfo": {"pg_config": []}, "traceEvents": [{"name": "entries"}]}')
    assert not is_dump(file)
    assert not is_dump(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_12", 12), ("rank0.json", 0), ("fr3.pickle", 3), ("7", 7), ("nccl_trace_rank_2.json.gz", 2),
     ("notes.txt", None), ("rank_1_old", None)],
)  # fmt: skip
def test_the_rank_is_in_the_name(name: str, rank: int | None) -> None:
    assert rank_in_name(Path(name)) == rank
