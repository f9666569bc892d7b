"""torch.nn.init on sharded parameters: torch's distributions, and the same values on any mesh."""

from __future__ import annotations

import pytest
import torch
from torch.nn import init

import shardmesh as sm

FILLS = [
    (init.uniform_, (-2.0, 3.0)),
    (init.normal_, (1.0, 2.0)),
    (init.constant_, (3.0,)),
    (init.ones_, ()),
    (init.zeros_, ()),
    (init.trunc_normal_, ()),
    (init.kaiming_uniform_, ()),
    (init.kaiming_normal_, ()),
    (init.xavier_uniform_, ()),
    (init.xavier_normal_, ()),
]


def _filled(fill, arguments, shape, mesh_shape, spec):
    def rank():
        mesh = sm.init_device_mesh("cpu", mesh_shape, axis_names=("a", "b")[: len(mesh_shape)])
        sm.manual_seed(3)
        parameter = torch.nn.Parameter(sm.zeros(shape, mesh, spec))
        assert fill(parameter, *arguments) is parameter
        assert parameter.requires_grad
        return parameter.full_tensor().detach()

    n = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
    return sm.simulate(n)(rank)()


@pytest.mark.parametrize(("fill", "arguments"), FILLS)
def test_same_values_on_any_mesh_and_torchs_distribution(fill, arguments):
    shape = (90, 41)
    tensors = _filled(fill, arguments, shape, (1,), sm.P())
    tensors += _filled(fill, arguments, shape, (4,), sm.P("a"))
    tensors += _filled(fill, arguments, shape, (2, 2), sm.P("b", "a"))
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    torch.manual_seed(0)
    expected = fill(torch.empty(shape), *arguments)
    spread = float(expected.std()) if expected.std() > 0 else 1.0
    assert abs(float(tensors[0].mean() - expected.mean())) < 0.1 * spread
    assert abs(float(tensors[0].std() - expected.std())) < 0.05 * spread
    assert float(tensors[0].abs().max()) <= 1.5 * float(expected.abs().max())


def test_what_cannot_be_honoured_is_refused():
    def rank():
        x = sm.zeros((4, 4), sm.init_device_mesh("cpu", (1,)))
        with pytest.raises(NotImplementedError, match="manual_seed"):
            init.normal_(x, generator=torch.Generator())
        with pytest.raises(ValueError, match="at least 2 dims"):
            init.kaiming_uniform_(sm.zeros((4,), x.mesh))
        with pytest.raises(ValueError, match="neither"):
            init.kaiming_uniform_(x, mode="fan")

    sm.simulate(1)(rank)()
