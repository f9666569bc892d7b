"""Start the default process group: read the launch environment, bind the device, rendezvous."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from .. import errors
from ..monitor import timeouts
from ..monitor.startup.rank_info import what_must_agree
from ..monitor.torch_calls import hooks
from ..processes.process import ProcessWorld, process_world
from ..settings import check_environment
from . import rendezvous
from .environment import device_index, launch_environment, visible

_HOST_ONLY = ("cpu", "meta")

_epoch = 0


def start_processes(device_type: str, backend: str | None = None) -> ProcessWorld:
    """Bind this process to its device, and return the world of processes.

    Start the default process group if there is none.

    Raises: LaunchEnvironmentError when the environment is incomplete or wrong, the port is in use,
        the device does not exist, or the ranks differ in their setup (see
        `rendezvous.py`), the same text on every rank that can be reached; MeshError
        when the device type or the backend does not fit the default group that exists already.

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


def start() -> None:
    """start(): monitor calls of torch.distributed from here on, in a program without a mesh.

    Call it on every rank at the same place, after `torch.distributed.init_process_group`. The first
    mesh over all ranks does the same, and so does `with sm.session():` where the default group
    exists already.

    Raises: LaunchEnvironmentError without a default process group.

    Communication: a few messages to the job's store; waits for no rank.

    >>> import shardmesh as sm
    >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
    >>> sm.monitor.start()  # doctest: +SKIP
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise errors.LaunchEnvironmentError(
            "sm.monitor.start() monitors calls on process groups, and there is none: call "
            "torch.distributed.init_process_group before it."
        )
    hooks.monitor_calls(process_world().monitor)


def epoch() -> int:
    """Return the number of default groups that this process has started."""
    return _epoch


def local_device(device_type: str) -> torch.device:
    """Return the device of this type that this process is bound to."""
    if device_type in _HOST_ONLY:
        return torch.device(device_type)
    return torch.device(device_type, _module(device_type).current_device())


def _default_backend(device_type: str) -> str:
    known = dist.Backend.default_device_backend_map
    if (
        device_type in _HOST_ONLY
        or device_type not in known
        or not dist.is_backend_available(known[device_type])
    ):
        return "gloo"
    return f"cpu:gloo,{device_type}:{known[device_type]}"


def _start_default_group(device_type: str, backend: str | None) -> None:
    global _epoch
    try:
        check_environment()
        _bind_device(device_type)
        place = launch_environment()
    except errors.LaunchEnvironmentError as error:
        raise rendezvous.notify_ranks(error) from None
    backend = (backend or _default_backend(device_type)).lower()
    rank, size = place or (0, 1)
    if place is None:
        store: Any = HashStore()
    else:
        alike = what_must_agree(size, device_type, backend, os.environ)
        store = rendezvous.rendezvous(rank, size, alike, device=_identity(device_type, backend))
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
        raise errors.MeshError(
            f'device type {device_type!r}: must be one that torch knows, such as "cpu" or "cuda".'
        ) from None
    if parsed.index is not None:
        raise errors.MeshRuntimeError(
            f'device type {device_type!r}: write "{parsed.type}" without an index; LOCAL_RANK '
            f"chooses the device."
        )
    module = torch.get_device_module(device_type)
    if not module.is_available():
        raise errors.LaunchEnvironmentError(
            f'device type "{device_type}": torch {torch.__version__} finds no such device in this '
            f"process: "
            f'{visible(os.environ, device_type, 0)}. Use "cpu", or install a torch build for it '
            f"and make a device visible."
        )
    return module


def _bind_device(device_type: str) -> None:
    """Make this process's device the current one.

    That of `init_process_group(device_id=)`, else one that the program has made the current one
    already, else that of `device_index`.
    """
    if device_type in _HOST_ONLY:
        return
    module = _module(device_type)
    started = dist.is_available() and dist.is_initialized()
    bound = getattr(dist.group.WORLD, "bound_device_id", None) if started else None
    if bound is not None and bound.type == device_type:
        module.set_device(bound.index)
        return
    is_used = getattr(module, "is_initialized", lambda: False)()
    # nothing but the program chooses another than the first
    if is_used and module.current_device() != 0:
        return
    is_alone = dist.get_world_size() == 1 or is_used if started else False
    index = device_index(os.environ, device_type, module.device_count(), is_alone)
    if index is not None:
        module.set_device(index)


def _identity(device_type: str, backend: str) -> str:
    """Return a name of this process's device, the same in all processes of the host.

    "" where ranks may share one, as with gloo.
    """
    if device_type in _HOST_ONLY or "nccl" not in backend:
        return ""
    module, tokens = _module(device_type), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = module.current_device()
    if tokens[0].startswith("MIG-"):  # parts of one device, whose properties may have the same id
        return tokens[index] if index < len(tokens) else ""
    return str(getattr(module.get_device_properties(index), "uuid", ""))


def _check_backend(device_type: str, backend: str | None) -> None:
    running = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if device_type not in running and device_type != "meta":
        raise errors.MeshError(
            f'a mesh of device type "{device_type}" does not fit the default process group, whose '
            f"backends are "
            f"{running}. Use one of {sorted(running)}, or start the group with a backend for "
            f"{device_type}."
        )
    if backend is None:
        return
    backend = backend.lower()
    backends = (
        dict(part.split(":") for part in backend.split(","))
        if ":" in backend
        else {device_type: backend}
    )
    if any(running.get(device) != name for device, name in backends.items()):
        raise errors.MeshError(
            f"backend={backend!r}, but the default process group exists already, with {running}. "
            "Omit backend, or destroy that group first."
        )


rendezvous.notify_of_early_errors()
