"""docs/from_jax.md: every row is tested, "same" rows against JAX where it has an answer, and no
public name of JAX's is missing.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shardmesh as sm
from shardmesh import NamedSharding, P, multihost
from tests.docs.jax_side import answers, error_of
from tests.docs.pages import DOCS
from tests.public import public_names
from tests.sharding.ranks import on_mesh

pytestmark = pytest.mark.xdist_group("from jax")  # one worker of `pytest -n` asks JAX
PAGE = (DOCS / "from_jax.md").read_text()
ROWS = {
    section: {
        cells[0].replace("`", ""): cells[1]
        for cells in re.findall(r"^\| (.+?) \| (same|other|no) \| .*\|$", text, re.MULTILINE)
    }
    for section, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
EVERY = {row: word for rows in ROWS.values() for row, word in rows.items()}
ROOT = Path(__file__).parents[2]

# -- expressions that give the same on both sides --------------------------------------------------

CUBES = "(x ** 3 * x.sum())"
CUSTOM = (  # whose gradient is twice what it should be
    "[custom := custom_vjp(lambda x, by: x * by), custom.defvjp(lambda x, by: (x * by, by), lambda "
    "by, g: (g * by * 2, None))]"
)
GROUPS = "axis_index_groups=[[1], [0]]"
COMPARED = {
    "shard_map": "run(lambda x: x * 2 + psum(x, 'b'), P('a'), P('a'))",
    "mesh=": (
        "tolist(jit_or_not(shard_map(lambda x: x * 2, mesh=mesh, in_specs=P('a'), "
        "out_specs=P('a')))(X))"
    ),
    "in_specs=": (
        "tolist(shard_map(lambda t, u: t['u'] + t['v'][0] + u, mesh=mesh, in_specs=(P('a'), P()), "
        "out_specs=P('a'))({'u': X, 'v': [X]}, X[:4]))"
    ),
    "out_specs=": "run(lambda x: {'u': x, 'v': [psum(x, 'a')]}, P('a'), {'u': P('a'), 'v': P()})",
    "axis_names=": (
        "run(lambda x: psum(x * 2, 'a'), P('a'), P(), axis_names={'a'}) if whole_arrays else "
        "run_partly()"
    ),
    "check_vma=": "run(lambda x: psum(x, 'a'), P('a'), P(), check_vma=False)",
    "a NamedSharding as a spec": (
        "error_of(lambda: run(lambda x: x, NamedSharding(mesh, P('a')), P('a')))"
    ),
    "closing over a differentiated array": (
        "tolist(grad(lambda w: shard_map(lambda x: psum((x * w[:4] ** 2).sum(), 'a'), mesh=mesh, "
        "in_specs=P('a'), out_specs=P())(X))(put(X, P())))"
    ),
    "psum": "run(lambda x: psum(x, 'a') + psum(1, ('a', 'b')), P('a'), P())",
    "pmean": "run(lambda x: pmean(x, 'a'), P('a'), P())",
    "pmax": f"run(lambda x: pmax(x, 'a', {GROUPS}), P('a'), P('a'))",
    "pmin": "run(lambda x: pmin(x, 'a'), P('a'), P())",
    "all_gather": "run(lambda x: all_gather(x, 'a', tiled=True, to='varying'), P('a'), P('a'))",
    "all_to_all": (
        "run(lambda x: all_to_all(x.reshape(2, 2), 'a', 0, 1, tiled=True), P('a'), P('a'))"
    ),
    "psum_scatter": "run(lambda x: psum_scatter(x, 'a', tiled=True), P('a'), P('a'))",
    "ppermute": "run(lambda x: ppermute(x, 'a', [(0, 1)]), P('a'), P('a'))",
    "pshuffle": "run(lambda x: pshuffle(x, 'a', [1, 0]), P('a'), P('a'))",
    "pswapaxes": "run(lambda x: pswapaxes(x.reshape(2, 2), 'a', 1), P('a'), P('a'))",
    "pcast": "run(lambda x: pcast(psum(x, 'a'), 'a', to='varying'), P('a'), P('a'))",
    "axis_index": (
        "run(lambda x: x + axis_index('a') + axis_index(('a', 'b')), P(('a', 'b')), P(('a', 'b')))"
    ),
    "axis_size": "run(lambda x: x * axis_size(('a', 'b')), P('a'), P('a'))",
    "PartitionSpec": (
        "[list(P('a', None, ('b', 'c'))), P('a', 'b')[0], P('a', 'b')[0:1], len(P('a', None)), "
        "list(P('a') + P('b')), list(P('a') + (None,)), P('a') == P('a', None), P(*P('a', ('b',))) "
        "== P('a', 'b'), P('a', 'b').index('b'), error_of(lambda: P('a')[1]), P() == P()]"
    ),
    "NamedSharding": (
        "[NamedSharding(mesh, P('a')).shard_shape((8, 2)), NamedSharding(mesh, "
        "P('a')).is_equivalent_to(NamedSharding(mesh, P('a', None)), 2), NamedSharding(mesh, "
        "P()).is_fully_replicated, list(NamedSharding(mesh, P('a')).spec), NamedSharding(mesh, "
        "P('a')).mesh == mesh]"
    ),
    "Mesh.shape": "[mesh.shape['a'], dict(mesh.shape), error_of(lambda: mesh.shape['c'])]",
    "Mesh.axis_sizes": "mesh.axis_sizes",
    "Mesh.axis_names": "mesh.axis_names",
    "Mesh.devices": "[mesh.devices.shape, mesh.devices.size]",
    "AbstractMesh": (
        "[AbstractMesh((2, 4), ('x', 'y')).shape['y'], AbstractMesh((2, 4), ('x', 'y')).axis_names]"
    ),
    "sharding": (
        "[list(put(X, P(('a', 'b'))).sharding.spec), put(X, P('a')).sharding == "
        "NamedSharding(mesh, P('a'))]"
    ),
    "is_fully_replicated": "[put(X, P()).is_fully_replicated, put(X, P('a')).is_fully_replicated]",
    "committed": "put(X, P('a')).committed",
    "make_mesh": "make_mesh((2, 2), ('x', 'y')).shape['y']",
    "device_put": (
        "[tolist(device_put({'u': X, 'v': [1.5]}, {'u': NamedSharding(mesh, P('a')), 'v': "
        "NamedSharding(mesh, P())})), device_put({'u': None}, NamedSharding(mesh, P())), "
        "error_of(lambda: device_put({'u': X, 'v': X}, {'u': NamedSharding(mesh, P())}))]"
    ),
    "with_sharding_constraint": (
        "tolist(with_sharding_constraint({'u': put(X, P('a'))}, NamedSharding(mesh, P('b'))))"
    ),
    "make_array_from_callback": (
        "tolist(make_array_from_callback((8,), NamedSharding(mesh, P('a')), lambda index: "
        "X[index]))"
    ),
    "process_index": "process_index()",
    "typeof": (
        "[run(lambda x: [seen.append(shown(y)) for y in (x, psum(x, 'a'), psum(x, 'b'))] and x, "
        "P('a'), P('a')), seen[:3]]"
    ),
    "grad": "tolist(grad(lambda t: (t['u'] ** 3).sum())({'u': put(X, P()), 'v': None}))",
    "value_and_grad": (
        "tolist(value_and_grad(lambda t, s: ((t * s) ** 2).sum(), (0, 1))(put(X, P('a')), put(X, "
        "P())))"
    ),
    "vjp": (
        "tolist(vjp(lambda t: {'o': t['u'] * 2, 'n': None}, {'u': put(X, P()), 'v': "
        "None})[1]({'o': put(X, P()), 'n': None})[0])"
    ),
    "jvp": (
        "tolist(jvp(lambda t: {'o': t['u'] * 2, 'n': None}, ({'u': put(X, P()), 'v': None},), "
        "({'u': put(X, P()), 'v': None},))[1])"
    ),
    "linearize": "tolist(linearize(lambda x: x ** 3, put(X, P('a')))[1](put(X, P('a'))))",
    "jacfwd": f"tolist(jacfwd(lambda x: {CUBES})(put(X[1:3], P())))",
    "jacrev": f"tolist(jacrev(lambda x: {CUBES})(put(X[1:3], P())))",
    "hessian": f"tolist(hessian(lambda x: {CUBES}.sum())(put(X[1:3], P())))",
    "vmap": (
        "[tolist(vmap(lambda x, y: {'u': x * y}, (0, None), out_axes=0)(put(X, P('a')), put(X[2], "
        "P()))), tolist(vmap(shard_map(lambda x: psum(x, 'b'), mesh=mesh, in_specs=P('b'), "
        "out_specs=P()), spmd_axis_name='a')(put(X.reshape(4, 2), P('a', 'b'))))]"
    ),
    "custom_vjp": (
        f"[{CUSTOM} and tolist(grad(lambda x: custom(x, 2.0).sum())(put(X, P('a')))), run(lambda "
        "x: custom(x, 3.0), P('a'), P('a'))]"
    ),
    "cond": (
        "[tolist(cond(X[n] > 0, lambda x, y: x + y, lambda x, y: x - y, X, X[1])) for n in (0, 1)]"
    ),
    "switch": "[tolist(switch(n, [lambda x: x, lambda x: x * 2], X)) for n in (-1, 0, 1, 7)]",
    "scan": (
        "[tolist(scan(lambda c, x: (c + x['u'], {'v': c * x['u']}), X[0], {'u': X}, reverse=back)) "
        "for back in (False, True)] + [tolist(scan(lambda c, x: (c * 2, c), X[1], None, length=3))]"
    ),
    "while_loop": (
        "tolist(while_loop(lambda s: s['n'] < 5, lambda s: {'n': s['n'] + 1, 'x': s['x'] * 2}, "
        "{'n': X[0], 'x': X}))"
    ),
    "fori_loop": "tolist(fori_loop(2, 5, lambda i, x: x * 2 + i, X))",
    "remat": "tolist(grad(lambda x: remat(lambda x: x ** 2)(x).sum())(put(X, P())))",
    "checkpoint": "tolist(grad(lambda x: remat(lambda x: x ** 3)(x).sum())(put(X, P())))",
}


def our_names(mesh):
    """Return the names that our expressions may use."""
    X = torch.arange(8.0, dtype=torch.float64)

    def tolist(tree):
        return torch.utils._pytree.tree_map(lambda x: x.tolist() if torch.is_tensor(x) else x, tree)

    def put(x, spec):
        return sm.device_put(x, NamedSharding(mesh, spec))

    def run(f, in_specs, out_specs, **more):
        return tolist(sm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)(X))

    def run_partly():
        mapped = sm.shard_map(
            lambda x: sm.psum(x * 2, "a"),
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P(),
            axis_names={"a"},
        )
        return tolist(mapped(put(X, P("a"))))

    return {
        **public_names(),
        "mesh": mesh,
        "X": X,
        "tolist": tolist,
        "put": put,
        "run": run,
        "error_of": error_of,
        "seen": [],
        "whole_arrays": False,
        "run_partly": run_partly,
        "jit_or_not": lambda f: f,
        "shown": lambda x: str(sm.typeof(x)),
        "make_mesh": lambda *args: sm.make_mesh(*args, device_type="cpu"),
    }


# -- what has no answer of JAX's -------------------------------------------------------------------

X = torch.arange(8.0)


def whole(f, in_specs, out_specs, *args, **more):
    """Return the result of a mapped function as nested lists."""
    return (
        sm.shard_map(f, in_specs=in_specs, out_specs=out_specs, **more)(*(args or (X,)))
        .full_tensor()
        .tolist()
    )


def holds(found):
    assert found


def part(mesh):
    """Return the part of X under P("a")."""
    return X.chunk(2)[mesh.coordinate[0]].tolist()


def raises(kind, f):
    with pytest.raises(kind):
        f()


def put(spec):
    return sm.device_put(X, sm.get_mesh(), spec)


def ragged(x):
    here = int(sm.axis_index("a"))
    return sm.ragged_all_to_all(
        x, torch.zeros_like(x), [0, 1], [1, 2 if here else 1], [here, here], [1, 1], axis_name="a"
    )


def closes_over_a_sharded_one(mesh):
    w = put(P("a"))
    assert whole(lambda x: x + w, P("a"), P("a")) == (2 * X).tolist()
    raises(sm.errors.ShardingTypeError, lambda: whole(lambda x: w.sum(), P("a"), P()))


def shape_is_a_tuple_too(mesh):
    assert mesh.shape == (2, 2)
    assert [*mesh.shape] == [2, 2]
    assert {**mesh.shape} == {"a": 2, "b": 2}
    assert "a" in mesh.shape
    assert 2 in mesh.shape


def keeps_the_axes_of_a_dim(mesh):
    x = sm.zeros(4, 4, mesh, P("a"))
    assert sm.with_sharding_constraint(x, NamedSharding(mesh, P(P.UNCONSTRAINED, "b"))).spec == P(
        "a", "b"
    )
    assert sm.with_sharding_constraint(x, P(P.UNCONSTRAINED, "a")).spec == P(None, "a")
    raises(ValueError, lambda: sm.zeros(4, 4, mesh, P(P.UNCONSTRAINED)))


def sharding_is_taken_everywhere(mesh):
    at, x = NamedSharding(mesh, P("a")), put(P())
    found = [
        sm.distribute_tensor(X, at),
        x.redistribute(at),
        sm.redistribute(x, at),
        sm.reshard(x, at),
        sm.zeros(8, at),
        sm.from_local(X[:4], at),
        sm.ops.apply(torch.add, x, x, out_sharding=at),
        sm.redistribute_many([x], [at])[0],
        sm.with_sharding_constraint(x, at),
        sm.device_put(X, at),
        sm.rand(8, placements=at),
    ]
    assert {str(y.spec) for y in found} == {"P('a')"}
    assert sm.Layout.of(mesh, at, (8,)) is sm.Layout.of(mesh, P("a"), (8,))
    assert "all_gather" in str(sm.debug.explain(found[0], NamedSharding(mesh, P())))
    raises(ValueError, lambda: sm.zeros(8, mesh["a"], at))
    raises(ValueError, lambda: sm.with_sharding_constraint(x, NamedSharding(mesh["a"], P("a"))))


def sent_to_all(mesh):
    assert (
        multihost.broadcast_one_to_all({"x": mesh.get_rank()}, is_source=mesh.get_rank() == 2)[
            "x"
        ].item()
        == 2
    )
    raises(ValueError, lambda: multihost.broadcast_one_to_all(0, is_source=True))


def told_to_all(mesh):
    rank = mesh.get_rank()
    tree = multihost.process_allgather({"x": np.array([rank, 1]), "y": float(rank), "n": None})
    assert {name: None if x is None else x.tolist() for name, x in tree.items()} == {
        "x": [[0, 1], [1, 1], [2, 1], [3, 1]],
        "y": [0.0, 1.0, 2.0, 3.0],
        "n": None,
    }
    assert multihost.process_allgather(torch.tensor([rank]), tiled=True).tolist() == [0, 1, 2, 3]
    assert multihost.process_allgather(put(P("a"))).tolist() == X.tolist()
    raises(ValueError, lambda: multihost.process_allgather(torch.ones(rank)))


def compared(mesh):
    multihost.assert_equal({"x": torch.tensor([0.0, float("nan")]), "y": 3, "z": put(P("a"))})
    multihost.assert_equal(torch.tensor(-0.0) if mesh.get_rank() else torch.tensor(0.0))
    with pytest.raises(
        AssertionError,
        match=r"step: \['y'\] is not the same on every rank: rank 0: i64\[\] 0; rank 2: i64\[\] 1",
    ):
        multihost.assert_equal({"x": 1, "y": mesh.get_rank() // 2}, "step")
    raises(AssertionError, lambda: multihost.assert_equal([1] * mesh.get_rank()))


def met(mesh):
    multihost.sync_global_devices("here")
    raises(AssertionError, lambda: multihost.sync_global_devices(f"rank {mesh.get_rank()}"))


def local_to_global(mesh):
    local = np.arange(2 + mesh.coordinate[0])
    assert multihost.host_local_array_to_global_array({"x": local}, mesh, P("a"))["x"].tolist() == [
        0,
        1,
        0,
        1,
        2,
    ]
    w = torch.ones(2, requires_grad=True)
    (multihost.host_local_array_to_global_array(w, mesh, P("a")) ** 2).sum().backward()
    assert w.grad.tolist() == [2, 2]


def global_to_local(mesh):
    assert multihost.global_array_to_host_local_array([put(P()), X], mesh, P("a"))[
        1
    ].tolist() == part(mesh)


OWN = {
    "shard_map": lambda mesh: holds(callable(sm.shard_map(out_specs=P()))),
    "mesh=": lambda mesh: holds(whole(lambda x: x, P("a"), P("a"), put(P("a"))) == X.tolist()),
    "in_specs=": lambda mesh: holds(
        whole(lambda x, n: x * n, (P("a"), None), P("a"), X, 2) == (2 * X).tolist()
    ),
    "check_vma=": lambda mesh: raises(
        ValueError, lambda: sm.shard_map(abs, out_specs=P(), check="always", check_vma=False)
    ),
    "closing over a sharded array": closes_over_a_sharded_one,
    "keyword arguments": lambda mesh: sm.shard_map(
        lambda x, by: x * by, in_specs=P("a"), out_specs=P("a")
    )(X, by=2),
    "results that need not divide": lambda mesh: holds(
        whole(lambda x: x, P("a"), P("a"), X[:5]) == X[:5].tolist()
    ),
    "psum": lambda mesh: holds(
        whole(lambda x: sm.psum(x, "a", axis_index_groups=[[1], [0]]), P("a"), P("a")) == X.tolist()
    ),
    "pmean": lambda mesh: whole(
        lambda x: sm.pmean(x, "a", axis_index_groups=[[0, 1]]), P("a"), P("a")
    ),
    "pmax": lambda mesh: sm.grad(
        lambda x: sm.shard_map(lambda x: sm.pmax(x, "a"), in_specs=P("a"), out_specs=P())(x).sum()
    )(X),
    "pmin": lambda mesh: sm.grad(
        lambda x: sm.shard_map(lambda x: sm.pmin(x, "a"), in_specs=P("a"), out_specs=P())(x).sum()
    )(X),
    "all_gather": lambda mesh: holds(
        whole(lambda x: sm.all_gather(x, "a", tiled=True), P("a"), P()) == X.tolist()
    ),
    "pbroadcast": lambda mesh: holds(
        whole(lambda x: sm.pbroadcast(x, "a", 1), P("a"), P()) == X[4:].tolist()
    ),
    "ragged_all_to_all": lambda mesh: raises(ValueError, lambda: whole(ragged, P("a"), P("a"))),
    "pcast": lambda mesh: whole(
        lambda x: sm.pcast(sm.psum(x, "a"), "a", to="unreduced"), P("a"), P(unreduced="a")
    ),
    "pvary": lambda mesh: holds(
        whole(lambda x: sm.pvary(x, "a"), P(), P("a")) == [*X.tolist(), *X.tolist()]
    ),
    "PartitionSpec": lambda mesh: holds(
        P() and P("a", unreduced="b")[:1] == ("a",) and sm.PartitionSpec is P
    ),
    "PartitionSpec.UNCONSTRAINED": keeps_the_axes_of_a_dim,
    "PartitionSpec.unreduced": lambda mesh: holds(
        P(unreduced={"a": "max"}).unreduced == (("a", "max"),)
    ),
    "NamedSharding": sharding_is_taken_everywhere,
    "Sharding": lambda mesh: holds(not hasattr(sm, "Sharding")),
    "Mesh": lambda mesh: holds(
        sm.DeviceMesh(mesh.device_type, mesh.devices, axis_names=("a", "b")) is mesh
    ),
    "Mesh.shape": shape_is_a_tuple_too,
    "Mesh.devices": lambda mesh: holds(mesh.devices.tolist() == [[0, 1], [2, 3]]),
    "Mesh.size": lambda mesh: holds((mesh.size(), mesh.size("b")) == (4, 2)),
    "ManualAxisType": lambda mesh: whole(
        lambda x: holds(sm.typeof(x).varying == {"a"} and not sm.typeof(x).pending) or x,
        P("a"),
        P("a"),
    ),
    "set_mesh": lambda mesh: holds(sm.set_mesh(mesh).mesh is sm.get_mesh() is mesh),
    "get_mesh": lambda mesh: holds(sm.set_mesh(None).mesh is sm.get_mesh() is None),
    "reshard": lambda mesh: holds(sm.reshard(put(P()), NamedSharding(mesh, P("a"))).spec == P("a")),
    "is_fully_addressable": lambda mesh: holds(not put(P()).is_fully_addressable),
    "addressable_shards": lambda mesh: holds(
        [s.data.tolist() for s in put(P("a")).addressable_shards] == [part(mesh)]
    ),
    "addressable_data": lambda mesh: holds(put(P("a")).addressable_data(0).tolist() == part(mesh)),
    "global_shards": lambda mesh: holds(
        [s.rank for s in put(P("a")).global_shards if s.data is not None] == [mesh.get_rank()]
    ),
    "device": lambda mesh: holds(put(P()).device == mesh.device),
    "make_mesh": lambda mesh: holds(
        sm.make_mesh((2,), ("x",), devices=[3, 1], device_type="cpu").devices.tolist() == [3, 1]
    ),
    "make_array_from_process_local_data": lambda mesh: holds(
        sm.make_array_from_process_local_data(NamedSharding(mesh, P("a")), X).shape == (16,)
    ),
    "make_array_from_single_device_arrays": lambda mesh: sm.make_array_from_single_device_arrays(
        (16,), NamedSharding(mesh, P("a")), [X]
    ),
    "while_loop": lambda mesh: holds(
        sm.grad(lambda x: sm.while_loop(lambda y: y.sum() < 100, lambda y: y * 2, x).sum())(
            X
        ).tolist()
        == [4.0] * 8
    ),
    "fori_loop": lambda mesh: holds(
        sm.grad(
            lambda x: sm.fori_loop(torch.tensor(0), torch.tensor(2), lambda i, y: y * 2, x).sum()
        )(X).tolist()
        == [4.0] * 8
    ),
    "process_count": lambda mesh: holds(sm.process_count() == 4),
    "process_allgather": told_to_all,
    "broadcast_one_to_all": sent_to_all,
    "sync_global_devices": met,
    "assert_equal": compared,
    "host_local_array_to_global_array": local_to_global,
    "global_array_to_host_local_array": global_to_local,
    "reached_preemption_sync_point": lambda mesh: holds(
        multihost.reached_preemption_sync_point is sm.training.reached_preemption
    ),
}


# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jax_side():
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs the extra jax-oracle")
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.jax_side"],
        input=json.dumps(COMPARED),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def our_side():
    return on_mesh_a_b(lambda mesh: answers(COMPARED, our_names(mesh)))[0]


def on_mesh_a_b(program):
    def on_this_rank(mesh):
        with mesh:
            return program(mesh)

    return on_mesh((2, 2), on_this_rank)


def test_every_row_is_tested():
    assert sum(map(len, ROWS.values())) == len(EVERY) > 70
    assert {row for row, word in EVERY.items() if word != "no"} == {*COMPARED, *OWN}


@pytest.mark.parametrize("row", COMPARED)
def test_as_in_jax(row, jax_side, our_side):
    assert our_side[row] == jax_side["answers"][row]
    assert "Error" not in str(our_side[row]) or row in (
        "a NamedSharding as a spec",
        "PartitionSpec",
        "Mesh.shape",
        "device_put",
    )


@pytest.mark.parametrize("row", OWN)
def test_here(row):
    on_mesh_a_b(OWN[row])


@pytest.mark.parametrize("row", [row for row, word in EVERY.items() if word == "no"])
def test_missing_names(row):
    assert not hasattr(sm, row)
    assert not hasattr(multihost, row)


def test_no_public_name_is_missing(jax_side):
    missing = {
        section: [n for n in names if n not in ROWS[section]]
        for section, names in jax_side["names"].items()
    }
    assert not any(missing.values()), missing
