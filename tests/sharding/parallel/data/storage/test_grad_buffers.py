"""Which gradients are in a buffer already, and which are copied into it."""

from __future__ import annotations

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.layout.layout import Layout
from shardmesh.sharding.parallel.data.storage.flat import FlatBucket


def test_a_gradient_that_is_its_view_transposed_is_copied() -> None:
    """It has the view's address, dtype and shape."""

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("x",))
        bases = [Layout.of(mesh, P(), shape, torch.float32) for shape in ((4, 4), (3, 4))]
        flat = FlatBucket(mesh, ("x",), bases, None)
        filled = flat.new_grad_buffer(torch.float32)
        values = [torch.arange(16.0).view(4, 4), torch.arange(12.0).view(3, 4)]
        for view, value in zip(filled.views, values, strict=True):
            view.copy_(value)
        square, other = filled.views
        grads = [square.t(), other.view_as(other)]
        flat.fill_grad_buffer(grads, torch.float32, filled)
        assert torch.equal(square, values[0].t())
        assert torch.equal(other, values[1])

    sm.simulate(2)(program)()
