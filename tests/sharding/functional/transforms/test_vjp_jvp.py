"""`vjp`, `jvp` and `stop_gradient` over global functions, over mapped functions and inside them."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, values
from tests.sharding.functional.transforms.test_gradients import inside, plain_grads, same_trees
from tests.sharding.ranks import every_rank

X, W = values(6, 4), values(4, 5, seed=1)


@every_rank(2)
def test_vjp(mesh):
    f = lambda w, x: {"y": x @ w, "n": w.sum()}  # noqa: E731
    w, x = put(mesh, W), put(mesh, X, P("a"))
    out, back = sm.vjp(f, w, x)
    same(out["y"], X @ W)
    given = values(6, 5, seed=7)
    leaves = [leaf(W), leaf(X)]
    plain = f(*leaves)
    wanted = torch.autograd.grad(
        [plain["y"], plain["n"]], leaves, [given, torch.tensor(2.0).double()]
    )
    for _ in range(2):
        same_trees(
            back({"y": put(mesh, given, P("a")), "n": put(mesh, torch.tensor(2.0).double())}),
            wanted,
            [w, x],
        )
    with pytest.raises(ValueError, match="pass a tree like that of the results"):
        back(put(mesh, given))
    out, back, aux = sm.vjp(lambda w: (w * 2, "more"), w, has_aux=True)
    assert aux == "more"
    same_trees(back(out), [4 * W])


@every_rank(2)
def test_jvp(mesh):
    f = lambda w, x: {"y": (x @ w).sin(), "n": w.sum(), "constant": x * 0 + 1}  # noqa: E731
    w, x, tangent = put(mesh, W), put(mesh, X, P("a")), values(4, 5, seed=8)
    out, found = sm.jvp(lambda w: f(w, x), (w,), (put(mesh, tangent),))
    plain, wanted = torch.func.jvp(lambda w: f(w, X), (W,), (tangent,))
    same_trees(out, plain)
    same_trees(found, wanted)
    with pytest.raises(ValueError, match="pass a tree like that of the primals"):
        sm.jvp(lambda w: w, (w,), (w, w))


@every_rank(2)
def test_vjp_and_jvp_over_mapped_functions(mesh):
    mapped = inside(mesh, lambda w, x: ((x @ w).sin(), sm.psum((x @ w).sum(), "a")), (P("a"), P()))
    w = put(mesh, W)
    x = put(mesh, X, P("a"))
    tangent = values(4, 5, seed=8)
    given = values(6, 5, seed=9)
    plain = lambda w: ((X @ w).sin(), (X @ w).sum())  # noqa: E731
    for _ in range(2):
        out, found = sm.jvp(lambda w: mapped(w, x), (w,), (put(mesh, tangent),))
        same_trees(
            [*out, *found], [t for pair in torch.func.jvp(plain, (W,), (tangent,)) for t in pair]
        )
        out, back = sm.vjp(lambda w: mapped(w, x), w)
        wanted = torch.func.vjp(plain, W)[1]((given, torch.tensor(3.0).double()))
        same_trees(back((put(mesh, given, P("a")), put(mesh, torch.tensor(3.0).double()))), wanted)


@every_rank(2)
def test_vjp_inside(mesh):
    given = values(6, 5, seed=9)

    def f(w, x, given):
        out, back = sm.vjp(lambda w: ((x @ w).sin(), sm.psum((x @ w).sum(), "a")), w)
        return (
            out,
            back((given, torch.tensor(3.0).double())),
            back((given * 2, torch.tensor(6.0).double())),
        )

    mapped = inside(mesh, f, ((P("a"), P()), P(), P()), (P(), P("a"), P("a")))
    out, back = torch.func.vjp(lambda w: ((X @ w).sin(), (X @ w).sum()), W)
    for _ in range(2):
        found = mapped(put(mesh, W), put(mesh, X, P("a")), put(mesh, given, P("a")))
        same_trees(found[0], out)
        same_trees(found[1], back((given, torch.tensor(3.0).double())))
        same_trees(found[2], back((given * 2, torch.tensor(6.0).double())))


@every_rank(2)
def test_jvp_inside(mesh):
    tangent = values(4, 5, seed=8)

    def f(w, x, tangent):
        return sm.jvp(lambda w: ((x @ w).sin(), sm.psum((x @ w).sum(), "a")), (w,), (tangent,))

    mapped = inside(mesh, f, ((P("a"), P()), (P("a"), P())), (P(), P("a"), P()))
    wanted = torch.func.jvp(lambda w: ((X @ w).sin(), (X @ w).sum()), (W,), (tangent,))
    for _ in range(2):
        same_trees(mapped(put(mesh, W), put(mesh, X, P("a")), put(mesh, tangent)), wanted)


@every_rank(2)
def test_stop_gradient(mesh):
    f = lambda w, x: ((x @ w) * sm.stop_gradient({"y": (x @ w).tanh(), "n": 1})["y"]).sum()  # noqa: E731
    plain = plain_grads(lambda w, x: ((x @ w) * (x @ w).tanh().detach()).sum(), W, X)[1]
    w, x = put(mesh, W), put(mesh, X, P("a"))
    same(sm.grad(f)(w, x), plain)
    mapped = inside(mesh, lambda w, x: sm.grad(lambda w: sm.psum(f(w, x), "a"))(w), P())
    for _ in range(2):
        same(mapped(w, x), plain)
