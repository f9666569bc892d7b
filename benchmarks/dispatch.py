"""Host time of operators on sharded tensors: plain torch on the same local shapes, torch's DTensor,
and shardmesh.

    python benchmarks/dispatch.py                       tables on the terminal, about two minutes
    python benchmarks/dispatch.py --size large          larger tensors, whose arithmetic takes time
    python benchmarks/dispatch.py --only operators      or handling, moves, shapes, mlp, stack,
                                                        optimizers
    python benchmarks/dispatch.py --json figures.json --markdown tables.md

One process is rank 0 of 8 on torch's `fake` backend: collectives return at once, so the time is
that of Python and the dispatcher. The implementations are interleaved in every round (see
measure.py), and all sections run several times, since other load can last longer than all rounds of
one case. "over plain" is a difference of minima, in microseconds; values ending in "x" are ratios
of medians.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from measure import Call, Times, interleaved, joined
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardmesh as sm

WORLD = 8
PLAIN, DTENSOR, OURS = "plain", "DTensor", "ours"


@dataclass(frozen=True)
class Size:
    """Local sizes: `x` is [rows, width]; the MLP is [rows, width] -> [rows, hidden] -> [rows,
    width].
    """

    rows: int
    width: int
    hidden: int
    rounds: int


SIZES = {"small": Size(4, 8, 16, rounds=25), "large": Size(256, 512, 1024, rounds=8)}
PASSES = 4


# -- the implementations ---------------------------------------------------------------------------


@dataclass
class Implementation:
    """One way to hold distributed tensors.

    Attributes:
        name: for the tables.
        mesh: its mesh of 8 ranks; None for plain tensors.
        ranks: number of local tensors in a global one.
        place: makes a distributed tensor from this rank's part, sharded along a dim, or replicated
            for None.
    """

    name: str
    mesh: Any
    ranks: int
    place: Callable[[Tensor, int | None], Tensor]

    def leaf(self, local: Tensor, dim: int | None, grad: bool) -> Tensor:
        """Return a leaf with this local part: sharded along `dim`, or replicated if `dim`
        is None.
        """
        return self.place(local.clone(), dim).requires_grad_(grad)


def implementations() -> dict[str, Implementation]:
    """Return plain torch, DTensor and ours, over one fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    theirs = init_torch_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))._flatten("all")
    ours = sm.init_device_mesh("cpu", (WORLD,), axis_names=("all",))

    def place_dtensor(local: Tensor, dim: int | None) -> Tensor:
        return dt.DTensor.from_local(
            local, theirs, [dt.Replicate() if dim is None else dt.Shard(dim)]
        )

    def place_ours(local: Tensor, dim: int | None) -> Tensor:
        placement = sm.Replicate() if dim is None else sm.Shard(dim)
        return sm.from_local(local, ours, [placement], shape=global_shape(local, dim))

    return {
        PLAIN: Implementation(PLAIN, None, 1, lambda local, dim: local),
        DTENSOR: Implementation(DTENSOR, theirs, WORLD, place_dtensor),
        OURS: Implementation(OURS, ours, WORLD, place_ours),
    }


def global_shape(local: Tensor, dim: int | None) -> list[int]:
    """Return the global shape of a tensor of which every rank holds a part shaped like `local`."""
    return [size * WORLD if i == dim else size for i, size in enumerate(local.shape)]


# -- operators -------------------------------------------------------------------------------------


@dataclass
class Operands:
    """Operands: x and y sharded by rows, w and b replicated."""

    impl: Implementation
    size: Size
    grad: bool
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    w: Tensor = field(init=False)
    b: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows, width = self.size.rows, self.size.width
        generator = torch.Generator().manual_seed(0)
        x, y, w, b = (
            torch.randn(s, generator=generator)
            for s in ((rows, width), (rows, width), (width, width), (width,))
        )
        self.x, self.y = self.impl.leaf(x, 0, self.grad), self.impl.leaf(y, 0, self.grad)
        self.w, self.b = self.impl.leaf(w, None, self.grad), self.impl.leaf(b, None, self.grad)
        self.rows, self.shape = rows * self.impl.ranks, (width,)


