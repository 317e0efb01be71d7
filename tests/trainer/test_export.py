"""Checkpoints to Hugging Face's format and back: bitwise, readable by transformers, one tensor at a time."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fourfold.model import Batch, Llama, huggingface
from fourfold.recipe import ModelConfig, check, from_table
from fourfold.trainer import export
from fourfold.trainer.checkpoint import Checkpoint, CheckpointStore, find_checkpoint
from fourfold.trainer.checkpoint import tensors as tensors_module
from fourfold.trainer.export import export_checkpoint, import_model, parse_size
from fourfold.trainer.ranks import fork_ranks
from fourfold.trainer.weights import initial_weights
from tests.parallel.harness import Case
from tests.trainer.runs import fourfold, metrics, train, write_recipe
from tests.trainer.saves import build, merge, plan_of, without_padding

CASES = {"untied": Case(tp=2, nmb=2, layers=3), "tied": Case(pp=2, nmb=2, layers=3, tied=True)}
Saved = tuple[Checkpoint, dict[str, Tensor], ModelConfig]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    """Checkpoints of two models, with what they must hold."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    found = {}
    for name, case in CASES.items():

        def work(rank: int, name: str = name, case: Case = case) -> Any:
            own = build(case)
            own.train(0, 2)
            own.save(folder / name / "checkpoints", tokenizer_files=[folder / "tokenizer.json"])
            return own.parts()

        parts = fork_ranks(case.world, work, timeout=60)
        weights = without_padding(merge(parts), 261)
        weights = {n.removeprefix("model."): v for n, v in weights.items() if n.startswith("model.")}
        found[name] = (find_checkpoint(folder / name), weights, plan_of(case).config)
    return found


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "?": 2}, "unk_token": "?"},
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_the_export_is_bitwise_the_weights_and_transformers_agrees_on_the_loss(
    tmp_path: Path, saved: dict[str, Saved], kind: str
) -> None:
    checkpoint, weights, config = saved[kind]
    done = export_checkpoint(checkpoint, tmp_path / "hf")
    assert done.num_parameters == sum(value.numel() for value in weights.values())
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == {huggingface.name_to_hf(name) for name in weights}
    assert all(torch.equal(found[huggingface.name_to_hf(name)], value) for name, value in weights.items())

    theirs, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    assert AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)("a b c")["input_ids"] == [0, 1, 2]
    ours = Llama(config)
    ours.load_state_dict(huggingface.load(tmp_path / "hf", config))
    tokens = torch.randint(261, (90,), generator=torch.Generator().manual_seed(3))
    batch = Batch.from_rows(tokens, [[90]])
    with torch.no_grad():
        loss = ours(tokens, batch).item() / 89
        assert theirs(tokens[None], labels=tokens[None]).loss.item() == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", CASES)
def test_export_then_import_is_bitwise(tmp_path: Path, saved: dict[str, Saved], kind: str) -> None:
    checkpoint, weights, _ = saved[kind]
    export_checkpoint(checkpoint, tmp_path / "hf", shard_size=20_000)
    import_model(tmp_path / "hf", str(tmp_path / "back"), shard_size=30_000)
    back = find_checkpoint(tmp_path / "back")
    state = back.state()
    assert (state.step, state.tokens, state.optimizer_steps) == (0, 0, 0)
    assert back.index().tensors.keys() == {f"model.{name}" for name in weights}
    assert len([name for name in back.index().files if name.endswith(".safetensors")]) > 1
    export_checkpoint(back, tmp_path / "again", shard_size=20_000)
    files = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "again").iterdir())
    assert all((tmp_path / "hf" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in files)
    assert (Path(back.path) / "tokenizer" / "tokenizer.json").read_text() == json.dumps(TOKENIZER)


def test_shards_and_dtype(tmp_path: Path, saved: dict[str, Saved]) -> None:
    checkpoint, weights, config = saved["untied"]
    limit = 12_000
    done = export_checkpoint(checkpoint, tmp_path / "hf", dtype=torch.bfloat16, shard_size=limit)
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert done.num_files == len(files) > 3
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= limit
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * sum(value.numel() for value in weights.values())
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
    found = huggingface.load(tmp_path / "hf", config)
    for name, value in weights.items():
        assert torch.equal(found[name][: len(value)], value.bfloat16()), name
    import_model(tmp_path / "hf", str(tmp_path / "back"))
    read = export.load_boxes  # of the import, float32 holds the rounded values exactly
    box = export.Box((261, 32), (0, 0), torch.empty(261, 32))
    back = find_checkpoint(tmp_path / "back")
    read(back.files, back.index(), {"x": ("model.output.weight", box)})
    assert torch.equal(box.memory, weights["output.weight"].bfloat16().float())


def test_no_more_than_one_tensor_is_in_memory(
    tmp_path: Path, saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, weights, _ = saved["untied"]
    largest = max(value.nbytes for value in weights.values())
    alive, memory_of = [], tensors_module.memory_of

    def watched(tensor: Tensor) -> memoryview:
        new = [value for value in gc.get_objects() if type(value) is Tensor]
        alive.append(sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in new}.values()))
        return memory_of(tensor)

    monkeypatch.setattr(tensors_module, "memory_of", watched)
    gc.freeze()  # what exists already is not looked at
    export_checkpoint(checkpoint, tmp_path / "hf")
    import_model(tmp_path / "hf", str(tmp_path / "back"))
    gc.unfreeze()
    assert len(alive) > 2 * len(weights)
    assert max(alive) <= largest


