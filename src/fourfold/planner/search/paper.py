"""How "Scaling Llama 3 Training" (ISCA 2025) sizes its four dimensions, as a procedure with this job's numbers.

The rules (its sections 3 and 5, Table 2) are those of a team with one model, one machine and a batch of 16M tokens.
They are followed here for any job as far as they reach:

1. sequences per step = tokens per step / sequence length.
2. TP: a micro-batch per pipeline rank, bs >= pp, asks for tp cp >= GPUs / sequences; a node ends it.
3. FSDP alone (2D) does where its gathers hide behind the micro-batch between them; else there is a pipeline (3D).
4. PP: the smallest that fits in memory, without recomputation, in 1F1B order with whole gradients.
5. CP: what TP leaves of rule 2: the smallest with bs >= pp.
6. A layer per virtual stage, and ZeRO and the schedule by bs.

Memory is counted with the paper's saved set, 62 % of the usual one: 0.33 GB per layer of 405B and micro-batch of 8,192
tokens at tp = 8 (slopes of its Figures 9 and 10). Whether the layout fits a present stack, the planner says beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fourfold.planner.arithmetic import FP32, count_parameters
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import ALLOCATOR, RESERVED
from fourfold.planner.memory.saved import load_rules
from fourfold.planner.search.contradictions import unfilled_node
from fourfold.planner.search.space import tensor_degrees
from fourfold.planner.search.words import many
from fourfold.recipe import ModelConfig

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem

_BF16 = 2  # bytes


@dataclass(frozen=True, slots=True)
class PaperAnswer:
    """The layout that the rules give, and how; or, with `refusal`, which rule has no answer (all sizes are 0 then)."""

    tp: int = 0
    cp: int = 0
    pp: int = 0
    dp: int = 0
    virtual_stages: int = 0
    nc: int = 0
    schedule: str = ""
    zero: int = 0
    split: str = "even"
    micro_batch: int = 1
    per_group: int = 0
    """Sequences per DP group, the paper's bs."""
    steps: tuple[str, ...] = ()
    """The rules that were followed, each with its numbers."""
    refusal: str | None = None

    @property
    def layout(self) -> str:
        """tp 8 cp 1 pp 16 dp 128."""
        return f"tp {self.tp} cp {self.cp} pp {self.pp} dp {self.dp}"


def zero_rule(per_group: int, *, pp: int, virtual_stages: int) -> tuple[int, str]:
    """(ZeRO mode, kind of schedule) by bs, the sequences of a DP group (ISCA'25 3.1.3).

    bs >= 2 pp: ZeRO-1 with 1F1B. Less: ZeRO-2 with all forwards first, where one stage's gradients at a time are whole.
    """
    if per_group >= 2 * pp:
        return 1, "interleaved" if virtual_stages > 1 else "1f1b"
    return 2, "afab"


