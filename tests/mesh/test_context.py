"""The current mesh: set by a call or for a block, separately for each world and thread."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.world import World
from shardmesh.mesh.context import get_mesh, given_or_current, set_mesh
from shardmesh.mesh.errors import MeshError
from tests.sharding.ranks import every_rank

pytestmark = pytest.mark.usefixtures("one_rank_job")


@every_rank(2, 2)
def test_set_mesh_takes_effect_at_the_call(mesh):
    assert get_mesh() is None
    set_mesh(mesh)
    assert get_mesh() is mesh
    assert sm.zeros(4).mesh is mesh
    set_mesh(mesh["a"])
    assert get_mesh() is mesh["a"]
    assert given_or_current(mesh) is mesh
    set_mesh(None)
    with pytest.raises(
        TypeError, match=r"give the mesh .* `with mesh:` or after sm\.set_mesh\(mesh\)$"
    ):
        sm.zeros(4)


@every_rank(2, 2)
def test_blocks_nest_and_restore_the_previous_mesh(mesh):
    with set_mesh(mesh) as entered:
        assert entered is mesh
        with mesh["a"]:
            assert get_mesh() is mesh["a"]
            with set_mesh(mesh["b"]):
                assert get_mesh() is mesh["b"]
                with mesh:
                    assert get_mesh() is mesh
                assert get_mesh() is mesh["b"]
            assert get_mesh() is mesh["a"]
            with set_mesh(None):
                assert get_mesh() is None
        assert get_mesh() is mesh
    assert get_mesh() is None


@every_rank(2, 2)
def test_block_end_discards_meshes_set_inside(mesh):
    set_mesh(mesh["a"])
    with mesh:
        set_mesh(mesh["b"])
        set_mesh(None)
        set_mesh(mesh["b"])
        assert get_mesh() is mesh["b"]
    assert get_mesh() is mesh["a"]
    with set_mesh(mesh):
        set_mesh(mesh["b"])
    assert get_mesh() is mesh["a"]


@every_rank(2)
def test_an_exception_ends_a_block(mesh):
    for block in (mesh, set_mesh(mesh)):
        with pytest.raises(KeyError), block:
            raise KeyError
    assert get_mesh() is None


def test_each_rank_has_its_own_mesh():
    def rank():
        mesh = sm.init_device_mesh("cpu", (4,))
        if current_world().rank % 2:
            set_mesh(mesh)
        current_world().group(range(4)).barrier()
        return get_mesh() is mesh

    assert sm.simulate(4)(rank)() == [False, True, False, True]
    assert get_mesh() is None


def test_mesh_of_another_world_is_not_current():
    outer = sm.init_device_mesh("cpu", (1,), axis_names=("x",))

    def rank():
        assert get_mesh() is None
        with pytest.raises(TypeError, match="is set, but it is a mesh of another world") as error:
            sm.zeros(4)
        inner = sm.init_device_mesh("cpu", (2,))
        set_mesh(inner)
        assert get_mesh() is inner
        return str(error.value)

    with outer:
        first, second = sm.simulate(2)(rank)()
        assert first == second
        with sm.debug.null_world(8):
            assert get_mesh() is None
            inner = sm.init_device_mesh("cpu", (8,))
            with inner:
                assert get_mesh() is inner
            set_mesh(inner)
        assert get_mesh() is outer
    assert get_mesh() is None


@every_rank(2)
def test_setting_a_mesh_of_another_world_raises(mesh):
    with sm.debug.null_world(8):
        text = (
            r"mesh of another world \(SimulatedWorld of size 2\), and this runs in NullWorld of "
            r"size 8"
        )
        with pytest.raises(MeshError, match=text):
            set_mesh(mesh)
        with pytest.raises(MeshError, match=text), mesh:
            pass
    assert get_mesh() is None


def test_set_mesh_accepts_only_meshes():
    for wrong in ("x", sm.AbstractMesh((2,), ("x",)), 3):
        with pytest.raises(TypeError, match="takes a DeviceMesh"):
            set_mesh(wrong)  # type: ignore[arg-type]
    assert get_mesh() is None


def test_new_thread_has_no_mesh():
    mesh, seen = sm.init_device_mesh("cpu", (1,), axis_names=("x",)), []
    with mesh:
        thread = threading.Thread(target=lambda: seen.append(get_mesh()))
        thread.start()
        thread.join()
        assert get_mesh() is mesh
    assert seen == [None]


def test_finished_world_is_released():
    def run() -> weakref.ref[World]:
        with sm.debug.null_world(8):
            set_mesh(sm.init_device_mesh("cpu", (8,)))
            return weakref.ref(current_world())

    over = run()
    gc.collect()
    assert over() is None
    assert get_mesh() is None


def test_null_worlds_are_independent():
    for _ in range(2):
        with sm.debug.null_world(8):
            assert get_mesh() is None
            set_mesh(sm.init_device_mesh("cpu", (8,)))


def _in_a_process(rank_count):
    mesh = sm.init_device_mesh("cpu", (rank_count,), axis_names=("x",))
    with set_mesh(mesh):
        x = sm.device_put(torch.arange(10.0), sm.P("x"))  # type: ignore[arg-type]
    return get_mesh() is None, x.mesh is mesh, x.full_tensor().tolist()


def test_in_processes(world4):
    assert world4(_in_a_process, 4) == [(True, True, list(range(10)))] * 4
