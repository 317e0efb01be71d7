"""Tables into jobs: no row is lost, rows read as written by hand, and malformed cells are named."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fourfold.planner.jobs import Order, Precision, Recompute, Split, model_parameters
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.rows import MeasuredRow, is_calibration, jobs_of
from fourfold.planner.measured.tables import MEASUREMENTS, read

PUBLISHED = MEASUREMENTS / "published.csv"
LLAMA_70B = {
    "id": "x-1",
    "source_key": "x",
    "framework": "NeMo (Megatron-Core)",
    "gpu": "H100-80GB-SXM",
    "gpu_count": "64",
    "model_name": "Llama-3-70B",
    "layers": "80",
    "hidden": "8192",
    "ffn_hidden": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gated_mlp": "1",
    "tied_embeddings": "0",
    "global_batch": "128",
    "micro_batch": "1",
    "tp": "4",
    "pp": "4",
    "vpp": "5",
    "cp": "2",
    "dp": "2",
    "sharding": "dist-opt (ZeRO-1)",
    "sequence_parallel": "1",
    "pp_schedule": "1F1B interleaved",
    "recompute": "none",
    "precision": "bf16",
    "measured_step_time_s": "12.5",
    "quality": "A",
}


def table(tmp_path: Path, *rows: dict[str, str], columns: list[str] | None = None) -> Path:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def one(tmp_path: Path, **changes: str) -> MeasuredRow:
    measured = read(table(tmp_path, LLAMA_70B | changes))
    assert not measured.unscored
    return measured.rows[0]


def why(tmp_path: Path, **changes: str) -> str:
    measured = read(table(tmp_path, LLAMA_70B | changes))
    assert not measured.rows
    return measured.unscored[0].reason


class TestPublished:
    def test_no_row_is_lost(self) -> None:
        with PUBLISHED.open(newline="", encoding="utf-8") as file:
            ids = [row["id"] for row in csv.DictReader(file)]
        measured = read(PUBLISHED)
        assert len(ids) == 1083
        assert sorted(ids) == sorted([r.id for r in measured.rows] + [u.id for u in measured.unscored])

    def test_all_dense_rows_of_quality_a_are_predicted(self) -> None:
        with PUBLISHED.open(newline="", encoding="utf-8") as file:
            dense = {row["id"] for row in csv.DictReader(file) if row["quality"] == "A" and not row["n_experts"]}
        assert dense == {row.id for row in read(PUBLISHED).rows if row.quality == "A"}

    def test_gpus_are_those_of_the_table(self) -> None:
        with PUBLISHED.open(newline="", encoding="utf-8") as file:
            counts = {row["id"]: row["gpu_count"] for row in csv.DictReader(file)}
        rows = read(PUBLISHED).rows
        for row, gpus in zip(rows, jobs_of(rows).gpus, strict=True):
            assert counts[row.id] in ("", str(gpus))

    def test_seconds_agree_with_rates(self) -> None:
        """Both are printed of many rows, rounded: 3 % at most, as their flags promise."""
        with PUBLISHED.open(newline="", encoding="utf-8") as file:
            rates = {row["id"]: row["tokens_per_s_per_gpu"] for row in csv.DictReader(file)}
        rows = [row for row in read(PUBLISHED).rows if row.quality == "A" and rates[row.id]]
        jobs = jobs_of(rows)
        seconds = jobs.tokens / (np.array([float(rates[row.id]) for row in rows]) * jobs.gpus)
        np.testing.assert_allclose(np.array([row.seconds for row in rows], dtype=float), seconds, rtol=0.031)

    def test_parameters_are_those_of_the_names(self) -> None:
        rows = [row for row in read(PUBLISHED).rows if row.quality == "A"]
        with PUBLISHED.open(newline="", encoding="utf-8") as file:
            names = {row["id"]: (row["model_name"], row["layers"]) for row in csv.DictReader(file)}
        counted = dict(zip([names[row.id] for row in rows], model_parameters(jobs_of(rows)), strict=True))
        assert counted["Llama-3-8B", "32"] == 8_030_261_248
        assert counted["Llama-3-70B", "80"] == 70_553_706_496
        assert counted["LLaMA-65B", "80"] == pytest.approx(65e9, rel=0.05)  # its vocabulary was 128,000

    def test_halves_are_even_and_hold_whole_groups(self) -> None:
        rows = read(PUBLISHED).rows
        halves = Counter(is_calibration(row.group) for row in rows)
        assert min(halves.values()) > 0.4 * len(rows)
        by_group: dict[str, set[bool]] = {}
        for row in rows:
            by_group.setdefault(row.group, set()).add(is_calibration(row.group))
        assert all(len(found) == 1 for found in by_group.values())


def test_the_half_of_a_group_never_changes() -> None:
    # The last digits of their SHA-256, by sha256sum: 5, d, b and d are odd, 6 and 4 even.
    assert [is_calibration(group) for group in ("", "abc", "a", "b")] == [False, False, False, False]
    assert [is_calibration(group) for group in ("c", "hello")] == [True, True]


def test_a_row_by_hand(tmp_path: Path) -> None:
    row = one(tmp_path)
    c = row.columns
    assert (row.stack, row.seconds, row.quality, row.source) == ("megatron", 12.5, "A", "x")
    assert [c[name] for name in ("tp", "cp", "pp", "dp", "v", "nc")] == [4, 2, 4, 2, 5, 4]
    assert (c["sequences"], c["micro_batch"], c["order"]) == (128, 1, Order.INTERLEAVED)
    assert (c["zero"], c["shards"]) == (1, 4)  # dp x cp
    assert c["padded_vocab"] == 128_512  # to a multiple of 128 x 4
    assert (c["head_dim"], c["positions"], c["tied"], c["sequence_parallel"]) == (128, 0, False, True)
    assert c["pairs"] == 8192 * 8193 // 2
    assert CHIPS[int(c["chip"])].name == "h100"
    assert (c["domain"], c["link"], c["nic"]) == (8, 450e9, 50e9)
    jobs = jobs_of([row])
    assert (int(jobs.gpus[0]), int(jobs.micro_batches[0])) == (64, 64)


def test_columns_in_any_case_and_order(tmp_path: Path) -> None:
    reordered = {key.upper(): value for key, value in reversed(LLAMA_70B.items())}
    assert read(table(tmp_path, reordered)).rows[0] == one(tmp_path)


def test_what_is_blank_takes_defaults(tmp_path: Path) -> None:
    c = one(tmp_path, vpp="", kv_heads="", gated_mlp="", sequence_parallel="", pp_schedule="", recompute="").columns
    assert (c["v"], c["order"], c["kv_heads"], c["gated"]) == (1, Order.ONE_F_ONE_B, 64, True)
    assert (c["sequence_parallel"], c["recompute"]) == (True, Recompute.NONE)
    assert one(tmp_path, dp="").columns["dp"] == 2
    assert one(tmp_path, ffn_hidden="").columns["ffn_dim"] == 22_016  # 8/3 of 8,192, to a multiple of 256
    c = one(tmp_path, model_name="GPT3-175B", gated_mlp="0", ffn_hidden="", tied_embeddings="").columns
    assert (c["ffn_dim"], c["tied"], c["positions"]) == (4 * 8192, True, 8192)
    assert one(tmp_path, quality="").quality == ""


def test_a_table_with_few_columns(tmp_path: Path) -> None:
    needed = ("gpu", "gpu_count", "layers", "hidden", "heads", "vocab", "seq_len", "global_batch",
              "micro_batch", "tp", "pp", "measured_step_time_s")  # fmt: skip
    row = {name: LLAMA_70B[name] for name in needed}
    found = read(table(tmp_path, row)).rows[0]
    assert (found.id, found.columns["dp"], found.columns["precision"]) == ("row 1", 4, Precision.BF16)
    assert found.stack == "standard"  # without a framework


def test_rate_where_no_step_time_is_given(tmp_path: Path) -> None:
    row = LLAMA_70B | {"measured_step_time_s": "", "tokens_per_s_per_gpu": "1000"}
    assert read(table(tmp_path, row)).rows[0].seconds == pytest.approx(128 * 8192 / (1000 * 64))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_experts": "8"}, "mixture of experts"),
        ({"task": "lora"}, "task: lora"),
        ({"gpu": "RTX 4090"}, "no numbers of the chip: RTX 4090"),
        ({"gpu": "A100-80GB-SXM", "precision": "fp8"}, "a100-80 cannot multiply in fp8"),
        ({"precision": "int8"}, "precision: int8"),
        ({"micro_batch": ""}, "not stated: micro_batch"),
        ({"layers": "", "heads": ""}, "not stated: layers, heads"),
        ({"dp": "4"}, "gpu_count is not tp x cp x pp x dp"),
        ({"measured_step_time_s": ""}, "no step time and no token rate"),
    ],
)
def test_why_a_row_is_not_predicted(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    assert why(tmp_path, **changes) == reason


def test_splits_over_stages(tmp_path: Path) -> None:
    asymmetric = "1F1B interleaved, asymmetric (embedding/loss counted as layers)"
    assert one(tmp_path).columns["split"] == Split.EVEN
    assert one(tmp_path, pp_schedule=asymmetric).columns["split"] == Split.ENDS_LIGHT
    # 126 layers on 4 x 4 stages go only with the ends counted as layers: 128 / 16.
    assert one(tmp_path, layers="126", vpp="4").columns["split"] == Split.ENDS_LIGHT
    assert one(tmp_path, layers="126", pp="1", dp="8", vpp="").columns["split"] == Split.EVEN


def test_flags(tmp_path: Path) -> None:
    flags = "overlap_grad_sync, bf16 grad reduce, ub_tp_comm_overlap"
    c = one(tmp_path, overlap_flags=flags).columns
    assert (c["gradient_bytes"], c["reduce_bytes"], c["tp_overlap"], c["cuda_graphs"]) == (2, 2, True, False)
    assert one(tmp_path, overlap_flags="TP comm overlap, layer CUDA graphs").columns["cuda_graphs"]
    c = one(
        tmp_path, framework="TorchTitan (FSDP2)", sharding="", compile="1", recompute="full on 8 of 80 layers"
    ).columns
    assert (c["zero"], c["compiled"], c["padded_vocab"]) == (3, True, 128_256)
    assert (c["recompute"], c["recomputed_layers"]) == (Recompute.FULL, 0.1)


def test_nvl72_spans_trays(tmp_path: Path) -> None:
    c = one(tmp_path, gpu="GB200 (B200-186GB)", gpus_per_node="4").columns
    assert (c["domain"], c["nic"]) == (64, 50e9)  # no more than the job has


class TestErrors:
    def test_no_number(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"rows.csv, line 3, column hidden: 'wide' is not a number"):
            read(table(tmp_path, LLAMA_70B, LLAMA_70B | {"hidden": "wide"}))

    def test_no_whole_number(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"line 2, column tp: 2\.5 must be a whole number from 1"):
            read(table(tmp_path, LLAMA_70B | {"tp": "2.5"}))

    def test_no_flag(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="line 2, column gated_mlp: 'maybe' is neither 1 nor 0"):
            read(table(tmp_path, LLAMA_70B | {"gated_mlp": "maybe"}))

    def test_a_short_line(self, tmp_path: Path) -> None:
        path = table(tmp_path, LLAMA_70B)
        path.write_text(path.read_text() + "x-2,x,NeMo\n")
        with pytest.raises(
            ValueError, match=r"rows.csv, line 3: 3 cells under a header of 29 columns; column gpu is miss"
        ):
            read(path)

    def test_no_table_of_runs(self, tmp_path: Path) -> None:
        path = tmp_path / "other.csv"
        path.write_text("a,b\n1,2\n")
        with pytest.raises(ValueError, match=r"other.csv: not a table of measured runs.*it has a, b"):
            read(path)

    def test_missing_columns_are_named(self, tmp_path: Path) -> None:
        row = {name: LLAMA_70B[name] for name in LLAMA_70B if name not in ("heads", "tp")}
        with pytest.raises(ValueError, match=r"Its header lacks heads, tp, to be a table with global_batch, gpu, "):
            read(table(tmp_path, row))

    def test_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is a folder; give its CSV files"):
            read(tmp_path)

    def test_no_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text(",".join(LLAMA_70B) + "\n\n")
        with pytest.raises(ValueError, match=r"rows.csv: has a header and no rows"):
            read(path)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such file"):
            read(tmp_path / "nothing.csv")

    def test_an_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.csv"
        path.write_text("")
        with pytest.raises(ValueError, match="it has none"):
            read(path)

    def test_no_csv(self, tmp_path: Path) -> None:
        path = table(tmp_path, LLAMA_70B)
        path.write_text(path.read_text() + "x" * 200_000 + "\n")
        with pytest.raises(ValueError, match=r"rows.csv, line 3: not valid CSV: field larger than field limit"):
            read(path)

    def test_other_encodings_matter_in_words_only(self, tmp_path: Path) -> None:
        path = table(tmp_path, LLAMA_70B | {"notes": "caf\u00e9"})
        path.write_bytes(b"\xef\xbb\xbf" + path.read_text(encoding="utf-8").encode("latin-1"))
        assert read(path).rows[0].seconds == 12.5
