"""Dropout of every kind, sharded: against torch's own formula for the same mask, its gradients, and
what it refuses.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place as place_pending
from tests.sharding.ranks import collectives, on_mesh, same_error

F = nn.functional
CHANNELS = {
    "dropout1d": (F.dropout1d, (4, 6, 5)),
    "dropout1d of one": (F.dropout1d, (16, 5)),
    "dropout2d": (F.dropout2d, (4, 6, 2, 3)),
    "dropout3d": (F.dropout3d, (4, 6, 2, 3, 2)),
    "dropout3d of one": (F.dropout3d, (16, 2, 3, 2)),
    "feature_dropout": (lambda x, p, training: torch.feature_dropout(x, p, training), (4, 6, 3)),
    "feature_alpha_dropout": (F.feature_alpha_dropout, (4, 6, 3)),
}
LAYOUTS = [
    ((1,), P()),
    ((3,), P("a")),
    ((3,), P(None, "a")),
    ((2, 2), P("b", "a")),
    ((2, 2), P(("a", "b"))),
    ((5,), P("a")),
]


def whole(shape, func, p=0.4, mesh_shape=(1,), spec=None, backward=False):
    """Return the full results of two calls (or the gradients of their sum) on ones; check that all
    ranks agree without communication.
    """

    def program(mesh):
        sm.random.manual_seed(6)
        x = sm.ones(shape, mesh, spec, dtype=torch.float64, requires_grad=backward)
        with collectives() as records:
            results = [func(x, p, training=True) for _ in range(2)]
        assert records == []
        if backward:
            sum(results).sum().backward()
            return (x.grad.full_tensor(),)
        return tuple(y.full_tensor() for y in results)

    ranks = on_mesh(mesh_shape, program)
    assert all(torch.equal(a, b) for rank in ranks for a, b in zip(rank, ranks[0], strict=True))
    return ranks[0]


@pytest.mark.parametrize("name", CHANNELS)
def test_whole_channels_are_dropped_on_any_mesh(name):
    func, shape = CHANNELS[name]
    channels = 1 if name.endswith("one") else 2
    first, second = whole(shape, func)
    assert not torch.equal(first, second)
    for mesh_shape, spec in LAYOUTS:
        again = whole(shape, func, 0.4, mesh_shape, spec)
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], second)
        assert torch.equal(
            whole(shape, func, 0.4, mesh_shape, spec, True)[0], whole(shape, func, backward=True)[0]
        )
    rows = first.flatten(channels)
    assert torch.equal(rows, rows[..., :1].expand_as(rows))
    assert rows[..., 0].unique().numel() == 2


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("func", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_equals_torch(func, p):
    """The two values that torch gives to what is kept and to what is not, of an input of ones; mean
    and variance stay.
    """
    torch.manual_seed(0)
    theirs = func(torch.ones(40, 40, 2, dtype=torch.float64), p, True).unique()
    ours = whole((40, 40, 2), func, p)[0].unique()
    torch.testing.assert_close(ours, theirs)

    def program(mesh):
        sm.random.manual_seed(1)
        y = func(sm.randn(300, 300, device_mesh=mesh, dtype=torch.float64), p, True).full_tensor()
        return float(y.mean()), float(y.var())

    ((mean, variance),) = on_mesh((1,), program)
    assert abs(mean) < 0.02
    assert abs(variance - 1) < 0.05


@pytest.mark.parametrize("func", [F.dropout, F.alpha_dropout, F.dropout1d, F.rrelu])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("spec", [P("a"), P(None, "a"), P()], ids=str)
def test_first_and_second_derivatives(func, in_place, spec):
    """Derivatives of a weighted sum of f(x**2) are those with a constant mask."""
    whole_x = torch.linspace(-0.9, 1.5, 20, dtype=torch.float64).view(5, 4)
    arguments = {"p": 0.5} if func is not F.rrelu else {}

    def program(mesh):
        def at(value):
            sm.random.manual_seed(5)
            return func(sm.device_put(value, mesh, spec), training=True, **arguments).full_tensor()

        x = sm.device_put(whole_x, mesh, spec).requires_grad_()
        sm.random.manual_seed(5)
        y = func(x * x - 1, training=True, inplace=in_place, **arguments)
        (first,) = torch.autograd.grad((y * y).sum(), [x], create_graph=True)
        first.sum().backward()
        plain = whole_x.clone().requires_grad_()
        value = (whole_x * whole_x - 1).detach()
        once, twice = at(value), at(2 * value)
        slope = (twice - once) / value  # f is linear on either side of zero
        z = slope * (plain * plain - 1) + (once - slope * value)
        (expected,) = torch.autograd.grad((z * z).sum(), [plain], create_graph=True)
        expected.sum().backward()
        torch.testing.assert_close(y.detach().full_tensor(), once)
        torch.testing.assert_close(first.detach().full_tensor(), expected.detach())
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    on_mesh((3,), program)


def test_pending_sums_stay_pending_and_other_pending_values_are_reduced():
    values = torch.arange(1.0, 13, dtype=torch.float64).view(3, 4)

    def program(mesh, kind):
        sm.random.manual_seed(0)
        expected = F.dropout(sm.device_put(values, mesh, P()), 0.5).full_tensor()
        sm.random.manual_seed(0)
        x = place_pending(values, mesh, P(None, "b", unreduced={"a": kind}))
        with collectives() as records:
            y = F.dropout(x, 0.5)
        assert (records == []) == (kind in ("sum", "avg"))
        assert bool(sm.typeof(y).pending) == (kind in ("sum", "avg"))
        torch.testing.assert_close(y.full_tensor(), expected)
        sm.random.manual_seed(0)
        expected = F.alpha_dropout(sm.device_put(values, mesh, P()), 0.5, True).full_tensor()
        sm.random.manual_seed(0)
        torch.testing.assert_close(F.alpha_dropout(x, 0.5, True).full_tensor(), expected)

    for kind in ("sum", "avg", "max"):
        on_mesh((2, 2), lambda mesh, kind=kind: program(mesh, kind))


@pytest.mark.parametrize("func", [F.dropout, F.alpha_dropout, F.dropout1d, F.feature_alpha_dropout])
def test_no_draw_without_dropout(func):
    def program(mesh):
        x = sm.ones(4, 3, device_mesh=mesh, placements=P("a"))
        state = sm.random.get_rng_state()
        assert func(x, 0.5, training=False) is x
        assert func(x, 0.0, training=True) is x
        assert func(x, 0.0, training=True, inplace=True) is x
        empty = sm.ones(0, 3, device_mesh=mesh, placements=P("a"))
        assert func(empty, 0.5, training=True).shape == (0, 3)
        assert torch.equal(sm.random.get_rng_state(), state)
        assert not func(x, 1.0, training=True).full_tensor().any()
        assert not func(x, 1, training=True, inplace=True).full_tensor().any()

    on_mesh((2,), program)


def test_low_precision_keeps_the_mean():
    """The factor 1 / (1 - p) is not rounded to bfloat16 (8 bits) first."""

    def program(mesh):
        x = sm.full((64,), 3.0, mesh, dtype=torch.bfloat16)
        y = F.dropout(x, 0.1).full_tensor()
        assert y.dtype == torch.bfloat16
        assert set(y.unique().tolist()) <= {0.0, torch.tensor(3 / 0.9).bfloat16().item()}

    on_mesh((1,), program)


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.3),
        nn.Dropout1d(0.3),
        nn.AlphaDropout(0.3),
        nn.FeatureAlphaDropout(0.3),
        nn.RReLU(),
    ],
)
def test_modules(module):
    def program(mesh, spec):
        own = copy.deepcopy(module)
        sm.random.manual_seed(3)
        x = sm.randn(4, 6, 5, device_mesh=mesh, placements=spec)
        assert torch.equal(own.eval()(x).full_tensor(), own(x.full_tensor()))
        return own.train()(x).full_tensor()

    (expected,) = on_mesh((1,), lambda mesh: program(mesh, P()))
    for result in on_mesh((2, 2), lambda mesh: program(mesh, P("b", "a"))):
        assert torch.equal(result, expected)


def test_native_dropout_returns_its_mask():
    def program(mesh):
        x = sm.ones(6, 5, device_mesh=mesh, placements=P("a"), dtype=torch.float64)
        y, mask = torch.native_dropout(x, 0.5, True)
        assert mask.dtype == torch.bool
        assert sm.typeof(mask) is sm.typeof(y).replace(dtype=torch.bool)
        assert torch.equal(y.full_tensor(), mask.full_tensor() * 2.0)
        y, mask = torch.native_dropout(x, 0.5, False)
        assert torch.equal(y.full_tensor(), x.full_tensor())
        assert mask.full_tensor().all()

    on_mesh((2,), program)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: F.alpha_dropout(x, 0.5, True, inplace=True),
            ["unreduced", "pending", "out-of-place"],
        ),
        (lambda x: F.dropout(x, 1.5), ["1.5", "between 0 and 1"]),
        (lambda x: F.dropout(F.dropout(x, 0.5), -2.0), ["-2.0", "between 0 and 1"]),
        (lambda x: F.dropout1d(x), ["2D or 3D"]),
        (lambda x: torch.feature_dropout(x, 0.5, True), ["at least 2 dim"]),
        (lambda x: F.dropout(sm.ones(3, device_mesh=x.mesh, dtype=torch.int64)), ["can't be cast"]),
        (lambda x: F.rrelu(x, 0.5, 0.1, True), ["less than or equal"]),
    ],
)
def test_errors(call, words):
    text = same_error(
        (2,), lambda mesh: call(sm.from_local(torch.ones(3), mesh, [sm.Partial()])), Exception
    )
    for word in words:
        assert word in text
