"""Known ways of being wrong, and how each looks in the numbers: those of sums and weights.

Each function looks for one pattern in the first step that order does not explain, and says what it has found with the
figures that it rests on. Those of factors are in `factors.py`, those of tokens and places in `places.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fourfold.debugger.numerics.alignment import LOSS as LOSS_OPERATION
from fourfold.debugger.numerics.alignment import Pair
from fourfold.debugger.numerics.comparison import SCALAR, Finding, Pattern
from fourfold.debugger.numerics.judging import ROUNDING, SUMS
from fourfold.debugger.numerics.order import layer_of
from fourfold.debugger.numerics.records import Kind, RankStep
from fourfold.debugger.numerics.situation import Search, Situation, names_text, number_text, sizes_text
from fourfold.debugger.numerics.stepping import NORM, VOCABULARY
from fourfold.layout import join_ranks

_ALIKE = 8.0  # largest error of a row over the middle one, where all rows are rounded alike
_MOSTLY = 0.5  # share of rows that must have a pattern; what is a sum of one term only has no error
_EXPLAINED = 0.05  # |difference - explanation| / |explanation| of an explanation that holds; bf16 makes up to 0.01


def replicas_differ(here: Situation) -> Iterator[Finding]:
    """Ranks that hold the same weight, and have other numbers for it."""
    for which, found in enumerate(here.replicas):
        for kind in (Kind.OUTPUT, Kind.GRADIENT, Kind.WEIGHT):
            of_kind = [each for each in found if each.kind is kind]
            if not of_kind:
                continue
            first = of_kind[0]
            what = {Kind.GRADIENT: "The gradient of ", Kind.WEIGHT: "Weight ", Kind.OUTPUT: "The result of "}[kind]
            missing = "a sum over these ranks is missing" if kind is Kind.GRADIENT else "one of them went another way"
            yield Finding(
                Pattern.REPLICAS,
                f"{what}{first.name} is not the same on {here.rank_text(which, first.ranks)} of {here.names[which]}, "
                f"which all hold it: {missing}.",
                (
                    f"they are {first.error:.1e} of its size apart",
                    *([f"the same is true of {len(of_kind) - 1} others"] if len(of_kind) > 1 else []),
                ),
            )
            break  # what follows from it is no other finding


def ends_differ(here: Situation) -> Iterator[Finding]:
    """Both ends of a tied model, which are the same in one run only."""
    for kind in (Kind.GRADIENT, Kind.WEIGHT):
        ends = [here.named(kind, name) for name in VOCABULARY]
        if ends[0] is None or ends[1] is None or ends[0].a.numbers.shape != ends[1].a.numbers.shape:
            continue
        same = [
            torch.equal(first.fingerprint.checksum, last.fingerprint.checksum)
            for first, last in ((ends[0].a, ends[1].a), (ends[0].b, ends[1].b))
        ]
        if same[0] != same[1]:
            what = "gradients" if kind is Kind.GRADIENT else "weights"
            yield Finding(
                Pattern.REPLICAS,
                f"The {what} of the embedding and of the head, which are one in {here.names[same[1]]}, are not the "
                f"same in {here.names[same[0]]}: the sum over both ends of the tied weight is missing.",
            )
            return


def only_replicated(here: Situation) -> Iterator[Finding]:
    """Only weights that every TP rank holds whole are wrong: norms, and keys and values of shared heads."""
    gradients, wrong = here.of(Kind.GRADIENT), here.wrong_of(Kind.GRADIENT)
    held_by_all = _replicated(here)
    if not wrong or any(here.replicas) or not {each.name for each in wrong} <= held_by_all:
        return
    factors = [each.scale()[0] for each in wrong]
    yield Finding(
        Pattern.REPLICAS,
        f"Only gradients of weights that every TP rank holds are wrong ({names_text(wrong)}): a sum over TP ranks is "
        "missing, or made twice.",
        (
            f"{len(wrong)} of {len(held_by_all & {each.name for each in gradients})} such gradients are wrong, and "
            f"none of the {len(gradients) - len(wrong)} others",
            f"they are {min(factors):.3g} to {max(factors):.3g} times as large as they should be",
        ),
    )


def _replicated(here: Situation) -> set[str]:
    """Names of weights of which neighbouring TP ranks of either run hold the same rows and columns."""
    found: set[str] = set()
    for records in (here.step.a, here.step.b):
        by_rank = {record.rank: _parts(record) for record in records}
        for tp_group in records[0].grid.groups("tp"):
            if len(tp_group) > 1:
                found |= {name for _, name, *_ in by_rank[tp_group[0]] & by_rank[tp_group[1]]}
    return found


def _parts(record: RankStep) -> set[tuple[Kind, str, int, int, int]]:
    """Which parts of weights and gradients a rank holds."""
    return {
        (seen.kind, seen.name, seen.first, seen.features, int(seen.rows[0]))
        for seen in record.seen
        if seen.kind in (Kind.GRADIENT, Kind.WEIGHT) and len(seen.rows)
    }


def only_padding(here: Situation) -> Iterator[Finding]:
    """Rows of the vocabulary that stand for no token."""
    for together in here.wrong:
        if together.name not in VOCABULARY:
            continue
        rows = here.far(together)
        padding = _padded_rows(here, together)
        which = together.a.numbers[rows & padding]
        if not len(which):
            continue
        where = f"rows {int(which[0])} to {int(which[-1])} of {together.name}"
        if {each.name for each in here.wrong} <= {*VOCABULARY} and not bool((rows & ~padding).any()):
            yield Finding(
                Pattern.PADDING,
                f"Only padded rows of the vocabulary are wrong: {where}, which stand for no token.",
                (f"{len(which)} rows; all {int((~padding).sum())} others agree",),
            )
            return
        if together.kind is Kind.GRADIENT:
            yield Finding(
                Pattern.PADDING,
                f"Padding of the vocabulary takes part: {where}, which stand for no token, have a gradient in one run "
                "only.",
            )
            return


def _padded_rows(here: Situation, together: Pair) -> Tensor:
    """bool [r]; where the size of the vocabulary is not known, rows at the end that are zero in one of the runs."""
    if here.vocab_size is not None:
        return together.a.numbers >= here.vocab_size
    zero = (together.square == 0) | (together.a.square() == 0)
    return zero.flip(0).long().cumprod(0).bool().flip(0)


def only_after_the_optimizer(here: Situation) -> Iterator[Finding]:
    """Gradients agree, weights do not."""
    gradients, weights = here.of(Kind.GRADIENT), here.wrong_of(Kind.WEIGHT)
    if not gradients or here.wrong_of(Kind.GRADIENT):
        return
    ratio = here.ratio(NORM)
    if abs(ratio - 1) > here.limits.of(SCALAR, NORM, SUMS):
        yield Finding(
            Pattern.NORM,
            f"All gradients agree, but their norm is {number_text(ratio)} times what it should be: something counts "
            "in it more than once, or not at all, and clipping goes wrong.",
            (f"its square is {number_text(ratio**2)} times{sizes_text(here, ratio**2)}",),
        )
    elif weights:
        equal = sum(each.same for each in gradients)
        yield Finding(
            Pattern.OPTIMIZER,
            f"All {len(gradients)} gradients agree{' to the bit' if equal == len(gradients) else ''}, and "
            f"{len(weights)} of {len(here.of(Kind.WEIGHT))} weights do not: the optimizer's step is another "
            "(learning rate, clipping, weight decay or its state).",
            (f"the first is {weights[0].name}, {weights[0].relative():.1e} apart",),
        )


def key_gradient(here: Situation) -> Iterator[Finding]:
    """Gradients of keys and values are wrong where those of queries are right."""
    grid, sentence = here.grids[0], "what must be added up over the CP ranks, or the query heads of a key head, is not."
    wrong = here.wrong_of(Kind.ARRIVING)
    if wrong:
        holder, _, last = wrong[0].name.rpartition(".")
        queries, attended = here.named(Kind.ARRIVING, f"{holder}.wq"), here.named(Kind.ARRIVING, f"{holder}.attend")
        right = [each for each in (queries, attended) if each is not None and not here.limits.exceeded(each)]
        if last in ("wk", "wv") and len(right) == 2:
            yield Finding(
                Pattern.KEY_GRADIENT,
                f"The gradients of keys and values are wrong from {holder} on, while what comes into its attention and "
                f"what goes to its queries agree: {sentence}",
                (f"cp {grid.cp}; {wrong[0].relative():.1e} apart at {wrong[0].name}",),
            )
        return
    gradients = here.wrong_of(Kind.GRADIENT)
    if all(layer_of(each.name) is None for each in gradients):
        return
    last_layer = max(layer for each in gradients if (layer := layer_of(each.name)) is not None)
    in_last = {
        each.name.removesuffix(".weight").rpartition(".")[2] for each in gradients if layer_of(each.name) == last_layer
    }
    if {"wk", "wv"} & in_last and not {"wq", "wo", "w2"} & in_last:
        yield Finding(
            Pattern.KEY_GRADIENT,
            f"In layer {last_layer}, the last that is wrong, gradients of wk and wv are wrong and those of wq, wo and "
            f"the feed-forward agree: {sentence}",
            (f"cp {grid.cp}; wrong there: {', '.join(sorted(in_last))}",),
        )


def low_precision(here: Situation) -> Iterator[Finding]:
    """An error of the size of bf16's rounding, alike in all rows, where a sum is made in fp32."""
    if not here.wrong or here.limits.drift or here.wrong[0].kind is Kind.WEIGHT or here.wrong[0].name == LOSS_OPERATION:
        return
    first = here.wrong[0]
    rounding, limit = ROUNDING["bfloat16"], here.limits.of(first.kind, first.name, first.a.dtype)
    alike = [first] if first.kind is not Kind.GRADIENT else here.of(Kind.GRADIENT)
    errors = sorted(each.relative() for each in alike)
    rows = first.differs & (first.square > 0)
    of_rows = (first.error[rows] / first.square[rows]).sqrt()
    if (
        limit < rounding / 4
        and rounding / 16 <= errors[0] <= errors[-1] <= 4 * rounding
        and int(rows.sum()) > _MOSTLY * int((first.square > 0).sum())
        and float(of_rows.quantile(0.9)) <= _ALIKE * float(of_rows.median())
    ):
        yield Finding(
            Pattern.LOW_PRECISION,
            f"{first.name} is {first.relative():.1e} off, about one rounding of bfloat16 ({rounding:.1e}), where sums "
            "are made in float32: one of them is made in bfloat16.",
            (f"in its rows alike; order alone makes less than {limit:.1e}",),
        )


