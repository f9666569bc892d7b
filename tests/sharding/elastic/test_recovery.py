"""State is recovered bit for bit from the ranks that are left; what nobody holds is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import Layout, P, ShardedTensor
from shardmesh.kernels.box import slices
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.tree import PerRank, leaves, name_of, without_stateful
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from tests.device import DEVICE
from tests.sharding.checkpoint.trees import DTYPES, MESHES, mesh_of, shape_of, spec_of, values_of
from tests.sharding.elastic.states import (
    Build,
    State,
    assert_equals,
    bits_of,
    ddp,
    fsdp,
    lost_elements,
    mesh_over,
    on_ranks,
    part_at_box,
    tensor_parallel,
    train,
    whole_values,
)
from tests.sharding.ranks import collectives, place
from tests.tiers import examples, slow

# -- every choice of lost ranks --------------------------------------------------------------------


def new_shape(form: str, n: int) -> tuple[tuple[int, ...], str]:
    """Return the shape and axes of the mesh for n ranks; it may leave some as spares."""
    if form.startswith("tensor parallel"):
        return (n // 2, 2), "dt"
    if form.startswith("hsdp") and n % 2 == 0:
        return (2, n // 2), "rs"
    return (n,), "s"


@pytest.mark.parametrize(
    ("form", "build", "shape", "names"),
    [
        ("ddp", ddp, (3,), "d"),
        ("hsdp", fsdp, (2, 2), "rs"),
        slow("hsdp of 8", fsdp, (2, 4), "rs"),
        ("fsdp", fsdp, (4,), "s"),
        ("tensor parallel", tensor_parallel, (2, 2), "dt"),
        slow("tensor parallel of 6", tensor_parallel, (3, 2), "dt"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_choice_of_one_and_two_lost_ranks(
    form: str, build: Build, shape: tuple[int, ...], names: str
):
    size = int(torch.tensor(shape).prod())

    def program() -> list[str]:
        torch.manual_seed(0)
        state = build(mesh_over(range(size), shape, names))
        train(state)
        expected = whole_values(state)
        outcomes: list[str] = []
        for lost in [*combinations(range(size), 1), *combinations(range(size), 2)]:
            alive = [rank for rank in range(size) if rank not in lost]
            if current_world().rank in lost:
                continue
            new, axes = new_shape(form, len(alive))
            used = alive[: int(torch.tensor(new).prod())]
            torch.manual_seed(1)
            like = build(mesh_over(used, new, axes))
            outcomes.append(f"{lost}: {outcome(state, like, alive, expected)}")
        return outcomes

    outcomes = {text for outcomes in on_ranks(size, program) for text in outcomes}
    assert len(outcomes) == size * (size + 1) // 2  # all ranks come to the same
    ends = {text.partition(": ")[2] for text in outcomes}
    # no part of "tensor parallel of 6" has fewer than three holders
    always = {"ddp": {"recovered"}, "fsdp": {"lost"}, "tensor parallel of 6": {"recovered"}}
    assert ends == always.get(form, {"recovered", "lost"})


def outcome(
    state: State, like: State, alive: Sequence[int], expected: dict[str, torch.Tensor]
) -> str:
    missing = lost_elements(state, alive)
    try:
        recover(state, like, alive)
    except StateLostError as error:
        assert error.lost.keys() == missing.keys()
        for name, boxes in error.lost.items():
            mask = torch.zeros_like(missing[name])
            for box in boxes:
                mask[slices(box)] = True
            assert torch.equal(mask, missing[name])
        assert all(f"lost: {name}[" in str(error) for name in list(missing)[:8])
        return "lost"
    assert not missing
    assert_equals(like, expected)
    assert_equals(like, whole_of(like, alive, expected))
    return "recovered"


def whole_of(
    like: State, alive: Sequence[int], expected: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the whole values of the recovered state on ranks of its mesh."""
    meshes = [
        leaf.mesh for _, leaf in leaves(without_stateful(like)) if isinstance(leaf, ShardedTensor)
    ]
    if any(mesh.coordinate_of(current_world().rank) is None for mesh in meshes):
        return expected
    return whole_values(like)


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_layouts(seed: int):
    """Ragged and empty parts, 0-d tensors, all dtypes, meshes of some of the ranks in any order."""
    rng = random.Random(seed)
    old_shape, new_mesh_shape = rng.choice(MESHES[2:]), rng.choice(MESHES)
    size = max(int(torch.tensor(old_shape).prod()), 2)
    lost = rng.sample(range(size), rng.randint(1, min(2, size - 1)))
    alive = [rank for rank in range(size) if rank not in lost]
    if int(torch.tensor(new_mesh_shape).prod()) > len(alive):
        new_mesh_shape = (len(alive),)
    tensors = [(shape_of(rng), rng.choice(DTYPES)) for _ in range(6)]

    def program() -> str:
        own = random.Random(seed + 1)
        old_mesh = mesh_of(own, old_shape)
        ranks = torch.tensor(
            own.sample(alive, int(torch.tensor(new_mesh_shape).prod())), device="cpu"
        )
        old_specs = [spec_of(own, old_mesh, shape) for shape, _ in tensors]
        state: State = {}
        wholes: dict[str, torch.Tensor] = {}
        for i, ((shape, dtype), spec) in enumerate(zip(tensors, old_specs, strict=True)):
            whole = values_of(seed + i, shape, dtype).to(DEVICE)
            state[str(i)], wholes[str(i)] = (
                part_of(whole, Layout.of(old_mesh, spec, shape, dtype)),
                whole,
            )
        if current_world().rank in lost:
            return ""
        names = ("x", "y", "z")[: len(new_mesh_shape)]
        new_mesh = sm.DeviceMesh(DEVICE, ranks.reshape(new_mesh_shape), axis_names=names)
        like = {
            str(i): Layout.of(new_mesh, spec_of(own, new_mesh, shape), shape, dtype)
            for i, (shape, dtype) in enumerate(tensors)
        }
        missing = lost_elements(state, alive)
        try:
            result = recover(state, like, alive)
        except StateLostError as error:
            assert error.lost.keys() == missing.keys()
            return "lost"
        assert not missing
        assert_equals(result, wholes)
        return "recovered"

    outcomes = set(on_ranks(size, program)) - {""}
    assert len(outcomes) == 1


