"""Backward through pending values, uneven parts, plain losses, errors and recomputation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P, Partial, Shard, ShardedTensor
from shardmesh.parallel import distribute_module, shard_parameter
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error
from tests.sharding.reference import equal, plain_grad

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
W = torch.arange(12.0, dtype=torch.float64).view(3, 4) / 5 - 1

# -- pending values of other kinds -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["max", "min", "avg", "product", "sum"])
def test_gradients_through_pending_values(kind):
    """Each rank's contribution gets the gradient that autograd gives it in the combination of all
    contributions.
    """
    combine = {
        "max": torch.amax,
        "min": torch.amin,
        "avg": torch.mean,
        "product": torch.prod,
        "sum": torch.sum,
    }[kind]
    parts = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (expected,) = plain_grad(lambda parts: (combine(parts, 0) ** 2).sum(), parts)

    def program(mesh):
        x = sm.from_local(parts[mesh.world.rank].clone(), mesh, [Partial(kind)]).requires_grad_()
        (x**2).sum().backward()
        equal(x.grad.to_local(), expected[mesh.world.rank] if kind != "sum" else expected[0])

    on_mesh((3,), program)


def test_gradients_of_contributions_to_an_extreme_cannot_be_combined():
    """They can be read on each rank; combining them raises an error."""

    def program(mesh):
        x = sm.from_local(X * (mesh.world.rank + 1), mesh, [Partial("max")]).requires_grad_()
        x.redistribute(P()).sum().backward()
        assert x.grad.to_local().shape == X.shape
        return x.grad

    for use in (
        lambda grad: grad.full_tensor(),
        lambda grad: grad + 1,
        lambda grad: grad.sum().item(),
    ):

        def asked(mesh, use=use):
            use(program(mesh))

        assert "read them one by one with x.to_local()" in same_error(
            (2,), asked, ValueError, silent=False
        )


@every_rank(3)
def test_ties_share_the_gradient_of_an_extreme(mesh):
    x = sm.from_local(
        torch.tensor([1.0, float(mesh.world.rank % 2)]), mesh, [Partial("max")]
    ).requires_grad_()
    (x.redistribute(P()) * torch.tensor(2.0)).sum().backward()
    expected = [2 / 3, 2.0 if mesh.world.rank == 1 else 0.0]
    assert x.grad.to_local().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_reductions_over_uneven_and_empty_shards(n):
    """With five rows, on up to eight ranks."""
    functions = [
        lambda x: x.mean(),
        lambda x: x.amax(),
        lambda x: x.amin(0).sum(),
        lambda x: x.max() * x.min(),
        lambda x: x.prod(),
        lambda x: x.var(),
        lambda x: x.norm(),
        lambda x: x.softmax(0).amax(1).sum(),
        lambda x: x.logsumexp(0).sum(),
        lambda x: nn.functional.mse_loss(x, x.detach() * 0.5),
        lambda x: nn.functional.cross_entropy(x, x.detach().argmax(1)),
    ]
    expected = [(f(X).item(), plain_grad(f, X)[0]) for f in functions]

    def program(mesh):
        for f, (value, grad) in zip(functions, expected, strict=True):
            x = place(mesh, X, Shard(0), grad=True)
            loss = f(x)
            assert loss.item() == pytest.approx(value, rel=1e-12)
            loss.redistribute(P()).backward()
            torch.testing.assert_close(x.grad.full_tensor(), grad, rtol=1e-10, atol=1e-12)

    on_mesh((n,), program)


# -- plain losses of local parts -------------------------------------------------------------------


@every_rank(2)
def test_plain_loss_of_full_tensor(mesh):
    """Every rank computes the same plain loss: the gradient is that of one of them."""
    w, x = place(mesh, W, grad=True), place(mesh, X, Shard(0), grad=True)
    loss = ((x @ w).full_tensor() ** 2).sum()
    assert type(loss) is torch.Tensor
    loss.backward()
    expected_w, expected_x = plain_grad(lambda w, x: ((x @ w) ** 2).sum(), W, X)
    equal(w.grad.full_tensor(), expected_w)
    equal(x.grad.full_tensor(), expected_x)


@every_rank(2)
def test_a_plain_loss_of_the_local_parts(mesh):
    """Each rank's own loss of its own part: together, the gradient of their sum."""
    w, x = place(mesh, W, grad=True), place(mesh, X, Shard(0), grad=True)
    ((x @ w).to_local() ** 2).sum().backward()
    expected_w, expected_x = plain_grad(lambda w, x: ((x @ w) ** 2).sum(), W, X)
    equal(w.grad.full_tensor(), expected_w)
    equal(x.grad.full_tensor(), expected_x)


@every_rank(2)
def test_a_plain_loss_of_a_replicated_part(mesh):
    """The replicas' gradients are checked to agree; where they are shares of a sum, the caller says
    so.
    """
    w = place(mesh, W, grad=True)
    (w.to_local() ** 2).sum().backward()
    equal(w.grad.full_tensor(), 2 * W)
    w.grad = None
    (w.to_local(grad_placements=[Partial()]) * (mesh.world.rank + 1)).sum().backward()
    equal(w.grad.full_tensor(), torch.full_like(W, 3))
    w.grad = None
    local = w.to_local()
    with pytest.raises(
        RuntimeError,
        match=r"differ between the replicas on axes \('a',\).*grad_placements=\[Partial\(\)",
    ):
        (local * (mesh.world.rank + 1)).sum().backward()


