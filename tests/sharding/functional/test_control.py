"""`cond`, `switch`, `while_loop`, `fori_loop`, `scan`: plain, on sharded tensors, inside mapped
functions, under transforms.
"""

from __future__ import annotations

import re

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.ranks import every_rank, on_mesh

X = values(4, 3)


# -- branches --------------------------------------------------------------------------------------


@every_rank(2)
def test_cond_and_switch(mesh):
    x = put(mesh, X, P("a"))
    for pred in (True, x.sum() > -100, torch.tensor(2)):
        same(sm.cond(pred, lambda x, y: x + y, lambda x, y: x - y, x, x), 2 * X)
    same(sm.cond(x.sum() > 1e9, torch.sin, torch.cos, x), X.cos())
    branches = [torch.sin, torch.cos, torch.tanh]
    for index, wanted in (
        (0, X.sin()),
        (1, X.cos()),
        (-5, X.sin()),
        (7, X.tanh()),
        (torch.tensor(2), X.tanh()),
    ):
        same(sm.switch(index, branches, x), wanted)


@every_rank(2)
def test_branches_under_vmap(mesh):
    """Each example takes its own branch."""
    rows = [r.sin() if r.sum() > 0 else r.cos() for r in X]
    for spec in (P(), P(None, "a"), P("a")):
        same(
            sm.vmap(lambda r: sm.cond(r.sum() > 0, torch.sin, torch.cos, r))(put(mesh, X, spec)),
            torch.stack(rows),
        )
    index = torch.tensor([2, -1, 9, 1])
    found = sm.vmap(lambda i, r: sm.switch(i, [torch.sin, torch.cos, torch.tanh], r))(index, X)
    torch.testing.assert_close(
        found, torch.stack([X[0].tanh(), X[1].sin(), X[2].tanh(), X[3].cos()])
    )
    halved = sm.vmap(lambda r: sm.while_loop(lambda r: r.norm() > 1, lambda r: r / 2, r))(
        put(mesh, X * 8, P(None, "a"))
    ).full_tensor()
    assert all(0.5 < float(r.norm()) <= 1 for r in halved)


@every_rank(2)
def test_a_branch_inside_a_mapped_function(mesh):
    @sm.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P())
    def total(x):
        return sm.cond(
            sm.psum(x.sum(), "a") > -100, lambda x: sm.psum(x, "a"), lambda x: -sm.psum(x, "a"), x
        )

    for _ in range(2):
        same(total(put(mesh, X, P("a"))), X[:2] + X[2:])


def test_a_collective_that_only_some_ranks_reach_raises():
    def program(mesh):
        @sm.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        def uneven(x):
            return sm.cond(
                sm.axis_index("a") == 0,
                lambda x: x + sm.psum(x, "a"),
                lambda x: x + sm.pmax(x, "a"),
                x,
            )

        uneven(put(mesh, X, P("a")))

    with pytest.raises(
        sm.errors.CollectiveMismatchError, match=r"(?s)all_reduce\(sum.*all_reduce\(max"
    ):
        on_mesh((2,), program)


# -- loops -----------------------------------------------------------------------------------------


@every_rank(2)
def test_loops(mesh):
    x = put(mesh, X, P("a"))
    same(sm.fori_loop(2, torch.tensor(5), lambda i, v: v * i, x), X * 24)
    same(sm.fori_loop(3, 3, lambda i, v: v * i, x), X)
    found = sm.while_loop(
        lambda s: s["n"] < 4,
        lambda s: {"n": s["n"] + 1, "v": s["v"] * 2},
        {"n": torch.tensor(0), "v": x},
    )
    same(found["v"], X * 16)


@pytest.mark.parametrize("remat", [False, True])
def test_scan(remat):
    def step(carry, x):
        new = (carry + x["x"]).tanh()
        return new, {"y": new * 2, "n": None}

    def plain(init, xs, reverse=False):
        carry, ys = init, []
        for x in xs.flip(0) if reverse else xs:
            carry = (carry + x).tanh()
            ys.append(carry * 2)
        return carry, torch.stack(ys[::-1] if reverse else ys)

    def program(mesh):
        for spec in (P(), P(None, "a"), P("a")):
            for reverse in (False, True):
                init, xs = put(mesh, X[0] * 0, grad=True), put(mesh, X, spec, grad=True)
                carry, ys = sm.scan(step, init, {"x": xs}, reverse=reverse, remat=remat)
                wanted, wanted_ys = plain(X[0] * 0, pxs := X.clone().requires_grad_(), reverse)
                same(carry.detach(), wanted.detach())
                same(ys["y"].detach(), wanted_ys.detach())
                assert ys["n"] is None
                (carry.sum() + ys["y"].square().sum()).backward()
                (wanted.sum() + wanted_ys.square().sum()).backward()
                assert pxs.grad is not None
                same(xs.grad, pxs.grad)

    on_mesh((2,), program)


