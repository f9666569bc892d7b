"""Tensors that a mapped function closes over.

Each becomes an argument when the function first uses it.

    f = shard_map(lambda x: x @ w, ...)     w is sharded, or requires grad
    f(x)     runs as     shard_map(lambda x, w: x @ w, ...)(x, w)

A `ShardedTensor` keeps its layout: the function receives this rank's part, which varies over the
axes that split it. A plain tensor that requires grad counts as replicated, and its gradient is
summed over the ranks; ranks compare its values when the signature is new. Plain tensors without
gradient are constants.

The type checker finds them (`types/type_checker.py`), so a function that closes over such a tensor
is tracked at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...mesh.device_mesh import DeviceMesh
from ..autograd import engine_hooks
from ..autograd.named_axes import AxisEnv, CapturedTensors
from ..layout.layout import dtype_name
from ..ops.rules.registry import writes_first_operand
from ..ops.strategy import name_of
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors, tensors_in
from .inputs import InputSpec, alias, make_input_spec, prepare_inputs
from .types.type_checker import TypeChecker, untracked
from .types.types import ShardingTypeError, TypeOrigin, user_location


class Captures:
    """The captured tensors that one call of a mapped function uses.

    Attributes:
        name: the function's name.
        inputs: by id, the tensor, its input spec, and the local part that the function receives.
        constants: plain tensors without gradient that it uses.
    """

    def __init__(
        self,
        name: str,
        env: AxisEnv,
        mesh: DeviceMesh,
        names: Sequence[str],
        auto_mesh: DeviceMesh | None,
        checker: TypeChecker,
    ) -> None:
        self.name, self.checker = name, checker
        self.inputs: dict[int, tuple[Tensor, InputSpec, Any]] = {}
        self.constants: list[ref[Tensor]] = []
        self._env, self._mesh, self._names, self._auto_mesh = env, mesh, names, auto_mesh
        self._start = engine_hooks.sequence_number()

    def plain_tensors(self) -> list[tuple[str, Any]]:
        """Return the name and value of each plain one, which must be the same on every rank."""
        return [
            (spec.path, part)
            for x, spec, part in self.inputs.values()
            if not isinstance(x, ShardedTensor)
        ]

    def local(self, x: Any) -> Any:
        """Return the local part of a captured tensor, anything else itself.

        A tensor is captured if it is sharded or requires grad, and is no argument.

        Raises:
            ShardingTypeError: a sharded one on a mesh that the function is not mapped over.
        """
        captured = self.inputs.get(id(x))
        if captured is not None:
            return captured[2]
        if type(x) is ShardedTensor:
            return self._add(x) if self.is_foreign(x) else x
        return self._add(x) if isinstance(x, Tensor) and self.is_captured(x) else x

    def is_foreign(self, x: ShardedTensor) -> bool:
        """Return whether a sharded tensor comes from outside of this function.

        Those of the function itself lie on the axes that stay global.
        """
        auto_mesh, axes = self._auto_mesh, x._layout.mesh.axis_names
        return auto_mesh is None or any(axis in self._env.names for axis in axes)

    def check_inside(self, x: ShardedTensor, what: str) -> None:
        """Raise ShardingTypeError if `what` is called on a captured tensor that requires grad.

        `what` works on whole tensors.
        """
        if self.is_foreign(x) and x._local.requires_grad and torch.is_grad_enabled():
            raise ShardingTypeError(
                f"{user_location()}: {what} of {x._layout} inside {self.name}, a mapped function "
                f"that closes over it: {what} it before the call, or pass it as an argument"
            )

    def is_captured(self, x: Tensor) -> bool:
        """Return whether a plain tensor requires grad and was made before this call."""
        if self.checker.has_tag(x) or engine_hooks.is_transformed(x):
            return False
        with untracked():
            if not (x.requires_grad and torch.is_grad_enabled()):
                return False
            return x.grad_fn is None or engine_hooks.made_before(x.grad_fn, self._start)

    def _add(self, x: Tensor) -> Any:
        with untracked():
            spec = self._input_spec(x)
            part = alias(prepare_inputs(self.name, [x], [spec])[0])
        tag = self.checker.make_tag(TypeOrigin(spec.path.partition(": ")[2]), spec.type)
        self.checker.set_tag(part, self.checker.join(self.checker.argument_tag(x), tag))
        self.inputs[id(x)] = x, spec, part
        return part

    def _input_spec(self, x: Tensor) -> InputSpec:
        kind = (
            f"{x._layout}"
            if isinstance(x, ShardedTensor)
            else f"a tensor of {dtype_name(x.dtype)}{list(x.shape)} that requires grad"
        )
        path = f"shard_map({self.name}): {kind}, which it closes over at {user_location()}"
        if not isinstance(x, ShardedTensor) or x._layout.mesh is self._mesh:
            return make_input_spec(path, x, None, self._mesh, self._names, self._auto_mesh)
        root, names = self._env.root, self._env.names
        if x._layout.mesh is not root:
            raise ShardingTypeError(
                f"{path}, is on {x._layout.mesh}, and the function is mapped over {self._mesh}: "
                "redistribute it there first, or pass it as an argument"
            )
        rest = tuple(axis for axis in root.axis_names if axis not in names)
        return make_input_spec(path, x, None, root, names, root[rest] if rest else None)

    # -- operators ---------------------------------------------------------------------------------

    def with_local_parts(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """Return the arguments of an operator with local parts in place of captured tensors.

        None if there are none.

        Raises:
            ShardingTypeError: the operator would write to a captured tensor.
        """
        new = map_tensors(self.local, args)
        named = dict(zip(kwargs, map_tensors(self.local, kwargs.values()), strict=True))
        before, after = tensors_in((*args, *kwargs.values())), tensors_in((*new, *named.values()))
        if all(x is y for x, y in zip(before, after, strict=True)):
            return None
        written = [
            *tensors_in(args[:1] if writes_first_operand(func) else ()),
            *tensors_in((kwargs.get("out"),)),
        ]
        if any(id(x) in self.inputs for x in written):
            raise ShardingTypeError(
                f"{user_location()}: {name_of(func)} writes to a tensor that the mapped function "
                "closes over; write to a clone of it"
            )
        return new, named

    def replaying(self) -> AbstractContextManager[Any]:
        """Return a context in which a recomputation gets the local parts again."""
        return ReplayCaptures(self)


class ReplayCaptures(TorchFunctionMode):
    """Replace captured tensors by their local parts while backward recomputes.

    It recomputes a piece of a mapped function.
    """

    def __init__(self, captures: Captures) -> None:
        super().__init__()
        self._inputs = captures.inputs

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._inputs:
            return func(*args, **kwargs)
        return func(
            *map_tensors(self._part, args),
            **dict(zip(kwargs, map_tensors(self._part, kwargs.values()), strict=True)),
        )

    def _part(self, x: Any) -> Any:
        captured = self._inputs.get(id(x))
        return x if captured is None else captured[2]


def replace_captures(tree: Any, captures: CapturedTensors | None) -> Any:
    """Return the tree with local parts in place of captured tensors.

    Those are tensors that the running mapped function closes over.
    """
    return tree if captures is None else pytree.tree_map(captures.local, tree)
