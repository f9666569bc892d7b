"""Writes at indices and masks: eager, under `sm.jit` and under `sm.vmap` the values and derivatives
of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh import P
from tests.sharding.ranks import AXES, on_mesh, place
from tests.sharding.strategies import ragged_specs
from tests.tiers import examples

ROWS, COLUMNS = 7, 5


def ints(*shape: int, low: int = -4, high: int = 5) -> Tensor:
    """Return whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(low, high, shape, generator=generator).double()


X = ints(ROWS, COLUMNS)
MASK, TRUE = X > 0, int((X > 0).sum())
ROW_MASK, COLUMN_MASK = MASK[:, 0], MASK[2]
# of these the last 6 and the last 0 win, and -2 is 5
TWICE, ONCE, AT = torch.tensor([6, 0, -2, 0, 6]), torch.tensor([6, -7, 3]), torch.tensor([1, 1, -1])


def setitem(*index: Any) -> Callable[..., Any]:
    """Return `y[index] = value`; `Tensor` in the index stands for one of the tensors passed."""

    def write(y: Tensor, *tensors: Tensor) -> None:
        *indices, value = tensors
        remaining = iter(indices)
        entries = tuple(next(remaining) if e is Tensor else e for e in index)
        y[entries[0] if len(entries) == 1 else entries] = value

    return write


# how y is written, and the tensors of the index and the value
WRITES: dict[str, tuple[Callable[..., Any], Sequence[Tensor]]] = {
    "rows": (setitem(Tensor), [ONCE, ints(3, COLUMNS)]),
    "rows twice": (setitem(Tensor), [TWICE, ints(5, COLUMNS)]),
    "rows to a number": (lambda y, i: y.__setitem__(i, 2), [TWICE]),
    "rows to a tensor without dims": (setitem(Tensor), [TWICE, ints()]),
    "rows to one row": (setitem(Tensor), [TWICE, ints(COLUMNS)]),
    "no rows": (setitem(Tensor), [TWICE[:0], ints(0, COLUMNS)]),
    "a table of rows": (setitem(Tensor), [ONCE[:2, None], ints(2, 1, COLUMNS)]),
    "columns": (setitem(slice(None), Tensor), [AT, ints(ROWS, 3)]),
    "rows of a slice": (setitem(Tensor, slice(1, None, 2)), [ONCE, ints(3, 2)]),
    "elements": (setitem(Tensor, Tensor), [ONCE, AT, ints(3)]),
    "elements twice": (setitem(Tensor, Tensor), [TWICE, TWICE % COLUMNS, ints(5)]),
    "elements of a column": (setitem(Tensor, -1), [ONCE, ints(3)]),
    "index_put": (lambda y, i, v: y.index_put((i,), v), [TWICE, ints(5, COLUMNS)]),
    "index_put_ that adds": (
        lambda y, i, j, v: y.index_put_((i, j), v, True),
        [TWICE, TWICE % COLUMNS, ints(5)],
    ),
    "index_put of a mask": (lambda y, m, v: y.index_put([m], v), [MASK, ints(TRUE)]),
    "index_put of a mask that adds": (
        lambda y, m, v: y.index_put((m,), v, accumulate=True),
        [MASK, ints(TRUE)],
    ),
    "index_put_ of a mask that adds one value": (
        lambda y, m, v: y.index_put_((m,), v, accumulate=True),
        [MASK, ints()],
    ),
    "mask to a number": (lambda y, m: y.__setitem__(m, 2), [MASK]),
    "mask to one value": (setitem(Tensor), [MASK, ints(1)]),
    "mask to a tensor without dims": (setitem(Tensor), [MASK, ints()]),
    "mask to values": (setitem(Tensor), [MASK, ints(TRUE)]),
    "mask without true elements": (setitem(Tensor), [MASK & False, ints(0)]),
    "mask of rows to one row": (setitem(Tensor), [ROW_MASK, ints(COLUMNS)]),
    "mask of rows to values": (setitem(Tensor), [ROW_MASK, ints(int(ROW_MASK.sum()), COLUMNS)]),
    "mask of columns to values": (
        setitem(slice(None), Tensor),
        [COLUMN_MASK, ints(ROWS, int(COLUMN_MASK.sum()))],
    ),
    "masked_scatter": (lambda y, m, v: y.masked_scatter(m, v), [MASK, ints(TRUE + 3)]),
    "masked_scatter_ of a row": (
        lambda y, m, v: y.masked_scatter_(m, v),
        [COLUMN_MASK, ints(ROWS, COLUMNS)],
    ),
    "masked_scatter of no values": (
        lambda y, m, v: y.masked_scatter(m, v),
        [MASK & False, ints(0)],
    ),
    "masked_fill": (lambda y, m, v: y.masked_fill(m, v), [MASK, ints()]),
    "index_fill": (lambda y, i: y.index_fill(0, i, 2.0), [TWICE]),
    "index_add": (lambda y, i, v: y.index_add(0, i, v), [TWICE % ROWS, ints(5, COLUMNS)]),
    "scatter": (lambda y, i, v: y.scatter(0, i, v), [ONCE[:, None] % ROWS, ints(3, 1)]),
}


