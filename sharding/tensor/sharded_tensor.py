"""`ShardedTensor`: a global tensor of which each rank holds one box: state, properties, making.

The wrapper is a `torch.Tensor` of the global shape without memory, with the local tensor and the
layout next to it. Autograd runs on the local tensors: the graph holds no wrapper, and backward runs
at torch's own speed.

    made by                                 device in C++   what bypasses the dispatch
    `_make_guarded`: what enters a          of the part     reaches `__torch_dispatch__`, which runs
        program, parameters, gradients                      or raises: `ops/torch_transforms.py`
    `_make`: results of operators           "meta"          gets a meta tensor without values
        (a quarter of the time)

`methods.py` binds the methods that communicate, dispatch or take part in autograd.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ...mesh.comm.call_site import is_called_by
from ...mesh.device_mesh import DeviceMesh, unpickle_mesh
from ..layout.layout import Layout, dtype_name, make_layout
from ..layout.named_sharding import NamedSharding
from ..layout.spec import P, Placement, SpecLike, make_spec
from ..lineage import root

if TYPE_CHECKING:
    import numpy as np

Index = tuple[slice, ...]
_ONE_PART = (
    "torch.save writes only this rank's part of a ShardedTensor, which only this rank of an equal "
    "mesh can read; to save all of it, use sm.checkpoint.save(tree, folder), or on every rank "
    "state = sm.checkpoint.full_state_dict(model) and then torch.save(state, path) on rank 0"
)
_no_torch_function = torch._C.DisableTorchFunctionSubclass
_same_kind = torch._has_compatible_shallow_copy_type  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class AddressableShard:
    """The part of a tensor that a rank holds.

    Attributes:
        index: the slice per dim of the part in the global tensor: `whole[shard.index]` is the part.
        data: the part, in the tensor's own memory, outside the graph. Of a pending tensor, this
            rank's contribution. None for other ranks' parts in `global_shards`.
        device: the device of the part.
        replica_id: this rank's index among the ranks with the same part; the parts with replica_id
            0 make up the tensor. Contributions to a pending tensor are not replicas of each other.
        rank: the rank, in the world.
    """

    index: Index
    data: Any
    device: torch.device
    replica_id: int
    rank: int

    def __repr__(self) -> str:
        data = (
            "not here"
            if self.data is None
            else f"{dtype_name(self.data.dtype)}{list(self.data.shape)} on {self.device}"
        )
        index = ", ".join(f"{s.start}:{s.stop}" for s in self.index)
        return (
            f"AddressableShard([{index}], {data}, replica_id={self.replica_id}, rank={self.rank})"
        )


class CopySource(Protocol):
    """What a copy of a slice was sliced from: `ops/sliced_from.py`."""

    @property
    def base(self) -> Any:
        """The tensor, or None if it has been freed."""

    def write(self, copy: ShardedTensor, operator: Callable[..., Any], *args: Any) -> Any:
        """Run an in-place operator on the copy, and assign the result to the slice of the base."""

    def has_written(self, base: Any, index: Any, copy: ShardedTensor) -> bool:
        """Return whether `base[index] = copy` would repeat the last `write`, without a change."""
        ...


class ShardedTensor(Tensor):
    """A tensor laid out on a mesh; from `distribute_tensor`, `device_put`, `from_local`, a factory.

    Attributes:
        shape: the global shape.
        sharding: mesh and spec; `shardmesh.typeof` gives the whole layout, with shape and dtype.
        spec: which axes split which dims, as a `P`.
        placements: the same per axis, as torch writes it.
        mesh: the `DeviceMesh`; also `device_mesh`.
    """

    _local: Tensor
    _layout: Layout
    _lineage: int = 0  # see `lineage.py`
    # How often `.data` was read or assigned: values may have been written without dispatch.
    _data_accesses: int = 0
    _sliced_from: CopySource | None = None  # of a copy of a slice
    _reduced_grad: ShardedTensor | None = None
    _accumulated_grad: ShardedTensor | None = None
    _after_grad_hooks: dict[int, Any] | None = None
    # asked of every gradient by torch's optimizers, so without a dispatch
    is_sparse = False  # type: ignore[assignment]

    @staticmethod
    def _make(local: Tensor, layout: Layout) -> ShardedTensor:
        """Wrap a local tensor without any check."""
        out: Any = layout.meta.data
        if local.requires_grad:
            out.requires_grad = True
        out.__class__ = ShardedTensor  # half the time of Tensor._make_subclass
        out._local, out._layout = local, layout
        return out

    @staticmethod
    def _make_guarded(local: Tensor, layout: Layout, lineage: int | None = None) -> ShardedTensor:
        """Wrap a tensor that enters the program.

        The wrapper has the device of the part in C++, and an operation on it reaches
        `__torch_dispatch__`.
        """
        out = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            ShardedTensor,
            layout.shape,
            dtype=layout.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        # it has no memory
        torch._C._set_throw_on_mutable_data_ptr(out)  # type: ignore[attr-defined]
        out._local = local
        out._layout = layout
        out._lineage = root(layout) if lineage is None else lineage
        return out

    def _expose_device(self) -> None:
        """Give the wrapper of an operator's result the device of its part in C++.

        torch groups gradients by it.
        """
        with _no_torch_function():
            device: Any = Tensor.device.__get__(self)  # type: ignore[attr-defined]
            history = Tensor.grad_fn.__get__(self)  # type: ignore[attr-defined]
            if device == self._local.device or history is not None:
                return
            guarded = ShardedTensor._make_guarded(self._local, self._layout, 0)
            torch._C._swap_tensor_impl(self, guarded)  # type: ignore[attr-defined]

    @staticmethod
    def _refuse_dispatch(func: Any) -> Any:
        """Refuse what bypasses `__torch_function__` and would run on the wrapper without values.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{func} was called on the wrapper of a ShardedTensor and not through torch's "
            "functions: by C++ code, forward mode of torch.func (use sm.jvp, sm.jacfwd), or "
            "torch.distributed. The wrapper holds no values; work on this rank's part, "
            "x.to_local(), and wrap the result with ShardedTensor.from_local. For gradients use "
            "x.backward() or torch.autograd.grad"
        )

    def __new__(cls, *args: Any, **kwargs: Any) -> ShardedTensor:
        raise TypeError(
            "ShardedTensor has no constructor; use distribute_tensor(t, mesh, placements), "
            "ShardedTensor.from_local(part, mesh, placements) or a factory such as sm.zeros(shape, "
            "mesh, spec)"
        )

    # -- layout ------------------------------------------------------------------------------------

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
        """The mesh on which the tensor is laid out."""
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
        """Return the global shape, or the global size of one dim."""
        return self._layout.shape if dim is None else self._layout.shape[dim]

    def dim(self) -> int:
        """Return the number of dims.

        `torch.vmap` asks for it before it wraps a tensor, which must then have the device of its
        part in C++.
        """
        self._expose_device()
        return len(self._layout.shape)

    def numel(self) -> int:
        """Return the number of elements of the global tensor."""
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
        """Whether this rank alone can read the whole tensor: it is the only rank of the mesh."""
        return self._layout.mesh.size() == 1 and self.mesh.coordinate is not None

    @property
    def committed(self) -> bool:
        """Whether the tensor stays on its devices: always True, as for a placed `jax.Array`."""
        return True

    # -- gradients and copies: `methods.py` has what communicates ----------------------------------

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local.retains_grad

    def retain_grad(self) -> None:
        """Keep the gradient of a tensor that is not a leaf, read in the layout dual to this one."""
        self._local.retain_grad()

    def _sync_requires_grad(self) -> None:
        """Set `requires_grad` of the wrapper to that of the local tensor."""
        with _no_torch_function():
            if Tensor.requires_grad.__get__(self) != self._local.requires_grad:  # type: ignore[attr-defined]
                Tensor.requires_grad_(self, self._local.requires_grad)

    def detach(self) -> ShardedTensor:
        """Return a tensor with the same values, outside the graph."""
        return ShardedTensor._make_guarded(self._local.detach(), self._layout, self._lineage)

    def detach_(self) -> ShardedTensor:
        """Take this tensor out of its graph."""
        self._local.detach_()
        self._sync_requires_grad()
        return self

    @property
    def data(self) -> ShardedTensor:  # type: ignore[override]
        self._data_accesses += 1
        return ShardedTensor._make_guarded(self._local.data, self._layout, self._lineage)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, ShardedTensor):
            resized = (
                ""
                if value.shape == self.shape
                else (
                    f". This one is {list(self.shape)} and the new one {list(value.shape)}: what "
                    "gives parameters other shapes, such as resize_token_embeddings, comes before "
                    "fully_shard, data_parallel and parallelize"
                )
            )
            raise TypeError(
                "assign a ShardedTensor to .data; place a plain tensor with distribute_tensor "
                f"first{resized}"
            )
        self._local.data = value._local.data  # raises if one of them is on "meta"
        with _no_torch_function():
            shells = (
                value._layout.meta,
                ShardedTensor._make_guarded(value._local, value._layout, value._lineage),
            )
            Tensor.data.__set__(self, next(shell for shell in shells if _same_kind(self, shell)))  # type: ignore[attr-defined]
        self._layout, self._lineage = value._layout, value._lineage
        self._data_accesses += 1

    def data_ptr(self) -> int:
        """Raise: a ShardedTensor is not one block of memory.

        `nn.LSTM` and the other RNN modules get 0: on a GPU they compare the addresses of their
        weights before they copy them into one block for cuDNN, and equal addresses make them leave
        the weights in place. `dcp.async_save` gets 0 too, and copies the attributes, among them the
        part, as for a DTensor.

        Raises:
            RuntimeError: always, except inside these two.
        """
        if is_called_by(nn.RNNBase.flatten_parameters) or is_called_by(_offload_of_stager()):
            return 0
        raise RuntimeError(
            "a ShardedTensor is not one block of memory; this rank's part is: x.to_local(). To "
            "write a model for other programs, use sm.checkpoint.save_safetensors(model, path), or "
            "give whole tensors: state = sm.checkpoint.full_state_dict(model) on every rank, then "
            "on rank 0 model.save_pretrained(path, state_dict=state) or torch.save(state, path). "
            "To export or trace a model, load that state into a plain one"
        )

    untyped_storage = storage = data_ptr  # type: ignore[assignment]

    @property
    def _local_tensor(self) -> Tensor:
        """This rank's part, under the name by which torch's utilities set that of a DTensor."""
        return self._local

    @_local_tensor.setter
    def _local_tensor(self, part: Tensor) -> None:
        self._local = part

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied; detach() first")
        copy = ShardedTensor._make_guarded(
            self._local.detach().clone(), self._layout, self._lineage
        )
        memo[id(self)] = copy
        if self.requires_grad:
            copy.requires_grad_()
        if self.grad is not None:
            copy.grad = self.grad.detach().clone()  # type: ignore[assignment]
        if getattr(self, "_is_param", False):
            copy._is_param = True  # type: ignore[attr-defined]
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_param = getattr(self, "_is_param", False)
        if self._local.shape != self._layout.shape and is_called_by(torch.save):
            warnings.warn(_ONE_PART, stacklevel=4)  # at the line that calls torch.save
        return _rebuild, (self._local.detach(), self._layout, self.requires_grad, is_param)

    # -- bound in `methods.py`, declared here for type checkers ------------------------------------

    if TYPE_CHECKING:
        requires_grad: bool  # pyright: ignore
        grad: ShardedTensor | None  # pyright: ignore
        from_local: Callable[..., ShardedTensor]

        @property
        def addressable_shards(self) -> list[AddressableShard]: ...
        @property
        def global_shards(self) -> list[AddressableShard]: ...
        @property
        def grad_fn(self) -> Any: ...
        @property
        def is_leaf(self) -> bool: ...
        def addressable_data(self, index: int) -> Tensor: ...
        def to_local(
            self, *, grad_placements: SpecLike = None, check: bool | str = True
        ) -> Tensor: ...
        def full_tensor(self, *, grad_placements: SpecLike = None) -> Tensor: ...
        def redistribute(self, *where: Any, **options: Any) -> Any: ...
        def item(self) -> Any: ...
        def tolist(self) -> Any: ...
        def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]: ...
        def __iter__(self) -> Iterator[ShardedTensor]: ...  # pyright: ignore
        def requires_grad_(self, requires_grad: bool = True) -> ShardedTensor: ...
        def backward(  # pyright: ignore
            self,
            gradient: Tensor | None = None,
            retain_graph: bool | None = None,
            create_graph: bool = False,
            inputs: Any = None,
        ) -> None: ...
        def register_hook(self, hook: Callable[[ShardedTensor], Tensor | None]) -> Any: ...
        def register_post_accumulate_grad_hook(
            self, hook: Callable[[ShardedTensor], None]
        ) -> Any: ...


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
    what = (
        f"a plain tensor of shape {list(x.shape)}"
        if isinstance(x, Tensor)
        else f"{type(x).__name__} {x!r}"
    )
    raise TypeError(
        f"typeof takes a ShardedTensor, got {what}; place it with distribute_tensor or device_put "
        "first"
    )


