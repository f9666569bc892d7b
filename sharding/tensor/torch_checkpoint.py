"""How `ShardedTensor`s take part in torch.distributed.checkpoint (DCP).

    dcp.save, dcp.load, dcp.async_save     torch asks each tensor for its chunk:
                                           `create_write_items`, `create_chunk_list`,
                                           `get_tensor_shard`
    get_model_state_dict, set_state_dict   torch asks for `isinstance(x, DTensor)`: four of its
                                           functions are replaced when one of them is about to
                                           run (`tensor_hash`)

`import shardmesh` imports nothing of DCP, which takes seconds.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import box_origin, box_shape, box_size, slices
from ..layout.layout import Layout
from .sharded_tensor import ShardedTensor

_lock = threading.Lock()
_UTILS = "torch.distributed._state_dict_utils"
_STATE_DICT = "torch.distributed.checkpoint.state_dict"

# -- files -----------------------------------------------------------------------------------------


def create_write_items(x: ShardedTensor, fqn: str, object: Any) -> list[Any]:
    """Return what this rank writes of a tensor: its box.

    Of ranks with the same box torch lets one write it.

    Raises:
        RuntimeError: a reduction is pending.

    Communication: none.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(x._local)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, x.shape),
        )
        for chunk in _chunks(x._layout, f"dcp.save: {fqn}")
    ]


def create_chunk_list(x: ShardedTensor) -> list[Any]:
    """Return the box of this rank, to read from a checkpoint; none where it is empty.

    Raises:
        RuntimeError: a reduction is pending.

    Communication: none.
    """
    chunks = _chunks(x._layout, "dcp.load")
    if not x._local.is_inference():  # written where it is not empty: a change on every rank
        torch.autograd.graph.increment_version(x._local)
    x._lineage = 0  # all ranks read one checkpoint, however each has made the values before
    return chunks


def get_tensor_shard(x: ShardedTensor, index: Any) -> Tensor:
    """Return the part of this rank, which DCP saves, or writes on loading."""
    return x._local.detach()


def _chunks(layout: Layout, what: str) -> list[Any]:
    """Return this rank's box as a chunk of DCP, none for an empty box.

    A tensor without elements is one chunk, since the index must have it.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if layout.pending:
        raise RuntimeError(  # torch takes a ValueError for a value that is no tensor
            f"{what}: {layout} is pending, so that no rank holds its values; redistribute it to "
            "its spec without unreduced axes first"
        )
    if layout.mesh.coordinate is None:  # type: ignore[attr-defined]
        return []
    box = layout.box if layout.shape.numel() else tuple((0, size) for size in layout.shape)
    if layout.shape.numel() and not box_size(box):
        return []
    return [ChunkStorageMetadata(torch.Size(box_origin(box)), torch.Size(box_shape(box)))]


# -- state dicts -----------------------------------------------------------------------------------


def tensor_hash(x: ShardedTensor) -> int:
    """Return `id(x)`, as torch does; call `register` once it has an effect.

    torch's functions for state dicts look up all parameters in a dict before anything else.
    """
    if _UTILS in sys.modules:
        register()
    return id(x)


def register() -> None:
    """Make torch's functions for state dicts treat these tensors as they treat DTensors.

    Replaces `_iterate_state_dict`, `_broadcast_tensors`, `_broadcast_state_dict` and
    `_distribute_state_dict` of torch; a second call does nothing.
    """
    utils: Any = sys.modules[_UTILS]
    with _lock:
        is_imported = hasattr(utils, _distribute_state_dict.__name__)
        if "__hash__" not in vars(ShardedTensor) or not is_imported:
            return
        del ShardedTensor.__hash__  # from now on that of torch
    for adapted in (
        _iterate_state_dict,
        _broadcast_tensors,
        _broadcast_state_dict,
        _distribute_state_dict,
    ):
        function = getattr(utils, adapted.__name__)
        replacement = functools.wraps(function)(functools.partial(adapted, function))
        for module in (utils, sys.modules.get(_STATE_DICT)):
            if getattr(module, adapted.__name__, None) is function:
                setattr(module, adapted.__name__, replacement)


def _iterate_state_dict(
    function: Callable[..., Any],
    x: Any,
    of_sharded: Any,
    of_dtensor: Any,
    of_tensor: Any,
    **options: Any,
) -> Any:
    return function(
        x,
        of_sharded,
        of_dtensor,
        of_dtensor if isinstance(x, ShardedTensor) else of_tensor,
        **options,
    )


def _broadcast_tensors(
    function: Callable[..., Any],
    full: dict[str, Any],
    local: dict[str, Any],
    keys: list[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    sharded = _sharded_entries(local, keys)
    function(full, local, keys, *args, **kwargs)
    _lay_out(local, sharded)


def _broadcast_state_dict(
    function: Callable[..., Any],
    full: dict[str, Any],
    local: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    sharded = _sharded_entries(local, local)
    function(full, local, *args, **kwargs)
    _lay_out(local, sharded)  # those of 0 dims, which are broadcast otherwise


def _distribute_state_dict(
    function: Callable[..., Any],
    full: dict[str, Any],
    local: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> None:
    sharded = _sharded_entries(local, full)
    function(
        {name: value for name, value in full.items() if name not in sharded}, local, *args, **kwargs
    )
    local.update({name: full[name] for name in sharded})
    _lay_out(local, sharded)


def _sharded_entries(local: dict[str, Any], names: Iterable[str]) -> dict[str, ShardedTensor]:
    return {name: local[name] for name in names if isinstance(local.get(name), ShardedTensor)}


def _lay_out(local: dict[str, Any], sharded: dict[str, ShardedTensor]) -> None:
    """Lay out whole plain tensors as the sharded ones of the same names.

    Raises:
        ValueError: another shape.
    """
    for name, x in sharded.items():
        whole = local.get(name)
        if not isinstance(whole, Tensor) or isinstance(whole, ShardedTensor):
            continue
        layout = x._layout
        if whole.shape != layout.shape:
            raise ValueError(
                f"{name}: the state dict has shape {list(whole.shape)}, and the tensor is {layout}"
            )
        inside = layout.mesh.coordinate is not None  # type: ignore[attr-defined]
        part = whole.detach()[slices(layout.box)] if inside else whole.new_empty(0)
        if x._local.is_meta or layout.pending:
            part = part.to(
                x._local.device if layout.pending else part.device, copy=True
            ).contiguous()
            local[name] = ShardedTensor._make_guarded(
                part,
                Layout.of(layout.mesh, layout.spec.with_unreduced({}), x.shape, whole.dtype),
                0,
            )
        else:
            x._local.detach().copy_(part)
            x._lineage = 0  # as above; ranks may have made the values before in different ways
            local[name] = x
