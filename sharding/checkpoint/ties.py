"""Tied weights: the names in a module's state that stand for one tensor.

{"embed.weight": w, "head.weight": w}        ties: {"head.weight": "embed.weight"}
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from .tree import Path, children, is_stateful, name_of


def ties(tree: Any, of_leaves: bool = False) -> dict[str, str]:
    """Return, for each name of a module's tensor that has an earlier name too, that earlier name.

    Parameters and buffers of modules are compared by identity, so ranks without elements of a
    tensor get the same result; so are, with `of_leaves`, tensors that are leaves of the tree, as
    `state_dict` has the tied weights of a module.
    """
    first: dict[int, str] = {}
    earlier_names: dict[str, str] = {}
    for name, tensor in _tensors(tree, (), of_leaves):
        first_name = first.setdefault(id(tensor), name)
        if first_name != name:
            earlier_names[name] = first_name
    return earlier_names


def _tensors(tree: Any, path: Path, of_leaves: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of the modules in a tree, by their names in its state, in
    that order; perhaps leaves, too.
    """
    if isinstance(tree, nn.Module):
        saved = tree.state_dict(keep_vars=True)
        named = chain(
            tree.named_parameters(remove_duplicate=False),
            tree.named_buffers(remove_duplicate=False),
        )
        tensors = dict(named)
        yield from ((name_of((*path, name)), tensors[name]) for name in saved if name in tensors)
    elif isinstance(tree, Tensor):
        if of_leaves:
            yield name_of(path), tree
    elif not is_stateful(tree):
        for key, child in children(tree) or ():
            yield from _tensors(child, (*path, key), of_leaves)
