"""zeros, ones, full, empty, rand, randn, arange: the same global tensor on any mesh."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from tests.device import DEVICE

PLACES = [
    ((4,), sm.P("a")),
    ((4,), sm.P(None, "a")),
    ((3,), sm.P("a")),
    ((2, 2), sm.P("b", "a")),
    ((2, 2), sm.P(("b", "a"))),
    ((1,), sm.P()),
]


def _everywhere(make):
    """Yield the global tensor of `make(mesh, spec)` for each mesh and spec."""

    def rank(shape, spec):
        mesh = sm.init_device_mesh(DEVICE, shape, axis_names=("a", "b")[: len(shape)])
        sm.random.manual_seed(7)
        return make(mesh, spec).full_tensor()

    for shape, spec in PLACES:
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        yield from sm.simulate(n)(rank)(shape, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_random_tensors_do_not_depend_on_the_mesh(dtype):
    for make in (sm.rand, sm.randn):
        tensors = list(
            _everywhere(lambda mesh, spec, make=make: make((5, 7), mesh, spec, dtype=dtype))
        )
        assert all(torch.equal(t, tensors[0]) for t in tensors)
        assert tensors[0].dtype == dtype
        assert tensors[0].unique().numel() > 20


def test_constants():
    for t in _everywhere(lambda mesh, spec: sm.full((5, 7), 3, mesh, spec)):
        assert torch.equal(t, torch.full((5, 7), 3))
    for t in _everywhere(lambda mesh, spec: sm.ones(5, 7, device_mesh=mesh, placements=spec)):
        assert torch.equal(t, torch.ones(5, 7))
    for t in _everywhere(lambda mesh, spec: sm.zeros((5, 7), mesh, spec, dtype=torch.int32)):
        assert torch.equal(t, torch.zeros(5, 7, dtype=torch.int32))


@pytest.mark.parametrize(
    "arguments", [(10,), (6.0,), (2, 11), (2, 11, 3), (0.0, 1.0, 0.125), (5, -5, -2), (3, 3)]
)
def test_arange(arguments):
    def make(mesh):
        return sm.arange(*arguments, device_mesh=mesh, placements=[sm.Shard(0)]).full_tensor()

    for t in sm.simulate(4)(lambda: make(sm.init_device_mesh(DEVICE, (4,))))():
        assert torch.equal(t, torch.arange(*arguments))
        assert t.dtype == torch.arange(*arguments).dtype


def test_requires_grad_makes_a_leaf():
    def rank():
        x = sm.ones((4,), sm.init_device_mesh(DEVICE, (2,)), [sm.Shard(0)], requires_grad=True)
        (x * x).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert sm.simulate(2)(rank)() == [[2, 2, 2, 2]] * 2


def test_invalid_arguments_raise():
    mesh = sm.simulate(1)(lambda: sm.init_device_mesh(DEVICE, (1,), axis_names=("a",)))()[0]
    with pytest.raises(TypeError, match="give the mesh"):
        sm.zeros(4, 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'device'"):
        sm.zeros((4,), mesh, device="cpu")
    with pytest.raises(ValueError, match="cannot be pending"):
        sm.zeros((4,), mesh, sm.P(unreduced={"a"}))
