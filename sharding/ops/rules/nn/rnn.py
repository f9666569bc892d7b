"""Recurrent layers: the batch may be split, time and features are whole; cells also run on split
weights and states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ....layout.spec import P
from ....tensor.sharded_tensor import ShardedTensor
from ..decomposition_utils import is_split
from ..notation import Rule, dim_names, einrule
from ..registry import decomposition, functions, handler
from .window import with_a_row

SEQUENCES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


def _listed(hx: Any) -> list[Any]:
    return list(hx) if isinstance(hx, (tuple, list)) else [hx]


# -- sequences -------------------------------------------------------------------------------------


def _sequence_rule(func: Any, a: Any) -> Rule:
    states = _listed(a.hx)
    left = [
        "b [t] [i]" if a.batch_first else "[t] b [i]",
        *[f"[l{n}] b [h{n}]" for n in range(len(states))],
    ]
    left += [dim_names(w.ndim, range(w.ndim), f"w{n}_") for n, w in enumerate(a.params)]
    right = ["b 1 1" if a.batch_first else "1 b 1", *["1 b 1"] * len(states)]
    return einrule(
        f"{', '.join(left)} -> {', '.join(right)}",
        a.input,
        *states,
        *a.params,
        bind=with_a_row(func),
    )


def _register_sequence(func: Any) -> None:
    @decomposition(
        also=(func,),
        when=lambda a: a.dropout and a.train and a.num_layers > 1,
        rule=partial(_sequence_rule, func),
    )
    def run(
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
        """Run one layer after the other, so that the elements dropped between them are the same on
        every mesh.
        """
        directions, count, ends = 2 if bidirectional else 1, len(params) // num_layers, []
        for layer in range(num_layers):
            states = [state.narrow(0, layer * directions, directions) for state in _listed(hx)]
            start = states if isinstance(hx, (tuple, list)) else states[0]
            mine = params[layer * count : (layer + 1) * count]
            input, *end = func(
                input, start, mine, has_biases, 1, 0.0, train, bidirectional, batch_first
            )
            ends.append(end)
            if layer < num_layers - 1:
                input = F.dropout(input, dropout, True)
        return input, *[torch.cat(parts) for parts in zip(*ends, strict=True)]


# -- states that the modules make ------------------------------------------------------------------


def _on_mesh(func: Any, input: Any, hx: Any, *args: Any, **kwargs: Any) -> Any:
    """Replicate the zeros that modules pass as state where none is given.

    Any other plain state raises the error of plain tensors. Packed sequences are refused: their
    rows mix sequences.
    """
    if (
        func in _PACKABLE
        and not (len(args) > 1 and isinstance(args[1], bool))
        and "has_biases" not in kwargs
    ):
        raise NotImplementedError(_PACKED.format(func.__name__))
    states = _listed(hx)
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


def _cell_rule(func: Any, a: Any) -> Rule:
    states = _listed(a.hx)
    left = [
        "... [i]",
        *[f"... [h{n}]" for n in range(len(states))],
        "[g0] [i]",
        "[g1] [h0]",
        "[g0]",
        "[g1]",
    ]
    right = ", ".join(["... 1"] * len(states))
    operands = (a.input, *states, a.w_ih, a.w_hh, a.b_ih, a.b_hh)
    return einrule(f"{', '.join(left)} -> {right}", *operands, bind=with_a_row(func))


def _has_split_features(a: Any) -> bool:
    weights = [w for w in (a.w_ih, a.w_hh, a.b_ih, a.b_hh) if w is not None]
    return any(is_split(x, [-1]) for x in (a.input, *_listed(a.hx))) or any(map(is_split, weights))


def _register_cell(func: Any) -> None:
    """Register a cell. Over split weights or features it is two products of matrices, and gates on
    whole rows.
    """
    composed = _COMPOSED[func.__name__]

    @decomposition(
        also=(func,), check=func, when=_has_split_features, rule=partial(_cell_rule, func)
    )
    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return composed(input, hx, w_ih, w_hh, b_ih, b_hh)


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
_PACKABLE = frozenset(functions(*SEQUENCES))

for _names, _register in ((SEQUENCES, _register_sequence), (CELLS, _register_cell)):
    for _func in functions(*_names):
        _register(_func)
        handler(also=(_func,))(partial(_on_mesh, _func))
