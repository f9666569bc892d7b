"""Duplicates of meshes: process groups of their own, for a second thread that communicates."""

from __future__ import annotations

import pickle
import threading

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.errors import MeshError
from tests.sharding.ranks import every_rank

STEPS = 40


def _communicate_in_two_threads():
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
    background = mesh.duplicate("background")
    whole = torch.arange(32.0).view(8, 4)
    x = sm.device_put(whole, mesh, P("a"))
    with sm.debug.comm_budget() as used:
        copy = sm.device_put(x, background, P("a"))
    assert used.bytes_received == 0
    gathered, failures = [], []

    def redistribute() -> None:
        try:
            for step in range(STEPS):
                gathered.append((copy * step).redistribute(P(None, "b")).full_tensor())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=redistribute)
    thread.start()
    totals = [(x * step).redistribute(P("b")).sum().item() for step in range(STEPS)]
    thread.join()
    if failures:
        raise failures[0]
    assert all(torch.equal(one, whole * step) for step, one in enumerate(gathered))
    return len(gathered), totals == [whole.sum().item() * step for step in range(STEPS)]


def test_a_thread_redistributes_while_the_main_thread_does(world4):
    assert world4(_communicate_in_two_threads) == [(STEPS, True)] * 4


def _own_groups():
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
    own = mesh.duplicate("own")
    assert own is mesh.duplicate("own") is not mesh.duplicate("other")
    assert own != mesh
    for axes in ("a", "b", ("a", "b")):
        assert own.group(axes) is not mesh.group(axes)
        assert own.group(axes).ranks == mesh.group(axes).ranks
    assert own["a"].group() is own.group("a")
    assert own.flatten().group() is own.group(("a", "b"))
    assert own.unflatten("a", (2, 1), ("c", "d")).group("c") is own.group("a")
    assert own.get_group("a") is not mesh.get_group("a")
    assert pickle.loads(pickle.dumps(own)) is own
    return own.get_group("a").group_name != mesh.duplicate("other").get_group("a").group_name


def test_parts_of_a_duplicate_have_its_groups(world4):
    assert world4(_own_groups) == [True] * 4


@every_rank(2, 2)
def test_a_duplicate_has_the_topology_of_the_mesh(mesh):
    own = mesh.duplicate("own")
    mesh.topology = sm.topology.Topology.default("cuda", node_size=2)
    assert own.topology == mesh.topology
    assert repr(own) == "DeviceMesh(cpu, a=2, b=2, communicator='own')"


@every_rank(2, 2)
def test_a_duplicate_needs_a_name_and_a_mesh_that_is_none(mesh):
    with pytest.raises(MeshError, match="give a name for the groups"):
        mesh.duplicate("")
    with pytest.raises(MeshError, match="is a duplicate already"):
        mesh.duplicate("one").duplicate("two")
