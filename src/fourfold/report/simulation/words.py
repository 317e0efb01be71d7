"""What a simulated step is called in tables and sentences."""

from __future__ import annotations

from fourfold.simulator.scenario import Scenario

CLASS_WORDS = {
    "compute": "computing, without attention",
    "attention": "attention",
    "tp": "TP's transfers",
    "tp_wait": "waiting for slower TP peers",
    "cp": "CP's transfers",
    "cp_wait": "waiting for slower CP peers",
    "pp_wait": "waiting for other pipeline ranks",
    "dp": "FSDP's collectives, not hidden",
    "dp_wait": "waiting for slower replicas",
    "host": "launched late by the host",
    "end_wait": "waiting for the last rank to end",
    "optimizer": "optimizer",
    "fixed": "fixed for every step",
}
"""`played.CLASSES`, in the order in which they are shown."""

PATH_WORDS = {
    "compute": "computing, without attention",
    "attention": "attention",
    "tp": "TP's collectives",
    "cp": "CP's collectives",
    "pp": "messages between pipeline ranks",
    "dp": "FSDP's collectives",
    "host": "launched late by the host",
    "optimizer": "optimizer",
    "fixed": "fixed for every step",
}
"""`critical.PATH_CLASSES`."""

DIMENSION_WORDS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "messages between pipeline ranks, the bubble included",
    "dp": "FSDP over dp x cp",
}

DIMENSION_NAMES = {"tp": "TP", "cp": "CP", "pp": "PP", "dp": "FSDP"}

PHASE_WORDS = ("fills", "full", "drains")
"""Of `causes.PHASES`, as heads of columns."""


def layout_of(scenario: Scenario) -> str:
    """tp 8 cp 1 pp 16 dp 128, flexible v8 nc 16, 32 micro-batches, ZeRO-2."""
    grid, schedule = scenario.grid, scenario.schedule
    batches = f"{schedule.num_micro_batches} micro-batch{'' if schedule.num_micro_batches == 1 else 'es'}"
    nc = f" nc {schedule.nc}" if schedule.kind == "flexible" else ""
    kind = f"{schedule.kind} v{schedule.v}{nc}"
    return f"tp {grid.tp} cp {grid.cp} pp {grid.pp} dp {grid.dp}, {kind}, {batches}, ZeRO-{schedule.zero}"


def percent(share: float) -> str:
    """12.3%, and what is less than 0.1% but not nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
