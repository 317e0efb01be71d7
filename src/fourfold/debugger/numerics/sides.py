"""What a path holds that can be compared: recorded numbers, losses, weights; of our runs or of another system's."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fourfold.debugger.numerics.judging import ROUNDING
from fourfold.debugger.numerics.records import FOLDER, recorded_steps
from fourfold.debugger.runs import layout_of_run
from fourfold.layout import Grid
from fourfold.model.huggingface import name_from_hf
from fourfold.recipe import RecipeError, check, load

METRICS, MODEL, RECIPE, CONFIG = "metrics.jsonl", "model", "recipe.toml", "config.json"
STEP_KEYS = ("step", "iteration", "iter", "global_step", "_step", "train/step", "trainer/global_step", "steps")
LOSS_KEYS = (
    "loss", "lm loss", "lm_loss", "train_loss", "train/loss", "training_loss", "loss_metrics/global_avg_loss",
    "train/CE loss", "train/cross_entropy_loss", "reduced_train_loss", "ce_loss", "learning/loss",
)  # fmt: skip
NORM_KEYS = ("grad_norm", "grad norm", "gradient_norm", "train/grad_norm", "optim/total_grad_norm", "global_grad_norm")
RATE_KEYS = ("lr", "learning_rate", "learning rate", "train/lr", "train/learning_rate", "optim/learning_rate_group0")
_NOT_LOSSES = ("validation.jsonl",)


@dataclass(frozen=True)
class Series:
    """Losses of a run, step by step, from a file of JSON lines.

    Attributes:
        file: where they are.
        keys: those that were taken: of the step, the loss, the gradient norm and the learning rate; empty: none.
        losses, norms, rates: by step.
        resolution: largest rounding error of a loss as it is printed.
    """

    file: Path
    keys: tuple[str, str, str, str]
    losses: dict[int, float]
    norms: dict[int, float]
    rates: dict[int, float]
    resolution: float


@dataclass(frozen=True)
class Weights:
    """Weights of a model, each read when it is asked for.

    Attributes:
        place: where they are.
        shapes: by our name where the model is a Llama, else by that in the file.
        read: the tensor of a name.
    """

    place: str
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[str], Tensor] = field(compare=False)


@dataclass(frozen=True)
class Side:
    """One of two runs, with what there is of it; None: that there is not.

    Attributes:
        path: as the user gave it.
        records: folder of recorded numbers.
        series: its losses.
        weights: at its end.
        settings: its recipe, flat: "train.dtype" -> value.
        compute: dtype of computation.
        num_layers, vocab_size: of the model.
        grid: its layout.
    """

    path: Path
    records: Path | None = None
    series: Series | None = None
    weights: Weights | None = None
    settings: Mapping[str, Any] | None = None
    compute: str | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    grid: Grid | None = None


def find_side(path: Path) -> Side:
    """Looks at a path: the folder of a run or of its numbers, a file of JSON lines, a folder with a model.

    Raises:
        ValueError: there is nothing there that can be compared, or it is damaged.
    """
    if path.suffix == ".safetensors":
        raise ValueError(f"{path}: is a file of weights or numbers; name its folder")
    if path.is_file():
        return Side(path, series=_required_series(path))
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such file or folder")
    records = next((folder for folder in (path / FOLDER, path) if recorded_steps(folder)), None)
    model = next((folder for folder in (path, path / MODEL) if _has_weights(folder)), None)
    weights = None if model is None else open_weights(model)
    series = _find_series(path)
    if records is None and weights is None and series is None:
        raise ValueError(
            f"{path}: holds nothing that can be compared: no {FOLDER}/, no {METRICS} or other file of JSON lines with "
            f"a step and a loss, no {CONFIG} with safetensors, no {MODEL}/"
        )
    settings, compute, num_layers, vocab_size = _of_recipe(path)
    if model is not None and num_layers is None:
        compute, num_layers, vocab_size = _of_config(model)
    return Side(path, records, series, weights, settings, compute, num_layers, vocab_size, layout_of_run(path))


def _of_recipe(path: Path) -> tuple[Mapping[str, Any] | None, str | None, int | None, int | None]:
    """(settings, dtype of computation, layers, vocabulary) that the recipe beside or above a path says."""
    file = next((folder / RECIPE for folder in (path, path.absolute().parent) if (folder / RECIPE).is_file()), None)
    if file is None:
        return None, None, None, None
    settings, compute = None, None
    with suppress(OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        settings = {f"{name}.{key}": value for name, section in table.items() if isinstance(section, dict)
                    for key, value in section.items()}  # fmt: skip
        compute = settings.get("train.dtype")
    try:  # one of another version may not be legal here, and its data may be gone
        config = check(load(file)).config
    except (RecipeError, OSError):
        return settings, compute, None, None
    return settings, compute, config.num_layers, config.vocab_size


def _of_config(model: Path) -> tuple[str | None, int | None, int | None]:
    """(dtype, layers, vocabulary) that a config.json says."""
    try:
        values = json.loads((model / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None, None
    values = values if isinstance(values, dict) else {}
    dtype = values.get("dtype") or values.get("torch_dtype")
    counts = [values.get(key) for key in ("num_hidden_layers", "vocab_size")]
    layers, vocabulary = (count if isinstance(count, int) else None for count in counts)
    return dtype if dtype in ROUNDING else None, layers, vocabulary


def _has_weights(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and any(folder.glob("model*.safetensors"))


def open_weights(folder: Path) -> Weights:
    """The weights of a folder in Hugging Face's format, of any model. ValueError: a file is damaged."""
    files: dict[str, tuple[Any, str]] = {}
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            opened = safe_open(file, framework="pt")
            for theirs in opened.keys():  # noqa: SIM118 - not a mapping
                name = _our_name(theirs)
                files[name] = opened, theirs
                shapes[name] = opened.get_slice(theirs).get_shape()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: cannot be read: {error}") from None

    def read(name: str) -> Tensor:
        opened, theirs = files[name]
        return opened.get_tensor(theirs)

    return Weights(str(folder), shapes, read)