_steps = itertools.count(1)

OPERATORS: dict[str, Callable[[Operands], Any]] = {
    "x + y": lambda t: t.x + t.y,
    "x * 2.0": lambda t: t.x * 2.0,
    "x + b (broadcast)": lambda t: t.x + t.b,
    "x @ w": lambda t: t.x @ t.w,
    "linear(x, w, b)": lambda t: F.linear(t.x, t.w, t.b),
    "x.view(rows, 2, -1)": lambda t: t.x.view(t.rows, 2, -1),
    "x.transpose(0, 1)": lambda t: t.x.transpose(0, 1),
    "x[:, 1:3]": lambda t: t.x[:, 1:3],
    "x.sum(-1)": lambda t: t.x.sum(-1),
    "x.sum()": lambda t: t.x.sum(),
    "gelu(x)": lambda t: F.gelu(t.x),
    "softmax(x, -1)": lambda t: torch.softmax(t.x, -1),
    "layer_norm(x)": lambda t: F.layer_norm(t.x, t.shape, t.b, t.b),
    "cat([x, y], 1)": lambda t: torch.cat([t.x, t.y], 1),
    "x.detach()": lambda t: t.x.detach(),
    "x * step, another int each call": lambda t: t.x * next(_steps),
    "x[:, position], another int each call": lambda t: t.x[:, next(_steps) % t.shape[0]],
}


