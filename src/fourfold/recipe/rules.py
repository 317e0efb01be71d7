"""The rules a recipe must satisfy: one table of bounds for single keys, one list of small functions for the rest.
Here are those of model and layout, and the list; those of batches, data and optimizer are in `run_rules`.

Every function sees the flat values by full key ("layout.tp"; the model's with preset and path resolved) and names the
keys that it reads, so that it is skipped where one of them is already refused: one mistake gives one line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fourfold.layout import partition
from fourfold.recipe import run_rules
from fourfold.recipe.bounds import Values, broken_bounds
from fourfold.recipe.errors import Problem, nearest_integers, nearest_name
from fourfold.recipe.model import ModelConfig, parameter_shapes
from fourfold.recipe.parameters import is_covered, is_frozen, recorded_names
from fourfold.recipe.schema import Numerics


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


def schedule_kind(values: Values) -> Iterator[Problem]:
    """1f1b and zb-h1 have one stage per rank, interleaved several."""
    kind, v = values["pipeline.schedule"], values["pipeline.virtual_stages"]
    if kind in ("1f1b", "zb-h1") and v > 1:
        rule = f"needs pipeline.virtual_stages = 1, which is {v}"
        yield Problem("pipeline.schedule", kind, rule, ("interleaved", "flexible", "afab"))
    elif kind == "interleaved" and v == 1:
        rule = "needs pipeline.virtual_stages of at least 2, which is 1"
        yield Problem("pipeline.schedule", kind, rule, ("1f1b", "flexible", "afab"))


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


def whole_nodes(values: Values) -> Iterator[Problem]:
    """On GPUs, a job larger than a node fills its nodes."""
    per_node = values["cluster.gpus_per_node"]
    size = math.prod(values[f"layout.{d}"] for d in ("tp", "cp", "pp", "dp"))
    if values["train.device"] == "cuda" and size > per_node and size % per_node:
        rule = f"must divide the {size} ranks of the layout (tp x cp x pp x dp), or hold them all"
        yield Problem(
            "cluster.gpus_per_node", per_node, rule, nearest_integers(per_node, lambda n: size % n == 0, limit=size)
        )


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
    (("batch.sequences", "layout.dp"), run_rules.sequences),
    (("batch.sequences", "layout.dp", "pipeline.micro_batch"), run_rules.micro_batch),
    (("pipeline.schedule", "pipeline.virtual_stages"), schedule_kind),
    (
        ("pipeline.schedule", "pipeline.nc", "layout.pp", "batch.sequences", "layout.dp", "pipeline.micro_batch"),
        run_rules.consecutive_micro_batches,
    ),
    (("pipeline.split", "model.num_layers", "layout.pp", "pipeline.virtual_stages"), explicit_split),
    (
        ("batch.sequences", "layout.dp", "pipeline.micro_batch", "pipeline.nc", "pipeline.schedule", "layout.pp"),
        run_rules.batch_phases,
    ),
    (("data.tokenizer",), run_rules.tokenizer),
    (("data.source", "data.mix"), run_rules.source),
    (("data.validation",), run_rules.validation),
    (("data.skip",), run_rules.skipped_samples),
    (
        ("optimizer.schedule", "optimizer.decay_steps", "optimizer.warmup_steps", "train.steps"),
        run_rules.learning_rate_schedule,
    ),
    (
        tuple(f"timeouts.{t}" for t in ("step_factor", "step_minimum", "startup", "abort", "collective")),
        run_rules.timeouts,
    ),
    (("train.recompute", "layout.pp", "pipeline.virtual_stages"), run_rules.recompute),
    (("optimizer.name", "optimizer.momentum"), run_rules.momentum),
    (("optimizer.clip_norm_type",), run_rules.clip_norm_type),
    (("layout.tp", "layout.cp", "layout.pp", "layout.dp", "cluster.gpus_per_node"), whole_nodes),
    (("output.name", "output.dir"), run_rules.run_folder),
    (("profile.steps", "train.steps"), run_rules.profiled_steps),
    (("profile.steps", "profile.memory"), run_rules.profiled_memory),
    (
        ("profile.steps", "profile.ranks", "layout.tp", "layout.cp", "layout.pp", "layout.dp"),
        run_rules.profiled_ranks,
    ),
    (("numerics.steps", "train.steps"), run_rules.recorded_steps),
    (("numerics.steps", "numerics.tensors", "numerics.keep"), run_rules.recorded_tensors),
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


def broken_keep(numerics: Numerics, config: ModelConfig) -> list[Problem]:
    """Every entry of numerics.keep that matches nothing that is recorded."""
    names, everything = (recorded_names(config, operations=every) for every in (numerics.tensors == "all", True))
    parts = {name.rsplit(".", cut)[0] for name in names for cut in range(name.count(".") + 1)}
    problems = []
    for entry in numerics.keep:
        if any(is_covered(name, [entry]) for name in names):
            continue
        if any(is_covered(name, [entry]) for name in everything):
            problems.append(Problem("numerics.keep", entry, 'is recorded with numerics.tensors = "all" only'))
            continue
        near = nearest_name(entry, sorted(parts))
        problems.append(Problem("numerics.keep", entry, "matches nothing that is recorded", (near,) if near else ()))
    return problems
