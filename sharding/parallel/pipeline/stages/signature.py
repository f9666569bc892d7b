"""What decides which units a forward calls and what they return, as something to look up by."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ....ops.block_masks import is_block_mask
from ....trees import flatten, is_dataclass_instance


@dataclass(frozen=True)
class ModuleFlags:
    """The modes of modules, and whether their parameters require gradients, module by module."""

    training: tuple[bool, ...]
    requires_grad: tuple[bool, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # a signature is looked up several times for each action of a step
        return hash((self.training, self.requires_grad))


def flags_of(modules: Sequence[nn.Module]) -> ModuleFlags:
    """Return the flags of a model, given all of its modules."""
    requires_grad: list[bool] = []
    for module in modules:
        for x in module._parameters.values():
            requires_grad.append(x is not None and x.requires_grad)
    return ModuleFlags(tuple([module.training for module in modules]), tuple(requires_grad))


def set_flags(flags: ModuleFlags, model: nn.Module) -> None:
    """Give a copy of the model these flags."""
    requires_grad = iter(flags.requires_grad)
    for module, training in zip(model.modules(), flags.training, strict=True):
        module.training = training
        for x in module._parameters.values():
            required = next(requires_grad)
            if x is not None:
                x.requires_grad_(required)


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any], flags: ModuleFlags) -> Hashable:
    """Return the signature of a call of a model with these flags.

    It has the shapes, dtypes and other values of the inputs, the flags of the model's modules, grad
    mode and autocast.

    Raises:
        TypeError: an input is neither a tensor nor hashable.
    """
    enabled = tuple([torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")])
    dtypes = tuple([torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")])
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), enabled, dtypes
    return _description((tuple(args), dict(kwargs))), modes, flags


def _description(tree: Any) -> Hashable:
    leaves, structure = flatten(tree)
    return structure, tuple([_leaf_description(leaf) for leaf in leaves])


def _leaf_description(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    if is_dataclass_instance(leaf):
        return type(leaf), _description(dict(vars(leaf)))
    if is_block_mask(leaf):  # whose function is another one in each step
        fields = {name: value for name, value in vars(leaf).items() if name != "mask_mod"}
        return type(leaf), _description(fields)
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            f"inputs of a pipeline's model are tensors, hashable values, and lists, tuples, dicts "
            f"and dataclasses of these; got a {type(leaf).__qualname__}"
        ) from None
    return type(leaf), leaf
