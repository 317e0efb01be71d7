"""Saving beside the training and going on: what is saved, when, and what becomes of it under other settings."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fourfold.recipe import RecipeError
from fourfold.trainer.checkpoint import (
    CheckpointStore,
    TrainState,
    load_checkpoint,
    load_newest,
    open_weights,
)
from fourfold.trainer.checkpoint.files import LocalFiles
from fourfold.trainer.ranks import RankFailure, fork_ranks
from tests.parallel.harness import Case
from tests.trainer.runs import wait_until
from tests.trainer.saves import STATE, Parts, Rank, assert_same, build, merge, plan_of, without_padding

SMALL = Case(nmb=2, layers=2)
PAIR = Case(tp=2, nmb=2, layers=2)
SGD = {"name": "sgd", "momentum": 0.9, "lr": 0.05}


def at(step: int) -> TrainState:
    return TrainState(step, 100 * step, {"samples": step}, step, 0)


def load(own: Rank, place: Path | str) -> tuple[TrainState | None, list[str]]:
    """Loads the newest; returns what was said, too."""
    said: list[str] = []
    return load_newest(own.model, own.optimizer, CheckpointStore(place), own.groups, say=said.append), said


@pytest.mark.parametrize(("settings", "interruptions"), [({}, 3), (SGD, 1)], ids=["adamw", "sgd"])
def test_going_on_is_bitwise_as_if_never_interrupted(
    tmp_path: Path, settings: dict[str, Any], interruptions: int
) -> None:
    plan, last = plan_of(PAIR, settings), 2 * (interruptions + 1)

    def draw(own: Rank, first: int, last: int) -> list[tuple[float, float]]:
        """Losses of steps, and random numbers as dropout would take them."""
        return [(own.train(step, step + 1)[0], torch.rand(()).item()) for step in range(first, last)]

    def uninterrupted(rank: int) -> tuple[Parts, list[tuple[float, float]]]:
        torch.manual_seed(5 + rank)
        own = build(PAIR, plan=plan)
        seen = draw(own, 0, last)
        return own.parts(), seen

    def interrupted(rank: int) -> tuple[Parts, list[tuple[float, float]]]:
        torch.manual_seed(5 + rank)
        own = build(PAIR, plan=plan)
        state, _ = load(own, tmp_path)
        step = state.step if state else 0
        saver = own.saver(CheckpointStore(tmp_path), keep=1)
        seen = draw(own, step, step + 1)
        saver.save(at(step + 1))
        seen += draw(own, step + 1, step + 2)  # while it is written
        saver.save(at(step + 2))
        saver.wait()
        assert saver.failure() is None
        return own.parts(), seen

    def weights_only(rank: int) -> list[float]:
        read = open_weights(CheckpointStore(tmp_path).complete()[-1], plan.config)
        return build(PAIR, plan=plan, weights=lambda name, shape, slices: read(name, slices)).train(last - 2, last)

    whole = fork_ranks(2, uninterrupted, timeout=60)
    pieces = []
    for turn in range(interruptions + 1):
        if turn == interruptions:
            without_moments = fork_ranks(2, weights_only, timeout=60)[0]
        pieces.append(fork_ranks(2, interrupted, timeout=60))
    for rank in range(2):
        assert [seen for piece in pieces for seen in piece[rank][1]] == whole[rank][1]
    assert_same(merge([parts for parts, _ in pieces[-1]]), merge([parts for parts, _ in whole]))
    losses = [loss for loss, _ in whole[0][1]]
    assert without_moments[0] == losses[-2]  # the same weights
    assert without_moments[1] != losses[-1]  # but not the same step
    assert [c.step for c in CheckpointStore(tmp_path).complete()] == [last]


def test_what_is_saved_is_the_state_at_the_call_however_slow_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, write = threading.Event(), LocalFiles.write

    def slow_write(self: LocalFiles, name: str, parts: Any) -> None:
        disk.wait()
        write(self, name, parts)

    def work(rank: int) -> None:
        own = build(SMALL)
        own.train(0, 2)
        saver = own.saver(CheckpointStore(tmp_path))
        monkeypatch.setattr(LocalFiles, "write", slow_write)
        stall = saver.save(at(2))
        assert stall < 1
        wanted, random = merge([own.parts()]), torch.get_rng_state()
        torch.rand(7)
        own.train(2, 4)
        assert CheckpointStore(tmp_path).complete() == []
        threading.Timer(0.3, disk.set).start()
        assert saver.save(at(4)) > 0.25  # it waits for the first
        saver.wait()
        first, second = CheckpointStore(tmp_path).complete()
        later = merge([own.parts()])
        assert load_checkpoint(second, own.model, own.optimizer) == at(4)
        assert_same(merge([own.parts()]), later)
        assert load_checkpoint(first, own.model, own.optimizer) == at(2)
        assert_same(merge([own.parts()]), wanted)
        assert torch.equal(torch.get_rng_state(), random)

    fork_ranks(1, work, timeout=60)


def test_saving_and_loading_need_no_other_rank_and_no_rank_holds_more_than_its_part(tmp_path: Path) -> None:
    """Ranks save one after the other, the next when the one before has written: a collective would never end."""
    case = Case(tp=2, pp=2, nmb=2, layers=2)

    def work(rank: int) -> None:
        own = build(case)
        own.train(0, 1)
        before = merge_own(own)
        saver = own.saver(CheckpointStore(tmp_path))
        partial = Path(CheckpointStore(tmp_path).place)
        wait_until(lambda: len(list(partial.glob("*/rank-*.json"))) == rank)
        saver.save(at(1))
        saver.wait()
        if rank == 0:  # which publishes when all have written
            (tmp_path / "published").touch()
        wait_until((tmp_path / "published").exists)
        wait_until(lambda: len(list(tmp_path.glob("loaded*"))) == rank)
        (checkpoint,) = CheckpointStore(tmp_path).complete()
        own.optimizer.state.clear()
        load_checkpoint(checkpoint, own.model, own.optimizer)
        (tmp_path / f"loaded{rank}").touch()
        assert_same(merge_own(own), before)

    def merge_own(own: Rank) -> dict[str, torch.Tensor]:
        return {name: value for name, _, _, value in own.parts()}

    fork_ranks(4, work, timeout=60)
    (checkpoint,) = CheckpointStore(tmp_path).complete()
    index = checkpoint.index()
    for rank in range(4):
        with safe_open(Path(checkpoint.path) / f"rank-{rank:05d}.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                whole, held = index.tensors[name], file.get_slice(name).get_shape()
                assert len(whole.shape) == 1 or held != list(whole.shape), name  # TP cuts every matrix
    assert sum(c.end - c.begin for t in index.tensors.values() for c in t.chunks) == 4 * sum(
        torch.Size(t.shape).numel() for t in index.tensors.values()
    )


def test_only_plain_files_are_written(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"a": 1}')

    def work(rank: int) -> None:
        own = build(PAIR)
        own.train(0, 1)
        own.save(tmp_path / "c", data={"source": [1, 2]}, tokenizer_files=[tokenizer])

    fork_ranks(2, work, timeout=60)
    (checkpoint,) = CheckpointStore(tmp_path / "c").complete()
    folder = Path(checkpoint.path)
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "config.json", "index.json", "rank-00000.json", "rank-00000.safetensors", "rank-00001.json",
        "rank-00001.safetensors", "recipe.toml", "state.json", "tokenizer/tokenizer.json",
    ]  # fmt: skip
    for file in folder.rglob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert list(opened.keys())
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    state = checkpoint.state()
    assert (state.step, state.tokens, state.position, state.data) == (
        STATE.step, STATE.tokens, STATE.position, {"source": [1, 2]},
    )  # fmt: skip
    assert state.layout == {"tp": 2, "cp": 1, "pp": 1, "dp": 1, "virtual_stages": 1, "zero": 1}
    assert state.versions.keys() == {"fourfold", "torch"}


def test_damaged_checkpoints_are_named_and_the_newest_good_one_is_used(tmp_path: Path) -> None:
    def save(rank: int) -> None:
        own = build(PAIR)
        saver = own.saver(CheckpointStore(tmp_path), asynchronous=False)
        for step in range(1, 5):
            own.train(step - 1, step)
            saver.save(at(step))
            own.groups.barrier()

    def resume(rank: int) -> tuple[TrainState | None, list[str]]:
        own = build(PAIR)
        return load(own, tmp_path)

    assert fork_ranks(2, resume, timeout=60) == [(None, []), (None, [])]
    fork_ranks(2, save, timeout=60)
    data = tmp_path / "step-00000004" / "rank-00001.safetensors"
    content = bytearray(data.read_bytes())
    content[-3] ^= 1
    data.write_bytes(content)
    (tmp_path / "step-00000003" / "index.json").unlink()
    (tmp_path / "step-00000002" / "state.json").write_text("{}")
    (tmp_path / "step-00000009.1a-1.partial").mkdir()
    (state, said), (other, nothing) = fork_ranks(2, resume, timeout=60)
    assert state == other == at(1)
    assert nothing == []
    expected = [
        "step-00000003 was never finished", "step-00000009.1a-1.partial was never finished",
        "step-00000004 is damaged: rank-00001.safetensors does not have the checksum of",
        "step-00000002 is damaged: state.json has 2 bytes instead of", "Going on from",
    ]  # fmt: skip
    assert len(said) == len(expected)
    assert all(part in line for part, line in zip(expected, said, strict=True)), said
    (tmp_path / "step-00000001" / "rank-00000.json").unlink()
    with pytest.raises(RankFailure, match=r"no checkpoint in .* is whole; the newest: .*step-00000004"):
        fork_ranks(2, resume, timeout=60)


def test_freezing_and_thawing_and_another_optimizer(tmp_path: Path) -> None:
    """Frozen weights have no moments; weights newly trained begin with none, and so does another optimizer."""
    frozen = Case(nmb=2, layers=2, freeze=("layers.0", "tok_embeddings"))

    def work(rank: int) -> None:
        own = build(frozen)
        own.train(0, 2)
        own.save(tmp_path)
        saved = merge([own.parts()])
        assert (
            "optimizer.exp_avg.layers.0.ffn_norm.weight" not in CheckpointStore(tmp_path).complete()[0].index().tensors
        )

        thawed = build(SMALL, seed=99)
        state, said = load(thawed, tmp_path)
        assert state == STATE
        assert "has no optimizer state for 10 weights, such as tok_embeddings.weight" in said[-1]
        found = merge([thawed.parts()])
        assert_same(found, saved)
        thawed.train(2, 3)
        counts = {name: value.item() for name, value in merge([thawed.parts()]).items() if name.startswith("step.")}
        assert counts["step.layers.0.ffn_norm.weight"] == 1
        assert counts["step.layers.1.ffn_norm.weight"] == 3

        again = build(frozen, seed=99)
        load(again, tmp_path)
        assert_same(merge([again.parts()]), saved)

        other = build(SMALL, plan=plan_of(SMALL, SGD), seed=99)
        _, said = load(other, tmp_path)
        assert "has no optimizer state for 21 weights" in said[-1]
        assert_same(merge([other.parts()]), {n: v for n, v in saved.items() if n.startswith("model.")})
        other.train(2, 3)

        plain = build(SMALL, plan=plan_of(SMALL, SGD | {"momentum": 0.0}))
        plain.train(0, 1)
        plain.save(tmp_path / "plain")
        _, said = load(plain, tmp_path / "plain")
        assert len(said) == 1

    fork_ranks(1, work, timeout=60)


def test_settings_of_the_optimizer_are_the_recipes(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        own = build(SMALL)
        own.train(0, 1)
        own.save(tmp_path)
        settings = {"lr": 0.5, "weight_decay": 0.7, "betas": (0.1, 0.2), "eps": 1e-3}
        new = build(SMALL, plan=plan_of(SMALL, settings))
        before = [{k: v for k, v in group.items() if k != "params"} for group in new.optimizer.param_groups]
        load(new, tmp_path)
        after = [{k: v for k, v in group.items() if k != "params"} for group in new.optimizer.param_groups]
        assert before == after
        assert {group["lr"] for group in after} == {0.5}
        assert {group["betas"] for group in after} == {(0.1, 0.2)}

    fork_ranks(1, work, timeout=60)


def test_the_padding_of_the_vocabulary_may_change_and_the_model_may_not(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[Parts, Parts]:
        own = build(PAIR)  # 272 rows of 261
        own.train(0, 2)
        own.save(tmp_path)
        saved = own.parts()
        wide = build(PAIR, plan=plan_of(PAIR, vocab_multiple=48), seed=99)  # 288 rows
        load(wide, tmp_path)
        found = wide.parts()
        wide.train(2, 3)
        with pytest.raises(RecipeError, match=r"model\.ffn_dim = 64: must be that of the checkpoint .*step-00000002"):
            load(build(PAIR, plan=plan_of(PAIR, ffn_dim=64)), tmp_path)
        read = open_weights(CheckpointStore(tmp_path).complete()[0], wide.plan.config)
        part = read("output.weight", (slice(250, 288), slice(3, 32)))
        assert part.shape == (38, 29)
        assert not part[11:].any()
        return saved, found

    saved, found = (merge(list(parts)) for parts in zip(*fork_ranks(2, work, timeout=60), strict=True))
    assert found["model.output.weight"].shape == (288, 32)
    assert_same(without_padding(found, 261), without_padding(saved, 261))
    read = open_weights(CheckpointStore(tmp_path).complete()[0], plan_of(PAIR).config)
    assert torch.equal(read("output.weight", (slice(250, 272), slice(3, 32))), saved["model.output.weight"][250:, 3:])


def test_random_states_of_ranks_that_were_not_there(tmp_path: Path) -> None:
    def save(rank: int) -> torch.Tensor:
        torch.manual_seed(77)
        torch.rand(3)
        build(SMALL).save(tmp_path)
        return torch.rand(4)

    def resume(rank: int) -> torch.Tensor:
        torch.manual_seed(int(time.time_ns() % 2**31))
        load(build(PAIR), tmp_path)
        return torch.rand(4)

    (saved,) = fork_ranks(1, save, timeout=60)
    once, twice = fork_ranks(2, resume, timeout=60), fork_ranks(2, resume, timeout=60)
    assert torch.equal(once[0], saved)
    assert not torch.equal(once[1], saved)
    assert torch.equal(once[1], twice[1])


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_urls(tmp_path: Path, kind: str) -> None:
    """On an object store: the same protocol, with index.json last instead of a rename."""
    case = Case(nmb=2, layers=2, dtype="bfloat16") if kind == "memory" else PAIR
    place = "memory://runs/a" if kind == "memory" else f"local://{tmp_path}/runs/a"

    def work(rank: int) -> None:
        own = build(case)
        saver = own.saver(CheckpointStore(place), keep=2)
        for step in range(1, 5):
            own.train(step - 1, step)
            saver.save(at(step))
        saver.wait()
        own.groups.barrier()
        store = CheckpointStore(place)
        assert [c.step for c in store.complete()] == [3, 4]
        assert len([name for name in store.files.names() if name.startswith("step-")]) == 2
        new = build(case, seed=99)
        state, said = load(new, place)
        assert state == at(4)
        assert len(said) == (1 if rank == 0 else 0)
        found, wanted = ({name: value for name, _, _, value in each.parts()} for each in (new, own))
        assert_same(found, wanted)
        assert {value.dtype for value in found.values()} == {torch.float32}

    fork_ranks(case.world, work, timeout=60)
