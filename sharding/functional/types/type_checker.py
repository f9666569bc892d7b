"""Following types through a mapped function: a torch function mode that looks at every operator as it runs.

    y = x @ w          x varies over dp, w is replicated: y varies over dp, "since matmul at train.py:12, of argument 0"
    y = psum(y, "dp")  replicated again

A tensor carries what is known of it as an attribute; one without is a constant of the function and replicated. Memory that
something varying was written into varies, under whatever view it is read.

Numbers are not followed. When the program turns a varying tensor into a number (`.item()`, `if x:`), whatever it makes from
then on may depend on that, and counts as varying; what a psum makes of it is the same on every rank all the same. Which of two
such results the program returns may depend on the number too: so ranks also compare the values of replicated results the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...ops.plain_operands import tensors_in
from ...ops.strategy import name_of
from ...tensor.autograd import engine_hooks
from ...tensor.sharded_tensor import ShardedTensor
from ..named_axes import Mapping, captures_here
from .custom_functions import Application, Applications, is_custom
from .pending import share_of_gradient, stays_pending
from .special_operators import SPECIAL, special_of
from .types import REPLICATED, Origin, ShardingTypeError, Tag, Type, place

_NO_TENSORS = frozenset({int, bool, float, str, torch.Size, torch.dtype, torch.device, type(None), torch.layout})
unfollowed = torch._C.DisableTorchFunction  # a context in which operators are not followed


transforms_active = engine_hooks.transforms_active


class Following(TorchFunctionMode):
    """The types of all values of one call of a mapped function.

    Attributes:
        names: the manual axes.
        trusts: whether nothing is checked.
        uneven: whether parts of some argument differ in shape.
        looked: what the program knows in numbers: the type of everything that it looked at.
        numbers: the same, and that of everything whose shape depends on values.
        random: the type of what random operators give.
        unknown: what a tensor may be that no operator has made: a constant, or one that a transform of torch.func has unwrapped.
        in_backward: whether it follows the backward of a custom function.
        met_unknown: whether that has met a value of which nothing is known.
        customs: the applications of custom functions.
    """

    trusts = in_backward = met_unknown = False

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.uneven = False
        self.names = frozenset(names)
        self.mapping: Any = None
        self.owner: object = object()  # of the tags of its values
        self.replicated = Tag(REPLICATED, {}, self.owner)
        self.looked = self.replicated
        self.unknown = self.numbers = self.replicated
        self.random = Type.of(self.names)  # of what random operators give
        self._memory: dict[int, Tag] = {}
        self._written: dict[int, tuple[Tag, Tensor]] = {}  # by memory, which the tensor keeps alive
        self._unwrapped: dict[int, tuple[Tag, Tensor]] = {}
        self.customs = Applications(self) if torch.is_grad_enabled() else None

    @classmethod
    def of_backward(cls, names: frozenset[str], owner: object, memory: dict[int, Tag]) -> Following:
        """Who follows the backward of a custom function whose forward this class has followed.

        Args:
            names: the manual axes.
            owner: of the tags of forward's values.
            memory: what is known of what lies where.
        """
        found = cls(())
        found.names, found.owner, found.in_backward, found.customs = names, owner, True, None
        found.replicated = found.looked = found.numbers = Tag(REPLICATED, {}, owner)
        found.unknown, found.random = found.varying(Origin("what nobody has followed"), Type.of(names)), Type.of(names)
        found._memory = memory
        return found

    # -- what is known -------------------------------------------------------------------------------------------------

    def varying(self, origin: Origin, type_: Type) -> Tag:
        """The tag of what is of this type, for this reason."""
        return self.replicated if type_ is REPLICATED else Tag(type_, dict.fromkeys(type_.varying | type_.pending, origin), self.owner)

    def argument(self, leaf: Any) -> Tag:
        """What is known already of an argument of a mapped function inside another one."""
        tag = getattr(leaf, "_mapped_tag", None)
        return self.replicated if tag is None or tag.owner is not self.owner else self.of(leaf)

    def gradient(self, type_: Type) -> Tag:
        """The tag of a gradient."""
        return self.varying(Origin("the gradient of what is not replicated", place()), type_)

    def without(self, names: Sequence[str], x: Any) -> Tag:
        """What is known of a result, for the function around the one that made these axes manual."""
        tag = self.joined(tensors_in((x,)), self.looked)
        return tag.retyped(Type.of(tag.type.varying - set(names), tag.type.pending - set(names)))

    @contextmanager
    def inside(self, mapping: Mapping) -> Iterator[None]:
        """Inside, the axes of this mapping are manual, and it is the one of custom functions."""
        before, self.names, self.mapping = (self.names, self.mapping), self.names | frozenset(mapping.names), mapping
        try:
            yield
        finally:
            self.names, self.mapping = before

    def end(self) -> Sequence[Application]:
        """The call is over: the custom functions that were applied in it."""
        return () if self.customs is None else self.customs.end()

    def set(self, x: Any, tag: Tag) -> None:
        """From now on this is known of `x`."""
        x._mapped_tag = tag

    def knows(self, x: Tensor) -> bool:
        """Whether an operator that was followed, or an argument's entry, has made a tensor."""
        tag = getattr(x, "_mapped_tag", None)
        return tag is not None and (tag if tag.kept is None else tag.kept).owner is self.owner

    def of(self, x: Tensor) -> Tag:
        """What is known of a tensor.

        Raises: ShardingTypeError for a tensor from outside that requires grad.
        """
        tag = getattr(x, "_mapped_tag", None)
        if tag is None or tag.owner is not self.owner:
            tag = self._of_loose(x, tag)
        if self._written:
            tag = self._with_written(x, tag)
        return tag

    def _of_loose(self, x: Tensor, tag: Tag | None) -> Tag:
        kept = tag.kept if tag is not None and tag.kept is not None and tag.kept.owner is self.owner else None
        customs = None if self.customs is None or isinstance(x, ShardedTensor) else self.customs
        with unfollowed():
            node = None if customs is None or engine_hooks.is_transformed(x) else x.grad_fn
        if customs is not None and node is not None and is_custom(node):
            x._mapped_tag = kept = customs.result(node, x, kept)  # type: ignore[attr-defined]
        return self._of_unknown(x) if kept is None else kept

    def _of_unknown(self, x: Tensor) -> Tag:
        with unfollowed():
            if engine_hooks.is_transformed(x):
                return self.of(engine_hooks.untransformed(x))
            found = self._unwrapped.get(_memory(x)) if self._unwrapped and not isinstance(x, ShardedTensor) else None
            if found is not None:
                self.note(x, found[0])
                return found[0]
            if self.in_backward:
                return self._of_saved(x)
            outside = x.is_leaf or self.unknown.type is REPLICATED
            if outside and x.requires_grad and torch.is_grad_enabled() and not isinstance(x, ShardedTensor) and self._is_refused(x):
                raise FromOutsideError(_from_outside(x))
            if x.is_leaf and not x.requires_grad and (captures := captures_here()) is not None:
                captures.constants.append(ref(x))
        self.note(x, self.unknown)
        return self.unknown

    def _is_refused(self, x: Tensor) -> bool:
        """Whether a tensor that requires grad, and that no operator here has made, cannot be used as it is."""
        return True

    def _of_saved(self, x: Tensor) -> Tag:
        """What is known of a result that was saved for backward, or comes from anywhere."""
        found = None if isinstance(x, ShardedTensor) else self._memory.get(_memory(x))
        self.met_unknown = self.met_unknown or found is None
        return self.unknown if found is None else found

    def gradient_of(self, g: Tensor | None, out: Tag | None) -> Tensor | None:
        """The gradient of a result, as another object that its type is noted on; that of one that nobody used is zero."""
        if g is None or g.layout is not torch.strided:
            return g
        with unfollowed():
            fresh = g.view_as(g)
        self.note(fresh, self.replicated if out is None else self.gradient(out.type.dual_over(self.names)))
        return fresh

    def joined(self, items: Iterator[Tensor], found: Tag) -> Tag:
        """What is known of a value that is made of these."""
        for x in items:
            tag = self.of(x)
            if tag is not found:
                found = self.join(found, tag)
        return found

    def join(self, one: Tag, other: Tag) -> Tag:
        """What is known of a value that is made of two; where it varies is told by the first that does."""
        if one.type is REPLICATED:
            return other
        if other.type is REPLICATED or other.type is one.type:
            return one
        type_ = one.type.join(other.type)
        return one if type_ is one.type else Tag(type_, {**other.origins, **one.origins}, self.owner)

    # -- operators -----------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if types and ShardedTensor in types:
            args, kwargs = self._with_captures(func, args, kwargs or {}) or (args, kwargs)
        special = SPECIAL.get(func, func)
        if special is func:
            special = SPECIAL[func] = special_of(func)
        try:
            if special is not None:
                return special(self, func, args, kwargs or {})
            tag = self._of_operands(args, kwargs)  # first, since what comes from outside must go in before the operator runs
        except FromOutsideError:
            replaced = self._with_captures(func, args, kwargs or {})
            if replaced is None:
                raise
            return self.__torch_function__(func, (), *replaced)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if type(result) in _NO_TENSORS:
            return result
        if not tag.settled:
            tag = self._settled(func, args, kwargs or {}, tag)
        if type(result) is Tensor and not transforms_active():
            result._mapped_tag = tag if self.customs is None else self._made(result, tag)  # type: ignore[attr-defined]
        else:
            self.note(result, tag)
        if kwargs and ("out" in kwargs or kwargs.get("inplace") is True):
            self.wrote(result)
        return result

    def _with_captures(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The arguments with what the function closes over as it goes in; None where there is nothing of that kind."""
        captures = captures_here()
        return None if captures is None else captures.replaced(func, args, kwargs)

    def entered(self, x: Any) -> Any:
        """The tensor, or if the function closes over it, how it goes in."""
        captures = captures_here()
        return x if captures is None else captures.of(x)

    def made(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """What is known of an operator's results."""
        tag = self._of_operands(args, kwargs)
        return tag if tag.settled else self._settled(func, args, kwargs or {}, tag)

    def _of_operands(self, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Tag:
        """What is known of an operator's operands together."""
        tag, owner = self.looked, self.owner
        for x in args:
            kind = type(x)
            if kind is Tensor:  # this: `joined`, without a call for what is known already
                known = getattr(x, "_mapped_tag", None)
                if known is None or known.owner is not owner or self._written:
                    known = self.of(x)
                if known is not tag:
                    tag = self.join(tag, known)
            elif kind not in _NO_TENSORS:
                tag = self.joined(tensors_in((x,)), tag)
        if kwargs:
            tag = self.joined(tensors_in(kwargs.values()), tag)
        return tag

    def _settled(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        if tag.type.pending:
            tag = self._of_pending(func, args, kwargs, tag)
        return tag if all(origin.place for origin in tag.origins.values()) else self._begun(func, tag)

    def _begun(self, func: Any, tag: Tag) -> Tag:
        """The same, with this operator as the place where it began to vary, if it did by an argument."""
        here = place()
        origins = {a: o if o.place else Origin(name_of(func), here, str(o)) for a, o in tag.origins.items()}
        return Tag(tag.type, origins, self.owner)

    def _of_pending(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        """The same where an operand is pending: over each axis it goes through, if the operator is linear in it.

        Raises: ShardingTypeError where it is not, or may be given a number that differs between the ranks whose shares it works on.
        """
        numbers = self.numbers.type.varying | (self.names if self.uneven else frozenset())
        if tag.type.pending & numbers and any(type(x) in (int, float, complex) for x in (*args, *kwargs.values())):
            axes = sorted(tag.type.pending & numbers)
            raise ShardingTypeError(_by_a_number(func, axes, self.pending_since(axes[0], args, kwargs), self.numbers))
        passes = share_of_gradient if self.in_backward else stays_pending
        kept = frozenset(a for a in tag.type.pending if passes(self, a, func, args, kwargs))
        return tag.retyped(Type.of(tag.type.varying - tag.type.pending, kept))

    def pending_since(self, axis: str, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Where the first operand that is pending over an axis began to be, for a message."""
        tags = (self.of(x) for x in tensors_in((*args, *kwargs.values())))
        return next((tag.since((axis,)) for tag in tags if axis in tag.type.pending), "")

    def note(self, result: Any, tag: Tag) -> None:
        """Note the same of every tensor of a result; inside a transform of torch.func, also of what comes out of it."""
        if isinstance(result, Tensor):
            result._mapped_tag = tag  # type: ignore[attr-defined]
            if engine_hooks.is_transformed(result):
                self._remember(result, tag)
            elif self.customs is not None and not isinstance(result, ShardedTensor):
                result._mapped_tag = self._made(result, tag)  # type: ignore[attr-defined]
        elif isinstance(result, (tuple, list)):
            for part in result:
                self.note(part, tag)

    def _made(self, x: Tensor, tag: Tag) -> Tag:
        """The tag for a result of an operator: its node is known by it, or, made without gradients, it may yet get one."""
        node = x.grad_fn
        if node is None:
            return tag if torch.is_grad_enabled() else tag.loose
        self.customs.nodes[node] = tag  # type: ignore[union-attr]
        return tag

    def _remember(self, x: Tensor, tag: Tag) -> None:
        """What a transform of torch.func unwraps later is a new object: it is known by its memory, or else may be anything that the
        transform has made."""
        with unfollowed():
            memory = _memory(x)
            before, _ = self._unwrapped.get(memory, (self.replicated, None))
            self._unwrapped[memory] = (self.join(before, tag), x)
        self.unknown = self.join(self.unknown, tag)

    def has_written(self, x: Tensor) -> bool:
        """Whether what varies has been written into the memory of a tensor."""
        return not isinstance(x, ShardedTensor) and _memory(x) in self._written

    def wrote(self, x: Any) -> None:
        """`x` has been written to: so have all tensors that share its memory."""
        tag = getattr(x, "_mapped_tag", self.replicated)
        if tag.type is not REPLICATED and not isinstance(x, ShardedTensor):
            with unfollowed():
                self._written[_memory(x)] = (tag, x)

    def _with_written(self, x: Tensor, tag: Tag) -> Tag:
        """What is known of a tensor, and of what has been written into its memory."""
        with unfollowed():
            found = None if isinstance(x, ShardedTensor) else self._written.get(_memory(x))
        return tag if found is None or found[0].type is tag.type else self.join(tag, found[0])

    # -- numbers -------------------------------------------------------------------------------------------------------

    def look(self, func: Any, tag: Tag) -> None:
        """The program turns a value into a number, and may go on as that says."""
        if tag.type.pending and self.in_backward:  # to compute with it by other means, or to look for what is not finite
            tag = self.varying(Origin(name_of(func), place()), Type.of(tag.type.varying | tag.type.pending))
        if tag.type.pending:
            raise ShardingTypeError(
                f"{place()}: {name_of(func)} of a value that {tag.type}{tag.since(tag.type.pending)}: each rank holds a share of it; "
                "psum it first"
            )
        if not tag.type.varying <= self.looked.type.varying:
            why = f"{name_of(func)}, after which the program may go its own way on every rank (to print a value, print the tensor),"
            self.looked = self.join(self.looked, self.varying(Origin(why, place()), tag.type))
        self.numbers = self.join(self.numbers, self.looked)


class Trusting(Following):
    """Follows who has made what, so that tensors from outside are found, and believes the rest."""

    trusts = True

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.customs = None

    def _settled(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tag: Tag) -> Tag:
        return tag

    def look(self, func: Any, tag: Tag) -> None:
        """Numbers are not followed."""

    def _is_refused(self, x: Tensor) -> bool:
        captures = captures_here()
        return captures is not None and captures.is_captured(x)


class FromOutsideError(ShardingTypeError):
    """A tensor that requires grad and that no operator of the mapped function has made."""


# ----------------------------------------------------------------------------------------------------------------------


def _memory(x: Tensor) -> int:
    return engine_hooks.innermost(x).untyped_storage()._cdata


def _by_a_number(func: Any, axes: Sequence[str], since: str, numbers: Tag) -> str:
    names, read = ", ".join(map(repr, axes)), numbers.since(axes)
    return (
        f"{place()}: {name_of(func)} of a value that is pending over {names}{since} and a number, which may differ between ranks"
        f"{read or ', since they have read lengths of parts'}: the shares would not add up; psum over {names} first"
    )


def _from_outside(x: Tensor) -> str:
    return (
        f"{place()}: a tensor of shape {list(x.shape)} that requires grad comes into a mapped function from outside: its gradient would be "
        "each rank's own. Pass it as an argument by position (with a spec of its own), or use it detached: x.detach()"
    )