def local_of(x: Any) -> Any:
    """Return the local part of a `ShardedTensor`, which autograd sees; other values as they are."""
    return x._local if isinstance(x, ShardedTensor) else x


class DonatedTensor(Tensor):
    """A `ShardedTensor` after `redistribute(..., donate=True)`: no memory, and every use raises."""

    _layout: Layout

    @staticmethod
    def take(x: ShardedTensor) -> None:
        """Turn `x` into a `DonatedTensor`."""
        donated: Any = x
        del donated._local
        donated.__class__ = DonatedTensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            "this tensor was donated: redistribute(..., donate=True) has given its memory to the "
            "result; use the result, or redistribute without donate=True"
        )

    def __repr__(self, **kwargs: Any) -> str:
        return f"ShardedTensor({self._layout}, donated)"


def _rebuild(local: Tensor, layout: Layout, requires_grad: bool, is_param: bool) -> ShardedTensor:
    """Unpickle a `ShardedTensor`; its mesh must exist in the process that reads it."""
    if local.shape != layout.local_shape:
        raise RuntimeError(
            f"this file has the part {list(local.shape)} of another rank; rank "
            f"{layout.mesh.world.rank} of {layout} "  # type: ignore[attr-defined]
            f"needs {list(layout.local_shape)}: load the file that this rank wrote"
        )
    out = ShardedTensor._make_guarded(local, layout, 0)  # one rank alone may read a file
    if requires_grad:
        out.requires_grad_()
    if is_param:
        out._is_param = True  # type: ignore[attr-defined]
    return out


# For `torch.load` with weights_only=True.
torch.serialization.add_safe_globals([_rebuild, make_layout, make_spec, unpickle_mesh])


def _offload_of_stager() -> Any:
    """Return torch's method that copies tensors for `dcp.async_save`; None if not imported."""
    module = sys.modules.get("torch.distributed.checkpoint._state_dict_stager")
    return module and module.StateDictStager._offload_tensor
