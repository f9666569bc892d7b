"""Plain tensors created in prepared modules are treated as replicated, and compared between ranks
the first time.
"""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import (
    colwise,
    data_parallel,
    distribute_module,
    fully_shard,
    parallelize,
    rowwise,
)
from shardmesh.sharding.ops import plain_operands
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, same_error

X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)


class _Masked(nn.Module):
    """Makes positions and a mask, as language models do."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        positions = torch.arange(4, device=x.device)
        x = x * positions.to(x.dtype)
        return self.down(self.up(x).tanh()).masked_fill(positions[None] % 2 == 0, 0.0)


def _model(kind=_Masked):
    torch.manual_seed(0)
    return kind().double().to(DEVICE)


def _expected(kind=_Masked):
    made, x = _model(kind), X.to(DEVICE).clone().requires_grad_()
    made(x).square().sum().backward()
    return [x.grad, *[p.grad for p in made.parameters()]]


PREPARED = {
    "parallelize": lambda m, mesh: parallelize(m, mesh, {"up": colwise(), "down": rowwise()}),
    "parallelize_module": lambda m, mesh: sm.compat.parallelize_module(
        m, mesh, {"up": colwise(), "down": rowwise()}
    ),
    "fully_shard": lambda m, mesh: fully_shard(m, mesh, units=nn.Linear),
    "data_parallel": lambda m, mesh: data_parallel(m, mesh),
    "distribute_module": lambda m, mesh: distribute_module(m, mesh),
}


def _whole_gradients(x, made):
    return [t.grad.full_tensor() for t in (x, *made.parameters())]


@pytest.mark.parametrize("how", PREPARED)
def test_masks_and_positions(how):
    def program(mesh):
        made = PREPARED[how](_model(), mesh)
        for _ in range(2):
            made.zero_grad()
            x = place(mesh, X.to(DEVICE), sm.Shard(0), grad=True)
            made(x).square().sum().backward()
            torch.testing.assert_close(_whole_gradients(x, made), expected, rtol=1e-12, atol=1e-12)

    expected = _expected()
    on_mesh((3,), program)


@every_rank(2)
def test_only_the_first_call_of_a_line_compares_ranks(mesh):
    made, x = PREPARED["distribute_module"](_model(), mesh), place(mesh, X.to(DEVICE), sm.Shard(0))
    with collectives() as first:
        made(x)
    with collectives() as again:
        made(x)
    with collectives() as other_shape:
        made(place(mesh, X[:2].to(DEVICE), sm.Shard(0)))
    assert again == []
    assert len(first) == len(other_shape) > 0


@every_rank(2)
def test_under_a_policy_that_forbids_implicit_communication(mesh):
    made = PREPARED["distribute_module"](_model(), mesh)
    with sm.ops.implicit_comm("forbid"):
        made(place(mesh, X.to(DEVICE), sm.Shard(0)))


@every_rank(2)
def test_outside_of_prepared_modules_it_raises(mesh):
    made, x = PREPARED["distribute_module"](_model(), mesh), place(mesh, X.to(DEVICE), sm.Shard(0))
    y = made(x)
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        y + torch.ones(6, 4, dtype=X.dtype, device=DEVICE)
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        _model()(x)


class _Random(nn.Module):
    def forward(self, x):
        seed = x.mesh.get_rank() if self.differs else 0
        noise = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=X.dtype).to(
            x.device
        )
        return x + noise

    differs = True


def test_difference_between_ranks_raises_and_names_the_line():
    def program(mesh):
        PREPARED["distribute_module"](_Random(), mesh)(place(mesh, X.to(DEVICE), sm.Shard(0)))

    text = same_error((2,), program, sm.errors.ReplicaError, silent=False)
    line = 1 + Path(__file__).read_text().splitlines().index("        return x + noise")
    assert f"test_plain_operands.py:{line}: add" in text
    assert "rank 0 against rank 1" in text
    assert "ShardedTensor.from_local(t, mesh, placements)" in text


@every_rank(2)
def test_comparison_is_repeated_after_a_difference(mesh):
    made, x = PREPARED["distribute_module"](_Random(), mesh), place(mesh, X.to(DEVICE), sm.Shard(0))
    for _ in range(2):
        with pytest.raises(sm.errors.ReplicaError):
            made(x)
    made.differs = False
    made(x)


class _Recomputed(nn.Module):
    """Recomputes a function that is no method, so that in backward no module is on the stack."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        linear = self.linear

        def masked(y):
            return linear(y).tanh() * torch.arange(4, dtype=X.dtype, device=y.device)

        return checkpoint(masked, x, use_reentrant=False)


@pytest.mark.parametrize("how", ["distribute_module", "fully_shard"])
def test_recomputation(how):
    prepared = PREPARED[how]

    def program(mesh):
        made = prepared(_model(_Recomputed), mesh)
        x = place(mesh, X.to(DEVICE), sm.Shard(0), grad=True)
        made(x).square().sum().backward()
        torch.testing.assert_close(_whole_gradients(x, made), expected, rtol=1e-12, atol=1e-12)

    expected = _expected(_Recomputed)
    on_mesh((2,), program)


