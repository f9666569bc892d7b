"""Ints that change from call to call: results as in one process, and no new decision where the int
decides nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops import dispatch
from shardmesh.sharding.ops.rules.free_ints import numbers_of
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import on_mesh
from tests.tiers import examples

X, Y = f(6, 8), f(6, 8, seed=1)
LAYOUTS = {"whole": P(), "rows": P("a"), "columns": P(None, "a"), "pending": P(unreduced={"a"})}

NUMBERS: dict[str, Callable[[Any, int], Any]] = {
    "x * i": lambda x, i: x * i,
    "i - x": lambda x, i: i - x,
    "x + i": lambda x, i: x + i,
    "add alpha": lambda x, i: torch.add(x, x, alpha=i),
    "x / i": lambda x, i: x / (i or 1),
    "x ** i": lambda x, i: x**i,
    "i ** x": lambda x, i: (i * i + 1) ** x,
    "x // i": lambda x, i: x // (i or 1),
    "x % i": lambda x, i: x % (i or 1),
    "clamp max": lambda x, i: x.clamp(max=i),
    "clamp both": lambda x, i: x.clamp(-i, i),
    "x > i": lambda x, i: x > i,
    "lerp": lambda x, i: torch.lerp(x, x * x, i),
    "addcmul": lambda x, i: torch.addcmul(x, x, x, value=i),
    "masked_fill": lambda x, i: x.masked_fill(x > 0, i),
    "where": lambda x, i: torch.where(x > 0, x, i),
    "where first": lambda x, i: torch.where(x > 0, i, x),
    "full_like": lambda x, i: torch.full_like(x, i),
    "mul_": lambda x, i: x.clone().mul_(i),
    "add_": lambda x, i: x.clone().add_(i),
    "fill_": lambda x, i: torch.zeros_like(x).fill_(i),
    "nan_to_num": lambda x, i: x.nan_to_num(nan=i),
    "leaky_relu": lambda x, i: F.leaky_relu(x, i),
    "hardtanh": lambda x, i: F.hardtanh(x, -abs(i) - 1, abs(i)),
    "threshold": lambda x, i: F.threshold(x, 0, i),
    "pad value": lambda x, i: F.pad(x, (1, 1), "constant", i),
    "tril": lambda x, i: x.tril(i),
    "triu": lambda x, i: torch.triu(x, diagonal=i),
    "addmm": lambda x, i: torch.addmm(x @ x.T, x, x.T, alpha=i),
    "std": lambda x, i: x.std(dim=1, correction=i % 3),
    "norm": lambda x, i: torch.linalg.vector_norm(x, i, 1),
    "norm of all": lambda x, i: x.norm(i),
    "cdist": lambda x, i: torch.cdist(x, x, abs(i)),
}

POSITIONS: dict[str, Callable[[Any, int], Any]] = {
    "x[:, i]": lambda x, i: x[:, i],
    "x[i]": lambda x, i: x[i % 6],
    "x[..., i, None]": lambda x, i: x[..., i, None],
    "x[i, i]": lambda x, i: x[i % 6, i],
    "negative": lambda x, i: x[:, -1 - i],
    "window": lambda x, i: x[:, i % 4 : i % 4 + 3],
    "window of rows": lambda x, i: x[i % 4 : i % 4 + 2, 1:],
    "strided": lambda x, i: x[:, i % 2 : i % 2 + 6 : 2],
    "select": lambda x, i: x.select(1, i),
    "select dim=": lambda x, i: torch.select(x, dim=0, index=i % 6),
    "narrow": lambda x, i: x.narrow(1, i % 5, 3),
}

WRITES: dict[str, Callable[[Any, int], Any]] = {
    "x[i] = i": lambda x, i: x.__setitem__(i % 6, i),
    "x[:, i] = i": lambda x, i: x.__setitem__((slice(None), i), i),
    "x[i] = row": lambda x, i: x.__setitem__(i % 6, x[0] * 2),
    "x[:, i] = column": lambda x, i: x.__setitem__((slice(None), i), x[:, 0] * i),
    "window": lambda x, i: x.__setitem__((slice(None), slice(i % 4, i % 4 + 3)), i),
}


class Decisions:
    """Counts the strategies that each simulated rank, a thread, chooses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._counts, choose = Counter[int](), dispatch.choose_strategy

        def counted(*args: Any) -> Any:
            self._counts[threading.get_ident()] += 1
            return choose(*args)

        monkeypatch.setattr(dispatch, "choose_strategy", counted)

    @property
    def count(self) -> int:
        """The number of strategies that this rank has chosen."""
        return self._counts[threading.get_ident()]


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Decisions:
    return Decisions(monkeypatch)


def _equal(result: Any, expected: Any) -> None:
    whole = result.full_tensor() if isinstance(result, sm.ShardedTensor) else result
    torch.testing.assert_close(whole, expected)


