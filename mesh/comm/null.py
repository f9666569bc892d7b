"""null_world: run one rank of many alone and count its communication, without communicating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .. import errors
from ..abstract_mesh import MOST_RANKS
from .current_world import current_world
from .group import Group
from .thread_context import thread_context
from .work import DONE, Work
from .world import World


class NullGroup(Group):
    """Group whose collectives are counted but send nothing.

    Outputs of all_gather, reduce_scatter, all_to_all and permute are zeros, which any operator
    accepts (an index of 0 is valid, a sum of zeros is finite). Tensors that are reduced or
    broadcast in place keep this rank's values; every object gathered is this rank's own.
    """

    __slots__ = ()

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        return _zeros(out, async_op)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        return _zeros(out, async_op)

    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        return _zeros(out, async_op)

    def _permute(
        self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool
    ) -> Work | None:
        if src is not None:
            _zeros(out, async_op)
        return DONE if async_op else None

    def _send(self, x: Tensor, dst: int) -> Work | None:
        return DONE

    def _receive(self, out: Tensor, src: int) -> Work | None:
        return _zeros(out, True)

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return DONE if async_op else None

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        return DONE if async_op else None

    def _barrier(self) -> None:
        pass

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.size


def _zeros(out: Tensor, async_op: bool) -> Work | None:
    out.detach().zero_()
    return DONE if async_op else None


class NullWorld(World):
    """The world of `null_world`."""

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return NullGroup(self, ranks)


@contextmanager
def null_world(size: int, rank: int = 0) -> Iterator[World]:
    """with null_world(size, rank): run as that rank of `size` ranks, alone.

    Collectives are counted, but nothing is communicated.

    Works with tensors on any device, including "meta", so a mesh of thousands of ranks needs the
    memory of one rank or none. The resulting values are meaningless (see `NullGroup`).

    Raises: MeshError when there is no such rank.

    Communication: none.

    >>> import torch
    >>> from shardmesh.mesh import comm_budget, init_device_mesh, null_world
    >>> with null_world(1024), comm_budget() as used:
    ...     mesh = init_device_mesh("meta", (128, 8), axis_names=("dp", "tp"))
    ...     mesh.group("tp").all_reduce(torch.empty(1000, device="meta"))
    >>> used.bytes_received
    7000
    """
    if size > MOST_RANKS:
        raise errors.MeshError(f"null_world: a world has at most {MOST_RANKS} ranks.")
    if size < 1 or not 0 <= rank < size:
        raise errors.MeshError(
            f"null_world(size={size}, rank={rank}): rank must be from 0 to size - 1."
        )
    world = NullWorld(rank, size, list(current_world().observers))
    try:
        with thread_context.setting(world=world):
            yield world
    finally:
        world.end()
