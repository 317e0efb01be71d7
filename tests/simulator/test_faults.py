"""What a person types after --slow."""

from __future__ import annotations

import pytest

from fourfold.layout import Grid
from fourfold.simulator.faults import Faults

GRID = Grid(tp=2, cp=2, pp=2, dp=2)


def test_read() -> None:
    faults = Faults.parse(["rank=5:1.5", "link=13-12:3", "cpu=7:0.02"], jitter=0.01, seed=4)
    assert faults == Faults({5: 1.5}, {(12, 13): 3.0}, {7: 0.02}, 0.01, 4)
    faults.check(GRID)
    assert faults.descriptions() == (
        "rank 5 computes 1.5 times as long",
        "the link of ranks 12 and 13 takes 3 times as long",
        "the host of rank 7 launches computations 0.02 s late",
        "computations vary by 1.0% (seed 4)",
    )
    assert Faults(ranks={1: 0.5}).descriptions() == ("rank 1 computes 50% as long",)
    assert not Faults()
    assert Faults.parse([]) == Faults()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("rank=5", "must be rank=RANK:FACTOR, link=RANK-RANK:FACTOR or cpu=RANK:SECONDS"),
        ("gpu=5:2", "must be rank=RANK:FACTOR"),
        ("rank=-1:2", "must be rank=RANK:FACTOR"),
        ("rank=1-2:2", "must be rank=RANK:FACTOR"),
        ("link=1:2", "must be rank=RANK:FACTOR"),
        ("rank=5:fast", "fast is no number"),
        ("rank=5:0", "0 must be a factor"),
        ("rank=5:-2", "-2 must be a factor"),
        ("rank=5:nan", "nan must be a factor"),
        ("cpu=5:-1", "-1 must be seconds above 0"),
        ("rank=5:inf", "inf must be a factor"),
    ],
)
def test_refused_by_name(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"--slow {text}: {rule}"):
        Faults.parse([text])


def test_given_twice() -> None:
    with pytest.raises(ValueError, match="--slow rank=5:3: given twice"):
        Faults.parse(["rank=5:2", "rank=5:3"])
    with pytest.raises(ValueError, match="--slow link=3-2:3: given twice"):
        Faults.parse(["link=2-3:2", "link=3-2:3"])


def test_jitter_is_a_share() -> None:
    with pytest.raises(ValueError, match=r"--jitter 2: must be at least 0 and below 1; 0\.01 is 1 %"):
        Faults.parse([], jitter=2)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (Faults(ranks={16: 2.0}), "--slow rank=16: there are ranks 0 to 15"),
        (Faults(cpus={99: 2.0}), "--slow cpu=99: there are ranks 0 to 15"),
        (Faults(links={(3, 16): 2.0}), "--slow link=3-16: there are ranks 0 to 15"),
        (Faults(links={(3, 3): 2.0}), "--slow link=3-3: a link has two ends"),
        # tp 0 cp 0 pp 0 dp 0 and tp 1 cp 1 pp 0 dp 0 share no group
        (Faults(links={(0, 3): 2.0}), "--slow link=0-3: nothing goes between these two ranks; nearest .* 1, 2, 4"),
    ],
)
def test_ranks_that_are_not_there(faults: Faults, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        faults.check(GRID)


def test_ends_of_a_pipeline_are_neighbours_where_ranks_have_several_stages() -> None:
    """pp 4, tp 1: with one stage per rank nothing goes from the last to the first."""
    ends = Faults(links={(0, 3): 2.0})
    ends.check(Grid(pp=4), several_stages=True)
    with pytest.raises(ValueError, match="--slow link=0-3: nothing goes between"):
        ends.check(Grid(pp=4), several_stages=False)
