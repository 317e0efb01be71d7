"""What is found at a path, and one verdict of losses, recorded numbers and weights; other systems' files, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fourfold.debugger.numerics.comparison import Pattern, Verdict
from fourfold.debugger.numerics.records import write
from fourfold.debugger.numerics.runs import compare_runs
from fourfold.debugger.numerics.sides import find_side, read_series
from fourfold.layout import Grid
from fourfold.model import Llama, initialise
from fourfold.model.huggingface import save
from fourfold.recipe import check, from_table, to_toml
from tests.debugger.numerics.made import Made, slightly, whole_step

GLOBAL_LOSS = "loss_metrics/global_avg_loss"
LOSSES = [5.5123456789012, 5.1098765432109, 4.7543210987654, 4.5012345678901]
TABLE: dict[str, dict[str, Any]] = {
    "model": {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 48, "vocab_size": 61},
    "batch": {"sequences": 4, "seq_len": 64},
    "train": {"dtype": "float32"},
}


def run_folder(
    folder: Path,
    losses: Sequence[float] = LOSSES,
    *,
    made: Made | None = None,
    model: Llama | None = None,
    lr: float = 0.01,
    **train: Any,
) -> Path:
    """The folder of a run, with what is asked for in it."""
    folder.mkdir()
    plan = check(from_table({**TABLE, "optimizer": {"lr": lr}, "train": {**TABLE["train"], **train}}))
    (folder / "recipe.toml").write_text(to_toml(plan.recipe))
    layout = {"tp": 1, "cp": 1, "pp": 1, "dp": 1}
    (folder / "run.json").write_text(json.dumps({"state": "finished", "layout": layout}))
    lines = [{"step": i, "loss": loss, "grad_norm": 1.0, "lr": lr} for i, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for record in [] if made is None else made.records():
        write(record, folder / "numerics")
    if model is not None:
        save(model.state_dict(), plan.config, folder / "model")
    return folder


def altered(*by: float) -> list[float]:
    return [loss + more for loss, more in zip(LOSSES, by, strict=True)]


def a_model(seed: int = 3) -> Llama:
    model = Llama(check(from_table(TABLE)).config)
    initialise(model, seed)
    return model


def lines(path: Path, *values: dict[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in values))
    return path


def test_a_run_has_everything(tmp_path: Path) -> None:
    side = find_side(run_folder(tmp_path / "run", made=Made(), model=a_model(), dtype="bfloat16"))
    assert side.records == tmp_path / "run" / "numerics"
    assert side.series is not None
    assert side.series.losses == dict(enumerate(LOSSES, 1))
    assert side.weights is not None
    assert "layers.1.attention.wq.weight" in side.weights.shapes
    assert (side.compute, side.num_layers, side.vocab_size, side.grid) == ("bfloat16", 2, 61, Grid())
    numbers = find_side(tmp_path / "run" / "numerics")
    assert (numbers.records, numbers.vocab_size, numbers.series) == (tmp_path / "run" / "numerics", 61, None)


def test_equal_runs(tmp_path: Path) -> None:
    one, two = (run_folder(tmp_path / name, made=Made(), model=a_model()) for name in ("one", "two"))
    found = compare_runs(one, two)
    assert found.verdict is Verdict.SAME
    assert found.names == ("one", "two")
    assert found.layouts == ("tp1 cp1 pp1 dp1",) * 2
    assert [step.step for step in found.steps] == [1, 2, 3, 4]
    assert [bool(step.kinds) for step in found.steps] == [True, False, False, False]
    assert found.weights is not None
    assert (found.weights.tensors, found.weights.equal) == (21, 21)


def test_order_in_the_numbers(tmp_path: Path) -> None:
    tensors = {name: slightly(x) for name, x in whole_step().items()}
    one = run_folder(tmp_path / "one", made=Made(Grid(tp=2), tensors))
    two = run_folder(tmp_path / "two", altered(0, 1e-6, -1e-6, 0), made=Made())
    found = compare_runs(one, two)
    assert (found.verdict, found.findings) == (Verdict.ORDER, ())
    assert found.layouts == ("tp2 cp1 pp1 dp1", "tp1 cp1 pp1 dp1")


def test_padding_is_known_from_the_recipe(tmp_path: Path) -> None:
    """61 entries stand for tokens, and the made-up vocabulary has 24: none of it is padding."""
    tensors = {name: x + (0.1 if name[1] == "output.weight" else 0.0) for name, x in whole_step().items()}
    one, two = run_folder(tmp_path / "one", made=Made(tensors=tensors)), run_folder(tmp_path / "two", made=Made())
    assert Pattern.PADDING not in {finding.pattern for finding in compare_runs(one, two).findings}


def test_losses_alone(tmp_path: Path) -> None:
    plain = run_folder(tmp_path / "plain")
    found = compare_runs(run_folder(tmp_path / "order", altered(0, 1e-6, -2e-6, 0)), plain)
    assert found.verdict is Verdict.ORDER
    assert found.reason == "the losses of the first step agree to 0.0e+00, and later ones to 4.2e-07"
    found = compare_runs(run_folder(tmp_path / "bug", altered(0.1, 0, 0, 0)), plain)
    assert found.verdict is Verdict.BUG
    assert "the losses of the first step, 1, are 1.8e-02 apart" in found.reason
    found = compare_runs(run_folder(tmp_path / "later", altered(0, 0, 0, 0.4)), plain)
    assert found.verdict is Verdict.UNKNOWN
    assert "from step 4 on they are 8.9e-02 apart" in found.reason
    found = compare_runs(run_folder(tmp_path / "factor", [2 * loss for loss in LOSSES]), plain)
    assert found.findings[0].sentence == "The losses are 2 times those of the other run in every step."
    found = compare_runs(run_folder(tmp_path / "bad", altered(0, float("nan"), 0, 0)), plain)
    assert found.verdict is Verdict.UNKNOWN


def test_in_bf16_losses_may_be_further_apart(tmp_path: Path) -> None:
    losses = altered(5e-4, 0, 0, 0)
    for dtype, verdict in (("float32", Verdict.BUG), ("bfloat16", Verdict.ORDER)):
        one, two = (run_folder(tmp_path / f"{dtype}{i}", each, dtype=dtype) for i, each in enumerate((losses, LOSSES)))
        assert compare_runs(one, two).verdict is verdict


def test_recipes_that_ask_for_other_numbers(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "one", altered(0.2, 0, 0, 0), lr=0.02, seed=3), run_folder(tmp_path / "two")
    found = compare_runs(one, two)
    assert found.verdict is Verdict.OTHER
    assert found.reason == "the recipes differ in optimizer.lr (0.02 and 0.01), train.seed (3 and 0)"
    (one / "recipe.toml").unlink()
    assert compare_runs(one, two).reason == "the learning rates differ from step 1 on: 0.02 and 0.01"


def test_steps_are_chosen(tmp_path: Path) -> None:
    one, two = (run_folder(tmp_path / name, made=Made(), model=a_model()) for name in ("one", "two"))
    found = compare_runs(one, two, steps=(3, 4))  # of which there are losses only
    assert ([step.step for step in found.steps], found.verdict, found.weights) == ([3, 4], Verdict.SAME, None)
    assert [bool(step.kinds) for step in compare_runs(one, two, steps=(1, 1)).steps] == [True]
    with pytest.raises(ValueError, match="steps 7-9: none of them has numbers or a loss in both runs"):
        compare_runs(one, two, steps=(7, 9))


# Other systems.


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        (lambda step, loss: {"iteration": step, "lm loss": loss, "grad norm": 1.0}, ("iteration", "lm loss")),
        (lambda step, loss: {"_step": step, "train": {"loss": loss}}, ("_step", "train/loss")),
        (lambda step, loss: {"step": step, GLOBAL_LOSS: loss}, ("step", GLOBAL_LOSS)),
        (lambda step, loss: {"global_step": step, "train_loss": loss, "other": "x"}, ("global_step", "train_loss")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("first", [0, 1])
def test_losses_of_other_systems(form: Any, keys: tuple[str, str], first: int, tmp_path: Path) -> None:
    """Printed with four digits, counted from 0 or 1, among lines that are something else."""
    theirs = [form(i, round(loss, 4)) for i, loss in enumerate(LOSSES, first)]
    file = lines(tmp_path / "log.jsonl", {"event": "start"}, *theirs)
    file.write_text(file.read_text() + "no json\n[1, 2]\n")
    found = compare_runs(run_folder(tmp_path / "run"), file)
    assert found.verdict is Verdict.SAME
    assert found.reason in ("all losses are equal, as far as they are printed", "all losses are equal")
    assert [step.losses[1] for step in found.steps] == [round(loss, 4) for loss in LOSSES]
    taken = f"Losses of log.jsonl are from log.jsonl, {keys[1]!r} by {keys[0]!r}."
    assert taken in found.notes
    assert ("Step 1 of run is step 0 of log.jsonl." in found.notes) == (first == 0)
    assert any("bfloat16 is assumed" in note for note in found.notes)


def test_printed_digits_are_no_difference(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", *({"step": i, "loss": 2.0 + i / 3} for i in range(1, 5)))
    two = lines(tmp_path / "two.jsonl", *({"step": i, "loss": round(2.0 + i / 3, 3)} for i in range(1, 5)))
    series = read_series(two)
    assert series is not None
    assert series.resolution == pytest.approx(5e-4)
    found = compare_runs(one, two)
    assert (found.verdict, found.reason) == (Verdict.SAME, "all losses are equal, as far as they are printed")


def test_the_offset_is_found_under_a_factor(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", *({"step": i, "loss": loss} for i, loss in enumerate(LOSSES)))
    two = lines(tmp_path / "two.jsonl", *({"step": i, "loss": 2 * loss} for i, loss in enumerate(LOSSES, 1)))
    found = compare_runs(one, two)
    assert found.findings[0].sentence == "The losses are 1/2 times those of the other run in every step."
    assert "Step 0 of one.jsonl is step 1 of two.jsonl." in found.notes


def test_runs_that_begin_in_the_middle(tmp_path: Path) -> None:
    one = lines(tmp_path / "one.jsonl", *({"step": i, "loss": 3.0} for i in range(100, 110)))
    two = lines(tmp_path / "two.jsonl", *({"step": i, "loss": 3.4} for i in range(100, 110)))
    found = compare_runs(one, two)
    assert found.verdict is Verdict.UNKNOWN
    assert "step 100 is the first that both have" in found.reason


def test_weights_of_other_systems(tmp_path: Path) -> None:
    model = a_model()
    run = run_folder(tmp_path / "run", model=model)
    config = check(from_table(TABLE)).config
    state = dict(model.state_dict())
    save(state, config, tmp_path / "hf")
    assert compare_runs(run, tmp_path / "hf").verdict is Verdict.SAME
    save(state, config, tmp_path / "bf16", dtype=torch.bfloat16)
    found = compare_runs(run, tmp_path / "bf16")
    assert found.verdict is Verdict.ORDER
    assert found.reason == "all weights agree within a rounding of bfloat16"
    state["layers.1.feed_forward.w2.weight"] = 1.5 * state["layers.1.feed_forward.w2.weight"]
    save(state, config, tmp_path / "other")
    found = compare_runs(tmp_path / "hf", tmp_path / "other")  # neither is ours
    assert found.weights is not None
    assert (found.verdict, found.weights.worst) == (Verdict.UNKNOWN, "layers.1.feed_forward.w2.weight")
    assert (found.weights.equal, found.weights.error) == (20, pytest.approx(1 / 3, rel=1e-6))


def test_weights_that_are_no_llamas(tmp_path: Path) -> None:
    for name, size in (("one", 4), ("two", 4), ("wide", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {"h.0.mlp": torch.ones(size), name: torch.ones(1)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = compare_runs(tmp_path / "one", tmp_path / "two")
    assert found.verdict is Verdict.SAME
    assert found.notes == ("Only one has one.", "Only two has two.")
    with pytest.raises(ValueError, match=r"h\.0\.mlp has shape 4 in one and 5 in wide: other models"):
        compare_runs(tmp_path / "one", tmp_path / "wide")


def test_losses_agree_and_weights_do_not(tmp_path: Path) -> None:
    one, two = run_folder(tmp_path / "one", model=a_model()), run_folder(tmp_path / "two", model=a_model(4))
    found = compare_runs(one, two)
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason.startswith(
        "all that was compared step by step is equal, but 16 of 21 weights differ"
    )  # all but norms


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="empty: holds nothing that can be compared"):
        compare_runs(run, empty)
    with pytest.raises(ValueError, match="there is no such file or folder"):
        compare_runs(run, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no line of it is a JSON object with a step"):
        compare_runs(run, lines(tmp_path / "strange.jsonl", {"x": 1}, {"step": "one", "loss": "two"}))
    save(a_model().state_dict(), check(from_table(TABLE)).config, tmp_path / "hf")
    with pytest.raises(
        ValueError, match=r"run and .*hf have nothing in common: .*run has losses, and .*hf has weights"
    ):
        compare_runs(run, tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match="cannot be read"):
        compare_runs(run, tmp_path / "hf")
