"""Hooks on tensors, leaves and modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardmesh import P, Shard, ShardedTensor
from tests.sharding.linear import WEIGHT, sharded_linear
from tests.sharding.ranks import every_rank, on_mesh, place


@every_rank(2)
def test_hooks_see_and_change_gradients(mesh):
    """A hook sees the gradient in the layout dual to the tensor's; what it returns is redistributed
    to it.
    """
    x, seen = place(mesh, WEIGHT, grad=True), []

    def triple(grad):
        seen.append(grad.spec)
        return grad * 3

    handle = x.register_hook(triple)
    (x * 2).sum().backward()
    assert seen == [P(None, None, unreduced={"a"})]
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 6.0))
    handle.remove()
    x.grad = None
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 2.0))


@every_rank(2)
def test_nonlinear_hook_sees_the_reduced_gradient(mesh):
    """Clamping each rank's share of a pending gradient would be wrong."""
    x = place(mesh, WEIGHT, grad=True)
    x.register_hook(lambda grad: grad.clamp(max=1.5))
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 1.5))


@every_rank(2)
def test_hooks_on_computed_tensors(mesh):
    x = place(mesh, WEIGHT, Shard(0), grad=True)
    y = x * 2
    y.register_hook(lambda grad: grad * 5)
    y.sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 10.0))


@every_rank(2)
def test_a_hook_may_change_the_gradient_in_place(mesh):
    x = place(mesh, WEIGHT, Shard(0), grad=True)

    def halve(grad):
        grad.mul_(0.5)

    y = x * 2
    y.register_hook(halve)
    (y**2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 4 * WEIGHT)


@every_rank(2)
def test_hook_that_returns_a_plain_tensor_raises(mesh):
    x = place(mesh, WEIGHT, Shard(0), grad=True)
    x.register_hook(lambda grad: torch.ones(3, 4))
    with pytest.raises(TypeError, match="hook"):
        (x * 2).sum().backward()


@every_rank(2)
def test_post_accumulate_grad_hooks_see_reduced_gradients(mesh):
    """They run at the end of backward, so an optimizer may step in them."""
    p, seen = nn.Parameter(place(mesh, WEIGHT)), []
    optimizer = torch.optim.SGD([p], lr=1.0)

    def step(leaf):
        assert leaf is p
        seen.append((leaf.grad.spec, leaf.grad.sum().item()))
        optimizer.step()
        optimizer.zero_grad()

    handle = p.register_post_accumulate_grad_hook(step)
    (p * 2).sum().backward()
    assert seen == [(P(None, None), 24.0)]
    assert torch.equal(p.detach().full_tensor(), WEIGHT - 2)
    assert p.grad is None
    handle.remove()
    (p * 2).sum().backward()
    assert len(seen) == 1
    with pytest.raises(RuntimeError, match="leaf"):
        (p * 2).register_post_accumulate_grad_hook(step)


@every_rank(2)
def test_module_forward_hooks(mesh):
    module, seen = sharded_linear(mesh), []
    module.register_forward_pre_hook(lambda _, inputs: seen.append(type(inputs[0])))
    module.register_forward_hook(lambda _, inputs, output: output * 2)
    module(place(mesh, torch.ones(2, 4))).sum().backward()
    assert seen == [ShardedTensor]
    assert torch.equal(module.bias.grad.full_tensor(), torch.full((3,), 4.0))


@pytest.mark.parametrize(
    "register", ["register_full_backward_hook", "register_full_backward_pre_hook"]
)
def test_module_backward_hooks_raise(register):
    """torch puts a custom autograd.Function around the module for them, which would lose
    gradients.
    """

    def program(mesh):
        module = sharded_linear(mesh)
        getattr(module, register)(lambda *_: None)
        with pytest.raises(RuntimeError, match=r"full backward hook.*register_hook"):
            module(place(mesh, torch.ones(2, 4), grad=True)).sum().backward()

    on_mesh((2,), program)


@every_rank(2)
def test_retain_grad(mesh):
    x = place(mesh, WEIGHT, grad=True)
    y = x * 2
    assert not y.retains_grad
    y.retain_grad()
    y.sum().backward()
    assert y.retains_grad
    assert torch.equal(y.grad.full_tensor(), torch.ones(3, 4))
