"""Calls that raise on "meta" but are supported on the device."""

from __future__ import annotations

import re

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.ranks import every_rank, same_error


@pytest.fixture(scope="module", autouse=True)
def picky():
    """An operator whose kernel for "meta" takes bfloat16 only, and whose kernel here takes all but
    float64.
    """

    @torch.library.custom_op("device_result::rowdot", mutates_args=())
    def rowdot(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            raise RuntimeError("no kernel for float64")
        return (x * y).sum(-1).bfloat16()

    @rowdot.register_fake
    def _(x, y):
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("bfloat16 only")
        return x.new_empty(x.shape[:-1])

    sm.ops.register_rule(torch.ops.device_result.rowdot.default, "n k, n k -> n")


def _rowdot(mesh, dtype):
    x, y = (torch.linspace(0, n, 20000, dtype=dtype).reshape(100, 200) for n in (1, 2))
    placed = [sm.distribute_tensor(z, mesh, P("a"), src_data_rank=None) for z in (x, y)]
    return torch.ops.device_result.rowdot.default(*placed), (x * y).sum(-1)


@every_rank(3)
def test_calls_supported_on_the_device(mesh):
    """The shape is the rule's, the dtype the kernel's."""
    y, expected = _rowdot(mesh, torch.float32)
    assert (y.shape, y.dtype, y.spec) == ((100,), torch.bfloat16, P("a"))
    torch.testing.assert_close(y.full_tensor(), expected.bfloat16())


def test_calls_unsupported_on_the_device():
    """The error is that of the kernel for "meta", which saw the sizes of the program."""
    assert (
        same_error((3,), lambda mesh: _rowdot(mesh, torch.float64), RuntimeError) == "bfloat16 only"
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        # Fits 48 rows where they are taken as 16.
        (lambda x: torch.split(x, [8, 8]), "split_with_sizes expects"),
        (lambda x: x[:, :40] @ x[:, :39].T, "cannot be multiplied|mat2 must|a and b must"),
    ],
)
def test_mismatched_sizes_raise(call, text):
    found = same_error(
        (3,),
        lambda mesh: call(sm.distribute_tensor(torch.zeros(48, 48), mesh, P(), src_data_rank=None)),
        RuntimeError,
    )
    assert re.search(text, found), found
