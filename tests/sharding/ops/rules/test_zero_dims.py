"""Operators on 0-d tensors, for which torch accepts dim 0 or -1."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE

OPERATORS = {
    "flip": lambda x: x.flip(0),
    "flip -1": lambda x: x.flip(-1),
    "movedim": lambda x: x.movedim(0, -1),
    "transpose": lambda x: x.transpose(0, -1),
    "cumsum": lambda x: x.cumsum(0),
    "sum": lambda x: x.sum(0),
    "softmax": lambda x: x.softmax(0),
    "sort": lambda x: x.sort(0)[0],
    "topk": lambda x: x.topk(1, 0)[0],
    "argmax": lambda x: x.argmax(0),
}


@pytest.mark.parametrize("spec", [P(), P(unreduced="a")], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_on_0d_tensors(name, spec):
    def main() -> torch.Tensor:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        return OPERATORS[name](sm.device_put(torch.tensor(3.0), mesh, spec)).full_tensor()

    for found in sm.simulate(2)(main)():
        torch.testing.assert_close(found, OPERATORS[name](torch.tensor(3.0)))
