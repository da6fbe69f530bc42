"""Saved pipelines: any number of workers writes them, any number reads them, and so does the plain model."""

from stageflow.checkpoint.hub import write_config
from stageflow.checkpoint.layout import Manifest
from stageflow.checkpoint.load import Checkpoint, load_weights, open_checkpoint
from stageflow.checkpoint.save import Progress, Saving
from stageflow.checkpoint.shard import ShardEntry, write_shard

__all__ = [
    "Checkpoint",
    "Manifest",
    "Progress",
    "Saving",
    "ShardEntry",
    "load_weights",
    "open_checkpoint",
    "write_config",
    "write_shard",
]
