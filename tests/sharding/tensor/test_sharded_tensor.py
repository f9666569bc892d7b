"""`ShardedTensor` as a tensor: parameter, module conversions, print, sizes, `.data` and `.grad`."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from shardmesh import P, Replicate, Shard, ShardedTensor, typeof
from tests.sharding.linear import WEIGHT, sharded_linear
from tests.sharding.ranks import collectives, every_rank, on_mesh, place

# -- parameters and modules ------------------------------------------------------------------------


@every_rank(2)
def test_a_parameter_is_a_parameter(mesh):
    x = place(mesh, WEIGHT, Shard(0))
    p = nn.Parameter(x)
    assert isinstance(p, nn.Parameter)
    assert type(p) is ShardedTensor
    assert p.requires_grad
    assert p.is_leaf
    assert not x.requires_grad
    assert not nn.Parameter(x, requires_grad=False).requires_grad
    assert p.to_local().data_ptr() == x.to_local().data_ptr()
    module = nn.Module()
    module.w = p
    assert dict(module.named_parameters()) == {"w": p}
    assert repr(p).startswith("Parameter(ShardedTensor(f32[3, 4] @ P('a', None) on (a=2), local [")


@every_rank(2)
def test_module_to_another_dtype(mesh):
    module = sharded_linear(mesh)
    x = place(mesh, torch.ones(2, 4))
    module(x).sum().backward()
    weight = module.weight
    module.to(torch.float64)
    assert module.weight is weight
    assert weight.dtype == weight.to_local().dtype == weight.grad.dtype == torch.float64
    assert weight.placements == weight.grad.placements == (Shard(0),)
    assert weight.requires_grad
    module(x.double()).sum().backward()
    assert torch.equal(
        module.weight.grad.full_tensor(), torch.full((3, 4), 4.0, dtype=torch.float64)
    )
    assert torch.equal(module.bias.grad.full_tensor(), torch.full((3,), 4.0, dtype=torch.float64))


@every_rank(2)
def test_module_conversions_communicate_nothing(mesh):
    module = sharded_linear(mesh)
    with collectives() as records:
        for convert in (module.double, module.half, module.bfloat16, module.float, module.cpu):
            assert convert() is module
        module.to("cpu")
        module.to_empty(device="cpu")
        module.requires_grad_(False)
        module.train().eval()
    assert records == []
    assert not module.weight.requires_grad


@every_rank(2)
def test_module_to_another_device_type_raises(mesh):
    with pytest.raises(
        ValueError, match="cannot move a ShardedTensor on DeviceMesh\\(cpu, a=2\\) to mps"
    ):
        sharded_linear(mesh).to("mps")


@every_rank(2)
def test_a_layout_first_seen_in_inference_mode_can_train_later(mesh):
    whole = torch.ones(7, 9)
    with torch.inference_mode():
        assert (place(mesh, whole, Shard(0)) * 2).sum().item() == 126
    x = place(mesh, whole, Shard(0), grad=True)
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), 2 * whole)


@every_rank(2)
def test_memory_is_freed_without_the_garbage_collector(mesh):
    """Neither parameters nor activations nor gradients are part of a reference cycle."""
    gc.collect()
    gc.disable()
    try:
        module = sharded_linear(mesh)
        x = place(mesh, torch.ones(2, 4))
        y = module(x).relu()
        things = [y, y.to_local(), module.weight, module.bias]
        y.sum().backward()
        things += [module.weight.grad, module.bias.grad]
        gone = [weakref.ref(thing) for thing in things]
        del things, module, x, y
        assert [reference() for reference in gone] == [None] * 6
    finally:
        gc.enable()


# -- looking at tensors ----------------------------------------------------------------------------


def test_repr():
    def program(mesh):
        x = place(mesh, WEIGHT, Shard(0))
        with collectives() as records:
            texts = [repr(x), str(x), f"{x}", repr(x.requires_grad_() * 2)]
        assert records == []
        return texts

    first, second = on_mesh((2,), program)
    assert first[0] == first[1] == first[2]
    assert first[0].startswith(
        "ShardedTensor(f32[3, 4] @ P('a', None) on (a=2), local [2, 4],\ntensor([[0., 1., 2., 3.]"
    )
    assert second[0] == (
        "ShardedTensor(f32[3, 4] @ P('a', None) on (a=2), local [1, 4],\ntensor([[ 8.,  9., "
        "10., 11.]]))"
    )
    assert "grad_fn=<MulBackward0>" in first[3]


@every_rank(3)
def test_format_of_a_0d_tensor_is_its_value(mesh):
    """As for torch's own 0-d tensors, for pending, sharded and replicated ones alike."""
    loss = place(mesh, WEIGHT, Shard(0)).sum()
    assert typeof(loss).pending
    for number in (loss, loss.redistribute(P()), loss.requires_grad_()):
        assert f"{number}" == "66.0"
        assert f"{number:.2f}" == "66.00"
        assert f"{number:>8.1f}" == "    66.0"
        assert "%.1f" % number == "66.0"  # noqa: UP031 - the old way asks float() for the number
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{place(mesh, WEIGHT):.2f}"


