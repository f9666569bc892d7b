"""Mapped programs as data, and their meaning in one process: every step runs for all ranks before
the next one begins.

    step                     rank 0    rank 1      a variable is a list of tensors, one for each
    v0 = x0.sin()            sin(.)    sin(.)      rank, and all of them hang in one graph of
    v1 = sm.psum(v0, "a")    +---------------+     torch.autograd, whose leaves are the global
                             same      same        tensors: so results and gradients are those of a
                                                   function of global tensors, without a library
A pending sum is cut here into unequal shares, and in the library the first rank has all of it:
whoever reads a share as a value is found out.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardmesh import P
from tests.sharding.functional import oracle
from tests.sharding.functional.lines import Halved, Same, Square
from tests.sharding.functional.steps import Env, ProgramStep, own

CONSTANTS = torch.linspace(-1, 1, 12, dtype=torch.float64)
NAMES = {
    "torch": torch,
    "F": F,
    "K": CONSTANTS,
    "checkpoint": checkpoint,
    "Square": Square,
    "Same": Same,
    "Halved": Halved,
}
SHARES = {1: (1.0,), 2: (0.3, 0.7), 3: (0.2, 0.5, 0.3)}


class Lockstep:
    """All ranks of a mesh with axes a and b.

    Attributes:
        mesh: its shape.
        unequal: whether ranks turned out to hold different values of what should be the same.
    """

    def __init__(self, mesh: Sequence[int]) -> None:
        self.mesh, self.size, self.unequal = tuple(mesh), math.prod(mesh), False
        self.oracle, self._groups = oracle.Oracle(mesh), {}
        self.coordinates = [
            dict(zip("ab", c, strict=True)) for c in itertools.product(*map(range, mesh))
        ]
        self.names = [{**NAMES, "sm": _Rank(self.oracle, rank)} for rank in range(self.size)]

    def run(self, steps: Sequence[ProgramStep], envs: list[Env]) -> None:
        for step in steps:
            step.run(self, envs)

    def groups(self, axis: str | Sequence[str]) -> list[list[int]]:
        key = tuple(axis)
        if key not in self._groups:
            self._groups[key] = (
                self.oracle.groups(axis) if axis else [[rank] for rank in range(self.size)]
            )
        return self._groups[key]

    def along(
        self,
        axis: str | Sequence[str],
        definition: Callable[[list[Tensor]], list[Tensor]],
        xs: list[Tensor],
    ) -> list[Tensor]:
        """Apply the definition of a collective to every group of ranks along the axis.

        Raises: ValueError for parts of different shapes.
        """
        if any(len({xs[rank].shape for rank in group}) > 1 for group in self.groups(axis)):
            raise ValueError("parts differ in shape")
        return self.each(axis, definition, xs)

    def each(
        self,
        axis: str | Sequence[str],
        definition: Callable[[list[Tensor]], list[Tensor]],
        xs: list[Tensor],
    ) -> list[Tensor]:
        """Apply the definition to parts of any shapes."""
        losses: dict[int, Tensor] = {}
        for group in self.groups(axis):
            losses |= zip(
                group, (own(part) for part in definition([xs[rank] for rank in group])), strict=True
            )
        return [losses[rank] for rank in range(self.size)]

    def same(self, xs: list[Tensor]) -> bool:
        return all(
            x.shape == xs[0].shape and torch.allclose(x, xs[0], rtol=1e-9, atol=1e-11) for x in xs
        )

    def enter(self, whole: Tensor, spec: P) -> list[Tensor]:
        """Return every rank's part of a global tensor."""
        pending = [axis for axis, _ in spec.unreduced]
        parts = []
        for place in self.coordinates:
            part = whole
            for dim, axes in enumerate(spec.dims):
                for axis in axes:
                    part = oracle.cut(part, dim, self.mesh["ab".index(axis)], True)[place[axis]]
            parts.append(own(part * self.share(pending, place)) if pending else own(part))
        return parts

    def share(self, pending: Sequence[str], place: dict[str, int]) -> float:
        return math.prod(SHARES[self.mesh["ab".index(axis)]][place[axis]] for axis in pending)

    def leave(self, xs: list[Tensor], spec: P) -> Tensor:
        """Return the global tensor of a result.

        Raises: ValueError where parts are not as torch.chunk cuts.
        """
        same = [a for a in "ab" if a not in spec.axes]
        if not all(self.same([xs[rank] for rank in group]) for group in self.groups(same)):
            self.unequal = True
        xs = self.along(same, lambda parts: [parts[0]] * len(parts), xs)
        for axis, _ in spec.unreduced:
            xs = self.along(axis, oracle.psum, xs)
        whole = self._together(xs, list(enumerate(spec.dims)))
        parts = self.enter(whole.detach(), spec.with_unreduced({}))
        if any(part.shape != x.shape for part, x in zip(parts, xs, strict=True)):
            raise ValueError("uneven in another way than torch.chunk cuts")
        return whole

    def _together(self, xs: list[Tensor], dims: list[tuple[int, tuple[str, ...]]]) -> Tensor:
        for dim, axes in dims:
            for axis in reversed(axes):
                xs = self.each(
                    axis, lambda parts, dim=dim: [torch.cat(parts, dim)] * len(parts), xs
                )
        return xs[0]


