"""`EMA`: a moving average of a model's parameters, in the same layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel.pipeline.pipeline import Pipeline
from ..tensor.sharded_tensor import ShardedTensor


class EMA:
    """EMA(model, decay): moving average of the trained parameters, by path, in the same layouts.

        average = decay * average + (1 - decay) * parameter       at each `update()`, on local parts

    Averages of 16-bit parameters are kept in float32, so that small steps are not rounded away. A
    tied parameter has one average; buffers and parameters that require no gradient have none.

    Args:
        model: the module, after `fully_shard` and the like; or a pipeline, of which each rank
            averages its stages, and the state is that of the whole model.
        decay: the weight of the old average in an update, from 0 to 1.

    Attributes:
        decay: as given; it may be changed.
        average: path -> average, initially a copy of the parameter.
        pipe: the pipeline; None for a module.

    Raises:
        ValueError: on every rank, a decay outside [0, 1]; a model with no parameter that requires
            grad.

    Communication: none, except in `load_state_dict` of averages with another layout, and in
        `state_dict` and `load_state_dict` for a pipeline: one all_gather of small objects over its
        axis.

    Example:
        >>> ema = sm.training.EMA(model, decay=0.999)
        >>> for batch in batches:
        ...     train_step(model, batch)
        ...     ema.update()
        >>> with ema.swapped():
        ...     evaluate(model)
    """

    # to `sm.jit`, as hyperparameters of optimizers are: `decay` may change from call to call
    _numbers_are_inputs = True

    def __init__(self, model: nn.Module | Pipeline, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"EMA(decay={decay}): decay must be from 0 to 1, such as 0.999")
        self.decay = decay
        # a tensor, so that a graph of `sm.jit` can count
        self._updates = torch.zeros((), dtype=torch.int64)
        self._parameters = {path: p for path, p in model.named_parameters() if p.requires_grad}
        self.pipe = model if isinstance(model, Pipeline) else None
        if not self._parameters and self.pipe is None:
            raise ValueError(
                f"EMA of {type(model).__name__}: no parameter requires grad, so there is nothing "
                "to average"
            )
        # copies with the same layouts, at least in float32
        self.average = {
            path: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for path, p in self._parameters.items()
        }
        self._is_swapped = False

    @torch.no_grad()
    def update(self) -> None:
        """Update the average from the current parameters; call it after each step of the optimizer.

        Raises:
            RuntimeError: on every rank, inside `swapped()`.
            ValueError: on every rank, a parameter whose layout has changed since the average was
                made.
        """
        if self._is_swapped:
            raise RuntimeError(
                "EMA.update() inside swapped(): the parameters are the average there; update after "
                "the block"
            )
        self._check_layouts()
        averages = list(self.average.values())
        parameters = [p.detach() for p in self._parameters.values()]
        for some in _by_dtype(parameters):
            now = [parameters[i].to(averages[i].dtype) for i in some]
            torch._foreach_lerp_([averages[i] for i in some], now, 1 - self.decay)
        self._updates += 1

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return int(self._updates)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap parameters and averages inside the block, so that the model uses the averages.

        Values are swapped in place, with one more local part in memory at a time, so references to
        parameters (in an optimizer) stay valid. A 16-bit parameter is restored bit for bit.

        Raises: RuntimeError on every rank, inside another `swapped()`.
        """
        if self._is_swapped:
            raise RuntimeError(
                "EMA.swapped() inside swapped(): the parameters are the average already"
            )
        self._check_layouts()
        self._swap()
        self._is_swapped = True
        try:
            yield
        finally:
            self._is_swapped = False
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """Return {"decay", "updates", "average": {path: tensor}}; the tensors are not copied."""
        state = self.own_state_dict()
        if self.pipe is not None:
            state["average"] = self.pipe.whole.tree(state["average"])
        return state

    def own_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` with the averages of this rank's stages alone.

        Communication: none.
        """
        self._refuse_swapped("state_dict")
        return {"decay": self.decay, "updates": self.updates, "average": dict(self.average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the averages of a `state_dict`.

        Raises: ValueError on every rank, before anything is changed: paths or shapes that differ
        from the model's.

        Communication: for averages with another layout, their redistribution; else none.
        """
        self._refuse_swapped("load_state_dict")
        averages: Mapping[str, Tensor] = state["average"]
        if self.pipe is not None:
            averages = self.pipe.whole.own_tree(averages)
        _check_same(averages, self.average)
        for path, own in self.average.items():
            loaded = averages[path]
            if isinstance(loaded, ShardedTensor) and isinstance(own, ShardedTensor):
                loaded = loaded.redistribute(own.mesh, own.spec)
            own.copy_(loaded)
        self.decay = state["decay"]
        self._updates.fill_(state["updates"])

    def __repr__(self) -> str:
        return f"EMA({len(self.average)} parameters, decay={self.decay}, updates={self.updates})"

    @torch.no_grad()
    def _swap(self) -> None:
        for path, p in self._parameters.items():
            before = p.detach().to(self.average[path].dtype, copy=True)
            average = self.average[path]
            p.copy_(average)
            average.copy_(before)

    def _refuse_swapped(self, what: str) -> None:
        if self._is_swapped:
            raise RuntimeError(
                f"EMA.{what}() inside swapped(): the averages are in the model there; call it "
                "outside the block"
            )

    def _check_layouts(self) -> None:
        for path, p in self._parameters.items():
            average = self.average[path]
            if _layout_key(p) != _layout_key(average):
                now, then = (
                    f"{x._layout}" if isinstance(x, ShardedTensor) else f"a plain {list(x.shape)}"
                    for x in (p, average)
                )
                raise ValueError(
                    f"EMA: {path} is {now}, but its average {then}; make the EMA after the model "
                    "is sharded, or load its state into a new one"
                )


def _layout_key(x: Tensor) -> Any:
    return (x.mesh, x.spec, x.shape) if isinstance(x, ShardedTensor) else x.shape


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that one `foreach` operator can process."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(tensors):
        groups.setdefault((x.device, x.dtype, isinstance(x, ShardedTensor)), []).append(i)
    return list(groups.values())


def _check_same(loaded: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if paths or shapes differ."""
    missing, unknown = [p for p in own if p not in loaded], [p for p in loaded if p not in own]
    if missing or unknown:
        raise ValueError(
            f"EMA.load_state_dict: the state lacks averages of {missing or 'nothing'}, and has "
            f"averages of {unknown or 'nothing'}, which the model does not have; it has {list(own)}"
        )
    for path, x in own.items():
        if loaded[path].shape != x.shape:
            raise ValueError(
                f"EMA.load_state_dict: the average of {path} is {list(loaded[path].shape)}, the "
                f"parameter {list(x.shape)}"
            )
