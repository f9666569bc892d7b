"""`flex_attention` on `ShardedTensor`s: batch, heads and query rows may be split, and no others.

torch's own function compiles its kernel around a call that a tensor subclass cannot take over, so
this one has the same arguments and calls torch's on each rank's part. Score and mask functions get
global positions:

    query rows over 2 ranks, each of 8        rank 1 calls score_mod(score, b, h, q + 8, kv)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ....tensor.sharded_tensor import ShardedTensor
from ... import nonmember
from ...block_masks import Mod, closed_over, mask_from
from ...dispatch import wrap
from ...strategy import check_one_mesh, operand_meta
from ..notation import Rule, einrule
from ..propagation import assign


def flex_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """flex_attention(query, key, value, ...) -> attention, as torch's function of this name.

    The batch, the heads and the rows of the query may be split, each over any axes; the result is
    split as the query is. Keys and values are split in batch and heads as the query, and otherwise
    whole. On a CPU, where torch's kernel has no backward, tensors that require grad are computed
    through the whole matrix of scores.

    Args:
        query, key, value: [batch, heads, length, features], all sharded on one mesh; or all plain,
            which calls torch's function.
        score_mod: as in torch; it gets global positions. Tensors that it closes over are plain,
            and whole on every rank.
        block_mask: as in torch, for the global lengths; whole on every rank. Its `mask_mod` gets
            global positions.
        scale, enable_gqa, return_lse, kernel_options, return_aux: as in torch.

    Returns:
        The result [batch, heads, length, features of value]; with `return_lse` or `return_aux` a
        tuple, as in torch.

    Raises:
        TypeError: some tensors are plain, or a function closes over a `ShardedTensor`.
        ValueError: shapes that do not fit each other or the mask.

    Communication: an all_gather of keys and values along dims in which they are split otherwise. In
    backward a reduction of their gradients over the axes that split the rows of the query.
    """
    from torch.nn.attention import flex_attention as flex

    tensors = query, key, value
    if not any(isinstance(x, ShardedTensor) for x in tensors):
        options = {"return_aux": return_aux} if return_aux is not None else {}
        return flex.flex_attention(
            query,
            key,
            value,
            score_mod=score_mod,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=return_lse,
            kernel_options=kernel_options,
            **options,
        )
    _check(tensors, score_mod, block_mask, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("flex_attention: give either return_lse or return_aux, not both")
    layouts = [x._layout for x in tensors]
    metas = [operand_meta(layout) for layout in layouts]
    rule = _flex_rule(metas[0], metas[1], metas[2], enable_gqa)
    chosen = assign(rule, layouts)
    q, k, v = (
        x.redistribute(target.spec) for x, target in zip(tensors, chosen.targets, strict=True)
    )
    shape = *query.shape[:-1], value.shape[-1]
    out_layout = Layout.of(query.mesh, chosen.outputs[0], shape, query.dtype)
    rows_layout = Layout.of(query.mesh, chosen.outputs[1], shape[:-1], torch.float32)
    aux = flex.AuxRequest(lse=True) if return_lse else return_aux
    requested = [True, aux is not None and aux.lse, aux is not None and aux.max_scores]
    result_layouts = [out_layout, rows_layout, rows_layout]
    if query.mesh.coordinate is None:
        results: Sequence[Any] = [nonmember.unknown(layout, q, k, v) for layout in result_layouts]
    else:
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        part = _PartOfAttention(
            q._layout, k._layout, score_mod, block_mask, factor, enable_gqa, kernel_options, aux
        )
        locals_ = part(q._local, k._local, v._local)
        results = [
            None if x is None else wrap(x, layout)
            for x, layout in zip(locals_, result_layouts, strict=True)
        ]
    out, lse, highest = (x if want else None for x, want in zip(results, requested, strict=True))
    if return_lse:
        return out, lse
    return out if return_aux is None else (out, flex.AuxOutput(lse=lse, max_scores=highest))


def _flex_rule(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Rule:
    """Return the rule of the result and of what there is one of for each row."""
    if enable_gqa and query.shape[1] != key.shape[1]:
        sizes = {"g": key.shape[1], "r": query.shape[1] // key.shape[1]}
        return einrule(
            "b (g r) l [e], b g [s] [e], b g [s] [v] -> b (g r) l [v], b (g r) l",
            query,
            key,
            value,
            sizes=sizes,
        )
    return einrule("b h l [e], b h [s] [e], b h [s] [v] -> b h l [v], b h l", query, key, value)


def _check(tensors: Sequence[Any], score_mod: Any, block_mask: Any, enable_gqa: bool) -> None:
    """Check the arguments, equally on every rank and before any communication.

    Raises:
        TypeError, ValueError: as in `flex_attention`.
    """
    names = "query", "key", "value"
    plain = [
        name for name, x in zip(names, tensors, strict=True) if not isinstance(x, ShardedTensor)
    ]
    if plain:
        raise TypeError(
            f"flex_attention: {' and '.join(plain)} must be a ShardedTensor as the others are; "
            "place it with sm.device_put or distribute_tensor"
        )
    check_one_mesh(flex_attention, [x._layout for x in tensors])
    query, key, value = (tuple(x.shape) for x in tensors)
    text = f"query {list(query)}, key {list(key)}, value {list(value)}"
    if not len(query) == len(key) == len(value) == 4:
        raise ValueError(
            f"flex_attention takes tensors of 4 dims, [batch, heads, length, features]; got {text}"
        )
    if key[:3] != value[:3] or query[3] != key[3] or key[0] not in (1, query[0]):
        raise ValueError(f"flex_attention: shapes do not fit: {text}")
    if query[1] != key[1] and not (enable_gqa and key[1] and query[1] % key[1] == 0):
        raise ValueError(
            f"flex_attention: {query[1]} query heads and {key[1]} key heads; they must be equal, "
            "or with enable_gqa=True the first a multiple of the second"
        )
    lengths = None if block_mask is None else tuple(block_mask.shape[-2:])
    if lengths not in (None, (query[2], key[2])):
        raise ValueError(
            f"flex_attention: the block mask is for lengths {lengths}, the tensors are of "
            f"{(query[2], key[2])}; make it with create_block_mask(mask_mod, B, H, {query[2]}, "
            f"{key[2]}), for the global lengths"
        )
    for name, function in (
        ("score_mod", score_mod),
        ("mask_mod", None if block_mask is None else block_mask.mask_mod),
    ):
        if any(isinstance(x, ShardedTensor) for x in closed_over(function)):
            raise TypeError(
                f"flex_attention: {name} closes over a ShardedTensor, of which it would index a "
                "part by global positions; give it x.full_tensor()"
            )


def _score_from(score_mod: Mod, batch: int, head: int, row: int) -> Mod:
    """Return a score function of positions in a part that begins at this batch, head and row."""

    def score_of_part(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score_mod(score, b + batch, h + head, q + row, kv)

    return score_of_part


class _PartOfAttention:
    """Attention of this rank's part.

    Batches, heads and rows of the query start where the part does.

    Args:
        query, key: the layouts of the parts.
        others: as in `flex_attention`; scale and aux are what torch is called with.
    """

    def __init__(
        self,
        query: Layout,
        key: Layout,
        score_mod: Any,
        block_mask: Any,
        scale: float,
        enable_gqa: bool,
        options: Any,
        aux: Any,
    ) -> None:
        self.box, self.shape, self.keys = query.box, query.shape, key.shape[2]
        starts = [start for start, _ in query.box[:3]]
        self.block_mask = block_mask
        self.score_mod = None if score_mod is None else _score_from(score_mod, *starts)
        self.mask_mod = None if block_mask is None else mask_from(block_mask.mask_mod, *starts)
        self.scale, self.enable_gqa, self.options, self.aux = scale, enable_gqa, options, aux

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the result, and each row's logsumexp and maximum where they are asked for."""
        shape = *query.shape[:-1], value.shape[-1]
        if not math.prod(shape):  # in the graph, as on other ranks
            graph = query.sum() + key.sum() + value.sum()
            rows = graph.float().expand(shape[:-1])
            return graph.expand(shape), rows, rows
        differentiated = torch.is_grad_enabled() and any(
            x.requires_grad for x in (query, key, value)
        )
        if query.device.type == "cpu" and differentiated:
            return self._dense(query, key, value)
        from torch.nn.attention import flex_attention as flex

        mask = None if self.block_mask is None else self._part_of_mask()
        extra = {} if self.aux is None else {"return_aux": self.aux}
        call = flex.flex_attention
        # the functions of this file are part of what is compiled
        with torch._dynamo.config.patch(dont_skip_tracing=True):
            settings = self.score_mod, mask, self.scale, self.enable_gqa
            result = call(query, key, value, *settings, kernel_options=self.options, **extra)
        return (
            (result, None, None)
            if self.aux is None
            else (result[0], result[1].lse, result[1].max_scores)
        )

    def _part_of_mask(self) -> Any:
        """Return the block mask of the part: rows of blocks, or a new one if blocks are cut."""
        from torch.nn.attention import flex_attention as flex

        mask, (start, stop) = self.block_mask, self.box[2]
        rows, columns = mask.BLOCK_SIZE
        lengths = stop - start, self.keys
        batches, heads = (
            slice(None) if size == 1 else slice(*interval)
            for size, interval in zip(mask.kv_num_blocks.shape[:2], self.box, strict=False)
        )
        if start % rows or (stop % rows and stop != self.shape[2]):
            counts = [
                1 if size == 1 else high - low
                for size, (low, high) in zip(mask.kv_num_blocks.shape[:2], self.box, strict=False)
            ]
            device = mask.kv_num_blocks.device
            mask_mod: Any = self.mask_mod
            return flex.create_block_mask(
                mask_mod,
                counts[0],
                counts[1],
                lengths[0],
                lengths[1],
                device=device,
                BLOCK_SIZE=(rows, columns),
            )
        blocks = slice(start // rows, -(-stop // rows))
        tables = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
        parts: list[Any] = [
            None if x is None else x[batches, heads, blocks].contiguous() for x in tables
        ]
        return flex.BlockMask.from_kv_blocks(
            *parts, BLOCK_SIZE=(rows, columns), mask_mod=self.mask_mod, seq_lengths=lengths
        )

    def _dense(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute through the whole matrix of scores, with torch's ordinary operators."""
        groups = query.shape[1] // key.shape[1] if self.enable_gqa else 1
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        scores = query @ key.transpose(-2, -1) * self.scale
        positions = [torch.arange(n, device=query.device) for n in scores.shape]
        if self.score_mod is not None:
            scores = _over_all(self.score_mod, (0,))(scores, *positions)
        if self.mask_mod is not None:
            visible = _over_all(self.mask_mod, ())(*positions)
            scores = scores.masked_fill(~visible, -math.inf)
        highest = scores.detach().amax(-1)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
        return weights @ value, lse.float(), highest.float()


def _over_all(function: Mod, first: tuple[int, ...]) -> Mod:
    """Return a function of (score,) b, h, q, kv as one of all scores and vectors of positions."""
    for position in reversed(range(4)):
        places = [0 if i == position else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*first, *places))
    return function
