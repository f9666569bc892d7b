"""torch.optim, clipping and gradient scaling on sharded parameters, against one process."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Shard, ShardedTensor
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place

PLACES = {
    "sharded": [P("a"), P(None, "a")],
    "replicated": [P(), P()],
    "mixed axes": [P("a", "b"), P(("b", "a"))],
}


def parameters():
    torch.manual_seed(3)
    return [torch.randn(3, 4), torch.randn(5, 2)]


def losses_and_result(params, optimizer, steps=4):
    losses = []
    for step in range(steps):
        loss = sum(((p - step) ** 2).mean() * (i + 1) for i, p in enumerate(params))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        losses.append(loss.item())
    return losses


OPTIMIZERS = [
    one
    for one in vars(torch.optim).values()
    if isinstance(one, type) and "foreach" in inspect.signature(one).parameters
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_every_optimizer_of_torch_with_and_without_foreach(make, foreach):
    plain = [p.requires_grad_() for p in parameters()]
    expected = losses_and_result(plain, make(plain, foreach=foreach))

    def program(mesh):
        params = [
            nn.Parameter(sm.device_put(p, mesh, spec))
            for p, spec in zip(parameters(), next(iter(PLACES.values())), strict=True)
        ]
        losses = losses_and_result(params, make(params, foreach=foreach))
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        for p, q in zip(params, plain, strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-6, atol=1e-6)

    on_mesh((2, 2), program)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "maximize": True}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ],
    ids=["AdamW", "AdamW-amsgrad", "SGD"],
)
def test_optimizers_equal_one_process(make, options, how, where):
    plain = [p.requires_grad_() for p in parameters()]
    expected = losses_and_result(plain, make(plain, **options, **how))

    def program(mesh):
        params = [
            nn.Parameter(sm.device_put(p, mesh, spec))
            for p, spec in zip(parameters(), PLACES[where], strict=True)
        ]
        losses = losses_and_result(params, make(params, **options, **how))
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
        for p, q in zip(params, plain, strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-6, atol=1e-6)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_step_communicates_nothing(how):
    def program(mesh):
        params = [
            nn.Parameter(sm.device_put(p, mesh, spec))
            for p, spec in zip(parameters(), [P("a"), P()], strict=True)
        ]
        optimizer = torch.optim.AdamW(params, **how)
        for _ in range(2):
            sum((p * p).sum() for p in params).backward()
            with collectives() as records:
                optimizer.step()
                optimizer.zero_grad()
            assert launched(records) == []

    on_mesh((2, 2), program)


@every_rank(2, 2)
def test_clip_grad_norm(mesh):
    """The norm is that of the whole gradients."""
    plain = [p.requires_grad_() for p in parameters()]
    params = [
        nn.Parameter(sm.device_put(p.detach(), mesh, spec))
        for p, spec in zip(plain, PLACES["mixed axes"], strict=True)
    ]
    for group in (plain, params):
        sum((p**2).sum() for p in group).backward()
    expected = nn.utils.clip_grad_norm_(plain, 1.0)
    assert nn.utils.clip_grad_norm_(params, 1.0).item() == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_parameters_that_are_not_contiguous(how):
    """Gradients and states keep the strides of the parameter: fused kernels go through them in
    memory order.
    """
    whole, factor = torch.arange(12.0).view(3, 4) - 5, torch.arange(12.0).view(3, 4) - 3

    def trained(p, factor):
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, **how)
        for _ in range(3):
            (p * factor).sum().backward()
            assert p.grad.to_local().stride() == (1, 3) if isinstance(p, ShardedTensor) else True
            optimizer.step()
            optimizer.zero_grad()
        return p

    def program(mesh):
        p = nn.Parameter(sm.from_local(whole.T.contiguous().T, mesh))
        assert torch.zeros_like(p).to_local().stride() == (1, 3)
        trained(p, place(mesh, factor))
        torch.testing.assert_close(p.detach().full_tensor(), expected)

    expected = trained(whole.clone().requires_grad_(), factor).detach()
    on_mesh((2,), program)


def test_grad_scaler_skips_the_step_on_every_rank():
    """An infinity in one rank's part of one gradient is detected on all."""

    def program(mesh):
        w = nn.Parameter(place(mesh, torch.ones(4), Shard(0)))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD([w], lr=1.0)
        for factor in (
            torch.tensor([1.0, 2.0, 3.0, float("inf")]),
            torch.tensor([1.0, 2.0, 3.0, 4.0]),
        ):
            scaler.scale((w * place(mesh, factor, Shard(0))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), w.detach().full_tensor().tolist()

    assert on_mesh((2,), program) == [(2.0, [0.0, -1.0, -2.0, -3.0])] * 2


@every_rank(2)
def test_pending_scalar_with_lists_is_reduced_first(mesh):
    """For example a clipping factor that is still pending."""
    pending = sm.from_local(torch.tensor(1.5), mesh, [Partial()])
    x = place(mesh, torch.ones(4), Shard(0))
    (y,) = torch._foreach_mul([x], pending)
    torch._foreach_mul_([x], pending)
    assert x.full_tensor().tolist() == y.full_tensor().tolist() == [3.0] * 4


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_on_fully_sharded_parameters(line_search_fn):
    """Steps by step sizes computed from gradients, over the flat gradient of uneven parameters, one
    of them without a gradient.
    """
    inputs, targets = torch.randn(2, 9, 5, dtype=torch.float64).unbind()

    def trained(wrap):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
        wrap(model)
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=6, history_size=3, line_search_fn=line_search_fn
        )

        def closure():
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return losses, [p.detach() for p in model.parameters()]

    expected, wanted = trained(lambda model: model)
    assert expected[-1] < expected[0] / 2

    def program(mesh):
        losses, params = trained(lambda model: sm.parallel.fully_shard(model, mesh))
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
        for p, q in zip(params, wanted, strict=True):
            torch.testing.assert_close(p.full_tensor(), q, rtol=1e-8, atol=1e-10)

    on_mesh((3,), program)
