"""redistribute with its options, and redistribute_many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.redistribute.autograd import redistribute_local, redistribute_locals
from shardmesh.sharding.redistribute.plan.traffic import plan_bytes_received
from tests.device import DEVICE
from tests.sharding import reference
from tests.sharding.ranks import AXES, collectives, every_rank, launched, on_mesh, same_error
from tests.sharding.strategies import mesh_shapes, ragged_specs, shapes, specs
from tests.tiers import examples

X = torch.arange(48, dtype=torch.float64).view(6, 8)
KINDS = ("sum", "max", "product")


def numbers(*shape, dtype=torch.float64):
    """Return numbers that are the same on every rank."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def place(mesh, spec, tensor=X):
    return sm.distribute_tensor(tensor, mesh, spec, src_data_rank=None)


# -- several at once -------------------------------------------------------------------------------


@st.composite
def lists(draw: st.DrawFn, kinds=("sum",)):
    """Draw a mesh shape and some (shape, spec, spec)."""
    mesh_shape = draw(mesh_shapes)
    mesh = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    found = []
    for _ in range(draw(st.integers(1, 5))):
        shape = draw(shapes())
        make = draw(
            st.sampled_from(
                [
                    lambda s: specs(mesh.axis_names, len(s), kinds),
                    lambda s: ragged_specs(mesh, s, kinds),
                ]
            )
        )
        found.append((shape, draw(make(shape)), draw(make(shape))))
    return mesh_shape, found


def layouts(mesh, moves):
    return [
        tuple(sm.Layout.of(mesh, spec, shape, torch.float64) for spec in (a, b))
        for shape, a, b in moves
    ]


@given(lists(KINDS))
@settings(max_examples=examples(200))
def test_many_equal_single_redistributions(case):
    mesh_shape, moves = case

    def program(mesh):
        pairs = layouts(mesh, moves)
        parts = [
            reference.local_part(reference.contributions(mesh, src.spec, src.shape, i), src)
            for i, (src, _) in enumerate(pairs)
        ]
        kept = [part.clone() for part in parts]
        alone = [redistribute_local(part, *pair) for part, pair in zip(parts, pairs, strict=True)]
        with collectives() as records:
            together = redistribute_locals(parts, pairs)
        for (_, dst), one, other in zip(pairs, alone, together, strict=True):
            whole = [redistribute_local(x, dst, dst.replicated) for x in (one, other)]
            assert other.shape == dst.local_shape
            torch.testing.assert_close(*whole, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(parts, kept, strict=True))
        expected = sum(plan_bytes_received(sm.debug.plan(*pair), mesh.coordinate) for pair in pairs)
        rounding = 2 * len(records)  # of 2(n-1)/n of an all_reduce
        assert abs(sum(r.bytes_received for r in records) - expected) <= rounding + 8 * len(pairs)

    on_mesh(mesh_shape, program)


@given(lists(), st.data())
@settings(max_examples=examples(150))
def test_gradients_of_many(case, data):
    mesh_shape, moves = case
    used = [data.draw(st.booleans()) for _ in moves]

    def program(mesh):
        pairs = layouts(mesh, moves)
        leaves = [
            reference.local_part(
                reference.contributions(mesh, src.spec, src.shape, i), src
            ).requires_grad_()
            for i, (src, _) in enumerate(pairs)
        ]
        out = redistribute_locals(leaves, pairs)
        picked = [i for i, use in enumerate(used) if use]
        if not picked:
            return
        weights = {
            i: torch.randn(
                pairs[i][0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(i)
            )
            for i in picked
        }
        seeds = [
            redistribute_local(weights[i], pairs[i][1].replicated, pairs[i][1].dual) for i in picked
        ]
        found = torch.autograd.grad([out[i] for i in picked], [leaves[i] for i in picked], seeds)
        for i, grad in zip(picked, found, strict=True):
            dual = pairs[i][0].dual
            torch.testing.assert_close(
                redistribute_local(grad, dual, dual.replicated), weights[i], rtol=1e-12, atol=1e-12
            )

    on_mesh(mesh_shape, program)


@every_rank(2, 2)
def test_one_launch_for_a_bucket(mesh):
    shards = [place(mesh, P("a"), numbers(2 * n, 3)) for n in range(1, 5)] + [
        place(mesh, P(None, "a"), numbers(3, 2))
    ]
    others = [place(mesh, P("b"), numbers(4, 3)), place(mesh, P("a"), numbers(4, 3).bfloat16())]
    with collectives() as records:
        whole = sm.redistribute_many([*shards, *others], [P()] * 7)
    assert launched(records) == ["all_gather"] * 3  # over a, over b, over a in another dtype
    assert all(
        w.is_fully_replicated
        if hasattr(w, "is_fully_replicated")
        else sm.typeof(w).is_fully_replicated
        for w in whole
    )
    with collectives() as records:
        back = sm.redistribute_many(whole, [x.spec for x in (*shards, *others)])
    assert not records
    assert all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(back, (*shards, *others), strict=True)
    )


