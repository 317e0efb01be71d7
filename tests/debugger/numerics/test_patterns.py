"""Each known way of being wrong, planted in the numbers of a run, is named; and none that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from fourfold.debugger.numerics.compare import compare_records
from fourfold.debugger.numerics.comparison import Comparison, Finding, Pattern, Verdict
from fourfold.debugger.numerics.records import Kind
from fourfold.layout import Grid
from tests.debugger.numerics.made import (
    LENGTH,
    PADDED,
    PLACES,
    POSITIONS,
    SEQUENCE_OF,
    SEQUENCES,
    VOCAB,
    Made,
    Name,
    is_vector,
    slightly,
    whole_step,
)

FOUR = Grid(tp=2, cp=2, dp=2)
GRADIENTS = [name for name in whole_step() if name[0] is Kind.GRADIENT]
ARRIVING = [name for name in whole_step() if name[0] is Kind.ARRIVING]
LATER = PLACES >= 8  # tokens of second documents
Tensors = dict[Name, Tensor]


def change(names: Iterable[Name], by: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: by(x) if name in {*names} else x for name, x in whole_step().items()}


def only(mask: Tensor, by: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of some rows of tensors that have as many rows as the mask."""
    return lambda x: torch.where(mask.unsqueeze(1), by(x), x) if len(x) == len(mask) else x


def after(name: Name) -> list[Name]:
    """All tensors from one on, which it spoils."""
    names = [*whole_step()]
    return names[names.index(name) :]


def compare(a: Made, b: Made | None = None, **options: int) -> Comparison:
    found = compare_records(a.records(), (b or Made()).records(), names=("ours", "theirs"), **options)  # type: ignore[arg-type]
    assert found.verdict is Verdict.BUG
    return found


def finding(found: Comparison, pattern: Pattern) -> Finding:
    named = [each for each in found.findings if each.pattern is pattern]
    assert named, [each.sentence for each in found.findings]
    return named[0]


def text(each: Finding) -> str:
    return " | ".join((each.sentence, *each.evidence))


# Sums of weights that all TP ranks hold.


def test_a_missing_reduction_shows_in_replicas() -> None:
    name = "layers.0.attention_norm.weight"
    changes = {(Kind.GRADIENT, name, rank): (lambda x, rank=rank: (0.3 + 0.4 * (rank % 2)) * x) for rank in range(8)}
    for other in (Made(), Made(FOUR, per_dp_group=1)):
        found = finding(compare(Made(FOUR, per_dp_group=1, changes=changes), other), Pattern.REPLICAS)
        assert found.sentence.startswith(f"The gradient of {name} is not the same on ranks 0-7 ")
        assert "a sum over these ranks is missing" in found.sentence
        assert "1.3e+00 of its size" in found.evidence[0]  # 0.4 of 0.3


def test_replicas_that_are_equal_and_wrong() -> None:
    """A sum that was made twice."""
    names = [name for name in GRADIENTS if is_vector(name[1])]
    found = finding(compare(Made(Grid(tp=2), change(names, lambda x: 2 * x))), Pattern.REPLICAS)
    assert found.sentence.startswith("Only gradients of weights that every TP rank holds are wrong")
    assert "3 of 3 such gradients are wrong, and none of the 10 others" in found.evidence[0]
    assert "2 to 2 times" in found.evidence[1]


def test_both_ends_of_a_tied_model() -> None:
    names = [(Kind.GRADIENT, f"{end}.weight") for end in ("tok_embeddings", "output")]
    tied = {**whole_step(), **{name: whole_step()[names[0]] for name in names}}
    apart = {**tied, names[0]: 0.7 * tied[names[0]]}
    found = finding(compare(Made(tensors=apart), Made(tensors=tied)), Pattern.REPLICAS)
    assert "which are one in theirs, are not the same in ours" in found.sentence


# Factors.


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (
            2.0,
            "All gradients are 2 times what they should be (dp of ours or cp of ours or tp of ours or micro-batches of",
        ),
        (1 / 4, "All gradients are 1/4 times what they should be (dp x cp of ours or"),
        (1.37, "All gradients are 1.37 times what they should be."),
    ],
)
def test_a_constant_factor(factor: float, words: str) -> None:
    tensors = change(GRADIENTS, lambda x: factor * slightly(x))
    found = compare(Made(FOUR, tensors, per_dp_group=2))
    assert finding(found, Pattern.FACTOR).sentence.startswith(words)


