"""`TypeChecker`: a torch function mode that tracks the types of values through every operator of a
mapped function.

    y = x @ w          x varies over dp, w is replicated: y varies over dp, "since matmul at
                       train.py:12, of argument 0"
    y = psum(y, "dp")  replicated again

A tensor stores its type as an attribute, its tag. A tensor without a tag is a constant of the
function, and replicated. Memory that a varying value was written into varies under every view of
it.

Python numbers have no tags. Once the program turns a varying tensor into a number (`.item()`,
`if x:`), every later result may depend on it and counts as varying, except that a psum of it is the
same on every rank. Which of two such results the program returns may depend on the number too, so
ranks also compare the values of replicated results the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...autograd import engine_hooks
from ...autograd.named_axes import AxisEnv, current_captures
from ...ops.plain_operands import tensors_in
from ...ops.strategy import name_of
from ...tensor.sharded_tensor import ShardedTensor
from .custom_functions import CustomFunctionCall, CustomFunctionCalls, is_custom
from .pending import share_of_gradient, stays_pending
from .special_operators import SPECIAL, special_of
from .types import REPLICATED, ShardingTypeError, Tag, Type, TypeOrigin, user_location

_NO_TENSORS = frozenset(
    {int, bool, float, str, torch.Size, torch.dtype, torch.device, type(None), torch.layout}
)
untracked = torch._C.DisableTorchFunction  # a context in which types are not tracked


transforms_active = engine_hooks.transforms_active


class TypeChecker(TorchFunctionMode):
    """Track the types of all values of one call of a mapped function.

    Attributes:
        names: the manual axes.
        captures_only: whether only captured tensors are looked for, and types are not checked.
        uneven: whether parts of some argument differ in shape.
        control_tag: the type of everything that the program has read as a number.
        number_tag: the same, joined with the type of everything whose shape depends on values.
        random_type: the type of the results of random operators.
        unknown: the tag of a tensor that no operator has made: a constant, or one that a transform
            of torch.func has unwrapped.
        tracks_backward: whether this is the backward of a custom function.
        saw_unknown: whether that backward has used a value of unknown type.
        custom_calls: the calls of custom functions.
    """

    captures_only = tracks_backward = saw_unknown = False

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.uneven = False
        self.names = frozenset(names)
        self.env: Any = None
        self.owner: object = object()  # of the tags of its values
        self.replicated = Tag(REPLICATED, {}, self.owner)
        self.control_tag = self.replicated
        self.unknown = self.number_tag = self.replicated
        self.random_type = Type.of(self.names)
        self._memory: dict[int, Tag] = {}
        self._written: dict[int, tuple[Tag, Tensor]] = {}  # by memory; the tensor keeps it alive
        self._unwrapped: dict[int, tuple[Tag, Tensor]] = {}
        self.custom_calls = CustomFunctionCalls(self) if torch.is_grad_enabled() else None

    @classmethod
    def for_backward(
        cls, names: frozenset[str], owner: object, memory: dict[int, Tag]
    ) -> TypeChecker:
        """Return a checker for the backward of a custom function whose forward was tracked.

        Args:
            names: the manual axes.
            owner: the owner of the tags of forward's values.
            memory: the tags of forward's results by memory.
        """
        found = cls(())
        found.names, found.owner, found.tracks_backward, found.custom_calls = (
            names,
            owner,
            True,
            None,
        )
        found.replicated = found.control_tag = found.number_tag = Tag(REPLICATED, {}, owner)
        found.unknown, found.random_type = (
            found.make_tag(TypeOrigin("a value of unknown type"), Type.of(names)),
            Type.of(names),
        )
        found._memory = memory
        return found

    # -- tags --------------------------------------------------------------------------------------

    def make_tag(self, origin: TypeOrigin, type_: Type) -> Tag:
        """Return a tag of this type with one origin for all its axes."""
        return (
            self.replicated
            if type_ is REPLICATED
            else Tag(type_, dict.fromkeys(type_.varying | type_.pending, origin), self.owner)
        )

    def argument_tag(self, leaf: Any) -> Tag:
        """Return the tag that an argument has in the outer mapped function; replicated if there is
        none.
        """
        tag = getattr(leaf, "_type_tag", None)
        return self.replicated if tag is None or tag.owner is not self.owner else self.tag_of(leaf)

    def grad_tag(self, type_: Type) -> Tag:
        """Return the tag of a gradient of this type."""
        return self.make_tag(
            TypeOrigin("the gradient of a value that is not replicated", user_location()), type_
        )

    def tag_outside(self, names: Sequence[str], x: Any) -> Tag:
        """Return the tag of a result in the outer function, where these axes are not manual."""
        tag = self.join_all(tensors_in((x,)), self.control_tag)
        return tag.retyped(Type.of(tag.type.varying - set(names), tag.type.pending - set(names)))

    @contextmanager
    def bind(self, env: AxisEnv) -> Iterator[None]:
        """Make the axes of `env` manual too in the block; custom functions belong to `env`."""
        before, self.names, self.env = (
            (self.names, self.env),
            self.names | frozenset(env.names),
            env,
        )
        try:
            yield
        finally:
            self.names, self.env = before

    def finish(self) -> Sequence[CustomFunctionCall]:
        """End the call; return the calls of custom functions in it."""
        return () if self.custom_calls is None else self.custom_calls.finish()

    def has_tag(self, x: Tensor) -> bool:
        """Return whether a tensor is an argument, or the result of an operator that was tracked."""
        tag = getattr(x, "_type_tag", None)
        return (
            tag is not None and (tag if tag.original is None else tag.original).owner is self.owner
        )

    def tag_of(self, x: Tensor) -> Tag:
        """Return the tag of a tensor.

        Raises: ShardingTypeError for a tensor that requires grad and is neither an argument nor
        made here.
        """
        tag = getattr(x, "_type_tag", None)
        if tag is None or tag.owner is not self.owner:
            tag = self._tag_of_provisional(x, tag)
        if self._written:
            tag = self._with_writes(x, tag)
        return tag

    def _tag_of_provisional(self, x: Tensor, tag: Tag | None) -> Tag:
        kept = (
            tag.original
            if tag is not None and tag.original is not None and tag.original.owner is self.owner
            else None
        )
        custom_calls = (
            None if self.custom_calls is None or isinstance(x, ShardedTensor) else self.custom_calls
        )
        with untracked():
            node = None if custom_calls is None or engine_hooks.is_transformed(x) else x.grad_fn
        if custom_calls is not None and node is not None and is_custom(node):
            x._type_tag = kept = custom_calls.result(node, x, kept)  # type: ignore[attr-defined]
        return self._tag_of_unknown(x) if kept is None else kept

    def _tag_of_unknown(self, x: Tensor) -> Tag:
        with untracked():
            if engine_hooks.is_transformed(x):
                return self.tag_of(engine_hooks.untransformed(x))
            found = (
                self._unwrapped.get(_memory(x))
                if self._unwrapped and not isinstance(x, ShardedTensor)
                else None
            )
            if found is not None:
                self.set_tag(x, found[0])
                return found[0]
            if self.tracks_backward:
                return self._tag_of_saved(x)
            outside = x.is_leaf or self.unknown.type is REPLICATED
            if (
                outside
                and x.requires_grad
                and torch.is_grad_enabled()
                and not isinstance(x, ShardedTensor)
                and self._is_refused(x)
            ):
                raise CapturedTensorError(_captured_message(x))
            if x.is_leaf and not x.requires_grad and (captures := current_captures()) is not None:
                captures.constants.append(ref(x))
        self.set_tag(x, self.unknown)
        return self.unknown

    def _is_refused(self, x: Tensor) -> bool:
        """Return whether a tensor that requires grad, and that no operator here has made, cannot be
        used as it is.
        """
        return True

    def _tag_of_saved(self, x: Tensor) -> Tag:
        """Return the tag of a tensor in backward, which may be a saved result of forward."""
        found = None if isinstance(x, ShardedTensor) else self._memory.get(_memory(x))
        self.saw_unknown = self.saw_unknown or found is None
        return self.unknown if found is None else found

    def track_grad(self, g: Tensor | None, out: Tag | None) -> Tensor | None:
        """Return the gradient of a result as a new object with a tag of the dual type; `out` is
        None for a result that was not used.
        """
        if g is None or g.layout is not torch.strided:
            return g
        with untracked():
            fresh = g.view_as(g)
        self.set_tag(
            fresh, self.replicated if out is None else self.grad_tag(out.type.dual_over(self.names))
        )
        return fresh

    def join_all(self, items: Iterator[Tensor], found: Tag) -> Tag:
        """Return the tag of a value that is computed from these."""
        for x in items:
            tag = self.tag_of(x)
            if tag is not found:
                found = self.join(found, tag)
        return found

    def join(self, one: Tag, other: Tag) -> Tag:
        """Return the tag of a value that is computed from two; the first that varies gives the
        origin.
        """
        if one.type is REPLICATED:
            return other
        if other.type is REPLICATED or other.type is one.type:
            return one
        type_ = one.type.join(other.type)
        return (
            one if type_ is one.type else Tag(type_, {**other.origins, **one.origins}, self.owner)
        )

    # -- operators ---------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and ShardedTensor in types:
            args, kwargs = self._with_captures(func, args, kwargs or {}) or (args, kwargs)
        special = SPECIAL.get(func, func)
        if special is func:
            special = SPECIAL[func] = special_of(func)
        try:
            if special is not None:
                return special(self, func, args, kwargs or {})
            tag = self._operands_tag(
                args, kwargs
            )  # first: captured tensors must be replaced before the operator runs
        except CapturedTensorError:
            replaced = self._with_captures(func, args, kwargs or {})
            if replaced is None:
                raise
            return self.__torch_function__(func, (), *replaced)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) in _NO_TENSORS:
            return result
        if not tag.is_final:
            tag = self._final_tag(func, args, kwargs or {}, tag)
        if type(result) is Tensor and not transforms_active():
            result._type_tag = tag if self.custom_calls is None else self._tag_node(result, tag)  # type: ignore[attr-defined]
        else:
            self.set_tag(result, tag)
        if kwargs and ("out" in kwargs or kwargs.get("inplace") is True):
            self.record_write(result)
        return result

    def _with_captures(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with local parts in place of captured tensors; None if there are
        none.
        """
        captures = current_captures()
        return None if captures is None else captures.replaced(func, args, kwargs)

    def replace_capture(self, x: Any) -> Any:
        """Return the local part of a captured tensor; any other tensor itself."""
        captures = current_captures()
        return x if captures is None else captures.local(x)

    def result_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """Return the tag of an operator's results."""
        tag = self._operands_tag(args, kwargs)
        return tag if tag.is_final else self._final_tag(func, args, kwargs or {}, tag)

    def _operands_tag(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """Return the joined tag of an operator's operands."""
        tag, owner = self.control_tag, self.owner
        for x in args:
            kind = type(x)
            if kind is Tensor:  # `join_all`, without a call where the tag is known
                known = getattr(x, "_type_tag", None)
                if known is None or known.owner is not owner or self._written:
                    known = self.tag_of(x)
                if known is not tag:
                    tag = self.join(tag, known)
            elif kind not in _NO_TENSORS:
                tag = self.join_all(tensors_in((x,)), tag)
        if kwargs:
            tag = self.join_all(tensors_in(kwargs.values()), tag)
        return tag

    def _final_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        if tag.type.pending:
            tag = self._pending_tag(func, args, kwargs, tag)
        return (
            tag
            if all(origin.location for origin in tag.origins.values())
            else self._with_location(func, tag)
        )

    def _with_location(self, func: Any, tag: Tag) -> Tag:
        """Return the tag with this operator's line as the origin where so far it is an argument."""
        here = user_location()
        origins = {
            a: o if o.location else TypeOrigin(name_of(func), here, str(o))
            for a, o in tag.origins.items()
        }
        return Tag(tag.type, origins, self.owner)

    def _pending_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        """Return the tag of a result with a pending operand, which must be pending over each axis
        in which the operator is linear.

        Raises: ShardingTypeError if the operator is not linear, or takes a number that may differ
        between the ranks.
        """
        numbers = self.number_tag.type.varying | (self.names if self.uneven else frozenset())
        if tag.type.pending & numbers and any(
            type(x) in (int, float, complex) for x in (*args, *kwargs.values())
        ):
            axes = sorted(tag.type.pending & numbers)
            raise ShardingTypeError(
                _by_a_number(func, axes, self.pending_since(axes[0], args, kwargs), self.number_tag)
            )
        passes = share_of_gradient if self.tracks_backward else stays_pending
        kept = frozenset(a for a in tag.type.pending if passes(self, a, func, args, kwargs))
        return tag.retyped(Type.of(tag.type.varying - tag.type.pending, kept))

    def pending_since(self, axis: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return where the first operand that is pending over an axis became so, for a message."""
        tags = (self.tag_of(x) for x in tensors_in((*args, *kwargs.values())))
        return next((tag.since((axis,)) for tag in tags if axis in tag.type.pending), "")

    def set_tag(self, result: Any, tag: Tag) -> None:
        """Set the tag of every tensor of a result; inside a transform of torch.func, also of what
        the transform unwraps from it.
        """
        if isinstance(result, Tensor):
            result._type_tag = tag  # type: ignore[attr-defined]
            if engine_hooks.is_transformed(result):
                self._remember(result, tag)
            elif self.custom_calls is not None and not isinstance(result, ShardedTensor):
                result._type_tag = self._tag_node(result, tag)  # type: ignore[attr-defined]
        elif isinstance(result, (tuple, list)):
            for part in result:
                self.set_tag(part, tag)

    def _tag_node(self, x: Tensor, tag: Tag) -> Tag:
        """Return the tag for a result, and remember it by autograd node; without a node it may
        still get one, so the tag is provisional.
        """
        node = x.grad_fn
        if node is None:
            return tag if torch.is_grad_enabled() else tag.provisional
        self.custom_calls.nodes[node] = tag  # type: ignore[union-attr]
        return tag

    def _remember(self, x: Tensor, tag: Tag) -> None:
        """Remember the tag by memory: a tensor that a transform of torch.func unwraps later is a
        new object, and may be any value that the transform has made."""
        with untracked():
            memory = _memory(x)
            before, _ = self._unwrapped.get(memory, (self.replicated, None))
            self._unwrapped[memory] = (self.join(before, tag), x)
        self.unknown = self.join(self.unknown, tag)

    def was_written(self, x: Tensor) -> bool:
        """Return whether a varying value was written into the memory of a tensor."""
        return not isinstance(x, ShardedTensor) and _memory(x) in self._written

    def record_write(self, x: Any) -> None:
        """Record that `x` was written to, and with it all tensors that share its memory."""
        tag = getattr(x, "_type_tag", self.replicated)
        if tag.type is not REPLICATED and not isinstance(x, ShardedTensor):
            with untracked():
                self._written[_memory(x)] = (tag, x)

    def _with_writes(self, x: Tensor, tag: Tag) -> Tag:
        """Return the tag of a tensor joined with that of values written into its memory."""
        with untracked():
            found = None if isinstance(x, ShardedTensor) else self._written.get(_memory(x))
        return tag if found is None or found[0].type is tag.type else self.join(tag, found[0])

    # -- numbers -----------------------------------------------------------------------------------

    def record_read(self, func: Any, tag: Tag) -> None:
        """Record that the program reads a value as a number, which its control flow may
        depend on.
        """
        if (
            tag.type.pending and self.tracks_backward
        ):  # for computation outside torch, or checks for non-finite values
            tag = self.make_tag(
                TypeOrigin(name_of(func), user_location()),
                Type.of(tag.type.varying | tag.type.pending),
            )
        if tag.type.pending:
            raise ShardingTypeError(
                f"{user_location()}: {name_of(func)} of a value that "
                f"{tag.type}{tag.since(tag.type.pending)}: each rank holds only a share of the "
                "sum; psum it first"
            )
        if not tag.type.varying <= self.control_tag.type.varying:
            why = (
                f"{name_of(func)}, after which control flow may differ between ranks (to print a "
                "value, print the tensor),"
            )
            self.control_tag = self.join(
                self.control_tag, self.make_tag(TypeOrigin(why, user_location()), tag.type)
            )
        self.number_tag = self.join(self.number_tag, self.control_tag)


class CaptureTracker(TypeChecker):
    """Track which tensors the function has made, to find captured ones; do not check types."""

    captures_only = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.custom_calls = None

    def _final_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        return tag

    def record_read(self, func: Any, tag: Tag) -> None:
        """Ignore reads: types are not checked."""

    def _is_refused(self, x: Tensor) -> bool:
        captures = current_captures()
        return captures is not None and captures.is_captured(x)


class CapturedTensorError(ShardingTypeError):
    """A tensor that requires grad and is neither an argument nor made by the mapped function."""


# --------------------------------------------------------------------------------------------------


def _memory(x: Tensor) -> int:
    return engine_hooks.innermost(x).untyped_storage()._cdata


def _by_a_number(func: Any, axes: Sequence[str], since: str, numbers: Tag) -> str:
    names, read = ", ".join(map(repr, axes)), numbers.since(axes)
    return (
        f"{user_location()}: {name_of(func)} of a value that is pending over {names}{since} and a "
        "number, which may differ between "
        f"ranks{read or ', since they have read lengths of parts'}: the shares would not add up; "
        f"psum over {names} first"
    )


def _captured_message(x: Tensor) -> str:
    return (
        f"{user_location()}: a mapped function uses a tensor of shape {list(x.shape)} that "
        "requires grad and is not an argument: its gradient would be each rank's own. Pass it by "
        "position (with a spec of its own), or use it detached: x.detach()"
    )
