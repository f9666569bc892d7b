"""Who talks to whom: meshes of ranks, and groups of ranks that run collectives in one of three worlds."""

from .abstract_mesh import AbstractMesh
from .counter import CommBudget, comm_budget
from .device_mesh import DeviceMesh, init_device_mesh
from .errors import (
    CollectiveError,
    CollectiveMismatchError,
    CommBudgetError,
    DeadlockError,
    LaunchEnvironmentError,
    MeshError,
)
from .group import CollectiveRecord, Group, World, current_world
from .null import null_world
from .simulate import simulate

__all__ = [
    "AbstractMesh",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveRecord",
    "CommBudget",
    "CommBudgetError",
    "DeadlockError",
    "DeviceMesh",
    "Group",
    "LaunchEnvironmentError",
    "MeshError",
    "World",
    "comm_budget",
    "current_world",
    "init_device_mesh",
    "null_world",
    "simulate",
]
