"""`state_dict` and `load_state_dict`: the state of a module and its optimizer by name.

The names are those of parameters; nothing is communicated. `RandomState`: the state of the random
number generators.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..layout.layout import Layout
from ..layout.spec import P
from ..ops.torch_compile import ORIGINAL
from ..tensor.random import get_rng_state, set_rng_state
from ..tensor.sharded_tensor import ShardedTensor
from .tree import LayoutOf, PartialModel, Path, PerRank, StoredDict, ties

_CHECKPOINTED = "_checkpoint_wrapped_module"
_WRAPPED = (ORIGINAL, _CHECKPOINTED, "_fsdp_wrapped_module")  # where wrappers keep a module
_DATA_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def state_dict(
    model: nn.Module | PartialModel, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """state_dict(model, optimizer) -> the state of both, by parameter name.

    {"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}.

    The tensors are those of the module and the optimizer, detached, in their layouts: for `save`,
    or as the `like` of `load`. Optimizer state is named by parameter, not by number, as in
    torch.distributed.checkpoint: it fits an optimizer with other groups, and one before its first
    step, whose state then follows the checkpoint.

    Names have no parts that wrappers add: `_orig_mod` of `torch.compile`,
    `_checkpoint_wrapped_module` of `checkpoint_wrapper`, `module` of `DistributedDataParallel`. So
    the state of a model fits the same one with other wrappers or with none. Tied weights are one
    tensor under all of their names.

    Args:
        model: a module; or a pipeline, whose state is that of the whole model on every rank, and
            fits the same model in other stages or in none.
        optimizer: one over parameters of the model; for a pipeline, of this rank's stages.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.

    Communication: none; of a pipeline up to four all_gathers of small objects over its axis.

    Example:
        >>> save(state_dict(model, optimizer), "checkpoints")
        >>> state = load("checkpoints", like=state_dict(model, optimizer))
        >>> load_state_dict(model, state, optimizer)
    """
    model_state = model.state_dict()
    tied = ties(model) if isinstance(model, nn.Module) else {}
    # By plain names; tied weights are one object.
    state: dict[str, Any] = {
        "model": {
            plain_name(model, name): model_state[tied.get(name, name)] for name in model_state
        }
    }
    if optimizer is not None:
        state["optimizer"] = optimizer_state_dict(model, optimizer)
    return state


def optimizer_state_dict(model: nn.Module | PartialModel, optimizer: Optimizer) -> StoredDict:
    """Return the state of an optimizer by parameter name, as in `state_dict`.

    Raises:
        ValueError: as `state_dict`.

    Communication: none; of a pipeline up to three all_gathers of small objects over its axis.
    """
    names = _names(model, optimizer)
    own = optimizer.state_dict()
    by_name = {
        "state": {names[number]: dict(values) for number, values in own["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]}
            for group in own["param_groups"]
        ],
    }
    parameters = dict(zip(names, parameters_of(optimizer), strict=True))
    if not isinstance(model, nn.Module):
        by_name = _whole_optimizer(model, by_name)
        parameters = {without_wrappers(name): x for name, x in model.whole.parameters().items()}
    return StoredDict(by_name, optimizer_layouts(parameters))


def _whole_optimizer(model: PartialModel, by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state by name of all ranks' optimizers."""
    own_names = {without_wrappers(name): name for name, _ in model.named_parameters()}
    own = {own_names[name]: values for name, values in by_name["state"].items()}
    groups = [
        {**group, "params": [own_names[name] for name in group["params"]]}
        for group in by_name["param_groups"]
    ]
    return {
        "state": {without_wrappers(name): values for name, values in model.whole.tree(own).items()},
        "param_groups": [
            {**group, "params": [without_wrappers(name) for name in group["params"]]}
            for group in model.whole.groups(groups)
        ],
    }


def load_state_dict(
    model: nn.Module | PartialModel,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> None:
    """load_state_dict(model, state, optimizer): load a `state_dict` into the module and optimizer.

    Tensors in other layouts are redistributed; each rank takes its part of whole tensors. Without
    an optimizer, one in `state` is ignored.

    Args:
        state: names may have parts of wrappers, also those that this model does not have.
        strict: whether names of the module that are missing, or unknown ones, are errors, as for
            torch.

    Raises:
        RuntimeError: as `Module.load_state_dict`.
        ValueError: no state of the optimizer, or of a parameter that it does not have.

    Communication: none if tensors have the module's layouts; of a pipeline up to two all_gathers of
        small objects over its axis.

    Example: see `state_dict`.
    """
    numbered = None
    if optimizer is not None:
        if "optimizer" not in state:
            raise ValueError(
                f"load_state_dict: the state has {list(state)} and no 'optimizer'; pass none, or a "
                "state made with one"
            )
        numbered = _numbered(model, state["optimizer"], optimizer)
    own = {plain_name(model, name): name for name in model.state_dict()}
    named = {
        own[key] if (key := without_wrappers(name)) in own else name: value
        for name, value in state["model"].items()
    }
    model.load_state_dict(named, strict=strict)
    if optimizer is not None and numbered is not None:
        optimizer.load_state_dict(numbered)


def load_optimizer_state_dict(
    model: nn.Module | PartialModel, stored: Mapping[str, Any], optimizer: Optimizer
) -> None:
    """Load the state of an optimizer by parameter name, as `load_state_dict` does.

    Raises:
        ValueError: the state of a parameter that the optimizer does not have.

    Communication: as `load_state_dict`.
    """
    optimizer.load_state_dict(_numbered(model, stored, optimizer))


def _numbered(
    model: nn.Module | PartialModel, stored: Mapping[str, Any], optimizer: Optimizer
) -> dict[str, Any]:
    if not isinstance(model, nn.Module):
        stored = _own_optimizer(model, stored)
    return _state_by_number(stored, _names(model, optimizer), optimizer)


def _own_optimizer(model: PartialModel, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return what this rank's optimizer needs of the state by name of all ranks' optimizers."""
    names = {without_wrappers(name): name for name in model.whole.parameters()}
    state: dict[str, Any] = {}
    for name, values in stored.get("state", {}).items():
        plain = without_wrappers(name)
        state[names.get(plain, name)] = values
    own = {without_wrappers(name): values for name, values in model.whole.own_tree(state).items()}
    groups: list[dict[str, Any]] = []
    for group in stored["param_groups"]:
        params = [without_wrappers(name) for name in group["params"]]
        groups.append({**group, "params": params})
    return {"state": own, "param_groups": groups}


def _state_by_number(
    numbered: Mapping[str, Any], names: list[str], optimizer: Optimizer
) -> dict[str, Any]:
    """Return the state by number, as the optimizer has it.

    A group takes the settings of the group of its first parameter.
    """
    number = {name: i for i, name in enumerate(names)}
    by_name = {
        _plain_name(name, number): values for name, values in numbered.get("state", {}).items()
    }
    unknown = [name for name in by_name if name not in number]
    if unknown:
        raise ValueError(
            f"load_state_dict: the state has parameters {unknown[:3]} that the optimizer does not "
            f"have; it has {names[:3]}"
        )
    settings = {
        _plain_name(name, number): group
        for group in numbered["param_groups"]
        for name in group["params"]
    }
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        of_first = settings.get(names[group["params"][0]], {}) if group["params"] else {}
        names_of_group = {key: group[key] for key in ("params", "param_names") if key in group}
        groups.append({**group, **of_first, **names_of_group})
    return {
        "state": {number[name]: dict(values) for name, values in by_name.items()},
        "param_groups": groups,
    }


def optimizer_layouts(parameters: Mapping[Any, Tensor]) -> LayoutOf:
    """Return the layout function of optimizer state.

    The layout is that of the parameter if shapes are equal. Tensors of other shapes are whole and
    plain; those that are known to be ShardedTensors, as of Adafactor and LBFGS, are replicated on
    the parameter's mesh, as `new_zeros` makes them.
    """

    def layout_of(path: Path, shape: Sequence[int], is_sharded: bool = False) -> Layout | None:
        if len(path) < 3 or path[0] != "state":
            return None
        key: Any = path[1]
        if key not in parameters and str(key).isdecimal():
            key = int(key)  # torch's own checkpoints have strings
        parameter = parameters.get(key)
        if not isinstance(parameter, ShardedTensor):
            return None
        if len(path) == 3 and tuple(shape) == tuple(parameter.shape):
            return parameter._layout
        return Layout.of(parameter.mesh, P(), shape, parameter.dtype) if is_sharded else None

    return layout_of


def _names(model: nn.Module | PartialModel, optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter of the optimizer, in order.

    Raises:
        ValueError: a parameter is not the model's.
    """
    names = {id(parameter): plain_name(model, name) for name, parameter in model.named_parameters()}
    parameters = parameters_of(optimizer)
    strange = [i for i, parameter in enumerate(parameters) if id(parameter) not in names]
    if strange:
        raise ValueError(
            f"state_dict: parameters {strange[:5]} of the optimizer are not the model's (by "
            "identity); make the optimizer from model.parameters(), after the model is sharded"
        )
    return [names[id(parameter)] for parameter in parameters]


def plain_name(model: nn.Module | PartialModel, name: str) -> str:
    """Return a name in the module's or optimizer's state without the parts that wrappers add.

    "blocks.0._checkpoint_wrapped_module.weight"  ->  "blocks.0.weight"
    """
    if not isinstance(model, nn.Module):
        return without_wrappers(name)
    parts = []
    module: nn.Module | None = model
    for part in name.split("."):
        if module is not None and part not in module._modules and _CHECKPOINTED in module._modules:
            module = module._modules[_CHECKPOINTED]  # its hook has removed this part already
        if part not in _WRAPPED and not (part == "module" and isinstance(module, _DATA_PARALLEL)):
            parts.append(part)
        module = None if module is None else module._modules.get(part)
    return ".".join(parts)


def without_wrappers(name: str) -> str:
    """Return a name without the parts of wrappers that no other module has."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def _plain_name(name: str, number: Mapping[str, int]) -> str:
    """Return the plain name of a parameter; the state may have been saved with wrappers' parts."""
    return name if name in number else without_wrappers(name)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the optimizer's parameters in the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class RandomState:
    """RandomState(): saves and restores the state of all random number generators.

    The generator of `ShardedTensor`s is the same on every rank; those of torch (CPU and this rank's
    GPU) and Python's `random` are saved per rank. On ranks beyond the saving world these do not
    change.

    Communication: none.

    Example:
        >>> state = {"model": model, "random": sm.checkpoint.RandomState()}
        >>> sm.checkpoint.save(state, "checkpoints")
        >>> sm.checkpoint.load("checkpoints", state)
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the current states."""
        state = {
            "sharded": get_rng_state(),
            "torch": PerRank(torch.get_rng_state()),
            "python": PerRank(random.getstate()),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = PerRank(torch.cuda.get_rng_state())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore these states."""
        set_rng_state(state["sharded"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if state.get("cuda") is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
