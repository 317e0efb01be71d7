"""The verbs that play a step without running it: simulate, figures. None needs torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from fourfold.cli.drawings import check_drawings, write_drawings
from fourfold.cli.errors import USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.recipe import RunPlan
    from fourfold.simulator.graph import Receives
    from fourfold.simulator.played import Played
    from fourfold.simulator.scenario import Scenario

Flag = Annotated[bool, Parameter(negative=())]
Drawings = dict[str, Path | None]
"""html, png and svg: files that were asked for."""
Several = Annotated[tuple[str, ...], Parameter(negative=())]


def simulate(
    recipe: Path,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
    gpu: str | None = None,
    stack: str = "standard",
    slow: Several = (),
    jitter: float = 0.0,
    documents: str | None = None,
    seed: int = 0,
    receives: Literal["asynchronous", "in-order", "as-posted"] = "asynchronous",
    all_ranks: Flag = False,
    compare: Flag = False,
    log: Path | None = None,
    log_step: int | None = None,
    html: Path | None = None,
    png: Path | None = None,
    svg: Path | None = None,
    trace: Path | None = None,
    trace_ranks: str | None = None,
    trace_steps: int = 1,
    merged: Flag = False,
    skew_ms: float = 0.0,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Play one step of a recipe on every rank of its cluster: where the time goes, what holds it up, who needs memory.

    An example, with a slow GPU:

    fourfold simulate recipes/llama3-405b.toml --slow rank=77:1.5 --html step.html

    Parameters
    ----------
    recipe
        TOML file; docs/formats.md lists the keys.
    gpu
        h100, a100-80, b200 ..., or a TOML file that describes a cluster; default: cluster.gpu of the recipe.
    stack
        Software whose speed is assumed, or a file that `fourfold calibrate` made.
    slow
        rank=5:1.5 (computes 1.5 times as long), link=12-13:3 (three times as slow) or cpu=7:0.02 (launches every
        computation 0.02 s late), each with a --slow of its own.
    jitter
        Relative standard deviation of every computation: 0.01 is 1 %.
    documents
        Lengths of the documents in a sequence, such as mean=1024,dist=exponential, lengths=32768,1024x96,
        file=lengths.txt or tokens=FOLDER; without it a sequence is one.
    seed
        Of jitter, documents and clocks.
    receives
        How messages queue: on a line per pair of ranks, or all of a rank in one queue (docs/simulating.md).
    all_ranks
        Play all replicas also where they are alike.
    compare
        Play every kind of pipeline schedule on this recipe, and print them side by side.
    log
        Folder of a run with action logs: play what was measured again, beside what was measured.
    log_step
        Which step of the logs; default: the last that all ranks have.
    html
        Write a page with the timeline, memory, heat maps of the ranks, and what would help.
    png
        Write the timeline with memory as a picture.
    svg
        Write the same as a picture that can be scaled.
    trace
        Folder for Chrome traces, which Perfetto opens: one per rank, and truth.json with what was planted.
    trace_ranks
        Ranks to write traces of, as in 0-7,16; default: all, up to 1,024.
    trace_steps
        Steps in each trace.
    merged
        One trace of all ranks.
    skew_ms
        In traces, the clock of each host is wrong by up to so many milliseconds.
    as_json
        Print one JSON object instead of tables.
    """
    from fourfold.recipe import RecipeError, check, load

    drawings: Drawings = {"html": html, "png": png, "svg": svg}
    try:
        check_drawings(**drawings)
        plan = check(load(recipe, overrides))
        if log is not None:
            return _replay(plan, recipe, log, log_step, drawings=drawings, as_json=as_json)
        machines = _cluster(plan, gpu)
        if compare:
            return _compare(plan, machines, stack, as_json=as_json)
        scenario = _scenario(
            plan,
            machines,
            stack,
            slow=slow,
            jitter=jitter,
            documents=documents,
            seed=seed,
            receives=receives,
            all_ranks=all_ranks,
        )
        traced = None
        if trace is not None:
            options = {"ranks": trace_ranks, "merged": merged, "skew_ms": skew_ms, "seed": seed, "steps": trace_steps}
            traced = _traced(plan, scenario, trace, **options)
        _show(plan, recipe, scenario, machines, stack, drawings=drawings, trace=traced, as_json=as_json)
    except (RecipeError, ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    return 0


def _cluster(plan: RunPlan, gpu: str | None) -> Cluster:
    """The machines of a recipe, or those asked for."""
    from fourfold.planner.machines.cluster import cluster
    from fourfold.planner.run_time import run_cluster

    if gpu is not None:
        return cluster(gpu, plan.grid.size)
    machines = run_cluster(plan)
    if machines is None:
        raise ValueError(
            "cluster.gpu: the recipe does not say on which GPUs it runs, so nobody can say how fast; give --gpu h100, "
            "or --log RUN to play what a run has measured"
        )
    return machines


def _scenario(
    plan: RunPlan,
    machines: Cluster,
    stack: str,
    *,
    slow: tuple[str, ...],
    jitter: float,
    documents: str | None,
    seed: int,
    receives: Receives,
    all_ranks: bool,
) -> Scenario:
    from fourfold.planner.timing.stack import load_stack
    from fourfold.simulator.faults import Faults
    from fourfold.simulator.loads import loads_of, parse_mix
    from fourfold.simulator.scenario import recipe_scenario

    faults = Faults.parse(slow, jitter=jitter, seed=seed)
    faults.check(plan.grid)
    loads = None
    if documents is not None:
        loads = loads_of(
            parse_mix(documents),
            seq_len=plan.phases[0].seq_len,
            micro_batch=plan.recipe.pipeline.micro_batch,
            dp=plan.grid.dp,
            micro_batches=plan.num_micro_batches,
            cp=plan.grid.cp,
            strategy=plan.recipe.layout.cp_split,
            seed=seed,
        )
    return recipe_scenario(
        plan, machines, load_stack(stack), loads=loads, faults=faults, receives=receives, all_ranks=all_ranks
    )


def _show(
    plan: RunPlan,
    recipe: Path,
    scenario: Scenario,
    machines: Cluster,
    stack: str,
    *,
    drawings: Drawings,
    trace: Callable[[Played], list[str]] | None,
    as_json: bool,
) -> None:
    """Plays, and says and draws what came of it."""
    from fourfold.report.simulation import print_simulation, simulation_json, simulation_page, worst_replica
    from fourfold.simulator.critical import critical_path
    from fourfold.simulator.engine import simulate
    from fourfold.simulator.live import memory_of_run, timeline_of
    from fourfold.simulator.whatif import what_if

    played = simulate(scenario)
    dp, cp, tp = worst_replica(played)
    found = {
        "gains": what_if(scenario, played),
        "path": critical_path(scenario, played),
        "memory": memory_of_run(plan, timeline_of(played, dp=dp, cp=cp, tp=tp), capacity=machines.chip.hbm_bytes),
        "name": plan.recipe.output.name or recipe.stem,
        "tokens": plan.phases[0].num_tokens,
    }
    written = trace(played) if trace is not None else []
    if any(drawings.values()):
        notes = (f"Costs of {machines.name} under stack {stack}; one step of the first phase of {recipe}.",)
        page = simulation_page(scenario, played, notes=notes, **found)
        written += write_drawings(page, **drawings)
    if as_json:
        print(json.dumps(simulation_json(scenario, played, **found)))
        return
    print_simulation(scenario, played, **found)
    if written:
        print(*written, sep="\n")


def _traced(
    plan: RunPlan,
    scenario: Scenario,
    folder: Path,
    *,
    ranks: str | None,
    merged: bool,
    skew_ms: float,
    seed: int,
    steps: int,
) -> Callable[[Played], list[str]]:
    """Writes traces of what will have been played. What is asked for is checked before."""
    from fourfold.planner.run_memory import job_of
    from fourfold.report.trace import parse_ranks, write_traces
    from fourfold.report.trace_groups import Sizes

    chosen = None if ranks is None else parse_ranks(ranks, plan.grid.size)

    def write(played: Played) -> list[str]:
        files = write_traces(
            folder,
            scenario,
            played,
            ranks=chosen,
            merged=merged,
            skew_ms=skew_ms,
            seed=seed,
            steps=steps,
            sizes=Sizes.of(job_of(plan, plan.phases[0]), plan.stages),
            gpus_per_node=plan.recipe.cluster.gpus_per_node,
        )
        number = f"{len(files)} files, " if len(files) > 1 else ""
        return [f"traces: {number}{files[0]}{' ...' if len(files) > 1 else ''} (Perfetto opens them)"]

    return write


def _compare(plan: RunPlan, machines: Cluster, stack: str, *, as_json: bool) -> int:
    from dataclasses import asdict

    from fourfold.planner.timing.stack import load_stack
    from fourfold.report.compare import compare_text
    from fourfold.simulator.compare import compare_schedules

    found = compare_schedules(plan, machines, load_stack(stack))
    print(json.dumps([asdict(one) for one in found]) if as_json else compare_text(found, machines))
    return 0


def _replay(plan: RunPlan, recipe: Path, run: Path, step: int | None, *, drawings: Drawings, as_json: bool) -> int:
    from fourfold.report.replay import replay_json, replay_page, replay_text
    from fourfold.simulator.replay import read_action_logs
    from fourfold.simulator.replayed import replayed

    found = replayed(read_action_logs(run, step, num_ranks=plan.grid.size), plan.schedule, plan.grid)
    written = write_drawings(replay_page(found, name=recipe.stem), **drawings) if any(drawings.values()) else []
    if as_json:
        print(json.dumps(replay_json(found)))
        return 0
    print(replay_text(found))
    if written:
        print("", *written, sep="\n")
    return 0


def figures(
    *,
    out: Path | None = None,
    only: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    page: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> int:
    """Recompute the figures of Llama 3's paper (ISCA 2025) and print how far ours are from the published values.

    Parameters
    ----------
    out
        Folder for a picture of each, figure-N.png.
    only
        Numbers of the figures, each with an --only of its own; default: all.
    page
        Markdown page to be written about them; needs --out.
    as_json
        Print a JSON list instead of tables.
    """
    from fourfold.report.figures import figures_json, figures_page, figures_text
    from fourfold.report.files import check_target, write_whole
    from fourfold.report.pictures import write_figure
    from fourfold.simulator.figures.every import FIGURES, chosen

    try:
        numbers = chosen(only)
        if page is not None and out is None:
            raise ValueError("--page: shows the pictures, so it needs --out, a folder for them")
        if page is not None:
            check_target(page, (".md",))
        if out is not None:
            _make_folder(out)
        made = [FIGURES[number]() for number in numbers]
        if out is not None:
            for figure in made:
                write_figure(out / f"figure-{figure.number}.png", figure)
        if page is not None and out is not None:
            seen = os.path.relpath(out, page.parent)
            write_whole(page, figures_page(made, folder=seen).encode())
    except (ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    print(json.dumps(figures_json(made)) if as_json else figures_text(made))
    return 0


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"--out {path}: is a file; give a folder") from None
