"""Check the gradients of custom functions (`torch.autograd.Function`) inside mapped functions.

    forward     x: S  ->  y = psum(x): R
    backward    g: U (the dual of R)  ->  must return S, the dual of x

The gradient of an operator of torch has the right type. A custom function may return one of another
type: the identity as the backward of a psum returns each rank's share of a gradient as if it were
all of it. So types are tracked through the backward of every custom function as well, starting from
gradients of the types dual to its results. It must return

    for an argument that is    varying       varying or replicated: this rank's own gradient
                               replicated    varying or pending: this rank's share
                               pending       replicated

A custom function is identified by the autograd node of its results. Its arguments are the values
that the node's edges lead to.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .types import ShardingTypeError, Tag, Type

if TYPE_CHECKING:
    from .type_checker import TypeChecker

_INTERNAL = ("torch.", "shardmesh.")  # modules whose functions need no check


def is_custom(node: Any) -> bool:
    """Return whether an autograd node is that of a custom function of the program."""
    if not isinstance(node, BackwardCFunction):
        return False
    function = node._forward_cls  # type: ignore[attr-defined]
    is_internal = f"{function.__module__}.".startswith(_INTERNAL)
    return getattr(function, "is_type_checked", False) or not is_internal


class CustomFunctionCalls:
    """The calls of custom functions in one call of a mapped function.

    Attributes:
        nodes: the tags of results of operators, by autograd node.
        calls: the calls of custom functions, by autograd node.
    """

    def __init__(self, checker: TypeChecker) -> None:
        self.checker = weakref.ref(checker)
        self.nodes: dict[Any, Tag] = {}
        self.calls: dict[Any, CustomFunctionCall] = {}

    def note(self, x: Tensor, tag: Tag) -> Tag:
        """Return the tag for a result, and remember it by autograd node.

        Without a node it may still get one, so the tag is provisional.
        """
        node = x.grad_fn
        if node is None:
            return tag if torch.is_grad_enabled() else tag.provisional
        self.nodes[node] = tag
        return tag

    def result(self, node: Any, x: Tensor, tag: Tag | None) -> Tag:
        """Return the tag of a result of a custom function.

        `tag` is what its forward gave, if that used tracked operators.
        """
        call = self._call_of(node)
        if tag is None:  # the result is one of its arguments, or untracked
            tag = call.joined
        return call.add(x.output_nr, tag, x.untyped_storage()._cdata)

    def _call_of(self, node: Any) -> CustomFunctionCall:
        call = self.calls.get(node)
        if call is None:
            checker: Any = self.checker()
            operands = [self._of_edge(*edge) for edge in node.next_functions]
            call = self.calls[node] = CustomFunctionCall(node, checker, operands)
        return call

    def _of_edge(self, node: Any, number: int) -> Tag | None:
        """Return the tag of the value that an edge of the graph leads to.

        None if it does not require grad.
        """
        checker: Any = self.checker()
        if node is None:
            return None
        if hasattr(node, "variable"):
            return checker.tag_of(node.variable)
        if is_custom(node):
            call = self._call_of(node)
            return call.outs.get(number) or call.add(number, call.joined)
        return self.nodes.get(node, checker.unknown)

    def finish(self) -> list[CustomFunctionCall]:
        """Return the calls and drop all references to the graph."""
        calls = list(self.calls.values())
        self.nodes, self.calls = {}, {}
        return calls


class CustomFunctionCall:
    """One call of a custom function.

    Attributes:
        ins: the tags of its arguments that require grad, by number.
        outs: the tags of its results, by number.
        joined: the joined tag of all arguments.
        memory: the tags of its results by memory: saved for backward, they are returned as other
            objects.
        names: the manual axes.
        is_checked: whether its backward has run.
        must_be_checked: whether later calls need to know the result of the check.
    """

    def __init__(self, node: Any, checker: TypeChecker, ins: Sequence[Tag | None]) -> None:
        self.function = node._forward_cls
        self.must_be_checked = getattr(self.function, "is_type_checked", False)
        needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
        tags = [tag for tag in ins if tag is not None]
        self.ins: dict[int, Tag] = dict(zip(needed, tags, strict=True))
        self.joined = checker.control_tag
        for tag in self.ins.values():
            self.joined = checker.join(self.joined, tag)
        self.outs: dict[int, Tag] = {}
        self.memory: dict[int, Tag] = {}
        self.names, self.is_checked = checker.names, False
        self.make_checker = partial(type(checker), self.names, checker.owner, self.memory)
        self.env: Any = checker.env
        reference = weakref.ref(node)
        node.apply = lambda *grads: self.backward(reference(), grads)

    def add(self, number: int, tag: Tag, memory: int | None = None) -> Tag:
        self.outs[number] = tag
        if memory is not None:
            self.memory[memory] = tag
        return tag

    def backward(self, node: Any, grads: Sequence[Any]) -> Any:
        """Run the backward while types are tracked.

        Raises:
            ShardingTypeError: on every rank, a gradient whose type is not dual to its argument's.
        """
        checker = self.make_checker()
        with ExitStack() as stack:
            stack.enter_context(torch._C._EnableTorchFunction())
            stack.enter_context(self.env.tracked_by(checker))
            tracked = [checker.track_grad(g, self.outs.get(i)) for i, g in enumerate(grads)]
            with checker:
                out = type(node).apply(node, *tracked)
            gradients = list(out) if isinstance(out, tuple) else [out]
            for i, tag in self.ins.items():
                if i < len(gradients) and isinstance(gradients[i], Tensor):
                    gradients[i] = self._check_gradient(checker, node, i, tag.type, gradients[i])
        self.is_checked = True
        return tuple(gradients)

    def _check_gradient(
        self, checker: Any, node: Any, i: int, argument: Type, gradient: Tensor
    ) -> Tensor:
        """Check and return the gradient of an argument.

        As a share if a `custom_vjp` returns the whole gradient on every rank.
        """
        type_, call = checker.tag_of(gradient).type, getattr(node, "call", None)
        replicated_grads = None if call is None else call.replicated_grads
        shared: tuple[str, ...] = ()
        if call is not None and replicated_grads is not None:
            shared = replicated_grads.axes.get(i - 1, ())
            if not shared:
                known = argument.varying | argument.pending | type_.varying | type_.pending
                shared = tuple(a for a in self.env.names if a in self.names and a not in known)
                if shared:
                    replicated_grads.axes[i - 1] = shared
                    gradient = call.as_share(gradient, shared)
        for axis in sorted(self.names - set(shared)):
            varies, pends = axis in type_.varying, axis in type_.pending
            if axis in argument.pending:
                wrong = (varies or pends) and not checker.saw_unknown
                needed = "is the same on every rank, as that of a pending value is"
                advice = f"return psum(gradient, {axis!r})"
            elif axis in argument.varying:
                wrong, needed = pends, "is this rank's own, not a share of a sum"
                advice = f"return psum(gradient, {axis!r}), as the gradient of psum is"
            else:
                wrong = not (varies or pends or gradient.is_meta) and bool(gradient.any())
                needed = "is this rank's share of a sum, which is reduced later, once for all uses"
                advice = (
                    "return the share without a psum, or for a whole gradient pcast(gradient, "
                    f"{axis!r}, to='unreduced')"
                )
            if wrong:
                raise ShardingTypeError(
                    f"{self._name(call)}: the gradient of argument {self._argument(call, i)} "
                    f"{_describe_type(type_, axis)}, and the argument "
                    f"{_describe_type(argument, axis)}: its gradient must be one that {needed}; "
                    f"{advice}"
                )
        return gradient

    def _argument(self, call: Any, i: int) -> str:
        return _argument(self.function, i) if call is None else call.argument_name(i - 1)

    def _name(self, call: Any) -> str:
        if call is not None:
            return call.bwd_location()
        code = inspect.unwrap(self.function.backward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}: backward of {self.function.__qualname__}"


def _argument(function: Any, i: int) -> str:
    """Return the name of an argument of forward, or its number."""
    names = list(inspect.signature(function.forward).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]  # without ctx
    is_named = i < len(names) and names[i].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return repr(names[i].name) if is_named else str(i)


def _describe_type(type_: Type, axis: str) -> str:
    if axis in type_.varying:
        return f"varies over {axis!r}"
    return f"is {'pending' if axis in type_.pending else 'replicated'} over {axis!r}"
