"""What a plan means: counts, bubble, memory per pipeline rank, against facts.md and hand arithmetic."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from fourfold.planner import Consequences, consequences
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.reasons.differences import paper_candidate
from fourfold.planner.search.paper import paper_layout
from fourfold.planner.search.problem import Problem
from fourfold.recipe import RecipeError, check, from_table


def of(**sections: dict[str, Any]) -> Consequences:
    return consequences(check(from_table(sections)))


def production(*, dp: int, cp: int = 1, sequences: int, seq_len: int) -> Consequences:
    return of(
        model={"preset": "llama3-405b"},
        layout={"tp": 8, "cp": cp, "pp": 16, "dp": dp},
        pipeline={"virtual_stages": 8, "split": "ends_light"},
        batch={"sequences": sequences, "seq_len": seq_len},
        train={"dtype": "bfloat16"},
    )


class TestProduction:
    """Table 4 of the Herd report (facts.md 3.2) with the schedule of each phase (row 33)."""

    def test_8k_gpus(self) -> None:
        got = production(dp=64, sequences=2048, seq_len=8192)
        assert got.num_ranks == 8192
        assert got.tokens_per_step == 16_777_216
        assert (got.sequences_per_dp_group, got.num_micro_batches) == (32, 32)
        assert (got.zero, got.schedule) == (1, "interleaved")
        assert got.bubble_over_compute == pytest.approx(0.0586, abs=1e-4)
        assert got.bubble_over_total == pytest.approx(0.0586 / 1.0586, abs=1e-4)
        assert [rank.in_flight_peak for rank in got.ranks] == [143 - 2 * r for r in range(16)]
        assert {rank.reduce_scatters for rank in got.ranks} == {8}

    def test_16k_gpus(self) -> None:
        got = production(dp=128, sequences=2048, seq_len=8192)
        assert (got.num_ranks, got.tokens_per_step, got.sequences_per_dp_group) == (16384, 16_777_216, 16)
        assert (got.zero, got.schedule) == (2, "afab")
        assert got.bubble_over_compute == pytest.approx(0.1172, abs=1e-4)

    def test_long_context(self) -> None:
        """cp takes over from dp: the same number of ranks share the state, so memory is the same."""
        long = production(dp=8, cp=16, sequences=128, seq_len=131_072)
        short = production(dp=128, sequences=2048, seq_len=8192)
        assert (long.num_ranks, long.tokens_per_step, long.sequences_per_dp_group) == (16384, 16_777_216, 16)
        assert [rank.bytes for rank in long.ranks] == [rank.bytes for rank in short.ranks]

    def test_the_ranks(self) -> None:
        ranks = production(dp=64, sequences=2048, seq_len=8192).ranks
        assert [rank.num_layers for rank in ranks] == [7] + [8] * 14 + [7]
        assert (ranks[0].embedding, ranks[0].head) == (True, False)
        assert (ranks[15].embedding, ranks[15].head) == (False, True)
        assert ranks[3].stages == tuple(range(3, 128, 16))
        assert sum(rank.parameters for rank in ranks) / 16 == pytest.approx(3.17e9, rel=1e-3)


class TestSmall:
    @pytest.mark.parametrize(
        ("pp", "v", "nmb", "nc", "ratio", "peaks"),
        [  # facts.md 2.2
            (3, 2, 6, 3, 0.1667, (8, 6, 4)),
            (4, 2, 10, 5, 0.1500, (12, 10, 8, 6)),
            (4, 7, 12, 6, 0.0357, (43, 41, 39, 37)),
            (4, 2, 3, 3, 0.6667, (6, 6, 6, 6)),
        ],
    )
    def test_bubble_and_in_flight(
        self, pp: int, v: int, nmb: int, nc: int, ratio: float, peaks: tuple[int, ...]
    ) -> None:
        got = of(
            model={"num_layers": pp * v},
            layout={"pp": pp},
            pipeline={"virtual_stages": v, "nc": nc},
            batch={"sequences": nmb},
        )
        assert got.bubble_over_compute == pytest.approx(ratio, abs=5e-5)
        assert got.bubble_over_total == pytest.approx(ratio / (1 + ratio), abs=5e-5)
        assert tuple(rank.in_flight_peak for rank in got.ranks) == peaks

    def test_a_fallback_is_told(self) -> None:
        got = of(layout={"pp": 4}, pipeline={"schedule": "1f1b"}, batch={"sequences": 3})
        assert got.schedule == "afab"
        assert got.fallback is not None
        assert "pp = 4" in got.fallback

    def test_one_rank(self) -> None:
        got = of()
        assert (got.num_ranks, got.bubble_over_compute, got.fallback, len(got.ranks)) == (1, 0.0, None, 1)
        assert got.parameters == got.trained_parameters == 2 * 260 * 64 + 8 * 36_992 + 64
        assert got.ranks[0].parameters == 2 * 272 * 64 + 8 * 36_992 + 64  # padded, as held
        assert got.step_seconds is None  # unknown hardware is not guessed

    def test_frozen(self) -> None:
        got = of(train={"freeze": ["tok_embeddings", "layers.0"]}, layout={"pp": 8})
        assert got.num_frozen_stages == 1
        assert got.parameters - got.trained_parameters == 260 * 64 + 36_992
        assert got.ranks[0].trained_parameters == 0

    @pytest.mark.parametrize(
        ("optimizer", "moments"), [({"name": "adamw"}, 2), ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1)]
    )
    def test_optimizer(self, optimizer: dict[str, Any], moments: int) -> None:
        (rank,) = of(optimizer=optimizer).ranks
        assert rank.bytes.optimizer == moments * rank.bytes.master

    def test_the_layout_changes_no_totals(self) -> None:
        one = of(batch={"sequences": 16})
        many = of(batch={"sequences": 16}, layout={"tp": 2, "cp": 2, "pp": 2, "dp": 2})
        assert (one.parameters, one.tokens_per_step) == (many.parameters, many.tokens_per_step)


def test_no_torch() -> None:
    """`fourfold plan` must answer at once."""
    code = "import sys, fourfold.report, fourfold.planner, fourfold.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class TestWhereTheGpuIsKnown:
    """A recipe that names its GPU is told how long a step takes, and whether it fits."""

    def meta(self, **cluster: Any) -> Consequences:
        return of(
            model={"preset": "llama3-405b"},
            layout={"tp": 8, "pp": 16, "dp": 128},
            pipeline={"virtual_stages": 8, "split": "ends_light"},
            batch={"sequences": 2048, "seq_len": 8192},
            train={"dtype": "bfloat16"},
            cluster=cluster,
        )

    def test_llama3_on_16384_h100(self) -> None:
        """The paper's own layout and speed: 400 TFLOP/s are 6.2 to 6.5 s a step (facts.md 5.2)."""
        assert self.meta(gpu="h100").step_seconds == pytest.approx(6.35, rel=0.05)

    def test_as_the_plan_says_it(self) -> None:
        """`fourfold train` and `fourfold plan` promise the same: two ways to the same schedule, played."""
        problem = Problem.of(model="llama3-405b", cluster=cluster("h100", 16384), seq_len=8192, sequences=2048)
        planned = paper_candidate(problem, paper_layout(problem))
        assert self.meta(gpu="h100").step_seconds == pytest.approx(planned.step_seconds, rel=1e-6)

    def test_recomputation_costs_time(self) -> None:
        """Full: a forward more, of what was one forward and a backward of about two. Between stages that do nothing
        again and some that do all, and within selective, the parts."""
        layout = {"model": {"preset": "llama3-8b"}, "layout": {"pp": 4}, "batch": {"sequences": 16, "seq_len": 8192}}

        def seconds(recompute: Any) -> float:
            found = of(**layout, train={"recompute": recompute, "dtype": "bfloat16"}, cluster={"gpu": "h100"})
            assert found.step_seconds is not None
            return found.step_seconds

        none, norms, swiglu, selective, full = map(seconds, ("none", "norms", "swiglu", "selective", "full"))
        assert 1.25 < full / none < 1.4
        assert none < norms < swiglu < selective < 1.03 * none
        assert (norms - none) + (swiglu - none) == pytest.approx(selective - none, rel=0.1)
        assert none < seconds(["full", "none", "none", "none"]) < full

    def test_room(self) -> None:
        """An 80 GB H100 has 79.1 GiB for programs, of which 1 GiB is CUDA's and NCCL's (algorithms.md 3.10)."""
        assert self.meta(gpu="h100").usable_bytes == pytest.approx(78.1 * 2**30)

    def test_nothing_is_said_of_what_is_not_known(self) -> None:
        unnamed = self.meta()
        assert (unnamed.step_seconds, unnamed.usable_bytes) == (None, None)
        assert of(cluster={"gpu": "h100"}, train={"device": "cpu"}).step_seconds is None
        assert of(cluster={"gpu": "h100"}, train={"freeze": ["layers.0"]}).step_seconds is None

    def test_an_unknown_gpu_is_refused(self) -> None:
        with pytest.raises(RecipeError, match=r'cluster.gpu = "h1000".*nearest legal: "h100"'):
            self.meta(gpu="h1000")
