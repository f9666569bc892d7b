"""`assert_replicated` and `check_replicas`: compare what ranks should hold alike, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ...mesh.comm.current_world import current_world
from ...mesh.context import get_mesh
from ...mesh.device_mesh import DeviceMesh
from .compare import ReplicaError, compare
from .leaves import leaves_of, mesh_over, replica_leaves


def assert_replicated(tree: Any, mesh: DeviceMesh | None = None) -> None:
    """assert_replicated(tree) -> None: raise unless replicas are equal, bit for bit.

    Replicas are ranks that should hold the same values.

    For a `ShardedTensor` these are the ranks that hold the same part by its layout, along "tp" for
    `P("dp")`; contributions to a pending value are not compared. Plain tensors, numbers and strings
    must be the same on all ranks. NaNs with the same bits are equal, 0.0 and -0.0 are not.

    Args:
        tree: any tree of these; a module stands for its parameters and buffers, an optimizer for
            its state and settings.
        mesh: the mesh whose ranks are compared; all of them call this, on other ranks it does
            nothing. By default the mesh of the sharded tensors, if there is one for all; else that
            of `set_mesh` or `with mesh:`; else all ranks.

    Raises:
        ReplicaError: on every rank; names the leaf, the ranks that differ, the first index and both
            values, or how trees differ.
        TypeError: a leaf is neither tensor, number nor text.

    Communication: one all_gather of about 100 bytes from each rank. If values differ, more: at most
        a few thousand bytes from each rank and a few dozen for each leaf.

    Example:
        >>> sm.debug.assert_replicated({"model": model, "optimizer": optimizer, "step": step})
    """
    _compare("assert_replicated: ", [tree], mesh)


class ReplicaCheck:
    """The result of `check_replicas`: call it once per step; it compares every `every` steps.

    Attributes:
        every: the number of steps from one comparison to the next.
        step: the number of calls.
        last_equal: the last step at which all replicas were the same; 0 before the first
            comparison.
    """

    def __init__(
        self, model: Any, optimizer: Optimizer | None, every: int, mesh: DeviceMesh | None
    ) -> None:
        self.every, self.step, self.last_equal = every, 0, 0
        self._trees = [model] if optimizer is None else [model, optimizer]
        self._mesh = mesh

    def __call__(self) -> None:
        """Count a step, and compare if due. Raises: ReplicaError, on every rank, if they differ."""
        self.step += 1
        if self.step % self.every:
            return
        try:
            _compare("check_replicas: ", self._trees, self._mesh)
        except ReplicaError as error:
            before = (
                f"they were the same at step {self.last_equal}"
                if self.last_equal
                else "they were not compared before"
            )
            raise ReplicaError(
                f"{error} Found at step {self.step}; {before}.",
                error.path,
                error.ranks,
                error.index,
            ) from None
        self.last_equal = self.step

    def __repr__(self) -> str:
        return f"ReplicaCheck(every={self.every}, step={self.step}, last_equal={self.last_equal})"


def check_replicas(
    model: Any, optimizer: Optimizer | None = None, *, every: int, mesh: DeviceMesh | None = None
) -> ReplicaCheck:
    """check_replicas(model, optimizer, every=n) -> check: compare replicas every n steps.

    Call `check()` once per step; every n-th time it is an `assert_replicated`.

    Args:
        model: a module, or any tree of modules, tensors and numbers.
        optimizer: an optimizer whose state and settings are compared as well, under the names of
            the parameters.
        every: steps. A comparison takes a CPU core about 0.07 ms for each tensor and 0.5 ms for
            each MB.
        mesh: as in `assert_replicated`.

    Raises: ValueError if `every` is not a positive integer. The check raises ReplicaError, which
        also names the last step at which all replicas were the same.

    Communication: none here; that of `assert_replicated` in every n-th call.

    Example:
        >>> check = sm.debug.check_replicas(model, optimizer, every=100)
        >>> for batch in loader:
        ...     train_step(batch)
        ...     check()
    """
    if not isinstance(every, int) or every < 1:
        raise ValueError(
            "check_replicas: every must be a positive integer, the number of steps between "
            f"comparisons, got every={every!r}"
        )
    return ReplicaCheck(model, optimizer, every, mesh)


def _compare(prefix: str, trees: Sequence[Any], mesh: DeviceMesh | None) -> None:
    leaves = leaves_of(trees)
    mesh = mesh or mesh_over(leaves) or get_mesh()
    if mesh is not None and mesh.coordinate is None:
        return
    world = current_world()
    group = world.group(range(world.size)) if mesh is None else mesh.group()
    replicas = replica_leaves(leaves, group.ranks)
    compare(prefix, replicas, group)
    for leaf in replicas:
        if not leaf.can_be_compared:
            raise TypeError(
                f"{prefix}{leaf.path or 'the tree'} is a {leaf.kind}, neither tensor, number nor "
                "text; leave it out"
            )
