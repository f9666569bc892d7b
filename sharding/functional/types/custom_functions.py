"""Custom functions (`torch.autograd.Function`) inside mapped functions: types are followed through their backward as well.

    forward    x: S  ->  y = psum(x): R          backward    g: U (the dual of R)  ->  what it returns must be S, the dual of x

What an operator's gradient is follows from the operator. What a custom function says is its gradient may be of another type than the dual
of what went in: the identity as the backward of a psum hands on each rank's share of a gradient as if it were all of it. So while types are
followed, the backward of every custom function is followed as well when it runs, with gradients of the types dual to its results, and what
it returns must be

    for an argument that is    varying       varying or replicated: this rank's own gradient
                               replicated    varying or pending: this rank's share
                               pending       replicated

A custom function is known by the autograd node of its results. Its arguments are the values that the node's edges lead to.
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

from ..named_axes import Mapping
from .types import ShardingTypeError, Tag, Type

if TYPE_CHECKING:
    from .type_checker import Following

_INTERNAL = ("torch.", "shardmesh.")  # modules whose functions are known to be right


def is_custom(node: Any) -> bool:
    """Whether an autograd node is that of a program's own function."""
    if not isinstance(node, BackwardCFunction):
        return False
    function = node._forward_cls  # type: ignore[attr-defined]
    return getattr(function, "is_followed", False) or not f"{function.__module__}.".startswith(_INTERNAL)


class Applications:
    """The applications of custom functions in one call of a mapped function.

    Attributes:
        nodes: by autograd node, what is known of its results.
        found: by autograd node, the applications.
    """

    def __init__(self, following: Following) -> None:
        self.following = weakref.ref(following)
        self.nodes: dict[Any, Tag] = {}
        self.found: dict[Any, Application] = {}

    def result(self, node: Any, x: Tensor, tag: Tag | None) -> Tag:
        """What is known of a result of a custom function; `tag` is what its forward has told, if that went through operators."""
        application = self._application(node)
        if tag is None:  # one of its arguments, or nobody knows
            tag = application.joined
        return application.add(x.output_nr, tag, x.untyped_storage()._cdata)

    def _application(self, node: Any) -> Application:
        found = self.found.get(node)
        if found is None:
            following: Any = self.following()
            found = self.found[node] = Application(node, following, [self._of_edge(*edge) for edge in node.next_functions])
        return found

    def _of_edge(self, node: Any, number: int) -> Tag | None:
        """What is known of the value that an edge of the graph leads to; None where that does not require grad."""
        following: Any = self.following()
        if node is None:
            return None
        if hasattr(node, "variable"):
            return following.of(node.variable)
        if is_custom(node):
            application = self._application(node)
            return application.outs.get(number) or application.add(number, application.joined)
        return self.nodes.get(node, following.unknown)

    def end(self) -> list[Application]:
        """The call is over: the applications, and nothing is held on to any longer."""
        found = list(self.found.values())
        self.nodes, self.found = {}, {}
        return found


