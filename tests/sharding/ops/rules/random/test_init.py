"""torch.nn.init on sharded parameters: torch's distributions, and the same values on any mesh."""

from __future__ import annotations

import pytest
import torch
from torch.nn import init

import shardmesh as sm
from tests.device import DEVICE

FILLS = [
    (init.uniform_, (-2.0, 3.0)),
    (init.normal_, (1.0, 2.0)),
    (init.constant_, (3.0,)),
    (init.ones_, ()),
    (init.zeros_, ()),
    (init.trunc_normal_, ()),
    (init.trunc_normal_, (0.5, 2.0, 1.0, 1.5)),
    (init.kaiming_uniform_, ()),
    (init.kaiming_normal_, ()),
    (init.xavier_uniform_, ()),
    (init.xavier_normal_, ()),
    (init.eye_, ()),
    (init.orthogonal_, ()),
    (init.orthogonal_, (0.5,)),
    (init.kaiming_normal_, (0.1, "fan_out", "relu")),
]
CONVOLUTIONS = [
    (init.dirac_, (), (12, 8, 3, 3)),
    (init.dirac_, (2,), (12, 8, 3)),
    (init.kaiming_uniform_, (0.2, "fan_out"), (12, 8, 3, 3)),
    (init.xavier_normal_, (2.0,), (12, 8, 3, 3)),
    (init.orthogonal_, (), (80, 8, 3, 3)),
]


def _filled(fill, arguments, shape, mesh_shape, spec):
    def rank():
        mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=("a", "b")[: len(mesh_shape)])
        sm.random.manual_seed(3)
        parameter = torch.nn.Parameter(sm.zeros(shape, mesh, spec))
        assert fill(parameter, *arguments) is parameter
        assert parameter.requires_grad
        return parameter.full_tensor().detach()

    n = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    return sm.simulate(n)(rank)()


def _filled_alike_on_any_mesh(fill, arguments, shape):
    """Return the tensor, which is the same on every mesh."""
    tensors = _filled(fill, arguments, shape, (1,), sm.P())
    tensors += _filled(fill, arguments, shape, (4,), sm.P("a"))
    tensors += _filled(fill, arguments, shape, (2, 2), sm.P("b", "a"))
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    return tensors[0]


@pytest.mark.parametrize(("fill", "arguments"), FILLS)
def test_same_values_on_any_mesh_and_torchs_distribution(fill, arguments):
    shape = (90, 41)
    filled = _filled_alike_on_any_mesh(fill, arguments, shape)
    torch.manual_seed(0)
    expected = fill(torch.empty(shape), *arguments)
    spread = float(expected.std()) if expected.std() > 0 else 1.0
    assert abs(float(filled.mean() - expected.mean())) < 0.1 * spread
    assert abs(float(filled.std() - expected.std())) < 0.05 * spread
    assert float(filled.abs().max()) <= 1.5 * float(expected.abs().max())


@pytest.mark.parametrize(("fill", "arguments", "shape"), CONVOLUTIONS)
def test_convolution_weights_have_the_fan_of_the_whole(fill, arguments, shape):
    filled = _filled_alike_on_any_mesh(fill, arguments, shape)
    torch.manual_seed(0)
    expected = fill(torch.empty(shape), *arguments)
    assert float(filled.std()) == pytest.approx(float(expected.std()), rel=0.1)
    if fill is init.dirac_:
        assert torch.equal(filled, expected)


@pytest.mark.parametrize("spec", [sm.P(), sm.P("a"), sm.P(None, "a")], ids=str)
def test_exact_fills(spec):
    for fill in (init.eye_, init.ones_, init.zeros_):
        assert all(
            torch.equal(t, fill(torch.empty(5, 7))) for t in _filled(fill, (), (5, 7), (3,), spec)
        )
    for q in _filled(init.orthogonal_, (), (7, 5), (3,), spec):
        torch.testing.assert_close(q.T @ q, torch.eye(5))


def test_sparse_needs_implicit_replication():
    """It calls torch.randperm, which has no mesh."""

    def rank():
        x = sm.zeros((6, 4), sm.init_device_mesh(DEVICE, (3,), axis_names=("a",)), sm.P("a"))
        with pytest.raises(RuntimeError, match="implicit_replication"):
            init.sparse_(x, 0.5)
        torch.manual_seed(1)
        with sm.ops.implicit_replication():
            init.sparse_(x, 0.5)
        assert torch.equal((x == 0).sum(0).full_tensor(), torch.full((4,), 3))
        return x.full_tensor()

    tensors = sm.simulate(3)(rank)()
    assert all(torch.equal(t, tensors[0]) for t in tensors)


def test_unsupported_arguments_raise():
    def rank():
        x = sm.zeros((4, 4), sm.init_device_mesh(DEVICE, (1,)))
        with pytest.raises(NotImplementedError, match="manual_seed"):
            init.normal_(x, generator=torch.Generator())
        with pytest.raises(ValueError, match="at least 2 dims"):
            init.kaiming_uniform_(sm.zeros((4,), x.mesh))
        with pytest.raises(ValueError, match="mode must be 'fan_in' or 'fan_out', got '"):
            init.kaiming_uniform_(x, mode="fan")

    sm.simulate(1)(rank)()
