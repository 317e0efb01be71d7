"""Software stacks: the calibrated constants of the time model, one TOML file each, and how such files are read.

What the chip sustains is the same under all stacks and stands in `stacks/chips.toml`; what the software adds stands in
`stacks/<name>.toml`, every constant with its value, its unit, what it was fitted on, and how well that determined it.
`fourfold calibrate` writes such a file from one's own runs; `benchmarks/calibrate.py` writes the project's.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Self

import numpy as np

from fourfold.planner.jobs import Column, Precision
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.memory.peak import ALLOCATOR
from fourfold.recipe.errors import nearest_name, show

FOLDER = resources.files("fourfold.planner.timing") / "stacks"
CHIPS_FILE = "chips.toml"


@dataclass(frozen=True)
class Sustained:
    """Shares of the dense peak that big work sustains, one entry per row of `cluster.CHIPS`."""

    matmul_16: Column
    matmul_8: Column
    matmul_4: Column
    attention: Column  # of the 16-bit peak, fused, forward, by kernels written for the chip
    portable: Column  # the same by kernels written for the chips before it, such as FlashAttention 2

    def rows(self, chip: Column) -> Self:
        """The entries of these chips."""
        return type(self)(**{field.name: getattr(self, field.name)[chip] for field in fields(self)})


@dataclass(frozen=True)
class Constants:
    """What a stack makes of a chip: numbers, or columns with one per job where jobs of several stacks are predicted."""

    matmul: Column  # rate of big products relative to what the chip sustains
    depth: Column  # K at which a product runs at half of its rate
    attention: Column  # rate of fused attention relative to what the chip sustains
    reach: Column  # sequence length at which fused attention runs at half of its rate: the diagonal, and few blocks
    scores: Column  # passes of unfused attention's scores through memory, relative to `compute.SCORE_BYTES`
    elementwise: Column  # bytes moved outside of products, relative to the least possible
    cast: Column  # bytes moved to quantise, relative to one pass
    launch: Column  # host seconds per layer, forward
    link: Column  # share of the link's bandwidth that collectives reach
    latency: Column  # seconds per hop of a ring between domains
    tp_hidden: Column  # share of TP's collectives that `tp_overlap` hides
    nic: Column  # share of the NIC's bandwidth that collectives reach
    dp_hidden: Column  # share of the work beside it that can hide ZeRO-1's collectives
    contention: Column  # share of a hidden collective's time by which it slows the work that hides it
    p2p: Column  # share of a hop that each micro-batch waits for in the steady state
    optimizer: Column  # bytes moved by the optimizer, relative to 30 per parameter
    fixed: Column  # seconds per step: data, logging, gradient norm, synchronisation
    slow: Column  # growth of the step per doubling of GPUs beyond 8: the slowest of many
    sustained: Sustained
    # Traits, known and not fitted
    portable: Column = field(default_factory=lambda: np.asarray(False))  # bool: attention is not written for the chip
    pxn: Column = field(default_factory=lambda: np.asarray(True))  # bool: NCCL 2.12 or later, which uses all NICs
    pp_inside: Column = field(default_factory=lambda: np.asarray(True))  # bool: ranks of PP lie inside those of DP


TRAITS = ("portable", "pxn", "pp_inside")
SHARES = ("link", "tp_hidden", "nic", "dp_hidden", "contention", "p2p")  # between 0 and 1
UNMEASURED = 0.25  # log seconds by which a chip is expected to miss that nobody has published runs of: 1.6 x 0.15
CONSTANT_UNITS = {
    "matmul": "of the chip's sustained rate",
    "depth": "K",
    "attention": "of the chip's sustained rate",
    "reach": "tokens",
    "scores": "of 13 and 19 bytes per score",
    "elementwise": "of the least bytes",
    "cast": "of one pass",
    "launch": "s per layer",
    "link": "of the bandwidth",
    "latency": "s per hop",
    "tp_hidden": "of the time",
    "nic": "of the bandwidth",
    "dp_hidden": "of the work beside it",
    "contention": "of the time",
    "p2p": "of a hop",
    "optimizer": "of 30 bytes per parameter",
    "fixed": "s per step",
    "slow": "per doubling of GPUs",
}


@dataclass(frozen=True)
class Stack:
    """A software stack: what it keeps and how fast it is."""

    name: str
    description: str
    saved_set: str  # as `saved.load_rules` knows it
    constants: Constants
    band: tuple[float, float]  # multiples of the predicted seconds between which nine of ten measured runs lie
    allocator: float = ALLOCATOR  # reserved over allocated bytes
    allocator_band: tuple[float, float] = (1.0, 1.1)
    fused_attention: bool = True
    compiled: bool = False
    cuda_graphs: bool = False
    tp_overlap: bool = False
    gradient_bytes: int = 4
    reduce_bytes: int = 4

    def band_on(self, chip: int, precision: Precision) -> tuple[float, float]:
        """The band on a row of `cluster.CHIPS`: wider where no run on it in these numbers was fitted."""
        low, high = self.band
        if measured_runs(chip, precision):
            return low, high
        wider = [math.exp(math.hypot(math.log(edge), UNMEASURED)) for edge in (low, high)]
        return 1 / wider[0], wider[1]

    def columns(self) -> dict[str, Any]:
        """The software and gradient columns of `Jobs`."""
        names = ("fused_attention", "compiled", "cuda_graphs", "tp_overlap", "gradient_bytes", "reduce_bytes")
        return {name: getattr(self, name) for name in names}


SOFTWARE = ("fused_attention", "compiled", "cuda_graphs", "tp_overlap", "gradient_bytes", "reduce_bytes")


def stack_names() -> tuple[str, ...]:
    """Stacks that come with the project, `standard` first."""
    names = sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))
    return ("standard", *(name for name in names if name not in ("standard", "chips")))


def load_stack(name_or_path: str | Path) -> Stack:
    """A stack by name, or from a TOML file. ValueError naming the nearest."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise ValueError(f"stack = {show(str(path))}: no such file; a stack is a name or a .toml file") from None
        return parse_stack(text, origin=str(path))
    return _shipped(str(name_or_path))