@pytest.mark.one_in(3, each=["name", "layout"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, layout: str, decisions: Decisions) -> None:
    call = NUMBERS[name]

    def program(mesh: Any) -> None:
        x = sm.device_put(X, mesh, LAYOUTS[layout])
        for i in (3, 0, 2, -1, -2):
            _equal(call(x, i), call(X, i))
        before = decisions.count
        for i in range(2, 40):
            _equal(call(x, i), call(X, i))
        assert decisions.count == before

    on_mesh((2,), program)


@pytest.mark.parametrize("layout", ["whole", "rows", "pending"])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_on_dims_that_are_not_split(name: str, layout: str, decisions: Decisions) -> None:
    call = POSITIONS[name]
    by_rows = name in ("x[i]", "x[i, i]", "window of rows", "select dim=")

    def program(mesh: Any) -> None:
        x = sm.device_put(X, mesh, LAYOUTS[layout])
        _equal(call(x, 0), call(X, 0))
        before = decisions.count
        for i in (*range(8), *range(8)):
            _equal(call(x, i), call(X, i))
        assert decisions.count == before or (by_rows and layout == "rows")

    on_mesh((2,), program)


@pytest.mark.parametrize("layout", ["whole", "rows", "columns"])
@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str, layout: str, decisions: Decisions) -> None:
    write = WRITES[name]

    def program(mesh: Any) -> int:
        x, expected = sm.device_put(X.clone(), mesh, LAYOUTS[layout]), X.clone()
        write(x, 1)
        write(expected, 1)
        before = decisions.count
        for i in range(2, 8):
            write(x, i)
            write(expected, i)
        _equal(x, expected)
        return decisions.count - before

    made = on_mesh((2,), program)
    assert made == [0, 0] or (name == "window" and layout == "columns")


@given(data=st.data())
@settings(max_examples=examples(60))
def test_random_programs(data: st.DataObject) -> None:
    """Run one program with several ints, in one layout."""
    names = data.draw(
        st.lists(
            st.sampled_from([n for n in NUMBERS if n not in _NOT_CHAINED] + [*POSITIONS]),
            min_size=1,
            max_size=4,
        )
    )
    layout = data.draw(st.sampled_from(list(LAYOUTS)))
    positive = st.lists(st.integers(1, 7), min_size=4, max_size=4)
    steps = [data.draw(positive) for _ in names]

    def run(x: Any, turn: int) -> Any:
        for name, ints in zip(names, steps, strict=True):
            y = (NUMBERS | POSITIONS)[name](x, ints[turn])
            x = torch.tanh(y) if y.shape == x.shape else x + y.sum()
        return x

    def program(mesh: Any) -> None:
        x = sm.device_put(X, mesh, LAYOUTS[layout])
        for turn in range(4):
            _equal(run(x, turn), run(X, turn))

    on_mesh((2,), program)


_NOT_CHAINED = {"x > i", "addmm", "cdist", "pad value", "x // i", "x % i"}


def test_the_cache_does_not_grow() -> None:
    def program(mesh: Any) -> int:
        x = sm.device_put(X, mesh, P("a"))
        for i in range(1, 500):
            x * i
            x.clamp(max=i)
            x[:, i % 8]
        return len(sm.typeof(x).strategies)

    assert max(on_mesh((2,), program)) <= 60


def test_negative_power_of_integers_raises() -> None:
    def program(mesh: Any) -> None:
        x = sm.device_put(torch.arange(1, 5), mesh, P("a"))
        _equal(x**3, torch.arange(1, 5) ** 3)
        with pytest.raises(RuntimeError, match="negative integer powers"):
            x**-2

    on_mesh((2,), program)


def test_out_of_range_raises_after_an_index_in_range() -> None:
    def program(mesh: Any) -> None:
        x = sm.device_put(X, mesh, P("a"))
        _equal(x[:, 3], X[:, 3])
        for read in (
            lambda: x[:, 8],
            lambda: x[:, -9],
            lambda: x.select(1, 8),
            lambda: x.narrow(1, 6, 3),
        ):
            with pytest.raises(
                (IndexError, RuntimeError), match=r"out of range|exceeds|out of bounds"
            ):
                read()

    on_mesh((2,), program)


def test_calls_with_different_ints_have_different_lineages() -> None:
    def program(mesh: Any) -> None:
        x = sm.device_put(X, mesh, P("a"))
        lineages = {(x * i)._lineage for i in range(1, 40)} | {x[:, i]._lineage for i in range(8)}
        assert len(lineages) == 47
        assert (x * 3)._lineage == (x * 3)._lineage

    on_mesh((2,), program)


@pytest.mark.parametrize(
    ("func", "positions", "names"),
    [
        (torch.mul, {1}, {"other"}),
        (torch.Tensor.pow, {0, 1}, {"self", "exponent"}),
        (torch.Tensor.sum, set(), set()),
        (torch.Tensor.view, set(), set()),
        (torch.scatter, {3}, {"value"}),
        (F.leaky_relu, {1}, {"negative_slope"}),
        (F.pad, {3}, {"value"}),
        (torch.softmax, set(), set()),
        (torch.Tensor.__rsub__, {0, 1}, set()),
    ],
)  # fmt: skip
def test_numbers_are_read_off_the_schemas(func: Any, positions: set[int], names: set[str]) -> None:
    assert numbers_of(func) == (positions, names)
