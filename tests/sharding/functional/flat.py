"""Programs on parts whose shapes differ between ranks, through `shard_map` and by definition
(`oracle.py`).

The parts are passed and returned as one flat tensor, split into pieces of these lengths:

    rank 0   [2, 3]    ->   6 numbers  |
    rank 1   [0, 3]    ->   0 numbers  |  P("a", sizes={"a": (6, 0, 3)})
    rank 2   [1, 3]    ->   3 numbers  |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.functional import oracle
from tests.sharding.functional.mapped_cases import laid_out, weighing
from tests.sharding.functional.oracle import Everyone, Oracle
from tests.sharding.functional.table import AxisName, loss
from tests.sharding.reference import equal

AXES: tuple[str, ...] = ("a", "b", "c")
Shape = tuple[int, ...]
Program = Callable[..., Any]


@dataclass(frozen=True)
class FlatCase:
    """A program and the inputs of every rank.

    Attributes:
        mesh: its shape; the axes are a, b, c.
        program: `(c, *tensors) -> pytree of tensors`; `c` is `shardmesh` or the oracle.
        inputs: the parts of all ranks.
        replicated: whether the results are replicated.
    """

    mesh: Shape
    program: Program
    inputs: tuple[list[torch.Tensor], ...]
    replicated: bool = False

    @property
    def spec_of(self) -> Callable[[Sequence[torch.Tensor]], P]:
        """The spec of a flat tensor of these parts."""
        axes = AXES[: len(self.mesh)]
        return lambda parts: P(axes, sizes={axes: [part.numel() for part in parts]})


def numbers(shapes: Sequence[Shape], seed: int = 0) -> list[torch.Tensor]:
    """Return a float64 part for each rank, with multiples of 1/4, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).double() / 4 for shape in shapes]


# -- both sides ------------------------------------------------------------------------------------


@dataclass
class Found:
    """Flat results, gradients of flat inputs, and second derivatives."""

    values: list[torch.Tensor]
    grads: list[torch.Tensor]
    second: list[torch.Tensor]


def flat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def wanted(case: FlatCase) -> tuple[Found, list[Everyone]]:
    """Return the result by definition, and the expected values on each rank."""
    xs = [flat(parts).requires_grad_(parts[0].is_floating_point()) for parts in case.inputs]
    everyone = [Everyone(cut_flat(x, parts)) for x, parts in zip(xs, case.inputs, strict=True)]
    leaves = tree_leaves(case.program(Oracle(case.mesh), *everyone))
    values = [leaf.values[0] if case.replicated else flat(leaf.values) for leaf in leaves]
    by = [x for x in xs if x.requires_grad]
    grads, second = oracle.derivatives(values, by, second=True)
    return Found([v.detach() for v in values], [g.detach() for g in grads], second), leaves


def cut_flat(x: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = x.split([part.numel() for part in like])
    return [piece.reshape(part.shape) for piece, part in zip(pieces, like, strict=True)]


def ours(case: FlatCase, results: list[Everyone], check: Any) -> Found:
    """Return the result on this rank, through `shard_map`."""
    mesh = sm.init_device_mesh(DEVICE, case.mesh, axis_names=AXES[: len(case.mesh)])
    specs = [case.spec_of(parts) for parts in case.inputs]
    xs = [laid_out(mesh, flat(parts), spec) for parts, spec in zip(case.inputs, specs, strict=True)]
    by = [x.requires_grad_() for x in xs if x.is_floating_point()]

    def run(*pieces: torch.Tensor) -> list[torch.Tensor]:
        local = [
            x.reshape(parts[mesh.world.rank].shape)
            for x, parts in zip(pieces, case.inputs, strict=True)
        ]
        leaves = tree_leaves(case.program(sm, *local))
        return leaves if case.replicated else [leaf.reshape(-1) for leaf in leaves]

    out_specs = [P() if case.replicated else case.spec_of(leaf.values) for leaf in results]
    out = sm.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check=check)(*xs)
    return derivatives(mesh, out, by)


def derivatives(mesh: sm.DeviceMesh, out: Any, by: Any) -> Found:
    """Return derivatives of the same losses as the oracle's, and check that `backward` gives the
    same gradients.
    """
    total: Any = sum(loss(y.double(), weighing(mesh, y, k, y.spec)) for k, y in enumerate(out))
    grads: Any = torch.autograd.grad(total, by, create_graph=True)
    again: Any = sum((x * 0).sum() for x in by)
    again += sum(
        (g * weighing(mesh, g, k, x.spec)).sum()
        for k, (g, x) in enumerate(zip(grads, by, strict=True))
    )
    second: Any = torch.autograd.grad(again, by, retain_graph=True)
    total.backward()
    for x, g in zip(by, grads, strict=True):
        equal(x.grad.full_tensor(), g.full_tensor().detach())
    return Found(*([x.full_tensor().detach() for x in xs] for xs in (out, grads, second)))


def check_case(case: FlatCase, check: Any = True) -> None:
    """Check that values, gradients and second derivatives equal those of the definition, on every
    rank.
    """
    by_definition, results = wanted(case)
    for results_of_rank in sm.simulate(math.prod(case.mesh))(lambda: ours(case, results, check))():
        for what in ("values", "grads", "second"):
            for one, other in zip(
                getattr(results_of_rank, what), getattr(by_definition, what), strict=True
            ):
                assert one.dtype == other.dtype, what
                torch.testing.assert_close(
                    one,
                    other,
                    rtol=1e-12,
                    atol=1e-12,
                    msg=lambda text, what=what: f"{what}: {text}",
                )


def all_ranks(mesh: Shape, shape: Shape, seed: int = 0) -> list[torch.Tensor]:
    return numbers([shape] * math.prod(mesh), seed)


def by_place(
    mesh: Shape, axis: AxisName, shape: Callable[[int], Shape], seed: int = 0
) -> list[torch.Tensor]:
    """Return parts whose shape depends on the index along the axis."""
    return numbers([shape(int(place)) for place in Oracle(mesh).axis_index(axis).values], seed)
