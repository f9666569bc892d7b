"""Pooling and image operators over sharded batch, channels and space: values, indices, gradients,
bytes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardmesh as sm
from shardmesh import P
from tests.sharding.ranks import collectives, launched, on_mesh, same_error
from tests.tiers import examples

ROWS = P(None, None, "a")


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def put(mesh, tensor, spec=ROWS, grad=True):
    x = sm.distribute_tensor(tensor, mesh, spec, src_data_rank=None)
    return x.requires_grad_() if grad else x


def received(records):
    return sum(record.bytes_received for record in records)


def both(call, x):
    """Return the results of a call and the gradient of x."""
    results = call(x)
    results = list(results) if isinstance(results, tuple) else [results]
    return [*results, *torch.autograd.grad(results[0].square().sum(), x)]


def check(mesh, call, tensor, spec=ROWS):
    for ours, theirs in zip(
        both(call, put(mesh, tensor, spec)),
        both(call, tensor.clone().requires_grad_()),
        strict=True,
    ):
        torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), equal_nan=True)


# -- windows ---------------------------------------------------------------------------------------


@st.composite
def pools(draw):
    length, size = draw(st.integers(1, 13)), draw(st.integers(1, 4))
    size = min(size, length)
    options = {
        "kernel_size": size,
        "stride": draw(st.integers(1, 4)),
        "padding": draw(st.integers(0, size // 2)),
    }
    return length, {**options, "ceil_mode": draw(st.booleans())}


@given(data=st.data(), pool=pools(), ranks=st.sampled_from([2, 3]))
@settings(max_examples=examples(40), deadline=None)
def test_any_window(data, pool, ranks):
    """Values, global indices and gradients, for any sharding of the dim."""
    length, options = pool
    ends = sorted(
        data.draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1))
    )
    bounds = [0, *ends, length]
    sizes = tuple(bounds[i + 1] - bounds[i] for i in range(ranks))
    spec = data.draw(st.sampled_from([ROWS, P(None, None, "a", sizes={"a": sizes})]))
    dilation = data.draw(st.integers(1, 2)) if 2 * (options["kernel_size"] - 1) < length else 1
    include = data.draw(st.booleans())
    x = numbers(2, 1, length)
    # Ties, and what padding must not win over.
    x[0, 0, : length // 2] = data.draw(st.sampled_from([0.5, -torch.inf, torch.nan]))

    def program(mesh):
        check(
            mesh,
            lambda x: F.max_pool1d(x, **options, dilation=dilation, return_indices=True),
            x,
            spec,
        )
        check(
            mesh,
            lambda x: F.avg_pool1d(x, **options, count_include_pad=include),
            x.nan_to_num(0, neginf=0),
            spec,
        )

    on_mesh((ranks,), program)


@pytest.mark.parametrize(
    "spec",
    [
        P(None, None, "a", "b"),
        P(None, None, ("b", "a")),
        P("b", None, None, "a"),
        P(None, "a", "b"),
    ],
)
def test_planes(spec):
    x = numbers(2, 3, 7, 5)

    def program(mesh):
        check(mesh, lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), x, spec)
        check(mesh, lambda x: F.avg_pool2d(x, 3, 2, 1), x, spec)
        check(mesh, lambda x: F.adaptive_avg_pool2d(x, (1, 5)), x, spec)
        check(mesh, lambda x: F.interpolate(x, scale_factor=(1.5, 2)), x, spec)
        check(mesh, lambda x: F.interpolate(x, scale_factor=(1.9, 2)), x, spec)

    on_mesh((2, 2), program)


def test_double_backward():
    x = numbers(2, 3, 7)

    def twice(x):
        pooled = F.avg_pool1d(x, 3, 2, 1, count_include_pad=False) + F.max_pool1d(x, 3, 2, 1)
        (first,) = torch.autograd.grad(pooled.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    on_mesh(
        (3,),
        lambda mesh: torch.testing.assert_close(
            twice(put(mesh, x)).full_tensor(), twice(x.clone().requires_grad_())
        ),
    )


LINEAR = {
    "mean": lambda x: F.avg_pool1d(x, 2, 1, 1),
    "largest": lambda x: F.max_pool1d(x, 2, 1, 1),
    "nearest": lambda x: F.interpolate(x, scale_factor=1.5),
    "mixed": lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"),
    "convolution": lambda x: F.conv1d(x, x.detach(), padding=1),
    "spread": lambda x: F.conv_transpose1d(x, x.detach(), padding=1),
    "folded": lambda x: F.unfold(x[..., None], (1, 1)),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("spec", [ROWS, P("a"), P(None, "a")])
def test_second_gradients_with_empty_parts(name, spec):
    """A rank with an empty part calls the same collectives as the others, although the operator is
    linear.
    """
    x = numbers(2, 2, 2)

    def twice(x):
        (first,) = torch.autograd.grad(LINEAR[name](x).sum() + x.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    on_mesh(
        (4,),
        lambda mesh: torch.testing.assert_close(
            twice(put(mesh, x, spec)).full_tensor(), twice(x.clone().requires_grad_())
        ),
    )


def test_bytes():
    """Windows on one rank need no communication; overlapping ones a row; the global mean
    its sum.
    """
    x, row = numbers(1, 3, 16, 8), 3 * 8 * 8

    def program(mesh):
        counts = []
        for call in (
            lambda x: F.max_pool2d(x, 2),
            lambda x: F.avg_pool2d(x, 3, 1, 1),
            lambda x: F.adaptive_avg_pool2d(x, 8),
            lambda x: F.interpolate(x, scale_factor=2),
            lambda x: F.adaptive_avg_pool2d(x, 1),
        ):
            with collectives() as records:
                call(put(mesh, x))
            counts.append(received(records))
        return counts

    pooled = 2 * 3 * 8 * 3 // 4  # an all_reduce of three numbers among four ranks
    for rank, counts in enumerate(on_mesh((4,), program)):
        assert counts == [0, row * (2 if rank in (1, 2) else 1), 0, 0, pooled]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_of_low_precision_are_rounded_once(dtype):
    x = numbers(1, 2, 12, 9, dtype=dtype)

    def program(mesh):
        for call in (
            lambda x: F.avg_pool2d(x, 3, 2, 1),
            lambda x: F.avg_pool2d(x, 5, 3, 2, count_include_pad=False),
        ):
            ours, exact = call(put(mesh, x)).detach().full_tensor(), dtype is torch.bfloat16
            torch.testing.assert_close(
                ours, call(x), rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7
            )

    on_mesh((3,), program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_interpolation_is_rounded_once(dtype):
    """Positions and weights are torch's own, for a size, a factor, and corners that meet."""
    x = numbers(1, 2, 61, 9, dtype=dtype)
    sizes = [
        {"size": (173, 7)},
        {"scale_factor": (1.37, 2.0)},
        {"size": (100, 20), "align_corners": True},
    ]

    def program(mesh):
        for options in sizes:
            ours = F.interpolate(put(mesh, x), **options, mode="bilinear").detach().full_tensor()
            whole = F.interpolate(x.float(), **options, mode="bilinear").to(dtype)
            torch.testing.assert_close(
                ours, whole, rtol=2**-7 if dtype is torch.bfloat16 else 1e-6, atol=1e-6
            )
            # Sums that lie between two numbers.
            assert dtype is torch.float32 or (ours != whole).float().mean() < 0.01

    on_mesh((3,), program)


