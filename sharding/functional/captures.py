"""Tensors that a mapped function closes over: each becomes an argument when the function first works on it.

    w sharded, or requires grad        f = shard_map(lambda x: x @ w, ...)        f(x)  as  shard_map(lambda x, w: x @ w, ...)(x, w)

A `ShardedTensor` goes in as it lies: the function sees this rank's part, which varies over the axes that split it. A plain tensor that
requires grad counts as replicated, and its gradient is summed over the ranks; ranks compare its values when the signature is first
seen. Plain tensors without gradient are constants.

The type follower finds them (`following.py`), so a function that closes over such a tensor is followed at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import dtype_name
from ..ops.plain_operands import tensors_in
from ..ops.rules.registry import writes_first_operand
from ..ops.strategy import name_of
from ..tensor.autograd import engine_hooks
from ..tensor.sharded_tensor import ShardedTensor
from .inputs import Entrance, aliased, enter, entrance
from .named_axes import Mapping
from .types.type_checker import Following, unfollowed
from .types.types import Origin, ShardingTypeError, place


class Captures:
    """The tensors from outside that one call of a mapped function works on.

    Attributes:
        name: of the function.
        entered: by id, the tensor, how it went in, and the part that the function sees.
        constants: plain tensors without gradient that it works on.
    """

    def __init__(
        self, name: str, mapping: Mapping, mesh: DeviceMesh, names: Sequence[str], inner: DeviceMesh | None, checker: Following
    ) -> None:
        self.name, self.checker = name, checker
        self.entered: dict[int, tuple[Tensor, Entrance, Any]] = {}
        self.constants: list[ref[Tensor]] = []
        self._mapping, self._mesh, self._names, self._inner = mapping, mesh, names, inner
        self._start = engine_hooks.sequence_number()

    def entrances(self) -> list[tuple[Entrance, Any]]:
        """How each went in, and its part, in the order in which the function met them."""
        return [(way, part) for _, way, part in self.entered.values()]

    def plain(self) -> list[tuple[str, Any]]:
        """How to name each plain one, and its value, which must be the same on every rank."""
        return [(way.path, part) for x, way, part in self.entered.values() if not isinstance(x, ShardedTensor)]

    def of(self, x: Any) -> Any:
        """What the function sees of a tensor: its part if it is one from outside that is sharded or requires grad, else itself.

        Raises:
            ShardingTypeError: a sharded one on a mesh that the function is not mapped over.
        """
        found = self.entered.get(id(x))
        if found is not None:
            return found[2]
        if type(x) is ShardedTensor:
            return self._entered(x) if self.is_foreign(x) else x
        return self._entered(x) if isinstance(x, Tensor) and self.is_captured(x) else x

    def is_foreign(self, x: ShardedTensor) -> bool:
        """Whether a sharded tensor is not one of this function's, on the axes that stay global."""
        inner, axes = self._inner, x._layout.mesh.axis_names
        return inner is None or any(axis in self._mapping.names for axis in axes)

    def check_inside(self, x: ShardedTensor, what: str) -> None:
        """Raises: ShardingTypeError where `what` is to be done to a differentiated tensor from outside as a whole."""
        if self.is_foreign(x) and x._local.requires_grad and torch.is_grad_enabled():
            raise ShardingTypeError(
                f"{place()}: {what} of {x._layout} inside {self.name}, a mapped function that closes over it: {what} it before the call, "
                "or pass it as an argument"
            )

    def is_captured(self, x: Tensor) -> bool:
        """Whether a plain tensor that no operator here has made requires grad, and is older than this call."""
        if self.checker.knows(x) or engine_hooks.is_transformed(x):
            return False
        with unfollowed():
            if not (x.requires_grad and torch.is_grad_enabled()):
                return False
            return x.grad_fn is None or engine_hooks.made_before(x.grad_fn, self._start)

    def _entered(self, x: Tensor) -> Any:
        with unfollowed():
            way = self._entrance(x)
            part = aliased(enter(self.name, [x], [way])[0])
        tag = self.checker.varying(Origin(way.path.partition(": ")[2]), way.type)
        self.checker.note(part, self.checker.join(self.checker.argument(x), tag))
        self.entered[id(x)] = x, way, part
        return part

    def _entrance(self, x: Tensor) -> Entrance:
        kind = f"{x._layout}" if isinstance(x, ShardedTensor) else f"a tensor of {dtype_name(x.dtype)}{list(x.shape)} that requires grad"
        path = f"shard_map({self.name}): {kind}, which it closes over at {place()}"
        if not isinstance(x, ShardedTensor) or x._layout.mesh is self._mesh:
            return entrance(path, x, None, self._mesh, self._names, self._inner)
        root, names = self._mapping.root, self._mapping.names
        if x._layout.mesh is not root:
            raise ShardingTypeError(
                f"{path}, lies on {x._layout.mesh}, and the function is mapped over {self._mesh}: redistribute it there first, or pass "
                "it as an argument"
            )
        rest = tuple(axis for axis in root.axis_names if axis not in names)
        return entrance(path, x, None, root, names, root[rest] if rest else None)

    # -- operators -----------------------------------------------------------------------------------------------------

    def replaced(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """The arguments of an operator with parts in the place of what comes from outside; None where nothing does.

        Raises:
            ShardingTypeError: the operator would write to it.
        """
        new, named = _mapped(self.of, args), dict(zip(kwargs, _mapped(self.of, kwargs.values()), strict=True))
        before, after = tensors_in((*args, *kwargs.values())), tensors_in((*new, *named.values()))
        if all(x is y for x, y in zip(before, after, strict=True)):
            return None
        written = [*tensors_in(args[:1] if writes_first_operand(func) else ()), *tensors_in((kwargs.get("out"),))]
        if any(id(x) in self.entered for x in written):
            raise ShardingTypeError(
                f"{place()}: {name_of(func)} writes to a tensor that the mapped function closes over; write to a clone of it"
            )
        return new, named


class Replaying(TorchFunctionMode):
    """Puts the parts that went in in the place of what a piece of a mapped function closes over, where backward runs it again."""

    def __init__(self, captures: Captures) -> None:
        super().__init__()
        self._entered = captures.entered

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self._entered:
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        return func(*_mapped(self._part, args), **dict(zip(kwargs, _mapped(self._part, kwargs.values()), strict=True)))

    def _part(self, x: Any) -> Any:
        found = self._entered.get(id(x))
        return x if found is None else found[2]


def captured_in(tree: Any, captures: Captures | None) -> Any:
    """A tree with parts in the place of what comes from outside of the mapped function that runs here."""
    return tree if captures is None else pytree.tree_map(captures.of, tree)


def _mapped(of: Callable[[Any], Any], items: Any) -> list[Any]:
    """The items with `of` of every tensor in them, also those in lists, tuples and dicts."""
    out: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            item = of(item)
        elif type(item) in (list, tuple):
            item = type(item)(_mapped(of, item))
        elif type(item) is dict:
            item = dict(zip(item, _mapped(of, item.values()), strict=True))
        out.append(item)
    return out