@every_rank(2, 2)
def test_gradients_are_moved_in_one_bucket(mesh):
    shards = [place(mesh, P("a"), numbers(4, n)).requires_grad_() for n in (1, 2, 3)]
    whole = sm.redistribute_many(shards, [P()] * 3)
    loss = sum((w * w).sum() for w in whole)
    with collectives() as records:
        loss.backward()
    assert launched(records).count("reduce_scatter") == 1
    assert all(torch.equal(x.grad.full_tensor(), 2 * x.detach().full_tensor()) for x in shards)


@every_rank(2, 2)
def test_results_of_a_bucket_can_be_written_independently(mesh):
    """Not views of one tensor for autograd: writing one leaves what was saved of another valid."""
    x, y = sm.redistribute_many(
        [place(mesh, P(unreduced={"a"})), place(mesh, P(unreduced={"a"}))], [P(), P()]
    )
    w = place(mesh, P(), torch.ones(6, 8, dtype=torch.float64)).requires_grad_()
    saved = (w * x).sum()
    y.mul_(3)
    saved.backward()
    assert torch.equal(w.grad.full_tensor(), X)
    assert torch.equal(y.full_tensor(), 3 * X)


def test_different_numbers_of_specs_raise():
    text = same_error(
        (2,), lambda mesh: sm.redistribute_many([place(mesh, P("a"))], []), ValueError
    )
    assert "1 tensors and 0 placements" in text


@every_rank(2)
def test_empty_list(mesh):
    assert sm.redistribute_many([], []) == []


# -- under way -------------------------------------------------------------------------------------


@every_rank(2, 2)
def test_async(mesh):
    x = place(mesh, P("a", "b")).requires_grad_()
    coming = [
        x.redistribute(spec, async_op=True)
        for spec in (P(), P("b", "a"), P("a", "b"), P(None, "a"))
    ]
    for handle in reversed(coming):  # in any order
        y = handle.wait()
        assert handle.wait() is y
        assert torch.equal(y.full_tensor(), X)
    (coming[1].wait() * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 2))
    several = sm.redistribute_many([x, x], [P(), P("b", "a")], async_op=True)
    assert all(torch.equal(y.full_tensor(), X) for y in several.wait())


@every_rank(4)
def test_async_of_every_kind_of_pending(mesh):
    for kind in ("sum", "avg", "max", "min", "product"):
        x = sm.ShardedTensor.from_local(
            torch.ones(8), mesh, P(unreduced={"a": kind})
        ).requires_grad_()
        y = x.redistribute(P("a"), async_op=True).wait()
        assert torch.equal(
            y.full_tensor().detach(), torch.full((8,), 4.0 if kind == "sum" else 1.0)
        )


def async_program():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    torch.manual_seed(0)
    t = torch.randn(37, 5)
    x = sm.distribute_tensor(t, mesh, P("a", "b"))
    for dtype in (torch.float32, torch.bfloat16):
        handles = [
            x.redistribute(spec, async_op=True, forward_dtype=dtype)
            for spec in (P(), P(("b", "a")), P("b"))
        ]
        for handle in reversed(handles):
            assert torch.equal(handle.wait().full_tensor(), t.to(dtype))
    many = sm.redistribute_many([x, x.redistribute(P("b"))], [P(), P("a")], async_op=True)
    return all(torch.equal(y.full_tensor(), t) for y in many.wait())


def test_async_between_processes(world4):
    assert all(world4(async_program))


# -- in place --------------------------------------------------------------------------------------


@every_rank(2, 2)
def test_donated_tensor_cannot_be_used(mesh):
    for src, dst in (
        (P("a"), P()),
        (P(unreduced={"a"}), P()),
        (P(unreduced={"a"}), P("a")),
        (P(), P("a")),
        (P("a", "b"), P("b", "a")),
    ):
        x = place(mesh, src)
        y = x.redistribute(dst, donate=True)
        assert torch.equal(y.full_tensor(), X)
        assert "donated" in repr(x)
        for use in (
            lambda x=x: x + 1,
            lambda x=x: x.shape,
            lambda x=x: x.to_local(),
            lambda x=x: sm.redistribute(x, P()),
        ):
            with pytest.raises((RuntimeError, AttributeError)):
                use()


@every_rank(4)
def test_reductions_of_donated_memory_are_in_place(mesh):
    local = torch.ones(8, 3)
    x = sm.ShardedTensor.from_local(local, mesh, P(unreduced={"a"}))
    y = x.redistribute(P(), donate=True)
    assert y.to_local().data_ptr() == local.data_ptr()
    local = torch.ones(8, 3)
    x = sm.ShardedTensor.from_local(local, mesh, P(unreduced={"a"}))
    y = x.redistribute(P("a"), donate=True)
    rank = mesh.get_local_rank("a")
    assert y.to_local().data_ptr() == local[2 * rank].data_ptr()
    assert torch.equal(y.full_tensor(), torch.full((8, 3), 4.0))


