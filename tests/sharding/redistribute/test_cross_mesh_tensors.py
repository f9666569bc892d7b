"""`ShardedTensor`s that move between meshes: programs of several meshes, with gradients, on ranks
inside and outside.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, same_error

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
V = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
W = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def mesh_of(ranks):
    return sm.DeviceMesh(DEVICE, ranks, axis_names=("x", "y")[: torch.tensor(ranks).ndim])


def whole_of(x):
    """Return the full tensor on the ranks of its mesh, None on the others."""
    return None if x.mesh.coordinate is None else x.detach().full_tensor()


def close(actual, expected):
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


PAIRS = [
    ([0, 1], [2, 3]),
    ([0, 1, 2], [3, 1]),
    ([0, 1, 2, 3], [2]),
    ([1], [[3, 0], [2, 1]]),
    ([[0, 1], [2, 3]], [3, 1, 2, 0]),
]


def _two_stages(first, second):
    """Run a network with its first layer on one mesh and its second on another, and a skip
    connection.
    """
    one, two = mesh_of(first), mesh_of(second)
    v = nn.Parameter(sm.distribute_tensor(V, one, P(None, "x")))
    w = nn.Parameter(sm.distribute_tensor(W, two, P("x")))
    x = sm.distribute_tensor(X, one)
    h = torch.nn.functional.gelu(x @ v)
    y = torch.softmax(h.redistribute(two, P()) @ w, -1) * h.redistribute(two, P("x")).mean()
    y.square().sum().backward()
    plain_v, plain_w = V.clone().requires_grad_(), W.clone().requires_grad_()
    plain_h = torch.nn.functional.gelu(X @ plain_v)
    (torch.softmax(plain_h @ plain_w, -1) * plain_h.mean()).square().sum().backward()
    for mine, plain in ((v, plain_v), (w, plain_w)):
        assert mine.grad.placements == mine.placements
        close(whole_of(mine.grad), plain.grad)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_network_on_two_meshes(first, second):
    sm.simulate(4)(_two_stages)(first, second)


def test_a_network_on_two_meshes_of_processes(world4):
    for pair in PAIRS:
        world4(_two_stages, *pair)


def test_gradients_of_gradients():
    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x")).requires_grad_()
        y = x.redistribute(mesh_of([1, 2]), P(None, "x"))
        (first,) = torch.autograd.grad((y**3 + 2 * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        close(whole_of(first), 3 * X**2 + 2)
        close(whole_of(second), 2 * (3 * X**2 + 2) * 6 * X)

    sm.simulate(4)(program)()


def test_training_steps():
    """Two layers on two meshes with AdamW have the losses of one rank."""

    def program():
        one, two = mesh_of([0, 1]), mesh_of([2, 0, 3])
        v = nn.Parameter(sm.distribute_tensor(V, one, P("x")))
        w = nn.Parameter(sm.distribute_tensor(W, two, P(None, "x")))
        optimizer = torch.optim.AdamW([v, w], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            hidden = (sm.distribute_tensor(X, one) @ v).relu().redistribute(two, P("x"))
            loss = (hidden @ w).square().mean()
            loss.backward()
            optimizer.step()
        return whole_of(v), whole_of(w), None if two.coordinate is None else loss.item()

    plain_v, plain_w = V.clone().requires_grad_(), W.clone().requires_grad_()
    optimizer = torch.optim.AdamW([plain_v, plain_w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = ((X @ plain_v).relu() @ plain_w).square().mean()
        loss.backward()
        optimizer.step()
    for v, w, value in sm.simulate(4)(program)():
        close(v, plain_v.detach())
        close(w, plain_w.detach())
        assert value is None or value == pytest.approx(loss.item())


@pytest.mark.parametrize("use", [
    lambda x, buffer: torch.zeros_like(x) + x.detach(),
    lambda x, buffer: x.sign() * x,
    lambda x, buffer: buffer.add_(x),
    lambda x, buffer: (buffer.copy_(x), buffer)[1],
    lambda x, buffer: (buffer[:, 1:3].copy_(x[:, 1:3]), buffer)[1],
    lambda x, buffer: torch.cat(x.split(2)[::-1]),
    lambda x, buffer: x.max(0).values + x.double(),
    lambda x, buffer: torch.where(x > 0, x, buffer),
    lambda x, buffer: x[torch.tensor(1)] * x.float().double(),
    lambda x, buffer: torch.nn.functional.layer_norm(x, (4,)),
    lambda x, buffer: torch.cumsum(x, 0),
    lambda x, buffer: x.to("cpu", torch.float64) * buffer.argmax(),
])  # fmt: skip
def test_requires_grad_is_equal_inside_and_outside_the_mesh(use):
    weight = torch.arange(24, dtype=torch.float64).reshape(6, 4)

    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x")).requires_grad_()
        buffer = sm.distribute_tensor(torch.ones_like(X), x.mesh, P("x"))
        y = use(x, buffer).redistribute(mesh_of([2, 1]), P())
        if y.requires_grad:
            (y * sm.distribute_tensor(weight, y.mesh)).sum().backward()
        return y.requires_grad, whole_of(y), None if x.grad is None else whole_of(x.grad)

    plain = X.clone().requires_grad_()
    expected = use(plain, torch.ones_like(X))
    if expected.requires_grad:
        (expected * weight).sum().backward()
    for requires_grad, y, grad in sm.simulate(4)(program)():
        assert requires_grad == expected.requires_grad
        close(y, expected.detach())
        close(grad, plain.grad)


def test_through_plain_local_tensors():
    """The local tensor of a rank outside is in the graph, and so are results computed from it."""

    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x")).requires_grad_()
        local = 2 * x.redistribute(mesh_of([1, 2]), P("x")).to_local()
        y = sm.from_local(local, mesh_of([2, 1]), P("x"), shape=(6, 4))
        y.redistribute(mesh_of([3]), P()).square().sum().backward()
        close(whole_of(x.grad), 8 * X)

    sm.simulate(4)(program)()


def test_seed_on_the_other_mesh():
    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x")).requires_grad_()
        y = x.redistribute(mesh_of([2]), P())
        y.backward(3 * X)
        close(whole_of(x.grad), 3 * X)

    sm.simulate(3)(program)()


def test_accumulated_gradients():
    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1])).requires_grad_()
        with sm.accumulate_grads():
            for scale in (1, 2):
                (x.redistribute(mesh_of([1, 2]), P("x")) * scale).sum().backward()
        close(whole_of(x.grad), torch.full_like(X, 3))

    sm.simulate(3)(program)()


def test_moves_across_meshes_are_one_all_to_all():
    def program():
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x"))
        with collectives() as records:
            y = x.redistribute(mesh_of([2, 1]), [Shard(1)])
            z = sm.device_put(x, mesh_of([1, 0]), P("x"))
            same = x.redistribute(mesh_of([[0, 1]]), [Replicate(), Shard(0)])
        close(whole_of(y), X)
        close(whole_of(z), X)
        close(whole_of(same), X)
        assert y.placements == (Shard(1),)
        if same.mesh.coordinate is not None:
            assert same._local.data_ptr() != x._local.data_ptr()
        return launched(records)

    assert sm.simulate(3)(program)() == [["all_to_all"] * 2, ["all_to_all"] * 2, ["all_to_all"]]


def test_communication_dtypes():
    def program():
        x = sm.distribute_tensor(X, mesh_of([0]), P()).requires_grad_()
        with collectives() as records:
            y = x.redistribute(
                mesh_of([1]), P(), forward_dtype=torch.float32, backward_dtype=torch.bfloat16
            )
            y.double().sum().backward()
        assert y.dtype == torch.float32
        assert x.grad.dtype == torch.float64
        assert [record.dtype for record in records] == [torch.float32, torch.bfloat16]

    sm.simulate(2)(program)()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"async_op": True}, "async_op="),
        ({"donate": True}, "donate="),
        ({"max_bytes": 1}, "max_bytes="),
        (None, "placements"),
    ],
)
def test_options_unsupported_across_meshes_raise(options, word):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh_of([0, 1]), P("x"), src_data_rank=None)
        x.redistribute(mesh) if options is None else x.redistribute(mesh, P("a"), **options)

    text = same_error((3,), program, ValueError)
    assert word in text
    assert "DeviceMesh(cpu, x=2)" in text
