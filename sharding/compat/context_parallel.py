"""`context_parallel` in torch's form: plain buffers are this rank's part in the block.

    tokens [b, 16] on 2 ranks    in the block    rank 0  [b, 8]: positions 0 1 2 3 12 13 14 15
                                                 rank 1  [b, 8]: positions 4 5 6 7 8 9 10 11

The order is that of `balance_sequence`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...mesh.comm.current_world import current_world
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ...mesh.device_mesh import DeviceMesh, as_device_mesh
from ..parallel.context import attention
from ..parallel.context.attention import context_parallel_attention
from ..parallel.context.load_balance import balanced_runs, balanced_sizes, unbalance_sequence
from ..tensor.convert import from_part, to_local
from ..tensor.part_shapes import lengths_along
from ..tensor.sharded_tensor import ShardedTensor

_METHODS = {"allgather": "all_gather", "alltoall": "ring"}


class _RotateMethod:
    """How `context_parallel` moves keys and values in one world."""

    def __init__(self, _: World) -> None:
        self.method = "all_gather"


def set_rotate_method(rotate_method: str) -> None:
    """Choose how `context_parallel` moves keys and values, from now on.

    "allgather" (the default) gathers them, "alltoall" rotates them.

    They are the methods "all_gather" and "ring" of `sm.parallel.context_parallel_attention`;
    results are the same.

    Raises:
        NotImplementedError: another method.

    Communication: none.

    Example:
        >>> set_rotate_method("alltoall")
    """
    if rotate_method not in _METHODS:
        raise NotImplementedError(
            f"set_rotate_method({rotate_method!r}): write one of {', '.join(map(repr, _METHODS))}"
        )
    current_world().state(_RotateMethod).method = _METHODS[rotate_method]


def chosen_method() -> str:
    """Return the method of `sm.parallel.context_parallel_attention` that was chosen."""
    return current_world().state(_RotateMethod).method


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """with context_parallel(mesh["cp"], buffers=[...], buffer_seq_dims=[...]): ...

    Attention over sequences split over the mesh, in torch's form.

    In the block each buffer is this rank's part of its sequence, in the balanced order of
    `balance_sequence`, and `F.scaled_dot_product_attention` of plain tensors computes as
    `context_parallel_attention`. A loss is that of this rank's positions; average losses and
    gradients over the ranks, as under data parallelism. `sm.parallel.context_parallel(axis)` is the
    form for sharded tensors.

    Activation checkpointing (`use_reentrant=False`) recomputes attention as forward ran it, also
    after the block; buffers that it reads must be in `no_restore_buffers` then.

    Args:
        mesh: the mesh of the axis, or axes, that split the sequence.
        buffers: plain tensors with a dim of positions, whole and the same on every rank: tokens,
            labels, positional embeddings. They get other data in place, and their own again after
            the block.
        buffer_seq_dims: that dim of each. The sequence is as long as the first buffer; of longer
            ones the first positions are used.
        no_restore_buffers: those of the buffers that keep this rank's part after the block.

    Raises:
        TypeError: something else than a mesh; a buffer that is a parameter or a sharded tensor, or
            requires grad.
        ValueError: another number of dims than buffers, a buffer that is shorter than the first, or
            one in `no_restore_buffers` that is not in `buffers`. Later, from attention: masks or
            dropout, and what `context_parallel_attention` raises.

    Communication: none by itself; attention's as in `context_parallel_attention`.

    Example:
        >>> with context_parallel(
        ...     mesh["cp"],
        ...     buffers=[tokens, labels],
        ...     buffer_seq_dims=[1, 1],
        ...     no_restore_buffers={tokens, labels},
        ... ):
        ...     loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        ...     loss.backward()
    """
    mesh = as_device_mesh(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"context_parallel({mesh!r}): the first argument is a mesh, as in torch; the form that "
            "takes an axis is sm.parallel.context_parallel(axis, method=, balanced=)"
        )
    buffers, dims = list(buffers or ()), list(buffer_seq_dims or ())
    unrestored = [] if no_restore_buffers is None else list(no_restore_buffers)
    length = _check_buffers(buffers, dims, unrestored)
    ranks = mesh.size()
    index = mesh.index_along(mesh.axis_names)
    originals: list[tuple[Tensor, Tensor]] = []
    method = chosen_method()
    try:
        for buffer, dim in zip(buffers, dims, strict=True):
            whole = buffer.detach().view_as(buffer)
            if not any(buffer is other for other in unrestored):
                originals.append((buffer, whole))
            runs = (
                [
                    whole.narrow(dim, start, stop - start)
                    for start, stop in balanced_runs(length, ranks)[index]
                ]
                if ranks > 1
                else [whole]
            )
            with torch.no_grad():
                buffer.set_(torch.cat(runs, dim) if ranks > 1 else whole)  # type: ignore[call-overload]
        block = _Block(mesh, length, method)
        state = thread_context.function_state()._replace(plain_attention=block)
        with (
            attention.context_parallel(mesh.axis_names, method=method, balanced=True),
            thread_context.running_as(state),
        ):
            yield
    finally:
        for buffer, whole in originals:
            with torch.no_grad():
                buffer.set_(whole)  # type: ignore[call-overload]


def _check_buffers(
    buffers: Sequence[Tensor], dims: Sequence[int], unrestored: Sequence[Tensor]
) -> int:
    """Return the length of the sequence, that of the first buffer, 0 without buffers."""
    if len(buffers) != len(dims):
        raise ValueError(
            f"context_parallel: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; give one "
            "dim for each buffer"
        )
    if not all(any(x is buffer for buffer in buffers) for x in unrestored):
        raise ValueError(
            "context_parallel: no_restore_buffers has a tensor that is not in buffers; it must be "
            "a subset of them"
        )
    for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if (
            not isinstance(buffer, Tensor)
            or isinstance(buffer, nn.Parameter | ShardedTensor)
            or buffer.requires_grad
        ):
            what = (
                "requires grad"
                if isinstance(buffer, Tensor) and buffer.requires_grad
                else f"is a {type(buffer).__name__}"
            )
            raise TypeError(
                f"context_parallel: buffer {i} {what}; buffers are plain tensors that are the same "
                "on every rank"
            )
        if not -buffer.ndim <= dim < buffer.ndim:
            raise ValueError(
                f"context_parallel: buffer {i} has shape {list(buffer.shape)} and no dim {dim}"
            )
    length = buffers[0].shape[dims[0]] if buffers else 0
    short = [
        i
        for i, (buffer, dim) in enumerate(zip(buffers, dims, strict=True))
        if buffer.shape[dim] < length
    ]
    if short:
        sizes = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
        raise ValueError(
            f"context_parallel: buffer {short[0]} has fewer positions than buffer 0; their lengths "
            f"are {sizes}"
        )
    return length


@dataclass(frozen=True)
class _Block:
    """The mesh, the length of the sequences and the method of an active `context_parallel`."""

    mesh: DeviceMesh
    length: int
    method: str

    def install(self) -> None:
        """Replace torch's attention; see `Replacement`."""
        _replace(1)

    def uninstall(self) -> None:
        """Put torch's attention back if no other thread is in a block."""
        _replace(-1)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if any(isinstance(x, ShardedTensor) for x in (query, key, value)):
            return _torchs_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if attn_mask is not None or dropout_p:
            unsupported = (
                f"dropout_p={dropout_p}"
                if attn_mask is None
                else f"attn_mask of shape {list(attn_mask.shape)}"
            )
            raise ValueError(
                f"scaled_dot_product_attention in context_parallel: {unsupported}; keys of other "
                "ranks are processed with is_causal or no mask, without dropout"
            )
        if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
            raise ValueError(
                f"scaled_dot_product_attention in context_parallel: {query.shape[-3]} query heads "
                f"and {key.shape[-3]} key heads need enable_gqa=True"
            )
        sequences = [self._sequence(x) for x in (query, key, value)]
        options = {
            "axis": self.mesh.axis_names,
            "is_causal": is_causal,
            "scale": scale,
            "method": self.method,
            "balanced": True,
        }
        return to_local(context_parallel_attention(*sequences, **options))  # type: ignore[arg-type]

    def _sequence(self, part: Tensor) -> ShardedTensor:
        """Return the sequence of this part: as long as the buffers, or else of equal parts."""
        ranks = self.mesh.size()
        own = part.shape[-2]
        sizes = balanced_sizes(self.length, ranks)
        total = (
            self.length
            if sizes[self.mesh.index_along(self.mesh.axis_names)] == own
            else own * ranks
        )
        return from_part(part, self.mesh, part.ndim - 2, balanced_sizes(total, ranks))


