"""Tied parameters: copies in several stages have the gradient of all, and stay equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import pipeline
from tests.sharding.parallel.pipeline.stateful_model import (
    SETUPS,
    Model,
    Setup,
    batch,
    make_model,
    own_rows,
)
from tests.sharding.ranks import collectives


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x.clone()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_gradients_of_two_steps_and_one_before(setup):
    """`.grad` had a value before; each step adds that of all copies to it, once."""
    model = make_model()
    ids, targets = batch()
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    for _ in range(2):
        F.cross_entropy(model(ids), targets).backward()

    def program() -> dict[str, Tensor]:
        pipe = setup.pipe()
        for x in pipe.parameters():
            x.grad = torch.ones_like(x)
        for _ in range(2):
            pipe.step(*own_rows(pipe.mesh, ids, targets), loss_fn=F.cross_entropy)
        grads: dict[str, Tensor] = {}
        for name, x in pipe.named_parameters():
            assert x.grad is not None
            grads[name] = whole(x.grad)
        return grads

    seen: set[str] = set()
    for grads in sm.simulate(setup.size)(program)():
        for name, grad in grads.items():
            expected = dict(model.named_parameters(remove_duplicate=False))[name].grad
            torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)
            seen.add(name)
    assert seen - {"head.weight"} == {name for name, _ in model.named_parameters()}


def test_copies_become_equal_before_the_first_step():
    def program() -> Tensor:
        pipe = Setup("fsdp", "1f1b", 2, 2).pipe()
        named = dict(pipe.named_parameters())
        with torch.no_grad():
            named["embedding.weight"].fill_(1.0 + pipe.mesh.get_local_rank("pp"))
        pipe.step(*own_rows(pipe.mesh, *batch()), loss_fn=F.cross_entropy)
        return named["embedding.weight"].full_tensor()

    for weight in sm.simulate(4)(program)():
        assert (weight == 1).all()


def test_copies_with_other_layouts():
    """The embedding is replicated in one stage and has split rows in the other."""
    model = make_model()
    ids, targets = batch()
    F.cross_entropy(model(ids), targets).backward()
    expected = model.embedding.weight.grad

    def program() -> tuple[str, Tensor]:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "tp"))
        pipe = pipeline(make_model(), mesh, split=["blocks.1"], microbatches=2)
        if 1 in pipe.stages:
            sm.parallel.parallelize(
                pipe.stages[1], mesh["tp"], {"head": sm.parallel.colwise(out=sm.P())}
            )
        pipe.step(ids, targets, loss_fn=F.cross_entropy)
        weight = dict(pipe.named_parameters())["embedding.weight"]
        return str(type(weight.grad).__name__), whole(weight.grad)

    results = sm.simulate(4)(program)()
    assert {kind for kind, _ in results} == {"Tensor", "ShardedTensor"}
    for _, grad in results:
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


class UsedInOnePlace(Model):
    """The head's result does not reach the loss."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + 0.0 * self.head(self.norm(x)).detach().sum()


class NotUsed(Model):
    """Neither copy's result reaches the loss."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).detach()
        for block in self.blocks:
            x = block(x)
        return self.norm(x) + 0.0 * self.head(self.norm(x)).detach().sum()


@pytest.mark.parametrize("kind", [UsedInOnePlace, NotUsed])
def test_a_copy_without_gradient_counts_as_zeros(kind):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind().double()

    ids, _ = batch()
    target = torch.zeros(*ids.shape, 6, dtype=torch.float64)
    model: Any = make()
    F.mse_loss(model(ids), target).backward()

    def program() -> Tensor | None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make(), mesh, split=["blocks.1"], microbatches=2)
        pipe.step(ids, target, loss_fn=F.mse_loss)
        return dict(pipe.named_parameters())["embedding.weight"].grad

    for grad in sm.simulate(2)(program)():
        if kind is NotUsed:
            assert grad is None
            assert model.embedding.weight.grad is None
        else:
            torch.testing.assert_close(grad, model.embedding.weight.grad, rtol=0, atol=1e-12)


def test_frozen_weights_are_not_communicated():
    def program(frozen: bool) -> tuple[int, Tensor | None]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = make_model()
        model.embedding.weight.requires_grad_(not frozen)
        pipe = pipeline(model, mesh, split=["blocks.1"], microbatches=2)
        pipe.step(*batch(), loss_fn=F.cross_entropy)
        with collectives() as records:
            pipe.step(*batch(), loss_fn=F.cross_entropy)
        sums = [record for record in records if record.op == "all_reduce"]
        return len(sums), dict(pipe.named_parameters())["embedding.weight"].grad

    trained = sm.simulate(2)(program)(False)
    frozen = sm.simulate(2)(program)(True)
    assert [count for count, _ in trained] == [count + 1 for count, _ in frozen]
    assert all(grad is None for _, grad in frozen)


def test_a_failed_step_leaves_gradients_as_they_were():
    def program() -> None:
        pipe = Setup("none", "1f1b", 1, 1).pipe()
        weight = dict(pipe.named_parameters())["embedding.weight"]
        weight.grad = before = torch.ones_like(weight)

        def fail(grad: Tensor) -> None:
            raise RuntimeError("in a hook")

        handle = weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="in a hook"):
            pipe.step(*batch(), loss_fn=F.cross_entropy)
        handle.remove()
        assert weight.grad is before
        assert (weight.grad == 1).all()

    sm.simulate(1)(program)()


def test_names_of_tied_parameters():
    def program() -> list[str]:
        return [name for name, _ in Setup("none", "1f1b", 2, 2).pipe().named_parameters()]

    first, last = sm.simulate(2)(program)()
    assert "embedding.weight" in first
    assert "embedding.weight" in last
    assert "head.weight" not in last


def test_untied_models_have_no_collective_for_it():
    def program(tied: bool) -> int:
        pipe = Setup("none", "1f1b", 2, 2).pipe(tied=tied)
        pipe.step(*batch(), loss_fn=F.cross_entropy)
        with collectives() as records:
            pipe.step(*batch(), loss_fn=F.cross_entropy)
        return len(records)

    tied, untied = (sm.simulate(2)(program)(tied) for tied in (True, False))
    assert [count - 1 for count in tied] == untied


def _gradients(setup: Setup) -> Tensor:
    pipe = setup.pipe()
    pipe.step(*own_rows(pipe.mesh, *batch()), loss_fn=F.cross_entropy)
    return whole(dict(pipe.named_parameters())["embedding.weight"].grad)


def test_on_processes(world4):
    model = make_model()
    ids, targets = batch()
    F.cross_entropy(model(ids), targets).backward()
    for grad in world4(_gradients, Setup("fsdp", "1f1b", 2, 2)):
        torch.testing.assert_close(grad, model.embedding.weight.grad, rtol=0, atol=1e-12)
