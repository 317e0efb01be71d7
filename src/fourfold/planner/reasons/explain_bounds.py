"""What communication allows: FSDP per tier, TP, both together; and why there is a pipeline, or CP, on top of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fourfold.planner.arithmetic import count_parameters
from fourfold.planner.machines.chips import GIB
from fourfold.planner.reasons import thresholds as bounds
from fourfold.planner.reasons.explanation import Figure, Section
from fourfold.planner.reasons.published import preset_of
from fourfold.planner.search.judge import Candidate, allocatable_bytes, candidate
from fourfold.planner.search.misses import BYTES_WORDS, paper_job
from fourfold.planner.search.paper import PaperAnswer, context_ways, fsdp_intensity, node_ways
from fourfold.planner.search.words import many

if TYPE_CHECKING:
    from fourfold.planner.search.problem import Problem

_SEQUENCE = 8_192  # tokens of the example micro-batch, if sequences are longer


def peak_of(problem: Problem) -> float:
    """FLOP/s of one GPU, dense, in the precision that is trained in."""
    return problem.cluster.chip.peaks[problem.precision.name.lower()]


def fsdp_section(problem: Problem, best: Candidate | None) -> Section:
    """Tokens per GPU against the threshold of every tier."""
    cluster, peak = problem.cluster, peak_of(problem)
    limits = bounds.thresholds(cluster, peak=peak, ffn_dim=problem.config.ffn_dim)
    per_gpu, domain = problem.tokens / problem.gpus, min(cluster.domain, cluster.gpus)
    if problem.gpus == 1:
        return Section("fsdp", "When FSDP hides", "There is one GPU: nothing is shared, and nothing is sent.")
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
    sentence = (
        f"Traffic once per step (ZeRO-1: gradients reduced, weights gathered) {where} takes less time than the step's "
        f"products from {bound:,.0f} tokens per GPU on; this step has {per_gpu:,.0f}"
    )
    spanned = 1.0 if best is None else max(1.0, best.tp * best.pp / domain)
    if best is not None and spanned > 1:
        by = f"/ {spanned:g} nodes that tp x pp = {best.tp} x {best.pp} span"
        figures.append(Figure("across nodes, this layout", bound / spanned, "tokens", by))
        sentence += f", and TP and PP of this layout span {spanned:g} nodes, which makes it {bound / spanned:,.0f}"
    verdict = "it can hide" if per_gpu >= bound / spanned else "it cannot hide"
    return Section(
        "fsdp",
        "When FSDP hides",
        f"{sentence}: {verdict}.{_exposed(best)}",
        tuple(figures),
        (
            "Bandwidths are one-way per GPU: an H100 has 450 GB/s of NVLink, not 900, and owns 50 of its node's 400.",
            "Tokens are counted per GPU; comparing those of a DP group with these bounds flatters by tp x pp.",
        ),
    )


def _exposed(best: Candidate | None) -> str:
    """What the time model has of it, which knows what runs beside it."""
    if best is None:
        return ""
    if best.dp * best.cp == 1:
        return " In this layout no two ranks have the same weights, so that nothing is sent."
    seconds = f"{best.breakdown['dp']:.3g} s of {best.step_seconds:.3g} stay (see Where a step goes)"
    if best.zero == 3:
        return f" This layout has ZeRO-3, which gathers for every micro-batch instead: {seconds}."
    return f" Only the first forward and the last backward run beside it, not the whole step: {seconds}."


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
    if problem.gpus == 1:
        return Section("x_opt", "FSDP and TP together", "There is one GPU: nothing is sent.")
    split = f"X_opt = {ways:,.0f} ways of FSDP and {problem.gpus / ways:.3g} of TP"
    if ways >= problem.gpus:
        split = f"no TP, as X_opt = {ways:,.0f} ways of FSDP are more than there are GPUs"
    return Section(
        "x_opt",
        "FSDP and TP together",
        f"Without a pipeline they send least with {split}. FSDP once per step and TP in every layer, one after the "
        f"other, take less time than the products from {least:,.0f} tokens per GPU on; this step has {per_gpu:,.0f}, "
        f"so that {verdict} would bound such a layout.",
        (
            Figure("X_opt", ways, "GPUs", of_ways),
            Figure("tokens per GPU to hide both", least, "tokens", of_least),
        ),
        ("C^2 / W^2 / 2 F, which is in circulation for this bound, is eight times too small.",),
    )


def pipeline_section(problem: Problem, best: Candidate | None = None, searched: str = "") -> Section:
    """FSDP and TP alone, at the tp of the layout found: memory, and whether ZeRO-3 can hide its gathers."""
    key, title, cluster = "why_pp", "Why pipeline parallelism", problem.cluster
    tp = node_ways(problem) if best is None else best.tp
    cp = context_ways(problem, tp) or 1
    flat, tokens = without_pipeline(problem, tp, cp), problem.seq_len // cp
    if problem.sequences % flat.dp:
        sentence = f"Without one, dp = {flat.dp:,} at tp = {tp} and cp = {cp} does not divide"
        return Section(key, title, f"{sentence} {many(problem.sequences, 'sequence')}; a pipeline can.{searched}")
    bound, usable = fsdp_intensity(problem, tp), allocatable_bytes(problem)
    largest = sorted(flat.memory_parts.items(), key=lambda part: -part[1])[:2]
    parts = ", ".join(f"{size / GIB:.1f} of {BYTES_WORDS[name]}" for name, size in largest)
    whose = "" if best is None else ", with this layout's tp,"
    sentence = (
        f"Without one, {flat.layout}{whose} in ZeRO-1 and without recomputation allocates "
        f"{flat.memory_bytes / GIB:,.1f} GiB of {usable / GIB:.1f} (largest: {parts})"
    )
    sign = ">=" if tokens >= bound else "<"
    part = "one sequence" if cp == 1 else f"a sequence over cp = {cp}"
    gathers = (
        f"ZeRO-3 would gather every layer for every micro-batch: {tokens:,} FLOP per byte ({part}), where the network "
        f"at tp = {tp} wants {bound:,.0f}"
    )
    shared = flat.dp * flat.cp > 1
    if flat.fits:
        sentence += "; it fits, so that a pipeline is a choice."
    elif not shared:
        sentence += ", and does not fit; no other rank has the same weights, so that ZeRO-3 has nobody to share with."
    elif tokens >= bound:
        sentence += f", and does not fit. {gathers}: at best that hides, so that a pipeline is a choice."
    else:
        sentence += f", and does not fit. {gathers}: that cannot hide. A pipeline cuts layers and sends activations."
    ours = (
        "C / W inside a node" if cluster.gpus <= cluster.domain else f"C / W of a rank's part of the NICs at tp = {tp}"
    )
    figures = [
        Figure("allocated without a pipeline", flat.memory_bytes, "bytes", f"{flat.layout}, ZeRO-1"),
        Figure("can be allocated", usable, "bytes"),
    ]
    if shared:
        figures += [
            Figure("FLOP per gathered byte", tokens, "FLOP/byte", f"2 x {tokens:,} / 2 bytes {sign} {bound:,.0f}"),
            Figure("what the network wants", bound, "FLOP/byte", ours),
        ]
    return Section(
        key,
        title,
        sentence + searched,
        tuple(figures),
        ("tp 8 x dp 16 for 70B on 128 H100, a plan in circulation, leaves out that gradients are float32.",)
        if preset_of(problem.config) == "llama3-70b" and problem.gpus == 128
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
    by = f"GPUs / (sequences x tp) = {gpus:,} / ({sequences:,} x {tp}) = {wanted:.3g}, and at least 1"
    figures = (
        Figure("sequences per step", sequences, "count", f"{problem.tokens:,} / {problem.seq_len:,}"),
        Figure("cp from which bs >= pp", max(1.0, wanted), "", by),
    )
    if wanted > 1:
        sentence = (
            f"{many(sequences, 'sequence')} on {many(gpus, 'GPU')} leave fewer than pp micro-batches to a DP group at "
            f"tp = {tp}; cutting every sequence over cp = {wanted:.3g} ranks or more gives bs >= pp again."
        )
    else:
        sentence = (
            f"{many(sequences, 'sequence')} a step for {many(gpus, 'GPU')} at tp = {tp}: bs >= pp without it. Only "
            "memory, or messages smaller than TP's, can ask for it."
        )
    return Section("why_cp", "Why context parallelism", sentence + searched, figures)
