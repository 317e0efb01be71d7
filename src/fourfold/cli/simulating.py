"""The verbs that play a step without running it: simulate, figures. None needs torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from fourfold.cli.drawings import check_drawings, check_picture, write_drawings
from fourfold.cli.errors import USER_ERROR, fail

if TYPE_CHECKING:
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.planner.timing.stack import Stack
    from fourfold.recipe import RunPlan
    from fourfold.report.drawing import Page
    from fourfold.simulator.loads import Loads
    from fourfold.simulator.played import Played
    from fourfold.simulator.scenario import Scenario

Flag = Annotated[bool, Parameter(negative=())]
Several = Annotated[tuple[str, ...], Parameter(negative=())]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which the step is played.

    Parameters
    ----------
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
    """

    slow: Several = ()
    jitter: float = 0.0
    documents: str | None = None
    seed: int = 0
    receives: Literal["asynchronous", "in-order", "as-posted"] = "asynchronous"
    all_ranks: Flag = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Traces:
    """Chrome traces to be written.

    Parameters
    ----------
    trace
        Folder for Chrome traces, which Perfetto opens: one per rank, and truth.json with what was planted.
    trace_ranks
        Ranks to write traces of, as in 0-7,16; default: all, if these are at most 256.
    trace_steps
        Steps in each trace; default: 1.
    merged
        One trace of all ranks.
    gzip
        Compress traces.
    skew_ms
        In traces, the clock of each host is wrong by up to so many milliseconds.
    """

    trace: Path | None = None
    trace_ranks: str | None = None
    trace_steps: int | None = None
    merged: Flag = False
    gzip: Flag = False
    skew_ms: float | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Drawings:
    """Files to be drawn.

    Parameters
    ----------
    html
        Write a page with the timeline, memory, heat maps of the ranks, and what would help.
    png
        Write the timeline with memory as a picture.
    svg
        Write the same as a picture that can be scaled.
    heat_map
        Write the computing time of every rank as a picture, .png or .svg.
    """

    html: Path | None = None
    png: Path | None = None
    svg: Path | None = None
    heat_map: Path | None = None


