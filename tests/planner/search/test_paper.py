"""The sizing rules of ISCA'25: its own two layouts from them, the phase before, and where they end."""

from __future__ import annotations

import pytest

from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.paper import PaperAnswer, fsdp_intensity, paper_layout, rule_bytes, saved_bytes, zero_rule
from fourfold.planner.search.problem import Problem
from fourfold.recipe import preset

M = 1 << 20
GIB = 1 << 30


def job(model: str = "llama3-405b", *, gpus: int = 16_384, seq: int = 8_192, tokens: int = 16 * M, gpu: str = "h100"):
    return Problem.of(model=model, cluster=cluster(gpu, gpus), seq_len=seq, tokens=tokens)


def layout(answer: PaperAnswer) -> tuple[int, int, int, int]:
    return answer.tp, answer.cp, answer.pp, answer.dp


class TestTable2:
    """Llama 3 405B with 16M tokens on 16,384 H100 (ISCA'25 Table 2), and on 8,192 before (Herd, Table 4)."""

    def test_8k(self) -> None:
        answer = paper_layout(job())
        assert layout(answer) == (8, 1, 16, 128)
        assert (answer.virtual_stages, answer.split) == (8, "ends_light")
        assert (answer.per_group, answer.zero, answer.schedule) == (16, 2, "afab")

    def test_131k(self) -> None:
        answer = paper_layout(job(seq=131_072))
        assert layout(answer) == (8, 16, 16, 8)
        assert (answer.per_group, answer.zero, answer.schedule) == (16, 2, "afab")

    def test_half_the_gpus_have_twice_the_micro_batches(self) -> None:
        answer = paper_layout(job(gpus=8_192))
        assert layout(answer) == (8, 1, 16, 64)
        assert (answer.per_group, answer.zero, answer.schedule, answer.nc) == (32, 1, "interleaved", 16)

    def test_says_its_numbers(self) -> None:
        text = " ".join(paper_layout(job(seq=131_072)).steps)
        for number in ("128 sequences", "8,192 FLOP/byte", "19,788", "cp >= 16,384 / (128 x 8) = 16", "2 pp = 32"):
            assert number in text


@pytest.mark.parametrize(
    ("per_group", "mode", "kind"), [(32, 1, "interleaved"), (31, 2, "afab"), (16, 2, "afab"), (64, 1, "interleaved")]
)
def test_zero_rule_switches_on_sequences_per_group(per_group: int, mode: int, kind: str) -> None:
    assert zero_rule(per_group, pp=16, virtual_stages=8) == (mode, kind)


def test_one_stage_per_rank_is_not_interleaved() -> None:
    assert zero_rule(8, pp=4, virtual_stages=1) == (1, "1f1b")


class TestNumbers:
    def test_saved_set_of_405b(self) -> None:
        """0.33 GB per layer and micro-batch at 8K, tp = 8 (facts 2.4)."""
        assert saved_bytes(preset("llama3-405b"), 8_192) / 8 == pytest.approx(0.33e9, rel=0.005)

    def test_memory_of_405b(self) -> None:
        """19.3 GB of weights, gradients and optimizer (facts 2.5), and 143 chunks of a 128th of 126 layers."""
        by_hand = 19.3e9 + 143 * 126 / 128 * 0.33e9
        assert rule_bytes(job(), tp=8, cp=1, pp=16, zero=1) == pytest.approx(by_hand, rel=0.005)

    def test_cp_leaves_memory_as_it_is_but_for_gathered_keys_and_values(self) -> None:
        more = rule_bytes(job(seq=131_072), tp=8, cp=16, pp=16, zero=1) - rule_bytes(job(), tp=8, cp=1, pp=16, zero=1)
        assert more == pytest.approx(2 * 2 * 131_072 * 8 * 128 / 8)  # 67 MB (facts 2.7)

    def test_intensity(self) -> None:
        """989T / 50G, and what a whole node's NICs make of it; NVLink where a node is all there is."""
        assert fsdp_intensity(job(), 8) == pytest.approx(19_788)
        assert fsdp_intensity(job(), 1) == pytest.approx(2_473.5)
        assert fsdp_intensity(job("llama3-8b", gpus=8), 1) == pytest.approx(2_199, rel=1e-3)


class TestOtherJobs:
    def test_8b_on_32_needs_only_fsdp(self) -> None:
        """Facts 5.9: FSDP, tp 1, pp 1."""
        answer = paper_layout(job("llama3-8b", gpus=32, tokens=4 * M))
        assert layout(answer) == (1, 1, 1, 32)

    @pytest.mark.parametrize("seq", [8_192, 16_384])
    @pytest.mark.parametrize(("model", "gpus"), [("llama3-8b", 64), ("llama3-70b", 128), ("llama3-70b", 512)])
    def test_answers_are_layouts_of_the_job(self, model: str, gpus: int, seq: int) -> None:
        problem = job(model, gpus=gpus, seq=seq, tokens=4 * M)
        answer = paper_layout(problem)
        if answer.refusal is None:
            assert answer.tp * answer.cp * answer.pp * answer.dp == gpus
            assert problem.sequences % answer.dp == 0
            assert answer.per_group >= answer.pp

    @pytest.mark.parametrize(
        ("model", "gpus", "expected"),
        [("llama3-8b", 24, (1, 1, 3, 8)), ("llama3.2-1b", 24, (1, 1, 3, 8)), ("llama3-8b", 7, (1, 1, 7, 1))],
    )
    def test_gpus_that_are_no_power_of_two(self, model: str, gpus: int, expected: tuple[int, ...]) -> None:
        """512 sequences have no factor 3 or 7, so that the pipeline takes it up."""
        answer = paper_layout(job(model, gpus=gpus, tokens=4 * M))
        assert answer.refusal is None
        assert layout(answer) == expected

    def test_says_what_does_not_divide(self) -> None:
        """1,000 = 8 x 125 GPUs; 512 sequences leave 125, and 34 stages are fewer."""
        refusal = str(paper_layout(job("llama3-8b", gpus=1_000, tokens=4 * M)).refusal)
        assert "512 % 125 = 12" in refusal
        assert "GiB" not in refusal

    def test_tp_beyond_a_node_has_the_nics_of_its_nodes(self) -> None:
        assert fsdp_intensity(job(), 16) == fsdp_intensity(job(), 8)

    def test_more_memory_makes_the_pipeline_shorter(self) -> None:
        assert paper_layout(job(gpu="b200")).pp < 16

    def test_names_the_rule_without_an_answer(self) -> None:
        answer = paper_layout(job(gpus=8))
        assert "rule 4" in str(answer.refusal)
        assert "GiB" in str(answer.refusal)
        assert len(answer.steps) == 2

    def test_chip_without_bf16(self) -> None:
        """V100 has fp16 only; the rules need a 16-bit peak."""
        problem = Problem.of(
            model="llama3-8b", cluster=cluster("v100", 64), seq_len=8192, tokens=4 * M, precision="fp16"
        )
        assert fsdp_intensity(problem, 16) > 0
        paper_layout(problem)
