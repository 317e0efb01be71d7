"""Chips against each other and against what is printed of them; clusters from names and files; refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.planner.jobs import Precision
from fourfold.planner.machines.chips import CHIPS, GB, GIB, Chip
from fourfold.planner.machines.cluster import chip_index, cluster, find_chip
from fourfold.planner.machines.hardware import GPUS, find_gpu

LLAMA3 = """
[cluster]
name = "llama3-24k"
chip = "h100"
peaks_tflops.bf16 = 989.4
units = 132
hbm_gib = 79.1
hbm_bandwidth_gb_s = 3350
link_gb_s = 450
domain = 8
gpus_per_node = 8
nic_gb_s = 50
tier_gpus = 3072
oversubscription = 7
"""


class TestChips:
    @pytest.mark.parametrize(
        ("name", "device"),
        [
            ("a100-40", "NVIDIA A100-SXM4-40GB"),
            ("a100-80", "NVIDIA A100-SXM4-80GB"),
            ("h100", "NVIDIA H100 80GB HBM3"),
            ("h200", "NVIDIA H200"),
            ("b200", "NVIDIA B200"),
            ("b300", "NVIDIA B300 SXM6 AC"),
            ("gb200", "NVIDIA GB200"),
            ("gb300", "NVIDIA GB300"),
            ("mi300x", "AMD Instinct MI300X"),
            ("mi355x", "AMD Instinct MI355X"),
        ],
    )
    def test_peaks_are_those_of_the_meter(self, name: str, device: str) -> None:
        gpu = find_gpu(device)
        assert gpu is not None
        peaks = find_chip(name).peaks
        assert (peaks["bf16"], peaks.get("fp8"), peaks.get("fp4")) == (gpu.bfloat16, gpu.float8, gpu.float4)

    def test_every_listed_chip_is_there(self) -> None:
        nvidia = {"v100-32", "a100-40", "a100-80", "h100", "h100-hbm2e", "h200", "b200", "b300", "gb200", "gb300"}
        assert nvidia | {"mi300x", "v5p"} <= {chip.name for chip in CHIPS}

    def test_names_mean_one_chip(self) -> None:
        names = [name for chip in CHIPS for name in (chip.name, *chip.aliases)]
        assert len(names) == len(set(names))
        for index, chip in enumerate(CHIPS):
            assert chip_index(chip.name) == index
            assert all(find_chip(name) is chip for name in (chip.name, *chip.aliases))

    @pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
    def test_eight_bits_twice_as_fast_as_sixteen(self, chip: Chip) -> None:
        """A sparse number in one of both columns stands out (pains P29)."""
        assert len(chip.source) > 50
        if "fp8" in chip.peaks:
            assert chip.peaks["fp8"] / chip.peaks["bf16"] == pytest.approx(2, rel=1e-3)
        if "fp4" in chip.peaks:
            assert 1.9 < chip.peaks["fp4"] / chip.peaks["fp8"] < 3.1
        assert chip.peaks.get("fp32", 0) < 0.5 * max(chip.peaks.values())

    @pytest.mark.parametrize(
        ("name", "links", "gb_s_each"),
        [  # one-way, by the number of links: facts.md 4.2 and row 15; V100, A100 and MI300X by their whitepapers
            ("v100-32", 6, 25), ("a100-80", 12, 25), ("h100", 18, 25), ("h200", 18, 25), ("b200", 18, 50),
            ("gb200", 18, 50), ("b300", 18, 50), ("gb300", 18, 50), ("mi300x", 7, 64), ("mi355x", 7, 76.8),
        ],
    )  # fmt: skip
    def test_links_are_one_way(self, name: str, links: int, gb_s_each: float) -> None:
        assert find_chip(name).link == pytest.approx(links * gb_s_each * GB)

    @pytest.mark.parametrize(
        ("name", "gbit"),
        [("a100-80", 200), ("h100", 400), ("h200", 400), ("b200", 400), ("gb200", 400), ("gb300", 800)],
    )
    def test_a_gpu_owns_one_nic(self, name: str, gbit: float) -> None:
        """facts.md row 16: 400 GB/s belong to a node of 8, not to a GPU."""
        assert find_chip(name).nic == gbit / 8 * GB

    @pytest.mark.parametrize(
        ("name", "gib", "printed_gb"),
        [("a100-80", 79.1, 80), ("h100", 79.1, 80), ("b200", 178.4, 180), ("h200", 139.8, 141), ("gb200", 184.3, 186)],
    )
    def test_memory_as_a_program_sees_it(self, name: str, gib: float, printed_gb: float) -> None:
        """algorithms.md 3.10. What is printed on the box is neither GB nor GiB of it."""
        chip = find_chip(name)
        assert chip.hbm_bytes == gib * GIB
        assert printed_gb * 0.98 < chip.hbm_bytes / GIB < printed_gb
        if name == "h100":
            assert chip.hbm_bytes == pytest.approx(84.9e9, rel=1e-3)

    def test_intensity_of_memory(self) -> None:
        """facts.md 4.2: 295 and 281 FLOPs per byte of HBM (the book's B200 has 8.0 TB/s; the product 7.7)."""
        h100, b200 = find_chip("h100"), find_chip("b200")
        assert h100.peaks["bf16"] / h100.hbm_bandwidth == pytest.approx(295, abs=1)
        assert b200.peaks["bf16"] / 8.0e12 == pytest.approx(281, abs=1)

    def test_one_table_of_peaks(self) -> None:
        """The rates of a chip with a row in hardware.GPUS appear nowhere else in the package."""
        text = Path(sys.modules["fourfold.planner.machines.chips"].__file__ or "").read_text()
        for gpu in GPUS:
            assert f"{gpu.bfloat16 / 1e12:_}".rstrip("0").rstrip(".") + " * T" not in text
        assert "989" not in text


class TestClusters:
    @pytest.mark.parametrize("name", ["h100", "H100", "H100-SXM", "h100 80GB", "h100_80gb"])
    def test_by_name(self, name: str) -> None:
        found = cluster(name, 16_384)
        assert (found.chip.name, found.gpus, found.domain, found.gpus_per_node) == ("h100", 16_384, 8, 8)
        assert (found.tier, found.oversubscription) == (16_384, 1)

    def test_columns(self) -> None:
        assert cluster("h100", 128).columns(Precision.BF16) == {
            "chip": chip_index("h100"),
            "peak": 989.4e12,
            "peak_16": 989.4e12,
            "units": 132,
            "hbm_bytes": 79.1 * GIB,
            "hbm_bandwidth": 3.35e12,
            "domain": 8,
            "link": 450e9,
            "nic": 50e9,
            "tier": 128,
            "oversubscription": 1.0,
        }
        eight = cluster("h100", 128).columns(Precision.FP8)
        assert (eight["peak"], eight["peak_16"]) == (1978.9e12, 989.4e12)
        assert cluster("v100", 16).columns(Precision.FP16)["peak_16"] == 125e12

    def test_a_domain_is_no_larger_than_the_job(self) -> None:
        assert cluster("gb200", 16).columns(Precision.MXFP8)["domain"] == 16
        assert cluster("gb200", 144).columns(Precision.MXFP8)["domain"] == 72

    @pytest.mark.parametrize(
        ("name", "precision", "nearest"),
        [
            ("a100", Precision.FP8, "bf16"),
            ("v100", Precision.BF16, "fp16"),
            ("h100", Precision.MXFP8, "fp8"),
            ("h100", Precision.FP4, "fp8"),
            ("v5p", Precision.FP16, "bf16"),
        ],
    )
    def test_what_a_chip_cannot(self, name: str, precision: Precision, nearest: str) -> None:
        with pytest.raises(ValueError, match=f'precision = "{precision.name.lower()}".*nearest legal: "{nearest}"'):
            cluster(name, 8).columns(precision)

    def test_unknown_names(self) -> None:
        with pytest.raises(ValueError, match=r'gpu = "h10": must be one of v100-32, .* nearest legal: "h100"'):
            cluster("h10", 8)
        with pytest.raises(ValueError, match=r"or the path of a \.toml file"):
            cluster("xyzzy", 8)
        with pytest.raises(ValueError, match="gpus = 0: must be at least 1; nearest legal: 1"):
            cluster("h100", 0)


class TestFiles:
    def test_llama3(self, tmp_path: Path) -> None:
        """2407.21783, 3.3.1: pods of 3,072 GPUs, 1 : 7 above. Every other key says what the chip says anyway."""
        found = cluster(write(tmp_path, LLAMA3), 16_384)
        named = cluster("h100", 16_384)
        assert found.name == "llama3-24k"
        assert (found.tier, found.oversubscription) == (3072, 7)
        pod = {"tier": 3072, "oversubscription": 7.0}
        assert found.columns(Precision.BF16) == named.columns(Precision.BF16) | pod

    def test_what_is_left_out_is_the_chips(self, tmp_path: Path) -> None:
        found = cluster(write(tmp_path, '[cluster]\nchip = "a100"\nnic_gb_s = 12.5\npeaks_tflops.bf16 = 250'), 64)
        assert found.name == "own"
        columns = found.columns(Precision.BF16)
        assert (columns["nic"], columns["peak"], columns["link"]) == (12.5e9, 250e12, 300e9)
        assert find_chip("a100").peaks["bf16"] == 312e12  # the table is as it was

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("link_gb_s = 900", r"link_gb_s = 900: is the sum of both directions .* nearest legal: 450"),
            ("nic_gb_s = 400", r"nic_gb_s = 400: is what a whole node of h100 has; .* nearest legal: 50"),
            ("peaks_tflops.bf16 = 1979", r"peaks_tflops.bf16 = 1979: .*2:4 sparse .* nearest legal: 989.4"),
            ("peaks_tflops.fp8 = 3958", r"peaks_tflops.fp8 = 3958: .*nearest legal: 1978.9"),
            ("peaks_tflops.int8 = 3", r"peaks_tflops.int8: unknown precision; must be one of fp32, fp16, bf16"),
            ("peaks_tflops = 3", r"peaks_tflops = 3: must be a table"),
            ("hbm_gib = 0", r"hbm_gib = 0: must be a number above 0"),
            ("hbm_gib = nan", r"hbm_gib = nan: must be a number above 0"),
            ("hbm_gib = true", r"hbm_gib = true: must be a number"),
            ('domain = "8"', r'domain = "8": must be a whole number of at least 1'),
            ("tier_gpus = 0", r"tier_gpus = 0: must be a whole number"),
            ("oversubscription = 0.5", r"oversubscription = 0.5: must be at least 1; nearest legal: 1"),
            ("nic_gbs = 50", r"nic_gbs: unknown key; nearest legal: nic_gb_s"),
            ("name = 3", r"name = 3: must be text"),
        ],
    )
    def test_refusals(self, tmp_path: Path, line: str, message: str) -> None:
        with pytest.raises(ValueError, match=rf"own\.toml: cluster\.{message}"):
            cluster(write(tmp_path, f'[cluster]\nchip = "h100"\n{line}\n'), 8)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r'cluster: missing; .* chip = "h100"'),
            ("[cluster]\n", r"cluster\.chip: must name one of v100-32"),
            ('[cluster]\nchip = "h10"', 'nearest legal: "h100"'),
            ('[clutser]\nchip = "h100"', r"clutser: unknown section"),
            ("[cluster", "not valid TOML"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            cluster(write(tmp_path, text), 8)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such file"):
            cluster(tmp_path / "none.toml", 8)


def test_no_heavy_import() -> None:
    code = "import sys, fourfold.planner.machines.cluster; print(*({'torch', 'scipy', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def write(folder: Path, text: str) -> Path:
    path = folder / "own.toml"
    path.write_text(text)
    return path
