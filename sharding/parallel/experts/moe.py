"""`moe`: a mixture of experts split over an axis (expert parallelism)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import Cut, P
from ...lineage import comm_context, mixed, seed_of
from ...ops import nonmember
from ...ops.dispatch import wrap
from ...ops.rules.decomposition_utils import even_sizes, part_sizes
from ...tensor.autograd.local_part import known_local
from ...tensor.convert import from_local, from_part
from ...tensor.part_shapes import lengths_along
from ...tensor.sharded_tensor import ShardedTensor
from ..redistribute_operands import redistribute_operands
from .router import Routing, check_sharded
from .token_dispatch import ExpertGroup, dispatch_axes, make_dispatch

Expert = Callable[[Tensor, Any], Tensor]
_SEED = seed_of("moe")


def moe(
    x: Tensor,
    routing: Routing,
    expert: Expert,
    params: Any,
    *,
    axis: str | tuple[str, ...] = "ep",
    capacity: float | None = None,
) -> Tensor:
    """moe(x: S(tokens), routing, expert, params: S(experts)) -> S(tokens).

    For each token the weighted sum of its experts' outputs.

        rank 0   tokens a b   choose experts 1 0      b e | a     experts 0, 1        a' b'
        rank 1   tokens e f   choose experts 0 3 ->     f         experts 2, 3   ->   e' f'

    Only chosen rows are sent, without padding. Under `sm.jit` it is one operator of the graph; the
    expert should then use no tensors but its rows and params.

    Args:
        x: tokens [... d], a ShardedTensor; leading dims may be split over any axes, evenly or not.
            If the axis of the experts splits none of them, each of its ranks takes a share of the
            tokens, and the result is gathered. Or a plain tensor, like the routing: this rank's own
            tokens. The batch is then that of the ranks along the axis, the result is plain, and
            gradients of the parameters are averaged over the axis, as `fully_shard` averages them
            over others.
        routing: the chosen experts and their weights [... k], as from `top_k_routing`.
        expert: `expert(rows, params_of_one)`: one expert's function of rows [n d] -> [n f], row by
            row. n may be 0.
        params: a tree of ShardedTensors [e ...] with one slice per expert. They are used split over
            the axis in dim 0, as they are split there already, and whole otherwise: other splits
            are gathered.
        axis: the axis, or axes, over which experts are split; sizes need not divide.
        capacity: an expert takes at most ceil(capacity * tokens * k / e) rows of the global batch
            and drops the others: first choices come before second ones, and so on (as GShard), and
            equal choices are in the order of the batch, so that the same ones are dropped on every
            mesh. None drops none.

    Returns:
        [... f], with the leading dims laid out as those of x.

    Raises:
        TypeError: plain parameters, or plain tensors among sharded ones.
        ValueError: on every rank, before any communication: shapes or meshes that do not fit, a
            capacity that is not positive; after the exchange of counts: a choice that is not the
            index of an expert.

    Communication: one all_gather of counts (see `token_dispatch.make_dispatch`), one all_to_all of
        rows [d] and one of results [f], over the axis of the experts; the same two in backward. For
        replicated parameters, one reduction of gradients at its end. For plain tokens one more
        small all_gather, of their numbers.

    Example:
        >>> routing = sm.parallel.top_k_routing(x @ router, 2)
        >>> expert = lambda rows, p: F.silu(rows @ p["up"]) @ p["down"]
        >>> y = sm.parallel.moe(x, routing, expert, {"up": up, "down": down})
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    leaves = {
        f"params{pytree.keystr(path)}": leaf
        for path, leaf in pytree.tree_flatten_with_path(params)[0]
    }
    structure = pytree.tree_structure(params)
    if not any(isinstance(t, ShardedTensor) for t in (x, *routing)):
        return _of_plain(x, routing, expert, leaves, structure, axes, capacity)
    return _of_sharded(x, routing, expert, leaves, structure, axes, capacity)


