"""Silent errors: cases that could give a wrong number, different numbers on ranks, or no gradient,
without an error.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

import shardmesh as sm
from shardmesh import P, Partial, Shard
from tests.sharding.ranks import every_rank, on_mesh, place, same_error

X = torch.arange(15.0, dtype=torch.float64).view(5, 3) / 7 - 1
F = nn.functional


# -- numbers out of tensors ------------------------------------------------------------------------

ONE_NUMBER = {
    "item": lambda x: x.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "complex": complex,
    "format": lambda x: f"{x}",
    "format with width": lambda x: f"{x:8.3f}",
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "asarray": lambda x: np.asarray(x).tolist(),
    "comparison": lambda x: bool(x > 40),
    "is_nonzero": torch.is_nonzero,
    "in if": lambda x: "yes" if x else "no",
    "math": lambda x: __import__("math").sqrt(x),
    "sum of": lambda x: sum([x, x]).item(),
    "max of": lambda x: max(x, x * 2).item(),
    "torch.tensor": lambda x: torch.tensor([x, x]).tolist(),
}


def as_scalars(mesh):
    """Return the number 45 in every layout that a 0-d or one-element tensor can have."""
    rank, n = mesh.world.rank, mesh.size()
    shares = torch.full((), 45.0, dtype=torch.float64) * (rank + 1) * 2 / (n * (n + 1))
    below = torch.tensor(45.0 - rank, dtype=torch.float64)
    one = torch.tensor([45.0], dtype=torch.float64)
    return {
        "pending sum": sm.from_local(shares, mesh, [Partial()]),
        "pending avg": sm.from_local(shares * n, mesh, [Partial("avg")]),
        "pending max": sm.from_local(below, mesh, [Partial("max")]),
        "pending min": sm.from_local(45.0 + below * 0 + rank, mesh, [Partial("min")]),
        "pending product": sm.from_local(
            torch.tensor(45.0 if rank == 1 else 1.0, dtype=torch.float64),
            mesh,
            [Partial("product")],
        ),
        "replicated": place(mesh, one[0]),
        "one element, sharded": place(mesh, one, Shard(0)),
    }


@pytest.mark.parametrize("ask", ONE_NUMBER)
def test_item_is_equal_on_every_rank(ask):
    """And equal to that of the plain tensor."""

    def program(mesh):
        return {name: ONE_NUMBER[ask](x.reshape(())) for name, x in as_scalars(mesh).items()}

    expected = ONE_NUMBER[ask](torch.tensor(45.0, dtype=torch.float64))
    for numbers in on_mesh((3,), program):
        for name, number in numbers.items():
            if isinstance(expected, (str, bool)):
                assert number == expected, name
            else:
                assert number == pytest.approx(expected, rel=1e-12), name


@every_rank(3)
def test_one_element_of_a_sharded_tensor(mesh):
    x = place(mesh, X, Shard(0))
    for i in range(5):
        assert x[i, 1].item() == X[i, 1].item()
    assert x.tolist() == X.tolist()
    assert np.array_equal(x.numpy(), X.numpy())
    assert np.array_equal(np.array(x), X.numpy())
    assert np.asarray(x, dtype=np.float32).dtype == np.float32
    assert torch.equal(x, place(mesh, X))
    assert not torch.equal(x, place(mesh, X + 1))
    assert torch.allclose(x, place(mesh, X + 1e-12))
    assert float(X[4, 2]) in x


@pytest.mark.parametrize(
    "ask", [bool, float, int, lambda x: x.item(), lambda x: "yes" if x else "no"]
)
def test_item_of_many_elements_raises(ask):
    same_error((2,), lambda mesh: ask(place(mesh, X, Shard(0))), RuntimeError)


def test_numpy_of_a_tensor_that_requires_grad_raises_as_in_torch():
    for ask in (lambda x: x.numpy(), np.asarray):
        text = same_error(
            (2,), lambda mesh, ask=ask: ask(place(mesh, X, Shard(0), grad=True)), RuntimeError
        )
        assert "detach" in text


# -- reductions over uneven and empty parts --------------------------------------------------------

INTEGERS = torch.tensor([-3, -1])
REDUCTIONS = {
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max over dim": lambda x: x.max(0).values,
    "argmin": lambda x: x.argmin(),
    "amax": lambda x: x.amax(0),
    "sum": lambda x: x.sum(),
    "prod": lambda x: x.prod(),
    "all": lambda x: (x < 0).all(),
    "any": lambda x: (x > 0).any(),
    "sort": lambda x: x.sort(descending=True).values,
    "cumsum": lambda x: x.cumsum(0),
    "float mean": lambda x: x.double().mean(),
    "float std": lambda x: x.double().std(),
    "float norm": lambda x: x.double().norm(),
    "float logsumexp": lambda x: x.double().logsumexp(0),
    "float softmax": lambda x: x.double().softmax(0),
    "infinity norm": lambda x: torch.linalg.vector_norm(x.double(), float("inf")),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(
    "whole",
    [INTEGERS, INTEGERS.double(), INTEGERS.float() - 0.5, INTEGERS < -2],
    ids=["int", "f64", "f32", "bool"],
)
def test_empty_parts_are_ignored(whole, name):
    """Two elements on five ranks: three ranks hold nothing."""
    try:
        expected = REDUCTIONS[name](whole)
    except RuntimeError:
        pytest.skip("torch has no such reduction of this dtype")

    def program(mesh):
        torch.testing.assert_close(
            REDUCTIONS[name](place(mesh, whole, Shard(0))).full_tensor(), expected
        )

    on_mesh((5,), program)


@every_rank(2)
def test_reductions_of_empty_tensors(mesh):
    x = place(mesh, torch.zeros(0, 3), Shard(0))
    assert x.sum().item() == 0
    assert x.prod().item() == 1
    assert x.mean().isnan().item()
    for reduce in (lambda: x.max(), lambda: x.amin(0), lambda: x.argmax()):
        with pytest.raises((RuntimeError, IndexError)):
            reduce()


CLASSES = torch.tensor([0, 1, 2, -100, 1])
LOSSES = {
    "mse": lambda x, t, y: F.mse_loss(x, t),
    "l1": lambda x, t, y: F.l1_loss(x, t),
    "smooth_l1": lambda x, t, y: F.smooth_l1_loss(x, t),
    "huber": lambda x, t, y: F.huber_loss(x, t, delta=0.3),
    "cross_entropy": lambda x, t, y: F.cross_entropy(x, y),
    "cross_entropy smoothed": lambda x, t, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "cross_entropy sum": lambda x, t, y: F.cross_entropy(x, y, reduction="sum"),
    "cross_entropy of probabilities": lambda x, t, y: F.cross_entropy(x, t.softmax(1)),
    "nll": lambda x, t, y: F.nll_loss(x.log_softmax(1), y),
    "bce": lambda x, t, y: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
    "kl": lambda x, t, y: F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "by hand": lambda x, t, y: ((x - t) ** 2).mean(1).mean(),
    "masked mean": lambda x, t, y: (x * (x > 0)).sum() / (x > 0).sum(),
}


@pytest.mark.one_in(7)
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(("b", "a")), P(None, "b")], ids=str)
def test_mean_losses_over_uneven_parts(name, spec):
    """The mean over all elements, not the mean of the ranks' means; value and gradient."""
    leaf = X.clone().requires_grad_()
    expected = LOSSES[name](leaf, X.flip(0), CLASSES)
    expected.backward()

    def program(mesh):
        x = sm.device_put(X, mesh, spec).requires_grad_()
        loss = LOSSES[name](
            x, sm.device_put(X.flip(0), mesh, spec), sm.device_put(CLASSES, mesh, P(*spec.dims[:1]))
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, rtol=1e-10, atol=1e-12)

    on_mesh((3, 2), program)


