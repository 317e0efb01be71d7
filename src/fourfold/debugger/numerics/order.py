"""In which order a step computes its tensors, told from their names alone."""

from __future__ import annotations

from fourfold.debugger.numerics.records import Kind

_IN_LAYER = (
    ("attention_norm",), ("attention.wq", "attention.wk", "attention.wv"), ("attention.attend",), ("attention.wo",),
    ("ffn_norm",), ("feed_forward.w1", "feed_forward.w3"), ("feed_forward.swiglu",), ("feed_forward.w2",), ("",),
)  # fmt: skip
"""Operations of a layer, those made at once together; the last is the residual sum that ends it, with its own name."""
_IN_FEED_FORWARD = 4  # from here on
_BEHIND_LAYERS = ("norm", "output", "cross_entropy")
_PLACES = {name: (place, which) for place, names in enumerate(_IN_LAYER) for which, name in enumerate(names)}
_HEAD, _UNKNOWN = 1 << 30, 1 << 31  # as layers: behind all
_KINDS = tuple(Kind)


def execution_order(kind: Kind, name: str) -> tuple[int, int, int, int]:
    """Sorts tensors of a step: forwards along the model, backwards against it, then gradients, then weights."""
    layer, place, which = place_in_model(name)
    against = -1 if kind is Kind.ARRIVING else 1
    return _KINDS.index(kind), against * layer, against * place, against * which


def place_in_model(name: str) -> tuple[int, int, int]:
    """(layer, operation in it, which of those made at once) of an operation or weight; unknown names come last."""
    operation = name.removesuffix(".weight")
    if operation == "tok_embeddings":
        return -1, 0, 0
    if operation in _BEHIND_LAYERS:
        return _HEAD, _BEHIND_LAYERS.index(operation), 0
    layer, _, rest = operation.removeprefix("layers.").partition(".")
    if not (operation.startswith("layers.") and layer.isdecimal()):
        return _UNKNOWN, 0, 0
    return (int(layer), *_PLACES.get(rest, (len(_IN_LAYER), 0)))


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None: to none."""
    layer, *_ = place_in_model(name)
    return layer if 0 <= layer < _HEAD else None


def roundings_before(kind: str, name: str, num_layers: int) -> int:
    """Operations in a row, each of which rounds, from the tokens to this tensor or scalar; at least 1.

    A forward has two per layer that add to the residual stream, and a backward comes back through all of them.
    """
    if name == "loss":
        return 2 * num_layers + 1
    if kind not in (Kind.OUTPUT, Kind.ARRIVING):
        return 2 * (2 * num_layers + 1)
    layer, place, _ = place_in_model(name)
    depth = 2 * min(max(layer, 0), num_layers) + 1 + (0 <= layer < num_layers and place >= _IN_FEED_FORWARD)
    return depth if kind == Kind.OUTPUT else 2 * (2 * num_layers + 1) - depth
