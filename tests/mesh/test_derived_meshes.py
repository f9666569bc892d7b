"""Meshes made of others: `unflatten`, `concatenate`, the root of a slice, backends of axes, and
torch's names of these.
"""

from __future__ import annotations

import importlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.device_mesh import init_device_mesh as torch_init_device_mesh

import shardmesh as sm
from shardmesh.mesh import (
    AbstractMesh,
    DeviceMesh,
    MeshError,
    Topology,
    current_world,
    init_device_mesh,
    simulate,
)
from tests.pool import Pool

# -- values ----------------------------------------------------------------------------------------


def test_unflatten() -> None:
    def program() -> None:
        world = init_device_mesh("cpu", (8,), axis_names=("world",))
        mesh = world.unflatten("world", (2, 1, 4), ("dp", "cp", "tp"))
        assert mesh.ranks.tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
        assert mesh.axis_names == ("dp", "cp", "tp")
        assert (
            mesh
            is world.unflatten(0, (2, 1, 4), ("dp", "cp", "tp"))
            is world._unflatten(-1, (2, 1, 4), ["dp", "cp", "tp"])
        )
        assert mesh.root is mesh["tp"].root is mesh["dp", "tp"]._get_root_mesh() is world
        assert world.root is world
        inner = mesh.unflatten("tp", (2, 2), ("ep", "etp"))
        assert inner.shape == (2, 1, 2, 2)
        assert inner["ep", "etp"].ranks.flatten().tolist() == mesh["tp"].ranks.tolist()
        assert inner.root is world
        assert inner["etp"].group() is inner.group("etp")
        assert world.unflatten(0, (8,), ("world",)) is world

    simulate(8)(program)()


@pytest.mark.parametrize(
    ("axis", "sizes", "names", "match"),
    [
        ("x", (2, 2), ("a", "b"), "unknown axis 'x'"),
        (2, (2, 2), ("a", "b"), "axis 2 is out of range"),
        (
            "world",
            (2, 3),
            ("a", "b"),
            "the product of the sizes is 6, but axis 'world' of .* has 4 ranks",
        ),
        ("world", (2, 2), ("a",), "has 2 axes, but the names given are"),
        ("world", (2, 2), ("a", "a"), "axis 'a' is used twice"),
        ("world", (2, -2), ("a", "b"), "must be a tuple of positive integers"),
        ("world", (2, 2), ("one", "b"), "axis 'one' is used twice"),
    ],
)
def test_unflatten_refuses(axis: Any, sizes: Any, names: Any, match: str) -> None:
    for mesh in (
        AbstractMesh((1, 4), ("one", "world")),
        simulate(4)(init_device_mesh)("cpu", (1, 4), axis_names=("one", "world"))[0],
    ):
        with pytest.raises(MeshError, match=match):
            mesh.unflatten(axis, sizes, names)


def test_an_unflattened_mesh_has_the_topology_of_its_root() -> None:
    world = AbstractMesh((8,), ("world",))
    mesh = world.unflatten("world", (2, 4), ("dp", "tp"))
    assert mesh.topology.nodes(mesh) == 1
    world.topology = Topology.default("cuda", node_size=4)
    assert mesh.topology.node_ids(mesh).tolist() == [[0] * 4, [1] * 4]
    assert mesh.topology.crossing_axes(mesh) == ("dp",)
    assert mesh["tp"].topology.nodes(mesh["tp"]) == 1
    world.topology = Topology.default("cuda", crossing=("world",))
    assert mesh.topology.nodes(mesh) == 8


