"""Cut a long run of operators where it repeats itself, as layers of a model do.

A compiler then sees each repeated part once.

    run     a b | c d e f | c d e f | c d e f | g
    parts   a b   c d e f   c d e f   c d e f   g     three are equal: compiled once, called 3 times

An operator is a letter: what is called, constants, shapes, strides and dtypes. The part that saves
most letters is cut out first, at the offset where the fewest values cross; what is left on both
sides is cut in the same way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import fx

from ..collectives import OPERATORS, WAIT
from ..passes.alias import is_view, root_of, writes

LONG = 512  # operators that are compiled together without a search for repetitions
# operators of a repeated part: a call of a compiled function costs as much as several operators
_SMALLEST = 24


def cut(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Return the parts of a run of nodes, in order.

    A run that is short or never repeats itself is one part.
    """
    costs = list(accumulate((not is_view(node) for node in nodes), initial=0))
    if costs[-1] <= LONG:
        return [nodes]
    numbers: dict[Any, int] = {}
    letters = []
    for node in nodes:
        letter = node.target, _constants(node, lambda x: "node"), node.meta.get("val")
        letters.append(numbers.setdefault(letter, len(numbers)))
    bounds = _bounds(np.array(letters), costs, _crossings(nodes), 0, len(nodes))
    return [nodes[i:j] for i, j in pairwise([0, *bounds, len(nodes)]) if i < j]


def _bounds(
    letters: np.ndarray[Any, Any],
    costs: list[int],
    crossings: np.ndarray[Any, Any],
    first: int,
    last: int,
) -> list[int]:
    """Return where letters[first:last] is cut."""
    if costs[last] - costs[first] <= LONG:
        return []
    start, end, period = _most_repeated(letters[first:last])
    if period == 0:
        return []
    start, end = first + start, first + end
    # As many periods as one part has.
    count = -(-_SMALLEST * (end - start) // max(1, costs[end] - costs[start]) // period)
    period *= max(1, count)
    offsets = [
        i
        for i in range(start, min(start + period, end - 2 * period + 1))
        if all(crossings[i : end + 1 : period] >= 0)
    ]
    if not offsets:
        return []
    start = min(
        offsets,
        key=lambda i: crossings[i : end + 1 : period].sum() / len(crossings[i : end + 1 : period]),
    )
    inside = list(range(start, end + 1, period))
    left = _bounds(letters, costs, crossings, first, start)
    right = _bounds(letters, costs, crossings, inside[-1], last)
    return [*left, *inside, *right]


def _most_repeated(letters: np.ndarray[Any, Any]) -> tuple[int, int, int]:
    """Return the start, the end and the period of the repetition that saves the most letters.

    The period is 0 if there is no repetition.
    """
    best, repetition = _SMALLEST, (0, 0, 0)
    for period in range(1, len(letters) // 2 + 1):
        unequal = np.flatnonzero(letters[period:] != letters[:-period])
        edges = np.concatenate(([-1], unequal, [len(letters) - period]))
        lengths = np.diff(edges) - 1  # of runs in which each letter equals that one period later
        longest = int(lengths.argmax())
        saved = int(lengths[longest]) // period * period
        if saved > best:
            start = int(edges[longest]) + 1
            best, repetition = saved, (start, start + int(lengths[longest]) + period, period)
    return repetition


def _crossings(nodes: list[fx.Node]) -> np.ndarray[Any, Any]:
    """Return for each place between nodes how many values cross it.

    The count is -1 where nodes must stay together.
    """
    index = {node: i for i, node in enumerate(nodes)}
    change, forbidden = np.zeros(len(nodes) + 2, dtype=int), np.zeros(len(nodes) + 2, dtype=int)
    for i, node in enumerate(nodes):
        last = max((index.get(user, len(nodes)) for user in node.users), default=i)
        change[i + 1] += 1
        change[last + 1] -= 1
        together = min((index[x] for x in _together(node) if x in index), default=i)
        forbidden[together + 1] += 1
        forbidden[i + 1] -= 1
    return np.where(np.cumsum(forbidden) > 0, -1, np.cumsum(change))[: len(nodes) + 1]


def _together(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that must be in the same part as a node.

    They are a started collective, a list, and memory that the node writes to or counts its offset
    from.
    """
    nodes = [root_of(x) for x in writes(node)]
    if node.target is WAIT or node.target is operator.getitem:
        nodes.append(node.args[0])  # type: ignore[arg-type]
    if node.target is torch.ops.aten.as_strided.default:
        nodes.append(root_of(node))
    return nodes


def _constants(node: fx.Node, number: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return the arguments of a node as a hashable value.

    Each node among them is replaced by its number, and the site of a collective is left out.
    """
    args = node.args[:-1] if node.target in OPERATORS else node.args
    return _hashable(args, number), tuple(
        (name, _hashable(x, number)) for name, x in node.kwargs.items()
    )


def _hashable(x: Any, number: Callable[[fx.Node], Hashable]) -> Hashable:
    if isinstance(x, fx.Node):
        return number(x)
    if isinstance(x, (list, tuple)):
        return type(x), tuple(_hashable(part, number) for part in x)
    return type(x), repr(x)


def key_of(nodes: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> Hashable:
    """Return what is equal for two parts that compute the same from their inputs."""
    numbers: dict[fx.Node, Hashable] = {x: ("input", i) for i, x in enumerate(inputs)}
    key: list[Hashable] = [x.meta.get("val") for x in inputs]
    for i, node in enumerate(nodes):
        key.append((node.target, _constants(node, numbers.__getitem__)))
        numbers[node] = i
    return tuple(key)
