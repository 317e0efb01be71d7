"""What is recorded of a layout's step is what the step computed: held against whole weights and the plain model."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replaced
from safetensors.torch import load_file
from torch import Tensor

from fourfold.debugger.numerics.fingerprints import Fingerprinter
from fourfold.debugger.numerics.ordered import OrderedReference
from fourfold.debugger.numerics.records import (
    SEQUENCE_BITS,
    Kind,
    RankStep,
    Seen,
    read_step,
    recorded_steps,
    step_folder,
)
from fourfold.model import PLAIN, Llama, Ops, initialise
from fourfold.parallel import ParallelModel, connect
from fourfold.recipe import Numerics, check
from fourfold.trainer.nonfinite import find_non_finite
from fourfold.trainer.numerics import Numbers, StepRecorder
from fourfold.trainer.ranks import fork_ranks
from tests.debugger.numerics.layouts import plan_of, source_of
from tests.parallel.harness import LR, SEED, Case, make_model, micro_batches
from tests.trainer.runs import metrics, train, write_recipe

Whole = dict[str, Tensor]
QUERY = ("layers.0.attention_norm", "layers.0.attention.wq", "layers.0.attention.wk")
KEPT = ("layers.1", "norm.weight", "output")

CASES = [
    Case(tp=2, nmb=2),
    Case(cp=2, nmb=3, cp_split="per_document"),
    Case(pp=2, v=2, nmb=2, tied=True),
    Case(dp=3, zero=3, nmb=2, micro_batch=2, recompute="full"),
    Case(tp=4, kv=2, nmb=1, dtype="bfloat16"),  # pairs of ranks share a key head
    Case(tp=2, cp=2, pp=2, dp=2, nmb=3, schedule="zb-h1", recompute="selective"),
]
"""Each with four layers, width 32, and 241 or 256 entries padded to a multiple of 16."""


@dataclass(frozen=True)
class Step:
    """A recorded step of a layout, of all ranks; and its whole gradients and weights, gathered by the model itself."""

    records: list[RankStep]
    gradients: Whole
    weights: Whole
    loss: float
    norm: float


@cache
def recorded(case: Case) -> tuple[Step, Step]:
    """Two steps."""
    reports = fork_ranks(case.world, lambda rank: _rank(case), timeout=120)
    steps = []
    for of_ranks in zip(*reports, strict=True):
        records = [step.records[0] for step in of_ranks]
        gradients, weights = ({n: t for s in of_ranks for n, t in getattr(s, which).items()} for which in WHOLES)
        steps.append(Step(records, gradients, weights, of_ranks[0].loss, of_ranks[0].norm))
    return steps[0], steps[1]


WHOLES = ("gradients", "weights")


def _rank(case: Case) -> list[Step]:
    model = make_model(case)
    recorder = StepRecorder(model, everything=True, keep=KEPT)
    steps = []
    for step in range(2):
        with recorder.step(step + 1) as record:
            loss = model.forward_backward(micro_batches(case, step, model.groups.coordinates.dp)).loss
            norm = model.gradients.norm()
            gradients = {name: whole for name, whole in model.whole_weights(gradients=True) if whole is not None}
            model.gradients.clip(norm, norm / 2)  # what is recorded is of before it
            with torch.no_grad():
                for weight in model.gradients.weights:
                    weight.local.sub_(LR * weight.gradient)
            model.zero_grad()
        weights = {name: whole for name, whole in model.whole_weights() if whole is not None}
        steps.append(Step([record], gradients, weights, loss, norm))
    return steps


def seen(step: Step, kind: Kind) -> dict[str, list[tuple[RankStep, Seen]]]:
    """By name."""
    found = defaultdict(list)
    for record in step.records:
        for one in record.seen:
            if one.kind is kind:
                found[one.name].append((record, one))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestWeights:
    """Gradients and weights of a layout, put together from what its ranks recorded."""

    @pytest.mark.parametrize("kind", [Kind.GRADIENT, Kind.WEIGHT])
    def test_checksums_add_up_to_those_of_the_whole(self, case: Case, kind: Kind) -> None:
        step = recorded(case)[1]
        wholes = step.gradients if kind is Kind.GRADIENT else step.weights
        found = seen(step, kind)
        assert found.keys() == wholes.keys() | {"output.weight"}
        for name, parts in found.items():
            whole = wholes["tok_embeddings.weight" if case.tied and name == "output.weight" else name]
            # By row and first column; replicas have the same.
            sums: dict[int, dict[int, int]] = defaultdict(dict)
            for _, one in parts:
                assert (one.dtype, one.micro_batch, one.width) == ("float32", -1, whole[0].numel())
                for row, checksum in zip(one.rows.tolist(), one.fingerprint.checksum.tolist(), strict=True):
                    assert sums[row].setdefault(one.first, checksum) == checksum, f"replicas of {name} differ"
            wanted = Fingerprinter().of(whole).checksum.tolist()
            got = [sum(sums[row].values()) for row in range(len(whole))]
            assert len(sums) == len(whole)
            assert [(g - w) % 2**64 for g, w in zip(got, wanted, strict=True)] == [0] * len(whole), name

    def test_values_that_are_kept(self, case: Case) -> None:
        step = recorded(case)[1]
        for kind, wholes in ((Kind.GRADIENT, step.gradients), (Kind.WEIGHT, step.weights)):
            for name, parts in seen(step, kind).items():
                kept = name.startswith("layers.1.") or name in ("norm.weight", "output.weight")
                for _, one in parts:
                    assert (one.values is not None) == kept
                    if one.values is not None:
                        whole = wholes["tok_embeddings.weight" if case.tied and name == "output.weight" else name]
                        columns = slice(one.first, one.first + one.features)
                        assert torch.equal(one.values, whole.reshape(len(whole), -1)[one.rows, columns])

    def test_scalars(self, case: Case) -> None:
        for number, step in enumerate(recorded(case), 1):
            for rank, record in enumerate(step.records):
                assert (record.step, record.rank, record.grid) == (number, rank, case.plan().grid)
                assert record.scalars == {"loss": step.loss, "grad_norm": step.norm}


IN_LAYER = [
    *("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.attend", "attention.wo"),
    *("ffn_norm", "feed_forward.w1", "feed_forward.w3", "feed_forward.swiglu", "feed_forward.w2"),
]
LAYERS = [name for i in range(4) for name in (*(f"layers.{i}.{n}" for n in IN_LAYER), f"layers.{i}")]
OPERATIONS = ["tok_embeddings", *LAYERS, "norm", "output", "cross_entropy"]


def numbers_of_tokens(case: Case) -> list[int]:
    """Of a step's tokens, from the lengths of its rows alone."""
    lengths = [
        sum(row) for group in range(case.dp) for _, rows in micro_batches(case, 0, group) for row in rows
    ]  # fmt: skip
    return [(sequence << SEQUENCE_BITS) + place for sequence, length in enumerate(lengths) for place in range(length)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestOperations:
    """What operations give, and the gradients that reach them."""

    @pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.ARRIVING])
    def test_every_feature_of_every_token_is_there_once(self, case: Case, kind: Kind) -> None:
        found = seen(recorded(case)[0], kind)
        without = {"cross_entropy", *(name for name in LAYERS if name.count(".") == 1)}
        assert sorted(found) == sorted({*OPERATIONS} - (without if kind is Kind.ARRIVING else set()))
        tokens = {number: place for place, number in enumerate(numbers_of_tokens(case))}
        for name, parts in found.items():
            if name == "cross_entropy":
                continue
            count = torch.zeros(len(tokens), parts[0][1].width, dtype=torch.int64)
            for _, one in parts:
                rows = torch.tensor([tokens[row] for row in one.rows[one.rows >= 0].tolist()], dtype=torch.int64)
                count[rows, one.first : one.first + one.features] += 1
            holders = case.tp // case.kv if name.endswith((".wk", ".wv")) and case.tp > case.kv else 1
            assert bool((count == holders).all()), name

    def test_the_loss_of_every_micro_batch(self, case: Case) -> None:
        """A number per context rank, the same on its TP ranks; its row is that of the micro-batch's first token."""
        step, grid = recorded(case)[0], case.plan().grid
        losses: dict[tuple[int, int], float] = {}
        for record, one in seen(step, Kind.OUTPUT)["cross_entropy"]:
            assert (one.features, one.width, one.dtype) == (1, 1, "float32")
            loss = float(one.fingerprint.square.double().sqrt())  # a loss is positive
            assert losses.setdefault((int(one.rows), grid.coordinates(record.rank).cp), loss) == loss
        first = [number >> SEQUENCE_BITS for number, _ in losses]
        assert sorted({*first}) == [*range(0, case.nmb * case.dp * case.micro_batch, case.micro_batch)]
        assert sum(losses.values()) / num_labels(case) == pytest.approx(step.loss, rel=1e-6)

    def test_values_are_those_of_the_plain_model(self, case: Case) -> None:
        """Layer 1 and the head are kept whole: their rows, columns and names are right, forward and backward."""
        tolerance = 0.1 if case.dtype == "bfloat16" else 1e-5
        tokens = {number: place for place, number in enumerate(numbers_of_tokens(case))}
        for kind, wholes in zip((Kind.OUTPUT, Kind.ARRIVING), plain(case), strict=True):
            for name, parts in seen(recorded(case)[0], kind).items():
                if not (name.startswith("layers.1") or name == "output"):
                    continue
                wanted, got = wholes[name], torch.zeros_like(wholes[name])
                for _, one in parts:
                    assert one.values is not None
                    real = one.rows >= 0
                    rows = torch.tensor([tokens[row] for row in one.rows[real].tolist()], dtype=torch.int64)
                    columns = slice(one.first, one.first + one.features)
                    if kind is Kind.ARRIVING:  # ranks that share a key head have a part each
                        got[rows, columns] += one.values[real]
                    else:
                        got[rows, columns] = one.values[real].float()
                size = torch.linalg.vector_norm(wanted)
                assert torch.linalg.vector_norm(got - wanted) <= tolerance * size, (kind, name)

    def test_positions(self, case: Case) -> None:
        """Where each token is in its document."""
        wanted = {}
        sequence = 0
        for group in range(case.dp):
            for _, rows in micro_batches(case, 0, group):
                for row in rows:
                    places = [place for length in row for place in range(length)]
                    wanted |= {(sequence << SEQUENCE_BITS) + i: place for i, place in enumerate(places)}
                    sequence += 1
        got: dict[int, int] = {}
        for record in recorded(case)[0].records:
            assert record.positions.keys() == set(range(case.nmb))
            for numbers, positions in record.positions.values():
                got |= dict(zip(numbers.tolist(), positions.tolist(), strict=True))
        assert got == wanted


