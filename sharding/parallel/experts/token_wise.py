"""`token_wise`: modules that flatten [b, s] to tokens, on sequences that are split.

    x [4, 8, d], the batch over dp, sequences over cp        rows 0 1 | 2 3, positions 0-3 | 4-7
    flattened [32, d]                                        tokens of rank (dp 0, cp 1): 4-7, 12-15

A rank's tokens are several intervals of all tokens, which no layout describes: flattening gathers
the sequences, and each rank of cp computes the tokens of all. With the parts of sequences as rows
of their own, the first parts before the second ones, they are one interval.

    x [8, 4, d], dim 0 over cp and dp                        tokens of rank (dp 0, cp 1): 16-23
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ...tensor.sharded_tensor import ShardedTensor


def token_wise(module: nn.Module) -> nn.Module:
    """token_wise(module) -> the module, which computes parts of sequences as rows of their own.

    For modules that compute each token by itself and flatten [b, s], such as mixtures of experts of
    transformers. Where sequences are split over ranks, each computes its own tokens.

    Args:
        module: its first argument is [b, s, ...], and so are its results, or some of them. It is
            changed in place, by hooks.

    Returns:
        The module. Where dim 1 of the argument is split evenly, inside of it the argument is
        [n b, s / n, ...] for n parts, and its results of that shape are [b, s, ...] again. Other
        results, such as scores of flattened tokens, are in the order of tokens inside.

    Communication: none; if the batch has a single row, which is split as well, that row.

    Example:
        >>> for block in model.model.layers:
        ...     token_wise(block.mlp)
        >>> with context_parallel("cp", method="ring"):
        ...     loss = model(ids)
    """
    hooks = _Hooks()
    module.register_forward_pre_hook(hooks.on_inputs, with_kwargs=True)
    module.register_forward_hook(hooks.on_outputs)
    return module


class _Hooks:
    """Hooks of a module; a call of it ends, or fails, before the next one begins."""

    def __init__(self) -> None:
        self._call: tuple[int, tuple[int, ...]] | None = None

    def on_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make rows of the parts of the first argument's sequences."""
        self._call = None
        name = None if args else next(iter(kwargs), None)
        x = args[0] if name is None and args else kwargs.get(name)
        parts = _parts(x)
        if parts == 1:
            return args, kwargs
        inside = x.unflatten(1, (parts, -1)).transpose(0, 1).flatten(0, 1)
        self._call = parts, tuple(inside.shape[:2])
        if name is None:
            return (inside, *args[1:]), kwargs
        return args, {**kwargs, name: inside}

    def on_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Join the parts of results that have rows of parts."""
        if self._call is None:
            return None
        (parts, shape), self._call = self._call, None

        def join(x: Any) -> Any:
            if not isinstance(x, ShardedTensor) or tuple(x.shape[:2]) != shape:
                return x
            return x.unflatten(0, (parts, -1)).transpose(0, 1).flatten(1, 2)

        return pytree.tree_map(join, output)


def _parts(x: Any) -> int:
    """Return into how many equal parts dim 1 is split; 1 for other arguments."""
    if not isinstance(x, ShardedTensor) or x.ndim < 2:
        return 1
    axes = x.spec.dims[1]
    parts = x.mesh.size(axes) if axes else 1
    is_even = x.shape[1] % parts == 0 and all(cut.sizes is None for cut in x.spec.cuts[1])
    return parts if is_even else 1
