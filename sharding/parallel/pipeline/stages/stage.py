"""`Stage`: the part of a model that one stage holds, as a module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

from .units import ModuleTree, Place, join

# Attributes of models that say how to lay them out, split them and initialise them.
_OF_MODEL = ("config", "tp_plan", "_tp_plan", "_no_split_modules", "_init_weights")

RunForward = Callable[[tuple[Tensor, ...], tuple[Any, ...], dict[str, Any]], Any]
RunStage = Callable[[int, tuple[Tensor, ...], tuple[Any, ...], dict[str, Any]], Any]


class Stage(nn.Module):
    """One stage of a `StagedModel`: its own units, under the paths that they have in the model.

    So `named_parameters()` and `state_dict()` have the model's names, and patterns of `parallelize`
    and `fully_shard` mean the same modules as in the model. Containers are copies without the
    modules of other stages; a parameter of another stage's unit that this one uses as well is at
    its place.

    A copy (`copy.deepcopy`) and what `torch.save` writes have the modules, parameters and buffers,
    for averages of weights and for other programs. They do not run: the model around the units,
    and the pipeline, are not part of them.

    Attributes:
        index: the number of the stage.
        model_names: for each parameter and buffer of the stage by its name, the name in the model's
            `named_parameters()`; they differ where the first of tied ones is in another stage.
    """

    index: int
    model_names: dict[str, str]

    def __init__(self, index: int, model: nn.Module, run: RunForward) -> None:
        super().__init__()
        self.index = index
        self.model_names = {}
        self.training = model.training
        self.__dict__["_model"], self.__dict__["_run"] = model, run
        for name in _OF_MODEL:
            if hasattr(model, name):
                self.__dict__[name] = getattr(model, name)

    def forward(
        self, carried: tuple[Tensor, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the next stage takes as `carried`; in the last stage, the model's result.

        A carried tensor that later stages need as well is returned as it is.

        Args:
            carried: as described by `StagedModel.boundary`; () in stage 0.
            args, kwargs: the inputs of the model, the same in all stages.

        Raises:
            RuntimeError: which units the forward calls, or what they return beside tensors,
                depends on values.

        Communication: that of the units.
        """
        run = self.__dict__["_run"]
        if run is None:
            raise RuntimeError(
                f"this is a copy of stage {self.index} of a pipeline, which holds parameters and "
                "does not run: load its state_dict() into pipe.stages, or sm.checkpoint.state_dict "
                "of the pipeline into another model"
            )
        return run(carried, args, kwargs)

    def train(self, mode: bool = True) -> Stage:
        """Set the mode of the stage, and that of the model around its units."""
        model = self.__dict__["_model"]
        if model is not None:
            model.train(mode)
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles have: all but the model around the units."""
        state = self.__dict__ | {"_model": None, "_run": None}
        state.pop("_init_weights", None)  # a method of the model
        return state

    def extra_repr(self) -> str:
        return f"index={self.index}"


class Stages(MutableMapping[int, Stage]):
    """The stages of a rank by number, and what runs each of them.

        stages[1] = sm.jit(stages[1])       stages[1] is the stage as before, its calls are graphs

    Attributes:
        calls: by number, the stage, or what compiles it.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = dict(stages)
        self.calls: dict[int, nn.Module] = dict(stages)

    def __getitem__(self, number: int) -> Stage:
        return self._stages[number]

    def __setitem__(self, number: int, module: nn.Module) -> None:
        """Let calls of a stage run what `sm.jit` has made of it, or the stage itself.

        Raises:
            TypeError: it is something else.
        """
        is_of_torch = type(module).__module__.partition(".")[0] == "torch"
        inner = module if is_of_torch else getattr(module, "_orig_mod", module)
        if inner is not self.get(number):
            raise TypeError(
                f"pipeline: pipe.stages[{number}] = {type(module).__name__}: assign sm.jit of the "
                "stage, or the stage itself. torch.compile does not take a stage as a whole, since "
                "its forward is the model's own; compile the blocks in it, by block.compile()"
            )
        self.calls[number] = module

    def __delitem__(self, number: int) -> None:
        raise TypeError(f"pipeline: the stages of a rank are fixed: del pipe.stages[{number}]")

    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def __repr__(self) -> str:
        return f"Stages({self._stages!r})"


def fill_stage(
    stage: Stage,
    tree: ModuleTree,
    units: Mapping[str, nn.Module],
    tensors: Mapping[Place, Tensor],
) -> dict[Place, nn.Module]:
    """Give a stage its modules; return the module of the stage for each place in `tensors`.

    Args:
        stage: a stage without modules.
        tree: the model's modules.
        units: the stage's units by path.
        tensors: parameters and buffers to register outside of these.
    """
    homes: dict[Place, nn.Module] = {}
    parts = {tree.units[path]: unit for path, unit in units.items()}
    leaves, containers = set(tree.leaves.values()), set(tree.containers.values())

    def fill(target: nn.Module, path: str, module: nn.Module, is_container: bool) -> bool:
        """Register what the stage has of a module; return whether it has anything."""
        if is_container:
            target._buffers.update(module._buffers)
        for place, x in tensors.items():
            if place[0] == path:
                table = target._parameters if isinstance(x, nn.Parameter) else target._buffers
                table[place[1]] = x  # type: ignore[assignment]
                homes[place] = target
        for name, child in module._modules.items():
            inner = part(join(path, name), child)
            if inner is not None:
                target._modules[name] = inner
        return any((target._modules, target._parameters, target._buffers))

    def part(path: str, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if module in parts:
            return parts[module]
        if module in leaves:
            return module
        is_container = module in containers
        if not is_container and not any(f"{place[0]}.".startswith(f"{path}.") for place in tensors):
            return None
        target = _empty_copy(module)
        has_any = fill(target, path, module, is_container)
        return parts.setdefault(module, target) if has_any else None

    fill(stage, "", tree.containers[""], True)
    return homes


def _empty_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes and hooks, but no contents.

    It has neither tensors nor submodules, and is never called.
    """
    empty = copy.copy(module)
    empty.__dict__["_shardmesh_uncalled"] = True
    for table in ("_parameters", "_buffers", "_modules"):
        empty.__dict__[table] = {}
    return empty
