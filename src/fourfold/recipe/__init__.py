"""What a run is: models, recipes, and the rules that a legal recipe satisfies. No torch."""

from fourfold.recipe.check import RunPlan, check
from fourfold.recipe.errors import Problem, RecipeError
from fourfold.recipe.load import from_table, load, to_table, to_toml
from fourfold.recipe.model import (
    PRESETS,
    ModelConfig,
    RopeScaling,
    config_from_hf,
    config_to_hf,
    parameter_shapes,
    preset,
)
from fourfold.recipe.parameters import is_frozen, split_dimension, stage_shapes
from fourfold.recipe.schema import (
    Batch,
    Cluster,
    Data,
    Layout,
    Model,
    Optimizer,
    Output,
    Pipeline,
    Recipe,
    RopeScalingTable,
    Train,
)

__all__ = [
    "PRESETS",
    "Batch",
    "Cluster",
    "Data",
    "Layout",
    "Model",
    "ModelConfig",
    "Optimizer",
    "Output",
    "Pipeline",
    "Problem",
    "Recipe",
    "RecipeError",
    "RopeScaling",
    "RopeScalingTable",
    "RunPlan",
    "Train",
    "check",
    "config_from_hf",
    "config_to_hf",
    "from_table",
    "is_frozen",
    "load",
    "parameter_shapes",
    "preset",
    "split_dimension",
    "stage_shapes",
    "to_table",
    "to_toml",
]
