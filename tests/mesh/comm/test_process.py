"""The world of gloo processes, run in the shared worker pools."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

from shardmesh.mesh import (
    CollectiveError,
    DeviceMesh,
    Group,
    MeshError,
    comm_budget,
    current_world,
    init_device_mesh,
    simulate,
)
from shardmesh.mesh.processes import process
from tests.mesh.comm.collectives import DTYPES, as_bytes, rank_values
from tests.pool import Pool

Found = list[tuple[str, list[int]]]


def everyone() -> Group:
    return current_world().group(range(current_world().size))


def all_collectives(numel: int) -> Found:
    """Run every collective on every dtype, also with a 0-d tensor, several dims and uneven and
    empty parts.
    """
    group, found = everyone(), []

    def note(name: str, x: torch.Tensor) -> None:
        found.append((f"{name} {x.dtype}", as_bytes(x).tolist()))

    for dtype in DTYPES:
        x, n = rank_values(group.rank, (numel,), dtype), group.size
        for op in ("sum", "product") if dtype.is_complex else ("sum", "product", "max", "min"):
            whole = rank_values(group.rank, (n, 1, numel), dtype)
            part = torch.empty(1, numel, dtype=dtype)
            group.reduce_scatter(part, whole, op)
            group.all_reduce(whole, op)
            note(f"reduce_scatter {op}", part)
            note(f"all_reduce {op}", whole)
        for shape in ((numel,), (), (2, numel)):
            out = torch.empty((n, *shape), dtype=dtype)
            group.all_gather(out, rank_values(group.rank, shape, dtype))
            note("all_gather", out)
        splits = [(group.rank + r) % 3 * (numel > 0) for r in range(n)]
        out = torch.empty(sum(splits), dtype=dtype)
        group.all_to_all(out, rank_values(group.rank, (sum(splits),), dtype), splits, splits)
        note("all_to_all", out)
        group.broadcast(x, n - 1)
        note("broadcast", x)
    group.barrier()
    return found


@pytest.mark.parametrize("numel", [0, 1, 3])
def test_gloo_equals_the_simulated_world(world4: Pool, numel: int) -> None:
    assert world4(all_collectives, numel) == simulate(4)(all_collectives)(numel)


def counted_groups() -> tuple[int, int, list[float]]:
    """(groups made for the three axes and for all ranks, groups made in all, results)."""
    process._world = None  # as in a process that has not made a group yet
    made, new_group = [], dist.new_group
    dist.new_group = lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2), axis_names=("a", "b", "c"))
        x = torch.tensor(1.0 + mesh.get_rank())
        seen = [reduced(mesh, axes, x) for axes in ("a", "b", "c", "a", ("a", "b", "c"))]
        per_axis = len(made)
        seen += [reduced(mesh, axes, x) for axes in (("a", "b"), ("b", "a"))]
        seen += [reduced(mesh.flatten(("a", "b")), None, x), reduced(mesh["b", "a"], None, x)]
        assert all(mesh.get_rank() in args[0] for args in made)
        return per_axis, len(made), seen
    finally:
        dist.new_group = new_group


def reduced(mesh: DeviceMesh, axes: Any, x: torch.Tensor) -> float:
    y = x.clone()
    mesh.group(axes).all_reduce(y)
    return y.item()


@pytest.mark.slow
def test_each_rank_creates_only_its_own_groups(world8: Pool) -> None:
    for rank, (per_axis, in_all, seen) in enumerate(world8(counted_groups)):
        assert (per_axis, in_all) == (4, 5)
        a, b, c = rank // 4, rank // 2 % 2, rank % 2
        along = [[r for r in range(8) if (r // 2 % 2, r % 2) == (b, c)]]
        along += [
            [r for r in range(8) if (r // 4, r % 2) == (a, c)],
            [r for r in range(8) if r // 2 == rank // 2],
        ]
        along += [along[0], list(range(8)), *[[r for r in range(8) if r % 2 == c]] * 4]
        assert seen == [sum(1.0 + r for r in ranks) for ranks in along]


def asking_is_free() -> bool:
    """Request the group on rank 0 only; no rank waits for another."""
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("x", "y"))
    return mesh.get_rank() != 0 or mesh.group("y").ranks == (0, 1)


def test_requesting_a_group_does_not_communicate(world4: Pool) -> None:
    assert all(world4(asking_is_free))


def sub_world() -> tuple[Any, Any, Any]:
    mesh = DeviceMesh("cpu", [[3, 1]], axis_names=("a", "b"))
    gathered = None
    if mesh.coordinate is not None:
        out = torch.empty(2)
        mesh.group("b").all_gather(out, torch.tensor([float(mesh.get_rank())]))
        gathered = out.tolist()
    return mesh.coordinate, mesh["b"].coordinate, gathered


def test_mesh_over_a_subset_of_ranks(world4: Pool) -> None:
    outside = (None, None, None)
    assert world4(sub_world) == [
        outside,
        ((0, 1), (1,), [1.0, 3.0]),
        outside,
        ((0, 0), (0,), [1.0, 3.0]),
    ]


def identities() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    return [
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) is mesh,
        pickle.loads(pickle.dumps(mesh)) is mesh,
        copy.deepcopy(mesh) is mesh,
        mesh["tp"] is mesh["tp"],
        mesh["tp", "dp"]["tp"] is mesh["tp"],
        all(m is mesh for m in mesh.group().all_gather_object(mesh)),
        all(m == mesh["tp"] for m in mesh.group("tp").all_gather_object(mesh["tp"])),
        isinstance(mesh.get_group("tp"), dist.ProcessGroup),
        mesh.get_group() is dist.group.WORLD if mesh.ndim == 1 else True,
        mesh.flatten().get_group() is dist.group.WORLD,
        mesh.get_all_groups() == [mesh.get_group("dp"), mesh.get_group(1)],
    ]


def test_equal_meshes_are_the_same_object(world4: Pool) -> None:
    for found in world4(identities):
        assert all(found), found


def torch_meshes() -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    theirs = mesh.to_torch()
    flat = mesh["tp"].to_torch()
    x = torch.tensor(float(mesh.get_rank()))
    dist.all_reduce(x, group=theirs.get_group("tp"))
    made = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("p", "q"))
    ours = DeviceMesh.from_torch(made)
    pairs = DeviceMesh.from_group(made.get_group("q"), "cpu", axis_names=("q",))
    both = DeviceMesh.from_group(
        made.get_all_groups(), "cpu", [[0, 1], [2, 3]], mesh_dim_names=("p", "q")
    )
    return [
        isinstance(theirs, TorchMesh)
        and theirs.mesh_dim_names == ("dp", "tp")
        and theirs.shape == (2, 2),
        theirs.get_group("tp") is mesh.get_group("tp"),
        isinstance(mesh, TorchMesh) and type(mesh) is DeviceMesh,
        DeviceMesh.from_torch(made["q"]) is ours["q"] and DeviceMesh.from_torch(made) is ours,
        mesh.to_torch() is theirs and DeviceMesh.from_torch(theirs) is mesh,
        flat.mesh.tolist() == mesh["tp"].mesh.tolist(),
        x.item() == (1.0 if mesh.get_rank() < 2 else 5.0),
        ours.axis_names == ("p", "q") and ours.shape == (2, 2),
        pairs.ranks.tolist() == dist.get_process_group_ranks(made.get_group("q")),
        both is ours,
        reduced(ours, "q", torch.tensor(1.0)) == 2.0,
    ]


def test_to_and_from_torch(world4: Pool) -> None:
    for found in world4(torch_meshes):
        assert all(found), found


def functional_collectives() -> list[Any]:
    warnings.simplefilter("ignore", FutureWarning)  # torch's names since 2.13 are not those of 2.11
    mesh: Any = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    x, where = torch.arange(4.0) + 10 * mesh.get_rank(), (mesh, 1)
    return [
        funcol.all_reduce(x, "sum", mesh["dp"]).tolist(),
        funcol.all_reduce(x, "sum", (mesh, 0)).tolist(),
        funcol.all_gather_tensor(x[:1], 0, where).tolist(),
        funcol.reduce_scatter_tensor(x, "sum", 0, where).tolist(),
        funcol.all_to_all_single(x, None, None, where).tolist(),
    ]


def test_functional_collectives_accept_a_mesh_and_an_axis(world4: Pool) -> None:
    for rank, found in enumerate(world4(functional_collectives)):
        pair, place = [rank // 2 * 2, rank // 2 * 2 + 1], rank % 2
        summed = [2.0 * i + 10 * (place + place + 2) for i in range(4)]
        mine = slice(2 * place, 2 * place + 2)
        assert found == [
            summed,
            summed,
            [10.0 * r for r in pair],
            [2 * i + 10.0 * sum(pair) for i in range(4)][mine],
            [i + 10.0 * r for r in pair for i in range(4)[mine]],
        ]


def bad_groups() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
    a, b = mesh.get_all_groups()
    return [
        message(lambda: DeviceMesh.from_group([a, b], "cpu"), MeshError),
        message(
            lambda: DeviceMesh.from_group([b, a], "cpu", [[0, 1], [2, 3]], axis_names=("a", "b")),
            MeshError,
        ),
        message(lambda: DeviceMesh.from_group([a], "cpu", [[0, 1], [2, 3]]), MeshError),
        message(lambda: init_device_mesh("cpu", (3, 2), axis_names=("dp", "tp")), MeshError),
        message(lambda: init_device_mesh("cpu", (4,), backend="mpi"), MeshError),
        message(lambda: DeviceMesh("cpu", [0, 4]), MeshError),
        message(lambda: everyone().all_reduce(torch.ones(2), "avg"), CollectiveError),
    ]


def message(call: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def test_errors_are_the_same_on_every_rank(world4: Pool) -> None:
    found = world4(bad_groups)
    expected = [
        "give mesh=, the array of ranks",
        "but the group given for it has ranks",
        "1 groups for the 2 axes",
        "(dp=3, tp=2) needs 6 ranks, but the world has 4. Either start 6 processes",
        "backend='mpi', but the default process group exists already, with {",
        "ranks [4] do not exist: the world has 4",
        "unknown reduction 'avg'",
    ]
    for texts in found:
        for part, text in zip(expected, texts, strict=True):
            assert part in text
    assert all(texts[3:] == found[0][3:] for texts in found)


def budget() -> tuple[int, dict[str, tuple[int, int]]]:
    with comm_budget() as used:
        everyone().all_reduce(torch.ones(8))
        everyone().all_gather_object("x")
    return used.launches, used.by_op


def test_collectives_are_counted(world4: Pool) -> None:
    for launches, by_op in world4(budget):
        assert launches == 2
        assert by_op["all_reduce"] == (1, 48)


def many_groups(seed: int) -> bool:
    """Use random subsets in an order shared by all ranks: groups are created lazily and never wait
    for non-members.
    """
    rng, world, right = random.Random(seed), current_world(), True
    for _ in range(20):
        ranks = rng.sample(range(world.size), rng.randint(1, world.size))
        if world.rank in ranks:
            x = torch.tensor(float(world.rank))
            world.group(ranks).all_reduce(x)
            right = right and x.item() == sum(ranks)
    return right


def test_random_groups(world4: Pool) -> None:
    assert all(world4(many_groups, 7))
