"""Each collective in torch.distributed by hand, torch's functional collectives, spmd_types and
shardmesh.

    psum  raw  clone, all_reduce   ours   sm.psum(x, "x")   spmd_types   all_reduce(x, group, dst=R)

All return a new tensor and do not modify `x`. The raw ones include any arithmetic and reordering of
elements that the collective needs, written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from dispatch import WORLD
from functional_setup import AXIS
from torch import Tensor

import shardmesh as sm

ROWS, WIDTH, TENSORS = 8, 8, 20
RawCollective = Callable[[Any, Tensor], Any]  # called with a process group and this rank's part


class ByHand:
    """A raw collective as an autograd function, as written by hand for a layer."""

    def __init__(self, forward: RawCollective, backward: RawCollective | None) -> None:
        self.forward, self.backward = forward, backward

    def __call__(self, group: Any, x: Tensor) -> Tensor:
        return _ByHand.apply(x, group, self)  # type: ignore[return-value]


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, both: ByHand) -> Tensor:
        ctx.group, ctx.backward_of = group, both.backward
        return both.forward(group, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_of(ctx.group, grads[0]), None, None


# torch 2.13 renamed these two; the old names add a call.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# -- by hand ---------------------------------------------------------------------------------------


def all_reduce(group: Any, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum over ranks."""
    out = x.clone()
    dist.all_reduce(out, op, group=group)
    return out


def all_reduce_waited(group: Any, x: Tensor) -> Tensor:
    """Return the sum over ranks by an asynchronous collective and wait."""
    out = x.clone()
    work: Any = dist.all_reduce(out, group=group, async_op=True)
    work.wait()
    return out


def all_reduce_many(group: Any, x: Tensor) -> list[Tensor]:
    """Return the sums of several tensors, in one collective."""
    many = [x] * TENSORS
    flat = torch.cat([part.reshape(-1) for part in many])
    dist.all_reduce(flat, group=group)
    return [piece.view(x.shape) for piece in flat.split([part.numel() for part in many])]


def gather(group: Any, x: Tensor) -> Tensor:
    """Concatenate all parts along dim 0."""
    out = x.new_empty(WORLD * x.shape[0], *x.shape[1:])
    all_gather_flat(out, x, group=group)
    return out


def gather_columns(group: Any, x: Tensor) -> Tensor:
    """Concatenate all parts along dim 1."""
    return torch.cat(gather(group, x).chunk(WORLD), 1)


def gather_stacked(group: Any, x: Tensor) -> Tensor:
    """Stack all parts along a new dim 0."""
    return gather(group, x.unsqueeze(0))


