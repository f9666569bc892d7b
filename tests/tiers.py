"""Selection of tests for `make test-fast`, `make test` and `make test-all`.

A test that only repeats a property on more cases is marked `slow`. A table of similar cases is
marked as a whole:

    @pytest.mark.one_in(4, each=["kind"])  # one case in four, and at least one for each `kind`
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_sum(kind, shape): ...

The others become `slow`. The selection is the same in every run. It is by a checksum of the names,
since every fourth case would have the same value of a parameter with four values. The first case of
each function that is not slow is marked `fast`, except for functions that use processes and those
in `NOT_FAST`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any
from zlib import crc32

import hypothesis
import pytest

SLOW_LIMIT_S = 300  # timeout of a slow test; pyproject.toml has that of other tests
THOROUGH = 50  # default number of examples of a property
# Groups of tests that run on one worker of `pytest -n`, the longest first, so that they start on
# different workers; tests without a group come last and balance the load.
GROUPS = (
    "processes",
    "faults",
    "shared memory",
    "jax",
    "forked",
    "stand-in",
    "package",
    "multinode",
    "tour",
    "from jax",
    "assembly",
    "random_processes",
)

# Folders and files without fast tests: they start processes, interpret kernels, compile, or are
# exhaustive.
NOT_FAST = (
    "benchmarks/",
    "docs/",
    "examples/",
    "faults/",
    "kernels/",
    "models/",
    "multinode/",
    "test_import.py",
    "test_package.py",
    "test_pool.py",
    "mesh/launch/test_local_processes.py",
    "mesh/simulated/test_simulate_anywhere.py",
    "mesh/monitor/test_breakpoint.py",
    "mesh/monitor/doctor/test_doctor.py",
    "mesh/monitor/test_termination.py",
    "mesh/monitor/recording/test_files.py",
    "mesh/monitor/ledger/test_ledger.py",
    "mesh/launch/test_session.py",
    "mesh/monitor/startup/test_rendezvous.py",
    "mesh/monitor/torch_calls/test_torch_calls.py",
    "sharding/checkpoint/storage/test_lease.py",
    "sharding/checkpoint/test_ends.py",
    "sharding/functional/test_random_programs.py",
    "sharding/parallel/data/test_compiled.py",
    "sharding/parallel/tensor/test_compiled.py",
    "sharding/ops/rules/test_check.py",
    "sharding/debug/test_nan_check.py",
    "sharding/ops/test_torch_compile.py",
    "sharding/redistribute/test_through_kernels.py",
)


def slow(*values: Any) -> Any:
    """Return a slow case for `pytest.mark.parametrize`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def parameters(session: pytest.Session, name: str) -> set[Hashable]:
    """Return the values of a parameter in the selected tests, for a fixture that prepares them."""
    values = (item.callspec.params.get(name) for item in session.items if hasattr(item, "callspec"))
    return {value for value in values if _is_hashable(value)}


def examples(thorough: int) -> int:
    """Return the number of examples of a property, given that of `make test-all`; scaled by the
    hypothesis profile (conftest.py).
    """
    return max(5, thorough * hypothesis.settings().max_examples // THOROUGH)


def add_marks(items: Sequence[pytest.Item]) -> None:
    """Mark tests `slow` and `fast`."""
    for cases in _by_function(items).values():
        for mark in cases[0].iter_markers("one_in"):
            values = [_values(case, mark.kwargs.get("each", ())) for case in cases]
            selected = select_cases(
                values, [case.name.partition("[")[2] for case in cases], *mark.args, **mark.kwargs
            )
            for number, case in enumerate(cases):
                if number not in selected:
                    case.add_marker(pytest.mark.slow)
        for case in cases:
            if case.get_closest_marker("slow") and not case.get_closest_marker("timeout"):
                case.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
        _mark_fast(cases)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by `GROUPS`, for workers of `pytest -n` with `--no-loadscope-reorder`."""

    def place(item: pytest.Item) -> int:
        mark = item.get_closest_marker("xdist_group")
        return GROUPS.index(mark.args[0]) if mark and mark.args[0] in GROUPS else len(GROUPS)

    items.sort(key=place)


def _by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    items_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        items_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return items_of


def _values(case: pytest.Item, wanted: Iterable[str]) -> dict[str, Hashable]:
    """Return the values of parameters, or of their attributes ("case.kind"); ids of values that are
    not hashable.
    """
    values = {}
    for name in wanted:
        parameter, _, attribute = name.partition(".")
        value = case.callspec.params[parameter]  # type: ignore[attr-defined]
        value = getattr(value, attribute) if attribute else value
        values[name] = value if _is_hashable(value) else id(value)
    return values


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def select_cases(
    values: Sequence[Mapping[str, Hashable]],
    names: Sequence[str],
    n: float,
    each: Sequence[str] = (),
) -> set[int]:
    """Return the numbers of the kept cases: one in n, rounded up, and more only to keep every value
    of the parameters `each`.

    The selection depends only on the cases, so two tests with the same cases keep the same ones.

    Args:
        values: values of the parameters `each`, for each case.
        names: names of the cases, without the function's name.
    """
    order = sorted(range(len(names)), key=lambda number: (crc32(names[number].encode()), number))
    selected, seen = [], set()
    for number in order:
        new = {(name, values[number][name]) for name in each} - seen
        if new:
            selected.append(number)
            seen |= new
    rest = [number for number in order if number not in set(selected)]
    return {*selected, *rest[: max(0, math.ceil(len(names) / n) - len(selected))]}


def _mark_fast(cases: Sequence[pytest.Item]) -> None:
    for case in cases:
        if any(case.get_closest_marker(name) for name in ("slow", "gpu", "xdist_group")):
            continue
        if not any(f"tests/{part}" in case.nodeid for part in NOT_FAST):
            case.add_marker(pytest.mark.fast)
        return
