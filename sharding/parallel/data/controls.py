"""What a program may change on a unit between steps: the methods of torch's `FSDPModule`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class UnitControls:
    """Switches of one unit; the defaults are those of `fully_shard`.

    Attributes:
        keep: what to keep between forward and backward: "all", only the shard ("rest"), or the
            axis over which to keep parameters split; None for "all" in the outermost unit, whose
            backward is the first, and "rest" in the others.
        allows_unused: whether a parameter may have a gradient on some ranks only.
        reduces_grads: whether backward reduces gradients; if not, whole gradients accumulate.
        all_reduces_grads: whether backward reduces gradients over axes that replicate
            parameters (HSDP).
        reshards_after_backward: whether backward frees the gathered parameters.
        prefetched_in_backward: whether other units gather this one ahead of its backward.
        divide_factor: the divisor of gradients summed over data-parallel axes; None to average.
        forward_prefetch, backward_prefetch: the units to gather ahead; None for the order of
            the last forward.
        reduce_hook: called with each reduced flat buffer of gradients, which it may write.
        optimizer_event: an event that the next forward of the outermost unit waits for.
    """

    keep: str | None = None
    allows_unused: bool = False
    reduces_grads: bool = True
    all_reduces_grads: bool = True
    reshards_after_backward: bool = True
    prefetched_in_backward: bool = True
    divide_factor: float | None = None
    forward_prefetch: Sequence[Any] | None = None
    backward_prefetch: Sequence[Any] | None = None
    reduce_hook: Callable[[Tensor], Any] | None = None
    optimizer_event: Any = None

    def wait_for_optimizer(self) -> None:
        """Wait, on the current stream, for the optimizer's event, once."""
        event, self.optimizer_event = self.optimizer_event, None
        if event is not None:
            event.wait()
