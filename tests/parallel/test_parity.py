"""Every layout computes what REF computes: losses, every gradient, the global norm, and weights after SGD steps."""

from __future__ import annotations

from itertools import product

import pytest

from fourfold.recipe import parameter_shapes
from tests.parallel.harness import Case, bitwise_equal, check_case, run

ODD_LENGTHS = ((2,), (3,), (64,), (17,), (9, 31), (1, 1, 5))

FOUR_DIMENSIONS = [Case(tp=tp, cp=cp, pp=pp, dp=dp, v=pp, nmb=3) for tp, cp, pp, dp in product((1, 2), repeat=4)]
DEEP_PIPELINES = [
    Case(pp=pp, v=v, nmb=5, layers=7, split=split)
    for pp, v, split in (
        (3, 1, "even"), (3, 2, "ends_light"), (3, 3, "even"), (4, 1, (3, 2, 2, 0)), (4, 2, "even"), (4, 3, "even"),
        (1, 3, "even"),
    )
]  # fmt: skip
MICRO_BATCH_COUNTS = [Case(pp=4, v=2, nmb=nmb, layers=8, steps=2) for nmb in range(1, 18)]
ROUNDS = [Case(pp=2, v=2, nmb=7, nc=nc, schedule="flexible", steps=2, zero=2) for nc in range(1, 8)] + [
    Case(pp=4, v=2, nmb=nmb, nc=nc, schedule="flexible", steps=2)
    for nc, nmb in ((4, 5), (4, 7), (5, 7), (6, 13), (7, 7))
]
ZERO = [Case(zero=zero, **layout) for zero in (1, 2, 3) for layout in (
    {"pp": 2, "v": 2, "dp": 2, "nmb": 5, "nc": 2, "schedule": "flexible"}, {"tp": 2, "cp": 2}, {"dp": 3, "nmb": 2},
)]  # fmt: skip
TIED = [
    Case(tied=True, **layout)
    for layout in (
        {"v": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "v": 2, "nmb": 3}, {"pp": 4, "v": 2, "nmb": 4},
        {"cp": 2, "pp": 2, "dp": 2, "zero": 3},
    )
]  # fmt: skip
KEY_VALUE_HEADS = [Case(tp=2, kv=1), Case(tp=4, kv=2), Case(tp=4, kv=1, pp=2, v=2, nmb=3)]
DOCUMENTS = [
    Case(tp=2, cp=2, rows=((63,),)),
    Case(cp=2, cp_split="per_document"),
    Case(cp=3, cp_split="per_document", nmb=3),
    Case(cp=4, tp=2, cp_split="per_document"),
    Case(cp=3),
    Case(cp=4),
    Case(cp=4, rows=((2,), (64,))),  # ranks 2 and 3 have no token at all in the first micro-batch
    Case(cp=4, tp=2, rows=((1,), (3,), (30, 2))),
    Case(cp=4, rows=((1,), (1,))),  # not one valid label in the whole step
    Case(pp=2, v=2, nmb=5, rows=ODD_LENGTHS),  # other lengths in every step, too
    Case(tp=2, pp=2, dp=2, nmb=3, rows=ODD_LENGTHS),
    Case(tp=2, cp=2, pp=2, nmb=6, rows=ODD_LENGTHS, cp_split="per_document"),
    Case(dp=2, rows=((1, 1, 2, 1), (63,))),  # 1 and 62 valid labels on the two groups
    Case(micro_batch=3, cp=2, pp=2, nmb=2),
    Case(micro_batch=2, tp=2, dp=2, nmb=2, rows=ODD_LENGTHS),
]
VOCABULARY = [Case(tp=4, vocab=256), Case(tp=4, vocab=257), Case(tp=4, vocab=241, tied=True)]
FROZEN = [
    Case(pp=2, freeze=("tok_embeddings", "layers.0", "layers.1"), nmb=3),
    Case(pp=4, freeze=("tok_embeddings", "layers.0", "layers.1"), nmb=4),
    Case(pp=2, v=2, tp=2, freeze=("tok_embeddings", "layers.0", "layers.2.feed_forward"), nmb=3, zero=3),
    Case(
        tp=2, freeze=tuple(n for n in parameter_shapes(Case().plan().config) if "norm" not in n)
    ),  # only norms are trained
]
CLIPPED = [
    Case(pp=2, clip=0.5),
    Case(tp=2, pp=2, dp=2, clip=0.5, tied=True),
    Case(tp=2, pp=2, dp=2, clip=0.01, clip_type=float("inf")),
]
ZERO_BUBBLE = [
    Case(schedule="zb-h1", steps=2, **layout)
    for layout in (
        {"nmb": 3}, {"pp": 4, "nmb": 2}, {"pp": 3, "nmb": 7, "layers": 7, "split": "ends_light", "zero": 2},
        {"pp": 2, "tp": 2, "dp": 2, "nmb": 3, "tied": True, "zero": 3},
        {"pp": 2, "cp": 2, "nmb": 5, "rows": ODD_LENGTHS, "cp_split": "per_document", "kv": 1, "zero": 1},
        {"pp": 4, "freeze": ("tok_embeddings", "layers.0", "layers.1", "layers.2.feed_forward"), "nmb": 5},
    )
]  # fmt: skip

