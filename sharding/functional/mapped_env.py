"""`MappedEnv`: the axes of a mapped function, and what is known of the types of its values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...mesh.comm.thread_context import thread_context
from ...mesh.device_mesh import DeviceMesh
from ..autograd.named_axes import AxisEnv
from .types.type_checker import TypeChecker


class MappedEnv(AxisEnv):
    """The environment in which `shard_map` runs a function.

    Attributes:
        checker: the type checker, in a tracked call.
        type_log: the types that calls of `grad`, `typeof` and `custom_vjp` inside have found in a
            tracked call, for later calls.
        cursor: the entry of the log that comes next.
        recording: whether entries are appended.
    """

    def __init__(self, root: DeviceMesh, names: tuple[str, ...]) -> None:
        super().__init__(root, names)
        self.checker: TypeChecker | None = None
        self.type_log: list[Any] = []
        self.cursor, self.recording = 0, False

    @contextmanager
    def tracked_by(self, checker: TypeChecker) -> Iterator[None]:
        """Make this the current environment in the block, in which `checker` tracks types."""
        before = self.checker, self.recording
        with self.as_current():
            self.checker, self.recording = checker, False
            try:
                yield
            finally:
                self.checker, self.recording = before


def current_mapped_env() -> MappedEnv | None:
    """Return the environment of the innermost mapped function in this thread."""
    return thread_context.axis_env
