"""Models built on "meta": their initial values do not depend on the mesh or the sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.parallel import colwise, fully_shard, parallelize
from shardmesh.sharding.parallel.data.materialize import materialize
from tests.sharding.parallel.data.training import (
    FORMS,
    GatedBlock,
    TiedModel,
    batch,
    loss_of,
    on_ranks,
    values,
)


class _NoReset(nn.Module):
    """Has a parameter and a buffer, but no initializer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("seen", torch.zeros(()))


def _made(**sizes):
    with torch.device("meta"):
        made = TiedModel(**sizes)
    for module in (made, *made.blocks):
        module.reset_parameters = lambda module=module: _reset(module)
    return made


def _reset(module):
    if isinstance(module, GatedBlock):
        module.g.fill_(0.7)
    else:
        module.shift.copy_(torch.linspace(-1, 1, module.shift.shape[0]))


def _values(shape, form):
    def program(mesh):
        sm.random.manual_seed(3)
        made = materialize(FORMS[form](_made(), mesh))
        assert not made.shift.is_meta
        assert type(made.shift) is torch.Tensor
        return values(made)

    return on_ranks(shape, program)


class _PlainDraws(nn.Module):
    """Draws its values as a plain tensor, as models with decay rates do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.empty(8).uniform_(1, 16).log_())


def test_plain_draws_are_the_same_on_ranks_that_torch_seeds_differently():
    def drawn(of_torch, seed, place):
        def program(mesh):
            sm.random.manual_seed(seed)
            with torch.device("meta"):
                made = nn.Sequential(_PlainDraws(), _PlainDraws())
            torch.manual_seed(of_torch)
            materialize(place(made, mesh))
            assert torch.equal(torch.rand(3), torch.rand(3, generator=generator(of_torch)))
            return values(made)

        return on_ranks((1,), program)[0]

    def generator(seed):
        return torch.Generator().manual_seed(seed)

    def whole(module, mesh):
        return parallelize(module, mesh, {})

    def in_units(module, mesh):
        return fully_shard(module, mesh, units=_PlainDraws)

    first = drawn(1, 3, whole)
    assert not torch.equal(first["0.weight"], first["1.weight"])
    for other in (drawn(2, 3, whole), drawn(2, 3, in_units)):
        assert all(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["0.weight"], drawn(1, 4, whole)["0.weight"])


def test_values_are_the_same_on_every_mesh():
    expected = _values((1,), "ddp")[0]
    assert expected["blocks.0.a.weight"].std() > 0.1
    assert set(expected["blocks.1.norm.weight"].tolist()) == {1.0}
    for shape, form in (((4,), "fsdp"), ((2, 2), "hybrid"), ((3,), "zero1"), ((2, 2), "fsdp")):
        for found in _values(shape, form):
            assert all(torch.equal(found[name], x) for name, x in expected.items())


def test_materialized_parts_are_views_of_the_flat_buffer():
    def program(mesh):
        made = materialize(fully_shard(_made(), mesh, units=GatedBlock))
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        losses = []
        for _ in range(8):
            loss = loss_of(made, *batch(mesh, False))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        pieces = {
            x._local.untyped_storage().data_ptr()
            for x in made.blocks[0].parameters()
            if x.dim() and x._local.numel()
        }
        assert len(pieces) == 1
        return sum(losses[:2]), sum(losses[-2:])

    found = on_ranks((4,), program)
    assert sum(last for _, last in found) < sum(first for first, _ in found)


def test_tied_parameters_stay_tied():
    def program(mesh):
        made = _made()
        made.blocks[1].a.weight = made.blocks[0].a.weight
        ignored = made.norm.weight
        fully_shard(made, mesh, units=GatedBlock, ignored_params=[ignored])
        materialize(made)
        assert made.blocks[1].a.weight is made.blocks[0].a.weight
        assert type(made.norm.weight) is nn.Parameter
        assert made.norm.weight.tolist() == [1.0] * 5

    on_ranks((2,), program)


def test_custom_initializer():
    def program(mesh):
        made = fully_shard(nn.Sequential(_on_meta(_NoReset), nn.LayerNorm(3, device="meta")), mesh)
        materialize(
            made,
            lambda module: [
                x.fill_(2.0)
                for x in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            ],
        )
        assert made[0].seen.item() == 2.0
        assert values(made)["1.weight"].tolist() == [2.0] * 3

    on_ranks((2,), program)


def _on_meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize(
    "kind", [nn.LSTM, nn.MultiheadAttention, nn.Embedding, nn.BatchNorm1d, nn.Conv1d]
)
def test_modules_of_torch(kind):
    arguments = {
        nn.LSTM: (3, 5),
        nn.MultiheadAttention: (6, 2),
        nn.Embedding: (7, 3),
        nn.BatchNorm1d: (5,),
        nn.Conv1d: (3, 5, 2),
    }[kind]
    options = {"padding_idx": 1} if kind is nn.Embedding else {}

    def program(mesh):
        sm.random.manual_seed(0)
        made = materialize(fully_shard(kind(*arguments, device="meta", **options), mesh))
        assert all(torch.isfinite(x).all() for x in made.state_dict().values())
        return {
            name: x.full_tensor() if isinstance(x, sm.ShardedTensor) else x
            for name, x in made.state_dict().items()
        }

    expected, *rest = [found for shape in ((1,), (3,)) for found in on_ranks(shape, program)]
    assert all(torch.equal(found[name], x) for found in rest for name, x in expected.items())


def test_errors_name_the_modules():
    def program(mesh):
        with pytest.raises(
            ValueError, match=r"LayerNorm is not sharded, .*; call fully_shard first"
        ):
            materialize(nn.LayerNorm(3, device="meta"))
        made = fully_shard(nn.Sequential(nn.LayerNorm(3, device="meta"), _on_meta(_NoReset)), mesh)
        with pytest.raises(
            ValueError,
            match=(
                r"no reset_parameters\(\) to initialise .* on meta of 1 \(_NoReset\); define it, "
                r"or pass"
            ),
        ):
            materialize(made)

    on_ranks((2,), program)


class _HasMany(nn.Module):
    """Initializes its submodules and then its own parameters, as Hugging Face models do."""

    def __init__(self):
        super().__init__()
        self.inner, self.scaled = nn.Linear(4, 4), _NoReset()
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)

    def _init_weights(self, module):
        if module is self:
            self.frequencies.copy_(torch.arange(4.0))
            self.inner.bias.fill_(3.0)
        elif isinstance(module, nn.Linear):
            module.weight.fill_(2.0)
            module.bias.zero_()
        elif isinstance(module, _NoReset):
            for x in (*module.parameters(), *module.buffers()):
                x.fill_(1.0)


@pytest.mark.parametrize("shard", ["fully_shard", "parallelize"])
def test_models_own_initializer(shard):
    def program(mesh):
        made = nn.Sequential(_on_meta(_HasMany), _on_meta(lambda: nn.LayerNorm(3)))
        plan = {"0.inner": colwise()}
        materialize(
            fully_shard(made, mesh) if shard == "fully_shard" else parallelize(made, mesh, plan)
        )
        found = values(made)
        assert found["0.inner.weight"].tolist() == [[2.0] * 4] * 4
        assert found["0.inner.bias"].tolist() == [3.0] * 4
        assert found["1.weight"].tolist() == [1.0] * 3
        assert made[0].scaled.seen.item() == 1.0
        frequencies = made[0].frequencies
        assert (
            frequencies.full_tensor() if isinstance(frequencies, sm.ShardedTensor) else frequencies
        ).tolist() == [0.0, 1.0, 2.0, 3.0]

    on_ranks((2,), program)


class _Forgets(nn.Linear):
    """Does not initialize its bias."""

    def reset_parameters(self):
        nn.init.ones_(self.weight)


def test_uninitialized_tensor_raises():
    def program(mesh):
        made = fully_shard(nn.Sequential(_Forgets(3, 2, device="meta")), mesh)
        with pytest.raises(ValueError, match=r"no initialiser writes 0\.bias, which were on meta"):
            materialize(made)
        # To be loaded.
        materialize(fully_shard(nn.Sequential(_Forgets(3, 2, device="meta")), mesh), lambda _: None)

    on_ranks((3,), program)
