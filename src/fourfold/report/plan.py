"""The answer of `fourfold plan` as people read it: layouts from best on, memory, near misses, and what the paper does.

On a terminal with colour and lines, in its width; elsewhere plain ASCII, a statement a line.
"""

from __future__ import annotations

import io
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.reasons.as_recipe import has_spare, named_cluster, untrainable
from fourfold.planner.search.infeasible import Infeasible
from fourfold.planner.search.judge import Candidate
from fourfold.planner.search.misses import NearMiss
from fourfold.planner.search.paper import PaperAnswer, paper_layout
from fourfold.planner.search.problem import Problem
from fourfold.planner.search.search import Plan
from fourfold.planner.search.words import layout_words, many, pipeline_words

PLAIN_WIDTH = 4000  # characters; plain sentences are never wrapped
LEGEND_WIDTH = 120  # characters of a line of the legend, which no program reads
_EXCLUDED = (
    "loading of data, saving of checkpoints, validation, evaluation, restarts; memory of the host, and of "
    "other programs on a GPU"
)


def print_plan(plan: Plan, *, file: TextIO | None = None) -> None:
    """Prints a plan; pretty where `file` (default stdout) is a terminal, plain elsewhere."""
    file = sys.stdout if file is None else file
    if file.isatty():
        console = Console(file=file, highlight=False)
        console.print(_render(plan, width=console.width))
    else:
        print(plan_text(plan), file=file)


def plan_text(plan: Plan) -> str:
    """The plain form: ASCII, no colour, no trailing spaces."""
    return as_plain(_render(plan))


