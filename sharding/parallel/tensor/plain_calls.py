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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from ...layout.spec import P
from ...ops.plain_operands import accept_plain_operands
from ...ops.torch_compile import not_compiled
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import map_nested, nested_tensors


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
    for mesh in {x.mesh for x in nested_tensors(output) if isinstance(x, ShardedTensor)}:
        accept_plain_operands(mesh)
    return _map_sharded(output, lambda x: x.to_local() if _is_whole_on_rank(x) else x)


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
    return _map_sharded(output, lambda x: x.redistribute(P()).to_local())


def _are_plain(tree: Any) -> bool:
    """Return whether there are tensors among these arguments, and all of them are plain."""
    inputs = list(nested_tensors(tree))
    return bool(inputs) and not any(isinstance(x, ShardedTensor) for x in inputs)


def _map_sharded(output: Any, convert: Callable[[ShardedTensor], Tensor]) -> Any:
    """Return the output with each `ShardedTensor` converted."""
    return map_nested(lambda x: convert(x) if isinstance(x, ShardedTensor) else x, output)


def _is_whole_on_rank(x: ShardedTensor) -> bool:
    return x._layout.is_fully_replicated and x.mesh.coordinate is not None
