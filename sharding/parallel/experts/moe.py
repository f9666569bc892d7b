"""Expert parallelism: a mixture of experts that are split over an axis; tokens travel to the experts that they choose, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import Cut, P
from ...ops import nonmember
from ...ops.dispatch import known_local, wrap
from ...ops.lineage import comm_context, mixed, seed_of
from ...ops.rules.decomposition_utils import part_sizes
from ...tensor.convert import from_local
from ...tensor.sharded_tensor import ShardedTensor
from ..bring import bring
from .router import Routing, check_sharded
from .token_dispatch import Peers, journey

Expert = Callable[[Tensor, Any], Tensor]
_SEED = seed_of("moe")


def moe(
    x: Tensor, routing: Routing, expert: Expert, params: Any, *, axis: str | tuple[str, ...] = "ep", capacity: float | None = None
) -> Tensor:
    """moe(x: S(tokens), routing, expert, params: S(experts)) -> S(tokens): for each token the weighted sum of what its experts make of it.

        rank 0   tokens a b   want experts 1 0        b e | a     experts 0, 1        a' b'
        rank 1   tokens e f   want experts 0 3   ->     f         experts 2, 3   ->   e' f'

    Exactly the rows that are wanted travel; nothing is padded.

    Args:
        x: tokens [... d], a ShardedTensor; leading dims may be split over any axes, evenly or not. Where the axis of the experts splits
            none of them, each of its ranks takes a share of the tokens, and the result is gathered. Or a plain tensor, like the routing:
            then these are this rank's own tokens, the batch is that of the ranks along the axis, the result is plain, and gradients of the
            parameters are averaged over the axis, as `fully_shard` averages them over others.
        routing: the experts that tokens choose and their weights [... k], as from `top_k_routing`.
        expert: `expert(rows, params_of_one)`: what one expert makes of rows [n d] -> [n f], row by row. n may be 0.
        params: a tree of ShardedTensors [e ...], of which each expert has one slice. They are used split over the axis in dim 0, as they
            are cut there, and whole otherwise: a further split is gathered.
        axis: the axis, or axes, over which experts are split; they need not divide it.
        capacity: an expert takes at most ceil(capacity * tokens * k / e) rows of the global batch, and the others add nothing to
            their tokens: first choices come before second ones, and so on (as GShard), and among equal choices tokens in the order of
            the batch, so that the same ones are dropped on every mesh. None: none are.

    Returns:
        [... f], with the leading dims laid out as those of x.

    Raises:
        TypeError: plain parameters, or plain tensors among sharded ones.
        ValueError: on every rank, before any communication: shapes or meshes that do not fit, a capacity that is not positive; after
            counts were exchanged: a choice that is no expert.

    Communication: one all_gather of counts (see `journey.journey`), one all_to_all of rows of d there and one of rows of f back, over the
        axis of the experts; the same two in backward. For parameters that are replicated, one reduction of gradients at its end. For plain
        tokens one more small all_gather, of their numbers.

    Example:
        >>> routing = sm.top_k_routing(x @ router, 2)
        >>> y = sm.moe(x, routing, lambda rows, p: F.silu(rows @ p["up"]) @ p["down"], {"up": up, "down": down})
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    leaves = {f"params{pytree.keystr(path)}": leaf for path, leaf in pytree.tree_flatten_with_path(params)[0]}
    structure = pytree.tree_structure(params)
    if not any(isinstance(t, ShardedTensor) for t in (x, *routing)):
        return _of_plain(x, routing, expert, leaves, structure, axes, capacity)
    return _of_sharded(x, routing, expert, leaves, structure, axes, capacity)


def _of_sharded(
    tokens: Any, routing: Routing, expert: Expert, leaves: dict[str, Any], structure: pytree.TreeSpec, axes: tuple[str, ...],
    capacity: float | None,
) -> ShardedTensor:  # fmt: skip
    _check(tokens, routing, leaves, axes, capacity)
    lead, stacked = _token_cuts(tokens._layout, axes), _expert_cut(leaves, axes)
    given: Any = [tokens, *routing, *leaves.values()]
    limit = None if capacity is None else math.ceil(capacity * routing.experts.numel() / given[3].shape[0])
    lineage = mixed(_SEED, given)
    with comm_context(tokens.mesh.world, lineage):
        cuts = [[*lead, ()]] * 3 + [[[stacked]]] * len(leaves)
        placed = bring(given, [x._layout.replace(P.of_cuts(cut, {})) for x, cut in zip(given, cuts, strict=True)])
        mixture = _Mixture(expert, structure, _peers(placed[3]._layout, axes), placed[1]._layout, limit)
        made = _mixed(mixture, lead, placed)
        made._lineage = lineage
        return made.redistribute(P.of_cuts([*tokens.spec.cuts[:-1], ()], {}))


