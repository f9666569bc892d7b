"""Random trees of state on random meshes, by seed: the saved tree, the layouts for loading, and the
comparison.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import shardmesh as sm
from shardmesh import Layout, P, ShardedTensor
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from tests.device import DEVICE, on_device
from tests.sharding.ranks import AXES

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (1, 3), (2, 1, 2), (5,)]
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 12]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def shape_of(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randrange(4)))


def spec_of(rng: random.Random, mesh: sm.AbstractMesh, shape: Sequence[int]) -> P:
    """Return a spec without pending values: axes in any order, ragged and empty parts."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in rng.sample(mesh.axis_names, mesh.ndim):
        place = rng.randrange(-1, len(shape))
        if place >= 0:
            dims[place].append(axis)
    sizes = {}
    for axes, size in zip(map(tuple, dims), shape, strict=True):
        if axes and rng.random() < 0.5:
            cuts = sorted(rng.randint(0, size) for _ in range(mesh.size(axes) - 1))
            sizes[axes] = tuple(stop - start for start, stop in pairwise([0, *cuts, size]))
    return P(*map(tuple, dims), sizes=sizes)


def values_of(seed: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of random bits, including NaNs if the dtype has them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    size = math.prod(shape) * dtype.itemsize
    return (
        torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8, device="cpu")
        .view(dtype)
        .reshape(shape)
    )


def mesh_of(rng: random.Random, shape: Sequence[int]) -> sm.DeviceMesh:
    """Return a mesh of this shape over some ranks of the world, in any order."""
    world = current_world()
    ranks = torch.tensor(rng.sample(range(world.size), math.prod(shape)), device="cpu").reshape(
        tuple(shape)
    )
    return sm.DeviceMesh(DEVICE, ranks, axis_names=AXES[: len(shape)])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def part_of(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return this rank's part, sliced by hand."""
    if layout.mesh.coordinate is None:
        return torch.empty(0, dtype=whole.dtype)
    return whole[tuple(slice(*interval) for interval in layout.box)].clone()


def pair(seed: int, folder: Path) -> int:
    """Save a random tree on a random mesh and load it onto another, bit for bit. Return the number
    of tensors.
    """
    rng = random.Random(seed)
    saved_shape, loaded_shape = rng.choice(MESHES), rng.choice(MESHES)
    tensors = [(shape_of(rng), rng.choice(DTYPES)) for _ in range(rng.randint(1, 4))]

    def laid_out(rng: random.Random, shape: Sequence[int]) -> dict[str, Layout]:
        mesh = mesh_of(rng, shape)
        return {
            f"x{i}": Layout.of(mesh, spec_of(rng, mesh, size), size, dtype)
            for i, (size, dtype) in enumerate(tensors)
        }

    def wholes() -> dict[str, torch.Tensor]:
        return {
            f"x{i}": values_of(seed + i, size, dtype) for i, (size, dtype) in enumerate(tensors)
        }

    def saving(state: random.Random) -> None:
        layouts = laid_out(state, saved_shape)
        parts = {name: part_of(whole, layouts[name]).to(DEVICE) for name, whole in wholes().items()}
        tree = {
            name: ShardedTensor._make_guarded(part, layouts[name]) for name, part in parts.items()
        }
        save({"tensors": tree, "whole": wholes()["x0"], "seed": seed}, folder)

    def loading(state: random.Random) -> None:
        layouts = laid_out(state, loaded_shape)
        whole = wholes()
        loaded: Any = load(
            folder, {"tensors": layouts, "whole": torch.empty_like(whole["x0"]), "seed": None}
        )
        assert loaded["seed"] == seed
        assert torch.equal(bits(loaded["whole"]), bits(whole["x0"]))
        for name, x in loaded["tensors"].items():
            assert sm.typeof(x) is layouts[name]
            assert torch.equal(
                bits(x.to_local() if x.mesh.coordinate else x._local),
                bits(part_of(whole[name], layouts[name])),
            ), name

    for shape, program in ((saved_shape, saving), (loaded_shape, loading)):
        # at times a rank is outside the mesh
        size = math.prod(shape) + rng.randrange(2)
        start = rng.random()

        def rank(program: Any = program, start: float = start) -> None:
            with on_device():
                program(random.Random(start))

        sm.simulate(size)(rank)()
    return len(tensors)
