"""What is said of one layout: ZeRO mode, bubble, memory by rank, where the step goes, MFU, and what the run costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.planner.flops import flops_per_token
from fourfold.planner.jobs import Precision
from fourfold.planner.machines.chips import GIB
from fourfold.planner.reasons.cost import FAILURES_PER_GPU_DAY, checkpointing, run_cost
from fourfold.planner.reasons.explanation import Figure, Section
from fourfold.planner.reasons.published import training_tokens
from fourfold.planner.search.judge import Candidate, allocatable_bytes
from fourfold.planner.search.misses import BYTES_WORDS, SECONDS_WORDS
from fourfold.planner.search.paper import zero_rule

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem

_SHOWN = 5e-4  # of a step: parts that are less share a line


def layout_sections(problem: Problem, one: Candidate) -> tuple[Section, ...]:
    """The sections that need a layout."""
    return (
        zero_section(problem, one),
        bubble_section(problem, one),
        memory_section(problem, one),
        time_section(one),
        mfu_section(problem, one),
        cost_section(problem, one),
    )


def micro_batches(problem: Problem, one: Candidate) -> int:
    """Per step and DP group."""
    return problem.sequences // (one.dp * one.micro_batch)


def zero_section(problem: Problem, one: Candidate) -> Section:
    """ISCA'25 3.1.3, with bs and not nc (facts row 1)."""
    per_group = problem.sequences // one.dp
    mode, kind = zero_rule(per_group, pp=one.pp, virtual_stages=one.virtual_stages)
    sign = ">=" if per_group >= 2 * one.pp else "<"
    rule = f"bs = {per_group} {sign} 2 pp = {2 * one.pp}, so the paper's rule says ZeRO-{mode} with {kind}"
    same = (mode, kind) == (one.zero, one.schedule)
    mine = "and so it is" if same else f"the fastest that fits has ZeRO-{one.zero} with {one.schedule}"
    if one.pp == 1:
        rule, mine = (
            "Without a pipeline the paper's rule has nothing to say",
            f"the fastest that fits has ZeRO-{one.zero}",
        )
    return Section(
        "zero_rule",
        "Which ZeRO mode",
        f"{rule}; {mine}.",
        (
            Figure("sequences per DP group, bs", per_group, "count", f"{problem.sequences:,} / {one.dp:,}"),
            Figure("2 pp", 2 * one.pp, "count", f"2 x {one.pp}"),
        ),
        ("The rule is about bs, the sequences of a DP group, and not about nc, as digests of the paper have it.",),
    )


def bubble_section(problem: Problem, one: Candidate) -> Section:
    """Both definitions, by formula and as played."""
    count, pp, v = micro_batches(problem, one), one.pp, one.virtual_stages
    if pp == 1:
        parts = (
            f" Its {v} virtual stages are parts of the layers whose gradients are reduced one at a time."
            if v > 1
            else ""
        )
        return Section("bubble", "The bubble", f"There is none: no rank waits for another stage.{parts}")
    if count >= pp:
        by_formula, formula = (pp - 1) / (count * v), f"(pp - 1) / (nmb v) = {pp - 1} / ({count} x {v})"
    else:
        by_formula = (pp * v + count - 1 - count * v) / (count * v)
        formula = f"(pp v + nmb - 1 - nmb v) / (nmb v), nmb = {count} < pp = {pp}"
    return Section(
        "bubble",
        "The bubble",
        f"Pipeline ranks idle for {one.bubble_over_compute:.1%} of their computing time, which is "
        f"{one.bubble_over_total:.1%} of the pipeline's time; equal stages and free messages would make it "
        f"{by_formula:.1%} and {by_formula / (1 + by_formula):.1%}.",
        (
            Figure(
                "idle / computing, r, as played", one.bubble_over_compute, "share", "unequal stages, messages take time"
            ),
            Figure("idle / total, f, as played", one.bubble_over_total, "share", "f = r / (1 + r)"),
            Figure("idle / computing by formula", by_formula, "share", formula),
            Figure("idle / total by formula", by_formula / (1 + by_formula), "share", "r / (1 + r)"),
        ),
    )


