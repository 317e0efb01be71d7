"""Writes the finished model where Hugging Face's transformers can load it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from fourfold.model import huggingface
from fourfold.parallel import TIED_HEAD, ParallelModel
from fourfold.recipe import stage_shapes


def partial_folder(directory: Path) -> Path:
    """Where a model is while it is being written."""
    return directory.with_name(directory.name + ".partial")


def export(model: ParallelModel, directory: Path, *, tokenizer_json: str | None) -> None:
    """Writes config.json, the weights as safetensors in fp32, and the tokenizer. A collective of all ranks.

    Each pipeline rank writes one file. All go to a folder beside ``directory`` that is renamed at the end, so that
    ``directory`` is whole or absent.
    """
    groups, plan = model.groups, model.plan
    partial = partial_folder(directory)
    if groups.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    groups.barrier()

    files = huggingface.file_names(plan.grid.pp)
    own = {name: tensor for name, tensor in model.whole_weights() if tensor is not None}
    if own:
        huggingface.save_file_of(own, plan.config, partial / files[groups.pp.rank])
    if groups.rank == 0:
        shapes = stage_shapes(plan.config, plan.stages)
        names = {
            file: [
                name
                for stage in plan.stages[pp_rank :: plan.grid.pp]
                for name in shapes[stage.index]
                if not (plan.config.tied and name == TIED_HEAD)
            ]
            for pp_rank, file in enumerate(files)
        }
        # Readers take the longest sequence from here: as long as trained on, at least.
        huggingface.save_config(
            plan.config, partial, files=names, dtype=torch.float32, min_positions=plan.recipe.batch.seq_len
        )
        if tokenizer_json is not None:
            (partial / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    groups.barrier()
    if groups.rank == 0:
        partial.rename(directory)
