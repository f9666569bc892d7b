"""How often a mapped function is checked (`check=`), and that ranks fail together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh

X, W = values(6, 4), values(4, 4, seed=1)


def over(mesh, f, out_specs=P(), **more):
    return sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=out_specs, **more)


def unlike(mesh, scale=1.0):
    """Return a tensor that is declared replicated, but differs on the last rank in one element."""
    local = W.clone()
    if mesh.coordinate[0] == mesh.size("a") - 1:
        local[2, 1] += scale
    return sm.ShardedTensor.from_local(local, mesh, P(), shape=(4, 4))


class Turning:
    """A program that is right when it is called first and wrong afterwards."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x, w):
        self.calls += 1
        return w * 2 if self.calls == 1 else w * x.sum()


@every_rank(2)
def test_check_true_does_not_check_the_second_call(mesh):
    mapped = over(mesh, Turning())
    x = put(mesh, X, P("a"))
    same(mapped(x, W), W * 2)
    assert not torch.equal(mapped(x, W).to_local(), W * 2)
    assert mapped.f.calls == 2


@every_rank(2)
def test_check_always_checks_the_second_call(mesh):
    mapped = over(mesh, Turning(), check="always")
    x = put(mesh, X, P("a"))
    same(mapped(x, W), W * 2)
    for _ in range(2):
        with pytest.raises(
            sm.errors.ShardingTypeError,
            match=r"varies over 'a'.*sum at \S+test_check_modes.py:\d+, of argument 0",
        ):
            mapped(x, W)


@every_rank(2)
def test_check_always_shares_errors_at_every_call(mesh):
    x = put(mesh, X, P("a"))
    for check, more in (("always", ["all_gather_object"]), (True, [])):
        mapped = over(mesh, lambda x, w: sm.psum(x @ w, "a"), check=check)
        mapped(x, W)
        with collectives() as records:
            mapped(x, W)
        assert launched(records) == ["all_reduce", *more]


@every_rank(2)
def test_check_false_is_off(mesh):
    mapped = over(mesh, lambda x, w: w * x.sum(), check=False)
    x = put(mesh, X, P("a"))
    for _ in range(2):
        y = mapped(x, W)
        torch.testing.assert_close(y.to_local(), W * x.to_local().sum())


@every_rank(3)
def test_values_compares_arguments(mesh):
    mapped = over(mesh, lambda x, w: w + 0, check="values")
    x = put(mesh, X, P("a"))
    for _ in range(2):
        same(mapped(x, put(mesh, W)), W)
        with pytest.raises(sm.errors.ReplicaError) as caught:
            mapped(x, unlike(mesh))
        for words in (
            "argument 1",
            "ranks 0 and 2",
            "[2, 1]",
            repr(W[2, 1].item()),
            repr(W[2, 1].item() + 1),
        ):
            assert words in str(caught.value)


@every_rank(3)
def test_values_compares_results(mesh):
    """A number from outside that differs is of no type that the checker could see; the first call
    compares, "values" every one.
    """
    scale = [1.0]
    mapped = over(mesh, lambda x, w: (x, [w * scale[0]]), (P("a"), [P()]), check="values")
    trusting = over(mesh, lambda x, w: (x, [w * scale[0]]), (P("a"), [P()]))
    x = put(mesh, X, P("a"))
    for f in (mapped, trusting):
        f(x, W)
    scale[0] += mesh.coordinate[0] == 1
    trusting(x, W)
    for _ in range(2):
        with pytest.raises(
            sm.errors.ReplicaError, match=r"result \[1\]\[0\].*ranks 0 and 1.*index \[0, 0\]"
        ):
            mapped(x, W)


@every_rank(2, 2)
def test_values_compares_the_replicas_of_each_part(mesh):
    wrong = [False]
    mapped = sm.shard_map(
        lambda x: torch.where(torch.arange(3)[:, None] == 1, x + wrong[0], x),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
        check="values",
    )
    x = put(mesh, X, P("a"))
    same(mapped(x), X)
    wrong[0] = mesh.coordinate == (1, 0)
    with pytest.raises(sm.errors.ReplicaError, match=r"result.*ranks 2 and 3.*index \[1, 0\]"):
        mapped(x)


