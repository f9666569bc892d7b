"""The same programs on torch's FSDP2 and on shardmesh.compat, in processes: the same gradients, in
the same order of calls.
"""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch
from torch import nn

LIBRARIES = {
    "torch": (
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "torch.distributed._composable.replicate_with_fsdp",
    ),
    "shardmesh": ("shardmesh.compat",),
}
WIDTH = 8


class Names:
    """The names of a library, from the first of its modules that has them."""

    def __init__(self, library):
        self._modules = [importlib.import_module(name) for name in LIBRARIES[library]]

    def __getattr__(self, name):
        return next(getattr(module, name) for module in self._modules if hasattr(module, name))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x, skip_head=False):
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x) if skip_head else self.head(self.norm(x))

    def features(self, x):
        return self(x, skip_head=True)


def build(names, shape, **options):
    torch.manual_seed(0)
    model = Model().double()
    axes = ("replicate", "shard")[-len(shape) :]
    mesh = names.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    for layer in model.layers:
        names.fully_shard(layer, mesh=mesh, **options)
    names.fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False, **options)
    return names.fully_shard(model, mesh=mesh, **options)


def rows(seed):
    rank = torch.distributed.get_rank()
    return torch.randn(
        4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank)
    )


def backward(model, seed):
    model(rows(seed)).square().sum().backward()


def units(names, model):
    return [module for module in model.modules() if isinstance(module, names.FSDPModule)]


def results(model):
    return {
        name: None if x.grad is None else x.grad.full_tensor()
        for name, x in model.named_parameters()
    }


# -- programs --------------------------------------------------------------------------------------


def average(names):
    model = build(names, (4,))
    for seed in range(2):
        backward(model, seed)
    return results(model)


def without_division(names):
    model = build(names, (2, 2))
    for module in units(names, model):
        module.set_gradient_divide_factor(1.0)
    model.layers[0].set_gradient_divide_factor(3.0)  # torch warns of its earlier name
    backward(model, 0)
    return results(model)


def gradients_without_sync(names):
    model = build(names, (2, 2))
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    before = results(model)
    model.set_is_last_backward(False)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    backward(model, 1)
    between = results(model)
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True)
    backward(model, 2)
    return [before, between, results(model)]


def other_dims(names):
    model = build(names, (4,), shard_placement_fn=lambda x: names.Shard(1) if x.ndim == 2 else None)
    backward(model, 0)
    return [{name: x.placements[-1].dim for name, x in model.named_parameters()}, results(model)]


def hooks_and_prefetch(names):
    model = build(names, (4,))
    layers = list(model.layers)
    for one, following in itertools.pairwise(layers):
        one.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([one])
    layers[-1].set_modules_to_forward_prefetch([model.norm, model.head])
    model.head.set_modules_to_backward_prefetch([layers[-1]])
    model.set_reshard_after_backward(False)
    model.set_reshard_after_forward(False, recurse=False)
    seen = []
    layers[1].set_all_reduce_hook(lambda x: (seen.append(x.ndim), x.mul_(3)))
    for seed in range(2):
        backward(model, seed)
    for module in units(names, model):
        module.reshard()  # torch leaves the whole parameters in the modules
    return [seen, results(model)]


def chunked_loss(names):
    model = build(names, (4,))
    names.register_fsdp_forward_method(model, "features")
    hidden = model.features(rows(0))
    leaf = hidden.detach().requires_grad_()
    head = model.head
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    shape = head.weight.shape, not hasattr(head.weight, "placements")
    chunks = leaf.chunk(2)
    for chunk in chunks:
        if chunk is chunks[-1]:
            head.set_requires_gradient_sync(True, recurse=False)
        head(chunk).square().sum().backward()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    hidden.backward(leaf.grad)
    return [list(shape[0]), shape[1], results(model)]


def replicas(names):
    torch.manual_seed(0)
    model = Model().double()
    mesh = names.init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    for layer in model.layers:
        names.replicate(layer, mesh=mesh)
    names.replicate(model, mesh=mesh)
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    return {name: x.grad.full_tensor() for name, x in model.named_parameters()}


PROGRAMS = [
    average,
    without_division,
    gradients_without_sync,
    other_dims,
    hooks_and_prefetch,
    chunked_loss,
    replicas,
]


def run_both(program):
    """Run a program on both libraries; return whether each rank's results are equal, after the
    differences.
    """
    theirs, ours = (program(Names(library)) for library in LIBRARIES)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    return True


@pytest.mark.parametrize("program", PROGRAMS)
def test_like_torch(world4, program):
    assert world4(run_both, program) == [True] * 4
