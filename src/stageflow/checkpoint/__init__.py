"""Saved pipelines: any number of workers writes them, any number reads them, and so does the plain model."""

from stageflow.checkpoint.background import BackgroundSave, Pending, write_behind
from stageflow.checkpoint.hub import write_config
from stageflow.checkpoint.layout import Manifest
from stageflow.checkpoint.load import Checkpoint
from stageflow.checkpoint.opening import load_weights, open_checkpoint, open_newest
from stageflow.checkpoint.save import Progress, Saving
from stageflow.checkpoint.series import Series
from stageflow.checkpoint.shard import Shard, ShardEntry, write_shard

__all__ = [
    "BackgroundSave",
    "Checkpoint",
    "Manifest",
    "Pending",
    "Progress",
    "Saving",
    "Series",
    "Shard",
    "ShardEntry",
    "load_weights",
    "open_checkpoint",
    "open_newest",
    "write_behind",
    "write_config",
    "write_shard",
]
