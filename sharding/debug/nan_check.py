"""`debug_nans`: find the operator, line and rank where a NaN or an infinity first appears.

A torch function mode checks what each operator of the program returns on this rank, and registers a
hook on each node that it adds to the autograd graph. Operators that the library calls by itself are
not checked: their buffers may be uninitialised.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...mesh.comm.call_site import operator_line
from ...mesh.comm.current_world import current_world
from ...mesh.monitor.monitor import monitor_of
from ..autograd.engine_hooks import innermost
from ..layout.layout import Layout, dtype_name
from ..ops.strategy import name_of
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in

# Operators whose results are uninitialised.
_UNSET = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(Tensor.new_empty, Tensor.new_empty_strided, Tensor.resize_, Tensor.resize_as_),
    }
)
# the end of the graph at a leaf
_AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_SEEN = "shardmesh.debug.debug_nans"  # in the metadata of a node of the graph


class BadValueError(FloatingPointError):
    """An operator returned a NaN or an infinity.

    Attributes:
        operator: its name; after "backward of " if a gradient is bad.
        place: file:line of the program that called it, in the forward pass.
        rank: the rank on which it was found.
        index: of the first bad value, in the global tensor if that is known.
    """

    def __init__(
        self,
        message: str,
        operator: str = "",
        place: str = "",
        rank: int = 0,
        index: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.operator = operator
        self.place = place
        self.rank = rank
        self.index = tuple(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.operator, self.place, self.rank, self.index)


class debug_nans(TorchFunctionMode):
    """with debug_nans(): an operator that returns a NaN or an infinity raises, also in backward.

    Each rank checks its own part, so values are found before a reduction spreads them. Ranks that
    found nothing raise PeerError in their next collective, with this error's text. An infinity
    counts if all arguments are finite, so masks of -inf may be written and passed on. Operators
    that return views or uninitialised memory are not checked, and neither is what runs inside
    `torch.compile`. With `simulate`, write it inside the function. Do not use it with a
    `GradScaler`, which lets gradients overflow.

    Args:
        infs: whether infinities count; NaNs always do.

    Raises: BadValueError inside the block, or in a backward of its results; names operator, line,
        rank, index and value, and says whether an argument was bad before.

    Communication: none. Each result is read once more; on a GPU the host waits for each operator.
        For debugging: a step of `examples/train_lm.py` takes 1.2 times as long on a CPU core, at
        its smallest size 2.1 times (torch's `detect_anomaly`: 1.7, 3.2).

    Example:
        >>> with sm.debug.debug_nans():
        ...     loss = model(batch).mean()
        ...     loss.backward()
    """

    def __init__(self, infs: bool = True) -> None:
        super().__init__()
        self.infs = infs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        line = None if func in _UNSET or name_of(func) == "__get__" else operator_line()
        if line is None:
            return func(*args, **kwargs)
        place = "{}:{}".format(*line)
        ends = _Ends.of(args, kwargs) if torch.is_grad_enabled() else None
        result = func(*args, **kwargs)
        call = _OperatorCall(name_of(func).removeprefix("__").removesuffix("__"), place, self.infs)
        outputs = list(
            tensors_in(args[:1] if result is None and call.operator.endswith("_") else (result,))
        )
        for x in outputs:
            _check_result(call, x, args, kwargs)
        if ends is not None:
            _check_backward(call, outputs, ends)
        return result


@dataclass(frozen=True, slots=True)
class _OperatorCall:
    """A call of an operator by the program.

    Attributes:
        operator: its name.
        place: file:line that called it.
        infs: whether infinities count.
    """

    operator: str
    place: str
    infs: bool

    def is_bad(self, x: Tensor, arguments: Callable[[], Iterable[Any]]) -> bool:
        """Return whether a result has a bad value.

        `arguments` returns the arguments, which are checked if the result is infinite.
        """
        if _is_finite(x):
            return False
        has_nan = bool(torch.isnan(_values(x)).any())
        return has_nan or (self.infs and all(map(_is_finite, arguments())))


# -- values ----------------------------------------------------------------------------------------


def _local(x: Tensor) -> Tensor:
    return innermost(x._local if isinstance(x, ShardedTensor) else x)


def _values(x: Tensor) -> Tensor:
    """Return this rank's values as a tensor that can be summed."""
    x = _local(x).detach()
    x = x if x.layout is torch.strided else x.to_dense()
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _is_finite(x: Any) -> bool:
    """Return whether a tensor's values are all finite, or a number is; True for other objects."""
    if not isinstance(x, Tensor):
        return not isinstance(x, (float, complex)) or cmath.isfinite(x)
    if x.is_meta or not (x.is_floating_point() or x.is_complex()):
        return True
    values = _values(x)
    # fast: if the sum is finite, all values are
    total = values.sum(dtype=torch.float32 if values.dtype is torch.float16 else None)
    return cmath.isfinite(total.item()) or bool(torch.isfinite(values).all())


def _first_bad(x: Tensor, infs: bool) -> tuple[list[int], Any, int]:
    """Return the index of the first bad value in this rank's part, the value and their number."""
    values = _values(x)
    bad = ~torch.isfinite(values) if infs else torch.isnan(values)
    at = bad.nonzero()
    index = at[0].tolist()
    return index, values[tuple(index)].item(), len(at)


# -- forward ---------------------------------------------------------------------------------------


def _check_result(
    call: _OperatorCall, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise BadValueError for a bad result that is not a view of an argument."""
    arguments = pytree.tree_leaves((args, kwargs))
    if call.is_bad(x, lambda: (leaf for leaf in arguments if leaf is not x)) and not any(
        _is_view(x, leaf) for leaf in arguments
    ):
        raise _notify_peers(
            _error(
                call,
                x,
                x._layout if isinstance(x, ShardedTensor) else None,
                "",
                _origin(x, args, kwargs),
            )
        )


def _is_view(x: Any, leaf: Any) -> bool:
    """Return whether a result shares memory with an argument, and so has no new values."""
    if leaf is x or not isinstance(leaf, Tensor):
        return False
    one, other = _local(x), _local(leaf)
    strided = one.layout is other.layout is torch.strided
    return strided and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _origin(x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Return a sentence on whether arguments were bad before."""
    for path, leaf in pytree.tree_flatten_with_path((*args, kwargs) if kwargs else tuple(args))[0]:
        if leaf is not x and not _is_finite(leaf):
            since = ": it was so before the block, or it was computed by the library itself"
            return (
                f"Argument {pytree.keystr(path)} is "
                f"{f'not finite already{since}' if isinstance(leaf, Tensor) else leaf}"
            )
    return (
        "All other arguments are finite"
        if any(leaf is x for leaf in args)
        else "All arguments are finite"
    )


def _error(
    call: _OperatorCall, x: Tensor, layout: Layout | None, prefix: str, origin: str
) -> BadValueError:
    index, value, count = _first_bad(x, call.infs)
    rank = current_world().rank
    operator = prefix + call.operator
    tensor = f"{dtype_name(x.dtype)}{list(_values(x).shape)}"
    if layout is not None:
        index = [i + start for i, (start, _) in zip(index, layout.box, strict=True)]
        tensor = f"{layout}{', a contribution that is not reduced yet' if layout.pending else ''}"
    return BadValueError(
        f"{operator} gave {value} on rank {rank}, at {call.place}: first at index {index} of "
        f"{tensor}; {count} of {_values(x).numel()} values on this rank are bad. {origin}.",
        operator,
        call.place,
        rank,
        index,
    )


def _notify_peers(error: BadValueError) -> BadValueError:
    """Return the error after notifying the other ranks of it."""
    monitor = monitor_of(current_world())
    if monitor is not None:
        monitor.raised(error)
    return error


# -- backward --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ends:
    """The arguments of an operator, at which its part of the autograd graph ends.

    Attributes:
        nodes: the node that made an argument -> the argument's layout.
        leaves: id of a leaf's local tensor -> the leaf's layout.
    """

    nodes: dict[Any, Layout | None] = field(default_factory=dict)
    leaves: dict[int, Layout | None] = field(default_factory=dict)

    @staticmethod
    def of(args: Sequence[Any], kwargs: dict[str, Any]) -> _Ends:
        ends = _Ends()
        for x in tensors_in((args, kwargs)):
            is_sharded = isinstance(x, ShardedTensor)
            local, layout = (x._local, x._layout) if is_sharded else (x, None)
            if local.grad_fn is not None:
                ends.nodes[local.grad_fn] = layout
            elif local.requires_grad:
                ends.leaves[id(local)] = layout
        return ends

    def layout_at(self, node: Any) -> Layout | None:
        """Return the layout of the argument whose gradient goes to this node."""
        return (
            self.leaves.get(id(node.variable))
            if isinstance(node, _AccumulateGrad)
            else self.nodes.get(node)
        )


def _check_backward(call: _OperatorCall, outputs: Iterable[Any], ends: _Ends) -> None:
    """Register hooks on the nodes between the results of an operator and its arguments."""
    todo = [getattr(x, "_local", x).grad_fn for x in outputs]
    while todo:
        node = todo.pop()
        if (
            node is None
            or node in ends.nodes
            or isinstance(node, _AccumulateGrad)
            or _SEEN in node.metadata
        ):
            continue
        node.metadata[_SEEN] = True
        after = [successor for successor, _ in node.next_functions]
        layouts = [None if successor is None else ends.layout_at(successor) for successor in after]
        node.register_hook(partial(_check_gradients, call, layouts))
        todo += after


def _check_gradients(
    call: _OperatorCall,
    layouts: Sequence[Layout | None],
    gradients: Sequence[Any],
    arrived: Sequence[Any],
) -> None:
    """Raise BadValueError for a bad gradient."""
    for i, x in enumerate(gradients):
        if isinstance(x, Tensor) and call.is_bad(x, lambda: arrived):
            was_finite = all(map(_is_finite, arrived))
            origin = (
                "The gradient that it received is "
                f"{'finite' if was_finite else 'not finite already'}"
            )
            raise _notify_peers(
                _error(call, x, layouts[i] if i < len(layouts) else None, "backward of ", origin)
            )
