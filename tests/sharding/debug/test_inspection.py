"""`inspect`: its output for layouts agrees with their boxes, and for tensors with their local
parts.
"""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import given
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P, Shard
from shardmesh.sharding.debug import inspection
from shardmesh.sharding.debug.inspection import inspect
from tests.device import DEVICE
from tests.public import public_names
from tests.sharding.ranks import collectives, every_rank, place
from tests.sharding.strategies import AXES, ragged_moves


@given(ragged_moves(("sum", "max")))
def test_output_agrees_with_the_boxes(move):
    mesh_shape, shape, spec, _ = move
    layout = Layout.of(
        sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)]), spec, shape, torch.bfloat16
    )
    boxes = {int(layout.mesh.ranks[c]): (c, box) for c, box in layout.boxes()}
    nbytes = {
        rank: 2 * math.prod(stop - start for start, stop in box) for rank, (_, box) in boxes.items()
    }
    found = inspect(layout)
    assert {part.rank: (part.coordinate, part.box) for part in found.parts} == boxes
    assert {part.rank: part.nbytes for part in found.parts} == nbytes
    assert all(2 * math.prod(part.shape) == part.nbytes for part in found.parts)
    assert found.empty == tuple(rank for rank, size in nbytes.items() if not size)
    assert (found.nbytes_least, found.nbytes_most) == (min(nbytes.values()), max(nbytes.values()))
    assert found.nbytes_held == sum(nbytes.values()) == found.copies * found.nbytes
    assert found.pending == dict(spec.unreduced)
    assert list(found.same) == same_values(layout, boxes, nbytes)
    assert str(found)


def same_values(layout, boxes, nbytes):
    """Return the ranks with the same box and the same coordinates on pending axes."""
    groups = {}
    for rank, (coordinate, box) in boxes.items():
        if nbytes[rank]:
            pending = tuple(
                k
                for k, axis in zip(coordinate, layout.mesh.axis_names, strict=True)
                if axis in layout.pending
            )
            groups.setdefault((box, pending), []).append(rank)
    return [tuple(group) for group in groups.values()]


def test_output_for_a_tensor():
    def program():
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
        x = sm.zeros(
            3, 4, device_mesh=mesh, placements=P(None, ("tp", "dp"), sizes={"tp": (4, 0)})
        ).requires_grad_()
        with collectives() as records:
            shown = str(inspect(x))
        assert records == []
        return shown

    first, *others = sm.simulate(4)(program)()
    assert first.splitlines() == [
        "f32[3, 4] @ P(None, ('tp', 'dp'), sizes={'tp': (4, 0)}) on (dp=2, tp=2)",
        "axis  ranks  along it",
        "dp        2  splits dim 1, axis 2 of 2 that split it",
        "tp        2  splits dim 1, axis 1 of 2 that split it, into parts of given sizes",
        "rank  at          box       shape   bytes",
        "   0  dp=0, tp=0  0:3, 0:2  [3, 2]     24",
        "   1  dp=0, tp=1  0:3, 4:4  [3, 0]      0",
        "   2  dp=1, tp=0  0:3, 2:4  [3, 2]     24",
        "   3  dp=1, tp=1  0:3, 4:4  [3, 0]      0",
        "same values: on no two ranks",
        "hold nothing: 1,3",
        "bytes: 48 in total; a rank holds 0 to 24; all ranks together 48, each element once",
        "this rank, 0: on cpu, contiguous",
        "gradient: leaf, no .grad yet, will be P(None, ('tp', 'dp'), sizes={'tp': (4, 0)})",
    ]
    assert all(other.splitlines()[:-2] == first.splitlines()[:-2] for other in others)


@every_rank(2, 2)
def test_pending_axes_and_their_kinds(mesh):
    x = sm.ShardedTensor.from_local(
        torch.ones(()), mesh, [sm.Partial("max"), sm.Replicate()], shape=()
    )
    found = inspect(x)
    assert found.pending == {"a": "max"}
    assert found.same == ((0, 1), (2, 3))
    assert found.copies == 4
    assert "a         2  pending max" in str(found)
    assert "the one element" in str(found)


