"""Random small programs with collectives, views and writes in place, for the tests of passes."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.sharding.jit.passes.agreement import Schedule, schedule_of
from tests.device import DEVICE

ALL: dict[str, Any] = {
    "dead_collectives": True,
    "common_collectives": True,
    "fuse_casts": True,
    "reduce_scatter": True,
    "regather": True,
    "bucket_bytes": 4096,
    "overlap": True,
}
OFF: dict[str, Any] = dict.fromkeys(ALL, False) | {"bucket_bytes": 0}
ROOMY = ALL | {"max_live_bytes": 1 << 20}
SINGLE = [OFF | {name: value} for name, value in ALL.items()]


class Random:
    """A program of `length` operators on a list of tensors, the same on all ranks of a mesh with
    the axes "a" and "b".

    Tensors have one dim. Some have lengths that depend on the index along "b"; those are
    communicated along "a" only.
    """

    def __init__(self, seed: int, mesh: sm.DeviceMesh, length: int = 18) -> None:
        self.choice, self.mesh, self.length = random.Random(seed), mesh, length
        self.seed = seed

    def inputs(self, call: int) -> list[Tensor]:
        """Return the arguments of a call: two of equal length on all ranks, and one that is longer
        on some.
        """
        generator = torch.Generator().manual_seed(100 * call + self.mesh.world.rank)
        coordinate = self.mesh.coordinate
        assert coordinate is not None
        return [torch.randn(n, generator=generator) for n in (8, 8, 8 + 4 * coordinate[1])]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        choice = random.Random(self.seed)
        even, uneven = list(inputs[:2]), list(inputs[2:])
        results: list[Tensor] = []
        pending: list[Any] = []
        saved: list[Tensor] = []
        for _ in range(self.length):
            axes = choice.choice(["a", "a", "b", None])
            family = choice.choice([even, even, uneven])
            group = self.mesh.group("a" if family is uneven else axes)
            x = choice.choice(family)
            self._step(choice, group, family, x, pending, results, saved)
        for work, out in pending:
            work.wait()
            results.append(out * 2)
        return [*results, *(x + 0 for x in even + uneven), even[-1]]

    def _step(
        self,
        choice: random.Random,
        group: Any,
        family: list[Tensor],
        x: Tensor,
        pending: list[Any],
        results: list[Tensor],
        saved: list[Tensor],
    ) -> None:
        kinds = [
            "compute",
            "compute",
            "write",
            "write part",
            "reduce",
            "reduce",
            "gather",
            "gather",
        ]
        kinds += ["scatter", "again", "in place", "later", "cast", "cast", "saved"]
        kind = choice.choice(kinds)
        if kind == "compute":
            family.append(x * choice.choice([0.5, 1.5]) + choice.choice(family))
        elif kind == "write":
            x.mul_(0.75)
        elif kind == "write part":
            x[2:6].add_(choice.choice(family)[2:6])
        elif kind in ("reduce", "again"):
            for _ in range(2 if kind == "again" else 1):
                out = x.clone()
                group.all_reduce(out, choice.choice(["sum", "max"]) if kind == "reduce" else "sum")
                if choice.random() < 0.8:
                    family.append(out)
        elif kind == "in place":
            group.all_reduce(x, "max")
        elif kind == "gather":
            for _ in range(choice.choice([1, 2])):
                out = x.new_empty(group.size * x.numel())
                group.all_gather(out, x)
                if choice.random() < 0.8:
                    family.append(
                        out[-x.numel() :]
                        if choice.random() < 0.5
                        else out.view(group.size, -1).sum(0)
                    )
                    family[-1] = family[-1][: x.numel()]
        elif kind == "cast":
            family += [y[: x.numel()].to(x.dtype) for y in self._cast(choice, group, x)]
        elif kind == "saved":
            out = x.new_empty(group.size * x.numel())
            group.all_gather(out, x * 2)
            family.append((torch.cat([out] * 4) * 2)[: x.numel()] + choice.choice(family))
            saved.append(out)
            if choice.random() < 0.5:
                family.append(saved.pop(0)[-x.numel() :] * 0.5)
            if choice.random() < 0.1:
                out.add_(1)
        elif kind == "scatter":
            out = torch.cat([x * (i + 1) for i in range(group.size)])
            group.all_reduce(out)
            family.append(out[group.rank * x.numel() : (group.rank + 1) * x.numel()])
        else:
            out = x.new_empty(group.size * x.numel())
            pending.append((group.all_gather(out, x.clone(), async_op=True), out))

    def _cast(self, choice: random.Random, group: Any, x: Tensor) -> list[Tensor]:
        """Results that are cast or scaled next to a collective."""
        small, number = choice.choice([torch.bfloat16, torch.float16]), choice.choice([0.5, 3.0])
        functions = [
            lambda y: y.to(small),
            lambda y: y * number,
            lambda y: y / number,
            lambda y: y + 1,
        ]
        f, g = (choice.choice(functions) for _ in range(2))
        before, after = choice.choice(
            [
                (x, f),
                (x.to(small).float(), f),
                (x.to(small).float(), g),
                (x.double(), lambda y: y.float()),
            ]
        )
        if choice.random() < 0.4:  # one part comes from each rank, packed and unpacked
            packed = before.new_empty(group.size, before.numel())
            for row in packed:
                row.copy_(before.to(small) if choice.random() < 0.3 else before.double())
            out = torch.empty_like(packed)
            group.all_to_all(out, packed)
            out[0].add_(0 if choice.random() < 0.9 else 1)
        elif choice.random() < 0.3:
            out = torch.stack([before] * group.size)
            group.all_reduce(out)
            return [after(out)[group.rank] * 1]
        else:
            out = before.new_empty(group.size, before.numel())
            group.all_gather(out, before)
        if choice.random() < 0.5:  # as where another dim than the first is gathered
            moved = out.new_empty(before.numel(), group.size)
            moved.copy_(out.t())
            out = moved.t() if choice.random() < 0.5 else moved.view(group.size, -1)
        exits = [after, after if choice.random() < 0.8 else g][: choice.choice([1, 2])]
        parts = [
            h(y) for h in exits for y in ([out] if choice.random() < 0.7 else [out[0], out[-1]])
        ]
        if choice.random() < 0.1:
            parts[0].mul_(2)
        return [part.flatten() * 1 for part in parts]


def run(
    seed: int, options: Any, shape: tuple[int, int] = (2, 2), calls: int = 3
) -> tuple[list[list[Tensor]], Schedule]:
    """Call a random program, under `sm.jit` unless options are None; return results with the
    arguments after them, and the schedule.
    """
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=("a", "b"))
    program = Random(seed, mesh)
    f = program if options is None else sm.jit(program, backend="eager", compiler_options=options)
    found = []
    for i in range(calls):
        inputs = program.inputs(i)
        found.append([*(x.clone() for x in f(*inputs)), *inputs])
    return found, [] if options is None else schedule_of(f.recorded[-1].graph)  # type: ignore[union-attr]
