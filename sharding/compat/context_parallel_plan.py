"""Context parallelism as a plan for attention modules, under names that are private in torch.

    tokens, labels, positions   _context_parallel_shard      this rank's part of each sequence
    model.layers.*.attention    parallelize_module(module, mesh["cp"], _ContextParallel(...))
    queries, keys, values       parts of sequences in the module, plain tensors outside of it

torchtitan imports these names from `torch.distributed.tensor.experimental._attention`. Programs of
one's own are shorter with `context_parallel`, or with `sm.parallel.context_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ...mesh.comm.thread_context import thread_context
from ...mesh.device_mesh import DeviceMesh, as_device_mesh
from ..layout.spec import Partial, Replicate
from ..parallel.context import attention
from ..parallel.context.load_balance import balanced_runs
from ..parallel.tensor.torch_styles import ParallelStyle
from ..tensor.convert import from_part, to_local
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors
from .context_parallel import check_seq_dims, chosen_method, selected


class LoadBalancer(Protocol):
    """The order of a sequence over ranks, as an object of torch's or of a program's own."""

    def _generate_indices(self, restore: bool = False) -> Tensor | None:
        """Return the position at each place, [1, length] or [batch, length], or the inverse."""


class _HeadTailLoadBalancer:
    """The order of `balance_sequence`: rank i of n has the pieces i and 2n-1-i of 2n.

    Args:
        seq_length: positions of a whole sequence.
        world_size: ranks that the sequence is split over.
        device: of the indices.

    Communication: none.

    Example:
        >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices()
        tensor([[0, 1, 6, 7, 2, 3, 4, 5]])
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length = seq_length
        self.world_size = world_size
        self.device = device

    def _generate_indices(self, restore: bool = False) -> Tensor:
        runs = [
            torch.arange(start, stop, device=self.device)
            for of_rank in balanced_runs(self.seq_length, self.world_size)
            for start, stop in of_rank
        ]
        order = torch.cat(runs)
        return (order.argsort() if restore else order)[None]


def _PTRRLoadBalancer(block_mask: BlockMask, world_size: int) -> LoadBalancer:
    """Return torch's load balancer for flex attention, by the blocks of a mask."""
    torchs = import_module("torch.distributed.tensor.experimental._attention")  # with DTensor
    return torchs._PTRRLoadBalancer(block_mask, world_size)


# The orders of sequences over ranks, see `ThreadContext.sequence_order`.
_CONTIGUOUS, _HEAD_TAIL, _OTHER = "contiguous", "head-tail", "other"


# -- buffers ---------------------------------------------------------------------------------------


@torch.no_grad()
def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Sequence[Tensor | BlockMask] | Mapping[str, Tensor | BlockMask],
    seq_dims: Sequence[int] | Mapping[str, int],
    load_balancer: LoadBalancer | None = None,
) -> Any:
    """_context_parallel_shard(mesh["cp"], (tokens, labels), (1, 1), balancer) -> this rank's parts.

    Attention of modules with a plan `_ContextParallel` takes sequences to be in the order of the
    last call in this thread, as in torch; recomputation in backward takes that of its forward.

    Args:
        mesh: of one axis, over which sequences are split.
        buffers: whole tensors, the same on every rank, or masks of flex attention, of which the
            queries are split.
        seq_dims: the dim of positions of each; that of masks is ignored.
        load_balancer: None keeps positions in order.

    Returns:
        The parts, in a list, or a dict with the names of the buffers.

    Raises:
        ValueError: another number of dims than buffers; a load balancer for another length; a
            length that the ranks do not divide, with a `_HeadTailLoadBalancer` twice the number of
            ranks.

    Communication: none.
    """
    mesh = as_device_mesh(mesh)
    check_seq_dims("_context_parallel_shard", buffers, seq_dims)
    wholes: Any = buffers
    dims: Any = seq_dims
    if isinstance(buffers, Mapping):
        wholes, dims = list(buffers.values()), [dims[name] for name in buffers]
    order = None if load_balancer is None else load_balancer._generate_indices()
    parts = [
        _part_of_mask(mesh, whole, order)
        if isinstance(whole, BlockMask)
        else _part(mesh, whole, dim, load_balancer, order)
        for whole, dim in zip(wholes, dims, strict=True)
    ]
    thread_context.sequence_order = _order_name(mesh, load_balancer, order)
    return dict(zip(buffers, parts, strict=True)) if isinstance(buffers, Mapping) else parts


