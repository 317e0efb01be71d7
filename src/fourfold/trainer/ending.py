"""What the process that prepared a run does when its ranks have ended: model, run.json, summary, exit code."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console

from fourfold.trainer import runs
from fourfold.trainer.checkpoint import Checkpoint
from fourfold.trainer.export import export_checkpoint
from fourfold.trainer.loop import Outcome
from fourfold.trainer.prepare import Prepared, clear, made_a_step


@contextmanager
def answering_for(prepared: Prepared) -> Generator[Callable[..., int]]:
    """The process that prepared a run keeps its run.json true, exports its model, and leaves nothing half-written.

    Yields a function to be called with how the ranks ended, which returns the exit code.
    """
    saved = False

    def ending(outcome: Outcome | None, stopped_by: int = 0, *, killed: bool = False) -> int:
        nonlocal saved
        saved = outcome is not None and outcome.saved
        # A signal may have come when the last step was done: then the ranks do not know of it.
        if outcome is not None:
            stopped_by = stopped_by or outcome.stopped_by
            outcome = replace(outcome, stopped_by=stopped_by)
            if not stopped_by:
                _export(prepared, outcome)
        name = f"by {signal.Signals(stopped_by).name}" if stopped_by else None
        runs.end(prepared.folder, "stopped" if stopped_by else "finished", name)
        summarize(prepared, outcome, killed=killed)
        return 0 if not stopped_by or (stopped_by == signal.SIGTERM and saved) else 128 + stopped_by

    try:
        yield ending
    except KeyboardInterrupt:  # while the model was written: that is made up for when the run is resumed
        runs.end(prepared.folder, "stopped", "by SIGINT")
        raise
    except SystemExit as stop:  # the same, by SIGTERM
        runs.end(prepared.folder, "stopped", "by SIGTERM")
        raise SystemExit(0 if saved else stop.code) from None
    except BrokenPipeError:  # nobody reads how it ended
        raise
    except BaseException as error:
        runs.end(prepared.folder, "failed", str(error))
        raise
    finally:
        clear(prepared)


def _export(prepared: Prepared, outcome: Outcome) -> None:
    """Writes the finished model. One of an earlier end of this run stays only if training did not go on."""
    model = prepared.folder / "model"
    if model.exists() and outcome.last is None:
        return
    shutil.rmtree(model, ignore_errors=True)
    export_checkpoint(_checkpoint_of(prepared, outcome), model)


def _checkpoint_of(prepared: Prepared, outcome: Outcome) -> Checkpoint:
    """Where the run ended. A later one may be there, damaged, that was passed over when the run was resumed."""
    return next(c for c in reversed(prepared.store.complete()) if c.step == outcome.state.step)


def summarize(prepared: Prepared, outcome: Outcome | None, *, killed: bool = False) -> None:
    """Prints how the run ended, for the reader who comes back to it. ``outcome`` None: the ranks could not say."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    if outcome is None or outcome.state.step == 0:
        why = "The ranks were killed" if killed else "Stopped before the first step"
        kept = f" Metrics: {prepared.folder / 'metrics.jsonl'}" if made_a_step(prepared.folder) else ""
        complete = prepared.store.complete()
        saved = f"the newest checkpoint is {complete[-1].path}" if complete else "nothing was saved"
        console.print(f"\n{why}; {saved}.{kept}")
        return
    steps, entropy, last = prepared.plan.recipe.train.steps, prepared.data.unigram_entropy, outcome.last
    how = "Stopped" if outcome.stopped_by else "Finished"
    lines = [f"\n{how} after {outcome.state.step} of {steps} steps, {outcome.state.tokens:,} tokens"]
    if last is None:
        lines[0] += "; none of them now: there was nothing left to do."
    else:
        lines[0] += (
            f"; {outcome.tokens:,} of them now in {outcome.seconds:.0f} s "
            f"({outcome.tokens / outcome.seconds:,.0f} tokens/s)."
        )
        known = "."
        if entropy is not None:
            relation = "below" if last.loss < entropy else "above"
            known = f", {abs(entropy - last.loss):.2f} nats {relation} the unigram entropy {entropy:.3f}."
        lines.append(f"Last loss {last.loss:.4f}{known}")
    lines.append(f"Metrics:    {prepared.folder / 'metrics.jsonl'}")
    lines.append(f"Checkpoint: {_checkpoint_of(prepared, outcome).path}")
    if outcome.stopped_by:
        lines.append(f"Go on with: fourfold train {prepared.folder / 'recipe.toml'} --resume")
    else:
        lines.append(f"Model:      {prepared.folder / 'model'} (Hugging Face format)")
    console.print("\n".join(lines))