# -- windows at random -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        F.fractional_max_pool2d,
        lambda x, *a, **k: F.fractional_max_pool2d(x, *a, **k, return_indices=True)[0],
    ],
)
def test_random_windows_do_not_depend_on_the_mesh(call):
    x = numbers(4, 3, 9, 8)

    def program(mesh):
        pooled = []
        for spec in (P(), P("a"), P(None, "a"), ROWS):
            sm.random.manual_seed(3)
            pooled.append(
                call(put(mesh, x, spec), 2, output_ratio=(0.5, 0.6)).detach().full_tensor()
            )
        assert all(torch.equal(pooled[0], p) for p in pooled)
        sm.random.manual_seed(3)
        assert call(put(mesh, x), 2, output_ratio=(0.7, 0.6)).shape == (4, 3, 6, 4)
        return pooled[0]

    assert all(
        torch.equal(*pair)
        for pair in zip(on_mesh((2,), program), on_mesh((3,), program), strict=False)
    )


# -- errors and modules ----------------------------------------------------------------------------


def test_invalid_arguments_raise_torchs_error():
    assert "Output size is too small" in same_error(
        (2,), lambda mesh: F.max_pool2d(put(mesh, numbers(1, 1, 4, 4)), 7), RuntimeError
    )
    assert same_error(
        (2,), lambda mesh: F.avg_pool2d(put(mesh, numbers(1, 1, 4, 4)), 2, padding=2), RuntimeError
    )
    assert same_error(
        (2,), lambda mesh: F.adaptive_avg_pool2d(put(mesh, numbers(1, 1, 4, 4)), -1), RuntimeError
    )