_torchs_attention = F.scaled_dot_product_attention
_lock = threading.Lock()
_users = 0  # blocks, and recomputations of blocks, for which torch's function is replaced


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Compute attention as the block of this thread does, outside of blocks as torch does."""
    block: Any = thread_context.plain_attention
    if block is None or block.mesh.size() == 1:
        return _torchs_attention(*args, **kwargs)
    thread_context.plain_attention = None  # it may call torch's attention on this rank's parts
    try:
        return block._attention(*args, **kwargs)
    finally:
        thread_context.plain_attention = block


def _replace(by: int) -> None:
    """Count a user of the replacement; torch's own function is back when there is none."""
    global _users
    with _lock:
        _users += by
        F.scaled_dot_product_attention = _attention if _users else _torchs_attention


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: list[Tensor], seq_dims: list[int], load_balancer: Any = None
) -> list[Tensor]:
    """context_parallel_unshard(mesh, parts, dims) -> whole tensors by positions, without gradients.

    Args:
        mesh: that of `context_parallel`.
        buffers: this rank's parts, such as logits of the block's tokens, of any balanced lengths.
        seq_dims: the dim of positions of each.
        load_balancer: None for the order of `context_parallel`; else an object whose
            `_generate_indices(restore=True)` returns where each position is, [1, length] or [batch,
            length].

    Raises:
        ValueError: another number of dims than buffers.

    Communication: for each buffer a small all_gather of lengths, an all_to_all to the order of
        positions, and an all_gather.

    Example:
        >>> (logits,) = context_parallel_unshard(mesh["cp"], [logits], [1])
    """
    mesh = as_device_mesh(mesh)
    check_seq_dims("context_parallel_unshard", buffers, seq_dims)
    return [
        _whole_buffer(mesh, buffer.detach(), dim % buffer.ndim, load_balancer)
        for buffer, dim in zip(buffers, seq_dims, strict=True)
    ]