def part_of(whole: torch.Tensor, layout: Layout) -> ShardedTensor:
    """Return this rank's part, without communication; an empty one outside the mesh."""
    if layout.mesh.coordinate_of(current_world().rank) is None:
        return ShardedTensor._make_guarded(whole.new_empty((0,)), layout)
    return ShardedTensor._make_guarded(part_at_box(whole, layout).clone(), layout)


# -- what is state ---------------------------------------------------------------------------------


def everything(mesh: sm.DeviceMesh) -> State:
    state = fsdp(mesh)
    model, optimizer = state["model"], state["optimizer"]
    return {
        **state,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "scaler": sm.training.GradScaler(DEVICE),
        "average": sm.training.EMA(model, 0.5),
        "random": sm.checkpoint.RandomState(),
        "data": sm.training.DistributedSampler(range(100), mesh=mesh, axes="s"),
        "epoch": 0,
        "own": PerRank(current_world().rank),
    }


def test_everything_that_is_state():
    def program() -> None:
        rank = current_world().rank
        state = everything(mesh_over(range(4), (2, 2), "rs"))
        train(state, 3)
        state["schedule"].step()
        state["average"].update()
        state["scaler"].load_state_dict({**state["scaler"].state_dict(), "scale": 8.0})
        state["data"].advance(10)
        state["epoch"] = 3
        sm.random.manual_seed(7)
        expected = whole_values({key: state[key] for key in ("model", "optimizer", "average")})
        if rank == 2:
            return
        torch.manual_seed(100 + rank)
        state = without_stateful(state)  # what a job keeps of a version
        new_mesh = mesh_over([0, 1, 3], (3,), "s")
        drawn = torch.rand(3), sm.rand(3, device_mesh=new_mesh).full_tensor()
        like = everything(new_mesh)
        result = recover(state, like, [0, 1, 3])
        assert result["model"] is like["model"]
        assert_equals({key: result[key] for key in ("model", "optimizer", "average")}, expected)
        assert result["schedule"].last_epoch == 1
        assert result["optimizer"].param_groups[0]["lr"] == pytest.approx(0.01)
        assert result["scaler"].state_dict()["scale"] == 8.0
        assert result["data"].consumed == 10
        assert len(list(result["data"])) == 30
        assert (result["epoch"], result["own"]) == (3, rank)
        again = torch.rand(3), sm.rand(3, device_mesh=new_mesh).full_tensor()
        assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))

    on_ranks(4, program)


