"""A comparison of two runs in words: the verdict in a sentence, where, what it looks like, and tables of the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fourfold.debugger.numerics.comparison import SCALAR, Comparison, Divergence, StepNumbers, Verdict

_HEADS = {
    Verdict.SAME: "The same to the bit",
    Verdict.ORDER: "Order only",
    Verdict.BUG: "A bug",
    Verdict.OTHER: "Not the same run",
    Verdict.UNKNOWN: "It cannot be told",
}
_WHAT = {
    "output": "the result of {}",
    "arriving": "the gradient that reaches {}",
    "gradient": "the gradient of {}",
    "weight": "{} after the optimizer",
    SCALAR: "{}",
}
_SCALARS = {"loss": "the loss", "grad_norm": "the gradient norm"}
_KINDS = {
    "output": "results of operations",
    "arriving": "gradients that reach them",
    "gradient": "gradients of weights",
    "weight": "weights after the step",
    SCALAR: "loss and norm",
}
_MOST_STEPS = 12  # rows of the table of losses


def comparison_text(found: Comparison) -> str:
    """For the terminal: plain lines, the verdict first."""
    lines = [verdict_sentence(found)]
    for finding in found.findings:
        lines += ["", finding.sentence, *(f"  {evidence}" for evidence in finding.evidence)]
    if found.beyond is not None and found.first is not None and found.first != found.beyond:
        lines += [
            "",
            f"The first difference, which order explains, is in {where_text(found.first)}: {_size(found.first)}.",
        ]
    lines += ["", *_runs(found)]
    if any(step.kinds for step in found.steps):
        lines += ["", *_table_of_kinds(found)]
    if found.weights is not None:
        tally = found.weights
        worst = f"; {tally.worst} is {tally.error:.1e} off" if tally.error else ""
        lines += ["", f"weights at the end: {tally.equal} of {tally.tensors} equal{worst}"]
    if any(None not in step.losses for step in found.steps):
        lines += ["", *_table_of_losses(found.steps)]
    if found.notes:
        lines += ["", *(f"note: {note}" for note in found.notes)]
    return "\n".join(lines)


def reference_text(ordered: Comparison, plain: Comparison) -> str:
    """A job beside its ordered reference, and beside a plain run of one process; plain lines, the verdict first."""
    if not ordered.same:
        return comparison_text(ordered)
    if plain.verdict in (Verdict.BUG, Verdict.UNKNOWN):
        wrong = plain.verdict is Verdict.BUG
        lines = [
            "The job is its ordered reference to the bit, but further from a plain run of one process than order goes:",
            f"what the job and its reference have in common {'is' if wrong else 'may be'} wrong.",
        ]
        return "\n".join([*lines, "", comparison_text(plain)])
    lines = [verdict_sentence(ordered), ""]
    if plain.same:
        lines.append("A plain run of one process has the same numbers: this layout changes no order.")
    else:
        lines.append("What lies between it and a plain run of one process is the order of sums, and makes:")
        lines += ["", *_table_of_kinds(plain)]
    lines += ["", f"job: {ordered.layouts[0]}"]
    if any(None not in step.losses for step in plain.steps):
        lines += ["", *_table_of_losses(plain.steps, ("job", "plain"))]
    lines += ["", *(f"note: {note}" for note in ordered.notes)] if ordered.notes else []
    return "\n".join(lines)


def reference_json(ordered: Comparison, plain: Comparison) -> dict[str, Any]:
    """Both as `comparison_json`, under one verdict."""
    worst = plain if ordered.same and plain.verdict in (Verdict.BUG, Verdict.UNKNOWN) else ordered
    return {
        "format": 1,
        "verdict": str(worst.verdict),
        "sentence": verdict_sentence(worst),
        "ordered": comparison_json(ordered),
        "plain": comparison_json(plain),
    }


def verdict_sentence(found: Comparison) -> str:
    """What the difference is, and where it begins."""
    if found.verdict is Verdict.SAME:
        tensors = sum(kind.tensors for step in found.steps for kind in step.kinds if kind.kind != SCALAR)
        if not tensors:
            head = "The same to the bit" if "printed" not in found.reason and found.weights is not None else "The same"
            return f"{head}: {found.reason or 'nothing differs'}."
        return f"The same to the bit: {tensors:,} tensors in {_steps_text(found.steps)}."
    head = _HEADS[found.verdict]
    if found.verdict is Verdict.BUG and found.beyond is not None:
        return f"{head}: {where_text(found.beyond)}: {_size(found.beyond)}."
    if found.verdict is Verdict.BUG and found.findings and not found.reason:
        return f"{head}: {found.findings[0].sentence}"
    if found.verdict is Verdict.ORDER and found.first is not None:
        return (
            f"{head}: the runs differ first in {where_text(found.first)}, {_size(found.first)}, and nothing differs by "
            "more than order makes."
        )
    return f"{head}: {found.reason}."


def where_text(at: Divergence) -> str:
    """A tensor, and where the row is in it that differs."""
    name = _SCALARS.get(at.name, at.name) if at.kind == SCALAR else at.name
    parts = [f"step {at.step}, {_WHAT[at.kind].format(name)}"]
    if at.place is not None:
        place = " ".join(f"{name}{index}" for name, index in at.place._asdict().items())
        parts.append(f"rank {at.rank} ({place})")
    if at.micro_batch >= 0:
        parts.append(f"micro-batch {at.micro_batch}")
    if (token := at.token) is not None:
        parts.append(f"token {token[1]} of sequence {token[0]}")
    elif at.row >= 0:
        parts.append(f"row {at.row}")
    return ", ".join(parts)


def _size(at: Divergence) -> str:
    """How far off it is, and how far order goes."""
    if at.only_in:
        return f"only the {at.only_in} run has it"
    if at.error == 0.0:
        return "by less than its fingerprint tells"
    if math.isinf(at.error):
        return "it is not finite, or should be zero and is not"
    limit = at.limit * at.error / at.units
    order = f"order makes up to {limit:.1e}"
    rows = f", in {at.num_different:,} of {at.num_rows:,} rows" if at.num_rows > 1 else ""
    if at.units > at.limit:
        return f"{at.error:.1e} of its size off, where {order}{rows}"
    return f"by {at.error:.1e} of its size ({order}{rows})"


def _steps_text(steps: Sequence[StepNumbers]) -> str:
    numbers = [step.step for step in steps if step.kinds]
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    together = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"steps {numbers[0]}-{numbers[-1]}" if together else f"{len(numbers)} steps"


def _runs(found: Comparison) -> list[str]:
    layouts = [f" ({layout})" if layout is not None else "" for layout in found.layouts]
    return [f"first:  {found.names[0]}{layouts[0]}", f"second: {found.names[1]}{layouts[1]}"]


def _table_of_kinds(found: Comparison) -> list[str]:
    """Of the first step, of the one that is judged, and of the last: how many tensors are equal, and the worst."""
    recorded = [step for step in found.steps if step.kinds]
    wanted = {recorded[0].step, recorded[-1].step}
    wanted |= {at.step for at in (found.first, found.beyond) if at is not None}
    rows = [("step", "what", "equal", "worst", "error", "roundings")]
    for step in recorded:
        if step.step not in wanted:
            continue
        for kind in step.kinds:
            error = "" if kind.equal == kind.tensors else f"{kind.error:.1e}"
            units = "" if kind.equal == kind.tensors else f"{kind.units:,.1f}"
            equal = f"{kind.equal} of {kind.tensors}"
            rows.append((str(step.step), _KINDS[kind.kind], equal, kind.worst, error, units))
    return _aligned(rows)


def _table_of_losses(steps: Sequence[StepNumbers], names: tuple[str, str] = ("first", "second")) -> list[str]:
    """Losses of both by step, the first and the last ones."""
    known = [step for step in steps if None not in step.losses]
    head, tail = known, []
    if len(known) > _MOST_STEPS:
        head, tail = known[: _MOST_STEPS // 2], known[-_MOST_STEPS // 2 :]
    rows: list[tuple[str, ...]] = [
        ("step", f"loss, {names[0]}", names[1], "apart", f"gradient norm, {names[0]}", names[1], "apart")
    ]
    for step in head:
        rows.append(_row_of_losses(step))
    if tail:
        rows += [("...", *("" for _ in rows[0][1:])), *map(_row_of_losses, tail)]
    if all(row[4] == row[5] == "" for row in rows[1:]):
        rows = [row[:4] for row in rows]
    return _aligned(rows)


def _row_of_losses(step: StepNumbers) -> tuple[str, ...]:
    cells = [str(step.step)]
    for x, y in (step.losses, step.norms):
        if x is None or y is None:
            cells += ["" if value is None else f"{value:.6f}" for value in (x, y)] + [""]
            continue
        apart = "equal" if x == y or (math.isnan(x) and math.isnan(y)) else f"{abs(x - y) / abs(y):.1e}" if y else "?"
        cells += [f"{x:.6f}", f"{y:.6f}", apart]
    return tuple(cells)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def comparison_json(found: Comparison) -> dict[str, Any]:
    """One object; docs/formats.md explains the keys. A number that is not finite is null."""
    return {
        "format": 1,
        "verdict": str(found.verdict),
        "sentence": verdict_sentence(found),
        "reason": found.reason or None,
        "first": _at(found.first),
        "beyond": _at(found.beyond),
        "findings": [
            {"pattern": str(each.pattern), "sentence": each.sentence, "evidence": list(each.evidence)}
            for each in found.findings
        ],
        "runs": [
            {"name": name, "layout": layout} for name, layout in zip(found.names, found.layouts, strict=True)
        ],
        "by_rank": found.by_rank,
        "steps": [
            {
                "step": step.step,
                "losses": list(map(_finite, step.losses)),
                "grad_norms": list(map(_finite, step.norms)),
                "kinds": [_plain(asdict(kind)) for kind in step.kinds],
            }
            for step in found.steps
        ],
        "weights": None if found.weights is None else _plain(asdict(found.weights)),
        "notes": list(found.notes),
    }  # fmt: skip


def _at(at: Divergence | None) -> dict[str, Any] | None:
    if at is None:
        return None
    values = _plain({name: value for name, value in asdict(at).items() if name != "place"})
    token = None if at.token is None else {"sequence": at.token[0], "place": at.token[1]}
    return {**values, "place": None if at.place is None else at.place._asdict(), "token": token}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
