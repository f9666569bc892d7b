"""The mesh axes over which `vmap` has split its examples, while the function of one example runs.

mesh (dp=2, tp=2), examples split over dp    one example is on the mesh (tp=2), and ranks of
                                             different dp have different ones
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.utils import _pytree as pytree

from ....mesh.comm.thread_context import thread_context
from ....mesh.device_mesh import DeviceMesh
from ...layout.spec import P


class Batch(NamedTuple):
    """How examples are split.

    Attributes:
        mesh: the mesh of the arguments; of nested `vmap`s, of those of the outermost that splits.
        axes: the axes over which examples are split.
        inner: the mesh of the others, which one example is on; None if there are none.
    """

    mesh: DeviceMesh
    axes: tuple[str, ...]
    inner: DeviceMesh | None

    @staticmethod
    def inside(
        outer: Batch | None, mesh: DeviceMesh, axes: tuple[str, ...], inner: DeviceMesh | None
    ) -> Batch:
        """Return the split of examples inside examples that are split already."""
        nested = outer is not None and outer.inner is mesh
        return (
            Batch(outer.mesh, (*outer.axes, *axes), inner)
            if nested and outer is not None
            else Batch(mesh, axes, inner)
        )

    def check(self, name: str, *specs: Any) -> None:
        """Raise ValueError if a mapped function's specs name an axis that splits examples."""
        leaves = pytree.tree_leaves(list(specs), is_leaf=lambda x: isinstance(x, P))
        named = set().union(*[spec.axes for spec in leaves if isinstance(spec, P)])
        if split_axes := sorted(named & set(self.axes)):
            raise ValueError(
                f"shard_map({name}): its specs name {split_axes[0]!r}, over which vmap has split "
                "its examples: one example is not on that axis. Have vmap split them over another "
                "axis, or over none: spmd_axis_name=()"
            )


def current_batch() -> Batch | None:
    """Return how the innermost `vmap` in this thread has split its examples; None if it has not."""
    return thread_context.batch


@contextmanager
def use_batch(batch: Batch | None) -> Iterator[None]:
    """Split examples in the block as `batch` says."""
    with thread_context.setting(batch=batch):
        yield
