"""Layers: normalisation, embedding, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .notation import Rule, einrule
from .registry import handler, rule

# -- normalisation ----------------------------------------------------------------------------------------------------


def _normalised(normalized_shape: Sequence[int], *operands: Tensor | None) -> Rule:
    names = " ".join(f"[n{i}]" for i in range(len(normalized_shape)))
    rest = [names] * (len(operands) - 1)
    return einrule(f"{', '.join(['... ' + names, *rest])} -> ... {names}", *operands)


@rule("layer_norm")
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Rule:
    return _normalised(normalized_shape, input, weight, bias)


@rule("rms_norm")
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Rule:
    return _normalised(normalized_shape, input, weight)


@handler("normalize")
def _normalize(input: Any, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Any:
    if out is not None:
        raise NotImplementedError("normalize: out= is not supported on ShardedTensors; use the result, or copy_ it")
    return input / torch.linalg.vector_norm(input, p, dim, keepdim=True).clamp_min(eps)


@handler("batch_norm", "instance_norm")
def _running_statistics(
    input: Any, running_mean: Any = None, running_var: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Gathered; but statistics that would be written must not be a gathered copy."""
    written = [x for x in (running_mean, running_var) if x is not None]
    if not all(x.is_fully_replicated for x in written):
        raise ValueError(
            f"running statistics laid out as {[x.layout for x in written]}: redistribute them to Replicate()"
        )
    return NotImplemented


# -- embedding --------------------------------------------------------------------------------------------------------


@rule(also=(F.embedding,))
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Rule:
    """Rows are picked by number, so that all of them must be there; gradients scaled by frequency count all indices."""
    if max_norm is not None or sparse:
        raise NotImplementedError(
            "embedding: max_norm= (which writes into the weight) and sparse= are not supported on ShardedTensors"
        )
    indices = " ".join(f"[i{d}]" if scale_grad_by_freq else f"i{d}" for d in range(input.ndim))
    return einrule(f"{indices}, [v] d -> {indices} d", input, weight, linear=((1,),))


@rule(also=(torch.embedding,))
def _embedding_of_weight(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Rule:
    return _embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


@handler("embedding_bag", also=(torch.embedding_renorm_,))
def _writes_weight(*args: Any, max_norm: float | None = None, **kwargs: Any) -> Any:
    if max_norm is not None:
        raise NotImplementedError("max_norm= writes into the weight and is not supported on ShardedTensors")
    return NotImplemented


@rule("one_hot")
def _one_hot(tensor: Tensor, num_classes: int = -1) -> Rule:
    if num_classes < 0:
        raise ValueError(
            "one_hot: give num_classes; without it the shape would depend on values that lie on other ranks"
        )
    result = torch.empty((*tensor.shape, num_classes), dtype=torch.int64, device="meta")
    return einrule("... -> ... 1", tensor, result=result)


# -- attention --------------------------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Rule:
    """Batch and heads may be split; positions and features are whole.

    With `enable_gqa` query heads are groups of the key's heads.
    """
    if dropout_p > 0:
        raise NotImplementedError(
            "scaled_dot_product_attention: dropout_p > 0 would differ between replicas; use dropout_p=0"
        )
    options: dict[str, Any] = {"linear": ((2,),), "local": _attention_local}
    if not enable_gqa or query.shape[-3] == key.shape[-3]:
        pattern = "... [l] [e], ... [s] [e], ... [s] [v], ... [l] [s] -> ... [l] [v]"
    else:
        options["sizes"] = {"g": key.shape[-3], "r": query.shape[-3] // key.shape[-3]}
        pattern = "... (g r) [l] [e], ... g [s] [e], ... g [s] [v], ... (g r) [l] [s] -> ... (g r) [l] [v]"
        if attn_mask is not None and attn_mask.ndim < 3:
            pattern = pattern.replace(", ... (g r) [l] [s] ->", ", ... [l] [s] ->")
        elif attn_mask is not None and attn_mask.shape[-3] == 1:
            pattern = pattern.replace(", ... (g r) [l] [s] ->", ", ... 1 [l] [s] ->")
    return einrule(pattern, query, key, value, attn_mask, **options)


def _attention_local(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's own, but of an empty part the result stays connected to the graph, as it is on the other ranks."""
    out = F.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    if out.numel():
        return out
    mask = kwargs.get("attn_mask", args[0] if args else None)
    return sum((x.sum() for x in (query, key, value, mask) if x is not None and x.requires_grad), start=out)
