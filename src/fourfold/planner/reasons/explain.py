"""Why a plan is as it is: the walk of the Scaling Book with this job's numbers, then the layout, then the paper's.

Formulas are those of `thresholds` and `cost`, with the corrections of what is printed elsewhere: one-way bandwidths,
what a GPU owns of its node's NICs, float32 gradients. Everything is data; `report.explain` prints it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.planner.arithmetic import count_parameters
from fourfold.planner.flops import CONVENTIONS, flops_per_token
from fourfold.planner.machines.chips import GIB
from fourfold.planner.memory.peak import RESERVED
from fourfold.planner.reasons.cost import gpus_for_state, minimum_gpus
from fourfold.planner.reasons.differences import compare_with_paper
from fourfold.planner.reasons.explain_bounds import (
    best_split_section,
    context_section,
    fsdp_section,
    pipeline_section,
    tp_section,
)
from fourfold.planner.reasons.explain_layout import layout_sections
from fourfold.planner.reasons.explanation import Explanation, Figure, Section
from fourfold.planner.reasons.published import preset_of
from fourfold.planner.reasons.thresholds import attention_seq_len
from fourfold.planner.search.words import many

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem
    from fourfold.planner.search.search import Plan

STATE_BYTES = 18  # per parameter: bf16 weights, float32 gradients, master weights and two moments
_SHOWN = ("model", "6p", "no_attention", "causal", "full", "palm_6n")  # of the conventions of `flops`


def explain(plan: Plan) -> Explanation:
    """All sections. Without a layout that fits, those about the layout are missing."""
    problem = plan.problem
    best = plan.candidates[0] if plan.candidates else None
    sections = [
        parameters_section(problem),
        flops_section(problem),
        minimum_section(problem),
        pure_dp_section(problem),
        fsdp_section(problem, best),
        tp_section(problem),
        best_split_section(problem),
        pipeline_section(problem, best, _other_way(plan, "pipeline", "no-pipeline")),
        context_section(problem, _other_way(plan, "cp", "no-cp")),
    ]
    if best is not None:
        sections += layout_sections(problem, best)
    return Explanation(plan, tuple(sections), compare_with_paper(plan))


def _other_way(plan: Plan, *kinds: str) -> str:
    """What the search says of the fastest layout that does it the other way."""
    for miss in plan.near_misses:
        if miss.kind in kinds:
            return f" {miss.reason[:1].upper()}{miss.reason[1:]}."
    return ""


def parameters_section(problem: Problem) -> Section:
    """By component, with the formulas."""
    config, count = problem.config, count_parameters(problem.config)
    layers, dim, size = config.num_layers, config.dim, config.head_dim
    heads = f"({config.num_heads} + {config.num_kv_heads})"
    of_attention = f"L 2 D d (H + H_kv) = {layers} x 2 x {dim} x {size} x {heads}"
    table = f"V D = {config.vocab_size} x {dim}"
    figures = (
        Figure("attention", count.attention, "parameters", of_attention),
        Figure("feed-forward", count.ffn, "parameters", f"L 3 D F = {layers} x 3 x {dim} x {config.ffn_dim}"),
        Figure("norms", count.norms, "parameters", f"(2 L + 1) D = {2 * layers + 1} x {dim}"),
        Figure("embedding", count.embedding, "parameters", table),
        Figure("head", count.head, "parameters", "the embedding itself" if config.tied else table),
        Figure("all", count.total, "parameters"),
    )
    notes = {
        "llama3-405b": ("Attention of 405B is 71.87 B; 70.5 B, which is in circulation, is not what its shapes give.",),
        "llama3-8b": ('The feed-forward share is 70.2 % here; "80 %" is that of 70B.',),
    }.get(preset_of(config) or "", ())
    share = count.ffn / count.total
    sentence = f"{count.total:,} parameters, {share:.1%} of them in feed-forward networks."
    return Section("parameters", "How many parameters", sentence, figures, notes)


def flops_section(problem: Problem) -> Section:
    """Per token in the conventions that people use, and per step."""
    config, seq_len = problem.config, problem.seq_len
    per_token = dict(flops_per_token(config, seq_len))
    if problem.imbalance is not None:  # documents: fewer pairs than the causal mask leaves
        of_pair = 12 * config.num_layers * config.num_heads * config.head_dim
        seen = problem.imbalance.pairs_per_sequence / seq_len
        per_token["model"] = per_token["no_attention"] + of_pair * seen
    figures = [Figure(f"per token, {name}", per_token[name], "FLOP", CONVENTIONS[name]) for name in _SHOWN]
    per_step = per_token["model"] * problem.tokens
    figures.append(Figure("per step, model", per_step, "FLOP", f"x {problem.tokens:,} tokens"))
    attention = per_token["model"] / per_token["no_attention"] - 1
    return Section(
        "flops",
        "How many FLOPs",
        f"{per_token['model'] / 1e12:.4f} TFLOP per token, of which attention adds {attention:.1%} to the products "
        f"with weights. It is no small part from about 8 D = {attention_seq_len(config.dim):,} tokens on; this job has "
        f"{seq_len:,}.",
        tuple(figures),
        ("Logs use all of these conventions; compare an MFU only with one of its own kind.",),
    )


def minimum_section(problem: Problem) -> Section:
    """The Scaling Book's teaching figure, and what state alone needs."""
    hbm, config = problem.cluster.chip.hbm_bytes, problem.config
    total, usable = count_parameters(config).total, hbm - RESERVED
    found = minimum_gpus(config, batch_tokens=problem.tokens, hbm_bytes=hbm)
    state = gpus_for_state(total, hbm_bytes=usable, bytes_per_parameter=STATE_BYTES)
    of_state = f"{STATE_BYTES} bytes x {total:,} / {usable / GIB:.1f} GiB"
    of_activations = f"4 per layer: 2 x 4 x {config.num_layers} x {config.dim} x {problem.tokens:,}"
    return Section(
        "minimum_gpus",
        "How many GPUs at least",
        f"Weights, gradients and optimizer state fill {many(state, 'GPU')}. With the activations of a whole step at "
        f"once it would be {many(found.gpus, 'GPU')}: a figure to think with and no lower bound, since micro-batches "
        "and pipelines hold a few sequences at a time.",
        (
            Figure("state, all sharded", state, "GPUs", of_state),
            Figure("weights", found.weights, "bytes", "2 bytes per parameter"),
            Figure("optimizer", found.optimizer, "bytes", "8 bytes per parameter, as the book counts: moments only"),
            Figure("activations of the step", found.activations, "bytes", of_activations),
            Figure("by the book", found.gpus, "GPUs", "their sum / memory of a GPU"),
        ),
        ("The Scaling Book's text says 3 activations per layer; its figures are those of 4.",),
    )


def pure_dp_section(problem: Problem) -> Section:
    """Every GPU with a whole replica."""
    usable, total = problem.cluster.chip.hbm_bytes - RESERVED, count_parameters(problem.config).total
    needed, most = STATE_BYTES * total, usable / STATE_BYTES
    if needed <= usable:
        verdict = f"which fits in {usable / GIB:.1f}; but activations come on top"
    else:
        verdict = f"{needed / usable:,.1f} times what a GPU has"
    return Section(
        "pure_dp",
        "Why not data parallelism alone",
        f"A whole replica of weights, gradients and optimizer state is {needed / GIB:,.0f} GiB, {verdict}. Without "
        f"sharding, models end at {most / 1e9:.2g} B parameters.",
        (
            Figure("one replica", needed, "bytes", f"{STATE_BYTES} bytes x {total:,}"),
            Figure("largest model", most, "parameters", f"{usable / GIB:.1f} GiB / {STATE_BYTES} bytes"),
        ),
        ("10 bytes per parameter, which is in circulation, leaves out gradients and master weights.",),
    )
