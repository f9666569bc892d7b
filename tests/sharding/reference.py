"""Definition of redistribution on full tensors: the oracle of the property tests.

A pending tensor is a stack of contributions, one per rank of the pending axes; its value is their
combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import shardmesh as sm

COMBINE = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.mean(0),
    "max": lambda parts: parts.amax(0),
    "min": lambda parts: parts.amin(0),
    "product": lambda parts: parts.prod(0),
}


def contributions(
    mesh: sm.AbstractMesh, spec: sm.P, shape: tuple[int, ...], seed: int = 0
) -> torch.Tensor:
    """Return full tensors, one per combination of coordinates on pending axes: [n, *shape],
    float64, all values different.
    """
    n = math.prod(mesh.size(axis) for axis, _ in spec.unreduced)
    return torch.randn(
        (n, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def my_contribution(mesh: sm.DeviceMesh, spec: sm.P) -> int:
    """Return the index of the contribution of which this rank holds a box."""
    index = 0
    for axis, _ in spec.unreduced:
        index = index * mesh.size(axis) + mesh.coordinate[mesh.axis_index(axis)]
    return index


def value(parts: torch.Tensor, spec: sm.P) -> torch.Tensor:
    """Return the global value of a tensor with these contributions."""
    return COMBINE[spec.unreduced[0][1] if spec.unreduced else "sum"](parts)


def local_part(parts: torch.Tensor, layout: sm.Layout) -> torch.Tensor:
    """Return this rank's box of its contribution."""
    index = tuple(slice(start, stop) for start, stop in layout.box)
    return parts[my_contribution(layout.mesh, layout.spec)][index].clone()


def equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equal float64 numbers, up to rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def plain_grad(
    function: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> list[torch.Tensor | None]:
    """Return the gradients of a function of plain tensors with respect to each of them."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    function(*leaves).backward()
    return [leaf.grad for leaf in leaves]