def _our_name(theirs: str) -> str:
    try:
        return name_from_hf(theirs)
    except ValueError:
        return theirs


def _find_series(folder: Path) -> Series | None:
    """The losses in a folder: of ours the metrics, else of the file that has the most."""
    if (folder / METRICS).is_file():
        return read_series(folder / METRICS)
    found = [read_series(file) for file in sorted(folder.glob("*.jsonl")) if file.name not in _NOT_LOSSES]
    return max((series for series in found if series is not None), key=lambda s: len(s.losses), default=None)


def _required_series(file: Path) -> Series:
    series = read_series(file)
    if series is None:
        raise ValueError(
            f"{file}: no line of it is a JSON object with a step ({', '.join(STEP_KEYS[:4])}, ...) and a loss "
            f"({', '.join(LOSS_KEYS[:4])}, ...)"
        )
    return series


class _Number(float):
    """A number with the digits behind its point as it was printed."""

    decimals: int

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        mantissa, _, exponent = text.lower().partition("e")
        number.decimals = len(mantissa.partition(".")[2]) - int(exponent or 0)
        return number


def read_series(file: Path) -> Series | None:
    """Losses from JSON lines; other lines are passed over, and of a step that is there twice the last counts.

    Returns None if no line has a step and a loss. ValueError: it cannot be read.
    """
    keys: tuple[str, str, str, str] | None = None
    losses: dict[int, _Number | float] = {}
    norms: dict[int, float] = {}
    rates: dict[int, float] = {}
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    for line in lines:
        try:
            values = json.loads(line, parse_float=_Number)
        except ValueError:
            continue
        if not isinstance(values, dict):
            continue
        values = _flat(values)
        keys = keys or _keys_of(values)
        if keys is None or keys[1] not in values or not _is_number(step := values.get(keys[0])):
            continue
        for key, into in ((keys[1], losses), (keys[2], norms), (keys[3], rates)):
            value = values.get(key) if key else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                into[int(step)] = value
            elif key in values and value is None and key != keys[3]:  # not finite, as we write it
                into[int(step)] = math.nan
    if keys is None or not losses:
        return None
    decimals = max((loss.decimals for loss in losses.values() if isinstance(loss, _Number)), default=0)
    plain = {step: float(loss) for step, loss in losses.items()}
    return Series(file, keys, plain, norms, rates, 0.5 * 10.0**-decimals)


def _is_number(step: Any) -> TypeGuard[int | float]:
    return isinstance(step, int | float) and not isinstance(step, bool) and math.isfinite(step)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of tables inside are joined with theirs: {"train": {"loss": 1}} has train/loss."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": x for inner, x in value.items() if not isinstance(x, dict)}
        else:
            flat[key] = value
    return flat


def _keys_of(values: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    """Which of a line's keys are meant."""
    step, loss, norm, rate = (
        next((key for key in known if key in values), "") for known in (STEP_KEYS, LOSS_KEYS, NORM_KEYS, RATE_KEYS)
    )
    return (step, loss, norm, rate) if step and loss else None
