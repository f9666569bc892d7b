"""Lineage: the same on all ranks that make a value in the same way, on whatever lines; another one
for another value.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh import current_world, simulate
from shardmesh.mesh.comm.recording.recorder import unlike
from shardmesh.mesh.settings import collective_check, settings
from shardmesh.sharding.lineage import mixed, packed, seed_of

RANKS = 4


def make(spec: P | None = None, value: float = 1.0) -> Any:
    """Create a tensor on this line, regardless of the caller."""
    return sm.device_put(
        torch.full((8, 8), value), mesh(), P("x") if spec is None else spec, src_data_rank=None
    )


def mesh() -> Any:
    return sm.init_device_mesh("cpu", (RANKS,), axis_names=("x",))


def shown(x: Any) -> int:
    """Return the lineage shown next to the collectives of a tensor."""
    return packed(x._lineage)


def on_ranks(fn: Callable[[int], list[Any]]) -> list[list[int]]:
    """Return the lineages of the tensors on each rank."""
    return simulate(RANKS, prints="plain")(lambda: [shown(x) for x in fn(current_world().rank)])()


def all_alike(found: list[list[int]]) -> bool:
    """Return whether the ranks agree on each tensor, directly or through another rank."""
    return not any(
        unlike(one, other)
        for column in zip(*found, strict=True)
        for one in column
        for other in column
    )


def all_different(row: list[int]) -> bool:
    """Return whether all tensors of a rank have different lineages."""
    return all(unlike(one, other) for n, one in enumerate(row) for other in row[:n])


# -- alike on all ranks ----------------------------------------------------------------------------


def test_the_same_program_gives_the_same_lineages() -> None:
    def fn(_: int) -> list[Any]:
        a, b = make(), make(P(None, "x"))
        w = make(P()).requires_grad_()
        (a @ w).sum().backward()
        return [
            a,
            b,
            a + b,
            a @ b,
            (a @ b).sum(),
            w,
            w.grad,
            torch.stack([a, b]),
            a.redistribute(P()),
        ]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all(row != 0 for row in found[0])


def test_different_lines_on_each_rank() -> None:
    def fn(rank: int) -> list[Any]:
        if rank == 0:  # noqa: SIM114 - the lines are what this is about
            a = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        elif rank == 1:
            a = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        else:
            a = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        return [a, a * 2, a @ a]

    found = on_ranks(fn)
    assert found[0] != found[1] != found[2]
    assert all_alike(found)


@pytest.mark.parametrize("extra", [1, 7])
def test_tensors_created_on_one_rank_only(extra: int) -> None:
    def fn(rank: int) -> list[Any]:
        a = make()
        if rank == 2:
            more = [
                sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None) * 2
                for _ in range(extra)
            ]
            assert len(more) == extra
        b = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        return [a, b, a + b]

    assert all_alike(on_ranks(fn))


def of_a_line_of_its_own(rank: int) -> Any:
    """Return the product of two tensors; on one rank the line of the first differs, and so the
    number of the second.
    """
    if rank == 1:
        a = sm.device_put(torch.ones(8, 8), mesh(), P(), src_data_rank=None)
        assert sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None) is not None
    else:
        a = sm.device_put(torch.ones(8, 8), mesh(), P(), src_data_rank=None)
    return make() @ a


def test_different_line_and_an_extra_tensor() -> None:
    def fn(rank: int) -> float:
        w = of_a_line_of_its_own(rank).detach().requires_grad_()
        w.square().sum().backward()
        return w.full_tensor().sum().item() + w.grad.full_tensor().sum().item()

    assert not all_alike(on_ranks(lambda rank: [of_a_line_of_its_own(rank)]))
    assert len(set(simulate(RANKS)(lambda: fn(current_world().rank))())) == 1


def test_different_operator_still_differs() -> None:
    def fn(rank: int) -> None:
        x = of_a_line_of_its_own(rank)
        (x + x if rank == 1 else x * 2).full_tensor()

    assert raised(fn).ranks == (1,)


def test_extra_tensor_and_later_a_different_line() -> None:
    """Order and line differ; the number since the last collective does not."""

    def fn(rank: int) -> list[Any]:
        if rank == 0:
            sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        mesh().group("x").barrier()
        if rank == 0:
            b = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        else:
            b = sm.device_put(torch.ones(8, 8), mesh(), P("x"), src_data_rank=None)
        return [b, b * 2]

    assert all_alike(on_ranks(fn))


def test_thread_that_creates_tensors() -> None:
    def fn(rank: int) -> list[Any]:
        a, here = make(), mesh()
        if rank == 1:
            thread = threading.Thread(
                target=lambda: sm.device_put(torch.ones(8, 8), here, P("x"), src_data_rank=None) * 2
            )
            thread.start()
            thread.join()
        b = sm.device_put(torch.ones(8, 8), here, P("x"), src_data_rank=None)
        return [a, b]

    assert all_alike(on_ranks(fn))


LOOKS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda x: x.detach(),
    "repr": repr,
    "to_local": lambda x: x.to_local(),
    "grad": lambda x: x.grad,
    "placements": lambda x: (x.placements, x.spec, x.shape, x.mesh),
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "operators": lambda x: (x * 2 + 1).neg(),
    "shards": lambda x: x.addressable_shards,
    "data": lambda x: x.data * 2,
}


@pytest.mark.parametrize("look", LOOKS)
def test_inspecting_a_tensor_on_one_rank_changes_nothing(look: str) -> None:
    def fn(rank: int) -> list[Any]:
        a = make()
        if rank == 0:
            LOOKS[look](a)
        return [a, make(), a @ make()]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS


def test_uneven_and_empty_parts() -> None:
    def fn(_: int) -> list[Any]:
        x = sm.device_put(torch.ones(5, 2), mesh(), P("x"), src_data_rank=None)
        return [x, x * 2, x.sum(0), x.redistribute(P())]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS


# -- carried along ---------------------------------------------------------------------------------

KEEPS: dict[str, Callable[[Any], Any]] = {
    "redistribute": lambda x: x.redistribute(P()),
    "async": lambda x: x.redistribute(P(), async_op=True).wait(),
    "donate": lambda x: copy.deepcopy(x).redistribute(P(), donate=True),
    "many": lambda x: sm.redistribute_many([x], [P()])[0],
    "reshard": lambda x: sm.reshard(x, P()),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "deepcopy": copy.deepcopy,
    "constraint": lambda x: sm.with_sharding_constraint(x, P()),
}


@pytest.mark.parametrize("way", KEEPS)
def test_redistribution_keeps_the_lineage(way: str) -> None:
    def fn(_: int) -> list[Any]:
        x = make()
        return [x, KEEPS[way](x)]

    for one, other in on_ranks(fn):
        assert one == other


def test_copied_data_keeps_its_lineage() -> None:
    def fn(_: int) -> list[Any]:
        x, y = make(), make(value=2)
        z = y * 3
        x.data = z
        return [x, z]

    for one, other in on_ranks(fn):
        assert one == other


# -- another value ---------------------------------------------------------------------------------


def test_values_of_equal_shape_differ() -> None:
    def fn(_: int) -> list[Any]:
        a, b = make(), make()
        c = make(P(None, "x"))
        return [
            a,
            b,
            c,
            a + b,
            b + a,
            a - b,
            a * b,
            a + a,
            b + b,
            (a + b) + a,
            a + (b + a),
            a @ b,
            b @ a,
            a.neg(),
            a.neg().neg(),
            a.t(),
            a.exp(),
            *a.chunk(2),
            *a.split(4, 1),
            *a.max(0),
        ]

    for row in on_ranks(fn):
        assert all_different(row)


def test_non_tensor_arguments_count() -> None:
    """On a square, these have the same shape and may have the same layout."""

    def fn(_: int) -> list[Any]:
        a = make(P())
        return [
            a,
            a.sum(0),
            a.sum(1),
            a[0],
            a[1],
            a.select(1, 0),
            a.select(1, 1),
            a.narrow(1, 0, 4),
            a.narrow(1, 4, 4),
            a.softmax(0),
            a.softmax(1),
            a * 2,
            a * 3,
            a.cumsum(0),
            a.cumsum(1),
            a.roll(1, 0),
            a.roll(2, 0),
        ]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all_different(found[0])


def test_each_loop_iteration_differs() -> None:
    def fn(_: int) -> list[Any]:
        made = [make() for _ in range(20)]
        return [*made, *(x * 2 for x in made)]

    for row in on_ranks(fn):
        assert all_different(row)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2),
        lambda x: x.add_(x),
        lambda x: x.zero_(),
        lambda x: x.copy_(make(value=5)),
    ],
)
def test_in_place_writes_change_the_lineage(write: Callable[[Any], Any]) -> None:
    def fn(_: int) -> list[Any]:
        x = make()
        before = x.detach().clone()
        write(x)
        return [before, x]

    for row in on_ranks(fn):
        assert all_different(row)


def test_gradients_of_two_parameters() -> None:
    def fn(_: int) -> list[Any]:
        a, b = make(P()).requires_grad_(), make(P()).requires_grad_()
        (make() @ a @ b).sum().backward()
        return [a.grad, b.grad]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all_different(found[0])


def test_gradients_of_two_losses() -> None:
    """For one parameter, and after a second backward."""

    def fn(_: int) -> list[Any]:
        w, found = make(P()).requires_grad_(), []
        for loss in (lambda: (make() @ w).sum(), lambda: (make() @ w).square().sum()):
            loss().backward()
            found += [w.grad.detach()]
        w.grad = None
        (make() @ w).mean().backward()
        return [*found, w.grad]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all_different(found[0])


# -- what it catches -------------------------------------------------------------------------------


def raised(fn: Callable[[int], Any]) -> Any:
    with pytest.raises(sm.errors.CollectiveMismatchError) as caught:
        simulate(RANKS, prints="plain")(lambda: fn(current_world().rank))()
    return caught.value


@pytest.mark.parametrize("odd", range(RANKS))
def test_two_swapped_redistributions(odd: int) -> None:
    def fn(rank: int) -> None:
        a, b = make(), make()
        for x in (b, a) if rank == odd else (a, b):
            x.redistribute(P())

    error = raised(fn)
    assert error.ranks == (odd,)
    assert error.verdict.field == "lineage"


def test_skipped_iteration() -> None:
    def fn(rank: int) -> None:
        for turn in range(4):
            x = make() * 2
            if not (rank == 3 and turn == 1):
                x.full_tensor()

    assert raised(fn).ranks == (3,)


def test_operator_skipped_on_one_rank() -> None:
    def fn(rank: int) -> None:
        x = make()
        if rank != 1:
            x = x * 2
        x.full_tensor()

    assert raised(fn).ranks == (1,)


def test_update_skipped_on_one_rank() -> None:
    def fn(rank: int) -> None:
        x = make()
        if rank != 2:
            x.add_(1)
        x.full_tensor()

    assert raised(fn).ranks == (2,)


def test_gradients_in_another_order() -> None:
    def fn(rank: int) -> None:
        a, b = make(P()).requires_grad_(), make(P()).requires_grad_()
        losses = [(make() * a).sum(), (make() * b).sum()]
        for loss in losses[::-1] if rank == 0 else losses:
            loss.backward()

    assert raised(fn).ranks == (0,)


ORDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "operators of one operand": (lambda x: x.sin() * 2, lambda x: (x * 2).sin()),
    "in place": (lambda x: x.neg_().mul_(2), lambda x: x.mul_(2).neg_()),
    "operators of two operands": (lambda x: make() @ x.sin(), lambda x: (make() @ x).sin()),
}


@pytest.mark.parametrize("ways", ORDERS.values(), ids=ORDERS)
def test_operators_in_another_order(
    ways: tuple[Callable[[Any], Any], Callable[[Any], Any]],
) -> None:
    def fn(rank: int) -> None:
        ways[rank == 2](make(value=0.5)).full_tensor()

    assert raised(fn).ranks == (2,)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_gradient_of_a_moved_operand_depends_on_its_loss(spec: P) -> None:
    """w is gathered for the product, which all ranks do alike; its gradient depends on x, which one
    rank has changed.
    """

    def fn(rank: int) -> None:
        w, x = make(P("x")).requires_grad_(), make(spec)
        if rank == 1:
            x = torch.sin(x * x)
        (x @ w).square().sum().backward()

    assert raised(fn).ranks == (1,)


def mapped(x: Any) -> Any:
    return sm.shard_map(
        lambda y: y * 0.5 + sm.psum(y.sum(), "x"), mesh=mesh(), in_specs=P("x"), out_specs=P("x")
    )(x)


def test_different_argument_of_a_mapped_function() -> None:
    def fn(rank: int) -> None:
        a, b = make(), make()
        mapped(b if rank == 1 else a)

    assert raised(fn).ranks == (1,)


def test_results_of_a_mapped_function_depend_on_its_arguments() -> None:
    def fn(_: int) -> list[Any]:
        a, b = make(), make()
        return [a, b, mapped(a), mapped(b), mapped(mapped(a))]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all_different(found[0])


# -- random numbers --------------------------------------------------------------------------------

F = torch.nn.functional
DRAWS: dict[str, Callable[[], Any]] = {
    "a factory": lambda: sm.randn(8, device_mesh=mesh(), placements=P("x")),
    "dropout": lambda: F.dropout(make(), 0.5),
    "dropout in place": lambda: F.dropout(make(), 0.5, inplace=True),
    "dropout of another dropout": lambda: F.dropout(F.dropout(make(), 0.5) * 2, 0.5),
    "dropout of attention": lambda: F.scaled_dot_product_attention(
        *[make().view(1, 1, 8, 8)] * 3, dropout_p=0.5
    ),
    "uniform_": lambda: make().uniform_(),
    "bernoulli_ with a tensor": lambda: make().bernoulli_(torch.tensor(0.5)),
    "initialisation": lambda: torch.nn.init.kaiming_uniform_(make()),
    "rand_like": lambda: torch.rand_like(make()),
    "multinomial": lambda: torch.multinomial(make(), 2),
    "an operator of torch's generator": lambda: torch.poisson(make()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_different_seed(draw: Callable[[], Any]) -> None:
    def fn(rank: int) -> None:
        sm.random.manual_seed(5 if rank == 2 else 1)
        draw().full_tensor()

    error = raised(fn)
    assert error.ranks == (2,)
    assert error.verdict.field == "lineage"
    assert "random numbers differ (ranks 0, 1, 3: seed 1, " in str(error)
    assert "rank 2: seed 5, " in str(error)


def test_extra_draw() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            F.dropout(make(), 0.5)
        F.dropout(make(value=2.0) + 1, 0.5).sum().item()

    error = raised(fn)
    assert error.ranks == (1,)
    assert "rank 1: seed 0, 2 tensors drawn" in str(error)


def test_values_without_random_numbers_are_unaffected() -> None:
    """The seeds of ranks do not matter if no value is drawn."""

    def fn(rank: int) -> list[Any]:
        sm.random.manual_seed(rank)
        x = make()
        F.dropout(x, 0.5)
        F.dropout(x, 0.0)
        F.dropout(x, 0.5, training=False)
        return [x, x + 1, torch.zeros_like(x), (x @ x).sum()]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS


def test_the_same_draws_give_the_same_lineages() -> None:
    def fn(rank: int) -> list[Any]:
        sm.random.manual_seed(3)
        state = sm.random.get_rng_state()
        one, other = sm.rand(8, device_mesh=mesh(), placements=P("x")), F.dropout(make(), 0.5)
        sm.random.set_rng_state(state)
        return [one, other, one * other, sm.rand(8, device_mesh=mesh(), placements=P("x"))]

    found = on_ranks(fn)
    assert found == [found[0]] * RANKS
    assert all_different(found[0])


def test_a_draw_on_the_ranks_of_another_mesh() -> None:
    def fn(rank: int) -> list[Any]:
        part = sm.DeviceMesh("cpu", [0, 1], axis_names=("y",))
        sm.rand(4, device_mesh=part, placements=P("y"))
        return [F.dropout(make(), 0.5)]

    assert all_alike(on_ranks(fn))


# -- slices of a mesh ------------------------------------------------------------------------------

# Each of the slices mesh["y"] has a loss of its own, and backward also moves gradients along x.


def slices(columns: int = 2) -> tuple[Any, Any]:
    whole = sm.init_device_mesh("cpu", (2, columns), axis_names=("x", "y"))
    return whole["x"], whole["y"]


def values(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss_on(y: Any, local: Any) -> Any:
    """Return a loss on the slice of y, which splits the columns."""
    whole = sm.ShardedTensor.from_local(local, y, P())
    return (whole.redistribute(P(None, "y")) ** 3).sum()


def gathered_rows() -> Any:
    """The gradient of an all_gather over x."""
    x, y = slices()
    w = sm.device_put(values(4, 4), x, P("x"), src_data_rank=None).requires_grad_()
    whole = w.redistribute(P()).to_local(grad_placements=[sm.Partial()])
    loss_on(y, whole / x.size()).backward()
    return w.grad


def replicated_leaf() -> Any:
    """The gradient of a leaf, summed over x at the end of backward."""
    x, y = slices()
    w = sm.device_put(values(4, 4), x, P(), src_data_rank=None).requires_grad_()
    loss_on(y, w.to_local(grad_placements=[sm.Partial()]) / x.size()).backward()
    return w.grad


def replicated_plain() -> Any:
    """The gradient of a plain tensor that enters as replicated."""
    x, y = slices()
    w = values(4, 4).requires_grad_()
    local = sm.ShardedTensor.from_local(w, x, P()).to_local(grad_placements=[sm.Partial()])
    loss_on(y, local / x.size()).backward()
    return sm.ShardedTensor.from_local(w.grad, x, P())


def largest() -> Any:
    """The gradient of a maximum over x, which counts how many ranks hold it."""
    x, y = slices()
    w = sm.device_put(values(4, 4), x, P("x"), src_data_rank=None).requires_grad_()
    rows = w.amax(0, keepdim=True).redistribute(P()).to_local(grad_placements=[sm.Partial()])
    loss_on(y, rows / x.size()).backward()
    return w.grad


def mapped_sum() -> Any:
    """The gradient of a sum over x in a mapped function."""
    x, y = slices()
    w = sm.device_put(values(4, 4), x, P("x"), src_data_rank=None).requires_grad_()
    total = sm.shard_map(
        lambda part: sm.psum(part.sum(0, keepdim=True), "x"),
        mesh=x,
        in_specs=P("x"),
        out_specs=P(),
    )(w)
    loss_on(y, total.to_local(grad_placements=[sm.Partial()]) / x.size()).backward()
    return w.grad


def together() -> Any:
    """Tensors of two slices, moved at once."""
    x, y = slices()
    w = sm.device_put(values(4, 4), x, P("x"), src_data_rank=None).requires_grad_()
    v = sm.device_put(values(4, 4), y, P("y"), src_data_rank=None).requires_grad_()
    wholes = sm.redistribute_many([w, v], [P(), P()])
    local, other = (whole.to_local(grad_placements=[sm.Partial()]) for whole in wholes)
    loss_on(y, local * other / x.size()).backward()
    return w.grad


CUBES: dict[Callable[[], Any], Callable[[Any], Any]] = {
    gathered_rows: lambda w: w / 2,
    replicated_leaf: lambda w: w / 2,
    replicated_plain: lambda w: w / 2,
    largest: lambda w: w.amax(0, keepdim=True) / 2,
    mapped_sum: lambda w: w.sum(0, keepdim=True) / 2,
    together: lambda w: w * w.detach() / 2,
}


@pytest.mark.parametrize("program", CUBES, ids=lambda program: program.__name__)
def test_a_loss_on_a_slice_and_gradients_along_another_axis(program: Callable[[], Any]) -> None:
    w = values(4, 4).requires_grad_()
    (2 * CUBES[program](w) ** 3).sum().backward()  # each of the two ranks of x has a loss

    def fn() -> None:
        grad = program()
        torch.testing.assert_close(grad.full_tensor(), w.grad)
        (grad * 2).full_tensor()  # the lineage of .grad, too, is the same along x

    simulate(4, prints="plain")(fn)()


@pytest.mark.parametrize("is_leaf", [True, False])
def test_gradients_of_a_loss_on_a_slice_in_another_order(is_leaf: bool) -> None:
    def fn() -> None:
        _, y = slices(4)
        plain = [values(4, 4).requires_grad_() for _ in range(2)]
        ws = [
            sm.device_put(w.detach(), y, P(), src_data_rank=None).requires_grad_()
            if is_leaf
            else sm.ShardedTensor.from_local(w, y, P())
            for w in plain
        ]
        data = [sm.device_put(values(4, 4), y, P("y"), src_data_rank=None) for _ in ws]
        losses = [(x * w).sum() for x, w in zip(data, ws, strict=True)]
        for loss in losses[::-1] if current_world().rank == 6 else losses:
            loss.backward()

    with pytest.raises(sm.errors.CollectiveMismatchError) as caught:
        simulate(8, prints="plain")(fn)()
    assert caught.value.ranks == (6,)
    assert caught.value.verdict.field == "lineage"


def sum_over_ranks(w: Any) -> Any:
    def body(part: Any) -> Any:
        return (sm.psum(part.sum(0, keepdim=True), "y") * (1 + sm.axis_index("y")) * part).sum()[
            None
        ]

    return sm.shard_map(body, mesh=w.mesh, in_specs=P("y"), out_specs=P("y"))(w).sum()


def gathered_in_map(w: Any) -> Any:
    def body(part: Any) -> Any:
        whole = sm.all_gather(part, "y", tiled=True)
        return (whole * (1 + sm.axis_index("y"))).sum()[None]

    return sm.shard_map(body, mesh=w.mesh, in_specs=P("y"), out_specs=P("y"))(w).sum()


def largest_in_map(w: Any) -> Any:
    def body(part: Any) -> Any:
        return (sm.pmax(part, "y") * part).sum()[None]

    return sm.shard_map(body, mesh=w.mesh, in_specs=P("y"), out_specs=P("y"))(w).sum()


# The gradient of each calls a collective.
LOSSES: dict[str, Callable[[Any], Any]] = {
    "psum": sum_over_ranks,
    "all_gather": gathered_in_map,
    "pmax": largest_in_map,
    "amax": lambda w: (w.amax(0) ** 2).sum(),
    "pending max": lambda w: (
        sm.ShardedTensor.from_local(w.to_local(), w.mesh, P(unreduced={"y": "max"})).redistribute(
            P()
        )
        ** 2
    ).sum(),
    "roll": lambda w: (w.roll(1, 0) * w).sum(),
    "jit": lambda w: sm.jit(lambda x: (x.roll(1, 0) * x).sum())(w),
}


@pytest.mark.parametrize("is_slice", [True, False])
@pytest.mark.parametrize("loss_of", LOSSES.values(), ids=LOSSES)
def test_collectives_in_the_backward_of_a_loss_that_some_ranks_lack(
    loss_of: Callable[[Any], Any], is_slice: bool
) -> None:
    """On one of two slices, and on a mesh of all ranks but one."""

    def fn(odd: int | None) -> Any:
        if is_slice:
            y = slices(4)[1]
        else:
            y = sm.DeviceMesh("cpu", [0, 1, 2, 3], axis_names=("y",))
            if y.coordinate is None:
                return None
        ws = [
            sm.device_put(values(8, 4) * n, y, P("y"), src_data_rank=None).requires_grad_()
            for n in (1, 2)
        ]
        losses = [loss_of(w) for w in ws]
        buffer = current_world().trace_buffer
        before = buffer.last.number
        for loss in losses[::-1] if current_world().rank == odd else losses:
            loss.backward()
        in_backward = [record for record in buffer.records() if record.number > before]
        assert in_backward
        assert all(record.lineage for record in in_backward)

    ranks, odd = (8, 6) if is_slice else (5, 2)
    simulate(ranks, prints="plain")(fn)(None)
    with pytest.raises(sm.errors.CollectiveMismatchError) as caught:
        simulate(ranks, prints="plain")(fn)(odd)
    assert caught.value.ranks == (odd,)
    assert caught.value.verdict.field == "lineage"


# -- numbers ---------------------------------------------------------------------------------------


def test_seeds_do_not_collide() -> None:
    one = (1 << 32) - 1
    for name in ("add", "mul", "matmul"):
        seed = seed_of(name)
        assert seed >> 192 == seed >> 128 & one == seed >> 64 & one == seed & one
        assert seed >> 224 == 0


def test_mixing_keeps_the_hashes_apart() -> None:
    """Each mixed hash depends only on the same hash of the operands."""

    class Operand:
        def __init__(self, *hashes: int) -> None:
            self._lineage = hashes[0] << 192 | hashes[1] << 128 | hashes[2] << 64 | hashes[3]

    top = (1 << 32) - 1
    base = mixed(seed_of("add"), [Operand(1, 2, 3, 4), Operand(top, top, top, top)])
    for place in range(4):
        hashes = [1, 2, 3, 4]
        hashes[place] = top
        other = mixed(seed_of("add"), [Operand(*hashes), Operand(top, top, top, top)])
        changed = [base >> shift & top != other >> shift & top for shift in (192, 128, 64, 0)]
        assert changed == [place == n for n in range(4)]


def test_collective_check_off_computes_no_lineage() -> None:
    before = settings().mode
    collective_check("off")
    try:
        assert on_ranks(lambda _: [make(), make() * 2])[0][0] == 0
    finally:
        collective_check(before)