def time_operators(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time each operator with and without an autograd graph."""
    for grad in (False, True):
        operands = {name: Operands(impl, size, grad) for name, impl in impls.items()}
        for operator, run in OPERATORS.items():
            calls = {name: bound(run, t) for name, t in operands.items()}
            yield CaseTimes(
                f"{operator}{', grad' if grad else ''}", interleaved(calls, rounds=size.rounds)
            )


def bound(run: Callable[[Any], Any], argument: Any) -> Call:
    """Return the call with its argument bound."""
    return lambda: run(argument)


# -- handling --------------------------------------------------------------------------------------


def time_handling(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time what is not an operator: attributes, conversion to and from local tensors, meshes."""
    operands = {name: Operands(impl, size, True) for name, impl in impls.items()}
    reads: dict[str, Callable[[Operands], Any]] = {
        "x.shape": lambda t: t.x.shape,
        "x.dtype": lambda t: t.x.dtype,
        "x.requires_grad": lambda t: t.x.requires_grad,
        "x.ndim": lambda t: t.x.ndim,
        "x.device": lambda t: t.x.device,
    }
    for what, read in reads.items():
        yield CaseTimes(
            what,
            interleaved({name: bound(read, t) for name, t in operands.items()}, rounds=size.rounds),
        )
    for what, calls in _handling_calls(impls, operands, torch.randn(size.rows, size.width)).items():
        yield CaseTimes(what, interleaved(calls, rounds=size.rounds))


def _handling_calls(
    impls: dict[str, Implementation], operands: dict[str, Operands], local: Tensor
) -> dict[str, dict[str, Call]]:
    """Return calls without an equivalent on plain tensors."""
    theirs, ours = impls[DTENSOR].mesh, impls[OURS].mesh
    their_2d = init_torch_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    our_2d = sm.init_device_mesh("cpu", (2, 4), axis_names=("dp", "tp"))
    their_rows, our_rows, shape = [dt.Shard(0)], [sm.Shard(0)], global_shape(local, 0)
    their_x: Any = operands[DTENSOR].x
    our_x: Any = operands[OURS].x
    grad_local = local.clone().requires_grad_()
    return {
        "from_local": {
            DTENSOR: lambda: dt.DTensor.from_local(local, theirs, their_rows),
            OURS: lambda: sm.ShardedTensor.from_local(local, ours, our_rows, shape=shape),
        },
        "from_local, grad": {
            DTENSOR: lambda: dt.DTensor.from_local(grad_local, theirs, their_rows),
            OURS: lambda: sm.ShardedTensor.from_local(grad_local, ours, our_rows, shape=shape),
        },
        "to_local, grad": {DTENSOR: lambda: their_x.to_local(), OURS: lambda: our_x.to_local()},
        "redistribute to the same layout": {
            DTENSOR: lambda: their_x.redistribute(theirs, their_rows),
            OURS: lambda: our_x.redistribute(ours, our_rows),
        },
        'mesh["tp"]': {DTENSOR: lambda: their_2d["tp"], OURS: lambda: our_2d["tp"]},
    }


# -- moves -----------------------------------------------------------------------------------------


def time_moves(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time redistribute and the raw collective that it needs ("plain"), on contiguous buffers."""
    x = torch.randn(size.rows * WORLD, size.width)
    full = torch.Size((size.rows * WORLD, size.width))
    group, splits = dist.group.WORLD, [size.rows * size.width // WORLD] * WORLD
    rows, columns = x.chunk(WORLD)[0].contiguous(), x.chunk(WORLD, 1)[0].contiguous()
    flat = rows.view(-1)

    def all_reduce() -> None:
        dist.all_reduce(x.clone(), group=group)

    def all_gather() -> None:
        dist.all_gather_into_tensor(rows.new_empty(full), rows, group=group)

    def reduce_scatter() -> None:
        dist.reduce_scatter_tensor(torch.empty_like(rows), x, group=group)

    def all_to_all() -> None:
        dist.all_to_all_single(torch.empty_like(flat), flat, splits, splits, group=group)

    partial, whole = "partial", None
    cases = [
        ("partial -> replicated", x, partial, whole, all_reduce),
        ("rows -> replicated", rows, 0, whole, all_gather),
        ("partial -> rows", x, partial, 0, reduce_scatter),
        ("rows -> columns", rows, 0, 1, all_to_all),
        ("columns -> rows", columns, 1, 0, all_to_all),
        ("replicated -> rows", x, whole, 0, lambda: None),
    ]
    for what, local, src, dst, raw in cases:
        yield CaseTimes(
            what,
            interleaved(
                _move_calls(impls, local, full, src, dst) | {PLAIN: raw}, rounds=size.rounds
            ),
        )


def _move_calls(
    impls: dict[str, Implementation], local: Tensor, full: torch.Size, src: Any, dst: Any
) -> dict[str, Call]:
    def placements(module: Any, where: Any) -> list[Any]:
        return [
            module.Partial()
            if where == "partial"
            else module.Replicate()
            if where is None
            else module.Shard(where)
        ]

    theirs, ours = impls[DTENSOR].mesh, impls[OURS].mesh
    stride = (full[1], 1)
    their_x = dt.DTensor.from_local(local, theirs, placements(dt, src), shape=full, stride=stride)
    our_x = sm.from_local(local, ours, placements(sm, src), shape=full)
    their_dst, our_dst = placements(dt, dst), placements(sm, dst)
    return {
        DTENSOR: lambda: their_x.redistribute(theirs, their_dst),
        OURS: lambda: our_x.redistribute(our_dst),
    }


# -- new shapes ------------------------------------------------------------------------------------


def time_new_shapes(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time linear and add on new shapes, four in a row, on meshes of one to four axes.

    On four axes DTensor takes seconds per call, and is left out. On fewer it takes milliseconds,
    which leaves caches cold for the next implementation; with four calls in a row this affects one
    of them.
    """
    for mesh_shape in ((8,), (2, 4), (2, 2, 2), (1, 2, 2, 2)):
        names = ("a", "b", "c", "d")[: len(mesh_shape)]
        theirs = init_torch_mesh("cpu", mesh_shape, mesh_dim_names=names)
        ours = sm.init_device_mesh("cpu", mesh_shape, axis_names=names)
        for what, operator in (("linear", F.linear), ("x + x", lambda x, w: x + x)):
            placers = {
                PLAIN: lambda local, dim: local,
                DTENSOR: _dtensor_placer(theirs),
                OURS: _our_placer(ours),
            }
            if len(mesh_shape) > 3:
                del placers[DTENSOR]
            calls = {name: _on_new_shapes(operator, place, size) for name, place in placers.items()}
            times = interleaved(calls, rounds=3, agree=lambda _: IN_A_ROW)
            yield CaseTimes(f"{what}, new shape, {len(mesh_shape)}-D mesh", times)


def _dtensor_placer(mesh: Any) -> Callable[[Tensor, int | None], Tensor]:
    def place(local: Tensor, dim: int | None) -> Tensor:
        first = dt.Replicate() if dim is None else dt.Shard(dim)
        return dt.DTensor.from_local(local, mesh, [first, *[dt.Replicate()] * (mesh.ndim - 1)])

    return place


def _our_placer(mesh: Any) -> Callable[[Tensor, int | None], Tensor]:
    def place(local: Tensor, dim: int | None) -> Tensor:
        shape = [n * mesh.shape[0] if i == dim else n for i, n in enumerate(local.shape)]
        return sm.from_local(
            local,
            mesh,
            [sm.Replicate() if dim is None else sm.Shard(dim)] + [sm.Replicate()] * (mesh.ndim - 1),
            shape=shape,
        )

    return place


IN_A_ROW = 4
_rows = itertools.count(1)


def _on_new_shapes(
    operator: Callable[[Tensor, Tensor], Any], place: Callable[..., Tensor], size: Size
) -> Call:
    """Return the operator on an x with more rows in each call; operands are created in advance."""
    weight = place(torch.randn(size.width, size.width), None)
    fresh = iter([place(torch.randn(next(_rows), size.width), 0) for _ in range(12 + 3 * IN_A_ROW)])
    return lambda: operator(next(fresh), weight)


# -- a tensor-parallel MLP -------------------------------------------------------------------------


def time_mlp(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time forward and backward of gelu(x @ w1.T) @ w2.T, w1 sharded by output features, w2 by
    input features.

    "plain" is the local arithmetic alone; "by hand" adds the all_reduce of the result, as in a
    hand-written tensor-parallel layer.
    """
    x = torch.randn(size.rows, size.width)
    w1 = torch.randn(size.hidden, size.width)
    w2 = torch.randn(size.width, size.hidden)
    calls = {
        PLAIN: _mlp_step(impls[PLAIN], x, w1, w2, lambda y: y),
        "by hand": _mlp_step(impls[PLAIN], x, w1, w2, lambda y: _AllReduce.apply(y)),
        DTENSOR: _mlp_step(
            impls[DTENSOR], x, w1, w2, lambda y: y.redistribute(placements=[dt.Replicate()])
        ),
        "DTensor modules": _module_step(impls[DTENSOR].mesh, x, size),
        OURS: _mlp_step(impls[OURS], x, w1, w2, lambda y: y.redistribute([sm.Replicate()])),
    }
    yield CaseTimes(
        "TP MLP, forward + backward", interleaved(calls, rounds=2 * size.rounds, batch_s=1e-3)
    )


def _mlp_step(
    impl: Implementation, x: Tensor, w1: Tensor, w2: Tensor, reduce: Callable[[Any], Any]
) -> Call:
    x, w1, w2 = impl.leaf(x, None, False), impl.leaf(w1, 0, True), impl.leaf(w2, 1, True)

    def step() -> None:
        w1.grad = w2.grad = None
        reduce(F.linear(F.gelu(F.linear(x, w1)), w2)).sum().backward()

    return step


class _AllReduce(torch.autograd.Function):
    """All-reduce with the identity as backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _module_step(mesh: Any, x: Tensor, size: Size) -> Call:
    """Return the same step with nn.Linear and torch's parallel styles."""
    model = torch.nn.Sequential(
        torch.nn.Linear(size.width, size.hidden * WORLD, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(size.hidden * WORLD, size.width, bias=False),
    )
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step() -> None:
        model.zero_grad()
        model(x).sum().backward()

    return step


# -- a stack of transformer blocks -----------------------------------------------------------------

LAYERS, HEADS = 12, 4


def time_stack(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time forward, backward and the AdamW step of 12 tensor-parallel transformer blocks.

    "plain" has the same local shapes, and no communication.
    """
    tokens, width = min(4 * size.rows, 256), min(8 * size.width, 512)
    calls = {name: _stack_step(impl, tokens, width) for name, impl in impls.items()}
    yield CaseTimes(
        "12 blocks, forward + backward + AdamW",
        interleaved(calls, rounds=size.rounds, batch_s=1e-3),
    )


class _TensorParallelBlock:
    """Pre-norm transformer block: heads and hidden features are sharded, the residual stream is
    replicated.
    """

    def __init__(self, impl: Implementation, width: int) -> None:
        def weight(rows: int, columns: int, dim: int | None) -> Tensor:
            return impl.leaf(torch.randn(rows, columns) / columns**0.5, dim, True)

        self.ranks, self.inner = impl.ranks, width // WORLD
        self.norms = [impl.leaf(torch.ones(width), None, True) for _ in range(2)]
        self.query, self.key, self.value = (weight(self.inner, width, 0) for _ in range(3))
        self.out, self.up, self.down = (
            weight(width, self.inner, 1),
            weight(4 * self.inner, width, 0),
            weight(width, 4 * self.inner, 1),
        )
        self.whole = {
            PLAIN: lambda y: y,
            DTENSOR: lambda y: y.redistribute(placements=[dt.Replicate()]),
        }.get(impl.name, lambda y: y.redistribute([sm.Replicate()]))

    def parameters(self) -> list[Tensor]:
        return [*self.norms, self.query, self.key, self.value, self.out, self.up, self.down]

    def __call__(self, x: Tensor) -> Tensor:
        shape, heads = x.shape[-1:], HEADS * self.ranks
        h = F.rms_norm(x, shape, self.norms[0])
        q, k, v = (
            F.linear(h, w).unflatten(-1, (heads, -1)).transpose(1, 2)
            for w in (self.query, self.key, self.value)
        )
        # DTensor has no fused form on CPU.
        mixed = (torch.softmax(q @ k.transpose(2, 3), -1) @ v).transpose(1, 2).flatten(2)
        x = x + self.whole(F.linear(mixed, self.out))
        h = F.rms_norm(x, shape, self.norms[1])
        return x + self.whole(F.linear(F.silu(F.linear(h, self.up)), self.down))


def _stack_step(impl: Implementation, tokens: int, width: int) -> Call:
    blocks = [_TensorParallelBlock(impl, width) for _ in range(LAYERS)]
    x = impl.leaf(torch.randn(1, tokens, width), None, False)
    optimizer = torch.optim.AdamW(
        [p for block in blocks for p in block.parameters()], lr=1e-3, foreach=True
    )

    def step() -> None:
        optimizer.zero_grad()
        y = x
        for block in blocks:
            y = block(y)
        y.sum().backward()
        optimizer.step()

    return step


# -- optimizers ------------------------------------------------------------------------------------

PARAMETERS = 100
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def time_optimizers(impls: dict[str, Implementation], size: Size) -> Iterator[CaseTimes]:
    """Time a step of AdamW on 100 parameters, split by rows, in each of torch's implementations."""
    for implementation, options in IMPLEMENTATIONS.items():
        calls = {name: _adamw_step(impl, size, options) for name, impl in impls.items()}
        yield CaseTimes(
            f"AdamW, {PARAMETERS} parameters, {implementation}",
            interleaved(calls, rounds=size.rounds, batch_s=1e-3),
        )


def _adamw_step(impl: Implementation, size: Size, options: dict[str, Any]) -> Call:
    params = [impl.leaf(torch.randn(size.rows, size.width), 0, True) for _ in range(PARAMETERS)]
    for x in params:
        x.grad = torch.ones_like(x)
    optimizer = torch.optim.AdamW(params, lr=1e-3, **options)
    return lambda: optimizer.step()


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CaseTimes:
    """The times of one case, by implementation."""

    case: str
    times: dict[str, Times]

    def above(self, name: str) -> float | None:
        """Return the difference to plain between minima, in microseconds; None if either was not
        timed.
        """
        if PLAIN not in self.times or name not in self.times:
            return None
        return (self.times[name].best - self.times[PLAIN].best) * 1e6

    def ratio(self, name: str, base: str) -> float | None:
        """Return the ratio of medians; None if either was not timed."""
        if base not in self.times or name not in self.times:
            return None
        return self.times[name].median / self.times[base].median

    def as_dict(self) -> dict[str, Any]:
        """Return the times for the JSON file."""
        over = {
            n: round(v, 3) for n in self.times if n != PLAIN and (v := self.above(n)) is not None
        }
        return {
            "case": self.case,
            "times": {n: t.as_dict() for n, t in self.times.items()},
            "over_plain_us": over,
        }


def merged(passes: Sequence[Sequence[CaseTimes]]) -> list[CaseTimes]:
    """Merge several passes over the same cases."""
    return [
        CaseTimes(same[0].case, {n: joined([f.times[n] for f in same]) for n in same[0].times})
        for same in zip(*passes, strict=True)
    ]


COLUMNS = (
    "case",
    "plain us",
    "DTensor us",
    "ours us",
    "DTensor over plain",
    "ours over plain",
    "DTensor / ours",
    "ours / plain",
)


def table_row(case: CaseTimes) -> list[str]:
    """Return a row of the tables: minima, differences of minima, ratios of medians."""
    minima = [
        _number(case.times[n].best * 1e6 if n in case.times else None)
        for n in (PLAIN, DTENSOR, OURS)
    ]
    above = [_number(case.above(n)) for n in (DTENSOR, OURS)]
    ratios = [_number(case.ratio(DTENSOR, OURS), "x"), _number(case.ratio(OURS, PLAIN), "x")]
    return [case.case, *minima, *above, *ratios]


def _number(value: float | None, unit: str = "") -> str:
    return (
        "-" if value is None else f"{value:.2f}{unit}" if abs(value) < 100 else f"{value:.0f}{unit}"
    )


MLP_COLUMNS = ("implementation", "min us", "median us", "x plain", "x by hand")


def mlp_rows(case: CaseTimes) -> list[list[str]]:
    """Return the table of the MLP: one row per implementation, of which there are more than in the
    other cases.
    """
    return [
        [
            name,
            _number(t.best * 1e6),
            _number(t.median * 1e6),
            _number(case.ratio(name, PLAIN), "x"),
            _number(case.ratio(name, "by hand"), "x"),
        ]
        for name, t in case.times.items()
    ]


SECTIONS: dict[
    str, tuple[str, Callable[[dict[str, Implementation], Size], Iterator[CaseTimes]]]
] = {
    "operators": (
        "Operators, x split by rows over 8 ranks, no communication needed",
        time_operators,
    ),
    "handling": ("Attributes, conversion to and from local tensors, meshes", time_handling),
    "moves": ("redistribute; plain is the raw collective on ready buffers", time_moves),
    "shapes": ("The first call on a shape", time_new_shapes),
    "mlp": ("Two-layer tensor-parallel MLP, forward and backward", time_mlp),
    "stack": ("12 tensor-parallel transformer blocks, forward, backward and AdamW", time_stack),
    "optimizers": (f"A step of AdamW on {PARAMETERS} parameters", time_optimizers),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen sections, print their tables and write the files asked for."""
    options = _options(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module=r"torch\.")
    impls, size = implementations(), SIZES[options.size]
    chosen = {name: SECTIONS[name] for name in options.only or SECTIONS}
    passes = [
        {name: list(run(impls, size)) for name, (_, run) in chosen.items()} for _ in range(PASSES)
    ]
    figures, document = {}, []
    for section, (title, _) in chosen.items():
        times = merged([timed[section] for timed in passes])
        columns, rows = (
            (MLP_COLUMNS, mlp_rows(times[0]))
            if section == "mlp"
            else (COLUMNS, [table_row(f) for f in times])
        )
        show(title, columns, rows)
        document.append(f"### {title}\n\n{markdown(columns, rows)}\n")
        figures[section] = [f.as_dict() for f in times]
    env = environment()
    print(environment_line(env))
    write_json(options.json, {"environment": env, "size": options.size, "sections": figures})
    write_markdown(options.markdown, "\n".join([*document, environment_line(env)]))
    dist.destroy_process_group()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="small",
        help="small: host time dominates; large: arithmetic counts",
    )
    parser.add_argument(
        "--only",
        choices=SECTIONS,
        action="append",
        help="a section to run; may be given several times",
    )
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
