"""New tensors like an old one, values copied in, and what the class of sharded tensors defines itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout, told_apart
from ....tensor.sharded_tensor import ShardedTensor
from ...dispatch import check_base
from ...lineage import drawn, with_drawn
from ..registry import functions, handler


def settled(layout: Layout) -> Layout:
    """The layout with whole values where they were pending: for values that are not a sum over ranks."""
    return layout.replace(layout.spec.with_unreduced({})) if layout.pending else layout


def _like(
    x: ShardedTensor,
    dtype: torch.dtype | None,
    device: Any,
    requires_grad: bool,
    make: Callable[[Layout, torch.device], Tensor],
) -> Any:
    layout = settled(x._layout).replace(dtype=dtype)
    before = drawn.last
    out = ShardedTensor._make(make(layout, _device_of_parts(x, device)), layout)
    if drawn.last is not before:
        out._lineage = with_drawn(x._lineage, before)
    return out.requires_grad_() if requires_grad else out


def _device_of_parts(x: ShardedTensor, device: Any) -> torch.device:
    """Where the parts of a new tensor like `x` are: where they are asked for, which is the mesh's kind of device or "meta".

    Raises:
        ValueError: another kind of device.
    """
    here = x._local.device
    wanted = here if device is None else torch.device(device)
    if wanted.type not in (here.type, x.mesh.device_type, "meta"):
        raise ValueError(
            f"a tensor like one on {x.mesh} cannot be made on {device}; drop device=, or use a mesh of that device type"
        )
    return here if wanted.type == here.type else x.mesh.device if wanted.type == x.mesh.device_type else wanted


def register_like(name: str, make: Callable[..., Callable[[Layout, torch.device], Tensor]]) -> None:
    @handler(name)
    def like(
        input: Any, *args: Any, dtype: Any = None, layout: Any = None, device: Any = None, requires_grad: bool = False,
        memory_format: Any = None, pin_memory: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return _like(input, dtype, device, requires_grad, make(input, *args, **kwargs))


def _filled(x: ShardedTensor, fill_value: float) -> Callable[[Layout, torch.device], Tensor]:
    """Parts keep the strides of x, as in torch: fused optimizers go through parameter and state in one order."""
    return lambda layout, device: torch.full_like(x._local, fill_value, dtype=layout.dtype, device=device)


register_like("zeros_like", lambda x: _filled(x, 0))
register_like("ones_like", lambda x: _filled(x, 1))
register_like("full_like", _filled)
register_like("empty_like", lambda x: lambda layout, device: torch.empty_like(x._local, dtype=layout.dtype, device=device))


def _register_new(name: str, fill: Callable[..., Any]) -> None:
    """`x.new_zeros(shape)`: laid out as x where the shape is that of x, as in torch; another shape is replicated."""

    @handler(name)
    def new(
        input: Any, size: Any, *rest: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any
    ) -> Any:
        size, rest = ((size, *rest), ()) if isinstance(size, int) else (size, rest)
        layout = settled(input._layout) if tuple(size) == input.shape else Layout.of(input.mesh, None, size)
        options = {"dtype": dtype, "device": _device_of_parts(input, device)}
        local = fill(input._local, layout.local_shape, *rest, **options, **{k: v for k, v in kwargs.items() if v is not None})
        out = ShardedTensor._make(local, layout.replace(dtype=local.dtype))
        return out.requires_grad_() if requires_grad else out


@handler("new")
def _new(input: Any, *size: Any, device: Any = None) -> Any:
    """torch's old name of `new_empty`, where it is given a shape."""
    shape = (size or (0,)) if all(type(n) is int for n in size) else size[0]
    return input.new_empty(shape, device=device) if isinstance(shape, torch.Size | tuple) else NotImplemented


@handler("new_tensor")
def _new_tensor(input: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    """A number stays a plain 0-d tensor; anything else is replicated, the same on every rank."""
    local = torch.as_tensor(data, dtype=dtype or input.dtype, device=device or input.device).clone()
    if local.ndim == 0:
        return local.requires_grad_(requires_grad)
    layout = Layout.of(input.mesh, None, local.shape, local.dtype)
    local = local if input.mesh.coordinate is not None else local.new_empty(0)
    out = ShardedTensor._make(local.to(_device_of_parts(input, device)), layout)
    return out.requires_grad_() if requires_grad else out


for _name in ("new_zeros", "new_ones", "new_empty", "new_full"):
    _register_new(_name, getattr(torch.Tensor, _name))


# -- values in ---------------------------------------------------------------------------------------------------------


@handler("copy_")
def _copy_(x: Any, src: Any, non_blocking: bool = False) -> Any:
    """Copy into x in its own layout. A plain `src` is taken as the whole tensor, the same on every rank.

    Communication: what redistributing a sharded `src` to the layout of x needs; none for a plain one.
    """
    if not isinstance(x, ShardedTensor):
        x.copy_(src.full_tensor())
        return x
    if not isinstance(src, ShardedTensor):
        src = ShardedTensor._make(src.to(x.device), Layout.of(x.mesh, None, src.shape, src.dtype))
    if src.mesh != x.mesh:
        here, there = told_apart(x.mesh, src.mesh)
        raise ValueError(f"copy_: the tensor lies on {here}, its source on {there}; copy source.full_tensor() instead")
    wide: Any = src if src.shape == x.shape else src.expand(x.shape)
    check_base(x)
    moved = wide.to(x.dtype).redistribute(x.spec)
    x._local.copy_(moved._local)
    x._sync_requires_grad()
    return x


@handler("detach")
def _detach(x: Any) -> Any:
    return ShardedTensor.detach(x)


@handler("is_nonzero")
def _is_nonzero(x: Any) -> bool:
    return bool(x)


@handler("_make_dual")
def _make_dual(tensor: Any, tangent: Any, level: int) -> Any:
    """Tangents live on local tensors and would be lost in every collective, without a word."""
    raise NotImplementedError(
        "forward-mode differentiation of a ShardedTensor by torch.func.jvp or torch.autograd.forward_ad, which do not see its parts: use "
        "sm.jvp (or sm.jacfwd, sm.hessian, sm.linearize)"
    )


def _register_autograd() -> None:
    from ....tensor.autograd import backward

    handler(also=(torch.autograd.grad,))(backward.grad)
    handler(also=(torch.autograd.backward,))(backward.backward)


_register_autograd()


def _register_own_methods() -> None:
    """What `ShardedTensor` defines itself, also where it is called as a function of torch."""
    for func in functions("item", "tolist", "requires_grad_"):
        handler(also=(func,))(getattr(ShardedTensor, func.__name__))


_register_own_methods()
