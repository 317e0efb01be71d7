"""A candidate of a plan as a recipe that `fourfold train` accepts.

The trainer does less than the planner knows: it recomputes next to nothing or whole layers, computes in bfloat16 or
float32, cuts sequences between TP's regions, and shares what ZeRO shards over all dp x cp ranks. A candidate that needs
more is refused, and `trainable` is the same job with the search held to what can be trained.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fourfold.planner.jobs import TRAINED_IN
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.reasons.cost import HOUR, checkpointing
from fourfold.planner.reasons.published import HERD, long_tokens, preset_of, published, training_steps
from fourfold.planner.search.judge import Candidate
from fourfold.planner.search.paper import zero_rule
from fourfold.planner.search.search import Plan, search
from fourfold.planner.search.words import layout_words
from fourfold.recipe import (
    Batch,
    Checkpoint,
    Cluster,
    Data,
    Layout,
    Model,
    ModelConfig,
    Optimizer,
    Output,
    Pipeline,
    Recipe,
    RopeScalingTable,
    Timeouts,
    Train,
    check,
)
from fourfold.recipe.schema import Recompute
from fourfold.recipe.write import commented_toml, write_new

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem

SCHEDULES = ("afab", "1f1b", "interleaved", "flexible", "zb-h1")
"""Kinds of pipeline schedules that the trainer runs."""
SEARCHED = ("afab", "1f1b", "interleaved", "flexible")
"""Those of them that are looked at unless others are asked for."""
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Of what the planner looks at, what the trainer can make again."""
_DTYPES = {precision: dtype for dtype, precision in TRAINED_IN.items()}
_LOOKED_AT = 30  # of the fastest layouts, for one that has memory to spare
_SET_ME = "/path/to/tokens"
_WIDTH = 112  # characters of a command's line in the head


def trainable(problem: Problem) -> Problem:
    """The same job, searched only among what the trainer can run."""
    schedules = _allowed(problem, "schedule", SCHEDULES) or SEARCHED
    recomputes = _allowed(problem, "recompute", RECOMPUTES) or RECOMPUTES
    return problem.replace(limits={**problem.limits, "recompute": recomputes, "schedule": schedules})


def _allowed(problem: Problem, dimension: str, runs: Sequence[str]) -> tuple[int | str, ...]:
    """Of what is asked for, what the trainer runs."""
    return tuple(kind for kind in problem.limits.get(dimension, ()) if kind in runs)


def layout_for_recipe(plan: Plan) -> Candidate:
    """The layout of a plan's recipe: the fastest that the trainer can run and that has memory to spare.

    To spare: it fits with the most that allocators have been seen to lose, too. If no layout does, the fastest that
    fits as the plan has it. ValueError with the reason if the trainer can run none.
    """
    problem = plan.problem
    if problem.precision not in _DTYPES:
        raise ValueError(f"no recipe: {_precision_reason(problem)}")
    known = [one for one in plan.candidates if not untrainable(problem, one)]
    if not any(has_spare(problem, one) for one in known):
        searched = search(trainable(problem), top=_LOOKED_AT)
        known = list(searched.candidates)
        if not known:
            why = "there is no legal layout" if searched.infeasible is None else searched.infeasible.constraint
            raise ValueError(f"no recipe: nothing that the trainer can run fits: {why}")
    return next((one for one in known if has_spare(problem, one)), known[0])


def recipe_sentence(plan: Plan, one: Candidate, path: str | Path) -> str:
    """What was written: Recipe: f.toml: layout 4 of the table, 6.25 s a step where layout 1 takes 6.10, since ..."""
    numbers = f"{one.step_seconds:.3g} s a step"
    place = next((number for number, other in enumerate(plan.candidates, 1) if other == one), None)
    which = layout_words(one) if place is None else f"layout {place} of the table, {layout_words(one)}"
    if place == 1 or not plan.candidates:
        return f"Recipe: {path}: {which}, {numbers}"
    first = plan.candidates[0]
    reasons = untrainable(plan.problem, first)
    if not reasons:
        lost = f"{plan.problem.stack.allocator_band[1] - 1:.0%}"
        reasons = (f"it would not fit with the {lost} that allocators have been measured to lose at most",)
    more = one.step_seconds / first.step_seconds - 1
    return (
        f"Recipe: {path}: {which}, {numbers}, {more:+.1%} beside layout 1, which is not written since "
        f"{'; '.join(reasons)}"
    )


def has_spare(problem: Problem, one: Candidate) -> bool:
    """Whether a layout fits even with the most that allocators have been seen to lose."""
    return one.memory_bytes * problem.stack.allocator_band[1] <= problem.cluster.chip.hbm_bytes - RESERVED


def _precision_reason(problem: Problem) -> str:
    return f"dtype = {problem.precision.name.lower()}: the trainer computes in bf16 or fp32"