@cache
def _shipped(name: str) -> Stack:
    names = stack_names()
    if name not in names:
        nearest = nearest_name(name, names) or "standard"
        raise ValueError(f"stack = {show(name)}: must be one of {', '.join(names)}; nearest legal: {show(nearest)}")
    return parse_stack((FOLDER / f"{name}.toml").read_text(encoding="utf-8"), origin=f"{name}.toml")


@cache
def _chips() -> dict[str, Any]:
    return tomllib.loads((FOLDER / CHIPS_FILE).read_text(encoding="utf-8"))


@cache
def load_sustained() -> Sustained:
    """The shares of all chips, from `stacks/chips.toml`."""
    table = _chips()
    names = [field.name for field in fields(Sustained)]
    return Sustained(**{name: np.array([table[chip.name][name]["value"] for chip in CHIPS]) for name in names})


class _RefusedError(Exception):
    """A value of a stack's file that cannot be."""


def _value(value: Any, name: str) -> float:
    """A constant: a number above 0, and a share of something at most 1."""
    share = name in SHARES
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value < math.inf
        or (share and value > 1)
    ):
        rule = "must be above 0" + (" and at most 1" if share else "")
        raise _RefusedError(f"constants.{name}.value = {value}: {rule} ({CONSTANT_UNITS[name]})")
    return float(value)


def _band(table: dict[str, Any]) -> tuple[float, float]:
    low, high = table["low"], table["high"]
    if not 0 < low <= 1 <= high < math.inf:
        raise _RefusedError(f"band.low = {low}, band.high = {high}: must be around 1, such as 0.8 and 1.25")
    return float(low), float(high)


def measured_runs(chip: int, precision: Precision) -> int:
    """Runs on a row of `cluster.CHIPS`, in numbers as wide as these, to which its share of the peak was fitted."""
    return _chips()[CHIPS[chip].name][f"matmul_{min(precision.bits, 16)}"]["runs"]


def parse_stack(text: str, *, origin: str) -> Stack:
    """A stack from the text of its file. ValueError naming the file, the key and the rule."""
    try:
        table = tomllib.loads(text)
        constants = {name: np.asarray(_value(table["constants"][name]["value"], name)) for name in CONSTANT_UNITS}
        software = table.get("software", {})
        return Stack(
            name=table["name"],
            description=table["description"],
            saved_set=table.get("saved_set", "standard"),
            constants=Constants(
                **constants,
                sustained=load_sustained(),
                portable=np.asarray(software.get("portable_attention", False)),
                pxn=np.asarray(software.get("pxn", True)),
                pp_inside=np.asarray(software.get("pp_inside", True)),
            ),
            band=_band(table["band"]),
            allocator=table.get("allocator", ALLOCATOR),
            allocator_band=tuple(table.get("allocator_band", (1.0, 1.1))),
            **{name: software[name] for name in SOFTWARE if name in software},
        )
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{origin}: not valid TOML: {error}") from None
    except _RefusedError as error:
        raise ValueError(f"{origin}: {error}") from None
    except KeyError as error:
        key = error.args[0]
        raise ValueError(f"{origin}: {key}: missing; a stack has name, description, [band], [constants.*]") from None


def constants_of(stack: Stack | Constants) -> Constants:
    """The constants of a stack; constants themselves as they are."""
    return stack.constants if isinstance(stack, Stack) else stack
