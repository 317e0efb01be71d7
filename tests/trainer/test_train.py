"""`fourfold train` from recipe to exported model: what it writes, and that it is what the plan and the model say."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaForCausalLM

from fourfold.data.sources import prepare_sources
from fourfold.data.stream import Position
from fourfold.layout.actions import RECEIVES, Action, Kind
from fourfold.model import Batch, Llama, huggingface
from fourfold.parallel import connect
from fourfold.recipe import Recipe, RunPlan, check, load
from fourfold.recipe.schema import Layout, Pipeline
from fourfold.trainer import loop
from fourfold.trainer.batches import Loader
from fourfold.trainer.prepare import Prepared
from fourfold.trainer.ranks import fork_ranks
from fourfold.trainer.weights import initial_weights
from tests.trainer.runs import has_steps, metrics, train, wait_until, write_recipe

KEYS = {
    "step", "loss", "grad_norm", "lr", "tokens", "samples", "valid_tokens", "skipped", "tokens_per_second",
    "step_seconds", "data_seconds", "forward_backward_seconds", "optimizer_seconds", "checkpoint_seconds",
    "garbage_seconds", "other_seconds", "idle_share", "idle_share_max", "attention_pairs", "model_flops_per_second",
    "mfu_6p", "mfu_attention", "peak_memory_bytes",
}  # fmt: skip


def plain_loss(plan: RunPlan, folder: Path, model: Path) -> float:
    """The loss of an exported model on the global batch of the first step, by the plain model in one process."""
    plain = Llama(plan.config)
    plain.load_state_dict(huggingface.load(model, plan.config))
    data = msgspec.structs.replace(plan.recipe.data, source=str(folder / "text"))
    tokens = prepare_sources(data, folder / "plain", vocab_size=261, seq_len=plan.recipe.batch.seq_len)
    whole = check(on_one_rank(plan.recipe))
    total, count = 0.0, 0
    with torch.no_grad():
        for batch, _ in Loader(tokens.open_stream(), whole, 0).micro_batches(Position(), whole.phases[0]):
            assert batch.labels is not None
            total += plain(batch.tokens, batch).item()
            count += int((batch.labels >= 0).sum())
    return total / count


def on_one_rank(recipe: Recipe) -> Recipe:
    """The same batches, in one group."""
    return msgspec.structs.replace(recipe, layout=Layout(), pipeline=Pipeline())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one name: a real process on tp2 pp2, and one on dp2 cp2 that goes on from its model."""
    folder = tmp_path_factory.mktemp("train")
    write_recipe(folder)
    settings = ["layout.tp=2", "layout.pp=2", "pipeline.virtual_stages=2", "output.action_log_every=2"]
    args = [arg for setting in settings for arg in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "fourfold.cli", "train", "tiny.toml", *args],
        cwd=folder, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "stdout").write_text(done.stdout)
    again = train(folder, "layout.dp=2", "layout.cp=2", "model.path=runs/tiny/model", "model.vocab_multiple=16")
    assert again.code == 0, again.err
    assert "Run folder: runs/tiny-2" in again.out
    return folder


@pytest.fixture(scope="module")
def plan(folder: Path) -> RunPlan:
    """Of the first run, read from its own copy of the recipe."""
    return check(load(folder / "runs" / "tiny" / "recipe.toml"))


def test_what_is_printed(folder: Path) -> None:
    out = (folder / "stdout").read_text()
    order = ["Plan for tiny", "bubble", "ZeRO-1: bs = 4", "unigram entropy", "step 1/3", "step 3/3", "Finished after 3"]
    places = [out.index(part) for part in order]
    assert places == sorted(places)
    assert out.count("step ") >= 3
    assert out.count("Plan for tiny") == 1  # forked ranks do not repeat what was in the buffer


