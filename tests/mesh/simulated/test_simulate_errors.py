"""Errors of simulated runs: each rank's line and a short traceback; the next run works."""

from __future__ import annotations

import re
import traceback

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh import CollectiveMismatchError, DeadlockError, Group, current_world, simulate


def everyone() -> Group:
    return current_world().group(range(current_world().size))


def line(fn: object, offset: int) -> str:
    return f"{__file__}:{fn.__code__.co_firstlineno + offset}"  # type: ignore[attr-defined]


def unwrapped(text: str) -> list[str]:
    """Return the logical lines of an error, with wrapped lines joined."""
    assert all(len(line) <= 120 or " " not in line.strip() for line in text.splitlines())
    return text.replace("\n      ", " ").splitlines()


def test_a_deadlock_shows_each_ranks_line() -> None:
    def fn() -> None:
        x = torch.zeros(4)
        if current_world().rank == 0:
            current_world().group([0, 1]).all_reduce(x)
        elif current_world().rank == 1:
            everyone().barrier()
        else:
            pass

    with pytest.raises(DeadlockError) as caught:
        simulate(3)(fn)()
    assert unwrapped(str(caught.value))[2:] == [
        "  rank 0 waits in all_reduce(sum, float32, 4 elements) over ranks (0, 1) for ranks [1] at "
        f"{line(fn, 3)}",
        f"  rank 1 waits in barrier() over ranks (0, 1, 2) for ranks [0, 2] at {line(fn, 5)}",
        "  ranks [2] have finished",
    ]


def test_a_mismatch_shows_each_ranks_line() -> None:
    def fn() -> None:
        if current_world().rank == 1:
            everyone().barrier()
        else:
            everyone().all_reduce(torch.zeros(3))

    with pytest.raises(CollectiveMismatchError) as caught:
        simulate(3)(fn)()
    assert unwrapped(str(caught.value)) == [
        "ranks call different collectives in the group of ranks (0, 1, 2); outlier: rank 1.",
        "Call the same collectives in the same order on every rank of the group.",
        f"  ranks [0, 2] call all_reduce(sum, float32, 3 elements) at {line(fn, 4)}",
        f"  ranks [1] call barrier() at {line(fn, 2)}",
    ]
    assert caught.value.ranks == (1,)


def test_same_call_at_different_lines_is_distinguished() -> None:
    def fn() -> None:
        if current_world().rank == 0:
            everyone().barrier()
        everyone().broadcast(torch.zeros(1), 0) if current_world().rank == 2 else None
        everyone().barrier()

    with pytest.raises(CollectiveMismatchError) as caught:
        simulate(3)(fn)()
    for text in (
        f"ranks [0] call barrier() at {line(fn, 2)}",
        f"ranks [1] call barrier() at {line(fn, 4)}",
    ):
        assert text in str(caught.value)


def test_error_shows_the_users_line_at_any_depth() -> None:
    def fn() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
        w = sm.device_put(torch.ones(4, 4), mesh, sm.P("a")).requires_grad_()
        loss = (w.redistribute(sm.P()) ** 2).sum()
        if mesh.get_rank() == 0:
            loss.backward()

    with pytest.raises(DeadlockError, match=re.escape(f"at {line(fn, 5)}")):
        simulate(2)(fn)()


def test_groups_of_many_ranks_are_shortened() -> None:
    with pytest.raises(DeadlockError) as caught:
        simulate(20)(lambda: current_world().rank and everyone().barrier())()
    group = "over ranks (0, 1, 2, 3, 4, 5, 6, 7, ... 20 ranks)"
    assert f"rank 19 waits in barrier() {group} for ranks [0]" in str(caught.value)
    assert str(caught.value).count("waits in") == 19


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_traceback_spans_from_the_call_to_the_users_line() -> None:
    def fn() -> None:
        everyone().barrier()
        if current_world().rank == 1:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        simulate(2)(fn)()
    ours = simulate.__code__.co_filename
    assert files(caught.value) == [__file__, ours, __file__]
    assert caught.value.__context__ is None
    assert caught.value.__notes__ == ["raised on rank 1 of simulate(2)"]


@pytest.mark.parametrize("op", ["barrier", "all_gather_object"])
def test_errors_that_name_lines_hide_library_frames(op: str) -> None:
    def fn() -> None:
        if current_world().rank == 0:
            getattr(everyone(), op)(*([1] if op == "all_gather_object" else []))

    with pytest.raises(DeadlockError) as caught:
        simulate(2)(fn)()
    assert files(caught.value) == [__file__, simulate.__code__.co_filename, __file__]


def test_ranks_have_separate_tracebacks() -> None:
    def fn() -> list[str]:
        try:
            everyone().all_reduce(torch.zeros(1 + current_world().rank))
        except CollectiveMismatchError as error:
            return [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        return []

    first, *others = simulate(3)(fn)()
    assert first.count("fn") == 1
    assert all(names == first for names in others)


def test_invalid_call_raises_at_the_users_line() -> None:
    with pytest.raises(TypeError, match="argument"):
        simulate(2)(lambda x: x)()  # type: ignore[call-arg]


def test_the_generator_is_rank_0s_after_a_failure() -> None:
    def fn() -> None:
        torch.rand(2)
        everyone().barrier()
        torch.rand(5 * current_world().rank)
        everyone().barrier()
        if current_world().rank == 2:
            raise ValueError("mine")
        everyone().barrier()

    torch.manual_seed(5)
    torch.rand(2)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="mine"):
        simulate(3)(fn)()
    assert torch.equal(torch.rand(3), expected)


def test_runs_after_failures() -> None:
    def fails(kind: int) -> None:
        if kind == 0:
            raise ValueError("mine")
        if kind == 1 and current_world().rank:
            everyone().barrier()
        everyone().all_reduce(torch.zeros(1 + current_world().rank * kind))

    def sums() -> float:
        x = torch.ones(1)
        everyone().all_reduce(x)
        return x.item()

    for kind in (0, 1, 2, 0):
        with pytest.raises((ValueError, DeadlockError, CollectiveMismatchError)):
            simulate(4)(fails)(kind)
        assert simulate(4)(sums)() == [4.0] * 4
        assert simulate(6)(sums)() == [6.0] * 6
