"""What the tokens of a run were, small enough for every checkpoint: a position in them means nothing in others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.data.indexed import TokenFile
from fourfold.recipe import Problem, RecipeError


def fingerprint(
    sources: Mapping[str, Sequence[TokenFile]], weights: Sequence[float], *, row_length: int, seed: int
) -> dict[str, Any]:
    """JSON: the share of the samples of each source, and bytes, tokens and documents of each of its files.

    Paths are not in it: data may move.
    """
    return {
        "row_length": row_length,
        "seed": seed,
        "sources": {
            name: {
                "share": weight / sum(weights),
                "files": [[f.num_tokens * f.dtype.itemsize, f.num_tokens, f.num_documents] for f in files],
            }
            for (name, files), weight in zip(sources.items(), weights, strict=True)
        },
    }


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What a run that goes on from a checkpoint should say about its data: sentences, none if nothing has changed.

    Args:
        before: the fingerprint in the checkpoint.
        now: of the data at hand.

    Raises:
        RecipeError: a source of the same name holds other tokens, so that the place where it stood means nothing.
    """
    old, new = before["sources"], now["sources"]
    both = [name for name in new if name in old]
    problems = [
        Problem(
            "data",
            name,
            f"has {_size(new[name])}, but had {_size(old[name])} when the checkpoint was written: where it stood means "
            "nothing now; under another name it begins at its beginning",
        )
        for name in both
        if new[name]["files"] != old[name]["files"]
    ]
    if problems:
        raise RecipeError(problems)
    notes = [
        f"Share of {name}: {old[name]['share']:.2%} of the samples before, {new[name]['share']:.2%} from here on"
        for name in both
        if not math.isclose(new[name]["share"], old[name]["share"])
    ]
    notes += [f"{name} is new and begins at its beginning" for name in new if name not in old]
    notes += [f"{name} is no longer trained on; its place is kept" for name in old if name not in new]
    for key, what in (("seed", "data.seed"), ("row_length", "The longest row")):
        if before[key] != now[key]:
            notes.append(
                f"{what} was {before[key]} and is {now[key]}: the rest of each epoch comes in another order, in which "
                "some of its tokens have been seen already"
            )
    return notes


def _size(source: Mapping[str, Any]) -> str:
    files = source["files"]
    return f"{sum(f[1] for f in files):,} tokens in {sum(f[2] for f in files):,} documents and {len(files)} files"
