"""Checkpoints that load on any mesh, state dicts and safetensors.

    state = {"model": model, "optimizer": optimizer}
    sm.checkpoint.save(state, "run", step=100)
    sm.checkpoint.load("run", like=state)  # the newest one, on any number of ranks

See docs/checkpoint.md.
"""

from shardmesh.sharding.checkpoint.convert import Conversion, convert
from shardmesh.sharding.checkpoint.full_state import full_state_dict, load_full_state_dict
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.safetensors import load_safetensors, save_safetensors
from shardmesh.sharding.checkpoint.save import AsyncSave, async_save, save
from shardmesh.sharding.checkpoint.state import RandomState, load_state_dict, state_dict
from shardmesh.sharding.checkpoint.storage.folder import Checkpoint, latest
from shardmesh.sharding.checkpoint.tree import PerRank

__all__ = [
    "AsyncSave",
    "Checkpoint",
    "Conversion",
    "PerRank",
    "RandomState",
    "async_save",
    "convert",
    "full_state_dict",
    "latest",
    "load",
    "load_full_state_dict",
    "load_safetensors",
    "load_state_dict",
    "save",
    "save_safetensors",
    "state_dict",
]
