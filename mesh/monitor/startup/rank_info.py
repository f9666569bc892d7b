"""What a rank publishes at start-up: which process it is, and what must be equal on all ranks."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...text import is_secret, ranks_text, shortened
from ...version import __version__
from ..diagnosis.votes import minority, parties_by
from ..recording.job_directory import boot_id, born, pid_space, process_state
from ..store_keys import StoreKeys
from ..store_values import MOST_RANKS, checked, has_fields, json_object, whole

# Variables that change what ranks send each other, or how they connect: where they differ, ranks
# hang or compute different bits. Names of interfaces, devices and files are not among them: those
# differ from host to host in healthy jobs.
ALIKE = (
    "TORCH_DISTRIBUTED_DEBUG",  # DETAIL adds collectives of its own
    "TORCH_DIST_INIT_BARRIER",
    "TORCH_GLOO_LAZY_INIT",
    "TORCH_NCCL_RANKS_PER_ROOT",
    "GLOO_DEVICE_TRANSPORT",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_BUFFSIZE",
    "NCCL_NTHREADS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NET",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_COMM_BLOCKING",
    "NVIDIA_TF32_OVERRIDE",
)
_OWN = "SHARDMESH_"
_PER_HOST = ("SHARDMESH_WATCH_DIR",)
_MOST_PID = 1 << 31
_NAMED = 8  # outliers whose processes are listed


@dataclass(frozen=True)
class RankInfo:
    """A process that is a rank of a job that starts.

    Attributes:
        rank: as RANK says.
        host, pid: where it runs.
        machine: equal for processes that can look each other up by pid.
        born: start time of the process, as its system counts.
        start: how many times this process has started a default group before.
        job: the launcher's name for the job; "" if it has none.
        alike: what must be the same on every rank, WORLD_SIZE first.
        device: a name of its device, "" where ranks may share it.
    """

    rank: int
    host: str
    pid: int
    machine: str
    born: int
    start: int
    job: str
    alike: dict[str, str]
    device: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> RankInfo:
        """Return the rank info in a text that anybody may have written. Raises: ValueError."""
        fields = has_fields(
            json_object(text if isinstance(text, str) else text.decode()),
            RankInfo.__dataclass_fields__,
        )
        names = ("host", "machine", "job", "device")
        texts = {name: shortened(checked(fields[name], str)) for name in names}
        alike = {
            shortened(key): shortened(checked(value, str))
            for key, value in checked(fields["alike"], dict).items()
        }
        rank = whole(fields["rank"], MOST_RANKS - 1)
        pid = whole(fields["pid"], _MOST_PID)
        numbers = whole(fields["born"]), whole(fields["start"])
        return RankInfo(
            rank,
            texts["host"],
            pid,
            texts["machine"],
            *numbers,
            texts["job"],
            alike,
            texts["device"],
        )

    @property
    def place(self) -> str:
        return f"process {self.pid} on host {self.host}"

    @property
    def size(self) -> str:
        return self.alike.get("WORLD_SIZE", "?")

    def is_same_process(self, other: RankInfo) -> bool:
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)

    def is_gone(self) -> bool:
        """Return whether its process is known to have ended; on other hosts that is unknown."""
        if self.machine != machine():
            return False
        state = process_state(self.pid)
        return state is None or state[0] in "ZX" or state[1] != self.born


def own_rank_info(
    rank: int, alike: Mapping[str, str], start: int, env: Mapping[str, str], device: str = ""
) -> RankInfo:
    pid = os.getpid()
    return RankInfo(
        rank,
        socket.gethostname(),
        pid,
        machine(),
        born(pid),
        start,
        job_of(env),
        dict(alike),
        device,
    )


def job_of(env: Mapping[str, str]) -> str:
    """Return the launcher's name for the job; torchrun's static rendezvous calls each "none"."""
    name = env.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def machine() -> str:
    """Return a text that is equal for processes that see each other's process numbers."""
    return f"{boot_id()}/{pid_space()}"


