"""The training loop."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.data.stream import Position
from fourfold.debugger.numerics.records import FOLDER
from fourfold.layout import Doing
from fourfold.parallel import Groups, MicroBatch, ParallelModel, StepTotals, WeightSource
from fourfold.recipe import Phase
from fourfold.trainer import sanity
from fourfold.trainer.batches import Loader, ValidationBatches
from fourfold.trainer.checkpoint import CheckpointError, Saver, TrainState, load_newest
from fourfold.trainer.garbage import Garbage
from fourfold.trainer.meter import Meter
from fourfold.trainer.metrics import Reporter, StepMetrics, ValidationMetrics, cut_action_log, write_action_log
from fourfold.trainer.nonfinite import NonFiniteError, NonFinitePolicy, find_non_finite
from fourfold.trainer.numerics import Numbers
from fourfold.trainer.optimizer import learning_rate, make_optimizer
from fourfold.trainer.prepare import Prepared
from fourfold.trainer.profiling import Profiling
from fourfold.trainer.sinks import open_sinks
from fourfold.trainer.watchdog import Watchdog


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        last: metrics of the last step made here; None if there was none.
        state: where training stands.
        seconds: of the loop.
        tokens: trained on here.
        stopped_by: the signal that ended it, or 0.
        saved: whether ``state`` is in a checkpoint.
    """

    last: StepMetrics | None
    state: TrainState
    seconds: float
    tokens: int
    stopped_by: int
    saved: bool


def train(run: Prepared, *, groups: Groups, weights: WeightSource, device: torch.device) -> Outcome:
    """One rank's work, from the first step or the newest good checkpoint to the finished model. All ranks call it."""
    recipe = run.plan.recipe
    stop_request = StopRequest()
    trainer = Trainer(run, groups=groups, weights=weights, device=device)
    began_at, started, stopped_by, metrics = trainer.state, time.monotonic(), 0, None
    with ExitStack() as open_things:
        reporter = open_things.enter_context(_reporter(run, groups, began_at.step))
        watchdog = open_things.enter_context(Watchdog(run.folder, groups, recipe.timeouts))
        garbage = open_things.enter_context(Garbage(recipe.train.gc_every, groups.recorder))
        profiling = open_things.enter_context(Profiling(run.plan, run.folder, groups, device, after_step=began_at.step))
        numbers = open_things.enter_context(Numbers(trainer.model, run.folder / FOLDER, after_step=began_at.step))
        trainer.meter.begin()
        while trainer.state.step < recipe.train.steps and not stopped_by:
            number = trainer.state.step + 1
            profiling.step_begins(number)
            watchdog.step_begins(number)
            with numbers.step(number):
                metrics, totals = trainer.step()
            reporter.report(metrics)
            watchdog.step_ended()
            for result in trainer.validate():
                reporter.report_validation(result)
            if recipe.checkpoint.every and number % recipe.checkpoint.every == 0:
                reporter.sync()  # no checkpoint is ahead of its metrics, even if the machine loses power
                trainer.save()
            with trainer.meter.part("garbage"):
                garbage.step_ended(number)
            # All ranks stop after the same step, or none: whoever stopped alone would leave the others waiting.
            with groups.recorder.doing(Doing.MEET):
                stopped_by = int(trainer.model.world_max([float(stop_request.signal)])[0])
            profiling.step_ended(number)
            doings, every = groups.recorder.take_doings(), recipe.output.action_log_every
            if every and number % every == 0:
                write_action_log(run.folder, groups.rank, number, (*totals.log, *doings))
        seconds = time.monotonic() - started
        reporter.sync()
        trainer.save_last()
    tokens = trainer.state.tokens - began_at.tokens
    return Outcome(metrics, trainer.state, seconds, tokens, stopped_by, saved=trainer.state == trainer.saved)