def titan_meshes(dp_replicate: int, dp_shard: int, cp: int, tp: int, ep: int) -> dict[str, Any]:
    """Build meshes by the calls of a trainer: views of one world, for data, dense weights and
    experts.
    """
    batch, fsdp = dp_replicate * dp_shard, dp_shard * cp
    world = init_device_mesh("cpu", (batch * cp * tp,), mesh_dim_names=("world",))

    def view(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
        fake = {
            name: "fake"
            for name, size in zip(names, sizes, strict=True)
            if size == 1 and name != "fsdp"
        }
        return world._unflatten(0, sizes, names, backend_override=fake)

    data = view(("pp", "batch", "cp", "tp"), (1, batch, cp, tp))
    dense = view(("pp", "dp_replicate", "fsdp", "tp"), (1, dp_replicate, fsdp, tp))
    sparse = view(("pp", "dp_replicate", "efsdp", "ep"), (1, dp_replicate, fsdp * tp // ep, ep))
    return {
        "world": world,
        "data": data,
        "dense": dense,
        "sparse": sparse,
        "loss": data["batch", "cp"]._flatten("loss_mesh"),
    }


def test_meshes_of_a_trainer() -> None:
    def program() -> None:
        meshes = titan_meshes(2, 2, 1, 2, 4)
        data, dense, sparse, loss = (meshes[name] for name in ("data", "dense", "sparse", "loss"))
        assert loss.mesh_dim_names == ("loss_mesh",)
        assert loss.size() == 4
        assert data["tp"] is dense["tp"]
        assert data["tp"].group() is dense.group("tp")
        # An axis of one view with one of another, as fully_shard concatenates them.
        both = DeviceMesh._concatenate([dense["fsdp"], data["tp"]])
        assert both is dense["fsdp", "tp"]
        assert DeviceMesh.concatenate([data["cp"], dense["fsdp"]]).shape == (1, 2)
        mixed = DeviceMesh.concatenate([sparse["ep"], dense["dp_replicate"]])
        assert mixed.axis_names == ("ep", "dp_replicate")
        assert mixed.ranks.tolist() == sparse["ep", "dp_replicate"].ranks.tolist()
        wide = DeviceMesh.concatenate([loss, dense["tp"]])
        assert wide.ranks.tolist() == data["batch", "tp"].ranks.tolist()
        assert all(
            mesh.root is meshes["world"] for mesh in (data, dense, sparse, loss, both, mixed, wide)
        )
        sizes = {
            name: mesh[axis].size()
            for name, mesh, axis in [("ep", sparse, "ep"), ("efsdp", sparse, "efsdp")]
        }
        assert sizes == {"ep": 4, "efsdp": 1}

    simulate(8)(program)()


def test_concatenate_finds_axes_that_no_view_has() -> None:
    def program() -> None:
        world = init_device_mesh("cpu", (16,), axis_names=("world",))
        outer = world.unflatten(0, (2, 8), ("outer", "rest"))["outer"]
        inner = world.unflatten(0, (8, 2), ("other", "inner"))["inner"]
        mesh = DeviceMesh.concatenate([inner, outer])
        rank = current_world().rank
        first = rank % 8 // 2 * 2
        assert mesh.ranks.tolist() == [[first, first + 8], [first + 1, first + 9]]
        assert mesh.coordinate == (rank % 2, rank // 8)
        assert mesh["inner"] is inner
        assert mesh.group("outer") is outer.group()
        assert mesh.root is world
        # An axis whose ranks have no single distance.
        strided = world.unflatten(0, (2, 2, 2, 2), ("a", "b", "c", "d"))["a", "c"].flatten(
            name="ac"
        )
        mesh = DeviceMesh.concatenate([world.unflatten(0, (8, 2), ("other", "d"))["d"], strided])
        assert mesh.shape == (2, 4)
        assert mesh["ac"] is strided
        assert sorted(mesh.ranks.flatten()) == sorted(
            {rank & ~11 | a * 8 | c * 2 | d for a in (0, 1) for c in (0, 1) for d in (0, 1)}
        )

    simulate(16)(program)()


def test_concatenate_refuses() -> None:
    def program() -> list[str]:
        world = init_device_mesh("cpu", (8,), axis_names=("world",))
        texts = []
        half = DeviceMesh("cpu", [0, 1, 2, 3], axis_names=("half",))
        fsdp, tp = (world.unflatten(0, (4, 2), (a, b)) for a, b in (("fsdp", "x"), ("y", "tp")))
        pairs = world.unflatten(0, (2, 4), ("z", "four"))
        for meshes in (
            [fsdp["fsdp"], pairs["z"]],
            [pairs["four"], tp["tp"]],
            [fsdp["fsdp"], half],
            [tp["tp"], tp["tp"]],
            [],
        ):
            with pytest.raises(RuntimeError) as caught:
                DeviceMesh.concatenate(meshes)
            texts.append(str(caught.value))
        return texts

    by_rank = simulate(8)(program)()
    assert all(texts == by_rank[0] for texts in by_rank)
    overlapping, inside, strangers, twice, none = by_rank[0]
    assert (
        "of 'fsdp' are among those of another" in overlapping or "of 'z' are among" in overlapping
    )
    assert "are among those of another axis" in inside
    assert "do not come from one mesh" in strangers
    assert "axis 'tp' is used twice" in twice
    assert "at least one mesh" in none


def test_ranks_outside() -> None:
    def program() -> None:
        part = DeviceMesh("cpu", [1, 3, 5, 7], axis_names=("world",))
        mesh = part.unflatten(0, (2, 2), ("dp", "tp"))
        assert mesh.ranks.tolist() == [[1, 3], [5, 7]]
        both = DeviceMesh.concatenate(
            [
                part.unflatten(0, (2, 2), ("dp", "x"))["dp"],
                part.unflatten(0, (2, 2), ("y", "tp"))["tp"],
            ]
        )
        assert both.ranks.tolist() == [[1, 3], [5, 7]]
        assert (mesh.coordinate is None) == (current_world().rank not in (1, 3, 5, 7))

    simulate(8)(program)()


# -- backends --------------------------------------------------------------------------------------


def test_backend_override_of_axes() -> None:
    def program() -> None:
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "fake", 1: "gloo"}
        )
        assert [backend.name for backend in mesh.backends] == ["fake", "gloo"]
        assert mesh is not init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh != init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh["dp"].backends[0].name == "fake"
        assert mesh["tp", "dp"].backends == mesh.backends[::-1]
        assert (
            DeviceMesh(
                "cpu",
                [[0, 1], [2, 3]],
                mesh_dim_names=("dp", "tp"),
                backend_override=("fake", "gloo"),
            )
            is mesh
        )
        assert pickle.loads(pickle.dumps(mesh)) is mesh
        x = torch.ones(1)
        mesh.group("tp").all_reduce(x)
        for axis in ("dp", None):
            with pytest.raises(
                MeshError, match=r"axis 'dp' of .* has the backend 'fake', which moves no data"
            ):
                mesh.group(axis)
        single = init_device_mesh(
            "cpu", (4, 1), mesh_dim_names=("dp", "tp"), backend_override={"tp": "fake"}
        )
        single.group("tp").all_reduce(x)
        assert x.item() == 2
        flat = mesh._flatten("all", backend_override="gloo")
        assert flat is mesh["all"]
        assert flat.backends[0].name == "gloo"

    simulate(4)(program)()


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ({"x": "gloo"}, "'x' is no axis"),
        ({2: "gloo"}, "2 is no axis"),
        ({"dp": "gloo", 0: "gloo"}, "gives axis 'dp' twice"),
        ({"dp": "carrier pigeon"}, "is no backend; write a name of"),
        ({"dp": 3}, "is no backend"),
        ({"dp": ("gloo", 3)}, "is no backend"),
        (("gloo",), "has 1 entries for the 2 axes"),
    ],
)
def test_backend_override_refuses(override: Any, match: str) -> None:
    def program() -> None:
        with pytest.raises(MeshError, match=match):
            init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override=override)

    simulate(4)(program)()