def untrainable(problem: Problem, candidate: Candidate) -> tuple[str, ...]:
    """What keeps the trainer from running a candidate; empty if nothing does."""
    reasons = []
    if candidate.recompute not in RECOMPUTES:
        kinds = ", ".join(RECOMPUTES)
        reasons.append(f'recompute = "{candidate.recompute}": must be one of {kinds} for the trainer')
    if candidate.schedule not in SCHEDULES:
        reasons.append(f'schedule = "{candidate.schedule}": must be one of {", ".join(SCHEDULES)}')
    if candidate.zero not in (1, 2, 3):
        reasons.append(f"zero = {candidate.zero}: must be 1, 2 or 3; the trainer always shards optimizer state")
    if problem.precision not in _DTYPES:
        reasons.append(_precision_reason(problem))
    return tuple(reasons)


def candidate_recipe(problem: Problem, candidate: Candidate, *, name: str, checkpoint_every: int = 500) -> Recipe:
    """The recipe of a candidate. ValueError, with every reason, if the trainer cannot run it."""
    reasons = untrainable(problem, candidate)
    if reasons:
        raise ValueError("no recipe of this layout: " + "; ".join(reasons))
    preset = preset_of(problem.config)
    flexible = candidate.schedule == "flexible"
    split: Any = candidate.split if isinstance(candidate.split, str) else tuple(candidate.split)
    recipe = Recipe(
        model=Model(preset=preset) if preset else _model(problem.config),
        layout=Layout(
            tp=candidate.tp,
            cp=candidate.cp,
            pp=candidate.pp,
            dp=candidate.dp,
            zero=candidate.zero,  # type: ignore[arg-type]
        ),
        pipeline=Pipeline(
            schedule=candidate.schedule,  # type: ignore[arg-type]
            virtual_stages=candidate.virtual_stages,
            nc=candidate.nc if flexible else None,
            micro_batch=candidate.micro_batch,
            split=split,
        ),
        batch=Batch(sequences=problem.sequences, seq_len=problem.seq_len),
        data=Data(source=_SET_ME),
        optimizer=_optimizer(problem),
        train=Train(
            steps=training_steps(problem.config, problem.seq_len, problem.tokens),
            dtype=_DTYPES[problem.precision],
            device="cuda",
            recompute=candidate.recompute,  # type: ignore[arg-type]
        ),  # type: ignore[arg-type]
        checkpoint=Checkpoint(every=checkpoint_every),
        timeouts=_timeouts(candidate),
        cluster=Cluster(gpu=problem.cluster.source, gpus_per_node=problem.cluster.gpus_per_node),
        output=Output(name=name),
    )
    check(recipe)  # RecipeError is a ValueError and names keys
    return recipe


def _model(config: ModelConfig) -> Model:
    keys = ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size", "head_dim", "rope_theta",
            "norm_eps", "tied", "vocab_multiple")  # fmt: skip
    scaling = config.rope_scaling
    table = None
    if scaling is not None:
        table = RopeScalingTable(
            factor=scaling.factor,
            low_freq_factor=scaling.low_freq_factor,
            high_freq_factor=scaling.high_freq_factor,
            original_max_positions=scaling.original_max_positions,
        )
    return Model(**{key: getattr(config, key) for key in keys}, rope_scaling=table)


