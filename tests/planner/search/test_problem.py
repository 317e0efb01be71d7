"""Jobs as people give them: batches, models and numbers read, refusals with what is near."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.planner.flops import model_flops_per_step
from fourfold.planner.jobs import Order, Precision, Recompute, Split, model_parameters
from fourfold.planner.machines.cluster import cluster
from fourfold.planner.search.problem import (
    Problem,
    asked_problem,
    parse_count,
    parse_limits,
    parse_precision,
    read_model,
    sequences_of,
)
from fourfold.recipe import Batch, Layout, Model, Pipeline, Recipe, Train, check, config_to_hf, preset


def llama(name: str = "llama3-8b", gpus: int = 8, **more: Any) -> Problem:
    given: dict[str, Any] = {"seq_len": 8192, "sequences": 128} | more
    return Problem.of(model=name, cluster=cluster("h100", gpus), **given)


class TestBatch:
    @pytest.mark.parametrize(
        ("text", "number"),
        [("8192", 8192), ("8K", 8192), ("128k", 131_072), ("16M", 16_777_216), ("0.5M", 524_288), ("4_096", 4096)],
    )
    def test_counts(self, text: str, number: int) -> None:
        assert parse_count(text) == number

    @pytest.mark.parametrize("text", ["", "many", "1.5", "3T", "16MB"])
    def test_counts_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"^--seq {text}: must be a whole number"):
            parse_count(text, flag="--seq")

    @pytest.mark.parametrize("text", ["0", "0K", "-1"])
    def test_counts_below_1(self, text: str) -> None:
        with pytest.raises(ValueError, match=f"^--batch-tokens {text}: must be at least 1$"):
            parse_count(text, flag="--batch-tokens")

    def test_batches_of_llama_3(self) -> None:
        """ISCA'25, Table 2: 16M tokens are 2,048 sequences of 8,192 or 128 of 131,072."""
        assert sequences_of(parse_count("16M"), 8192) == 2048
        assert sequences_of(parse_count("16M"), parse_count("128K")) == 128

    def test_part_of_a_sequence(self) -> None:
        """16,000,000 = 1,953.125 sequences of 8,192."""
        with pytest.raises(ValueError, match=r"multiple of seq = 8192; .* 15998976 \(1953 seq.*16007168 \(1954 seq"):
            sequences_of(16_000_000, 8192)

    def test_less_than_a_sequence(self) -> None:
        with pytest.raises(ValueError, match=r"nearest legal: 8192 \(1 sequences\)"):
            sequences_of(100, 8192)

    def test_tokens_or_sequences(self) -> None:
        machine = cluster("h100", 8)
        assert Problem.of(model="llama3-8b", cluster=machine, seq_len=8192, tokens=1 << 20).sequences == 128
        for given in ({}, {"tokens": 8192, "sequences": 1}):
            both: dict[str, Any] = {"model": "llama3-8b", "cluster": machine, "seq_len": 8192} | given
            with pytest.raises(ValueError, match="one of the two"):
                Problem.of(**both)