# -- when something goes wrong ---------------------------------------------------------------------


@every_rank(2)
def test_exception_during_backward(mesh):
    """The next backward after zero_grad is correct: nothing of the failed one remains."""

    def refuse(grad):
        raise KeyError("mine")

    v, w = place(mesh, W, grad=True), place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    y = x @ w
    handle = y.register_hook(refuse)
    with pytest.raises(KeyError, match="mine"):
        ((y @ v.T) ** 2).sum().backward()
    handle.remove()
    v.grad = w.grad = None
    with collectives() as records:
        ((x @ w @ v.T) ** 2).sum().backward()
    assert launched(records) == ["all_reduce"]
    expected_w, expected_v = plain_grad(lambda w, v: ((X @ w @ v.T) ** 2).sum(), W, W)
    equal(w.grad.full_tensor(), expected_w)
    equal(v.grad.full_tensor(), expected_v)


@every_rank(2)
def test_failed_reduction_loses_no_gradient(mesh):
    """It fails because of a budget; the gradient stays pending, and the next backward
    reduces both.
    """
    w = place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    with pytest.raises(sm.errors.CommBudgetError), sm.debug.comm_budget(bytes=0):
        (x @ w).tanh().sum().backward()
    (once,) = plain_grad(lambda w: (X @ w).tanh().sum(), W)
    assert sm.typeof(w.grad).pending == {"a": "sum"}
    equal(w.grad.full_tensor(), once)
    (x @ w).tanh().sum().backward()
    assert sm.typeof(w.grad) is sm.typeof(w)
    equal(w.grad.full_tensor(), 2 * once)


@every_rank(2)
def test_without_grad(mesh):
    w = place(mesh, W, grad=True)
    x = place(mesh, X, Shard(0))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = x @ w
            assert not y.requires_grad
            assert y.grad_fn is None
            assert not (y + 1).redistribute(P()).requires_grad
            equal(y.full_tensor(), X @ W)
    with torch.no_grad():
        loss = (x @ w).sum()
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


@every_rank(2)
def test_in_place_on_a_leaf_raises_as_in_torch(mesh):
    w = place(mesh, W, grad=True)
    with pytest.raises(
        RuntimeError, match="leaf Variable that requires grad is being used in an in-place"
    ):
        w.mul_(2)
    with torch.no_grad():
        w.mul_(2)
    equal(w.detach().full_tensor(), 2 * W)


@every_rank(2)
def test_modified_saved_tensor_raises_as_in_torch(mesh):
    w = place(mesh, W, grad=True)
    y = (w * 1).exp()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@every_rank(2)
def test_in_place_accumulation_is_differentiable(mesh):
    """`total += loss`, in place on a tensor that did not require grad."""
    w = place(mesh, W, grad=True)
    total = place(mesh, torch.zeros((), dtype=torch.float64))
    for i in range(3):
        total += ((w * i) ** 2).sum()
    assert total.requires_grad
    total.backward()
    equal(w.grad.full_tensor(), 2 * W * 5)


# -- recomputation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
def test_checkpoint(spec):
    """torch.utils.checkpoint recomputes sharded operators; values, gradients and random numbers are
    the same.
    """

    def block(x, w):
        return torch.tanh(x @ w) @ w.T

    expected_x, expected_w = plain_grad(lambda x, w: (block(block(x, w), w) ** 2).sum(), X, W)

    def program(mesh):
        x, w = place(mesh, X, Shard(0), grad=True), sm.device_put(W, mesh, spec).requires_grad_()
        y = checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False)
        (y**2).sum().backward()
        equal(x.grad.full_tensor(), expected_x)
        equal(w.grad.full_tensor(), expected_w)

    on_mesh((2,), program)


@every_rank(2)
def test_reentrant_checkpoint_raises(mesh):
    """It is an autograd.Function of torch's around the block, and runs a backward of its own."""
    x = place(mesh, X, Shard(0), grad=True)
    with pytest.raises(RuntimeError, match="reentrant form of checkpoint"):
        checkpoint(torch.tanh, x, use_reentrant=True).sum().backward()


# -- a model ---------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).double()


@pytest.mark.parametrize(
    ("mesh_shape", "first", "second", "batch"),
    [
        ((2,), P(), P(), P("a")),
        ((2,), P("a"), P(None, "a"), P()),
        ((2, 2), P("b"), P(None, "b"), P("a")),
        ((2, 2), P("b", "a"), P("a", "b"), P("a")),
        ((3, 2), P(("a", "b")), P("a"), P("b")),
    ],
)
def test_a_model_equals_one_process(mesh_shape, first, second, batch):
    plain = mlp()
    plain_loss = nn.functional.cross_entropy(plain(X), torch.tensor([0, 1, 2, 3, 0]))
    plain_loss.backward()

    def program(mesh):
        model = mlp()
        shard_parameter(model[0], "weight", mesh, first)
        shard_parameter(model[3], "weight", mesh, second)
        distribute_module(model, mesh)
        target = sm.device_put(torch.tensor([0, 1, 2, 3, 0]), mesh, P(*batch.dims[:1]))
        loss = nn.functional.cross_entropy(model(sm.device_put(X, mesh, batch)), target)
        loss.backward()
        assert loss.item() == pytest.approx(plain_loss.item(), rel=1e-12)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(p.grad, ShardedTensor)
            assert sm.typeof(p.grad) is sm.typeof(p)
            equal(p.grad.full_tensor(), q.grad)

    on_mesh(mesh_shape, program)
