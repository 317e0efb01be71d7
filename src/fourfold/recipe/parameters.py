"""Which parameters a stage holds, and which of them a recipe freezes. Integers only: nothing is allocated."""

from __future__ import annotations

from collections.abc import Sequence

from fourfold.layout import Stage
from fourfold.recipe.model import ModelConfig, parameter_shapes


def stage_shapes(config: ModelConfig, stages: Sequence[Stage]) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Per stage, name -> shape of every parameter it holds, whole (not cut by tensor parallelism or FSDP).

    A head without the embedding holds an output.weight of its own even in a tied model: a second copy of the embedding.
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
            if not (config.tied and stage.embedding):
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


def is_frozen(name: str, freeze: Sequence[str], *, tied: bool = False) -> bool:
    """Whether `train.freeze` covers a parameter: one of its entries is the name, or whole leading parts of it.

    "layers.1" covers layers.1.ffn_norm.weight but not layers.10. In a tied model output.weight is the embedding.
    """
    if tied and name == "output.weight":
        name = "tok_embeddings.weight"
    return any(name == prefix or name.startswith(f"{prefix.rstrip('.')}.") for prefix in freeze)
