"""`ShardedTensor`: a global tensor of which each rank holds its box.

The wrapper is a `torch.Tensor` whose own storage is a meta tensor of the global shape, with the local tensor and the
layout beside it. Autograd runs on the local tensors: the graph holds no wrapper, and backward runs at torch's own speed.
Code that goes round the dispatch (a raw pointer, a C++ extension, a transform) meets a meta tensor and
`__torch_dispatch__`, and fails loudly.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...mesh.device_mesh import DeviceMesh, unpickle_mesh
from ..layout.layout import Layout, make_layout
from ..layout.named_sharding import NamedSharding
from ..layout.spec import P, Placement, make_spec
from ..ops.lineage import comm_context, root
from ..redistribute.autograd import redistribute_local
from .autograd.engine_hooks import any_requires_grad

if TYPE_CHECKING:
    from ..ops.sliced_from import SlicedFrom
    from .process_data import AddressableShard

_ONE_PART = (
    "torch.save writes only this rank's part of a ShardedTensor, which only this rank of an equal mesh can read; to save all of it, use "
    "sm.save(tree, folder), or on every rank state = sm.full_state_dict(model) and then torch.save(state, path) on rank 0"
)
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_same_kind = torch._has_compatible_shallow_copy_type  # type: ignore[attr-defined]


class ShardedTensor(Tensor):
    """A tensor laid out on a mesh. Made by `distribute_tensor`, `device_put`, `from_local` or a factory.

    Attributes:
        shape: the global shape.
        sharding: mesh and spec; `shardmesh.typeof` gives the whole layout, with shape and dtype.
        spec: how dims lie on axes, as a `P`.
        placements: the same per axis, as torch spells it.
        mesh: the `DeviceMesh`; also `device_mesh`.
    """

    _local: Tensor
    _layout: Layout
    _lineage: int = 0  # see `lineage.py`
    _touched: int = 0  # how often `.data` was asked for or assigned: values may have been written unseen
    _sliced_from: SlicedFrom | None = None  # of a copy of a slice: see `sliced_from.py`
    _reduced_grad: ShardedTensor | None
    _arrived_grad: ShardedTensor | None
    from_local: Callable[..., ShardedTensor]  # `shardmesh.from_local`, which puts itself here: a call in between would show

    @staticmethod
    def _make(local: Tensor, layout: Layout) -> ShardedTensor:
        """Wrap without any check."""
        out: Any = layout.meta.data
        if local.requires_grad:
            out.requires_grad = True
        out.__class__ = ShardedTensor  # half the time of Tensor._make_subclass
        out._local, out._layout = local, layout
        return out

    @staticmethod
    def _make_guarded(local: Tensor, layout: Layout, lineage: int | None = None) -> ShardedTensor:
        """Wrap a tensor that enters the program: what works on the wrapper itself meets `__torch_dispatch__`."""
        out = Tensor._make_subclass(ShardedTensor, layout.meta, local.requires_grad)
        out._local, out._layout, out._lineage = local, layout, root(layout) if lineage is None else lineage
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Only what goes round `__torch_function__` comes here, and it would work on the wrapper, which has no values.

        Raises:
            RuntimeError: always, except when a tensor is detached, as autograd does before it shows it to a hook.
        """
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        raise RuntimeError(
            f"{func} was called on the wrapper of a ShardedTensor and not through torch's functions: by C++ code, a transform of "
            "torch.func, or torch.distributed. The wrapper holds no values; work on this rank's part, x.to_local(), and wrap the result "
            "with ShardedTensor.from_local. For gradients use x.backward() or torch.autograd.grad"
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> ShardedTensor:
        raise TypeError(
            "a ShardedTensor is made by distribute_tensor(t, mesh, placements), ShardedTensor.from_local(part, mesh, placements) "
            "or a factory such as sm.zeros(shape, mesh, spec)"
        )

    # -- where it lies -------------------------------------------------------------------------------------------------

    @property
    def sharding(self) -> NamedSharding:
        """Mesh and spec."""
        return NamedSharding(self._layout.mesh, self._layout.spec)

    @property
    def spec(self) -> P:
        """The spec, one entry per dim."""
        return self._layout.spec

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return self._layout.placements

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh that the tensor lies on."""
        return self._layout.mesh  # type: ignore[return-value]

    device_mesh = mesh

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._layout.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._layout.dtype

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device of this rank's part."""
        return self._local.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self._local.is_cuda

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self._local.is_cpu

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return self._local.is_meta

    def size(self, dim: int | None = None) -> Any:
        """The global shape, or the global size of one dim."""
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        """Number of dims."""
        return len(self._layout.shape)

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return math.prod(self._layout.shape)

    def __len__(self) -> int:
        if not self._layout.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.shape[0]

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return self._layout.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this rank alone can read the whole tensor: where it is the mesh's only one."""
        return self._layout.mesh.size() == 1 and self.mesh.coordinate is not None

    @property
    def committed(self) -> bool:
        """Whether the tensor stays where it was put: always."""
        return True

    def addressable_data(self, index: int) -> Tensor:
        """The data of `addressable_shards[index]`: this rank's part, outside the graph. Raises: IndexError for another index."""
        return self.addressable_shards[index].data

    @property
    def global_shards(self) -> list[AddressableShard]:
        """The part of every rank of the mesh, in mesh order; `data` is None for those of other ranks."""
        return process_data.global_shards(self)

    @property
    def addressable_shards(self) -> list[AddressableShard]:
        """The part that this rank holds and where it lies, as a list of one; of none on a rank outside the mesh."""
        return process_data.addressable_shards(self)

    # -- in and out ----------------------------------------------------------------------------------------------------

    def to_local(self, *, grad_placements: P | Sequence[Placement] | None = None, check: bool | str = True) -> Tensor:
        """See `shardmesh.to_local`."""
        return convert.to_local(self, grad_placements=grad_placements, check=check)

    def full_tensor(self, *, grad_placements: P | Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor, on every rank of the mesh, as a plain tensor.

        Communication: what `redistribute` to replicated needs.
        """
        return convert.to_local(self.redistribute(P()), grad_placements=grad_placements)

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """`x.redistribute(placements)` or `x.redistribute(mesh, placements)`: see `shardmesh.redistribute`."""
        if args and not kwargs and (len(args) == 1 or args[0] is self._layout.mesh) and self._layout.is_spelled(args[-1]):
            dispatch.known_local(self)
            return self
        return redistribute.redistribute(self, *args, **kwargs)

    # -- values --------------------------------------------------------------------------------------------------------

    def _value(self) -> Tensor:
        """The whole tensor, without gradient; what is pending is reduced first."""
        if self.mesh.coordinate is None:
            raise RuntimeError(f"rank {self.mesh.world.rank} is outside {self.mesh} and holds no part of this tensor")
        with comm_context(self.mesh.world, self._lineage):
            return redistribute_local(self._local.detach(), self._layout, self._layout.replicated)

    def item(self) -> Any:
        """The one element, the same on every rank. Communication: reduces or gathers it where needed."""
        if self.numel() != 1:
            raise RuntimeError(f"a tensor with {self.numel()} elements cannot be converted to a number")
        return self._value().item()

    def tolist(self) -> Any:
        """The whole tensor as nested lists, the same on every rank. Communication: as `full_tensor`."""
        return self._value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The whole tensor as a numpy array, the same on every rank. Communication: as `full_tensor`."""
        if self.requires_grad and not force:
            raise RuntimeError("cannot call numpy() on a tensor that requires grad; use tensor.detach().numpy()")
        return self._value().numpy(force=force)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.item().__index__()

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(
                "the truth value of a tensor with more than one element is ambiguous; use .any() or .all()"
            )
        return bool(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 else object.__format__(self, spec)

    def __contains__(self, item: Any) -> bool:
        return bool((self == item).any())

    def __iter__(self) -> Any:
        if self.ndim == 0:
            raise TypeError("iteration over a 0-d tensor")
        return iter(self.unbind(0))

    def __reversed__(self) -> Any:
        return self.flip(0) if self.ndim else self

    def data_ptr(self) -> int:
        """Refused: there is no one piece of memory.

        Only `nn.LSTM` and its like, which ask on a GPU whether weights share memory before they lay them out in one piece for
        cuDNN, are told that they do: then they leave them where they are.

        Raises:
            RuntimeError: always, but for these.
        """
        if _called_by(torch.nn.RNNBase.flatten_parameters):
            return 0
        raise RuntimeError(
            "a ShardedTensor has no single piece of memory; this rank's part has: x.to_local(). To write a model for other "
            "programs, use sm.save_safetensors(model, path), or give whole tensors: state = sm.full_state_dict(model) on every rank, "
            "then on rank 0 model.save_pretrained(path, state_dict=state) or torch.save(state, path). To export or trace a model, "
            "load that state into a plain one"
        )

    untyped_storage = storage = data_ptr  # type: ignore[assignment]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return visualize.tensor_repr(self)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return self._local.requires_grad or (any_requires_grad(self) and dispatch.known_local(self).requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor:
        """Ask for this tensor's gradient; it will appear in `.grad`, in this tensor's own layout."""
        self._local.requires_grad_(requires_grad)
        self._sync_requires_grad()
        if requires_grad and self._local.is_leaf:
            leaf_grads.watch(self)
        return self

    def _sync_requires_grad(self) -> None:
        with _no_torch_function():
            if Tensor.requires_grad.__get__(self) != self._local.requires_grad:  # type: ignore[attr-defined]
                Tensor.requires_grad_(self, self._local.requires_grad)

    @property
    def grad(self) -> ShardedTensor | None:  # type: ignore[override]
        """The gradient, a `ShardedTensor` in this tensor's own layout. Reading it never communicates."""
        return leaf_grads.read(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        leaf_grads.write(self, value)

    @grad.deleter
    def grad(self) -> None:
        leaf_grads.write(self, None)

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        dispatch.check_gradient_known(self)
        return self._local.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return dispatch.known_local(self).is_leaf

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that is not a leaf; it is read in the layout dual to this one."""
        self._local.retain_grad()

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Compute gradients of this tensor with respect to the leaves.

        Without `gradient` the tensor must be a scalar, and not a sharded one.

        Communication: that of the backward of each redistribution, and at the end one bucketed reduction per set of axes
        and dtype for leaves that are replicated (not inside `accumulate_grads()`).
        """
        backward.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[ShardedTensor], Tensor | None]) -> Any:
        """Call `hook` with the gradient when it is computed; the hook sees it in the layout dual to this tensor's."""
        return leaf_grads.register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[ShardedTensor], None]) -> Any:
        """Call `hook(self)` at the end of a backward, when `.grad` is complete and reduced."""
        return leaf_grads.register_post_accumulate_grad_hook(self, hook)

    def detach(self) -> ShardedTensor:
        """The same values, outside the graph."""
        return ShardedTensor._make_guarded(self._local.detach(), self._layout, self._lineage)

    def detach_(self) -> ShardedTensor:
        """Take this tensor out of its graph."""
        self._local.detach_()
        self._sync_requires_grad()
        return self

    @property
    def data(self) -> ShardedTensor:  # type: ignore[override]
        self._touched += 1
        out = ShardedTensor._make(self._local.data, self._layout)
        out._lineage = self._lineage
        return out

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedTensor):
            raise TypeError("assign a ShardedTensor to .data; place a plain tensor with distribute_tensor first")
        with _no_torch_function():
            shells = (value._layout.meta, ShardedTensor._make_guarded(value._local, value._layout, value._lineage))
            Tensor.data.__set__(self, next(shell for shell in shells if _same_kind(self, shell)))  # type: ignore[attr-defined]
        self._local.data, self._layout, self._lineage = value._local.data, value._layout, value._lineage
        self._touched += 1

    # -- copies and files ----------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() first")
        copy = ShardedTensor._make_guarded(self._local.detach().clone(), self._layout, self._lineage)
        memo[id(self)] = copy
        if self.requires_grad:
            copy.requires_grad_()
        if self.grad is not None:
            copy.grad = self.grad.detach().clone()
        if getattr(self, "_is_param", False):
            copy._is_param = True  # type: ignore[attr-defined]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_param = getattr(self, "_is_param", False)
        if self._local.shape != self._layout.shape and _called_by(torch.save):
            warnings.warn(_ONE_PART, stacklevel=4)  # at the line that calls torch.save
        return _rebuild, (self._local.detach(), self._layout, self.requires_grad, is_param)