def _optimizer(problem: Problem) -> Optimizer:
    """As published for the model, else the defaults with a short warm-up."""
    known = published(problem.config)
    if known is None:
        return Optimizer(warmup_steps=min(2000, training_steps(problem.config, problem.seq_len, problem.tokens) // 10))
    return Optimizer(lr=known.lr, warmup_steps=known.warmup_steps, min_lr_ratio=known.min_lr_ratio)


def _timeouts(candidate: Candidate) -> Timeouts:
    """The defaults, but that no step may look like a hang which is only as slow as predicted."""
    slowest = math.ceil(10 * candidate.step_seconds_band[1])
    usual = Timeouts()
    if slowest <= usual.abort:
        return usual
    return Timeouts(abort=float(slowest), startup=float(slowest // 2), collective=float(2 * slowest))


def recipe_toml(
    problem: Problem, candidate: Candidate, *, name: str, command: str | None = None, notes: Sequence[str] = ()
) -> str:
    """The recipe of a candidate as commented TOML, which `fourfold.recipe.load` reads.

    Args:
        name: of the run.
        command: what was typed to get this file; it stands in the head.
        notes: more lines of the head.
    """
    saving = checkpointing(problem.config, problem.cluster, step_seconds=candidate.step_seconds)
    every = _round_steps(saving.interval_steps)
    recipe = candidate_recipe(problem, candidate, name=name, checkpoint_every=every)
    return commented_toml(
        recipe,
        header=[*_header(problem, candidate, command), *notes],
        comments=_comments(problem, candidate, recipe),
        always=_ALWAYS,
    )


def write_recipe(
    problem: Problem,
    candidate: Candidate,
    path: str | Path,
    *,
    command: str | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Writes the recipe of a candidate; the run is named after the file.

    Raises:
        ValueError: the trainer cannot run the candidate, or the file exists and says something else.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.suffix != ".toml":
        raise ValueError(f"{path}: a recipe is a .toml file; nearest legal: {path.with_suffix('.toml')}")
    write_new(path, recipe_toml(problem, candidate, name=path.stem, command=command, notes=notes))
    return path


_ALWAYS = (
    *(f"layout.{d}" for d in ("tp", "cp", "pp", "dp", "zero")),
    *(f"pipeline.{key}" for key in ("schedule", "virtual_stages", "micro_batch", "split")),
    "batch.sequences", "batch.seq_len", "optimizer.lr", "optimizer.warmup_steps", "optimizer.min_lr_ratio",
    "train.steps", "train.dtype", "train.device", "checkpoint.every", "cluster.gpu", "cluster.gpus_per_node",
)  # fmt: skip


def _header(problem: Problem, candidate: Candidate, command: str | None) -> list[str]:
    low, high = candidate.step_seconds_band
    cluster = problem.cluster
    where = f"{cluster.gpus:,} {cluster.chip.title}{named_cluster(problem)}"
    lines = [f"{problem.name} on {where}, as laid out by `fourfold plan`."]
    if command:
        parts = textwrap.wrap(command, _WIDTH, break_long_words=False, break_on_hyphens=False)
        lines += ["Written by:", *(f"  {part} \\" for part in parts[:-1]), f"  {parts[-1]}"]
    most = f"with the {problem.stack.allocator_band[1] - 1:.0%} that allocators have lost at most, it would not fit"
    tight = f" It is tight: {most}." if not has_spare(problem, candidate) else ""
    fits = tight if candidate.fits else " IT DOES NOT FIT."
    lines += [
        f"Predicted with the stack {problem.stack.name}: {candidate.step_seconds:.3g} s per step "
        f"({low:.3g} to {high:.3g}), {candidate.mfu:.0%} MFU, "
        f"{candidate.memory_bytes / GIB:.0f} of {cluster.chip.hbm_bytes / GIB:.1f} GiB on the fullest GPU.",
        *([fits.strip()] if fits else []),
        "Set data.source, and data.tokenizer for a folder of text, before you train.",
    ]
    return lines


def named_cluster(problem: Problem) -> str:
    """Of a cluster with a name of its own, that: " of llama3-24k"."""
    cluster = problem.cluster
    return "" if cluster.name == cluster.chip.name else f" of {cluster.name}"


def _comments(problem: Problem, candidate: Candidate, recipe: Recipe) -> dict[str, str]:
    layout, batch = recipe.layout, recipe.batch
    per_group = batch.sequences // layout.dp
    enough = ">=" if per_group >= 2 * layout.pp else "<"
    rule = f"the paper's rule: {per_group} sequences per DP group {enough} 2 pp = {2 * layout.pp}"
    mode, kind = zero_rule(per_group, pp=layout.pp, virtual_stages=candidate.virtual_stages)
    split = {
        "ends_light": "embedding and head count as a layer each",
        "even": "layers per stage differ by one at most",
    }
    again = {
        "selective": "what norms and SwiGLU give, which costs next to nothing",
        "full": "every layer from its input: a second forward",
    }
    comments = {
        "train.recompute": again.get(candidate.recompute, ""),
        "layout": f"{layout.tp * layout.cp * layout.pp * layout.dp:,} ranks",
        "pipeline.split": split.get(str(recipe.pipeline.split), "layers per stage"),
        "batch.sequences": f"x {batch.seq_len:,} = {problem.tokens:,} tokens per step",
        "data.source": "set this: a folder of token files, as `fourfold data tokenize` writes them, or of text",
        "train.steps": f"{format_tokens(recipe.train.steps * problem.tokens)} tokens",
        "checkpoint.every": f"{_span(recipe.checkpoint.every * candidate.step_seconds)}, "
        "by the failure rate of Llama 3's cluster",
    }
    if (mode, kind) == (candidate.zero, candidate.schedule):
        comments["layout.zero"] = rule
    if layout.pp > 1:
        comments["pipeline.schedule"] = f"ranks wait {candidate.bubble_over_total:.1%} of the time for other stages"
    known = published(problem.config)
    if known is not None:
        is_long = long_tokens(problem.config, batch.seq_len) is not None
        of = " (in pre-training; for long sequences none is printed)" if is_long else ""
        comments["optimizer"] = f"{HERD}; {known.source}{of}"
    return comments


def format_tokens(tokens: float) -> str:
    """15.6T; 800B."""
    return f"{tokens / 1e12:.3g}T" if tokens >= 1e12 else f"{tokens / 1e9:.3g}B"


def _span(seconds: float) -> str:
    """12 minutes; 3.4 hours."""
    return f"{seconds / 60:.0f} minutes" if seconds < 2 * HOUR else f"{seconds / HOUR:.1f} hours"


def _round_steps(steps: int) -> int:
    """The nearest of 1, 2, 5, 10, 20, 50 ... so that a small change of the prediction changes no recipe."""
    round_ones = (m * 10**e for e in range(6) for m in (1, 2, 5))
    return min(round_ones, key=lambda number: abs(math.log(number / steps)))
