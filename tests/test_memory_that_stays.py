"""What lives on after its last use: meshes, finished worlds, caches of a program whose lengths
always change.
"""

from __future__ import annotations

import gc
import shutil
import weakref
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.compat import local_map
from shardmesh.mesh.comm.world import World
from shardmesh.mesh.device_mesh import DeviceMesh
from shardmesh.parallel import colwise, data_parallel, fully_shard, parallelize, rowwise
from shardmesh.sharding.layout.layout import MeshLayouts
from tests.sharding.ranks import every_rank

AXIS = "dp"


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Keep what earlier tests of the process have left, such as imported modules, out of the
    collections of these tests, which would take seconds each.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _model():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def _train(model, optimizer=torch.optim.AdamW):
    stepped = optimizer(model.parameters())
    for _ in range(2):
        model(torch.ones(4, 8)).log_softmax(-1).sum().backward()
        sm.training.clip_grad_norm_(model.parameters(), 1.0)
        stepped.step()
        stepped.zero_grad()
    return stepped


def _vector(mesh):
    return sm.device_put(torch.ones(8, 4), mesh, P(AXIS))


def _tensors(mesh, folder):
    x = _vector(mesh).requires_grad_()
    (x * 2).softmax(0).sum().backward()
    x.redistribute(P(None, AXIS)).sum().item()
    torch.vmap(lambda row: row * 2)(torch.ones(2))
    sm.grad(lambda x: (x * x).sum())(x.detach())
    sm.debug.explain(x, P(None, AXIS))


def _data_parallel(mesh, folder):
    _train(data_parallel(_model(), mesh))


def _zero(mesh, folder):
    _train(data_parallel(_model(), mesh, optimizer=AXIS))


def _fsdp(mesh, folder):
    _train(fully_shard(_model(), mesh, units=nn.Linear))


def _tensor_parallel(mesh, folder):
    _train(parallelize(_model(), mesh, {"1": colwise(axis=AXIS), "3": rowwise(axis=AXIS)}))


def _muon(mesh, folder):
    _train(fully_shard(_model(), mesh), sm.optim.Muon)


def _shampoo(mesh, folder):
    _train(fully_shard(_model(), mesh), sm.optim.Shampoo)


def _checkpoint(mesh, folder):
    model = fully_shard(_model(), mesh)
    optimizer = _train(model)
    sm.checkpoint.save(sm.checkpoint.state_dict(model, optimizer), folder, step=1)
    mesh.group().barrier()
    sm.checkpoint.load_state_dict(
        model,
        sm.checkpoint.load(folder, like=sm.checkpoint.state_dict(model, optimizer)),
        optimizer,
    )


@sm.shard_map(in_specs=P(AXIS), out_specs=P())
def _mapped(x):
    return sm.psum(x.sum(), AXIS)


@local_map(out_placements=P(AXIS), in_placements=(P(AXIS),))
def _locally(x):
    return x * 2


@sm.jit
def _compiled(x):
    return (x * 2).sum()


def _functions(mesh, folder):
    for _ in range(3):
        _mapped(_vector(mesh))
        _locally(_vector(mesh))


def _jit(mesh, folder):
    for _ in range(2):
        _compiled(_vector(mesh))


PROGRAMS = [
    _tensors,
    _data_parallel,
    _zero,
    _fsdp,
    _tensor_parallel,
    _muon,
    _shampoo,
    _checkpoint,
    _functions,
    _jit,
]


def _alive(kind):
    gc.collect()
    gc.collect()
    return [x for x in gc.get_objects() if isinstance(x, kind)]


@pytest.mark.one_in(3)  # what holds a world mostly holds its meshes, which the next test drops
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__.lstrip("_"))
def test_finished_worlds_are_freed(program, tmp_path):
    """Worlds that others keep, such as a fixture of another test, are alive before and after."""
    worlds: list[weakref.ref[World]] = []

    def run():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=(AXIS,))
        worlds.append(weakref.ref(mesh.world))
        program(mesh, tmp_path / "checkpoint")

    sm.simulate(2)(run)()
    gc.collect()
    gc.collect()
    assert [world() for world in worlds] == [None, None]


@pytest.mark.parametrize("program", PROGRAMS[:-1], ids=lambda program: program.__name__.lstrip("_"))
def test_dropped_meshes_are_freed(program, tmp_path):
    """In one world, each with names of its own. (A function of `sm.jit` keeps its last
    signatures.)
    """
    rounds = 4

    def run():
        base = sm.init_device_mesh("cpu", (2,), axis_names=("base",))
        meshes = []
        for number in range(rounds):
            mesh = DeviceMesh("cpu", [[0, 1]], axis_names=(f"axis{number}", AXIS))
            meshes.append(weakref.ref(mesh))
            folder = tmp_path / f"{number}"
            program(mesh[AXIS] if program is _checkpoint else mesh, folder)
            base.group().barrier()
            shutil.rmtree(folder, ignore_errors=True)
        del mesh
        base.group().barrier()
        _alive(DeviceMesh)
        return sum(mesh() is not None for mesh in meshes)

    # What runs when a rank ends or begins (a frame, the last collective) may keep the last mesh.
    assert max(sm.simulate(2)(run)()) <= 1


@every_rank(2, 2)
def test_a_mesh_lives_as_long_as_its_parts_and_tensors(mesh):
    whole = sm.init_device_mesh("cpu", (2, 2), axis_names=("x", "y"))
    number, part = id(whole), whole["y"]
    del whole
    gc.collect()
    again = sm.init_device_mesh("cpu", (2, 2), axis_names=("x", "y"))
    assert id(again) == number
    assert again["y"] is part
    x = sm.device_put(torch.ones(4), again, P("x"))
    del again, part
    gc.collect()
    assert sm.init_device_mesh("cpu", (2, 2), axis_names=("x", "y")) is x.mesh


@every_rank(2, 2)
def test_what_the_program_has_set_on_a_mesh_stays(mesh):
    """Otherwise ranks that have collected the mesh would plan otherwise than those that
    have not.
    """
    topology = sm.topology.Topology.default("cuda", node_size=2)
    sm.init_device_mesh("cpu", (2, 2), axis_names=("x", "y")).topology = topology
    sm.set_mesh(sm.init_device_mesh("cpu", (2, 2), axis_names=("u", "v")))
    gc.collect()
    assert sm.init_device_mesh("cpu", (2, 2), axis_names=("x", "y")).topology == topology
    current = sm.get_mesh()
    assert current is not None
    assert current.axis_names == ("u", "v")
    reference = weakref.ref(current)
    del current
    sm.set_mesh(None)
    gc.collect()
    assert reference() is None


def test_caches_of_lengths_that_always_change_are_bounded():
    """The bounds that docs/architecture.md states."""

    def run():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=(AXIS,))
        model = parallelize(_model(), mesh, {"1": colwise(axis=AXIS), "3": rowwise(axis=AXIS)})
        for length in range(1, 300):
            model(torch.ones(length, 8))
            _mapped(sm.ones(length, device_mesh=mesh, placements=P(AXIS)))
        for length in range(3000):
            Layout.of(mesh, P(AXIS), (length, 3))
        cache = MeshLayouts.of(mesh)
        strategies = cast(Any, model[1].weight)._layout.strategies
        assert len(cache.recent) <= 2048
        assert len(strategies) <= 1024
        caches = [values for x in cache.alive.values() for values in x.caches.values()]
        assert caches
        assert all(len(values) <= 256 for values in caches)
        assert len(cache.functions[_mapped]) <= 256
        gc.collect()
        return len(cache.alive)

    assert max(sm.simulate(2)(run)()) <= 2048 + 100
