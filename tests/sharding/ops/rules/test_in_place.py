"""In-place operators write to the tensor's memory, through views, or raise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place
from shardmesh.sharding.ops.rules.propagation import CannotKeep
from tests.sharding.ops.rules.table import b, f, i
from tests.sharding.ranks import on_mesh

X = f(4, 6)


def both(mesh, spec, write):
    """Apply `write` to a sharded and to a plain tensor, and compare."""
    x, plain = sm.distribute_tensor(X, mesh, spec), X.clone()
    write(x)
    write(plain)
    assert x.spec == spec.padded(2)
    assert torch.equal(x.full_tensor(), plain)


VIEWS = {
    "select": lambda x: x[:, 1].add_(1),
    "slice": lambda x: x[:, 2:4].mul_(2),
    "transpose": lambda x: x.t().zero_(),
    "view": lambda x: x.view(4, 2, 3)[:, 0].neg_(),
    "split": lambda x: x.split(2, dim=1)[1].fill_(3.0),
    "unbind": lambda x: x.unbind(1)[0].sub_(1),
    "chain": lambda x: x.unsqueeze(0).transpose(0, 1).squeeze(1)[..., -1].exp_(),
    "item": lambda x: x.__setitem__((slice(None), 1), 0.0),
    "masked": lambda x: x[:, :3].masked_fill_(x[:, :3] > 0, -1.0),
    "relu": lambda x: F.relu(x, inplace=True),
    "triangle": lambda x: x[:, 1:4].tril_(-1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_through_a_view(name):
    on_mesh((3,), lambda mesh: both(mesh, P("a"), VIEWS[name]))
    on_mesh((2, 2), lambda mesh: both(mesh, P(("b", "a")), VIEWS[name]))


MOVED = {
    "select": lambda x: x[1].add_(1),
    "slice": lambda x: x[1:3].mul_(2),
    "split": lambda x: x.split(2)[1].fill_(3.0),
    "view of the moved": lambda x: x[1:3].t()[0].neg_(),
    "random": lambda x: x[0].normal_(),
    "list": lambda x: torch._foreach_add_([x[0]], 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_writing_to_a_view_of_a_moved_base_raises(name):
    """The base is on other ranks too: the write would be lost."""

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        with pytest.raises(RuntimeError, match="base had to be redistributed"):
            MOVED[name](x)
        assert torch.equal(x.full_tensor(), X)

    on_mesh((3,), program)


def test_clone_of_such_a_view_can_be_written():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        assert torch.equal(x[1].clone().add_(1).full_tensor(), X[1] + 1)
        assert torch.equal(x[1].exp().add_(1).full_tensor(), X[1].exp() + 1)

    on_mesh((3,), program)


KEEP = {
    "along a split dim": lambda x: x.cumsum_(0),
}


@pytest.mark.parametrize("name", KEEP)
def test_changing_the_layout_raises(name):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        with pytest.raises(CannotKeep, match="would have to change its layout"):
            KEEP[name](x)
        assert torch.equal(x.full_tensor(), X)

    on_mesh((2,), program)


def test_pending_tensor_accepts_only_linear_writes():
    def program(mesh):
        x, y = place(X, mesh, P(unreduced={"a"})), sm.distribute_tensor(X, mesh)
        for write in (
            x.exp_,
            lambda: x.clamp_(min=0),
            lambda: x.__setitem__(0, 1.0),
            lambda: x.fill_(2.0),
        ):
            with pytest.raises(CannotKeep):
                write()
        x.mul_(y).mul_(2)
        torch.testing.assert_close(x.full_tensor(), 2 * X * X)

    on_mesh((2,), program)


def test_pending_operand_is_reduced_before_writing_into_a_reduced_one():
    def program(mesh):
        x, y = sm.distribute_tensor(X, mesh), place(X, mesh, P(unreduced={"a"}))
        torch.testing.assert_close(x.mul_(y).to_local(), X * X)
        torch.testing.assert_close(x.add_(y).to_local(), X * X + X)

    on_mesh((2,), program)


def test_inplace_keyword_returns_the_same_tensor():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        assert F.relu(x, inplace=True) is x
        pending = place(X, mesh, P(unreduced={"a"}))
        with pytest.raises(CannotKeep):
            F.relu(pending, inplace=True)

    on_mesh((2,), program)


def test_masks_and_indices():
    mask, rows = b(4, 6), i(2, high=6)

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"))
        x[sm.distribute_tensor(mask, mesh)] = 7.0
        x[:, sm.distribute_tensor(rows, mesh)] = -1.0
        x[sm.distribute_tensor(mask[:, 0], mesh, P("a"))] = 0.5
        return x.full_tensor()

    expected = X.clone()
    expected[mask] = 7.0
    expected[:, rows] = -1.0
    expected[mask[:, 0]] = 0.5
    assert all(torch.equal(x, expected) for x in on_mesh((3,), program))


def test_gradients_flow_through_writes():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a")).requires_grad_()
        y = x * 1
        y[:, 0] = 0
        y[:, 1] *= x[:, 2]
        y.sum().redistribute(P()).backward()
        return x.grad.full_tensor()

    plain = X.clone().requires_grad_()
    y = plain * 1
    y[:, 0] = 0
    y[:, 1] *= plain[:, 2]
    y.sum().backward()
    for grad in on_mesh((3,), program):
        torch.testing.assert_close(grad, plain.grad)


def test_on_one_rank_everything_can_be_written():
    """A mesh axis of one rank shards nothing, whatever the spec."""

    def program(mesh):
        both(mesh, P("a"), lambda x: x.__setitem__(1, 0.0))
        both(mesh, P("a"), lambda x: x.tril_())

    on_mesh((1,), program)
