"""In-place operators on slices that are copies: `x[i] += y`, with x split along a dim that `i` selects from, also writes to x.

    y = x[0]      a copy of row 0, on every rank, with a reference to x and the index
    y += 1        adds to the copy, then runs x[0] = y
    x[0] += 1     Python runs y = x[0]; y += 1; x[0] = y, and the last step is skipped, since x has these values already

The reference to x is weak, so that a copy does not keep x alive. If x is gone, as after `y = f(x)[0]`, and for methods, as in
`x[0].add_(1)`, writing to the copy is an error: see `dispatch.check_base`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..tensor.sharded_tensor import ShardedTensor
from .dispatch import check_base, marked_as_copy

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_Version = tuple[int, int] | None  # None: unknown


def _version(x: ShardedTensor) -> _Version:
    """Return a token that changes when x is written; None for an inference tensor, which has no version counter."""
    return None if x._local.is_inference() else (x._local._version, x._data_accesses)


class SlicedFrom:
    """The tensor and the index that a copy was sliced by.

    Args:
        base: the tensor.
        index: integers, slices, None and Ellipsis.
    """

    def __init__(self, base: ShardedTensor, index: Any) -> None:
        self._base, self._index = weakref.ref(base), index
        self._read = _version(base)
        self._written: tuple[_Version, _Version] | None = None  # of base and copy, when the copy was assigned to the base

    @property
    def base(self) -> Any:
        """The tensor, or None if it has been freed."""
        return self._base()

    def write(self, copy: ShardedTensor, operator: Callable[..., Any], other: Any) -> Any:
        """Run an in-place operator on the copy, and assign the result to the slice of the base.

        Raises:
            RuntimeError: the base is itself a copy; or it is a leaf that requires grad, as in torch.

        Communication: the operator's and the assignment's; if the base was written after the copy was made, it is sliced again.
        """
        base = self.base
        check_base(base)
        if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
            raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
        with torch.set_grad_enabled(copy.requires_grad):
            is_current = self._read is not None and self._read == _version(base)
            current = copy if is_current else base[self._index].redistribute(copy.spec)
            copy._local = current._local.clone()  # without the mark of a copy, so it can be written to
        try:
            result = operator(copy, other)
            if result is copy:
                base[self._index] = copy
        finally:
            copy._local = marked_as_copy(copy._local, base._local)
        self._read = _version(base)
        self._written = (self._read, _version(copy)) if result is copy else None
        return result

    def has_written(self, base: Any, index: Any, copy: ShardedTensor) -> bool:
        """Return whether `base[index] = copy` would repeat the last `write`, with no change since."""
        if self._written is None or self.base is not base or not _is_same(self._index, index):
            return False
        return None not in self._written and self._written == (_version(base), _version(copy))


def _is_same(index: Any, other: Any) -> bool:
    one, two = (i if isinstance(i, tuple) else (i,) for i in (index, other))
    return len(one) == len(two) and all(type(a) is type(b) and a == b for a, b in zip(one, two, strict=True))


def _writing_through(operator: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the method of `ShardedTensor` for an augmented assignment: torch's, which writes through a copy of a slice."""

    @wraps(operator)
    def augmented(self: ShardedTensor, other: Any) -> Any:
        source = self._sliced_from
        if source is None or source.base is None:
            return operator(self, other)
        return source.write(self, operator, other)

    return augmented


for _name in _OPERATORS.split():
    setattr(ShardedTensor, f"__i{_name}__", _writing_through(getattr(Tensor, f"__i{_name}__")))
