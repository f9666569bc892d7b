"""calibrate: valid numbers, equal on all ranks, kept until the topology is set. (No test checks
their values.)
"""

from __future__ import annotations

from math import isfinite

import pytest

from shardmesh.mesh import (
    AbstractMesh,
    DeviceMesh,
    MeshError,
    Topology,
    calibrate,
    comm_budget,
    current_world,
    init_device_mesh,
    null_world,
    simulate,
)
from shardmesh.mesh.topology import OPS
from tests.pool import Pool

FAST = 1e-3


def measured(**where: object) -> tuple[Topology, Topology, bool]:
    """Return (before, after, whether a second call communicates) on a mesh of all ranks."""
    mesh = init_device_mesh("cpu", (2, current_world().size // 2), axis_names=("dp", "tp"))
    mesh.topology = Topology.default("cpu", **where)  # type: ignore[arg-type]
    before, after = mesh.topology, calibrate(mesh, seconds=FAST)
    assert mesh.topology is after
    with comm_budget() as used:
        assert calibrate(mesh) is after
    mesh.topology = None
    return before, after, used.launches > 0


def check(before: Topology, after: Topology) -> None:
    numbers = [
        after.local.latency,
        after.local.bandwidth,
        after.network.latency,
        after.network.bandwidth,
        after.memory,
    ]
    assert all(isfinite(x) and x > 0 for x in [*numbers, *map(after.factor, OPS)])
    assert (after.node_size, after.crossing) == (before.node_size, before.crossing)
    assert after.local != before.local
    assert after.memory != before.memory


@pytest.mark.parametrize("where", [{}, {"node_size": 2}, {"crossing": ("dp",)}])
def test_simulated(where: dict[str, object]) -> None:
    found = simulate(4)(measured)(**where)
    assert len({after for _, after, _ in found}) == 1
    before, after, again = found[0]
    check(before, after)
    assert (after.network == before.network) == (where == {})
    assert not again


def test_nodes_of_different_sizes() -> None:
    def fn() -> Topology:
        mesh = init_device_mesh("cpu", (3,))
        mesh.topology = Topology.default("cpu", node_size=2)
        return calibrate(mesh, seconds=FAST)

    assert len(set(simulate(3)(fn)())) == 1


def test_gloo(world4: Pool) -> None:
    found = world4(measured, node_size=2)
    assert len({after for _, after, _ in found}) == 1
    check(*found[0][:2])
    assert found[0][1].network != found[0][0].network


def test_nothing_to_measure() -> None:
    def fn() -> bool:
        rank = current_world().rank
        outside = DeviceMesh("cpu", [0, 1])
        alone = DeviceMesh("cpu", [rank])
        same = calibrate(alone) == Topology.default("cpu")
        return same and (rank < 2 or calibrate(outside) == Topology.default("cpu"))

    assert all(simulate(3)(fn)())


def test_null_world() -> None:
    with null_world(8):
        check(Topology.default("cpu"), calibrate(init_device_mesh("cpu", (8,)), seconds=FAST))
        meta = init_device_mesh("meta", (8,))
        assert calibrate(meta) == meta.topology == Topology.default("meta")


def test_errors() -> None:
    with pytest.raises(MeshError, match=r"no devices to measure.*Topology\.default"):
        calibrate(AbstractMesh((2,)))
    with pytest.raises(MeshError, match=r"seconds=0.*positive"), null_world(2):
        calibrate(init_device_mesh("cpu", (2,)), seconds=0)

    def fn() -> None:
        mesh = init_device_mesh("cpu", (2,))
        if mesh.get_rank():
            mesh.topology = Topology.default("cpu", node_size=1)
        calibrate(mesh)

    with pytest.raises(
        MeshError, match=r"rank 0 has the topology \(one node.*rank 1 has \(nodes of 1 ranks"
    ):
        simulate(2)(fn)()
