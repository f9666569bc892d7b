"""Flops of the operators of a graph: of matrix products, convolutions and attention.

torch's registry of formulas (`torch.utils.flop_counter`) has products and convolutions. Those of
attention and of grouped products are here: torch 2.13 has none for the operators of the CPU, counts
causal attention as if it were whole, and takes as many heads of keys as of queries.

    attention             2 n (d + e) for n pairs of a query and a key that may meet, in each head
    its backward          2 n (3 d + 2 e): the scores again, and four gradients
    causal                n counts query i with the first i + 1 keys only
    grouped product       2 m k n of all rows together

where queries and keys have d elements, and values e.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

_ATTENTION = "_scaled_dot_product_"
_STACKED = 3  # dims of a stack of matrices
_GROUPED = ("_grouped_mm", "_scaled_grouped_mm")
# Parts of the names of operators that compute as much as products do.
_COSTLY = (
    "mm",
    "matmul",
    "conv",
    "attention",
    "linalg_",
    "cholesky",
    "fft",
    "lstm",
    "gru",
    "rnn_",
    "cdist",
    "triangular_solve",
    "grid_sampler",
)


def flops_of(node: fx.Node) -> int | None:
    """Return the flops of an operator, None if they are unknown.

    Operators that are bound by memory have 0; one that is not and has no formula has None.
    """
    packet: Any = node.target.overloadpacket  # type: ignore[union-attr]
    name = packet.__name__
    if name.startswith(_ATTENTION):
        return _attention(node)
    if name in _GROUPED:
        return _grouped_product(node)
    count = flop_registry.get(packet)
    if count is None:
        return None if any(part in name for part in _COSTLY) else 0
    args, kwargs = map_arg((node.args, node.kwargs), _meta_of)
    items = [user for user in node.users if getattr(user.target, "__name__", "") == "getitem"]
    return count(*args, **kwargs, out_val=[_meta_of(x) for x in items] if items else _meta_of(node))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return the operands of an operator by their names in its schema."""
    parameters = node.target._schema.arguments  # type: ignore[union-attr]
    values = {x.name: x.default_value for x in parameters if x.has_default_value()}
    values |= dict(zip((x.name for x in parameters), node.args, strict=False))
    return values | node.kwargs


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"][0])


def _attention(node: fx.Node) -> int:
    operands = _arguments(node)
    return attention_flops(
        *(_shape(operands[name]) for name in ("query", "key", "value")),
        is_causal=operands["is_causal"],
        is_backward=str(node.target).partition(".")[2].partition(".")[0].endswith("_backward"),
    )


def attention_flops(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *,
    is_causal: bool,
    is_backward: bool = False,
) -> int:
    """Return the flops of attention between operands of these shapes, or of its backward."""
    *batch, queries, d = query
    keys, e = key[-2], value[-1]
    pairs = queries * keys
    if is_causal:
        met = min(queries, keys)  # query i meets keys 0 to i, as far as there are keys
        pairs = met * (met + 1) // 2 + (queries - met) * keys
    return 2 * math.prod(batch) * pairs * (3 * d + 2 * e if is_backward else d + e)


def _grouped_product(node: fx.Node) -> int:
    """Rows of one operand may be in groups, those of both, or the dim that is summed over."""
    operands = _arguments(node)
    x, y = _shape(operands["self"]), _shape(operands["mat2"])
    groups = x[0] if len(x) == len(y) == _STACKED else 1  # else what is in groups is one dim
    return 2 * groups * x[-2] * x[-1] * y[-1]


def _meta_of(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return None if value is None else torch.empty(value[0], dtype=value[2], device="meta")
