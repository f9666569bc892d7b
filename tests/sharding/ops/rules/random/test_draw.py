"""Draws with a distribution per element, in-place fills, and random activations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place as place_pending
from tests.device import DEVICE
from tests.sharding.ranks import collectives, on_mesh, same_error

F = nn.functional
LAYOUTS = [
    ((3,), P("a")),
    ((3,), P(None, "a")),
    ((2, 2), P("b", "a")),
    ((2, 2), P("b")),
    ((5,), P("a")),
]
WEIGHTS = torch.tensor(
    [[0, 1, 2, 0, 3, 1], [5, 0, 0.5, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 1, 2, 0, 4]],
    dtype=torch.float64,
)

OF_TENSORS = {
    "multinomial": lambda x: torch.multinomial(x, 3),
    "multinomial replaced": lambda x: x.multinomial(20, replacement=True),
    "bernoulli": lambda x: torch.bernoulli(x / 6),
    "poisson": lambda x: torch.poisson(x * 20),
    "binomial": lambda x: torch.binomial(x * 100, x / 5),
    "normal": lambda x: torch.normal(x, x * 2),
    "normal of rows": lambda x: torch.normal(x, x[:1]),
    "normal of an outer sum": lambda x: torch.normal(x[:, :1], x[:1]),
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x, 0.5, hard=True),
    "gumbel_softmax of columns": lambda x: F.gumbel_softmax(x, 2.0, hard=True, dim=0),
}


@pytest.mark.parametrize("name", OF_TENSORS)
def test_the_same_on_any_mesh(name):
    def program(mesh, spec, unreduced=None):
        sm.random.manual_seed(4)
        x = sm.device_put(WEIGHTS, mesh, spec)
        if unreduced:
            x = place_pending(WEIGHTS, mesh, P(*spec.dims, unreduced=unreduced))
        return [OF_TENSORS[name](x).full_tensor() for _ in range(2)]

    (expected,) = on_mesh((1,), lambda mesh: program(mesh, P()))
    for mesh_shape, spec in LAYOUTS:
        for drawn in on_mesh(mesh_shape, lambda mesh, spec=spec: program(mesh, spec)):
            torch.testing.assert_close(
                drawn, expected, rtol=1e-14 if "gumbel" in name else 0, atol=0
            )
    for drawn in on_mesh((2, 2), lambda mesh: program(mesh, P("b"), {"a": "sum"})):
        torch.testing.assert_close(drawn, expected, rtol=1e-14, atol=0)


def test_rows_of_categories_need_no_communication():
    def program(mesh):
        x = sm.device_put(WEIGHTS, mesh, P("a"))
        with collectives() as records:
            for replacement in (False, True):
                drawn = torch.multinomial(x, 3, replacement)
                assert drawn.spec == P("a", None)
                assert drawn.dtype == torch.int64
        assert records == []

    on_mesh((3,), program)


@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
def test_categories_of_weight_zero_are_never_drawn(spec):
    def program(mesh):
        x = sm.device_put(WEIGHTS, mesh, spec)
        many = torch.multinomial(x, 500, True).full_tensor()
        assert bool((WEIGHTS.gather(1, many) > 0).all())
        assert all(
            set(row.tolist()) == set(w.nonzero().flatten().tolist())
            for row, w in zip(many, WEIGHTS, strict=True)
        )
        few = torch.multinomial(x, 3).full_tensor()
        assert bool((WEIGHTS.gather(1, few) > 0).all())
        assert all(row.unique().numel() == 3 for row in few)
        assert torch.multinomial(x[0], 4).shape == (4,)
        assert torch.multinomial(x.bfloat16(), 1).shape == (4, 1)

    on_mesh((3,), program)


GRADIENTS_OF_ZERO = {
    "bernoulli": torch.bernoulli,
    "bernoulli with p": lambda x: x.bernoulli(0.5),
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(torch.ones_like(x), x),
    "normal": lambda x: torch.normal(x, x),
    "fill": lambda x: (x * 2).normal_(),
    "bernoulli_": lambda x: (x * 2).bernoulli_(x.detach()),
}


@pytest.mark.parametrize("name", GRADIENTS_OF_ZERO)
def test_draws_have_zero_gradient_as_in_torch(name):
    """Also where a part is empty."""

    def program(mesh):
        x = sm.full((4, 2), 0.5, mesh, P("a"), requires_grad=True)
        y = GRADIENTS_OF_ZERO[name](x)
        plain = torch.full((4, 2), 0.5, requires_grad=True)
        assert y.requires_grad is GRADIENTS_OF_ZERO[name](plain).requires_grad is True
        y.sum().backward()
        assert not x.grad.full_tensor().any()

    on_mesh((3,), program)


def test_a_leaf_that_requires_grad_cannot_be_filled():
    def program(mesh):
        x = sm.ones(4, device_mesh=mesh, placements=P("a"), requires_grad=True)
        with torch.no_grad():
            x.normal_()
        x.normal_()

    assert "leaf" in same_error((3,), program, RuntimeError)


def test_views_are_filled():
    def program(mesh):
        x = sm.zeros(4, 6, device_mesh=mesh, placements=P("a"))
        x[:, 2:4].fill_(1)
        x[:, :2].uniform_(2, 3)
        whole = x.full_tensor()
        assert bool((whole[:, :2] >= 2).all())
        assert not whole[:, 4:].any()

    on_mesh((2,), program)


def test_out_argument():
    def program(mesh):
        x, out = (sm.full((5,), 0.5, mesh, P("a"), dtype=torch.float64) for _ in range(2))
        for draw in (torch.bernoulli, torch.normal):
            sm.random.manual_seed(2)
            expected = draw(x).full_tensor()
            sm.random.manual_seed(2)
            assert draw(x, out=out) is out
            assert torch.equal(out.full_tensor(), expected)

    on_mesh((2,), program)


DTYPES = {
    "normal_": (
        lambda x: x.normal_(3, 0.5),
        (torch.float64, torch.bfloat16, torch.float16, torch.complex64),
    ),
    "uniform_": (lambda x: x.uniform_(1, 2), (torch.float32, torch.bfloat16, torch.float16)),
    "exponential_": (lambda x: x.exponential_(), (torch.float32, torch.bfloat16, torch.float16)),
    "geometric_": (
        lambda x: x.geometric_(0.5),
        (torch.float32, torch.int64, torch.uint8, torch.bfloat16),
    ),
    "random_": (
        lambda x: x.random_(),
        (torch.int64, torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float32),
    ),
    "random_ to": (lambda x: x.random_(2), (torch.int64, torch.uint8, torch.bool, torch.float16)),
    "bernoulli_": (
        lambda x: x.bernoulli_(0.5),
        (torch.int64, torch.bool, torch.bfloat16, torch.float32),
    ),
    "cauchy_": (lambda x: x.cauchy_(), (torch.float32, torch.bfloat16)),
    "log_normal_": (lambda x: x.log_normal_(), (torch.float32, torch.bfloat16)),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in DTYPES.items() for dtype in dtypes]
)
def test_dtypes(name, dtype):
    """The mean over 3000 elements is near that of torch's own draw, clipped where it has none."""

    def program(mesh):
        sm.random.manual_seed(1)
        x = sm.zeros(3000, device_mesh=mesh, placements=P("a"), dtype=dtype)
        assert DTYPES[name][0](x) is x
        return x.full_tensor()

    ranks = on_mesh((3,), program)
    assert all(torch.equal(x, ranks[0]) for x in ranks)
    torch.manual_seed(0)
    ours, theirs = (
        _clipped(x, name) for x in (ranks[0], DTYPES[name][0](torch.zeros(3000, dtype=dtype)))
    )
    assert ranks[0].dtype == dtype
    spread = float(theirs.std()) / 3000**0.5
    assert abs(float(ours.mean() - theirs.mean())) < 6 * spread