def _of_sharded(
    tokens: Any,
    routing: Routing,
    expert: Expert,
    leaves: dict[str, Any],
    structure: pytree.TreeSpec,
    axes: tuple[str, ...],
    capacity: float | None,
) -> ShardedTensor:
    _check(tokens, routing, leaves, axes, capacity)
    lead = token_cuts(tokens._layout, axes)
    stacked = _expert_cut(leaves, axes)
    inputs: Any = [tokens, *routing, *leaves.values()]
    limit = (
        None
        if capacity is None
        else math.ceil(capacity * routing.experts.numel() / inputs[3].shape[0])
    )
    lineage = mixed(_SEED, inputs)
    with comm_context(tokens.mesh.world, lineage):
        cuts = [[*lead, ()]] * 3 + [[[stacked]]] * len(leaves)
        operands = redistribute_operands(
            inputs,
            [x._layout.replace(P.of_cuts(cut, {})) for x, cut in zip(inputs, cuts, strict=True)],
        )
        mixture = _Mixture(
            expert, structure, _peers(operands[3]._layout, axes), operands[1]._layout, limit
        )
        result = _run_mixture(mixture, lead, operands)
        result._lineage = lineage
        return result.redistribute(P.of_cuts([*tokens.spec.cuts[:-1], ()], {}))


# -- plain tokens ----------------------------------------------------------------------------------


def _of_plain(
    x: Tensor,
    routing: Routing,
    expert: Expert,
    leaves: dict[str, Any],
    structure: pytree.TreeSpec,
    axes: tuple[str, ...],
    capacity: float | None,
) -> Tensor:
    """Run on the slice of the mesh with these axes: plain tensors say nothing of the others."""
    _check_params(leaves, axes)
    mesh: Any = next(iter(leaves.values())).mesh
    expert_mesh = mesh[axes]
    tokens = math.prod(x.shape[:-1])
    lengths = lengths_along(expert_mesh, expert_mesh.axis_names, tokens)
    operands = [
        from_part(t.reshape(tokens, t.shape[-1]), expert_mesh, 0, lengths) for t in (x, *routing)
    ]
    cut = _expert_cut(leaves, axes)
    params = {name: _on_expert_mesh(p, expert_mesh, cut) for name, p in leaves.items()}
    out = _of_sharded(
        operands[0], Routing(operands[1], operands[2]), expert, params, structure, axes, capacity
    )
    return out.to_local().view(*x.shape[:-1], out.shape[-1])


def _on_expert_mesh(p: ShardedTensor, expert_mesh: DeviceMesh, cut: Cut) -> ShardedTensor:
    """Return a parameter on the mesh of the experts' axes.

    Its gradient is the mean over these and the sum over others.
    """
    split = p.redistribute(P.of_cuts([[cut]], {}))
    others = P.of_cuts([[cut]], dict.fromkeys(split._layout.replicated_axes, "sum"))
    local = _ScaleGrad.apply(split.to_local(grad_placements=others), 1 / expert_mesh.size())
    return from_local(local, expert_mesh, P.of_cuts([[cut]], {}), shape=p.shape)  # type: ignore[arg-type]


