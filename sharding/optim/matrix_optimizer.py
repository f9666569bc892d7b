"""The base class of Muon and Shampoo: groups of matrices, and AdamW for all other parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_

from ...mesh.comm.current_world import current_world
from ..parallel.pipeline.live_pipelines import LivePipelines
from ..training.norms import check_reduced

ADAMW = "adamw"


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer with its own algorithm for matrices and AdamW for all other parameters.

    A group with both kinds becomes two groups, which differ in "algorithm"; torch's schedulers
    treat them like any others. A group that has "algorithm" already is not split.

    Attributes:
        algorithm: the name of the groups of matrices.
    """

    algorithm: str
    most_dims: int | None = 2  # of a parameter that the algorithm takes; None for any number

    def __init__(
        self, params: Any, defaults: dict[str, Any], adamw: Sequence[str], adamw_lr: float | None
    ) -> None:
        """Split each group into parameters of the algorithm and those that AdamW steps.

        Args:
            params, defaults: as for torch's optimizers.
            adamw: patterns of names of matrices to step with AdamW.
            adamw_lr: its learning rate, by default that of the group.
        """
        self._patterns = tuple([adamw] if isinstance(adamw, str) else adamw)
        self._adamw_lr = adamw_lr
        self._matched: set[str] = set()
        super().__init__(params, defaults)
        unmatched = [pattern for pattern in self._patterns if pattern not in self._matched]
        unmatched = [pattern for pattern in unmatched if not self._matches_elsewhere(pattern)]
        if unmatched:
            names = [name for group in self.param_groups for name in group.get("param_names", ())]
            known = (
                f"the names are {names}"
                if names
                else "the parameters have no names: pass model.named_parameters()"
            )
            raise ValueError(
                f"{type(self).__name__}(adamw={list(self._patterns)}): no parameter matches "
                f"{unmatched}; {known}"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch; matrices and other parameters become separate groups."""
        for group in (
            [param_group] if param_group.get("algorithm") else self._split_group(param_group)
        ):
            self._check_group(group)
            super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; groups saved by an optimizer of torch get the missing defaults."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in {**self.defaults, "algorithm": self.algorithm}.items():
                if group.get(name) is None:
                    group[name] = value

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; return the result of the closure.

        Raises: ValueError on every rank for gradients that are still pending, as inside
        `accumulate_grads()`; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_reduced(f"{type(self).__name__}.step", self._named_grads())
        self._step_matrices([group for group in self.param_groups if group["algorithm"] != ADAMW])
        for group in self.param_groups:
            if group["algorithm"] == ADAMW:
                self._step_adamw(group)
        return loss

    @abstractmethod
    def _step_matrices(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step the matrices of these groups."""

    def _split_group(self, param_group: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the non-empty ones of a group of matrices and a group of other parameters."""
        params = (
            [param_group["params"]]
            if isinstance(param_group["params"], Tensor)
            else list(param_group["params"])
        )
        rest: Mapping[str, Any] = {
            name: value for name, value in param_group.items() if name != "params"
        }
        matrices, others = (
            [p for p in params if self._is_matrix(p) == is_matrix] for is_matrix in (True, False)
        )
        rate = {} if self._adamw_lr is None else {"lr": self._adamw_lr}
        groups = [
            {**rest, "params": matrices, "algorithm": self.algorithm},
            {**rest, **rate, "params": others, "algorithm": ADAMW},
        ]
        return [group for group in groups if group["params"]] or groups[:1]

    def _is_matrix(self, parameter: Tensor | tuple[str, Tensor]) -> bool:
        name, x = parameter if isinstance(parameter, tuple) else ("", parameter)
        hits = [pattern for pattern in self._patterns if name and fnmatchcase(name, pattern)]
        self._matched.update(hits)
        return self._has_dims(x) and not hits

    def _matches_elsewhere(self, pattern: str) -> bool:
        """Return whether a pattern matches a name in another stage of a pipeline."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        model = current_world().state(LivePipelines).owner_of(parameters)
        return model is not None and any(fnmatchcase(name, pattern) for name in model.names())

    def _has_dims(self, x: Tensor) -> bool:
        return x.ndim >= 2 and (self.most_dims is None or x.ndim <= self.most_dims)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise a ValueError for other parameters in a group of matrices, and for complex ones."""
        if group["algorithm"] not in (self.algorithm, ADAMW):
            known = f"{self.algorithm!r} or {ADAMW!r}"
            raise ValueError(
                f'{type(self).__name__}: "algorithm" of a group must be {known}, got '
                f"{group['algorithm']!r}"
            )
        group["params"] = (
            [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        )
        for parameter in group["params"]:
            name, x = parameter if isinstance(parameter, tuple) else ("a parameter", parameter)
            if x.is_complex() or (group["algorithm"] != ADAMW and not self._has_dims(x)):
                stacked = " or a stack of them" if self.most_dims is None else ""
                raise ValueError(
                    f"{type(self).__name__}: {name} of shape {list(x.shape)} and {x.dtype} is not "
                    f"a real matrix{stacked}; leave such "
                    f"parameters to another optimizer, or put those of other dims in a group with "
                    f'"algorithm": {ADAMW!r}'
                )

    def _named_grads(self) -> dict[str, Tensor]:
        grads = {}
        for g, group in enumerate(self.param_groups):
            names = group.get("param_names") or [
                f"param_groups[{g}]['params'][{i}]" for i in range(len(group["params"]))
            ]
            grads.update(
                {
                    f"{name}.grad": p.grad
                    for name, p in zip(names, group["params"], strict=True)
                    if p.grad is not None
                }
            )
        return grads

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                zeros = {
                    name: torch.zeros_like(p, memory_format=torch.preserve_format)
                    for name in ("exp_avg", "exp_avg_sq")
                }
                self.state[p].update({"step": torch.tensor(0.0), **zeros})
        states = [self.state[p] for p in params]
        beta1, beta2 = group["betas"]
        adamw_(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            foreach=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=False,
        )


def with_grads(groups: Sequence[dict[str, Any]]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the parameters with a gradient, each with its group."""
    return [
        (p, group) for group in groups for p in group["params"] if p.grad is not None and p.numel()
    ]


def as_number(lr: float | Tensor) -> float:
    """Return a learning rate, which may be a one-element tensor, as a number."""
    return lr.item() if isinstance(lr, Tensor) else lr


def check_not_negative(what: str, **numbers: float) -> None:
    """Raise a ValueError for a negative number."""
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{what}({name}={value}): {name} must be a number >= 0")
