"""Runs a layout for a few SGD steps and compares it with REF: one process, the whole global batch, plain autograd.

REF shares with the layout the initial weights and the documents, and nothing of the parallel code: the plain model is
called on every micro-batch, PyTorch makes the gradients, and ``p -= lr * grad`` is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fourfold.model import Batch, Llama, fill, initialise
from fourfold.parallel import MicroBatch, ParallelModel, connect
from fourfold.recipe import RunPlan, check, from_table
from fourfold.trainer.ranks import fork_ranks

# REF runs in the process that forks. On busy cores a second thread would mostly spin.
torch.set_num_threads(1)

LR = 0.1
SEED = 7
MODEL_FIELDS = ("tied", "vocab", "kv", "heads", "layers")
GRADIENT_STEPS = 2  # gathering every gradient takes longer than a step: only in the first ones


@dataclass(frozen=True)
class Case:
    """A layout and what is fed to it. ``rows`` are document lengths per row, taken in turn; None gives mixed
    documents.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    v: int = 1
    nmb: int = 2  # micro-batches per data-parallel group
    nc: int | None = None
    schedule: str = "auto"
    zero: Any = "auto"
    split: Any = "even"
    cp_split: str = "head_tail"
    micro_batch: int = 1
    steps: int = 5
    tied: bool = False
    vocab: int = 261
    kv: int = 2
    heads: int = 4
    layers: int = 4
    rows: tuple[tuple[int, ...], ...] | None = None
    freeze: tuple[str, ...] = ()
    dtype: str = "float32"
    clip: float = 0.0
    clip_type: float = 2.0
    z_loss: float = 0.0
    recompute: Any = "none"
    compile: bool = False

    @property
    def name(self) -> str:
        """Only what differs from the default."""
        fields = {f: getattr(self, f) for f in self.__dataclass_fields__}
        defaults = Case()
        return " ".join(f"{f}{v}" for f, v in fields.items() if v != getattr(defaults, f)).replace(" ", "-") or "single"

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.cp * self.pp * self.dp

    def plan(self) -> RunPlan:
        """The checked recipe of this case."""
        return check(
            from_table(
                {
                    "model": {
                        "dim": 32, "num_layers": self.layers, "num_heads": self.heads, "num_kv_heads": self.kv,
                        "ffn_dim": 48, "vocab_size": self.vocab, "vocab_multiple": 16, "tied": self.tied,
                    },
                    "layout": {"tp": self.tp, "cp": self.cp, "pp": self.pp, "dp": self.dp, "zero": self.zero,
                    "cp_split": self.cp_split}, "pipeline": {
                        "schedule": self.schedule, "virtual_stages": self.v, "micro_batch": self.micro_batch, "split":
                        self.split, **({"nc": self.nc} if self.nc else {}),
                    },
                    "batch": {"sequences": self.nmb * self.dp * self.micro_batch, "seq_len": 64},
                    "train": {"freeze": list(self.freeze), "dtype": self.dtype, "seed": SEED, "z_loss": self.z_loss,
                    "recompute": self.recompute, "compile": self.compile},
                    "optimizer": {"name": "sgd", "lr": LR, "weight_decay": 0.0},
                }
            )
        )  # fmt: skip


MIXED_ROWS = ((7, 13, 43), (43, 1, 19), (63,), (13, 13, 13, 13, 11), (1, 7, 1, 54))


def micro_batches(case: Case, step: int, group: int) -> list[MicroBatch]:
    """The micro-batches of one data-parallel group in one step. A row depends on its global index only."""
    rows = case.rows or MIXED_ROWS
    out = []
    for m in range(case.nmb):
        first = ((step * case.dp + group) * case.nmb + m) * case.micro_batch
        indices = range(first, first + case.micro_batch)
        mine = [rows[index % len(rows)] for index in indices]
        tokens = [
            torch.randint(case.vocab, (sum(row),), generator=torch.Generator().manual_seed(1000 + index))
            for index, row in zip(indices, mine, strict=True)
        ]
        out.append((Batch.from_rows(torch.cat(tokens), mine), mine))
    return out


@dataclass(frozen=True)
class Outcome:
    """What is compared, per step: losses, norms, gradients by name; and the weights after the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def run(case: Case) -> Outcome:
    """The layout, on forked ranks."""
    reports = fork_ranks(case.world, lambda rank: train_rank(case), timeout=120)
    first = reports[0]
    for report in reports[1:]:
        assert (report.losses, report.norms) == (first.losses, first.norms), "ranks disagree on loss or norm"
        for whole, part in zip(first.gradients, report.gradients, strict=True):
            whole.update(part)
        first.weights.update(report.weights)
    return first


def make_model(case: Case) -> ParallelModel:
    """This rank's model."""
    plan = case.plan()

    def weights(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, SEED, plan.config, rows=rows, columns=columns)

    return ParallelModel(plan, connect(plan.grid, "cpu"), weights=weights, device=torch.device("cpu"))