class TestModel:
    def test_huggingface(self, tmp_path: Path) -> None:
        config = preset("llama3.2-3b")
        (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
        assert read_model(tmp_path) == read_model(tmp_path / "config.json") == config

    @pytest.mark.parametrize(
        ("name", "hint"),
        [("llama3-80b", "nearest legal: llama3-8b"), ("/nowhere/config.json", "config.json that exists")],
    )
    def test_unknown(self, name: str, hint: str) -> None:
        with pytest.raises(ValueError, match=hint):
            read_model(name)

    def test_not_a_llama(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        for text, reason in (
            ("{", "is not JSON"),
            ("[]", "must hold a table"),
            ('{"model_type": "gpt2"}', "model_type"),
        ):
            file.write_text(text)
            with pytest.raises(ValueError, match=reason):
                read_model(file)

    def test_precisions(self) -> None:
        assert parse_precision("bf16") is parse_precision("bfloat16") is Precision.BF16
        with pytest.raises(ValueError, match="nearest legal: mxfp8"):
            parse_precision("mxfp9")


class TestColumns:
    def test_sizes_of_the_model(self) -> None:
        problem = llama("llama3-405b", gpus=16_384, sequences=2048)
        jobs = problem.jobs(
            **{"tp": 8, "cp": 1, "pp": 16, "dp": 128, "v": 8, "nc": 16, "micro_batch": 1},
            **{"order": Order.AFAB, "split": Split.ENDS_LIGHT, "zero": 2, "recompute": Recompute.NONE},
        )
        assert int(model_parameters(jobs)) == 405_853_388_800  # facts.md 5.1
        assert float(model_flops_per_step(jobs)) / problem.tokens == pytest.approx(2.524e12, rel=1e-3)  # facts.md 5.2
        assert int(jobs.micro_batches) == 16
        assert int(jobs.gpus) == 16_384

    def test_documents_make_fewer_pairs(self) -> None:
        whole, packed = llama(), llama(documents="mean=1024,dist=fixed")
        assert whole.base_columns()["pairs"] == 8192 * 8193 / 2
        # 8 documents of 1,024: 8 x 1,024 x 1,025 / 2 pairs.
        assert packed.base_columns()["pairs"] == pytest.approx(8 * 1024 * 1025 / 2, rel=0.01)


class TestRecipe:
    def test_of_a_recipe(self) -> None:
        recipe = Recipe(
            model=Model(preset="llama3-8b"),
            layout=Layout(tp=2, pp=2, dp=2),
            pipeline=Pipeline(virtual_stages=2, micro_batch=2),
            batch=Batch(sequences=16, seq_len=4096),
            train=Train(dtype="bfloat16"),
        )
        plan = check(recipe)
        problem = Problem.from_recipe(plan, cluster=cluster("a100", 8))
        assert (problem.seq_len, problem.sequences, problem.precision) == (4096, 16, Precision.BF16)
        assert problem.config == preset("llama3-8b")

    @pytest.mark.parametrize(
        ("limits", "hint"),
        [
            ({"virtual_stage": (8,)}, "nearest legal: virtual_stages"),
            ({"tp": ()}, "leaves no value"),
            ({"pp": (0,)}, "pp = 0: must be at least 1"),
            ({"schedule": ("interleave",)}, "nearest legal: interleaved"),
            ({"zero": (4,)}, "must be 1, 2 or 3"),
            ({"schedule": ("zb-h2",)}, "schedule = 'zb-h2': must be one of afab.*nearest legal: zb-h1"),
        ],
    )
    def test_limits_refused(self, limits: dict[str, tuple], hint: str) -> None:
        with pytest.raises(ValueError, match=hint):
            llama(limits=limits)

    def test_empty_job(self) -> None:
        with pytest.raises(ValueError, match="sequences = 0"):
            llama(sequences=0)


class TestAsked:
    """From what is typed on a command line."""

    def test_alone(self) -> None:
        job, known = asked_problem(
            model="llama3-8b", gpu="h100", gpus=8, seq="8K", batch_tokens="1M", dtype="fp8", fix=("tp=1,2", "zero=1")
        )
        assert known is None
        assert (job.seq_len, job.sequences, job.gpus, job.precision) == (8192, 128, 8, Precision.FP8)
        assert job.limits == {"tp": (1, 2), "zero": (1,)}

    def test_what_is_missing(self) -> None:
        with pytest.raises(ValueError, match=r"--gpus, --seq, --batch-tokens: needed, or a recipe"):
            asked_problem(model="llama3-8b", gpu="h100")

    def test_recipe(self, tmp_path: Path) -> None:
        file = tmp_path / "r.toml"
        file.write_text(
            '[model]\npreset = "llama3-8b"\n[layout]\ndp = 8\n[batch]\nsequences = 16\nseq_len = 4096\n'
            '[train]\ndtype = "bfloat16"\n'
        )
        with pytest.raises(ValueError, match=r"--gpu: needed, or cluster\.gpu in the recipe"):
            asked_problem(file)
        job, known = asked_problem(file, gpu="a100")
        assert known is not None
        assert (job.gpus, job.seq_len, job.sequences, job.config) == (8, 4096, 16, preset("llama3-8b"))

    @pytest.mark.parametrize(
        "more", [{"gpus": 16}, {"seq": "8K", "batch_tokens": "1M"}, {"dtype": "fp32"}, {"model": "llama3.2-3b"}]
    )
    def test_another_job_than_the_recipe(self, tmp_path: Path, more: dict[str, Any]) -> None:
        file = tmp_path / "r.toml"
        file.write_text(
            '[model]\npreset = "llama3-8b"\n[layout]\ndp = 8\n[batch]\nsequences = 16\nseq_len = 4096\n'
            '[train]\ndtype = "bfloat16"\n'
        )
        job, own = asked_problem(file, gpu="a100", **more)
        assert own is not None
        if "gpus" in more:
            ranks = "tp 1 x cp 1 x pp 1 x dp 8"
            assert own.unjudged == f"{ranks} is for 8 GPUs, and the job has 16"
        else:
            assert (own.unjudged, own.dp) == (None, 8)
            assert int(own.job(job).gpus) == 8

    def test_recipe_that_is_not_legal_for_the_job(self, tmp_path: Path) -> None:
        file = tmp_path / "r.toml"
        file.write_text('[model]\npreset = "llama3-8b"\n[layout]\ndp = 8\n[batch]\nsequences = 16\nseq_len = 4096\n')
        _, own = asked_problem(file, gpu="a100", seq="8K", batch_tokens="32K")
        assert own is not None
        assert "not legal for this job: " in str(own.unjudged)
        assert "batch.sequences = 4" in str(own.unjudged)


class TestLimitsAsTyped:
    def test_short_names(self) -> None:
        """As tables print them."""
        assert parse_limits(["v=2,4", "mb=1"]) == {"virtual_stages": (2, 4), "micro_batch": (1,)}

    @pytest.mark.parametrize("texts", [["tp=2", "tp=4"], ["v=2", "virtual_stages=4"]])
    def test_given_twice(self, texts: list[str]) -> None:
        with pytest.raises(ValueError, match=r"is given twice; for one of several values: --fix \w+=2,4"):
            parse_limits(texts)

    def test_words_for_numbers(self) -> None:
        with pytest.raises(ValueError, match="tp = x: must be whole numbers"):
            llama(limits=parse_limits(["tp=x"]))

    def test_gpus_and_models_as_typed(self) -> None:
        job, _ = asked_problem(model="llama3-8b", gpu="h100", gpus="16K", seq="8K", batch_tokens="16M")
        assert job.gpus == 16_384
        with pytest.raises(ValueError, match="nearest legal: llama3-8b"):
            asked_problem(model="LLAMA3-8B", gpu="h100", gpus=8, seq="8K", batch_tokens="1M")
