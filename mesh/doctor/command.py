"""The command `python -m shardmesh doctor`: examine the machine and the job, and print what is
wrong and how to fix it.
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

from ..abstract_mesh import AbstractMesh
from ..launch.local_processes import LaunchError, launch
from ..monitor.recording.cleanup import remove_left
from ..monitor.recording.files import parent_folders
from ..text import printable
from .bandwidth import Measured, measure
from .checks import clocks, collectives, device_of_each_rank, findings, hosts, merged, speed
from .facts import Facts, Place, facts
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
_MOST_NPROCS, _MOST_PER_CORE = 64, 4  # of --nprocs
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
)
_NEEDED += ("hostname", "master address", "master port")
_LOUDER = "TORCH_CPP_LOG_LEVEL=INFO NCCL_DEBUG=INFO python -m shardmesh doctor   # says more"


def add_to(commands: Any, parse_mesh: Callable[[str], AbstractMesh]) -> None:
    """Add the command to an argparse parser's subparsers; its `run` takes the parsed arguments.

    Args:
        parse_mesh: makes a mesh of text like "dp=2,tp=4"; raises ValueError.
    """
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
    parser.set_defaults(run=lambda arguments: _run(parser, arguments, parse_mesh))


def _run(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    parse_mesh: Callable[[str], AbstractMesh],
) -> int:
    if arguments.fix:
        _fix()
    here = facts()
    is_job = here.place.launcher != "none"
    try:
        given = None if arguments.mesh is None else parse_mesh(arguments.mesh)
        mesh = (
            _in_job(given, arguments.nprocs, here)
            if is_job
            else _alone(given, arguments.nprocs, here)
        )
    except ValueError as error:
        parser.error(str(error))
    show = Report.to_json if arguments.json else str
    examined = _examine_job(here, mesh, show) if is_job else _examine_host(here, mesh)
    if here.place.rank == 0:
        print(show(examined), flush=True)
    return examined.exit_status


def _fix() -> None:
    """Delete the folders of dead jobs, and say so on stderr: stdout may be JSON. Of several ranks
    of a host each deletes what it finds.
    """
    for folder in remove_left(parent_folders()):
        print(
            f"shardmesh doctor: deleted {printable(str(folder))}, which a dead job had left",
            file=sys.stderr,
            flush=True,
        )


# ---------------------------------------------------------------------------------- the mesh to try


@dataclass(frozen=True, slots=True)
class _Mesh:
    """The mesh on which collectives are tried: arguments of `measure`."""

    device_type: str
    sizes: tuple[int, ...]
    names: tuple[str, ...]


def _in_job(given: AbstractMesh | None, nprocs: int | None, here: Facts) -> _Mesh:
    """Return a mesh over all ranks of the job. Raises: ValueError if the arguments do not fit."""
    size = here.place.size
    if nprocs is not None:
        raise ValueError(
            f"--nprocs {nprocs}: this process is rank {here.place.rank} of a job of {size} "
            "already; leave --nprocs out"
        )
    if given is not None and given.size() != size:
        raise ValueError(
            f"--mesh {given!r} has {given.size()} ranks, but the job has {size}: "
            f"make their product {size}"
        )
    return _over(given, size, here)


def _alone(given: AbstractMesh | None, nprocs: int | None, here: Facts) -> _Mesh:
    """Return a mesh over processes here. Raises: ValueError if arguments contradict each other."""
    size = nprocs if given is None else given.size()
    if nprocs not in (None, size):
        raise ValueError(
            f"--mesh {given!r} has {size} ranks, but --nprocs is {nprocs}: leave one of them out"
        )
    if size is None:
        count = len(here.devices.found)
        size = count if count > 1 else min(_MOST_LOCAL, max(2, here.system.cores))
    if size > (most := max(_MOST_NPROCS, _MOST_PER_CORE * here.system.cores)):
        raise ValueError(
            f"{size} processes are more than this host can start at once ({most}): "
            "write a smaller --nprocs or --mesh"
        )
    if size < 2:
        raise ValueError(
            f"collectives need at least 2 processes, got {size}: write --nprocs 2, or more"
        )
    return _over(given, size, here)


def _over(given: AbstractMesh | None, size: int, here: Facts) -> _Mesh:
    local = min(size, here.place.local_size) if here.place.size > 1 else size
    device_type = (
        "cuda"
        if 1 < local <= len(here.devices.found) or (here.place.size > 1 and here.has_own_device)
        else "cpu"
    )
    return (
        _Mesh(device_type, (size,), (_AXIS,))
        if given is None
        else _Mesh(device_type, given.shape, given.axis_names)
    )


# ------------------------------------------------------------------------------------------ looking


def _examine_host(here: Facts, mesh: _Mesh) -> Report:
    """Try collectives on processes started for it, and return the report."""
    size, checks = prod(mesh.sizes), findings(here)
    subject = f"host {here.network.hostname}, {size} processes started to try out collectives"
    if needed := _missing(checks):
        return Report(subject, checks | {"collectives": _not_tried(needed)})
    try:
        measured = launch(
            measure,
            size,
            (mesh.device_type, mesh.sizes, mesh.names, _SECONDS),
            timeout=_limit(mesh),
        )[0]
    except LaunchError as error:
        return Report(subject, checks | {"collectives": _failed(error)})
    return Report(subject, checks | _tried(measured, mesh, False), measured.bandwidth)


def _examine_job(here: Facts, mesh: _Mesh, show: Callable[[Report], str]) -> Report:
    """Try collectives on the ranks of the job, which all return the same report. End this process
    where ranks cannot connect.
    """
    place, checks = here.place, findings(here)
    own = Report(f"rank {place.rank} of {place.size} on host {here.network.hostname}", checks)
    if needed := _missing(checks):
        _give_up(replace(own, checks=checks | {"collectives": _not_tried(needed)}), show, place)
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
        measured = _measured(mesh, here)
    except Exception as error:  # whatever it is, the job would fail with it
        _give_up(replace(own, checks=checks | {"collectives": _failed(error)}), show, place)
    timer.cancel()
    return _together(measured, mesh)


def _measured(mesh: _Mesh, here: Facts) -> Measured:
    starts = not dist.is_initialized()
    measured = measure(mesh.device_type, mesh.sizes, mesh.names, _SECONDS, here)
    if starts:
        dist.destroy_process_group()
    return measured


def _together(measured: Measured, mesh: _Mesh) -> Report:
    everyone = [one for one in measured.everyone if one is not None]
    names = [one.network.hostname for one in everyone]
    checks = merged([findings(one) for one in everyone])
    devices = device_of_each_rank(everyone, mesh.device_type)
    checks |= {
        "hosts": hosts(names),
        "device of each rank": devices,
        "clocks": clocks(measured.clocks),
    }
    checks |= _tried(measured, mesh, len(set(names)) > 1)
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
            f"{name}: {found.found}"
            for name, found in report.checks.items()
            if found.status == "fault"
        )
        print(f"shardmesh doctor: {report.subject}: {faults}", file=sys.stderr, flush=True)
    os._exit(1)


def _limit(mesh: _Mesh) -> float:
    return _LIMIT_S + 2 * _SECONDS * len(mesh.names)


def _missing(checks: Mapping[str, Finding]) -> list[str]:
    return [name for name in _NEEDED if checks[name].status == "fault"]


def _tried(measured: Measured, mesh: _Mesh, has_other_hosts: bool) -> dict[str, Finding]:
    rows = measured.bandwidth
    group = {"process group": ok(measured.group)} if measured.group else {}
    return group | {
        "collectives": collectives(rows),
        "speed": speed(rows, mesh.device_type, has_other_hosts),
    }


def _not_tried(needed: Sequence[str]) -> Finding:
    return warning(
        f"not tried, because of the fault in: {', '.join(needed)}",
        "fix that first, then run this again",
    )


def _failed(error: Exception) -> Finding:
    """Return the error in one line, without the traceback that `launch` appends."""
    text = " ".join(str(error).partition("\n\n---")[0].split())
    return fault(
        f"{type(error).__name__}: {text[:_MOST_TEXT]}{' ...' if len(text) > _MOST_TEXT else ''}",
        _LOUDER,
    )