def test_metrics_have_one_line_per_step(folder: Path) -> None:
    for name in ("tiny", "tiny-2"):
        lines = metrics(folder / "runs" / name)
        assert [line["step"] for line in lines] == [1, 2, 3]
        for line in lines:
            assert line.keys() == KEYS
            assert line["tokens"] == 256 * line["step"]
            assert 200 < line["valid_tokens"] <= 256
            assert line["tokens_per_second"] == pytest.approx(256 / line["step_seconds"])
            assert 10**7 < line["peak_memory_bytes"] < 10**10
            assert 0 < line["grad_norm"] < 100
        assert [line["lr"] for line in lines] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    losses = [line["loss"] for line in metrics(folder / "runs" / "tiny")]
    assert 5.4 < losses[0] < 5.8  # ln 261 = 5.56
    assert losses == sorted(losses, reverse=True)


def test_the_recipe_of_a_run_makes_the_same_run(folder: Path, plan: RunPlan) -> None:
    settings = ["layout.tp=2", "layout.pp=2", "pipeline.virtual_stages=2", "output.action_log_every=2"]
    assert plan.recipe == load(folder / "tiny.toml", settings)


def test_the_action_log_is_the_plan_carried_out(folder: Path, plan: RunPlan) -> None:
    done: dict[tuple[str, int, int], int] = {}
    received = []
    files = sorted((folder / "runs" / "tiny" / "actions").iterdir())
    assert [file.name for file in files] == [f"rank-{rank:05d}.jsonl" for rank in range(4)]
    for rank, file in enumerate(files):
        every = [json.loads(line) for line in file.read_text().splitlines()]
        assert all(list(line)[:5] == ["step", "action", "start", "end", "wait"] for line in every)
        assert {line["step"] for line in every} == {2}
        # What is no action stands around them. Nothing overlaps, and nobody waits for longer than it takes.
        words = [line["action"] if line["action"].isalpha() else "" for line in every]
        around = [word for word, _ in groupby(words)]
        assert around == ["LOAD", "CHECK", "COUNT", "", "FLUSH", "SUM", "NORM", "STEP", "MEET"]  # twice MEET
        assert words[-2:] == ["MEET", "MEET"]
        assert all(a["end"] <= b["start"] for a, b in pairwise(every))
        keys = ("wait", "tp", "cp", "fsdp")
        assert all(0 <= sum(line.get(key, 0) for key in keys) <= line["end"] - line["start"] for line in every)
        assert all(line["cpu"] > 0 for line in every)
        lines = [line for line, word in zip(every, words, strict=True) if not word]
        computing = [line for line in lines if re.fullmatch(r"\d[FB]\d", line["action"])]
        assert len(computing) == 2 * 4 * 2
        assert all(line["tp"] > 0 for line in computing)
        assert not any("cp" in line for line in lines)
        place = plan.grid.coordinates(rank)
        actions = [Action.parse(line["action"]) for line in lines]
        assert tuple(actions) == plan.schedule.actions[place.pp]
        previous = 0
        for action, line in zip(actions, lines, strict=True):
            assert previous <= line["start"] <= line["end"]
            assert 0 <= line["wait"] <= line["end"] - line["start"]
            previous = line["end"]
            if action.kind in (Kind.FORWARD, Kind.BACKWARD):
                done[action.kind.value, action.stage, place.tp * 1000 + action.micro_batch] = line["end"]
            if action.kind in RECEIVES:
                direction, stage, micro_batch = action.message
                received.append((direction, stage, action.stage, place.tp * 1000 + micro_batch))
    # A computation that needs another stage's result ends after that one's end. All ranks read one clock.
    assert len(received) == 2 * 4 * 2 * 3  # tp ranks, micro-batches, directions, borders between stages
    for direction, producer, consumer, key in received:
        assert done[direction, producer, key] < done[direction, consumer, key]


