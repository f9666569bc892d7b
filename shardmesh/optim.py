"""Optimizers that work on whole matrices, whatever their sharding: Muon, Shampoo. Those of
`torch.optim` work unchanged.
"""

from shardmesh.sharding.optim.muon import Muon
from shardmesh.sharding.optim.shampoo import Shampoo

__all__ = [
    "Muon",
    "Shampoo",
]
