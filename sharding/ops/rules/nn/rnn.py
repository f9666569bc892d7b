"""Recurrent layers: the batch may be split, time is whole, and features but for those of cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ....layout.spec import P
from ....tensor.sharded_tensor import ShardedTensor
from ..decomposition_utils import is_split
from ..notation import Rule, einrule, whole_dims
from ..registry import decomposition, handler
from .window import with_a_row

SEQUENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _as_list(hx: Any) -> list[Any]:
    return list(hx) if isinstance(hx, (tuple, list)) else [hx]


# -- sequences -------------------------------------------------------------------------------------


def _sequence_rule(a: Any) -> Rule:
    states = _as_list(a.hx)
    left = ["b [t] [i]" if a.batch_first else "[t] b [i]"]
    left += [f"[l{n}] b [h{n}]" for n in range(len(states))]
    left += [whole_dims(w, f"w{n}_") for n, w in enumerate(a.params)]
    right = ["b 1 1" if a.batch_first else "1 b 1", *["1 b 1"] * len(states)]
    pattern = f"{', '.join(left)} -> {', '.join(right)}"
    return einrule(pattern, a.input, *states, *a.params, bind=with_a_row(a.func))


@decomposition(
    *SEQUENCES,
    with_func=True,
    when=lambda a: a.dropout and a.train and a.num_layers > 1,
    rule=_sequence_rule,
)
def _sequence(
    func: Any,
    input: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Run layer after layer, so that the elements dropped between are the same on every mesh."""
    directions, count, ends = 2 if bidirectional else 1, len(params) // num_layers, []
    options = has_biases, 1, 0.0, train, bidirectional, batch_first
    for layer in range(num_layers):
        states = [state.narrow(0, layer * directions, directions) for state in _as_list(hx)]
        start = states if isinstance(hx, (tuple, list)) else states[0]
        weights = params[layer * count : (layer + 1) * count]
        input, *end = func(input, start, weights, *options)
        ends.append(end)
        if layer < num_layers - 1:
            input = F.dropout(input, dropout, True)
    return input, *[torch.cat(parts) for parts in zip(*ends, strict=True)]


# -- states that the modules make ------------------------------------------------------------------


@handler(*SEQUENCES, *CELLS, with_func=True)
def _on_mesh(func: Any, input: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
    """Replicate the zeros that modules pass as state where none is given.

    Any other plain state raises the error of plain tensors. Packed sequences are refused: their
    rows mix sequences.
    """
    is_padded = "has_biases" in kwargs or (len(args) > 1 and isinstance(args[1], bool))
    if func.__name__ in SEQUENCES and not is_padded:
        raise NotImplementedError(_PACKED.format(func.__name__))
    states = _as_list(hx)
    plain = [not isinstance(x, ShardedTensor) for x in states]
    if (
        not isinstance(input, ShardedTensor)
        or not all(plain)
        or any(x.requires_grad or bool(x.any()) for x in states)
    ):
        return NotImplemented
    states = [ShardedTensor.from_local(x, input.mesh, P()) for x in states]
    return func(input, states if isinstance(hx, (tuple, list)) else states[0], *args, **kwargs)


_PACKED = (
    "{}: packed sequences are not supported; pass the padded batch, split over the batch, and mask "
    "the result, or run the layer on this rank's sequences, x.to_local()"
)


@handler("_pack_padded_sequence")
def _pack(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(_PACKED.format("pack_padded_sequence"))


@handler("_pad_packed_sequence")
def _pad(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(_PACKED.format("pad_packed_sequence"))


# -- cells -----------------------------------------------------------------------------------------


def _cell_rule(a: Any) -> Rule:
    states = _as_list(a.hx)
    left = ["... [i]", *[f"... [h{n}]" for n in range(len(states))]]
    left += ["[g0] [i]", "[g1] [h0]", "[g0]", "[g1]"]
    operands = (a.input, *states, a.w_ih, a.w_hh, a.b_ih, a.b_hh)
    pattern = f"{', '.join(left)} -> {', '.join(['... 1'] * len(states))}"
    return einrule(pattern, *operands, bind=with_a_row(a.func))


def _has_split_features(a: Any) -> bool:
    weights = [w for w in (a.w_ih, a.w_hh, a.b_ih, a.b_hh) if w is not None]
    return any(is_split(x, [-1]) for x in (a.input, *_as_list(a.hx))) or any(map(is_split, weights))


@decomposition(*CELLS, with_func=True, check=True, when=_has_split_features, rule=_cell_rule)
def _cell(
    func: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None
) -> Any:
    """Over split weights or features take two products of matrices, and gates on whole rows."""
    return _COMPOSED[func.__name__](input, hx, w_ih, w_hh, b_ih, b_hh)


def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> tuple[Any, Any]:
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> Any:
    reset, update, new = F.linear(input, w_ih, b_ih).chunk(3, -1)
    h_reset, h_update, h_new = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    new = (new + (reset + h_reset).sigmoid() * h_new).tanh()
    return (hx - new) * (update + h_update).sigmoid() + new


def _plain_cell(
    activation: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any
) -> Any:
    return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))


_COMPOSED: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "rnn_tanh_cell": partial(_plain_cell, torch.tanh),
    "rnn_relu_cell": partial(_plain_cell, torch.relu),
}