def _clipped(x, name):
    """Return the real parts, clipped to [-100, 100] where torch's distribution has no
    useful mean.
    """
    x = (x.real if x.is_complex() else x).double()
    return x.clamp(-1e2, 1e2) if name in ("cauchy_", "log_normal_") else x


def test_ranks_outside_the_mesh_count_draws():
    """Every kind of draw on a mesh of some ranks; afterwards all ranks still draw the same."""

    def program():
        sm.random.manual_seed(5)
        some = sm.DeviceMesh(DEVICE, [1, 2], axis_names=("x",))
        x = sm.full((4, 3), 0.5, some, P("x"))
        for draw in (*OF_TENSORS.values(), *GRADIENTS_OF_ZERO.values()):
            draw(x)
        for draw in (F.dropout, F.dropout1d, F.alpha_dropout, F.rrelu):
            draw(x, training=True)
            draw(x.clone(), training=True, inplace=True)
        torch.native_dropout(x, 0.5, True)
        (
            x.exponential_().random_(),
            torch.randint_like(x, 5),
            sm.randperm(5, some),
            sm.randint(5, (3,), some, P()),
        )
        return sm.random.get_rng_state()

    states = sm.simulate(4)(program)()
    assert all(torch.equal(state, states[0]) for state in states)


def test_gumbel_softmax_is_a_sample_with_the_gradient_of_the_soft_one():
    weight = torch.linspace(-1, 2, 15, dtype=torch.float64).view(5, 3)

    def sample(mesh, spec, hard):
        sm.random.manual_seed(7)
        x = sm.device_put(weight.cos(), mesh, spec).requires_grad_()
        y = F.gumbel_softmax(x, 0.7, hard)
        (y * sm.device_put(weight, mesh, spec)).sum().backward()
        return y.detach().full_tensor(), x.grad.full_tensor()

    def program(mesh, spec):
        (soft, grad), (one_hot, same_grad) = (sample(mesh, spec, hard) for hard in (False, True))
        torch.testing.assert_close(soft.sum(1), torch.ones(5, dtype=torch.float64))
        torch.testing.assert_close(grad, same_grad)
        torch.testing.assert_close(
            one_hot, F.one_hot(soft.argmax(1), 3).double(), rtol=0, atol=1e-15
        )
        assert bool(grad.any())

    for spec in (P(), P("a"), P(None, "a")):
        on_mesh((3,), lambda mesh, spec=spec: program(mesh, spec))


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda x: torch.multinomial(x, 9), ["9 of 4", "replacement=True"]),
        (lambda x: torch.multinomial(x, 0), ["samples > 0"]),
        (lambda x: torch.multinomial(x - 2, 2), ["at least 0"]),
        (lambda x: torch.multinomial(x * 0, 2), ["too few"]),
        (lambda x: torch.bernoulli(x * 2), ["between 0 and 1"]),
        (lambda x: torch.bernoulli(x.long()), ["int64", "float()"]),
        (lambda x: torch.poisson(-x), ["at least 0"]),
        (lambda x: torch.normal(x, -1.0), ["std"]),
        (lambda x: torch.normal(x, torch.ones(4)), ["distribute_tensor"]),
        (lambda x: torch.binomial(x, x.float()), ["float64", "float32"]),
        (lambda x: x.bernoulli_(torch.ones(4)), ["distribute_tensor"]),
        (lambda x: torch.ones(4).bernoulli_(x), ["distribute_tensor"]),
        (lambda x: x.exponential_(-1), ["rate"]),
        (lambda x: x.geometric_(1.0), ["0 < p < 1"]),
        (lambda x: x.cauchy_(0, 0), ["sigma"]),
        (lambda x: x.random_(3, 3), ["empty"]),
        (lambda x: torch.poisson(x, torch.Generator()), ["sm.random.manual_seed"]),
        (lambda x: torch.bernoulli(x, generator=torch.Generator()), ["sm.random.manual_seed"]),
        (lambda x: torch.multinomial(x, 2, generator=torch.Generator()), ["sm.random.manual_seed"]),
    ],
)
def test_invalid_draws_raise(draw, words):
    def program(mesh):
        draw(sm.ones(4, device_mesh=mesh, placements=P("a"), dtype=torch.float64))

    text = same_error((2,), program, Exception, silent=False)
    for word in words:
        assert word in text