def test_an_optimizer_before_its_first_step():
    def program() -> None:
        state = fsdp(mesh_over(range(4), (2, 2), "rs"))
        expected = whole_values(state)
        if current_world().rank == 1:
            return
        like = fsdp(mesh_over([0, 2, 3], (3,), "s"))
        recover(state, like, [0, 2, 3])
        assert not like["optimizer"].state
        assert_equals(like, expected)
        train(like, 1)
        steps = {int(values["step"]) for values in like["optimizer"].state.values()}
        assert steps == {1}

    on_ranks(4, program)


def test_the_state_by_name():
    """`state_dict(model, optimizer)`, as for checkpoints."""

    def program() -> None:
        state = fsdp(mesh_over(range(4), (2, 2), "rs"))
        train(state)
        expected = whole_values(state)
        if current_world().rank == 0:
            return
        like = fsdp(mesh_over([1, 2, 3], (3,), "s"))
        train(like, 1)
        old, new = (sm.checkpoint.state_dict(s["model"], s["optimizer"]) for s in (state, like))
        result = recover(old, new, [1, 2, 3])
        sm.checkpoint.load_state_dict(like["model"], result, like["optimizer"])
        assert_equals(like, expected)

    on_ranks(4, program)


def test_survivors_in_another_world():
    """As processes that have built their groups anew: rank i was rank `alive[i]`."""

    def before() -> tuple[Any, dict[str, torch.Tensor]]:
        state = fsdp(mesh_over(range(4), (2, 2), "rs"))
        train(state)
        return without_stateful(state), whole_values(state)

    alive = [0, 2, 3]
    held = on_ranks(4, before)

    def after() -> None:
        state, expected = held[alive[current_world().rank]]
        like = fsdp(mesh_over(range(3), (3,), "s"))
        recover(state, like, alive)
        assert_equals(like, expected)

    on_ranks(3, after)


def recover_three_of_four() -> bool:
    state = fsdp(mesh_over(range(4), (2, 2), "rs"))
    train(state)
    expected = whole_values(state)
    if current_world().rank == 2:
        return False
    torch.manual_seed(1)
    like = fsdp(mesh_over([0, 1, 3], (3,), "s"))
    recover(state, like, [0, 1, 3])
    assert_equals(like, expected)
    return True


def test_on_processes(world4):
    """Over gloo, as if rank 2 were lost: it takes no part."""
    assert world4(recover_three_of_four) == [True, True, False, True]


def test_survivors_in_any_order():
    def program() -> None:
        state = fsdp(mesh_over(range(4), (2, 2), "rs"))
        train(state)
        expected = whole_values(state)
        if current_world().rank != 2:
            like = fsdp(mesh_over([3, 0, 1], (3,), "s"))
            recover(state, like, [3, 0, 1])
            assert_equals(like, expected)

    on_ranks(4, program)


def test_what_a_rank_holds_before_is_not_changed():
    def program() -> None:
        state = fsdp(mesh_over(range(4), (2, 2), "rs"))
        train(state)
        expected = whole_values(state)
        if current_world().rank != 3:
            like = ddp(mesh_over(range(3), (3,), "d"))
            recover(state, like, range(3))
            train(like)
            # every rank has all now; what it had before is as it was
            named = {
                name_of(p): x
                for p, x in leaves(without_stateful(state))
                if isinstance(x, torch.Tensor)
            }
            assert_equals_parts(named, expected)

    on_ranks(4, program)