def test_a_factor_of_the_loss_alone() -> None:
    found = compare(Made(Grid(cp=2), scalars={"loss": 6.0, "grad_norm": 1.5}))
    assert "The loss that is told is 2 times what it should be (cp of ours" in finding(found, Pattern.FACTOR).sentence


def test_a_factor_that_enters_the_backward() -> None:
    found = compare(Made(Grid(dp=2), change([*ARRIVING, *GRADIENTS], lambda x: x / 3)))
    assert finding(found, Pattern.FACTOR).sentence == (
        "The gradient that enters the backward is 1/3 times what it should be."
    )


def test_each_group_divides_by_its_own_count() -> None:
    """Of 40 labels one group has 10 and the other 30."""
    first_group = SEQUENCE_OF < SEQUENCES // 2

    def scaled(x: Tensor) -> Tensor:
        return torch.where(first_group.unsqueeze(1), 4 * x, 4 / 3 * x)

    tensors = {**change(ARRIVING, scaled), **{name: 2.1 * slightly(whole_step()[name], 0.1) for name in GRADIENTS}}
    found = finding(compare(Made(Grid(dp=2), tensors)), Pattern.LOCAL_COUNT)
    assert "the number of labels of each data-parallel group" in found.sentence
    assert "4, 1.33" in found.sentence
    assert "add up to 1" in found.evidence[0]


def test_the_same_without_gradients_of_operations() -> None:
    weights = (Kind.GRADIENT, Kind.WEIGHT)
    tensors = {name: x for name, x in whole_step().items() if name[0] in weights}
    factors = torch.linspace(1.8, 2.3, len(GRADIENTS)).tolist()
    wrong = {**tensors, **{n: f * slightly(tensors[n], 0.1) for n, f in zip(GRADIENTS, factors, strict=True)}}
    found = finding(compare(Made(Grid(dp=2), wrong), Made(tensors=tensors)), Pattern.LOCAL_COUNT)
    assert "as if every part of the batch were divided by its own count" in found.sentence
    assert "about 2 (dp of ours)" in found.evidence[1]


# Padding, the optimizer, the norm, precision.


@pytest.mark.parametrize("options", [{"vocab_size": VOCAB}, {}], ids=["size known", "size unknown"])
def test_only_padded_rows(options: dict[str, int]) -> None:
    name = (Kind.WEIGHT, "output.weight")
    padding = torch.arange(PADDED) >= VOCAB
    found = compare(Made(Grid(tp=2), change([name], only(padding, lambda x: x + 1e-6))), **options)
    named = finding(found, Pattern.PADDING)
    assert named.sentence.startswith(f"Only padded rows of the vocabulary are wrong: rows {VOCAB} to {PADDED - 1} of")


def test_padding_in_the_softmax() -> None:
    """It gives rows of the head a gradient that nobody asked for, and changes all others a little."""
    padding = torch.arange(PADDED) >= VOCAB
    head = (Kind.GRADIENT, "output.weight")
    spoilt = change([*ARRIVING, *GRADIENTS], lambda x: slightly(x, 1e-3))
    spoilt[head] = only(padding, lambda x: x + 0.01)(spoilt[head])
    found = finding(compare(Made(tensors=spoilt), vocab_size=VOCAB), Pattern.PADDING)
    assert found.sentence.startswith(
        f"Padding of the vocabulary takes part: rows {VOCAB} to {PADDED - 1} of output.weight"
    )


def test_only_after_the_optimizer() -> None:
    names = [name for name in whole_step() if name[0] is Kind.WEIGHT]
    for other, equal in ((Made(), " to the bit"), (Made(tensors=change(GRADIENTS, slightly)), "")):
        found = compare(Made(tensors=change(names, lambda x: slightly(x, 0.1))), other)
        named = finding(found, Pattern.OPTIMIZER)
        assert named.sentence.startswith(f"All 13 gradients agree{equal}, and 13 of 13 weights do not")


