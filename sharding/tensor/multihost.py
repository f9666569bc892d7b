"""`sm.multihost`: exchange values between hosts.

By the names of `jax.experimental.multihost_utils`. Every rank counts as a host.

Every function is called on every rank of the world, with trees of one structure: tensors, NumPy
arrays and numbers in tuples, lists and dicts, in which None stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...mesh.comm.agreement import gather_facts, same_on_all
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.device_mesh import DeviceMesh
from ...mesh.launch.environment import launch_environment
from ...mesh.launch.preemption import reached_preemption
from ...mesh.processes.process import ProcessGroup, ProcessWorld
from ..layout.layout import dtype_name
from ..trees import broadcast_prefix, flatten, unflatten
from .convert import as_tensor, from_local
from .device_put import device_put
from .mesh_arguments import SPECS
from .process_data import make_array_from_process_local_data
from .sharded_tensor import ShardedTensor

reached_preemption_sync_point = reached_preemption


def process_allgather(in_tree: Any, tiled: bool = False) -> Any:
    """Return a tree like `in_tree` with every rank's values, on every rank, outside of any graph.

    Args:
        in_tree: a tree, whose leaves have the same shapes on all ranks. A `ShardedTensor` in it
            becomes the whole tensor.
        tiled: if False, the values of a leaf are stacked along a new dim 0, in the order of ranks;
            if True, concatenated along dim 0 (numbers are stacked).

    Raises:
        ValueError: on every rank: trees, shapes or dtypes differ.
        RuntimeError: the launcher started several ranks, and no mesh has connected them yet.

    Communication: a small all_gather of the shapes and one all_gather for each leaf; of a
    `ShardedTensor`, that of `full_tensor`.

    Example:
        >>> losses = sm.multihost.process_allgather(loss.item())  # one number for each rank
    """
    group, leaves, shape, _ = _compare_trees("process_allgather", in_tree)
    return pytree.tree_unflatten([_gather_leaf(group, leaf, tiled) for leaf in leaves], shape)


def broadcast_one_to_all(in_tree: Any, is_source: bool | None = None) -> Any:
    """Return a tree with the values of one rank, on every rank, outside of any graph.

    Args:
        in_tree: a tree, whose leaves have the same shapes on all ranks.
        is_source: whether this rank's values are sent; by default rank 0's are.

    Raises:
        TypeError: a `ShardedTensor` in the tree.
        ValueError: on every rank: trees, shapes or dtypes differ, or there is not exactly one
            source.
        RuntimeError: as `process_allgather`.

    Communication: a small all_gather of the shapes and one broadcast for each leaf.

    Example:
        >>> seed = sm.multihost.broadcast_one_to_all(int(time.time())).item()
    """
    if any(isinstance(leaf, ShardedTensor) for leaf in pytree.tree_leaves(in_tree)):
        raise TypeError(
            "broadcast_one_to_all: a ShardedTensor already is one value for all ranks; leave it "
            "out of the tree"
        )
    own = current_world().rank == 0 if is_source is None else bool(is_source)
    group, leaves, shape, source = _compare_trees("broadcast_one_to_all", in_tree, own)
    return pytree.tree_unflatten([_broadcast(group, leaf, source) for leaf in leaves], shape)


def sync_global_devices(name: str) -> None:
    """Wait until every rank has called this with the same name.

    Raises:
        AssertionError: on every rank: names differ.
        RuntimeError: as `process_allgather`.

    Communication: a small all_gather.
    """

    def error(names: dict[int, str]) -> AssertionError:
        return AssertionError(
            f"sync_global_devices: names differ between ranks: {_by_rank(names)}; pass the same on "
            "every rank"
        )

    same_on_all(_group(), name, error)


def assert_equal(in_tree: Any, fail_message: str = "") -> None:
    """Check that all ranks have the same tree of values, and the layout of each `ShardedTensor`.

    NaN equals NaN, unlike in JAX.

    Raises:
        AssertionError: on every rank, with `fail_message` and the first leaf that differs.
        RuntimeError: as `process_allgather`.

    Communication: a small all_gather.
    """
    leaves, shape = pytree.tree_flatten_with_path(in_tree)
    digests = {pytree.keystr(path) or "the value": _digest(leaf) for path, leaf in leaves}
    start = f"{fail_message}: " if fail_message else ""

    def error(trees: dict[int, tuple[str, dict[str, tuple[str, str]]]]) -> AssertionError:
        if len({structure for structure, _ in trees.values()}) > 1:
            structures = {rank: structure for rank, (structure, _) in trees.items()}
            return AssertionError(
                f"{start}ranks passed trees of different structures: {_by_rank(structures)}"
            )
        path = next(p for p in digests if len({leaf[p] for _, leaf in trees.values()}) > 1)
        texts = {rank: leaf[path][0] for rank, (_, leaf) in trees.items()}
        return AssertionError(f"{start}{path} is not the same on every rank: {_by_rank(texts)}")

    same_on_all(_group(), (str(shape), digests), error)


def host_local_array_to_global_array(
    local_inputs: Any, global_mesh: DeviceMesh, pspecs: Any
) -> Any:
    """Return each leaf as a `ShardedTensor` whose part on this rank is the leaf.

        P("dp") on (dp=2)      rank 0 has [a b]   rank 1 has [c d]       global [a b c d]

    Differentiable.

    Args:
        local_inputs: a tree of this rank's parts.
        global_mesh: the mesh.
        pspecs: a `P` for all leaves, or a prefix tree of them. Along axes that split nothing all
            ranks must have equal values.

    Raises:
        ValueError: as `make_array_from_process_local_data`.

    Communication: for each split leaf, a small all_gather of the shapes.
    """

    def place(leaf: Any, spec: Any) -> Any:
        x = as_tensor(leaf, "host_local_array_to_global_array")
        return (
            from_local(x, global_mesh, spec)
            if x.requires_grad
            else make_array_from_process_local_data(global_mesh, spec, x)
        )

    return _map_leaves("host_local_array_to_global_array", local_inputs, pspecs, place)


def global_array_to_host_local_array(
    global_inputs: Any, global_mesh: DeviceMesh, pspecs: Any
) -> Any:
    """Return this rank's part of each leaf laid out by its spec, a plain tensor. Differentiable.

    Args:
        global_inputs: a tree of `ShardedTensor`s, or of tensors that are equal on all ranks.
        global_mesh: the mesh.
        pspecs: as in `host_local_array_to_global_array`.

    Communication: that of redistributing the leaves that have another layout.
    """

    def part(leaf: Any, spec: Any) -> Any:
        x = (
            leaf
            if isinstance(leaf, ShardedTensor)
            else device_put(leaf, global_mesh, None, src_data_rank=None)
        )
        return x.redistribute(global_mesh, spec).to_local()

    return _map_leaves("global_array_to_host_local_array", global_inputs, pspecs, part)


# --------------------------------------------------------------------------------------------------


def _map_leaves(context: str, tree: Any, specs: Any, convert: Callable[[Any, Any], Any]) -> Any:
    leaves, structure = flatten(tree)
    leaf_specs = broadcast_prefix(f"{context}: pspecs", specs, tree, SPECS)
    pairs = zip(leaves, leaf_specs, strict=True)
    converted = [None if leaf is None else convert(leaf, spec) for leaf, spec in pairs]
    return unflatten(structure, converted)


def _group() -> Group:
    """Return the group of all ranks of the world.

    Raises:
        RuntimeError: the launcher started several ranks, and no mesh has connected them yet.
    """
    world = current_world()
    launched = launch_environment() if isinstance(world, ProcessWorld) and world.size == 1 else None
    if launched is not None and launched[1] > 1:
        raise RuntimeError(
            f"sm.multihost: {launched[1]} ranks were launched and are not connected yet; first "
            "make a mesh, sm.make_mesh"
        )
    return world.group(range(world.size))


def _compare_trees(
    context: str, tree: Any, is_source: bool = True
) -> tuple[Group, list[Any], Any, int]:
    """Return the group of all ranks, the leaves as tensors, the tree and the source rank.

    Raises:
        ValueError: on every rank: the trees of ranks differ, or there is not exactly one source.
    """
    leaves, shape = pytree.tree_flatten(tree)
    tensors = [leaf if leaf is None else as_tensor(leaf, context) for leaf in leaves]
    group = _group()
    kinds = [None if x is None else f"{dtype_name(x.dtype)}{list(x.shape)}" for x in tensors]
    everyone = gather_facts(group, ((str(shape), kinds), is_source))
    if any(own != everyone[0][0] for own, _ in everyone.values()):
        by_rank = {
            rank: f"{', '.join(map(str, kinds))} in {structure}"
            for rank, ((structure, kinds), _) in everyone.items()
        }
        raise ValueError(
            f"{context}: ranks passed different trees: {_by_rank(by_rank)}; pass the same shapes "
            "and dtypes on every rank"
        )
    sources = [rank for rank, (_, source) in everyone.items() if source]
    if context == "broadcast_one_to_all" and len(sources) != 1:
        raise ValueError(
            f"{context}: is_source is true on ranks {sources}; it must be true on exactly one rank"
        )
    return group, tensors, shape, sources[0]


def _gather_leaf(group: Group, x: Any, tiled: bool) -> Any:
    if x is None:
        return None
    if isinstance(x, ShardedTensor):
        return x.detach().full_tensor()
    own_bytes = _bytes(group, x)
    everyone = own_bytes.new_empty(group.size * own_bytes.numel())
    group.all_gather(everyone, own_bytes)
    rows = everyone.to(x.device).view(x.dtype).reshape(group.size, *x.shape)
    return rows.flatten(0, 1) if tiled and x.ndim else rows


def _broadcast(group: Group, x: Any, source: int) -> Any:
    if x is None:
        return None
    data = _bytes(group, x).clone()
    group.broadcast(data, source)
    return data.to(x.device).view(x.dtype).reshape(x.shape)


def _bytes(group: Group, x: Tensor) -> Tensor:
    """Return the values as bytes, on the device from which the group sends host data."""
    device = (
        group._host_device()
        if isinstance(group, ProcessGroup) and group.size > 1
        else torch.device("cpu")
    )
    return x.detach().to(device).contiguous().reshape(-1).view(torch.uint8)


def _digest(leaf: Any) -> tuple[str, str]:
    """Return a description of a leaf and a hash of its values."""
    if leaf is None or isinstance(leaf, ShardedTensor):
        return str(None if leaf is None else leaf._layout), ""
    x = as_tensor(leaf, "assert_equal").detach().cpu()
    x = x + 0 if x.is_floating_point() or x.is_complex() else x  # -0.0 equals 0.0
    x = torch.where(x.isnan(), torch.nan, x) if x.is_floating_point() else x
    shown = (
        f"{x.item()}"
        if x.numel() == 1
        else f"values with hash {hashlib.sha256(_raw(x)).hexdigest()[:8]}"
    )
    return f"{dtype_name(x.dtype)}{list(x.shape)} {shown}", hashlib.sha256(_raw(x)).hexdigest()


def _raw(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _by_rank(texts: Mapping[int, str]) -> str:
    """Return each different text with the first rank that has it."""
    first: dict[str, int] = {}
    for rank, text in texts.items():
        first.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" for text, rank in first.items())