def scatter(group: Any, x: Tensor) -> Tensor:
    """Return this rank's chunk of the sum along dim 0."""
    out = x.new_empty(x.shape[0] // WORLD, *x.shape[1:])
    reduce_scatter_flat(out, x, group=group)
    return out


def scatter_columns(group: Any, x: Tensor) -> Tensor:
    """Return this rank's chunk of the sum along dim 1."""
    return scatter(group, torch.cat(x.chunk(WORLD, 1)))


def scatter_stacked(group: Any, x: Tensor) -> Tensor:
    """Return this rank's row of the sum."""
    return scatter(group, x).squeeze(0)


def swap(group: Any, x: Tensor) -> Tensor:
    """Send row i to rank i."""
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


def columns_to_rows(group: Any, x: Tensor) -> Tensor:
    """Split along dim 1, concatenate along dim 0."""
    return swap(group, torch.cat(x.chunk(WORLD, 1)))


def rows_to_columns(group: Any, x: Tensor) -> Tensor:
    """Split along dim 0, concatenate along dim 1."""
    return torch.cat(swap(group, x).chunk(WORLD), 1)


def shift(group: Any, x: Tensor, by: int = 1) -> Tensor:
    """Send to the next rank, receive from the previous one."""
    me, out = dist.get_rank(group), torch.empty_like(x)
    sends = dist.P2POp(dist.isend, x, group=group, group_peer=(me + by) % WORLD)
    receives = dist.P2POp(dist.irecv, out, group=group, group_peer=(me - by) % WORLD)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()
    return out


def shift_back(group: Any, x: Tensor) -> Tensor:
    """Send to the previous rank, receive from the next one."""
    return shift(group, x, -1)


RING = [(i, (i + 1) % WORLD) for i in range(WORLD)]

# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveCase:
    """One collective.

    Attributes:
        name: name of the row.
        ours: called with this rank's part.
        raw: by hand, called with the group and this rank's part.
        back: backward of `raw`, called with the group and the gradient.
        functional: with torch's functional collectives, waited for; records a graph.
        spmd: with spmd_types, called with the package, the group and this rank's part.
        type: spmd_types' type of the input: "P", "V" or "S".
        shape: shape of this rank's part.
    """

    name: str
    ours: Callable[[Tensor], Any]
    raw: RawCollective
    back: RawCollective | None = None
    functional: RawCollective | None = None
    spmd: Callable[[Any, Any, Tensor], Any] | None = None
    type: str = "V"
    shape: tuple[int, ...] = (ROWS, WIDTH)

    @property
    def differentiable(self) -> bool:
        """Whether to also time it with a graph."""
        return self.back is not None or self.name == "pmax"

    def spmd_type(self, spmd: Any) -> Any:
        """Return spmd_types' type of the input."""
        return {"P": spmd.P, "V": spmd.V, "S": spmd.S(0)}[self.type]


wait = funcol.wait_tensor
CASES = (
    CollectiveCase(
        "psum",
        lambda x: sm.psum(x, AXIS),
        all_reduce,
        all_reduce,
        lambda g, x: wait(funcol.all_reduce(x, "sum", g)),
        lambda spmd, g, x: spmd.all_reduce(x, g, dst=spmd.R),
        "P",
    ),
    CollectiveCase(
        f"psum of {TENSORS} tensors",
        lambda x: sm.psum([x] * TENSORS, AXIS),
        all_reduce_many,
        None,
        lambda g, x: [wait(y) for y in funcol.all_reduce_coalesced([x] * TENSORS, "sum", g)],
        lambda spmd, g, x: [spmd.all_reduce(x, g, dst=spmd.R) for _ in range(TENSORS)],
        "P",
    ),
    CollectiveCase(
        "pmax",
        lambda x: sm.pmax(x, AXIS),
        lambda g, x: all_reduce(g, x, dist.ReduceOp.MAX),
        None,
        lambda g, x: wait(funcol.all_reduce(x, "max", g)),
    ),
    CollectiveCase(
        "all_gather",
        lambda x: sm.all_gather(x, AXIS),
        gather_stacked,
        scatter_stacked,
        lambda g, x: wait(funcol.all_gather_single(x.unsqueeze(0), 0, g)),
        lambda spmd, g, x: spmd.all_gather(x, g, dst=spmd.R),
    ),
    CollectiveCase(
        "all_gather, tiled",
        lambda x: sm.all_gather(x, AXIS, tiled=True),
        gather,
        scatter,
        lambda g, x: wait(funcol.all_gather_single(x, 0, g)),
        lambda spmd, g, x: spmd.all_gather(x, g, src=spmd.S(0), dst=spmd.R),
        "S",
    ),
    CollectiveCase(
        "all_gather, tiled, dim 1",
        lambda x: sm.all_gather(x, AXIS, axis=1, tiled=True),
        gather_columns,
        scatter_columns,
        lambda g, x: wait(funcol.all_gather_single(x, 1, g)),
        lambda spmd, g, x: spmd.all_gather(x, g, src=spmd.S(1), dst=spmd.R),
    ),
    CollectiveCase(
        "psum_scatter",
        lambda x: sm.psum_scatter(x, AXIS),
        scatter_stacked,
        gather_stacked,
        lambda g, x: wait(funcol.reduce_scatter_single(x, "sum", 0, g)).squeeze(0),
        lambda spmd, g, x: spmd.reduce_scatter(x, g),
        "P",
    ),
    CollectiveCase(
        "psum_scatter, tiled",
        lambda x: sm.psum_scatter(x, AXIS, tiled=True),
        scatter,
        gather,
        lambda g, x: wait(funcol.reduce_scatter_single(x, "sum", 0, g)),
        lambda spmd, g, x: spmd.reduce_scatter(x, g, dst=spmd.S(0)),
        "P",
    ),
    CollectiveCase(
        "all_to_all",
        lambda x: sm.all_to_all(x, AXIS, 0, 0),
        swap,
        swap,
        lambda g, x: wait(funcol.all_to_all_single(x, None, None, g)),
        lambda spmd, g, x: spmd.all_to_all(x, g),
    ),
    CollectiveCase(
        "all_to_all, tiled, dim 1 to 0",
        lambda x: sm.all_to_all(x, AXIS, 1, 0, tiled=True),
        columns_to_rows,
        rows_to_columns,
        lambda g, x: wait(funcol.all_to_all_single(torch.cat(x.chunk(WORLD, 1)), None, None, g)),
        lambda spmd, g, x: spmd.all_to_all(x, g, src=spmd.S(0), dst=spmd.S(1)),
        "S",
    ),
    CollectiveCase(
        "ppermute",
        lambda x: sm.ppermute(x, AXIS, RING),
        shift,
        shift_back,
        lambda g, x: wait(funcol.permute_tensor(x.view(-1), [to for _, to in RING], g)).view(
            x.shape
        ),
    ),
    CollectiveCase(
        "axis_index", lambda x: sm.axis_index(AXIS), lambda g, x: torch.tensor(dist.get_rank(g))
    ),
    CollectiveCase(
        "start and wait for psum",
        lambda x: sm.async_start(sm.psum, x, AXIS).wait(),
        all_reduce_waited,
        all_reduce,
        lambda g, x: wait(funcol.all_reduce(x, "sum", g)),
    ),
)
