"""`StagedModel`: any model as the stages of a pipeline."""

from __future__ import annotations

import copy
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .assembly import make_stages
from .dependencies import (
    Boundary,
    Dependencies,
    dependencies,
    unit_calls,
    units_to_open,
)
from .module_calls import intercept_calls
from .ownership import first_places, own_places, ownership_by_calls, ownership_by_order
from .precision import Precision, apply_precision
from .recording import Recording, TensorMeta, record
from .run import AfterUnit, StageRun, shared_tensors
from .signature import ModuleFlags, flags_of, set_flags, signature_of
from .skeleton import on_meta
from .split import Split, choose_boundaries, splittable_units, unit_costs
from .stage import Stages
from .units import ModuleTree, Place, join, module_tree, places_of

_SIGNATURES = 128  # of which the dependencies are kept

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class StagedModel:
    """StagedModel(model, split, num_stages, own_stages) -> the stages of a model on this rank.

        split = ["layers.2", "layers.4"]

        stage 0   embed, layers.0, layers.1     until the first call of layers.2
        stage 1   layers.2, layers.3            until the first call of layers.4
        stage 2   layers.4, layers.5, head

    The model's code does not change. Its forward runs in every stage, and calls of its *units* are
    answered: those of the stage run, those of earlier stages return what the stage before sent, and
    the first call of a later stage ends the run. A unit is an outermost submodule with parameters
    inside of which no stage begins. What the forward computes between units (masks, rotary
    embeddings, residual sums) is computed in each stage that uses it, from the model's inputs,
    which every stage gets, and from outputs of units. So the outputs of units that later stages
    need are *carried* from stage to stage, also past stages that do not use them. Modules without
    parameters that draw random numbers, such as dropout, run once, in one stage, as units do.

    Which outputs a stage needs is found by running the forward on tensors without values, once for
    each signature: shapes and dtypes of the inputs, their other values, and modes. So a forward
    must not decide by values of tensors which units it calls.

    Units of other stages stay in the model on "meta"; those of this rank's stages keep their
    values, or stay on "meta" for `materialize`. Shard the stages, not the model, and make the
    optimizer from their parameters. Freeze parameters in the model, on all ranks, before.

    Args:
        model: any module whose parameters are not sharded; or a list of modules, one for each
            stage, each called with the result of the one before, of which a tuple is spread.
        split: the modules with which the stages after the first begin, as paths or modules; a
            boundary is the first call of a module. Or "even", for stages with about equal forward
            flops of their blocks in the example, the largest as small as possible; without an
            example, or where no flops are counted, as "parameters", by the number of parameters.
            Blocks are the entries of the model's outermost lists of modules, and the modules next
            to these. Or "auto", the same between the modules of the model's own plan, see
            `modules_of_plan`. Or a function of a list of `UnitCost` that returns paths or modules.
            None for a list of modules.
        num_stages: the number of stages.
        own_stages: those that this rank holds.
        example: arguments and keyword arguments of a microbatch; tensors may be on "meta". Without
            it, units count as called in the order in which they are registered, and a parameter of
            a container belongs to all stages; inputs that show something else raise an error later.

    Attributes:
        num_stages: the number of stages.
        stages: the stages of this rank, by number.
        after_unit: called in the forward of a stage when a unit has returned, with the number of
            the call in the model's forward; None for nothing.
        on_meta: the first places of the tensors that the model had on "meta", until
            `Pipeline.materialize`.
        tied: the parameters that two or more stages hold, by their name in the model, with these
            stages. Each has a copy, and the gradient is the sum of theirs.

    Raises:
        ValueError: a module that is not in the model, is never called, or is called in another
            order; a number of boundaries that does not give `num_stages`; a stage without units;
            a stage needs what no unit returns; parameters that are sharded already.
        TypeError: a unit returns an object that is neither a tensor nor a constant.
        RuntimeError: the forward reads values of tensors outside of units.

    Communication: none.

    Example:
        >>> staged = StagedModel(model, ["model.layers.2"], 2, [rank], example=((ids,), {}))
        >>> stage = sm.parallel.fully_shard(staged.stages[rank], mesh)
        >>> carried = stage((), (ids,), {})                        # rank 0
        >>> logits = stage(received, (ids,), {})                   # rank 1
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        split: Split | None,
        num_stages: int,
        own_stages: Sequence[int],
        *,
        example: Inputs | None = None,
    ) -> None:
        _check_numbers(num_stages, own_stages)
        if not isinstance(model, nn.Module):
            model, split = _chain(model, split, num_stages)
        if split is None:
            raise TypeError("split=None is for a list of modules; name the boundaries of a model")
        self.num_stages = num_stages
        self.after_unit: AfterUnit | None = None
        self._model = model
        self._modules = list(model.modules())
        self._flags: ModuleFlags | None = None
        self._skeleton = on_meta(model)
        self._dependencies: dict[Hashable, Dependencies] = {}
        self._precision = Precision()
        self._tree = splittable_units(split, model)
        recording = None
        if example is not None:
            recording = self._record(
                *example, count_flops=isinstance(split, str) or callable(split)
            )
        costs = unit_costs(_open_units(model, self._tree, recording), recording)
        self._boundaries: list[Boundary] = choose_boundaries(split, model, costs, num_stages)
        self._tree = self._tree_of(recording)
        first = first_places(model)
        self._first_places = {place: first[id(x)] for place, x in places_of(model)}
        self.on_meta = frozenset(first[id(x)] for _, x in places_of(model) if x.is_meta)
        self._own_places = own_places(self._tree, first)
        if recording is None:
            ownership = ownership_by_order(self._tree, self._boundaries, num_stages, first)
        else:
            needs = self._dependencies_of(recording)
            ownership = ownership_by_calls(self._tree, needs, first)
        self._ownership = ownership
        self.tied = dict(ownership.tied)
        self._assembled = make_stages(self._tree, ownership, first, sorted(own_stages), self._run)
        self.stages = Stages({index: one.stage for index, one in self._assembled.items()})
        intercepted = _modules_to_intercept(self._tree, self._boundaries)
        self._paths = {id(module): path for path, module in intercepted.items()}
        for module in intercepted.values():
            intercept_calls(module)

    @property
    def model(self) -> nn.Module:
        """The whole model; units of other ranks' stages are on "meta"."""
        return self._model

    @contextmanager
    def constant_flags(self) -> Iterator[None]:
        """Read once, for all calls in the block, which modules train and what is frozen."""
        self._flags = flags_of(self._modules)
        try:
            yield
        finally:
            self._flags = None

    def set_precision(self, precision: Precision) -> None:
        """Set how the units in all stages cast, which decides dtypes of what is between units."""
        if precision != self._precision:
            self._precision = precision
            self._dependencies.clear()

    def copy_on_meta(self) -> nn.Module:
        """Return a copy of the whole model on "meta", as it was before it was split."""
        return copy.deepcopy(self._skeleton)

    def first_place(self, place: Place) -> Place:
        """Return the first place of the tensor at a place of the model."""
        return self._first_places[place]

    def holders(self, place: Place) -> Collection[int] | None:
        """Return the stages that hold the tensor at a place of the model.

        None for what every rank has, such as buffers outside of units.
        """
        return self._ownership.tensors.get(self.first_place(place))

    def signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        """Return what the dependencies of stages depend on, of the inputs and the model.

        That is shapes and dtypes of inputs, their values that are not tensors, the modes of
        modules, whether parameters require gradients, grad mode and autocast.

        For a signature that is new, the forward runs once without values.

        Raises:
            ValueError, TypeError, RuntimeError: as for the class; the inputs make the forward call
                a unit in a stage that does not hold it.

        Communication: none.
        """
        signature = signature_of(args, kwargs, self._flags or flags_of(self._modules))
        if signature not in self._dependencies:
            needs = self._dependencies_of(self._record(args, kwargs, count_flops=False))
            self._check_held(needs)
            while len(self._dependencies) >= _SIGNATURES:
                del self._dependencies[next(iter(self._dependencies))]
            self._dependencies[signature] = needs
        return signature

    def boundary(self, signature: Hashable, stage: int) -> list[TensorMeta]:
        """Return the tensors that are carried into a stage, in order; [] for stage 0.

        Args:
            signature: of the inputs, see `signature`.
            stage: the number of the stage.

        Raises:
            KeyError: `signature` was not called for such inputs, or too long ago.
        """
        needs = self._dependencies[signature]
        return [needs.calls[x.call].metas[x.index] for x in needs.carried[stage]]

    # -- recording ---------------------------------------------------------------------------------

    def _record(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count_flops: bool
    ) -> Recording:
        flags = flags_of(self._modules)

        def prepare(model: nn.Module) -> None:
            set_flags(flags, model)
            apply_precision(self._precision, model)

        units = tuple(self._tree.units)

        def is_in_unit(path: str) -> bool:
            return any(f"{path}.".startswith(f"{unit}.") for unit in units)

        return record(self._skeleton, args, dict(kwargs), prepare, is_in_unit, count_flops)

    def _tree_of(self, recording: Recording | None) -> ModuleTree:
        """Return the units between the boundaries.

        Those whose insides are called from outside are containers.
        """
        modules = dict(self._model.named_modules())
        boundaries = {modules[path] for path, _ in self._boundaries}
        opened: set[str] = set()
        while True:
            tree = module_tree(self._model, boundaries, opened)
            called_inside = units_to_open(recording, tree) if recording is not None else set()
            if not called_inside:
                return tree
            opened |= called_inside

    def _dependencies_of(self, recording: Recording) -> Dependencies:
        opened = units_to_open(recording, self._tree)
        if opened:
            raise ValueError(
                f"for these inputs the forward calls modules inside of {sorted(opened)} from "
                "outside, which it did not for the example; pass such inputs as example="
            )
        calls = unit_calls(recording, self._tree, self._boundaries)
        return dependencies(recording, calls, self._own_places, self.num_stages)

    def _check_held(self, needs: Dependencies) -> None:
        """Raise a ValueError if a stage calls or uses what it does not hold."""
        for call in needs.calls:
            held = self._ownership.units.get(call.path)
            if held is not None and call.stage not in held:
                raise ValueError(
                    f"for these inputs the forward calls {call.path!r} in stage {call.stage}, but "
                    f"it belongs to stages {sorted(held)}, by the example or, without one, by the "
                    "order of registration; pass such inputs as example="
                )
        for place, used_by in needs.places.items():
            held = self._ownership.tensors.get(place)
            if held is not None and not set(used_by) <= set(held):
                raise ValueError(
                    f"for these inputs stages {sorted(used_by)} use {join(*place)!r} outside of "
                    f"the unit that owns it, but it is held by stages {sorted(held)}; pass such "
                    "inputs as example="
                )

    def _run(
        self,
        index: int,
        carried: tuple[Tensor, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        needs = self._dependencies[self.signature(args, kwargs)]
        assembled = self._assembled[index]
        for path, unit in assembled.units.items():
            if assembled.stage.get_submodule(path) is not unit:
                raise ValueError(
                    f"{path!r} was replaced in a stage, but the forward that runs is the model's, "
                    "with its own modules: replace modules of the model, before it is split"
                )
        run = StageRun(index, needs, self._paths, assembled.units, carried, self.after_unit)
        with shared_tensors(assembled.shared, needs.device):
            return run.forward(self._model, args, kwargs)


def _modules_to_intercept(tree: ModuleTree, boundaries: Sequence[Boundary]) -> dict[str, nn.Module]:
    """Return units, leaves, and containers with which a stage begins."""
    starts = {path for path, _ in boundaries}
    containers = {path: module for path, module in tree.containers.items() if path in starts}
    return {**tree.units, **tree.leaves, **containers}


def _open_units(model: nn.Module, tree: ModuleTree, recording: Recording | None) -> ModuleTree:
    """Return a tree in which units whose insides are called from outside are containers."""
    while recording is not None and (called_inside := units_to_open(recording, tree)):
        tree = module_tree(model, (), {*tree.containers, *called_inside})
    return tree


class _Chain(nn.Module):
    """Modules that are called one after the other; a tuple is spread as arguments."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(str(i), module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self._modules.values()
        result = first(*args, **kwargs)  # type: ignore[misc]
        for module in others:
            result = module(*result) if isinstance(result, tuple) else module(result)  # type: ignore[misc]
        return result


def _chain(
    modules: Sequence[nn.Module], split: Split | None, num_stages: int
) -> tuple[nn.Module, Split]:
    """Return a list of modules as one, and the boundaries between them."""
    if split is not None:
        raise ValueError(f"a list of modules is one module for each stage: split={split!r} is None")
    if len(modules) != num_stages:
        raise ValueError(f"{len(modules)} modules, but num_stages={num_stages}; pass one for each")
    return _Chain(modules), [str(i) for i in range(1, num_stages)]


def _check_numbers(num_stages: int, own_stages: Sequence[int]) -> None:
    if num_stages < 1:
        raise ValueError(f"num_stages={num_stages}: a model has at least one stage")
    wrong = [stage for stage in own_stages if not 0 <= stage < num_stages]
    if wrong or len(set(own_stages)) != len(own_stages):
        raise ValueError(
            f"own_stages={list(own_stages)}: name each stage of this rank once, from 0 to "
            f"{num_stages - 1}"
        )
