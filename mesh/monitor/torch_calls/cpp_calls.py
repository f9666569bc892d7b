"""Intercept collectives that torch calls from C++ on a process group, past wrapped methods.

    DDP            dist.Reducer(..., process_group)       buckets of gradients, during backward
                   dist._broadcast_coalesced(group, ...)  parameters and buffers
    functional     torch.ops._c10d_functional.all_reduce(x, "sum", name of a group): torch's
                   functional collectives, DTensor's, and those in compiled graphs

Functions of Python that take a group are wrapped. Operators get a kernel for tensors on the CPU,
which replaces the name of the group and calls torch's own; what is traced, or on another device,
does not come there.

They get another group with the same backends, of a Python subclass whose collectives C++ asks
Python for; it forwards them to the real group, whose methods are wrapped. The work that it returns
is a subclass as well, so that C++ waits for it through Python.

Only groups that are on the CPU alone are replaced.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work
from torch.autograd import Variable
from torch.distributed import distributed_c10d

_PREFIX = "monitored_"
_METHODS = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "barrier",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "send",
    "recv",
)

_OPERATORS = "_c10d_functional"
_GROUP = "group_name"  # what the operators call their group

_kernels: torch.library.Library | None = None
# id of one of torch's groups -> (the group, by a weak reference; the one in its place)
_inner: dict[int, tuple[Callable[[], Any], InnerGroup]] = {}
_names: dict[str, str] = {}  # of one of torch's groups -> that of the one in its place
_registering = threading.Lock()


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
        backend = getattr(
            dist.ProcessGroup.BackendType,
            dist.get_backend(real).upper(),
            dist.ProcessGroup.BackendType.CUSTOM,
        )
        for device in real._device_types:
            self._register_backend(device, backend, real._get_backend(device))
        self._set_default_backend(backend)
        self._set_group_name(real.group_name)
        self._set_group_desc(real.group_desc)

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        real = self._real()
        if real is None:
            raise RuntimeError(
                "this process group was destroyed (torch.distributed.destroy_process_group)"
            )
        work = getattr(real, name)(*args)
        self._wait_before_backward_ends(work)
        return InnerWork(work)

    def gather_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Start `all_gather_into_tensor_out`; return `out`, for which `wait_tensor` waits."""
        _register_work(out, self._call("_allgather_base", (out, x)))
        return out

    def _wait_before_backward_ends(self, work: Any) -> None:
        """Wait before backward ends.

        DDP waits there for futures, in C++, and a callback that runs before it waits in Python.
        """
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


def install(
    put: Callable[[Any, str, Callable[[Any], Any]], None], find: Callable[[Any], Any]
) -> None:
    """Replace the groups that C++ gets by those that stand in for monitored ones.

    Args:
        put: replaces an attribute by a function of it.
        find: returns the recorder of a group; None if its calls are not monitored.
    """

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
            return original(
                *map(inner_of, args), **{name: inner_of(value) for name, value in kwargs.items()}
            )

        return call

    put(dist.Reducer, "__init__", with_inner)
    put(dist, "_broadcast_coalesced", with_inner)
    put(dist, "_verify_params_across_processes", with_inner)
    _install_kernels(inner_of)


def _install_kernels(inner_of: Callable[[Any], Any]) -> None:
    """Let torch's functional collectives on the CPU run on the stand-ins of monitored groups."""
    global _kernels
    if not hasattr(dist, "_functional_collectives"):
        return
    _kernels = kernels = torch.library.Library(_OPERATORS, "IMPL")
    for operator in _operators():
        kernels.impl(operator._schema.name.partition("::")[2], _kernel(operator, inner_of), "CPU")


def _operators() -> list[Any]:
    """Return torch's functional collectives: the operators that take a group."""
    schemas = (
        schema
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{_OPERATORS}::")
    )
    names = [
        schema.name.partition("::")[2]
        for schema in schemas
        if any(argument.name == _GROUP for argument in schema.arguments)
    ]
    return [getattr(getattr(torch.ops, _OPERATORS), name).default for name in names]


def _gather_out() -> Any:
    """Return the operator whose method of the group C++ calls without asking Python."""
    return torch.ops._c10d_functional.all_gather_into_tensor_out.default


def _kernel(operator: Any, inner_of: Callable[[Any], Any]) -> Callable[..., Any]:
    position = [argument.name for argument in operator._schema.arguments].index(_GROUP)
    own_key = torch._C.DispatchKey.CompositeExplicitAutograd

    def call(*args: Any, **kwargs: Any) -> Any:
        group_or_name = args[position]
        name = group_or_name if isinstance(group_or_name, str) else group_or_name.group_name
        real = _c10d._resolve_process_group(name)
        inner = inner_of(real)
        if inner is not real and operator is _gather_out():
            return inner.gather_into(args[0], kwargs["out"])
        if inner is not real:
            args = (*args[:position], _register_inner(name, inner), *args[position + 1 :])
        return operator._op_dk(own_key, *args, **kwargs)

    return call


def _make(real: Any) -> InnerGroup:
    key = id(real)
    name = real.group_name

    def forget_one(_: Any) -> None:
        _inner.pop(key, None)
        _unregister(name)

    inner = InnerGroup(real)
    _inner[key] = weakref.ref(real, forget_one), inner
    return inner


def _register_inner(name: str, inner: InnerGroup) -> str:
    """Return the name by which C++ finds the group that stands in for the one of this name."""
    with _registering:
        if name not in _names:
            _c10d._register_process_group(_PREFIX + name, inner)
            _names[name] = _PREFIX + name
    return _names[name]


def _unregister(name: str) -> None:
    known = _names.pop(name, None)
    if known is not None:
        _c10d._unregister_process_group(known)


def forget() -> None:
    """Restore the operators and forget the groups; C++ that holds one goes on unmonitored."""
    global _kernels
    if _kernels is not None:
        _kernels._destroy()
        _kernels = None
    for name in list(_names):
        _unregister(name)
    _inner.clear()
