"""benchmarks/gpu.sh at tiny sizes on the CPU: that it runs from end to end, and that its figures are what they say."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.layout import Run, describe, shards
from fourfold.model import Batch, attention

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from gpu import older_torch  # noqa: E402
from gpu.context import document_rows  # noqa: E402
from gpu.kernels import BOUNDS, Kernel, dense_attention, shard_errors  # noqa: E402
from gpu.part import Part, run_parts  # noqa: E402
from gpu.sizes import TINY  # noqa: E402
from gpu.words import table, wrong  # noqa: E402

PEAK = 0.2  # TFLOP/s
CPU = torch.device("cpu")
ROWS = [[5, 20, 1], [14]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """The whole script, once."""
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    done = call("--tiny", "--out", str(out), "--peak", str(PEAK), "--seconds", "1000")  # nothing is left out
    return done, json.loads(out.read_text())


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [str(ROOT / "benchmarks" / "gpu.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)


def test_whole_script_at_tiny_sizes(finished: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    done, found = finished
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(found) == ["machine", "kernels", "memory", "training", "context"]
    for part in found.values():
        assert part["items"]
        assert not part["left_out"]
        assert not part["failures"]
    assert len(found["memory"]["items"]) == 5
    assert len(found["training"]["items"]) == 10
    for heading in ("kernels against a dense fp64 oracle", "a step of 2 layers of dim 64", "CP ranks' attention"):
        assert heading in done.stdout


def test_kernels_are_within_their_bounds(finished: tuple[Any, dict[str, Any]]) -> None:
    items = finished[1]["kernels"]["items"]
    assert {item["kernel"] for item in items} == {"SDPA, bf16", "SDPA, fp32", "Flex, fp32, forward"}
    for item in items:
        bound = 1e-6 if "fp32" in item["kernel"] else 1e-2
        assert 0 < max(item["errors"].values()) < bound
        assert set(item["errors"]) == ({"out"} if "forward" in item["kernel"] else {"out", "dq", "dk", "dv"})


def test_every_variant_made_the_same_step(finished: tuple[Any, dict[str, Any]]) -> None:
    items = finished[1]["training"]["items"]
    ours = [item for item in items if item["stack"] == "Fourfold"]
    assert all(item["same_work"] for item in items)
    # What is made again is so bit for bit; PyTorch's own model only rounds otherwise.
    for compiled in (False, True):
        assert len({(item["loss"], item["norm"]) for item in ours if item["compiled"] is compiled}) == 1
    assert items[0]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-4)
    assert math.log(256) < items[0]["loss"] < math.log(256) + 0.2  # of tokens that nothing tells


def test_rates_and_both_mfus_by_hand(finished: tuple[Any, dict[str, Any]]) -> None:
    """Two layers of width 64, 4 heads and 2 of keys, 16 channels each, feed-forward 128, 256 entries; 2 x 64 tokens."""
    part = finished[1]["training"]
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    head = 64 * 256 + 64
    tokens, pairs = 2 * 64, 2 * 64 * 65 // 2
    flops_6p = 6 * (2 * layer + head + 256 * 64) * tokens
    flops_attention = 6 * (2 * layer + head) * tokens + 12 * 2 * 64 * pairs
    assert (part["facts"]["flops_6p"], part["facts"]["flops_attention"]) == (flops_6p, flops_attention)
    for item in part["items"]:
        halves = sorted(step["forward_backward"] + step["update"] for step in item["steps"])
        assert item["step_seconds"] == pytest.approx(halves[1])  # the median of three
        assert item["tokens_per_second"] == pytest.approx(tokens / halves[1])
        assert item["mfu_6p"] == pytest.approx(flops_6p / halves[1] / (PEAK * 1e12))
        assert item["mfu_attention"] == pytest.approx(flops_attention / halves[1] / (PEAK * 1e12))


def test_relative_hfu_by_hand(finished: tuple[Any, dict[str, Any]]) -> None:
    items = finished[1]["context"]["items"]
    alone = {item["seq_len"]: item["rows"][0] for item in items if item["cp"] == 1}
    assert set(alone) == {128, 256}
    for item in (item for item in items if item["cp"] > 1):
        n, cp = item["seq_len"], item["cp"]
        for way in ("forward", "both"):
            shares = [
                100 * (sum(row["pairs"]) / cp / max(row[way])) / (n * (n + 1) / 2 / alone[n][way][0])
                for row in item["rows"]
            ]
            assert item["relative_hfu"][way] == pytest.approx(sum(shares) / len(shares))
        for row in item["rows"]:
            assert len(row["pairs"]) == len(row["forward"]) == cp
            if item["mask"] == "causal":
                assert sum(row["pairs"]) == n * (n + 1) / 2
            if item["split"] == "per_document":  # even but for the rest of divisions
                assert max(row["pairs"]) - min(row["pairs"]) < n


def test_predicted_memory(finished: tuple[Any, dict[str, Any]]) -> None:
    items = {item["recompute"]: item for item in finished[1]["memory"]["items"]}
    weights = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 2 * 64 * 256
    for item in items.values():
        held = item["dry_run"]["held"]
        assert (held["master weights"], held["optimizer"]) == (4 * weights, 8 * weights)
        assert held["gathered weights"] == 2 * weights
        assert sum(held.values()) == item["dry_run"]["bytes"]
        assert sum(item["planner"]["held"].values()) == pytest.approx(item["planner"]["bytes"])
    kept = {kind: item["planner"]["held"]["activations"] for kind, item in items.items()}
    assert kept["full"] < kept["selective"] < min(kept["norms"], kept["swiglu"]) < kept["none"]


def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = call("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 1
    assert not done.stdout
    assert len(done.stderr.strip().splitlines()) == 1
    assert "CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())


# --- the oracle ---


def test_oracle_is_attention_written_out() -> None:
    documents, positions = (torch.from_numpy(x) for x in describe(ROWS))
    for shard in shards(ROWS, cp=2, multiple_of=8):
        q = torch.randn(len(shard.index), 4, 8, dtype=torch.float64)
        k, v = (torch.randn(40, 2, 8, dtype=torch.float64) for _ in range(2))
        wanted = torch.zeros_like(q)
        for place, token in enumerate(shard.index.tolist()):
            if token < 0:
                continue
            seen = [t for t in range(40) if documents[t] == documents[token] and positions[t] <= positions[token]]
            for head in range(4):
                weights = torch.softmax(k[seen, head // 2] @ q[place, head] / 8**0.5, 0)
                wanted[place, head] = weights @ v[seen, head // 2]
        torch.testing.assert_close(dense_attention((q, k, v), ROWS, shard), wanted)


def leaks(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """The second document of the first row sees the last token of the first, too."""
    runs = [
        Run(r.query_start, r.query_length, r.key_start - 1, r.key_length + 1) if i else r
        for i, r in enumerate(batch.runs)
    ]
    leaking = Batch(
        tokens=batch.tokens, labels=None, positions=batch.positions, documents=batch.documents, runs=tuple(runs)
    )
    return attention(q, k, v, leaking)


def loses_a_gradient(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """The first key is taken for a constant."""
    return attention(q, torch.cat((k[:1].detach(), k[1:])), v, batch)


def forgets_padding(q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """What nobody asked for is not zero."""
    out = attention(q, k, v, batch)
    return torch.cat((out[:-1], out[-1:] + 1))


@pytest.mark.parametrize(
    ("attend", "what"), [(leaks, "out"), (leaks, "dv"), (loses_a_gradient, "dk"), (forgets_padding, "out")]
)
def test_wrong_kernels_are_far_beyond_the_bounds(attend: Any, what: str) -> None:
    (shard,) = shards(ROWS, cp=1, multiple_of=16)
    good = shard_errors(Kernel("", attention, torch.bfloat16), ROWS, shard, TINY, CPU, seed=0)
    bad = shard_errors(Kernel("", attend, torch.bfloat16), ROWS, shard, TINY, CPU, seed=0)
    assert good[what] < BOUNDS[torch.bfloat16] / 2
    assert bad[what] > 3 * BOUNDS[torch.bfloat16]


def test_documents_fill_their_rows() -> None:
    rows = document_rows(TINY, 256, seed=3)
    assert [sum(row) for row in rows] == [256, 256]
    assert rows == document_rows(TINY, 256, seed=3) != document_rows(TINY, 256, seed=4)


# --- time ---


def test_what_fails_hangs_or_dies_costs_itself_only(tmp_path: Path) -> None:
    def good(part: Part) -> None:
        part.item("one", lambda: {"figure": 1})

    def fails(part: Part) -> None:
        part.item("bad", lambda: {"figure": 1 // 0})
        part.item("long", dict, expected=1e6)
        part.item("fine", lambda: {"figure": 2})

    def hangs(part: Part) -> None:
        part.item("quick", dict)
        part.item("endless", lambda: time.sleep(1000) or {})

    def dies(part: Part) -> None:
        part.item("quick", dict)
        os.kill(os.getpid(), signal.SIGKILL)

    parts = [("good", 1, good), ("fails", 1, fails), ("dies", 1, dies), ("hangs", 0.2, hangs), ("last", 1, good)]
    started = time.monotonic()
    found = dict(run_parts(parts, seconds=5.0, folder=tmp_path))
    assert time.monotonic() - started < 5 * 1.15
    assert [part["items"][-1]["name"] for part in found.values()] == ["one", "fine", "quick", "quick", "one"]
    assert found["fails"]["left_out"] == ["long"]
    assert "ZeroDivisionError" in found["fails"]["failures"][0]["traceback"]
    assert "SIGKILL" in found["dies"]["failures"][0]["why"]
    assert "was stopped after" in found["hangs"]["failures"][0]["why"]
    assert not found["good"]["failures"]


def test_wrong_figures_are_seen(finished: tuple[Any, dict[str, Any]]) -> None:
    found = finished[1]
    assert not wrong(found)
    for part, key, word in (("kernels", "good", "WRONG"), ("training", "same_work", "NOT THE SAME WORK")):
        spoilt = json.loads(json.dumps(found))
        spoilt[part]["items"][0][key] = False
        assert wrong(spoilt)
        assert word in table(spoilt)


def test_older_torch_gets_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert older_torch.mend() is None
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(older_torch.varlen, "varlen_attn", lambda q, *, window_size: (q, window_size))
    assert "2.11.0" in (older_torch.mend() or "")
    assert older_torch.varlen.varlen_attn(1, window_size=(-1, 0), enable_gqa=True) == (1, (-1, 0))
