"""The layouts of a module's tensors.

As a table, as a tree like `repr(module)`, and in the `repr` of a distributed module.

Block(
  (up): Linear(
    in_features=4, out_features=3, bias=True
    weight: f32[3, 4] @ P('tp', None) on (tp=2)
    bias: f32[3], plain
  )
)
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...mesh.abstract_mesh import AbstractMesh, axes_text
from ...mesh.text import table_lines
from ..layout.layout import Layout, dtype_name
from ..layout.shard_holders import title
from .rank_table import colour, coloured_text, plain, rich_table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class TensorEntry:
    """A parameter or buffer of a module.

    Attributes:
        name: its qualified name, as in `state_dict`.
        tensor: the parameter or buffer.
        first: the first name of the same tensor; `name`, unless it has several.
    """

    name: str
    tensor: Tensor
    first: str

    @property
    def layout(self) -> Layout | None:
        """None for a plain tensor."""
        return getattr(self.tensor, "_layout", None)

    @property
    def local(self) -> Tensor:
        """This rank's part, or the plain tensor itself."""
        return getattr(self.tensor, "_local", self.tensor)

    @property
    def is_known(self) -> bool:
        """Whether the shape is known: a lazy module's parameter has none before the first call."""
        return not is_lazy(self.tensor)

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.local.numel() * self.local.element_size() if self.is_known else 0

    @property
    def global_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize if self.is_known else 0

    def row(self) -> list[str]:
        """Return the cells of the table."""
        spec = (
            title(self.layout).partition(" @ ")[2].rpartition(" on (")[0]
            if self.layout
            else "plain"
        )
        local = str(list(self.local.shape)) if self.is_known else "not known yet"
        same = f"is {self.first}" if self.first != self.name else ""
        return [self.name, _kind(self.tensor), spec, local, f"{self.nbytes:,}", same]


def module_table(module: nn.Module) -> str:
    """Return a table of parameters and buffers: name, dtype, shape, spec, part and its bytes."""
    rows, footer = _table(module)
    return "\n".join([*table_lines(rows, right=(4,)), footer])


def module_rich(module: nn.Module) -> Table:
    """Return the same table for rich; tensors with the same spec have the same colour.

    Raises:
        ImportError: rich is not installed.
    """
    (header, *rows), footer = _table(module)
    table = rich_table(type(module).__name__, footer)
    for column in header:
        table.add_column(column, justify="right" if column == "bytes" else "left")
    specs = sorted({row[2] for row in rows})
    for row in rows:
        shade = colour(specs.index(row[2]), len(specs))
        table.add_row(
            *[coloured_text(cell, shade) if i == 2 else plain(cell) for i, cell in enumerate(row)]
        )
    return table


def _table(module: nn.Module) -> tuple[list[list[str]], str]:
    """Return header and rows, and a line below them. A last column without entries is left out."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    entries = [
        TensorEntry(name, tensor, first.setdefault(id(tensor), name)) for name, tensor in named
    ]
    rows = [
        ["tensor", "global", "spec", "local", "bytes", "same tensor"],
        *[entry.row() for entry in entries],
    ]
    if all(entry.first == entry.name for entry in entries):
        rows = [row[:-1] for row in rows]
    return rows, _footer([entry for entry in entries if entry.first == entry.name])


def _footer(entries: Sequence[TensorEntry]) -> str:
    """Return `3 tensors on (tp=2): 36 bytes on this rank, 60 in all`; each tensor counts once."""
    meshes = list(dict.fromkeys(entry.layout.mesh for entry in entries if entry.layout))
    on = " and ".join(dict.fromkeys(mesh_text(mesh) for mesh in meshes))
    local_bytes = sum(entry.nbytes for entry in entries)
    total = sum(entry.global_nbytes for entry in entries)
    count = f"{len(entries)} tensor{'' if len(entries) == 1 else 's'}"
    return f"{count}{' on ' * bool(on)}{on}: {local_bytes:,} bytes on this rank, {total:,} in all"


def mesh_text(mesh: AbstractMesh) -> str:
    """Return `(dp=2, tp=8)`."""
    return f"({axes_text(mesh.shape, mesh.axis_names)})"


def _kind(tensor: Tensor) -> str:
    shape = "[?]" if is_lazy(tensor) else str(list(tensor.shape))
    return f"{dtype_name(tensor.dtype)}{shape}"


# -- tree ------------------------------------------------------------------------------------------


def module_tree(module: nn.Module) -> str:
    """Return `repr(module)` with the layout of each tensor, the same text on every rank.

    Consecutive children with the same text are shown once, as `(0-3): 4 x Block(...)`.
    """
    children = [
        (name, module_tree(child)) for name, child in module._modules.items() if child is not None
    ]
    extra = own_extra_repr(module)
    tensors = tensor_lines(module)
    name = module._get_name()
    if not children and not tensors and "\n" not in extra:
        return f"{name}({extra})"
    lines = [*filter(None, [extra]), *tensors, *_folded_lines(children)]
    return "\n".join(
        [f"{name}(", *["\n".join("  " + line for line in text.split("\n")) for text in lines], ")"]
    )


def tensor_lines(module: nn.Module) -> list[str]:
    """Return a line for each tensor of the module itself, and for each layout hook.

    `weight: f32[3, 4] @ P('tp', None) on (tp=2)`.
    """
    lines = []
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            layout = getattr(tensor, "_layout", None)
            lines.append(
                f"{name}: {f'{_kind(tensor)}, plain' if layout is None else title(layout)}"
            )
    return [*lines, *_hook_lines(module)]


def _hook_lines(module: nn.Module) -> list[str]:
    """Return the lines `shown` of the hooks that redistribute inputs and outputs."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return [line for hook in hooks for line in getattr(hook, "shown", ())]


def _folded_lines(children: Iterable[tuple[str, str]]) -> list[str]:
    lines = []
    for text, group in itertools.groupby(children, lambda child: child[1]):
        names = [name for name, _ in group]
        lines.append(
            f"({names[0]}): {text}"
            if len(names) == 1
            else f"({names[0]}-{names[-1]}): {len(names)} x {text}"
        )
    return lines


# -- repr(module) ----------------------------------------------------------------------------------


def show_layouts_in_repr(module: nn.Module) -> None:
    """Show the layouts of the module's own tensors in `repr(module)`.

    An `extra_repr` that was set on the instance is kept.
    """
    if "extra_repr" not in module.__dict__ and [
        *module._parameters,
        *module._buffers,
        *_hook_lines(module),
    ]:
        module.extra_repr = LayoutRepr(module)


def own_extra_repr(module: nn.Module) -> str:
    """Return `extra_repr()` of the module's class, without the lines about layouts."""
    override = module.__dict__.get("extra_repr")
    return (
        type(module).extra_repr(module) if isinstance(override, LayoutRepr) else module.extra_repr()
    )


class LayoutRepr:
    """The attribute `extra_repr` of one module instance, which `nn.Module.__repr__` calls.

    The reference to the module is weak, so that a model's memory is freed with its last strong
    reference. A deep copy or a pickled module gets its own instance; it is not in the `state_dict`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> str:
        module = self._module()
        return (
            ""
            if module is None
            else "\n".join(filter(None, [own_extra_repr(module), *tensor_lines(module)]))
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutRepr:
        module: Any = self._module()
        return LayoutRepr(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return LayoutRepr, (self._module(),)
