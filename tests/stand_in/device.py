"""The device "standin": a GPU to torch, with autograd's thread for it, streams, events and pinned
memory, whose memory is the host's.

`register` is for a process of its own (`python -m tests.stand_in.scenarios`): a process has one
accelerator.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

NAME = "standin"
_SOURCE = Path(__file__).with_name("device.cpp")
_numbers = iter(range(1 << 62))


def register() -> None:
    """Make "standin" a device of this process."""
    torch.utils.rename_privateuse1_backend(NAME)
    ctypes.CDLL(str(_compiled())).register_device()
    torch._register_device_module(NAME, _module())


def _compiled() -> Path:
    """Return the library, compiled once for each torch and source."""
    root = Path(torch.__file__).parent
    key = hashlib.sha256(f"{torch.__version__} {root} {_SOURCE.read_text()}".encode()).hexdigest()[
        :16
    ]
    library = Path(tempfile.gettempdir()) / f"shardmesh-stand-in-{key}.so"
    if not library.exists():
        include, lib = root / "include", root / "lib"
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "device.so"
            flags = [
                "-O0",
                "-shared",
                "-fPIC",
                "-std=c++20",
                f"-I{include}",
                f"-I{include / 'torch/csrc/api/include'}",
                f"-L{lib}",
            ]
            command = [
                "g++",
                *flags,
                str(_SOURCE),
                "-o",
                str(out),
                "-Wl,--no-as-needed",
                "-lc10",
                "-ltorch_cpu",
            ]
            subprocess.run(command, check=True, capture_output=True, text=True)
            ready = library.with_suffix(f".{next(_numbers)}-{threading.get_native_id()}")
            ready.write_bytes(out.read_bytes())
            ready.rename(library)
    return library


# -- streams ---------------------------------------------------------------------------------------


class Stream:
    """A queue of work. The work runs at once, except for copies to pinned memory, which run when
    the host waits for them.

    Attributes:
        seen: for each stream, how much of its work this stream's next work comes after.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.priority = priority
        self.seen: dict[Stream, int] = {self: 0}

    def step(self) -> int:
        """Add a piece of work and return its number."""
        self.seen[self] += 1
        return self.seen[self]

    def wait_event(self, event: Event) -> None:
        for stream, count in event.seen.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _on_wait("Stream.synchronize")
        run_copies(self.seen)

    def __enter__(self) -> Stream:
        _streams().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams().pop()


class Event:
    """A place in a stream's queue."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seen: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        self.seen = dict((stream or current_stream()).seen)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _on_wait("Event.synchronize")
        run_copies(self.seen)

    def query(self) -> bool:
        run_copies(self.seen)
        return True


DEFAULT = Stream()
_local, _lock = threading.local(), threading.RLock()
_copies: list[tuple[Stream, int, Callable[[], Any]]] = []


def _on_wait(what: str) -> None:
    for mode in _get_current_dispatch_mode_stack():
        mode.on_wait(what)  # type: ignore[attr-defined]


def _streams() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = [DEFAULT]
    return _local.streams


def current_stream(device: Any = None) -> Stream:
    return _streams()[-1]


def delay_copy(copy: Callable[[], Any]) -> None:
    """Run a copy when the host waits for what the current stream has done so far."""
    with _lock:
        stream = current_stream()
        _copies.append((stream, stream.step(), copy))


def run_copies(seen: dict[Stream, int] | None = None) -> None:
    """Run the copies up to these places in the streams' queues; by default all."""
    with _lock:
        late = []
        for stream, number, copy in _copies:
            if seen is None or number <= seen.get(stream, 0):
                copy()
            else:
                late.append((stream, number, copy))
        _copies[:] = late


def _synchronize(device: Any = None) -> None:
    _on_wait("synchronize")
    run_copies()


@contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    with stream or DEFAULT:
        yield


def _module() -> ModuleType:
    module = ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        set_device=lambda device: None,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        manual_seed_all=lambda seed: None,
        Stream=Stream,
        Event=Event,
        current_stream=current_stream,
        stream=_stream,
        default_stream=lambda device=None: DEFAULT,
        synchronize=_synchronize,
    )
    return module