# -- plain tokens -----------------------------------------------------------------------------------------------------


def _of_plain(
    x: Tensor, routing: Routing, expert: Expert, leaves: dict[str, Any], structure: pytree.TreeSpec, axes: tuple[str, ...],
    capacity: float | None,
) -> Tensor:  # fmt: skip
    """On the mesh of these axes alone, so that other axes, of which nothing is known, take no part."""
    _check_params(leaves, axes)
    mesh: Any = next(iter(leaves.values())).mesh
    line = mesh[axes]
    group, tokens = line.group(), math.prod(x.shape[:-1])
    lengths = [n for (n,) in group.all_gather_object((tokens,))]
    sizes = [lengths[group.ranks.index(int(rank))] for rank in line.ranks.flatten()]
    spec = P(line.axis_names, sizes={line.axis_names: sizes})
    placed = [from_local(t.reshape(tokens, t.shape[-1]), line, spec, shape=(sum(sizes), t.shape[-1])) for t in (x, *routing)]
    cut = _expert_cut(leaves, axes)
    params = {name: _on_line(p, line, cut) for name, p in leaves.items()}
    out = _of_sharded(placed[0], Routing(placed[1], placed[2]), expert, params, structure, axes, capacity)
    return out.to_local().view(*x.shape[:-1], out.shape[-1])


def _on_line(p: ShardedTensor, line: DeviceMesh, cut: Cut) -> ShardedTensor:
    """A parameter on the mesh of the experts' axes. Its gradient is the mean over these, and the sum over others."""
    split = p.redistribute(P.of_cuts([[cut]], {}))
    others = P.of_cuts([[cut]], dict.fromkeys(split._layout.replicated_axes, "sum"))
    local = _Averaged.apply(split.to_local(grad_placements=others), 1 / line.size())
    return from_local(local, line, P.of_cuts([[cut]], {}), shape=p.shape)  # type: ignore[arg-type]


class _Averaged(torch.autograd.Function):
    """The value; of its gradient a share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.share, None


# -- on this rank -----------------------------------------------------------------------------------------------------


class _Mixture(NamedTuple):
    """What a rank does with its parts: `mixture(x, experts, weights, *params)`.

    Attributes:
        expert, structure: what one expert does, and the tree of its parameters.
        peers: who has which experts.
        choices: how the choices of tokens lie.
        limit: the most rows that an expert takes.
    """

    expert: Expert
    structure: pytree.TreeSpec
    peers: Peers
    choices: Layout
    limit: int | None

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, *params: Tensor) -> Tensor:
        k = self.choices.shape[-1]
        tokens, trip = math.prod(x.shape[:-1]), journey(experts, self.choices, self.peers, self.limit)
        arrived = trip.there(x.reshape(tokens, x.shape[-1]).index_select(0, trip.slots // k))
        back = trip.back(self._made(arrived, trip.for_mine, params))
        by_choice = back.new_zeros(tokens * k, back.shape[-1]).index_copy(0, trip.slots, back).view(tokens, k, back.shape[-1])
        mixed_rows = (by_choice * weights.reshape(tokens, k, 1)).sum(1).to(back.dtype)
        return mixed_rows.view(*x.shape[:-1], back.shape[-1])

    def _made(self, rows: Tensor, counts: Sequence[int], params: Sequence[Tensor]) -> Tensor:
        """What this rank's experts make of their rows. All are asked, also for no rows: so their parameters get gradients, of zero."""
        if not counts:
            return self.of_one(rows, [p.sum() + p.new_zeros(p.shape[1:]) for p in params])
        slices = zip(*[p.unbind(0) for p in params], strict=True)
        return torch.cat([self.of_one(part, one) for part, one in zip(rows.split(list(counts)), slices, strict=True)])

    def of_one(self, rows: Tensor, params: Sequence[Tensor]) -> Tensor:
        """What one expert makes of rows.

        Raises:
            ValueError: another number of rows, or dims.
        """
        made = self.expert(rows, pytree.tree_unflatten(params, self.structure))
        if made.ndim != 2 or len(made) != len(rows):
            raise ValueError(
                f"moe: an expert made {list(made.shape)} of rows {list(rows.shape)}; it works row by row, [n d] -> [n f], for any n"
            )
        return made


def _mixed(mixture: _Mixture, lead: Sequence[Sequence[Cut]], given: Sequence[ShardedTensor]) -> ShardedTensor:
    """The result, whose width and dtype are those of what experts make."""
    x, mesh = given[0], given[0].mesh
    if mesh.coordinate is None:
        rows = torch.empty(0, x.shape[-1], dtype=x.dtype, device="meta")
        like = mixture.of_one(rows, [torch.empty(p.shape[1:], dtype=p.dtype, device="meta") for p in given[3:]])
        return nonmember.unknown(_wide(x, lead, like), *given)
    local = mixture(*[known_local(p) for p in given])
    return wrap(local, _wide(x, lead, local))