def memory_section(problem: Problem, one: Candidate) -> Section:
    """The fullest rank by kind, and what is left; `Candidate.ranks` has them all."""
    usable, reserved = allocatable_bytes(problem), one.memory_bytes * problem.stack.allocator
    hbm = problem.cluster.chip.hbm_bytes
    low, high = problem.stack.allocator_band
    figures = [Figure(BYTES_WORDS[name], value, "bytes") for name, value in one.memory_parts.items() if value]
    figures += [
        Figure("allocated at most", one.memory_bytes, "bytes", "all of it at its worst moment, as played"),
        Figure(
            "reserved with the allocator's losses",
            reserved,
            "bytes",
            f"x {problem.stack.allocator:g}; measured between {low:g} and {high:g}",
        ),
        Figure("left", hbm - GIB - reserved, "bytes", f"{hbm / GIB:.1f} GiB - 1 GiB (context, NCCL) - reserved"),
    ]
    counted = ""
    if one.zero < 3:
        held, whole = one.memory_parts["gradients"], _whole_gradients(problem, one)
        counted, more = _how_gradients_count(problem, one, held=held, whole=whole), max(whole - held, 0.0)
        figures.append(
            Figure("gradients of all its layers at once", whole, "bytes", f"+{more / GIB:.1f} GiB if held so")
        )
    risky = one.memory_bytes * high > hbm - GIB
    risk = f" With the most that allocators have been seen to lose, {high - 1:.0%}, it would not." if risky else ""
    rank = f"pipeline rank {one.worst_rank}" if one.pp > 1 else "every rank"
    fits = "It fits" if one.fits else "It does not fit"
    return Section(
        "memory",
        "Memory per rank",
        f"{fits}: {rank} allocates {one.memory_bytes / GIB:.1f} GiB at most, of {usable / GIB:.1f} that one "
        f"{problem.cluster.chip.name} leaves to it.{risk if one.fits else ''}{counted}",
        tuple(figures),
        ("Gradients are summed in float32 (4 bytes each) and whole between reduce-scatters; plans that leave them out, "
         "or count 8 bytes of optimizer state instead of 12, come out up to half too small.",),
    )  # fmt: skip


def _whole_gradients(problem: Problem, one: Candidate) -> float:
    """Bytes of the sums of all parameters of the fullest rank; its weights have 2 bytes each, or 4 in float32."""
    each = 4 if problem.precision is Precision.FP32 else 2
    return one.memory_parts["weights"] * problem.stack.gradient_bytes / each


def _how_gradients_count(problem: Problem, one: Candidate, *, held: float, whole: float) -> str:
    """Which sums are there at the worst moment, and what other ways of holding them would add."""
    if whole - held < 0.02 * whole:
        return f" Of gradients, the sums of all its layers are there, {held / GIB:.1f} GiB."
    by_chunk = one.schedule == "afab" or one.zero == 2 or one.nc >= micro_batches(problem, one)
    why = "as a virtual stage's are reduced before the next one's begin" if by_chunk else "as not all have begun then"
    return (
        f" Of gradients, it holds {held / GIB:.1f} GiB at that moment, {why}; a buffer for all of them through the "
        f"step, as Megatron has, is {whole / GIB:.1f}: +{(whole - held) / GIB:.1f} GiB."
    )


def time_section(one: Candidate) -> Section:
    """The parts of a step, largest first."""
    total = one.step_seconds
    parts = sorted(one.breakdown.items(), key=lambda item: -item[1])
    shown = {name: seconds for name, seconds in parts if abs(seconds) >= _SHOWN * total}
    figures = [Figure(SECONDS_WORDS[name], seconds, "s", f"{seconds / total:.1%}") for name, seconds in shown.items()]
    rest = total - sum(shown.values())
    if abs(rest) >= 1e-6 * total:
        figures.append(Figure("what is less than each of these", rest, "s", f"{rest / total:.1%}"))
    low, high = one.step_seconds_band
    products, attention = (one.breakdown.get(name, 0.0) / total for name in ("matmul", "attention"))
    return Section(
        "step_time",
        "Where a step goes",
        f"{total:.3g} s, of which {products:.1%} are matrix products of the layers and {attention:.1%} attention; nine "
        f"of ten measured runs lie within {low:.3g} to {high:.3g} s of such a prediction.",
        tuple(figures),
    )


