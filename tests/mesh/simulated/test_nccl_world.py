"""The world that behaves like NCCL: correct programs pass, and each way to use memory too early
fails at its line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh import errors
from shardmesh.mesh.comm import pending
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.group import Group
from shardmesh.mesh.simulated.simulate import SimulatedWorld
from tests.mesh.simulated.late_memory import StreamHazard
from tests.mesh.simulated.nccl_world import LateGroup, nccl_world


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with nccl_world():
        yield


def everyone() -> Group:
    world = current_world()
    return world.group(range(world.size))


def own(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32) + current_world().rank


def hazard(
    program: Callable[[], Any], ranks: int = 2, *, line: str = "# here", ahead: bool = True
) -> str:
    """Return the text of the hazard in this program, which must name the line with that comment."""
    with nccl_world(ahead), pytest.raises(StreamHazard) as caught:
        sm.simulate(ranks)(program)()
    lines, first = inspect.getsourcelines(program)
    (number,) = (first + i for i, text in enumerate(lines) if line in text)
    assert f"{__file__}:{number}" in str(caught.value)
    return str(caught.value)


# -- correct programs ------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
def test_collectives_return_what_they_should(ahead: bool, async_op: bool) -> None:
    def program() -> list[list[float]]:
        group, rank, found = everyone(), current_world().rank, []

        def call(name: str, *args: Any, **kwargs: Any) -> None:
            work = getattr(group, name)(*args, async_op=async_op, **kwargs)
            if async_op:
                work.wait()
                work.wait()
            found.append(args[0])

        call("all_gather", torch.empty(4), own(1, 2))
        call("reduce_scatter", torch.empty(1), own(1, 2))
        call("all_reduce", own(1, 2), "max")
        call("all_reduce", own(1, 2) > 2, "max")
        call("all_to_all", torch.empty(2), own(1, 2))
        call("all_to_all", torch.empty(2 * rank), own(1), [rank, rank], [0, 1])
        call("broadcast", own(1, 2), 1)
        call(
            "permute",
            torch.zeros(2),
            own(1, 2),
            dst=1 if rank == 0 else None,
            src=0 if rank == 1 else None,
        )
        group.barrier()
        assert group.all_gather_object(rank) == [0, 1]
        return [x.tolist() for x in found]

    with nccl_world(ahead):
        found = sm.simulate(2)(program)()
    assert found[0] == [[1, 2, 2, 3], [3], [2, 3], [False, True], [1, 2], [], [2, 3], [0, 0]]
    assert found[1] == [[1, 2, 2, 3], [5], [2, 3], [False, True], [2, 3], [1, 2], [2, 3], [1, 2]]


@pytest.mark.parametrize("ahead", [False, True])
def test_messages(ahead: bool) -> None:
    """Each direction has an order of its own; the second message is sent before it is posted."""

    def program() -> list[float]:
        group, rank = everyone(), current_world().rank
        received = torch.empty(2, 2)
        posted = [group.receive(received[0], 1 - rank)]
        sent = [group.send(own(1, 2), 1 - rank), group.send(own(3, 4), 1 - rank)]
        posted.append(group.receive(received[1], 1 - rank))
        for work in (*posted, *sent):
            work.wait()
        return received.flatten().tolist()

    with nccl_world(ahead):
        assert sm.simulate(2)(program)() == [[2, 3, 4, 5], [1, 2, 3, 4]]


def test_messages_before_wait() -> None:
    def reads() -> None:
        out = torch.zeros(2)
        group, rank = everyone(), current_world().rank
        work = group.receive(out, 0) if rank else group.send(own(1, 2), 1)
        out.sum()
        work.wait()

    def writes() -> None:
        x = torch.zeros(2)
        group, rank = everyone(), current_world().rank
        work = group.receive(torch.empty(2), 0) if rank else group.send(x, 1)
        x.add_(1)
        work.wait()

    for program, verb in ((reads, "reads the result"), (writes, "writes to the input")):
        with nccl_world(), pytest.raises(StreamHazard, match=verb):
            sm.simulate(2)(program)()


def test_collectives_in_place() -> None:
    def program() -> tuple[list[float], list[float]]:
        group, rank = everyone(), current_world().rank
        whole, parts = own(1, 2), own(1, 2)
        group.all_gather(whole, whole[rank : rank + 1])
        group.reduce_scatter(parts[rank : rank + 1], parts)
        return whole.tolist(), parts[rank : rank + 1].tolist()

    assert sm.simulate(2)(program)() == [([1, 3], [3]), ([1, 3], [5])]


def test_hosts_run_ahead_until_a_result_is_needed() -> None:
    events: list[str] = []

    def program() -> None:
        group, rank, x = everyone(), current_world().rank, own(1)
        group.all_reduce(x)
        group.all_reduce(x.view(1, 1))  # needs x
        events.append(f"{rank} runs")
        y = own(2)
        group.all_reduce(y)
        events.append(f"{rank} runs on")
        group.barrier()
        events.append(f"{rank} has met the others")
        y.add_(1)

    sm.simulate(2)(program)()
    assert events[:2] == ["1 runs", "1 runs on"]
    assert sorted(events[2:4]) == ["0 runs", "0 runs on"]
    assert all("met" in event for event in events[4:])


def test_works_of_different_groups_are_waited_for_in_any_order() -> None:
    def program() -> list[float]:
        world = current_world()
        groups = (
            [world.group((0, 1, 2)), world.group((0, 1))]
            if world.rank < 2
            else [world.group((0, 1, 2))]
        )
        xs = [own(1) for _ in groups]
        works: Any = [
            group.all_reduce(x, async_op=True) for group, x in zip(groups, xs, strict=True)
        ]
        for work in reversed(works) if world.rank else works:
            work.wait()
        return [x.item() for x in xs]

    assert sm.simulate(3)(program)() == [[6, 3], [6, 3], [6]]


def test_results_are_there_when_the_program_has_ended() -> None:
    def program() -> Tensor:
        x = own(1)
        everyone().all_reduce(x)
        return x

    assert torch.stack(sm.simulate(2)(program)()).tolist() == [[3], [3]]


def test_only_this_world_is_changed() -> None:
    def program() -> bool:
        return isinstance(everyone(), LateGroup)

    assert sm.simulate(2)(program)() == [True, True]
    make = SimulatedWorld._make_group
    with nccl_world():
        assert SimulatedWorld._make_group is make
    assert SimulatedWorld._make_group is make


# -- hazards ---------------------------------------------------------------------------------------


def test_a_result_read_too_early() -> None:
    def program() -> None:
        out = torch.empty(4)
        work: Any = everyone().all_gather(out, own(1, 2), async_op=True)
        out[2:].add(1)  # here
        work.wait()

    text = hazard(program)
    assert (
        "rank 0: aten.add.Tensor reads the result of all_gather(float32, 2 elements) over ranks "
        "(0, 1)" in text
    )


@pytest.mark.parametrize("read", ["item", "tolist", "numpy"])
def test_a_result_that_the_host_reads_too_early(read: str) -> None:
    def program() -> None:
        x = own(1)
        work: Any = everyone().all_reduce(x, async_op=True)
        getattr(x, read)()  # here
        work.wait()

    assert "reads the result of all_reduce" in hazard(program)


def test_an_input_overwritten_too_early() -> None:
    def program() -> None:
        x, out = own(1, 2), torch.empty(4)
        work: Any = everyone().all_gather(out, x, async_op=True)
        x + 1  # may be read
        x.view(2, 1)[1].zero_()  # here
        work.wait()

    assert "aten.zero_.default writes to the input of all_gather" in hazard(program)


def test_a_buffer_of_two_collectives_under_way() -> None:
    def program() -> None:
        x = own(1, 2)
        works: Any = [everyone().all_reduce(x, async_op=True) for _ in "12"]  # here
        for work in works:
            work.wait()

    assert "all_reduce(sum, float32, 2 elements) writes to the result of all_reduce" in hazard(
        program
    )


@pytest.mark.parametrize("ahead", [True, False])
def test_memory_written_without_an_operator(ahead: bool) -> None:
    def program() -> None:
        x, out = own(1, 2), torch.empty(4)
        memory = x.numpy()
        work: Any = everyone().all_gather(out, x, async_op=True)  # here
        memory[1] = 5
        work.wait()

    assert "was written to before wait()" in hazard(program, ahead=ahead)


@pytest.mark.parametrize("which", ["input", "result"])
def test_memory_freed_too_early(which: str) -> None:
    def program() -> None:
        buffers = {"input": own(1, 2), "result": torch.empty(4)}
        x, out = buffers["input"], buffers["result"]
        work: Any = everyone().all_gather(out, x, async_op=True)  # here
        del x, out
        buffers[which].untyped_storage().resize_(0)
        work.wait()

    assert f"the {which} of all_gather" in (text := hazard(program))
    assert "was freed before wait()" in text


def test_a_work_that_is_dropped() -> None:
    def program() -> None:
        everyone().all_reduce(own(1), async_op=True)  # here

    assert "nobody waited for all_reduce" in hazard(program)


def test_a_work_that_an_exception_cuts_off() -> None:
    def program() -> None:
        with pytest.raises(KeyError):
            everyone().all_reduce(own(1), async_op=True) and {}["missing"]

    sm.simulate(2)(program)()


def test_a_collective_is_no_barrier_of_hosts() -> None:
    """Rank 1 reads what rank 0 has not written: an all_reduce orders what streams do."""
    files: list[int] = []

    def program(wait: Callable[[Group], object]) -> int:
        if current_world().rank == 1:
            files.append(0)
        wait(everyone())
        return len(files)

    with pytest.raises(AssertionError):
        assert sm.simulate(2)(program)(lambda group: group.all_reduce(torch.ones(1))) == [1, 1]
    files.clear()
    assert sm.simulate(2)(program)(Group.barrier) == [1, 1]


def test_new_memory_is_poison() -> None:
    def program() -> None:
        assert torch.empty(3).isnan().all()
        assert (torch.zeros(3, dtype=torch.int64).new_empty(2) < -(2**60)).all()

    sm.simulate(1)(program)()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int32, torch.uint8],
)
def test_early_reads_find_poison_where_operators_are_not_looked_at(dtype: torch.dtype) -> None:
    def program() -> bool:
        x, out = torch.ones(2).to(dtype), torch.ones(4).to(dtype)
        work: Any = everyone().all_gather(out, x, async_op=True)
        found = bool((out.to(torch.complex128) == 1).any())
        work.wait()
        assert (out.to(torch.complex128) == 1).all()
        return found

    with nccl_world(ahead=False):
        assert sm.simulate(2)(program)() == [False, False]


# -- calls that differ -----------------------------------------------------------------------------


def test_ranks_that_call_different_collectives() -> None:
    def program() -> None:
        group, rank, x = everyone(), current_world().rank, own(1, 2)
        if rank == 0:
            group.all_reduce(x)
        else:
            group.all_gather(torch.empty(4), x)
        x.add_(1)

    with pytest.raises(
        errors.CollectiveMismatchError, match=r"ranks \[1\] call all_gather\(float32, 2 elements\)"
    ):
        sm.simulate(2)(program)()


def test_asynchronous_calls_in_another_order() -> None:
    def program() -> None:
        xs = [own(1), own(1, 2)]
        for work in [
            everyone().all_reduce(x, async_op=True)
            for x in (xs if current_world().rank else xs[::-1])
        ]:
            work.wait()  # type: ignore[union-attr]

    with pytest.raises(errors.CollectiveMismatchError, match="1 elements"):
        sm.simulate(2)(program)()


def test_a_rank_that_calls_less() -> None:
    def program() -> None:
        x = own(1)
        for _ in range(2 - current_world().rank):
            everyone().all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
        x.item()

    with pytest.raises(
        errors.DeadlockError, match=r"rank 0 waits in all_reduce\(.*for ranks \[1\]"
    ):
        sm.simulate(2)(program)()


# -- the library without its waits -----------------------------------------------------------------


def redistribution() -> None:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
    x = sm.device_put(torch.arange(6.0), mesh, sm.P("a"))
    coming = x.redistribute(sm.P(), async_op=True)
    (coming.wait() * 2).to_local()


def training() -> None:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
    model = sm.parallel.fully_shard(torch.nn.Linear(4, 2), mesh)
    model(torch.ones(3, 4)).sum().backward()
    for x in model.parameters():
        x.grad.to_local() + 1  # type: ignore[union-attr]


@pytest.mark.parametrize("program", [redistribution, training])
def test_a_missing_wait_in_the_library(
    program: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sm.simulate(2)(program)()
    monkeypatch.setattr(pending, "_wait_and_finish", lambda work, finish: finish())
    with pytest.raises(StreamHazard, match=r"reads the result of .* called at .*/sharding/"):
        sm.simulate(2)(program)()


def test_a_buffer_that_the_library_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    sm.simulate(2)(redistribution)()
    gather = Group.all_gather

    def reusing(self: Any, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(self, out, x, *args, **kwargs)
        x.zero_()
        return work

    monkeypatch.setattr(Group, "all_gather", reusing)
    with pytest.raises(StreamHazard, match="writes to the input of all_gather"):
        sm.simulate(2)(redistribution)()