@every_rank(2)
def test_the_state_of_a_gradient(mesh):
    x = place(mesh, torch.ones(4, 3), Shard(0), grad=True)
    y = x.t() * 2
    with collectives() as records:
        before, between = inspect(x), inspect(y)
        y.sum().backward()
        after, plain = inspect(x), inspect(x.detach())
    assert records == []
    assert (before.here.is_leaf, before.here.grad, before.here.grad_fn) == (True, None, None)
    assert (between.here.is_leaf, between.here.requires_grad, between.here.grad) == (
        False,
        True,
        None,
    )
    assert "gradient: grad_fn MulBackward0, flows as P(None, 'a')" in str(between)
    assert after.here.grad is sm.typeof(x.grad) is after.grad_layout
    assert str(after).endswith("gradient: leaf, .grad is P('a', None)")
    assert not plain.here.requires_grad
    assert str(plain).endswith("gradient: not required")


@every_rank(2)
def test_a_replicated_parameter_whose_gradient_is_pending(mesh):
    w = nn.Parameter(place(mesh, torch.ones(3)))
    x = place(mesh, torch.ones(4, 3), Shard(0))
    with sm.accumulate_grads():
        (x * w).sum().backward()
        with collectives() as records:
            assert inspect(w).here.grad.spec == w.grad.spec
        assert records == []
    assert inspect(w).here.grad.spec == P(None) == inspect(w).grad_layout.spec


@every_rank(2)
def test_memory(mesh):
    x = place(mesh, torch.arange(24).view(4, 6), Shard(0))
    assert inspect(x).here.is_contiguous
    assert inspect(x.t()).here.strides == (1, 6)
    assert "not contiguous, strides (1, 6)" in str(inspect(x.t()))
    assert inspect(x).here.part == inspect(x).parts[mesh.get_rank()]
    assert inspect(x).here.part.nbytes == x.to_local().numel() * 8


def test_a_rank_outside_the_mesh_sees_the_same():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [2, 0], axis_names=("a",))
        x = sm.zeros(5, device_mesh=mesh, placements=P("a"))
        found = inspect(x)
        assert [part.rank for part in found.parts] == [2, 0]
        assert (found.here.part is None) == (mesh.coordinate is None)
        return str(found)

    inside, outside, _ = sm.simulate(3)(program)()
    assert "this rank, 1: outside the mesh, holds nothing" in outside
    assert inside.splitlines()[:6] == outside.splitlines()[:6]


def test_large_meshes_fit_the_screen():
    mesh = sm.AbstractMesh((128, 8), ("dp", "tp"))
    found = inspect(Layout.of(mesh, P("tp", sizes={"tp": (0, 1, 1, 1, 1, 1, 1, 2)}), (8, 4)))
    lines = str(found).splitlines()
    assert len(lines) < 30
    assert max(map(len, lines)) < 300
    assert "not shown: 1,008 of 1,024 ranks" in lines
    assert len(found.parts) == 1024
    assert len(found.same) == 7
    assert found.empty == tuple(range(0, 1024, 8))
    assert lines[-2] == "hold nothing: 0,8,16,...,1016 (128 ranks)"
    assert "(7 groups)" in lines[-3]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (
            torch.ones(2),
            r"inspect\(Tensor\): a plain tensor is on this rank only; shard it with "
            r"distribute_tensor",
        ),
        (
            nn.Linear(2, 2),
            r"inspect\(Linear\): give one of its tensors, such as inspect\(module.weight\), or "
            r"print visualize\(module\)",
        ),
        (3, r"inspect\(int\): give a ShardedTensor or a Layout"),
    ],
)
def test_errors(x, text):
    with pytest.raises(TypeError, match=text):
        inspect(x)


def test_docstring_example():
    results = doctest.testmod(inspection, globs={**public_names(), **vars(inspection)})
    assert (results.failed, results.attempted) == (0, 3)