def test_the_norm() -> None:
    found = compare(Made(Grid(tp=2), scalars={"loss": 3.0, "grad_norm": 1.5 * 2**0.5}))
    named = finding(found, Pattern.NORM)
    assert named.sentence.startswith("All gradients agree, but their norm is 1.414 times what it should be")
    assert named.evidence == ("its square is 2 times (tp of ours or micro-batches of ours or micro-batches of theirs)",)


def test_a_sum_in_bfloat16() -> None:
    found = compare(Made(tensors=change(GRADIENTS, lambda x: x.bfloat16().float())))
    named = finding(found, Pattern.LOW_PRECISION)
    assert "about one rounding of bfloat16 (3.9e-03), where sums are made in float32" in named.sentence


# Terms that are missing.


def embedding_gradient(arriving: Tensor, counted: Tensor) -> Tensor:
    """[V, D]: what arrives at counted tokens, added to the rows of their entries."""
    entries = torch.arange(len(arriving)) * 7 % VOCAB
    return torch.zeros(PADDED, arriving.shape[1]).index_add_(0, entries[counted], arriving[counted])


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (SEQUENCE_OF == 3, "lacks what micro-batch 1 of data-parallel group 1 adds to it"),
        ((SEQUENCE_OF == 0) & (PLACES % 2 == 1), "lacks what micro-batch 0 of data-parallel group 0 on CP rank 1 adds"),
        (SEQUENCE_OF >= 2, "lacks what data-parallel group 1 adds to it"),
        (PLACES % 2 == 0, "lacks what CP rank 0 adds to it"),
    ],
)
def test_a_micro_batch_that_is_left_out_of_a_sum(left_out: Tensor, words: str) -> None:
    arriving = whole_step()[Kind.ARRIVING, "tok_embeddings"]
    name = (Kind.GRADIENT, "tok_embeddings.weight")
    right = {**whole_step(), name: embedding_gradient(arriving, torch.ones(len(arriving), dtype=torch.bool))}
    wrong = {**right, name: embedding_gradient(arriving, ~left_out)}
    grid = Grid(cp=2, dp=2)
    assert words in finding(compare(Made(grid, wrong), Made(tensors=right)), Pattern.SKIPPED).sentence


def test_a_sum_of_other_weights_that_is_wrong() -> None:
    names = [name for name in GRADIENTS if "layers.1" in name[1]]
    found = finding(compare(Made(tensors=change(names, lambda x: x + 0.3 * torch.randn(x.shape)))), Pattern.SKIPPED)
    assert "5 of 13 gradients do not (layers 1)" in found.sentence


def test_no_gradient_comes_back() -> None:
    left_out = only(SEQUENCE_OF == 2, torch.zeros_like)
    found = compare(Made(Grid(dp=2), change(ARRIVING, left_out)))
    named = finding(found, Pattern.SKIPPED)
    assert named.sentence.startswith("No gradient comes back to output in micro-batch 0 of data-parallel group 1")
    assert "only micro-batch 0 of dp 1 is wrong" in finding(found, Pattern.ONE_PLACE).sentence


def test_a_micro_batch_that_was_never_run() -> None:
    records = Made(Grid(dp=2)).records()
    records[0].seen[:] = [seen for seen in records[0].seen if seen.micro_batch != 1]
    found = compare_records(records, Made(Grid(dp=2)).records(), names=("ours", "theirs"))
    assert found.verdict is Verdict.BUG
    assert finding(found, Pattern.SKIPPED).sentence == (
        "ours has no forward at tok_embeddings for 12 tokens of theirs: micro-batch 1 of data-parallel group 0."
    )


def test_gradients_of_keys_and_values() -> None:
    names = [(Kind.ARRIVING, f"layers.1.attention.{weight}") for weight in ("wk", "wv")]
    spoilt = [n for n in ARRIVING if n in names or n[1].startswith("layers.0") or n[1].endswith("1.attention_norm")]
    found = finding(compare(Made(Grid(cp=2), change(spoilt, lambda x: 0.6 * x + 0.1))), Pattern.KEY_GRADIENT)
    assert "wrong from layers.1.attention on" in found.sentence


