"""Check a host: software, devices, cores, memory, limits. Pure functions of the facts."""

from __future__ import annotations

import re
from math import inf

from ..comm.recording.trace_buffer import BUFFER_BYTES
from ..errors import LaunchEnvironmentError
from ..launch.environment import complete_environment, device_index, visible
from ..text import whole_number
from .facts import Facts, number
from .findings import Finding, fault, ok, size_text, warning

_OLDEST_TORCH = (2, 11)
_TORCH_FOR_CUDA = (
    "pip install torch --index-url https://download.pytorch.org/whl/cu128   # or what fits the "
    "driver"
)
_MEMORY_PER_RANK = 1 << 30  # torch alone, imported and with its groups, takes about half of it
_DOCKER_SHARED = 64 << 20  # docker's default
# three channels of some 10 MB to neighbours of the same host (NCCL's SHM transport)
_NCCL_PER_RANK = 32 << 20
_SOCKETS_PER_RANK = 32  # a few groups, each with a connection to every rank
_FILES = 256  # the interpreter, torch's libraries and caches
# gloo's, the gradient engine's, NCCL's, pinned memory's; and two sets of one per core
_THREADS_PER_RANK = 64
_FREE_SHARE = 0.1  # of a device's memory; less means that another program uses it


def python(facts: Facts) -> Finding:
    return ok(
        f"{facts.software.python} on "
        f"{facts.system.name}{', in a container' if facts.system.container else ''}"
    )


def torch(facts: Facts) -> Finding:
    have = facts.software
    release = tuple(int(part) for part in re.findall(r"\d+", have.torch)[:2])
    if release < _OLDEST_TORCH:
        return fault(
            f"torch {have.torch}; shardmesh needs 2.11 or newer",
            'pip install --upgrade "torch>=2.11"',
        )
    if not have.distributed:
        return fault(
            f"torch {have.torch} was built without torch.distributed",
            "pip install torch   # or build it with USE_DISTRIBUTED=1",
        )
    return ok(
        f"{have.torch}, built for {facts.devices.build or 'the CPU alone'}; shardmesh "
        f"{have.shardmesh}"
    )


def triton(facts: Facts) -> Finding:
    version = facts.software.triton
    if not version and facts.devices.usable:
        return warning(
            "not installed: the library's kernels run as plain torch operators",
            'pip install "shardmesh[gpu]"',
        )
    return ok(version or "not installed, and not needed without a GPU")


def backends(facts: Facts) -> Finding:
    have = facts.software
    nccl = facts.devices.nccl
    if have.distributed and not have.gloo:
        return fault(
            "torch has no gloo, which CPU tensors travel by",
            "pip install torch   # or build it with USE_GLOO=1",
        )
    if facts.devices.usable and not have.nccl:
        return fault("torch has no NCCL, which GPU tensors travel by", _TORCH_FOR_CUDA)
    return ok(
        "gloo (torch's own)"
        + (f", NCCL {nccl}" if nccl else ", NCCL" if have.nccl else "; no NCCL")
    )


def devices(facts: Facts) -> Finding:
    have = facts.devices
    local_size = facts.place.local_size
    if not have.usable:
        return _no_devices(facts)
    if local_size > len(have.usable) and not facts.has_own_device:
        return warning(
            f"{len(have.usable)} devices for {local_size} ranks on this host: meshes on cuda are "
            "impossible, those on cpu are not",
            f"torchrun --nproc-per-node {len(have.usable)} ...",
        )
    taken = [i for i, device in enumerate(have.usable) if device.free < _FREE_SHARE * device.memory]
    if taken:
        names = ", ".join(
            f"{i} ({size_text(have.usable[i].free)} of {size_text(have.usable[i].memory)} free)"
            for i in taken
        )
        return warning(
            f"memory is nearly full on device {names}", "nvidia-smi   # which processes are these?"
        )
    return ok(
        "; ".join(
            f"{i}: {device.name}, {size_text(device.memory)}"
            for i, device in enumerate(have.usable)
        )
    )


