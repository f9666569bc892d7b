"""Invalid input raises an error with the values and a replacement, the same on every rank, before
any communication.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from tests.device import DEVICE
from tests.sharding.ranks import every_rank, place, same_error

X = torch.arange(15.0).view(5, 3)


def x(mesh, *placements):
    """Return a sharded tensor, created without communication."""
    return place(mesh, X, *(placements or (Shard(0), Replicate())))


def other_order():
    """Return a mesh of the same four ranks with the same names, in another order."""
    return sm.DeviceMesh(DEVICE, [[0, 2], [1, 3]], axis_names=("a", "b"))


BAD = {
    # placements and specs
    "too few placements": (
        lambda m: sm.distribute_tensor(X, m, [Shard(0)]),
        ["1 placements [Shard(0)]", "2 axes ('a', 'b')", "give one placement per axis"],
    ),
    "too many placements": (
        lambda m: x(m).redistribute([Shard(0)] * 3),
        ["3 placements", "2 axes ('a', 'b')", "P(...)"],
    ),
    "axis used twice": (
        lambda m: sm.device_put(X, m, P("a", "a")),
        ["P('a', 'a')", "'a' more than once"],
    ),
    "axis splits and is pending": (
        lambda m: sm.device_put(X, m, P("a", unreduced={"a"})),
        ["'a' more than once", "not both"],
    ),
    "unknown axis": (
        lambda m: sm.device_put(X, m, P("tp")),
        ["'tp'", "axes ('a', 'b')"],
    ),
    "unknown pending axis": (
        lambda m: x(m).redistribute(P(unreduced={"tp"})),
        ["'tp'", "axes ('a', 'b')"],
    ),
    "unknown axis of a mesh": (
        lambda m: m["tp"],
        ["'tp'", "['a', 'b']", "Write one of these names"],
    ),
    "dim out of range": (
        lambda m: sm.distribute_tensor(X, m, [Shard(2), Replicate()]),
        ["Shard(2)", "2 dims"],
    ),
    "negative dim out of range": (
        lambda m: x(m).redistribute([Shard(-3), Replicate()]),
        ["Shard(-3)", "2 dims"],
    ),
    "too many entries": (
        lambda m: sm.device_put(X, m, P("a", "b", None)),
        ["3 entries", "2 dims", "drop the extra entries"],
    ),
    "one placement without a list": (
        lambda m: sm.distribute_tensor(X, m, Shard(0)),
        ["Shard(0)", "[Shard(0)]"],
    ),
    "an axis name for a spec": (
        lambda m: sm.device_put(X, m, "a"),
        ["'a'", "P('a')"],
    ),
    "something else for a placement": (
        lambda m: sm.distribute_tensor(X, m, ["a", "b"]),
        ["'a'", "expected Shard, Replicate or Partial"],
    ),
    "something else for a dim": (
        lambda m: sm.distribute_tensor(X, m, [Shard("a"), Replicate()]),
        ["'a'", "P('a')"],
    ),
    "unknown pending kind": (
        lambda m: sm.distribute_tensor(X, m, [Partial("mean"), Replicate()]),
        ["'mean'", "'avg'"],
    ),
    "kinds that do not commute": (
        lambda m: x(m).redistribute([Partial("max"), Partial("sum")]),
        ["['max', 'sum']", "reduce one of the axes first"],
    ),
    "orders that make no sense": (
        lambda m: x(m).redistribute([Shard(0, order=1), Shard(0, order=1)]),
        ["[1, 1]", "0..1"],
    ),
    "average of integers": (
        lambda m: sm.distribute_tensor(X.long(), m, [Partial("avg"), Replicate()]),
        ["average", "'a'", "i64", "Partial('sum')", "floating dtype"],
    ),
    "average of integers, from local parts": (
        lambda m: sm.from_local(X.bool(), m, P(unreduced={"b": "avg"})),
        ["average", "'b'", "bool"],
    ),
    # meshes and devices
    "mesh that does not fit the world": (
        lambda m: sm.init_device_mesh(DEVICE, (2, 4), axis_names=("a", "b")),
        ["(a=2, b=4) needs 8 ranks", "the world has 4", "start 8 processes", "product is 4"],
    ),
    "names that do not fit": (
        lambda m: sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a",)),
        ["(2, 2)", "('a',)", "axis_names="],
    ),
    "axis named twice": (
        lambda m: m["a", "a"],
        ["'a' is used twice", "('a', 'a')"],
    ),
    "ranks that do not exist": (
        lambda m: sm.DeviceMesh(DEVICE, [0, 7]),
        ["[7]", "the world has 4", "0 to 3"],
    ),
    "rank twice": (
        lambda m: sm.DeviceMesh(DEVICE, [0, 0]),
        ["[0]", "more than once"],
    ),
    "moving to another device": (
        lambda m: x(m).to("mps"),
        ["DeviceMesh(cpu, a=2, b=2)", "mps", "full_tensor()"],
    ),
    "two meshes": (
        lambda m: x(m) + place(m["a"], X, Shard(0)),
        ["add", "DeviceMesh(cpu, a=2, b=2) and DeviceMesh(cpu, a=2)", "one mesh first"],
    ),
    "two meshes in a list": (
        lambda m: torch.cat([x(m), place(m["b"], X)]),
        ["cat", "DeviceMesh(cpu, a=2, b=2) and DeviceMesh(cpu, b=2)"],
    ),
    "redistribution to another mesh": (
        lambda m: x(m).redistribute(m["a"], [Shard(0)]),
        [
            "f32[5, 3] @ P('a', None) on (a=2, b=2)",
            "DeviceMesh(cpu, a=2)",
            "one mesh",
            "x.full_tensor()",
        ],
    ),
    "two meshes of one shape": (
        lambda m: x(m) + place(other_order(), X, Shard(0), Replicate()),
        ["of ranks [[0, 1], [2, 3]]", "of ranks [[0, 2], [1, 3]]"],
    ),
    "copying from another mesh": (
        lambda m: x(m).copy_(place(other_order(), X)),
        ["of ranks [[0, 1], [2, 3]]", "of ranks [[0, 2], [1, 3]]", "full_tensor()"],
    ),
    "gradient on another mesh": (
        lambda m: setattr(x(m), "grad", place(other_order(), X)),
        ["of ranks [[0, 1], [2, 3]]", "of ranks [[0, 2], [1, 3]]", "full_tensor()"],
    ),
    "gradient of backward on another mesh": (
        lambda m: (x(m).requires_grad_() * 2).backward(place(other_order(), X)),
        ["of ranks [[0, 1], [2, 3]]", "of ranks [[0, 2], [1, 3]]"],
    ),
    "no mesh": (
        lambda m: sm.zeros(3, 4),
        ["device_mesh=mesh"],
    ),
    "source that does not exist": (
        lambda m: sm.distribute_tensor(X, m, src_data_rank=4),
        ["src_data_rank 4", "4 ranks"],
    ),
    # plain tensors
    "mixed": (
        lambda m: x(m) + X,
        [
            "add",
            "f32[5, 3]",
            "distribute_tensor(t, mesh, placements)",
            "sm.ops.implicit_replication()",
        ],
    ),
    "mixed, a number that requires grad": (
        lambda m: x(m) + torch.tensor(1.0, requires_grad=True),
        ["add", "f32[]", "requires grad", "device_put(t, mesh, P())"],
    ),
    "the class called": (
        lambda m: sm.ShardedTensor(X),
        ["distribute_tensor(t, mesh, placements)", "from_local"],
    ),
    "from_local of a sharded tensor": (
        lambda m: sm.from_local(x(m), m),
        ["plain tensor", "f32[5, 3] @ P('a', None) on (a=2, b=2)"],
    ),
    "plain data": (
        lambda m: setattr(x(m), "data", X),
        ["distribute_tensor"],
    ),
    "plain gradient": (
        lambda m: setattr(x(m), "grad", X),
        ["distribute_tensor"],
    ),
    "gradient of another shape": (
        lambda m: setattr(x(m), "grad", x(m).T),
        ["[3, 5]", "[5, 3]"],
    ),
    # gradients
    "backward of many elements": (
        lambda m: (x(m).requires_grad_() * 2).backward(),
        ["needs a scalar", "f32[5, 3] @ P('a', None) on (a=2, b=2)", "gradient="],
    ),
    "many elements as a number": (
        lambda m: float(x(m)),
        ["15 elements"],
    ),
    "truth of many elements": (
        lambda m: bool(x(m)),
        ["more than one element", ".any() or .all()"],
    ),
    "integers that require grad": (
        lambda m: place(m, X.long()).requires_grad_(),
        ["floating point"],
    ),
    # what torch itself checks
    "shapes that do not fit": (lambda m: x(m) @ x(m), ["[5, 3] X [5, 3]"]),
    "shapes that do not broadcast": (lambda m: x(m) + place(m, X[:4]), ["5", "4"]),
    "view of another size": (lambda m: x(m).view(4, 4), ["[4, 4]", "15"]),
    "dim of a reduction": (lambda m: x(m).sum(2), ["2"]),
    "index out of range": (lambda m: x(m)[5], ["5"]),
    "unknown argument": (lambda m: x(m).sum(dims=0), ["dims"]),
    "in-place change of layout": (
        lambda m: x(m).cumsum_(0),
        ["cumsum_", "redistribute it first", "out-of-place"],
    ),
    "in-place broadcast": (lambda m: place(m, X[0]).add_(x(m)), ["3", "5"]),
    "dropout probability": (lambda m: nn.functional.dropout(x(m), 1.5), ["1.5", "between 0 and 1"]),
    # plans
    "plan between shapes": (
        lambda m: sm.debug.plan(sm.typeof(x(m)), sm.typeof(x(m).T)),
        ["f32[5, 3] @ P('a', None)", "f32[3, 5] @ P(None, 'a')", "shape"],
    ),
    "plan between dtypes": (
        lambda m: sm.debug.plan(sm.typeof(x(m)), sm.typeof(x(m).double())),
        ["the dtype must be the same, got torch.float32 and torch.float64"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_input_raises(name):
    """Uneven parts (three rows and two), so that a text that names the rank's own part would differ
    between ranks.
    """
    program, words = BAD[name]
    text = same_error((2, 2), program, Exception)
    for word in words:
        assert word in text


@every_rank(2)
def test_state_is_valid_after_an_error(mesh):
    y = place(mesh, X, Shard(0), grad=True)
    for bad in (lambda: y @ y, lambda: y + X, lambda: y.redistribute(P("z")), lambda: y.backward()):
        with pytest.raises((RuntimeError, ValueError)):
            bad()
    (y @ y.T).sum().backward()
    plain = X.clone().requires_grad_()
    (plain @ plain.T).sum().backward()
    assert torch.equal(y.grad.full_tensor(), plain.grad)