def test_the_model_is_whole_and_transformers_computes_the_same_loss(folder: Path, plan: RunPlan) -> None:
    directory = folder / "runs" / "tiny" / "model"
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
    stored = load_file(directory / "model.safetensors")
    assert stored["model.embed_tokens.weight"].shape == (261, 32)  # the padding of the vocabulary is cut off
    assert stored["lm_head.weight"].shape == (261, 32)
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plain = Llama(plan.config)
    plain.load_state_dict(huggingface.load(directory, plan.config))
    tokens = torch.randint(261, (64,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = plain(tokens, Batch.from_rows(tokens, [[64]])).item() / 63
        assert theirs(tokens[None], labels=tokens[None]).loss.item() == pytest.approx(ours, rel=1e-5)


def test_a_run_from_exported_weights_begins_where_the_other_ended(folder: Path, plan: RunPlan) -> None:
    begins = metrics(folder / "runs" / "tiny-2")[0]["loss"]
    assert begins == pytest.approx(plain_loss(plan, folder, folder / "runs" / "tiny" / "model"), rel=1e-5)
    assert begins < metrics(folder / "runs" / "tiny")[-1]["loss"]


def test_a_tied_model_and_its_tokenizer_are_exported_whole(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    settings = ("model.tied=true", "optimizer.name=sgd", "train.steps=2", "data.tokenizer=bpe:261")
    assert train(tmp_path, *settings, "output.name=one").code == 0
    assert train(tmp_path, *settings, "output.name=three", "layout.pp=3").code == 0
    runs = tmp_path / "runs"
    one = load_file(runs / "one" / "model" / "model.safetensors")
    three = load_file(runs / "three" / "model" / "model.safetensors")
    assert one.keys() == three.keys()
    assert "lm_head.weight" not in one
    assert all(torch.allclose(one[name], three[name], rtol=1e-5, atol=1e-6) for name in one)
    assert json.loads((runs / "three" / "model" / "config.json").read_text())["tie_word_embeddings"] is True
    tokenizer: Any = AutoTokenizer.from_pretrained(runs / "three" / "model")
    assert tokenizer.decode(tokenizer("the cat slept")["input_ids"]) == "the cat slept"


def test_every_rank_knows_the_same_loss(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    recipe = load(tmp_path / "tiny.toml", ["layout.pp=2", "layout.dp=2", "train.steps=2", "train.sanity_steps=0"])
    plan = check(recipe)
    data = msgspec.structs.replace(recipe.data, source=str(tmp_path / "text"))
    run = Prepared(
        plan, prepare_sources(data, tmp_path, vocab_size=261, seq_len=64), tmp_path, new=False, resumes=False
    )
    weights = initial_weights(plan)

    def work(rank: int) -> loop.Outcome:
        return loop.train(run, groups=connect(plan.grid, "cpu"), weights=weights, device=torch.device("cpu"))

    outcomes = fork_ranks(4, work, timeout=60)
    known = {
        (o.last.loss, o.last.grad_norm, o.last.valid_tokens, o.last.peak_memory_bytes, o.stopped_by) for o in outcomes
    }
    assert len(known) == 1
    assert len(metrics(tmp_path)) == 2


def test_torchrun_joins_and_computes_the_same(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    settings = ("layout.tp=2", "train.steps=40000", "optimizer.min_lr_ratio=1.0")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "fourfold.cli", "train", "tiny.toml"]
    joined = subprocess.Popen(
        [*command, *(arg for s in (*settings, "output.name=joined") for arg in ("--set", s))],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert train(tmp_path, *settings[:1], "train.steps=3", settings[2]).code == 0
        wait_until(lambda: has_steps(tmp_path / "runs" / "joined", 3)() or joined.poll() is not None, 100)
        os.killpg(joined.pid, signal.SIGINT)  # Ctrl-C
        out, err = joined.communicate(timeout=60)
    finally:
        joined.kill()
    assert out.count("Plan for joined") == 1
    assert "Stopped after" in out, err
    assert list((tmp_path / "runs" / "joined" / "checkpoints").glob("step-*"))
    forked, found = (metrics(tmp_path / "runs" / name) for name in ("tiny", "joined"))
    for a, b in zip(forked, found, strict=False):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)


def test_a_number_of_processes_that_is_not_the_layouts_is_an_error(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    for rank, said in (("0", 1), ("1", 0)):
        env = {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        done = train(tmp_path, "layout.tp=2", env=env)
        assert done.code == 2
        assert done.err.count("error: layout: tp x cp x pp x dp = 2 must equal the number of processes, 3") == said
        assert len(done.err.splitlines()) == said
    assert not (tmp_path / "runs").exists()
