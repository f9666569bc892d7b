"""A model's lists of blocks, and copies of the model with a few blocks of each.

layers  [dense, dense, moe, moe, moe]      kinds: dense (2), moe (3)
short   [dense, moe]                       one block of each kind
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..parallel.data.wrap import AUTO, matching_modules

_LAYER_COUNTS = ("num_hidden_layers", "num_layers")


@dataclass(frozen=True)
class BlockList:
    """A list of blocks.

    Attributes:
        path: its path.
        kinds: the indices of the blocks of each kind: with the same parameters, of which the same
            are frozen, and of which a configuration of Hugging Face says the same, such as that
            their attention is sliding.
    """

    path: str
    kinds: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return sum(map(len, self.kinds))

    def kind_of(self, index: int) -> int:
        """Return the kind of a block."""
        return next(k for k, indices in enumerate(self.kinds) if index in indices)


def block_lists(model: nn.Module) -> list[BlockList]:
    """Return the lists of blocks of a model; none for a model without blocks that repeat.

    Lists inside of the blocks of another are not among them.
    """
    try:
        paths = [path for path, _ in matching_modules(model, AUTO)]
    except ValueError:
        return []
    lists: list[BlockList] = []
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in paths):
        if any(parent.startswith(f"{outer.path}.") for outer in lists):
            continue
        blocks = model.get_submodule(parent)
        is_list = isinstance(blocks, nn.ModuleList | nn.Sequential)
        if not is_list or len(blocks) < 2:
            continue
        lists.append(BlockList(parent, kinds_of(model, parent)))
    return lists


def kinds_of(model: nn.Module, path: str) -> tuple[tuple[int, ...], ...]:
    """Return the indices of the blocks of each kind in a list, see `BlockList.kinds`."""
    blocks: Any = model.get_submodule(path)
    by_layer = _lists_by_layer(model, len(blocks))
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(blocks):
        parameters = tuple(
            (name, tuple(x.shape), x.requires_grad) for name, x in block.named_parameters()
        )
        configured = tuple(str(values[index]) for values in by_layer.values())
        kinds.setdefault((parameters, configured), []).append(index)
    return tuple(map(tuple, kinds.values()))


def _lists_by_layer(model: nn.Module, count: int) -> dict[str, Sequence[Any]]:
    """Return what a configuration of Hugging Face says of each block, such as its `layer_types`.

    Lists whose values all differ are left out: they are numbers of blocks.
    """
    config: Any = getattr(model, "config", None)
    if count not in {getattr(config, name, None) for name in _LAYER_COUNTS}:
        return {}  # of another list of blocks
    return {
        name: values
        for name, values in vars(config).items()
        if "layer" in name
        and isinstance(values, list | tuple)
        and len(values) == count > len(set(map(str, values)))
    }


@dataclass(frozen=True)
class Repetition:
    """How the kinds of blocks in a list repeat.

    d d d m m m m m        3 before, periods of m
    s s f s s f s s        none before, periods of s s f, and 2 blocks of one that is not whole

    Attributes:
        count: the number of blocks.
        before: how many come before the first period.
        period: how many a period has.
    """

    count: int
    before: int
    period: int

    @classmethod
    def of(cls, kinds: Sequence[Hashable]) -> Repetition:
        """Return the repetition of the fewest blocks, of kinds in the order of the list."""

        def before(period: int) -> int:
            repeats = [kinds[i] == kinds[i + period] for i in range(len(kinds) - period)]
            return next((i + 1 for i in reversed(range(len(repeats))) if not repeats[i]), 0)

        period = min(range(1, len(kinds) + 1), key=lambda period: before(period) + 2 * period)
        return cls(len(kinds), before(period), period)

    @property
    def periods(self) -> int:
        """The number of whole periods."""
        return (self.count - self.before) // self.period

    def blocks_of(self, periods: int) -> list[int]:
        """Return the indices of the blocks of a list with fewer periods: the first and the last."""
        rest = (self.count - self.before) % self.period
        first = self.before + periods * self.period
        return [*range(first), *range(self.count - rest, self.count)]


def shorten(model: nn.Module, blocks: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of a model with copies of some of its blocks.

    A configuration that blocks share with the model is shared by the copies, too: forwards read it,
    such as for the function that computes experts.

    Args:
        model: the model.
        blocks: path of a list of blocks -> the indices of those of the copy.
    """
    memo: dict[int, Any] = {}
    for inner in model.modules():
        copy.deepcopy(getattr(inner, "config", None), memo)
    configurations = dict(memo)
    for path, indices in blocks.items():
        whole: Any = model.get_submodule(path)
        chosen = nn.ModuleList(
            copy.deepcopy(whole[index], dict(configurations)) for index in indices
        )
        memo[id(whole)] = nn.Sequential(*chosen) if isinstance(whole, nn.Sequential) else chosen
    short = copy.deepcopy(model, memo)
    config: Any = getattr(short, "config", None)
    if len(blocks) == 1:  # of which some forwards read the configuration
        ((path, indices),) = blocks.items()
        whole = model.get_submodule(path)
        for name, values in _lists_by_layer(model, len(whole)).items():
            setattr(config, name, [values[index] for index in indices])
        for name in _LAYER_COUNTS:
            if getattr(config, name, None) is not None:
                setattr(config, name, len(indices))
    return short
