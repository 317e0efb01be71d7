"""Figures 9 and 10 against the published bars (facts.md 2.4 and 2.12)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from fourfold.planner.memory.walk import walk_row
from fourfold.simulator.figures import figure9, figure10
from fourfold.simulator.figures.figure import Figure
from fourfold.simulator.figures.small_scale import small_job, small_stack


@cache
def figures() -> dict[str, Figure]:
    return {"9": figure9.figure(), "10": figure10.figure()}


def ours(number: str, panel: int, series: int = 0) -> dict[str, float]:
    values = figures()[number].panels[panel].series[series].ours
    return {name: value for name, value in values.items() if value is not None}


def published(number: str, panel: int, series: int = 0) -> dict[str, float]:
    values = figures()[number].panels[panel].series[series].published
    return {name: value for name, value in values.items() if value is not None}


def test_figure_9_speed() -> None:
    """AFAB and flexible within 0.2 % of each other, 1F1B 0.8 % behind, give or take 0.3: so it is asked for."""
    speed = ours("9", 0)
    assert speed["AFAB"] == pytest.approx(speed["flexible"], rel=0.002)
    assert 100 - speed["1F1B"] == pytest.approx(0.8, abs=0.3)
    absolute = ours("9", 1)
    assert 100 * absolute["1F1B"] / absolute["flexible"] == pytest.approx(speed["1F1B"])


def test_figure_9_memory() -> None:
    """AFAB above flexible above 1F1B, every gap within 40 % of the published one: so it is asked for. How high the bars
    are is fitted by dp, so for them it is only asked that no other dp is nearer: 4 would be 8 GB lower."""
    memory, bars = ours("9", 2), published("9", 2)
    for high, low in (("AFAB", "flexible"), ("flexible", "1F1B"), ("AFAB", "1F1B")):
        assert memory[high] - memory[low] == pytest.approx(bars[high] - bars[low], rel=0.4), (high, low)
    for name, bar in bars.items():
        assert memory[name] == pytest.approx(bar, abs=8 / 2), name
    assert memory[figure9.FORWARDS_FIRST] > memory["AFAB"]


def test_figure_9_by_hand() -> None:
    """Rank 1 has 7 layers of 398 M weights: 2 bytes each, 12 over dp 2, and 4 of gradients for 7 chunks, or for one in
    one round; 29, 41 and 77 pairs, of which 62 % are kept as the stack says.

    For a moment of backward: gradients of a layer's input (cut by tp) and of the two wide matrices; the gathered input
    and its gradient whole, less what the activation function kept. Four messages are in buffers."""
    weights = (2 * 16384 * 128 * (128 + 8) + 3 * 16384 * 53248) / 8 + 2 * 16384
    pair = figure_pair()
    row, wide = 2 * 8192 * 16384, 2 * 8192 * 53248 / 8
    moment = row / 8 + 2 * 2 * 16384 * 53248 / 8 + (2 * row - wide)
    memory = ours("9", 2)
    for name, chunks, pairs in (("1F1B", 7, 29), ("flexible", 7, 41), ("AFAB", 1, 77)):
        by_hand = weights * (7 * (2 + 12 / 2) + 4 * chunks) + pair * pairs
        assert memory[name] == pytest.approx((by_hand + moment + 4 * row / 8) / 1e9, rel=1e-6), name


def figure_pair() -> float:
    """Bytes: 62 % of what a layer keeps of 8,192 tokens, two bytes a number, on one of 8 TP ranks: 6 of the hidden size
    (inputs of norms and of projections, queries, attention's output), K and V, 3 of the feed-forward; and in 32 bits
    the sums of 16 heads' softmax and of two norms."""
    return 0.62 * 8192 * ((12 * 16384 + 4 * 8 * 128 + 6 * 53248) / 8 + 4 * 16 + 2 * 4 / 8)


def test_figure_10_bars() -> None:
    """The balanced peak of 44.4 GB within 3 % (so it is asked for), every bar within the 2 % that the figure claims;
    rank 0 is fullest before, rank 1 after, and balancing takes off the paper's "5 GB"."""
    for series, name in enumerate(figure10.PUBLISHED_GB):
        gb = ours("10", 0, series)
        assert gb == pytest.approx(published("10", 0, series), rel=0.02), name
        assert max(gb, key=lambda rank: gb[rank]) == ("0" if name == "not balanced" else "1")
    fullest = ours("10", 1)
    assert fullest["balanced"] == pytest.approx(44.4, rel=0.03)
    assert fullest["not balanced"] - fullest["balanced"] == pytest.approx(5, abs=0.5)


def test_figure_10_slope() -> None:
    """Two pairs less from rank to rank, as the warm-up 2 (pp - rank - 1) says. What a pair holds, 0.33 GB, is fitted to
    this slope: this shows that pairs are counted right, not how large one is."""
    pair = figure_pair() / 1e9
    gb = list(ours("10", 0, 1).values())
    assert [high - low for high, low in pairwise(gb[1:7])] == pytest.approx([2 * pair] * 5, rel=1e-6)


@pytest.mark.parametrize(("rounds", "nc", "zero", "most"), [(2, 10, 1, 0.02), (3, 10, 1, 0.02), (3, 9, 2, 0.03)])
def test_figure_10_choice(rounds: int, nc: int, zero: int, most: float) -> None:
    """Three rounds of 10 give the same bars as two; the next choice is more than 2 % off somewhere."""
    off = []
    for name, bars in figure10.PUBLISHED_GB.items():
        layers, split, _ = figure10.LAYOUTS[name]
        job = small_job(layers=layers, pp=8, v=4, dp=1, micro_batches=rounds * nc, nc=nc, split=split, zero=zero)
        off.append(np.abs(walk_row(job, small_stack()) / np.array(bars) / 1e9 - 1).max())
    assert most - 0.01 < max(off) < most


def test_figure_10_speed() -> None:
    """319 < 340 < 375, and +10.3 % within 3 points: so it is asked for. The +6.6 % get the same, as how much is
    recomputed is our choice."""
    speed = ours("10", 3)
    recomputing, uneven, balanced = (speed[name] for name in figure10.LAYOUTS)
    assert recomputing < uneven < balanced
    assert 100 * balanced / uneven - 100 == pytest.approx(10.3, abs=3)
    assert 100 * uneven / recomputing - 100 == pytest.approx(6.6, abs=3)
