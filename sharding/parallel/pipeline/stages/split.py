"""Where stages begin: from paths, or chosen so that stages cost about the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from .dependencies import Boundary, outer_calls
from .model_plan import modules_of_plan, plan_of
from .recording import Recording
from .units import ModuleTree, blocks, is_callable, module_tree


@dataclass(frozen=True)
class UnitCost:
    """A call of a block of the model, and what it costs.

    Attributes:
        path: the module.
        occurrence: which of its calls, from 0.
        flops: floating-point operations of its forward for the example; 0 without an example.
        parameters: the number of its parameters, each counted where it is used first.
    """

    path: str
    occurrence: int
    flops: int
    parameters: int


SplitFunction = Callable[[Sequence[UnitCost]], Sequence[str | nn.Module]]
Split = str | Sequence[str | nn.Module] | SplitFunction


def default_split(model: nn.Module) -> Split:
    """Return "auto" for a model that has a pipeline plan of its own, else "even"."""
    return "auto" if modules_of_plan(model) else "even"


def splittable_units(split: Split, model: nn.Module) -> ModuleTree:
    """Return the tree whose units are those that a split by cost chooses from.

    For "auto" they are the modules of the model's own plan, and outermost modules around them;
    otherwise the model's blocks.

    Raises:
        ValueError: "auto" for a model without a plan, or one whose plan matches nothing.
    """
    if split != "auto":
        return blocks(model)
    paths = modules_of_plan(model)
    if not paths:
        plan = list(plan_of(model))
        problem = f"matches none of its modules: {plan}" if plan else "is missing"
        raise ValueError(
            f'split="auto" is by the plan of the model (pp_plan), which some models of Hugging '
            f'Face have; that of {type(model).__name__} {problem}. Pass "even", or a list of paths '
            'such as ["layers.2", "layers.4"]'
        )
    return module_tree(model, [model.get_submodule(path) for path in paths])


def unit_costs(tree: ModuleTree, recording: Recording | None) -> list[UnitCost]:
    """Return the units in the order of their calls, or of registration without a recording."""
    calls = [(path, 0) for path in tree.units]
    if recording is not None:
        calls = [(enter.path, flops) for enter, flops in outer_calls(recording, tree)]
    counted: set[int] = set()
    occurrences: dict[str, int] = {}
    costs: list[UnitCost] = []
    for path, flops in calls:
        if path not in tree.units:
            continue
        occurrence = occurrences[path] = occurrences.get(path, -1) + 1
        new = [x for x in tree.units[path].parameters() if id(x) not in counted]
        counted |= {id(x) for x in new}
        costs.append(UnitCost(path, occurrence, flops, sum(x.numel() for x in new)))
    return costs


def choose_boundaries(
    split: Split, model: nn.Module, costs: Sequence[UnitCost], stages: int
) -> Any:
    """Return the calls with which the stages after the first begin.

    Args:
        split: paths or modules, "auto", "even", "parameters", or a function of the costs that
            returns paths or modules.
        model: the model.
        costs: of `splittable_units`, in order.
        stages: the number of stages.

    Raises:
        ValueError: fewer blocks than stages; or see `named_boundaries`.
        TypeError: `split` is of another kind.
    """
    if isinstance(split, str):
        if split not in ("auto", "even", "parameters"):
            raise ValueError(
                f'split={split!r}: pass "auto", "even", "parameters", a list of paths such as '
                f'["layers.2", "layers.4"], or a function'
            )
        paths = modules_of_plan(model) if split == "auto" else [cost.path for cost in costs]
        firsts = [number for number, cost in enumerate(costs) if cost.path in paths]
        if len(firsts) < stages:
            raise ValueError(
                f"split={split!r}: the model has {len(firsts)} blocks, fewer than the {stages} "
                f"stages: {[costs[i].path for i in firsts]}; use fewer stages, or name boundaries "
                "inside of the blocks"
            )
        values = [cost.parameters if split == "parameters" else cost.flops for cost in costs]
        if not any(values):
            values = [cost.parameters for cost in costs]
        # what is before the first one, such as a vision tower, is in its stage
        edges = [0, *firsts[1:], len(costs)]
        sums = [sum(values[i:j]) for i, j in pairwise(edges)]
        starts = [firsts[number] for number in balance_costs(sums, stages)]
        return [Boundary(costs[i].path, costs[i].occurrence) for i in starts]
    named = split(costs) if callable(split) else split
    if not isinstance(named, Sequence) or isinstance(named, str):
        raise TypeError(f"split: expected a list of paths or modules, got {named!r}")
    return named_boundaries(named, model, stages)


def named_boundaries(
    split: Sequence[str | nn.Module], model: nn.Module, stages: int
) -> list[Boundary]:
    """Return the first calls of these modules.

    Raises:
        ValueError: a module is not in the model, is never called, or is named twice; the number of
            modules does not fit the number of stages.
    """
    first_paths = {id(module): path for path, module in model.named_modules()}
    modules = dict(model.named_modules(remove_duplicate=False))
    boundaries: list[Boundary] = []
    for entry in split:
        module = modules.get(entry) if isinstance(entry, str) else entry
        path = first_paths.get(id(module))
        if module is None or path is None:
            text = entry if isinstance(entry, str) else type(entry).__name__
            similar = get_close_matches(text, [name for name in modules if name], 4)
            hint = f"; similar paths are {similar}" if similar else ""
            raise ValueError(f"split: {type(model).__name__} has no module {text!r}{hint}")
        if not path:
            raise ValueError("split: a stage cannot begin with the model itself; name a submodule")
        if not is_callable(module):
            raise ValueError(
                f"split: {path!r} is a {type(module).__name__}, which is never called; name one of "
                f"its entries, such as '{path}.{next(iter(module._modules), 0)}'"
            )
        if Boundary(path) in boundaries:
            raise ValueError(f"split: {path!r} is named twice; each stage begins with another call")
        boundaries.append(Boundary(path))
    if len(boundaries) != stages - 1:
        raise ValueError(
            f"split: {len(boundaries)} boundaries make {len(boundaries) + 1} stages, but "
            f"num_stages={stages}; name the modules with which stages 1 to {stages - 1} begin"
        )
    return boundaries


def balance_costs(costs: Sequence[int], stages: int) -> list[int]:
    """Return where each part but the first begins, of costs cut into contiguous parts.

    No part is empty, and the largest sum of a part is as small as possible.
    """
    sums = [0, *accumulate(costs)]
    count = len(costs)
    # largest[i]: of the first i costs in `stage` parts; starts[stage][i]: where the last one begins
    largest = list(sums)
    starts: list[list[int]] = []
    for stage in range(2, stages + 1):
        following = [0] * (count + 1)
        start_of = [0] * (count + 1)
        for end in range(stage, count + 1):
            # `largest` grows with the start and the last part shrinks: compare where they cross
            candidates = range(stage - 1, end)
            crossing = bisect_left(
                candidates, True, key=lambda j, end=end: largest[j] >= sums[end] - sums[j]
            )
            near = [candidates[i] for i in (crossing - 1, crossing) if 0 <= i < len(candidates)]
            start = min(near, key=lambda j, end=end: max(largest[j], sums[end] - sums[j]))
            start_of[end], following[end] = start, max(largest[start], sums[end] - sums[start])
        largest = following
        starts.append(start_of)
    chosen: list[int] = []
    end = count
    for start_of in reversed(starts):
        end = start_of[end]
        chosen.append(end)
    return chosen[::-1]