def stages_rule(num_layers: int, pp: int) -> tuple[int, str]:
    """(virtual stages per rank, split): one layer per stage, the embedding and the head counting as a layer each if
    only so all ranks have as many (126 + 2 = 16 x 8)."""
    if pp == 1:
        return 1, "even"
    if num_layers % pp and (num_layers + 2) % pp == 0:
        return (num_layers + 2) // pp, "ends_light"
    return min(-(-num_layers // pp), (num_layers + 2) // pp), "even"


@dataclass(frozen=True, slots=True)
class _Fit:
    """A tp with the smallest pipeline that fits, in bytes per GPU."""

    tp: int
    cp: int
    pp: int
    zero: int
    bytes: float
    sentence: str = field(compare=False)


def paper_layout(problem: Problem) -> PaperAnswer:
    """Follows the rules for a job. Never raises: where they end, `refusal` says at which one."""
    sequences, seq_len, gpus = problem.sequences, problem.seq_len, problem.cluster.gpus
    tokens = sequences * seq_len
    steps = [f"1. {tokens:,} tokens per step / {seq_len:,} = {many(sequences, 'sequence')}; bs = {sequences:,} / dp."]

    if unfilled := unfilled_node(problem):
        return PaperAnswer(steps=tuple(steps), refusal=unfilled)
    lower, node = gpus / sequences, min(problem.cluster.domain, gpus)
    degrees = _node_degrees(problem)
    enough = [tp for tp in degrees if tp >= lower]
    asked = f"bs >= pp asks for tp cp >= {many(gpus, 'GPU')} / {many(sequences, 'sequence')} = {lower:.3g}"
    if enough and enough[0] == degrees[-1]:
        steps.append(f"2. {asked}; a node ends tp at {node}. So tp = {enough[0]}.")
    elif enough:
        steps.append(f"2. {asked}; a node ends tp at {node}. So tp = {enough[0]} or more, as memory wants it.")
    else:
        enough = degrees[-1:]
        steps.append(f"2. {asked}, beyond a node of {node}. So tp = {enough[0]}, and CP takes the rest (rule 5).")

    fits = [fit for tp in enough if (fit := _smallest_pipeline(problem, tp)) is not None]
    if not fits:
        return PaperAnswer(steps=tuple(steps), refusal=_refusal(problem, enough))
    best = min(fits, key=lambda fit: (fit.tp * fit.pp, fit.tp))
    steps.append(_why_a_pipeline(problem, best))
    steps.append(f"4. {best.sentence}")
    steps.append(_why_context(problem, best))

    dp = gpus // (best.tp * best.cp * best.pp)
    per_group = sequences // dp
    virtual_stages, split = stages_rule(problem.config.num_layers, best.pp)
    zero, schedule = zero_rule(per_group, pp=best.pp, virtual_stages=virtual_stages)
    if best.zero == 3:
        zero, schedule = 3, "1f1b"
    steps.append(_ending(problem.config.num_layers, best, virtual_stages, split, per_group, zero, schedule))
    return PaperAnswer(
        tp=best.tp,
        cp=best.cp,
        pp=best.pp,
        dp=dp,
        virtual_stages=virtual_stages,
        nc=per_group if schedule == "afab" else min(best.pp, per_group),
        schedule=schedule,
        zero=zero,
        split=split,
        per_group=per_group,
        steps=tuple(steps),
    )


def rule_bytes(problem: Problem, *, tp: int, cp: int, pp: int, zero: int) -> float:
    """Bytes per GPU by which the rules size PP: whole gradients, and as many micro-batches as 1F1B order ever holds.

    6 bytes per parameter of the rank (bf16 weights, float32 gradients; 18 / dp cp of them under ZeRO-3, with two layers
    gathered), 12 / (dp cp) for the optimizer, the saved set of the micro-batches in flight, and one layer's gathered
    K and V under CP. Without a pipeline the logits, too.
    """
    config = problem.config
    shards = problem.cluster.gpus // (tp * pp)
    per_rank = count_parameters(config).total / (tp * pp)
    layer = count_parameters(config).total / config.num_layers / tp
    static = 18 * per_rank / shards + 2 * _BF16 * layer if zero == 3 else (6 + 3 * FP32 / shards) * per_rank
    virtual_stages, _ = stages_rule(config.num_layers, pp)
    chunks = pp if virtual_stages == 1 else (virtual_stages - 1) * pp + 2 * (pp - 1) + 1
    layers = chunks * config.num_layers / (virtual_stages * pp)
    local = problem.seq_len / cp
    gathered = 0 if cp == 1 else 2 * _BF16 * problem.seq_len * config.num_kv_heads * config.head_dim / tp
    # In bf16, and in the loss its float32 copy, the softmax and its gradient. In a pipeline the first rank has most.
    logits = (_BF16 + 3 * FP32) * local * config.padded_vocab / tp if pp == 1 else 0
    return static + layers * saved_bytes(config, local) / tp + gathered + logits


def saved_bytes(config: ModelConfig, tokens: float) -> float:
    """The paper's saved set of one layer, before TP cuts it: 62 % of two norm inputs, two norm outputs, queries and
    attention's output, keys, values, and the three products of SwiGLU, in bf16."""
    numbers = 4 * config.dim + 2 * config.num_heads * config.head_dim
    numbers += 2 * config.num_kv_heads * config.head_dim + 3 * config.ffn_dim
    return load_rules("meta").share * _BF16 * tokens * numbers


def node_ways(problem: Problem) -> int:
    """The most tensor parallelism that a node allows; at most 8, as larger domains are no nodes of the paper's."""
    return max(tp for tp in _node_degrees(problem) if tp <= 8)


def _node_degrees(problem: Problem) -> list[int]:
    """Powers of two inside a node that divide the GPUs and what TP cuts."""
    node = min(problem.cluster.domain, problem.gpus)
    legal = tensor_degrees(problem.config)
    return [tp for tp in _powers_of_two(node) if tp in legal and problem.gpus % tp == 0]


def _usable(problem: Problem) -> float:
    """What a plan may allocate: all that a program sees, less the context, and with the allocator's losses."""
    return (problem.cluster.chip.hbm_bytes - RESERVED) / ALLOCATOR


def context_ways(problem: Problem, tp: int) -> int | None:
    """The smallest CP with bs >= pp: cp >= GPUs / (sequences tp). A power of two that divides GPUs and sequences."""
    gpus, seq_len = problem.cluster.gpus, problem.seq_len
    for cp in _powers_of_two(gpus // tp):
        cuts = gpus % (tp * cp) == 0 and (cp == 1 or seq_len % (2 * cp) == 0)
        if cuts and cp * tp * problem.sequences >= gpus:
            return cp
    return None


def _pipelines(problem: Problem, tp: int) -> Iterator[tuple[int, int]]:
    """(cp, pp) of the pipelines that rule 4 may choose among, shortest first: sequences are shared evenly."""
    cp, gpus, sequences = context_ways(problem, tp), problem.cluster.gpus, problem.sequences
    if cp is None:
        return
    for pp in range(1, min(gpus // (tp * cp), problem.config.num_layers + 2) + 1):
        dp, rest = divmod(gpus, tp * cp * pp)
        if not rest and sequences % dp == 0:
            yield cp, pp


def _refusal(problem: Problem, degrees: list[int]) -> str:
    """Why rule 4 has no answer with these tp: nothing divides, or nothing fits."""
    if any(True for tp in degrees for _ in _pipelines(problem, tp)):
        limit, rest = _usable(problem) / GIB, "as the rules know no recomputation"
        return f"rule 4 has no answer: with tp <= {degrees[-1]} no pipeline fits in {limit:.1f} GiB, {rest}"
    gpus, sequences, left = problem.cluster.gpus, problem.sequences, problem.cluster.gpus
    while (common := math.gcd(left, sequences)) > 1:
        left //= common
    most = f"tp <= {degrees[-1]} and pp <= {problem.config.num_layers + 2}"
    if left > 1:
        return (
            f"rule 4 has no answer: a dp with the factor {left:,} of {gpus:,} GPUs does not divide {sequences:,} "
            f"sequences ({sequences:,} % {left:,} = {sequences % left:,}), and with {most} nothing else takes it up"
        )
    return f"rule 4 has no answer: dp = {gpus:,} GPUs / (tp cp pp) divides {sequences:,} sequences with no {most}"


def _smallest_pipeline(problem: Problem, tp: int) -> _Fit | None:
    """For one tp the smallest pipeline that fits, or none at all with ZeRO-3 where its gathers hide."""
    usable, tried = _usable(problem), []
    for cp, pp in _pipelines(problem, tp):
        for zero in (1, 3) if pp == 1 and _hides(problem, tp, cp) else (1,):
            needed = rule_bytes(problem, tp=tp, cp=cp, pp=pp, zero=zero)
            what = f"pp = {pp}" + (" with ZeRO-3" if zero == 3 else "")
            if needed <= usable:
                before = f"{tried[-1]} does not, " if tried else ""
                sentence = (
                    f"Memory: {before}{what} fits: {needed / GIB:.1f} GiB of {usable / GIB:.1f} "
                    "(whole gradients, 1F1B order, no recomputation, the paper's saved set)."
                )
                return _Fit(tp, cp, pp, zero, needed, sentence)
            tried.append(f"{what} with {needed / GIB:.1f} GiB")
    return None


def fsdp_intensity(problem: Problem, tp: int) -> float:
    """Tokens of a micro-batch above which FSDP's gathers between nodes hide: peak / (what the NICs give a TP rank).

    The tp ranks of a node gather each their own part through its NICs: peak tp / (NICs of a node). tp = 8 on H100 gives
    989e12 / 50e9 = 19,780 FLOP per byte, as the paper has it; a job inside one node has NVLink instead. TP beyond a
    node has the NICs of all its nodes.
    """
    cluster = problem.cluster
    peak = max(cluster.chip.peaks.get(name, 0.0) for name in ("bf16", "fp16"))
    if cluster.gpus <= cluster.domain:
        return peak / cluster.link
    return peak * min(tp, cluster.domain) / (cluster.nic * cluster.domain)


def _hides(problem: Problem, tp: int, cp: int) -> bool:
    """A micro-batch of one sequence has seq / cp tokens per rank: 2 FLOPs per token and parameter of 2 bytes."""
    return problem.seq_len / cp >= fsdp_intensity(problem, tp)


def _why_a_pipeline(problem: Problem, best: _Fit) -> str:
    if problem.cluster.gpus == 1:
        return "3. FSDP has nobody to share with: there is one GPU."
    tokens, bound = problem.seq_len // best.cp, fsdp_intensity(problem, best.tp)
    compare = f"{tokens:,} FLOP/byte (one sequence per gather) {{}} the machine's {bound:,.0f}"
    gathers = f"its gathers per micro-batch (ZeRO-3) at tp = {best.tp}"
    if _hides(problem, best.tp, best.cp):
        return f"3. FSDP (2D) can hide {gathers}: {compare.format('>=')}; a pipeline only if memory wants one."
    where = "so ZeRO-3 would wait for weights, and memory is left to a pipeline (3D)"
    return f"3. FSDP alone (2D) cannot hide {gathers}: {compare.format('<')}, {where}."


def _why_context(problem: Problem, best: _Fit) -> str:
    gpus, sequences = problem.cluster.gpus, problem.sequences
    bs = sequences * best.tp * best.pp / gpus
    if best.cp == 1:
        return f"5. bs = {sequences:,} x {best.tp} x {best.pp} / {gpus:,} = {bs:g} >= pp = {best.pp}: no CP."
    return (
        f"5. Without CP bs = {sequences:,} x {best.tp} x {best.pp} / {gpus:,} = {bs:g} < pp = {best.pp}; "
        f"cp >= {gpus:,} / ({sequences:,} x {best.tp}) = {gpus / (sequences * best.tp):g} makes bs >= pp: "
        f"cp = {best.cp}."
    )


def _ending(
    num_layers: int, best: _Fit, virtual_stages: int, split: str, per_group: int, zero: int, schedule: str
) -> str:
    if best.pp == 1:
        stages = "One stage"
    elif split == "ends_light":
        stages = f"({num_layers} layers + embedding + head) / {best.pp} = {virtual_stages} virtual stages per rank"
    else:
        about = "=" if num_layers == best.pp * virtual_stages else "~"
        stages = f"{num_layers} layers / {best.pp} {about} {virtual_stages} virtual stages per rank"
    if zero == 3:
        return f"6. {stages}; ZeRO-3, since only sharded weights fit without a pipeline."
    sign = ">=" if per_group >= 2 * best.pp else "<"
    return f"6. {stages}; bs = {per_group} {sign} 2 pp = {2 * best.pp}: ZeRO-{zero} with {schedule}."


def _powers_of_two(limit: int) -> Iterator[int]:
    size = 1
    while size <= limit:
        yield size
        size *= 2