def as_plain(what: RenderableType, *, width: int = PLAIN_WIDTH) -> str:
    """Plain lines of something that rich renders, in so many characters."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False)
    console.print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def seconds_text(seconds: float) -> str:
    """Three digits: 412, 38.2, 6.00, 0.0421."""
    if seconds < 0.995:
        return f"{seconds:.3g}"
    return f"{seconds:.{2 if seconds < 9.995 else 1 if seconds < 99.95 else 0}f}"


def _render(plan: Plan, *, width: int | None = None) -> RenderableType:
    """`width`: of the terminal; None: plain."""
    problem, paper = plan.problem, paper_layout(plan.problem)
    where = f"{problem.gpus:,} {problem.cluster.chip.title}{named_cluster(problem)}"
    name = Text.assemble("Plan for ", (problem.name, "bold"), f" on {where}")
    parts: list[RenderableType] = [name, Padding(_grid(_facts(plan)), (0, 0, 1, 2))]
    if plan.infeasible is not None:
        parts.append(_infeasible(plan.infeasible))
    if plan.candidates:
        table = _table(problem, plan.candidates, width=width, numbered=True)
        parts += [
            _title("Layouts, fastest first"),
            table,
            *_by_rank(plan.candidates[0]),
            _legend(plan, pretty=width is not None),
        ]
    if len(plan.pareto) > 1:
        table = _table(problem, plan.pareto, width=width)
        parts += [
            Text(),
            _title("Less memory for more time (by closed forms, a percent or two beside the above)"),
            table,
        ]
    misses = [miss for miss in plan.near_misses if miss.kind != "paper"]
    if misses:
        parts += [Text(), _title("Near misses"), *_misses(misses, pretty=width is not None)]
    if plan.own is not None and plan.own.unjudged is not None:
        parts.append(Padding(Text(f"The recipe's layout is not judged: {plan.own.unjudged}."), (0, 0, 0, 2)))
    theirs = [miss for miss in plan.near_misses if miss.kind == "paper"]
    parts += [Text(), _title("By the rules of Llama 3's paper"), *_paper(plan, paper, theirs, pretty=width is not None)]
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold cyan", no_wrap=True)
    facts.add_column()
    for label, sentence in rows:
        facts.add_row(label, Text(sentence))
    return facts


def _facts(plan: Plan) -> list[tuple[str, str]]:
    problem, config = plan.problem, plan.problem.config
    chip = problem.cluster.chip
    facts = [
        (
            "model",
            f"{config.num_layers} layers of width {config.dim:,}, {config.num_heads} heads ({config.num_kv_heads} "
            f"key-value), ffn {config.ffn_dim:,}, vocabulary {config.vocab_size:,}",
        ),
        (
            "step",
            f"{many(problem.sequences, 'sequence')} of {problem.seq_len:,} tokens = {problem.tokens:,} tokens in "
            f"{problem.precision.name.lower()}",
        ),
        ("gpu", f"{chip.name}: {chip.hbm_bytes / GIB:.1f} GiB as a program sees it, {_links(problem)}"),
        ("stack", f"{problem.stack.name}: {problem.stack.description}"),
    ]
    if not problem.is_measured:
        facts.append(("CAREFUL", _unmeasured(problem)))
    if problem.documents is not None:
        facts.append(("documents", str(problem.documents)))
    if problem.limits:
        limits = ", ".join(f"{name} = {' or '.join(map(str, values))}" for name, values in problem.limits.items())
        facts.append(("limits", limits))
    searched = (
        f"{plan.evaluated:,} layouts judged in {plan.seconds:.2f} s; {plan.feasible:,} of those judged fit in memory"
    )
    if plan.slow:
        searched += f"; {plan.slow:,} more are too slow to matter"
    if plan.hopeless:
        searched += f"; {plan.hopeless:,} more are too large by weights and optimizer state alone"
    return [*facts, ("search", searched)]


def _unmeasured(problem: Problem) -> str:
    return (
        f"no run on {problem.cluster.chip.name} in {problem.precision.name.lower()} has been measured: "
        "take its rates as guesses; the band is wider"
    )


def _links(problem: Problem) -> str:
    cluster = problem.cluster
    links = f"{cluster.link / 1e9:.0f} GB/s in a node of {cluster.domain:,}, {cluster.nic / 1e9:g} GB/s beyond"
    if cluster.oversubscription > 1:
        links += f", {cluster.nic / cluster.oversubscription / 1e9:.3g} GB/s beyond {cluster.tier:,} GPUs"
    return f"{links} (one-way)"


def _table(problem: Problem, candidates: Sequence[Candidate], *, width: int | None, numbered: bool = False) -> Table:
    """A row per candidate; of two lines where the terminal is too narrow."""
    table = _table_of(problem, candidates, pretty=width is not None, wide=True, numbered=numbered)
    unlimited = Console(width=PLAIN_WIDTH)
    if width is not None and unlimited.measure(table).maximum > width:
        return _table_of(problem, candidates, pretty=True, wide=False, numbered=numbered)
    return table


def _table_of(problem: Problem, candidates: Sequence[Candidate], *, pretty: bool, wide: bool, numbered: bool) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD if pretty else None,
        padding=0 if pretty else (0, 1, 0, 0),  # the lines of a box have a space of their own
        pad_edge=False,
        header_style="bold",
    )
    if numbered:
        table.add_column("", justify="right", no_wrap=True)
    for title, justify in _COLUMNS if wide else _NARROW:
        table.add_column(title, justify=justify, no_wrap=wide or title != "pipeline")
    for number, one in enumerate(candidates, 1):
        cells = _cells(problem, one) if wide else _narrow_cells(problem, one)
        table.add_row(*([str(number)] if numbered else []), *cells, style="bold" if numbered and number == 1 else "")
    return table


_COLUMNS: tuple[tuple[str, JustifyMethod], ...] = (
    ("tp cp pp dp", "left"), ("pipeline", "left"), ("ZeRO", "right"), ("recompute", "left"), ("s/step", "right"),
    ("(band)", "right"), ("MFU", "right"), ("tok/s/GPU", "right"), ("GiB", "right"), ("rank", "right"),
    ("spare", "right"),
)  # fmt: skip
_NARROW: tuple[tuple[str, JustifyMethod], ...] = (
    ("tp cp pp dp", "left"), ("pipeline", "left"), ("ZeRO\nrecompute", "left"), ("s/step\n(band)", "right"),
    ("MFU", "right"), ("tok/s\n/GPU", "right"), ("GiB\n(rank)", "right"), ("spare", "right"),
)  # fmt: skip


def _cells(problem: Problem, one: Candidate) -> list[str]:
    low, high = one.step_seconds_band
    tight = "" if has_spare(problem, one) else "!"
    return [
        f"{one.tp} {one.cp} {one.pp} {one.dp}",
        pipeline_words(one),
        str(one.zero),
        one.recompute + ("*" if untrainable(problem, one) else ""),
        seconds_text(one.step_seconds),
        f"{seconds_text(low)}-{seconds_text(high)}",
        f"{one.mfu:.1%}",
        f"{one.tokens_per_second_per_gpu:,.0f}",
        f"{one.memory_bytes / GIB:.1f}",
        str(one.worst_rank),
        f"{spare_bytes(problem, one) / GIB:.1f}{tight}",
    ]


def _narrow_cells(problem: Problem, one: Candidate) -> list[str]:
    layout, pipeline, zero, recompute, step, band, mfu, rate, gib, rank, spare = _cells(problem, one)
    return [layout, pipeline, f"{zero} {recompute}", f"{step}\n{band}", mfu, rate, f"{gib}\n({rank})", spare]


def spare_bytes(problem: Problem, one: Candidate) -> float:
    """What the fullest GPU has left of what a program may use: 1 GiB of it is the context's and NCCL's."""
    return problem.cluster.chip.hbm_bytes - RESERVED - one.memory_bytes * problem.stack.allocator


def _by_rank(one: Candidate) -> list[Text]:
    """Every pipeline rank of the first layout: the fullest is not always the first, nor are the others alike."""
    if len(one.ranks) < 2:
        return []
    sizes = " ".join(f"{rank.total / GIB:.1f}" for rank in one.ranks)
    return [Text(f"GiB of layout 1 on pipeline ranks 0 to {len(one.ranks) - 1}: {sizes}")]


def _legend(plan: Plan, *, pretty: bool) -> Text:
    """What the columns and marks mean; of a pipe, in lines of 120 characters."""
    lines = list(_legend_lines(plan))
    if not pretty:
        lines = [part for line in lines for part in textwrap.wrap(line, LEGEND_WIDTH, break_on_hyphens=False)]
    return Text("\n".join(lines), style="dim")


def _legend_lines(plan: Plan) -> Iterator[str]:
    problem, shown = plan.problem, (*plan.candidates, *plan.pareto)
    chip, allocator = problem.cluster.chip, problem.stack.allocator
    low, high = problem.stack.allocator_band
    yield (
        "v: virtual stages per rank; nc: consecutive micro-batches; mb: sequences per micro-batch; light: embedding "
        "and head count as a layer each. Of layouts that hardly differ a few are shown; a percent or two is a tie."
    )
    if any(one.pp == 1 for one in shown):
        stages = any(one.pp == 1 and one.virtual_stages > 1 for one in shown)
        parts = "; v is then the number of parts of the layers whose gradients are reduced one at a time" * stages
        yield f"none: no pipeline{parts}."
    yield "band: nine of ten measured runs lie in it. MFU: 6 (P - V D) and causal attention, of the dense peak."
    yield (
        "GiB (2^30 bytes): allocated at most, on this pipeline rank. "
        f"spare: what is left of {chip.hbm_bytes / GIB:.1f} - {RESERVED / GIB:.1f} GiB of one {chip.name} when the "
        f"allocator has lost {allocator - 1:.0%} ({low - 1:.0%} to {high - 1:.0%} have been measured)."
    )
    if not all(has_spare(problem, one) for one in shown):
        yield f"!: it would not fit if the allocator lost the {high - 1:.0%}."
    reasons = dict.fromkeys(reason.partition(": ")[2] for one in shown for reason in untrainable(problem, one))
    if reasons:
        yield f"*: `fourfold train` cannot run it ({'; '.join(reasons)})."
    yield f"Not counted: {_EXCLUDED}."


def _misses(misses: Iterable[NearMiss], *, pretty: bool) -> list[RenderableType]:
    """What and why: on two lines of a terminal, on one elsewhere."""
    if not pretty:
        table = Table.grid(padding=(0, 2))
        for miss in misses:
            table.add_row(layout_words(miss.candidate), Text(miss.reason))
        return [Padding(table, (0, 0, 0, 2))]
    parts: list[RenderableType] = []
    for miss in misses:
        parts += [
            Padding(Text(layout_words(miss.candidate)), (0, 0, 0, 2)),
            Padding(Text(miss.reason, style="dim"), (0, 0, 0, 4)),
        ]
    return parts


def _paper(plan: Plan, paper: PaperAnswer, theirs: Sequence[NearMiss], *, pretty: bool) -> list[RenderableType]:
    if paper.refusal is not None:
        return [Padding(Text(f"No layout: {paper.refusal}."), (0, 0, 0, 2))]
    if plan.candidates and theirs and layout_words(plan.candidates[0]) == layout_words(theirs[0].candidate):
        return [Padding(Text(f"{layout_words(theirs[0].candidate)}: the first of the layouts above"), (0, 0, 0, 2))]
    if theirs:
        return _misses(theirs, pretty=pretty)
    pipeline = "none" if paper.pp == 1 else f"{paper.schedule} v{paper.virtual_stages}"
    what = f"{paper.layout}, {pipeline}, ZeRO-{paper.zero}"
    return [Padding(Text(what), (0, 0, 0, 2))]


def _infeasible(found: Infeasible) -> RenderableType:
    lines: list[RenderableType] = [
        Text(found.headline, style="bold red"),
        Padding(Text(found.constraint), (0, 0, 0, 2)),
    ]
    if found.changes:
        lines += [Text(), _title("What would fit")]
        lines += [Padding(Text(f"- {change}"), (0, 0, 0, 2)) for change in found.changes]
    return Group(*lines)
