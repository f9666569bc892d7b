"""Recurrent layers: the batch is split, time and features are whole; cells also run on split weights and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.spec import P
from ....tensor.sharded_tensor import ShardedTensor
from ..decomposition_utils import splits
from ..notation import Rule, einrule
from ..registry import form, functions, handler, rule
from .window import unless_empty

SEQUENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _listed(hx: Any) -> list[Any]:
    return list(hx) if isinstance(hx, (tuple, list)) else [hx]


# -- sequences --------------------------------------------------------------------------------------------------------


def _sequence(
    func: Any, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Rule:  # fmt: skip
    states = _listed(hx)
    left = ["b [t] [i]" if batch_first else "[t] b [i]", *[f"[l{n}] b [h{n}]" for n in range(len(states))]]
    left += [" ".join(f"[w{n}_{d}]" for d in range(w.ndim)) for n, w in enumerate(params)]
    right = ["b 1 1" if batch_first else "1 b 1", *["1 b 1"] * len(states)]
    return einrule(f"{', '.join(left)} -> {', '.join(right)}", input, *states, *params, bind=unless_empty(func))


def _with_dropout(
    func: Any, input: Tensor, hx: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Callable[..., Any] | None:  # fmt: skip
    """One layer after the other, so that what is dropped between them is the same on every mesh."""
    return partial(_layers, func) if dropout and train and num_layers > 1 else None


def _layers(
    func: Any, input: Any, hx: Any, params: Sequence[Any], has_biases: bool, num_layers: int, dropout: float, train: bool, *rest: bool
) -> tuple[Any, ...]:
    directions, count, ends = 2 if rest[0] else 1, len(params) // num_layers, []
    for layer in range(num_layers):
        states = [state.narrow(0, layer * directions, directions) for state in _listed(hx)]
        start = states if isinstance(hx, (tuple, list)) else states[0]
        mine = params[layer * count : (layer + 1) * count]
        input, *end = func(input, start, mine, has_biases, 1, 0.0, train, *rest)
        ends.append(end)
        if layer < num_layers - 1:
            input = F.dropout(input, dropout, True)
    return input, *[torch.cat(parts) for parts in zip(*ends, strict=True)]


# -- states that the modules make -------------------------------------------------------------------------------------


def _on_mesh(func: Any, input: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
    """Without a state the modules begin with plain zeros, which are the same on every rank; any other plain state is left to the
    error that plain tensors meet. Packed sequences are refused: their rows are those of many sequences at once."""
    if func in _PACKABLE and not (len(args) > 1 and isinstance(args[1], bool)) and "has_biases" not in kwargs:
        raise NotImplementedError(_PACKED.format(func.__name__))
    states = _listed(hx)
    plain = [not isinstance(x, ShardedTensor) for x in states]
    if not isinstance(input, ShardedTensor) or not all(plain) or any(x.requires_grad or bool(x.any()) for x in states):
        return NotImplemented
    states = [ShardedTensor.from_local(x, input.mesh, P()) for x in states]
    return func(input, states if isinstance(hx, (tuple, list)) else states[0], *args, **kwargs)


_PACKED = (
    "{}: packed sequences do not know ShardedTensors; give the padded batch, split over the batch, and mask the result, or run the layer "
    "on this rank's sequences, x.to_local()"
)


@handler("_pack_padded_sequence")
def _pack(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(_PACKED.format("pack_padded_sequence"))


# -- cells ------------------------------------------------------------------------------------------------------------


def _cell(
    func: Any, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Rule:
    states = _listed(hx)
    left = ["... [i]", *[f"... [h{n}]" for n in range(len(states))], "[g0] [i]", "[g1] [h0]", "[g0]", "[g1]"]
    right = ", ".join(["... 1"] * len(states))
    return einrule(f"{', '.join(left)} -> {right}", input, *states, w_ih, w_hh, b_ih, b_hh, bind=unless_empty(func))


def _cell_form(
    func: Any, input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Callable[..., Any] | None:
    """Over split weights or features: two products of matrices, and gates that are whole, a row of them for each sequence."""
    func(input.detach(), hx, w_ih, w_hh, b_ih, b_hh)
    weights = [w for w in (w_ih, w_hh, b_ih, b_hh) if w is not None]
    along = [x for x in (input, *_listed(hx)) if splits(x, [-1])]
    return _COMPOSED[func] if along or any(splits(w, range(w.ndim)) for w in weights) else None


def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> tuple[Any, Any]:
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    reset, update, new = F.linear(input, w_ih, b_ih).chunk(3, -1)
    h_reset, h_update, h_new = F.linear(hx, w_hh, b_hh).chunk(3, -1)
    new = (new + (reset + h_reset).sigmoid() * h_new).tanh()
    return (hx - new) * (update + h_update).sigmoid() + new


def _plain_cell(activation: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))


_COMPOSED: dict[Any, Callable[..., Any]] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: partial(_plain_cell, torch.tanh),
    torch.rnn_relu_cell: partial(_plain_cell, torch.relu),
}
_PACKABLE = frozenset(functions(*SEQUENCES))

for _names, _rule, _form in ((SEQUENCES, _sequence, _with_dropout), (CELLS, _cell, _cell_form)):
    for _func in functions(*_names):
        rule(also=(_func,))(partial(_rule, _func))
        form(also=(_func,))(partial(_form, _func))
        handler(also=(_func,))(partial(_on_mesh, _func))
