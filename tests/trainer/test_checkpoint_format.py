"""The JSON of a checkpoint: what one says about its tensors must be so, and damage to it is noticed."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest

from fourfold.recipe import ModelConfig, preset
from fourfold.trainer.checkpoint.format import (
    FORMAT,
    CheckpointError,
    Chunk,
    FileCheck,
    RankReport,
    SavedState,
    StoredTensor,
    decode,
    encode,
    make_index,
    model_problems,
    read_index,
    real_shape,
    require_filled,
)
from fourfold.trainer.checkpoint.state import model_of, model_table

CONFIG = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, vocab_size=261)


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...], file: str = "rank-00000.safetensors") -> Chunk:
    return Chunk(offsets, sizes, file, 0, 4 * int(np.prod(sizes)), 0)


def tensor(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> StoredTensor:
    return StoredTensor(shape, "float32", tuple(chunk(offsets, sizes) for offsets, sizes in boxes))


def random_cuts(size: int, random: Random) -> list[tuple[int, int]]:
    borders = [0, *sorted(random.sample(range(1, size), random.randint(0, min(3, size - 1)))), size]
    return list(pairwise(borders))


def test_any_exact_cover_is_accepted_and_any_other_refused() -> None:
    random = Random(1)
    for _ in range(200):
        shape = tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
        rows = random_cuts(shape[0], random)
        boxes = []
        for first, last in rows:  # every band of rows is cut in its own way
            cuts = [random_cuts(size, random) for size in shape[1:]]
            for other in product(*cuts):
                boxes.append(((first, *(a for a, _ in other)), (last - first, *(b - a for a, b in other))))
        random.shuffle(boxes)
        require_filled("w", tensor(shape, *boxes))
        with pytest.raises(CheckpointError, match="leave a part out"):
            require_filled("w", tensor(shape, *boxes[1:]))
        with pytest.raises(CheckpointError, match="overlap"):
            require_filled("w", tensor(shape, *boxes, boxes[0]))


@pytest.mark.parametrize("box", [((0, 0), (3, 4)), ((-1, 0), (3, 4)), ((0, 0), (2, 5)), ((1,), (1,)), ((0, 0), (0, 4))])
def test_a_chunk_must_lie_in_its_tensor(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(CheckpointError, match="does not fit the tensor"):
        require_filled("w", tensor((2, 4), box))


def test_a_chunk_must_have_as_many_bytes_as_values() -> None:
    short = StoredTensor((2, 4), "float32", (Chunk((0, 0), (2, 4), "f", 8, 39, 0),))
    with pytest.raises(CheckpointError, match=r"w: the chunk at \(0, 0\) of f does not fit"):
        require_filled("w", short)


def reports() -> list[RankReport]:
    return [
        RankReport(
            rank=rank,
            tensors={"model.w": StoredTensor((4, 2), "float32", (chunk((2 * rank, 0), (2, 2), f"rank-{rank}"),))},
            files={f"rank-{rank}": FileCheck(100, 20, 7)},
            steps={"w": 3},
        )
        for rank in range(2)
    ]


def test_the_index_is_what_the_ranks_report() -> None:
    content = make_index(reports(), {"state.json": FileCheck.of(b"{}")})
    index = read_index(content, path="index.json")
    assert index.format == FORMAT
    assert index.tensors["model.w"].shape == (4, 2)
    assert [c.file for c in index.tensors["model.w"].chunks] == ["rank-0", "rank-1"]
    assert sorted(index.files) == ["rank-0", "rank-1", "state.json"]
    assert index.steps == {"w": 3}


def test_ranks_that_disagree_make_no_index() -> None:
    first, second = reports()
    second.tensors["model.w"] = StoredTensor((5, 2), "float32", second.tensors["model.w"].chunks)
    with pytest.raises(CheckpointError, match="rank 1 has another shape"):
        make_index([first, second], {})
    first, second = reports()
    second.steps["w"] = 4
    with pytest.raises(CheckpointError, match="rank 1 counts 4 steps, others 3"):
        make_index([first, second], {})
    with pytest.raises(CheckpointError, match="leave a part out"):
        make_index(reports()[:1], {})


def test_damage_to_any_byte_of_the_index_is_noticed() -> None:
    content = make_index(reports(), {})
    whole = read_index(content, path="index.json")
    for place in range(len(content) - 1):  # the last is the line end
        for change in (1, 16):
            damaged = bytearray(content)
            damaged[place] ^= change
            with suppress(CheckpointError):
                assert read_index(bytes(damaged), path="x/index.json") == whole  # a space that became a line end
    for length in range(len(content) - 1):
        with pytest.raises(CheckpointError, match="damaged"):
            read_index(content[:length], path="x/index.json")


def test_a_later_format_is_refused_by_number() -> None:
    content = make_index(reports(), {}).replace(b'"format":1', b'"format":9')
    with pytest.raises(CheckpointError, match="has format 9; this version of Fourfold reads up to 1"):
        read_index(content, path="index.json")


def test_a_file_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"state\.json is damaged: Object missing required field"):
        decode(b'{"step": 3}', SavedState, path="state.json")
    with pytest.raises(CheckpointError, match="damaged"):
        decode(b"\x80\x04pickle", SavedState, path="state.json")


def state_of(config: ModelConfig) -> SavedState:
    return SavedState(FORMAT, 1, 2, {"samples": 3}, 1, 0, model_table(config))


def test_the_model_is_kept_whole() -> None:
    assert model_of(decode(encode(state_of(CONFIG)), SavedState, path="s").model) == CONFIG
    scaled = preset("llama3-405b")
    assert model_of(decode(encode(state_of(scaled)), SavedState, path="s").model) == scaled
    with pytest.raises(CheckpointError, match="not one"):
        model_of({**model_table(CONFIG), "num_kv_heads": 3})


def test_another_model_is_named_by_key() -> None:
    saved = model_table(CONFIG)
    assert model_problems(saved, CONFIG.replace(vocab_multiple=16, rope_theta=1e6, norm_eps=1e-6), path="p") == []
    problems = model_problems(saved, CONFIG.replace(ffn_dim=64, tied=True), path="runs/a")
    assert [str(problem) for problem in problems] == [
        "model.ffn_dim = 64: must be that of the checkpoint runs/a; nearest legal: 48",
        "model.tied = true: must be that of the checkpoint runs/a; nearest legal: false",
    ]


def test_the_padding_of_the_vocabulary_is_not_stored() -> None:
    assert real_shape("tok_embeddings.weight", (384, 32), CONFIG) == (261, 32)
    assert real_shape("output.weight", (384, 32), CONFIG) == (261, 32)
    assert real_shape("norm.weight", (32,), CONFIG) == (32,)
