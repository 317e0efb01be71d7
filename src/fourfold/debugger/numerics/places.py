"""Known ways of being wrong that show in which tokens are wrong, and on which ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fourfold.debugger.numerics.alignment import LOSS, Pair
from fourfold.debugger.numerics.comparison import SEQUENCE_BITS, Finding, Pattern, token_of
from fourfold.debugger.numerics.records import Kind, RankStep
from fourfold.debugger.numerics.situation import Search, Situation
from fourfold.layout import join_ranks

_TOKENS = (Kind.OUTPUT, Kind.ARRIVING)
_MOST = 3  # places that are written out
_MOSTLY = 0.5  # share of tokens that must have a pattern


def other_start(here: Situation) -> Iterator[Finding]:
    """The embedding's results, which are copies of its rows, are others: other tokens, or other weights."""
    first = _first(here)
    if first is None or first.kind is not Kind.OUTPUT or first.name != "tok_embeddings" or first.missing:
        return
    far = int(here.far(first).sum())
    if far == len(first.differs) and first.scale()[1] > 1e-3:
        yield Finding(
            Pattern.START,
            "The embeddings of all tokens are others: the runs began this step with other weights, or other tokens.",
            (f"they are {first.relative():.1e} of their size apart",),
        )
    elif far < len(first.differs) and next(stale(here), None) is None:
        yield Finding(
            Pattern.DATA,
            f"{far} of {len(first.differs)} tokens are others, or have another embedding, from token "
            f"{_token_text(int(first.a.numbers[here.far(first)][0]))} on.",
        )


def other_positions(here: Situation) -> Iterator[Finding]:
    """Tokens to which the runs give other places in their documents, or that do not count up in one of them."""
    numbers_a, positions_a, ranks = _positions(here.step.a)
    numbers_b, positions_b, _ = _positions(here.step.b)
    if not len(numbers_a):
        return
    if len(numbers_b):
        at = torch.searchsorted(numbers_b, numbers_a).clamp(max=len(numbers_b) - 1)
        other, should = (numbers_b[at] == numbers_a) & (positions_b[at] != positions_a), positions_b[at]
    else:
        should = torch.cat((positions_a[:1], positions_a[:-1] + 1))
        other = _breaks(numbers_a, positions_a)
    if not bool(other.any()):
        return
    where, grid = int(other.long().argmax()), here.grids[0]
    contexts = {grid.coordinates(rank).cp for rank in ranks[other].unique().tolist()}
    on = f", on CP rank {join_ranks(contexts)}" if grid.cp > 1 else ""
    yield Finding(
        Pattern.POSITIONS,
        f"{int(other.sum())} tokens of {here.names[0]} are given a wrong place in their document{on}.",
        (
            f"token {_token_text(int(numbers_a[where]))} is at {int(positions_a[where])} and should be at "
            f"{int(should[where])}",
        ),
    )


def _breaks(numbers: Tensor, positions: Tensor) -> Tensor:
    """bool [n]: tokens whose position neither follows on that of the token before nor begins a document."""
    follows = torch.zeros(len(numbers), dtype=torch.bool)
    follows[1:] = (numbers[1:] != numbers[:-1] + 1) | (positions[1:] == positions[:-1] + 1)
    return ~follows & (positions != 0)


def rotated_wrongly(here: Situation) -> Iterator[Finding]:
    """Queries, keys and values agree, and what attention makes of them does not, on some CP ranks only."""
    first = _first(here)
    grid = here.grids[0]
    if first is None or first.kind is not Kind.OUTPUT or not first.name.endswith(".attend") or grid.cp == 1:
        return
    cp = here.place(first, "cp")
    wrong, all_ranks = set(cp[here.far(first)].tolist()), set(cp.tolist())
    if wrong and wrong < all_ranks:
        yield Finding(
            Pattern.POSITIONS,
            f"At {first.name} only tokens of CP rank {join_ranks(wrong)} are wrong, though queries, keys and values "
            "agree: after sharding these tokens have wrong positions, or see the wrong keys.",
            (f"{int(here.far(first).sum())} tokens there, none on CP rank {join_ranks(all_ranks - wrong)}",),
        )