# -- processes -------------------------------------------------------------------------------------


def _groups_made(program: Any) -> tuple[int, Any]:
    before = len(dist.distributed_c10d._world.pg_names)
    result = program()
    return len(dist.distributed_c10d._world.pg_names) - before, result


def reuse() -> dict[str, Any]:
    default = dist.get_backend_config() and dist.get_backend()
    views: dict[str, Any] = {}

    def build() -> None:
        world = init_device_mesh("cpu", (4,), mesh_dim_names=("reuse",))
        names = (("a", "b"), ("c", "d"), ("e", "f"))
        views["meshes"] = [
            world._unflatten(0, (2, 2), pair, backend_override={pair[0]: default}) for pair in names
        ]
        views["concatenated"] = DeviceMesh._concatenate(
            [views["meshes"][0]["a"], views["meshes"][1]["d"]]
        )

    built, _ = _groups_made(build)

    def use() -> list[bool]:
        first, *others = views["meshes"]
        same = [other.get_group(i) is first.get_group(i) for other in others for i in (0, 1)]
        both = views["concatenated"]
        return [
            *same,
            both.get_group("a") is first.get_group("a"),
            both.get_group("d") is first.get_group("b"),
        ]

    used, same = _groups_made(use)
    again, _ = _groups_made(use)

    def with_options() -> list[bool]:
        options = dist.ProcessGroupGloo._Options()
        mesh = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": ("gloo", options)}
        )
        x = torch.ones(1)
        mesh.group("a").all_reduce(x)
        return [
            x.item() == 2,
            mesh.get_group("a") is not views["meshes"][0].get_group("a"),
            mesh["a"].get_group() is mesh.get_group("a"),
        ]

    own, differs = _groups_made(with_options)

    def fake() -> list[Any]:
        mesh = init_device_mesh(
            "cpu", (4, 1), mesh_dim_names=("a", "b"), backend_override={"b": "fake"}
        )
        return [dist.get_backend(mesh.get_group("b")), dist.get_world_size(mesh.get_group("b"))]

    _, backend = _groups_made(fake)
    return {
        "built": built,
        "used": used,
        "again": again,
        "same": same,
        "own": own,
        "differs": differs,
        "backend": backend,
    }