@every_rank(4)
def test_a_part_that_is_a_view_of_the_output_is_gathered_in_place(mesh):
    whole = torch.zeros(8, 3)
    rank = mesh.get_local_rank("a")
    part = whole[2 * rank : 2 * rank + 2]
    part.copy_(torch.arange(24.0).view(8, 3)[2 * rank : 2 * rank + 2])
    x = sm.ShardedTensor.from_local(part, mesh, P("a"), shape=(8, 3))
    out = sm.ShardedTensor.from_local(whole, mesh, P())
    assert x.redistribute(P(), out=out) is out
    assert out.to_local().data_ptr() == whole.data_ptr()
    assert torch.equal(whole, torch.arange(24.0).view(8, 3))


@given(st.sampled_from([(4,), (2, 2), (3,)]), st.data())
@settings(max_examples=examples(100))
def test_into_a_given_tensor(mesh_shape, data):
    names = AXES[: len(mesh_shape)]
    before, after = (data.draw(specs(names, 2)) for _ in range(2))

    def program(mesh):
        x = place(mesh, before)
        out = x.redistribute(after).clone()
        out.to_local().fill_(-1)
        assert x.redistribute(after, out=out) is out
        assert torch.equal(out.full_tensor(), X)
        assert torch.equal(x.full_tensor(), X)

    on_mesh(mesh_shape, program)


def test_invalid_donate_and_out_raise():
    def donated(mesh):
        place(mesh, P("a")).requires_grad_().redistribute(P(), donate=True)

    def other_layout(mesh):
        place(mesh, P("a")).redistribute(P(), out=place(mesh, P("a")))

    def with_grad(mesh):
        place(mesh, P("a")).requires_grad_().redistribute(P(), out=place(mesh, P()))

    def twice(mesh):
        x = place(mesh, P("a"))
        sm.redistribute_many([x, x], [P(), P()], donate=True)

    for program, words in (
        (donated, "cannot be donated"),
        (other_layout, "out is"),
        (with_grad, "autograd"),
        (twice, "twice"),
    ):
        assert words in same_error((2,), program, ValueError)


# -- in rounds -------------------------------------------------------------------------------------


@every_rank(2, 2)
def test_rounds(mesh):
    x, dst = place(mesh, P("a", "b")), P(("b", "a"))
    one, limit = sm.debug.explain(sm.typeof(x), dst), 300
    explained = sm.debug.explain(sm.typeof(x), dst, max_bytes=limit)
    assert one.peak_bytes > limit >= explained.peak_bytes
    assert explained.launches > 1
    with collectives() as records:
        y = x.redistribute(dst, max_bytes=limit)
    assert len(records) == explained.launches
    assert sum(r.bytes_received for r in records) == plan_bytes_received(
        explained.plan, mesh.coordinate
    )
    assert torch.equal(y.full_tensor(), X)


def test_a_limit_is_a_number_of_bytes():
    for limit in ("1GB", 1e9, True):
        text = same_error(
            (2,),
            lambda mesh, limit=limit: place(mesh, P("a")).redistribute(P(), max_bytes=limit),
            TypeError,
        )
        assert "number of bytes" in text
    assert "pass max_bytes=" in same_error(
        (2,), lambda mesh: place(mesh, P("a")).redistribute(P(), max_bytes=0), ValueError
    )


def test_impossible_limit_names_the_minimum():
    def program(mesh):
        place(mesh, P("a")).redistribute(P(None, "a"), max_bytes=100)

    text = same_error((4,), program, ValueError)
    least = int(text.rpartition("max_bytes=")[2].split()[0])
    src = sm.Layout.of(sm.AbstractMesh((4,), ("a",)), P("a"), X.shape, X.dtype)
    assert sm.debug.explain(src, P(None, "a"), max_bytes=least).peak_bytes <= least
    with pytest.raises(ValueError, match="pass max_bytes"):
        sm.debug.explain(src, P(None, "a"), max_bytes=least - 1)


# -- sums of 16-bit floats -------------------------------------------------------------------------


@every_rank(8)
def test_sums_of_16_bit_floats_in_fp32(mesh):
    """256 and seven ones: in bf16, 256 + 1 is 256."""
    mine = 256.0 if mesh.get_local_rank("a") == 0 else 1.0
    x = sm.ShardedTensor.from_local(
        torch.full((8, 2), mine, dtype=torch.bfloat16), mesh, P(unreduced={"a"})
    )
    for spec in (P(), P("a"), P(None, "a")):
        with collectives() as records:
            y = x.redistribute(spec, accumulate_dtype=torch.float32)
        assert torch.equal(y.full_tensor(), torch.full((8, 2), 264.0, dtype=torch.bfloat16))
        assert {record.dtype for record in records} == {torch.bfloat16}
        assert launched(records)[0] == "all_to_all"
        explained = sm.debug.explain(sm.typeof(x), spec, accumulate_dtype=torch.float32)
        assert sum(r.bytes_received for r in records) == plan_bytes_received(
            explained.plan, mesh.coordinate
        )


def test_accumulating_in_another_dtype():
    def program(mesh):
        place(mesh, P(unreduced={"a"})).redistribute(P(), accumulate_dtype=torch.float64)

    assert "torch.float32" in same_error((2,), program, ValueError)
