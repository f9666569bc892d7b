"""What launchers say in environment variables: torchrun, `launch`, srun, Open MPI and MPICH.

torch reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and so does shardmesh. Under srun and
mpirun the last two are enough: they say that the processes are one job, and their numbers are those
of the launcher. Without them each process is a job of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from .. import errors
from ..abstract_mesh import MOST_RANKS
from ..text import shortened, whole_number

# Set by torchrun, `launch` and most cluster launchers, and read by torch's own env://
# initialization.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LONGEST_NAME = 255  # characters of a host's name, RFC 1123
MESH = "SHARDMESH_MESH"  # the axes of the program's mesh and their sizes: see `mesh_from_env`
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


class Launcher(NamedTuple):
    """Variables in which a launcher numbers processes; "" for one that it lacks."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    def numbers(self) -> dict[str, str]:
        """Return the launcher's variables by torch's."""
        return dict(
            zip(
                ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
                (self.rank, self.size, self.local_rank),
                strict=True,
            )
        )


# mpirun starts its own daemons by srun, whose numbers its processes inherit: so MPI's come first.
LAUNCHERS = (
    Launcher(
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher("mpi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher(
        "slurm",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ),
)


def launchers_of(env: Mapping[str, str], least: int = 2) -> list[Launcher]:
    """Return the launchers that have started at least so many processes.

    The innermost first. For Slurm that is srun, not sbatch.
    """
    return [
        one
        for one in LAUNCHERS
        if _is_number(env, one.rank) and (whole_number(env.get(one.size, "")) or 0) >= least
    ]


def hint_if_unconnected(env: Mapping[str, str]) -> str:
    """Return what to set if a launcher started processes that do not know of each other."""
    launchers = launchers_of(env)
    if not launchers or launch_environment(env) is not None:
        return ""
    name = {"slurm": "srun", "mpi": "mpirun"}[launchers[0].name]
    return (
        f"This process is number {env[launchers[0].rank]} of {env[launchers[0].size]} that {name} "
        "has started, and each is a job of its own: set MASTER_ADDR to the host of the first and "
        "MASTER_PORT to a free port there, in all of them. "
    )


def complete_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the variables of ranks, where they are not set.

    RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as the launcher numbers them.

    The first two only where MASTER_ADDR and MASTER_PORT are set; the last two only from a launcher
    with the same RANK and WORLD_SIZE.
    """
    environment = {name: value for name, value in env.items() if value or name in VISIBLE.values()}
    launchers = launchers_of(env, 1)
    if (
        launchers
        and "MASTER_ADDR" in environment
        and "MASTER_PORT" in environment
        and "RANK" not in environment
        and "WORLD_SIZE" not in environment
    ):
        environment |= {"RANK": env[launchers[0].rank], "WORLD_SIZE": env[launchers[0].size]}
    for one in launchers:
        if (environment.get("RANK"), environment.get("WORLD_SIZE")) == (
            env[one.rank],
            env[one.size],
        ):
            if _is_number(env, one.local_rank):
                environment.setdefault("LOCAL_RANK", env[one.local_rank])
            if local_size := _local_size(env, one):
                environment.setdefault("LOCAL_WORLD_SIZE", local_size)
    return environment


def launch_environment(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (rank, world size) from the variables that launchers set.

    None if none of them makes this process a part of a job.

    Raises: LaunchEnvironmentError when some are missing or invalid.
    """
    env = complete_environment(os.environ if env is None else env)
    missing = [name for name in REQUIRED if name not in env]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        present = {name: env[name] for name in REQUIRED if name in env}
        raise errors.LaunchEnvironmentError(
            f"the environment has {', '.join(map('='.join, present.items()))} but not "
            f"{', '.join(missing)}. Start the program with torchrun --nproc-per-node N program.py, "
            f"or set all of {', '.join(REQUIRED)} in every process; for a single process unset "
            f"{', '.join(present)}."
        )
    rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if size > MOST_RANKS:
        raise errors.LaunchEnvironmentError(
            f"WORLD_SIZE={size}: a job has at most {MOST_RANKS} ranks."
        )
    if not 0 <= rank < size:
        raise errors.LaunchEnvironmentError(
            f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to WORLD_SIZE - 1."
        )
    if port > 65535:
        raise errors.LaunchEnvironmentError(
            f"MASTER_PORT={port}: a port is a number from 0 to 65535."
        )
    if port == 0 and size > 1:
        raise errors.LaunchEnvironmentError(
            "MASTER_PORT=0: the ranks would not find each other; write a free port of the host of "
            "rank 0."
        )
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in env:
            _number(env, name)
    if (
        "\0" in env["MASTER_ADDR"]
        or not env["MASTER_ADDR"].isprintable()
        or len(env["MASTER_ADDR"]) > _LONGEST_NAME
    ):
        raise errors.LaunchEnvironmentError(
            f"MASTER_ADDR={shortened(env['MASTER_ADDR'], 80)!r}: it must be the name or address of "
            "a host."
        )
    return rank, size


def device_index(
    env: Mapping[str, str], device_type: str, count: int, is_alone: bool = False
) -> int | None:
    """Return which of `count` visible devices belongs to this process.

    LOCAL_RANK (never RANK), or the only one; None leaves the choice.

    `srun --gpus-per-task=1` and a `CUDA_VISIBLE_DEVICES` for each process leave one visible device,
    whose index is 0 on every rank.

    Args:
        is_alone: whether a choice is needed only if there is a LOCAL_RANK: the process is its own
            job, or the program has chosen.

    Raises: LaunchEnvironmentError when that is unknown, or there is no such device.
    """
    env = complete_environment(env)
    if "LOCAL_RANK" not in env:
        if count == 1 or is_alone or launch_environment(env) is None:
            return None
        raise errors.LaunchEnvironmentError(
            f"LOCAL_RANK is not set and this process sees {visible(env, device_type, count)}, so "
            "it is unknown which one to use. Start the program with torchrun, or set LOCAL_RANK to "
            "the index of the process on its machine."
        )
    index = _number(env, "LOCAL_RANK")
    if count == 1:
        return 0
    if index >= count:
        raise errors.LaunchEnvironmentError(
            f"LOCAL_RANK={index} but this process sees {visible(env, device_type, count)}: start "
            f"at most {count} processes on this machine (torchrun --nproc-per-node {count})."
        )
    return index


def visible(env: Mapping[str, str], device_type: str, count: int) -> str:
    """Return how many devices there are, and the variable that may hide others.

    "1 cuda device (CUDA_VISIBLE_DEVICES='2')".
    """
    name = VISIBLE.get(device_type, "")
    return f"{count or 'no'} {device_type} device{'s'[: count != 1]}" + (
        f" ({name}={env[name]!r})" if name in env else ""
    )


def _local_size(env: Mapping[str, str], launcher: Launcher) -> str:
    """Return how many processes of the job are on this host; "" if the launcher does not say."""
    if launcher.name != "slurm":
        return env[launcher.local_size] if _is_number(env, launcher.local_size) else ""
    # "4(x2),3": two nodes with four tasks, one with three; SLURM_NODEID counts them
    runs = re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", env.get(launcher.local_size, ""))
    node = whole_number(env.get("SLURM_NODEID", ""))
    if node is None:
        return runs[0][0] if runs and len({tasks for tasks, _ in runs}) == 1 else ""
    for tasks, times in runs:
        if node < int(times or 1):
            return tasks
        node -= int(times or 1)
    return ""


def _is_number(env: Mapping[str, str], name: str) -> bool:
    return whole_number(env.get(name, "")) is not None


def _number(env: Mapping[str, str], name: str) -> int:
    number = whole_number(env[name])
    if number is None:
        raise errors.LaunchEnvironmentError(
            f"{name}={shortened(env[name], 80)!r}: it must be a whole number."
        )
    return number
