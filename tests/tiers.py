"""How much of the tests is run: `make test-fast`, `make test`, `make test-all`.

A test that only tries more of the same is marked `slow`. A table of cases that differ little is marked as a whole:

    @pytest.mark.one_in(4, each=["kind"])     # of its cases one in four, and at least one with each value of `kind`
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_sum(kind, shape): ...

The others become `slow`. Which ones stay does not change from run to run, and has no pattern (a checksum of their names decides): every
fourth one would have the same value of a parameter with four values in all of them. The tests marked `fast` are, of each function that
needs no process of its own, the first case that is not slow; but see `LEISURELY`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import pytest

# Folders and files of which nothing is fast: programs that are started, kernels in an interpreter, and what compiles.
LEISURELY = ("benchmarks", "docs", "examples", "faults", "kernels", "models", "multinode")


def slow(*values: Any) -> Any:
    """A case that is slow, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def sort_out(items: Sequence[pytest.Item]) -> None:
    """Marks tests `slow` and `fast`."""
    for cases in _by_function(items).values():
        for mark in cases[0].iter_markers("one_in"):
            kept = chosen([_values(case) for case in cases], [case.name.partition("[")[2] for case in cases], *mark.args, **mark.kwargs)
            for number, case in enumerate(cases):
                if number not in kept:
                    case.add_marker(pytest.mark.slow)
        _mark_fast(cases)


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def _values(case: pytest.Item) -> Mapping[str, Hashable]:
    """What tells its parameters' values apart from those of other cases, by the names of the parameters."""
    given = case.callspec.params if hasattr(case, "callspec") else {}  # type: ignore[attr-defined]
    return {name: value if _is_hashable(value) else id(value) for name, value in given.items()}


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def chosen(values: Sequence[Mapping[str, Hashable]], names: Sequence[str], n: float, each: Sequence[str] = ()) -> set[int]:
    """Numbers of the cases that stay: one in n, rounded up, and more only where that leaves out values of the parameters `each`.
    Of two tests with the same cases the same ones stay.

    Args:
        values: of each case, the values of its parameters.
        names: of the cases, without the function's.
    """
    unknown = [name for name in each if name not in values[0]]
    if unknown:
        raise ValueError(f"one_in(each={unknown}): no parameter of {names[0]}, which has {list(values[0])}")
    order = sorted(range(len(names)), key=lambda number: (crc32(names[number].encode()), number))
    kept, seen = [], set()
    for number in order:
        new = {(name, values[number][name]) for name in each} - seen
        if new:
            kept.append(number)
            seen |= new
    rest = [number for number in order if number not in set(kept)]
    return {*kept, *rest[: max(0, math.ceil(len(names) / n) - len(kept))]}


def _mark_fast(cases: Sequence[pytest.Item]) -> None:
    for case in cases:
        if any(case.get_closest_marker(name) for name in ("slow", "gpu", "xdist_group")):
            continue
        if not any(f"tests/{part}" in case.nodeid for part in LEISURELY):
            case.add_marker(pytest.mark.fast)
        return
