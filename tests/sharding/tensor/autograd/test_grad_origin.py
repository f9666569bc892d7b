"""Gradients tagged as one value are not summed again, and others stay sums: programs that cross
between plain and sharded tensors, against one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P, Shard
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, same_error

SHAPE = (5, 6)
SPECS = [P(), P("a"), P(None, "a"), P(unreduced={"a"})]
KEPT = SPECS[:3]
STEPS = ["move", "move", "tanh", "mix", "row", "linear", "out and in", "part"]


def tensor(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class LeafProgram:
    """Some steps on three leaves, drawn at random; the same on sharded and on plain tensors.

    Attributes:
        steps: name, index of another value, and a spec of each.
        end: "plain": a loss on the plain whole tensor; "seed": a gradient for the last value;
            "sum": a sharded loss.
    """

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.leaves = [
            tensor(seed + 1, *SHAPE),
            tensor(seed + 2, SHAPE[1], SHAPE[1]),
            tensor(seed + 3, SHAPE[1]),
        ]
        self.specs = [draw.choice(KEPT), draw.choice(KEPT), draw.choice(KEPT[:2])]
        self.steps = [
            (draw.choice(STEPS), draw.random(), draw.choice(SPECS))
            for _ in range(draw.randint(2, 7))
        ]
        self.end, self.end_spec = draw.choice(["plain", "seed", "sum"]), draw.choice(KEPT)
        self.weight = tensor(seed + 4, *SHAPE)

    def placed(self, mesh: Any) -> list[Any]:
        return [
            sm.distribute_tensor(x, mesh, s, src_data_rank=None).requires_grad_()
            for x, s in zip(self.leaves, self.specs, strict=True)
        ]

    def last(self, x: Any, w: Any, b: Any) -> Any:
        """Return the value of the last step."""
        values = [x]
        for name, which, spec in self.steps:
            values.append(self.step(name, values[-1], values[int(which * len(values))], w, b, spec))
        return values[-1]

    def step(self, name: str, x: Any, other: Any, w: Any, b: Any, spec: P) -> Any:
        sharded = isinstance(x, sm.ShardedTensor)
        if name == "move":
            return x.redistribute(spec) if sharded else x
        if name == "linear":
            return F.linear(x, w, b)
        if name == "mix":
            return x * 0.7 + other
        if name == "row":
            return x + other.mean(0, keepdim=True)
        if name == "tanh" or not sharded:
            return self.alone(x)
        if name == "out and in":
            return sm.from_local(self.alone(x.full_tensor()), x.mesh, P())
        x = x.redistribute(P(*x.spec.dims))
        return sm.from_local(self.alone(x.to_local()), x.mesh, x.spec, shape=x.shape)

    def alone(self, x: Any) -> Any:
        return x.tanh()

    def gradients(self, leaves: list[Any], factor: float = 1.0) -> list[Any]:
        """Return the gradients of the leaves, and of the square of these gradients."""
        y = self.last(*leaves)
        sharded = isinstance(y, sm.ShardedTensor)
        weight: Any = self.weight
        if self.end == "plain":
            y, seed = ((y.full_tensor() if sharded else y) * weight * factor).sum(), None
        else:
            seed = (
                sm.distribute_tensor(weight, y.mesh, self.end_spec, src_data_rank=None)
                if sharded
                else weight
            )
            y, seed = (y, seed) if self.end == "seed" else ((y * seed).sum(), None)
        first = torch.autograd.grad(y, leaves, seed, create_graph=True, allow_unused=True)
        squares = sum((g.square() * 0.5).sum() for g in first if g is not None and g.requires_grad)
        second = (
            torch.autograd.grad(squares, leaves, allow_unused=True)
            if isinstance(squares, torch.Tensor)
            else ()
        )
        return [
            None if g is None else g.full_tensor() if isinstance(g, sm.ShardedTensor) else g
            for g in (*first, *second)
        ]


def plain_gradients(program: LeafProgram) -> list[Any]:
    return program.gradients([x.clone().requires_grad_() for x in program.leaves])


@pytest.mark.one_in(7)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(0, 3000, 100))
def test_programs_across_the_boundary(seed, ranks):
    program = LeafProgram(seed)
    expected = plain_gradients(program)

    def run(mesh):
        for found, wanted in zip(program.gradients(program.placed(mesh)), expected, strict=True):
            assert (found is None) == (wanted is None) or not (
                found if wanted is None else wanted
            ).any()
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    on_mesh((ranks,), run)


@pytest.mark.parametrize("seed", range(0, 3000, 100))
def test_ranks_that_use_a_value_differently_raise(seed):
    """An error on every rank, never a gradient."""
    program = LeafProgram(seed)
    program.end = "plain"

    def run(mesh):
        program.gradients(program.placed(mesh), 1.0 + mesh.world.rank)

    assert "differ between the replicas" in same_error((2,), run, RuntimeError, silent=False)


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_programs_on_two_axes(seed):
    program = LeafProgram(seed)
    program.specs = [P("a", "b"), P(None, "b"), P("a")]
    wider = {
        P("a"): P(("a", "b")),
        P(None, "a"): P("b", "a"),
        P(unreduced={"a"}): P("b", unreduced={"a"}),
    }
    program.steps = [(name, which, wider.get(spec, spec)) for name, which, spec in program.steps]
    expected = plain_gradients(program)

    def run(mesh):
        for found, wanted in zip(program.gradients(program.placed(mesh)), expected, strict=True):
            if found is not None and wanted is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)

    on_mesh((2, 2), run)


# -- what is not moved -----------------------------------------------------------------------------

X, WEIGHT = tensor(1, *SHAPE), tensor(2, *SHAPE)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P(unreduced={"a"})])
@pytest.mark.parametrize("seeded", ["seed", "full_tensor"])
def test_replicated_gradient_is_sliced_not_summed(spec, seeded):
    """S -> R keeps this rank's part, U -> R the full tensor, in separate memory."""

    def program(mesh):
        whole, weight = place(mesh, X, grad=True), place(mesh, WEIGHT)
        x = whole.detach().redistribute(spec).requires_grad_()
        for counted in (False, True):
            x.grad = None
            y = x.redistribute(P())
            loss = y if seeded == "seed" else (y.to_local() * WEIGHT).sum()
            with collectives() as records:
                loss.backward(weight if seeded == "seed" else None)
            assert not (counted and records)
            torch.testing.assert_close(x.grad.full_tensor(), WEIGHT)
        x.grad.zero_()
        assert torch.equal(weight.to_local(), WEIGHT)

    on_mesh((3,), program)


