"""`TypeChecker`: a torch function mode that tracks the types of values.

Through every operator of a mapped function.

    y = x @ w          x varies over dp, w is replicated: y varies over dp, "since matmul at
                       train.py:12, of argument 0"
    y = psum(y, "dp")  replicated again

A *tag* is a type and where it comes from. The tag of a value is, in this order, that

    stored in the tensor               an argument, or the result of an operator
    of a call, by autograd node        the result of a custom function, which autograd wraps
    of its memory                      unwrapped by a transform of torch.func; saved for backward
    of a constant                      no operator here has made it: replicated

joined with the tag of what was written into its memory, which every view of it shows. Results of
operators have the joined tag of the operands (`result_tag`); `special_operators.py` lists those
that have another one.

Python numbers have no tags. Once the program turns a varying tensor into a number (`.item()`,
`if x:`), every later result may depend on it and counts as varying, except that a psum of it is the
same on every rank. Which of two such results the program returns may depend on the number too, so
ranks also compare the values of replicated results the first time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...autograd import engine_hooks
from ...autograd.named_axes import AxisEnv, current_captures
from ...ops.strategy import name_of
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import tensors_in
from .custom_functions import CustomFunctionCall, CustomFunctionCalls, is_custom
from .pending import share_of_gradient, stays_pending
from .special_operators import SPECIAL, special_of
from .types import REPLICATED, ShardingTypeError, Tag, Type, TypeOrigin, user_location

_NO_TENSORS = frozenset(
    {int, bool, float, str, torch.Size, torch.dtype, torch.device, type(None), torch.layout}
)
untracked = torch._C.DisableTorchFunction  # a context in which types are not tracked
transforms_active = engine_hooks.transforms_active


class TagsByMemory:
    """Tags of tensors by their memory, where they cannot be attributes: one memory has many views.

    A tensor is kept with its tag, so that no other gets its memory. A `ShardedTensor` has none.
    """

    def __init__(self) -> None:
        self._tags: dict[int, tuple[Tag, Tensor]] = {}

    def get(self, x: Tensor) -> Tag | None:
        """Return the tag of the memory of a tensor, None if it has none."""
        if not self._tags or isinstance(x, ShardedTensor):
            return None
        with untracked():
            entry = self._tags.get(_memory(x))
        return None if entry is None else entry[0]

    def set(self, x: Tensor, tag: Tag) -> None:
        if not isinstance(x, ShardedTensor):
            with untracked():
                self._tags[_memory(x)] = tag, x

    def __bool__(self) -> bool:
        return bool(self._tags)


class TypeChecker(TorchFunctionMode):
    """Track the types of all values of one call of a mapped function.

    Args:
        names: the manual axes.
        owner: for the backward of a custom function: the owner of the tags of forward's values.
        saved: for such a backward: the tags of forward's results by memory.

    Attributes:
        names, env: the manual axes, and the environment that custom functions belong to.
        owner: an object that identifies the tags of this call.
        captures_only: whether only captured tensors are looked for, and types are not checked.
        tracks_backward: whether this is the backward of a custom function.
        saw_unknown: whether that backward has used a value of unknown type.
        uneven: whether parts of some argument differ in shape.
        replicated: the tag of replicated values.
        unknown: the tag of a tensor that no operator has made: a constant, or one that a transform
            of torch.func has unwrapped.
        control_tag: the type of everything that the program has read as a number.
        number_tag: the same, joined with the type of everything whose shape depends on values.
        random_type: the type of the results of random operators.
        written: the tags of values that were written into memory.
        unwrapped: the joined tags of what transforms of torch.func may unwrap.
        custom_calls: the calls of custom functions.
    """

    captures_only = False

    def __init__(
        self,
        names: Iterable[str],
        owner: object = None,
        saved: Mapping[int, Tag] | None = None,
    ) -> None:
        super().__init__()
        self.names = frozenset(names)
        self.env: Any = None
        self.owner = object() if owner is None else owner
        self.tracks_backward = saved is not None
        self.saw_unknown = self.uneven = False
        self.replicated = Tag(REPLICATED, {}, self.owner)
        self.unknown = self.control_tag = self.number_tag = self.replicated
        self.random_type = Type.of(self.names)
        self.written, self.unwrapped = TagsByMemory(), TagsByMemory()
        self._saved = {} if saved is None else saved
        self.custom_calls: CustomFunctionCalls | None = None
        if self.tracks_backward:
            self.unknown = self.make_tag(TypeOrigin("a value of unknown type"), self.random_type)
        elif torch.is_grad_enabled() and not self.captures_only:
            self.custom_calls = CustomFunctionCalls(self)

    @contextmanager
    def bind(self, env: AxisEnv) -> Iterator[None]:
        """Make the axes of `env` manual too in the block; custom functions belong to `env`."""
        before = self.names, self.env
        self.names, self.env = self.names | frozenset(env.names), env
        try:
            yield
        finally:
            self.names, self.env = before

    def finish(self) -> Sequence[CustomFunctionCall]:
        """End the call; return the calls of custom functions in it."""
        return () if self.custom_calls is None else self.custom_calls.finish()

    # -- the tag of a value ------------------------------------------------------------------------

    def tag_of(self, x: Tensor) -> Tag:
        """Return the tag of a tensor, joined with that of what was written into its memory.

        Raises: ShardingTypeError for a tensor that requires grad and is neither an argument nor
        made here.
        """
        tag = getattr(x, "_type_tag", None)
        if tag is None or tag.owner is not self.owner:
            tag = self._find_tag(x, self._own_tag(tag))
        written = self.written.get(x) if self.written else None
        return tag if written is None or written.type is tag.type else self.join(tag, written)

    def _find_tag(self, x: Tensor, provisional: Tag | None) -> Tag:
        """Return the tag of a tensor that does not store a final one.

        Store it where it is that of the tensor for good.
        """
        with untracked():
            transformed, sharded = engine_hooks.is_transformed(x), isinstance(x, ShardedTensor)
            node = None if sharded or transformed or self.custom_calls is None else x.grad_fn
        if self.custom_calls is not None and node is not None and is_custom(node):
            tag = self.custom_calls.result(node, x, provisional)
            x._type_tag = tag  # type: ignore[attr-defined]
            return tag
        if provisional is not None:
            return provisional
        with untracked():
            if transformed:
                return self.tag_of(engine_hooks.untransformed(x))
            tag = self.unwrapped.get(x)
            if tag is None and self.tracks_backward:
                tag = None if sharded else self._saved.get(_memory(x))
                self.saw_unknown = self.saw_unknown or tag is None
                return self.unknown if tag is None else tag
            if tag is None:
                self._check_constant(x)
                tag = self.unknown
        self.set_tag(x, tag)
        return tag

    def _check_constant(self, x: Tensor) -> None:
        """Raise ShardingTypeError if a tensor that no operator here has made requires grad.

        Note a constant of a function whose captured tensors are looked for.
        """
        is_outside = x.is_leaf or self.unknown.type is REPLICATED
        needs_grad = x.requires_grad and torch.is_grad_enabled() and is_outside
        if needs_grad and not isinstance(x, ShardedTensor) and self._is_refused(x):
            raise CapturedTensorError(_captured_message(x))
        if x.is_leaf and not x.requires_grad and (captures := current_captures()) is not None:
            captures.constants.append(ref(x))

    def _is_refused(self, x: Tensor) -> bool:
        """Return whether a tensor that requires grad cannot be used as it is.

        No operator here has made it.
        """
        return True

    def _own_tag(self, tag: Tag | None) -> Tag | None:
        """Return the tag itself, of a provisional one the original, if this checker has set it."""
        tag = tag if tag is None or tag.original is None else tag.original
        return tag if tag is not None and tag.owner is self.owner else None

    def has_tag(self, x: Tensor) -> bool:
        """Return whether a tensor is an argument, or the result of an operator that was tracked."""
        return self._own_tag(getattr(x, "_type_tag", None)) is not None

    def argument_tag(self, leaf: Any) -> Tag:
        """Return the tag that an argument has in the outer mapped function, if there is one."""
        tag = getattr(leaf, "_type_tag", None)
        return self.replicated if tag is None or tag.owner is not self.owner else self.tag_of(leaf)

    def tag_outside(self, names: Sequence[str], x: Any) -> Tag:
        """Return the tag of a result in the outer function, where these axes are not manual."""
        tag = self.join_all(tensors_in((x,)), self.control_tag)
        return tag.with_type(Type.of(tag.type.varying - set(names), tag.type.pending - set(names)))

    # -- new tags ----------------------------------------------------------------------------------

    def make_tag(self, origin: TypeOrigin, type_: Type) -> Tag:
        """Return a tag of this type with one origin for all its axes."""
        if type_ is REPLICATED:
            return self.replicated
        return Tag(type_, dict.fromkeys(type_.varying | type_.pending, origin), self.owner)

    def grad_tag(self, type_: Type, names: frozenset[str] | None = None) -> Tag:
        """Return the tag of the gradient of a value of this type.

        The dual over `names`, by default over all manual axes.
        """
        origin = TypeOrigin("the gradient of a value that is not replicated", user_location())
        return self.make_tag(origin, type_.dual_over(self.names if names is None else names))

    def track_grad(self, g: Tensor | None, out: Tag | None) -> Tensor | None:
        """Return the gradient of a result as a new object with a tag of the dual type.

        `out` is None for a result that was not used.
        """
        if g is None or g.layout is not torch.strided:
            return g
        with untracked():
            fresh = g.view_as(g)
        self.set_tag(fresh, self.replicated if out is None else self.grad_tag(out.type))
        return fresh

    def join_all(self, items: Iterable[Tensor], tag: Tag) -> Tag:
        """Return the tag of a value that is computed from these, and from one with this tag."""
        for x in items:
            other = self.tag_of(x)
            if other is not tag:
                tag = self.join(tag, other)
        return tag

    def join(self, one: Tag, other: Tag) -> Tag:
        """Return the tag of a value that is computed from two.

        The first that varies gives the origin.
        """
        if one.type is REPLICATED:
            return other
        if other.type is REPLICATED or other.type is one.type:
            return one
        type_ = one.type.join(other.type)
        if type_ is one.type:
            return one
        return Tag(type_, {**other.origins, **one.origins}, self.owner)

    def set_tag(self, result: Any, tag: Tag) -> None:
        """Set the tag of every tensor of a result.

        Inside a transform of torch.func, also of what the transform unwraps from it.
        """
        if isinstance(result, Tensor):
            result._type_tag = tag  # type: ignore[attr-defined]
            if engine_hooks.is_transformed(result):
                # What a transform unwraps is a new object, and may be any value that it has made.
                before = self.unwrapped.get(result)
                self.unwrapped.set(result, tag if before is None else self.join(before, tag))
                self.unknown = self.join(self.unknown, tag)
            elif self.custom_calls is not None and not isinstance(result, ShardedTensor):
                result._type_tag = self.custom_calls.note(result, tag)  # type: ignore[attr-defined]
        elif isinstance(result, (tuple, list)):
            for part in result:
                self.set_tag(part, tag)

    def record_write(self, x: Any) -> None:
        """Record that `x` was written to, and with it all tensors that share its memory."""
        tag = getattr(x, "_type_tag", self.replicated)
        if tag.type is not REPLICATED:
            self.written.set(x, tag)

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
            # First: captured tensors must be replaced before the operator runs.
            tag = self._operands_tag(args, kwargs)
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
            noted = tag if self.custom_calls is None else self.custom_calls.note(result, tag)
            result._type_tag = noted  # type: ignore[attr-defined]
        else:
            self.set_tag(result, tag)
        if kwargs and ("out" in kwargs or kwargs.get("inplace") is True):
            self.record_write(result)
        return result

    def _with_captures(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with local parts in place of captured tensors, None without any."""
        captures = current_captures()
        return None if captures is None else captures.with_local_parts(func, args, kwargs)

    def replace_capture(self, x: Any) -> Any:
        """Return the local part of a captured tensor; any other tensor itself."""
        captures = current_captures()
        return x if captures is None else captures.local(x)

    def result_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """Return the tag of the results of an operator that depends on the values of its operands.

        Raises: ShardingTypeError if it is not linear in a pending operand.
        """
        tag = self._operands_tag(args, kwargs)
        return tag if tag.is_final else self._final_tag(func, args, kwargs or {}, tag)

    def _operands_tag(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """Return the joined tag of an operator's operands."""
        tag, owner = self.control_tag, self.owner
        for x in args:
            kind = type(x)
            if kind is Tensor:  # `join_all`, without a call where the tag is known
                known = getattr(x, "_type_tag", None)
                if known is None or known.owner is not owner or self.written:
                    known = self.tag_of(x)
                if known is not tag:
                    tag = self.join(tag, known)
            elif kind not in _NO_TENSORS:
                tag = self.join_all(tensors_in((x,)), tag)
        if kwargs:
            tag = self.join_all(tensors_in(kwargs.values()), tag)
        return tag

    def _final_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        """Return the joined tag of an operator's operands as that of its results.

        With its line as the origin where so far that is an argument.
        """
        if tag.type.pending:
            tag = self._pending_tag(func, args, kwargs, tag)
        if all(origin.location for origin in tag.origins.values()):
            return tag
        name, location = name_of(func), user_location()
        origins = {
            axis: origin if origin.location else TypeOrigin(name, location, str(origin))
            for axis, origin in tag.origins.items()
        }
        return Tag(tag.type, origins, self.owner)

    def _pending_tag(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        """Return the tag of a result with a pending operand.

        It must be pending over each axis in which the operator is linear.

        Raises: ShardingTypeError if the operator is not linear, or takes a number that may differ
        between the ranks.
        """
        numbers = self.number_tag.type.varying | (self.names if self.uneven else frozenset())
        if tag.type.pending & numbers and any(
            type(x) in (int, float, complex) for x in (*args, *kwargs.values())
        ):
            axes = sorted(tag.type.pending & numbers)
            since = self.pending_since(axes[0], args, kwargs)
            raise ShardingTypeError(_by_a_number(func, axes, since, self.number_tag))
        passes = share_of_gradient if self.tracks_backward else stays_pending
        pending = frozenset(a for a in tag.type.pending if passes(self, a, func, args, kwargs))
        return tag.with_type(Type.of(tag.type.varying - tag.type.pending, pending))

    def pending_since(self, axis: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Return where the first operand that is pending over an axis became so, for a message."""
        tags = (self.tag_of(x) for x in tensors_in((*args, *kwargs.values())))
        return next((tag.since((axis,)) for tag in tags if axis in tag.type.pending), "")

    # -- numbers -----------------------------------------------------------------------------------

    def record_read(self, func: Any, tag: Tag) -> None:
        """Record that the program reads a value as a number.

        Its control flow may depend on it.
        """
        location = user_location()
        if tag.type.pending and self.tracks_backward:
            # For computation outside torch, or checks for non-finite values.
            varying = Type.of(tag.type.varying | tag.type.pending)
            tag = self.make_tag(TypeOrigin(name_of(func), location), varying)
        if tag.type.pending:
            raise ShardingTypeError(
                f"{location}: {name_of(func)} of a value that {tag.type}"
                f"{tag.since(tag.type.pending)}: each rank holds only a share of the sum; "
                "psum it first"
            )
        if not tag.type.varying <= self.control_tag.type.varying:
            why = (
                f"{name_of(func)}, after which control flow may differ between ranks (to print a "
                "value, print the tensor),"
            )
            read = self.make_tag(TypeOrigin(why, location), tag.type)
            self.control_tag = self.join(self.control_tag, read)
        self.number_tag = self.join(self.number_tag, self.control_tag)


class CaptureTracker(TypeChecker):
    """Track which tensors the function has made, to find captured ones; do not check types."""

    captures_only = True

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
