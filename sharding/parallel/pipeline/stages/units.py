"""Which submodules are units, and which are containers, whose forward is run by several stages.

    model                  container     contains a boundary: its forward runs on every stage
    ├─ embed               unit          the outermost module that contains no boundary
    ├─ drop                leaf          the same, without parameters
    ├─ layers              container     a ModuleList, which is never called
    │  ├─ 0                unit
    │  └─ 1                unit          a boundary: stage 1 begins with its first call
    └─ head                unit

A leaf is a unit in those calls that draw random numbers, so that they are drawn once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ModuleTree:
    """The modules of a model, by their first paths in the order of registration.

    Attributes:
        containers: modules whose forward is run by several stages, the model itself first.
        units: outermost modules with parameters that are no containers, and boundaries.
        leaves: the same without parameters.
        order: the paths of all of these, as they are registered.
    """

    containers: Mapping[str, nn.Module]
    units: Mapping[str, nn.Module]
    leaves: Mapping[str, nn.Module]
    order: Sequence[str]


def module_tree(
    model: nn.Module, boundaries: Collection[nn.Module], opened: Collection[str] = ()
) -> ModuleTree:
    """Return the containers, units and leaves of a model.

    Args:
        model: the model.
        boundaries: modules with which stages begin; modules around them are containers.
        opened: paths of further containers.
    """
    containers: dict[str, nn.Module] = {}
    units: dict[str, nn.Module] = {}
    leaves: dict[str, nn.Module] = {}
    order: list[str] = []
    visited: set[nn.Module] = set()

    def visit(path: str, module: nn.Module) -> None:
        if module in visited:
            return
        visited.add(module)
        order.append(path)
        inside = set(module.modules()) - {module}
        around = not inside.isdisjoint(boundaries)
        if not path or path in opened or around or not is_callable(module):
            containers[path] = module
            for name, child in module.named_children():
                visit(join(path, name), child)
        elif module in boundaries or next(module.parameters(), None) is not None:
            units[path] = module
        else:
            leaves[path] = module

    visit("", model)
    return ModuleTree(containers, units, leaves, order)


def is_callable(module: nn.Module) -> bool:
    """Return whether a module has a forward, unlike a ModuleList."""
    return type(module).forward is not nn.Module.forward


def blocks(model: nn.Module) -> ModuleTree:
    """Return the tree whose units are the blocks of a model, as its lists of modules show them.

    Entries of the outermost ModuleLists, ModuleDicts and Sequentials are units, and so are modules
    next to these that contain no list: embeddings, norms, heads.
    """
    opened: list[str] = []

    def visit(path: str, module: nn.Module, in_list: bool) -> None:
        is_list = _is_list(module)
        has_list = any(_is_list(inner) for inner in module.modules())
        if path and not is_list and (in_list or not has_list):
            return
        opened.append(path)
        for name, child in module.named_children():
            visit(join(path, name), child, is_list)

    visit("", model, False)
    return module_tree(model, (), opened)


def _is_list(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return False
    return sum(next(child.parameters(), None) is not None for child in module.children()) > 1


Place = tuple[str, str]  # the path of a module, and the name of one of its parameters or buffers


def join(path: str, name: str) -> str:
    """Return the path of something with this name in the module at a path."""
    return f"{path}.{name}" if path else name


def places_of(module: nn.Module, path: str = "") -> Iterator[tuple[Place, Tensor]]:
    """Yield each parameter and buffer of a module and those inside it, by place.

    Tied ones come several times.
    """
    for inner_path, inner in module.named_modules(prefix=path):
        for table in (inner._parameters, inner._buffers):
            for name, x in table.items():
                if x is not None:
                    yield (inner_path, name), x
