"""What a graph will do, before and after the passes.

f.lower(*args)             ->   Lowered         recorded on "meta": nothing runs and nothing is sent
f.lower(*args).compile()   ->   CompiledGraph        with the passes applied
f.recorded                 ->   [CompiledGraph]      the graphs that calls have made
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.comm.null import null_world
from ....mesh.comm.world import World
from ....mesh.device_mesh import DeviceMesh
from ...abstract.eval_shape import _Inside, _root_mesh
from ..errors import JitError
from ..hyperparameters import Hyperparameters
from ..passes.options import PassOptions
from ..passes.pipeline import run as run_passes
from ..program import Program
from ..recording import record
from ..state.snapshot import Snapshot
from .step_graph import StepGraph


class Lowered(StepGraph):
    """A graph as recorded, before any pass."""

    def __init__(
        self,
        program: Program,
        world: World,
        layouts: dict[str, str],
        device_type: str,
        function: Any,
        options: PassOptions,
    ) -> None:
        super().__init__(program, world, layouts, device_type)
        self._function, self._options = function, options

    def compile(self) -> CompiledGraph:
        """Return the graph with the passes of the function applied.

        Nothing is compiled by a backend, since there are no tensors yet: the function does that
        when it is called.
        """
        program = run_passes(self._program, self._options, None, ())
        return CompiledGraph(program, self.world, self._layouts, self.device_type, self._function)  # type: ignore[arg-type]


class CompiledGraph(StepGraph):
    """A graph with the passes applied; a call of it is a call of the jitted function.

    The graphs of `f.recorded` have the passes that all ranks agreed on. That of `lower().compile()`
    has all that change this rank's.

    Attributes:
        entry: what runs it; None if no call has made it.
    """

    def __init__(
        self,
        program: Program,
        world: World,
        layouts: dict[str, str],
        device_type: str | None,
        function: Any,
        entry: Any = None,
    ) -> None:
        super().__init__(program, world, layouts, device_type)
        self._function, self.entry = function, entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def passes(self) -> dict[str, int]:
        """The passes that ran, and how many nodes each has changed."""
        return dict(self._program.passes)

    @property
    def reason(self) -> str | None:
        """Why the call was recorded although the function had graphs.

        None for the first graph, and for one that was only lowered.
        """
        return None if self.entry is None else self.entry.reason

    def _lines(self) -> Iterator[str]:
        passes = ", ".join(f"{name} {count}" for name, count in self.passes.items())
        yield f"# nodes changed by passes: {passes}" if passes else "# no passes"
        for read in self._program.reads:
            yield f"# runs where {read.place} reads {read.value}"
        yield from super()._lines()


def lower(
    function: Any,
    f: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    options: PassOptions,
) -> Lowered:
    """Record `f` on "meta" tensors; see `eval_shape` for what arguments may be."""
    cells = _cells(f)
    root = _root_mesh(None, (args, kwargs, list(cells.values())))
    with null_world(math.prod(root.shape), _place(root)) as world:
        world.observers.clear()  # lowering is not counted
        inside = _Inside(root)
        with inside.mesh:
            positional, named, held = inside.enter((tuple(args), kwargs, cells))
            leaves = [*positional, *named.values()]
            inner = _with_cells(f, held)
            arguments = [(f"args[{i}]", x) for i, x in enumerate(leaves)]
            others = [(path, x) for path, x in arguments if not isinstance(x, Tensor)]
            snapshot = Snapshot([("f", inner), *others])
            layouts = {path: f" @ {x._layout}" for x, path in snapshot.sharded}
            layouts |= {path: f" @ {x._layout}" for path, x in arguments if hasattr(x, "_layout")}

            def run(values: Sequence[Any]) -> Any:
                keywords = dict(zip(named, values[len(positional) :], strict=True))
                return inner(*values[: len(positional)], **keywords)

            inputs = Hyperparameters().inputs(snapshot)
            _, recording, _ = record(run, leaves, snapshot, inputs, world, False, abstract=True)
        if isinstance(recording, str):
            raise JitError(f"{function!r} cannot be lowered: {recording}")
        # Without devices as `AbstractMesh.topology`.
        device_type = getattr(root, "device_type", "cuda")
        return Lowered(recording.program, world, layouts, device_type, function, options)


def _place(mesh: AbstractMesh) -> int:
    """Return the index of this rank in a mesh; 0 if it has none."""
    if not isinstance(mesh, DeviceMesh) or mesh.coordinate is None:
        return 0
    return mesh.ranks.flatten().tolist().index(mesh.world.rank)


def _cells(f: Any) -> dict[str, Any]:
    """Return the objects that a function closes over, and the object of a method."""
    inner = f.__func__ if isinstance(f, types.MethodType) else f
    cells = {"": f.__self__} if isinstance(f, types.MethodType) else {}
    if isinstance(inner, types.FunctionType):
        pairs = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
        cells |= {name: cell.cell_contents for name, cell in pairs}
    return {"f": f} if isinstance(f, torch.nn.Module) else cells


def _with_cells(f: Any, cells: dict[str, Any]) -> Callable[..., Any]:
    """Return the function with other values in its closure."""
    if isinstance(f, torch.nn.Module):
        return cells["f"]
    inner = f.__func__ if isinstance(f, types.MethodType) else f
    if not isinstance(inner, types.FunctionType):
        return f
    closure = tuple(types.CellType(cells[name]) for name in inner.__code__.co_freevars)
    code, defaults = inner.__code__, inner.__defaults__
    copy = types.FunctionType(code, inner.__globals__, inner.__name__, defaults, closure)
    copy.__kwdefaults__, copy.__qualname__ = inner.__kwdefaults__, inner.__qualname__
    return types.MethodType(copy, cells[""]) if isinstance(f, types.MethodType) else copy
