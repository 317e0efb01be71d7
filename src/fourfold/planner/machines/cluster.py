"""A cluster: so many chips of one kind, and what connects them. By the name of a chip, or from a TOML file.

In the file, every key but `chip` may be left out:

    [cluster]
    name = "llama3-24k"
    chip = "h100"               # the row of CHIPS that all other keys start from
    peaks_tflops.bf16 = 989.4   # dense TFLOP/s per precision: fp32, fp16, bf16, fp8, mxfp8, fp4
    units = 132                 # streaming multiprocessors
    hbm_gib = 79.1              # as a program sees it: torch.cuda.get_device_properties(0).total_memory / 2**30
    hbm_bandwidth_gb_s = 3350
    link_gb_s = 450             # one-way per GPU inside an NVLink domain
    domain = 8                  # GPUs that NVLink connects
    gpus_per_node = 8
    nic_gb_s = 50               # one-way per GPU between domains: 400 Gb/s
    tier_gpus = 3072            # GPUs with full bandwidth among each other; left out: all
    oversubscription = 7        # beyond: each GPU has nic_gb_s / 7
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from fourfold.planner.jobs import Precision
from fourfold.planner.machines.chips import CHIPS, GB, GIB, Chip
from fourfold.recipe.errors import nearest_name, show


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """So many GPUs of one kind and what connects them. The fields of the chip may be overridden."""

    name: str
    chip: Chip
    gpus: int
    domain: int
    gpus_per_node: int
    link: float
    """Bytes/s one-way per GPU inside the domain."""
    nic: float
    """Bytes/s one-way per GPU between domains."""
    tier: int
    """GPUs that full bandwidth connects. Beyond, `nic` is divided by `oversubscription`."""
    oversubscription: float = 1.0
    path: str | None = None
    """The file that it was read from, as it was given; None: it is what its chip says."""

    @property
    def source(self) -> str:
        """What `cluster` makes it from again, with as many GPUs."""
        return self.path or self.chip.name

    def columns(self, precision: Precision) -> dict[str, Any]:
        """The hardware columns of `Jobs`. ValueError if the chip cannot multiply in this precision."""
        chip = self.chip
        key = precision.name.lower()
        if key not in chip.peaks:
            raise ValueError(
                f"precision = {show(key)}: {chip.name} ({chip.title}) has no such matrix products; "
                f"nearest legal: {_nearest_precision(precision, chip)}"
            )
        return {
            "chip": chip_index(chip.name),
            "peak": chip.peaks[key],
            "peak_16": max(chip.peaks.get("fp16", 0.0), chip.peaks.get("bf16", 0.0)),
            "units": chip.units,
            "hbm_bytes": chip.hbm_bytes,
            "hbm_bandwidth": chip.hbm_bandwidth,
            "domain": min(self.domain, self.gpus),
            "link": self.link,
            "nic": self.nic,
            "tier": self.tier,
            "oversubscription": self.oversubscription,
        }


def cluster(name_or_path: str | Path, gpus: int) -> Cluster:
    """A cluster by the name of its chip ("h100", "a100-40"), or from a TOML file as at the head of this module.

    ValueError naming key, value, rule and nearest legal value.
    """
    if gpus < 1:
        raise ValueError(f"gpus = {gpus}: must be at least 1; nearest legal: 1")
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return _read(path, gpus)
    chip = find_chip(str(name_or_path))
    return Cluster(name=chip.name, gpus=gpus, tier=gpus, **_network(chip))


def find_chip(name: str) -> Chip:
    """The chip of this name, in any case and spelling of its hyphens. ValueError naming the nearest."""
    wanted = _plain(name)
    names = {_plain(known): chip for chip in CHIPS for known in (chip.name, *chip.aliases)}
    if wanted in names:
        return names[wanted]
    nearest = nearest_name(wanted, names)
    known = ", ".join(chip.name for chip in CHIPS)
    hint = f"nearest legal: {show(names[nearest].name)}" if nearest else "or the path of a .toml file"
    raise ValueError(f"gpu = {show(name)}: must be one of {known}; {hint}")


def chip_index(name: str) -> int:
    """Row of CHIPS."""
    return next(index for index, chip in enumerate(CHIPS) if chip.name == name)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _network(chip: Chip) -> dict[str, Any]:
    """What a cluster takes over from its chip."""
    return {"chip": chip, **{key: getattr(chip, key) for key in ("domain", "gpus_per_node", "link", "nic")}}


def _nearest_precision(precision: Precision, chip: Chip) -> str:
    """The legal precision of next as many bits; bf16 before fp16."""
    legal = [p for p in Precision if p.name.lower() in chip.peaks]
    best = min(legal, key=lambda p: (abs(p.bits - precision.bits), p is Precision.FP16))
    return show(best.name.lower())


# --- A cluster from a file ---

_NUMBERS = {  # key: (field, bytes or FLOP/s of its unit)
    "hbm_gib": ("hbm_bytes", GIB),
    "hbm_bandwidth_gb_s": ("hbm_bandwidth", GB),
    "link_gb_s": ("link", GB),
    "nic_gb_s": ("nic", GB),
    "oversubscription": ("oversubscription", 1),
}
_COUNTS = {"units": "units", "domain": "domain", "gpus_per_node": "gpus_per_node", "tier_gpus": "tier"}
_KEYS = ("name", "chip", "peaks_tflops", *_NUMBERS, *_COUNTS)
_SAME = 0.025  # two figures this close are the same one, rounded


def _read(path: Path, gpus: int) -> Cluster:
    """A cluster from a TOML file, its errors with the file's name before them."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; a cluster is a .toml file or the name of a chip") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    try:
        return _from_table(table, default_name=path.stem, gpus=gpus, path=str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _from_table(table: dict[str, Any], *, default_name: str, gpus: int, path: str) -> Cluster:
    for name in table:
        if name != "cluster":
            raise ValueError(f"{name}: unknown section; nearest legal: [cluster]")
    section = table.get("cluster")
    if not isinstance(section, dict):
        raise ValueError('cluster: missing; the file has one section [cluster] with at least chip = "h100"')
    for key in section:
        if key not in _KEYS:
            raise ValueError(
                f"cluster.{key}: unknown key; nearest legal: {nearest_name(key, _KEYS) or ', '.join(_KEYS)}"
            )
    if not isinstance(section.get("chip"), str):
        raise ValueError(f"cluster.chip: must name one of {', '.join(chip.name for chip in CHIPS)}")
    chip = find_chip(section["chip"])

    values: dict[str, Any] = {"tier": gpus}
    for key, (field, unit) in _NUMBERS.items():
        if key in section:
            values[field] = _positive(f"cluster.{key}", section[key]) * unit
    for key, field in _COUNTS.items():
        if key in section:
            values[field] = _count(f"cluster.{key}", section[key])
    _refuse_two_way(values, chip)
    _refuse_shared_nic(values, chip)
    if values.get("oversubscription", 1.0) < 1:
        raise ValueError(
            f"cluster.oversubscription = {values['oversubscription']}: must be at least 1; nearest legal: 1"
        )

    peaks = chip.peaks | _peaks(section.get("peaks_tflops", {}), chip)
    own = {field: values.pop(field) for field in ("hbm_bytes", "hbm_bandwidth", "units") if field in values}
    chip = msgspec.structs.replace(chip, peaks=peaks, **own)
    name = section.get("name", default_name)
    if not isinstance(name, str):
        raise ValueError(f"cluster.name = {show(name)}: must be text")
    return Cluster(name=name, gpus=gpus, path=path, **(_network(chip) | values))


def _positive(key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{key} = {show(value)}: must be a number above 0")
    return float(value)


def _count(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} = {show(value)}: must be a whole number of at least 1")
    return value


def _peaks(table: object, chip: Chip) -> dict[str, float]:
    """Peaks of the file in FLOP/s. Refuses the rate of 2:4 sparse matrices, which is twice the dense one."""
    if not isinstance(table, dict):
        raise ValueError(f"cluster.peaks_tflops = {show(table)}: must be a table, such as peaks_tflops.bf16 = 989.4")
    legal = [precision.name.lower() for precision in Precision]
    for key, value in table.items():
        if key not in legal:
            raise ValueError(f"cluster.peaks_tflops.{key}: unknown precision; must be one of {', '.join(legal)}")
        peak = _positive(f"cluster.peaks_tflops.{key}", value) * 1e12
        dense = chip.peaks.get(key)
        if dense is not None and _close(peak, 2 * dense):
            raise ValueError(
                f"cluster.peaks_tflops.{key} = {show(value)}: is what {chip.name} does with 2:4 sparse matrices, which "
                f"training cannot use; must be dense; nearest legal: {dense / 1e12:g}"
            )
    return {key: float(value) * 1e12 for key, value in table.items()}


def _refuse_two_way(values: dict[str, Any], chip: Chip) -> None:
    if _close(values.get("link", 0.0), 2 * chip.link):
        raise ValueError(
            f"cluster.link_gb_s = {values['link'] / GB:g}: is the sum of both directions of {chip.name}; must be "
            f"one-way per GPU; nearest legal: {chip.link / GB:g}"
        )


def _refuse_shared_nic(values: dict[str, Any], chip: Chip) -> None:
    of_node = values.get("gpus_per_node", chip.gpus_per_node) * chip.nic
    if _close(values.get("nic", 0.0), of_node) and of_node > chip.nic:
        raise ValueError(
            f"cluster.nic_gb_s = {values['nic'] / GB:g}: is what a whole node of {chip.name} has; must be "
            f"one-way per GPU in GB/s (400 Gb/s = 50 GB/s); nearest legal: {chip.nic / GB:g}"
        )


def _close(value: float, other: float) -> bool:
    return abs(value - other) <= _SAME * other
