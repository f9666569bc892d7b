"""The lines of random programs.

    a b c     sharded matrices of n x n                 v    a sharded vector
    p         a sharded matrix on a part of the mesh    t u  plain tensors, different on each rank

Every line keeps these shapes, so that lines may follow each other in any order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

HEADER = """\
import copy, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.thread_context import thread_context

def value(k, n=N):
    return torch.sin(torch.arange(n * n, dtype=torch.float64) * 0.37 + k).view(n, n)

def layer(x, w, spec):
    x = x.redistribute(spec)
    return torch.tanh(x @ w * 0.1)

def trained(w, x):
    w = w.detach().requires_grad_()
    loss = torch.tanh(x @ w * 0.1).square().sum()
    loss.backward()
    return w.detach() - w.grad.detach() * 0.1

def mapped(reduce, axis, mesh, spec):
    f = lambda y: y - reduce(y.sum(), axis) * 0.1
    return sm.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)

def gathered(group, t):
    out = t.new_empty(group.size * t.numel())
    group.all_gather(out, t)
    return out[: t.numel()] * 0.5 + t

def scattered(group, t, op="sum"):
    out = t.new_empty(t.numel() // group.size)
    group.reduce_scatter(out, t, op)
    return t + out[0]

def exchanged(group, t):
    out = torch.empty_like(t)
    group.all_to_all(out, t)
    return out

def shifted(group, t, by):
    out = t.clone()
    group.permute(out, t, dst=(group.rank + by) % group.size, src=(group.rank - by) % group.size)
    return out

# Calls of torch.distributed; in a simulated world, where torch has no groups, the equivalent on a
# group of the library.

def raw_all_reduce(mesh, t, op="sum"):
    if thread_context.world is None:
        dist.all_reduce(t, op=getattr(dist.ReduceOp, op.upper()))
    else:
        mesh.group(mesh.axis_names).all_reduce(t, op)

def raw_start(mesh, t):
    if thread_context.world is None:
        return dist.all_reduce(t, async_op=True)
    return mesh.group(mesh.axis_names).all_reduce(t, async_op=True)

def raw_broadcast(mesh, t, src):
    if thread_context.world is None:
        dist.broadcast(t, src)
    else:
        mesh.group(mesh.axis_names).broadcast(t, src)

def raw_gathered(mesh, t):
    if thread_context.world is not None:
        return gathered(mesh.group(mesh.axis_names), t)
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t)
    return parts[0] * 0.5 + t

def raw_barrier(mesh):
    if thread_context.world is None:
        dist.barrier()
    else:
        mesh.group(mesh.axis_names).barrier()

def raw_objects(mesh, thing):
    if thread_context.world is None:
        dist.all_gather_object([None] * dist.get_world_size(), thing)
    else:
        mesh.group(mesh.axis_names).all_gather_object(thing)

def in_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()

def whole(*xs):
    return [x.full_tensor() for x in xs]

def program(mesh, rank, is_outlier):
    t = torch.arange(24, dtype=torch.float64) + rank
    u = torch.cos(torch.arange(24, dtype=torch.float64) * (rank + 1))
    coming = work = None
    smooth = {x: mapped(sm.psum, x, mesh, P("x")) for x in mesh.axis_names}
