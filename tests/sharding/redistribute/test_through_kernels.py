"""Redistribution with kernels instead of torch operations: equal results, and one launch where
torch needs many.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.kernels.backend import using_kernels
from shardmesh.sharding.redistribute.autograd import redistribute_local, redistribute_locals
from tests.sharding import reference
from tests.sharding.ranks import every_rank, on_mesh
from tests.sharding.tensor.test_redistribute import layouts, lists

# inf - inf in the interpreter's numpy.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:triton")
KINDS = ("sum", "max")


@pytest.fixture
def launches(monkeypatch):
    """The kernels that ran, by name."""
    from shardmesh.kernels import quantize_triton, strided_triton

    ran = []

    def count_calls(module, name):
        run = getattr(module, name)

        def counting(*args, **kwargs):
            ran.append(name)
            return run(*args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    count_calls(strided_triton, "launch")
    count_calls(quantize_triton, "launch_quantize")
    count_calls(quantize_triton, "launch_dequantize")
    return ran


@given(lists(KINDS), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(max_examples=25)
def test_equal_to_torch(case, dtype):
    mesh_shape, moves = case

    def program(mesh):
        pairs = [
            tuple(layout.replace(dtype=dtype) for layout in pair) for pair in layouts(mesh, moves)
        ]
        parts = [
            reference.local_part(reference.contributions(mesh, src.spec, src.shape, i), src)
            for i, (src, _) in enumerate(pairs)
        ]
        with using_kernels():  # float64 parts: cast as they are packed
            together = redistribute_locals(parts, pairs)
            alone = [
                redistribute_local(part, *pair) for part, pair in zip(parts, pairs, strict=True)
            ]
        with using_kernels(False):
            expected = [
                redistribute_local(part, *pair) for part, pair in zip(parts, pairs, strict=True)
            ]
        for one, other, wanted in zip(together, alone, expected, strict=True):
            assert one.dtype == other.dtype == wanted.dtype == dtype
            torch.testing.assert_close(
                one,
                wanted,
                rtol=1e-6 if dtype.itemsize > 2 else 2e-2,
                atol=1e-6 if dtype.itemsize > 2 else 2e-2,
            )
            torch.testing.assert_close(
                other,
                wanted,
                rtol=1e-6 if dtype.itemsize > 2 else 2e-2,
                atol=1e-6 if dtype.itemsize > 2 else 2e-2,
            )

    on_mesh(mesh_shape, program)


def count(ran, mesh_shape, program):
    """Return the launches of one rank; all ranks of a simulated mesh run the same."""

    def rank(mesh):
        with using_kernels():
            program(mesh)

    ran.clear()
    on_mesh(mesh_shape, rank)
    ranks = torch.tensor(mesh_shape).prod().item()
    assert len(ran) % ranks == 0
    return len(ran) // ranks


def place(mesh, spec, shape=(8, 6), dtype=torch.float32):
    return sm.distribute_tensor(
        torch.arange(shape[0] * shape[1]).view(shape).to(dtype), mesh, spec, src_data_rank=None
    )


def test_launches(launches):
    def move(src, dst, shape=(8, 6), **options):
        return lambda mesh: place(mesh, src, shape).redistribute(dst, **options)

    assert count(launches, (4,), move(P("a"), P())) == 0  # arrives where it belongs
    assert count(launches, (2,), move(P(None, "a"), P())) == 1  # unpacked
    # Cast alone, by torch, as nothing is packed.
    assert count(launches, (2,), move(P(None, "a"), P(), forward_dtype=torch.bfloat16)) == 1
    assert count(launches, (2,), move(P(unreduced={"a"}), P(None, "a"))) == 1  # packed
    # And cast.
    assert (
        count(launches, (2,), move(P(unreduced={"a"}), P(None, "a"), forward_dtype=torch.bfloat16))
        == 1
    )
    # And scaled.
    assert (
        count(
            launches,
            (2,),
            move(P(unreduced={"a": "avg"}), P(None, "a"), forward_dtype=torch.bfloat16),
        )
        == 1
    )
    # Uneven: packed, and added up on arrival.
    assert count(launches, (4,), move(P(unreduced={"a"}), P(None, "a"), (8, 118))) == 2
    # Quantized, and back.
    assert count(launches, (2,), move(P("a"), P(None, "a"), transport="int8")) == 2


def test_one_launch_for_a_bucket(launches):
    def program(mesh):
        shards = [place(mesh, P(None, "a"), (n, 64)) for n in range(1, 7)]
        sm.redistribute_many(shards, [P()] * len(shards))

    assert count(launches, (2,), program) == 1

    def backward(mesh):
        shards = [place(mesh, P(None, "a"), (n, 64)).requires_grad_() for n in range(1, 7)]
        whole = sm.redistribute_many(shards, [P()] * len(shards))
        sum((w * w).sum() for w in whole).backward()

    # What was gathered is unpacked, the gradients are packed.
    assert count(launches, (2,), backward) == 2


@every_rank(2)
def test_a_bucket_of_several_dtypes(mesh):
    """Cast to one as they are packed."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    xs = [place(mesh, P(unreduced={"a": "sum"}), (4, 8), dtype) for dtype in dtypes]
    with using_kernels():
        ours = sm.redistribute_many(xs, [P(None, "a")] * 4, forward_dtype=torch.float32)
    with using_kernels(False):
        theirs = sm.redistribute_many(xs, [P(None, "a")] * 4, forward_dtype=torch.float32)
    assert all(torch.equal(a._local, b._local) for a, b in zip(ours, theirs, strict=True))


@every_rank(2, 2)
def test_draws(mesh):
    found = []
    for use in (True, False):
        sm.random.manual_seed(3)
        with using_kernels(use):
            drawn = sm.rand((5, 7), device_mesh=mesh, placements=P("a", "b"))
            kept = torch.nn.functional.dropout(
                sm.randn((6, 4), device_mesh=mesh, placements=P(None, "a")), 0.25
            )
        found.append((drawn._local, kept._local))
    assert all(map(torch.equal, *found))
