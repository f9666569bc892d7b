"""Plain tensors as operands with sharded ones.

Inside prepared modules, masks and positions that a model makes count as replicated.

    mask = torch.arange(s) <= torch.arange(s)[:, None]    the same on every rank, since nothing in
                                                          it depends on the rank
    scores.masked_fill(~mask, -inf)                       scores is a ShardedTensor: mask counts as
                                                          replicated

The first time that a line uses such an operand, the ranks of the mesh compare its bits. After that
the same line, with the same operator, shapes, dtypes and layouts, is trusted to make equal operands
on every rank.

A module is prepared by `parallelize`, `parallelize_module`, `fully_shard`, `data_parallel` or
`distribute_module`. The stack tells whether one is running, and is read only when an operator gets
a plain tensor: other operators cost nothing, and recomputation in backward, exceptions and threads
need no special handling. peft's adapters of prepared layers count as prepared, though they were
added later: they add their plain matrices to the layer's weight (`merge_adapter`).

The same holds outside of a model that `parallelize` has prepared and that was called with plain
tensors: its outputs may stay split (logits by vocabulary), and labels next to them are equal on the
ranks of their mesh, as the inputs were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...mesh.comm.call_site import owners_of_methods, user_line
from ...mesh.comm.current_world import current_world
from ...mesh.comm.first_use import first_block
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ...mesh.device_mesh import DeviceMesh
from ..autograd import engine_hooks
from ..autograd.named_axes import current_axis_env
from ..layout.bounded_cache import keep
from ..layout.layout import dtype_name
from ..layout.spec import P
from ..replicas.compare import ReplicaError, compare
from ..replicas.leaves import ReplicaLeaf
from ..tensor.from_dtensor import is_dtensor
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors, tensors_in
from .implicit_comm import implicit_comm
from .prepared_modules import adapts_prepared, is_prepared
from .rules.registry import writes_first_operand
from .strategy import name_of

_MAX_SIGNATURES = 1 << 16  # per mesh


class _PlainOperands:
    """What a world knows of plain operands, by hashes of meshes: it keeps none of them alive.

    Attributes:
        compared: hash of the mesh -> signatures of operands that the ranks have compared.
        meshes_of_plain_calls: hashes of the meshes of outputs that models returned for plain
            inputs.
    """

    def __init__(self, _: World) -> None:
        self.compared: dict[int, dict[Hashable, bool]] = {}
        self.meshes_of_plain_calls: set[int] = set()


def may_replicate(sharded: ShardedTensor | None = None) -> bool:
    """Return whether a plain operand may count as replicated here.

    It may in a method of a prepared module, in backward, and next to outputs of a model that was
    called with plain tensors.

    In backward, recomputation runs the lines of forward again.

    Args:
        sharded: the sharded operand, whose mesh decides about outputs; without it, any mesh may.
    """
    if engine_hooks.current_backward() != -1 or _in_prepared_module():
        return True
    if current_axis_env() is not None:
        return False
    if sharded is None:
        return len(current_world().state(_PlainOperands).meshes_of_plain_calls) > 0
    return hash(sharded.mesh) in sharded.mesh.world.state(_PlainOperands).meshes_of_plain_calls


def accept_plain_operands(mesh: DeviceMesh) -> None:
    """Let plain operands count as replicated next to `ShardedTensor`s on this mesh.

    A model returned them for plain inputs.

    It decides only whether an operator raises; the ranks of the mesh compare the operands as inside
    of the model.
    """
    mesh.world.state(_PlainOperands).meshes_of_plain_calls.add(hash(mesh))


def _in_prepared_module() -> bool:
    return any(is_prepared(owner) or adapts_prepared(owner) for owner in owners_of_methods())


def _check_replicated(
    func: Callable[..., Any],
    plain: Sequence[Tensor],
    sharded: Sequence[ShardedTensor],
    *,
    in_backward: bool = False,
) -> bool:
    """Compare plain operands between the ranks of a mesh, unless this line has done so before.

    Args:
        func: the operator.
        plain: its plain operands.
        sharded: its sharded ones, on one mesh.
        in_backward: whether to compare also in backward.

    Returns:
        False if the operands must not count as replicated: in backward, on a line that no forward
        has compared.

    Raises:
        ReplicaError: on every rank of the mesh: they differ.

    Communication: the first time a line does this with these shapes, dtypes and layouts, an
    all_gather of about 100 bytes.
    """
    mesh: DeviceMesh = sharded[0].mesh
    if mesh.coordinate is None:
        return True
    file, line = user_line()
    shapes = tuple((x.dtype, x.shape, x.requires_grad) for x in plain)
    signature = (file, line, name_of(func), shapes, tuple(x._layout.fingerprint for x in sharded))
    compared = mesh.world.state(_PlainOperands).compared.setdefault(hash(mesh), {})
    if signature in compared:
        return True
    if engine_hooks.current_backward() != -1 and not in_backward and not _in_prepared_module():
        return False
    if mesh.size() > 1:
        _compare(f"{file}:{line}: {name_of(func)}", plain, mesh)
    keep(compared, signature, True, _MAX_SIGNATURES)
    return True


def _compare(place: str, plain: Iterable[Tensor], mesh: DeviceMesh) -> None:
    group = mesh.group()
    copies = [
        ReplicaLeaf(
            f"plain operand {dtype_name(x.dtype)}{list(x.shape)}", "tensor", x.detach(), group.ranks
        )
        for x in plain
    ]
    try:
        with implicit_comm("allow"):
            compare(
                f"{place}: a plain operand with a ShardedTensor counts as replicated inside a "
                "prepared module, next to its outputs and in torch.vmap, and ",
                copies,
                group,
            )
    except ReplicaError as error:
        advice = (
            "If it is this rank's part of a tensor, wrap it with ShardedTensor.from_local(t, mesh, "
            "placements); sm.rand and the other factories of shardmesh give random numbers that "
            "are the same on every rank"
        )
        raise ReplicaError(f"{error} {advice}", error.path, error.ranks, error.index) from None


# -- the operands ----------------------------------------------------------------------------------


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Treat plain operands of operators on `ShardedTensor`s as replicated.

    Every rank must hold the same values.

    Its gradient is reduced over the mesh, as for `from_local(t, mesh, [Replicate(), ...])`.

    Communication: none by itself.
    """
    first_block.begin()
    before = thread_context.implicit_replication
    thread_context.implicit_replication = True
    try:
        yield
    finally:
        thread_context.implicit_replication = before


