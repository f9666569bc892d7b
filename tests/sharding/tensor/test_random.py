"""Random numbers of sharded tensors: the same global tensor on any mesh, with any sharding, on
every replica.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P, Partial, Shard
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, place, same_error
from tests.sharding.strategies import AXES, mesh_shapes, ragged_specs, shapes

F = nn.functional

FILLS = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: x.bernoulli_(x * 0.3),
    "exponential_": lambda x: x.exponential_(2),
    "cauchy_": lambda x: x.cauchy_(1, 2),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.25),
    "geometric_": lambda x: x.geometric_(0.2),
    "random_": lambda x: x.random_(),
    "random_ from to": lambda x: x.random_(-3, 10**12),
    "dropout": lambda x: F.dropout(x, 0.4, inplace=True),
    "torch.dropout_": lambda x: torch.dropout_(x, 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True, inplace=True),
    "rrelu": lambda x: F.rrelu(x.neg_(), training=True, inplace=True),
    "torch.rrelu_": lambda x: torch.rrelu_(x.neg_(), 0.1, 0.9, True),
}
DRAWS = {
    **{f"{name} in place": lambda x, fill=fill: fill(x.clone()) for name, fill in FILLS.items()},
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, -5, 2**40),
    "dropout": lambda x: F.dropout(x, 0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "bernoulli": lambda x: torch.bernoulli(x * 0.3),
    "bernoulli with p": lambda x: x.bernoulli(0.3),
    "poisson": lambda x: torch.poisson(x * 3),
    "poisson of large rates": lambda x: torch.poisson(x * 300),
    "binomial": lambda x: torch.binomial(x * 9, x * 0.3),
    "binomial of many": lambda x: torch.binomial(x * 1000, x * 0.3),
    "normal of tensors": lambda x: torch.normal(x * 3, x * 2),
    "normal of a mean": lambda x: torch.normal(x * 3, 2.0),
    "normal of a spread": lambda x: torch.normal(3.0, x * 2),
    "rand": lambda x: sm.rand(x.shape, x.mesh, x.spec, dtype=x.dtype),
    "randn": lambda x: sm.randn(x.shape, x.mesh, x.spec, dtype=x.dtype),
    "randint": lambda x: sm.randint(-5, 2**40, x.shape, x.mesh, x.spec),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone()),
}
ASK = ("trunc_normal_",)  # torch looks whether any number is out of bounds


def drawn(name, mesh, spec, shape, seed=3):
    """Return the full result of the second of three draws."""
    sm.random.manual_seed(seed)
    x = sm.ones(shape, mesh, spec, dtype=torch.float64)
    with collectives() as records:
        _, y, _ = DRAWS[name](x), DRAWS[name](x), DRAWS[name](x)
    assert records == [] or name in ASK
    assert sm.typeof(y) is sm.typeof(x).replace(dtype=y.dtype)
    return y.full_tensor()


def on_one_rank(name, shape, seed=3):
    return on_mesh((1,), lambda mesh: drawn(name, mesh, P(), shape, seed))[0]


@st.composite
def places(draw):
    mesh_shape, shape = draw(mesh_shapes), draw(shapes())
    return (
        mesh_shape,
        shape,
        draw(ragged_specs(sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)]), shape, ())),
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DRAWS)
@given(places())
@settings(max_examples=6)
def test_the_same_tensor_on_any_mesh(name, place):
    mesh_shape, shape, spec = place
    expected = on_one_rank(name, shape)
    for whole in on_mesh(mesh_shape, lambda mesh: drawn(name, mesh, spec, shape)):
        assert torch.equal(whole, expected)


def _whole_draws():
    """Return the full result of every draw, on this process's mesh of four ranks."""
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    return {name: drawn(name, mesh, P("b", "a"), (5, 6)) for name in DRAWS}


def test_processes_draw_what_one_rank_draws(world4):
    expected = {name: on_one_rank(name, (5, 6)) for name in DRAWS}
    for found in world4(_whole_draws):
        assert all(torch.equal(found[name], expected[name]) for name in DRAWS)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", DRAWS)
def test_replicas_are_equal_and_draws_differ(name):
    def program(mesh):
        sm.random.manual_seed(0)
        x = sm.ones((6, 5), mesh, P("b"), dtype=torch.float64)
        return [DRAWS[name](x).to_local() for _ in range(2)]

    results = on_mesh((3, 2), program)
    for first, second in results:
        assert not torch.equal(first, second)
    for rank in range(6):
        # Ranks that differ on axis a hold the same rows.
        assert torch.equal(results[rank][0], results[rank % 2][0])
    assert not torch.equal(results[0][0], results[1][0])


def after(n, seed=1):
    """Advance the generator as n draws do."""
    sm.random.manual_seed(seed)
    first = sm.random.get_rng_state().view(torch.uint64)
    sm.random.set_rng_state(
        torch.tensor([first[0].item(), n], dtype=torch.uint64).view(torch.uint8)
    )


