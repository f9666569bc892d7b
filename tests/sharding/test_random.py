"""Random numbers of sharded tensors: the same global tensor on any mesh, with any sharding, on every replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P, Partial, Shard
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, same_error
from tests.sharding.strategies import AXES, mesh_shapes, shapes, specs

F = nn.functional

DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "uniform_": lambda x: x.clone().uniform_(-2, 3),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "rand": lambda x: sm.rand(x.shape, x.mesh, x.spec, dtype=x.dtype),
    "randn": lambda x: sm.randn(x.shape, x.mesh, x.spec, dtype=x.dtype),
    "init": lambda x: nn.init.trunc_normal_(x.clone()),
}


def drawn(name, mesh, spec, shape, seed=3):
    """The whole of what the second of three draws gives."""
    sm.manual_seed(seed)
    x = sm.ones(shape, mesh, spec, dtype=torch.float64)
    with collectives() as records:
        _, y, _ = DRAWS[name](x), DRAWS[name](x), DRAWS[name](x)
    assert records == [] or name == "init"  # torch's initializers ask whether any number is out of bounds
    assert y.layout is x.layout
    return y.full_tensor()


def on_one_rank(name, shape, seed=3):
    return on_mesh((1,), lambda mesh: drawn(name, mesh, P(), shape, seed))[0]


@st.composite
def places(draw):
    mesh_shape, shape = draw(mesh_shapes), draw(shapes())
    return mesh_shape, shape, draw(specs(AXES[: len(mesh_shape)], len(shape), ()))


@pytest.mark.parametrize("name", DRAWS)
@given(places())
@settings(max_examples=15)
def test_the_same_tensor_on_any_mesh(name, place):
    mesh_shape, shape, spec = place
    expected = on_one_rank(name, shape)
    for whole in on_mesh(mesh_shape, lambda mesh: drawn(name, mesh, spec, shape)):
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_are_equal_and_draws_differ(name):
    def program(mesh):
        sm.manual_seed(0)
        x = sm.ones((6, 5), mesh, P("b"), dtype=torch.float64)
        return [DRAWS[name](x).to_local() for _ in range(2)]

    results = on_mesh((3, 2), program)
    for first, second in results:
        assert not torch.equal(first, second)
    for rank in range(6):
        assert torch.equal(results[rank][0], results[rank % 2][0])  # ranks that differ on axis a hold the same rows
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("name", DRAWS)
def test_the_seed_decides(name):
    first, again, other = (on_one_rank(name, (7, 8), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


WITHOUT_RULE = {
    "bernoulli": torch.bernoulli,
    "multinomial": lambda x: torch.multinomial(x, 2),
    "normal": lambda x: torch.normal(x, 1.0),
    "poisson": torch.poisson,
    "gumbel_softmax": F.gumbel_softmax,
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
}


@pytest.mark.filterwarnings("ignore:.*no sharding rule")
@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_operators_without_a_rule_draw_alike_too(name):
    """They run on gathered copies, with torch's generator in the same state on every rank, whatever it was before."""
    whole = torch.linspace(0.1, 0.9, 15, dtype=torch.float64).view(5, 3)

    def program(mesh):
        torch.manual_seed(mesh.world.rank)
        sm.manual_seed(8)
        x = place(mesh, whole, Shard(0))
        return [WITHOUT_RULE[name](x).full_tensor() for _ in range(2)]

    results = [*on_mesh((1,), program), *on_mesh((3,), program)]
    for first, second in results:
        assert torch.equal(first, results[0][0])
        assert torch.equal(second, results[0][1])
        assert not torch.equal(first, second)


@every_rank(2)
def test_torch_manual_seed_has_no_part_in_it(mesh):
    """Ranks may well seed torch differently, for their data."""
    torch.manual_seed(mesh.world.rank)
    before = torch.get_rng_state()
    x = place(mesh, torch.ones(8), Shard(0))
    y = torch.rand_like(x), F.dropout(x), nn.init.trunc_normal_(x.clone())
    assert torch.equal(torch.get_rng_state(), before)
    sm.manual_seed(0)
    torch.manual_seed(99)
    assert torch.equal(torch.rand_like(x).full_tensor(), y[0].full_tensor())


def test_ranks_outside_the_mesh_keep_step():
    """A mesh of some ranks draws; afterwards all ranks still draw the same."""

    def program():
        sm.manual_seed(5)
        some = sm.DeviceMesh("cpu", [1, 2], axis_names=("x",))
        x = sm.randn(4, device_mesh=some, placements=[Shard(0)])
        F.dropout(torch.rand_like(x)).normal_()
        everyone = sm.init_device_mesh("cpu", (4,), axis_names=("x",))
        return sm.randn(3, device_mesh=everyone, placements=[sm.Replicate()]).to_local()

    results = sm.simulate(4)(program)()
    assert all(torch.equal(r, results[0]) for r in results)


