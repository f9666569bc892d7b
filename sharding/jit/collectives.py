"""Define collectives as operators `torch.ops.shardmesh`.

A graph calls them in place of the methods of `Group`.

    started = shardmesh.all_gather(x, "0,1,2,3", site)   launches; flat, in the order of the group
    whole   = shardmesh.wait(started)                    the result, which may be read

No result shares memory with an operand. All run through `Group`, so the monitor, `comm_report` and
budgets see them. A *site* is the number of a `Site`: the purpose of the collective when the graph
was made.

In a compiled segment every collective is `ordered(x, token, size, n)`, the segment's n-th: equal
segments of different layers, and of different processes, are equal code. The segment sets
`ThreadContext.segment_calls` before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...mesh.comm.call_site import DESCRIBERS
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.pending import Pending
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World


class Site(NamedTuple):
    """What a collective of a graph is part of.

    Attributes:
        tag, lineage: as in `CommContext`.
        name: what the program called, as `comm_report` shows it.
        place: file:line of the program.
    """

    tag: CommTag | None
    lineage: int
    name: str
    place: str


_sites: list[Site] = []
_numbers: dict[Any, int] = {}


def site_number(site: Site) -> int:
    """Return the number of a site, the same for equal ones."""
    key = id(site.tag), *site[1:]
    number = _numbers.get(key)
    if number is None:
        _sites.append(site)
        number = _numbers[key] = len(_sites) - 1
    return number


def site_of(number: int) -> Site:
    """Return the site with this number."""
    return _sites[number]


def forget_lineages(graph: fx.Graph) -> bool:
    """Let collectives of a graph meet those of other recordings, made of values of other calls.

    Returns: whether the graph has changed.
    """
    sites = {node: site_of(node.args[-1]) for node in graph.nodes if node.target in OPERATORS}  # type: ignore[arg-type]
    known = {node: site for node, site in sites.items() if site.lineage}
    for node, site in known.items():
        node.args = (*node.args[:-1], site_number(site._replace(lineage=0)))
    opaque: Any = [node for node in graph.nodes if getattr(node.target, "site", None) is not None]
    for node in opaque:
        node.target = node.target.at(node.target.site._replace(lineage=0))
    return bool(known) or bool(opaque)


def group_name(group: Group) -> str:
    """Return the text by which graphs refer to a group: its ranks."""
    return ",".join(map(str, group.ranks))


_ranks: dict[str, tuple[int, ...]] = {}


def group_of(name: str) -> Group:
    """Return the group of these ranks in the world of this thread."""
    ranks = _ranks.get(name)
    if ranks is None:
        ranks = _ranks[name] = tuple(map(int, name.split(",")))
    return current_world().group(ranks)


def bound(node: fx.Node) -> Callable[[Tensor], Tensor]:
    """Return a function of x that runs a graph's collective and returns its result."""
    start = STARTS[OPERATORS[node.target]]  # type: ignore[index]
    group = group_of(node.args[-2])  # type: ignore[arg-type]
    site = site_of(node.args[-1])  # type: ignore[arg-type]
    args = node.args[1:-2]
    return lambda x: start(x, *args, group, site, True).wait()


@contextmanager
def at_site(world: World, site: Site) -> Iterator[None]:
    """Let collectives in the block be part of this site."""
    context = world.comm_context
    before = context.lineage, context.origin
    context.lineage = site.lineage
    context.origin = site.place, 0 if before[1] is None else before[1][1]
    try:
        yield
    finally:
        context.lineage, context.origin = before


def _launch(
    method: Any, group: Group, site: Site, result: Tensor, *args: Any, **kwargs: Any
) -> Pending[Tensor]:
    context = group.world.comm_context  # as `at_site`, which costs a microsecond more
    before = context.lineage, context.origin
    tag, context.lineage, _, place = site
    context.origin = place, 0 if before[1] is None else before[1][1]
    try:
        return Pending.after(method(group, *args, **kwargs, tag=tag), lambda: result)
    finally:
        context.lineage, context.origin = before


DESCRIBERS[_launch.__code__] = lambda frame: frame["site"].name


def all_gather(x: Tensor, group: Group, site: Site, now: bool = False) -> Pending[Tensor]:
    """Launch an all_gather of x.

    With `now` it has completed when this returns, as in all functions of this module.
    """
    out = x.new_empty(group.size * x.numel())
    return _launch(Group.all_gather, group, site, out, out, x, async_op=not now)


