"""Device meshes, and the collectives among their ranks.

In processes, in simulated ranks, or in a null world that only counts.
"""

from .abstract_mesh import AbstractMesh
from .calibrate import calibrate
from .comm.current_world import current_world
from .comm.group import CollectiveRecord, Group
from .comm.null import null_world
from .comm.report import CommReport, comm_budget, comm_report
from .comm.work import Work
from .comm.world import World
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
from .make_mesh import make_mesh, process_count, process_index
from .simulated.simulate import simulate
from .topology import Link, Topology

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
