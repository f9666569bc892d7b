"""`vmap`: run a function of one example on a whole batch at once.

x: [batch, 8, 16] @ P(None, None, "tp")    one example: [8, 16] @ P(None, "tp"), its part batched by
                                           torch.func.vmap
x: [batch, 8, 16] @ P("dp", None, "tp")    the same on the mesh (tp,): each rank of dp has examples
                                           of its own

A call finds the mapped dim of each argument and how it is split (`_Batched`), lays the arguments
out so, hands this rank's examples to `torch.func.vmap`, and gives the results their batch dim
(`_Run`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....mesh import context
from ....mesh.comm.call_site import DESCRIBERS, OperatorCall
from ....mesh.device_mesh import DeviceMesh
from ...autograd.engine_hooks import is_transformed
from ...autograd.transforms import own_level
from ...layout.layout import Layout
from ...layout.spec import Cut, P
from ...lineage import mixed, seed_of
from ...ops.torch_compile import keep_compiler_out, not_compiled
from ...redistribute.autograd import redistribute_local, redistribute_locals
from ...tensor.autograd.local_part import known_local
from ...tensor.convert import from_local
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import PrefixKind, broadcast_prefix, flatten, paths_of, tensors_in, unflatten
from ..inputs import inner_layout, restrict_to_axes
from ..outputs import with_lineage
from ..types.type_checker import untracked
from ..types.types import ShardingTypeError, user_location
from .batch import Batch, current_batch, use_batch
from .parts import layout_with, layout_without, same_type

Axes = Any  # an int, None, or a tree of them that is a prefix of the arguments'
Cuts = tuple[Cut, ...]
_AXES = PrefixKind(
    lambda x: x is None or (isinstance(x, int) and not isinstance(x, bool)), "an int or None"
)


def vmap(
    fun: Callable[..., Any],
    in_axes: Axes = 0,
    out_axes: Axes = 0,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: str | Sequence[str] | None = None,
    *,
    randomness: str = "error",
) -> Callable[..., Any]:
    """vmap(f) -> f of a batch: `f` receives one example.

    Every operator works on all examples at once.

    Arguments and results are trees of plain and sharded tensors. Communication inside `f`
    (redistributions, mapped functions, collectives by axis name) is done once for the whole batch.

        rank 0   x = [x0 x1]   ->   f(x0) f(x1)     where the mapped dim is split, each rank has its
        rank 1   x = [x2 x3]   ->   f(x2) f(x3)     own examples

    Args:
        fun: a function of one example. If the mapped dim is split over some axes, an example is on
            the mesh of the others (with none left, a plain tensor), and all sharded tensors that
            `fun` uses must be arguments.
        in_axes: the mapped dim of every argument; None for an argument shared by all examples.
            Keyword arguments are mapped over dim 0.
        out_axes: the position of the batch dim in every result; None for a result that does not
            depend on the example.
        axis_name: not supported; a mapped dim has no name for collectives here.
        axis_size: the number of examples; required if no argument is mapped.
        spmd_axis_name: the axis (or axes) that splits the mapped dim, `()` for none; arguments are
            redistributed. Default: as the arguments are split.
        randomness: for random operators, as in `torch.func.vmap`: "error", "same" for all examples,
            or on plain tensors "different".

    Returns:
        A function of batches. The batch dim of a result is split as those of the arguments.

    Raises:
        ValueError: axes that do not fit the arguments; mapped dims of different sizes, or split
            differently.
        NotImplementedError: `axis_name`.
        ShardingTypeError: examples are split, and a plain tensor that requires grad is not an
            argument: its gradient would be that of this rank's examples only.

    Communication: that of redistributing arguments where mapped dims must be split, and that of
    `fun`.

    Example:
        >>> per_example = sm.vmap(sm.grad(loss), in_axes=(None, 0))(params, batch)
    """
    if axis_name is not None:
        raise NotImplementedError(
            f"vmap(axis_name={axis_name!r}): a mapped dim has no name for collectives; reduce over "
            "the batch outside of vmap, or use shard_map"
        )
    names: Any = spmd_axis_name and tuple(spmd_axis_name)
    if isinstance(spmd_axis_name, str):
        names = (spmd_axis_name,)
    batched = _Batched(fun, in_axes, out_axes, axis_size, names, randomness)
    return functools.update_wrapper(batched, fun, updated=())  # type: ignore[return-value]


class _Batched:
    """A function of batches; see `vmap`.

    Attributes:
        names: the axes that split the mapped dim, `()` for none; None: as the arguments are split.
    """

    def __init__(
        self,
        fun: Any,
        in_axes: Axes,
        out_axes: Axes,
        axis_size: int | None,
        names: Any,
        randomness: str,
    ) -> None:
        self.fun, self.in_axes, self.out_axes, self.axis_size = fun, in_axes, out_axes, axis_size
        self.names, self.randomness = names, randomness
        self.name = getattr(fun, "__name__", type(fun).__name__)
        self._seed = seed_of(f"vmap {self.name}")
        self._searched: set[Any] = set()

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        leaves, tree = flatten((args, kwargs))
        axes = self._mapped_dims(args, kwargs, leaves)
        size = self._batch_size(leaves, axes, args, kwargs)
        cuts, mesh = self._batch_cuts(leaves, axes)
        run = _Run(self, size, cuts, mesh)
        leaves = run.lay_out_leaves(leaves, axes)
        out = run(leaves, axes, tree)
        sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
        return with_lineage(mixed(self._seed, sharded), out) if sharded else out

    # -- mapped arguments --------------------------------------------------------------------------

    def _mapped_dims(self, args: Any, kwargs: Any, leaves: list[Any]) -> list[int | None]:
        """Return the mapped dim of every leaf, counted from the front."""
        axes = broadcast_prefix(f"vmap({self.name}): in_axes", self.in_axes, args, _AXES)
        axes += [0] * (len(leaves) - len(axes))
        for i, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
            is_tensor = isinstance(leaf, Tensor)
            if axis is None or leaf is None:
                axes[i] = None
            elif not is_tensor or not -leaf.ndim <= axis < leaf.ndim:
                what = f"has shape {list(leaf.shape)}" if is_tensor else f"is {leaf!r}"
                path = self._paths(args, kwargs)[i]
                raise ValueError(
                    f"{path} {what}, and in_axes map it over dim {axis}; pass None for an argument "
                    "shared by all examples"
                )
            else:
                axes[i] = axis % leaf.ndim
        return axes

    def _paths(self, args: Any, kwargs: Any) -> list[str]:
        return [
            f"vmap({self.name}): argument {path}" for path in [*paths_of(args), *paths_of(kwargs)]
        ]

    def _batch_size(self, leaves: list[Any], axes: list[int | None], args: Any, kwargs: Any) -> int:
        """Return the number of examples, which all mapped dims and `axis_size` must agree on."""
        pairs = enumerate(zip(leaves, axes, strict=True))
        sizes = {i: leaf.shape[axis] for i, (leaf, axis) in pairs if axis is not None}
        lengths = set(sizes.values()) | (set() if self.axis_size is None else {self.axis_size})
        if not lengths:
            raise ValueError(
                f"vmap({self.name}): in_axes={self.in_axes} map no argument; pass axis_size="
            )
        if len(lengths) > 1:
            paths = self._paths(args, kwargs)
            listing = ", ".join(f"{paths[i].partition(': ')[2]}: {n}" for i, n in sizes.items())
            also = "" if self.axis_size is None else f"; axis_size={self.axis_size}"
            raise ValueError(f"vmap({self.name}): mapped dims must have one size ({listing}{also})")
        return lengths.pop()

    # -- layouts -----------------------------------------------------------------------------------

    def _batch_cuts(
        self, leaves: list[Any], axes: list[int | None]
    ) -> tuple[Cuts, DeviceMesh | None]:
        """Return how the mapped dim is split, and on which mesh; None if it is not split."""
        sharded = [x for x in leaves if isinstance(x, ShardedTensor)]
        split = [
            (x._layout, x._layout.spec.cuts[axis])
            for x, axis in zip(leaves, axes, strict=True)
            if isinstance(x, ShardedTensor) and axis is not None and x._layout.spec.cuts[axis]
        ]
        splits = dict.fromkeys((layout.mesh, cuts) for layout, cuts in split)
        if self.names == ():
            return (), None
        if self.names:
            mesh: Any = sharded[0].mesh if sharded else context.given_or_current(None)
            self._check_names(mesh)
            for _, cuts in splits:
                if tuple(a for cut in cuts for a in cut.axes) == self.names:
                    return cuts, mesh
            return (Cut(self.names),), mesh
        if len(splits) > 1:
            listing = ", ".join(str(layout) for layout, _ in split)
            raise ValueError(
                f"vmap({self.name}): the mapped dims are split differently ({listing}); "
                "redistribute them alike, or pass spmd_axis_name="
            )
        return next(((cuts, mesh) for mesh, cuts in splits), ((), None))  # type: ignore[return-value]

    def _check_names(self, mesh: DeviceMesh) -> None:
        unknown = [name for name in self.names if name not in mesh.axis_names]
        if unknown:
            raise ValueError(
                f"vmap({self.name}): spmd_axis_name={unknown[0]!r} is not an axis of {mesh}"
            )

    def first_time(self, key: Any) -> bool:
        """Return whether this signature has not been searched for captured parameters yet."""
        if key in self._searched:
            return False
        self._searched.add(key)
        return True


class _Example(NamedTuple):
    """An argument of one call.

    Attributes:
        part: this rank's part, with all of its examples.
        axis: the mapped dim of the part; None if the examples share the argument.
        layout: of one example; None for a plain tensor, and for what is no tensor.
    """

    part: Any
    axis: int | None
    layout: Layout | None


class _ExampleResult(NamedTuple):
    """A result of the function of one example.

    Attributes:
        value: what the function returned.
        part: its local tensor.
        axis: the position of the batch dim to come; None if it does not depend on the example.
        layout: of one example; None for a plain tensor.
    """

    value: Any
    part: Tensor
    axis: int | None
    layout: Layout | None


class _Run:
    """One call.

    Attributes:
        size: the number of examples.
        count: this rank's number of examples.
        cuts, mesh: how the mapped dim is split, and on which mesh; see `_Batched._batch_cuts`.
        batch: how examples are split; None if they are not.
    """

    def __init__(self, owner: _Batched, size: int, cuts: Cuts, mesh: DeviceMesh | None) -> None:
        self.owner, self.size, self.cuts, self.mesh = owner, size, cuts, mesh
        self.count, self.batch = size, None
        if mesh is None:
            return
        if mesh.coordinate is None:
            where = f"rank {mesh.world.rank} is not in {mesh} and has no examples"
            raise RuntimeError(
                f"vmap({owner.name}): {where}; call it on the ranks of the mesh only"
            )
        axes = tuple(axis for cut in cuts for axis in cut.axes)
        rest = tuple(axis for axis in mesh.axis_names if axis not in axes)
        self.batch = Batch.inside(current_batch(), mesh, axes, mesh[rest] if rest else None)
        self.count = Layout.of(mesh, P.of_cuts([cuts], {}), (size,)).local_shape[0]

    # -- arguments ---------------------------------------------------------------------------------

    def lay_out_leaves(self, leaves: list[Any], axes: list[int | None]) -> list[Any]:
        """Return the leaves with the batch dim split as required.

        No other dim is split by its axes; if it is split, plain tensors become `ShardedTensor`s.

        Communication: that of redistributing leaves, in buckets.
        """
        mesh, out = self.mesh, list(leaves)
        if mesh is not None:
            out = [
                from_local(x, mesh, P(), shape=x.shape)
                if isinstance(x, Tensor) and not isinstance(x, ShardedTensor)
                else x
                for x in leaves
            ]
        moving, pairs = [], []
        for i, (x, axis) in enumerate(zip(out, axes, strict=True)):
            if isinstance(x, ShardedTensor):
                dst = self._layout_in_batch(x._layout, axis)
                if dst is not x._layout:
                    moving.append(i)
                    pairs.append((x._layout, dst))
        if moving:
            parts = _redistribute_parts(
                self.owner.name, [known_local(out[i]) for i in moving], pairs
            )
            for i, part, (_, dst) in zip(moving, parts, pairs, strict=True):
                out[i] = ShardedTensor._make(part, dst)
        return out

    def _layout_in_batch(self, layout: Layout, axis: int | None) -> Layout:
        """Return an argument's layout with its mapped dim, and no other, split as the batch is."""
        spec = layout.spec
        if self.batch is not None:
            if layout.mesh is not self.mesh:
                other = f"{layout} is not on the mesh of the mapped dim, {self.mesh}"
                raise ValueError(f"vmap({self.owner.name}): {other}; redistribute it there")
            others = [a for a in layout.mesh.axis_names if a not in self.batch.axes]
            spec = restrict_to_axes(spec, others)
        old = enumerate(spec.padded(len(layout.shape)).cuts)
        cuts = [self.cuts if d == axis else cut for d, cut in old]
        return layout.replace(P.of_cuts(cuts, dict(spec.unreduced)))

    def _example(self, x: Any, axis: int | None) -> _Example:
        if not isinstance(x, ShardedTensor):
            return _Example(x, axis, None)
        layout, part = x._layout, known_local(x)
        if self.batch is not None:
            if self.batch.inner is None:
                return _Example(part, axis, None)
            manual = P.of_cuts([self.cuts if d == axis else () for d in range(x.ndim)], {})
            layout = inner_layout(layout, manual, self.batch.axes, self.batch.inner)
        elif x.mesh.coordinate is None and axis is not None:
            # Outside the mesh: an empty part for each example.
            parts = part.unsqueeze(-1).expand(*part.shape, self.count)
            return _Example(parts, part.ndim, layout_without(layout, axis))
        return _Example(part, axis, layout if axis is None else layout_without(layout, axis))

    # -- running -----------------------------------------------------------------------------------

    def __call__(self, leaves: list[Any], axes: list[int | None], tree: Any) -> Any:
        examples = [self._example(x, axis) for x, axis in zip(leaves, axes, strict=True)]
        mapped = [i for i, example in enumerate(examples) if example.axis is not None]
        out_tree: Any = None
        results: list[_ExampleResult] = []

        def of_one(*batched: Tensor) -> tuple[Tensor, ...]:
            """Call the function for the mapped parts.

            torch takes and returns tensors that depend on the example; all else is described in
            `results`.
            """
            nonlocal out_tree, results
            parts = [example.part for example in examples]
            for i, part in zip(mapped, batched, strict=False):
                parts[i] = part
            layouts = [example.layout for example in examples]
            arguments = list(map(_argument, parts, layouts, leaves))
            args, kwargs = unflatten(tree, arguments)
            with own_level(self.owner.randomness), self._within(arguments, layouts):
                out = self.owner.fun(*args, **kwargs)
            out_tree, results = self._results(out)
            batched_results = tuple(x.part for x in results if x.axis is not None)
            return batched_results or (batched[0],)

        parts = [examples[i].part for i in mapped]
        dims = [examples[i].axis or 0 for i in mapped]
        if not parts:  # only axis_size= is given
            parts = [torch.zeros(self.size)]
            dims = [0]
        is_empty = self.count == 0
        if is_empty:
            # torch takes no empty batch: pass one example of zeros, and remove it from the results.
            parts = [_one_of_zeros(x, dim) for x, dim in zip(parts, dims, strict=True)]
        of_all = torch.func.vmap(of_one, tuple(dims), randomness=self.owner.randomness)
        batched = iter(of_all(*parts))
        outs = [
            self._with_batch_dim(x.part if x.axis is None else next(batched), x, is_empty)
            for x in results
        ]
        return unflatten(out_tree, outs)

    @contextmanager
    def _within(self, arguments: list[Any], layouts: list[Layout | None]) -> Iterator[None]:
        """Enter the contexts in which the function of one example runs.

        Where examples are split, the first call of each signature is searched for plain parameters
        that are no arguments.
        """
        if self.batch is None:
            yield
            return
        pairs = zip(arguments, layouts, strict=True)
        key = tuple((getattr(x, "shape", None), layout) for x, layout in pairs)
        search = torch.is_grad_enabled() and self.owner.first_time(key)
        with (
            use_batch(self.batch),
            self.batch.inner or nullcontext(),
            _ClosedOverParams(arguments) if search else nullcontext(),
        ):
            yield

    # -- results -----------------------------------------------------------------------------------

    def _results(self, out: Any) -> tuple[Any, list[_ExampleResult]]:
        """Return the tree of what the function of one example returned, and its leaves."""
        leaves, tree = flatten(out)
        name = f"vmap({self.owner.name})"
        axes = broadcast_prefix(f"{name}: out_axes", self.owner.out_axes, out, _AXES)
        paths = [f"{name}: result {path}".rstrip() for path in paths_of(out)]
        return tree, [self._result(*each) for each in zip(paths, leaves, axes, strict=True)]

    def _result(self, path: str, x: Any, axis: int | None) -> _ExampleResult:
        if isinstance(x, (bool, int, float, complex)):
            x = torch.as_tensor(x)
        if not isinstance(x, Tensor):
            raise TypeError(f"{path} is {x!r}, neither a tensor nor a number")
        layout, part = (x._layout, known_local(x)) if isinstance(x, ShardedTensor) else (None, x)
        if axis is None:
            functorch = torch._C._functorch  # type: ignore[attr-defined]
            if functorch.maybe_get_level(part) == functorch.maybe_current_level():
                raise ValueError(
                    f"{path} depends on the example, and its out_axes are None, which is for "
                    "results that do not; give a dim"
                )
            return _ExampleResult(x, part, None, layout)
        if not -x.ndim - 1 <= axis <= x.ndim:
            raise ValueError(
                f"{path} has shape {list(x.shape)} for one example, and out_axes put the batch at "
                f"dim {axis}"
            )
        if self.batch is not None and layout is not None and layout.mesh is not self.batch.inner:
            raise ValueError(
                f"{path} is on {layout.mesh}, and examples are on {self.batch.inner}, since they "
                f"are split over {list(self.batch.axes)}; pass sharded tensors as arguments, with "
                "None in in_axes"
            )
        return _ExampleResult(x, part, axis % (x.ndim + 1), layout)

    def _with_batch_dim(self, out: Tensor, result: _ExampleResult, is_empty: bool) -> Any:
        """Return a result for all examples, with its batch dim and layout.

        Args:
            out: the local tensor, with the batch dim in front if the result has one.
            is_empty: whether `out` is of one example of zeros, which stands for none.
        """
        example, axis, layout = result.value, result.axis, result.layout
        if axis is not None:
            out = out.narrow(0, 0, 0) if is_empty else out
            outside = layout is not None and layout.mesh.coordinate is None  # type: ignore[attr-defined]
            out = out.reshape(-1)[:0] if outside else out.movedim(0, axis)
        if self.batch is not None:
            spec = P() if layout is None else layout.spec
            layout = Layout.of(self.mesh, spec, example.shape, example.dtype)  # type: ignore[arg-type]
        if layout is None:
            return same_type(out, example)
        if axis is not None:
            layout = layout_with(layout, axis, self.cuts, self.size)
        return same_type(ShardedTensor._make(out, layout.replace(dtype=out.dtype)), example)