def _order_name(mesh: DeviceMesh, load_balancer: LoadBalancer | None, order: Tensor | None) -> str:
    if order is None:
        return _CONTIGUOUS
    is_head_tail = type(load_balancer).__name__ == "_HeadTailLoadBalancer"  # ours or torch's
    if is_head_tail and load_balancer.world_size == mesh.size():  # type: ignore[union-attr]
        return _HEAD_TAIL
    return _OTHER


def _part(
    mesh: DeviceMesh,
    buffer: Tensor,
    dim: int,
    load_balancer: LoadBalancer | None,
    order: Tensor | None,
) -> Tensor:
    dim %= buffer.ndim
    length, ranks = buffer.shape[dim], mesh.size()
    pieces = 2 * ranks if isinstance(load_balancer, _HeadTailLoadBalancer) else ranks
    if length % pieces:
        raise ValueError(
            f"_context_parallel_shard: {length} positions over {ranks} ranks; pad sequences to a "
            f"multiple of {pieces}, or use sm.parallel.context_parallel, which takes any length"
        )
    if order is not None and order.shape[-1] != length:
        raise ValueError(
            f"_context_parallel_shard: a load balancer of {order.shape[-1]} positions for a buffer "
            f"of {length}; make it for the length of the buffers"
        )
    places = slice(*_bounds(mesh, length))
    if order is None:
        return buffer.narrow(dim, places.start, places.stop - places.start).contiguous()
    return selected(buffer, dim, order[:, places])


def _bounds(mesh: DeviceMesh, length: int) -> tuple[int, int]:
    """Return the places of this rank in a sequence of this length."""
    part = length // mesh.size()
    start = part * mesh.index_along(mesh.axis_names)
    return start, start + part


