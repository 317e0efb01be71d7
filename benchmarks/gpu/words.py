"""The short table, from the figures as JSON has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu.part import Figures
from gpu.variants import FOURFOLD

GIB = 2**30


def table(found: dict[str, Figures]) -> str:
    """All that is printed of what the parts found."""
    lines = [*_machine(found["machine"]), *_kernels(found["kernels"])]
    lines += [*_training(found["training"], found["memory"]), *_context(found["context"]), *_missing(found)]
    return "\n".join(lines)


def _machine(part: Figures) -> Iterator[str]:
    facts = part["facts"]
    rates = {item["name"]: item for item in part["items"]}
    words = [facts.get("device", "an unknown device"), f"torch {facts.get('torch')}"]
    if facts.get("peak"):
        words.append(f"peak {facts['peak'] / 1e12:.4g} TFLOP/s bf16")
    if product := rates.get("bf16 matrix product"):
        words.append(f"reached {product['flops_per_second'] / 1e12:.3g} by a product of {product['matrix']}^3")
    if copy := rates.get("copy"):
        words.append(f"{copy['bytes_per_second'] / 1e9:.3g} GB/s by a copy")
    yield "; ".join(words)


def _kernels(part: Figures) -> Iterator[str]:
    yield "\nkernels against a dense fp64 oracle: worst relative error"
    bounds = {"bf16": "torch.bfloat16", "fp32": "torch.float32"}
    for name in dict.fromkeys(item["kernel"] for item in part["items"]):
        items = [item for item in part["items"] if item["kernel"] == name]
        errors = {what: max(item["errors"][what] for item in items) for what in items[0]["errors"]}
        bound = next(part["facts"]["bounds"][dtype] for short, dtype in bounds.items() if short in name)
        judged = "good" if all(item["good"] for item in items) else "WRONG"
        shown = "  ".join(f"{what} {error:.1e}" for what, error in errors.items())
        count = sum(item["shards"] for item in items)
        yield f"  {name:<22} {shown}  (bound {bound:.1e}, {count} shards)  {judged}"


def _training(part: Figures, predicted: Figures) -> Iterator[str]:
    facts, items = part["facts"], part["items"]
    by_kind = {item["recompute"]: item for item in predicted["items"]}
    if not facts:
        return
    model = facts["model"]
    shape = model.get("preset") or f"dim {model['dim']}"
    tokens = f"{facts['micro_batches']} x {facts['seq_len']} tokens"
    yield f"\na step of {model['num_layers']} layers of {shape}, {tokens}, bf16; peak GiB as measured and as predicted"
    yield (f"  {'':<30}  ms/step  tokens/s  MFU attn     6P | fwd, bwd  update | planner  dry run")
    for item in items:
        memory, expected = item["memory"], by_kind.get(item["recompute"]) if item["stack"] == FOURFOLD else None
        planner, dry_run = (_gib(expected and expected[who]["bytes"]) for who in ("planner", "dry_run"))
        yield (
            f"  {item['name']:<30} {1e3 * item['step_seconds']:8.1f} {item['tokens_per_second']:9.0f}"
            f" {_percent(item['mfu_attention']):>9} {_percent(item['mfu_6p']):>6}"
            f" | {_gib(memory['forward_backward']):>8} {_gib(memory['update']):>7} | {planner:>7} {dry_run:>8}"
            f"{'' if expected is None else ' at ' + expected['dry_run']['action']}"
            f"{'' if item['same_work'] else '  NOT THE SAME WORK'}"
        )


def _context(part: Figures) -> Iterator[str]:
    items = [item for item in part["items"] if "relative_hfu" in item]
    lengths = sorted({item["seq_len"] for item in items})
    yield "\nCP ranks' attention, no communication: relative HFU, % of one GPU with a causal mask; forward / both ways"
    yield " " * 32 + "".join(f"{_tokens(length):>14}" for length in lengths)
    for mask, cp, split in dict.fromkeys((item["mask"], item["cp"], item["split"]) for item in _by_mask(items)):
        row = {i["seq_len"]: i for i in items if (i["mask"], i["cp"], i["split"]) == (mask, cp, split)}
        name = f"cp {cp} {mask}" + (f", {split}" if mask == "documents" else "")
        yield f"  {name:<30}" + "".join(f"{_both(row.get(length)):>14}" for length in lengths)
        if split == "head_tail" and any(i["paper_with_communication"] for i in row.values()):
            values = (row[length]["paper_with_communication"] if length in row else None for length in lengths)
            yield "    paper, with communication   " + "".join(f"{'' if v is None else f'{v:.1f}':>14}" for v in values)


def _missing(found: dict[str, Figures]) -> Iterator[str]:
    yield ""
    for name, part in found.items():
        if part["left_out"]:
            yield f"{name}: no time for {len(part['left_out'])}: {_some(part['left_out'])}"
        for failure in part["failures"]:
            yield f"{name}: FAILED: {failure['name']}: {failure['why'].splitlines()[0]}"
    yield ", ".join(f"{name} {part['seconds']:.0f} s" for name, part in found.items())


def wrong(found: dict[str, Figures]) -> bool:
    """Whether a number is wrong or missing for another reason than time."""
    return (
        any(part["failures"] for part in found.values())
        or not all(item["good"] for item in found["kernels"]["items"])
        or not all(item["same_work"] for item in found["training"]["items"])
    )


def _by_mask(items: Sequence[Figures]) -> list[Figures]:
    return sorted(items, key=lambda item: (item["mask"], item["cp"], item["split"]))


def _both(item: Figures | None) -> str:
    if item is None:
        return "-"
    return "{forward:.1f} / {both:.1f}".format(**item["relative_hfu"])


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 else str(length)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"


def _gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.4g}"


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:4]) + (" ..." if len(names) > 4 else "")
