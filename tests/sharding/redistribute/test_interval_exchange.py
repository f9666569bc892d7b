"""Fetching intervals of a sharded dim from the ranks that hold them: values, second gradients, and
exact bytes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.layout.layout import Layout
from shardmesh.sharding.ops.rules.check import place
from shardmesh.sharding.redistribute.interval_exchange import IntervalExchange
from tests.sharding.ranks import collectives, launched, on_mesh
from tests.sharding.strategies import AXES, ragged_specs
from tests.tiers import examples

MESHES = [(2,), (3,), (2, 2), (1, 3), (2, 1, 2)]


def numbers(*shape, dtype=torch.float64):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) / 4 - 2


def intervals_of(seed, length):
    """Return random intervals for each part of a result: of any lengths, none, overlapping,
    repeated.
    """

    def wanted(start, stop):
        generator = torch.Generator().manual_seed(hash((seed, start, stop)) % 2**31)
        count = int(torch.randint(0, 4, (), generator=generator))
        ends = torch.randint(0, length + 1, (count, 2), generator=generator).tolist()
        return [(min(pair), max(pair)) for pair in ends]

    return wanted


def fetched(layout, whole, dim, intervals):
    """Return what a rank must receive: the intervals of its part of the tensor."""
    parts = [whole.narrow(dim, start, stop - start) for start, stop in intervals]
    joined = torch.cat(parts, dim) if parts else whole.narrow(dim, 0, 0)
    box = [slice(None) if d == dim else slice(*interval) for d, interval in enumerate(layout.box)]
    return joined[tuple(box)]


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_intervals_of_any_layout(data):
    """Values, gradients and gradients of gradients are those of slicing the whole; bytes are those
    that others hold.
    """
    mesh_shape = data.draw(st.sampled_from(MESHES))
    shape = data.draw(st.sampled_from([(7,), (5, 4), (0, 3), (4, 3, 2), (12, 1)]))
    dim = data.draw(st.integers(0, len(shape) - 1))
    mesh = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    src_spec = data.draw(ragged_specs(mesh, shape, kinds=()))
    cuts = data.draw(ragged_specs(mesh, (9,), kinds=()))
    assume(
        not set(cuts.axes)
        & {axis for d, axes in enumerate(src_spec.dims) if d != dim for axis in axes}
    )
    whole, wanted = numbers(*shape), intervals_of(data.draw(st.integers(0, 99)), shape[dim])

    def program(mesh):
        src = Layout.of(mesh, src_spec, shape, torch.float64)
        dst = Layout.of(mesh, cuts, (9,), torch.float64)
        fetch = IntervalExchange(src, dst, dim, wanted, 0)
        local = place(whole, mesh, src_spec)._local.requires_grad_()
        plain = whole.clone().requires_grad_()
        with collectives() as records:
            got = fetch(local)
        mine = wanted(*dst.box[0])
        expected = fetched(src, plain, dim, mine)
        assert torch.equal(got, expected)
        check_bytes(records, fetch, src, dim, mine)
        check_gradients(mesh, fetch, (local, plain), (got, expected))

    on_mesh(mesh_shape, program)


def check_bytes(records, fetch, src, dim, mine):
    """Check that no bytes are received if no rank needs any, otherwise exactly those that this rank
    lacks.
    """
    low, high = src.box[dim]
    row = (
        8 * torch.Size(stop - start for d, (start, stop) in enumerate(src.box) if d != dim).numel()
    )
    missing = sum(stop - start - max(0, min(stop, high) - max(start, low)) for start, stop in mine)
    assert launched(records) == (["all_to_all"] if fetch.moves else [])
    assert sum(r.bytes_received for r in records) == missing * row


def check_gradients(mesh, fetch, leaves, results):
    """Check the gradients of sum(fetched**3) and of the sum of its squares: 3x^2 and 36x^3, times
    the number of fetches of x.

    Copies of an element on several ranks share its gradient among them: their sum is what counts.
    """
    (local, plain), (got, expected) = leaves, results
    (grad,) = torch.autograd.grad((got**3).sum(), local, create_graph=True)
    (count,) = torch.autograd.grad(got.sum(), local, retain_graph=True)
    (twice,) = torch.autograd.grad((grad**2).sum(), local)
    (own,) = torch.autograd.grad(expected.sum(), plain)
    spread = torch.zeros_like(own)
    spread[tuple(slice(*interval) for interval in fetch.src.box)] = count
    assert torch.equal(added_up(mesh, fetch, spread), added_up(mesh, fetch, own))
    assert torch.allclose(grad, 3 * local**2 * count)
    assert torch.allclose(twice, 36 * local**3 * count**2)


def added_up(mesh, fetch, own):
    """Return the sum over the ranks that fetch from each other; for a single rank, its value."""
    total = own.clone()
    if fetch.axes:
        mesh.group(fetch.axes).all_reduce(total)
    return total


# -- what moves ------------------------------------------------------------------------------------


def test_local_elements_are_not_received():
    """Held by several ranks (the other axis replicates it), nothing moves."""

    def program(mesh):
        layout = Layout.of(mesh, P("a"), (8, 2))
        fetch = IntervalExchange(
            layout, layout, 0, lambda start, stop: [(start, stop), (start, start + 1)]
        )
        local = torch.randn(layout.local_shape)
        with collectives() as records:
            assert torch.equal(fetch(local), torch.cat([local, local[:1]]))
        assert not records

    on_mesh((2, 2), program)


def test_axis_that_shards_another_dim():
    mesh = sm.AbstractMesh((2, 2), ("a", "b"))
    src = Layout.of(mesh, P("a", "b"), (8, 2))
    with pytest.raises(ValueError, match="'b' splits dim 1"):
        IntervalExchange(src, src.replace(P(("a", "b"))), 0, lambda start, stop: [(start, stop)])


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.int8])
def test_dtypes(dtype):
    whole = numbers(6, 3).to(dtype)

    def program(mesh):
        x = place(whole, mesh, P("a"))
        fetch = IntervalExchange(
            sm.typeof(x), sm.typeof(x), 0, lambda start, stop: [(6 - stop, 6 - start)]
        )
        assert torch.equal(
            fetch(x._local),
            fetched(
                sm.typeof(x), whole, 0, [(6 - sm.typeof(x).box[0][1], 6 - sm.typeof(x).box[0][0])]
            ),
        )

    on_mesh((3,), program)


def test_many_small_gradients_add_up_in_single_precision():
    """Added up in bfloat16, ones stop at 256."""

    def program(mesh):
        layout = Layout.of(mesh, P("a"), (2,), torch.bfloat16)
        fetch = IntervalExchange(layout, layout, 0, lambda start, stop: [(0, 1)] * 300)
        local = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        fetch(local).sum().backward()
        assert local.grad.item() == (600 if mesh.coordinate == (0,) else 0)

    on_mesh((2,), program)


def test_a_part_that_is_not_contiguous_and_a_gradient_that_is_expanded():
    whole = numbers(3, 6)

    def program(mesh):
        layout = Layout.of(mesh, P(None, "a"), (3, 6), torch.float64)
        local = whole.t().contiguous().t()[:, slice(*layout.box[1])].requires_grad_()
        fetch = IntervalExchange(
            layout, layout, 1, lambda start, stop: [((start + 3) % 6, (stop + 2) % 6 + 1)]
        )
        got = fetch(local)
        assert torch.equal(
            got,
            fetched(
                layout, whole, 1, [((layout.box[1][0] + 3) % 6, (layout.box[1][1] + 2) % 6 + 1)]
            ),
        )
        (grad,) = torch.autograd.grad(got.sum(), local)
        assert torch.equal(grad, torch.ones_like(local))

    on_mesh((2,), program)
