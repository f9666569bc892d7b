"""Read the resources of this host: cores, memory, limits, shared memory and dead jobs' files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..monitor.recording.cleanup import is_left
from ..monitor.recording.files import is_own, job_folders, parent_folders
from ..monitor.recording.job_directory import process_state
from ..network import within
from ..text import whole_number

_DISK_S = 3.0  # a folder on a dead file server blocks without end
_SHARED = "/dev/shm"
# torch/csrc: NewProcessWideShmHandle, "/torch_<pid>_<random>_<number>"
_OF_TORCH = re.compile(r"torch_([0-9]{1,10})_[0-9A-Za-z_]*")
_UNLIMITED = 1 << 60  # cgroup 1 writes a number near 2^63 for no limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the container (its cgroup); None if there is none.

    Attributes:
        cores: CPU time, in cores.
        memory: bytes.
        processes: processes and threads.
    """

    cores: float | None = None
    memory: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Space:
    """A folder in shared memory: its size and free bytes; both 0 if it cannot be written."""

    folder: str
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder that a dead job left behind, and its bytes."""

    path: str
    bytes: int

    @property
    def is_of_job(self) -> bool:
        """Whether it is a job's folder, which `doctor --fix` deletes, and no file of torch's."""
        return _OF_TORCH.fullmatch(Path(self.path).name) is None


@dataclass(frozen=True, slots=True)
class System:
    """Facts about the host that the checks use.

    Attributes:
        name: the operating system and its version.
        container: whether this is a container.
        cores: the cores that this process may run on.
        memory, available: bytes of memory in all, and those that are free or can be freed; 0 if not
            known.
        limits: of the container.
        open_files: the soft and the hard limit of file descriptors; None is no limit.
        processes: the limit of the user's processes and threads; None is no limit.
        shared: shared memory.
        leftovers: of dead jobs, in shared memory and the monitor's folders.
    """

    name: str
    container: bool
    cores: int
    memory: int
    available: int
    limits: Limits
    open_files: tuple[int | None, int | None]
    processes: int | None
    shared: Space
    leftovers: tuple[Leftover, ...]


def system() -> System:
    """Return the resources of this host. Takes at most some seconds."""
    import platform

    memory = meminfo(read("/proc/meminfo"))
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return System(
        name=platform.platform(),
        container=os.path.exists("/.dockerenv") or os.path.exists("/run/.containerenv"),
        cores=cores,
        memory=memory.get("MemTotal", 0),
        available=memory.get("MemAvailable", 0),
        limits=limits(read),
        open_files=_limit("RLIMIT_NOFILE"),
        processes=_limit("RLIMIT_NPROC")[0],
        shared=within(_DISK_S, _shared_memory, Space(_SHARED, 0, 0)),
        leftovers=within(_DISK_S, lambda: tuple(leftovers(parent_folders(), Path(_SHARED))), ()),
    )


def read(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def meminfo(text: str) -> dict[str, int]:
    """Return bytes by name from the text of /proc/meminfo."""
    parts = (line.split() for line in text.splitlines())
    return {name.rstrip(":"): int(size) * 1024 for name, size, *unit in parts if unit == ["kB"]}


def _limit(name: str) -> tuple[int | None, int | None]:
    try:
        import resource  # which Windows lacks
    except ImportError:
        return None, None
    soft, hard = (
        None if value == resource.RLIM_INFINITY else value
        for value in resource.getrlimit(getattr(resource, name))
    )
    return soft, hard


def _shared_memory() -> Space:
    if not os.access(_SHARED, os.W_OK):
        return Space(_SHARED, 0, 0)
    usage = shutil.disk_usage(_SHARED)
    return Space(_SHARED, usage.total, usage.free)


# -- cgroups ---------------------------------------------------------------------------------------


def limits(read: Callable[[str], str]) -> Limits:
    """Return the limits of this process's cgroup and of those around it: version 2, else 1.

    Args:
        read: returns the text of a file, "" if there is none.
    """
    groups = dict(line.split(":", 2)[1:] for line in read("/proc/self/cgroup").splitlines())
    two = [f"/sys/fs/cgroup{folder}" for folder in _upwards(groups.get("", "/"))]
    one = {
        c: [f"/sys/fs/cgroup/{c}{f}" for f in _upwards(_of_controller(groups, c))]
        for c in ("cpu", "memory", "pids")
    }
    quotas = [read(f"{folder}/cpu.max").split() for folder in two]
    quotas += [
        [read(f"{folder}/cpu.cfs_{part}_us").strip() for part in ("quota", "period")]
        for folder in one["cpu"]
    ]
    memory = [read(f"{folder}/memory.max") for folder in two] + [
        read(f"{f}/memory.limit_in_bytes") for f in one["memory"]
    ]
    pids = [read(f"{folder}/pids.max") for folder in (*two, *one["pids"])]
    return Limits(
        min(_cores(quotas), default=None),
        min(_numbers(memory), default=None),
        min(_numbers(pids), default=None),
    )


def _of_controller(groups: dict[str, str], controller: str) -> str:
    return next((folder for names, folder in groups.items() if controller in names.split(",")), "/")


def _upwards(folder: str) -> Iterator[str]:
    """Yield the folder and its parents: "/a/b", "/a", "".

    A container sees its own group as the root, whatever its name outside.
    """
    while folder.strip("/"):
        yield folder
        folder = folder.rpartition("/")[0]
    yield ""


def _cores(quotas: Iterable[list[str]]) -> Iterator[float]:
    for quota in quotas:
        if len(quota) == 2 and all(map(whole_number, quota)):
            yield int(quota[0]) / int(quota[1])


def _numbers(texts: Iterable[str]) -> Iterator[int]:
    for text in texts:
        number = whole_number(text.strip())
        if number is not None and number < _UNLIMITED:
            yield number


# -- dead jobs -------------------------------------------------------------------------------------


def leftovers(parents: Sequence[Path], shared: Path) -> Iterator[Leftover]:
    """Yield what dead jobs left behind: the monitor's trace buffers, torch's shared tensors."""
    folders = sorted(
        (folder, changed) for parent in parents for changed, folder in job_folders(parent)
    )
    for folder, changed in folders:
        with contextlib.suppress(OSError):  # a job deletes it
            if is_left(folder, changed):
                yield Leftover(str(folder), sum(file.lstat().st_size for file in folder.iterdir()))
    for file in sorted(shared.glob("torch_*")):
        match = _OF_TORCH.fullmatch(file.name)
        with contextlib.suppress(OSError):
            if match and is_own(file.lstat()) and process_state(int(match[1])) is None:
                yield Leftover(str(file), file.lstat().st_size)