def reduce_scatter(
    x: Tensor, op: str, group: Group, site: Site, now: bool = False
) -> Pending[Tensor]:
    """Launch a reduce_scatter of x."""
    out = x.new_empty(x.numel() // group.size)
    return _launch(Group.reduce_scatter, group, site, out, out, x, op, async_op=not now)


def all_reduce(
    x: Tensor, op: str, group: Group, site: Site, now: bool = False, donate: bool = False
) -> Pending[Tensor]:
    """Launch an all_reduce of a copy of x, or of x itself if that may be overwritten."""
    out = x if donate and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return _launch(Group.all_reduce, group, site, out, out, op, async_op=not now)


def all_to_all(
    x: Tensor,
    out_splits: Sequence[int] | None,
    in_splits: Sequence[int] | None,
    group: Group,
    site: Site,
    now: bool = False,
) -> Pending[Tensor]:
    """Launch an all_to_all of x."""
    out = x.new_empty(x.numel() if out_splits is None else sum(out_splits))
    return _launch(
        Group.all_to_all, group, site, out, out, x, out_splits, in_splits, async_op=not now
    )


def broadcast(
    x: Tensor, src: int, group: Group, site: Site, now: bool = False, donate: bool = False
) -> Pending[Tensor]:
    """Launch a broadcast into a copy of x, or into x itself if that may be overwritten."""
    out = x if donate and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    return _launch(Group.broadcast, group, site, out, out, src, async_op=not now)


def permute(
    x: Tensor,
    size: int,
    dst: int | None,
    src: int | None,
    group: Group,
    site: Site,
    now: bool = False,
) -> Pending[Tensor]:
    """Launch a permute of x; the result has `size` elements, none if nothing is received."""
    out = x.new_empty(size)
    return _launch(Group.permute, group, site, out, out, x, dst=dst, src=src, async_op=not now)


# -- operators of torch ----------------------------------------------------------------------------

_SCHEMAS = {
    "all_gather": "(Tensor x, str group, int site) -> Tensor",
    "reduce_scatter": "(Tensor x, str op, str group, int site) -> Tensor",
    "all_reduce": "(Tensor x, str op, str group, int site) -> Tensor",
    "all_to_all": "(Tensor x, int[]? out_splits, int[]? in_splits, str group, int site) -> Tensor",
    "broadcast": "(Tensor x, int src, str group, int site) -> Tensor",
    "permute": "(Tensor x, int size, int? dst, int? src, str group, int site) -> Tensor",
}
STARTS = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "permute": permute,
}
_library = torch.library.Library("shardmesh", "DEF")


def _size_of(name: str) -> Any:
    """Return the meta function of an operator: its result without values."""

    def all_gather(x: Tensor, group: str, site: int) -> Tensor:
        return x.new_empty(x.numel() * (group.count(",") + 1))

    def reduce_scatter(x: Tensor, op: str, group: str, site: int) -> Tensor:
        return x.new_empty(x.numel() // (group.count(",") + 1))

    def in_place(x: Tensor, op: Any, group: str, site: int) -> Tensor:
        return x.new_empty(x.shape)

    def all_to_all(x: Tensor, out_splits: Any, in_splits: Any, group: str, site: int) -> Tensor:
        return x.new_empty(x.numel() if out_splits is None else sum(out_splits))

    def permute(x: Tensor, size: int, dst: Any, src: Any, group: str, site: int) -> Tensor:
        return x.new_empty(size)

    return {"all_reduce": in_place, "broadcast": in_place}.get(name) or locals()[name]


def _run_and_wait(start: Any) -> Any:
    return lambda *args: start(*args[:-2], group_of(args[-2]), site_of(args[-1]), now=True).wait()


for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _run_and_wait(STARTS[_name]), "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardmesh::{_name}", _size_of(_name), lib=_library)

_library.define("wait(Tensor started) -> Tensor")
_library.impl("wait", lambda started: started.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("shardmesh::wait", torch.empty_like, lib=_library)


# With a token, so that a compiler keeps the order of collectives, which must be the same on all
# ranks.
_library.define(
    "ordered(Tensor x, Tensor token, int? size, int number) -> (Tensor, Tensor)",
    tags=[torch.Tag.cudagraph_unsafe],  # the monitor counts each call
)
_library.impl(
    "ordered",
    lambda x, token, size, number: (
        thread_context.segment_calls[number](x.contiguous()),
        token.new_empty(0),
    ),
    "CompositeExplicitAutograd",
)
torch.library.register_fake(
    "shardmesh::ordered",
    lambda x, token, size, number: (
        x.new_empty(x.shape if size is None else size),
        token.new_empty(0),
    ),
    lib=_library,
)
ORDERED = torch.ops.shardmesh.ordered.default
OPERATORS = {getattr(torch.ops.shardmesh, name).default: name for name in _SCHEMAS}
WAIT = torch.ops.shardmesh.wait.default