class Application:
    """One application of a custom function.

    Attributes:
        ins: what is known of each of its arguments that require grad.
        outs: the same of its results, by number.
        joined: what is known of what may be any of its arguments.
        memory: what is known of its results, by their memory: saved for backward they come as other objects.
        names: the manual axes.
        is_checked: whether its backward has run.
        must_be_checked: whether later calls need to know what it has told.
    """

    def __init__(self, node: Any, following: Following, ins: Sequence[Tag | None]) -> None:
        self.function = node._forward_cls
        self.must_be_checked = getattr(self.function, "is_followed", False)
        needed = [i for i, needs in enumerate(node.needs_input_grad) if needs]
        self.ins: dict[int, Tag] = dict(zip(needed, [tag for tag in ins if tag is not None], strict=True))
        self.joined = following.looked
        for tag in self.ins.values():
            self.joined = following.join(self.joined, tag)
        self.outs: dict[int, Tag] = {}
        self.memory: dict[int, Tag] = {}
        self.names, self.is_checked = following.names, False
        self.followed = partial(following.of_backward, self.names, following.owner, self.memory)
        self.mapping: Any = following.mapping
        reference = weakref.ref(node)
        node.apply = lambda *grads: self.backward(reference(), grads)

    def add(self, number: int, tag: Tag, memory: int | None = None) -> Tag:
        self.outs[number] = tag
        if memory is not None:
            self.memory[memory] = tag
        return tag

    def backward(self, node: Any, grads: Sequence[Any]) -> Any:
        """Run it with its types followed.

        Raises:
            ShardingTypeError: on every rank, a gradient that is not of the type dual to its argument's.
        """
        following = self.followed()
        with ExitStack() as stack:
            stack.enter_context(torch._C._EnableTorchFunction())
            stack.enter_context(_entered(self.mapping, following))
            given = [following.gradient_of(g, self.outs.get(i)) for i, g in enumerate(grads)]
            with following:
                found = type(node).apply(node, *given)
            checked = list(found) if isinstance(found, tuple) else [found]
            for i, tag in self.ins.items():
                if i < len(checked) and isinstance(checked[i], Tensor):
                    checked[i] = self._checked(following, node, i, tag, checked[i])
        self.is_checked = True
        return tuple(checked)

    def _checked(self, following: Any, node: Any, i: int, tag: Tag, gradient: Tensor) -> Tensor:
        """The gradient of an argument; as a share where a `custom_vjp` gives the whole one on every rank."""
        given, found, call = tag.type, following.of(gradient).type, getattr(node, "call", None)
        shared = () if call is None or call.site is None else call.site.whole.get(i - 1, ())
        if call is not None and call.site is not None and not shared:
            known = given.varying | given.pending | found.varying | found.pending
            shared = tuple(a for a in self.mapping.names if a in self.names and a not in known)
            if shared:
                call.site.whole[i - 1] = shared
                gradient = call.as_share(gradient, shared)
        for axis in sorted(self.names - set(shared)):
            if axis in given.pending:
                wrong = axis in found.varying | found.pending and not following.met_unknown
                needed, advice = "is the same on every rank, as that of a pending value is", f"return psum(gradient, {axis!r})"
            elif axis in given.varying:
                wrong = axis in found.pending
                needed, advice = "is this rank's own, and no share of a sum", f"return psum(gradient, {axis!r}), as the gradient of psum is"
            else:
                wrong = axis not in found.varying | found.pending and not gradient.is_meta and bool(gradient.any())
                needed = "is this rank's share of a sum, which is taken later, once for all uses"
                advice = f"return the share without a psum of its own, or of a whole gradient pcast(gradient, {axis!r}, to='unreduced')"
            if wrong:
                raise ShardingTypeError(
                    f"{self._name(call)}: the gradient of argument {self._argument(call, i)} {_said(found, axis)}, and the argument "
                    f"{_said(given, axis)}: its gradient must be one that {needed}; {advice}"
                )
        return gradient

    def _argument(self, call: Any, i: int) -> str:
        return _argument(self.function, i) if call is None else call.argument_name(i - 1)

    def _name(self, call: Any) -> str:
        if call is not None:
            return call.described()
        code = inspect.unwrap(self.function.backward).__code__
        return f"{code.co_filename}:{code.co_firstlineno}: backward of {self.function.__qualname__}"


def _argument(function: Any, i: int) -> str:
    """An argument of forward by its name, or its number."""
    names = list(inspect.signature(function.forward).parameters.values())
    if function.setup_context is torch.autograd.Function.setup_context:
        names = names[1:]  # without ctx
    is_named = i < len(names) and names[i].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return repr(names[i].name) if is_named else str(i)


def _said(type_: Type, axis: str) -> str:
    kind = "varies" if axis in type_.varying else "is pending" if axis in type_.pending else "is replicated"
    return f"{kind} over {axis!r}"


class _entered:
    """A context in which a mapping is the current one, and types are followed by this."""

    def __init__(self, mapping: Mapping, following: Any) -> None:
        self.mapping, self.following, self.entered = mapping, following, mapping.entered()

    def __enter__(self) -> None:
        self.entered.__enter__()
        self.before, self.mapping.checker = self.mapping.checker, self.following
        self.recording, self.mapping.recording = self.mapping.recording, False

    def __exit__(self, *error: Any) -> None:
        self.mapping.checker, self.mapping.recording = self.before, self.recording
        self.entered.__exit__(*error)
