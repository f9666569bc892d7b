"""Mixtures of experts of a model, and those of a rank that are counted next to an axis "tp"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..layout.spec import P
from ..ops.dispatch import wrap
from ..parallel.experts.moe import token_cuts
from ..parallel.redistribute_operands import redistribute_operands
from ..tensor.autograd.local_part import known_local
from ..tensor.sharded_tensor import local_of


def mixtures(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield paths and modules whose parameters have a slice for each expert.

    Those of transformers do: `num_experts`, and stacks of matrices of so many.
    """
    for path, inner in model.named_modules():
        count = getattr(inner, "num_experts", None)
        own = list(inner.parameters(recurse=False))
        is_stack = all(x.ndim > 1 and x.shape[0] == count for x in own)
        if isinstance(count, int) and is_stack and any(x.ndim == 3 for x in own):
            yield path, inner


def mixture_inputs(model: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """Return the paths of the modules whose results the modules of experts are called with.

    Args:
        forward: calls the model.

    Returns:
        One for each module that has experts; none at all if another module takes one of these
        results, or if a module of experts is called with something else.
    """
    parents = dict.fromkeys(path.rpartition(".")[0] for path, _ in mixtures(model))
    results: list[tuple[str, Any]] = []
    uses: list[tuple[str, Any]] = []

    def note_result(path: str, module: nn.Module, args: Any, output: Any) -> None:
        results.append((path, output))

    def note_use(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        uses.extend((path, x) for x in (*args, *kwargs.values()) if isinstance(x, Tensor))

    handles: list[Any] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{parent}.") for parent in parents)
        if path in parents or not is_inside:
            hook = partial(note_use, path)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if next(module.children(), None) is None:
            handles.append(module.register_forward_hook(partial(note_result, path)))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    sources = []
    for parent in parents:
        x = next((x for path, x in uses if path == parent), None)
        source = next((path for path, y in results if y is x), None)
        if source is None or any(y is x and path != parent for path, y in uses):
            return []
        sources.append(source)
    return sources


class OwnRows(nn.Module):
    """Experts that are split over an axis, with as many rows as this rank has of its own.

    Rows that are whole along the axis are shared by its ranks, and results are gathered, as `moe`
    does it. In between, where `moe` sends rows to the ranks of their experts, this rank's rows go
    to its experts: on average a rank receives as many. No values decide how many they are, and
    experts see plain tensors.

    Args:
        experts: stacks of matrices that are split along dim 0 over the axis, evenly. They are
            replaced by this rank's.
        axis: of the mesh.
    """

    def __init__(self, experts: Any, axis: str) -> None:
        super().__init__()
        for name, x in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, nn.Parameter(local_of(x).detach(), x.requires_grad))
            experts.num_experts = len(local_of(x))
        self.experts = experts
        self._axis = axis

    def forward(self, rows: Any, chosen: Any, weights: Any) -> Tensor:
        """Apply the experts to rows [n d], of which each has some of them [n k]."""
        cuts = [*token_cuts(rows._layout, (self._axis,)), ()]
        split = [x._layout.replace(P.of_cuts(cuts, {})) for x in (rows, chosen, weights)]
        parts = redistribute_operands((rows, chosen, weights), split)
        result = wrap(self.experts(*map(known_local, parts)), split[0])
        whole: Tensor = result.redistribute(P.of_cuts([*rows.spec.cuts[:-1], ()], {}))
        return whole