def beyond_a_boundary(here: Situation) -> Iterator[Finding]:
    """Only tokens are wrong that are not in the first document of their row."""
    first = _first(here)
    if first is None:
        return
    records = here.step.b if any(record.positions for record in here.step.b) else here.step.a
    numbers, positions, _ = _positions(records)
    if not len(numbers) or bool(_breaks(numbers, positions).any()):
        return
    at = torch.searchsorted(numbers, first.a.numbers).clamp(max=len(numbers) - 1)
    known = numbers[at] == first.a.numbers
    later = known & (positions[at] < (first.a.numbers & ((1 << SEQUENCE_BITS) - 1)))
    far, in_first = here.far(first), known & ~later
    num_later, num_far = int(later.sum()), int(far.sum())
    if num_far and not bool((far & ~later).any()) and bool(in_first.any()) and num_far > _MOSTLY * num_later:
        yield Finding(
            Pattern.DOCUMENTS,
            f"At {first.name} only tokens are wrong that are not in the first document of their row: something crosses "
            "the boundary between documents.",
            (f"{num_far} of {num_later} tokens of later documents are wrong, none of {int(in_first.sum())} others",),
        )


def stale(here: Situation) -> Iterator[Finding]:
    """The numbers of one micro-batch are those that another should have."""
    first = _first(here)
    if first is None or first.name == LOSS:
        return
    far, dp = here.far(first), here.place(first, "dp")
    for group in dp[far].unique().tolist():
        of_group = dp == group
        for number in first.a.micro_batch[far & of_group].unique().tolist():
            wrong = far & of_group & (first.a.micro_batch == number)
            for other in first.a.micro_batch[of_group].unique().tolist():
                if other != number and _is_that_of(here, first, wrong, of_group, number, other):
                    yield Finding(
                        Pattern.STALE,
                        f"At {first.name}, micro-batch {number} of data-parallel group {group} has the numbers of "
                        f"micro-batch {other}: a buffer that was not filled anew.",
                        (f"{int(wrong.sum())} tokens", f"on rank {_ranks_text(first.a.rank[wrong])}"),
                    )
                    return


def _is_that_of(here: Situation, first: Pair, wrong: Tensor, of_group: Tensor, number: int, other: int) -> bool:
    """Whether wrong rows of a micro-batch are the same rows of another, as the second run has them."""
    sequences = first.a.numbers >> SEQUENCE_BITS
    starts = [int(sequences[of_group & (first.a.micro_batch == each)].min()) for each in (number, other)]
    wanted = first.a.numbers[wrong] + ((starts[1] - starts[0]) << SEQUENCE_BITS)
    at = torch.searchsorted(first.b.numbers, wanted).clamp(max=len(first.b.numbers) - 1)
    there = first.b.numbers[at] == wanted
    if float(there.double().mean()) <= _MOSTLY:
        return False
    mine, theirs = first.a.sketch()[wrong][there], first.b.sketch()[at[there]]
    limit = here.limits.of(first.kind, first.name, first.a.dtype)
    return float((mine - theirs).square().sum()) <= limit**2 * float(theirs.square().sum())


def nothing_comes_back(here: Situation) -> Iterator[Finding]:
    """What should be a gradient is zero."""
    first = _first(here)
    if first is None or first.kind is not Kind.ARRIVING:
        return
    far = here.far(first)
    if not bool(far.any()) or float((first.a.square()[far] == 0).double().mean()) < 1:
        return
    dp, number = (here.place(first, name)[far] for name in ("dp", "micro-batch"))
    whose = torch.stack((dp, number)).unique(dim=1).T.tolist()
    yield Finding(
        Pattern.SKIPPED,
        f"No gradient comes back to {first.name} in {_whose_text(whose)}: it is left out of the sum of micro-batches.",
        (f"{int(far.sum())} tokens have zero there",),
    )


