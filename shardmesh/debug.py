"""Inspect layouts, communication and errors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardmesh.mesh.comm.null import null_world
from shardmesh.mesh.comm.report import CommReport, comm_budget, comm_report
from shardmesh.sharding.abstract.eval_shape import Evaluated, eval_shape
from shardmesh.sharding.debug.explain import explain
from shardmesh.sharding.debug.inspection import inspect
from shardmesh.sharding.debug.nan_check import debug_nans
from shardmesh.sharding.debug.printing import print
from shardmesh.sharding.debug.visualize import visualize
from shardmesh.sharding.redistribute.plan import plan
from shardmesh.sharding.replicas.check import ReplicaCheck, assert_replicated, check_replicas

if TYPE_CHECKING:
    from shardmesh.sharding.debug.timeline.timeline import Timeline, TimelineEvent, timeline
else:

    def __getattr__(name: str) -> Any:
        if name not in ("Timeline", "TimelineEvent", "timeline"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # With all of sm.jit.
        value = globals()[name] = getattr(
            import_module("shardmesh.sharding.debug.timeline.timeline"), name
        )
        return value


__all__ = [
    "CommReport",
    "Evaluated",
    "ReplicaCheck",
    "Timeline",
    "TimelineEvent",
    "assert_replicated",
    "check_replicas",
    "comm_budget",
    "comm_report",
    "debug_nans",
    "eval_shape",
    "explain",
    "inspect",
    "null_world",
    "plan",
    "print",
    "timeline",
    "visualize",
]
