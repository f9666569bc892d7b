"""A penalty on `torch.autograd.grad` of the parameters, added to the loss of this rank's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, data_parallel, fully_shard, parallelize, rowwise
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh, same_error

ROWS = torch.arange(24.0, dtype=torch.float64).reshape(8, 3).cos()
LABELS = torch.arange(8) % 4


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize(model, mesh, {"0": colwise(axis="b"), "2": rowwise(axis="b")})


FORMS: dict[str, tuple[tuple[int, ...], Callable[[nn.Module, Any], nn.Module]]] = {
    "DDP": ((4,), data_parallel),
    "ZeRO-1": ((4,), lambda model, mesh: data_parallel(model, mesh, optimizer="a")),
    "ZeRO-2": ((4,), lambda model, mesh: data_parallel(model, mesh, gradient="a", optimizer="a")),
    "FSDP": ((4,), fully_shard),
    "FSDP of units": ((4,), lambda model, mesh: fully_shard(model, mesh, units=nn.Linear)),
    "TP": ((1, 4), tensor_parallel),
    "FSDP with TP": (
        (2, 2),
        lambda model, mesh: fully_shard(tensor_parallel(model, mesh), mesh, axes="a"),
    ),
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "loss + penalty": lambda loss, penalty: loss + penalty,
    "penalty - loss": lambda loss, penalty: penalty - loss,
    "alpha": lambda loss, penalty: torch.add(loss, penalty, alpha=0.5),
    "stack": lambda loss, penalty: torch.stack([loss, penalty]).sum(),
    "root": lambda loss, penalty: loss + (penalty.sqrt() - 1).square(),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def loss_and_penalty(model: nn.Module, rows: Any, labels: Any) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(rows), labels)
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss, sum(grad.pow(2).sum() for grad in grads)  # type: ignore[return-value]


def check(form: str, combine: Callable[[Tensor, Tensor], Tensor], sharded: bool = False) -> None:
    reference = net()
    expected = combine(*loss_and_penalty(reference, ROWS, LABELS))
    expected.backward()
    shape, prepare = FORMS[form]

    def program(mesh: Any) -> None:
        model = prepare(net().to(DEVICE), mesh)
        rows, labels = ROWS.to(DEVICE), LABELS.to(DEVICE)
        if sharded:
            rows, labels = (sm.device_put(x, mesh, P("a")) for x in (rows, labels))
        else:
            ranks, rank = mesh.shape[0], mesh.get_local_rank("a")
            rows, labels = rows.chunk(ranks)[rank], labels.chunk(ranks)[rank]
        total: Any = combine(*loss_and_penalty(model, rows, labels))
        assert isinstance(total, sm.ShardedTensor) == (sharded or form == "TP")
        total.backward()
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().cpu(), q.grad, rtol=1e-12, atol=1e-12)

    on_mesh(shape, program)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_penalty_is_one_value_of_all_ranks(form: str, sharded: bool) -> None:
    check(form, SUMS["loss + penalty"], sharded)


@pytest.mark.parametrize("name", SUMS)
def test_it_may_be_added_in_any_way(name: str) -> None:
    check("FSDP", SUMS[name])


def test_a_product_with_the_loss_of_each_rank_raises() -> None:
    """Each rank would need another gradient of the one value."""

    def program(mesh: Any) -> None:
        model = fully_shard(net().to(DEVICE), mesh)
        rows, labels = (x.to(DEVICE).chunk(4)[mesh.get_rank()] for x in (ROWS, LABELS))
        loss, penalty = loss_and_penalty(model, rows, labels)
        (loss * penalty).backward()

    text = same_error((4,), program, RuntimeError, silent=False)
    assert "each rank used the value differently" in text


def test_a_plain_number_with_a_gradient_next_to_more_than_numbers_raises() -> None:
    def program(mesh: Any) -> None:
        number = torch.ones((), dtype=torch.float64, device=DEVICE, requires_grad=True)
        sm.device_put(ROWS.to(DEVICE), mesh, P("a"), src_data_rank=None) * number

    assert "make it a ShardedTensor" in same_error((4,), program, RuntimeError)