class _ScaleGrad(torch.autograd.Function):
    """Identity; multiplies the gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.factor, None


# -- on this rank ----------------------------------------------------------------------------------


class _Mixture(NamedTuple):
    """The computation on local parts: `mixture(x, experts, weights, *params)`.

    Attributes:
        expert, structure: one expert's function, and the tree of its parameters.
        peers: the ranks that exchange rows, and their experts.
        choices: the layout of the tokens' choices.
        limit: the maximum number of rows per expert.
    """

    expert: Expert
    structure: pytree.TreeSpec
    peers: ExpertGroup
    choices: Layout
    limit: int | None

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, *params: Tensor) -> Tensor:
        k = self.choices.shape[-1]
        tokens = math.prod(x.shape[:-1])
        plan = make_dispatch(experts, self.choices, self.peers, self.limit)
        received = plan.dispatch(x.reshape(tokens, x.shape[-1]).index_select(0, plan.slots // k))
        back = plan.combine(self._apply(received, plan.rows_per_expert, params))
        by_choice = (
            back.new_zeros(tokens * k, back.shape[-1])
            .index_copy(0, plan.slots, back)
            .view(tokens, k, back.shape[-1])
        )
        mixed_rows = (by_choice * weights.reshape(tokens, k, 1)).sum(1).to(back.dtype)
        return mixed_rows.view(*x.shape[:-1], back.shape[-1])

    def _apply(self, rows: Tensor, counts: Sequence[int], params: Sequence[Tensor]) -> Tensor:
        """Apply this rank's experts to their rows, even to none: all parameters get a gradient."""
        if not counts:
            return self.apply_expert(rows, [p.sum() + p.new_zeros(p.shape[1:]) for p in params])
        slices = zip(*[p.unbind(0) for p in params], strict=True)
        return torch.cat(
            [
                self.apply_expert(part, one)
                for part, one in zip(rows.split(list(counts)), slices, strict=True)
            ]
        )

    def like(self, x: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Return an expert's result for no rows, on "meta"."""
        rows = torch.empty(0, x.shape[-1], dtype=x.dtype, device="meta")
        of_one = [torch.empty(p.shape[1:], dtype=p.dtype, device="meta") for p in params]
        return self.apply_expert(rows, of_one)

    def empty_result(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return an empty tensor like the result."""
        x, _, _, *params = inputs
        like = self.like(x, params)
        return x.new_empty(*x.shape[:-1], like.shape[-1], dtype=like.dtype)

    def apply_expert(self, rows: Tensor, params: Sequence[Tensor]) -> Tensor:
        """Apply one expert.

        Raises:
            ValueError: the result has another number of rows or dims.
        """
        result = self.expert(rows, pytree.tree_unflatten(params, self.structure))
        if result.ndim != 2 or len(result) != len(rows):
            raise ValueError(
                f"moe: an expert returned {list(result.shape)} for rows {list(rows.shape)}; it "
                "must map [n d] -> [n f] for any n"
            )
        return result


def _run_mixture(
    mixture: _Mixture, lead: Sequence[Sequence[Cut]], operands: Sequence[ShardedTensor]
) -> ShardedTensor:
    """Return the result; its width and dtype are those of the experts' results."""
    x, mesh = operands[0], operands[0].mesh
    if mesh.coordinate is None:
        like = mixture.like(x, operands[3:])
        return nonmember.unknown(_result_layout(x, lead, like), *operands)
    inputs = [known_local(p) for p in operands]
    if thread_context.weights is not None:
        thread_context.weights.add_sharded(operands[3:])
    if thread_context.recorder is None:
        local = mixture(*inputs)
    else:
        axes = dispatch_axes(mixture.choices, mixture.peers, mixture.limit is not None)
        local = thread_context.recorder.opaque(
            mixture, inputs, "moe", mesh.group(axes), lambda: mixture.empty_result(inputs)
        )
    return wrap(local, _result_layout(x, lead, local))


def _result_layout(x: ShardedTensor, lead: Sequence[Sequence[Cut]], result: Tensor) -> Layout:
    return Layout.of(
        x.mesh, P.of_cuts([*lead, ()], {}), (*x.shape[:-1], result.shape[-1]), result.dtype
    )


# -- layouts ---------------------------------------------------------------------------------------


def token_cuts(x: Layout, axes: tuple[str, ...]) -> list[list[Cut]]:
    """Return the leading dims' cuts; axes not among them split the dim with the longest parts."""
    lead = [list(cuts) for cuts in x.spec.cuts[:-1]]
    missing = [a for a in axes if not any(a in cut.axes for cuts in lead for cut in cuts)]
    longest = max(
        range(len(lead)),
        key=lambda dim: (
            x.shape[dim] // x.mesh.size(x.spec.dims[dim]) if lead[dim] else x.shape[dim]
        ),
    )
    lead[longest] += [Cut((a,)) for a in missing]
    return lead


def _expert_cut(params: dict[str, Any], axes: tuple[str, ...]) -> Cut:
    """Return how the axes split the experts: as in parameters split over them, else evenly.

    Raises:
        ValueError: two parameters are split differently.
    """
    sizes_by_name: dict[str, tuple[int, ...]] = {}
    for name, p in params.items():
        if p.spec.dims[0][: len(axes)] == axes:
            sizes = part_sizes(p._layout, 0)
            each = len(sizes) // p.mesh.size(axes)
            sizes_by_name[name] = tuple(
                sum(sizes[i : i + each]) for i in range(0, len(sizes), each)
            )
    if len(set(sizes_by_name.values())) > 1:
        raise ValueError(
            f"moe: the experts are split over {axes} into parts of {sizes_by_name}; split all "
            "parameters in the same way"
        )
    if sizes_by_name:
        return Cut(axes, next(iter(sizes_by_name.values())))
    first = next(iter(params.values()))
    return Cut(axes, even_sizes(first.shape[0], first.mesh.size(axes)))


def _peers(params: Layout, axes: tuple[str, ...]) -> ExpertGroup:
    mesh: Any = params.mesh
    if mesh.coordinate is None:
        return ExpertGroup(mesh, axes, ())
    return ExpertGroup(
        mesh,
        axes,
        tuple(params.box_at(mesh.coordinate_of(rank))[0] for rank in mesh.group(axes).ranks),
    )


# -- checks ----------------------------------------------------------------------------------------


def _check(
    x: Any, routing: Routing, params: dict[str, Any], axes: tuple[str, ...], capacity: float | None
) -> None:
    """Check the arguments of `moe`. Raises: TypeError, ValueError."""
    experts, weights = routing
    check_sharded("moe", {"x": x, "routing.experts": experts, "routing.weights": weights})
    _check_params(params, axes)
    check_one_mesh({"x": x, "routing.experts": experts, "routing.weights": weights, **params})
    _check_tokens(x, experts, weights)
    if capacity is not None and not 0 < capacity < math.inf:
        raise ValueError(
            f"moe: capacity={capacity}: an expert's limit as a multiple of its even share must be "
            "a positive number, or None"
        )


def _check_params(params: dict[str, Any], axes: tuple[str, ...]) -> None:
    if not params:
        raise ValueError(
            "moe: params has no tensor; pass tensors with one slice per expert along dim 0"
        )
    check_sharded("moe", params)
    check_one_mesh(params)
    first = next(iter(params.values()))
    if not axes or any(a not in first.mesh.axis_names for a in axes):
        raise ValueError(
            f"moe: axis={axes!r} for {next(iter(params))} {first._layout}; use one of the axes "
            f"{first.mesh.axis_names}"
        )
    counts = {name: p.shape[0] if p.ndim else 0 for name, p in params.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        raise ValueError(
            "moe: dim 0 of all parameters must be the number of experts, at least 1; they have "
            f"{counts}"
        )


def check_one_mesh(tensors: dict[str, Any]) -> None:
    """Raise ValueError for tensors that are not all on one mesh."""
    (name, first), *rest = tensors.items()
    for other, x in rest:
        if x.mesh is not first.mesh:
            first_mesh, other_mesh = distinct_mesh_names(first.mesh, x.mesh)
            raise ValueError(
                f"moe: {name} is on {first_mesh}, but {other} on {other_mesh}; redistribute all to "
                "one mesh first"
            )


def _check_tokens(x: Any, experts: Any, weights: Any) -> None:
    if (
        x.ndim < 2
        or not x.is_floating_point()
        or experts.dtype is not torch.int64
        or not weights.is_floating_point()
    ):
        raise ValueError(
            "moe: x must be floating [tokens ... features], experts int64 and weights floating; "
            f"got {x._layout}, {experts._layout} and {weights._layout}"
        )
    if experts.shape != weights.shape or experts.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"moe: x {list(x.shape)} has tokens {list(x.shape[:-1])}, and routing.experts "
            f"{list(experts.shape)} and routing.weights {list(weights.shape)} must have the same "
            f"and one dim for choices: {[*x.shape[:-1], 'k']}"
        )
