"""`loss_parallel`: losses of logits split by classes, with torch's name, and plain targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..layout.spec import P
from ..ops.rules.decomposition_utils import splitting_axes
from ..tensor.convert import from_local
from ..tensor.sharded_tensor import ShardedTensor

_LOSSES: dict[Any, str] = {F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss"}


@contextmanager
def loss_parallel() -> Iterator[None]:
    """with loss_parallel(): let losses of logits split by classes take plain targets.

    These are `F.cross_entropy` and `F.nll_loss`, as in torch.

        logits [b, c/tp]   targets [b], plain, the same on every rank   ->   the loss, no gather

    Without it they take targets that are sharded tensors, and logits split in any way; neither
    needs backward inside the block. All reductions, class weights and label smoothing work, on
    meshes of any number of axes.

    Raises:
        ValueError: from the loss: a plain target whose rows are ambiguous, since axes split other
            dims of the logits.

    Communication: none by itself; the loss reduces one maximum and one sum for each row.

    Example:
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(logits, labels)
        ...     loss.backward()
    """
    with _PlainTargets():
        yield


class _PlainTargets(TorchFunctionMode):
    """Make plain targets and class weights of losses replicated tensors."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LOSSES:
            return func(*args, **kwargs)
        named = dict(zip(("input", "target", "weight"), args, strict=False)) | kwargs
        logits = named.get("input")
        if isinstance(logits, ShardedTensor):
            for name in ("target", "weight"):
                named[name] = _as_replicated(_LOSSES[func], name, named.get(name), logits)
        return func(
            *(named.pop(name) for name in ("input", "target", "weight")[: len(args)]),
            *args[3:],
            **named,
        )


def _as_replicated(loss: str, name: str, value: Any, logits: ShardedTensor) -> Any:
    """Return a plain tensor as a replicated one on the logits' mesh; other values unchanged.

    Raises:
        ValueError: a target, and axes split other dims of the logits than the classes.
    """
    if not isinstance(value, Tensor) or isinstance(value, ShardedTensor):
        return value
    classes = min(1, logits.ndim - 1)
    rows = [
        axis
        for dim in range(logits.ndim)
        if dim != classes
        for axis in splitting_axes(logits._layout, dim)
    ]
    rows = [axis for axis in rows if logits.mesh.size(axis) > 1]
    if rows and name == "target":
        raise ValueError(
            f"{loss} in loss_parallel: the target {list(value.shape)} is a plain tensor, and axes "
            f"{rows} split the rows of the logits {logits._layout}, so it may be the whole target "
            "or this rank's part; write DTensor.from_local(target, mesh, placements)"
        )
    return from_local(value, logits.mesh, P())
