"""Optimizers on whole matrices, whatever their sharding: Muon, Shampoo; torch's work, too."""

from shardmesh.sharding.optim.muon import Muon
from shardmesh.sharding.optim.shampoo import Shampoo

__all__ = [
    "Muon",
    "Shampoo",
]