@every_rank(2)
def test_scan_without_xs_or_steps(mesh):
    carry, ys = sm.scan(lambda c, x: (c * 2, (c, 3.0, x)), torch.tensor(1), length=4)
    assert (carry.item(), ys[0].tolist(), ys[1].tolist(), ys[2]) == (
        16,
        [1, 2, 4, 8],
        [3.0] * 4,
        None,
    )
    carry, ys = sm.scan(lambda c, x: (c + x.sum(), x * 2), put(mesh, X[0, 0]), put(mesh, X)[:0])
    assert (carry.item(), list(ys.shape)) == (X[0, 0].item(), [0, 3])


@every_rank(2)
def test_scan_inside_and_under_transforms(mesh):
    def rnn(w, xs):
        return sm.scan(lambda c, x: ((c @ w + x).tanh(), c.sum()), xs[0] * 0, xs)

    def plain(w, xs):
        c, ys = xs[0] * 0, []
        for x in xs:
            ys.append(c.sum())
            c = (c @ w + x).tanh()
        return c, torch.stack(ys)

    w, batch = values(3, 3, seed=5), values(2, 4, 3, seed=6)
    wanted = torch.func.vmap(torch.func.grad(lambda w, xs: plain(w, xs)[0].sum()), (None, 0))(
        w, batch
    )
    for spec in (P(), P("a"), P(None, None, "a")):
        same(
            sm.vmap(sm.grad(lambda w, xs: rnn(w, xs)[0].sum()), (None, 0))(
                put(mesh, w), put(mesh, batch, spec)
            ),
            wanted,
        )
    total = lambda w, xs: sm.psum(sm.vmap(lambda xs: rnn(w, xs)[0])(xs).sum(0), "a")  # noqa: E731
    mapped = sm.shard_map(total, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    for _ in range(2):
        same(
            mapped(put(mesh, w), put(mesh, batch, P("a"))),
            torch.func.vmap(lambda xs: plain(w, xs)[0])(batch).sum(0),
        )
        tangent = sm.jvp(
            mapped, (put(mesh, w), put(mesh, batch)), (put(mesh, w), put(mesh, batch))
        )[1]
        g = lambda w, batch: torch.func.vmap(lambda xs: plain(w, xs)[0])(batch).sum(0)  # noqa: E731
        same(tangent, torch.func.jvp(g, (w, batch), (w, batch))[1])


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (
            lambda: sm.cond(torch.ones(2), torch.sin, torch.cos, X),
            TypeError,
            "cond: the predicate must be a scalar",
        ),
        (lambda: sm.switch(0, []), ValueError, "at least one branch"),
        (
            lambda: sm.switch(torch.tensor(0.5), [torch.sin], X),
            TypeError,
            "must be an integer scalar",
        ),
        (
            lambda: sm.while_loop(lambda x: x.sum() < 9, lambda x: x.int(), torch.ones(2)),
            TypeError,
            r"is float32\[2\] and int32\[2\]",
        ),
        (
            lambda: sm.fori_loop(0, 2, lambda i, x: (x, x), X),
            TypeError,
            "fori_loop: the two values must have the same tree",
        ),
        (lambda: sm.scan(lambda c, x: c, X[0], X), TypeError, "must return a pair"),
        (
            lambda: sm.scan(lambda c, x: (c[:1], x), X[0], X),
            TypeError,
            r"scan: leaf 0 .* float64\[3\] and float64\[1\]",
        ),
        (lambda: sm.scan(lambda c, x: (c, x), X[0]), ValueError, "give xs or length="),
        (lambda: sm.scan(lambda c, x: (c, x), X[0], (X, X[:2])), ValueError, r"lengths \[2, 4\]"),
        (lambda: sm.scan(lambda c, x: (c, x), X[0], 3), ValueError, "has no dim to scan over"),
        (
            lambda: sm.vmap(lambda r: sm.cond(r.sum() > 0, lambda r: r, lambda r: r[:1], r))(X),
            TypeError,
            r"cond: leaf 0",
        ),
    ],
)
def test_mismatched_arguments_raise(call, kind, match):
    with pytest.raises(kind) as raised:
        call()
    assert re.search(match, str(raised.value)), raised.value
