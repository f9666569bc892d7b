"""The implementation that torch's optimizers use for sharded parameters.

Where the user has chosen none.

    device            plain parameters     sharded parameters
    accelerators      foreach              foreach
    CPU               the loop             fused if torch has it for contiguous memory, else foreach

Torch uses the loop on the CPU, since an operator costs little there. One on a `ShardedTensor` costs
more, and the fused kernels read each element once instead of eight times. `foreach=False` still
selects the loop.

The first sharded leaf installs this: hooks of optimizer steps, by torch's public functions, a type
in torch's lists of types that foreach takes, and a note in the thread's context while one of
torch's elementwise steps runs. torch's function that groups tensors by device is replaced while
optimizers with sharded parameters step.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer
from torch.utils import _foreach_utils as foreach_utils

from .....mesh.comm.first_use import first_leaf
from .....mesh.comm.recording.trace_buffer import Header
from .....mesh.comm.thread_context import thread_context
from ....lineage import mixed, piece_of, seed_of, set_pieces, step_lineages
from ....tensor.sharded_tensor import ShardedTensor
from .foreach import are_aligned, check_writable, step_one_by_one

_LOOPS = (torch.optim.Adafactor,)  # by default on every device: foreach takes more memory
# under this name an optimizer that steps has the options that were chosen for it
_CHOSEN = "_shardmesh_chosen"
_STEP = seed_of("optimizer step")
Group = dict[str, Any]


def _install() -> None:
    """Make torch use its foreach and fused implementations for sharded parameters."""
    for types in (torch_optimizer._foreach_supported_types, foreach_utils._foreach_supported_types):
        types.append(ShardedTensor)
    torch_optimizer.register_optimizer_step_pre_hook(step_one_by_one)
    torch_optimizer.register_optimizer_step_pre_hook(_begin_step)
    torch_optimizer.register_optimizer_step_post_hook(_end_step)
    for name, steps in _ELEMENTWISE.items():
        module = importlib.import_module(f"torch.optim.{name}")
        for step in steps:
            if hasattr(module, step):
                setattr(module, step, _note_while_running(getattr(module, step)))


# -- steps -----------------------------------------------------------------------------------------

# optimizers with sharded parameters; a step may contain another one
_stepping: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_lock = threading.Lock()


def _begin_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Replace torch's grouping, and choose the implementation, for the step that begins."""
    if any(type(x) is ShardedTensor for group in optimizer.param_groups for x in group["params"]):
        with _lock:
            _stepping.add(optimizer)
            torch_optimizer._group_tensors_by_device_and_dtype = _by_local_device  # type: ignore[assignment]
    _choose(optimizer)


def _end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Undo what `_begin_step` did.

    After a step that has raised this is not called; its optimizer's next step undoes it, or any
    step once that optimizer is gone.
    """
    _finish(optimizer)
    _count_step(optimizer)
    with _lock:
        _stepping.discard(optimizer)
        if not _stepping and torch_optimizer._group_tensors_by_device_and_dtype is _by_local_device:
            torch_optimizer._group_tensors_by_device_and_dtype = _torchs_grouping


def _count_step(optimizer: torch.optim.Optimizer) -> None:
    """Count the step in the records of this rank, for verdicts on values that differ."""
    params = (x for group in optimizer.param_groups for x in group["params"])
    first = next((x for x in params if type(x) is ShardedTensor), None)
    world: Any = None if first is None else getattr(first._layout.mesh, "world", None)
    if world is not None:
        world.trace_buffer.words[Header.OPTIMIZER_STEPS] += 1


# -- tensors of one device -------------------------------------------------------------------------

_torchs_grouping = torch_optimizer._group_tensors_by_device_and_dtype

# torch's steps over lists, elementwise and in place: they may run on the parts.
_ELEMENTWISE = {
    "adam": ("_multi_tensor_adam", "_fused_adam"),
    "sgd": ("_multi_tensor_sgd", "_fused_sgd"),
    "adagrad": ("_multi_tensor_adagrad", "_fused_adagrad"),
    "adadelta": ("_multi_tensor_adadelta",),
    "adamax": ("_multi_tensor_adamax",),
    "nadam": ("_multi_tensor_nadam",),
    "radam": ("_multi_tensor_radam",),
    "rmsprop": ("_multi_tensor_rmsprop",),
    "rprop": ("_multi_tensor_rprop",),
}


def _note_while_running(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an elementwise step that the thread's context knows of while it runs."""
    kind = "fused" if step.__name__.startswith("_fused") else "foreach"

    @wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return step(*args, **kwargs)
        before, thread_context.elementwise_step = thread_context.elementwise_step, kind
        try:
            return step(*args, **kwargs)
        finally:
            thread_context.elementwise_step = before

    return run


