"""Topologies: which ranks share a node, on meshes and their slices, and how a mesh uses one."""

from __future__ import annotations

import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.mesh import (
    AbstractMesh,
    DeviceMesh,
    Link,
    MeshError,
    Topology,
    init_device_mesh,
    simulate,
)
from shardmesh.mesh.topology import torchrun_node_size

LINKS = (Link(1e-5, 4e11), Link(3e-5, 5e10), 1e12)
NAMES = ("a", "b", "c", "d")


def nodes_of(**where: object) -> Topology:
    return Topology(*LINKS, **where)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 9))
def test_node_size_counts_global_ranks(shape: list[int], size: int) -> None:
    mesh = AbstractMesh(shape, NAMES[: len(shape)])
    topology = nodes_of(node_size=size)
    ids = topology.node_ids(mesh)
    assert ids.dtype == np.int64
    assert ids.reshape(-1).tolist() == [rank // size for rank in range(mesh.size())]
    assert topology.nodes(mesh) == -(-mesh.size() // size)


@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_crossing_axes_separate_nodes(data: st.DataObject, shape: list[int]) -> None:
    mesh = AbstractMesh(shape, NAMES[: len(shape)])
    crossing = tuple(data.draw(st.sets(st.sampled_from(mesh.axis_names))))
    topology = nodes_of(crossing=crossing)
    ids = topology.node_ids(mesh)
    keys = {}
    for place, node in np.ndenumerate(ids):
        keys.setdefault(int(node), set()).add(
            tuple(i for i, n in zip(place, mesh.axis_names, strict=True) if n in crossing)
        )
    assert all(len(found) == 1 for found in keys.values())
    assert len(set.union(*keys.values())) == len(keys) == topology.nodes(mesh)
    assert topology.crossing_axes(mesh) == tuple(
        n for n in mesh.axis_names if n in crossing and mesh.size(n) > 1
    )


@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_slice_keeps_the_nodes_of_its_ranks(data: st.DataObject, shape: list[int]) -> None:
    where = data.draw(
        st.sampled_from(
            [{}, {"node_size": 2}, {"node_size": 3}, {"crossing": ("a",)}, {"crossing": "b"}]
        )
    )
    axes = tuple(data.draw(st.permutations(NAMES[: len(shape)])))[
        : data.draw(st.integers(1, len(shape)))
    ]

    def fn() -> None:
        mesh = init_device_mesh("cpu", shape, axis_names=NAMES[: len(shape)])
        mesh.topology = nodes_of(**where)
        whole = dict(zip(mesh.ranks.flat, mesh.topology.node_ids(mesh).flat, strict=True))
        for part in (mesh[axes], mesh.flatten(axes), mesh.flatten()[("_".join(mesh.axis_names),)]):
            ids = part.topology.node_ids(part)
            assert ids.reshape(-1).tolist() == [whole[rank] for rank in part.ranks.flat]

    simulate(int(np.prod(shape)))(fn)()


def test_slice_of_an_abstract_mesh_keeps_its_nodes() -> None:
    mesh = AbstractMesh((4, 8), ("dp", "tp"))
    mesh.topology = nodes_of(node_size=8)
    assert mesh["dp"].topology.nodes(mesh["dp"]) == 4  # though its ranks are numbered from 0
    assert mesh["tp"].topology.crossing_axes(mesh["tp"]) == ()
    mesh.topology = nodes_of(crossing=("dp",))
    assert mesh["tp"].topology.crossing == ()
    flat = mesh.flatten()
    assert flat.topology.crossing == ("dp_tp",)
    assert flat.topology.nodes(flat) == 4
    cube = AbstractMesh((2, 4, 8), ("pp", "dp", "tp"))
    cube.topology = nodes_of(crossing=("pp", "dp"))
    cube["dp", "tp"].flatten()
    part = cube["dp_tp", "pp"]
    assert part.topology.crossing == ("pp", "dp_tp")
    assert part.topology.nodes(part) == 8
    assert flat["dp_tp"].topology.node_ids(flat).tolist() == [rank // 8 for rank in range(32)]


def test_slice_may_have_its_own_topology() -> None:
    mesh = AbstractMesh((4, 8), ("dp", "tp"))
    part = mesh["tp"]
    part.topology = nodes_of(node_size=2)
    mesh.topology = nodes_of(crossing=("dp",))
    assert part.topology.nodes(part) == 4
    part.topology = None
    assert part.topology == nodes_of()


def test_transposing_a_mesh_twice_makes_no_cycle() -> None:
    def fn() -> bool:
        mesh = init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
        back = mesh["b", "a"]["a", "b"]
        mesh.topology = nodes_of(crossing=("b",))
        return back is mesh and mesh["b", "a"].topology.node_ids(mesh["b", "a"]).tolist() == [
            [0, 0],
            [1, 1],
        ]

    assert simulate(4)(fn)() == [True] * 4


def test_setting_a_topology_clears_plans_of_mesh_and_slices() -> None:
    mesh, dropped = AbstractMesh((2, 4), ("a", "b")), []
    part, other = mesh["b"], mesh["a"]
    other.topology = nodes_of(node_size=1)
    for m in (mesh, part, other):
        m.cache = SimpleNamespace(forget_plans=partial(dropped.append, m.axis_names))
    mesh.topology = nodes_of(node_size=4)
    assert dropped == [("a", "b"), ("b",)]
    assert part.topology.node_size == 4
    assert other.topology.node_size == 1


def test_large_meshes_are_cheap() -> None:
    mesh = AbstractMesh((512, 8, 32), ("dp", "pp", "tp"))
    topology = nodes_of(node_size=8)
    assert topology.crossing_axes(mesh) == ("dp", "pp", "tp")
    assert topology.node_ids(mesh) is topology.node_ids(mesh)
    assert topology.nodes(mesh) == 16384


@pytest.mark.parametrize(
    ("env", "size", "expected"),
    [
        ({}, 8, None),
        ({"LOCAL_WORLD_SIZE": "4"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "8"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "3"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "0"}, 8, None),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, 8, None),  # nodes of 2 and 6
    ],
)
def test_node_size_from_torchrun(env: dict[str, str], size: int, expected: int | None) -> None:
    assert torchrun_node_size(size, env) == expected


def test_defaults() -> None:
    def fn() -> tuple[DeviceMesh, Topology]:
        mesh = init_device_mesh("cpu", (2,))
        return mesh, mesh.topology

    assert all(topology == Topology.default("cpu") for _, topology in simulate(2)(fn)())
    assert AbstractMesh((2,)).topology == Topology.default("cuda")
    assert Topology.default("cuda", crossing=("dp",)).crossing == ("dp",)
    assert Topology.default("cuda").local.bandwidth > Topology.default("cuda").network.bandwidth


def test_topologies_compare_by_value() -> None:
    one = nodes_of(node_size=4, factors={"all_to_all": 2.0, "all_gather": 1.5})
    assert one == nodes_of(node_size=4, factors=(("all_gather", 1.5), ("all_to_all", 2.0)))
    assert len({one, pickle.loads(pickle.dumps(one))}) == 1
    assert (one.factor("all_to_all"), one.factor("all_reduce")) == (2.0, 1.0)
    assert str(one) == (
        "nodes of 4 ranks: local 10 us + 400 GB/s, network 30 us + 50 GB/s, memory 1 TB/s, "
        "all_gather x1.5, all_to_all x2"
    )
    assert str(nodes_of()).startswith("one node: ")
    assert str(nodes_of(crossing="dp")).startswith("nodes along dp: ")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0.0, 1e9), r"Link\(latency=0.0\): must be a positive"),
        (lambda: Link(1e-6, float("inf")), "bandwidth=inf"),
        (lambda: Topology(*LINKS[:2], memory=-1.0), "memory=-1.0"),
        (lambda: nodes_of(node_size=0), "node_size=0.*at least 1"),
        (
            lambda: nodes_of(node_size=4, crossing=("dp",)),
            r"node_size=4, crossing=\('dp',\).*give one",
        ),
        (lambda: nodes_of(factors={"gather": 2.0}), "'gather' is not one of"),
        (lambda: nodes_of(factors={"all_gather": 0}), "factors of all_gather=0"),
        (
            lambda: nodes_of(crossing=("x",)).node_ids(AbstractMesh((2,), ("dp",))),
            "'x' is not one of its axes",
        ),
        (
            lambda: setattr(AbstractMesh((2,), ("dp",)), "topology", nodes_of(crossing=("x",))),
            "'x' is not one of its axes",
        ),
    ],
)
def test_errors(make: object, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        make()  # type: ignore[operator]


def test_non_topology_raises() -> None:
    with pytest.raises(TypeError, match="must be a Topology"):
        AbstractMesh((2,)).topology = 8  # type: ignore[assignment]
