"""DeviceMesh in the simulated world: slices, groups, identity. Real processes are in
test_process.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from shardmesh.mesh import DeviceMesh, MeshError, current_world, init_device_mesh, simulate
from tests.tiers import examples

NAMES = ("a", "b", "c")


@st.composite
def meshes_and_axes(draw: st.DrawFn) -> tuple[np.ndarray, tuple[str, ...]]:
    """Draw an arrangement of some ranks of a world of eight, and some of its axes in some order."""
    shape = draw(
        st.sampled_from([(1,), (3,), (8,), (2, 2), (2, 3), (4, 2), (1, 5), (2, 2, 2), (3, 1, 2)])
    )
    ranks = draw(st.permutations(range(8)))[: int(np.prod(shape))]
    names = draw(st.permutations(NAMES[: len(shape)]))
    return np.array(ranks).reshape(shape), tuple(names[: draw(st.integers(1, len(shape)))])


@settings(max_examples=examples(60))
@given(case=meshes_and_axes())
def test_slices_and_groups(case: tuple[np.ndarray, tuple[str, ...]]) -> None:
    ranks, axes = case

    def fn() -> None:
        mesh = DeviceMesh("cpu", ranks, axis_names=NAMES[: ranks.ndim])
        me = current_world().rank
        part = mesh[axes]
        assert part.shape == tuple(mesh.size(a) for a in axes)
        assert part.axis_names == axes
        assert part is mesh[axes]
        flat = mesh.flatten(axes)
        assert flat is mesh.flatten(axes)
        assert flat.ranks.tolist() == part.ranks.flatten().tolist()
        if mesh.coordinate is None:
            assert me not in ranks
            assert part.coordinate is None
            return
        assert ranks[mesh.coordinate] == me
        assert part.coordinate == tuple(mesh.get_local_rank(a) for a in axes)
        for rank in part.ranks.flat:
            place = mesh.coordinate_of(int(rank))
            assert place is not None
            assert all(
                place[i] == mesh.coordinate[i]
                for i in range(mesh.ndim)
                if mesh.axis_names[i] not in axes
            )
        group = mesh.group(axes)
        assert group.ranks == tuple(sorted(part.ranks.flat))
        assert group is mesh.group(axes) is part.group() is flat.group()

    simulate(8)(fn)()


def on_rank(rank: int, size: int, fn: Callable[[], Any]) -> Any:
    return simulate(size)(lambda: fn() if current_world().rank == rank else None)()[rank]


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))


def test_torch_api() -> None:
    def fn() -> None:
        mesh = grid()
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mesh.get_rank() == 4
        assert mesh.get_coordinate() == [1, 1]
        assert mesh.coordinate == (1, 1)
        assert (mesh.get_local_rank("tp"), mesh.get_local_rank(0), mesh["tp"].get_local_rank()) == (
            1,
            1,
            1,
        )
        assert (mesh.ndim, mesh.shape, mesh.size(), mesh.size(1), mesh.size("dp")) == (
            2,
            (2, 3),
            6,
            3,
            2,
        )
        assert mesh["tp"].mesh.tolist() == [3, 4, 5]
        assert mesh.flatten(("dp", "tp")).axis_names == ("dp_tp",)
        assert mesh["dp_tp"].size() == mesh.group("dp_tp").size == 6
        assert (mesh.device_type, mesh.device) == ("cpu", torch.device("cpu"))
        assert repr(mesh) == "DeviceMesh(cpu, dp=2, tp=3)"

    on_rank(4, 6, fn)


def test_identity() -> None:
    def fn() -> None:
        mesh = grid()
        assert grid() is mesh
        assert DeviceMesh("cpu", torch.arange(6).view(2, 3), axis_names=("dp", "tp")) is mesh
        assert pickle.loads(pickle.dumps(mesh)) is mesh
        assert pickle.loads(pickle.dumps(mesh["tp"])) is mesh["tp"]
        assert mesh["dp", "tp"] is mesh
        assert mesh["tp", "dp"] is mesh["tp", "dp"]
        assert mesh["tp", "dp"]["dp"] is mesh["dp"]
        assert mesh["tp", "dp"] != mesh
        assert init_device_mesh("meta", (2, 3), axis_names=("dp", "tp")) != mesh
        assert len({mesh, grid(), mesh["tp"]}) == 2

    on_rank(1, 6, fn)


def test_ranks_outside_a_mesh() -> None:
    def fn() -> None:
        mesh = DeviceMesh("cpu", [[4, 0], [1, 3]], axis_names=("a", "b"))
        assert mesh.coordinate is None
        assert mesh.get_coordinate() is None
        assert mesh["b"].ranks.tolist() == [4, 0]
        assert mesh["b"].coordinate is None
        for call in (lambda: mesh.group("a"), lambda: mesh.get_local_rank("a")):
            with pytest.raises(MeshError, match=r"rank 2 is outside DeviceMesh\(cpu, a=2, b=2\)"):
                call()

    on_rank(2, 5, fn)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: init_device_mesh("cpu", (2, 8)),
            r"axis_1=8\) needs 16 ranks, but the world has 6\. Either start 16",
        ),
        (
            lambda: init_device_mesh("cpu", (2, 2)),
            r"needs 4 ranks, but the world has 6.*product is 6.*DeviceMesh\(",
        ),
        (
            lambda: init_device_mesh("cpu", (2, 3), axis_names=("a",)),
            "has 2 axes, but the names given are",
        ),
        (lambda: init_device_mesh("cpu", (2, 3), axis_names=("a", "a")), "used twice"),
        (
            lambda: init_device_mesh("cpu", (6,), axis_names=("a",), mesh_dim_names=("b",)),
            "differ, but both name the axes",
        ),
        (lambda: init_device_mesh("cpu", (-6,)), "positive integers"),
        (lambda: init_device_mesh("gpu", (6,)), "device type 'gpu': must be one that torch knows"),
        (lambda: init_device_mesh("cuda:0", (6,)), "without an index"),
        (lambda: DeviceMesh("cpu", [0, 9]), r"ranks \[9\] do not exist: the world has 6"),
        (lambda: DeviceMesh("cpu", [0, 1, 0]), r"ranks \[0\] appear more than once"),
        (lambda: DeviceMesh("cpu", [0.0, 1.0]), "array of integer ranks"),
        (lambda: DeviceMesh("cpu", 3), "array of integer ranks"),
        (lambda: DeviceMesh("cpu", []), "array of integer ranks"),
        (lambda: grid()["pp"], r"unknown axis 'pp': the mesh has axes \['dp', 'tp'\]"),
        (lambda: grid()["tp", "tp"], "'tp' is used twice"),
        (lambda: grid().group(("tp", "x")), "unknown axis 'x'"),
        (lambda: grid().get_local_rank(), "has 2 axes; name one of"),
        (lambda: grid().get_group("tp"), r"no torch process groups; use mesh.group\('tp'\)"),
        (lambda: grid().to_torch(), "no torch process groups"),
        (lambda: DeviceMesh.from_torch(None), "no torch process groups"),
    ],
)
def test_errors(make: Callable[[], object], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        on_rank(0, 6, make)


def test_slices_by_flattened_names() -> None:
    def fn() -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "cp"))
        flat = mesh["shard", "cp"]._flatten("shard_cp")
        assert mesh["shard_cp"] is flat
        assert flat.ranks.tolist() == [4, 5, 6, 7]
        both = mesh["replicate", "shard_cp"]
        assert both.axis_names == ("replicate", "shard_cp")
        assert both.ranks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert both["shard_cp"] is flat
        assert both["replicate"] is mesh["replicate"]
        assert mesh.group(("replicate", "shard_cp")) is mesh.group()

    on_rank(5, 8, fn)


def test_errors_subclass_those_of_torch() -> None:
    for kind, make in [
        (KeyError, lambda: grid()["pp"]),
        (KeyError, lambda: grid().get_local_rank("pp")),
        (IndexError, lambda: grid().get_local_rank(2)),
        (RuntimeError, lambda: grid().get_local_rank()),
        (RuntimeError, lambda: grid().get_group()),
        (RuntimeError, lambda: init_device_mesh("cpu", (3, 3))),
        (RuntimeError, lambda: init_device_mesh("cpu", (2, 3), mesh_dim_names=("a",))),
        (RuntimeError, lambda: init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "a"))),
        (RuntimeError, lambda: init_device_mesh("cpu:0", (6,))),
    ]:
        with pytest.raises(kind) as caught:
            on_rank(0, 6, make)
        assert isinstance(caught.value, MeshError)


def test_functional_collectives_raise_in_a_simulated_world() -> None:
    def fn() -> None:
        mesh: Any = grid()
        assert isinstance(mesh, TorchMesh)
        assert type(mesh) is DeviceMesh
        assert pickle.loads(pickle.dumps(mesh)) is copy.copy(mesh) is mesh
        for where in (mesh["tp"], (mesh, 1)):
            with pytest.raises(MeshError, match=r"get_group\(.*has no torch process groups"):
                funcol.all_reduce(torch.ones(2), "sum", where)

    on_rank(0, 6, fn)


def test_a_mesh_of_a_hundred_thousand_ranks() -> None:
    from shardmesh.mesh import null_world

    with null_world(100_000, rank=12_345):
        mesh = init_device_mesh("meta", (1000, 100), axis_names=("dp", "tp"))
        assert mesh.coordinate == (123, 45)
        assert mesh.group("tp").ranks[0] == 12_300
