"""Caches of a mesh for its layouts: lifetime, threads and invalidation."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.layout.bounded_cache import LayoutCache
from shardmesh.sharding.layout.layout import MeshLayouts
from shardmesh.sharding.redistribute.executor import executor


def test_a_mesh_is_freed_with_its_layouts():
    mesh = sm.AbstractMesh((2, 2), ("a", "b"))
    layout = Layout.of(mesh, P("a"), (4, 4))
    LayoutCache().keep(layout, layout.replace(P("b")), layout)
    alive = weakref.ref(mesh), weakref.ref(layout)
    del mesh, layout
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_layouts_of_equal_meshes_are_kept_apart():
    one, other = (sm.AbstractMesh((2,), ("a",)) for _ in range(2))
    assert one == other
    assert Layout.of(one, P("a"), (4,)) is not Layout.of(other, P("a"), (4,))
    assert MeshLayouts.of(one) is not MeshLayouts.of(other)


def test_threads_that_begin_at_once_share_the_layouts_of_a_mesh():
    for _ in range(20):
        mesh, found, together = sm.AbstractMesh((2,), ("a",)), [], threading.Barrier(4)

        def look(mesh=mesh, found=found, together=together):
            together.wait()
            found.append(MeshLayouts.of(mesh))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len(set(map(id, found))) == 1


def test_a_new_topology_drops_compiled_plans_here_and_in_parts():
    with sm.debug.null_world(4):
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
        other = mesh["a"]
        other.topology = sm.topology.Topology.default("cuda")
        pairs = [
            (Layout.of(m, P(m.axis_names[-1]), (4,), torch.float32), Layout.of(m, P(), (4,)))
            for m in (mesh, mesh["b"], other)
        ]
        before = [executor(*pair) for pair in pairs]
        mesh.topology = sm.topology.Topology.default("cuda", node_size=2)
        assert [executor(*pair) is kept for pair, kept in zip(pairs, before, strict=True)] == [
            False,
            False,
            True,
        ]


def test_the_shape_may_be_any_sequence():
    mesh = sm.AbstractMesh((2,), ("a",))
    shapes = ((4, 2), [4, 2], torch.Size((4, 2)), torch.tensor((4, 2)).numpy())
    assert len({Layout.of(mesh, P("a"), shape) for shape in shapes}) == 1