def file_store_fault(store: Any, rank: int) -> str:
    """Return what is wrong if a file store knows another process as this rank, else "".

    A killed job's, or a second one.
    """
    own = own_rank_info(rank, {}, 0, os.environ)
    keys = StoreKeys(store, "shardmesh/file")
    holder = keys.claim(str(rank), own.to_json(), RankInfo.from_json)
    if holder.is_same_process(own):
        return ""
    was = (
        "has ended, so the file was left by a job that was killed"
        if holder.is_gone()
        else "has the same rank"
    )
    return (
        f"rank {rank} ({own.place}) is already registered in the file store of "
        f"init_process_group: {holder.place} {was}. Remove the "
        'file before each start, or let torchrun find the ranks (init_method="env://").'
    )


def what_must_agree(
    size: int, device_type: str, backend: str, env: Mapping[str, str]
) -> dict[str, str]:
    """Return name and value of everything that must be the same on all ranks."""
    values = {
        "WORLD_SIZE": str(size),
        "shardmesh": __version__,
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "device type": device_type,
        "backend": backend,
    }
    if "nccl" in backend and dist.is_nccl_available():  # often a separate package
        from torch.cuda import nccl

        values["NCCL"] = ".".join(map(str, nccl.version()))
    names = sorted(
        name for name in env if name in ALIKE or (name.startswith(_OWN) and name not in _PER_HOST)
    )
    return values | {name: env[name] for name in names if not is_secret(name)}


def disagreement(infos: Sequence[RankInfo], missing: Sequence[int] = ()) -> str:
    """Return what differs between these ranks, and which are the outliers; "" if they agree.

    Args:
        missing: ranks that have not arrived yet, and so have no vote.
    """
    infos = sorted(infos, key=lambda info: info.rank)
    names = dict.fromkeys(name for info in infos for name in info.alike)
    differing = [name for name in names if len({info.alike.get(name) for info in infos}) > 1]
    if not differing:
        return ""
    outliers = {rank for name in differing for rank in _outliers(infos, name)}
    who = "the ranks do not agree"
    if outliers:
        who = (
            f"{ranks_text(sorted(outliers))} {'does' if len(outliers) == 1 else 'do'} not fit the "
            "others"
        )
    processes = [f"  rank {info.rank} is {info.place}" for info in infos if info.rank in outliers][
        :_NAMED
    ]
    if missing and "WORLD_SIZE" not in differing:
        processes.append(f"  {ranks_text(missing)} had not come yet")
    return "\n".join([f"{who}:", *(_line(infos, name) for name in differing), *processes, _ADVICE])


def shared_device(infos: Sequence[RankInfo]) -> str:
    """Return which ranks of a host use one device, where each needs its own; "" if none do."""
    by_device: dict[tuple[str, str], list[int]] = {}
    for info in sorted(infos, key=lambda info: info.rank):
        if info.device:
            by_device.setdefault((info.host, info.device), []).append(info.rank)
    shared = [
        f"  {ranks_text(ranks)}: device {device} of host {host}"
        for (host, device), ranks in by_device.items()
        if len(ranks) > 1
    ]
    if not shared:
        return ""
    return "\n".join(
        ["ranks share a device, but NCCL needs one for each:", *shared[:_NAMED], _ONE_DEVICE_EACH]
    )


_ONE_DEVICE_EACH = (
    "Start at most as many processes on a machine as it has devices, each with its own LOCAL_RANK, "
    "and set CUDA_VISIBLE_DEVICES to the same devices for all of them or to one device for each."
)
_ADVICE = (
    "Start every rank with the same number of ranks, versions, device type, backend and settings."
)


def _parties(infos: Sequence[RankInfo], name: str) -> list[list[RankInfo]]:
    return sorted(parties_by(infos, lambda info: info.alike.get(name)), key=len)


def _outliers(infos: Sequence[RankInfo], name: str) -> tuple[int, ...]:
    return minority([[info.rank for info in party] for party in _parties(infos, name)])


def _line(infos: Sequence[RankInfo], name: str) -> str:
    said = []
    for party in _parties(infos, name):
        value = party[0].alike.get(name)
        said.append(
            f"{ranks_text([info.rank for info in party])} {'has' if len(party) == 1 else 'have'} "
            f"{value or 'nothing'}"
        )
    tie = "" if _outliers(infos, name) else " (no majority)"
    return f"  {name}: {', '.join(said)}{tie}"