def _one_of_zeros(x: Tensor, dim: int) -> Tensor:
    """Return a batch of one example of zeros that depends on the empty batch in the graph."""
    shape = [1 if d == dim else n for d, n in enumerate(x.shape)]
    return (x.new_zeros(shape) + x.sum()).to(x.dtype)


def _argument(part: Any, layout: Layout | None, x: Any) -> Any:
    """Return what the function receives for an argument."""
    if layout is None:
        return same_type(part, x) if isinstance(part, Tensor) else part
    out = ShardedTensor._make(part, layout)
    out._lineage = x._lineage
    return same_type(out, x)


def _redistribute_parts(
    name: str, parts: list[Tensor], pairs: list[tuple[Layout, Layout]]
) -> list[Tensor]:
    if len(pairs) == 1:
        return [redistribute_local(parts[0], *pairs[0])]
    return redistribute_locals(parts, pairs)


def _describe(frame: dict[str, Any]) -> OperatorCall:
    """Describe the arguments that must be redistributed, for `sm.ops.implicit_comm` and reports."""
    pairs = frame["pairs"]
    advice = ", ".join(f"{src} to {dst.spec}" for src, dst in pairs)
    return OperatorCall(
        f"vmap({frame['name']})",
        ", ".join(str(src) for src, _ in pairs),
        f"Redistribute {advice} before the call",
    )