def _whose_text(whose: Sequence[Sequence[int]]) -> str:
    text = ", ".join(f"micro-batch {number} of data-parallel group {group}" for group, number in whose[:_MOST])
    return text + (f" and {len(whose) - _MOST} more" if len(whose) > _MOST else "")


def missing_tokens(here: Situation) -> Iterator[Finding]:
    """Tokens that one run has not computed."""
    first = _first(here)
    if first is None or not first.missing:
        return
    for which, only in ((1, first.only_a), (0, first.only_b)):
        if len(only):
            records = here.step.a if which else here.step.b
            whose = sorted({(record.grid.coordinates(record.rank).dp, seen.micro_batch) for record in records
                            for seen in record.seen if (seen.kind, seen.name) == (first.kind, first.name)
                            and bool(torch.isin(seen.rows, only).any())})  # fmt: skip
            what = "forward" if first.kind is Kind.OUTPUT else "backward"
            yield Finding(
                Pattern.SKIPPED,
                f"{here.names[which]} has no {what} at {first.name} for {len(only)} tokens of {here.names[1 - which]}: "
                f"{_whose_text(whose)}.",
            )


def only_in_one_place(here: Situation) -> Iterator[Finding]:
    """All that is wrong in the first wrong tensor is of one rank of a dimension, or of one micro-batch."""
    first = _first(here)
    if first is None:
        return
    far = here.far(first)
    if not bool(far.any()):
        return
    found = []
    for name in ("dp", "cp"):
        at = here.place(first, name)
        wrong, every = at[far].unique().tolist(), at.unique().tolist()
        if len(wrong) == 1 and len(every) > 1:
            found.append(f"{name} {wrong[0]}")
    wrong, every = first.a.micro_batch[far].unique().tolist(), first.a.micro_batch.unique().tolist()
    if len(wrong) == 1 and len(every) > 1:
        found.append(f"micro-batch {wrong[0]}")
    if found:
        yield Finding(
            Pattern.ONE_PLACE,
            f"At {first.name} only {' of '.join(reversed(found))} is wrong.",
            (f"{int(far.sum())} of {len(far)} tokens",),
        )


def _first(here: Situation) -> Pair | None:
    """The first wrong tensor, if it is one of tokens."""
    return here.wrong[0] if here.wrong and here.wrong[0].kind in _TOKENS else None


def _positions(records: Sequence[RankStep]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers of tokens, ascending; their positions; ranks), int64, each token once."""
    held = [(record.rank, *pair) for record in records for pair in record.positions.values()]
    if not held:
        return (torch.empty(0, dtype=torch.int64),) * 3
    numbers = torch.cat([tokens for _, tokens, _ in held])
    positions = torch.cat([positions for *_, positions in held])
    ranks = torch.cat([torch.full((len(tokens),), rank) for rank, tokens, _ in held])
    order = numbers.argsort(stable=True)
    numbers, positions, ranks = numbers[order], positions[order], ranks[order]
    fresh = torch.ones(len(numbers), dtype=torch.bool)
    fresh[1:] = numbers[1:] != numbers[:-1]
    fresh &= numbers >= 0
    return numbers[fresh], positions[fresh], ranks[fresh]


def _ranks_text(ranks: Tensor) -> str:
    return join_ranks(ranks.unique().tolist(), 4)


def _token_text(number: int) -> str:
    sequence, place = token_of(number)
    return f"{place} of sequence {sequence}"


SEARCHES: tuple[Search, ...] = (
    missing_tokens, stale, other_start, other_positions, beyond_a_boundary, rotated_wrongly, nothing_comes_back,
    only_in_one_place,
)  # fmt: skip
