"""Collect the facts of a rank's host and environment, as plain data to send to other ranks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..launch.environment import complete_environment, launchers_of
from ..network import Network, network
from ..text import is_secret, whole_number
from ..version import __version__
from .devices import Devices, devices
from .system import System, system

HIDDEN = "(hidden)"
_LAST_PORT = 65535
DEFAULT_PORT = 29500  # torchrun's default
# Nothing else of the environment is read: reports are pasted into forums, and variables may hold
# passwords.
_PREFIXES = (
    "CUDA_",
    "GLOO_",
    "MASTER_",
    "MPI_LOCAL",
    "NCCL_",
    "OMP_",
    "OMPI_COMM_",
    "PMI_",
    "SHARDMESH_",
    "SLURM_",
    "TORCH",
)
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of software; "" if not installed.

    Attributes:
        python, torch, triton, shardmesh: versions.
        distributed: whether torch was built with torch.distributed.
        gloo, nccl: whether torch has that backend.
    """

    python: str
    torch: str
    triton: str
    shardmesh: str
    distributed: bool
    gloo: bool
    nccl: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a process in its job; alone: rank 0 of 1.

    Attributes:
        launcher: "torchrun", "launch" (or another that keeps the store as torchrun does), "slurm",
            "mpi", "by hand" (the variables are set by an unknown launcher), "none".
        rank, size: in the job.
        local_rank, local_size: on the host; one host by default.
        agent_store: whether the launcher itself listens at MASTER_PORT, so that rank 0 does not.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    agent_store: bool

    @property
    def has_other_hosts(self) -> bool:
        return self.size > self.local_size

    @staticmethod
    def of(env: Mapping[str, str]) -> Place:
        """Return the variables' values; invalid ones are unset (`checks.launcher` reports them)."""
        env = complete_environment(env)
        size = max(1, number(env, "WORLD_SIZE", 1))
        hosts = max(1, number(env, "SLURM_STEP_NUM_NODES", 1))
        local = min(size, max(1, number(env, "LOCAL_WORLD_SIZE", -(-size // hosts))))
        agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(
            _launcher(env), number(env, "RANK", 0), size, number(env, "LOCAL_RANK", 0), local, agent
        )


def number(env: Mapping[str, str], name: str, otherwise: int) -> int:
    value = whole_number(env.get(name, ""))
    return otherwise if value is None else value


def _launcher(env: Mapping[str, str]) -> str:
    if "TORCHELASTIC_MAX_RESTARTS" in env:
        return "torchrun"
    if "TORCHELASTIC_USE_AGENT_STORE" in env:
        return "launch"
    if launchers := launchers_of(env):
        return launchers[0].name
    return "by hand" if "RANK" in env or "WORLD_SIZE" in env else "none"


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one rank: the relevant part of its environment, and what was read of its host."""

    env: Mapping[str, str]
    software: Software
    system: System
    network: Network
    devices: Devices

    @property
    def place(self) -> Place:
        return Place.of(self.env)

    @property
    def has_own_device(self) -> bool:
        """Return whether the launcher shows this process one device of its own.

        Rather than the host having one for several ranks.
        """
        return len(self.devices.usable) == 1 and "CUDA_VISIBLE_DEVICES" in self.env


def collect_facts() -> Facts:
    """Collect the facts here.

    Reads, looks up names and connects to MASTER_PORT; changes nothing. Takes at most about a
    minute.
    """
    env = relevant(os.environ)
    place = Place.of(env)
    master = env.get("MASTER_ADDR", "")
    is_client = place.agent_store and bool(master)
    port = number(env, "MASTER_PORT", DEFAULT_PORT)
    port = port if 0 < port <= _LAST_PORT else DEFAULT_PORT  # `checks.launcher` reports it
    return Facts(env, _software(), system(), network(master, port, is_client), devices())


def relevant(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the checks read, without the values of possible secrets."""
    variables = {
        name: value for name, value in env.items() if name.startswith(_PREFIXES) or name in _NAMES
    }
    return {name: HIDDEN if is_secret(name) else value for name, value in variables.items()}


def _software() -> Software:
    has = dist.is_available()
    return Software(
        python=platform.python_version(),
        torch=str(torch.__version__),
        triton=_version("triton"),
        shardmesh=__version__,
        distributed=has,
        gloo=has and dist.is_gloo_available(),
        nccl=has and dist.is_nccl_available(),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