PLANES = (2, 3, 6, 4)
MODULES = {
    "Flatten": (nn.Flatten(), PLANES),
    "Unflatten": (nn.Unflatten(1, (2, 2)), (2, 4, 6)),
    "ZeroPad2d": (nn.ZeroPad2d((1, 0, 2, 1)), PLANES),
    "ReflectionPad2d": (nn.ReflectionPad2d(1), PLANES),
    "ReplicationPad1d": (nn.ReplicationPad1d(2), (2, 3, 6)),
    "CircularPad2d": (nn.CircularPad2d(1), PLANES),
    "ConstantPad1d": (nn.ConstantPad1d(1, 2.0), (2, 3, 6)),
    "PixelShuffle": (nn.PixelShuffle(2), (2, 8, 3, 4)),
    "PixelUnshuffle": (nn.PixelUnshuffle(2), PLANES),
    "ChannelShuffle": (nn.ChannelShuffle(2), (2, 4, 3, 4)),
    "Upsample": (nn.Upsample(scale_factor=2), PLANES),
    "Upsample bilinear": (nn.Upsample(size=(7, 9), mode="bilinear"), PLANES),
    "UpsamplingNearest2d": (nn.UpsamplingNearest2d(size=(7, 9)), PLANES),
    "Unfold": (nn.Unfold(2, padding=1), PLANES),
    "Fold": (nn.Fold((4, 4), 2), (2, 8, 9)),
    "MaxPool3d": (nn.MaxPool3d(2, 1), (1, 2, 6, 4, 3)),
    "AdaptiveMaxPool2d": (nn.AdaptiveMaxPool2d((3, None)), PLANES),
    "LPPool2d": (nn.LPPool2d(2, 3, 2), PLANES),
    "CosineSimilarity": (lambda x: nn.CosineSimilarity(1)(x, x.roll(1, 0)), (3, 6, 4)),
    "PairwiseDistance": (lambda x: nn.PairwiseDistance()(x, x.roll(1, 0)), (3, 6, 4)),
    "pool and unpool": (
        lambda x: nn.MaxUnpool2d(2)(*nn.MaxPool2d(2, return_indices=True)(x)),
        PLANES,
    ),
    "affine grid": (
        lambda x: F.grid_sample(
            x, F.affine_grid(x[:, :2, :3, 0], x.shape, False), "bilinear", "border", True
        ),
        PLANES,
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    module, shape = MODULES[name]
    x = numbers(*shape)

    def program(mesh):
        for spec in (
            P(),
            P("a"),
            P(None, "a"),
            P(None, None, "a"),
            P("a", None, "b"),
            P(None, "b", unreduced={"a"}),
        ):
            check(mesh, module, x, spec)

    on_mesh((2, 2), program)


def test_bilinear():
    torch.manual_seed(0)
    plain = nn.Bilinear(3, 4, 5, dtype=torch.float64)
    x, y = numbers(6, 3), numbers(6, 4)
    grads = torch.autograd.grad(plain(x, y).square().sum(), [*plain.parameters()])

    def program(mesh):
        torch.manual_seed(0)
        model = nn.Bilinear(3, 4, 5, dtype=torch.float64)
        sm.parallel.shard_parameter(model, "weight", mesh, P("b"))
        model = sm.parallel.distribute_module(model, mesh)
        model(put(mesh, x, P("a")), put(mesh, y, P("a"))).square().sum().backward()
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), grad)

    on_mesh((2, 2), program)


# -- similarities ----------------------------------------------------------------------------------


def test_cosine_similarity_over_sharded_features_only_communicates_sums():
    x, y = numbers(6, 512), numbers(6, 512, seed=1)

    def program(mesh):
        for call in (F.cosine_similarity, F.pairwise_distance):
            with collectives() as records:
                out = call(put(mesh, x, P(None, "a")), put(mesh, y, P(None, "a")))
                torch.testing.assert_close(out.detach().full_tensor(), call(x, y))
            assert set(launched(records)) == {"all_reduce"}
            assert received(records) < 1000

    on_mesh((4,), program)
