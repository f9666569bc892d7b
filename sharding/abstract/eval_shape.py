"""`eval_shape`: layouts, bytes moved and memory of a program on any mesh, without devices.

Layout on AbstractMesh  ---   in  --->  ShardedTensor on "meta"     f runs as one rank, alone:
(dp=128, tp=8)                                     |                collectives are counted and move
                                                   f                nothing, tensors have shapes but
                                                   v                no values, memory is counted as
Layout on AbstractMesh  <---  out  ---  ShardedTensor on "meta"     it is allocated and freed
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...mesh import context
from ...mesh.abstract_mesh import ELSEWHERE, AbstractMesh, axes_text
from ...mesh.comm import call_site
from ...mesh.comm.null import null_world
from ...mesh.comm.report import CommReport, comm_report
from ...mesh.device_mesh import DeviceMesh, init_device_mesh
from ...mesh.figure import SERIES, Pictured, drawn, in_bytes
from ..layout.layout import Layout, distinct_mesh_names
from ..tensor.sharded_tensor import ShardedTensor
from .peak_memory import PeakMemory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In torch's errors about reading values of a tensor on "meta".
_NO_VALUES = ("meta tensor", "Meta tensor", "meta device", "register_meta")


@dataclass(frozen=True)
class Evaluated(Pictured):
    """The result of `eval_shape`. `print` shows it as a table.

    Attributes:
        result: what the function returned: a `Layout` for each `ShardedTensor`, plain tensors on
            "meta", the rest unchanged.
        report: what the function communicated, by operator, collective, axis and line; see
            `comm_report`.
        peak_bytes: the most bytes of tensors that were alive at one time on this rank, arguments
            included.
        argument_bytes, result_bytes: bytes of the arguments and of the result on this rank. Shared
            memory counts once.
        mesh: the mesh.
        rank: the rank that was evaluated.
        live_bytes: bytes of tensors that were alive on this rank, after each operator of the
            function.
    """

    result: Any = field(repr=False)
    report: CommReport
    peak_bytes: int
    argument_bytes: int
    result_bytes: int
    mesh: AbstractMesh
    rank: int
    live_bytes: Sequence[int] = field(default=(), repr=False)

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Return a figure of the memory of tensors on this rank, from operator to operator.

        Args:
            path: a file to write as well, .png, .svg or .pdf.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: a file format that matplotlib does not know.
        """
        return drawn(self._draw, path)

    def _draw(self, figure_type: type[Figure]) -> Figure:
        figure = figure_type(figsize=(9.0, 3.2))
        axes = figure.add_subplot()
        unit, scale = in_bytes(self.peak_bytes)
        live = [self.argument_bytes * scale, *(count * scale for count in self.live_bytes)]
        axes.fill_between(range(len(live)), live, color=SERIES[5], linewidth=0)
        axes.plot(live, color=SERIES[0], linewidth=1)
        axes.axhline(self.argument_bytes * scale, color="#707070", linewidth=0.8, linestyle=":")
        axes.axhline(self.peak_bytes * scale, color="#707070", linewidth=0.8, linestyle="--")
        right = len(live) - 1
        labels = {"arguments": self.argument_bytes, "peak": self.peak_bytes}
        for name, count in labels.items():
            axes.annotate(
                f"{name} {count * scale:.3g}",
                (right, count * scale),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                annotation_clip=False,
            )
        axes.set_xlim(0, max(right, 1))
        axes.set_ylim(0)
        axes.set_xlabel("operators of the function, in order")
        axes.set_ylabel(f"{unit} of tensors")
        mesh = axes_text(self.mesh.shape, self.mesh.axis_names)
        axes.set_title(f"rank {self.rank} of ({mesh})", fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        return figure

    def __str__(self) -> str:
        memory = {
            "arguments": self.argument_bytes,
            "result": self.result_bytes,
            "peak": self.peak_bytes,
        }
        rows = [(name, f"{count:,}", "bytes") for name, count in memory.items()]
        received = {f"received over {axis}": use for axis, use in self.report.by_axis.items()}
        received["received in total"] = self.report.launches, self.report.bytes_received
        rows += [
            (name, f"{count:,}", f"bytes  in {calls:,} launches")
            for name, (calls, count) in received.items()
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(2)]
        lines = [f"{name:{widths[0]}}  {count:>{widths[1]}} {unit}" for name, count, unit in rows]
        return "\n".join(
            [f"rank {self.rank} of ({axes_text(self.mesh.shape, self.mesh.axis_names)})", *lines]
        )


def eval_shape(
    f: Callable[..., Any],
    *args: Any,
    mesh: AbstractMesh | None = None,
    rank: int = 0,
    **kwargs: Any,
) -> Evaluated:
    """eval_shape(f, *args) -> Evaluated: run `f` without data, as one rank of a mesh of any size.

    Args:
        f: any function, or a module.
        args, kwargs: any pytree of: a `Layout` (a `ShardedTensor` of that layout), a
            `ShardedTensor`, a plain tensor, an `nn.Module`, a `torch.optim` optimizer, a mesh. `f`
            is called with copies of these on "meta", on a "meta" mesh; the originals do not change.
            Anything else is passed on unchanged.
        mesh: the mesh, an `AbstractMesh` or any other; by default the largest mesh of an argument,
            else that of `with mesh:`. Inside `f` it is the default mesh.
        rank: the rank to evaluate. If dims do not divide evenly, the last rank's part is the
            smallest.

    Returns:
        Layouts, bytes moved, bytes held. Plans are made for the topology of the mesh given.

    Raises:
        TypeError: there is no mesh.
        ValueError: an argument is on a mesh that is not a part of it.
        MeshError: the mesh has no such rank.
        RuntimeError: `f` reads a value, for example by `.item()`.

    Communication: none; no memory is allocated for tensors on "meta".

    Example:
        >>> mesh = sm.AbstractMesh((128, 8), ("dp", "tp"))
        >>> x = sm.Layout.of(mesh, P("dp"), (4096, 1024))
        >>> w = sm.Layout.of(mesh, P("tp"), (8192, 1024))
        >>> sm.debug.eval_shape(torch.nn.functional.linear, x, w).result
        f32[4096, 8192] @ P('dp', 'tp') on (dp=128, tp=8)
    """
    call = (f, args, kwargs)
    root = _root_mesh(mesh, call)
    with null_world(prod(root.shape), rank):
        inside = _Inside(root)
        with inside.mesh, PeakMemory("meta") as memory:
            function, args, kwargs = inside.enter(call)
            argument_bytes = memory.live
            memory.restart()
            with comm_report() as report:
                result = _call_without_values(function, args, kwargs)
            live_bytes = tuple(memory.history)
            sizes = memory.peak, argument_bytes, memory.of(_tensors_of(result))
        return Evaluated(inside.leave(result), report, *sizes, inside.abstract, rank, live_bytes)


# -- which mesh ------------------------------------------------------------------------------------


def _root_mesh(mesh: AbstractMesh | None, call: Any) -> AbstractMesh:
    """Return the mesh to run on.

    Raises:
        TypeError: none is given, no argument is on one, and there is no current mesh.
    """
    if mesh is not None:
        if not isinstance(mesh, AbstractMesh):
            raise TypeError(
                f"eval_shape(mesh={mesh!r}): mesh must be a mesh, such as sm.AbstractMesh((128, "
                f'8), ("dp", "tp"))'
            )
        return mesh
    largest = max(
        _meshes_of(call), key=lambda m: (prod(m.shape), type(m) is AbstractMesh), default=None
    )
    if largest is not None:
        return largest
    try:
        return context.given_or_current(None)
    except TypeError:
        raise TypeError(
            "eval_shape: no argument is on a mesh; give mesh=, such as "
            'mesh=sm.AbstractMesh((128, 8), ("dp", "tp")), or give layouts on one, '
            'sm.Layout.of(mesh, P("dp"), shape)'
        ) from None


def _meshes_of(tree: Any) -> Iterator[AbstractMesh]:
    for leaf in pytree.tree_leaves(tree):
        for x in (leaf, *_held_by(leaf)):
            if isinstance(x, AbstractMesh):
                yield x
            elif isinstance(x, ShardedTensor):
                yield x._layout.mesh
            elif isinstance(x, Layout):
                yield x.mesh


def _held_by(holder: Any) -> Iterator[Any]:
    """Yield the tensors, layouts and meshes of a module or an optimizer."""
    if isinstance(holder, Optimizer):
        yield from _parts_of(holder.param_groups)
        yield from _parts_of(list(holder.state.values()))
    elif isinstance(holder, nn.Module):
        for module in holder.modules():
            yield from _parts_of(vars(module))


def _parts_of(tree: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, (Tensor, Layout, AbstractMesh)):
            yield leaf
        elif not isinstance(leaf, nn.Module) and hasattr(leaf, "__dict__") and not callable(leaf):
            yield from (
                x for x in vars(leaf).values() if isinstance(x, (Tensor, Layout, AbstractMesh))
            )


def _tensors_of(tree: Any) -> list[Tensor]:
    values = [x for leaf in pytree.tree_leaves(tree) for x in (leaf, *_held_by(leaf))]
    return [x for x in values if isinstance(x, Tensor)]


# -- in and out ------------------------------------------------------------------------------------


class _Inside:
    """A mesh on "meta" on which the function runs, and the conversion of arguments and results.

    Attributes:
        mesh: the mesh inside.
        abstract: the same mesh outside.
        copies: id of each argument -> its copy, as `copy.deepcopy` keeps them.
    """

    def __init__(self, root: AbstractMesh) -> None:
        self.mesh = init_device_mesh("meta", root.shape, axis_names=root.axis_names)
        self.mesh.topology = root.topology
        self.abstract = (
            root if type(root) is AbstractMesh else AbstractMesh(root.shape, root.axis_names)
        )
        self.copies: dict[Any, Any] = {ELSEWHERE: self._enter_held}

    def enter(self, tree: Any) -> Any:
        """Return the tree with everything on an outside mesh replaced by its meta counterpart."""
        return pytree.tree_map(self._enter, tree)

    def _enter(self, x: Any) -> Any:
        if id(x) in self.copies:
            return self.copies[id(x)]
        if isinstance(x, (nn.Module, Optimizer)):
            return self._holder(x)
        if isinstance(x, AbstractMesh):
            return self._mesh_for(x)
        if isinstance(x, Layout):
            return self._of_layout(x)
        return self._tensor(x) if isinstance(x, Tensor) else x

    def _holder(self, holder: Any) -> Any:
        """Return a deep copy of a module or optimizer without values.

        Single numbers, such as an optimizer's step count, keep theirs.
        """
        for part in _held_by(holder):
            if not _is_number(part):
                self.copies[id(part)] = self._enter_held(part)
        with _TensorsElsewhere(self):
            return copy.deepcopy(holder, self.copies)

    def _enter_held(self, x: Any) -> Any:
        """Return the counterpart of something that a module or an optimizer holds."""
        return self._layout_for(x) if isinstance(x, Layout) else self._enter(x)

    def _tensor(self, x: Tensor) -> Tensor:
        stand_in = self._without_values(x)
        if isinstance(x, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        if x.requires_grad:
            stand_in.requires_grad_()
        if x.is_leaf and x.grad is not None:
            stand_in.grad = self._without_values(x.grad)
        self.copies[id(x)] = stand_in
        return stand_in

    def _without_values(self, x: Tensor) -> Tensor:
        return self._of_layout(x._layout) if isinstance(x, ShardedTensor) else _like(x)

    def _of_layout(self, layout: Layout) -> ShardedTensor:
        at = self._layout_for(layout)
        return ShardedTensor._make_guarded(
            torch.empty(at.local_shape, dtype=at.dtype, device="meta"), at, 0
        )

    def _layout_for(self, layout: Layout) -> Layout:
        return Layout.of(self._mesh_for(layout.mesh), layout.spec, layout.shape, layout.dtype)

    def _mesh_for(self, mesh: AbstractMesh) -> DeviceMesh:
        part = _part_like(self.mesh, mesh)
        if part is None:
            root_mesh, other_mesh = distinct_mesh_names(self.abstract, mesh)
            raise ValueError(
                f"eval_shape runs on {root_mesh}, but an argument is on {other_mesh}, whose axes "
                "are not among these; give mesh=, one that has all the axes, and arguments on it "
                "or on parts of it such as mesh['tp']"
            )
        return part

    def leave(self, tree: Any) -> Any:
        """Return the tree with everything on the inside mesh replaced by its outer counterpart."""
        return pytree.tree_map(self._leave, tree)

    def _leave(self, x: Any) -> Any:
        if isinstance(x, ShardedTensor):
            return Layout.of(
                self._outside(x._layout.mesh), x._layout.spec, x._layout.shape, x._layout.dtype
            )
        if isinstance(x, AbstractMesh):
            return self._outside(x)
        return _like(x) if isinstance(x, Tensor) else x

    def _outside(self, mesh: AbstractMesh) -> AbstractMesh:
        return _part_like(self.abstract, mesh) or AbstractMesh(mesh.shape, mesh.axis_names)


class _TensorsElsewhere(TorchFunctionMode):
    """Inside, `deepcopy` gives each plain tensor its counterpart without values.

    Also those that other objects of a module hold.
    """

    def __init__(self, inside: _Inside) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is Tensor.__deepcopy__
            and type(args[0]) is not ShardedTensor
            and not _is_number(args[0])
        ):
            return self._inside._enter(args[0])
        return func(*args, **(kwargs or {}))


def _part_like(whole: Any, mesh: AbstractMesh) -> Any:
    """Return the part of a mesh that has the axes of another; None if there is none."""
    sizes = dict(zip(whole.axis_names, whole.shape, strict=True))
    if any(sizes.get(name) != size for name, size in zip(mesh.axis_names, mesh.shape, strict=True)):
        return None
    return whole if mesh.axis_names == whole.axis_names else whole[mesh.axis_names]


def _is_number(x: Any) -> bool:
    return (
        isinstance(x, Tensor)
        and not isinstance(x, ShardedTensor)
        and x.ndim == 0
        and x.device.type == "cpu"
    )


def _like(x: Tensor) -> Tensor:
    """Return a plain tensor without values."""
    return torch.empty_like(x.detach(), device="meta")


# -- the call --------------------------------------------------------------------------------------


def _call_without_values(f: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return f(*args, **kwargs)
    except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
        if not any(words in str(error) for words in _NO_VALUES):
            raise
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise RuntimeError(
            f"{_line_of(error.__traceback__)}: eval_shape runs without values, but this line reads "
            f"some ({reason}). Keep what reads values (.item(), bool(x), nonzero, a mask as an "
            "index) out of the function, or pass the number as an argument."
        ) from error


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback that is neither in this library nor in torch."""
    line = "eval_shape"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(call_site._INNER):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
