"""The command `python -m shardmesh doctor`.

Examine the machine and the job, and print what is wrong and how to fix it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import torch.distributed as dist

from ..abstract_mesh import AbstractMesh, axes_text, parse_mesh
from ..launch.local_processes import LaunchError, check_process_count, launch
from ..monitor.recording.cleanup import remove_left
from ..monitor.recording.files import parent_folders
from ..text import printable
from .bandwidth import Measured, measure
from .checks import clocks, collectives, device_of_each_rank, findings, hosts, speed, worst_findings
from .facts import Facts, Place, collect_facts
from .findings import Finding, fault, ok, warning
from .report import Report

EXAMPLE = """\
  python -m shardmesh doctor
  python -m shardmesh doctor --fix
  torchrun --nproc-per-node 4 -m shardmesh doctor --mesh dp=2,tp=2
"""
_SECONDS = 2.0  # per axis
# for connecting and measuring: torch alone takes up to half of it to start on a cold machine
_LIMIT_S = 120.0
_MOST_LOCAL = 4  # processes that are started to try CPUs
_AXIS = "ranks"
_MOST_TEXT = 600  # characters of an error
# With a fault in one of these checks ranks cannot connect, or would wait in vain.
_NEEDED = (
    "torch",
    "backends",
    "devices",
    "memory",
    "shared memory",
    "launcher",
    "settings",
    "gloo interface",
    "hostname",
    "master address",
    "master port",
)
_LOUDER = "TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO python -m shardmesh doctor   # says more"


def add_to(commands: Any) -> None:
    """Add the command to an argparse parser's subparsers; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with this machine or job, and what to do about it",
        description="Looks at the machine and at how the job is started, tries out collectives, "
        "and says what is wrong and how to fix it. Alone it starts processes of its own; under "
        "torchrun it uses the job's. The exit status is 1 if there is a fault.",
        epilog=f"examples:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--fix",
        action="store_true",
        help="first delete what dead jobs of this user have left, and say what",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")
    parser.add_argument(
        "--nprocs",
        metavar="N",
        type=int,
        help="how many processes to start (one per GPU; else 2 to 4, by the cores)",
    )
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        help="along which axes to try collectives (one, over all ranks)",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.fix:
        _fix()
    facts = collect_facts()
    is_job = facts.place.launcher != "none"
    try:
        abstract_mesh = None if arguments.mesh is None else parse_mesh(arguments.mesh)
        mesh = (
            _mesh_of_job(abstract_mesh, arguments.nprocs, facts)
            if is_job
            else _mesh_of_host(abstract_mesh, arguments.nprocs, facts)
        )
    except ValueError as error:
        parser.error(str(error))
    show = Report.to_json if arguments.json else str
    examined = _examine_job(facts, mesh, show) if is_job else _examine_host(facts, mesh)
    if facts.place.rank == 0:
        print(show(examined), flush=True)
    return examined.exit_status


def _fix() -> None:
    """Delete the folders of dead jobs, and say so on stderr: stdout may be JSON.

    Of several ranks of a host each deletes what it finds.
    """
    for folder in remove_left(parent_folders()):
        print(
            f"shardmesh doctor: deleted {printable(str(folder))}, which a dead job had left",
            file=sys.stderr,
            flush=True,
        )


# -- the mesh to try -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The mesh on which collectives are tried: arguments of `measure`."""

    device_type: str
    sizes: tuple[int, ...]
    names: tuple[str, ...]


def _mesh_of_job(abstract_mesh: AbstractMesh | None, nprocs: int | None, facts: Facts) -> _Mesh:
    """Return a mesh over all ranks of the job. Raises: ValueError when it does not fit."""
    size = facts.place.size
    if nprocs is not None:
        raise ValueError(
            f"--nprocs {nprocs}: this process is rank {facts.place.rank} of a job of {size} "
            f"already; leave --nprocs out"
        )
    if abstract_mesh is not None and abstract_mesh.size() != size:
        raise ValueError(
            f"--mesh {abstract_mesh!r} has {abstract_mesh.size()} ranks, but the job has {size}: "
            f"make their product {size}"
        )
    return _mesh_of_size(abstract_mesh, size, facts)


def _mesh_of_host(abstract_mesh: AbstractMesh | None, nprocs: int | None, facts: Facts) -> _Mesh:
    """Return a mesh over processes of this host. Raises: ValueError when arguments conflict."""
    size = nprocs if abstract_mesh is None else abstract_mesh.size()
    if nprocs not in (None, size):
        raise ValueError(
            f"--mesh {_as_argument(abstract_mesh)} has {size} ranks, but --nprocs is {nprocs}: "
            "leave one of them out"
        )
    if size is None:
        count = len(facts.devices.usable)
        size = count if count > 1 else min(_MOST_LOCAL, max(2, facts.system.cores))
    try:
        check_process_count(size, facts.system.cores)
    except ValueError as error:
        raise ValueError(f"{error}: write a smaller --nprocs or --mesh") from None
    if size < 2:
        raise ValueError(
            f"collectives need at least 2 processes, got {size}: write --nprocs 2, or more"
        )
    return _mesh_of_size(abstract_mesh, size, facts)


def _as_argument(mesh: AbstractMesh | None) -> str:
    """Return a mesh as it is written after --mesh."""
    return "" if mesh is None else axes_text(mesh.shape, mesh.axis_names).replace(" ", "")


