"""Calls of a parallelized model with plain tensors: what is whole on this rank comes back plain.

    model(ids)                     ids: a plain tensor, equal along "tp"
    logits [b, s, v]               whole on every rank: a plain tensor, for any loss with plain labels
    logits [b, s, v/tp]            split by vocabulary: a ShardedTensor, which is not gathered; plain labels next to it
                                   count as replicated along "tp", like the input

A call with a `ShardedTensor` among its arguments returns `ShardedTensor`s, as the model computed them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...ops.plain_operands import accept_plain_operands
from ...ops.torch_compile import not_compiled
from ...tensor.sharded_tensor import ShardedTensor


def return_whole_outputs_plain(module: nn.Module) -> None:
    """Make calls of a module with plain tensors return plain tensors where those are whole on every rank.

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
    """Convert the whole outputs of a call, if each tensor among its arguments is plain."""
    inputs = list(_tensors((args, kwargs)))
    if not inputs or any(isinstance(x, ShardedTensor) for x in inputs):
        return output
    for mesh in {x.mesh for x in _tensors(output) if isinstance(x, ShardedTensor)}:
        accept_plain_operands(mesh)
    return _whole_as_plain(output)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses; other objects, such as caches, are opaque."""
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


def _whole_as_plain(tree: Any) -> Any:
    """Return the tree with whole `ShardedTensor`s as plain tensors; a container without any is returned itself."""
    if isinstance(tree, ShardedTensor):
        return tree.to_local() if _is_whole_here(tree) else tree
    if isinstance(tree, (list, tuple)):
        items = [_whole_as_plain(item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)  # type: ignore[attr-defined]
    if isinstance(tree, Mapping):
        changed = {key: new for key, old in tree.items() if (new := _whole_as_plain(old)) is not old}
        return _with_items(tree, changed) if changed else tree
    if _is_dataclass_instance(tree):
        fields = {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
        changed = {key: new for key, old in fields.items() if (new := _whole_as_plain(old)) is not old}
        return dataclasses.replace(tree, **changed) if changed else tree
    return tree


def _with_items(mapping: Mapping[str, Any], changed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a mapping of the same class with some values replaced; those of transformers are both mapping and dataclass."""
    items = {**mapping, **changed}
    return type(mapping)(**items) if _is_dataclass_instance(mapping) else type(mapping)(items)  # type: ignore[call-arg]


def _is_dataclass_instance(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _is_whole_here(x: ShardedTensor) -> bool:
    return x._layout.is_fully_replicated and x.mesh.coordinate is not None
