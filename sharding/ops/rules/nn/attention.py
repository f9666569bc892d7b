"""Attention: batch, heads and queries may be split; keys and features are whole."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.spec import P
from ....tensor.sharded_tensor import ShardedTensor
from ..decomposition_utils import with_elements
from ..notation import Rule, einrule
from ..registry import decomposition


def _attention_rule(a: Any) -> Rule:
    """Return the rule. With `is_causal` the positions of queries count, so these must be whole too.

    With `enable_gqa` query heads are groups of the key's heads.
    """
    options: dict[str, Any] = {"linear": ((2,),), "local": attention_local}
    query, key, mask = a.query, a.key, a.attn_mask
    rows = "[l]" if a.is_causal else "l"
    if not a.enable_gqa or query.shape[-3] == key.shape[-3]:
        pattern = f"... {rows} [e], ... [s] [e], ... [s] [v], ... {rows} [s] -> ... {rows} [v]"
    else:
        options["sizes"] = {"g": key.shape[-3], "r": query.shape[-3] // key.shape[-3]}
        # heads that the mask distinguishes
        masked = 0 if mask is None or mask.ndim < 3 else mask.shape[-3]
        heads = "(g r)" if masked > 1 else "1" if masked else ""
        pattern = (
            f"... (g r) {rows} [e], ... g [s] [e], ... g [s] [v], ... {heads} {rows} [s] -> ... (g "
            f"r) {rows} [v]"
        )
    return einrule(pattern, query, key, a.value, mask, **options)


def attention_local(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Call torch's function, whose result for an empty part would not be in the autograd graph."""
    shape = (*query.shape[:-1], value.shape[-1])
    if math.prod(shape):
        if query.is_meta:
            return _fused_on_meta(query, key, value, attn_mask, *args, **kwargs)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)
    query, key, value = map(with_elements, (query, key, value))
    mask = None if attn_mask is None else with_elements(attn_mask)
    out = F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
    return out[tuple(map(slice, shape))]


def _fused_on_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the result of a fused kernel; torch's on "meta" would keep scores in memory."""
    learned = attn_mask is not None and attn_mask.requires_grad
    if enable_gqa or query.ndim != 4 or query.shape[-1] != value.shape[-1] or learned:
        options: Any = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


# -- with dropout ----------------------------------------------------------------------------------


def _check_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *args: Any,
    **kwargs: Any,
) -> None:
    F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)


@decomposition(
    "scaled_dot_product_attention",
    check=_check_attention,
    when=lambda a: a.dropout_p,
    rule=_attention_rule,
)
def attention_with_dropout(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute the weights and drop some with `F.dropout`, which does not depend on the mesh.

    Operands that are all whole are those of `sm.tune`, which counts what this takes.
    """
    groups = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    key, value = _repeat_heads(key, groups), _repeat_heads(value, groups)
    mask = attn_mask
    if is_causal:
        square = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = square.tril()
        if isinstance(query, ShardedTensor):
            mask = ShardedTensor.from_local(mask, query.mesh, P())
    scores = query * (query.shape[-1] ** -0.5 if scale is None else scale) @ key.transpose(-2, -1)
    scores = _apply_mask(scores, mask)
    # A query that attends to no key has weights of zero, as in torch.
    dead = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0)
    return F.dropout(weights, dropout_p) @ value


def _repeat_heads(x: Any, count: int) -> Any:
    """Repeat each head: `... g s d -> ... (g r) s d`."""
    if count == 1:
        return x
    heads = x.unsqueeze(-3)
    return heads.expand(*heads.shape[:-3], count, *heads.shape[-2:]).flatten(-4, -3)


def _apply_mask(scores: Any, mask: Any) -> Any:
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask


# -- with its projections --------------------------------------------------------------------------


@decomposition("multi_head_attention_forward", check=F.multi_head_attention_forward)
def _multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Do as torch does, with heads as a separate dim throughout (`b h s d`), which may be split."""
    batched = query.ndim == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights = (
        (q_proj_weight, k_proj_weight, v_proj_weight)
        if use_separate_proj_weight
        else in_proj_weight.chunk(3)
    )
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    inputs = (query, key, value)
    q, k, v = [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
    k, v = _with_position(k, bias_k), _with_position(v, bias_v)
    q, k, v = _heads(q, num_heads), _heads(k, num_heads, static_k), _heads(v, num_heads, static_v)
    if add_zero_attn:
        k, v = (torch.cat([x, torch.zeros_like(x[:, :, :1])], 2) for x in (k, v))
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask_of(q, k, attn_mask, key_padding_mask)
    p = dropout_p if training else 0.0
    if need_weights:
        out, attention = _attend_with_weights(q, k, v, mask, p)
    else:
        out, attention = F.scaled_dot_product_attention(q, k, v, mask, p, hint), None
    out = F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    if attention is not None and average_attn_weights:
        attention = attention.mean(1)
    if batched:
        return out, attention
    return out.squeeze(1), None if attention is None else attention.squeeze(0)


def _attend_with_weights(q: Any, k: Any, v: Any, mask: Any, dropout_p: float) -> tuple[Any, Any]:
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)
    attention = F.softmax(_apply_mask(scores, mask), -1)
    attention = F.dropout(attention, dropout_p) if dropout_p else attention
    return attention @ v, attention


def _with_position(x: Any, learned: Any) -> Any:
    """Append a position, the same for the whole batch: `s b e -> (s+1) b e`."""
    return x if learned is None else torch.cat([x, learned.expand(1, x.shape[1], -1)])


def _heads(x: Any, num_heads: int, static: Any = None) -> Any:
    """Return `s b (h d) -> b h s d`, or `(b h) s d -> b h s d` of `static`, given in its place."""
    if static is not None:
        return static.unflatten(0, (-1, num_heads))
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def _mask_of(q: Any, k: Any, attn_mask: Any, key_padding_mask: Any) -> Any:
    """Return the bias of the scores, broadcast to `b h l s`; all attend to appended positions."""
    masks = []
    if attn_mask is not None:
        masks.append(
            attn_mask.unflatten(0, (-1, q.shape[1]))
            if attn_mask.shape[0] > 1 and attn_mask.ndim == 3
            else attn_mask
        )
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None])
    added = [F.pad(_additive(mask, q.dtype), (0, k.shape[2] - mask.shape[-1])) for mask in masks]
    return sum(added[1:], start=added[0]) if added else None


def _additive(mask: Any, dtype: torch.dtype) -> Any:
    return (
        torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
        if mask.dtype is torch.bool
        else mask
    )
