"""Intercept collectives that torch calls from C++ on a process group, where wrapped Python methods are bypassed.

    DDP            dist.Reducer(..., process_group)       buckets of gradients, during backward
                   dist._broadcast_coalesced(group, ...)  parameters and buffers
    functional     torch.ops._c10d_functional.all_reduce(x, "sum", name of a group)

These get another group with the same backends, of a Python subclass whose collectives C++ asks Python for; it forwards them to the
real group, whose methods are wrapped. The work that it returns is a subclass as well, so that C++ waits for it through Python.

Only groups that are on the CPU alone are replaced, and nothing is replaced while a graph is traced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed import distributed_c10d

_PREFIX = "monitored_"
_METHODS = (
    "allgather", "allgather_into_tensor_coalesced", "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "all_to_all_single",
    "alltoall_base", "barrier", "broadcast", "reduce_scatter", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "send",
    "recv",
)  # fmt: skip

# id of one of torch's groups -> (the group, by a weak reference; the one in its place)
_inner: dict[int, tuple[Callable[[], Any], InnerGroup]] = {}
_names: dict[str, str] = {}


class InnerWork(dist.Work):
    """Work of torch's that is under way; C++ calls `wait`."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        return self._work.wait(timeout) if timeout else self._work.wait()

    def get_future(self) -> Any:
        return self._work.get_future()

    def is_completed(self) -> bool:
        return self._work.is_completed()


_c10d: Any = distributed_c10d  # has a type of its own for names of groups
_ProcessGroup: Any = dist.ProcessGroup  # can be made without a store


class InnerGroup(_ProcessGroup):
    """A group that stands in for one of torch's."""

    def __init__(self, real: Any) -> None:
        super().__init__(real.rank(), real.size())
        self._real = weakref.ref(real)
        self._to_wait_for: list[Any] = []
        backend = getattr(dist.ProcessGroup.BackendType, dist.get_backend(real).upper(), dist.ProcessGroup.BackendType.CUSTOM)
        for device in real._device_types:
            self._register_backend(device, backend, real._get_backend(device))
        self._set_default_backend(backend)
        self._set_group_name(real.group_name)
        self._set_group_desc(real.group_desc)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        real = self._real()
        if real is None:
            raise RuntimeError("this process group was destroyed (torch.distributed.destroy_process_group)")
        work = getattr(real, name)(*args)
        self._wait_before_backward_ends(work)
        return InnerWork(work)

    def _wait_before_backward_ends(self, work: Any) -> None:
        """Wait before backward ends: DDP waits there for futures, in C++, and a callback that runs before it waits in Python."""
        try:
            Variable._execution_engine.queue_callback(work.wait)
        except RuntimeError:  # not inside backward
            return


def _method(name: str) -> Callable[..., Any]:
    def method(self: InnerGroup, *args: Any) -> Any:
        return self._call(name, args)

    return method


for _name in _METHODS:
    setattr(InnerGroup, _name, _method(_name))


def install(put: Callable[[Any, str, Callable[[Any], Any]], None], find: Callable[[Any], Any]) -> None:
    """Replace the groups that C++ gets by those that stand in for monitored ones.

    Args:
        put: replaces an attribute by a function of it.
        find: returns the recorder of a group; None if its calls are not monitored.
    """
    from torch.distributed import _functional_collectives as functional  # imported late, as torch itself does


    def inner_of(real: Any) -> Any:
        recorder = find(real) if type(real) is dist.ProcessGroup else None
        if recorder is None or not recorder.on_cpu:
            return real
        known = _inner.get(id(real))
        if known is not None and known[0]() is real:
            return known[1]
        return _make(real)

    def with_inner(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*map(inner_of, args), **{name: inner_of(value) for name, value in kwargs.items()})

        return call

    def named(original: Callable[..., Any]) -> Callable[..., Any]:
        def group_or_group_name(group: Any) -> Any:
            found = original(group)
            if torch.compiler.is_compiling() or not isinstance(found, str) or torch._C._len_torch_dispatch_stack():
                return found
            real = _c10d._resolve_process_group(found)
            inner = inner_of(real)
            return found if inner is real else _names.setdefault(found, _registered(found, inner))

        group_or_group_name._torchdynamo_inline = original  # what torch.compile traces instead
        return group_or_group_name

    put(dist.Reducer, "__init__", with_inner)
    put(dist, "_broadcast_coalesced", with_inner)
    put(dist, "_verify_params_across_processes", with_inner)
    put(functional, "_group_or_group_name", named)


def _make(real: Any) -> InnerGroup:
    key, name = id(real), real.group_name

    def forget_one(_: Any) -> None:
        _inner.pop(key, None)
        _unregister(name)

    made = InnerGroup(real)
    _inner[key] = weakref.ref(real, forget_one), made
    return made


def _registered(name: str, inner: InnerGroup) -> str:
    if name not in _names:
        _c10d._register_process_group(_PREFIX + name, inner)
    return _PREFIX + name


def _unregister(name: str) -> None:
    known = _names.pop(name, None)
    if known is not None:
        _c10d._unregister_process_group(known)


def forget() -> None:
    """Forget the groups. C++ code that still holds one continues to use it, unmonitored."""
    for name in list(_names):
        _unregister(name)
    _inner.clear()
