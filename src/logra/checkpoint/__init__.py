"""Checkpoints on disk: whole or absent, whatever happens, and readable without pickle."""

from logra.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
