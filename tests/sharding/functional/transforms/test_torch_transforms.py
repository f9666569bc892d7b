"""torch's own transforms inside mapped functions: `torch.func`, checkpointing, `torch.compile`,
functional modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh

X, W = values(6, 4), values(4, 5, seed=1)


def twice(mesh, f, args, wanted, *, in_specs=(P("a"), P()), out_specs=P("a"), **more):
    """Check the result of the mapped function, with tracked and with trusted types."""
    mapped = sm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)
    for _ in range(2):
        found = mapped(*[put(mesh, t, spec) for t, spec in zip(args, in_specs, strict=True)])
        for x, y in (
            zip(found, wanted, strict=True) if isinstance(wanted, tuple) else [(found, wanted)]
        ):
            same(x, y)
    return mapped


def with_gradients(mesh, f, plain):
    """Check the same for a replicated loss f(x, w) and its gradients."""
    mapped = sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    for _ in range(3):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        same_gradients([x, w], [px, pw], mapped(x, w), plain(px, pw))


# -- vmap ------------------------------------------------------------------------------------------


@every_rank(2)
def test_vmap_of_rows_and_of_columns(mesh):
    twice(mesh, lambda x, w: vmap(lambda row: (row @ w).sin())(x), (X, W), (X @ W).sin())
    twice(
        mesh, lambda x, w: vmap(lambda column: x @ column, in_dims=1, out_dims=1)(w), (X, W), X @ W
    )
    twice(
        mesh,
        lambda x, w: vmap(vmap(torch.dot, in_dims=(None, 1)), in_dims=(0, None))(x, w),
        (X, W),
        X @ W,
    )


COLLECTIVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "psum": (lambda r: sm.psum(r, "a"), lambda h: (h[0] + h[1]).repeat(2, 1)),
    "pmean": (lambda r: sm.pmean(r, "a"), lambda h: (h[0] + h[1]).repeat(2, 1) / 2),
    "pmax": (lambda r: sm.pmax(r, "a"), lambda h: torch.maximum(h[0], h[1]).repeat(2, 1)),
    "all_gather": (
        lambda r: sm.all_gather(r, "a", axis=0, tiled=True),
        lambda h: torch.cat(list(h), 1).repeat(2, 1),
    ),
    "all_gather stacked": (
        lambda r: sm.all_gather(r, "a", axis=1).flatten(),
        lambda h: torch.stack(list(h), 2).flatten(1).repeat(2, 1),
    ),
    "psum_scatter": (
        lambda r: sm.psum_scatter(r, "a", tiled=True),
        lambda h: torch.cat((h[0] + h[1]).chunk(2, 1), 0),
    ),
    "all_to_all": (
        lambda r: sm.all_to_all(r, "a", 0, 0, tiled=True),
        lambda h: torch.cat([torch.cat([part.chunk(2, 1)[i] for part in h], 1) for i in range(2)]),
    ),
    "ppermute": (
        lambda r: sm.ppermute(r, "a", [(0, 1)]),
        lambda h: torch.cat([torch.zeros_like(h[0]), h[0]]),
    ),
    "pbroadcast": (lambda r: sm.pbroadcast(r, "a", 1), lambda h: h[1].repeat(2, 1)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_under_vmap(name):
    collective, plain = COLLECTIVES[name]
    wanted = plain(X.view(2, 3, 4))

    def over_rows(x):
        return vmap(collective)(x)

    def over_columns(x):
        return vmap(collective, in_dims=1, out_dims=0)(x.t())

    def nested(x):
        return vmap(vmap(collective, in_dims=1, out_dims=1), in_dims=0)(x.unsqueeze(2)).squeeze(2)

    def program(mesh):
        for f in (over_rows, over_columns, nested):
            mapped = sm.shard_map(
                lambda x, f=f: f(x) + 0 * sm.axis_index("a"),
                mesh=mesh,
                in_specs=P("a"),
                out_specs=P("a"),
            )
            for _ in range(2):
                x, px = put(mesh, X, P("a"), grad=True), leaf(X)
                same(mapped(x), wanted)
                same_gradients(
                    [x], [px], mapped(x).sin().sum(), plain(px.view(2, 3, 4)).sin().sum()
                )

    on_mesh((2,), program)


@every_rank(2)
def test_one_collective_for_the_whole_batch(mesh):
    mapped = sm.shard_map(
        lambda x: vmap(lambda r: sm.psum(r.exp(), "a"))(x),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
    )
    x = put(mesh, X, P("a"))
    mapped(x)
    with collectives() as records:
        mapped(x)
    assert launched(records) == ["all_reduce"]


@every_rank(2)
def test_types_under_vmap(mesh):
    wrong = sm.shard_map(
        lambda x, w: vmap(lambda c: (x @ c).sum(), in_dims=1)(w),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    with pytest.raises(
        sm.errors.ShardingTypeError, match=r"varies over 'a'.*test_torch_transforms.py:\d+"
    ):
        wrong(put(mesh, X, P("a")), put(mesh, W))
    shares = lambda x: vmap(lambda r: sm.pcast(r, "a", to="unreduced"))(x)  # noqa: E731
    twice(mesh, shares, (X,), X, in_specs=(P(),), out_specs=P(unreduced="a"))


# -- grad, vjp of torch.func -----------------------------------------------------------------------


@every_rank(2)
def test_gradients_of_each_row(mesh):
    """Per-sample gradients: no collective is inside, each rank has its rows. The weight is made to
    vary: else its gradients are shares.
    """
    f = lambda row, w: (row @ w).sin().sum()  # noqa: E731
    per_sample = vmap(grad(f, argnums=1), in_dims=(0, None))
    twice(
        mesh, lambda x, w: per_sample(x, sm.pcast(w, "a", to="varying")), (X, W), per_sample(X, W)
    )
    twice(
        mesh,
        lambda x, w: vmap(jacrev(lambda r: (r @ w).tanh()))(x),
        (X, W),
        vmap(jacrev(lambda r: (r @ W).tanh()))(X),
    )
    twice(
        mesh,
        lambda x, w: vmap(grad(lambda r: grad(f)(r, w).sin().sum()))(x),
        (X, W),
        vmap(grad(lambda r: grad(f)(r, W).sin().sum()))(X),
    )


@every_rank(2)
def test_a_share_of_the_gradient(mesh):
    f = lambda x, w: grad(lambda w: (x @ w).sin().sum())(w)  # noqa: E731
    wanted = grad(lambda w: (X @ w).sin().sum())(W)
    twice(mesh, f, (X, W), wanted, out_specs=P(unreduced="a"))
    twice(mesh, lambda x, w: sm.psum(f(x, w), "a"), (X, W), wanted, out_specs=P())
    with pytest.raises(sm.errors.ShardingTypeError, match="is pending over 'a'"):
        twice(mesh, f, (X, W), wanted, out_specs=P("a"))


def total(x):
    """Return a loss that differs between ranks and contains a collective."""
    return (sm.psum(x.sin(), "a") * x).sum()


def gradient_of_the_totals(x):
    halves = leaf(x)
    one, two = halves[:3], halves[3:]
    return torch.autograd.grad(((one.sin() + two.sin()) * (one + two)).sum(), [halves])[0]


@every_rank(2)
def test_a_collective_under_grad(mesh):
    """torch.func starts from 1 on each rank: the gradient is that of the sum of all ranks'
    losses.
    """
    twice(mesh, lambda x: grad(total)(x), (X,), gradient_of_the_totals(X), in_specs=(P("a"),))
    twice(mesh, lambda x: vmap(grad(total))(x), (X,), gradient_of_the_totals(X), in_specs=(P("a"),))
    with pytest.raises(
        sm.errors.ShardingTypeError, match=r"loss that is replicated over 'a'.*sm.grad"
    ):
        twice(
            mesh,
            lambda x: grad(lambda x: sm.psum(x.sin(), "a").sum())(x),
            (X,),
            X,
            in_specs=(P("a"),),
        )


@every_rank(2)
def test_second_derivatives_of_a_collective(mesh):
    px = leaf(X)
    one, two = px[:3], px[3:]
    (g,) = torch.autograd.grad(
        ((one.sin() + two.sin()) * (one + two)).sum(), [px], create_graph=True
    )
    wanted = torch.autograd.grad(g.sin().sum(), [px])[0]
    twice(
        mesh,
        lambda x: grad(lambda x: grad(total)(x).sin().sum())(x),
        (X,),
        wanted,
        in_specs=(P("a"),),
    )


@every_rank(2)
def test_a_collective_under_vjp(mesh):
    def f(x):
        out, back = vjp(lambda x: sm.all_gather(x.sin(), "a", tiled=True), x)
        return sm.pcast(out, "a", to="varying").sum(0, keepdim=True), back(
            torch.ones(6, 4, dtype=torch.float64) * 3
        )[0]

    wanted = (X.sin().sum(0, keepdim=True).repeat(2, 1), 6 * X.cos())
    twice(mesh, f, (X,), wanted, in_specs=(P("a"),), out_specs=(P("a"), P("a")))


# -- checkpointing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["torch", "sm", "nested"])
def test_checkpoint(how):
    calls = []

    def body(x, w):
        calls.append(1)
        return sm.psum((x @ w).tanh().square().sum(), "a")

    def outer(x, w):
        return sm.remat(body)(x, w) * 2 - sm.remat(body)(x, w)

    def f(x, w):
        if how == "torch":
            return checkpoint(body, x, w, use_reentrant=False)
        return sm.remat(body if how == "sm" else outer)(x, w)

    def program(mesh):
        with_gradients(mesh, f, lambda x, w: (x @ w).tanh().square().sum())
        if mesh.world.rank == 0:
            assert len(calls) >= 2 * 3, "each call once more in backward"

    on_mesh((2,), program)


@every_rank(2)
def test_checkpoint_draws_the_same_numbers_again(mesh):
    key = sm.random.key(3)

    def body(x, w):
        with sm.random.seeded(sm.random.fold_in(key, sm.axis_index("a"))):
            return torch.nn.functional.dropout(x @ w, 0.5).square()

    plain = sm.shard_map(
        lambda x, w: sm.psum(body(x, w).sum(), "a"),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    again = sm.shard_map(
        lambda x, w: sm.psum(sm.remat(body)(x, w).sum(), "a"),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    for _ in range(2):
        grads = []
        for mapped in (plain, again):
            w = put(mesh, W, grad=True)
            mapped(put(mesh, X, P("a")), w).backward()
            grads.append(w.grad.to_local())
        assert torch.equal(*grads)


@every_rank(2)
def test_checkpoint_of_a_mapped_function(mesh):
    mapped = sm.shard_map(
        lambda x, w: sm.psum((x @ w).tanh().sum(), "a"),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    for _ in range(2):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        same_gradients([x, w], [px, pw], sm.remat(mapped)(x, w), (px @ pw).tanh().sum())


@every_rank(2)
def test_grad_of_a_checkpointed_piece_inside(mesh):
    def f(x, w):
        return sm.grad(lambda w: sm.psum(sm.remat(lambda x, w: (x @ w).tanh())(x, w).sum(), "a"))(w)

    pw = leaf(W)
    wanted = torch.autograd.grad((X @ pw).tanh().sum(), [pw])[0]
    twice(mesh, f, (X, W), wanted, out_specs=P())


# -- torch.compile ---------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def local_body(x, w):
    return (x @ w).tanh().square()


def body_with_psum(x, w):
    y = (x @ w).tanh()
    total = sm.psum(y.square().sum(), "a")
    return total * 2


@pytest.mark.one_in(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_local_body(backend, fresh_dynamo):
    def program(mesh):
        compiled = torch.compile(local_body, backend=backend)
        mapped = sm.shard_map(compiled, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
        for _ in range(3):
            x = put(mesh, X, P("a"), grad=True)
            w = put(mesh, W, grad=True)
            px = leaf(X)
            pw = leaf(W)
            same_gradients([x, w], [px, pw], mapped(x, w).sum(), local_body(px, pw).sum())
        wrong = sm.shard_map(compiled, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
        with pytest.raises(sm.errors.ShardingTypeError, match=r"matmul|tanh|square"):
            wrong(x, w)

    on_mesh((2,), program)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_body_with_a_collective(backend, fresh_dynamo):
    def program(mesh):
        mapped = sm.shard_map(
            torch.compile(body_with_psum, backend=backend),
            mesh=mesh,
            in_specs=(P("a"), P()),
            out_specs=P(),
        )
        for _ in range(3):
            x = put(mesh, X, P("a"), grad=True)
            w = put(mesh, W, grad=True)
            px = leaf(X)
            pw = leaf(W)
            same_gradients([x, w], [px, pw], mapped(x, w), 2 * local_body(px, pw).sum())

    on_mesh((2,), program)


@every_rank(2)
def test_the_second_call_is_compiled(mesh):
    graphs = []

    def backend(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    torch.compiler.reset()
    mapped = sm.shard_map(
        torch.compile(local_body, backend=backend),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P("a"),
    )
    counts = []
    for _ in range(3):
        same(mapped(put(mesh, X, P("a")), put(mesh, W)), local_body(X, W))
        counts.append(len(graphs))
    assert counts[0] == 0, "types are tracked operator by operator"
    assert counts[1] == counts[2] > 0


# -- modules ---------------------------------------------------------------------------------------


@every_rank(2)
def test_functional_call_of_a_module(mesh):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    given = {name: p.detach().clone() for name, p in module.named_parameters()}

    @sm.shard_map(mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    def loss(params, x):
        return sm.pmean(functional_call(module, params, (x,)).square().mean(), "a")

    plain = {name: leaf(t) for name, t in given.items()}
    wanted = functional_call(module, plain, (X,)).square().mean()
    wanted.backward()
    params, x = {name: put(mesh, t) for name, t in given.items()}, put(mesh, X, P("a"))
    for _ in range(2):
        value, found = sm.value_and_grad(loss)(params, x)
        same(value, wanted.detach())
        for name, p in plain.items():
            same(found[name], p.grad)
    assert all(p.grad is None for p in module.parameters())


@every_rank(2)
def test_a_module_whose_parameters_are_not_arguments(mesh):
    module = nn.Linear(4, 1).double()
    mapped = sm.shard_map(
        lambda x: sm.pmean(module(x).square().mean(), "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
    )
    with torch.no_grad():
        module.weight.fill_(0.5)
        module.bias.fill_(2.0)
    mapped(put(mesh, X, P("a"))).backward()
    found = [p.grad for p in module.parameters()]
    for g, whole in zip(
        found,
        torch.autograd.grad(module(X).square().mean(), list(module.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(g, whole)
    with torch.no_grad():
        same(mapped(put(mesh, X, P("a"))), module(X).square().mean())
