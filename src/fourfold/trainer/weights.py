"""Where the weights that training begins with come from."""

from __future__ import annotations

from safetensors import SafetensorError
from torch import Tensor

from fourfold.model import fill, huggingface
from fourfold.parallel import WeightSource
from fourfold.recipe import Problem, RecipeError, RunPlan
from fourfold.recipe.places import local_folder
from fourfold.trainer.checkpoint import CheckpointError, find_checkpoint, is_checkpoint, open_weights


def initial_weights(plan: RunPlan, *, verify: bool = True) -> WeightSource:
    """Weights of what ``model.path`` names, if it has any, else random ones from ``train.seed``.

    ``verify``: read a checkpoint through first; one process of a job is enough.

    Raises:
        RecipeError: the weights cannot be read, or are not those of the model.
    """
    path, config, seed = plan.recipe.model.path, plan.config, plan.recipe.train.seed
    if path is not None and has_weights(plan):
        folder = local_folder(path)
        try:
            if folder is None or is_checkpoint(path):  # a URL with weights is a checkpoint
                read = open_weights(find_checkpoint(path, verify=verify), config)
            else:
                read = huggingface.open_weights(folder, config)
        except RecipeError:
            raise
        except (CheckpointError, ValueError, OSError, SafetensorError) as error:
            raise RecipeError([Problem("model.path", path, f"its weights cannot be used: {error}")]) from None
        return lambda name, shape, slices: read(name, slices)

    def draw(name: str, shape: tuple[int, ...], slices: tuple[slice, ...]) -> Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return fill(name, shape, seed, config, rows=rows, columns=columns)

    return draw


def has_weights(plan: RunPlan) -> bool:
    """Whether training starts from the weights of ``model.path``.

    Raises:
        RecipeError: there are weights in another format, or there may be: training from random ones instead would be
            a trap.
    """
    path = plan.recipe.model.path
    if path is None:
        return False
    folder = local_folder(path)
    if is_checkpoint(path) or (folder is not None and any(folder.glob("*.safetensors"))):
        return True
    if folder is None:
        rule = "must be a checkpoint, as it is a URL; `fourfold import` makes one of a directory in Hugging Face format"
        raise RecipeError([Problem("model.path", path, rule)])
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if others:
        rule = f"must hold weights as safetensors, or none; found {others[0]}"
        raise RecipeError([Problem("model.path", path, rule)])
    return False


def describe_weights(plan: RunPlan) -> str:
    """Where initial weights come from, in words."""
    return f"from {plan.recipe.model.path}" if has_weights(plan) else f"random, seed {plan.recipe.train.seed}"
