"""Operators of aten, called as `torch.ops.aten.add.Tensor(x, y)`.

Each runs as the public function of its name.

So the rules of public functions apply to them. The function and the way its arguments are passed
are derived from names and the operator's schema; `_TRANSLATED` has the few operators without a
public function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from .registry import DECOMPOSITIONS, HANDLERS, RULES, functions

# Operators without a public function of the same name -> the public function that is made of them.
_PUBLIC_NAMES = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_unsafe_view": "reshape",
    "_local_scalar_dense": "item",
}
_PUBLIC_NAMES |= {f"adaptive_max_pool{n}d": f"adaptive_max_pool{n}d_with_indices" for n in (2, 3)}
_PREFIXES = {"linalg_": torch.linalg, "special_": torch.special, "fft_": torch.fft}
_REDUCTIONS = ("none", "mean", "sum")  # as aten numbers them


def public_names(name: str) -> tuple[str, ...]:
    """Return the names under which programs call the aten operator with this name."""
    name = _PUBLIC_NAMES.get(name, name)
    return (f"__i{name[:-1]}__", name) if name.endswith("_") else (f"__{name}__", name)


def public_call(op: Any) -> Callable[..., Any] | None:
    """Return a function of the operator's own arguments that calls the public one.

    None for other than aten operators.

    Raises:
        NotImplementedError: no public function does what the operator does.
    """
    if not isinstance(op, OpOverload | OpOverloadPacket) or op in RULES or op in DECOMPOSITIONS:
        return None
    return _call_of(op) if str(op).startswith("aten.") else None


@cache
def _call_of(op: OpOverload | OpOverloadPacket) -> Callable[..., Any]:
    name = (op.overloadpacket if isinstance(op, OpOverload) else op).__name__
    if (
        name not in _TRANSLATED
        and _public(name) is None
        and _public(name.removesuffix("_")) is None
    ):
        raise _no_public_function(op)
    return partial(_run_overload, op) if isinstance(op, OpOverload) else partial(_run_packet, op)


def _no_public_function(op: OpOverload | OpOverloadPacket) -> NotImplementedError:
    return NotImplementedError(
        f"torch.ops.{op} has no public function of torch that does the same, and ShardedTensors "
        "support only operators with one: call a public function, or call the operator on this "
        "rank's part, x.to_local(), and wrap the result with ShardedTensor.from_local"
    )


def _run_packet(packet: OpOverloadPacket, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        overload = torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs)
    return _run_overload(getattr(packet, overload), *args, **kwargs)


def _run_overload(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    name, several = op.overloadpacket.__name__, len(op._schema.returns)
    named = (
        dict(zip([argument.name for argument in op._schema.arguments], args, strict=False)) | kwargs
    )
    if name in _TRANSLATED:
        return _TRANSLATED[name](**named)
    public = _public(name, any(argument.name == "reduction" for argument in op._schema.arguments))
    if public is None:  # `silu_`: values are computed elsewhere and written
        result = _run_public(op, _public(name.removesuffix("_")), named)
        if result.shape != named["self"].shape:
            raise _no_public_function(op)
        return named["self"].copy_(result)
    result = _run_public(op, public, named)
    if several > 1 and not (isinstance(result, tuple) and len(result) == several):
        raise _no_public_function(op)
    return result


@cache
def _public(name: str, in_python: bool = False) -> Callable[..., Any] | None:
    """Return the public function of this name.

    One in the operator table, or else one of torch's own in C++ that writes no operand.

    With `in_python`, one that is written in Python comes first: in torch, reductions are numbers in
    C++ and words in Python.
    """
    candidates = list(_candidates(name))
    known = [
        func for func in candidates if func in HANDLERS or func in DECOMPOSITIONS or func in RULES
    ]
    known.sort(key=lambda func: in_python and not inspect.isfunction(func))
    others = [
        func for func in candidates if not inspect.isfunction(func) and not name.endswith("_")
    ]
    return next(iter((*known, *others)), None)


def _candidates(name: str) -> Iterator[Callable[..., Any]]:
    yield from functions(*reversed(public_names(name)))
    owners = [
        (owner, name.removeprefix(prefix))
        for prefix, owner in _PREFIXES.items()
        if name.startswith(prefix)
    ]
    for owner, own_name in (*owners, (torch._C._nn, name)):  # type: ignore[attr-defined]
        func = getattr(owner, own_name, None)
        if func is not None:
            yield func


def _run_public(op: OpOverload, func: Any, named: dict[str, Any]) -> Any:
    """Call the public function with an operator's arguments.

    By name where it is written in Python, since orders differ there.

    Raises:
        NotImplementedError: it has no parameter for an argument.
    """
    if not inspect.isfunction(func):
        return func(*_positional(op, named), **_by_name(op, named))
    signature = inspect.signature(func)
    first = next(iter(signature.parameters.values()))
    if first.kind is first.VAR_POSITIONAL:
        raise _no_public_function(op)
    arguments = {first.name if name == "self" else name: value for name, value in named.items()}
    if type(arguments.get("reduction")) is int:
        arguments["reduction"] = _REDUCTIONS[arguments["reduction"]]
    try:
        signature.bind(**arguments)
    except TypeError:
        raise _no_public_function(op) from None
    return func(**arguments)


def _positional(op: OpOverload, named: dict[str, Any]) -> Sequence[Any]:
    """Return the arguments up to the first that is left out or keyword-only."""
    out = []
    for argument in op._schema.arguments:
        if argument.kwarg_only or argument.name not in named:
            break
        out.append(named[argument.name])
    return out


def _by_name(op: OpOverload, named: dict[str, Any]) -> dict[str, Any]:
    rest = list(named)[len(_positional(op, named)) :]
    return {
        "input" if name == "self" else name: named[name] for name in rest if named[name] is not None
    }


# -- operators without a public function -----------------------------------------------------------


def _softmax(of: Callable[..., Any], self: Any, dim: int, half_to_float: bool = False) -> Any:
    return of(self, dim, dtype=torch.float32 if half_to_float else None)


def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(
        indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse
    )


def _to_copy(self: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
    where = {} if device is None else {"device": device}
    return self.to(dtype=self.dtype if dtype is None else dtype, copy=True, **where)


def _safe_softmax(self: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    nothing = (self == float("-inf")).all(dim, keepdim=True)
    return torch.softmax(self, dim, dtype=dtype).masked_fill(nothing, 0)


def _layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Any, Any, Any]:
    dims = tuple(range(-len(normalized_shape), 0))
    var, mean = torch.var_mean(input, dims, correction=0, keepdim=True)
    return F.layer_norm(input, normalized_shape, weight, bias, eps), mean, (var + eps).rsqrt()


def _layer_norm_gradient(
    grad_out: Any,
    input: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> tuple[Any, ...]:
    dims = tuple(range(-len(normalized_shape), 0))
    rows = tuple(range(input.ndim - len(dims)))
    normal = (input - mean) * rstd
    scaled = grad_out if weight is None else grad_out * weight
    of_input = (
        scaled
        - scaled.mean(dims, keepdim=True)
        - normal * (scaled * normal).mean(dims, keepdim=True)
    ) * rstd
    sums = [x.sum(rows) if rows else x for x in (grad_out * normal, grad_out)]
    return tuple(
        x if is_needed else None
        for x, is_needed in zip((of_input, *sums), output_mask, strict=True)
    )


def _embedding_gradient(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    if scale_grad_by_freq:
        raise NotImplementedError(
            "the gradient of an embedding with scale_grad_by_freq=True, in a transform of "
            "torch.func"
        )
    rows, numbers = grad_output.flatten(0, indices.ndim - 1), indices.flatten()
    if padding_idx >= 0:
        rows = rows.masked_fill((numbers == padding_idx)[:, None], 0)
    sums = rows.new_zeros(num_weights, rows.shape[1]).index_add(0, numbers, rows)
    return sums.redistribute(sums.spec.with_unreduced({}))  # torch.vmap's rule writes to it


_TRANSLATED: dict[str, Callable[..., Any]] = {
    "_log_softmax": partial(_softmax, torch.log_softmax),
    "_safe_softmax": _safe_softmax,
    "_softmax": partial(_softmax, torch.softmax),
    "_softmax_backward_data": lambda grad_output, output, dim, input_dtype: (
        output * (grad_output - (grad_output * output).sum(dim, keepdim=True))
    ).to(input_dtype),
    "_log_softmax_backward_data": lambda grad_output, output, dim, input_dtype: (
        grad_output - output.exp() * grad_output.sum(dim, keepdim=True)
    ).to(input_dtype),
    "_to_copy": _to_copy,
    "alias": lambda self: self.view_as(self),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_gradient,
    "index": lambda self, indices: self[
        tuple(slice(None) if index is None else index for index in indices)
    ],
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_gradient,
    "lift_fresh": lambda self: self,
    "native_dropout_backward": lambda grad_output, mask, scale: (
        grad_output * (mask.to(grad_output.dtype) * scale)
    ),
    "select_backward": lambda grad_output, input_sizes, dim, index: torch.select_scatter(
        grad_output.new_zeros(input_sizes), grad_output, dim, index
    ),
    "slice": lambda self, dim=0, start=None, end=None, step=1: self[
        (slice(None),) * (dim % self.ndim) + (slice(start, end, step),)
    ],
    "slice_backward": lambda grad_output, input_sizes, dim, start, end, step: torch.slice_scatter(
        grad_output.new_zeros(input_sizes), grad_output, dim, start, end, step
    ),
    "split": lambda self, split_size, dim=0: self.split(split_size, dim),
}
