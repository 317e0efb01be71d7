"""The training loop."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fourfold.parallel import Groups, ParallelModel, WeightSource
from fourfold.recipe import RunPlan
from fourfold.trainer import sanity
from fourfold.trainer.data import Loader, Rows
from fourfold.trainer.export import export
from fourfold.trainer.metrics import Reporter, StepMetrics, peak_memory, write_action_log
from fourfold.trainer.optimizer import learning_rate, make_optimizer
from fourfold.trainer.text import TokenSet


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last step's metrics, if any, the seconds of the loop, and the signal that ended it or 0."""

    last: StepMetrics | None
    seconds: float
    stopped_by: int


def train(
    plan: RunPlan, tokens: TokenSet, folder: Path, *, groups: Groups, weights: WeightSource, device: torch.device
) -> Outcome:
    """One rank's work from the first step to the finished model. All ranks call it with the same plan and tokens."""
    recipe, settings = plan.recipe, plan.recipe.optimizer
    stop_request = StopRequest()
    model = ParallelModel(plan, groups, weights=weights, device=device)
    optimizer = make_optimizer(model.gradients.weights, settings, tied=plan.config.tied)
    rows = Rows(tokens, seq_len=recipe.batch.seq_len, seed=recipe.data.seed)
    loader = Loader(rows, plan, groups.coordinates.dp)
    metrics, stopped_by, started = None, 0, time.monotonic()

    with Reporter(folder if groups.rank == 0 else None, recipe.train.steps) as reporter:
        for step in range(recipe.train.steps):
            step_started = time.monotonic()
            watched = step < recipe.train.sanity_steps
            lr = learning_rate(step, steps=recipe.train.steps, settings=settings)
            for group in optimizer.param_groups:
                group["lr"] = lr

            micro_batches = loader.micro_batches(step)
            if watched:
                sanity.check_inputs(model, micro_batches)
            totals = model.forward_backward(micro_batches)
            norm = model.gradients.norm(settings.clip_norm_type)
            if settings.clip_norm > 0:
                model.gradients.clip(norm, settings.clip_norm)
            if watched:
                sanity.check_gradients(model)
                sanity.check_learning_rate(model, optimizer, lr)
            model.gradients.hand_over()
            optimizer.step()
            model.zero_grad()
            if watched:
                sanity.check_weights(model)

            # All ranks stop after the same step, or none: whoever stopped alone would leave the others waiting.
            peak, stop = model.world_max([float(peak_memory(device)), float(stop_request.signal)])
            seconds = time.monotonic() - step_started
            num_tokens = recipe.batch.sequences * recipe.batch.seq_len
            metrics = StepMetrics(
                step=step + 1,
                loss=totals.loss,
                grad_norm=norm,
                lr=lr,
                tokens=num_tokens * (step + 1),
                valid_tokens=totals.valid_tokens,
                tokens_per_second=num_tokens / seconds,
                step_seconds=seconds,
                peak_memory_bytes=int(peak),
            )
            reporter.report(metrics)
            every = recipe.output.action_log_every
            if every and (step + 1) % every == 0:
                write_action_log(folder, groups.rank, step + 1, totals.log)
            if stopped_by := int(stop):
                break
        seconds = time.monotonic() - started
        export(model, folder / "model", tokenizer_json=tokens.tokenizer_json)
    return Outcome(metrics, seconds, stopped_by)


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