def missing_term(here: Situation) -> Iterator[Finding]:
    """Every forward and backward agrees, and gradients do not: something is wrong with their sum.

    The gradient of the embedding's table is a sum of what arrives there, token by token. Sketches are linear: that of
    the difference of two such gradients is that of the tokens that one of them lacks.
    """
    wrong = here.wrong_of(Kind.GRADIENT)
    if not wrong or not here.of(Kind.ARRIVING) or here.wrong_of(Kind.ARRIVING) or here.wrong_of(Kind.OUTPUT):
        return
    table, tokens = here.named(Kind.GRADIENT, VOCABULARY[0]), here.named(Kind.ARRIVING, "tok_embeddings")
    if table is not None and tokens is not None and here.limits.exceeded(table):
        apart = (table.a.sketch() - table.b.sketch()).sum(0)
        for what, rows in _groups_of_tokens(here, tokens):
            term = tokens.b.sketch()[rows].sum(0)
            size = float(term.norm())
            for sign, word in ((-1.0, "lacks"), (1.0, "has twice")):
                if size > 0 and float((apart - sign * term).norm()) <= _EXPLAINED * size:
                    yield Finding(
                        Pattern.SKIPPED,
                        f"The gradient of {table.name} {word} what {what} adds to it.",
                        (
                            f"to {float((apart - sign * term).norm()) / size:.1e}, this is the difference of both runs",
                            f"{len(wrong)} of {len(here.of(Kind.GRADIENT))} gradients are wrong",
                        ),
                    )
                    return


