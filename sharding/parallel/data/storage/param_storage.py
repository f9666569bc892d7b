"""The copies that a rank has of a bucket's parameters, from the shard to the gathered buffer.

    shard          split over all axes of the optimizer   what the optimizer steps: a flat buffer,
                                                          parameters are views of it
    kept           split over the axes of the parameter   ZeRO-1 and ZeRO-2 keep the whole from step
                                                          to step
    after forward  split over one axis                    between forward and backward, if asked for
    whole          not split                              in use

Each copy has the versions of the parameters that it was made from; if the optimizer has stepped
since, it is gathered again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .....mesh.comm.pending import Pending
from .....mesh.comm.recording.recorder import CommTag
from .....mesh.comm.thread_context import thread_context
from ....tensor.sharded_tensor import ShardedTensor
from ..address import address_of, storage_of
from ..slot import UnitOptions
from .flat import FlatBucket

_WHOLE: tuple[str, ...] = ()
Version = tuple[int, int, int, int]


class ParamStorage:
    """The copies of a bucket's parameters on this rank.

    Attributes:
        shard: the flat shard, in the parameters' own dtype.
    """

    def __init__(
        self, flat: FlatBucket, dtype: torch.dtype, options: UnitOptions, name: str
    ) -> None:
        self.flat, self._stage, self._policy = flat, options.stage, options.policy
        self._offloaded = options.offloaded
        self._copies: dict[tuple[str, ...], tuple[Any, Tensor]] = {}
        self._pending: tuple[Any, Pending[Tensor]] | None = None
        self._moves, self._address = 0, 0
        self._owners: list[int] = []  # ids of the parameters whose values are in the shard
        self._tag = CommTag(f"{name}: gather {len(flat.bases)} parameters")
        self._allocate(dtype, torch.device("cpu") if options.offload else flat.mesh.device)

    # -- sharded -----------------------------------------------------------------------------------

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        # zeros, so that gaps between parameters are zero
        self.shard = torch.zeros(self.flat.layout.piece, dtype=dtype, device=device)
        if self._offloaded is not None and device.type == "cpu":
            self.shard = self.shard.pin_memory()
        self._shard_views = self.flat.shards_in(self.shard)

    @torch.no_grad()
    def move_to_shard(self, parameters: Sequence[ShardedTensor]) -> None:
        """Move local parts into the flat shard, from which they are gathered without a copy."""
        parts = [x._local for x in parameters]
        owners = [id(x) for x in parameters]
        dtype, device = parts[0].dtype, parts[0].device
        is_converted = dtype is not self.shard.dtype or device != self.shard.device
        is_replaced = bool(self._owners) and self._owners != owners  # they keep the old shard
        if is_converted or is_replaced:
            self._allocate(dtype, device)
        self._owners = owners
        moved = [
            (view, x)
            for view, x in zip(self._shard_views, parts, strict=True)
            if address_of(view) != address_of(x)
        ]
        if not moved:
            return
        # `x.data = ...` leaves no trace but the storage address, which changes here; so count the
        # moves.
        self._moves += any(view.is_contiguous() for view, _ in moved)
        torch._foreach_copy_([view for view, _ in moved], [x for _, x in moved])
        for view, x in moved:
            if view.is_contiguous():
                x.data = view

    def as_shard(self, piece: Tensor) -> Tensor:
        """Return a piece of gradients on the shard's device and in its dtype, perhaps later."""
        is_elsewhere = self.shard.device != piece.device
        # a graph has no events
        if self._offloaded is not None and is_elsewhere and thread_context.recorder is None:
            return self._offloaded.start(piece, self.shard.dtype)
        return piece.to(self.shard.device, self.shard.dtype)

    # -- gathered ----------------------------------------------------------------------------------

    def start_gather(self, parameters: Sequence[ShardedTensor]) -> None:
        """Launch the all_gather of the whole buffer.

        Communication: one all_gather, none if it is gathered or under way; if parameters are split
            over fewer axes than the optimizer, one more after each step of the optimizer.
        """
        versions = [_version(x, self._moves) for x in parameters]
        if self._find(versions, _WHOLE) is not None or (
            self._pending is not None and self._pending[0] == versions
        ):
            return
        self.drop_pending()  # it may still read the shard
        self.move_to_shard(parameters)
        versions = [_version(x, self._moves) for x in parameters]
        self._copies.pop(_WHOLE, None)  # outdated
        axes, x = self._nearest(versions)
        at_rest = self._stage.parameter
        if axes == self._stage.optimizer and at_rest not in (_WHOLE, axes):
            x = self.flat.start_gather(x, axes, at_rest, self._tag).wait()
            self._copies[at_rest], axes = (versions, x), at_rest
        self._pending = versions, self.flat.start_gather(x, axes, _WHOLE, self._tag)

    def _nearest(self, versions: Any) -> tuple[tuple[str, ...], Tensor]:
        """Return the nearest copy of the whole, with the axes that split it."""
        current = [axes for axes in self._copies if self._find(versions, axes) is not None]
        if not current:
            # Copied to the device, then cast as parameters are used; one call for both would wait.
            shard = self.shard.to(self.flat.mesh.device, non_blocking=True)
            return self._stage.optimizer, shard.to(self._policy.used_as(shard.dtype))
        nearest = min(current, key=self.flat.mesh.size)
        return nearest, self._copies[nearest][1]

    def _find(self, versions: Any, axes: tuple[str, ...]) -> Tensor | None:
        copy = self._copies.get(axes)
        if (
            copy is None
            or copy[0] != versions
            or (copy[1].is_inference() and not torch.is_inference_mode_enabled())
        ):
            return None
        recorder = thread_context.recorder
        if (
            recorder is not None
            and axes != self._stage.parameter
            and recorder.node_of(copy[1]) is None
        ):
            # gathered before the recording, such as by a validation: later calls will not find it
            return None
        return copy[1]

    def whole(self) -> Tensor:
        """Return the whole buffer; wait for it if it is under way."""
        if self._pending is not None:
            versions, pending = self._pending
            self._pending = None
            whole = pending.wait()
            self._copies[_WHOLE] = versions, whole
            self._address = storage_of(whole)
        return self._copies[_WHOLE][1]

    @property
    def is_gathered(self) -> bool:
        """Whether the whole buffer is here, not only under way."""
        return _WHOLE in self._copies

    @property
    def versions(self) -> list[Version]:
        """The versions of the parameters that the whole buffer was made from."""
        return self._copies[_WHOLE][0]

    @property
    def address(self) -> int | None:
        """The storage address of the whole buffer, None while it is not gathered."""
        return self._address if _WHOLE in self._copies else None

    def update_shard(
        self, parameters: Sequence[ShardedTensor], values: dict[int, Tensor], *, is_in_whole: bool
    ) -> None:
        """Write this rank's rows of whole values to parameters. Communication: none.

        Args:
            parameters: all of the bucket.
            values: whole values, by the index of the parameter; the same on all ranks.
            is_in_whole: whether the whole buffer has them already, and so stays current.
        """
        with torch.no_grad():
            for k, value in values.items():
                parameters[k]._local.copy_(self.flat.rows_of(k, value))
        versions, whole = self._copies[_WHOLE]
        self._copies = {_WHOLE: (versions, whole)}
        if is_in_whole:
            versions[:] = [_version(x, self._moves) for x in parameters]

    @torch.no_grad()
    def copy_whole_to_shard(self, parameters: Sequence[ShardedTensor]) -> None:
        """Copy this rank's rows of the whole buffer to the shard, which counts as no write."""
        if self.flat.is_lossy or _WHOLE not in self._copies:
            return
        versions, whole = self._copies[_WHOLE]
        if versions == [_version(x, self._moves) for x in parameters]:
            self.shard.copy_(self.flat.piece_of(whole))

    def drop_copies(self) -> None:
        """Forget all gathered values, which forward has changed."""
        self.drop_pending()
        self._copies = {}

    def drop_pending(self) -> None:
        """Wait for an all_gather under way and drop its result."""
        if self._pending is not None:
            _, pending = self._pending
            self._pending = None
            pending.wait()

    def after_forward(self, keep: str) -> None:
        """Free the whole buffer, unless `keep` is "all"; for an axis, keep the part over it."""
        if keep == "all" or _WHOLE not in self._copies:
            return
        versions, whole = self._copies.pop(_WHOLE)
        if keep != "rest":
            mesh = self.flat.mesh
            part = whole.chunk(mesh.size(keep))[mesh.get_local_rank(keep)].clone()
            self._copies[(keep,)] = versions, part

    def after_backward(self) -> None:
        """Free all copies that are not kept until the next step."""
        self._copies = {
            axes: copy for axes, copy in self._copies.items() if axes == self._stage.parameter
        }


def _version(x: ShardedTensor, moves: int) -> Version:
    """Return the version token of a parameter.

    Storage address, autograd version, uses of `.data`, object id.

    A write or a replacement changes it on all ranks, also on those with an empty part. Inference
    tensors have no version and count as written every time.
    """
    local = x._local
    return (
        local.data_ptr(),
        next(_unique) if local.is_inference() else local._version,
        x._data_accesses + moves,
        id(x),
    )


_unique = iter(range(-1, -(1 << 62), -1))
