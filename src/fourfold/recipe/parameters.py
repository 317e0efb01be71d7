"""Which parameters a stage holds, and which of them a recipe freezes. Integers only: nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.layout import Stage
from fourfold.recipe.model import ModelConfig, parameter_shapes


def stage_shapes(config: ModelConfig, stages: Sequence[Stage]) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Per stage, name -> shape of every parameter it holds, whole (not cut by tensor parallelism or FSDP).

    A head holds an output.weight of its own even in a tied model: a second copy of the embedding.
    """
    whole = parameter_shapes(config)
    of_layer: dict[int, dict[str, tuple[int, ...]]] = {i: {} for i in range(config.num_layers)}
    for name, shape in whole.items():
        if name.startswith("layers."):
            of_layer[int(name.split(".", 2)[1])][name] = shape
    held = []
    for stage in stages:
        shapes: dict[str, tuple[int, ...]] = {}
        if stage.embedding:
            shapes["tok_embeddings.weight"] = whole["tok_embeddings.weight"]
        for layer in stage.layers:
            shapes |= of_layer[layer]
        if stage.head:
            shapes["norm.weight"] = whole["norm.weight"]
            shapes["output.weight"] = whole["tok_embeddings.weight"]
        held.append(shapes)
    return tuple(held)


def split_dimension(name: str, config: ModelConfig, tp: int) -> int | None:
    """Along which of its dimensions a parameter is cut over ``tp`` ranks: 0 (outputs), 1 (inputs) or None (whole).

    Whole are the norms, and wk and wv where there are fewer key-value heads than ranks: each rank keeps all of them and
    computes with the rows of its head.
    """
    weight = name.rsplit(".", 2)[-2]
    if "norm" in weight or (weight in ("wk", "wv") and config.num_kv_heads % tp):
        return None
    return 1 if weight in ("wo", "w2") else 0


def first_key_head(config: ModelConfig, *, tp: int, rank: int) -> int:
    """The first key-value head that a TP rank computes with. Neighbours share one where there are fewer than ranks."""
    return rank * config.num_kv_heads // tp


def is_frozen(name: str, freeze: Sequence[str], *, tied: bool = False) -> bool:
    """Whether `train.freeze` covers a parameter. In a tied model output.weight is the embedding."""
    if tied and name == "output.weight":
        name = "tok_embeddings.weight"
    return is_covered(name, freeze)


def is_covered(name: str, entries: Sequence[str]) -> bool:
    """Whether one of some entries is the name, or whole leading parts of it.

    "layers.1" covers layers.1.ffn_norm.weight but not layers.10.
    """
    return any(name == entry or name.startswith(f"{entry.rstrip('.')}.") for entry in entries)


def recorded_names(config: ModelConfig, *, operations: bool) -> set[str]:
    """What `[numerics]` records: weights; and operations, each by the name of its weight or by its own."""
    weights = {*parameter_shapes(config), "output.weight"}  # a tied head has numbers of its own
    if not operations:
        return weights
    own = ("attention.attend", "feed_forward.swiglu")
    in_layers = {f"layers.{layer}.{name}" for layer in range(config.num_layers) for name in own}
    return weights | {name.removesuffix(".weight") for name in weights} | in_layers | {"cross_entropy"}
