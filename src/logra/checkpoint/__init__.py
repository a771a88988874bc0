"""Checkpoints on disk that are readable without pickle: whole or absent for one process, sharded for several."""

from logra.checkpoint.sharded import load_sharded, save_sharded
from logra.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "load_sharded", "save_sharded"]
