"""The layout that somebody has already, as a recipe says it: reported beside those that the search finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from fourfold.planner.jobs import Jobs, Order, Split
from fourfold.planner.search.problem import ORDERS, RECOMPUTES, SPLITS, Problem
from fourfold.recipe import PRESETS, RecipeError, check

if TYPE_CHECKING:
    from fourfold.recipe import RunPlan


@dataclass(frozen=True, kw_only=True)
class OwnLayout:
    """A layout with every choice made, legal for its job."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_stages: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    nc: int | None = None
    """Of the flexible schedule; other kinds have one nc."""
    zero: int = 1
    recompute: str = "none"
    split: str | tuple[int, ...] = "even"
    """A rule, or the layers of every virtual stage."""
    unjudged: str | None = None
    """Why the planner has no figures for it, if it has none."""

    @classmethod
    def of(
        cls,
        plan: RunPlan,
        *,
        gpus: int | None = None,
        name: str | None = None,
        seq_len: int | None = None,
        sequences: int | None = None,
        **_other: object,
    ) -> Self:
        """That of a checked recipe; the schedule as it runs. `unjudged` says why, if it is not legal for a job that is
        another than the recipe's: on so many GPUs, of another model (`name`), or batch."""
        if gpus is not None and gpus != plan.grid.size:
            ranks = " x ".join(f"{d} {getattr(plan.grid, d)}" for d in ("tp", "cp", "pp", "dp"))
            return cls(unjudged=f"{ranks} is for {plan.grid.size:,} GPUs, and the job has {gpus:,}")
        if name is not None or seq_len is not None or sequences is not None:
            try:
                plan = _with_job(plan, name=name, seq_len=seq_len, sequences=sequences)
            except RecipeError as error:
                return cls(unjudged=f"it is not legal for this job: {'; '.join(map(str, error.problems))}")
        recipe, schedule = plan.recipe, plan.schedule
        by_document = plan.grid.cp > 1 and recipe.layout.cp_split == "per_document"
        kinds = {*plan.recompute}
        unjudged = 'cp_split = "per_document": the planner knows head_tail alone' if by_document else None
        if len(kinds) > 1 or not kinds <= RECOMPUTES.keys():
            unjudged = "train.recompute: the planner knows none, selective and full, one for all stages"
        kind = plain_schedule(schedule.kind, v=schedule.v, nc=schedule.nc, pp=schedule.pp)
        return cls(
            tp=plan.grid.tp,
            cp=plan.grid.cp,
            pp=plan.grid.pp,
            dp=plan.grid.dp,
            virtual_stages=schedule.v,
            micro_batch=recipe.pipeline.micro_batch,
            schedule=kind,
            nc=schedule.nc if kind == "flexible" else None,
            zero=plan.zero,
            split=recipe.pipeline.split,
            recompute=plan.recompute[0],
            unjudged=unjudged,
        )

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """The layers of every virtual stage, where they are given one by one."""
        return None if isinstance(self.split, str) else self.split

    def job(self, problem: Problem) -> Jobs:
        """The layout as a job. With layers given one by one, `split` is the even rule: play it with `stage_layers`."""
        order = ORDERS[self.schedule]
        number = problem.sequences // (self.dp * self.micro_batch)
        return problem.jobs(
            tp=self.tp,
            cp=self.cp,
            pp=self.pp,
            dp=self.dp,
            v=self.virtual_stages,
            nc=number if order is Order.AFAB else self.nc or self.pp,
            micro_batch=self.micro_batch,
            order=int(order),
            split=int(SPLITS[self.split] if isinstance(self.split, str) else Split.EVEN),
            zero=self.zero,
            recompute=int(RECOMPUTES[self.recompute]),
        )


def _with_job(plan: RunPlan, *, name: str | None, seq_len: int | None, sequences: int | None) -> RunPlan:
    """The recipe with another model or batch. RecipeError if its layout is not legal for it."""
    recipe = plan.recipe
    batch = replace(
        recipe.batch,
        seq_len=seq_len or recipe.batch.seq_len,
        sequences=sequences or recipe.batch.sequences,
        phases=type(recipe.batch)().phases,
    )
    model = recipe.model
    if name is not None:
        path = Path(name).parent if Path(name).is_file() else Path(name)
        model = type(model)(preset=name) if name in PRESETS else type(model)(path=str(path))
    return check(replace(recipe, model=model, batch=batch))


def plain_schedule(kind: str, *, v: int, nc: int, pp: int) -> str:
    """The plainer name of a flexible schedule that is one: 1F1B with one stage per rank, interleaved with nc = pp."""
    if kind != "flexible":
        return kind
    return "1f1b" if v == 1 else "interleaved" if nc == pp else kind
