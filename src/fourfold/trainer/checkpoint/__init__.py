"""Checkpoints: sharded, written beside the training, safe against a crash at any moment, loaded under any layout.

- :mod:`format` what the files say; :mod:`files` local folders and URLs; :mod:`tensors` tensors in files.
- :mod:`store` names, publication, retention, verification.
- :mod:`state` what of a model is saved; :mod:`storage` PyTorch's Distributed Checkpoint over our files.
- :mod:`saver` saving; :mod:`loading` loading.
"""

from fourfold.trainer.checkpoint.format import CheckpointError, SavedState, model_problems
from fourfold.trainer.checkpoint.loading import load_checkpoint, load_newest, open_weights
from fourfold.trainer.checkpoint.saver import Saver
from fourfold.trainer.checkpoint.state import TrainState
from fourfold.trainer.checkpoint.store import Checkpoint, CheckpointStore, damage, find_checkpoint, is_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "SavedState",
    "Saver",
    "TrainState",
    "damage",
    "find_checkpoint",
    "is_checkpoint",
    "load_checkpoint",
    "load_newest",
    "model_problems",
    "open_weights",
]
