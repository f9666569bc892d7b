"""The state of a module and its optimizer, by parameter name, and back: nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor
from .tree import Followed, Path


def state_dict(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """state_dict(model, optimizer) -> {"model": {name: tensor}, "optimizer": {"state": {name: {...}}, "param_groups": [...]}}.

    The tensors are the module's and the optimizer's own, as they lie on their meshes, detached: to be saved, or as the `like` of a load.
    The optimizer's are named by parameter, not by number, as torch.distributed.checkpoint names them: so they fit an optimizer with other
    groups, and one that has made no step yet, whose state the checkpoint then tells.

    Args:
        optimizer: one over parameters of the model.

    Raises:
        ValueError: the optimizer has a parameter that is not the model's.

    Communication: none.

    Example:
        >>> sm.save(sm.state_dict(model, optimizer), "checkpoints")
        >>> sm.load_state_dict(model, sm.load("checkpoints", like=sm.state_dict(model, optimizer)), optimizer)
    """
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        names = _names(model, optimizer)
        own = optimizer.state_dict()
        by_name = {
            "state": {names[number]: dict(values) for number, values in own["state"].items()},
            "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in own["param_groups"]],
        }
        parameters = dict(zip(names, parameters_of(optimizer), strict=True))
        state["optimizer"] = Followed(by_name, optimizer_layouts(parameters))
    return state


def load_state_dict(model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None, *, strict: bool = True) -> None:
    """load_state_dict(model, state, optimizer): the module and its optimizer have this state, as `state_dict` gives it.

    Tensors that lie otherwise than the module's are moved; whole tensors are cut by each rank. With no optimizer given, one in `state`
    is left out.

    Args:
        strict: whether names of the module that are missing, or unknown ones, are errors, as for torch.

    Raises:
        RuntimeError: as `Module.load_state_dict`.
        ValueError: no state of the optimizer, or of a parameter that it does not have.

    Communication: none where tensors lie as the module's do.

    Example: see `state_dict`.
    """
    told = None
    if optimizer is not None:
        if "optimizer" not in state:
            raise ValueError(f"load_state_dict: the state has {list(state)} and no 'optimizer'; give none, or a state made with one")
        told = _numbered(state["optimizer"], _names(model, optimizer), optimizer)
    model.load_state_dict(state["model"], strict=strict)
    if optimizer is not None and told is not None:
        optimizer.load_state_dict(told)


def _numbered(told: Mapping[str, Any], names: list[str], optimizer: Optimizer) -> dict[str, Any]:
    """The state as the optimizer's own, by number. Settings of a group are those of the group that its first parameter had."""
    number = {name: i for i, name in enumerate(names)}
    unknown = [name for name in told.get("state", {}) if name not in number]
    if unknown:
        raise ValueError(f"load_state_dict: the state has parameters {unknown[:3]} that the optimizer does not have; it has {names[:3]}")
    settings = {name: group for group in told["param_groups"] for name in group["params"]}
    groups = []
    for group in optimizer.state_dict()["param_groups"]:
        of_first = settings.get(names[group["params"][0]], {}) if group["params"] else {}
        groups.append({**group, **of_first, "params": group["params"]})
    return {"state": {number[name]: dict(values) for name, values in told.get("state", {}).items()}, "param_groups": groups}


def optimizer_layouts(parameters: Mapping[Any, Tensor]) -> Callable[[Path, Sequence[int]], Layout | None]:
    """How a tensor of an optimizer's state lies: as its parameter, if it has its shape. Others are whole on every rank."""

    def layout_of(path: Path, shape: Sequence[int]) -> Layout | None:
        parameter = parameters.get(_key(path[1], parameters)) if len(path) == 3 and path[0] == "state" else None
        return parameter._layout if isinstance(parameter, ShardedTensor) and tuple(shape) == tuple(parameter.shape) else None

    return layout_of


def _key(key: Any, parameters: Mapping[Any, Tensor]) -> Any:
    """Torch's own checkpoints have strings for numbers."""
    return int(key) if key not in parameters and str(key).isdecimal() else key


def _names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Of each parameter of the optimizer, in its order, the name.

    Raises:
        ValueError: it is not the model's.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = parameters_of(optimizer)
    strange = [i for i, parameter in enumerate(parameters) if id(parameter) not in names]
    if strange:
        raise ValueError(
            f"state_dict: parameters {strange[:5]} of the optimizer are not the model's (by identity); "
            "make the optimizer from model.parameters(), after the model has been distributed"
        )
    return [names[id(parameter)] for parameter in parameters]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """In the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
