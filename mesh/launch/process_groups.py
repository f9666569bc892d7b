"""Start the default process group: read the launch environment, bind the device, rendezvous."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from .. import errors
from ..comm.process import ProcessWorld, process_world
from ..monitor import timeouts
from ..monitor.startup import rendezvous
from ..monitor.startup.rank_info import what_must_agree

# Set by torchrun, `launch` and most cluster launchers, and read by torch's own env:// initialization.
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOST_ONLY = ("cpu", "meta")

_epoch = 0


def start_processes(device_type: str, backend: str | None = None) -> ProcessWorld:
    """Bind this process to its device, start the default process group if there is none, and return the world of processes.

    Raises: LaunchEnvironmentError when the environment is incomplete or wrong, the port is in use, the device does not
        exist, or the ranks differ in their setup (see `monitor/startup/rendezvous.py`), the same text on every rank that can be
        reached; MeshError when the device type or the backend does not fit the default group that exists already.
    Communication: starting the default group waits for all ranks.
    """
    if not dist.is_available():
        _bind_device(device_type)
        return process_world()
    if dist.is_initialized():
        _bind_device(device_type)
    else:
        _start_default_group(device_type, backend)
    _check_backend(device_type, backend)
    return process_world()


def epoch() -> int:
    """Return the number of default groups that this process has started."""
    return _epoch


def local_device(device_type: str) -> torch.device:
    """Return the device of this type that this process is bound to."""
    if device_type in _HOST_ONLY:
        return torch.device(device_type)
    return torch.device(device_type, _module(device_type).current_device())


def launch_environment(env: Mapping[str, str] | None = None) -> tuple[int, int] | None:
    """Return (rank, world size) from the variables that torchrun sets, or None if none of them is set.

    Raises: LaunchEnvironmentError when some are missing or invalid.
    """
    env = os.environ if env is None else env
    missing = [name for name in REQUIRED if not env.get(name)]
    if len(missing) == len(REQUIRED):
        return None
    if missing:
        given = {name: env[name] for name in REQUIRED if env.get(name)}
        raise errors.LaunchEnvironmentError(
            f"the environment has {', '.join(map('='.join, given.items()))} but not {', '.join(missing)}. Start the program with "
            f"torchrun --nproc-per-node N program.py, or set all of {', '.join(REQUIRED)} in every process; for a "
            f"single process unset {', '.join(given)}."
        )
    rank, size, port = (_number(env, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise errors.LaunchEnvironmentError(f"RANK={rank} with WORLD_SIZE={size}: ranks go from 0 to WORLD_SIZE - 1.")
    if port > 65535:
        raise errors.LaunchEnvironmentError(f"MASTER_PORT={port}: a port is a number from 0 to 65535.")
    return rank, size


def _number(env: Mapping[str, str], name: str) -> int:
    if not env[name].isdecimal():
        raise errors.LaunchEnvironmentError(f"{name}={env[name]!r}: it must be a whole number.")
    return int(env[name])


def _default_backend(device_type: str) -> str:
    known = dist.Backend.default_device_backend_map
    if device_type in _HOST_ONLY or device_type not in known or not dist.is_backend_available(known[device_type]):
        return "gloo"
    return f"cpu:gloo,{device_type}:{known[device_type]}"


def _start_default_group(device_type: str, backend: str | None) -> None:
    global _epoch
    try:
        _bind_device(device_type)
        place = launch_environment()
    except errors.LaunchEnvironmentError as error:
        raise rendezvous.notify_ranks(error) from None
    backend = backend or _default_backend(device_type)
    rank, size = place or (0, 1)
    store = HashStore() if place is None else rendezvous.rendezvous(rank, size, what_must_agree(size, device_type, backend, os.environ))
    timeout = timeouts.group_timeout(backend)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    if timeout is not None:
        timeouts.manage(dist.group.WORLD, is_own=False)
    _epoch += 1


def _module(device_type: str) -> Any:
    """Return the torch module of a device type: torch.cuda, torch.xpu, ...

    Raises: MeshError for an unknown device type; LaunchEnvironmentError if there is no such device.
    """
    try:
        parsed = torch.device(device_type)
    except (RuntimeError, TypeError):
        raise errors.MeshError(f'device type {device_type!r}: must be one that torch knows, such as "cpu" or "cuda".') from None
    if parsed.index is not None:
        raise errors.MeshRuntimeError(
            f'device type {device_type!r}: write "{parsed.type}" without an index; LOCAL_RANK chooses the device.'
        )
    module = torch.get_device_module(device_type)
    if not module.is_available():
        raise errors.LaunchEnvironmentError(
            f'device type "{device_type}": torch {torch.__version__} finds no such device in this process. '
            f'Use "cpu", or install a torch build for it and make a device visible.'
        )
    return module


def _bind_device(device_type: str) -> None:
    """Make the device with index LOCAL_RANK (never RANK) the current one, or the only one where the launcher shows each process its own.

    `srun --gpus-per-task=1` and a `CUDA_VISIBLE_DEVICES` for each process leave one visible device, whose index is 0 on every rank.
    """
    if device_type in _HOST_ONLY:
        return
    module = _module(device_type)
    count = module.device_count()
    if "LOCAL_RANK" in os.environ:
        index = _number(os.environ, "LOCAL_RANK")
        if count == 1:
            index = 0
        if index >= count:
            raise errors.LaunchEnvironmentError(
                f"LOCAL_RANK={index} but this process sees {count} {device_type} devices: start at most {count} "
                f"processes on this machine (torchrun --nproc-per-node {count})."
            )
        module.set_device(index)
    elif count > 1 and not dist.is_initialized() and launch_environment() is not None:
        raise errors.LaunchEnvironmentError(
            f"LOCAL_RANK is not set and this process sees {count} {device_type} devices, so it is unknown which one to "
            "use. Start the program with torchrun, or set LOCAL_RANK to the index of the process on its machine."
        )


def _check_backend(device_type: str, backend: str | None) -> None:
    running = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if device_type not in running and device_type != "meta":
        raise errors.MeshError(
            f'a mesh of device type "{device_type}" does not fit the default process group, whose backends are '
            f"{running}. Use one of {sorted(running)}, or start the group with a backend for {device_type}."
        )
    if backend is None:
        return
    wanted = dict(part.split(":") for part in backend.split(",")) if ":" in backend else {device_type: backend}
    if any(running.get(device) != name for device, name in wanted.items()):
        raise errors.MeshError(
            f"backend={backend!r}, but the default process group exists already, with {running}. Omit backend, or "
            "destroy that group first."
        )


rendezvous.notify_of_early_errors()
