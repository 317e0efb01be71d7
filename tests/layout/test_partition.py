"""Layers over stages, against the production layout, and `balanced` against a search of every composition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.layout.partition import Costs, Split, Stage, balanced, partition

SIZES = [(num_layers, pp, v) for num_layers in range(1, 34) for pp in range(1, 9) for v in range(1, 5)]


def counts_of(stages: Sequence[Stage]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def layers_of_ranks(counts: Sequence[int], pp: int) -> list[int]:
    return [sum(counts[rank::pp]) for rank in range(pp)]


@pytest.mark.parametrize("split", ["even", "ends_light"])
def test_no_layer_is_lost(split: Split) -> None:
    # pains.md T14: frameworks have dropped the remainder without a word.
    for num_layers, pp, v in SIZES:
        stages = partition(num_layers, pp=pp, v=v, split=split)
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        assert [stage.index for stage in stages] == list(range(pp * v))
        assert [stage.index for stage in stages if stage.embedding] == [0]
        assert [stage.index for stage in stages if stage.head] == [pp * v - 1]


def test_even_is_level_and_spares_the_ends() -> None:
    for num_layers, pp, v in SIZES:
        counts = counts_of(partition(num_layers, pp=pp, v=v))
        low, surplus = divmod(num_layers, pp * v)
        assert sorted(counts) == [low] * (pp * v - surplus) + [low + 1] * surplus
        assert counts[-1] == low
        assert counts[0] == low or surplus == pp * v - 1
        of_ranks = layers_of_ranks(counts, pp)
        assert max(of_ranks) - min(of_ranks) <= 1
        if surplus <= pp * v - 2 and num_layers % pp <= pp - 2:
            assert of_ranks[0] == of_ranks[-1] == min(of_ranks)


@pytest.mark.parametrize(
    ("num_layers", "pp", "v", "expected"),
    [
        (10, 8, 1, [1, 1, 1, 2, 2, 1, 1, 1]),
        (9, 4, 1, [2, 3, 2, 2]),
        (11, 4, 1, [3, 3, 3, 2]),
        (5, 8, 1, [0, 1, 1, 1, 1, 1, 0, 0]),
        (1, 2, 1, [1, 0]),
        # The middle stages 3 and 4 are those of the last and the first rank; stage 2 is of neither.
        (9, 4, 2, [1, 1, 2, 1, 1, 1, 1, 1]),
        (14, 4, 2, [1, 2, 2, 2, 2, 2, 2, 1]),
        (7, 1, 1, [7]),
        (32, 4, 2, [4] * 8),
    ],
)
def test_even_puts_the_surplus_in_the_middle(num_layers: int, pp: int, v: int, expected: list[int]) -> None:
    assert counts_of(partition(num_layers, pp=pp, v=v, split="even")) == expected


def test_ends_light_is_even_with_embedding_and_head_as_layers() -> None:
    for num_layers, pp, v in SIZES:
        counts = counts_of(partition(num_layers, pp=pp, v=v, split="ends_light"))
        weights = list(counts)
        weights[0] += 1
        weights[-1] += 1
        if num_layers + 2 >= pp * v:
            assert max(weights) - min(weights) <= 1
        else:
            assert counts[0] == counts[-1] == 0
            assert max(counts) == 1


def test_ends_light_by_hand() -> None:
    assert counts_of(partition(30, pp=4, split="ends_light")) == [7, 8, 8, 7]
    assert counts_of(partition(31, pp=4, split="ends_light")) == [7, 9, 8, 7]
    assert counts_of(partition(2, pp=2, v=2, split="ends_light")) == [0, 1, 1, 0]
    assert counts_of(partition(1, pp=4, split="ends_light")) == [0, 1, 0, 0]
    assert counts_of(partition(5, pp=1, split="ends_light")) == [5]


def test_production_layout() -> None:
    # facts.md 2.3: 405B, 126 layers, pp=16, v=8: one layer per virtual stage, embedding and head on their own.
    stages = partition(126, pp=16, v=8, split="ends_light")
    assert stages[0] == Stage(index=0, layers=(), embedding=True, head=False)
    assert stages[127] == Stage(index=127, layers=(), embedding=False, head=True)
    assert [stage.layers for stage in stages[1:127]] == [(layer,) for layer in range(126)]
    assert layers_of_ranks(counts_of(stages), 16) == [7] + [8] * 14 + [7]


def test_explicit_list() -> None:
    stages = partition(7, pp=2, v=2, split=[2, 0, 4, 1])
    assert [stage.layers for stage in stages] == [(0, 1), (), (2, 3, 4, 5), (6,)]
    assert (stages[0].embedding, stages[3].head) == (True, True)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([3, 4], r"split = \[3, 4\]: has 2 entries; must have one per stage, pp \* v = 4"),
        ([2, 2, 2, 2], r"sums to 8; must sum to num_layers = 7"),
        ([4, -1, 2, 2], r"stage 1 is negative; nearest legal: 0"),
        ("odd", r"split = 'odd': must be \"even\", \"ends_light\" or a list of 4 layer counts"),
    ],
)
def test_illegal_split_is_refused(split: Split, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(7, pp=2, v=2, split=split)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(sizes: tuple[int, int, int]) -> None:
    num_layers, pp, v = sizes
    with pytest.raises(ValueError, match="= 0: must be at least 1"):
        partition(num_layers, pp=pp, v=v)
    with pytest.raises(ValueError, match="= 0: must be at least 1"):
        balanced(num_layers, pp=pp, v=v, time=Costs(1))


def compositions(total: int, parts: int) -> Iterator[list[int]]:
    """Every way to write `total` as an ordered sum of `parts` non-negative numbers."""
    for bars in combinations(range(total + parts - 1), parts - 1):
        edges = [-1, *bars, total + parts - 1]
        yield [right - left - 1 for left, right in pairwise(edges)]


def peak(counts: Sequence[int], costs: Costs, pp: int, per_layer: Sequence[float] | None = None) -> float:
    of_ranks = [(costs.layer + (per_layer or [0] * pp)[rank]) * n for rank, n in enumerate(layers_of_ranks(counts, pp))]
    of_ranks[0] += costs.embedding
    of_ranks[-1] += costs.head
    return max(of_ranks)


whole_costs = st.builds(Costs, layer=st.integers(0, 5), embedding=st.integers(0, 9), head=st.integers(0, 9))


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 2), whole_costs)
def test_balanced_time_against_every_composition(num_layers: int, pp: int, v: int, time: Costs) -> None:
    counts = balanced(num_layers, pp=pp, v=v, time=time)
    assert len(counts) == pp * v
    assert sum(counts) == num_layers
    assert peak(counts, time, pp) == min(peak(other, time, pp) for other in compositions(num_layers, pp * v))


@given(
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 2),
    whole_costs,
    whole_costs,
    st.integers(0, 3),
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
    st.integers(0, 60) | st.none(),
)
def test_balanced_time_then_memory_against_every_composition(
    num_layers: int,
    pp: int,
    v: int,
    time: Costs,
    memory: Costs,
    activation: int,
    in_flight: list[int],
    limit: int | None,
) -> None:
    in_flight = in_flight[:pp]
    per_layer = [activation * chunks for chunks in in_flight]  # activation_bytes = activation * v keeps it whole

    def peaks(counts: list[int]) -> tuple[float, float]:
        return peak(counts, time, pp), peak(counts, memory, pp, per_layer)

    every = [peaks(counts) for counts in compositions(num_layers, pp * v)]
    legal = [(longest, largest) for longest, largest in every if limit is None or largest <= limit]

    def balance() -> list[int]:
        return balanced(
            num_layers,
            pp=pp,
            v=v,
            time=time,
            memory=memory,
            activation_bytes=activation * v,
            in_flight=in_flight,
            memory_limit=limit,
        )

    if legal:
        counts = balance()
        assert sum(counts) == num_layers
        assert peaks(counts) == min(legal)
    else:
        smallest = min(largest for _, largest in every)
        with pytest.raises(ValueError, match=rf"memory_limit = {limit}: the smallest possible peak is {smallest:g}$"):
            balance()


def test_balanced_finds_the_production_layout() -> None:
    # facts.md 2.3, 2.4 and 1 row 2: the head computes 0.66 of a layer; per GPU 3.19e9 / 8 weights a layer, 2.10e9 / 8
    # either end, 6 bytes each under ZeRO-1; 0.33 GB per layer and micro-batch in flight; warm-up + 1 chunks in flight.
    counts = balanced(
        126,
        pp=16,
        v=8,
        time=Costs(layer=1.0, head=0.66),
        memory=Costs(layer=2.39e9, embedding=1.58e9, head=1.58e9),
        activation_bytes=0.33e9,
        in_flight=[min(128, 7 * 16 + 2 * (15 - rank) + 1) for rank in range(16)],
    )
    assert counts == [0] + [1] * 126 + [0]
    assert counts == counts_of(partition(126, pp=16, v=8, split="ends_light"))
    assert counts_of(partition(126, pp=16, v=8, split=counts)) == counts


def test_balanced_by_hand() -> None:
    # The head is worth two layers: 4 + 4 + 2 layers take 4, 4, 4.
    assert balanced(10, pp=3, time=Costs(layer=1, head=2)) == [4, 4, 2]
    # Equal costs: the odd layer goes to the middle, and a rank's layers to all its chunks.
    assert balanced(4, pp=3, time=Costs(1)) == [1, 2, 1]
    assert balanced(5, pp=3, time=Costs(1)) == [2, 2, 1]
    assert balanced(6, pp=3, time=Costs(0)) == [2, 2, 2]
    assert balanced(12, pp=3, v=2, time=Costs(1)) == [2] * 6
    # Where the ends are one rank, and where they are two: the embedding's and the head's chunks are the lighter ones.
    assert balanced(3, pp=1, v=2, time=Costs(1)) == [2, 1]
    assert balanced(6, pp=2, v=2, time=Costs(1)) == [1, 2, 2, 1]
    # In time 3 + 2 is as good as 2 + 3; in memory the rank with two chunks in flight wants the fewer.
    light = partial(balanced, pp=2, time=Costs(1), memory=Costs(0), activation_bytes=1.0)
    assert light(5, in_flight=[2, 1]) == [2, 3]
    assert light(5, in_flight=[1, 2]) == [3, 2]
    # A limit costs time: 2 + 2 would be faster, but rank 0 has room for one layer of 2 bytes.
    assert light(4, in_flight=[2, 1], memory_limit=3.0) == [1, 3]


def test_activations_are_charged_per_chunk() -> None:
    # v = 2, 4 layers on the only rank: a chunk has 2 layers, 3 chunks in flight hold 6 layers of 10 bytes.
    one = partial(balanced, 4, pp=1, v=2, time=Costs(1), memory=Costs(1), activation_bytes=10.0, in_flight=[3])
    assert one(memory_limit=64.0) == [2, 2]
    with pytest.raises(ValueError, match=r"memory_limit = 63: the smallest possible peak is 64$"):
        one(memory_limit=63.0)


def test_contradictory_memory_is_refused() -> None:
    two_ranks = partial(balanced, 4, pp=2, time=Costs(1))
    for without_memory in (
        partial(two_ranks, activation_bytes=1.0),
        partial(two_ranks, in_flight=[1, 1]),
        partial(two_ranks, memory_limit=0.0),
    ):
        with pytest.raises(ValueError, match="memory = None"):
            without_memory()
    with pytest.raises(ValueError, match="in_flight = None: must give 2 chunk counts"):
        two_ranks(memory=Costs(1), activation_bytes=1.0)
    with pytest.raises(ValueError, match=r"in_flight = \[1\]: must have one entry per pipeline rank, pp = 2"):
        two_ranks(memory=Costs(1), in_flight=[1])


@pytest.mark.parametrize("name", ["layer", "embedding", "head"])
@pytest.mark.parametrize("cost", [-1.0, float("nan")])
def test_negative_costs_are_refused(name: str, cost: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = {cost}: must not be negative"):
        Costs(**{"layer": 1.0} | {name: cost})
