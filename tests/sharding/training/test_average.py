"""The moving average of parameters in every layout, compared with torch's on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.average import EMA
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, on_mesh, same_error

SPECS = {
    "0.weight": P("a", "b"),
    "0.bias": P(),
    "1.weight": P(("b", "a"), sizes={("b", "a"): (0, 3, 0, 1)}),
    "1.bias": P("a"),
}


def plain_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4)).to(DEVICE, dtype)


def place(model, mesh, specs=SPECS):
    for path, spec in specs.items():
        module, name = path.split(".")
        sm.parallel.shard_parameter(model[int(module)], name, mesh, spec, src_data_rank=None)
    return model


def train_step(model, step):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9).add_(step)


def whole(x):
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach()


def test_equals_torchs_average_without_communication():
    model = plain_model()
    expected = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    )
    expected.update_parameters(model)  # the first is a copy
    for step in range(3):
        train_step(model, step)
        expected.update_parameters(model)

    def program(mesh):
        model = place(plain_model(), mesh)
        with sm.debug.comm_budget(launches=0):
            ema = EMA(model, 0.8)
            for step in range(3):
                train_step(model, step)
                ema.update()
        assert ema.updates == 3
        for path, p in expected.module.named_parameters():
            assert sm.typeof(ema.average[path]) is sm.typeof(model.get_parameter(path))
            torch.testing.assert_close(whole(ema.average[path]), p.detach(), rtol=1e-6, atol=1e-7)

    on_mesh((2, 2), program)


def averaged(prepare, options):
    """Return torch's average of a model that is trained for three steps."""
    model = prepare(plain_model())
    average = torch.optim.swa_utils.AveragedModel(model, **options)
    for step in range(3):
        train_step(model, step)
        average.update_parameters(model)
    return [whole(p) for p in average.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)}]
)
def test_torchs_average_of_a_sharded_model(options):
    """It groups by device what `p.to(device)` returns, which is p itself."""
    expected = averaged(lambda model: model, options)

    def program(mesh):
        averages = averaged(lambda model: sm.parallel.fully_shard(model, mesh, axes="a"), options)
        torch.testing.assert_close(averages, expected, rtol=1e-6, atol=1e-7)

    on_mesh((2,), program)


@every_rank(2, 2)
def test_swap_and_restore(mesh):
    """In place, also after an exception; a 16-bit parameter is restored bit for bit."""
    model = place(plain_model(torch.bfloat16), mesh)
    ema = EMA(model, 0.5)
    train_step(model, 1.0)
    ema.update()
    parts = {path: p._local for path, p in model.named_parameters()}
    before = {path: part.clone() for path, part in parts.items()}
    averages = {path: x._local.clone() for path, x in ema.average.items()}
    assert all(x.dtype == torch.float32 for x in averages.values())
    with pytest.raises(ZeroDivisionError), sm.debug.comm_budget(launches=0), ema.swapped():
        for path, p in model.named_parameters():
            assert p._local is parts[path]
            assert torch.equal(p._local, averages[path].to(p.dtype))
        for refused in (ema.update, ema.state_dict, ema.swapped().__enter__):
            with pytest.raises(RuntimeError, match=r"inside swapped\(\)"):
                refused()
        raise ZeroDivisionError
    for path, p in model.named_parameters():
        assert torch.equal(p._local, before[path])
    ema.update()


@every_rank(2, 2)
def test_state_loads_into_another_layout(mesh):
    ema = EMA(place(plain_model(), mesh), 0.8)
    ema.update()
    state = ema.state_dict()
    other = EMA(
        place(
            plain_model(),
            mesh,
            {"0.weight": P("b"), "0.bias": P("a"), "1.weight": P(), "1.bias": P()},
        ),
        0.1,
    )
    for x in other.average.values():
        x.zero_()
    other.load_state_dict(state)
    assert (other.decay, other.updates) == (0.8, 1)
    for path, x in other.average.items():
        assert torch.equal(whole(x), whole(ema.average[path]))
    assert other.average["0.weight"].spec == P("b", None)


@every_rank(2, 2)
def test_selection_of_averaged_tensors(mesh):
    model = plain_model()
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(5, 4))
    model[2].weight = model[1].weight
    assert list(EMA(model).average) == ["0.bias", "1.weight", "1.bias", "2.bias"]


def test_errors():
    def moved(mesh):
        model = plain_model()
        ema = EMA(model)
        place(model, mesh)
        ema.update()
        EMA(model).update()
        ema._parameters = dict(model.named_parameters())
        ema.update()

    text = same_error((2, 2), moved, ValueError)
    assert (
        "0.weight is f32[5, 3] @ P('a', 'b') on (a=2, b=2), but its average a plain [5, 3]" in text
    )

    def other_paths(mesh):
        state = EMA(plain_model()).state_dict()
        state["average"]["2.weight"] = state["average"].pop("1.weight")
        EMA(plain_model()).load_state_dict(state)

    text = same_error((2, 2), other_paths, ValueError)
    assert "lacks averages of ['1.weight'], and has averages of ['2.weight']" in text

    def other_shape(mesh):
        state = EMA(plain_model()).state_dict()
        state["average"]["1.weight"] = torch.zeros(2, 2)
        EMA(plain_model()).load_state_dict(state)

    assert "1.weight is [2, 2], the parameter [4, 5]" in same_error((2, 2), other_shape, ValueError)
    assert "from 0 to 1" in same_error((2, 2), lambda mesh: EMA(plain_model(), 1.5), ValueError)
    assert "nothing to average" in same_error(
        (2, 2), lambda mesh: EMA(plain_model().requires_grad_(False)), ValueError
    )
