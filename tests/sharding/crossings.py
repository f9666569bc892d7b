"""Random programs that convert between plain and sharded tensors, differentiated three times, on
the ranks of a mesh and in one process.

A value is sharded, or plain and the same on every rank, or this rank's part. In one process it is
always the full tensor.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.kernels.box import slices
from tests.device import DEVICE

MESHES = [(2,), (3,), (2, 2), (1,), (2, 1), (4,)]
ORDERS = 3


def numbers(seed: int, *shape: int) -> Tensor:
    return (
        torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) / 2
    )


@dataclass
class Value:
    """A value of a program.

    Attributes:
        kind: "sharded", "plain" (the same on every rank) or "part".
        x: the tensor; in one process the whole one.
        spec: of a part, how it was cut.
    """

    kind: str
    x: Any
    spec: P | None = None


class CrossingProgram:
    """Random steps from leaves of each kind to a loss.

    Attributes:
        mesh_shape: that of the mesh.
        way: how it is differentiated.
        even: whether the rows can be cut into equal parts, as collectives in mapped functions want
            it.
        mesh: the mesh, or None in one process.
    """

    def __init__(self, seed: int, mesh_shape: Sequence[int] | None = None) -> None:
        draw = self.draw = random.Random(seed)
        self.seed = seed
        self.mesh_shape = draw.choice(MESHES) if mesh_shape is None else tuple(mesh_shape)
        self.axes = ("a", "b")[: len(self.mesh_shape)]
        self.even = draw.random() < 0.6
        self.shape = (4 * 3 if self.even else draw.choice([5, 1, 3]), draw.choice([2, 3]))
        self.steps = [
            (draw.choice(STEPS), draw.randrange(1 << 30)) for _ in range(draw.randint(2, 6))
        ]
        self.ends = [draw.randrange(1 << 30) for _ in range(ORDERS)]
        self.start = draw.choice(["sharded", "plain", "part"])
        self.way = draw.choice(["grad", "backward", "sm.grad"])
        self.mesh: Any = None

    def __str__(self) -> str:
        return (
            f"Program({self.seed}) on {self.mesh_shape}: {self.shape} by {self.way} from "
            f"{self.start} {[name for name, _ in self.steps]}"
        )

    # -- where things lie --------------------------------------------------------------------------

    def spec(self, draw: random.Random, pending: bool = False) -> P:
        """Return a random spec of a matrix."""
        ways = [P(), P("a"), P(None, "a")]
        if len(self.axes) > 1:
            ways += [P("a", "b"), P(("a", "b")), P(("b", "a")), P(None, "b"), P("b", "a")]
        if pending:
            ways += [
                P(unreduced={"a"}),
                P(*[None], "b", unreduced={"a"}) if len(self.axes) > 1 else P(unreduced={"a"}),
            ]
        return draw.choice(ways)

    def laid_out(self, x: Tensor, spec: P) -> Any:
        return (
            x if self.mesh is None else sm.distribute_tensor(x, self.mesh, spec, src_data_rank=None)
        )

    def leaves(self, mesh: Any) -> dict[str, Value]:
        """Return new leaves: `s` (matrix) and `v` (square) are sharded, `p` and `w` are plain, `l`
        is a local part.
        """
        self.mesh, draw = mesh, random.Random(self.seed)
        rows, columns = self.shape
        cut = self.spec(draw)
        part = numbers(self.seed + 3, rows, columns)
        if mesh is not None:
            part = part[slices(sm.Layout.of(mesh, cut, part.shape, part.dtype).box)].clone()
        values = {
            "s": Value(
                "sharded",
                self.laid_out(numbers(self.seed, rows, columns), self.spec(draw, pending=True)),
            ),
            "v": Value(
                "sharded", self.laid_out(numbers(self.seed + 1, columns, columns), self.spec(draw))
            ),
            "p": Value("plain", numbers(self.seed + 2, rows, columns)),
            "w": Value("plain", numbers(self.seed + 4, columns, columns)),
            "l": Value("part", part, cut),
        }
        for value in values.values():
            value.x.requires_grad_()
        return values

    # -- from kind to kind -------------------------------------------------------------------------

    def sharded(self, value: Value, draw: random.Random) -> Value:
        """Return the value as a sharded tensor, converted in one of several ways."""
        if value.kind == "sharded" or self.mesh is None:
            return Value("sharded", value.x)
        if value.kind == "part":
            return Value("sharded", sm.from_local(value.x, self.mesh, value.spec, shape=self.shape))
        way = draw.randrange(4)
        if way == 0:
            return Value("sharded", sm.from_local(value.x, self.mesh, P()))
        if way == 1:
            return Value("sharded", sm.from_local(value.x, self.mesh, P(), run_check=True))
        if way == 2:
            return Value("sharded", sm.device_put(value.x, self.mesh, self.spec(draw)))
        spec = self.spec(draw)
        return Value(
            "sharded",
            sm.shard_map(lambda x: x * 1, mesh=self.mesh, in_specs=spec, out_specs=spec)(value.x),
        )

    def plain(self, value: Value, draw: random.Random) -> Value:
        """Return the value as a plain tensor that is the same on every rank."""
        if value.kind == "plain" or self.mesh is None:
            return Value("plain", value.x)
        x = self.sharded(value, draw).x
        return Value(
            "plain", x.full_tensor() if draw.random() < 0.7 else x.redistribute(P()).to_local()
        )

    def part(self, value: Value, draw: random.Random) -> Value:
        """Return this rank's part of the value."""
        spec = self.spec(draw)
        if self.mesh is None:
            return Value("part", value.x, spec)
        return Value("part", self.sharded(value, draw).x.redistribute(spec).to_local(), spec)

    def as_kind(self, kind: str, value: Value, draw: random.Random) -> Value:
        return {"sharded": self.sharded, "plain": self.plain, "part": self.part}[kind](value, draw)

    # -- the program -------------------------------------------------------------------------------

    def loss(self, leaves: dict[str, Value]) -> Any:
        """Return a scalar, sharded or plain."""
        value = leaves[{"sharded": "s", "plain": "p", "part": "l"}[self.start]]
        for name, seed in self.steps:
            value = getattr(self, name)(value, leaves, random.Random(seed))
        return self.total([value], random.Random(self.seed + 1))

    def total(self, values: Sequence[Value], draw: random.Random) -> Any:
        """Return the sum of smooth functions of these, as a sharded or a plain scalar."""
        kind = draw.choice(["sharded", "plain"])
        terms = [(self.as_kind(kind, value, draw).x.sin() * 0.9).sum() for value in values]
        return sum(terms[1:], terms[0])

    def derivatives(self, mesh: Any) -> list[list[Any]]:
        """Return the full gradients of all leaves by order; each order differentiates the one
        before.
        """
        leaves = self.leaves(mesh)
        return {
            "grad": self._by_grad,
            "backward": self._by_backward,
            "sm.grad": self._by_transforms,
        }[self.way](leaves)

    def _by_grad(self, leaves: dict[str, Value]) -> list[list[Any]]:
        by, results, loss = list(leaves.values()), [], self.loss(leaves)
        for order in range(ORDERS):
            if not loss.requires_grad:
                break
            grads = torch.autograd.grad(
                loss,
                [value.x for value in by],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            results.append(grads)
            loss = self.next_loss(order, by, grads)
        return [self.wholes(by, grads) for grads in results]

    def _by_backward(self, leaves: dict[str, Value]) -> list[list[Any]]:
        """Return the gradients computed by `backward()`, which accumulates in `.grad`."""
        by, results, loss = list(leaves.values()), [], self.loss(leaves)
        for order in range(ORDERS):
            if not loss.requires_grad:
                break
            for value in by:
                value.x.grad = None
            with warnings.catch_warnings(action="ignore"):  # a reference cycle, which `None` ends
                loss.backward(create_graph=True)
            grads = [
                torch.zeros_like(value.x) if value.x.grad is None else value.x.grad for value in by
            ]
            results.append(grads)
            loss = self.next_loss(order, by, grads)
        for value in by:
            value.x.grad = None
        return [self.wholes(by, grads) for grads in results]

    def _by_transforms(self, leaves: dict[str, Value]) -> list[list[Any]]:
        """Return the gradients computed by nested `sm.grad`."""
        by, names = list(leaves.values()), list(leaves)

        def values(xs: Sequence[Any]) -> list[Value]:
            return [Value(value.kind, x, value.spec) for value, x in zip(by, xs, strict=True)]

        def first(xs: Sequence[Any]) -> Any:
            return self.loss(dict(zip(names, values(xs), strict=True)))

        def after(order: int, gradient: Any) -> Any:
            return lambda xs: self.next_loss(order, values(xs), gradient(xs))

        gradients = [sm.grad(first)]
        for order in range(ORDERS - 1):
            gradients.append(sm.grad(after(order, gradients[-1])))
        results = [gradient([value.x.detach() for value in by]) for gradient in gradients]
        return [self.wholes(by, grads) for grads in results]

    def next_loss(self, order: int, by: Sequence[Value], grads: Sequence[Any]) -> Any:
        """Return a function of the gradients, and sometimes of a leaf."""
        draw = random.Random(self.ends[order])
        own_values = [Value(value.kind, g, value.spec) for value, g in zip(by, grads, strict=True)]
        return self.total([*own_values, *draw.sample(by, draw.randrange(2))], draw)

    def wholes(self, by: Sequence[Value], grads: Sequence[Any]) -> list[Tensor]:
        return [
            self.whole(Value(value.kind, g, value.spec)) for value, g in zip(by, grads, strict=True)
        ]

    def whole(self, value: Value) -> Tensor:
        with torch.no_grad():
            if self.mesh is None or value.kind == "plain":
                return value.x.detach()
            x = (
                value.x
                if value.kind == "sharded"
                else sm.from_local(value.x, self.mesh, value.spec, shape=self.shape)
            )
            return x.full_tensor()

    # -- steps -------------------------------------------------------------------------------------

    def pointwise(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        f = draw.choice(
            [torch.tanh, torch.sin, lambda x: x * x + x * 0.3, lambda x: (x * 0.5).exp()]
        )
        if draw.random() < 0.3:
            again = (
                sm.remat(f)
                if draw.random() < 0.5
                else lambda x: checkpoint(f, x, use_reentrant=False)
            )
            return Value(value.kind, again(value.x), value.spec)
        return Value(value.kind, f(value.x), value.spec)

    def move(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        value = self.sharded(value, draw)
        spec = self.spec(draw, pending=True)
        return Value("sharded", value.x if self.mesh is None else value.x.redistribute(spec))

    def cross(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        return self.as_kind(draw.choice(["sharded", "plain", "part"]), value, draw)

    def mix(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        """Combine the value with a leaf of the same kind."""
        other = leaves[draw.choice("spl")]
        kind = draw.choice(["sharded", "plain"])
        return Value(
            kind, self.as_kind(kind, value, draw).x * 0.7 + self.as_kind(kind, other, draw).x.sin()
        )

    def product(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        """Multiply the value by a square matrix of any kind."""
        name = draw.choice("vw")
        kind = draw.choice(["sharded", "plain"])
        return Value(kind, self.as_kind(kind, value, draw).x @ self._square(kind, leaves[name]))

    def _square(self, kind: str, value: Value) -> Any:
        if self.mesh is None or value.kind == kind:
            return value.x
        return value.x.full_tensor() if kind == "plain" else sm.from_local(value.x, self.mesh, P())

    def implicit(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        """Combine a plain tensor with a sharded one."""
        f = draw.choice(
            [
                lambda x: x @ leaves["w"].x,
                lambda x: x * leaves["p"].x,
                lambda x: leaves["w"].x[0] + x,
            ]
        )
        with sm.ops.implicit_replication():
            return Value("sharded", f(self.sharded(value, draw).x))

    def shares(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        """Compute a share of the work from the whole value on every rank."""
        way = draw.choice(["sum", "sum", "copies", "avg", "max", "product"])
        x = self.sharded(value, draw).x
        if self.mesh is None:
            return Value("sharded", x.sin())
        rank, ranks = self.mesh.get_rank(), self.mesh.size()
        summed = P(unreduced=self.axes)
        local = x.redistribute(P()).to_local(grad_placements=summed).sin()
        if way == "copies":
            return Value("sharded", sm.from_local(local, self.mesh, P(), grad_placements=summed))
        share = 2 * (rank + 1) / (ranks * (ranks + 1))
        one = local if rank == 0 else local * 0 + 1
        own = {
            "sum": local * share,
            "avg": local * share * ranks,
            "max": local - rank,
            "product": one,
        }[way]
        return Value(
            "sharded",
            sm.from_local(
                own, self.mesh, P(unreduced=dict.fromkeys(self.axes, way)), shape=self.shape
            ),
        )

    def mapped(self, value: Value, leaves: dict[str, Value], draw: random.Random) -> Value:
        """Apply a mapped function to a value of any kind and a plain matrix."""
        body, even = draw.choice(BODIES)
        if even and not self.even:
            body, _ = BODIES[0]
        spec = P("a") if draw.random() < 0.7 or len(self.axes) == 1 else P(("a", "b"))
        square = leaves[draw.choice("vw")].x
        x = value.x if value.kind == "plain" else self.sharded(value, draw).x
        axes = spec.dims[0]
        if self.mesh is None:
            count = math.prod(self.mesh_shape[self.axes.index(axis)] for axis in axes)
            parts = x.chunk(count) if self.even else (x,)
            return Value("sharded", torch.cat(body(OneProcess(), parts, square)))

        def run(x: Any, w: Any) -> Any:
            return body(OnRanks(axes), (x,), w)[0]

        return Value(
            "sharded",
            sm.shard_map(run, mesh=self.mesh, in_specs=(spec, P()), out_specs=spec)(x, square),
        )


STEPS = [
    "pointwise",
    "pointwise",
    "move",
    "cross",
    "cross",
    "mix",
    "product",
    "implicit",
    "shares",
    "mapped",
    "mapped",
]


class OneProcess:
    """Collectives in one process, on all parts at once."""

    def psum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [sum(parts[1:], parts[0])] * len(parts)

    def all_gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(parts))] * len(parts)

    def next(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[-1], *parts[:-1]]


class OnRanks:
    """Collectives by axis name, on this rank's part."""

    def __init__(self, names: Any) -> None:
        self.names = names

    def psum(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [sm.psum(parts[0], self.names)]

    def all_gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [sm.all_gather(parts[0], self.names, tiled=True)]

    def next(self, parts: Sequence[Tensor]) -> list[Tensor]:
        n = sm.axis_size(self.names)
        return [sm.ppermute(parts[0], self.names, [(i, (i + 1) % n) for i in range(n)])]


def _sums(world: Any, xs: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    totals = world.psum([(x @ w).sin().sum(0) for x in xs])
    return [x * 0.5 + total * 0.3 for x, total in zip(xs, totals, strict=True)]


def _gathered(world: Any, xs: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    wholes = world.all_gather([x @ w for x in xs])
    return [x * whole.sin().mean(0) for x, whole in zip(xs, wholes, strict=True)]


def _ring(world: Any, xs: Sequence[Tensor], w: Tensor) -> list[Tensor]:
    coming = world.next([x.sin() for x in xs])
    return [x @ w + other * x for x, other in zip(xs, coming, strict=True)]


Body = Callable[[Any, Sequence[Tensor], Tensor], list[Tensor]]
BODIES: list[tuple[Body, bool]] = [(_sums, False), (_gathered, True), (_ring, True)]


def check(
    seed: int, mesh_shape: Sequence[int] | None = None, mesh: Any = None, expected: Any = None
) -> None:
    """Compare a program's derivatives on this rank with those of the one process."""
    program = CrossingProgram(seed, mesh_shape)
    for order, (ours, theirs) in enumerate(
        zip(program.derivatives(mesh), expected, strict=True), 1
    ):
        for name, x, y in zip("svpwl", ours, theirs, strict=True):
            what = f"{program}: order {order}, leaf {name}"
            torch.testing.assert_close(
                x, y, rtol=1e-8, atol=1e-8, msg=lambda text, what=what: f"{what}: {text}"
            )


def expected_of(seed: int, mesh_shape: Sequence[int] | None = None) -> list[list[Tensor]]:
    return CrossingProgram(seed, mesh_shape).derivatives(None)


def check_on_this_rank(seeds: Sequence[int], mesh_shape: Sequence[int]) -> None:
    """Run the program on a rank of a world of the mesh's size."""
    mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=("a", "b")[: len(mesh_shape)])
    for seed in seeds:
        check(seed, mesh_shape, mesh, expected_of(seed, mesh_shape))
