"""A small layer, plain and sharded, for the tests of modules."""

from __future__ import annotations

import torch
from torch import nn

import shardmesh as sm
from shardmesh import P

WEIGHT = torch.arange(12.0).view(3, 4)


def sharded_linear(mesh, spec=None):
    """Return a linear layer of 4 to 3 features with its weight sharded by rows (unevenly, 3 rows)
    and its bias replicated.
    """
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    return sm.parallel.distribute_module(
        module, mesh, lambda _, m, at: sm.parallel.shard_parameter(m, "weight", at, spec or P("a"))
    )


def plain_linear():
    torch.manual_seed(0)
    return nn.Linear(4, 3)
