"""Who talks to whom: meshes of ranks, and groups of ranks that run collectives in one of three worlds."""

from .abstract_mesh import AbstractMesh
from .calibrate import calibrate
from .counter import CommReport, comm_budget, comm_report
from .device_mesh import DeviceMesh, init_device_mesh
from .errors import (
    CollectiveError,
    CollectiveMismatchError,
    CommBudgetError,
    DeadlockError,
    ImplicitCommError,
    LaunchEnvironmentError,
    MeshError,
)
from .group import CollectiveRecord, Group, World, current_world
from .make_mesh import make_mesh, process_count, process_index
from .null import null_world
from .simulate import simulate
from .topology import Link, Topology
from .work import Work

__all__ = [
    "AbstractMesh",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveRecord",
    "CommBudgetError",
    "CommReport",
    "DeadlockError",
    "DeviceMesh",
    "Group",
    "ImplicitCommError",
    "LaunchEnvironmentError",
    "Link",
    "MeshError",
    "Topology",
    "Work",
    "World",
    "calibrate",
    "comm_budget",
    "comm_report",
    "current_world",
    "init_device_mesh",
    "make_mesh",
    "null_world",
    "process_count",
    "process_index",
    "simulate",
]