def wrong_sum(here: Situation) -> Iterator[Finding]:
    """If nothing else is found: all that goes into gradients agrees, so their sum does not."""
    wrong = here.wrong_of(Kind.GRADIENT)
    if not wrong or not here.of(Kind.ARRIVING) or here.wrong_of(Kind.ARRIVING) or here.wrong_of(Kind.OUTPUT):
        return
    layers = {layer for each in wrong if (layer := layer_of(each.name)) is not None}
    where = f"layers {join_ranks(layers, 4)}" if layers else names_text(wrong)
    yield Finding(
        Pattern.SKIPPED,
        f"All that forwards and backwards compute agrees, but {len(wrong)} of {len(here.of(Kind.GRADIENT))} gradients "
        f"do not ({where}): a term of their sum over micro-batches or ranks is missing, or is there twice.",
        (f"the largest error is {max(each.relative() for each in wrong):.1e}",),
    )


def _groups_of_tokens(here: Situation, tokens: Pair) -> Iterator[tuple[str, Tensor]]:
    """Parts of a step's tokens that could be left out of a sum, the smallest first, with their names."""
    grid = here.grids[0]
    dp, cp, micro_batch = (here.place(tokens, name) for name in ("dp", "cp", "micro-batch"))
    for group in range(grid.dp):
        of_group = dp == group
        name = f" of data-parallel group {group}" if grid.dp > 1 else ""
        for number in micro_batch[of_group].unique().tolist():
            rows = of_group & (micro_batch == number)
            yield f"micro-batch {number}{name}", rows
            if grid.cp > 1:
                for context in range(grid.cp):
                    yield f"micro-batch {number}{name} on CP rank {context}", rows & (cp == context)
        if grid.dp > 1:
            yield f"data-parallel group {group}", of_group
    if grid.cp > 1:
        for context in range(grid.cp):
            yield f"CP rank {context}", cp == context


SEARCHES: tuple[Search, ...] = (
    replicas_differ, ends_differ, only_replicated, key_gradient, only_padding, only_after_the_optimizer, low_precision,
    missing_term,
)  # fmt: skip
FALLBACKS: tuple[Search, ...] = (wrong_sum,)  # for what no other search finds
