"""A few steps of a job beside its references: the same sums in the same order in one process, and the plain run.

The job is the trainer itself, on forked ranks on this machine's processors, under ``train.ordered``. It is compared
with the ordered reference to the bit. If the two are equal, then what distinguishes the job from a plain run of one
process is the order of sums, and the second comparison says how much that is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from fourfold.data import sources
from fourfold.data.stream import Position
from fourfold.debugger.numerics.compare import Comparison, compare_records
from fourfold.debugger.numerics.ordered import OrderedReference
from fourfold.debugger.numerics.plain import PlainRun
from fourfold.debugger.numerics.records import RankStep, write
from fourfold.parallel import MicroBatch, WeightSource, connect
from fourfold.planner.run_memory import run_memory
from fourfold.recipe import Output, Phase, Problem, Profile, RecipeError, RunPlan, check
from fourfold.trainer.batches import Loader
from fourfold.trainer.loop import Trainer
from fourfold.trainer.numerics import Numbers
from fourfold.trainer.optimizer import learning_rate
from fourfold.trainer.prepare import Prepared
from fourfold.trainer.ranks import fork_ranks
from fourfold.trainer.weights import initial_weights

JOB, ORDERED, PLAIN = "job", "ordered", "plain"  # folders of their records


@dataclass(frozen=True)
class Beside:
    """What came of it.

    Attributes:
        plan: as it ran.
        steps: how many.
        ordered: the job and the ordered reference.
        plain: the job and the plain run.
    """

    plan: RunPlan
    steps: int
    ordered: Comparison
    plain: Comparison


def run_beside(plan: RunPlan, *, steps: int, say: Callable[[str], None] = lambda _: None) -> Beside:
    """Runs the first steps three times and compares them.

    Args:
        plan: of the run. What it would write, profile, validate or check is left out; its device is the CPU.
        steps: how many.
        say: is told what begins.

    Raises:
        RecipeError: the data cannot be used, or the ranks do not fit on this machine.
        RankFailure: a rank failed.
    """
    plan = _beside(plan, steps)
    _check_memory(plan)
    with tempfile.TemporaryDirectory(prefix="fourfold-") as name:
        folder = Path(name)
        say("reading the data")
        prepared = _prepare(plan, folder)
        weights = initial_weights(plan)
        say(f"training {steps} steps on {plan.grid.size} ranks")
        fork_ranks(plan.grid.size, lambda rank: _job(prepared, weights, steps, folder / JOB))
        say("making the same sums in the same order in one process")
        fork_ranks(1, lambda rank: _ordered(prepared, weights, steps, folder / ORDERED))
        say("training the plain model in one process")
        fork_ranks(1, lambda rank: _plain(prepared, weights, steps, folder / PLAIN))
        return Beside(
            plan=plan,
            steps=steps,
            ordered=_compare(plan, folder, ORDERED),
            plain=_compare(plan, folder, PLAIN),
        )


def _beside(plan: RunPlan, steps: int) -> RunPlan:
    """The same run, ordered, recorded, and without all that has no part in its numbers.

    Nothing stops it at the first sign of a fault, as the checks of a run would: the comparison says where it is. Code
    that a compiler makes rounds otherwise than PyTorch's own operations, so none is compiled.
    """
    change, recipe = msgspec.structs.replace, plan.recipe
    if steps > recipe.train.steps:
        rule = f"the run has {recipe.train.steps} steps (train.steps)"
        raise RecipeError([Problem("--steps", steps, rule, (recipe.train.steps,))])
    return check(
        change(
            recipe,
            train=change(recipe.train, ordered=True, compile=False, sanity_steps=0, device="cpu"),
            data=change(recipe.data, validation=()),
            numerics=change(recipe.numerics, steps=f"1-{steps}", tensors="all"),
            profile=Profile(),
            output=Output(tensorboard=False),
        )
    )


def _check_memory(plan: RunPlan) -> None:
    """All ranks must fit on this machine at once."""
    peers = plan.grid.size // plan.grid.pp
    needed = peers * sum(rank.total for rank in run_memory(plan))
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        rule = (
            f"{plan.grid.size} ranks of this model take about {needed / 2**30:,.0f} GiB, and this machine has "
            f"{there / 2**30:,.0f}; make both smaller for it, as by --set model.num_layers=4 --set layout.dp=2"
        )
        raise RecipeError([Problem("model", None, rule)])


def _compare(plan: RunPlan, folder: Path, what: str) -> Comparison:
    names = "the job", {ORDERED: "the ordered reference", PLAIN: "the plain run"}[what]
    size, dtype = plan.config.vocab_size, plan.recipe.train.dtype
    return compare_records(
        folder / JOB,
        folder / what,
        names=names,
        by_rank=True if what == ORDERED else None,
        compute=dtype,
        vocab_size=size,
    )


def _prepare(plan: RunPlan, folder: Path) -> Prepared:
    longest = max(phase.seq_len for phase in plan.phases)
    data = sources.prepare_sources(plan.recipe.data, folder, vocab_size=plan.config.vocab_size, seq_len=longest)
    return Prepared(plan, data, folder, new=True, resumes=False)


def _job(run: Prepared, weights: WeightSource, steps: int, folder: Path) -> None:
    """The work of one rank."""
    groups = connect(run.plan.grid, "cpu", ordered=True)
    trainer = Trainer(run, groups=groups, weights=weights, device=torch.device("cpu"))
    trainer.meter.begin()
    with Numbers(trainer.model, folder) as numbers:
        for step in range(1, steps + 1):
            with numbers.step(step):
                trainer.step()


def _feed(run: Prepared, steps: int) -> Iterator[tuple[list[list[MicroBatch]], Phase, float]]:
    """Of every step the micro-batches of all data-parallel groups, its phase and learning rate."""
    plan = run.plan
    stream = run.data.open_stream()
    loaders = [Loader(stream, plan, group) for group in range(plan.grid.dp)]
    position, tokens = Position(), 0
    for step in range(steps):
        phase = plan.phase_at(tokens)
        lr = learning_rate(step, steps=plan.recipe.train.steps, settings=plan.recipe.optimizer)
        yield [loader.micro_batches(position, phase) for loader in loaders], phase, lr
        position, tokens = stream.advance(position, phase.seq_len, phase.sequences), tokens + phase.num_tokens


def _ordered(run: Prepared, weights: WeightSource, steps: int, folder: Path) -> None:
    reference = OrderedReference(run.plan, weights, everything=True)
    for groups, phase, lr in _feed(run, steps):
        _write(reference.step(groups, phase=phase, lr=lr).records, folder)


def _plain(run: Prepared, weights: WeightSource, steps: int, folder: Path) -> None:
    plain = PlainRun(run.plan, weights)
    for groups, _, lr in _feed(run, steps):
        _write(plain.step(groups, lr=lr).records, folder)


def _write(records: list[RankStep], folder: Path) -> None:
    for record in records:
        write(record, folder)