def _part_of_mask(mesh: DeviceMesh, mask: BlockMask, order: Tensor | None) -> BlockMask:
    """Return the mask of this rank's queries and all keys, both in the order of the sequences."""
    queries, keys = mask.seq_lengths
    if queries % (mesh.size() * mask.BLOCK_SIZE[0]):
        raise ValueError(
            f"_context_parallel_shard: a mask of {queries} queries in blocks of "
            f"{mask.BLOCK_SIZE[0]} over {mesh.size()} ranks; pad sequences to a multiple of "
            f"{mesh.size() * mask.BLOCK_SIZE[0]}"
        )
    start, stop = _bounds(mesh, queries)
    whole = mask.mask_mod

    def of_part(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        query = query + start
        if order is not None:
            row = 0 if len(order) == 1 else batch
            query, key = order[row, query], order[row, key]
        return whole(batch, head, query, key)

    batches, heads = mask.kv_num_blocks.shape[:2]
    return create_block_mask(
        of_part,
        batches,
        heads,
        stop - start,
        keys,
        device=mask.kv_num_blocks.device,  # type: ignore[arg-type]
        BLOCK_SIZE=mask.BLOCK_SIZE,
    )


# -- modules ---------------------------------------------------------------------------------------


class _ContextParallel(ParallelStyle):
    """A style for modules that compute attention of queries, keys and values, plain tensors.

    Inside of the module they are parts of sequences that are split over the mesh. The module may
    call `F.scaled_dot_product_attention`, with is_causal or without a mask; or flex attention with
    a mask of `_context_parallel_shard`, whose keys and values are gathered before.

    Args:
        seq_dim: the dim of positions of queries, keys and values, [batch, heads, positions, width].
        attention_type: `_ContextParallel.AttentionType.SDPA` or `.FLEX`.

    Raises:
        ValueError: a mesh of several axes, when it is applied. In a call: sequences in an order
            that attention of SDPA does not know, or that were not split by
            `_context_parallel_shard`; keys and values that are passed to FLEX by other names.

    Under `sm.jit` it is a break, since a graph would keep the order of sequences.

    Communication: that of `sm.parallel.context_parallel_attention` with the method of
        `set_rotate_method`; for FLEX an all_gather of keys and values, and reduce_scatter of their
        gradients.

    Example:
        >>> plan = _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.SDPA)
        >>> parallelize_module(block.attention.inner_attention, mesh["cp"], plan)
    """

    class AttentionType(Enum):
        """What the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        self.seq_dim = seq_dim
        self.attention_type = type(self).AttentionType(attention_type)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        mesh = as_device_mesh(device_mesh)
        if len(mesh.axis_names) != 1:
            raise ValueError(
                f"_ContextParallel: {mesh} has {len(mesh.axis_names)} axes; give a mesh of one, as "
                'mesh["cp"]'
            )
        if self.attention_type is type(self).AttentionType.FLEX:
            module.forward = _GatherKeys(mesh, self.seq_dim, module.forward)
            return module
        module.forward = _SplitSequences(mesh, self.seq_dim, module.forward)
        return module


class _GatherKeys:
    """The forward of a module that calls flex attention, which sees the keys of all ranks."""

    def __init__(self, mesh: DeviceMesh, dim: int, forward: Callable[..., Any]) -> None:
        self.mesh, self.dim, self.forward = mesh, dim, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args[1:3]) + sum(name in kwargs for name in ("key", "value")) != 2:
            raise ValueError(
                "_ContextParallel(FLEX): pass queries, keys and values by position, or keys and "
                f"values as key= and value=; got {len(args)} by position and {', '.join(kwargs)}"
            )
        args = tuple(self._whole(x) if place in (1, 2) else x for place, x in enumerate(args))
        named = {
            name: self._whole(x) if name in ("key", "value") else x for name, x in kwargs.items()
        }
        # the function of a mask's part, in this file, is part of what flex attention compiles
        with torch._dynamo.config.patch(dont_skip_tracing=True):
            return self.forward(*args, **named)

    def _whole(self, part: Tensor) -> Tensor:
        x = _sequence_of(part, self.mesh, self.dim)
        return to_local(x.redistribute([Replicate()]), grad_placements=[Partial()])


class _SplitSequences:
    """The forward of a module that calls `F.scaled_dot_product_attention` of parts of sequences."""

    def __init__(self, mesh: DeviceMesh, dim: int, forward: Callable[..., Any]) -> None:
        self.mesh, self.dim, self.forward = mesh, dim, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if thread_context.recorder is not None:
            thread_context.recorder.refuse(
                "attention takes sequences in the order of the last _context_parallel_shard",
                "call the module outside of sm.jit, or use sm.parallel.context_parallel",
            )
        block = attention.context_parallel(
            self.mesh.axis_names, method=chosen_method(), balanced=_is_balanced()
        )
        args, kwargs = map_tensors(self._on_mesh, [args, kwargs])
        with block:
            return map_tensors(_local, [self.forward(*args, **kwargs)])[0]

    def _on_mesh(self, part: Tensor) -> Tensor:
        return part if isinstance(part, ShardedTensor) else _sequence_of(part, self.mesh, self.dim)


def _sequence_of(part: Tensor, mesh: DeviceMesh, dim: int) -> ShardedTensor:
    """Return the sequence of which each rank has such a part."""
    return from_part(part, mesh, dim, [part.shape[dim]] * mesh.size())


def _is_balanced() -> bool:
    """Return whether sequences are in the order of `balance_sequence`, not in their own."""
    order = thread_context.sequence_order
    if order is None:
        raise ValueError(
            "_ContextParallel(SDPA): the order of sequences is not known; split them by "
            "_context_parallel_shard"
        )
    if order == _OTHER:
        raise ValueError(
            "_ContextParallel(SDPA): sequences are in the order of a load balancer that is no "
            "_HeadTailLoadBalancer for this number of ranks; use that one, or none, or FLEX"
        )
    return order == _HEAD_TAIL


def _local(x: Tensor) -> Tensor:
    return to_local(x) if isinstance(x, ShardedTensor) else x


def _enable_context_parallel_dispatcher() -> None:
    """Do nothing: attention of sharded tensors is always dispatched. torch needs the call."""


def _disable_context_parallel_dispatcher() -> None:
    """Do nothing, as `_enable_context_parallel_dispatcher`."""
