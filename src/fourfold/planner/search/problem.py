"""What the planner is asked: a model, a batch, a cluster, a software stack, and what the user has fixed already."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fourfold.planner.jobs import (
    ORDER_NAMES,
    RECOMPUTE_NAMES,
    TRAINED_IN,
    Jobs,
    Precision,
    Split,
    model_columns,
)
from fourfold.planner.machines.cluster import chip_index
from fourfold.planner.timing.stack import measured_runs
from fourfold.recipe import PRESETS, ModelConfig, config_from_hf, preset
from fourfold.recipe.errors import nearest_name

if TYPE_CHECKING:
    from fourfold.planner.imbalance import Documents, Imbalance
    from fourfold.planner.machines.cluster import Cluster
    from fourfold.planner.search.own import OwnLayout
    from fourfold.planner.timing.stack import Stack
    from fourfold.recipe import RunPlan

Limits = Mapping[str, tuple[int | str, ...]]
"""Dimension -> the values it may have. A dimension that is not there is free."""

SPLIT_NAMES = {Split.EVEN: "even", Split.ENDS_LIGHT: "ends_light"}
ORDERS = {name: order for order, name in ORDER_NAMES.items()}
RECOMPUTES = {name: recompute for recompute, name in RECOMPUTE_NAMES.items()}
SPLITS = {name: split for split, name in SPLIT_NAMES.items()}
COUNTED = ("tp", "cp", "pp", "dp", "virtual_stages", "nc", "micro_batch")
NAMED = {
    "schedule": tuple(ORDERS),
    "recompute": tuple(RECOMPUTE_NAMES.values()),
    "split": tuple(SPLIT_NAMES.values()),
}
DIMENSIONS = (*COUNTED, "zero", *NAMED)
SHORT = {"v": "virtual_stages", "mb": "micro_batch"}  # as tables print them
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Problem:
    """A job without a layout. ValueError, naming what is wrong and what is near it, for one that nobody can run."""

    name: str
    config: ModelConfig
    cluster: Cluster
    seq_len: int
    """Tokens per sequence."""
    sequences: int
    """Per step, over all ranks."""
    precision: Precision
    stack: Stack
    documents: Documents | None = None
    """How long the documents are that a sequence is packed with; None: one document per sequence."""
    limits: Limits = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("seq_len", "sequences"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1; nearest legal: 1")
        for name, values in self.limits.items():
            _check_limit(name, values)

    @property
    def gpus(self) -> int:
        """GPUs of the cluster, all of which a layout uses."""
        return self.cluster.gpus

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.seq_len * self.sequences

    @cached_property
    def imbalance(self) -> Imbalance | None:
        """What documents of different lengths do to attention; None without documents."""
        if self.documents is None:
            return None
        from fourfold.planner.imbalance import Imbalance

        return Imbalance(self.documents, self.seq_len)

    @property
    def is_measured(self) -> bool:
        """Whether runs on this chip, in numbers as wide as these, are among those that the time model was fitted to."""
        return measured_runs(chip_index(self.cluster.chip.name), self.precision) > 0

    @property
    def band(self) -> tuple[float, float]:
        """Multiples of predicted seconds between which nine of ten measured runs lie; wider on a chip without any."""
        return self.stack.band_on(chip_index(self.cluster.chip.name), self.precision)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def base_columns(self) -> dict[str, Any]:
        """Every column of `Jobs` that a layout does not change: model, batch, numbers, software, machine."""
        seen = self.seq_len * (self.seq_len + 1) / 2 if self.imbalance is None else self.imbalance.pairs_per_sequence
        return {
            **model_columns(self.config),
            "seq_len": self.seq_len,
            "sequences": self.sequences,
            "pairs": float(seen),
            "sequence_parallel": True,
            "recomputed_layers": 1.0,
            "precision": int(self.precision),
            **self.stack.columns(),
            **self.cluster.columns(self.precision),
        }

    def jobs(self, **layout: Any) -> Jobs:
        """Jobs under these layouts: tp, cp, pp, dp, v, nc, micro_batch, order, split, zero and recompute, numbers or
        arrays. What ZeRO shards is shared by all dp x cp ranks."""
        shards = np.asarray(layout["dp"]) * np.asarray(layout["cp"])
        return Jobs.of(**self.base_columns(), **layout, shards=shards)

    @classmethod
    def of(
        cls,
        *,
        model: str | Path | ModelConfig,
        cluster: Cluster,
        seq_len: int,
        tokens: int | None = None,
        sequences: int | None = None,
        precision: Precision | str = Precision.BF16,
        stack: Stack | str = "standard",
        documents: Documents | str | None = None,
        limits: Limits | None = None,
        name: str | None = None,
    ) -> Self:
        """From what a person types.

        Args:
            model: a preset, a config.json in Hugging Face's form or the directory that holds it, or a ModelConfig.
            tokens, sequences: per step over all ranks; one of the two.
        """
        if (tokens is None) == (sequences is None):
            raise ValueError("give the batch as tokens per step or as sequences per step, one of the two")
        if isinstance(stack, str):
            from fourfold.planner.timing.stack import load_stack

            stack = load_stack(stack)
        if isinstance(documents, str):
            from fourfold.planner.imbalance import Documents

            documents = Documents.parse(documents)
        config = model if isinstance(model, ModelConfig) else read_model(model)
        return cls(
            name=name or (f"{config.num_layers} layers" if isinstance(model, ModelConfig) else str(model)),
            config=config,
            cluster=cluster,
            seq_len=seq_len,
            sequences=sequences_of(tokens, seq_len) if tokens is not None else (sequences or 0),
            precision=parse_precision(precision) if isinstance(precision, str) else precision,
            stack=stack,
            documents=documents,
            limits=dict(limits or {}),
        )

    @classmethod
    def from_recipe(
        cls,
        plan: RunPlan,
        *,
        cluster: Cluster,
        stack: Stack | str = "standard",
        documents: Documents | str | None = None,
        limits: Limits | None = None,
    ) -> Self:
        """The job of a recipe, on a cluster of any size, its layout left free. The batch is that of the first phase."""
        recipe = plan.recipe
        return cls.of(
            model=plan.config,
            cluster=cluster,
            seq_len=recipe.batch.seq_len,
            sequences=recipe.batch.sequences,
            precision=TRAINED_IN[recipe.train.dtype],
            stack=stack,
            documents=documents,
            limits=limits,
            name=recipe.output.name,
        )


def asked_problem(
    recipe: Path | None = None,
    *,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | str | None = None,
    seq: str | None = None,
    batch_tokens: str | None = None,
    dtype: str | None = None,
    stack: str = "standard",
    documents: str | None = None,
    fix: Iterable[str] = (),
) -> tuple[Problem, OwnLayout | None]:
    """The job that a command line asks for, and of a recipe its layout: of another job than the recipe's, if it is
    legal there; else why not.

    ValueError naming all that is missing, or what is wrong.
    """
    from fourfold.planner.machines.cluster import cluster

    known: RunPlan | None = None
    number = parse_count(gpus, flag="--gpus") if isinstance(gpus, str) else gpus
    if recipe is not None:
        from fourfold.recipe import check, load

        known = check(load(recipe))
        gpu, number = gpu or known.recipe.cluster.gpu, known.grid.size if number is None else number
    needed = {"--gpu": gpu, "--gpus": number}
    needed |= {} if known else {"--model": model, "--seq": seq, "--batch-tokens": batch_tokens}
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        where = "or a recipe" if known is None else "or cluster.gpu in the recipe"
        raise ValueError(f"{', '.join(missing)}: needed, {where}; `fourfold plan --help` shows an example of each")
    given: dict[str, Any] = {
        "cluster": cluster(str(gpu), number or 0),
        "stack": stack,
        "documents": documents,
        "limits": parse_limits(fix),
    }
    if known is None:
        length, tokens = parse_count(str(seq), flag="--seq"), parse_count(str(batch_tokens), flag="--batch-tokens")
        return Problem.of(model=str(model), seq_len=length, tokens=tokens, precision=dtype or "bf16", **given), None
    problem = Problem.from_recipe(known, **given)
    changes: dict[str, Any] = {}
    if model is not None:
        changes |= {"config": read_model(model), "name": model}
    if dtype is not None:
        changes["precision"] = parse_precision(dtype)
    if seq is not None or batch_tokens is not None:
        length = problem.seq_len if seq is None else parse_count(seq, flag="--seq")
        tokens = problem.tokens if batch_tokens is None else parse_count(batch_tokens, flag="--batch-tokens")
        changes |= {"seq_len": length, "sequences": sequences_of(tokens, length)}
    from fourfold.planner.search.own import OwnLayout

    problem = problem.replace(**changes)
    return problem, OwnLayout.of(known, gpus=problem.gpus, **changes)


def parse_limits(texts: Iterable[str]) -> Limits:
    """Limits as a person types them: "tp=8", "pp=8,16", "schedule=afab"; v and mb are as tables print them."""
    limits: dict[str, tuple[int | str, ...]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ValueError(
                f"--fix {text}: must be DIMENSION=VALUE, such as tp=8; dimensions: {', '.join(DIMENSIONS)}"
            )
        parts = [value.strip() for value in values.split(",")]
        name = SHORT.get(name.strip(), name.strip())
        if name in limits:
            both = ",".join(dict.fromkeys([*map(str, limits[name]), *parts]))
            raise ValueError(f"--fix {name}: is given twice; for one of several values: --fix {name}={both}")
        limits[name] = tuple(int(value) if value.lstrip("-").isdecimal() else value for value in parts)
    return limits


def parse_count(text: str, *, flag: str = "") -> int:
    """A number of tokens or the like: 8192, 8K, 16M. K, M and G are powers of 1,024, as batches and sequences are.

    `flag`: what a user gave it as, for errors.
    """
    where = f"{flag} {text}" if flag else repr(text)
    found = re.fullmatch(r"\s*([\d_,]+(?:\.\d+)?)\s*([kKmMgG]?)[iI]?\s*", text)
    number = float(re.sub("[_,]", "", found[1])) * _UNITS[found[2].lower()] if found else 0.0
    if (found and not number) or re.fullmatch(r"\s*-\s*\d+\s*", text):
        raise ValueError(f"{where}: must be at least 1")
    if number < 1 or number != int(number):
        raise ValueError(f"{where}: must be a whole number, with K, M or G for 1,024, 1,024^2 or 1,024^3; such as 16M")
    return int(number)


def sequences_of(tokens: int, seq_len: int) -> int:
    """Sequences per step of so many tokens; ValueError with the nearest batches if they are not whole."""
    if seq_len < 1:
        raise ValueError(f"seq = {seq_len}: must be at least 1; nearest legal: 1")
    whole, rest = divmod(tokens, seq_len)
    if rest or not whole:
        near = [n for n in (whole, whole + 1) if n > 0]
        legal = ", ".join(f"{n * seq_len} ({n} sequences)" for n in near)
        raise ValueError(f"batch_tokens = {tokens}: must be a multiple of seq = {seq_len}; nearest legal: {legal}")
    return whole


def parse_precision(text: str) -> Precision:
    """bf16, fp16, fp32, fp8, mxfp8 or fp4."""
    names = {p.name.lower(): p for p in Precision}
    names |= {**TRAINED_IN, "float16": Precision.FP16}
    if text.lower() not in names:
        near = nearest_name(text.lower(), names)
        hint = f"; nearest legal: {near}" if near else ""
        raise ValueError(f"dtype = {text!r}: must be one of {', '.join(names)}{hint}")
    return names[text.lower()]


def read_model(source: str | Path) -> ModelConfig:
    """A preset by name, else a config.json or the directory that holds it."""
    path = Path(source)
    if str(source) in PRESETS:
        return preset(str(source))
    if path.is_dir():
        path = path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        near = nearest_name(str(source).lower(), PRESETS)
        hint = f"; nearest legal: {near}" if near else ""
        known = ", ".join(PRESETS)
        raise ValueError(
            f"model = {str(source)!r}: must be one of {known}, or a config.json that exists{hint}"
        ) from None
    except ValueError as error:
        raise ValueError(f"model = {str(source)!r}: is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"model = {str(source)!r}: must hold a table of hyper-parameters")
    return config_from_hf(values)


def _check_limit(name: str, values: tuple[int | str, ...]) -> None:
    if name not in DIMENSIONS:
        near = nearest_name(name, DIMENSIONS)
        hint = f"; nearest legal: {near}" if near else ""
        raise ValueError(f"limit on {name!r}: must be one of {', '.join(DIMENSIONS)}{hint}")
    if not values:
        raise ValueError(f"{name}: leaves no value; give at least one")
    for value in values:
        if name in NAMED and value not in NAMED[name]:
            near = nearest_name(str(value), NAMED[name])
            hint = f"; nearest legal: {near}" if near else ""
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(NAMED[name])}{hint}")
        if name == "zero" and value not in (1, 2, 3):
            raise ValueError(f"zero = {value}: must be 1, 2 or 3")
        if name in COUNTED and not isinstance(value, int):
            raise ValueError(f"{name} = {value}: must be whole numbers, such as {name}=2")
        if name in COUNTED and isinstance(value, int) and value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1; nearest legal: 1")
