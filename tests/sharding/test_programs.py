"""Random programs of a few operators on tensors of random layouts: values and gradients equal one
process.

What one operator leaves behind (uneven and ragged parts, empty ones, pending sums, views) is what
the next one gets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from tests.sharding.ranks import on_mesh

Step = Callable[[Any], Any]
MESHES = [(2,), (3,), (2, 2), (3, 2)]
MOST = 600  # elements of any tensor


def _index(x: Any, numbers: list[int]) -> Any:
    index = torch.tensor(numbers)
    return (
        sm.device_put(index, x.mesh, P(), src_data_rank=None)
        if isinstance(x, sm.ShardedTensor)
        else index
    )


# Name -> least number of dims, and what makes the step from a random dim, a random place in it and
# the number of its places.
STEPS: dict[str, tuple[int, Callable[[int, int, int], Step]]] = {
    "gelu": (0, lambda *_: F.gelu),
    "linear function": (0, lambda *_: lambda x: x * 0.5 + 1),
    "square": (0, lambda *_: lambda x: x * x * 0.1),
    "where": (0, lambda *_: lambda x: torch.where(x > 0, x, x * 0.1)),
    "plus mean": (0, lambda *_: lambda x: x + x.mean()),
    "softmax": (1, lambda d, *_: lambda x: x.softmax(d)),
    "logsumexp": (1, lambda d, *_: lambda x: x.logsumexp(d, keepdim=True)),
    "sum": (2, lambda d, *_: lambda x: x.sum(d)),
    "mean": (1, lambda d, *_: lambda x: x.mean(d, keepdim=True)),
    "var": (1, lambda d, *_: lambda x: x.var(d, correction=0, keepdim=True)),
    "amax": (1, lambda d, *_: lambda x: x.amax(d, keepdim=True)),
    "max": (2, lambda d, *_: lambda x: x.max(d).values),
    "topk": (1, lambda d, i, n: lambda x: x.topk(min(2, n), d).values),
    "sort": (1, lambda d, *_: lambda x: x.sort(d).values),
    "norm": (
        1,
        lambda d, *_: lambda x: x / torch.linalg.vector_norm(x, dim=d, keepdim=True).clamp_min(0.1),
    ),
    "layer_norm": (2, lambda *_: lambda x: F.layer_norm(x, x.shape[-1:])),
    "cumsum": (1, lambda d, *_: lambda x: x.cumsum(d)),
    "matmul": (2, lambda *_: lambda x: x @ x.transpose(-1, -2)),
    "transpose": (2, lambda d, *_: lambda x: x.transpose(0, d)),
    "flatten": (2, lambda *_: lambda x: x.flatten(0, 1)),
    "unsqueeze": (0, lambda d, *_: lambda x: x.unsqueeze(d)),
    "expand": (0, lambda *_: lambda x: x.unsqueeze(0).expand(3, *x.shape)),
    "narrow": (1, lambda d, i, n: lambda x: x.narrow(d, i, n - i)),
    "every second": (1, lambda *_: lambda x: x[::2]),
    "select": (2, lambda d, i, _: lambda x: x.select(d, i)),
    "chunk": (1, lambda d, *_: lambda x: x.chunk(2, d)[-1]),
    "index_select": (1, lambda d, i, n: lambda x: x.index_select(d, _index(x, [i, 0, n - 1]))),
    "flip": (1, lambda d, *_: lambda x: x.flip(d)),
    "roll": (1, lambda d, i, _: lambda x: x.roll(i + 1, d)),
    "cat": (1, lambda d, *_: lambda x: torch.cat([x, x * 2], d)),
    "pad": (1, lambda *_: lambda x: F.pad(x, (1, 2))),
    "tril": (2, lambda d, i, _: lambda x: x.tril(i - 1)),
}


def _spec(draw: random.Random, ndim: int, axes: tuple[str, ...]) -> P:
    """Return a random spec: each axis shards a dim or none."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in draw.sample(axes, len(axes)):
        dim = draw.randrange(-2, ndim)
        if dim >= 0:
            dims[dim].append(axis)
    return P(*map(tuple, dims))


def _program(draw: random.Random, x: Tensor, axes: tuple[str, ...]) -> list[tuple[str, Step]]:
    program: list[tuple[str, Step]] = []
    for name in draw.choices(["redistribute", *STEPS], k=draw.randrange(2, 9)):
        if name == "redistribute":
            spec = _spec(draw, x.ndim, axes)
            program.append(
                (
                    str(spec),
                    lambda t, spec=spec: (
                        t.redistribute(spec) if isinstance(t, sm.ShardedTensor) else t
                    ),
                )
            )
            continue
        least, make = STEPS[name]
        if x.ndim >= least:
            dim = draw.randrange(max(x.ndim, 1))
            count = x.shape[dim] if x.ndim else 1
            step = make(dim, draw.randrange(count), count)
            made = step(x)
            if 0 < made.numel() <= MOST and made.ndim < 5:
                program.append((name, step))
                x = made
    return program


def _run(program: list[tuple[str, Step]], x: Any) -> Any:
    for _, step in program:
        x = step(x)
    return x


@pytest.mark.one_in(14)
@pytest.mark.parametrize("seed", range(30))
def test_values_and_gradients(seed):
    for number in range(20):
        draw = random.Random(f"{seed} {number}")
        shape = [draw.choice([1, 2, 3, 4, 5, 6, 7]) for _ in range(draw.randrange(1, 4))]
        mesh_shape = draw.choice(MESHES)
        axes = ("a", "b")[: len(mesh_shape)]
        x = torch.randn(
            shape,
            generator=torch.Generator().manual_seed(math.prod(shape) + number),
            dtype=torch.float64,
        )
        spec, program = _spec(draw, len(shape), axes), _program(draw, x, axes)
        x.requires_grad_()
        expected = _run(program, x)
        weight = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view(expected.shape)
        weight_spec = _spec(draw, weight.ndim, axes)
        (expected_grad,) = torch.autograd.grad((expected * weight).sum(), x)

        def on_rank(mesh, x=x, spec=spec, program=program, weight=weight, weight_spec=weight_spec):
            mine = sm.device_put(x.detach(), mesh, spec, src_data_rank=None).requires_grad_()
            found = _run(program, mine)
            total = (found * sm.device_put(weight, mesh, weight_spec, src_data_rank=None)).sum()
            return found.detach().full_tensor(), torch.autograd.grad(total, mine)[0].full_tensor()

        what = f"{shape} {spec} on {mesh_shape}: {[name for name, _ in program]}"
        for found, grad in on_mesh(mesh_shape, on_rank):
            torch.testing.assert_close(
                found, expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, w=what: f"{w}\n{m}"
            )
            torch.testing.assert_close(
                grad, expected_grad, rtol=1e-7, atol=1e-8, msg=lambda m, w=what: f"{w}\n{m}"
            )
