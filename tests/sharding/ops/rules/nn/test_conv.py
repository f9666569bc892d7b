"""Convolutions over sharded batch, channels, groups and space: values, gradients, and the bytes of
the halo.
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
from shardmesh.parallel import distribute_module, shard_parameter
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh, same_error
from tests.tiers import examples

ROW = 3 * 8 * 8  # bytes of one row of one image of 3 channels, 8 wide, in float64


def numbers(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def put(mesh, tensor, spec=P(), grad=True):
    x = sm.distribute_tensor(tensor, mesh, spec, src_data_rank=None)
    return x.requires_grad_() if grad else x


def received(records):
    return sum(record.bytes_received for record in records)


# -- the halo --------------------------------------------------------------------------------------


def halo(kernel, rows=16, **options):
    """Return the bytes received by each of four ranks, forward and backward, for an image sharded
    by rows.
    """
    x, w = numbers(1, 3, rows, 8), numbers(4, 3, kernel, 3, seed=1)

    def program(mesh):
        image, weight = put(mesh, x, P(None, None, "a")), put(mesh, w)
        with collectives() as forward:
            out = F.conv2d(image, weight, **options)
        torch.testing.assert_close(out.detach().full_tensor(), F.conv2d(x, w, **options))
        with collectives() as backward:
            torch.autograd.grad(
                out, image, put(mesh, torch.ones_like(F.conv2d(x, w, **options)), out.spec, False)
            )
        assert set(launched(forward)) | set(launched(backward)) <= {"all_to_all"}
        return received(forward), received(backward)

    return on_mesh((4,), program)


def test_each_rank_receives_exactly_its_halo():
    """One row from either side; in backward, the same rows back."""
    assert [forward for forward, _ in halo(3, padding=1)] == [ROW, 2 * ROW, 2 * ROW, ROW]
    assert [backward for _, backward in halo(3, padding=1)] == [ROW, 2 * ROW, 2 * ROW, ROW]


def test_only_needed_rows_are_received():
    assert [forward for forward, _ in halo(3, padding=1, stride=2)] == [0, ROW, ROW, ROW]
    assert [forward for forward, _ in halo(3, padding=2, dilation=(2, 1))] == [
        2 * ROW,
        4 * ROW,
        4 * ROW,
        2 * ROW,
    ]
    assert [forward for forward, _ in halo(5, padding="same")] == [
        2 * ROW,
        4 * ROW,
        4 * ROW,
        2 * ROW,
    ]


def test_patches_on_one_rank_need_no_communication():
    """The embedding of a vision transformer."""
    assert halo(4, stride=4) == [(0, 0)] * 4


def test_halo_of_a_transposed_convolution():
    x, w = numbers(1, 3, 8, 8), numbers(3, 3, 4, 4, seed=1)

    def program(mesh):
        image = put(mesh, x, P(None, None, "a"))
        with collectives() as records:
            out = F.conv_transpose2d(image, put(mesh, w), stride=2, padding=1)
        torch.testing.assert_close(
            out.detach().full_tensor(), F.conv_transpose2d(x, w, stride=2, padding=1)
        )
        return received(records)

    assert on_mesh((4,), program) == [ROW, 2 * ROW, 2 * ROW, ROW]


# -- without communication -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "groups", "specs", "result"),
    [
        ([(4, 6, 5, 5), (8, 6, 3, 3)], 1, [P("a"), P(), P()], P("a")),
        ([(4, 6, 5, 5), (8, 6, 3, 3)], 1, [P(), P("a"), P("a")], P(None, "a")),
        ([(4, 6, 5, 5), (8, 6, 3, 3)], 1, [P(None, "a"), P(None, "a"), P()], P(unreduced={"a"})),
        ([(4, 6, 5, 5), (8, 6, 3, 3)], 1, [P(unreduced={"a"}), P(), P()], P(unreduced={"a"})),
        ([(4, 6, 5, 5), (8, 6, 3, 3)], 1, [P("a"), P("b"), P("b")], P("a", "b")),
        ([(4, 8, 5, 5), (8, 2, 3, 3)], 4, [P(None, "a"), P("a"), P("a")], P(None, "a")),
        (
            [(4, 8, 5, 5), (8, 1, 3, 3)],
            8,
            [P(None, ("a", "b")), P(("a", "b")), P(("a", "b"))],
            P(None, ("a", "b")),
        ),
    ],
)
def test_batch_channels_and_groups(shapes, groups, specs, result):
    x, w, b = numbers(*shapes[0]), numbers(*shapes[1], seed=1), numbers(shapes[1][0], seed=2)

    def program(mesh):
        operands = [put(mesh, t, spec) for t, spec in zip((x, w, b), specs, strict=True)]
        with collectives() as records:
            out = F.conv2d(*operands, padding=1, groups=groups)
        assert launched(records) == []
        assert out.spec == result.padded(4)
        torch.testing.assert_close(
            out.detach().full_tensor(), F.conv2d(x, w, b, padding=1, groups=groups)
        )

    on_mesh((2, 2), program)


# -- any window, however the dim is cut ------------------------------------------------------------


@st.composite
def windows(draw):
    length = draw(st.integers(1, 13))
    size = draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 3))
    stride, padding = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    if dilation * (size - 1) + 1 > length + 2 * padding:
        padding = dilation * size
    return length, {"stride": stride, "padding": padding, "dilation": dilation}, size


@st.composite
def cuts(draw, length, ranks):
    """Draw even parts, or parts of any sizes."""
    if draw(st.booleans()):
        return P(None, None, "a")
    ends = sorted(draw(st.lists(st.integers(0, length), min_size=ranks - 1, max_size=ranks - 1)))
    bounds = [0, *ends, length]
    return P(None, None, "a", sizes={"a": tuple(bounds[i + 1] - bounds[i] for i in range(ranks))})


def check_twice(mesh, call, tensors, specs):
    """Check that values, gradients and gradients of gradients equal those of one process."""

    def twice(*leaves):
        out = call(*leaves)
        firsts = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return out, *firsts, *torch.autograd.grad(sum(g.square().sum() for g in firsts), leaves)

    expected = twice(*[t.clone().requires_grad_() for t in tensors])
    made = twice(*[put(mesh, t, spec) for t, spec in zip(tensors, specs, strict=True)])
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(
            ours.detach().full_tensor(), theirs.detach(), rtol=1e-9, atol=1e-9
        )


@given(data=st.data(), window=windows(), transposed=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_sharded_space_equals_one_process(data, window, transposed):
    length, options, size = window
    if transposed:
        options["output_padding"] = data.draw(
            st.integers(0, max(options["stride"], options["dilation"]) - 1)
        )
        grown = (
            (length - 1) * options["stride"]
            + options["dilation"] * (size - 1)
            + 1
            + options["output_padding"]
        )
        options["padding"] = min(options["padding"], (grown - 1) // 2)
    ranks = data.draw(st.sampled_from([2, 3]))
    spec = data.draw(cuts(length, ranks))
    func, shape = (F.conv_transpose1d, (2, 3, size)) if transposed else (F.conv1d, (3, 2, size))
    tensors = [numbers(1, 2, length), numbers(*shape, seed=1), numbers(3, seed=2)]
    on_mesh(
        (ranks,),
        lambda mesh: check_twice(
            mesh, lambda x, w, b: func(x, w, b, **options), tensors, [spec, P(), P()]
        ),
    )


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "specs",
    [
        [P(None, None, "a", "b"), P(), P()],
        [P(None, None, ("b", "a")), P(), P()],
        [P("a", None, "b"), P(), P()],
        [P(None, None, "a"), P("b"), P("b")],
        [P(None, "b", "a"), P(None, "b"), P()],
        [P(None, None, None, "b", unreduced={"a"}), P(), P()],
        [P(None, None, "a"), P("a"), P("a")],
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_space_sharded_with_other_dims(specs, transposed):
    func = F.conv_transpose2d if transposed else F.conv2d
    tensors = [numbers(2, 4, 5, 3), numbers(4, 4, 3, 2, seed=1), numbers(4, seed=2)]
    on_mesh(
        (2, 2),
        lambda mesh: check_twice(
            mesh, lambda x, w, b: func(x, w, b, (2, 1), (1, 0)), tensors, specs
        ),
    )


# -- other tensors ---------------------------------------------------------------------------------


def test_bfloat16_and_memory_formats():
    x, w = numbers(2, 3, 8, 5).to(memory_format=torch.channels_last), numbers(4, 3, 3, 3, seed=1)
    low, low_w = x.bfloat16(), w.bfloat16()

    def program(mesh):
        out = F.conv2d(put(mesh, x, P(None, None, "a")), put(mesh, w), padding=1)
        torch.testing.assert_close(out.detach().full_tensor(), F.conv2d(x, w, padding=1))
        out = F.conv2d(put(mesh, low, P(None, None, "a")), put(mesh, low_w), padding=1)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.detach().full_tensor(), F.conv2d(low, low_w, padding=1))

    on_mesh((3,), program)


def test_invalid_shapes_raise_before_communication():
    def program(mesh):
        F.conv2d(put(mesh, numbers(2, 3, 8, 8), P(None, None, "a")), put(mesh, numbers(4, 2, 3, 3)))

    assert "channel" in same_error((2,), program, RuntimeError)


def test_autocast_with_an_empty_part():
    """Every rank has the result in the same dtype, one without rows too."""

    def program(mesh):
        x = put(mesh, numbers(1, 2, 2, dtype=torch.float32), P(None, None, "a"))
        w = put(mesh, numbers(2, 2, 1, dtype=torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.conv1d(x, w).dtype

    assert on_mesh((3,), program) == [torch.bfloat16] * 3


# -- modules ---------------------------------------------------------------------------------------


def network(padding_mode):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode=padding_mode, dtype=torch.float64),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2, dtype=torch.float64),
        nn.ConvTranspose2d(8, 4, 2, 2, dtype=torch.float64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3, dtype=torch.float64),
    )


def split_channels(name, module, mesh):
    if name in ("0", "2"):
        shard_parameter(module, "weight", mesh, P("b"))
        shard_parameter(module, "bias", mesh, P("b"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("spec", [P("a"), P(None, None, "a"), P("b", None, None, "a")])
def test_a_training_step(padding_mode, spec):
    x = numbers(3, 3, 9, 8)
    plain = network(padding_mode)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss = plain(x).square().mean()
    loss.backward()
    optimizer.step()

    def program(mesh):
        model = distribute_module(network(padding_mode), mesh, split_channels)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ours = model(put(mesh, x, spec, False)).square().mean()
        torch.testing.assert_close(ours.detach().full_tensor(), loss.detach())
        ours.backward()
        optimizer.step()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach())

    on_mesh((2, 2), program)


# -- several meshes --------------------------------------------------------------------------------


def two_stages():
    """Split space on ranks 0 and 1, then on 1, 2 and 3: every rank walks through both, whether it
    holds a part or not.
    """
    one, two = (sm.DeviceMesh(DEVICE, ranks, axis_names=("a",)) for ranks in ([0, 1], [3, 1, 2]))
    tensors = [numbers(2, 2, 8, 3), numbers(3, 2, 3, 3, seed=1), numbers(3, 2, 2, 2, seed=2)]

    def run(x, w, v, move=lambda x: x):
        x = F.max_pool2d(F.conv2d(x, w, padding=1), (2, 1), return_indices=True)[0]
        x = F.interpolate(F.avg_pool2d(x, (3, 1), 1, (1, 0)), scale_factor=2)
        return F.adaptive_avg_pool2d(F.conv_transpose2d(move(x), v, stride=2), 1).square().sum()

    plain = [t.clone().requires_grad_() for t in tensors]
    run(*plain).backward()
    specs = [(one, P(None, None, "a")), (one, P()), (two, P("a"))]
    leaves = [put(mesh, t, spec) for t, (mesh, spec) in zip(tensors, specs, strict=True)]
    run(*leaves, lambda x: x.redistribute(two, P(None, None, "a"))).backward()
    for leaf, expected in zip(leaves, plain, strict=True):
        if leaf.mesh.coordinate is not None:
            torch.testing.assert_close(leaf.grad.full_tensor(), expected.grad)


def test_two_meshes():
    sm.simulate(4)(two_stages)()


def test_two_meshes_of_processes(world4):
    world4(two_stages)


def test_part_with_only_padding():
    """9 results of 1 element and 4 of padding on either side: the first and the last rank's 3 see
    no element.
    """
    random = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(shape, generator=random, dtype=torch.float64)
        for shape in ((1, 2, 1), (3, 2, 1), (3,))
    ]
    specs = [P(None, None, "a"), P(), P()]
    on_mesh(
        (3,),
        lambda mesh: check_twice(
            mesh, lambda x, w, b: F.conv1d(x, w, b, padding=4), tensors, specs
        ),
    )