def test_a_run_starts_from_an_imported_model(tmp_path: Path, saved: dict[str, Saved]) -> None:
    checkpoint, weights, config = saved["tied"]
    export_checkpoint(checkpoint, tmp_path / "hf")
    import_model(tmp_path / "hf", str(tmp_path / "start"))
    for path in (tmp_path / "start", Path(checkpoint.path)):
        plan = check(from_table({"model": {"path": str(path), "vocab_multiple": 16}}))
        assert plan.config == config
        read = initial_weights(plan)
        found = read("tok_embeddings.weight", (272, 32), (slice(100, 272), slice(0, 20)))
        assert torch.equal(found[:161], weights["tok_embeddings.weight"][100:, :20])
        assert not found[161:].any()


def test_the_verbs(tmp_path: Path, saved: dict[str, Saved]) -> None:
    checkpoint, weights, _ = saved["untied"]
    run = Path(checkpoint.path).parents[1]
    done = fourfold(tmp_path, "export", str(run), "hf", "--dtype", "bfloat16", "--shard-size", "1MB")
    assert done.code == 0, done.err
    count = sum(value.numel() for value in weights.values())
    assert (
        done.out
        == f"Step 2 of {checkpoint.path}: {count:,} parameters, {count * 2 / 1e6:.2f} MB in 1 file, written to hf\n"
    )
    done = fourfold(tmp_path, "import", "hf", "start")
    assert done.code == 0, done.err
    assert done.out == f"hf: {count:,} parameters, {count * 4 / 1e6:.2f} MB in 1 file, written to start\n"
    assert find_checkpoint(tmp_path / "start").step == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "nowhere", "out"), "nowhere is no checkpoint and holds none: there is no index.json in it"),
        (("export", "damaged", "out"), "damaged is damaged: state.json has 2 bytes instead of"),
        (("export", "s4://x/y", "out"), "s4://x/y cannot be opened: Protocol not known: s4"),
        (("export", "good", "hf"), "hf exists already"),
        (("export", "good", "out", "--shard-size", "5"), "--shard-size 5: must be a number with KB, MB, GB or TB"),
        (("import", "nowhere", "out"), "nowhere"),
        (("import", "hf", "good"), "good exists already"),
        (("import", "empty", "out"), "config.json is not one of a Llama that can be read here"),
        (("import", "holes", "out"), "parameters of holes: missing layers.0.attention.wk.weight"),
        (("import", "text", "out"), "the weights of text cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    hf = tmp_path / "hf"
    config = plan_of(CASES["untied"]).config
    model = Llama(config)
    for weight in model.parameters():
        weight.data.zero_()
    huggingface.save(model.state_dict(), config, hf)
    import_model(hf, str(tmp_path / "good"))
    import_model(hf, str(tmp_path / "damaged"))
    (tmp_path / "damaged" / "state.json").write_text("{}")
    for name in ("empty", "holes", "text"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes(b"{}" if name == "empty" else (hf / "config.json").read_bytes())
    held = load_file(hf / "model.safetensors")
    del held["model.layers.0.self_attn.k_proj.weight"]
    export.write_tensors(
        export.LocalFiles(tmp_path / "holes"), "model.safetensors", {n: v.shape for n, v in held.items()}, held.get
    )
    (tmp_path / "text" / "model.safetensors").write_text("this is no file of weights")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    done = fourfold(tmp_path, *args)
    assert done.code == 2, (done.out, done.err)
    assert message in done.err
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert sorted(str(p) for p in tmp_path.rglob("*") if not p.name.startswith("std")) == before


def test_a_full_disk_leaves_nothing(tmp_path: Path, saved: dict[str, Saved], monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _, _ = saved["untied"]
    export_checkpoint(checkpoint, tmp_path / "hf")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.huggingface, "save_config", full)
    monkeypatch.setattr(export, "make_index", full)
    with pytest.raises(OSError, match="No space left"):
        export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(OSError, match="No space left"):
        import_model(tmp_path / "hf", str(tmp_path / "back"))
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 mb", "200KB", "2TB")] == [
        5 * 10**9,
        1_500_000,
        200_000,
        2 * 10**12,
    ]
    for text in ("", "5", "GB", "-1GB", "0MB", "5GiB"):
        with pytest.raises(ValueError, match="must be a number with KB, MB, GB or TB"):
            parse_size(text)


def test_imports_to_a_url(tmp_path: Path, saved: dict[str, Saved]) -> None:
    checkpoint, weights, _ = saved["tied"]
    export_checkpoint(checkpoint, tmp_path / "hf")
    import_model(tmp_path / "hf", f"local://{tmp_path}/a/start")
    found = find_checkpoint(f"local://{tmp_path}/a/start")
    assert found.index().tensors.keys() == {f"model.{name}" for name in weights}
    assert CheckpointStore(tmp_path / "a").complete() == []  # it is no step of a run


class Remote(AsyncFileSystem):
    """Files of this machine as a store that is asked over connections, which a fork breaks. It is read only."""

    protocol = "remote"

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return LocalFileSystem().cat_file(path, start=start, end=end)

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return LocalFileSystem().info(path)

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        return LocalFileSystem().ls(path, detail=detail)


@pytest.mark.parametrize("scheme", ["file", "local", "remote"])
def test_runs_start_from_checkpoints_at_urls(tmp_path: Path, saved: dict[str, Saved], scheme: str) -> None:
    """An imported one, and one that a run has saved there, to the same losses as from their paths."""
    fsspec.register_implementation("remote", Remote, clobber=True)
    write_recipe_of_no_model(tmp_path)
    export_checkpoint(saved["tied"][0], tmp_path / "hf")
    store = f"{'local' if scheme == 'remote' else scheme}://{tmp_path}/store"
    done = fourfold(tmp_path, "import", "hf", f"{store}/start")
    assert done.code == 0, done.err
    start_from(tmp_path, "store/start", "one", f"checkpoint.dir={store}/steps")
    (step,) = (path.name for path in (tmp_path / "store" / "steps").glob("step-*"))
    start_from(tmp_path, f"store/steps/{step}", "two")
    losses = {name: [line["loss"] for line in metrics(tmp_path / "runs" / name)] for name in ("one", "two")}
    assert losses["two"][0] < losses["one"][0]
    for name, place in (("one", "start"), ("two", f"steps/{step}")):
        said = start_from(tmp_path, f"{scheme}://{tmp_path}/store/{place}", f"{name}-url")
        assert f"from {scheme}://{tmp_path}/store/{place}" in said
        assert [line["loss"] for line in metrics(tmp_path / "runs" / f"{name}-url")] == losses[name]


def start_from(folder: Path, place: str, name: str, *overrides: str) -> str:
    """Trains the recipe from weights, and returns what that printed."""
    done = train(folder, f"model.path={place}", f"output.name={name}", "layout.pp=2", *overrides)
    assert done.code == 0, done.err
    return done.out


def write_recipe_of_no_model(folder: Path) -> None:
    """The tiny recipe, whose model is what model.path says."""
    recipe = write_recipe(folder)
    recipe.write_text("[model]\nvocab_multiple = 16\n\n[batch]" + recipe.read_text().partition("[batch]")[2])


def test_a_url_that_is_no_checkpoint(tmp_path: Path, saved: dict[str, Saved]) -> None:
    """Only a folder of this machine may be one in Hugging Face's format, which file:// names as well."""
    write_recipe_of_no_model(tmp_path)
    export_checkpoint(saved["tied"][0], tmp_path / "hf")
    start_from(tmp_path, f"file://{tmp_path}/hf", "tiny")
    done = train(tmp_path, f"model.path=local://{tmp_path}/hf")
    assert done.code == 2
    assert f'model.path = "local://{tmp_path}/hf": must be a checkpoint, as it is a URL; `fourfold import`' in done.err
