"""`FSDPModule`: the class of what `compat.fully_shard` returns.

The class of a module becomes a subclass of `FSDPModule` and of its own class, as in torch. Its
copies and pickles keep it.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ...mesh.comm.pending import Pending
from ..parallel.data.unit import Unit, unit_of, units_in


class UnshardHandle(Pending[None]):
    """The handle of `FSDPModule.unshard(async_op=True)`.

    After `wait()` the parameters are in the module.

    Source: `torch.distributed.fsdp.UnshardHandle`.
    """


class FSDPModule:
    """The class of a module of `compat.fully_shard`.

    Methods with `recurse` also apply to the modules inside. All ranks must make the same calls.

    Source: `torch.distributed.fsdp.FSDPModule`.
    """

    _own_class_index = 2  # of: the class made here, FSDPModule, the module's own

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a module of the own class, such as a slice of an `nn.Sequential`."""
        own = cls.__mro__[cls._own_class_index]
        self = own.__new__(own, *args, **kwargs)
        self.__init__(*args, **kwargs)  # not called by Python, since this is no instance of `cls`
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to the own class, since the class made here has no name to be pickled by."""
        make, args, *state = super().__reduce_ex__(max(2, protocol))
        has_own_way = make is not copyreg.__newobj__  # type: ignore[attr-defined]
        if has_own_way:
            return make, args, *state
        cls = type(self)
        return _restore, (cls.__mro__[1], cls.__mro__[cls._own_class_index], *args[1:]), *state

    # -- gathering ---------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters and put the plain ones in the module.

        They stay there until `reshard` or the end of the module's forward.

        Args:
            async_op: return at once a handle, whose `wait` puts them in the module; a forward
                waits as well.

        Communication: one all_gather per dtype; none if they are gathered.
        """
        units = _units(self)
        for unit in units:
            unit.plan.adopt_materialized()
            unit.gather()

        def finish() -> None:
            for unit in units:
                unit.unshard()

        return UnshardHandle(finish) if async_op else finish()

    def reshard(self) -> None:
        """Put the sharded parameters in the module and free the gathered ones.

        Raises:
            RuntimeError: the module's forward is running.
        """
        for unit in _units(self):
            unit.reshard()

    def reset_iter_state(self) -> None:
        """Drop what a failed forward or backward left, gradients that are not in `.grad` included.

        Raises:
            RuntimeError: this is not the outermost module of `fully_shard`.
        """
        schedule = _units(self)[-1].schedule
        if schedule.units[0] is not _units(self)[-1]:
            raise RuntimeError(
                f"reset_iter_state() of {type(self).__name__}: call it on the outermost module of "
                "fully_shard"
            )
        schedule.reset()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to free the gathered parameters after forward.

        Raises:
            ValueError: `reshard_after_forward` is not a bool.
            AssertionError: a module of `replicate`.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward is a bool, got {reshard_after_forward!r}")
        if not all(unit.plan.options.stage.parameter for unit in _units_of(self, recurse)):
            raise AssertionError(
                "set_reshard_after_forward of replicate: its parameters are not split"
            )
        self._set(recurse, keep="rest" if reshard_after_forward else "all")

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to free the gathered parameters after backward.

        Those that were kept are gathered anew after a step of the optimizer.
        """
        self._set(recurse, reshards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether other units gather this one ahead of its backward.

        A backward that needs the parameters gathers them anyway.
        """
        self._set(False, prefetched_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set which modules to gather when this one's forward begins.

        By default it is the one that followed in the last forward.

        Raises:
            ValueError: something that is not an `FSDPModule`.
        """
        self._set(False, forward_prefetch=_units_to_prefetch(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set which modules to gather when this one's backward begins.

        By default it is the one that ran before it.

        Raises:
            ValueError: something that is not an `FSDPModule`.
        """
        self._set(False, backward_prefetch=_units_to_prefetch(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Set an event that the next forward waits for, once.

        It was recorded after a step of the optimizer in another stream.
        """
        self._set(False, optimizer_event=event)

    # -- gradients ---------------------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted without effect: each backward ends with its reductions."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients.

        If not, whole gradients accumulate until a backward that does.

        Communication: none in a backward that does not reduce.
        """
        self._set(
            recurse, reduces_grads=requires_gradient_sync, all_reduces_grads=requires_gradient_sync
        )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients over the axes that replicate parameters (HSDP).

        If not, they accumulate after the reduce_scatter until a backward that does.
        """
        self._set(recurse, all_reduces_grads=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what to divide the sum of gradients over the data-parallel ranks by.

        By default it is their number.

        Of sharded inputs, whose loss is that of the global batch, gradients are summed, whatever
        the factor.
        """
        self._set(False, divide_factor=float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as `set_gradient_divide_factor`, torch's earlier name of which this is."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether a parameter without a gradient on this rank counts as zeros.

        It is `find_unused_parameters` of `sm.parallel.fully_shard`.
        """
        self._set(recurse, allows_unused=reduce_scatter_unused_params)

    def set_all_reduce_hook(
        self, hook: Callable[[Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Set a function of this rank's flat piece of reduced gradients, which it may write.

        Args:
            hook: called once per dtype and backward, with averaged gradients, before they are
                added to `.grad`.
            stream: the stream to call it in.

        Raises:
            ValueError: the module's parameters are on several meshes.
            NotImplementedError: parameters are replicated over an axis.
        """
        units = _units(self)
        if len(units) > 1:
            raise ValueError("set_all_reduce_hook: the module has parameters on several meshes")
        options = units[0].plan.options
        copies = set(options.data_axes) - set(options.stage.optimizer)
        if copies or not options.stage.optimizer:
            raise NotImplementedError(
                f"set_all_reduce_hook with parameters replicated over {sorted(copies)}: their "
                "gradients are reduced together with those of other units; split them over all "
                "axes and reduce over the others in the hook"
            )
        units[0].controls.reduce_hook = hook if stream is None else _HookInStream(hook, stream)

    # -- how bytes are moved: no effect on results -------------------------------------------------

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted without effect: gradients are always summed and then scaled."""

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Accepted without effect: a buffer of gradients lives until its reduction is complete.

        Raises:
            TypeError, ValueError: not a positive integer.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers is an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers={max_input_buffers}: give a positive number")

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepted without effect: gathers and reductions use a process group per set of ranks."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Accepted without effect: buffers are torch's."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Accepted without effect; see `sm.symmetric_memory`."""

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise NotImplementedError: collectives are planned and compared before they run."""
        raise NotImplementedError(_NO_CUSTOM_COLLECTIVE.format("set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise NotImplementedError, as `set_custom_all_gather`."""
        raise NotImplementedError(_NO_CUSTOM_COLLECTIVE.format("set_custom_reduce_scatter"))

    # -- of nn.Module, with sharded parameters -----------------------------------------------------

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        _hide_unsharded(self)
        return super()._apply(*args, **kwargs)  # type: ignore[misc]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state with sharded parameters, also after `unshard`."""
        _hide_unsharded(self)
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the sharded parameters, also after `unshard`."""
        _hide_unsharded(self)
        return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    def _set(self, recurse: bool, **values: Any) -> None:
        for unit in _units_of(self, recurse):
            for name, value in values.items():
                setattr(unit.controls, name, value)


class ReplicateModule(FSDPModule):
    """The class of a module of `compat.replicate`.

    Source: `torch.distributed._composable.replicate_with_fsdp.ReplicateModule`.
    """

    _own_class_index = 3


_NO_CUSTOM_COLLECTIVE = (
    "{}: collectives of other libraries are not called; they would bypass the plans, the monitor "
    "and sm.jit. For less traffic pass "
    'transport="int8" to sm.parallel.fully_shard'
)


class _HookInStream:
    """A hook called in a stream, between what comes before and after it in the current one."""

    def __init__(self, hook: Callable[[Tensor], Any], stream: Any) -> None:
        self._hook, self._stream = hook, stream

    def __call__(self, x: Tensor) -> None:
        device: Any = torch.get_device_module(x.device)
        current = device.current_stream()
        self._stream.wait_stream(current)
        with device.stream(self._stream):
            self._hook(x)
        current.wait_stream(self._stream)


# -- units of modules ------------------------------------------------------------------------------


def _units(module: Any) -> list[Unit]:
    """Return the units of a module: one, after those of its parameters on other meshes."""
    unit = unit_of(module)
    if unit is None:
        raise AssertionError(
            f"{type(module).__name__} has the class of a module of fully_shard, but is none"
        )
    return [*unit.other_mesh_units, unit]


def _units_of(module: Any, recurse: bool) -> Iterator[Unit]:
    """Yield the units of a module, and of those inside it that are an `FSDPModule`."""
    modules = (
        [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        if recurse
        else [module]
    )
    yield from dict.fromkeys(unit for inner in modules for unit in _units(inner))


def _units_to_prefetch(modules: Iterable[FSDPModule]) -> list[Unit] | None:
    modules = list(modules)
    check_modules(modules)
    return list(dict.fromkeys(unit for module in modules for unit in _units(module))) or None


def check_modules(modules: Iterable[Any]) -> None:
    """Raise a ValueError if something is not an `FSDPModule`."""
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules of fully_shard, got {type(module).__name__}")


def _hide_unsharded(module: Any) -> None:
    for unit in units_in(module):
        unit.hide_unsharded()


# -- classes ---------------------------------------------------------------------------------------

_classes: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()


def set_class(modules: Iterable[nn.Module], base: type[FSDPModule]) -> None:
    """Make the class of each module a subclass of its own and of `base`."""
    for module in modules:
        module.__class__ = _class_of(base, type(module))


def _class_of(base: type, own: type) -> type:
    cls = _classes.get((base, own))
    if cls is None:
        prefix = base.__name__.removesuffix("Module")
        cls = _classes[base, own] = type(
            f"{prefix}{own.__name__}", (base, own), {"__module__": own.__module__}
        )
    return cls


def _restore(base: type, own: type, *args: Any) -> Any:
    """Return an empty module for a copy or pickle, whose state is set afterwards."""
    module = own.__new__(own, *args)
    module.__class__ = _class_of(base, own)
    return module
