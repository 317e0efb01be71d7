"""What communication allows: FSDP per tier, TP, both together; and why there is a pipeline, or CP, on top of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.planner import thresholds as bounds
from fourfold.planner.arithmetic import count_parameters
from fourfold.planner.chips import GIB
from fourfold.planner.explanation import Figure, Section
from fourfold.planner.judge import Candidate, allocatable_bytes, candidate
from fourfold.planner.misses import BYTES_WORDS, paper_job
from fourfold.planner.paper import PaperAnswer, context_ways, fsdp_intensity, node_ways
from fourfold.planner.published import preset_of

if TYPE_CHECKING:
    from fourfold.planner.problem import Problem

_SEQUENCE = 8_192  # tokens of the example micro-batch, if sequences are longer


def peak_of(problem: Problem) -> float:
    """FLOP/s of one GPU, dense, in the precision that is trained in."""
    return problem.cluster.chip.peaks[problem.precision.name.lower()]


def fsdp_section(problem: Problem, best: Candidate | None) -> Section:
    """Tokens per GPU against the threshold of every tier."""
    cluster, peak = problem.cluster, peak_of(problem)
    limits = bounds.thresholds(cluster, peak=peak, ffn_dim=problem.config.ffn_dim)
    per_gpu, domain = problem.tokens / problem.gpus, min(cluster.domain, cluster.gpus)
    flops, inside = f"{peak / 1e12:,.1f}e12", f"{cluster.link / 1e9:.0f}e9"
    nics = f"({domain} x {cluster.nic / 1e9:g}e9)"
    figures = [
        Figure("tokens per GPU", per_gpu, "tokens", f"{problem.tokens:,} / {problem.gpus:,}"),
        Figure("inside a node", limits.fsdp_in_domain, "tokens", f"C / W = {flops} / {inside}, one-way"),
    ]
    where, bound = "inside a node", limits.fsdp_in_domain
    if problem.gpus > domain:
        across = f"{flops} / {nics}; TP inside a node changes nothing"
        figures.append(Figure("across nodes", limits.fsdp_across, "tokens", across))
        where, bound = "across nodes", limits.fsdp_across_top
    if limits.fsdp_across_top > limits.fsdp_across:
        beyond = f"x {cluster.oversubscription:g} beyond {cluster.tier:,} GPUs"
        figures.append(Figure("across the top tier", limits.fsdp_across_top, "tokens", beyond))
    sentence = f"FSDP {where} hides from {bound:,.0f} tokens per GPU on; this step has {per_gpu:,.0f}"
    spanned = 1.0 if best is None else max(1.0, best.tp * best.pp / domain)
    if best is not None and spanned > 1:
        by = f"/ {spanned:g} nodes that tp x pp = {best.tp} x {best.pp} span"
        figures.append(Figure("across nodes, this layout", bound / spanned, "tokens", by))
        sentence += f", and TP and PP of this layout span {spanned:g} nodes, which makes it {bound / spanned:,.0f}"
    verdict = "it hides" if per_gpu >= bound / spanned else "it does not hide"
    return Section(
        "fsdp",
        "When FSDP hides",
        f"{sentence}: {verdict}.",
        tuple(figures),
        (
            "Bandwidths are one-way per GPU: an H100 has 450 GB/s of NVLink, not 900, and owns 50 of its node's 400.",
            "Tokens are counted per GPU; comparing those of a DP group with these bounds flatters by tp x pp.",
        ),
    )


def tp_section(problem: Problem) -> Section:
    """The bound, and what TP costs where it is exposed."""
    cluster, config, peak = problem.cluster, problem.config, peak_of(problem)
    limits = bounds.thresholds(cluster, peak=peak, ffn_dim=config.ffn_dim)
    domain = min(cluster.domain, cluster.gpus)
    flops, inside = f"{peak / 1e12:,.1f}e12", f"{cluster.link / 1e9:.0f}e9"
    figures = [
        Figure("bound inside a node", limits.tp_in_domain, "GPUs", f"F W / C = {config.ffn_dim} x {inside} / {flops}")
    ]
    sentence = f"Its messages could hide up to tp = F W / C = {limits.tp_in_domain:.1f} inside a node"
    if problem.gpus > domain:
        nics = f"{config.ffn_dim} x {domain} x {cluster.nic / 1e9:g}e9 / {flops}"
        figures.append(Figure("bound across nodes", limits.tp_across, "GPUs", nics))
        sentence += f", which has {domain:,} GPUs, and {limits.tp_across:.1f} across"
    tp, tokens = node_ways(problem), min(problem.seq_len, _SEQUENCE)
    if tp > 1:
        sending = bounds.tp_layer_seconds(tokens, config.dim, tp=tp, bandwidth=cluster.link)
        count = count_parameters(config)
        multiplying = 2 * (count.attention + count.ffn) / config.num_layers * tokens / tp / peak
        sent = f"4 x 2 x {tokens:,} x {config.dim} bytes x {tp - 1}/{tp} / {inside}"
        figures += [
            Figure(f"messages of a layer's forward, tp = {tp}", sending, "s", sent),
            Figure("its products", multiplying, "s", f"2 x parameters x {tokens:,} tokens / {tp} / C"),
        ]
        sentence += (
            f". Mostly they do not hide: at tp = {tp} a layer's forward over {tokens:,} tokens sends for "
            f"{sending * 1e3:.2f} ms, and multiplies for {multiplying * 1e3:.2f} ms at peak"
        )
    return Section(
        "tp_bound",
        "How far tensor parallelism goes",
        f"{sentence}.",
        tuple(figures),
        (
            "There are four collectives per layer and pass (ISCA'25): an all-gather and a reduce-scatter around "
            "attention, and the same around the feed-forward network.",
        ),
    )


def best_split_section(problem: Problem) -> Section:
    """X_opt, and whether FSDP with TP alone would do."""
    cluster, ffn, peak = problem.cluster, problem.config.ffn_dim, peak_of(problem)
    outer, inner = cluster.link if problem.gpus <= cluster.domain else cluster.nic, cluster.link
    ways = bounds.best_fsdp_ways(problem.tokens, problem.gpus, ffn, fsdp_bandwidth=outer, tp_bandwidth=inner)
    least, per_gpu = bounds.fsdp_tp_tokens(ffn, peak, outer, inner), problem.tokens / problem.gpus
    fabric = f"{outer / 1e9:g} / {inner / 1e9:g}"
    of_ways = f"sqrt(B N W_X / (F W_Y)) = sqrt({problem.tokens:,} x {problem.gpus:,} x {fabric} / {ffn})"
    of_least = f"4 (C / W_X) (C / W_Y) / F = 4 x {peak / outer:,.0f} x {peak / inner:,.0f} / {ffn}"
    verdict = "computation" if per_gpu >= least else "communication"
    split = f"X_opt = {ways:,.0f} ways of FSDP and {problem.gpus / ways:.3g} of TP"
    if ways >= problem.gpus:
        split = f"no TP, as X_opt = {ways:,.0f} ways of FSDP are more than there are GPUs"
    return Section(
        "x_opt",
        "FSDP and TP together",
        f"They send least with {split}. One after another they "
        f"hide from {least:,.0f} tokens per GPU on; this step has {per_gpu:,.0f}, so that {verdict} bounds it.",
        (
            Figure("X_opt", ways, "GPUs", of_ways),
            Figure("tokens per GPU to hide both", least, "tokens", of_least),
        ),
        ("C^2 / W^2 / 2 F, which is in circulation for this bound, is eight times too small.",),
    )


def pipeline_section(problem: Problem, searched: str = "") -> Section:
    """FSDP and TP inside a node without a pipeline: its memory, and whether ZeRO-3 could hide what it gathers."""
    cluster, tp = problem.cluster, node_ways(problem)
    cp = context_ways(problem, tp) or 1
    flat, tokens = without_pipeline(problem, tp, cp), problem.seq_len // cp
    bound, usable = fsdp_intensity(problem, tp), allocatable_bytes(problem)
    largest = sorted(flat.memory_parts.items(), key=lambda part: -part[1])[:2]
    parts = " and ".join(f"{size / GIB:.1f} of {BYTES_WORDS[name]}" for name, size in largest)
    sentence = (
        f"Without one, {flat.layout} with ZeRO-1 and no recomputation allocates {flat.memory_bytes / GIB:,.1f} GiB, "
        f"{parts}, of {usable / GIB:.1f}"
    )
    sign = ">=" if tokens >= bound else "<"
    part = "one sequence" if cp == 1 else f"a sequence over cp = {cp}"
    gathers = f"ZeRO-3 has {tokens:,} FLOP per byte between gathers ({part}), and the network wants {bound:,.0f}"
    if flat.fits:
        sentence += "; it fits, so that a pipeline is a choice."
    elif tokens >= bound:
        sentence += f", and does not fit. {gathers}: that would hide, so that a pipeline is a choice."
    else:
        sentence += f", and does not fit. {gathers}: that would not hide. A pipeline cuts layers and sends activations."
    ours = (
        "C / W inside a node" if cluster.gpus <= cluster.domain else f"C / W of a rank's part of the NICs at tp = {tp}"
    )
    return Section(
        "why_pp",
        "Why pipeline parallelism",
        sentence + searched,
        (
            Figure("allocated without a pipeline", flat.memory_bytes, "bytes", f"{flat.layout}, ZeRO-1"),
            Figure("can be allocated", usable, "bytes"),
            Figure("FLOP per gathered byte", tokens, "FLOP/byte", f"2 x {tokens:,} / 2 bytes {sign} {bound:,.0f}"),
            Figure("what the network wants", bound, "FLOP/byte", ours),
        ),
        ("tp 8 x dp 16 for 70B on 128 H100, a plan in circulation, leaves out that gradients are float32.",)
        if preset_of(problem.config) == "llama3-70b"
        else (),
    )


def without_pipeline(problem: Problem, tp: int, cp: int = 1) -> Candidate:
    """FSDP (ZeRO-1) with TP and CP alone, whether it fits or not, by the closed forms."""
    dp = max(1, problem.gpus // (tp * cp))
    flat = PaperAnswer(tp=tp, cp=cp, pp=1, dp=dp, virtual_stages=1, nc=1, schedule="1f1b", zero=1)
    return candidate(problem, paper_job(problem, flat))


def context_section(problem: Problem, searched: str = "") -> Section:
    """Sequences run out before GPUs do."""
    gpus, sequences, tp = problem.gpus, problem.sequences, node_ways(problem)
    wanted = gpus / (sequences * tp)
    by = f"GPUs / (sequences x tp) = {gpus:,} / ({sequences:,} x {tp})"
    figures = (
        Figure("sequences per step", sequences, "count", f"{problem.tokens:,} / {problem.seq_len:,}"),
        Figure("cp from which bs >= pp", wanted, "", by),
    )
    if wanted > 1:
        sentence = (
            f"{sequences:,} sequences on {gpus:,} GPUs leave fewer than pp micro-batches to a DP group at tp = {tp}; "
            f"cutting every sequence over cp = {wanted:.3g} ranks or more gives bs >= pp again."
        )
    else:
        sentence = (
            f"{sequences:,} sequences are enough for {gpus:,} GPUs at tp = {tp}: bs >= pp without it. Only memory, or "
            "messages smaller than TP's, can ask for it."
        )
    return Section("why_cp", "Why context parallelism", sentence + searched, figures)
