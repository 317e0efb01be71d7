"""What is simulated: a layout with its costs, the documents of its batch, and what is slower than it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fourfold.layout import Grid, Schedule, Stage
from fourfold.planner.jobs import TRAINED_IN, Jobs
from fourfold.planner.run_memory import job_of
from fourfold.simulator.faults import Faults
from fourfold.simulator.graph import Graph, Receives, compile_graph
from fourfold.simulator.work import Work, work_of

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.planner.timing.stack import Stack
    from fourfold.recipe import RunPlan
    from fourfold.simulator.loads import Loads


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One step of one layout."""

    grid: Grid
    graph: Graph
    work: Work
    stages: tuple[Stage, ...]
    loads: Loads | None = None
    """Attention of every rank and micro-batch; None: one document fills each row, and all have as much."""
    faults: Faults = field(default_factory=Faults)
    all_ranks: bool = False
    """Also where all replicas are alike, and one says it all."""

    def __post_init__(self) -> None:
        self.faults.check(self.grid, several_stages=self.schedule.v > 1)
        if self.loads is not None:
            wanted = (self.grid.dp, self.schedule.num_micro_batches, self.grid.cp)
            if self.loads.pairs.shape != wanted:
                raise ValueError(f"loads of shape {self.loads.pairs.shape}: must be [dp, micro-batches, cp] = {wanted}")

    @property
    def schedule(self) -> Schedule:
        """What runs."""
        return self.graph.schedule

    @property
    def lanes(self) -> Grid:
        """What is simulated of the grid: all of it, or one rank of each dimension along which all are alike."""
        if self.all_ranks or self.faults:
            return self.grid
        if self.loads is not None:
            return dataclasses.replace(self.grid, tp=1)
        return dataclasses.replace(self.grid, tp=1, cp=1, dp=1)

    def replace(self, **changes: object) -> Scenario:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)


def scenario(
    job: Jobs,
    stack: Stack,
    schedule: Schedule,
    stages: Sequence[Stage],
    *,
    loads: Loads | None = None,
    faults: Faults | None = None,
    receives: Receives = "asynchronous",
    all_ranks: bool = False,
) -> Scenario:
    """From a planner's job, a row with the machine's columns, and its schedule.

    With `loads`, attention is that of their mean row, and each rank's is in proportion to its pairs.
    """
    faults = faults or Faults()
    if loads is not None:
        job = job.replace(pairs=float(loads.pairs.mean()) * int(job.cp) / int(job.micro_batch))
    return Scenario(
        grid=Grid(tp=int(job.tp), cp=int(job.cp), pp=int(job.pp), dp=int(job.dp)),
        graph=compile_graph(schedule, receives=receives),
        work=work_of(job, stack, stages, factors={*faults.links.values()}),
        stages=tuple(stages),
        loads=loads,
        faults=faults,
        all_ranks=all_ranks,
    )


def recipe_scenario(
    plan: RunPlan,
    machines: Cluster,
    stack: Stack,
    *,
    loads: Loads | None = None,
    faults: Faults | None = None,
    receives: Receives = "asynchronous",
    all_ranks: bool = False,
) -> Scenario:
    """A step in the first phase of a checked recipe, on these machines.

    Raises:
        ValueError: the recipe freezes parameters, or computes in numbers that the chip does not have.
    """
    return scenario(
        recipe_job(plan, machines, stack),
        stack,
        plan.schedule,
        plan.stages,
        loads=loads,
        faults=faults,
        receives=receives,
        all_ranks=all_ranks,
    )


def recipe_job(plan: RunPlan, machines: Cluster, stack: Stack) -> Jobs:
    """The first phase of a checked recipe as a job. ValueError as above."""
    if plan.recipe.train.freeze:
        raise ValueError(
            "train.freeze: how long a step with frozen parameters takes is not known; simulate the recipe without it"
        )
    hardware = machines.columns(TRAINED_IN[plan.recipe.train.dtype])
    return job_of(plan, plan.phases[0]).replace(**hardware, **stack.columns())