@every_rank(2)
def test_new_line_in_backward_raises(mesh):
    x = place(mesh, X.to(DEVICE), sm.Shard(0), grad=True)
    x.register_hook(lambda grad: grad + torch.ones(6, 4, dtype=X.dtype, device=DEVICE))
    with pytest.raises(RuntimeError, match="mixes a plain tensor"):
        x.square().sum().backward()


class _PlainWeight(nn.Module):
    def forward(self, x):
        return x @ self.weight * self.factor


@every_rank(3)
def test_the_gradient_of_a_plain_operand_is_reduced(mesh):
    made = PREPARED["distribute_module"](_PlainWeight(), mesh)
    # After it was prepared, so they are plain.
    made.weight = nn.Parameter(torch.ones(4, 2, dtype=X.dtype, device=DEVICE))
    made.factor = nn.Parameter(torch.tensor(2.0, dtype=X.dtype, device=DEVICE))
    made(place(mesh, X.to(DEVICE), sm.Shard(0))).sum().backward()
    torch.testing.assert_close(
        made.weight.grad, 2 * X.to(DEVICE).sum(0)[:, None].expand(4, 2), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(made.factor.grad, 2 * X.to(DEVICE).sum(), rtol=1e-12, atol=1e-12)


class _Frees(nn.Module):
    def forward(self, x):
        y = x * 2
        z = y + torch.arange(4, dtype=X.dtype, device=x.device)
        kept, y = weakref.ref(y._local), None
        assert kept() is None
        return z


@every_rank(2)
def test_stack_inspection_keeps_no_tensor_alive(mesh):
    PREPARED["distribute_module"](_Frees(), mesh)(place(mesh, X.to(DEVICE), sm.Shard(0)))


@every_rank(2)
def test_sharded_operands_do_not_inspect_the_stack(mesh):
    made, x = PREPARED["distribute_module"](_model(), mesh), place(mesh, X.to(DEVICE), sm.Shard(0))
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_operands, "may_replicate", lambda: calls.append(1))
        made.down(made.up(x).tanh() * 2.0 + 1)
    assert calls == []


@every_rank(2)
def test_in_a_method_and_in_another_thread(mesh):
    class Encoder(_Masked):
        def encode(self, x):
            return x + torch.ones(4, dtype=X.dtype, device=x.device)

    made = PREPARED["distribute_module"](_model(Encoder), mesh)
    x = place(mesh, X.to(DEVICE), sm.Shard(0))
    torch.testing.assert_close(made.encode(x).full_tensor(), X.to(DEVICE) + 1)
    made(x)
    found = []
    worker = threading.Thread(target=lambda: found.append(made(x)))
    worker.start()
    worker.join()
    torch.testing.assert_close(found[0].full_tensor(), made(x).full_tensor())


class _Forms(nn.Module):
    """Operands in lists, as keywords, as indices, written in place, with a chosen layout."""

    def forward(self, x):
        ones = torch.ones(6, 4, dtype=X.dtype, device=x.device)
        return [
            torch.cat([x, ones]),
            torch.where(ones > 0, x, 0.0),
            nn.functional.linear(x, weight=ones),
            x[torch.tensor([0, 2], device=x.device)],
            ones.clone().add_(x),
            sm.ops.apply(torch.add, x, ones, out_sharding=P()),
        ]


@every_rank(2)
def test_forms_of_operands(mesh):
    x, plain = place(mesh, X.to(DEVICE), sm.Shard(0)), X.to(DEVICE)
    ones = torch.ones_like(plain)
    expected = [
        torch.cat([plain, ones]),
        plain,
        plain @ ones.T,
        plain[[0, 2]],
        plain + 1,
        plain + 1,
    ]
    for found, wanted in zip(
        PREPARED["distribute_module"](_Forms(), mesh)(x), expected, strict=True
    ):
        # What was written in place is plain.
        whole = found.full_tensor() if isinstance(found, sm.ShardedTensor) else found
        torch.testing.assert_close(whole, wanted, rtol=1e-12, atol=1e-12)


class _OnMeta(nn.Module):
    def forward(self, x):
        return x + torch.ones(4, device="meta")


@every_rank(2)
def test_plain_operand_on_meta_raises(mesh):
    with pytest.raises(RuntimeError, match="a plain tensor on 'meta'"):
        PREPARED["distribute_module"](_OnMeta(), mesh)(place(mesh, X.to(DEVICE), sm.Shard(0)))


@every_rank(4)
def test_ranks_outside_the_mesh_do_not_compare(mesh):
    part = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
    made = distribute_module(_model(), part, src_data_rank=None)
    out = made(place(part, X.to(DEVICE), sm.Shard(0)))
    assert out.shape == X.shape


def _program():
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("a",))
    made = PREPARED["distribute_module"](_model(), mesh)
    made(place(mesh, X, sm.Shard(0))).square().sum().backward()
    gradients = [p.grad.full_tensor() for p in made.parameters()]
    with pytest.raises(sm.errors.ReplicaError):
        PREPARED["distribute_module"](_Random(), mesh)(place(mesh, X, sm.Shard(0)))
    return gradients


def test_on_processes(world4):
    expected = _expected()[1:]
    for found in world4(_program):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