def train_rank(case: Case, each_step: Callable[[ParallelModel, int], None] = lambda model, step: None) -> Outcome:
    """The work of one rank."""
    model = make_model(case)
    group = model.groups.coordinates.dp
    outcome = Outcome()
    for step in range(case.steps):
        totals = model.forward_backward(micro_batches(case, step, group))
        norm = model.gradients.norm(case.clip_type)
        outcome.losses.append(totals.loss)
        outcome.norms.append(norm)
        if step < GRADIENT_STEPS:
            outcome.gradients.append({n: t for n, t in model.whole_weights(gradients=True) if t is not None})
        if case.clip:
            model.gradients.clip(norm, case.clip)
        each_step(model, step)
        with torch.no_grad():
            for weight in model.gradients.weights:
                weight.local.sub_(LR * weight.gradient)
        model.zero_grad()
    outcome.weights.update({n: t for n, t in model.whole_weights() if t is not None})
    return outcome


@lru_cache(maxsize=64)
def reference(case: Case) -> Outcome:
    """REF of a case. The layout's own fields do not enter but for the number of rows."""
    config = replace(case.plan().config, vocab_multiple=1)
    model = Llama(config)
    initialise(model, SEED)
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        weight.requires_grad_(not any(f"{name}.".startswith(f"{prefix}.") for prefix in case.freeze))
    outcome = Outcome()
    for step in range(case.steps):
        batches = [b for group in range(case.dp) for b, _ in micro_batches(case, step, group)]
        count = sum(int((batch.labels >= 0).sum()) for batch in batches)
        loss = sum(model(batch.tokens, batch) for batch in batches) / max(count, 1)
        penalty = sum(_squared_log_z(model, batch) for batch in batches) / max(count, 1) if case.z_loss else 0.0
        (loss + case.z_loss * penalty).backward()
        trained = {n: w for n, w in weights.items() if w.requires_grad}
        gradients = {n: w.grad.clone() for n, w in trained.items()}
        flat = torch.cat([g.flatten() for g in gradients.values()])
        norm = torch.linalg.vector_norm(flat.double(), case.clip_type).item()
        scale = min(1.0, case.clip / norm) if case.clip else 1.0
        outcome.losses.append(loss.item())
        outcome.norms.append(norm)
        if step < GRADIENT_STEPS:
            outcome.gradients.append(gradients)
        with torch.no_grad():
            for weight in trained.values():
                weight.sub_(LR * scale * weight.grad)
                weight.grad = None
    outcome.weights.update({n: w.detach().clone() for n, w in weights.items()})
    return outcome


def _squared_log_z(model: Llama, batch: Batch) -> Tensor:
    """The sum of log(Z)^2 over tokens that have a label, by plain autograd."""
    unlabelled = Batch(
        tokens=batch.tokens, labels=None, positions=batch.positions, documents=batch.documents, runs=batch.runs
    )
    assert batch.labels is not None
    return model(batch.tokens, unlabelled)[batch.labels >= 0].logsumexp(1).square().sum()


def compare(got: Outcome, want: Outcome, *, tolerance: float = 1e-5) -> None:
    """Asserts that losses, norms, every gradient and every weight agree, by relative 2-norm of the difference per
    tensor.
    """
    for step, (a, b) in enumerate(zip(got.losses, want.losses, strict=True)):
        assert abs(a - b) <= tolerance * abs(b), f"step {step}: loss {a} instead of {b}"
    for step, (a, b) in enumerate(zip(got.norms, want.norms, strict=True)):
        assert abs(a - b) <= tolerance * abs(b), f"step {step}: gradient norm {a} instead of {b}"
    for step, (grads, wanted) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        _compare_tensors(grads, wanted, tolerance, f"step {step}: gradient of")
    _compare_tensors(got.weights, want.weights, tolerance, "weight")


def _compare_tensors(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, what: str) -> None:
    assert got.keys() == want.keys(), f"{what}: other names: {got.keys() ^ want.keys()}"
    for name, b in want.items():
        a = got[name]
        padding = a[b.shape[0] :]
        assert not padding.any(), f"{what} {name}: the padded rows are not zero"
        error = torch.linalg.vector_norm((a[: b.shape[0]] - b).double()) / torch.linalg.vector_norm(
            b.double()
        ).clamp_min(1e-30)
        assert error <= tolerance, f"{what} {name}: relative error {error:.2e}"  # also false for NaN


def check_case(case: Case) -> Outcome:
    """Runs a case and compares it with REF."""
    got = run(case)
    compare(got, reference(sequential(case)))
    return got


def sequential(case: Case) -> Case:
    """The same rows and steps on one rank: what REF computes."""
    return Case(
        nmb=case.nmb * case.dp * case.micro_batch,
        **{f: getattr(case, f) for f in (*MODEL_FIELDS, "steps", "rows", "freeze", "clip", "clip_type", "z_loss")},
    )


def bitwise_equal(a: Outcome, b: Outcome, *, names: Sequence[str] | None = None) -> bool:
    """Whether losses, gradients and weights are the same to the bit."""
    pairs = [*zip(a.gradients, b.gradients, strict=True), (a.weights, b.weights)]
    return a.losses == b.losses and all(torch.equal(x[n], y[n]) for x, y in pairs for n in (names or x))