class Trainer:
    """One rank's model, optimizer and data, and where training stands. All ranks call the same methods.

    Attributes:
        state: after the last step.
        saved: what the newest checkpoint holds; None if there is none.
    """

    def __init__(self, run: Prepared, *, groups: Groups, weights: WeightSource, device: torch.device) -> None:
        self.plan = plan = run.plan
        recipe = plan.recipe
        self.groups = groups
        self.model = ParallelModel(plan, groups, weights=weights, device=device)
        self.optimizer = make_optimizer(self.model.gradients.weights, recipe.optimizer, tied=plan.config.tied)
        self.saved = load_newest(self.model, self.optimizer, run.store, groups) if run.resumes else None
        if run.resumes and self.saved is None:
            raise CheckpointError(f"the checkpoints in {run.store.place} have gone since this start")
        self.state = self.saved or TrainState(0, 0, Position().to_json(), 0, 0)
        self._first_step = self.state.step
        self._stream = run.data.open_stream()
        self._loader = Loader(self._stream, plan, groups.coordinates.dp)
        self._validation = run.data.open_validation()
        self._policy = NonFinitePolicy(recipe.train, skipped=self.state.skipped)
        self._saver = Saver(
            self.model,
            self.optimizer,
            run.store,
            plan,
            keep=recipe.checkpoint.keep,
            asynchronous=recipe.checkpoint.asynchronous,
            data=run.data.fingerprint,
            tokenizer_files=run.data.tokenizer_files,
            patience=recipe.timeouts.collective,
        )
        self.meter = Meter(plan, groups, device)

    def step(self) -> tuple[StepMetrics, StepTotals]:
        """One optimizer step."""
        recipe, settings, model = self.plan.recipe, self.plan.recipe.optimizer, self.model
        phase, position = self.plan.phase_at(self.state.tokens), Position.from_json(self.state.position)
        watched = self.state.step - self._first_step < recipe.train.sanity_steps
        lr = learning_rate(self.state.step, steps=recipe.train.steps, settings=settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        doing = self.groups.recorder.doing
        with self.meter.part("data"), doing(Doing.LOAD):
            micro_batches = self._loader.micro_batches(position, phase)
        if watched:
            with doing(Doing.CHECK):
                sanity.check_inputs(model, micro_batches)
        with self.meter.part("forward_backward"):
            totals = model.forward_backward(micro_batches, schedule=phase.schedule)
            with doing(Doing.NORM):
                norm = model.gradients.norm(settings.clip_norm_type)
        accepted = self._policy.accepts(totals.loss, norm)
        if accepted:
            with self.meter.part("optimizer"), doing(Doing.STEP):
                self._update(norm, lr, watched=watched)
        else:
            self._refuse(micro_batches, phase, totals.loss, norm)
        self._advance(phase, position, moved=accepted)
        metrics = self.meter.end(
            totals,
            micro_batches,
            step=self.state.step,
            num_tokens=phase.num_tokens,
            tokens=self.state.tokens,
            samples=self.state.position["samples"],
            grad_norm=norm,
            lr=lr,
            skipped=self.state.skipped,
        )
        return metrics, totals

    def _update(self, norm: float, lr: float, *, watched: bool) -> None:
        model, settings = self.model, self.plan.recipe.optimizer
        if settings.clip_norm > 0:
            model.gradients.clip(norm, settings.clip_norm)
        if watched:
            sanity.check_gradients(model)
            sanity.check_learning_rate(model, self.optimizer, lr)
        model.gradients.hand_over()
        self.optimizer.step()
        model.zero_grad()
        if watched:
            sanity.check_weights(model)

    def _refuse(self, micro_batches: list[MicroBatch], phase: Phase, loss: float, norm: float) -> None:
        """Leaves a step out, or raises, as the policy says; the same on all ranks."""
        cause = find_non_finite(self.model, micro_batches, schedule=phase.schedule)
        try:
            line = self._policy.refuse(self.state.step + 1, loss, norm, cause.describe(self.groups.grid))
        except NonFiniteError:
            # All ranks are here. What is being saved is of before, and good: rank 0 publishes it last.
            self._saver.wait()
            self.groups.barrier()
            raise
        if self.groups.rank == 0:
            print(line, flush=True)

    def _advance(self, phase: Phase, position: Position, *, moved: bool) -> None:
        state = self.state
        self.state = TrainState(
            step=state.step + 1,
            tokens=state.tokens + phase.num_tokens,
            position=self._stream.advance(position, phase.seq_len, phase.sequences).to_json(),
            optimizer_steps=state.optimizer_steps + moved,
            skipped=self._policy.skipped,
        )

    def validate(self) -> list[ValidationMetrics]:
        """Measures the loss on the sets whose turn it is after the step made last."""
        step, steps, results = self.state.step, self.plan.recipe.train.steps, []
        for settings, source in zip(self.plan.recipe.data.validation, self._validation, strict=True):
            if step % settings.every and step < steps:
                continue
            started = time.monotonic()
            seq_len = self.plan.phase_at(self.state.tokens).seq_len
            batches = ValidationBatches(
                source,
                seq_len=seq_len,
                limit=settings.sequences,
                plan=self.plan,
                dp_rank=self.groups.coordinates.dp,
            )
            with self.groups.recorder.doing(Doing.VALIDATE):
                totals = self.model.evaluate(batches)
            seconds = time.monotonic() - started
            results.append(ValidationMetrics(step, settings.name, totals.loss, totals.valid_tokens, seconds))
        return results

    def save(self) -> None:
        """Begins to save where training stands. A save that fails is tried again with the next."""
        with self.meter.part("checkpoint"), self.groups.recorder.doing(Doing.SAVE):
            self._saver.wait()
            if (failure := self._saver.failure()) is not None:
                print(f"rank {self.groups.rank}: {failure}", flush=True)
            self._saver.save(self.state)
        self.saved = self.state

    def save_last(self) -> None:
        """Saves the end of this run, unless it is saved, or no step was ever made, and waits until that is done.

        Raises:
            CheckpointError: it could not be written.
        """
        if self.state.step == 0:
            return
        if self.saved == self.state and self._last_save_failed() is None:
            return
        self.save()
        if (failure := self._last_save_failed()) is not None:
            raise CheckpointError(failure)

    def _last_save_failed(self) -> str | None:
        """Why the save that began last failed on this rank, or that it failed on another; the same wait for all."""
        self._saver.wait()
        failure = self._saver.failure()
        (failed,) = self.model.world_max([float(failure is not None)])
        return failure or ("another rank could not save" if failed else None)


def _reporter(run: Prepared, groups: Groups, resume_step: int) -> Reporter:
    cut_action_log(run.folder, groups.rank, groups.grid.size, resume_step)
    recipe, reports = run.plan.recipe, groups.rank == 0
    sinks = open_sinks(run.folder, recipe, resume_step=resume_step) if reports else []
    folder: Path | None = run.folder if reports else None
    return Reporter(folder, recipe.train.steps, resume_step=resume_step, sinks=sinks)


class StopRequest:
    """Turns SIGINT and SIGTERM into a question that the loop asks once per step. ``signal`` is the number, or 0.

    A signal that this process ignores stays ignored: forked ranks leave SIGINT to their parent.
    """

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._make)

    def _make(self, number: int, frame: object) -> None:
        self.signal = number
