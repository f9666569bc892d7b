"""Writes to slices and reshapes that are copies.

`x[i] += y`, with x split along a dim that `i` selects from, also writes to x.

    y = x[0]      a copy of row 0, on every rank, with a reference to x and the index
    y += 1        adds to the copy, then runs x[0] = y
    x[0] += 1     Python runs y = x[0]; y += 1; x[0] = y, and the last step is skipped, since x has
                  these values already

`x[0].copy_(y)`, `fill_`, `zero_` and `x.view(-1)[0] = y` write to x in the same way.
The reference to x is weak, so that a copy does not keep x alive. If x is gone, as after
`y = f(x)[0]`, and for other methods, as in `x[0].add_(1)`, writing to the copy is an error: see
`check_base`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..autograd.engine_hooks import transforming
from ..tensor.sharded_tensor import ShardedTensor

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_RESHAPES = frozenset(("view", "reshape", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze"))
_Version = tuple[int, int] | None  # None: unknown


class _MovedCopies:
    exist = False  # whether a view of a redistributed copy was ever made


_moved_copies = _MovedCopies()


def marked_as_copy(moved: Tensor, original: Tensor) -> Tensor:
    """Return the redistributed operand of a view, marked so that writing to a view of it raises."""
    if transforming():
        moved = moved.clone() if moved is original else moved
    elif moved.untyped_storage()._cdata == original.untyped_storage()._cdata:
        moved = moved.clone()
    base_of(moved)._is_moved_copy = True  # type: ignore[attr-defined]
    _moved_copies.exist = True
    return moved


def base_of(local: Tensor) -> Tensor:
    """Return the tensor whose view this is, or itself."""
    return local if local._base is None else local._base


def check_base(x: Any) -> None:
    """Raise if this is a view of a tensor that had to be redistributed, before it is written.

    Raises:
        RuntimeError: the base would not change.
    """
    check_bases((x,))


def check_bases(tensors: Iterable[Any]) -> None:
    """Call `check_base` for several tensors; free until the first view of a copy is made."""
    if _moved_copies.exist and any(
        getattr(base_of(x._local), "_is_moved_copy", False) for x in tensors
    ):
        raise RuntimeError(
            "in-place operator on a view whose base had to be redistributed: the base would not "
            "change; write to the base, or call .clone() first to say that it should not"
        )


def _version(x: ShardedTensor) -> _Version:
    """Return a token that changes when x is written; None for an inference tensor."""
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
        self._written: tuple[_Version, _Version] | None = (
            None  # of base and copy, when the copy was assigned to the base
        )

    @property
    def base(self) -> Any:
        """The tensor, or None if it has been freed."""
        return self._base()

    def write(self, copy: ShardedTensor, operator: Callable[..., Any], *args: Any) -> Any:
        """Run an in-place operator on the copy, and assign the result to the slice of the base.

        Raises:
            RuntimeError: the base is itself a copy of which the base is gone; or it is a leaf that
                requires grad, as in torch.

        Communication: the operator's and the assignment's; if the base was written after the copy
        was made, it is sliced again.
        """
        base = self.base
        if not _is_written_through(base):
            check_base(base)
        if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place "
                "operation."
            )
        with torch.set_grad_enabled(copy.requires_grad):
            is_current = self._read is not None and self._read == _version(base)
            current = copy if is_current else self._slice(base).redistribute(copy.spec)
            # without the mark of a copy, so it can be written to
            copy._local = current._local.clone()
        copy._sliced_from = None
        try:
            result = operator(copy, *args)
            if result is copy or result is None:
                self._assign(base, copy)
        finally:
            copy._sliced_from = self
            copy._local = marked_as_copy(copy._local, base._local)
        self._read = _version(base)
        self._written = (self._read, _version(copy)) if result is copy else None
        return result

    def _slice(self, base: Any) -> Any:
        """Return the values of the copy."""
        return base[self._index]

    def _assign(self, base: Any, copy: ShardedTensor) -> None:
        """Write the copy's values to the base."""
        base[self._index] = copy

    def has_written(self, base: Any, index: Any, copy: ShardedTensor) -> bool:
        """Return whether `base[index] = copy` would repeat the last `write`, without a change."""
        if self._written is None or self.base is not base or not _is_same(self._index, index):
            return False
        return None not in self._written and self._written == (_version(base), _version(copy))


class ReshapedFrom(SlicedFrom):
    """The tensor that a copy has the elements of, in another shape.

    Args:
        base: the tensor.
        shape: of the copy.
    """

    def __init__(self, base: ShardedTensor, shape: Sequence[int]) -> None:
        super().__init__(base, None)
        self._shape = tuple(shape)

    def _slice(self, base: Any) -> Any:
        return base.reshape(self._shape)

    def _assign(self, base: Any, copy: ShardedTensor) -> None:
        base.copy_(copy.reshape(base.shape))

    def has_written(self, base: Any, index: Any, copy: ShardedTensor) -> bool:
        return False


def is_reshape(func: Callable[..., Any]) -> bool:
    """Return whether a view has all elements of its operand, in the same order."""
    return getattr(func, "__name__", "") in _RESHAPES


def _is_written_through(x: Any) -> bool:
    source = x._sliced_from
    return source is not None and source.base is not None


def write_through(operator: Callable[..., Any], x: Any, *args: Any) -> Any:
    """Run an in-place operator on a copy of a slice and on its source, else NotImplemented."""
    if type(x) is not ShardedTensor or not _is_written_through(x):
        return NotImplemented
    return x._sliced_from.write(x, operator, *args)  # type: ignore[union-attr]


def _is_same(index: Any, other: Any) -> bool:
    one, two = (i if isinstance(i, tuple) else (i,) for i in (index, other))
    return len(one) == len(two) and all(
        type(a) is type(b) and a == b for a, b in zip(one, two, strict=True)
    )


def _writing_through(operator: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return the method for an augmented assignment: torch's, which writes through a copy."""

    @wraps(operator)
    def augmented(self: ShardedTensor, other: Any) -> Any:
        source = self._sliced_from
        if source is None or source.base is None:
            return operator(self, other)
        return source.write(self, operator, other)

    return augmented


for _name in _OPERATORS.split():
    setattr(ShardedTensor, f"__i{_name}__", _writing_through(getattr(Tensor, f"__i{_name}__")))