def test_groups_are_used_again(world4: Pool) -> None:
    for result in world4(reuse):
        assert result["built"] == 0
        assert result["used"] <= 2  # fewer if an earlier test in these processes made them
        assert result["again"] == 0
        assert result["own"] == 1
        assert all(result["same"])
        assert all(result["differs"])
        assert result["backend"] == ["fake", 1]


def as_torch() -> list[Any]:
    """Make the same meshes with torch and with shardmesh; return pairs of the ranks that must be
    equal.
    """
    pairs = []
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers "fake"
    ours = init_device_mesh("cpu", (4,), mesh_dim_names=("own_world",))
    theirs = torch_init_device_mesh("cpu", (4,), mesh_dim_names=("own_world",))
    made = []
    for world, kind in ((ours, DeviceMesh), (theirs, TorchMesh)):
        dense = world._unflatten(
            0, (1, 2, 2), ("own_pp", "own_fsdp", "own_tp"), backend_override={"own_pp": "fake"}
        )
        data = world._unflatten(0, (2, 2), ("own_batch", "own_cp"))
        flat = data["own_batch", "own_cp"]._flatten("own_loss")
        both = kind._concatenate([data["own_batch"], dense["own_tp"]])
        made.append([dense, data, flat, both, dense["own_tp"], dense["own_pp", "own_tp"]])
    for mesh, other in zip(*made, strict=True):
        pairs.append((mesh.mesh.tolist(), other.mesh.tolist()))
        pairs.append((tuple(mesh.mesh_dim_names), tuple(other.mesh_dim_names)))
        pairs.append((mesh._get_root_mesh() is ours, other._get_root_mesh() is theirs))
        converted = DeviceMesh.from_torch(other)
        pairs.append((converted.ranks.tolist(), other.mesh.tolist()))
        pairs.append((converted.root is DeviceMesh.from_torch(theirs), True))
    return pairs


def test_meshes_equal_those_of_torch(world4: Pool) -> None:
    for pairs in world4(as_torch):
        for one, other in pairs:
            assert one == other


def tutorial(kind: str) -> list[float]:
    """Train one step by torch's 2-D tutorial, with slices of torch's mesh that are converted
    alone.
    """
    from shardmesh.compat import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

    if kind == "sliced":
        mesh = torch_init_device_mesh("cpu", (2, 2), mesh_dim_names=("sliced_dp", "sliced_tp"))
        tp, dp = mesh["sliced_tp"], mesh["sliced_dp"]
    else:
        world = torch_init_device_mesh("cpu", (4,), mesh_dim_names=("views",))
        tp = world._unflatten(0, (2, 2), ("view_x", "view_tp"))["view_tp"]
        dp = world._unflatten(0, (2, 2), ("view_dp", "view_y"))["view_dp"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    ).double()
    plain = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    ).double()
    plain.load_state_dict(model.state_dict())
    parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=dp)
    x = torch.arange(16.0, dtype=torch.float64).view(4, 4) / 7
    model(x[2 * dp.get_local_rank() :][:2]).square().mean().backward()
    plain(x).square().mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [(sm.compat.DTensor.full_tensor(p.grad) - q.grad).abs().max().item() for p, q in pairs]


@pytest.mark.parametrize("kind", ["sliced", "views"])
def test_slices_of_torch_compose(world4: Pool, kind: str) -> None:
    for errors in world4(tutorial, kind):
        assert max(errors) < 1e-12