def assert_equals_parts(
    tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    for name, leaf in tensors.items():
        if isinstance(leaf, ShardedTensor):
            assert bits_of(leaf._local) == bits_of(part_at_box(expected[name], leaf._layout))


# -- the plan --------------------------------------------------------------------------------------


def test_holders_share_the_sending():
    """Twelve tensors in two halves on three replicas, wanted whole."""

    def program() -> Any:
        old = mesh_over(range(6), (3, 2), "rs")
        state = {str(i): place(old, torch.ones(8, 8)).redistribute(P("s")) for i in range(12)}
        if current_world().rank == 5:
            return None
        new = mesh_over(range(5), (5,), "d")
        like = {name: Layout.of(new, P(), (8, 8)) for name in state}
        return plan_recovery(state, like, range(5)).bytes_sent()

    sent = on_ranks(6, program)[0]
    half = 4 * 8 * 4
    by_sender = {r: sum(n for pair, n in sent.items() if pair[0] == r) for r in range(5)}
    # ranks 0, 2, 4 have the first halves, which 1 and 3 lack; 1 and 3 have the second ones
    assert sum(by_sender.values()) == 12 * 5 * half
    assert [by_sender[r] for r in (0, 2, 4)] == [8 * half] * 3
    assert [by_sender[r] for r in (1, 3)] == [18 * half] * 2


def test_ranks_that_have_all_do_not_communicate_but_to_agree():
    def program() -> Any:
        state = ddp(mesh_over(range(4), (4,), "d"))
        train(state)
        if current_world().rank == 0:
            return None
        like = ddp(mesh_over([1, 2, 3], (3,), "d"))
        with collectives() as records:
            recover(state, like, [1, 2, 3])
        return len(records)

    assert on_ranks(4, program)[1:] == [1, 1, 1]


def test_text():
    def program() -> Any:
        old = mesh_over(range(4), (2, 2), "rs")
        x = place(old, torch.ones(8, 2)).redistribute(P("s"))
        y = place(old, torch.ones(4)).redistribute(P(("r", "s")))
        if current_world().rank == 2:
            return None
        new = mesh_over([0, 1, 3], (3,), "s")
        like = {"w": Layout.of(new, P("s"), (8, 2)), "b": Layout.of(new, P("s"), (4,))}
        plan = plan_recovery({"w": x, "b": y}, like, [0, 1, 3])
        with pytest.raises(StateLostError) as error:
            recover({"w": x, "b": y}, like, [0, 1, 3])
        return str(plan), str(error.value)

    texts = on_ranks(4, program)
    assert texts[0] == texts[1] == texts[3]
    plan, error = texts[0]
    assert plan.splitlines() == [
        "recovery of 2 tensors from 3 ranks; rank 2 lost",
        "rank  is now  bytes  receives  sends  from",
        "   0       0     32         4      8  1: 4",
        "   1       1     32        12      4  0: 8, 3: 4",
        "   3       3     16         0      4",
        "lost: b[2:3]",
    ]
    assert error.splitlines() == [
        "recover: 1 of 2 tensors have elements that only lost ranks held (rank 2); load the "
        "newest checkpoint, or replicate the state along another axis",
        "lost: b[2:3]",
    ]


# -- errors ----------------------------------------------------------------------------------------


def _two(program: Callable[[sm.DeviceMesh], Any]) -> list[Any]:
    return on_ranks(2, lambda: program(mesh_over(range(2), (2,), "d")))


def test_pending_values_are_refused():
    def program(mesh: sm.DeviceMesh) -> None:
        x = ShardedTensor.from_local(torch.ones(2), mesh, P(None, unreduced={"d"}), shape=(2,))
        with pytest.raises(ValueError, match=r"recover: 'x' is .* which is pending"):
            recover({"x": x}, {"x": Layout.of(mesh, P(), (2,))}, [0, 1])

    _two(program)


def test_ranks_that_do_not_fit_are_refused():
    def program(mesh: sm.DeviceMesh) -> None:
        state, like = {"x": place(mesh, torch.ones(2))}, {"x": Layout.of(mesh, P(), (2,))}
        with pytest.raises(ValueError, match=r"alive=\[0, 0\] must list .* once each"):
            recover(state, like, [0, 0])
        if current_world().rank == 1:
            with pytest.raises(ValueError, match=r"rank 1 is not in alive=\[0\]"):
                recover(state, like, [0])

    _two(program)


def test_other_names_and_shapes_are_refused():
    def program(mesh: sm.DeviceMesh) -> None:
        state = {"x": place(mesh, torch.ones(2))}
        with pytest.raises(ValueError, match="has no 'y'; it has"):
            recover(state, {"y": Layout.of(mesh, P(), (2,))}, [0, 1])
        with pytest.raises(ValueError, match=r"'x' is torch.float32\[3\] in like="):
            recover(state, {"x": Layout.of(mesh, P(), (3,))}, [0, 1])

    _two(program)


def test_different_trees_are_refused():
    def program(mesh: sm.DeviceMesh) -> None:
        names = ["x", "y"] if current_world().rank == 0 else ["x"]
        state = {name: place(mesh, torch.ones(2)) for name in ("x", "y")}
        like = {name: Layout.of(mesh, P(), (2,)) for name in names}
        with pytest.raises(CheckpointError, match="only rank 0 has 'y'"):
            recover(state, like, [0, 1])

    _two(program)