def test_moments():
    """Of fixed draws: no chance in it."""
    n = 40_000

    def program(mesh):
        sm.manual_seed(11)
        x = sm.zeros(n, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float64)
        uniform, normal = torch.rand_like(x), torch.randn_like(x)
        kept = F.dropout(torch.ones_like(x), 0.25)
        return [
            t.item()
            for t in (
                uniform.mean(),
                uniform.var(),
                normal.mean(),
                normal.var(),
                (kept == 0).double().mean(),
                kept.mean(),
            )
        ]

    (moments, *_) = on_mesh((3,), program)
    bound = 5 / n**0.5  # five standard errors of the mean of unit-variance numbers
    for moment, expected in zip(moments, (1 / 2, 1 / 12, 0, 1, 1 / 4, 1), strict=True):
        assert abs(moment - expected) < bound


def test_dropout_and_its_gradient_follow_one_mask():
    def program(mesh):
        sm.manual_seed(2)
        x = place(mesh, torch.ones(6, 5, dtype=torch.float64), Shard(1), grad=True)
        y = F.dropout(x, 0.5)
        y.sum().backward()
        assert set(y.detach().full_tensor().unique().tolist()) == {0.0, 2.0}
        assert torch.equal(x.grad.full_tensor(), y.detach().full_tensor())
        assert F.dropout(x, 0.5, training=False) is x
        assert torch.equal(F.dropout(x, 1.0).full_tensor(), torch.zeros_like(x.full_tensor()))

    on_mesh((2,), program)


@pytest.mark.parametrize("spec", [P("a"), P()], ids=str)
def test_a_checkpoint_replays_its_random_numbers(spec):
    """Forward and recomputation drop the same elements: also nested, with draws after the block, and twice."""

    def block(x, w):
        return F.dropout(F.dropout(x @ w, 0.5).tanh(), 0.3)

    def deep(x, w, run):
        x = F.dropout(x, 0.2)
        return run(block, run(block, x, w), w) + torch.rand_like(x)

    def plain(f, *args):
        return f(*args)

    def checkpointed(f, *args):  # a checkpoint inside another one closes over its sharded arguments
        return checkpoint(lambda: f(*args), use_reentrant=False, context_fn=sm.replay_random)

    def gradients(mesh, outer, inner):
        sm.manual_seed(4)
        x = place(mesh, torch.ones(6, 5, dtype=torch.float64), Shard(0))
        w = sm.device_put(torch.arange(25.0, dtype=torch.float64).view(5, 5) / 25, mesh, spec).requires_grad_()
        y = outer(deep, x, w, inner)
        z = torch.rand_like(x)
        loss = (y * z).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.item(), w.grad.full_tensor(), torch.rand_like(x).full_tensor()

    def program(mesh):
        expected = gradients(mesh, plain, plain)
        for outer, inner in [(plain, checkpointed), (checkpointed, plain), (checkpointed, checkpointed)]:
            loss, grad, after = gradients(mesh, outer, inner)
            assert loss == expected[0]
            assert torch.equal(grad, expected[1])
            assert torch.equal(after, expected[2])

    on_mesh((2,), program)


def test_a_checkpoint_that_would_draw_other_numbers_is_an_error():
    def program(mesh):
        x = place(mesh, torch.ones(4, 4), Shard(0), grad=True)
        checkpoint(lambda t: F.dropout(t.sin(), 0.5), x, use_reentrant=False).sum().backward()

    text = same_error((2,), program, RuntimeError)
    assert "context_fn=sm.replay_random" in text


@every_rank(2)
def test_sharded_arguments_of_a_nested_checkpoint_are_an_error(mesh):
    """torch saves them for backward by way of C++, where they are wrappers without values."""

    def inner(x):
        return checkpoint(torch.sin, x * 2, use_reentrant=False)

    y = checkpoint(inner, place(mesh, torch.ones(4, 4), Shard(0), grad=True), use_reentrant=False)
    with pytest.raises(RuntimeError):
        y.sum().backward()


@every_rank(2)
def test_hooks_may_draw(mesh):
    """Noise on gradients, in backward."""
    x = place(mesh, torch.ones(4, 4), grad=True)
    x.register_hook(lambda grad: grad + torch.randn_like(grad))
    (x * 2).sum().backward()
    assert x.grad.layout is x.layout
    assert x.grad.full_tensor().unique().numel() == 16


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda x: x.normal_(), ["P(None, unreduced={'a'})", "pending", "redistribute it first"]),
        (lambda x: x.redistribute(P()).normal_(generator=torch.Generator()), ["sm.manual_seed"]),
        (lambda x: F.dropout(x, -0.1), ["-0.1", "between 0 and 1"]),
        (lambda x: sm.rand(3, device_mesh=x.mesh, placements=[Partial()]), ["pending"]),
    ],
)
def test_draws_that_make_no_sense(draw, words):
    text = same_error((2,), lambda mesh: draw(sm.from_local(torch.ones(3), mesh, [Partial()])), Exception, silent=False)
    for word in words:
        assert word in text