# -- gradients that would be lost ------------------------------------------------------------------


TRANSFORMS = {
    "jvp": lambda x: torch.func.jvp(lambda t: t.sum(), (x,), (torch.ones_like(x),)),
    "jacfwd": lambda x: torch.func.jacfwd(lambda t: t * t)(x),
    "hessian": lambda x: torch.func.hessian(lambda t: (t * t).sum())(x),
    "forward mode": lambda x: make_dual(x),
    "closed over, of a number": lambda x: torch.func.grad(lambda s: (x * s).sum())(
        torch.tensor(2.0)
    ),
    "closed over, of a batch": lambda x: torch.func.vmap(lambda s: (x * s).sum())(
        torch.arange(3.0)
    ),
    "closed over, of a matrix": lambda x: torch.func.grad(lambda w: (x @ w).sum())(
        torch.ones(3, 2, dtype=X.dtype)
    ),
}


def make_dual(x):
    with forward_ad.dual_level():
        return forward_ad.make_dual(x, x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch.func.jvp uses it
@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func_transforms_raise(name):
    same_error((1,), lambda mesh: TRANSFORMS[name](place(mesh, X, Shard(0))), Exception)
    text = same_error((2,), lambda mesh: TRANSFORMS[name](place(mesh, X, Shard(0))), Exception)
    assert "ShardedTensor" in text


@every_rank(2)
def test_functional_call_works(mesh):
    """It only exchanges parameters."""
    module = sm.parallel.distribute_module(nn.Linear(3, 2).double(), mesh)
    weight = place(mesh, torch.ones(2, 3, dtype=X.dtype), Shard(0))
    y = torch.func.functional_call(
        module,
        {"weight": weight, "bias": place(mesh, torch.zeros(2, dtype=X.dtype))},
        place(mesh, X),
    )
    torch.testing.assert_close(y.full_tensor(), X.sum(1, keepdim=True).expand(5, 2))


# -- round the dispatch ----------------------------------------------------------------------------

ROUND = {
    "data_ptr": lambda x: x.data_ptr(),
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "numpy from dlpack": np.from_dlpack,
    "memoryview": memoryview,
    "all_reduce": dist.all_reduce,
    "all_reduce of a result": lambda x: dist.all_reduce(x * 2),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(5, 3)] * 2, x),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(torch.empty(5, 3), x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ROUND)
def test_bypassing_the_dispatch_raises(way):
    """Pointers, collectives and C++ code cannot use one rank's part as if it were the whole."""
    same_error((2,), lambda mesh: ROUND[way](place(mesh, X, Shard(0))), Exception)