class _Rank:
    """The part of the library that local lines use, on one rank."""

    def __init__(self, meaning: oracle.Oracle, rank: int) -> None:
        self.meaning, self.rank = meaning, rank

    def axis_index(self, axis: Any) -> Tensor:
        return self.meaning.axis_index(axis).values[self.rank].clone()

    def stop_gradient(self, x: Tensor) -> Tensor:
        return x.detach()

    def axis_size(self, axis: Any) -> int:
        return self.meaning.axis_size(axis)


# -- programs --------------------------------------------------------------------------------------


@dataclass
class LockstepProgram:
    """A program with its inputs and outputs.

    Attributes:
        seed: seed of the program.
        mesh: shape, of axes a and b.
        shapes: of the global arguments, x0, x1, ...
        given: how each lies before the call; no pending ones.
        frozen: which of them require no gradient.
        in_specs, out_specs: how arguments go in, and results come out.
        results: names of variables.
        outside: how its gradient is taken, "backward" or "grad".
    """

    seed: int
    mesh: tuple[int, ...]
    shapes: list[tuple[int, ...]]
    given: list[P]
    frozen: list[bool]
    in_specs: list[P]
    steps: list[Any] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    out_specs: list[P] = field(default_factory=list)
    outside: str = "backward"

    @property
    def arguments(self) -> list[str]:
        return [f"x{i}" for i in range(len(self.shapes))]

    def source(self) -> str:
        body = [f"    {line}" for step in self.steps for line in step.lines()]
        return "\n".join(
            [
                f"def program({', '.join(self.arguments)}):",
                *body,
                f"    return {', '.join(self.results)},\n",
            ]
        )

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={n}" for name, n in zip("ab", self.mesh, strict=True))
        each = enumerate(zip(self.shapes, self.given, self.frozen, strict=True))
        inputs = [f"x{i}: {list(s)} {p}{' frozen' if f else ''}" for i, (s, p, f) in each]
        specs = (
            f"in_specs=({', '.join(map(str, self.in_specs))},), "
            f"out_specs=({', '.join(map(str, self.out_specs))},)"
        )
        return (
            f"# program {self.seed} on ({sizes}); gradient by {self.outside}; "
            f"{'; '.join(inputs)}\n# {specs}\n{self.source()}"
        )

    def uses(self, word: str) -> bool:
        return re.search(word, self.source()) is not None

    def inputs(self, call: int) -> list[Tensor]:
        """Return the global arguments of one call."""
        generator = torch.Generator().manual_seed(1000 * self.seed + call)
        drawn = [
            torch.randn(shape, dtype=torch.float64, generator=generator) for shape in self.shapes
        ]
        return [x.requires_grad_(not frozen) for x, frozen in zip(drawn, self.frozen, strict=True)]

    def begin(self, world: Lockstep, leaves: Sequence[Tensor]) -> list[Env]:
        """Return the variables of each rank before the first step."""
        parts = [world.enter(leaf, spec) for leaf, spec in zip(leaves, self.in_specs, strict=True)]
        return [dict(zip(self.arguments, each, strict=True)) for each in zip(*parts, strict=True)]


def weight(x: Tensor) -> Tensor:
    """Return the weight of each element of a result in the loss."""
    return torch.linspace(0.3, 1.1, x.numel(), dtype=torch.float64).cos().reshape(x.shape)


@dataclass
class Meaning:
    """Results and gradients of a call of a program, and whether ranks disagree on any of them."""

    results: list[Tensor]
    gradients: list[Tensor]
    unequal: bool


def finish(
    program: LockstepProgram, world: Lockstep, leaves: Sequence[Tensor], envs: list[Env]
) -> Meaning:
    """Return results and gradients, given the variables after the last step."""
    results = [
        world.leave([env[name] for env in envs], spec)
        for name, spec in zip(program.results, program.out_specs, strict=True)
    ]
    loss = sum((y * weight(y)).sum() for y in results)
    grads = [torch.zeros_like(x) for x in leaves]
    by = [i for i, x in enumerate(leaves) if x.requires_grad]
    if by and isinstance(loss, Tensor) and loss.requires_grad:
        for i, g in zip(
            by,
            torch.autograd.grad(
                loss, [leaves[i] for i in by], allow_unused=True, materialize_grads=True
            ),
            strict=True,
        ):
            grads[i] = g
    return Meaning([y.detach() for y in results], grads, world.unequal)


def meaning(program: LockstepProgram, call: int) -> Meaning:
    """Return the meaning of the program on the arguments of one call."""
    world = Lockstep(program.mesh)
    leaves = program.inputs(call)
    envs = program.begin(world, leaves)
    world.run(program.steps, envs)
    return finish(program, world, leaves, envs)
