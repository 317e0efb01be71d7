"""The planner's numbers against those of the code that trains, over kinds of layouts; sizes cost a dry run nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.dry_run.beside import beside
from fourfold.trainer.dry_run.rank import dry_run
from fourfold.trainer.dry_run.results import Held

ALL = {"tp": 2, "cp": 2, "pp": 2, "dp": 2}
MODEL = {
    "dim": 2048, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4, "ffn_dim": 5632, "vocab_size": 32000,
    "vocab_multiple": 128,
}  # fmt: skip
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "one rank, fp32": {"train": {"dtype": "float32"}},
    "more TP ranks than KV heads": {"layout": {"tp": 8}},
    "all dimensions": {"layout": ALL, "pipeline": {"virtual_stages": 2}},
    "ZeRO-2, a micro-batch of two rows": {
        "layout": ALL | {"zero": 2}, "pipeline": {"virtual_stages": 2, "micro_batch": 2}, "batch": {"sequences": 16},
    },
    "ZeRO-3, recomputed in part": {
        "layout": ALL | {"zero": 3}, "train": {"recompute": ["full", "norms"]}, "optimizer": {"name": "sgd"},
    },
    "zb-h1 in a stated order": {
        "layout": {"tp": 2, "pp": 4, "dp": 2}, "pipeline": {"schedule": "zb-h1"}, "train": {"ordered": True},
    },
    "tied ends, apart": {"layout": {"pp": 2, "dp": 2}, "model": {"tied": True}},
    "tied ends in one process": {"layout": {"tp": 2}, "model": {"tied": True}, "train": {"recompute": "swiglu"}},
    "a tiny one with an uneven rest": {
        "layout": {"cp": 3, "tp": 2, "dp": 1}, "model": {"dim": 96, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 128},
        "batch": {"seq_len": 101}, "train": {"dtype": "float32"},
    },
}  # fmt: skip


def plan_of(sections: dict[str, dict[str, Any]]) -> RunPlan:
    base: dict[str, dict[str, Any]] = {
        "model": MODEL, "batch": {"sequences": 8, "seq_len": 4096}, "train": {"device": "cuda", "dtype": "bfloat16"},
    }  # fmt: skip
    return check(from_table({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_planner_knows_what_the_code_does(name: str) -> None:
    """Parameters, static bytes (algorithms.md 3.1), every collective and message, FLOPs: exactly. Activations and peak:
    within what `beside` states."""
    plan = plan_of(LAYOUTS[name])
    for pp in {0, plan.grid.pp - 1}:
        dry = dry_run(plan, plan.grid.rank(pp=pp))
        wrong = [one for one in beside(plan, dry) if not one.agrees]
        assert not [one for one in wrong if one.unit != "bytes" or one.what not in (Held.ACTIVATIONS, "peak")]
        if "tiny" not in name:  # of which whole numbers are a part
            assert not wrong


def test_static_bytes_by_hand() -> None:
    """One rank of tp 2, dp x cp 4, two of four layers of 22.6 M / 2 parameters, embedding 32,000 x 2,048 / 2."""
    dry = dry_run(plan_of({"layout": ALL}), 0)
    layer = (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 2048 * 5632) // 2 + 2 * 2048
    parameters = 2 * layer + 16000 * 2048
    assert dry.parameters == parameters
    assert dry.most[Held.GATHERED] == 2 * parameters
    assert dry.most[Held.MASTER] == dry.most[Held.SHARDS] == parameters
    assert dry.most[Held.OPTIMIZER] == 2 * parameters
    assert dry.most[Held.SUMS] == 4 * parameters


def test_a_wrong_plan_is_seen() -> None:
    plan = plan_of({"layout": ALL})
    dry = dry_run(plan, 0)
    other = dataclasses.replace(plan, grid=dataclasses.replace(plan.grid, dp=4))
    assert {one.what for one in beside(other, dry) if not one.agrees} >= {Held.MASTER, Held.OPTIMIZER, Held.SHARDS}


def test_frozen_parameters_have_no_gradients() -> None:
    plan = plan_of({"layout": {"dp": 2}, "train": {"freeze": ["layers.0", "tok_embeddings"]}})
    known = beside(plan, dry_run(plan, 0))
    assert {one.unit for one in known} == {"parameters", "bytes"}
    assert all(one.agrees for one in known if one.what in (Held.MASTER, Held.OPTIMIZER, Held.SUMS, Held.SHARDS))


def test_there_are_no_ranks_beyond_the_grid() -> None:
    with pytest.raises(ValueError, match="rank = 16"):
        dry_run(plan_of({"layout": ALL}), 16)