def test_thousand_consecutive_draws():
    def program(mesh):
        sm.random.manual_seed(1)
        for _ in range(999):
            sm.rand(1, device_mesh=mesh)
        late = sm.rand(4, device_mesh=mesh)
        after(999)
        assert torch.equal(sm.rand(4, device_mesh=mesh).full_tensor(), late.full_tensor())

    on_mesh((1,), program)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", DRAWS)
def test_the_thousandth_draw(name):
    def program(mesh, spec):
        x = sm.ones((5, 6), mesh, spec, dtype=torch.float64)
        after(999)
        late = DRAWS[name](x).full_tensor()
        after(0)
        assert not torch.equal(DRAWS[name](x).full_tensor(), late)
        return late

    (expected,) = on_mesh((1,), lambda mesh: program(mesh, P()))
    for mesh_shape, spec in [((3,), P(None, "a")), ((2, 2), P("b", "a"))]:
        assert all(
            torch.equal(x, expected)
            for x in on_mesh(mesh_shape, lambda mesh, spec=spec: program(mesh, spec))
        )


@pytest.mark.parametrize("name", DRAWS)
def test_different_seeds_differ(name):
    first, again, other = (on_one_rank(name, (7, 8), seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.filterwarnings("ignore:.*no sharding rule")
def test_operators_without_a_rule_draw_equally():
    """They run on gathered copies, with torch's generator in the same state on every rank, whatever
    it was before.
    """
    whole = torch.linspace(0.1, 0.9, 288, dtype=torch.float64).view(2, 1, 12, 12)

    def program(mesh):
        torch.manual_seed(mesh.world.rank)
        sm.random.manual_seed(8)
        x = place(mesh, whole, Shard(0))
        return [F.fractional_max_pool2d(x, 2, output_size=5).full_tensor() for _ in range(4)]

    results = [*on_mesh((1,), program), *on_mesh((3,), program)]
    for pooled in results:
        assert all(torch.equal(x, y) for x, y in zip(pooled, results[0], strict=True))
        assert not all(torch.equal(x, pooled[0]) for x in pooled)


@every_rank(2)
def test_torch_manual_seed_has_no_effect(mesh):
    """Ranks may well seed torch differently, for their data."""
    sm.random.manual_seed(0)
    torch.manual_seed(mesh.world.rank)
    before = torch.get_rng_state()
    x = place(mesh, torch.ones(8), Shard(0))
    y = torch.rand_like(x), F.dropout(x), nn.init.trunc_normal_(x.clone())
    assert torch.equal(torch.get_rng_state(), before)
    sm.random.manual_seed(0)
    torch.manual_seed(99)
    assert torch.equal(torch.rand_like(x).full_tensor(), y[0].full_tensor())


def test_ranks_outside_the_mesh_count_draws():
    """A mesh of some ranks draws; afterwards all ranks still draw the same."""

    def program():
        sm.random.manual_seed(5)
        some = sm.DeviceMesh(DEVICE, [1, 2], axis_names=("x",))
        x = sm.randn(4, device_mesh=some, placements=[Shard(0)])
        F.dropout(torch.rand_like(x)).normal_()
        everyone = sm.init_device_mesh(DEVICE, (4,), axis_names=("x",))
        return sm.randn(3, device_mesh=everyone, placements=[sm.Replicate()]).to_local()

    results = sm.simulate(4)(program)()
    assert all(torch.equal(r, results[0]) for r in results)


@every_rank(2)
def test_the_state_is_saved_and_restored(mesh):
    sm.random.manual_seed(2**64 - 1)
    x = sm.ones(5, device_mesh=mesh, placements=[Shard(0)])
    torch.rand_like(x)
    state = sm.random.get_rng_state()
    first = torch.rand_like(x).full_tensor()
    with sm.random.fork_rng():
        sm.random.manual_seed(7)
        torch.rand_like(x)
    second = torch.rand_like(x).full_tensor()
    sm.random.set_rng_state(state)
    assert torch.equal(torch.rand_like(x).full_tensor(), first)
    assert torch.equal(torch.rand_like(x).full_tensor(), second)
    with pytest.raises(ValueError, match="16 bytes"):
        sm.random.set_rng_state(torch.get_rng_state())


def test_fork_rng_restores_after_an_exception():
    def program(mesh):
        sm.random.manual_seed(0)
        state = sm.random.get_rng_state()
        with pytest.raises(KeyError), sm.random.fork_rng():
            sm.rand(3, device_mesh=mesh)
            raise KeyError
        assert torch.equal(sm.random.get_rng_state(), state)

    on_mesh((1,), program)


@pytest.mark.parametrize(
    "apart",
    [
        lambda r, mesh: sm.random.manual_seed(r),
        lambda r, mesh: [sm.rand(1, device_mesh=mesh) for _ in range(r)],
    ],
)
def test_check_rng_state_names_ranks_that_differ(apart):
    def program(mesh):
        sm.random.manual_seed(0)
        with collectives() as records:
            sm.random.check_rng_state(mesh)
        assert len(records) <= 1
        apart(mesh.world.rank, mesh)
        sm.random.check_rng_state(mesh)

    text = same_error((2,), program, RuntimeError, silent=False)
    assert "rank 1: seed" in text
    assert "sm.random.manual_seed" in text


def test_parameters_of_random_integers():
    def program(mesh):
        def ends(x):
            return int(x.min()), int(x.max())

        assert ends(sm.randint(3, (900,), mesh, P("a"))) == (0, 2)
        assert ends(sm.randint(-2, 3, (900,), mesh, P("a"), dtype=torch.int8)) == (-2, 2)
        assert ends(sm.randint(3, (900,), device_mesh=mesh, placements=P("a"))) == (0, 2)
        assert ends(sm.randint(low=1, high=3, size=(900,), device_mesh=mesh)) == (1, 2)
        wide = sm.randint(-(2**63), 2**63 - 1, (900,), mesh, P("a"))
        assert wide.full_tensor().unique().numel() == 900
        assert sm.randint(5, (0,), mesh).shape == (0,)
        order = sm.randperm(7, mesh, P("a"), dtype=torch.int32)
        assert order.dtype == torch.int32
        assert sorted(order.tolist()) == list(range(7))
        assert sm.randperm(0, mesh).shape == (0,)
        return order.full_tensor()

    assert all(torch.equal(x, order) for order, *rest in [on_mesh((3,), program)] for x in rest)


def test_moments():
    """Fixed seeds make the test deterministic."""
    n = 40_000

    def program(mesh):
        sm.random.manual_seed(11)
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
        sm.random.manual_seed(2)
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
    """Forward and recomputation drop the same elements: also nested, with draws after the block,
    and twice.
    """

    def block(x, w):
        return F.dropout(F.dropout(x @ w, 0.5).tanh(), 0.3)

    def deep(x, w, run):
        x = F.dropout(x, 0.2)
        return run(block, run(block, x, w), w) + torch.rand_like(x)

    def plain(f, *args):
        return f(*args)

    def checkpointed(f, *args):  # a checkpoint inside another one closes over its sharded arguments
        return checkpoint(lambda: f(*args), use_reentrant=False, context_fn=sm.random.replay_random)

    def gradients(mesh, outer, inner):
        sm.random.manual_seed(4)
        x = place(mesh, torch.ones(6, 5, dtype=torch.float64), Shard(0))
        w = sm.device_put(
            torch.arange(25.0, dtype=torch.float64).view(5, 5) / 25, mesh, spec
        ).requires_grad_()
        y = outer(deep, x, w, inner)
        z = torch.rand_like(x)
        loss = (y * z).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.item(), w.grad.full_tensor(), torch.rand_like(x).full_tensor()

    def program(mesh):
        expected = gradients(mesh, plain, plain)
        for outer, inner in [
            (plain, checkpointed),
            (checkpointed, plain),
            (checkpointed, checkpointed),
        ]:
            loss, grad, after = gradients(mesh, outer, inner)
            assert loss == expected[0]
            assert torch.equal(grad, expected[1])
            assert torch.equal(after, expected[2])

    on_mesh((2,), program)


def test_checkpoint_without_replay_raises():
    def program(mesh):
        x = place(mesh, torch.ones(4, 4), Shard(0), grad=True)
        checkpoint(lambda t: F.dropout(t.sin(), 0.5), x, use_reentrant=False).sum().backward()

    text = same_error((2,), program, RuntimeError)
    assert "context_fn=sm.random.replay_random" in text


@every_rank(2)
def test_sharded_arguments_of_a_nested_checkpoint_raise(mesh):
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
    assert sm.typeof(x.grad) is sm.typeof(x)
    assert x.grad.full_tensor().unique().numel() == 16


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda x: x.normal_(), ["P(None, unreduced={'a'})", "pending", "redistribute it first"]),
        (
            lambda x: x.redistribute(P()).normal_(generator=torch.Generator()),
            ["sm.random.manual_seed"],
        ),
        (lambda x: F.dropout(x, -0.1), ["-0.1", "between 0 and 1"]),
        (lambda x: sm.rand(3, device_mesh=x.mesh, placements=[Partial()]), ["pending"]),
    ],
)
def test_invalid_draws_raise(draw, words):
    text = same_error(
        (2,),
        lambda mesh: draw(sm.from_local(torch.ones(3), mesh, [Partial()])),
        Exception,
        silent=False,
    )
    for word in words:
        assert word in text