@every_rank(2)
def test_sizes_and_iteration(mesh):
    x = place(mesh, WEIGHT, Shard(0))
    assert len(x) == 3
    assert x.shape == x.size() == (3, 4)
    assert x.size(-1) == 4
    assert (x.ndim, x.dim(), x.numel(), x.nelement(), x.itemsize, x.nbytes) == (2, 2, 12, 12, 4, 48)
    assert [torch.equal(row.full_tensor(), WEIGHT[i]) for i, row in enumerate(x)] == [True] * 3
    first, *_ = place(mesh, WEIGHT, Shard(1))
    assert first.spec == P("a")
    assert torch.equal(next(iter(reversed(x))).full_tensor(), WEIGHT[2])
    assert 11.0 in x
    assert 12.0 not in x
    for nothing in (len, iter):
        with pytest.raises(TypeError, match="0-d tensor"):
            nothing(x.sum())


@every_rank(2)
def test_transposes_are_views(mesh):
    x = place(mesh, WEIGHT, Shard(0))
    for y in (x.T, x.mT, x.t(), x.transpose(0, 1)):
        assert y.spec == P(None, "a")
        assert torch.equal(y.full_tensor(), WEIGHT.T)
        assert y.to_local().data_ptr() == x.to_local().data_ptr()


@every_rank(2)
def test_device_and_type_are_those_of_the_local_tensor(mesh):
    x = place(mesh, WEIGHT, Shard(0))
    assert x.device == torch.device("cpu")
    assert x.is_cpu
    assert not x.is_cuda
    assert not x.is_meta
    assert x.is_floating_point()
    assert not x.is_complex()
    assert x.element_size() == 4
    assert not x.is_pinned()
    assert not x.is_inference()
    assert x.is_same_size(x)
    assert not x.is_same_size(x.T)
    assert not x.is_sparse
    assert x.stride() == (4, 1)


# -- data and grad ---------------------------------------------------------------------------------


@every_rank(2)
def test_data_shares_memory_outside_the_graph(mesh):
    x = place(mesh, WEIGHT, Shard(0), grad=True)
    x.data.mul_(2)
    assert not x.data.requires_grad
    assert torch.equal(x.detach().full_tensor(), 2 * WEIGHT)


@every_rank(2)
def test_data_can_be_replaced(mesh):
    """Set to a tensor of any layout, dtype and shape; the gradients of the leaf are reduced as
    before.
    """
    x = place(mesh, WEIGHT, Shard(0), grad=True)
    x.data = place(mesh, torch.ones(4, 5, dtype=torch.float64))
    assert (x.shape, x.dtype, x.placements, x.is_leaf, x.requires_grad) == (
        (4, 5),
        torch.float64,
        (Replicate(),),
        True,
        True,
    )
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((4, 5), 2.0, dtype=torch.float64))
    x.data = x.data * 3  # the result of an operator
    assert torch.equal(x.detach().full_tensor(), torch.full((4, 5), 3.0, dtype=torch.float64))
    y = x.detach() * 1
    y.data = place(mesh, WEIGHT, Shard(1))
    assert torch.equal(y.full_tensor(), WEIGHT)
    with pytest.raises(TypeError, match="distribute_tensor"):
        x.data = WEIGHT


@every_rank(2)
def test_grad_can_be_set_and_deleted(mesh):
    x = place(mesh, WEIGHT, Shard(0), grad=True)
    x.grad = place(mesh, torch.ones(3, 4))
    assert x.grad.placements == (Shard(0),)
    assert x.grad is x.grad
    x.grad.mul_(2).add_(1)
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 4), 3.0))
    del x.grad
    assert x.grad is None
    x.grad = torch.ones_like(x)
    x.grad = None
    assert x.grad is None
    with pytest.raises(TypeError, match="distribute_tensor"):
        x.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"\[2, 4\].*\[3, 4\]"):
        x.grad = place(mesh, torch.ones(2, 4))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    def program(mesh):
        module = sharded_linear(mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        for zero_grad in (module.zero_grad, optimizer.zero_grad):
            module(place(mesh, torch.ones(2, 4))).sum().backward()
            assert torch.equal(module.bias.grad.full_tensor(), torch.full((3,), 2.0))
            zero_grad(set_to_none)
            for p in module.parameters():
                assert p.grad is None if set_to_none else torch.equal(p.grad, torch.zeros_like(p))

    on_mesh((2,), program)
