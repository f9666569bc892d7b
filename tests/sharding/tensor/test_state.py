"""State dicts, copies and files of sharded tensors."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Shard, ShardedTensor
from tests.sharding.linear import WEIGHT, plain_linear, sharded_linear
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, save_part

# -- state dicts -----------------------------------------------------------------------------------


@every_rank(2)
def test_state_dict_shares_memory_and_is_detached(mesh):
    module = sharded_linear(mesh)
    state = module.state_dict()
    assert list(state) == ["weight", "bias"]
    assert type(state["weight"]) is ShardedTensor
    assert not state["weight"].requires_grad
    assert sm.typeof(state["weight"]) is sm.typeof(module.weight)
    assert state["weight"].to_local().data_ptr() == module.weight.to_local().data_ptr()


@every_rank(2)
def test_load_plain_tensors(mesh):
    """Each rank takes its part of the whole; nothing moves."""
    module = sharded_linear(mesh)
    weight = module.weight
    with collectives() as records:
        result = module.load_state_dict({"weight": WEIGHT, "bias": torch.arange(3.0)})
    assert records == []
    assert str(result) == "<All keys matched successfully>"
    assert module.weight is weight
    assert weight.placements == (Shard(0),)
    assert weight.requires_grad
    assert torch.equal(weight.detach().full_tensor(), WEIGHT)
    assert torch.equal(module.bias.detach().full_tensor(), torch.arange(3.0))


@every_rank(2)
def test_load_sharded_tensors_of_other_placements(mesh):
    module, other = sharded_linear(mesh), sharded_linear(mesh, P(None, "a"))
    other.load_state_dict({"weight": WEIGHT, "bias": torch.arange(3.0)})
    module.load_state_dict(other.state_dict())
    assert module.weight.placements == (Shard(0),)
    assert torch.equal(module.weight.detach().full_tensor(), WEIGHT)
    same = sharded_linear(mesh).state_dict()
    with collectives() as records:
        module.load_state_dict(same)
    assert records == []
    assert torch.equal(module.weight.detach().full_tensor(), plain_linear().weight.detach())


@every_rank(2)
def test_load_with_assign_takes_the_placements_of_the_file(mesh):
    module = sharded_linear(mesh)
    module.load_state_dict(sharded_linear(mesh, P(None, "a")).state_dict(), assign=True)
    assert type(module.weight) is ShardedTensor
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.placements == (Shard(1),)
    assert module.weight.requires_grad
    module(place(mesh, torch.ones(2, 4))).sum().backward()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((3, 4), 2.0))


@every_rank(2)
def test_load_into_a_plain_module(mesh):
    plain = nn.Linear(4, 3)
    plain.load_state_dict(sharded_linear(mesh).state_dict())
    assert type(plain.weight) is nn.Parameter
    assert torch.equal(plain.weight, plain_linear().weight)


@every_rank(2)
def test_load_wrong_shapes_and_keys(mesh):
    module = sharded_linear(mesh)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[3, 5\].*\[3, 4\]"):
        module.load_state_dict({"weight": torch.ones(3, 5), "bias": torch.ones(3)})
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        module.load_state_dict({"weight": WEIGHT})


@every_rank(2)
def test_buffers_of_every_kind(mesh):
    """BatchNorm's state: running statistics and a 0-d integer counter."""
    state = nn.BatchNorm1d(4).state_dict()
    state["num_batches_tracked"] = torch.tensor(7)
    module = sm.parallel.distribute_module(nn.BatchNorm1d(4), mesh)
    module.load_state_dict(state)
    assert int(module.num_batches_tracked) == 7
    assert module.running_var.is_fully_replicated


# -- copies and files ------------------------------------------------------------------------------


@every_rank(2)
def test_deepcopy_of_a_module(mesh):
    """Values, gradients and placements are copied; tied parameters stay tied; hooks of gradients
    work in the copy.
    """
    module = nn.ModuleList([sharded_linear(mesh), sharded_linear(mesh)])
    module[1].weight = module[0].weight
    x = place(mesh, torch.ones(2, 4))
    module[0](x).sum().backward()
    twin = copy.deepcopy(module)
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight is not module[0].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight.grad is not module[0].weight.grad
    assert torch.equal(twin[0].weight.grad, module[0].weight.grad)
    twin[0](x).sum().backward()
    assert torch.equal(twin[0].bias.grad.full_tensor(), torch.full((3,), 4.0))
    assert torch.equal(module[0].bias.grad.full_tensor(), torch.full((3,), 2.0))


@every_rank(2)
def test_deepcopy_of_a_computed_tensor_raises_as_in_torch(mesh):
    with pytest.raises(RuntimeError, match="leaf"):
        copy.deepcopy(place(mesh, WEIGHT, Shard(0), grad=True) * 2)


def reloaded(thing, **options):
    file = io.BytesIO()
    save_part(thing, file)
    file.seek(0)
    return torch.load(file, **options)


@every_rank(2, 2)
def test_pickle_and_torch_save(mesh):
    """Each rank's file holds its own part; torch.load with its default, weights_only=True, reads
    it.
    """
    for spec in (P("a", "b"), P(("b", "a")), P(unreduced={"a"}), P()):
        x = sm.device_put(WEIGHT, mesh, spec)
        for y in (
            pickle.loads(pickle.dumps(x)),
            reloaded(x),
            reloaded(x, weights_only=False),
            copy.copy(x),
        ):
            assert sm.typeof(y) is sm.typeof(x)
            assert torch.equal(y.to_local(), x.to_local())
    module = sharded_linear(mesh)
    state = reloaded(module.state_dict())
    assert sm.typeof(state["weight"]) is sm.typeof(module.weight)
    p = reloaded(module.weight)
    assert isinstance(p, nn.Parameter)
    assert p.requires_grad


@every_rank(2)
def test_optimizer_state_in_a_file(mesh):
    module = sharded_linear(mesh)
    optimizer = torch.optim.AdamW(module.parameters())
    module(place(mesh, torch.ones(2, 4))).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(sharded_linear(mesh).parameters())
    fresh.load_state_dict(reloaded(optimizer.state_dict()))
    for state, expected in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert sm.typeof(state["exp_avg"]) is sm.typeof(expected["exp_avg"])
        assert torch.equal(state["exp_avg"], expected["exp_avg"])
        assert torch.equal(torch.as_tensor(state["step"]), torch.as_tensor(expected["step"]))


def test_file_of_another_rank_raises():
    def save(mesh):
        return pickle.dumps(place(mesh, WEIGHT, Shard(0)))

    files = on_mesh((2,), save)

    def load(mesh):
        with pytest.raises(RuntimeError, match="load the file that this rank wrote"):
            pickle.loads(files[1 - mesh.world.rank])

    on_mesh((2,), load)


def test_torch_save_of_a_part_warns_once():
    def program(mesh):
        module = sharded_linear(mesh)
        whole = {name: x.redistribute(P()) for name, x in module.state_dict().items()}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            torch.save(module.state_dict(), io.BytesIO())
            torch.save(whole, io.BytesIO())
            pickle.dumps(module.weight)
            copy.deepcopy(module)
        return [str(warning.message) for warning in caught]

    (text,) = on_mesh((2, 1), program)[0]
    assert "writes only this rank's part" in text
    assert "sm.checkpoint.save(tree, folder)" in text
    assert "sm.checkpoint.full_state_dict(model)" in text
