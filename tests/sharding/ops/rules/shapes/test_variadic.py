"""Methods of tensors that take several ints, or a sequence of them, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh

CALLS: dict[str, Callable[[Any], Any]] = {
    "squeeze ints": lambda x: x.squeeze(0, 1),
    "squeeze negative": lambda x: x.squeeze(-3, 1),
    "squeeze tuple": lambda x: x.squeeze((0, 1)),
    "squeeze dim=": lambda x: x.squeeze(dim=(0, 1)),
    "squeeze all": lambda x: x.squeeze(),
    "torch.squeeze": lambda x: torch.squeeze(x, (0, 1)),
    "permute": lambda x: x.permute(-1, 0, 1),
    "flip": lambda x: x.flip(0, -1),
    "expand": lambda x: x.expand(3, -1, -1),
    "repeat": lambda x: x.repeat(2, 1, 1),
    "tile": lambda x: x.tile(2, 1),
    "view": lambda x: x.view(1, -1, 6),
    "reshape": lambda x: x.reshape(4, 6),
    "new_zeros": lambda x: x.new_zeros(2, 3),
    "roll": lambda x: x.roll((1, 2), (1, 2)),
    "movedim": lambda x: x.movedim((0, 1), (1, 0)),
    "sum": lambda x: x.sum((0, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_like_torch(name: str) -> None:
    call, x = CALLS[name], torch.arange(24.0).reshape(1, 4, 6)

    def program(mesh: Any) -> None:
        for spec in (P(), P(None, "a"), P(None, None, "a")):
            placed = sm.device_put(x.to(DEVICE), mesh, spec)
            torch.testing.assert_close(call(placed).full_tensor().cpu(), call(x))

    on_mesh((2,), program)
