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

from ....mesh.watch.seat import Note
from ...tensor import ShardedTensor
from .flat import FlatBucket
from .form import Form

_WHOLE: tuple[str, ...] = ()


class Levels:
    """What this rank holds of the parameters of a bucket.

    Attributes:
        shard: the piece at rest, in the parameters' own dtype.
    """

    def __init__(self, flat: FlatBucket, form: Form, dtype: torch.dtype, used: torch.dtype, name: str) -> None:
        self.flat, self._form, self._used = flat, form, used
        self.shard = flat.empty_shard(dtype, flat.mesh.device)
        self._held: dict[tuple[str, ...], tuple[Any, Tensor]] = {}
        self._coming: tuple[Any, Callable[[], Tensor]] | None = None
        self._note = Note(f"{name}: gather {len(flat.bases)} parameters")

    # -- at rest -------------------------------------------------------------------------------------------------------

    def places(self) -> list[Tensor]:
        """Where each parameter's part lies in the piece."""
        return self.flat.shards_in(self.shard)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Put the parameters' values into the piece."""
        if parts[0].dtype is not self.shard.dtype or parts[0].device != self.shard.device:  # the module was converted
            self.shard = self.flat.empty_shard(parts[0].dtype, parts[0].device)
        moved = [(place, x) for place, x in zip(self.places(), parts, strict=True) if place.data_ptr() != x.data_ptr()]
        if moved:
            torch._foreach_copy_([place for place, _ in moved], [x for _, x in moved])

    def _packed(self, parts: Sequence[Tensor]) -> Tensor:
        """The piece with the parameters' values, in the dtype in which they are used."""
        self.take(parts)
        return self.shard.to(self.flat.mesh.device, self._used, non_blocking=True)

    # -- gathered ------------------------------------------------------------------------------------------------------

    def start(self, parameters: Sequence[ShardedTensor]) -> None:
        """Launch what is needed to have the whole.

        Communication: one all_gather, or none if the whole is there or under way; with parameters split over fewer axes than the
            optimizer, one more after each step of the optimizer.
        """
        parts = [x._local.detach() for x in parameters]
        versions = [(part.data_ptr(), _version(part), x._touched) for x, part in zip(parameters, parts, strict=True)]
        if self._find(versions, _WHOLE) is not None or (self._coming is not None and self._coming[0] == versions):
            return
        self.drop()
        axes, x = self._nearest(versions, parts)
        kept = self._form.parameter
        if axes == self._form.optimizer and kept not in (_WHOLE, axes):
            x = self.flat.start_gather(x, axes, kept, self._note)()
            self._held[kept], axes = (versions, x), kept
        self._coming = versions, self.flat.start_gather(x, axes, _WHOLE, self._note)

    def _nearest(self, versions: Any, parts: Sequence[Tensor]) -> tuple[tuple[str, ...], Tensor]:
        """From where the whole is gathered with the fewest bytes."""
        held = [axes for axes in self._held if self._find(versions, axes) is not None]
        if not held:
            return self._form.optimizer, self._packed(parts)
        nearest = min(held, key=self.flat.mesh.size)
        return nearest, self._held[nearest][1]

    def _find(self, versions: Any, axes: tuple[str, ...]) -> Tensor | None:
        held = self._held.get(axes)
        return held[1] if held is not None and held[0] == versions else None

    def whole(self) -> Tensor:
        """The whole buffer, once it has been started."""
        if self._coming is not None:
            versions, wait = self._coming
            self._coming = None
            self._held[_WHOLE] = versions, wait()
        return self._held[_WHOLE][1]

    @property
    def is_there(self) -> bool:
        """Whether the whole is there, not only on its way."""
        return _WHOLE in self._held

    @property
    def address(self) -> int | None:
        """Where the whole buffer lies."""
        held = self._held.get(_WHOLE)
        return None if held is None else held[1].untyped_storage().data_ptr()

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


def _version(x: Tensor) -> int:
    """How often a tensor was written; tensors of inference mode do not count, and are taken for written each time."""
    return next(_never) if x.is_inference() else x._version


_never = iter(range(-1, -(1 << 62), -1))
