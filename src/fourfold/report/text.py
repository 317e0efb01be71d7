"""Tables and sentences for the terminal. On a terminal with colour and lines, else as plain ASCII that greps well."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fourfold.planner import Consequences, LaterPhase, RankConsequences

_PLAIN_WIDTH = 400  # characters; plain output is never wrapped, one statement stays one line
_ORDER = {
    "afab": "afab (all forwards, then all backwards)",
    "1f1b": "1f1b (one forward, one backward in turn)",
    "interleaved": "interleaved 1f1b",
    "flexible": "flexible interleaved 1f1b",
    "zb-h1": "zb-h1 (1f1b, gradients of weights put off)",
}
_AGAIN = {
    "norms": "norms: what norms give is made again in backward",
    "swiglu": "swiglu: the product of SwiGLU is made again in backward",
    "selective": "selective: what norms and SwiGLU give is made again in backward",
    "full": "full: layers are made again from their input, a second forward",
}


def format_bytes(count: float) -> str:
    """Bytes with a binary unit, three digits: 5.94 GiB, 12.0 MiB, 512 B."""
    unit, size = _unit(count)
    return f"{count:.0f} B" if size == 1 else f"{_three_digits(count / size)} {unit}"


def _unit(count: float) -> tuple[str, int]:
    """The largest binary unit that fits, and its bytes."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        # Not 1024 KiB but 1.00 MiB, also where only rounding reaches the next unit.
        if count >= size * 0.9995:
            return unit, size
    return "B", 1


def format_count(count: float) -> str:
    """A large number with T, B (1e9), M or k, three digits: 405 B, 8.03 B, 3.1 k; small ones as they are."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size * 0.9995:
            return f"{_three_digits(count / size)} {unit}"
    return f"{count:.0f}"


def percent(share: float) -> str:
    """12.3%, and what is less than 0.1% but not nothing."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def print_consequences(what: Consequences, *, file: TextIO | None = None) -> None:
    """Prints the consequences of a recipe; pretty where `file` (default stdout) is a terminal, plain elsewhere."""
    file = sys.stdout if file is None else file
    if file.isatty():
        Console(file=file).print(_render(what, pretty=True))
    else:
        print(consequences_text(what), file=file)