def test_the_same_from_gradients_of_weights() -> None:
    right = {name: x for name, x in whole_step().items() if name[0] is Kind.GRADIENT}
    spoilt = {"layers.1.attention.wk", "layers.1.attention.wv", "layers.1.attention_norm", "tok_embeddings"}
    wrong = {
        name: x + 0.2 if name[1].removesuffix(".weight") in spoilt or "layers.0" in name[1] else x
        for name, x in right.items()
    }
    found = finding(compare(Made(Grid(cp=2), wrong), Made(tensors=right)), Pattern.KEY_GRADIENT)
    assert "In layer 1, the last that is wrong" in found.sentence


# Tokens and places.


def test_other_weights_at_the_start() -> None:
    found = compare(Made(tensors=whole_step(5)))
    assert finding(found, Pattern.START).sentence.startswith("The embeddings of all tokens are others")


def test_other_tokens() -> None:
    found = compare(Made(tensors=change([(Kind.OUTPUT, "tok_embeddings")], only(PLACES == 7, lambda x: x.flip(1)))))
    assert "4 of 48 tokens are others, or have another embedding, from token 7 of sequence 0 on" in (
        finding(found, Pattern.DATA).sentence
    )


def test_a_leak_across_documents() -> None:
    name = (Kind.OUTPUT, "layers.0.attention.attend")
    found = compare(Made(FOUR, change(after(name), only(LATER, lambda x: x + 0.2)), per_dp_group=1))
    named = finding(found, Pattern.DOCUMENTS)
    assert named.sentence.startswith("At layers.0.attention.attend only tokens are wrong that are not in the first")
    assert "16 of 16 tokens of later documents are wrong, none of 32 others" in named.evidence[0]


def test_positions_that_differ() -> None:
    local = PLACES // 2 * 2 % 7
    for other in (Made(), Made(positions=None)):
        name = (Kind.OUTPUT, "layers.0.attention.attend")
        wrong = change(after(name), only(LATER, lambda x: x + 0.2))
        found = compare(Made(Grid(cp=2), wrong, positions=local), other)
        assert "tokens of ours are given a wrong place in their document, on CP rank" in (
            finding(found, Pattern.POSITIONS).sentence
        )
        assert Pattern.DOCUMENTS not in [each.pattern for each in found.findings] or other.positions is not None


def test_one_position_that_is_wrong_is_shown() -> None:
    wrong = POSITIONS.clone()
    wrong[2 * LENGTH + 9] = 9
    name = (Kind.OUTPUT, "layers.0.attention.attend")
    found = compare(Made(positions=wrong, tensors=change(after(name), lambda x: x + 0.1)))
    assert finding(found, Pattern.POSITIONS).evidence == ("token 9 of sequence 2 is at 9 and should be at 1",)


def test_wrong_after_sharding() -> None:
    name = (Kind.OUTPUT, "layers.0.attention.attend")
    wrong = change(after(name), only(PLACES % 2 == 1, lambda x: x + 0.2))
    found = finding(compare(Made(Grid(cp=2), wrong, positions=None), Made(positions=None)), Pattern.POSITIONS)
    assert "only tokens of CP rank 1 are wrong, though queries, keys and values agree" in found.sentence


@pytest.mark.parametrize("grid", [Grid(), Grid(tp=2, cp=2)], ids=str)
def test_a_stale_buffer(grid: Grid) -> None:
    """Sequences 2 and 3, of micro-batch 1, have the numbers of 0 and 1."""

    def stale(x: Tensor) -> Tensor:
        return only(SEQUENCE_OF >= 2, lambda x: x.roll(2 * LENGTH, 0))(x)

    found = compare(Made(grid, change(after((Kind.OUTPUT, "layers.1.attention_norm")), stale)))
    assert finding(found, Pattern.STALE).sentence.startswith(
        "At layers.1.attention_norm, micro-batch 1 of data-parallel group 0 has the numbers of micro-batch 0"
    )


def test_order_has_no_pattern() -> None:
    found = compare_records(Made(FOUR, change(whole_step(), slightly), per_dp_group=1).records(), Made().records())
    assert (found.verdict, found.findings) == (Verdict.ORDER, ())