@every_rank(2)
def test_gradient_of_a_replicated_loss_is_tagged(mesh):
    """The sum of all parts is replicated, so that 1 needs no reduction on its way to them."""
    x = place(mesh, X, Shard(0), grad=True)
    loss = x.square().sum().redistribute(P())
    with collectives() as records:
        loss.backward()
    assert records == []
    torch.testing.assert_close(x.grad.full_tensor(), 2 * X)


@every_rank(3)
def test_sum_of_tagged_gradients_is_not_tagged(mesh):
    """Two uses of a replicated value: autograd adds them up, on some ranks in the memory of the
    first.
    """
    x = place(mesh, X, Shard(0), grad=True)
    y = x.redistribute(P())
    loss = (y.to_local() * WEIGHT).sum() + y.to_local().square().sum() + (y.to_local() * 3).sum()
    loss.backward()
    torch.testing.assert_close(x.grad.full_tensor(), WEIGHT + 2 * X + 3)


def _doubled_in_place(grad):
    grad._local.mul_(2)


@pytest.mark.parametrize("hook", [lambda grad: grad * 2, _doubled_in_place])
def test_hook_that_changes_a_tagged_gradient(hook):
    def program(mesh):
        x = place(mesh, X, Shard(0), grad=True)
        y = x.redistribute(P())
        y.register_hook(hook)
        (y.to_local() * WEIGHT.clone()).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * WEIGHT)

    on_mesh((2,), program)


@every_rank(2)
def test_a_bias_added_to_a_pending_sum_has_a_whole_gradient(mesh):
    """Also over several backward passes, where it is in memory of its own, and beside uses whose
    shares are summed.
    """
    w, b = tensor(3, 4, SHAPE[1]), tensor(4, 4)
    x = place(mesh, X, Shard(1))
    weight = place(mesh, w, Shard(1), grad=True)
    bias = place(mesh, b, grad=True)
    seed = tensor(5, SHAPE[0], 4)

    def loss():
        return (F.linear(x, weight, bias).redistribute(P()).to_local(check=False) * seed).sum()

    first = loss()
    with collectives() as records:
        first.backward()
    assert records == []
    bias.grad._local += 0  # what belongs to the leaf may be written to
    loss().backward()
    torch.testing.assert_close(bias.grad.to_local(), 2 * seed.sum(0))
    bias.grad = None
    with sm.accumulate_grads():
        loss().backward()
        (bias * place(mesh, b)).sum().backward()
        loss().backward()
    torch.testing.assert_close(bias.grad.to_local(), 2 * seed.sum(0) + b)
    torch.testing.assert_close(weight.grad.full_tensor(), 4 * (seed.T @ X))


@every_rank(2)
def test_gradient_of_a_leaf_is_not_the_seed(mesh):
    """A replicated leaf that is seeded itself takes a copy."""
    x, seed = place(mesh, X, grad=True), place(mesh, WEIGHT)
    x.backward(seed)
    x.grad.mul_(2)
    assert torch.equal(seed.to_local(), WEIGHT)
    (first,) = torch.autograd.grad(x * 1, x, seed)
    torch.testing.assert_close(first.to_local(), WEIGHT)


@every_rank(2)
def test_tagged_gradients_in_another_dtype(mesh):
    x = place(mesh, X.float(), Shard(0), grad=True)
    y = x.redistribute(P(), backward_dtype=torch.bfloat16)
    y.backward(place(mesh, WEIGHT.float()))
    torch.testing.assert_close(x.grad.full_tensor(), WEIGHT.bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [3, 2])
def test_gradient_shared_with_a_tensor_of_another_layout(rows):
    """Where this rank has one row, autograd hands the gradient of the sum on to the row that is
    added, as the same object.
    """
    x, row, weight = tensor(1, rows, 4), tensor(2, 1, 4), tensor(3, rows, 4)

    def program(mesh):
        w = place(mesh, row, sm.Replicate(), Shard(1), grad=True)
        total = place(mesh, x, Shard(0), sm.Replicate()) + w.redistribute(P())
        start = [0, (rows + 1) // 2][mesh.coordinate[0]]
        part = total.to_local()
        (part * weight[start : start + len(part)]).sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), weight.sum(0, keepdim=True))

    on_mesh((2, 2), program)


@every_rank(2, 2)
def test_gradient_with_an_empty_part(mesh):
    """On an empty part some backward functions return what they are given, and others' do not."""
    x, weight = tensor(1, 1, 4), tensor(2, 1, 4)
    w = place(mesh, x, Shard(1), sm.Replicate(), grad=True)
    part = w.redistribute(P("a")).cumsum(1).to_local()
    (part * weight[: len(part)]).sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), weight.flip(1).cumsum(1).flip(1))