"""


@dataclass(frozen=True)
class Line:
    """One line of a program, or several that belong together.

    Attributes:
        wrong: variants of the line with one wrong argument.
        is_local: whether it affects only this rank, so that a different line changes nothing.
    """

    text: str
    wrong: tuple[str, ...] = ()
    is_local: bool = False


class LineGenerator:
    """Draws lines for a mesh with these axes.

    Args:
        least: size of its smallest axis.
        raw: whether the program also calls torch.distributed directly.
    """

    def __init__(
        self, draw: random.Random, axes: tuple[str, ...], least: int, raw: bool = False
    ) -> None:
        self._draw, self._axes, self._least = draw, axes, least
        self._creates_local = draw.random() < 0.7
        self._kinds: tuple[tuple[int, Callable[[], list[Line]]], ...] = (
            (6, self._redistribute),
            (2, self._gather),
            (5, self._operator),
            (2, self._in_place),
            (2, self._many),
            (2, self._mapped),
            (3, self._layer),
            (1, self._trained),
            (2, self._vector),
            (3, self._part_of_mesh),
            (2, self._make),
            (2, self._async),
            (4, self._collective),
            (1, self._barrier),
            (1, self._plain),
            (5, self._local),
            *(((8, self._raw),) if raw else ()),
        )

    def first(self) -> list[Line]:
        """Return the lines that create the tensors."""
        made = [self._device_put(name, one, "mesh") for name, one in (("a", 1), ("b", 2), ("c", 3))]
        part = self._axis()
        return [*made, Line("v = a.sum(0)"), self._device_put("p", 4, f'mesh["{part}"]', (part,))]

    def several(self, count: int) -> list[Line]:
        """Draw this many lines, or a few more if some belong together."""
        weights, kinds = zip(*self._kinds, strict=True)
        return [line for make in self._draw.choices(kinds, weights, k=count) for line in make()]

    # -- parts of lines ----------------------------------------------------------------------------

    def _axis(self) -> str:
        return self._draw.choice(self._axes)

    def _spec(self, axes: tuple[str, ...] | None = None, dims: int = 2) -> str:
        """Draw a spec: each axis shards one of the dims, or none."""
        axes = self._axes if axes is None else axes
        split: list[list[str]] = [[] for _ in range(dims)]
        for axis in self._draw.sample(axes, len(axes)):
            dim = self._draw.randrange(-1, dims)
            if dim >= 0:
                split[dim].append(axis)
        return f"P({', '.join(str(tuple(names)) if names else 'None' for names in split)})"

    def _other_spec(self, spec: str, axes: tuple[str, ...] | None = None, dims: int = 2) -> str:
        while True:
            other_spec = self._spec(axes, dims)
            if other_spec != spec:
                return other_spec

    def _two(self) -> tuple[str, str, str]:
        """Draw two sharded matrices, which may be the same, and one that differs from the
        second.
        """
        one, two = self._draw.choice("abc"), self._draw.choice("abc")
        return one, two, self._draw.choice([x for x in "abc" if x != two])

    def _device_put(
        self, name: str, one: int, mesh: str, axes: tuple[str, ...] | None = None
    ) -> Line:
        spec = self._spec(axes)
        wrong = self._other_spec(spec, axes)
        make = f"{name} = sm.device_put(value({one}), {mesh}, %s, src_data_rank=None)"
        return Line(make % spec, (make % wrong,))

    # -- sharded tensors ---------------------------------------------------------------------------

    def _redistribute(self) -> list[Line]:
        one, two, other = self._two()
        spec = self._spec()
        wrong = (
            f"{one} = {other}.redistribute({spec})",
            f"{one} = {two}.redistribute({self._other_spec(spec)})",
            f"{one} = {two}.float().redistribute({spec})",
        )
        return [Line(f"{one} = {two}.redistribute({spec})", wrong)]

    def _gather(self) -> list[Line]:
        _, two, other = self._two()
        how = self._draw.choice(
            [
                "t[0] += {}.full_tensor().sum()",
                "t[1] += {}.sum().item()",
                "u[0] += {}.full_tensor()[1, 1]",
            ]
        )
        return [Line(how.format(two), (how.format(other),))]

    def _operator(self) -> list[Line]:
        one, two, other = self._two()
        third = self._draw.choice("abc")
        how = self._draw.choice(
            [
                "{} = {} + {}",
                "{} = torch.tanh({} @ {} * 0.1)",
                "{} = {} * 0.5 - {}",
                "{} = torch.sin({} * {})",
            ]
        )
        wrong = how.format(one, other, third), f"{one} = {two} / 3 + {third}"
        return [Line(how.format(one, two, third), wrong)]

    def _in_place(self) -> list[Line]:
        one = self._draw.choice("abc")
        how = self._draw.choice(["{}.mul_(0.5)", "{}.neg_()", "{}.add_(1)"])
        return [
            Line(how.format(one), (how.format(self._draw.choice([x for x in "abc" if x != one])),))
        ]

    def _many(self) -> list[Line]:
        one, two = self._draw.sample("abc", 2)
        specs = self._spec(), self._spec()
        text = f"{one}, {two} = sm.redistribute_many([{one}, {two}], [%s, %s])"
        wrong = (
            text % (self._other_spec(specs[0]), specs[1]),
            f"{one}, {two} = sm.redistribute_many([{two}, {one}], [{specs[0]}, {specs[1]}])",
        )
        return [Line(text % specs, wrong)]

    def _mapped(self) -> list[Line]:
        one, two, other = self._two()
        axis = self._axis()
        if self._draw.random() < 0.5:
            others = (f'{one} = smooth["{x}"]({two})' for x in self._axes if x != axis)
            return [
                Line(
                    f'{one} = smooth["{axis}"]({two})',
                    (f'{one} = smooth["{axis}"]({other})', *others),
                )
            ]
        spec = self._spec()
        text = f'{one} = mapped(sm.{{}}, "{axis}", mesh, {spec})({{}})'
        return [
            Line(text.format("psum", two), (text.format("pmax", two), text.format("psum", other)))
        ]

    def _layer(self) -> list[Line]:
        one, two, other = self._two()
        third, spec = self._draw.choice("abc"), self._spec()
        wrong = (
            f"{one} = layer({other}, {third}, {spec})",
            f"{one} = layer({two}, {third}, {self._other_spec(spec)})",
        )
        return [Line(f"{one} = layer({two}, {third}, {spec})", wrong)]

    def _trained(self) -> list[Line]:
        one, two, other = self._two()
        return [Line(f"{one} = trained({one}, {two})", (f"{one} = trained({one}, {other})",))]

    def _vector(self) -> list[Line]:
        one, two, other = self._two()
        dim = self._draw.randrange(2)
        sum_ = Line(
            f"v = {two}.sum({dim})",
            (f"v = {two}.sum({1 - dim})", f"v = {other}.sum({dim})", f"v = {two}.mean({dim})"),
        )
        spec = self._spec(dims=1)
        move = Line(
            f"v = v.redistribute({spec})",
            (f"v = v.redistribute({self._other_spec(spec, dims=1)})",),
        )
        return [
            self._draw.choice(
                [
                    sum_,
                    move,
                    Line(f"{one} = {one} + v * 0.1", (f"{one} = {two} + v * 0.2 * {other}",)),
                ]
            )
        ]

    def _part_of_mesh(self) -> list[Line]:
        """Return lines in which each row of the mesh works separately."""
        axis = self._axis()
        spec = self._spec((axis,))
        make = self._device_put("p", self._draw.randrange(9), f'mesh["{axis}"]', (axis,))
        wrong = tuple(
            f'p = sm.device_put(value(5), mesh["{x}"], P("{x}"), src_data_rank=None)'
            for x in self._axes
            if x != axis
        )
        then = self._draw.choice(
            [
                Line(
                    f"p = p.redistribute({spec})",
                    (f"p = p.redistribute({self._other_spec(spec, (axis,))})",),
                ),
                Line("u[1] += p.full_tensor().sum()"),
                Line("p = torch.tanh(p @ p * 0.1)", ("p = torch.tanh(p + p)",)),
            ]
        )
        return [Line(make.text, (*make.wrong, *wrong)), then]

    def _make(self) -> list[Line]:
        one, k = self._draw.choice("abc"), self._draw.randrange(9)
        if self._draw.random() < 0.5:
            return [self._device_put(one, k, "mesh")]
        spec = self._spec()
        make = f"{one} = sm.distribute_tensor(value({k}), mesh, %s)"
        return [Line(make % spec, (make % self._other_spec(spec),))]

    def _async(self) -> list[Line]:
        one, two, other = self._two()
        spec = self._spec()
        begin = f"coming = {two}.redistribute({spec}, async_op=True)"
        wrong = (
            begin.replace(f"{two}.", f"{other}."),
            f"coming = {two}.redistribute({self._other_spec(spec)}, async_op=True)",
        )
        between = self._draw.choice([self._operator, self._plain, self._collective])()
        return [Line(begin, wrong), *between, Line(f"{one} = coming.wait()")]

    # -- plain tensors -----------------------------------------------------------------------------

    def _collective(self) -> list[Line]:
        """Return a collective of a group on a plain tensor."""
        one, other = self._draw.sample("tu", 2)
        group, *others = self._groups()
        name, wrong = self._draw.choice(
            [
                ("{}.all_reduce({})", ["{}.all_reduce({}, 'max')", "{}.all_reduce({}.float())"]),
                ("{}.all_reduce({}, 'max')", ["{}.all_reduce({}, 'min')"]),
                ("{}.broadcast({}, src=0)", ["{}.broadcast({}, src=1)"]),
                ("t = gathered({}, {})", ["t = gathered({}, {}.float()).double()"]),
                ("u = scattered({}, {})", ["u = scattered({}, {}, 'max')"]),
                ("t = exchanged({}, {})", []),
                ("u = shifted({}, {}, 1)", ["u = shifted({}, {}, -1)"]),
            ]
        )
        if self._least < 2:
            wrong = [text for text in wrong if "src=1" not in text]
        calls = (
            [text.format(group, one) for text in wrong]
            + [name.format(g, one) for g in others]
            + [name.format(group, other)]
        )
        return [Line(name.format(group, one), tuple(calls))]

    def _groups(self) -> list[str]:
        """Return the groups of the mesh's axes and of the whole mesh, in random order."""
        groups = [f'mesh.group("{axis}")' for axis in self._axes] + [
            "mesh.group(mesh.axis_names)"
        ] * (len(self._axes) > 1)
        return self._draw.sample(groups, len(groups))

    def _barrier(self) -> list[Line]:
        group = self._groups()[0]
        return [Line(self._draw.choice([f"{group}.barrier()", f"{group}.all_gather_object(rank)"]))]

    def _raw(self) -> list[Line]:
        """Return a call of torch.distributed on all ranks."""
        one, other = self._draw.sample("tu", 2)
        name, wrong = self._draw.choice(
            [
                (
                    "raw_all_reduce(mesh, {})",
                    [
                        "raw_all_reduce(mesh, {}, 'max')",
                        "raw_all_reduce(mesh, {}.float())",
                        "raw_barrier(mesh)",
                    ],
                ),
                (
                    "raw_all_reduce(mesh, {}, 'max')",
                    ["raw_all_reduce(mesh, {}, 'min')", "raw_all_reduce(mesh, {}[:5], 'max')"],
                ),
                ("raw_broadcast(mesh, {}, 0)", ["raw_broadcast(mesh, {}[:7], 0)"]),
                ("t = raw_gathered(mesh, {})", ["t = raw_gathered(mesh, {}.float()).double()"]),
                ("raw_barrier(mesh)", []),
                ("raw_objects(mesh, rank)", ["raw_barrier(mesh)"]),
            ]
        )
        call = Line(
            name.format(one),
            tuple(text.format(one) for text in wrong)
            + ((name.format(other),) if "{}" in name else ()),
        )
        if "all_reduce" not in name or self._draw.random() < 0.6:
            return [call]
        between = self._draw.choice([self._operator, self._in_place, self._redistribute])()
        return [
            Line(f"work = raw_start(mesh, {one})", (f"work = raw_start(mesh, {one}.float())",)),
            *between,
            Line("work.wait()"),
        ]

    def _plain(self) -> list[Line]:
        return [Line(self._draw.choice(["t = t * 0.5", "u = u + 1", "t, u = u, t"]))]

    # -- lines of a single rank --------------------------------------------------------------------

    def _local(self) -> list[Line]:
        rank = self._draw.randrange(3)
        if self._draw.random() < 0.6:
            return [Line(f"if rank == {rank}:\n    {self._on_one_rank()}", is_local=True)]
        one, two, _ = self._two()
        branch = f"{one} = {two}.redistribute({self._spec()})"
        if self._draw.random() < 0.5:
            branch = f"{one} = {self._tensor()}"
        line = Line(f"if rank == {rank}:\n    {branch}\nelse:\n    {branch}", is_local=True)
        return (
            [Line("mesh.group(mesh.axis_names).barrier()"), line] if self._creates_local else [line]
        )

    def _on_one_rank(self) -> str:
        """Return code that one rank may run alone.

        In programs where single ranks create tensors, a branch that creates a shared tensor on
        different lines follows a barrier. Otherwise a rank could create a tensor alone, and then,
        without a collective in between, a shared one of the same layout on a line that differs from
        the other ranks': neither line nor count would identify the shared tensor across ranks. This
        cannot be distinguished from creating a different tensor, so the error would be no false
        alarm.
        """
        one, two, _ = self._two()
        looks = [
            f"repr({one}); {one}.to_local(); {one}.grad; {one}.placements",
            f"copy.deepcopy({one}.detach())",
            f"extra = {two}.detach() * 2",
        ]
        makes = [
            f"extra = {self._tensor()} * 2",
            f"extra = [{self._tensor()} for _ in range(3)]",
            f"in_thread(lambda: {self._tensor()} * 2)",
        ]
        return self._draw.choice(looks + makes * self._creates_local)

    def _tensor(self) -> str:
        return f"sm.device_put(value(7), mesh, {self._spec()}, src_data_rank=None)"