def _by_local_device(lists: list[list[Any]], with_indices: bool = False) -> dict[Any, Any]:
    """Group lists of tensors by the device and dtype of this rank's parts.

    The device of the wrapper is "meta", which torch would hold against a `step` on a GPU.

    To an elementwise step of torch's own, return the parts themselves if their layouts are alike:
    the step then costs the host what one of plain tensors does.
    """
    if not any(type(x) is ShardedTensor for x in lists[0]):
        return _torchs_grouping(lists, with_indices)
    parts = [[x._local if type(x) is ShardedTensor else x for x in tensors] for tensors in lists]
    kind = thread_context.elementwise_step
    if kind is not None and _may_be_parts(lists):
        _note_step(lists)
        if kind == "fused" or torch._C._len_torch_dispatch_stack():  # as in `foreach.py`
            torch.autograd.graph.increment_version(
                [x._local for x in lists[0] if type(x) is ShardedTensor]
            )
        return _torchs_grouping(parts, with_indices)
    by_device = _torchs_grouping(parts, True)
    return {
        key: (
            [[tensors[i] for i in numbers] if tensors else [] for tensors in lists],
            numbers if with_indices else [],
        )
        for key, (_, numbers) in by_device.items()
    }


def _may_be_parts(lists: list[list[Any]]) -> bool:
    """Return whether this step redistributes nothing and creates nothing (a buffer not None)."""
    nonempty = [tensors for tensors in lists if tensors]
    if torch.is_grad_enabled() or not all(map(_have_values, nonempty)) or not are_aligned(nonempty):
        return False
    for tensors in nonempty:
        check_writable(tensors)
    return True


def _have_values(tensors: list[Any]) -> bool:
    """Return whether none of these is None, and no plain one is on "meta"."""
    kinds = set(map(type, tensors))
    return kinds == _SHARDED or (
        type(None) not in kinds
        and not any(x.is_meta for x in tensors if type(x) is not ShardedTensor)
    )


_SHARDED = {ShardedTensor}


def _note_step(lists: list[list[Any]]) -> None:
    """Set the lineages of parameters and state."""
    params, grads, *states = [tensors for tensors in lists if tensors]
    lineages = step_lineages(_STEP, params, grads)
    for i, tensors in enumerate((params, *states)):
        set_pieces(tensors, lineages, i)


# -- defaults --------------------------------------------------------------------------------------


def _choose(optimizer: torch.optim.Optimizer) -> None:
    """Choose for the step that begins."""
    _restore(optimizer)  # a step before may have raised
    chosen = []
    for group in optimizer.param_groups:
        if _is_open(optimizer, group):
            name = (
                "fused"
                if "fused" in group and _is_contiguous(optimizer, group["params"])
                else "foreach"
            )
            group[name] = True
            chosen.append((group, name, [x._lineage for x in group["params"]]))
    if chosen:
        setattr(optimizer, _CHOSEN, chosen)


def _restore(optimizer: torch.optim.Optimizer) -> Iterable[tuple[Group, list[int]]]:
    """Leave the groups as the user has made them, for `state_dict()` and later steps.

    Returns:
        the groups that had been chosen for, and the lineages of their parameters before.
    """
    chosen = vars(optimizer).pop(_CHOSEN, ())
    for group, name, _ in chosen:
        group[name] = None
    return [(group, before) for group, _, before in chosen]


def _finish(optimizer: torch.optim.Optimizer) -> None:
    """Restore the groups, and set lineages that do not depend on what was chosen on this rank."""
    for group, before in _restore(optimizer):
        for x, lineage in zip(group["params"], before, strict=True):
            if x.grad is not None:
                x._lineage = lineage
                x._lineage = mixed(_STEP, [x, x.grad])
                for i, y in enumerate(optimizer.state.get(x, {}).values()):
                    if type(y) is ShardedTensor:
                        y._lineage = piece_of(x._lineage, i + 1)


def _is_open(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Return whether the user has chosen none, and torch would loop because of the CPU alone."""
    params = group["params"]
    return (
        group.get("foreach", False) is None
        and group.get("fused") is None
        and not (
            group.get("differentiable")
            or group.get("capturable")
            or isinstance(group.get("lr"), torch.Tensor)
        )
        and not isinstance(optimizer, _LOOPS)
        and bool(params)
        and all(type(x) is ShardedTensor and x._local.is_cpu for x in params)
    )


def _is_contiguous(optimizer: torch.optim.Optimizer, params: Sequence[ShardedTensor]) -> bool:
    """Return whether fused kernels may iterate over the memory of all tensors in order."""
    return all(
        x._local.is_contiguous()
        and x.dtype.is_floating_point
        and _lie_alike(x, (x.grad, *optimizer.state.get(x, {}).values()))
        for x in params
    )


def _lie_alike(x: ShardedTensor, others: Iterable[Any]) -> bool:
    """Return whether all of these are laid out as `x`, or are numbers."""
    layout = x._layout
    return all(
        (y._layout is layout and y._local.is_contiguous())
        if type(y) is ShardedTensor
        else (not isinstance(y, torch.Tensor) or (y.ndim == 0 and y.dtype is torch.float32))
        for y in others
    )


first_leaf.before(_install)