def _mesh_of_size(abstract_mesh: AbstractMesh | None, size: int, facts: Facts) -> _Mesh:
    local = min(size, facts.place.local_size) if facts.place.size > 1 else size
    device_type = (
        "cuda"
        if 1 < local <= len(facts.devices.usable) or (facts.place.size > 1 and facts.has_own_device)
        else "cpu"
    )
    return (
        _Mesh(device_type, (size,), (_AXIS,))
        if abstract_mesh is None
        else _Mesh(device_type, abstract_mesh.shape, abstract_mesh.axis_names)
    )


# -- trying collectives ----------------------------------------------------------------------------


def _examine_host(facts: Facts, mesh: _Mesh) -> Report:
    """Try collectives on processes started for it, and return the report."""
    size = prod(mesh.sizes)
    checks = findings(facts)
    subject = f"host {facts.network.hostname}, {size} processes started to try out collectives"
    if needed := _faulty_checks(checks):
        return Report(subject, checks | {"collectives": _blocked_finding(needed)})
    try:
        measured = launch(
            measure,
            size,
            (mesh.device_type, mesh.sizes, mesh.names, _SECONDS),
            timeout=_limit(mesh),
        )[0]
    except LaunchError as error:
        return Report(subject, checks | {"collectives": _error_finding(error)})
    return Report(subject, checks | _collective_findings(measured, mesh, False), measured.bandwidth)


def _examine_job(facts: Facts, mesh: _Mesh, show: Callable[[Report], str]) -> Report:
    """Try collectives on the ranks of the job, which all return the same report.

    End this process where ranks cannot connect.
    """
    place = facts.place
    checks = findings(facts)
    own = Report(f"rank {place.rank} of {place.size} on host {facts.network.hostname}", checks)
    if needed := _faulty_checks(checks):
        _give_up(
            replace(own, checks=checks | {"collectives": _blocked_finding(needed)}), show, place
        )
    late = fault(
        f"not done within {_limit(mesh):.0f} s: does every rank run this, and can the hosts reach "
        "each other?",
        _LOUDER,
    )
    timer = threading.Timer(
        _limit(mesh), _give_up, (replace(own, checks=checks | {"collectives": late}), show, place)
    )
    timer.daemon = True
    timer.start()
    try:
        measured = _measure_on_job(mesh, facts)
    except Exception as error:  # whatever it is, the job would fail with it
        _give_up(replace(own, checks=checks | {"collectives": _error_finding(error)}), show, place)
    timer.cancel()
    return _job_report(measured, mesh)


def _measure_on_job(mesh: _Mesh, facts: Facts) -> Measured:
    starts = not dist.is_initialized()
    measured = measure(mesh.device_type, mesh.sizes, mesh.names, _SECONDS, facts)
    if starts:
        dist.destroy_process_group()
    return measured


def _job_report(measured: Measured, mesh: _Mesh) -> Report:
    everyone = [one for one in measured.everyone if one is not None]
    names = [one.network.hostname for one in everyone]
    checks = worst_findings([findings(one) for one in everyone])
    devices = device_of_each_rank(everyone, mesh.device_type)
    checks |= {
        "hosts": hosts(names),
        "device of each rank": devices,
        "clocks": clocks(measured.clocks),
    }
    checks |= _collective_findings(measured, mesh, len(set(names)) > 1)
    return Report(
        f"a job of {len(names)} ranks on {', '.join(dict.fromkeys(names))}",
        checks,
        measured.bandwidth,
    )


def _give_up(report: Report, show: Callable[[Report], str], place: Place) -> NoReturn:
    """Print what is known, once per host, and end the process: torch's threads may wait on."""
    if place.rank == 0 or place.local_rank == 0:
        print(show(report), flush=True)
    else:
        faults = "; ".join(
            f"{name}: {finding.facts}"
            for name, finding in report.checks.items()
            if finding.status == "fault"
        )
        print(f"shardmesh doctor: {report.subject}: {faults}", file=sys.stderr, flush=True)
    os._exit(1)


def _limit(mesh: _Mesh) -> float:
    return _LIMIT_S + 2 * _SECONDS * len(mesh.names)


def _faulty_checks(checks: Mapping[str, Finding]) -> list[str]:
    return [name for name in _NEEDED if checks[name].status == "fault"]


def _collective_findings(
    measured: Measured, mesh: _Mesh, has_other_hosts: bool
) -> dict[str, Finding]:
    rows = measured.bandwidth
    group = {"process group": ok(measured.group)} if measured.group else {}
    return group | {
        "collectives": collectives(rows),
        "speed": speed(rows, mesh.device_type, has_other_hosts),
    }


def _blocked_finding(needed: Sequence[str]) -> Finding:
    return warning(
        f"not tried, because of the fault in: {', '.join(needed)}",
        "fix that first, then run this again",
    )


def _error_finding(error: Exception) -> Finding:
    """Return the error in one line, without the traceback that `launch` appends."""
    text = " ".join(str(error).partition("\n\n---")[0].split())
    return fault(
        f"{type(error).__name__}: {text[:_MOST_TEXT]}{' ...' if len(text) > _MOST_TEXT else ''}",
        _LOUDER,
    )
