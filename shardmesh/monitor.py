"""The monitor of collectives: how ranks are compared, how long they may wait, what took time."""

from shardmesh.mesh.launch.breakpoint import breakpoint
from shardmesh.mesh.launch.process_groups import start
from shardmesh.mesh.monitor.idle import idle
from shardmesh.mesh.monitor.ledger.ledger import Ledger, ledger, mark_step
from shardmesh.mesh.monitor.ledger.stragglers import StragglerReport, straggler_report
from shardmesh.mesh.settings import collective_check, watchdog

__all__ = [
    "Ledger",
    "StragglerReport",
    "breakpoint",
    "collective_check",
    "idle",
    "ledger",
    "mark_step",
    "start",
    "straggler_report",
    "watchdog",
]