def _wide(x: ShardedTensor, lead: Sequence[Sequence[Cut]], made: Tensor) -> Layout:
    return Layout.of(x.mesh, P.of_cuts([*lead, ()], {}), (*x.shape[:-1], made.shape[-1]), made.dtype)


# -- where things lie -------------------------------------------------------------------------------------------------


def _token_cuts(x: Layout, axes: tuple[str, ...]) -> list[list[Cut]]:
    """The cuts of the leading dims, further cut over the axes that do not cut them yet: where the parts are longest."""
    lead = [list(cuts) for cuts in x.spec.cuts[:-1]]
    missing = [a for a in axes if not any(a in cut.axes for cuts in lead for cut in cuts)]
    longest = max(range(len(lead)), key=lambda dim: x.shape[dim] // x.mesh.size(x.spec.dims[dim]) if lead[dim] else x.shape[dim])
    lead[longest] += [Cut((a,)) for a in missing]
    return lead


def _expert_cut(params: dict[str, Any], axes: tuple[str, ...]) -> Cut:
    """How experts are cut over the axes: as the parameters are that are split over them, else evenly.

    Raises:
        ValueError: two parameters that are cut otherwise.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, p in params.items():
        if p.spec.dims[0][: len(axes)] == axes:
            sizes = part_sizes(p._layout, 0)
            each = len(sizes) // p.mesh.size(axes)
            found[name] = tuple(sum(sizes[i : i + each]) for i in range(0, len(sizes), each))
    if len(set(found.values())) > 1:
        raise ValueError(f"moe: the experts are cut over {axes} into parts of {found}; give all parameters one of these")
    return Cut(axes, next(iter(found.values()))) if found else Cut(axes, _evenly(params, axes))


def _evenly(params: dict[str, Any], axes: tuple[str, ...]) -> tuple[int, ...]:
    first = next(iter(params.values()))
    count, parts = first.shape[0], first.mesh.size(axes)
    return tuple(count // parts + (i < count % parts) for i in range(parts))


def _peers(params: Layout, axes: tuple[str, ...]) -> Peers:
    mesh: Any = params.mesh
    if mesh.coordinate is None:
        return Peers(mesh, axes, ())
    return Peers(mesh, axes, tuple(params.box_at(mesh.coordinate_of(rank))[0] for rank in mesh.group(axes).ranks))


# -- what cannot be ---------------------------------------------------------------------------------------------------


def _check(x: Any, routing: Routing, params: dict[str, Any], axes: tuple[str, ...], capacity: float | None) -> None:
    """Raises: TypeError, ValueError: see `moe`."""
    experts, weights = routing
    check_sharded("moe", {"x": x, "routing.experts": experts, "routing.weights": weights})
    _check_params(params, axes)
    _check_one_mesh({"x": x, "routing.experts": experts, "routing.weights": weights, **params})
    _check_tokens(x, experts, weights)
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(f"moe: capacity={capacity} is how many times its even share an expert takes: a positive number, or None for all")


def _check_params(params: dict[str, Any], axes: tuple[str, ...]) -> None:
    if not params:
        raise ValueError("moe: params has no tensor, and dim 0 of these is what tells experts apart")
    check_sharded("moe", params)
    _check_one_mesh(params)
    first = next(iter(params.values()))
    if not axes or any(a not in first.mesh.axis_names for a in axes):
        raise ValueError(f"moe: axis={axes!r} for {next(iter(params))} {first._layout}; name one of {first.mesh.axis_names}")
    counts = {name: p.shape[0] if p.ndim else 0 for name, p in params.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise ValueError(f"moe: dim 0 of each parameter is the experts, as many in all, one at least; they have {counts}")


def _check_one_mesh(given: dict[str, Any]) -> None:
    (name, first), *rest = given.items()
    for other, x in rest:
        if x.mesh is not first.mesh:
            here, there = distinct_mesh_names(first.mesh, x.mesh)
            raise ValueError(f"moe: {name} lies on {here}, and {other} on {there}; bring all to one mesh first")


def _check_tokens(x: Any, experts: Any, weights: Any) -> None:
    if x.ndim < 2 or not x.is_floating_point() or experts.dtype is not torch.int64 or not weights.is_floating_point():
        raise ValueError(
            f"moe: x is [tokens ... features], of a floating dtype, experts int64 and weights floating; got {x._layout}, {experts._layout} "
            f"and {weights._layout}"
        )
    if experts.shape != weights.shape or experts.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"moe: x {list(x.shape)} has tokens {list(x.shape[:-1])}, and routing.experts {list(experts.shape)} and routing.weights "
            f"{list(weights.shape)} are to have the same and one dim for choices: {[*x.shape[:-1], 'k']}"
        )