ALL = [
    *FOUR_DIMENSIONS, *DEEP_PIPELINES, *MICRO_BATCH_COUNTS, *ROUNDS, *ZERO, *TIED, *KEY_VALUE_HEADS, *DOCUMENTS,
    *VOCABULARY, *FROZEN, *CLIPPED, *ZERO_BUBBLE,
]  # fmt: skip


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_equals_the_reference(case: Case) -> None:
    check_case(case)


def test_there_are_at_least_eighty_layouts() -> None:
    assert len(set(ALL)) >= 80


def test_eighteen_layouts_start_at_the_same_loss() -> None:
    """Where other systems start between 12.03 and 12.08 (torchtitan 3029), all of ours start at the same loss."""
    layouts = [
        {}, {"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 3}, {"pp": 2}, {"pp": 4}, {"dp": 2, "nmb": 2}, {"dp": 4, "nmb": 1},
        {"v": 2}, {"pp": 2, "v": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2, "nmb": 2},
        {"cp": 2, "pp": 2}, {"cp": 2, "dp": 2, "nmb": 2, "zero": 3}, {"pp": 2, "dp": 2, "nmb": 2, "zero": 2},
        {"tp": 2, "pp": 2, "dp": 2, "nmb": 2},
    ]  # fmt: skip
    assert len(layouts) == 18
    losses = [run(Case(**{"nmb": 4, "steps": 1, **layout})).losses[0] for layout in layouts]
    assert max(losses) - min(losses) <= 1e-6 * losses[0]


def test_a_pipeline_is_bitwise_the_single_process() -> None:
    """Where no sum is made in another order, nothing may differ at all."""
    single = run(Case(nmb=5))
    assert bitwise_equal(single, run(Case(pp=2, v=2, nmb=5)))
    assert bitwise_equal(single, run(Case(pp=2, nmb=5, schedule="zb-h1")))


def test_halves_of_a_backward_make_the_sums_of_a_whole_one() -> None:
    """Also in bf16, where every addition rounds, and where gradients are reduced several times."""
    layout = {"pp": 2, "dp": 2, "nmb": 4, "dtype": "bfloat16", "zero": 2, "steps": 2}
    assert bitwise_equal(run(Case(schedule="1f1b", **layout)), run(Case(schedule="zb-h1", **layout)))


def test_zero_1_and_zero_2_with_one_round_are_bitwise_equal() -> None:
    layout = {"pp": 2, "v": 2, "dp": 2, "nmb": 5, "nc": 5, "schedule": "flexible"}
    assert bitwise_equal(run(Case(zero=1, **layout)), run(Case(zero=2, **layout)))