@every_rank(3)
def test_results_that_differ_are_found_at_the_first_call(mesh):
    scale = 1.0 + (mesh.coordinate[0] == 1)
    for check in (True, "always"):
        with pytest.raises(
            sm.errors.ShardingTypeError, match="result: by its type it is the same on every rank"
        ):
            over(mesh, lambda x, w: w * scale, check=check)(put(mesh, X, P("a")), W)


@every_rank(2)
def test_values_of_every_kind(mesh):
    """NaNs of the same bits are the same; empty, 0-d, bool and bf16 tensors are compared too."""
    mapped = sm.shard_map(
        lambda tree: [t.clone() for t in tree],
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check="values",
    )
    given = [
        torch.tensor([float("nan"), 1.0]),
        torch.empty(0, 3),
        torch.tensor(2.0),
        torch.tensor([True]),
        W.bfloat16(),
        W.cfloat().conj(),
    ]
    for _ in range(2):
        for x, y in zip(given, mapped(given), strict=True):
            torch.testing.assert_close(y.to_local(), x, equal_nan=True)
    with pytest.raises(sm.errors.ReplicaError, match="argument 0"):
        mapped([torch.tensor(mesh.coordinate[0])])


# -- ranks fail together ---------------------------------------------------------------------------


def errors(size, f, out_specs=P(), kind=sm.errors.ShardingTypeError):
    """Return the error of every rank; fail if a rank raises none or hangs."""

    def program(mesh):
        mapped = over(mesh, f, out_specs)
        with pytest.raises(kind) as caught:
            mapped(put(mesh, X, P("a")), put(mesh, W))
        same(over(mesh, lambda x, w: sm.psum(x.sum(), "a"))(put(mesh, X, P("a")), W), X.sum())
        return str(caught.value)

    return on_mesh((size,), program)


def test_all_ranks_raise_the_same_text():
    texts = errors(3, lambda x, w: x.exp())
    assert len(set(texts)) == 1


def test_an_error_on_one_rank_is_raised_on_all():
    def one(x, w):
        return x.sum() * w if _rank() == 1 else w

    texts = errors(3, one)
    assert "varies over 'a'" in texts[1]
    for rank in (0, 2):
        assert texts[rank].startswith("on rank 1: ShardingTypeError: ")
        assert texts[1] in texts[rank]


def _rank():
    """Return this rank in a way that the type checker does not see."""
    return current_world().rank


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("numbers or kinds", lambda w: (w, w)),
        ("numbers or kinds", lambda w: [w][:0]),
        ("add up to", lambda w: w[:1]),
        ("differ in dtype", Tensor.float),
    ],
)
def test_one_rank_alone_returns_something_else(name, other):
    texts = errors(
        3,
        lambda x, w: other(w) if _rank() == 2 else w,
        kind=(sm.errors.ShardingTypeError, ValueError),
    )
    assert len(set(texts)) == 1
    assert name in texts[0]


def test_one_rank_alone_returns_no_tensor():
    texts = errors(3, lambda x, w: 1.5 if _rank() == 2 else w, kind=sm.errors.ShardingTypeError)
    assert "numbers or kinds" in texts[0]
    texts = errors(
        3,
        lambda x, w: w if _rank() == 2 else 1.5,
        None,
        kind=(sm.errors.ShardingTypeError, TypeError),
    )
    assert texts[0] == "on rank 2: " + "TypeError: " + texts[2]


@every_rank(2, 2)
def test_an_error_of_uneven_parts_is_raised_on_every_rank(mesh):
    """5 rows over a: the ranks with 3 cannot scatter one to each of 2, those with 2 could."""
    x = put(mesh, torch.randn(5, 4), P("a"))
    mapped = sm.shard_map(
        lambda x: sm.psum_scatter(x, "b"), mesh=mesh, in_specs=P("a"), out_specs=P(("a", "b"))
    )
    for _ in range(2):
        with pytest.raises(
            (ValueError, sm.errors.ShardingTypeError),
            match=r"dim 0 \(scatter_dimension\) of \[3, 4\] must have 2 elements",
        ):
            mapped(x)
