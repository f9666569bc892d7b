"""Writing in place: to views, and to pending tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial
from tests.sharding.ranks import on_mesh

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
F = nn.functional


VIEWS = {
    "transpose": lambda t: t.T,
    "row": lambda t: t[1],
    "rows": lambda t: t[1:3],
    "column": lambda t: t[:, 1],
    "last": lambda t: t[-1],
    "steps": lambda t: t[::2],
    "slice of a slice": lambda t: t[1:4][0],
    "column of the transpose": lambda t: t.T[1],
    "new dim": lambda t: t[None],
    "everything": lambda t: t[...],
    "flat": lambda t: t.view(15),
    "reshape": lambda t: t.reshape(3, 5),
    "flatten": lambda t: t.flatten(),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.squeeze(),
    "unflatten": lambda t: t.unflatten(1, (3, 1)),
    "narrow": lambda t: t.narrow(0, 1, 2),
    "select": lambda t: t.select(1, 1),
    "split": lambda t: t.split(2)[1],
    "chunk": lambda t: t.chunk(3, 1)[0],
    "unbind": lambda t: t.unbind(1)[2],
    "diagonal": lambda t: t.diagonal(),
    "expand": lambda t: t.expand(5, 3),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "view_as": lambda t: t.view_as(t),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "contiguous": lambda t: t.contiguous(),
    "same dtype": lambda t: t.to(torch.float64),
    "itself": lambda t: t,
    "a copy": lambda t: t.clone(),
    "another copy": lambda t: t.flip(0),
}
WRITES = {
    "mul_": lambda t: t.mul_(2),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(7),
    "add_": lambda t: t.add_(t),
    "setitem": lambda t: t.__setitem__(..., 5.0),
    "imul": lambda t: t.__imul__(3),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("view", VIEWS)
def test_writing_to_a_view_changes_its_base_or_raises(view):
    """If the view had to be redistributed, its base would not change, so this raises."""

    def program(mesh):
        for spec in (P("a"), P(None, "a"), P("a", "b"), P(("b", "a")), P()):
            for write in WRITES.values():
                expected, x = X.clone(), sm.device_put(X, mesh, spec, src_data_rank=None)
                write(VIEWS[view](expected))
                try:
                    write(VIEWS[view](x))
                except (RuntimeError, ValueError) as error:
                    assert "redistribut" in str(error)
                    assert not sm.typeof(x).is_fully_replicated
                    expected = X
                assert torch.equal(x.full_tensor(), expected), spec

    on_mesh((2, 2), program)


PENDING_WRITES = {
    "mul_": lambda t: t.mul_(2),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(7.0),
    "add_ number": lambda t: t.add_(1),
    "add_": lambda t: t.add_(t),
    "clamp_": lambda t: t.clamp_(max=0),
    "setitem": lambda t: t.__setitem__(0, 5.0),
    "set all": lambda t: t.__setitem__(..., 5.0),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 5.0),
    "copy_": lambda t: t.copy_(t * 2),
    "exp_": lambda t: t.exp_(),
    "div_": lambda t: t.div_(3),
    "neg_": lambda t: t.neg_(),
}


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("write", PENDING_WRITES)
def test_writing_to_a_pending_tensor_is_correct_or_raises(write, kind):
    """Filling 7 into each of two contributions to a sum would give 14."""
    parts = torch.stack([X + 1, X.flip(0) - 0.5])
    combined = {
        "sum": parts.sum(0),
        "avg": parts.mean(0),
        "max": parts.amax(0),
        "min": parts.amin(0),
        "product": parts.prod(0),
    }

    def program(mesh):
        x = sm.from_local(parts[mesh.world.rank].clone(), mesh, [Partial(kind)])
        expected = combined[kind].clone()
        try:
            PENDING_WRITES[write](x)
        except (RuntimeError, ValueError) as error:
            assert "redistribute" in str(error)
        else:
            PENDING_WRITES[write](expected)
        torch.testing.assert_close(x.full_tensor(), expected, rtol=1e-12, atol=1e-12)

    on_mesh((2,), program)


@pytest.mark.parametrize("spec", [P(), P("a")], ids=["whole", "split"])
def test_copy_of_a_plain_tensor_on_a_rank_outside_the_mesh(spec):
    def program(mesh):
        here = sm.DeviceMesh("cpu", [0, 1], axis_names=("a",))
        t = sm.zeros(5, 3, dtype=X.dtype, placements=spec, device_mesh=here)
        t.copy_(X)
        t.copy_(X[0])  # broadcast
        t.copy_(X)
        return t.to_local().clone() if here.coordinate is None else t.full_tensor()

    first, second, outside = on_mesh((3,), program)
    assert torch.equal(first, X)
    assert torch.equal(second, X)
    assert outside.numel() == 0