def _no_devices(facts: Facts) -> Finding:
    hidden = facts.env.get("CUDA_VISIBLE_DEVICES")
    if not facts.devices.driver:
        return ok("no GPU: ranks compute on the CPU")
    if not facts.devices.build:
        return warning(
            "a GPU driver is loaded, but this torch is built for the CPU alone", _TORCH_FOR_CUDA
        )
    if hidden in ("", "-1"):
        return warning(
            f"CUDA_VISIBLE_DEVICES={hidden} hides all GPUs", "unset CUDA_VISIBLE_DEVICES"
        )
    why = facts.devices.error or "it finds none"
    return fault(
        f"a GPU driver is loaded, but torch cannot use a GPU: {why}",
        "nvidia-smi   # does the driver answer, and fit torch's CUDA? in a container: docker run "
        "--gpus all",
    )


def used_device(facts: Facts) -> int:
    """Return the index of the device that this process uses.

    Raises: LaunchEnvironmentError when that is unknown or does not exist.
    """
    return device_index(facts.env, "cuda", len(facts.devices.usable)) or 0


def own_device(facts: Facts) -> Finding:
    """Return which device this process uses, by which variables."""
    env = complete_environment(facts.env)
    devices = facts.devices.usable
    if not devices:
        return ok("none: no GPU")
    try:
        index = used_device(facts)
    except LaunchEnvironmentError as error:
        return warning(
            str(error),
            f"torchrun --nproc-per-node {len(devices)} ...   # meshes on cpu are possible all the "
            "same",
        )
    by = f"LOCAL_RANK={env['LOCAL_RANK']}" if "LOCAL_RANK" in env else "no LOCAL_RANK"
    identity = devices[index].identity
    return ok(
        f"cuda:{index}{identity and f' ({identity})'}: {by}, "
        f"{visible(facts.env, 'cuda', len(devices))}"
    )


def peer_access(facts: Facts) -> Finding:
    pairs = facts.devices.no_peers
    count = len(facts.devices.usable)
    if pairs:
        text = ", ".join(f"{a}->{b}" for a, b in pairs[:6]) + (", ..." if len(pairs) > 6 else "")
        return warning(
            f"{len(pairs)} of {count * (count - 1)} pairs of devices cannot read each other's "
            f"memory ({text})",
            "nvidia-smi topo -p2p r   # in a virtual machine or with IOMMU on, PCIe ACS forbids it",
        )
    return ok("each device reads every other's memory" if count > 1 else "fewer than two devices")


def cores(facts: Facts) -> Finding:
    have = facts.system.cores
    quota = facts.system.limits.cores
    if quota is not None and quota <= have - 1 and "OMP_NUM_THREADS" not in facts.env:
        return warning(
            f"this process may run on {have} cores, but the container has time for {quota:.3g}: "
            "torch starts a thread for each core, which then wait for each other",
            f"export OMP_NUM_THREADS={max(1, int(quota) // facts.place.local_size)}",
        )
    return ok(f"{have}" + ("" if quota is None else f", with time for {quota:.3g}"))


def threads(facts: Facts) -> Finding:
    setting = facts.env.get("OMP_NUM_THREADS")
    ranks = facts.place.local_size
    cores = _usable_cores(facts)
    fitting = f"export OMP_NUM_THREADS={max(1, cores // ranks)}"
    if setting is None:
        if ranks > 1:
            return warning(
                f"OMP_NUM_THREADS is not set: each of {ranks} ranks starts {cores} threads on "
                f"{cores} cores",
                fitting,
            )
        return ok(
            "OMP_NUM_THREADS is not set: one thread per core; torchrun sets 1 for each rank, "
            "launch the cores per rank"
        )
    first = setting.partition(",")[0]
    if not whole_number(first):
        return fault(f"OMP_NUM_THREADS={setting!r} is not a number of threads", fitting)
    if int(first) * ranks > max(cores, ranks):
        return warning(
            f"OMP_NUM_THREADS={setting} for each of {ranks} ranks is more than the {cores} cores",
            fitting,
        )
    if int(first) == 1 and cores >= 2 * ranks and not facts.devices.usable:
        return warning(
            f"OMP_NUM_THREADS=1, as torchrun sets it, leaves {cores - ranks} of {cores} cores idle",
            fitting,
        )
    return ok(
        f"OMP_NUM_THREADS={setting} for each of {ranks} rank{'s'[: ranks > 1]} on {cores} cores"
    )