def simulate(
    recipe: Path,
    /,
    *,
    overrides: Annotated[
        tuple[str, ...], Parameter(name="--set", negative=(), help="KEY=VALUE, as in the recipe: layout.tp=2")
    ] = (),
    gpu: str | None = None,
    stack: str = "standard",
    conditions: Conditions = Conditions(),
    drawings: Drawings = Drawings(),
    traces: Traces = Traces(),
    compare: Flag = False,
    log: Path | None = None,
    log_step: int | None = None,
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
        Software whose speed and memory are assumed, or a file that `fourfold calibrate` made.
    compare
        Play every kind of pipeline schedule on this recipe, and print them side by side.
    log
        Folder of a run with action logs: play what was measured again, beside what was measured.
    log_step
        Which step of the logs; default: the last that all ranks have.
    as_json
        Print one JSON object instead of tables.
    """
    from fourfold.recipe import RecipeError, check, load

    try:
        _check_options(conditions, drawings, traces, gpu=gpu, compare=compare, log=log, log_step=log_step)
        plan = check(load(recipe, overrides))
        if log is not None:
            play = _replayed(plan, recipe, log, log_step, drawings, as_json=as_json)
        elif compare:
            play = _compared(plan, _cluster(plan, gpu), stack, as_json=as_json)
        else:
            play = _simulated(plan, recipe, _cluster(plan, gpu), stack, conditions, drawings, traces, as_json=as_json)
    except (RecipeError, ValueError, OSError) as error:
        return fail(error, USER_ERROR)
    try:
        play()
    except BrokenPipeError:
        raise
    except OSError as error:
        return fail(error, USER_ERROR)
    return 0


def _check_options(
    conditions: Conditions,
    drawings: Drawings,
    traces: Traces,
    *,
    gpu: str | None,
    compare: bool,
    log: Path | None,
    log_step: int | None,
) -> None:
    """ValueError for files that cannot be written, and for options that would have no effect."""
    check_drawings(html=drawings.html, png=drawings.png, svg=drawings.svg)
    if drawings.heat_map is not None:
        check_picture(drawings.heat_map, option="--heat-map")
    given = {
        name: getattr(group, name) != getattr(type(group)(), name)
        for group in (conditions, drawings, traces)
        for name in group.__dataclass_fields__
    } | {"gpu": gpu is not None, "compare": compare, "log": log is not None, "log_step": log_step is not None}
    simulated = {*Conditions.__dataclass_fields__, *Traces.__dataclass_fields__}
    rules = [(name, "trace") for name in Traces.__dataclass_fields__ if name != "trace"] + [("log_step", "log")]
    for name, needed in rules:
        if given[name] and not given[needed]:
            raise ValueError(f"{_option(name)}: has no effect without {_option(needed)}")
    excluded = {
        "log": {*simulated, "compare", "gpu", "heat_map"},
        "compare": {*simulated, *Drawings.__dataclass_fields__},
    }
    for mode, names in excluded.items():
        for name in sorted(names):
            if given[mode] and given[name]:
                raise ValueError(f"{_option(name)}: has no effect with {_option(mode)}; leave one of them out")
    if given["seed"] and not (conditions.jitter or conditions.documents or given["skew_ms"]):
        raise ValueError("--seed: has no effect without --jitter, --documents or --skew-ms")
    if conditions.seed < 0:
        raise ValueError(f"--seed {conditions.seed}: must be at least 0; nearest legal: 0")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    plan: RunPlan, machines: Cluster, stack: Stack, conditions: Conditions, splits: tuple[Loads, ...]
) -> Scenario:
    from fourfold.simulator.faults import Faults
    from fourfold.simulator.scenario import recipe_scenario

    faults = Faults.parse(conditions.slow, jitter=conditions.jitter, seed=conditions.seed)
    faults.check(plan.grid, several_stages=plan.schedule.v > 1)
    return recipe_scenario(
        plan,
        machines,
        stack,
        loads=next((loads for loads in splits if loads.strategy == plan.recipe.layout.cp_split), None),
        faults=faults,
        receives=conditions.receives,
        all_ranks=conditions.all_ranks,
    )


def _splits(plan: RunPlan, conditions: Conditions) -> tuple[Loads, ...]:
    """Attention of all ranks under both splits of context parallelism; nothing without documents."""
    if conditions.documents is None:
        return ()
    from fourfold.simulator.loads import both_splits, parse_mix

    return both_splits(
        parse_mix(conditions.documents),
        seq_len=plan.phases[0].seq_len,
        micro_batch=plan.recipe.pipeline.micro_batch,
        dp=plan.grid.dp,
        micro_batches=plan.num_micro_batches,
        cp=plan.grid.cp,
        seed=conditions.seed,
    )


def _simulated(
    plan: RunPlan,
    recipe: Path,
    machines: Cluster,
    stack_name: str,
    conditions: Conditions,
    drawings: Drawings,
    traces: Traces,
    *,
    as_json: bool,
) -> Callable[[], None]:
    """Checks all that was asked for. What it returns plays it, and says and draws what came of it."""
    from fourfold.planner.timing.stack import load_stack
    from fourfold.report.simulation import print_simulation, simulation_json, simulation_page, worst_replica
    from fourfold.simulator.answer import Answer
    from fourfold.simulator.critical import critical_path
    from fourfold.simulator.engine import simulate as simulated
    from fourfold.simulator.live import step_memory, timeline_of
    from fourfold.simulator.scenario import recipe_job
    from fourfold.simulator.whatif import what_if

    stack = load_stack(stack_name)
    splits = _splits(plan, conditions)
    scenario = _scenario(plan, machines, stack, conditions, splits)
    write_traces = _traced(plan, scenario, traces, seed=conditions.seed)

    def play() -> None:
        played = simulated(scenario)
        dp, cp, tp = worst_replica(played)
        timeline = timeline_of(played, dp=dp, cp=cp, tp=tp)
        answer = Answer(
            scenario=scenario,
            played=played,
            gains=what_if(scenario, played),
            path=critical_path(scenario, played),
            memory=step_memory(recipe_job(plan, machines, stack), timeline, plan.stages, stack),
            name=plan.recipe.output.name or recipe.stem,
            tokens=plan.phases[0].num_tokens,
            splits=splits if plan.grid.cp > 1 else (),
        )
        written = write_traces(played)
        if drawings != Drawings():
            notes = (f"Costs of {machines.name} under stack {stack.name}; one step of the first phase of {recipe}.",)
            written += _drawn(simulation_page(answer, notes=notes), drawings)
        if as_json:
            print(json.dumps(simulation_json(answer)))
            return
        print_simulation(answer)
        if written:
            print(*written, sep="\n")

    return play


def _drawn(page: Page, drawings: Drawings) -> list[str]:
    written = write_drawings(page, html=drawings.html, png=drawings.png, svg=drawings.svg)
    if drawings.heat_map is not None and page.heat_maps:
        from fourfold.report.pictures import write_heat_map

        write_heat_map(drawings.heat_map, page.heat_maps[0], heading=page.heading)
        written.append(f"picture: {drawings.heat_map}")
    return written


def _traced(plan: RunPlan, scenario: Scenario, traces: Traces, *, seed: int) -> Callable[[Played], list[str]]:
    """Writes traces of what will have been played, if they are wanted. What is asked for is checked before."""
    if traces.trace is None:
        return lambda played: []
    from fourfold.planner.run_memory import job_of
    from fourfold.report.trace import check_traces, parse_ranks, write_traces
    from fourfold.report.trace_groups import Sizes

    folder = traces.trace
    options: dict[str, Any] = {
        "ranks": None if traces.trace_ranks is None else parse_ranks(traces.trace_ranks, plan.grid.size),
        "skew_ms": traces.skew_ms or 0.0,
        "steps": 1 if traces.trace_steps is None else traces.trace_steps,
        "merged": traces.merged,
        "compress": traces.gzip,
        "gpus_per_node": plan.recipe.cluster.gpus_per_node,
    }
    check_traces(folder, plan.grid.size, **options)

    def write(played: Played) -> list[str]:
        sizes = Sizes.of(job_of(plan, plan.phases[0]), plan.stages)
        files = write_traces(folder, scenario, played, seed=seed, sizes=sizes, **options)
        number = f"{len(files)} files, " if len(files) > 1 else ""
        return [f"traces: {number}{files[0]}{' ...' if len(files) > 1 else ''} (Perfetto opens them)"]

    return write


def _compared(plan: RunPlan, machines: Cluster, stack: str, *, as_json: bool) -> Callable[[], None]:
    from fourfold.planner.timing.stack import load_stack
    from fourfold.report.compare import compare_text
    from fourfold.simulator.compare import compare_schedules

    found = compare_schedules(plan, machines, load_stack(stack))
    text = json.dumps([asdict(one) for one in found]) if as_json else compare_text(found, machines)
    return lambda: print(text)


def _replayed(
    plan: RunPlan, recipe: Path, run: Path, step: int | None, drawings: Drawings, *, as_json: bool
) -> Callable[[], None]:
    from fourfold.report.replay import replay_json, replay_page, replay_text
    from fourfold.simulator.replay import read_action_logs
    from fourfold.simulator.replayed import replayed

    found = replayed(read_action_logs(run, step, num_ranks=plan.grid.size), plan.schedule, plan.grid)

    def show() -> None:
        written = _drawn(replay_page(found, name=recipe.stem), drawings) if drawings != Drawings() else []
        if as_json:
            print(json.dumps(replay_json(found)))
            return
        print(replay_text(found))
        if written:
            print("", *written, sep="\n")

    return show


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
    from fourfold.recipe.write import write_whole
    from fourfold.report.figures import figures_json, figures_page, figures_text
    from fourfold.report.files import check_target
    from fourfold.report.pictures import write_figure
    from fourfold.simulator.figures.every import FIGURES, chosen

    try:
        numbers = chosen(only)
        if page is not None and out is None:
            raise ValueError("--page: shows the pictures, so it needs --out, a folder for them")
        if out is not None:
            _make_folder(out)
            check_picture(out / f"figure-{numbers[0]}.png", option="--out")
        if page is not None:
            check_target(page, (".md",))
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