DESCRIBERS[_redistribute_parts.__code__] = _describe


class _ClosedOverParams(TorchFunctionMode):
    """Look for plain tensors that require grad and are not arguments.

    If examples are split, each rank would compute the gradient of its own examples only.
    """

    def __init__(self, arguments: Sequence[Any]) -> None:
        super().__init__()
        self._known = {id(getattr(x, "_local", x)) for x in arguments}
        with untracked():
            self._first = torch.zeros((), requires_grad=True).clone().grad_fn._sequence_nr()  # type: ignore[union-attr]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "detach"):
            for x in tensors_in((*args, *(kwargs or {}).values())):
                if self._is_from_outside(x):
                    raise ShardingTypeError(
                        f"{user_location()}: a tensor of shape {list(x.shape)} that requires grad "
                        "and is not an argument, in a function whose examples vmap has split over "
                        "ranks: its gradient would be that of each rank's own examples. Pass it as "
                        "an argument, with None in in_axes, or use it detached: x.detach()"
                    )
        return func(*args, **(kwargs or {}))

    def _is_from_outside(self, x: Tensor) -> bool:
        if isinstance(x, ShardedTensor) or is_transformed(x):
            return False
        if not x.requires_grad or id(x) in self._known:
            return False
        return x.is_leaf or x.grad_fn._sequence_nr() < self._first  # type: ignore[union-attr]
