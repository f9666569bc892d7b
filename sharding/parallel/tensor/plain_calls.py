"""Calls of a parallelized model with plain tensors: what is whole on this rank comes back plain.

    model(ids)                     ids: a plain tensor, equal along "tp"
    logits [b, s, v]               whole on every rank: a plain tensor, for any loss with plain
                                   labels
    logits [b, s, v/tp]            split by vocabulary: a ShardedTensor, which is not gathered;
                                   plain labels next to it count as replicated along "tp", like
                                   the input

A call with a `ShardedTensor` among its arguments returns `ShardedTensor`s, as the model computed
them.

    model.generate(ids)          ids: a plain tensor
    logits [b, 1, v/tp]          gathered in each call, so that the tokens chosen from them, and the
                                 ids of the next call, are plain
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ...layout.spec import P
from ...ops.plain_operands import accept_plain_operands
from ...ops.torch_compile import not_compiled
from ...tensor.sharded_tensor import ShardedTensor


def return_whole_outputs_plain(module: nn.Module) -> None:
    """Make calls of a module with plain tensors return plain tensors where they are whole.

    The hook runs after those that are registered now; a second call moves it behind later ones.
    """
    for key, hook in module._forward_hooks.items():
        if hook is _return_whole_plain:
            module._forward_hooks.move_to_end(key)  # type: ignore[attr-defined]
            return
    module.register_forward_hook(_return_whole_plain, with_kwargs=True)


@not_compiled("parallelize returns plain tensors here, outside of any graph")
def _return_whole_plain(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    return whole_outputs_plain((args, kwargs), output)


def whole_outputs_plain(inputs: Any, output: Any) -> Any:
    """Convert the whole outputs of a call, if each tensor among its inputs is plain."""
    if not _are_plain(inputs):
        return output
    for mesh in {x.mesh for x in _tensors(output) if isinstance(x, ShardedTensor)}:
        accept_plain_operands(mesh)
    return _with_tensors(output, lambda x: x.to_local() if _is_whole_on_rank(x) else x)


_GENERATE = ("generate", "generate_batch")  # methods of Hugging Face models


def generate_plain(module: nn.Module) -> None:
    """Make generation from plain ids return plain ids, whatever is split in the model's outputs.

    The methods of the class are called as they are; a method that the program has replaced in the
    module is left alone.
    """
    for name in _GENERATE:
        if callable(getattr(type(module), name, None)) and name not in vars(module):
            setattr(module, name, MethodType(_GENERATORS[name], module))


def _generator(name: str) -> Any:
    def generate(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _gathered_outputs(module):
            return getattr(type(module), name)(module, *args, **kwargs)

    generate.__name__ = generate.__qualname__ = name
    return generate


_GENERATORS = {name: _generator(name) for name in _GENERATE}


@contextmanager
def _gathered_outputs(module: nn.Module) -> Iterator[None]:
    """Gather the outputs of calls of the module with plain tensors."""
    hook = module.register_forward_hook(_gather_plain, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _gather_plain(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    if not _are_plain((args, kwargs)):
        return output
    return _with_tensors(output, lambda x: x.redistribute(P()).to_local())


def _are_plain(tree: Any) -> bool:
    """Return whether there are tensors among these arguments, and all of them are plain."""
    inputs = list(_tensors(tree))
    return bool(inputs) and not any(isinstance(x, ShardedTensor) for x in inputs)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses.

    Other objects, such as caches, are opaque.
    """
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
    elif _is_dataclass_instance(tree):
        for field in dataclasses.fields(tree):
            yield from _tensors(getattr(tree, field.name, None))


def _with_tensors(tree: Any, convert: Callable[[ShardedTensor], Tensor]) -> Any:
    """Return the tree with each `ShardedTensor` converted.

    A container in which nothing changes is returned itself.
    """
    if isinstance(tree, ShardedTensor):
        return convert(tree)
    if isinstance(tree, (list, tuple)):
        items = [_with_tensors(item, convert) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if hasattr(tree, "_make"):
            return tree._make(items)  # type: ignore[attr-defined]
        return type(tree)(items)
    if isinstance(tree, Mapping):
        values: Mapping[str, Any] = tree
    elif _is_dataclass_instance(tree):
        values = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    else:
        return tree
    converted = {key: _with_tensors(old, convert) for key, old in values.items()}
    changed = {key: new for key, new in converted.items() if new is not values[key]}
    return _with_values(tree, changed) if changed else tree


def _with_values(container: Any, changed: Mapping[str, Any]) -> Any:
    """Return a mapping or dataclass with some values replaced; outputs of transformers are both."""
    if not isinstance(container, Mapping):
        return dataclasses.replace(container, **changed)
    values = {**container, **changed}
    if _is_dataclass_instance(container):
        return type(container)(**values)
    return type(container)(values)  # type: ignore[call-arg]


def _is_dataclass_instance(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _is_whole_on_rank(x: ShardedTensor) -> bool:
    return x._layout.is_fully_replicated and x.mesh.coordinate is not None