def _whole_buffer(mesh: DeviceMesh, part: Tensor, dim: int, load_balancer: Any) -> Tensor:
    x = from_part(part, mesh, dim, lengths_along(mesh, mesh.axis_names, part.shape[dim]))
    if load_balancer is None:
        return (unbalance_sequence(x, dim, mesh.axis_names) if mesh.size() > 1 else x).full_tensor()
    whole = x.full_tensor()
    indices = load_balancer._generate_indices(restore=True)
    return whole if indices is None else selected(whole, dim, indices)


def check_seq_dims(call: str, buffers: Sized, seq_dims: Sized) -> None:
    """Check that each buffer has a dim.

    Raises: ValueError, which names the call.
    """
    if len(buffers) != len(seq_dims):
        raise ValueError(
            f"{call}: {len(buffers)} buffers and {len(seq_dims)} seq_dims; give one dim for each"
        )


def selected(whole: Tensor, dim: int, indices: Tensor) -> Tensor:
    """Return positions of a tensor along a dim.

    Args:
        indices: the positions, [1, n], or [batch, n] for each row of dim 0.
    """
    if len(indices) == 1 or dim == 0:
        return whole.index_select(dim, indices[0])
    return torch.stack(
        [row.index_select(dim - 1, index) for row, index in zip(whole, indices, strict=True)]
    )