def replicated(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with replicated `ShardedTensor`s in place of plain tensors.

    For plain tensors that count as replicated.

    Raises:
        ReplicaError: on every rank: inside a prepared module, for operands that differ between
            ranks.
        RuntimeError: a plain operand on "meta", or in backward one that no forward has compared.

    Communication: inside prepared modules, that of `_check_replicated`.
    """
    tensors = list(tensors_in((*args, *kwargs.values())))
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    plain = [x for x in tensors if is_plain_operand(x)]
    if not plain or not sharded:
        return args, kwargs
    if not thread_context.implicit_replication:
        numbers = all(is_one_element(x) for x in plain)
        if not numbers and not may_replicate(sharded[0]):
            refuse(next(x for x in plain if not is_one_element(x)), func)
        if any(x.is_meta for x in plain):
            refuse_without_value(func, sharded)
        if not numbers and not _check_replicated(func, plain, sharded):
            refuse(plain[0], func)
    return replicated_arguments(args, kwargs)


def compared_arguments(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with `ShardedTensor`s in place of plain tensors that ranks compare.

    They must be equal on all ranks.

    Raises:
        ReplicaError: on every rank: they differ between ranks.

    Communication: that of `_check_replicated`.
    """
    tensors = list(tensors_in((*args, *kwargs.values())))
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    plain = [x for x in tensors if is_plain_operand(x) and not is_one_element(x)]
    if not plain or not sharded:
        return args, kwargs
    if not thread_context.implicit_replication:
        _check_replicated(func, plain, sharded, in_backward=True)
    return replicated_arguments(args, kwargs)


# -- numbers of each rank --------------------------------------------------------------------------


def are_numbers_of_ranks(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a plain number with a gradient meets only numbers, and is each rank's own.

    It does not count as replicated: this rank's loss, next to a penalty that is one value for all
    ranks.
    """
    tensors = list(tensors_in((*args, *kwargs.values())))
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    return (
        all(x.ndim == 0 for x in tensors)
        and bool(sharded)
        and not any(is_dtensor(x) or x.is_meta for x in tensors if is_plain_operand(x))
        and not thread_context.implicit_replication
        and current_axis_env() is None
        and not may_replicate(sharded[0])
    )


def on_whole_values(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the whole values of its sharded operands; the result is a plain tensor.

    The gradient of each sharded operand must be equal on all ranks, which its first backward
    compares.

    Communication: what redistributing the operands to replicated needs.
    """
    return func(*_whole(args), **dict(zip(kwargs, _whole(kwargs.values()), strict=True)))


# -- plain tensors that are written ----------------------------------------------------------------


def plain_targets(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the plain tensors that an operator writes: its first operand or list, and `out=`."""
    written = [kwargs.get("out")]
    of_lists = name_of(func).startswith("_foreach_") and name_of(func).endswith("_")
    if writes_first_operand(func) or of_lists or kwargs.get("inplace") is True:
        written.append(args[0] if args else kwargs.get("input"))
    return [x for x in tensors_in(written) if not isinstance(x, ShardedTensor)]


def write_plain(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes into a plain tensor and has sharded operands.

    torch's own, on their whole values.

    The tensor stays plain and is written in place, so its views, whatever else refers to it, and
    autograd see what they do in one process. It counts as replicated, and so does its gradient. A
    0-d one is a number and may be written anywhere.

    Returns:
        What torch returns: the plain tensor.

    Raises:
        ReplicaError: on every rank: inside a prepared module, if plain operands differ between
            ranks.
        RuntimeError: outside of prepared modules, for a tensor that is not 0-d; torch's own, such
            as for a leaf that requires grad.

    Communication: what redistributing the operands to replicated needs; inside prepared modules
    also that of `_check_replicated`.
    """
    targets = plain_targets(func, args, kwargs)
    if any(isinstance(x, ShardedTensor) for x in tensors_in((kwargs.get("out"),))):
        raise NotImplementedError(
            f"{name_of(func)}: out= takes plain tensors or ShardedTensors, not both; use the "
            "results instead"
        )
    tensors = list(tensors_in((*args, *kwargs.values())))
    sharded = [x for x in tensors if isinstance(x, ShardedTensor)]
    operands = [x for x in tensors if is_plain_operand(x) and not is_number(x, targets)]
    if any(x.is_meta for x in targets):
        refuse_without_value(func, sharded)
    if _METRICS in sys.modules:
        _refuse_synchronized_metric()
    checked = thread_context.implicit_replication or not operands
    if not checked and not (
        may_replicate(sharded[0]) and _check_replicated(func, operands, sharded)
    ):
        refuse(operands[0], func)
    for x in filter(is_dtensor, targets):
        refuse(x, func)
    if any(x.mesh.coordinate is None for x in sharded):
        return _write_nothing(targets[0], sharded)
    return on_whole_values(func, args, kwargs)


_METRICS = "torchmetrics"


def _refuse_synchronized_metric() -> None:
    """Raise in a metric of torchmetrics that will add up its states over ranks.

    What is written into a state now is the value of all ranks already.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    kind = sys.modules[_METRICS].Metric
    for owner in owners_of_methods():
        if isinstance(owner, kind) and (owner.sync_on_compute or owner._to_sync):
            raise RuntimeError(
                f"{type(owner).__name__} is updated with ShardedTensors, which are the values of "
                "all ranks, and its compute() would add up its states over the ranks once more: "
                f"make it with {type(owner).__name__}(..., sync_on_compute=False)"
            )


def is_number(x: Tensor, targets: Sequence[Tensor]) -> bool:
    """Return whether a plain tensor is a number: 0-d where written, of one element where read."""
    return x.ndim == 0 if any(x is target for target in targets) else is_one_element(x)


def _whole(items: Iterable[Any]) -> list[Any]:
    """Return the arguments with the whole value of each `ShardedTensor`, in the graph."""
    out: list[Any] = []
    for item in items:
        if type(item) in (list, tuple):
            item = type(item)(_whole(item))
        elif type(item) is slice:
            item = slice(*_whole((item.start, item.stop, item.step)))
        elif isinstance(item, ShardedTensor):
            item = item.full_tensor()
        out.append(item)
    return out


def _write_nothing(target: Tensor, sharded: Sequence[ShardedTensor]) -> Tensor:
    """Leave the tensor as it is outside the mesh, in the graph as on other ranks."""
    parts = [x._local for x in sharded if x._local.requires_grad] if torch.is_grad_enabled() else []
    if parts and (target.is_floating_point() or target.is_complex()):
        nothing = (target if target.ndim else target.unsqueeze(0)).narrow(0, 0, 0)
        nothing.add_(sum(part.reshape(-1)[:0].sum() for part in parts))
    return target


# -- kinds of plain tensors ------------------------------------------------------------------------


def is_plain_operand(x: Any) -> bool:
    """Return whether this is a plain tensor that is more than a number."""
    return (
        isinstance(x, Tensor)
        and not isinstance(x, ShardedTensor)
        and (x.ndim > 0 or x.requires_grad)
    )


def is_one_element(x: Tensor) -> bool:
    """Return whether a plain tensor has one element and no gradient, and is used as a number."""
    return (
        x.numel() == 1 and not (x.requires_grad and torch.is_grad_enabled()) and not is_dtensor(x)
    )


def replicated_arguments(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the arguments with plain tensors replicated on the mesh of the others."""
    mesh = next(
        (t.mesh for t in tensors_in((*args, *kwargs.values())) if isinstance(t, ShardedTensor)),
        None,
    )
    if mesh is None:
        return args, kwargs
    replicate = partial(_replicate_plain, mesh)
    named = zip(kwargs, map_tensors(replicate, kwargs.values()), strict=True)
    return map_tensors(replicate, args), dict(named)


def replicated_gradients(gradients: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return gradients of a custom function's backward, with plain ones as replicated tensors."""
    return tuple(map_tensors(partial(_replicate_plain, mesh), gradients))


def _replicate_plain(mesh: DeviceMesh, x: Any) -> Any:
    return ShardedTensor.from_local(x, mesh, P()) if is_plain_operand(x) else x


def refuse_without_value(func: Any, operands: Sequence[ShardedTensor]) -> None:
    """Raise for a plain tensor on "meta" with sharded operands that have values.

    The operator would silently do nothing.

    Raises:
        RuntimeError: always, except if the sharded operands are on "meta" as well.
    """
    if not all(x._local.is_meta for x in operands):
        raise RuntimeError(
            f"{name_of(func)}: a plain tensor on 'meta', which has no value, with ShardedTensors "
            f"on {operands[0].device}. Code that reads x.device in C++, such as torch's gradient "
            "clipping and GradScaler, gets 'meta' and puts numbers there: use "
            "sm.training.clip_grad_norm_ or sm.training.GradScaler, or make the number a "
            "ShardedTensor"
        )


def refuse(tensor: Tensor, func: Any) -> NoReturn:
    """Raise the RuntimeError for a plain tensor whose layout is unknown."""
    kind = "torch's DTensor" if is_dtensor(tensor) else "a plain tensor"
    what = (
        f"{name_of(func)}: mixes {kind} {dtype_name(tensor.dtype)}{list(tensor.shape)} with a "
        "ShardedTensor"
    )
    if tensor.ndim == 0:
        raise RuntimeError(
            f"{what}, and the plain one requires grad: its gradient would differ between ranks; "
            "make it a ShardedTensor with device_put(t, mesh, P())"
        )
    if current_axis_env() is not None:
        raise RuntimeError(
            f"{what}, inside a mapped function, which runs on parts: pass the ShardedTensor as an "
            "argument"
        )
    raise RuntimeError(
        f"{what}; lay out the plain tensor on the mesh with distribute_tensor(t, mesh, placements) "
        "or ShardedTensor.from_local(t, mesh, placements), or treat plain tensors as replicated "
        "inside `with sm.ops.implicit_replication():` (those of a module, such as a loss, also "
        "after `parallelize(module, mesh, {})`)"
    )