def num_labels(case: Case) -> int:
    """Of a step."""
    batches = [batch for group in range(case.dp) for batch, _ in micro_batches(case, 0, group)]
    return sum(int((batch.labels >= 0).sum()) for batch in batches if batch.labels is not None)


@cache
def plain(case: Case) -> tuple[Whole, Whole]:
    """What operations of the plain model give, and what reaches them, by name, of the tokens of the first step."""
    told: list[Tensor] = []

    def tell(out: Any) -> Any:
        for one in out if isinstance(out, tuple) else (out,):
            one.retain_grad()
            told.append(one)
        return out

    def listening(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: tell(operation(*arguments))

    told_of = {field.name: listening(getattr(PLAIN, field.name)) for field in fields(Ops) if field.name != "rotate"}
    model = Llama(case.plan().config, ops=replace(PLAIN, **told_of))
    initialise(model, SEED)
    for layer in model.layers.values():
        layer.register_forward_hook(lambda layer, given, out: tell(out))
    pairs: list[list[Tensor]] = []
    for group in range(case.dp):
        for batch, _ in micro_batches(case, 0, group):
            told.clear()
            (model(batch.tokens, batch) / num_labels(case)).backward()
            pairs.append([*told])
    outputs, arriving = {}, {}
    for name, outs in zip(OPERATIONS, zip(*pairs, strict=True), strict=True):
        outputs[name] = torch.cat([out.detach().reshape(out.shape[0] if out.ndim else 1, -1) for out in outs])
        grads = [out.grad for out in outs if out.grad is not None]
        arriving[name] = torch.cat([grad.reshape(grad.shape[0] if grad.ndim else 1, -1) for grad in grads])
    return outputs, arriving


@pytest.mark.parametrize("freeze", [("tok_embeddings", "layers.0.attention_norm"), ("tok_embeddings", *QUERY)])
def test_where_weights_are_frozen_the_ordered_reference_has_the_same(freeze: tuple[str, ...]) -> None:
    """Behind the first weight that is trained no gradient arrives. What is recorded is the same to the bit."""
    case = Case(tp=2, pp=2, layers=2, freeze=freeze)
    plan = plan_of(case)

    def work(rank: int) -> RankStep:
        groups = connect(plan.grid, "cpu", ordered=True)
        model = ParallelModel(plan, groups, weights=source_of(plan), device=torch.device("cpu"))
        with StepRecorder(model, everything=True).step(1) as record:
            model.forward_backward(micro_batches(case, 0, 0))
        return record

    reference = OrderedReference(plan, source_of(plan), everything=True)
    wanted = reference.step([micro_batches(case, 0, 0)], phase=plan.phases[0], lr=0.0).records
    for one, other in zip(fork_ranks(4, work), wanted, strict=True):
        both = [
            {(s.kind, s.name, s.micro_batch): s for s in record.seen if s.kind is not Kind.WEIGHT}
            for record in (one, other)
        ]
        assert both[0].keys() == both[1].keys()
        for key, seen_here in both[0].items():
            assert torch.equal(seen_here.rows, both[1][key].rows), key
            assert torch.equal(seen_here.fingerprint.checksum, both[1][key].fingerprint.checksum), key


def test_a_run_records_the_steps_it_is_asked_for_and_is_the_same(tmp_path: Path) -> None:
    """Each has one forward-backward pass and nothing of validation; without any the model is the same to the bit."""
    write_recipe(tmp_path)
    (tmp_path / "valid.txt").write_text("the cat sat on a mat " * 30)
    steps = ("layout.tp=2", "train.steps=5", 'data.validation=[{name="v", source="valid.txt", every=1}]')
    recorded = ('numerics.steps="2,4-5"', 'numerics.tensors="all"', 'numerics.keep=["layers.0"]')
    done = train(tmp_path, *steps, *recorded)
    assert done.code == 0, done.err
    assert "Numbers: of 3 steps, to numerics/" in done.out
    run = tmp_path / "runs" / "tiny"
    assert recorded_steps(run / "numerics") == [2, 4, 5]
    lines = metrics(run)
    for step in (2, 4, 5):
        assert len(list(step_folder(run / "numerics", step).iterdir())) == 2
        for record in read_step(run / "numerics", step):
            assert record.scalars["loss"] == lines[step - 1]["loss"]
            assert record.scalars["grad_norm"] == lines[step - 1]["grad_norm"]
            assert len({(one.kind, one.name, one.micro_batch) for one in record.seen}) == len(record.seen)
            of_losses = [one.micro_batch for one in record.seen if one.name == "cross_entropy"]
            assert sorted(of_losses) == [0, 1, 2, 3]
    assert train(tmp_path, *steps, "output.name=plain").code == 0
    assert not (tmp_path / "runs" / "plain" / "numerics").exists()
    models = [load_file(tmp_path / "runs" / name / "model" / "model.safetensors") for name in ("tiny", "plain")]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


def test_a_resumed_run_records_anew_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    """As its metrics, and on another layout: of which no rank's file may stay."""
    write_recipe(tmp_path)
    steady = (
        "optimizer.schedule=constant",
        "train.steps=4",
        "checkpoint.every=2",
        "checkpoint.keep=0",
        'numerics.steps="1-4"',
    )
    assert train(tmp_path, *steady, "layout.tp=2", "layout.dp=2").code == 0
    run = tmp_path / "runs" / "tiny"
    folder = run / "numerics"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert train(tmp_path, *steady, "layout.pp=2", resume=True).code == 0
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    assert {path.parent.name: before[path] == after.get(path) for path in before} == {
        "step-000001": True,
        "step-000002": True,
        "step-000003": False,
        "step-000004": False,
    }
    assert [len(read_step(folder, step)) for step in (1, 2, 3, 4)] == [4, 4, 2, 2]
    for line in metrics(run):
        assert read_step(folder, line["step"])[0].scalars["loss"] == line["loss"]


def test_a_folder_that_cannot_be_written_does_not_stop_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "numerics").write_text("a file")
    case = Case(layers=1, nmb=1)

    def work(rank: int) -> bool:
        model = make_model(case)
        model.plan = check(replaced(model.plan.recipe, numerics=Numerics(steps="1-2")))
        with Numbers(model, tmp_path / "numerics") as numbers, numbers.step(1):
            model.forward_backward(micro_batches(case, 0, 0))
        return True

    assert fork_ranks(1, work) == [True]
    assert "rank 0: numbers of step 1 could not be written: [Errno 20] Not a directory" in capfd.readouterr().out


def test_a_step_that_is_refused_is_recorded_as_it_was() -> None:
    """Looking for its cause runs the step again, which is not recorded a second time."""
    case = Case(tp=2, layers=2)

    def work(rank: int) -> RankStep:
        model = make_model(case)
        if rank == 1:
            with torch.no_grad():
                model.gradients.weights[3].local.fill_(math.inf)
        batches = micro_batches(case, 0, 0)
        with StepRecorder(model, everything=True).step(1) as record:
            assert not math.isfinite(model.forward_backward(batches).loss)
            assert find_non_finite(model, batches).kind == "weight"
            with torch.no_grad():
                model.gradients.weights[3].local.fill_(1.0)
            assert find_non_finite(model, batches).kind == "none"
        return record

    for record in fork_ranks(2, work):
        names = [(one.kind, one.name, one.micro_batch) for one in record.seen]
        assert len({*names}) == len(names)
        assert math.isnan(record.scalars["loss"])