def differentiated(write: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return the function of x and other tensors that returns y = 2x after the write, and the
    first and second derivatives of a function of it.
    """

    def run(*tensors: Tensor) -> list[Any]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
        y = leaves[0] * 2
        result = write(y, *leaves[1:])
        y = y if result is None else result
        leaves = [x for x in leaves if x.requires_grad]
        options = {"allow_unused": True, "materialize_grads": True}
        grads = torch.autograd.grad((y * y).sum(), leaves, create_graph=True, **options)
        second = torch.autograd.grad(sum((g * g).sum() for g in grads), leaves, **options)
        return [y.detach(), *(g.detach() for g in (*grads, *second))]

    return run


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], str, list[P], torch.dtype]:
    """Draw a mesh, a write, the layouts of x and of the other tensors, and a dtype."""
    shape = draw(st.sampled_from([(2,), (3,), (2, 2)]))
    mesh = sm.AbstractMesh(shape, AXES[: len(shape)])
    name = draw(st.sampled_from(list(WRITES)))
    tensors = [X, *WRITES[name][1]]
    specs = [
        draw(ragged_specs(mesh, tuple(t.shape), ())) if i == 0 or draw(st.booleans()) else P()
        for i, t in enumerate(tensors)
    ]
    return shape, name, specs, draw(st.sampled_from([torch.float64, torch.bfloat16]))


@pytest.mark.filterwarnings("ignore:.*was recorded 8 times")
@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_as_one_process(case: Any) -> None:
    """Under `sm.jit` all calls return the bits of eager code."""
    shape, name, specs, dtype = case
    write, others = WRITES[name]
    tensors = [x.to(dtype) if x.is_floating_point() else x for x in (X, *others)]
    run = differentiated(write)
    expected = run(*tensors)

    def program(mesh: sm.DeviceMesh) -> None:
        sharded = [
            sm.device_put(x, mesh, s, src_data_rank=None)
            for x, s in zip(tensors, specs, strict=True)
        ]
        eager = [x.full_tensor() for x in run(*sharded)]
        for x, wanted in zip(eager, expected, strict=True):
            torch.testing.assert_close(x, wanted)
        assert torch.equal(eager[0], expected[0])
        jitted = sm.jit(run, backend="eager")
        for _ in range(3):
            results = jitted(*sharded)
            assert all(torch.equal(x.full_tensor(), y) for x, y in zip(results, eager, strict=True))
        assert len(jitted.recorded) == 1

    on_mesh(shape, program)


def test_indices_are_arguments_of_the_graph() -> None:
    """Later calls write where their indices say; out of range, torch raises."""

    def write(y: Tensor, i: Tensor, v: Tensor) -> Tensor:
        y[i] = v
        return y

    def program(mesh: sm.DeviceMesh) -> None:
        jitted = sm.jit(write, backend="eager")
        for numbers in ([0, 1, 2], [6, 6, 3], [-1, 4, 0]):
            i, v = torch.tensor(numbers), ints(3, COLUMNS)
            y = jitted(place(mesh, X.clone(), sm.Shard(0)), place(mesh, i), place(mesh, v))
            assert torch.equal(y.full_tensor(), write(X.clone(), i, v))
        assert len(jitted.recorded) == 1
        with pytest.raises(IndexError, match="out of"):
            jitted(
                place(mesh, X.clone(), sm.Shard(0)),
                place(mesh, torch.tensor([0, 7, 1])),
                place(mesh, v),
            )

    on_mesh((3,), program)


@pytest.mark.parametrize("method", ["__setitem__", "masked_scatter_"])
def test_the_number_of_true_elements_is_checked_in_every_call(method: str) -> None:
    def write(y: Tensor, m: Tensor, v: Tensor) -> Tensor:
        getattr(y, method)(m, v)
        return y

    more = MASK.clone()
    more[~MASK] = torch.arange(ROWS * COLUMNS - TRUE) < 2

    def program(mesh: sm.DeviceMesh) -> None:
        jitted = sm.jit(write, backend="eager")
        v = place(mesh, ints(TRUE))
        for mask in (MASK, MASK.flip(0)):
            y = jitted(place(mesh, X.clone(), sm.Shard(0)), place(mesh, mask), v)
            assert torch.equal(y.full_tensor(), write(X.clone(), mask, ints(TRUE)))
        with pytest.raises(RuntimeError, match=f"as many true elements as values .*, {TRUE}; pass"):
            jitted(place(mesh, X.clone(), sm.Shard(0)), place(mesh, more), v)
        with pytest.raises(RuntimeError, match=f"{TRUE + 2} true elements, but {TRUE} values"):
            write(place(mesh, X.clone(), sm.Shard(0)), place(mesh, more), v)

    on_mesh((2,), program)


def test_examples_of_a_batch_write_at_indices_of_their_own() -> None:
    def write(y: Tensor, i: Tensor, v: Tensor) -> Tensor:
        return y.index_put((i,), v, accumulate=True)

    batch = ints(4, ROWS), ints(4, 3, low=-ROWS, high=ROWS).long(), ints(4, 3)
    expected = torch.vmap(write)(*batch)

    def program(mesh: sm.DeviceMesh) -> None:
        y, i, v = (sm.device_put(x, mesh, P(), src_data_rank=None) for x in batch)
        found = sm.vmap(write)(y.redistribute(P(None, "a")), i, v)
        assert torch.equal(found.full_tensor(), expected)

    on_mesh((3,), program)


class Copies(TorchDispatchMode):
    """Records how many elements the tensors that operators make have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func._schema.is_mutable:
            self.sizes.append(result.numel())
        return result


def test_few_rows_of_a_large_part_are_written_alone() -> None:
    """Eager code copies no parts: a cache is much larger than what is written."""

    def program(mesh: sm.DeviceMesh) -> None:
        cache = place(mesh, torch.zeros(40, 3), sm.Shard(0))
        i, v = place(mesh, torch.tensor([1, 39])), place(mesh, torch.ones(2, 3))
        cache[i] = v
        with Copies() as copies:
            cache[i] = v
        assert max(copies.sizes) <= 6

    on_mesh((2,), program)


def experts(x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Run transformers' "grouped_mm" experts: rows sorted by expert, and put back."""
    choices = chosen.shape[1]
    ids, order = torch.sort(chosen.reshape(-1))
    counts = torch.histc(ids.float(), bins=len(up), min=0, max=len(up) - 1)
    offsets = torch.cumsum(counts, 0, dtype=torch.int32)
    rows = torch.nn.functional.grouped_mm(x[order // choices], up, offs=offsets).relu()
    rows = torch.nn.functional.grouped_mm(rows, down, offs=offsets)
    rows = rows * weights.reshape(-1)[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return rows[inverse].view(len(x), choices, -1).sum(1)


def test_experts_whose_rows_are_sorted() -> None:
    x, weights, up, down = ints(6, 8), ints(6, 2), ints(4, 8, 16), ints(4, 16, 8)
    x, weights, up, down = (t.float() for t in (x, weights, up, down))
    chosen = ints(6, 2, low=0, high=4).long()

    def run(x: Tensor, chosen: Tensor, *rest: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, *rest)]
        with sm.ops.implicit_replication():  # for `torch.arange`, as `parallelize` does
            y = experts(leaves[0], chosen, *leaves[1:])
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    def program(mesh: sm.DeviceMesh) -> None:
        jitted = sm.jit(run, backend="eager")
        for route in (chosen, chosen.flip(0), torch.zeros_like(chosen)):
            args = [sm.device_put(t, mesh, P("a")) for t in (x, route, weights)]
            args += [sm.device_put(t, mesh, P()) for t in (up, down)]
            eager = run(*args)
            for _ in range(2):
                pairs = zip(jitted(*args), eager, run(x, route, weights, up, down), strict=True)
                for result, same, wanted in pairs:
                    assert torch.equal(result.full_tensor(), same.full_tensor())
                    torch.testing.assert_close(result.full_tensor(), wanted)
        assert len(jitted.recorded) == 1

    on_mesh((2,), program)