def typeof(x: ShardedTensor) -> Layout:
    """Return the layout of a sharded tensor: mesh, spec, global shape and dtype.

    Raises:
        TypeError: `x` is a plain tensor, or no tensor.

    Communication: none.

    Example:
        >>> def main():
        ...     mesh = init_device_mesh("cpu", (4,), axis_names=("x",))
        ...     return typeof(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]))
        >>> print(simulate(4)(main)()[0])
        f32[8, 3] @ P('x', None) on (x=4)
    """
    if isinstance(x, (ShardedTensor, DonatedTensor)):
        return x._layout
    what = f"a plain tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else f"{type(x).__name__} {x!r}"
    raise TypeError(f"typeof takes a ShardedTensor, got {what}; place it with distribute_tensor or device_put first")


class DonatedTensor(Tensor):
    """What a `ShardedTensor` is after `redistribute(..., donate=True)`: its memory is gone, and every use raises."""

    _layout: Layout

    @staticmethod
    def take(x: ShardedTensor) -> None:
        """Make `x` one of these."""
        donated: Any = x
        del donated._local
        donated.__class__ = DonatedTensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "this tensor was donated: redistribute(..., donate=True) has given its memory to the result; use the result, or "
            "redistribute without donate=True"
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"ShardedTensor({self._layout}, donated)"