def _usable_cores(facts: Facts) -> int:
    quota = facts.system.limits.cores
    return max(1, int(min(facts.system.cores, inf if quota is None else quota)))


def memory(facts: Facts) -> Finding:
    have = facts.system
    limit = facts.system.limits.memory
    ranks = facts.place.local_size
    if not have.memory:
        return ok("not known on this system")
    free = min(have.available, have.available if limit is None else limit)
    text = f"{size_text(free)} available of {size_text(min(have.memory, limit or have.memory))}"
    text += "" if limit is None or limit >= have.memory else " (the container's limit)"
    fix = "free -h   # end what uses it, or raise the container's --memory"
    if free < ranks * _MEMORY_PER_RANK // 4:
        return fault(f"{text}: not enough for torch in {ranks} processes", fix)
    if free < ranks * _MEMORY_PER_RANK:
        return warning(f"{text}: little for {ranks} processes", fix)
    return ok(text)


def shared_memory(facts: Facts) -> Finding:
    have = facts.system.shared
    ranks = facts.place.local_size
    larger = (
        "docker run --shm-size=8g ... (or --ipc=host); elsewhere: mount -o remount,size=8G /dev/shm"
    )
    if not have.total:
        return warning(
            f"{have.folder} is not there or cannot be written: the monitor uses files in the "
            "temporary folder",
            larger,
        )
    text = f"{size_text(have.free)} free of {size_text(have.total)} in {have.folder}"
    needed = ranks * (BUFFER_BYTES + (_NCCL_PER_RANK if facts.devices.usable else 0))
    if have.free < needed:
        return fault(
            f"{text}, but {ranks} ranks need about {size_text(needed)}: they would die with a bus "
            "error",
            larger,
        )
    if have.total <= _DOCKER_SHARED:
        return warning(
            f"{text}, as docker gives by default: data loaders with workers die of it with a bus "
            "error",
            larger,
        )
    return ok(text)


def open_files(facts: Facts) -> Finding:
    (soft, hard), needed = facts.system.open_files, _FILES + _SOCKETS_PER_RANK * facts.place.size
    if soft is None or soft >= needed:
        return ok("no limit" if soft is None else f"at most {soft} in a process")
    fix = f"ulimit -n {2 * needed if hard is None else min(hard, 2 * needed)}"
    if hard is not None and hard < needed:
        fix = (
            f"raise nofile to {2 * needed} in /etc/security/limits.conf   # docker run --ulimit "
            f"nofile={2 * needed}"
        )
    return fault(
        f"at most {soft} in a process, but {facts.place.size} ranks need about {needed} for their "
        "connections",
        fix,
    )


def processes(facts: Facts) -> Finding:
    limits = [
        limit
        for limit in (facts.system.processes, facts.system.limits.processes)
        if limit is not None
    ]
    if not limits:
        return ok("no limit")
    ranks = facts.place.local_size
    cores = _usable_cores(facts)
    needed = ranks * (_THREADS_PER_RANK + 2 * number(facts.env, "OMP_NUM_THREADS", cores))
    if min(limits) < needed:
        return fault(
            f"at most {min(limits)} processes and threads, but {ranks} rank{'s'[: ranks > 1]} may "
            f"start {needed}",
            f"ulimit -u {2 * needed}   # in a container: docker run --pids-limit {2 * needed}",
        )
    return ok(f"at most {min(limits)} processes and threads")


def leftovers(facts: Facts) -> Finding:
    have = facts.system.leftovers
    if not have:
        return ok("none")
    size = size_text(sum(one.bytes for one in have))
    of_torch = [one.path for one in have if not one.is_of_job]
    fixes = ["python -m shardmesh doctor --fix"] if len(of_torch) < len(have) else []
    if of_torch:
        more = (
            f"   # and {len(of_torch) - 8} more; run this again after it"
            if len(of_torch) > 8
            else ""
        )
        fixes.append(f"rm {' '.join(of_torch[:8])}{more}")
    return warning(f"{len(have)} of jobs that are dead ({size})", "; ".join(fixes))
