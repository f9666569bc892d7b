"""New tensors like an old one, copies of values, and calls of methods of `ShardedTensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from ....layout.layout import Layout, distinct_mesh_names
from ....lineage import with_drawn
from ....tensor.autograd import backward
from ....tensor.sharded_tensor import ShardedTensor
from ... import methods
from ...sliced_from import check_base, write_through
from ..decomposition_utils import without_pending
from ..registry import handler


def _like(
    x: ShardedTensor,
    dtype: torch.dtype | None,
    device: Any,
    requires_grad: bool,
    make: Callable[[Layout, torch.device], Tensor],
) -> Any:
    layout = without_pending(x._layout).replace(dtype=dtype)
    before = thread_context.last_draw
    out = ShardedTensor._make(make(layout, _device_of_parts(x, device)), layout)
    if thread_context.last_draw is not before:
        out._lineage = with_drawn(x._lineage, before)
    return out.requires_grad_() if requires_grad else out


def _device_of_parts(x: ShardedTensor, device: Any) -> torch.device:
    """Return the device of the parts of a new tensor like `x`, of the mesh's type or "meta".

    Raises:
        ValueError: another kind of device.
    """
    own = x._local.device
    requested = own if device is None else torch.device(device)
    if requested.type not in (own.type, x.mesh.device_type, "meta"):
        raise ValueError(
            f"a tensor like one on {x.mesh} cannot be made on {device}; drop device=, or use a "
            "mesh of that device type"
        )
    if requested.type == own.type:
        return own
    return x.mesh.device if requested.type == x.mesh.device_type else requested


def register_like(name: str, make: Callable[..., Callable[[Layout, torch.device], Tensor]]) -> None:
    @handler(name)
    def like(
        input: Any,
        *args: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        requires_grad: bool = False,
        memory_format: Any = None,
        pin_memory: bool = False,
        **kwargs: Any,
    ) -> Any:
        make_part = make(input, *args, **kwargs)
        if memory_format in (torch.contiguous_format, torch.legacy_contiguous_format):
            return _like(
                input, dtype, device, requires_grad, lambda *where: make_part(*where).contiguous()
            )
        return _like(input, dtype, device, requires_grad, make_part)


def _filler(x: ShardedTensor, fill_value: float) -> Callable[[Layout, torch.device], Tensor]:
    """Return a function that fills parts with the strides of x, which fused optimizers rely on."""
    return lambda layout, device: torch.full_like(
        x._local, fill_value, dtype=layout.dtype, device=device
    )


register_like("zeros_like", lambda x: _filler(x, 0))
register_like("ones_like", lambda x: _filler(x, 1))
register_like("full_like", _filler)
register_like(
    "empty_like",
    lambda x: lambda layout, device: torch.empty_like(x._local, dtype=layout.dtype, device=device),
)


@handler("new_zeros", "new_ones", "new_empty", "new_full", with_func=True)
def _new_filled(
    fill: Callable[..., Any],
    input: Any,
    size: Any,
    *rest: Any,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    **kwargs: Any,
) -> Any:
    """Return it in the layout of x where the shape is that of x, as in torch; else replicated."""
    size, rest = ((size, *rest), ()) if isinstance(size, int) else (size, rest)
    is_alike = tuple(size) == input.shape
    layout = without_pending(input._layout) if is_alike else Layout.of(input.mesh, None, size)
    options = {name: value for name, value in kwargs.items() if value is not None}
    options |= {"dtype": dtype, "device": _device_of_parts(input, device)}
    local = fill(input._local, layout.local_shape, *rest, **options)
    out = ShardedTensor._make(local, layout.replace(dtype=local.dtype))
    return out.requires_grad_() if requires_grad else out


@handler("new")
def _new(input: Any, *size: Any, device: Any = None) -> Any:
    """Return `new_empty`, of which this is torch's old name where it is given a shape."""
    shape = (size or (0,)) if all(type(n) is int for n in size) else size[0]
    is_shape = isinstance(shape, torch.Size | tuple)
    return input.new_empty(shape, device=device) if is_shape else NotImplemented


@handler("new_tensor")
def _new_tensor(
    input: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Any:
    """Return a plain 0-d tensor for a number, and a replicated tensor for anything else."""
    local = torch.as_tensor(data, dtype=dtype or input.dtype, device=device or input.device).clone()
    if local.ndim == 0:
        return local.requires_grad_(requires_grad)
    layout = Layout.of(input.mesh, None, local.shape, local.dtype)
    local = local if input.mesh.coordinate is not None else local.new_empty(0)
    out = ShardedTensor._make(local.to(_device_of_parts(input, device)), layout)
    return out.requires_grad_() if requires_grad else out


# -- values in -------------------------------------------------------------------------------------


@handler("copy_")
def _copy_(x: Any, src: Any, non_blocking: bool = False) -> Any:
    """Copy into x in its own layout; a plain `src` is the whole tensor, the same on every rank.

    Communication: what redistributing a sharded `src` to the layout of x needs; none for a plain
    one.
    """
    if not isinstance(x, ShardedTensor):
        x.copy_(src.full_tensor())
        return x
    if (written := write_through(torch.Tensor.copy_, x, src)) is not NotImplemented:
        return written
    if not isinstance(src, ShardedTensor):
        layout = Layout.of(x.mesh, None, src.shape, src.dtype)
        part = src if x.mesh.coordinate is not None else src.new_empty(layout.local_shape)
        src = ShardedTensor._make(part.to(x.device), layout)
    if src.mesh != x.mesh:
        mesh_name, source_mesh_name = distinct_mesh_names(x.mesh, src.mesh)
        raise ValueError(
            f"copy_: the tensor is on {mesh_name}, its source on {source_mesh_name}; copy "
            "source.full_tensor() instead"
        )
    wide: Any = src if src.shape == x.shape else src.expand(x.shape)
    check_base(x)
    moved = wide.to(x.dtype).redistribute(x.spec)
    x._local.copy_(moved._local)
    x._lineage = moved._lineage  # nothing is left of what x was made from
    x._sync_requires_grad()
    return x


handler("zero_")(lambda x: write_through(torch.Tensor.zero_, x))
handler("fill_")(lambda x, value: write_through(torch.Tensor.fill_, x, value))
handler("detach")(lambda x: ShardedTensor.detach(x))
handler("is_nonzero")(lambda x: bool(x))


@handler("_make_dual")
def _make_dual(tensor: Any, tangent: Any, level: int) -> Any:
    """Refuse: tangents are on local tensors and would be lost silently in every collective."""
    raise NotImplementedError(
        "forward-mode differentiation of a ShardedTensor by torch.func.jvp or "
        "torch.autograd.forward_ad, which do not see its parts: use sm.jvp (or sm.jacfwd, "
        "sm.hessian, sm.linearize)"
    )


handler(also=(torch.autograd.grad,))(backward.grad)
handler(also=(torch.autograd.backward,))(backward.backward)

# Methods that `ShardedTensor` overrides, for calls by torch's own name such as
# `torch.Tensor.item(x)`.
for _method in (methods.item, methods.tolist, methods.requires_grad_):
    handler(_method.__name__)(_method)
