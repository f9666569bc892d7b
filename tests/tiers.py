"""How much of the tests is run: `make test-fast`, `make test`, `make test-all`.

A test that only tries more of the same is marked `slow`. A table of cases that differ little is marked as a whole:

    @pytest.mark.one_in(4, each=["kind"])     # of its cases one in four, and at least one for each `kind`
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

import hypothesis
import pytest

SLOW_LIMIT_S = 300  # of a test that is slow; all others have pyproject's
THOROUGH = 50  # examples of each property that does not say how many
# The groups of tests that one worker of `pytest -n` runs, the longest first: the first ones go to different workers, and what belongs to
# no group comes last and fills up what time is left.
GROUPS = ("processes", "faults", "shared memory", "jax", "multinode", "tour", "from jax", "assembly", "random_processes")

# Folders and files of which nothing is fast: processes that are started, kernels in an interpreter, what compiles and what is thorough.
LEISURELY = (
    "benchmarks/", "docs/", "examples/", "faults/", "kernels/", "models/", "multinode/", "test_import.py",
    "test_package.py", "test_pool.py",
    "mesh/launch/test_local_processes.py", "mesh/simulated/test_simulate_anywhere.py",
    "mesh/monitor/test_breakpoint.py", "mesh/monitor/doctor/test_doctor.py", "mesh/monitor/test_termination.py",
    "mesh/monitor/recording/test_files.py", "mesh/monitor/ledger/test_ledger.py", "mesh/launch/test_session.py",
    "mesh/monitor/startup/test_rendezvous.py", "mesh/monitor/torch_calls/test_torch_calls.py",
    "sharding/checkpoint/storage/test_lease.py", "sharding/functional/test_random_programs.py",
    "sharding/parallel/data/test_compiled.py", "sharding/parallel/tensor/test_compiled.py",
    "sharding/ops/rules/test_check.py", "sharding/debug/test_nan_check.py", "sharding/ops/test_torch_compile.py",
    "sharding/redistribute/test_through_kernels.py",
)  # fmt: skip


def slow(*values: Any) -> Any:
    """A case that is slow, for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(most: int) -> int:
    """So many examples of a property by `make test-all`, and by others as many fewer as their profile of hypothesis has (conftest.py)."""
    return max(5, most * hypothesis.settings().max_examples // THOROUGH)


def sort_out(items: Sequence[pytest.Item]) -> None:
    """Marks tests `slow` and `fast`."""
    for cases in _by_function(items).values():
        for mark in cases[0].iter_markers("one_in"):
            values = [_values(case, mark.kwargs.get("each", ())) for case in cases]
            kept = chosen(values, [case.name.partition("[")[2] for case in cases], *mark.args, **mark.kwargs)
            for number, case in enumerate(cases):
                if number not in kept:
                    case.add_marker(pytest.mark.slow)
        for case in cases:
            if case.get_closest_marker("slow") and not case.get_closest_marker("timeout"):
                case.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
        _mark_fast(cases)


def longest_first(items: list[pytest.Item]) -> None:
    """Puts them into the order in which workers are to get them (with `--no-loadscope-reorder`)."""

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        return GROUPS.index(mark.args[0]) if mark and mark.args[0] in GROUPS else len(GROUPS)

    items.sort(key=place)


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return found


def _values(case: pytest.Item, wanted: Iterable[str]) -> dict[str, Hashable]:
    """The values of these parameters, or of attributes of theirs ("case.kind"); of what has no hash, its identity."""
    found = {}
    for name in wanted:
        parameter, _, attribute = name.partition(".")
        value = case.callspec.params[parameter]  # type: ignore[attr-defined]
        value = getattr(value, attribute) if attribute else value
        found[name] = value if _is_hashable(value) else id(value)
    return found


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
        values: of each case, those of the parameters `each`.
        names: of the cases, without the function's.
    """
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
