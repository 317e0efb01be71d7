"""What ranks send, by hand. The real code is held against it in tests/trainer/dry_run/test_beside.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.planner.flops import causal_pairs, model_flops
from fourfold.planner.rank_flops import rank_flops
from fourfold.planner.traffic import Traffic, traffic
from fourfold.recipe import RunPlan, check, from_table, load

RECIPES = Path(__file__).parents[2] / "recipes"


def sent(plan: RunPlan, pp_rank: int) -> dict[tuple[str, str, str, str], tuple[int, int]]:
    return {one.alike: (one.count, one.bytes) for one in traffic(plan, pp_rank)}


def test_405b_on_a_middle_pipeline_rank() -> None:
    """Eight stages of a layer, 16 micro-batches of 8,192 tokens, of which a hidden state takes 16,384 x 2 bytes."""
    plan = check(load(RECIPES / "llama3-405b.toml"))
    computations, hidden = 8 * 16, 8192 * 16384 * 2
    matrices = (2 * 16384 * 16384 + 2 * 1024 * 16384 + 3 * 53248 * 16384) // 8
    parameters = 8 * (matrices + 2 * 16384)
    assert sent(plan, 7) == {
        ("dp", "all_reduce", "float64", "COUNT"): (1, 8),
        ("fsdp", "all_gather", "bfloat16", "GATHER"): (8, 2 * parameters),
        ("pp", "receive", "bfloat16", "RECV_F"): (computations, computations * hidden // 8),
        ("tp", "all_gather", "bfloat16", "F"): (2 * computations, 2 * computations * hidden),
        ("tp", "reduce_scatter", "bfloat16", "F"): (2 * computations, 2 * computations * hidden),
        ("pp", "send", "bfloat16", "SEND_F"): (computations, computations * hidden // 8),
        ("pp", "receive", "bfloat16", "RECV_B"): (computations, computations * hidden // 8),
        ("tp", "all_gather", "bfloat16", "B"): (4 * computations, 4 * computations * hidden),
        ("tp", "reduce_scatter", "bfloat16", "B"): (2 * computations, 2 * computations * hidden),
        ("pp", "send", "bfloat16", "SEND_B"): (computations, computations * hidden // 8),
        ("fsdp", "reduce_scatter", "float32", "REDUCE"): (8, 4 * parameters),
        # Of 16 norms every data-parallel rank has a 128th, and gathers those of eight TP ranks.
        ("tp", "all_gather", "float32", "SUM"): (1, 8 * 4 * 16 * 16384 // 128),
        ("world", "all_reduce", "float64", "SUM"): (1, 8),
        ("world", "all_reduce", "float64", "NORM"): (1, 8),
    }


def test_one_rank_meets_nobody() -> None:
    """But for three numbers, which a group of one adds up as any other."""
    alone = sent(check(from_table({"batch": {"sequences": 4}})), 0)
    assert alone == {
        ("dp", "all_reduce", "float64", "COUNT"): (1, 8),
        ("world", "all_reduce", "float64", "SUM"): (1, 8),
        ("world", "all_reduce", "float64", "NORM"): (1, 8),
    }


def test_context_parallel_ranks_gather_keys_and_values() -> None:
    """4 layers, 2 KV heads of 8, 96 tokens in all: forward gathered, backward their gradients scattered."""
    plan = check(
        from_table(
            {
                "model": {
                    "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64,
                },
                "layout": {"cp": 3},
                "batch": {"sequences": 2, "seq_len": 96},
            }
        )
    )  # fmt: skip
    found = sent(plan, 0)
    for kind, during in (("all_gather", "F"), ("reduce_scatter", "B")):
        assert found["cp", kind, "float32", during] == (8, 8 * 2 * 96 * 2 * 8 * 4)


def test_frozen_parameters_are_refused() -> None:
    plan = check(from_table({"train": {"freeze": ["layers.0"]}}))
    for count in (lambda: traffic(plan, 0), lambda: rank_flops(plan, pp_rank=0)):
        with pytest.raises(ValueError, match="frozen parameters"):
            count()


def test_flops_of_all_ranks_are_those_of_the_model() -> None:
    """6 (P - V D) and 12 per pair, less 6 for each weight of a norm, which is no product; nothing is padded here."""
    plan = check(
        from_table(
            {
                "model": {
                    "dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64,
                    "vocab_multiple": 64,
                },
                "layout": {"tp": 2, "cp": 2, "pp": 2, "dp": 1},
                "batch": {"sequences": 4, "seq_len": 64},
            }
        )
    )  # fmt: skip
    ranks = [rank_flops(plan, pp_rank=pp, cp_rank=cp) for pp in range(2) for cp in range(2)]
    flops, tokens = model_flops(plan.config), 4 * 64
    assert 2 * sum(rank.products for rank in ranks) == (flops.per_token - 6 * 9 * 32) * tokens
    assert 2 * sum(rank.attention for rank in ranks) == flops.per_pair * 4 * causal_pairs([64])
    assert not any(rank.again for rank in ranks)


def test_a_layer_made_again_ends_before_its_last_product() -> None:
    """A third of attention more; of products the four of attention and two of three in the feed-forward network."""
    tables = {
        "model": {"dim": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 64},
        "batch": {"sequences": 4, "seq_len": 64},
    }
    once = rank_flops(check(from_table(tables)), pp_rank=0)
    again = rank_flops(check(from_table(tables | {"train": {"recompute": "full"}})), pp_rank=0)
    matrices = 2 * 32 * 32 + 2 * 16 * 32 + 2 * 48 * 32
    assert again.products - once.products == 4 * 64 * 4 * 2 * matrices
    assert 3 * (again.attention - once.attention) == once.attention
    assert again.again == again.total - once.total


def test_alike() -> None:
    assert Traffic("tp", "all_gather", "float32", "F", 1, 8).alike == ("tp", "all_gather", "float32", "F")
