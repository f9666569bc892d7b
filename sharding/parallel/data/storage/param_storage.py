"""The values of a bucket's parameters on this rank: at rest, gathered, and what lies between.

    at rest      split over all axes of the optimizer      what the optimizer steps: one piece, of which the parameters are views
    kept         split over the axes of the parameter      ZeRO-1 and 2 keep all of it from step to step
    after forward split over one axis                       if asked for, from forward to backward
    whole        split over none                           while it is used

Each is known by the versions of the parameters that it was made of: one that the optimizer has stepped since is made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .....mesh.monitor.recording.recorder import CommTag
from ....tensor.sharded_tensor import ShardedTensor
from ..slot import Options
from .flat import FlatBucket

_WHOLE: tuple[str, ...] = ()
Version = tuple[int, int, int, int]


class Levels:
    """What this rank holds of the parameters of a bucket.

    Attributes:
        shard: the piece at rest, in the parameters' own dtype.
    """

    def __init__(self, flat: FlatBucket, dtype: torch.dtype, options: Options, name: str) -> None:
        self.flat, self._form, self._policy, self._offload = flat, options.form, options.policy, options.offload
        self._held: dict[tuple[str, ...], tuple[Any, Tensor]] = {}
        self._coming: tuple[Any, Callable[[], Tensor]] | None = None
        self._moves, self._address = 0, 0
        self._note = CommTag(f"{name}: gather {len(flat.bases)} parameters")
        self._lay_out(dtype, torch.device("cpu") if options.offload else flat.mesh.device)

    # -- at rest -------------------------------------------------------------------------------------------------------

    def _lay_out(self, dtype: torch.dtype, device: torch.device) -> None:
        self.shard = self.flat.empty_shard(dtype, device)
        if self._offload and self._offload.pin_memory and device.type == "cpu" and self.flat.mesh.device.type == "cuda":
            self.shard = self.shard.pin_memory()
        self._places = self.flat.shards_in(self.shard)

    @torch.no_grad()
    def take(self, parameters: Sequence[ShardedTensor]) -> None:
        """Have the parameters' parts lie in the piece, from which they are gathered without a copy."""
        parts = [x._local for x in parameters]
        if parts[0].dtype is not self.shard.dtype or parts[0].device != self.shard.device:  # the module was converted
            self._lay_out(parts[0].dtype, parts[0].device)
        moved = [(place, x) for place, x in zip(self._places, parts, strict=True) if place.data_ptr() != x.data_ptr()]
        if not moved:
            return
        # Values may have come by `x.data = ...`, which leaves no trace but where they lie, and that is about to change.
        self._moves += any(place.is_contiguous() for place, _ in moved)
        torch._foreach_copy_([place for place, _ in moved], [x for _, x in moved])
        for place, x in moved:
            if place.is_contiguous():
                x.data = place

    # -- gathered ------------------------------------------------------------------------------------------------------

    def start(self, parameters: Sequence[ShardedTensor]) -> None:
        """Launch what is needed to have the whole.

        Communication: one all_gather, or none if the whole is there or under way; with parameters split over fewer axes than the
            optimizer, one more after each step of the optimizer.
        """
        versions = [_version(x, self._moves) for x in parameters]
        if self._find(versions, _WHOLE) is not None or (self._coming is not None and self._coming[0] == versions):
            return
        self.drop()  # it may read the piece
        self.take(parameters)
        versions = [_version(x, self._moves) for x in parameters]
        self._held.pop(_WHOLE, None)  # of values that are no longer those of the parameters
        axes, x = self._nearest(versions)
        kept = self._form.parameter
        if axes == self._form.optimizer and kept not in (_WHOLE, axes):
            x = self.flat.start_gather(x, axes, kept, self._note)()
            self._held[kept], axes = (versions, x), kept
        self._coming = versions, self.flat.start_gather(x, axes, _WHOLE, self._note)

    def _nearest(self, versions: Any) -> tuple[tuple[str, ...], Tensor]:
        """From where the whole is gathered with the fewest bytes."""
        held = [axes for axes in self._held if self._find(versions, axes) is not None]
        if not held:
            return self._form.optimizer, self._packed()
        nearest = min(held, key=self.flat.mesh.size)
        return nearest, self._held[nearest][1]

    def _packed(self) -> Tensor:
        """The piece in the dtype in which the parameters are used."""
        return self.shard.to(self.flat.mesh.device, self._policy.used_as(self.shard.dtype), non_blocking=True)

    def _find(self, versions: Any, axes: tuple[str, ...]) -> Tensor | None:
        held = self._held.get(axes)
        if held is None or held[0] != versions or (held[1].is_inference() and not torch.is_inference_mode_enabled()):
            return None
        return held[1]

    def whole(self) -> Tensor:
        """The whole buffer, once it has been started."""
        if self._coming is not None:
            versions, wait = self._coming
            self._coming = None
            whole = wait()
            self._held[_WHOLE], self._address = (versions, whole), whole.untyped_storage().data_ptr()
        return self._held[_WHOLE][1]

    @property
    def is_there(self) -> bool:
        """Whether the whole is there, not only on its way."""
        return _WHOLE in self._held

    @property
    def made_of(self) -> list[Version]:
        """The versions of the parameters that the whole was made of."""
        return self._held[_WHOLE][0]

    @property
    def address(self) -> int | None:
        """Where the whole buffer lies."""
        return self._address if _WHOLE in self._held else None

    def drop(self) -> None:
        """Wait for what is under way, and forget it."""
        if self._coming is not None:
            _, wait = self._coming
            self._coming = None
            wait()

    def after_forward(self, keep: str) -> None:
        """Let the whole go until backward; "all" to keep it, "rest" to keep nothing of it, or the axis over which it is kept split."""
        if keep == "all" or _WHOLE not in self._held:
            return
        versions, whole = self._held.pop(_WHOLE)
        if keep != "rest":
            self._held[(keep,)] = versions, self.flat.part_over(whole, keep)

    def after_backward(self) -> None:
        """Let go what is not kept until the next step."""
        self._held = {axes: held for axes, held in self._held.items() if axes == self._form.parameter}


def _version(x: ShardedTensor, moves: int) -> Version:
    """What changes when a parameter is written or replaced: where it lies, how often it was written, how often `.data` was asked for or
    assigned, and which object it is. It changes on all ranks at once, on those with an empty part too.

    Tensors of inference mode do not count, and are taken for written each time.
    """
    local = x._local
    return local.data_ptr(), next(_never) if local.is_inference() else local._version, x._data_accesses + moves, id(x)


_never = iter(range(-1, -(1 << 62), -1))
