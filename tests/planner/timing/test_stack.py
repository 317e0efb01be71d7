"""Stacks: all that ship can be read, errors name what is wrong, constants are physical."""

from __future__ import annotations

import numpy as np
import pytest

from fourfold.planner.jobs import Precision
from fourfold.planner.machines.cluster import CHIPS
from fourfold.planner.measured.priors import FAMILIES, PRIORS
from fourfold.planner.memory.saved import load_rules
from fourfold.planner.timing.stack import (
    CONSTANT_UNITS,
    FOLDER,
    TRAITS,
    Constants,
    load_stack,
    load_sustained,
    measured_runs,
    parse_stack,
    stack_names,
)


def test_standard_first_and_all_can_be_read():
    names = stack_names()
    assert names[0] == "standard"
    assert {"meta", "megatron", "torchtitan", "jax"} < set(names)
    for name in names:
        stack = load_stack(name)
        assert stack.name == name
        load_rules(stack.saved_set)  # ValueError if there is none
        assert 0.6 < stack.band[0] < 1 < stack.band[1] < 1.6


@pytest.mark.parametrize("name", stack_names())
def test_constants_are_physical(name):
    constants = load_stack(name).constants
    for constant, prior in PRIORS.items():
        value = float(getattr(constants, constant))
        assert 0 < value < (1 if prior.share else np.inf), constant
    assert 0.85 < constants.matmul < 1.15
    assert 1 <= constants.elementwise < 3
    assert 1e-4 < constants.launch < 3e-3
    assert constants.slow < 0.03  # 16,384 GPUs take at most a third longer than 8


def test_every_constant_has_a_value_a_unit_a_source_and_a_residual():
    import tomllib

    from fourfold.planner.timing.stack import FOLDER

    for name in stack_names():
        table = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        assert set(table["constants"]) == set(CONSTANT_UNITS)
        for constant in table["constants"].values():
            assert {"value", "unit", "source", "residual", "open"} == set(constant)


def test_chips():
    sustained = load_sustained()
    assert len(sustained.matmul_16) == len(CHIPS)
    assert {chip for chips in FAMILIES.values() for chip in chips} == {chip.name for chip in CHIPS}
    names = [chip.name for chip in CHIPS]
    h100, a100 = names.index("h100"), names.index("a100-80")
    # Products on Hopper are limited by power more than on Ampere; its attention needs kernels of its own.
    assert sustained.matmul_16[h100] < sustained.matmul_16[a100]
    assert sustained.portable[h100] < 0.7 * sustained.attention[h100]


def test_constants_are_the_units_keys():
    assert set(CONSTANT_UNITS) == set(Constants.__dataclass_fields__) - {"sustained", *TRAITS}


class TestErrors:
    def test_unknown_name(self):
        with pytest.raises(ValueError, match=r'stack = "megatrom": must be one of standard.*nearest legal: "megatron"'):
            load_stack("megatrom")

    def test_missing_file(self, tmp_path):
        with pytest.raises(ValueError, match="no such file"):
            load_stack(tmp_path / "mine.toml")

    def test_missing_constant(self):
        with pytest.raises(ValueError, match="mine: depth: missing"):
            parse_stack('name = "x"\ndescription = ""\n[constants.matmul]\nvalue = 1.0\n', origin="mine")

    def test_not_toml(self):
        with pytest.raises(ValueError, match="mine: not valid TOML"):
            parse_stack("name = ", origin="mine")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "[constants.nic]\nvalue = ",
            "[constants.nic]\nvalue = -",
            "constants.nic.value = -.*must be above 0 and at most 1",
        ),
        ("[constants.nic]\nvalue = ", "[constants.nic]\nvalue = 9", "at most 1"),
        ("low = ", "low = nan # ", "band.low"),
    ],
)
def test_values_that_cannot_be_are_refused(old, new, words):
    text = (FOLDER / "standard.toml").read_text()
    assert old in text
    with pytest.raises(ValueError, match=f"standard.toml: .*{words}"):
        parse_stack(text.replace(old, new), origin="standard.toml")


def test_the_band_is_wider_where_nothing_was_measured():
    stack = load_stack("standard")
    names = [chip.name for chip in CHIPS]
    assert measured_runs(names.index("h100"), Precision.BF16) > 0
    assert stack.band_on(names.index("h100"), Precision.BF16) == stack.band
    assert measured_runs(names.index("mi355x"), Precision.BF16) == 0
    low, high = stack.band_on(names.index("mi355x"), Precision.BF16)
    assert low < stack.band[0] < stack.band[1] < high