def consequences_text(what: Consequences) -> str:
    """The plain form: ASCII, no colour, no wrapping, no trailing spaces."""
    out = io.StringIO()
    Console(file=out, width=_PLAIN_WIDTH, color_system=None, force_terminal=False).print(_render(what, pretty=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _render(what: Consequences, *, pretty: bool) -> RenderableType:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold cyan", no_wrap=True)
    facts.add_column()
    for label, sentence in _facts(what):
        facts.add_row(label, Text(sentence, style="yellow" if label == "note" else ""))
    legend = Text(_legend(what), style="dim")
    title = Text.assemble("Plan for ", (what.name, "bold"))
    memory = Text(_title(what), style="bold"), _memory(what, pretty=pretty), legend
    numbers = (Text(), Text("Numbers", style="bold"), _numbers(what, pretty=pretty)) if _mixes(what) else ()
    return Group(title, Padding(facts, (0, 0, 1, 2)), *memory, *numbers)


def _facts(what: Consequences) -> list[tuple[str, str]]:
    """Label and sentence of each line, the most important first."""
    facts = [
        ("model", f"{what.description}: {format_count(what.parameters)} parameters"),
        ("ranks", f"{what.num_ranks:,} = tp {what.tp} x cp {what.cp} x pp {what.pp} x dp {what.dp}"),
        ("step", f"{_many(what.sequences, 'sequence')} of {what.seq_len:,} tokens = {what.tokens_per_step:,} tokens"),
        ("pipeline", _pipeline(what)),
        ("bubble", _bubble(what)),
        ("sharding", what.zero_reason),
    ]
    if set(what.recompute) != {"none"}:
        facts.append(("recompute", _recompute(what.recompute)))
    if not _mixes(what):
        facts.append(("numbers", f"all is held, sent and summed in {what.dtype}; gradient norm and loss in float64"))
    facts += [("later", _later(phase)) for phase in what.later_phases]
    facts += [("note", phase.fallback) for phase in what.later_phases if phase.fallback]
    if what.trained_parameters != what.parameters:
        trained = f"{format_count(what.trained_parameters)} of {format_count(what.parameters)} parameters are trained"
        if what.num_frozen_stages:
            trained += f"; no backward in the first {what.num_frozen_stages} of {what.pp * what.virtual_stages} stages"
        facts.append(("frozen", trained))
    if what.fallback:
        facts.append(("note", what.fallback))
    if what.step_seconds is not None:
        facts.append(
            ("time", f"{what.step_seconds:.3g} s per step, {what.tokens_per_step / what.step_seconds:,.0f} tokens/s")
        )
    if what.usable_bytes is not None:
        needed = max(rank.memory.reserved for rank in what.ranks)
        numbers = f"{format_bytes(needed)} with what allocators lose, of {format_bytes(what.usable_bytes)}"
        fits = needed <= what.usable_bytes
        facts.append(("memory" if fits else "note", f"{'fits' if fits else 'does not fit'}: {numbers}"))
    return facts


def _pipeline(what: Consequences) -> str:
    batches = f"{_micro_batches(what)} of {_many(what.micro_batch, 'sequence')} per DP group"
    if what.pp == 1 and what.virtual_stages == 1:
        return f"none (pp = 1); {batches}, {what.schedule}"
    stages = f"{_many(what.virtual_stages, 'stage')} per rank"
    # Without interleaving the rounds change nothing, and all-forward-all-backward has but one.
    rounds = "" if what.schedule == "afab" or what.virtual_stages == 1 else f" in {_rounds(what.rounds)}"
    return f"{_ORDER[what.schedule]}, {stages}; {batches}{rounds}"


def _rounds(rounds: Sequence[int]) -> str:
    """1 round of 6; 2 rounds of 16; 1 round of 5 and 2 of 4."""
    (size, count), *rest = Counter(rounds).items()
    return " and ".join([f"{_many(count, 'round')} of {size}", *(f"{count} of {size}" for size, count in rest)])


def _bubble(what: Consequences) -> str:
    if what.bubble_over_compute < 1e-9:
        return "none: no rank waits for another stage"
    over_compute, over_total = f"{what.bubble_over_compute:.1%}", f"{what.bubble_over_total:.1%}"
    numbers = f"pp = {what.pp}, {_micro_batches(what)}, {_many(what.virtual_stages, 'stage')} per rank"
    return f"ranks idle for {over_compute} of their computing time, {over_total} of the step ({numbers})"


def _recompute(kinds: Sequence[str]) -> str:
    """What backward makes again, stage by stage where they differ."""
    if len(set(kinds)) == 1:
        return _AGAIN[kinds[0]]
    runs = [(kind, [stage for stage, _ in alike]) for kind, alike in groupby(enumerate(kinds), key=lambda one: one[1])]
    return "; ".join(
        f"{_many_of('stage', stages[0], stages[-1])}: {_AGAIN[kind] if kind != 'none' else 'nothing'}"
        for kind, stages in runs
    )


def _many_of(what: str, first: int, last: int) -> str:
    """stage 3; stages 3 to 5."""
    return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _mixes(what: Consequences) -> bool:
    """Whether the run computes in less than it sums in."""
    return what.dtype != "float32"


def _numbers(what: Consequences, *, pretty: bool) -> Table:
    """One line for all that is held, sent and summed alike, in the order in which a step comes to it."""
    table = Table(box=box.SIMPLE_HEAD if pretty else None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for title in ("held", "sent", "summed", "what"):
        table.add_column(title, no_wrap=title != "what" or not pretty)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in what.precisions:
        name = f"{row.what} ({row.note})" if row.note else row.what
        alike.setdefault((row.held, row.travels, row.summed), []).append(name)
    for numbers, names in alike.items():
        table.add_row(*numbers, "; ".join(names))
    return table


def _later(phase: LaterPhase) -> str:
    """A later phase in one line: only what changes with the batch."""
    tokens = phase.sequences * phase.seq_len
    batches = _many(phase.num_micro_batches, "micro-batch", "micro-batches")
    return (
        f"after {phase.after_tokens:,} tokens: {_many(phase.sequences, 'sequence')} of {phase.seq_len:,} tokens = "
        f"{tokens:,} tokens; {batches}, {phase.schedule}, idle for {phase.bubble_over_total:.1%} of the step; "
        f"{phase.zero_reason.partition(':')[0]}"
    )


def _memory(what: Consequences, *, pretty: bool) -> Table:
    _, size = _unit(max(map(_allocated, what.ranks)))
    table = Table(box=box.SIMPLE_HEAD if pretty else None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("pp rank", no_wrap=True)
    table.add_column("holds")
    titles = ("params", "weights", "gradients", "kept", "activations", "sum", "in flight")
    if pretty:  # a terminal may have but 80 columns
        titles = ("params", "weights", "gradi-\nents", "kept", "activa-\ntions", "sum", "in\nflight")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    for _, alike in groupby(what.ranks, key=_content):
        ranks = list(alike)
        first, last = ranks[0], ranks[-1]
        live = sorted({first.in_flight_peak, last.in_flight_peak})
        held = first.bytes
        kinds = (held.weights, held.gradients + held.gradient_shards, held.master + held.optimizer)
        live_bytes = (_range(size, *map(number, (first, last))) for number in (_activations, _allocated))
        table.add_row(
            f"{first.pp_rank}" if first is last else f"{first.pp_rank}-{last.pp_rank}",
            _holds(first),
            format_count(first.parameters),
            *(_three_digits(number / size) for number in kinds),
            *live_bytes,
            "-".join(map(str, live)),
        )
    return table


def _activations(rank: RankConsequences) -> float:
    """At the rank's worst moment: what is kept for backward, and what is alive for that moment only."""
    held = rank.memory
    return held.activations + held.gathered_kv + held.logits + held.transients


def _allocated(rank: RankConsequences) -> float:
    """All at the rank's worst moment but buffers, which depend on the device."""
    return rank.memory.total - rank.memory.buffers


def _range(size: int, one: float, other: float) -> str:
    """Two numbers of bytes in their order, or one if they look alike."""
    texts = [_three_digits(number / size) for number in sorted((one, other))]
    return "-".join(dict.fromkeys(texts))


def _title(what: Consequences) -> str:
    fullest = max(what.ranks, key=_allocated)
    unit, _ = _unit(_allocated(fullest))
    where = f" (pp rank {fullest.pp_rank})" if what.pp > 1 else ""
    return f"Memory per rank in {unit}; at most {format_bytes(_allocated(fullest))}{where}"


def _legend(what: Consequences) -> str:
    moments = ""
    if any(rank.bytes.optimizer for rank in what.ranks):
        moments = {"adamw": " and AdamW's two moments", "sgd": " and SGD's momentum"}[what.optimizer]
    shared = f", shared by dp x cp = {what.dp * what.cp} ranks" if what.dp * what.cp > 1 else ""
    return (
        f"weights: {what.dtype}, gathered to compute with. gradients: float32 sums. "
        f"kept: float32 master weights{moments}{shared}. activations: with logits, and what is alive for a moment. "
        "sum: at the rank's worst moment, where not every kind is at its peak; without buffers of messages and "
        "libraries. "
        "in flight: most (micro-batch, stage) pairs whose activations are alive at once."
    )


def _content(rank: RankConsequences) -> tuple[object, ...]:
    """Neighbouring ranks that agree in this share a line."""
    return rank.embedding, rank.head, rank.num_layers, rank.parameters, rank.bytes


def _holds(rank: RankConsequences) -> str:
    parts = ["embedding"] if rank.embedding else []
    if rank.num_layers:
        parts.append(_many(rank.num_layers, "layer"))
    return " + ".join([*parts, "head"] if rank.head else parts) or "nothing"


def _micro_batches(what: Consequences) -> str:
    return _many(what.num_micro_batches, "micro-batch", "micro-batches")


def _many(count: int, one: str, several: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"