def _rebuild(local: Tensor, layout: Layout, requires_grad: bool, is_param: bool) -> ShardedTensor:
    """A pickled `ShardedTensor`; its mesh must exist in the process that reads it."""
    if local.shape != layout.local_shape:
        raise RuntimeError(
            f"this file holds the part {list(local.shape)} of another rank; rank {layout.mesh.world.rank} of {layout} "  # type: ignore[attr-defined]
            f"needs {list(layout.local_shape)}: load the file that this rank wrote"
        )
    out = ShardedTensor._make_guarded(local, layout, 0)  # one rank alone may read a file
    if requires_grad:
        out.requires_grad_()
    if is_param:
        out._is_param = True  # type: ignore[attr-defined]
    return out


# What a file of tensors refers to, so that `torch.load` reads it without weights_only=False.
torch.serialization.add_safe_globals([_rebuild, make_layout, make_spec, unpickle_mesh])

def _called_by(func: Any) -> bool:
    """Whether the caller of this function's caller is `func`, or a comprehension in it."""
    frame = sys._getframe(2)
    return any(f is not None and f.f_code is func.__code__ for f in (frame, frame.f_back))


# These make ShardedTensors, and its methods call them.
from ..debug import visualize  # noqa: E402
from ..ops import dispatch  # noqa: E402
from . import convert, process_data, redistribute  # noqa: E402
from .autograd import backward, leaf_grads  # noqa: E402

ShardedTensor.__torch_function__ = classmethod(dispatch.torch_function)  # type: ignore[assignment]
