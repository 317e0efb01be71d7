"""From a recipe to a plan: every rule is checked, then every derived value is made, once, for all who read it."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

from fourfold.layout import Grid, Schedule, Stage, generate, partition
from fourfold.recipe.errors import Problem, RecipeError, nearest_name
from fourfold.recipe.load import from_table, to_table
from fourfold.recipe.model import PRESETS, ModelConfig, RopeScaling, config_from_hf, preset
from fourfold.recipe.parameters import is_frozen, stage_shapes
from fourfold.recipe.places import local_folder, read_file
from fourfold.recipe.ranges import parse_range, parse_ranges, parse_ranks
from fourfold.recipe.rules import broken_freeze, broken_keep, broken_rules
from fourfold.recipe.schema import Model, Recipe, Recompute, RopeScalingTable

DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training in which every step has the same batch."""

    after_tokens: int  # begins with the first step before which so many tokens have been trained on
    sequences: int  # per step, over all ranks
    seq_len: int
    schedule: Schedule  # what really runs; its fallback says why, if it is not what was asked
    zero: int
    zero_reason: str  # a sentence with the numbers
    num_micro_batches: int  # per step and DP group
    sequences_per_dp_group: int  # the paper's bs

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.seq_len


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A legal recipe with everything that follows from it. Made by `check` only.

    `schedule` and what follows are those of the first phase.
    """

    recipe: Recipe
    config: ModelConfig
    grid: Grid
    stages: tuple[Stage, ...]  # all virtual stages, by global index
    phases: tuple[Phase, ...]  # by after_tokens

    @property
    def profiled_steps(self) -> range:
        """The steps that the profiler records, by number; empty: none."""
        text = self.recipe.profile.steps
        return parse_range(text) if text else range(0)

    @property
    def profiled_ranks(self) -> Collection[int]:
        """The global ranks on which it does."""
        text = self.recipe.profile.ranks
        return parse_ranks(text, self.grid.size) if text else range(self.grid.size)

    @property
    def recorded_steps(self) -> frozenset[int]:
        """The steps whose numbers are recorded."""
        text = self.recipe.numerics.steps
        return frozenset(number for numbers in parse_ranges(text) for number in numbers) if text else frozenset()

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """What backward makes again, of every virtual stage by global index."""
        kinds = self.recipe.train.recompute
        return (kinds,) * len(self.stages) if isinstance(kinds, str) else kinds

    def phase_at(self, tokens: int) -> Phase:
        """The phase of a step before which `tokens` tokens have been trained on."""
        return next(phase for phase in reversed(self.phases) if phase.after_tokens <= tokens)

    @property
    def schedule(self) -> Schedule:
        return self.phases[0].schedule

    @property
    def zero(self) -> int:
        return self.phases[0].zero

    @property
    def zero_reason(self) -> str:
        return self.phases[0].zero_reason

    @property
    def num_micro_batches(self) -> int:
        return self.phases[0].num_micro_batches

    @property
    def sequences_per_dp_group(self) -> int:
        return self.phases[0].sequences_per_dp_group


def check(recipe: Recipe) -> RunPlan:
    """Checks a recipe and derives the plan of its run.

    Raises:
        RecipeError: with every problem there is, each by key, value, rule and nearest legal values.
    """
    recipe = from_table(to_table(recipe))  # a recipe made in Python has not had its types checked
    base, problems = _base_config(recipe.model)
    values = _flat(recipe, base)
    problems += broken_rules(values)
    config = None
    if not any(problem.key.startswith("model.") for problem in problems):
        config = _config(values)
        problems += broken_freeze(recipe.train.freeze, config)
        problems += broken_keep(recipe.numerics, config)
    if problems or config is None:
        raise RecipeError(problems)

    layout, pipeline, batch = recipe.layout, recipe.pipeline, recipe.batch
    stages = partition(config.num_layers, pp=layout.pp, v=pipeline.virtual_stages, split=pipeline.split)
    frozen = num_frozen_stages(config, stages, recipe.train.freeze)
    sequences, seq_len = batch.sequences, batch.seq_len
    phases = [_phase(recipe, 0, sequences, seq_len, frozen)]
    for later in batch.phases:
        sequences, seq_len = later.sequences or sequences, later.seq_len or seq_len
        phases.append(_phase(recipe, later.after_tokens, sequences, seq_len, frozen))
    return RunPlan(
        recipe=recipe,
        config=config,
        grid=Grid(tp=layout.tp, cp=layout.cp, pp=layout.pp, dp=layout.dp),
        stages=stages,
        phases=tuple(phases),
    )


def _phase(recipe: Recipe, after_tokens: int, sequences: int, seq_len: int, num_frozen: int) -> Phase:
    layout, pipeline = recipe.layout, recipe.pipeline
    per_group = sequences // layout.dp
    kind, zero, reason = choose_schedule(recipe, sequences)
    num_micro_batches = per_group // pipeline.micro_batch
    schedule = generate(
        pp=layout.pp,
        v=pipeline.virtual_stages,
        num_micro_batches=num_micro_batches,
        kind=kind,
        nc=pipeline.nc,
        zero=zero,
        num_frozen_stages=num_frozen,
    )
    return Phase(
        after_tokens=after_tokens,
        sequences=sequences,
        seq_len=seq_len,
        schedule=schedule,
        zero=zero,
        zero_reason=reason,
        num_micro_batches=num_micro_batches,
        sequences_per_dp_group=per_group,
    )


def choose_schedule(recipe: Recipe, sequences: int) -> tuple[str, int, str]:
    """Kind of schedule, ZeRO mode and the reason for the mode, where the recipe says "auto" by the paper's rule.

    ISCA'25 3.1.3, with bs = sequences per DP group: bs >= 2 pp gives ZeRO-1 and 1F1B, interleaved if v > 1; a smaller
    bs gives ZeRO-2 and all-forward-all-backward, where one stage's gradients at a time are alive anyway.
    """
    layout, pipeline = recipe.layout, recipe.pipeline
    per_group, pp, v = sequences // layout.dp, layout.pp, pipeline.virtual_stages
    enough = per_group >= 2 * pp
    by_rule = ("interleaved" if v > 1 else "1f1b") if enough else "afab"
    kind: str = pipeline.schedule
    if kind == "auto":
        kind = by_rule if pipeline.nc is None else "flexible"
    if layout.zero != "auto":
        return kind, layout.zero, f"ZeRO-{layout.zero}: set by layout.zero"
    numbers = f"bs = {per_group} sequences per DP group {'>=' if enough else '<'} 2 x pp = {2 * pp}"
    if enough:
        return kind, 1, f"ZeRO-1: {numbers}, so each stage keeps its gradients whole and reduces them once a step"
    return kind, 2, f"ZeRO-2: {numbers}, so the gradients of one stage at a time are whole"


def num_frozen_stages(config: ModelConfig, stages: tuple[Stage, ...], freeze: tuple[str, ...]) -> int:
    """How many leading stages have no parameter to train: no gradient is computed for them, nor sent to them."""
    for index, shapes in enumerate(stage_shapes(config, stages)):
        if not all(is_frozen(name, freeze, tied=config.tied) for name in shapes):
            return index
    raise AssertionError("train.freeze leaves nothing to train: refused earlier")


def _base_config(model: Model) -> tuple[ModelConfig, list[Problem]]:
    """The model that the hyper-parameters override: a preset, or what a config.json says."""
    fallback = preset(DEFAULT_PRESET)
    if model.path is not None:
        problems = []
        if model.preset is not None:
            problems.append(Problem("model.path", model.path, f'cannot be given with model.preset = "{model.preset}"'))
        folder = local_folder(model.path)
        file = f"{model.path.rstrip('/')}/config.json" if folder is None else folder / "config.json"
        try:
            return config_from_hf(dict(json.loads(read_file(model.path, "config.json").decode("utf-8")))), problems
        except OSError as error:
            if folder is None:
                rule = f"must be a checkpoint, as it is a URL; {error}"
            else:
                rule = f"must be a directory in Hugging Face format; {file}: {error.strerror}"
        except (ValueError, TypeError) as error:
            rule = f"{file} cannot be used: {error}"
        except KeyError as error:
            rule = f"{file} cannot be used: {error} is missing"
        return fallback, [*problems, Problem("model.path", model.path, rule)]
    if model.preset is None or model.preset in PRESETS:
        return preset(model.preset or DEFAULT_PRESET), []
    near = nearest_name(model.preset, PRESETS)
    return fallback, [
        Problem("model.preset", model.preset, f"must be one of {', '.join(PRESETS)}", (near,) if near else ())
    ]


def _flat(recipe: Recipe, base: ModelConfig) -> dict[str, Any]:
    """Full key -> value, the model's with what they override."""
    values = {
        f"{name}.{key}": getattr(getattr(recipe, name), key)
        for name in recipe.__struct_fields__
        for key in getattr(recipe, name).__struct_fields__
    }
    derived = base.head_dim * base.num_heads == base.dim
    for field in fields(ModelConfig):
        key = f"model.{field.name}"
        if values[key] is None and field.name != "rope_scaling":
            values[key] = 0 if field.name == "head_dim" and derived else getattr(base, field.name)
    scaling = _scaling(values.pop("model.rope_scaling"), base.rope_scaling)
    return values | {f"model.rope_scaling.{key}": value for key, value in scaling.items()}


def _scaling(table: RopeScalingTable | str | None, base: RopeScaling | None) -> dict[str, Any]:
    """What the recipe's table gives, over what the base has, over Llama 3.1. Empty: no scaling."""
    if isinstance(table, str) or (table is None and base is None):
        return {}
    values = asdict(base or RopeScaling())
    given = {} if table is None else {name: getattr(table, name) for name in table.__struct_fields__}
    return values | {name: value for name, value in given.items() if value is not None}


def _config(values: dict[str, Any]) -> ModelConfig:
    prefix = "model.rope_scaling."
    scaling = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    given = {field.name: values[f"model.{field.name}"] for field in fields(ModelConfig) if field.name != "rope_scaling"}
    return ModelConfig(**given, rope_scaling=RopeScaling(**scaling) if scaling else None)