def mfu_section(problem: Problem, one: Candidate) -> Section:
    """One step in the conventions that logs use; all are shares of the dense peak."""
    peak = problem.cluster.chip.peaks[problem.precision.name.lower()]
    rate = one.tokens_per_second_per_gpu
    per_token = dict(flops_per_token(problem.config, problem.seq_len))
    seen = one.mfu * peak / rate  # with the pairs that documents leave
    rows = [
        ("6 (P - V D) and attention that masks leave", seen, "what Fourfold reports"),
        ("6 P", per_token["6p"], "no attention, and the embedding as if it were multiplied"),
        ("6 (P - V D) and the whole square", per_token["full"], "Megatron-LM, NeMo, MaxText, TorchTitan"),
    ]
    figures = [Figure(f"MFU, {name}", flops * rate / peak, "share", what) for name, flops, what in rows]
    figures += [Figure(f"FLOP/s per GPU, {name}", flops * rate, "FLOP/s") for name, flops, _ in rows]
    figures.append(
        Figure("tokens/s per GPU", rate, "tokens/s", f"{problem.tokens:,} / {one.step_seconds:.4g} s / GPUs")
    )
    return Section(
        "mfu",
        "MFU",
        f"{one.mfu:.1%} of {peak / 1e12:,.0f} TFLOP/s (dense), or {one.mfu_6p:.1%} counted as 6 P: "
        f"{seen * rate / 1e12:,.0f} and {per_token['6p'] * rate / 1e12:,.0f} TFLOP/s per GPU.",
        tuple(figures),
        ("Shares of the sparse peak, which vendors print first, are half as large, and no training reaches it.",),
    )


def cost_section(problem: Problem, one: Candidate) -> Section:
    """Days, GPU-hours, dollars and checkpoints of the whole training."""
    tokens, source = training_tokens(problem.config, problem.seq_len)
    steps = tokens / problem.tokens
    saving = checkpointing(problem.config, problem.cluster, step_seconds=one.step_seconds)
    ideal = run_cost(seconds=steps * one.step_seconds, gpus=problem.gpus)
    real = run_cost(seconds=steps * one.step_seconds, gpus=problem.gpus, goodput=saving.goodput)
    return Section(
        "cost",
        "What the training costs",
        f"{tokens / 1e12:.3g}T tokens take {real.days:,.1f} days, {real.gpu_hours:,.0f} GPU-hours and "
        f"${real.dollars:,.0f} at $2 a GPU-hour, of which {1 - saving.goodput:.1%} go to failures and checkpoints. "
        f"{saving.host_line()}",
        (
            Figure("tokens", tokens, "tokens", source),
            Figure("steps", steps, "steps", f"/ {problem.tokens:,} tokens"),
            Figure("tokens per GPU and step", problem.tokens / problem.gpus, "tokens"),
            Figure("days of steps alone", ideal.days, "days", f"x {one.step_seconds:.4g} s"),
            Figure("goodput", saving.goodput, "share", f"a failure every {saving.between_failures / 3600:,.1f} hours, "
                   f"{FAILURES_PER_GPU_DAY:.1e} per GPU and day as on Llama 3's cluster"),
            Figure("days", real.days, "days", "/ goodput"),
            Figure("GPU-hours", real.gpu_hours, "GPU-hours"),
            Figure("cost", real.dollars, "dollars", "$2 per GPU-hour"),
            Figure("a checkpoint", saving.bytes, "bytes", "12 bytes per parameter: float32 weights and moments"),
            Figure("a checkpoint, per GPU", saving.bytes_per_gpu, "bytes"),
            Figure("main memory of a node to stage it", saving.host_bytes_per_node, "bytes"),
            Figure("between two checkpoints", saving.interval_seconds, "s", f"{saving.interval_steps:,} steps (Daly)"),
        ),
        (
            "GPUs fail nine times as often as 2 % per GPU and year, a figure in circulation: there were 419 unexpected "
            "stops in 54 days on 16,384 GPUs.",
            "16 to 18 bytes per parameter are what training holds in memory, gradients included; a checkpoint has 12.",
        ),
    )  # fmt: skip
