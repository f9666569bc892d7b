"""The simulated world: scheduling, per-rank state, and how a run ends."""

from __future__ import annotations

import contextvars
import copy
import os
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from shardmesh.mesh import (
    CollectiveMismatchError,
    DeadlockError,
    Group,
    MeshError,
    current_world,
    init_device_mesh,
    simulate,
)
from shardmesh.mesh.simulated import threads


def everyone() -> Group:
    return current_world().group(range(current_world().size))


def test_results_are_ordered_by_rank_and_arguments_are_passed() -> None:
    @simulate(3)
    def fn(a: int, *, b: int) -> tuple[int, int, int]:
        """Doc."""
        return current_world().rank, a, b

    assert fn(1, b=2) == [(0, 1, 2), (1, 1, 2), (2, 1, 2)]
    assert fn.__name__ == "fn"


def test_one_rank_runs_at_a_time_until_it_blocks() -> None:
    trace: list[tuple[str, int]] = []

    def fn() -> None:
        rank = current_world().rank
        trace.append(("a", rank))
        everyone().barrier()
        trace.append(("b", rank))

    simulate(3)(fn)()
    assert trace == [("a", 0), ("a", 1), ("a", 2), ("b", 2), ("b", 0), ("b", 1)]
    again, trace[:] = list(trace), []
    simulate(3)(fn)()
    assert trace == again


def test_without_a_gpu_the_device_guard_is_replaced_outside_of_the_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replaced: list[threading.Thread] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(
        torch._C,
        "_ensureCUDADeviceGuardSet",
        lambda: replaced.append(threading.current_thread()),
        raising=False,
    )
    threads._replace_device_guard.cache_clear()
    for _ in range(2):
        assert simulate(2)(lambda: list(replaced))() == [[threading.current_thread()]] * 2


def test_several_groups_overlap() -> None:
    def fn() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 3), axis_names=("a", "b"))
        x = torch.tensor(float(mesh.get_rank()))
        seen = []
        for axes in ("a", "b", ("a", "b"), "a"):
            mesh.group(axes).all_reduce(x)
            seen.append(x.item())
        return seen

    # over a: r%3 + r%3 + 3; over b: 3+5+7; over both: 6 * 15; over a: 2 * 90
    assert simulate(6)(fn)() == [[2.0 * (r % 3) + 3, 15.0, 90.0, 180.0] for r in range(6)]


def test_rank_may_run_ahead_in_another_group() -> None:
    def fn() -> int:
        world = current_world()
        if world.rank < 2:
            for _ in range(5):
                world.group([0, 1]).barrier()
        everyone().barrier()
        return world.rank

    assert simulate(4)(fn)() == [0, 1, 2, 3]


class AllReduce(torch.autograd.Function):
    """psum whose gradient is a psum too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.clone()
        everyone().all_reduce(y)
        return y

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        y = grads[0].clone()
        everyone().all_reduce(y)
        return y


def test_backward_communicates_too() -> None:
    def fn() -> list[float]:
        x = torch.ones(2, requires_grad=True)
        y = AllReduce.apply(x * (1 + current_world().rank))
        (y * (10 + current_world().rank)).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    assert simulate(2)(fn)() == [[21.0, 21.0], [42.0, 42.0]]


def test_buffers_that_require_grad_are_detached() -> None:
    def fn() -> Tensor:
        x, out = torch.ones(2, requires_grad=True), torch.zeros(4)
        everyone().all_gather(out, x)
        current_world().group([current_world().rank]).all_gather(x.detach().clone(), x)
        return out

    assert not any(out.requires_grad for out in simulate(2)(fn)())


def test_ranks_inherit_the_callers_modes() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    def fn() -> tuple[bool, bool, torch.dtype, int]:
        x = torch.ones(2, 2, requires_grad=True)
        everyone().all_reduce(x.detach())
        variable.set(variable.get() + 1)
        return (
            (x @ x).requires_grad,
            torch.is_inference_mode_enabled(),
            (x @ x).dtype,
            variable.get(),
        )

    assert simulate(2)(fn)() == [(True, False, torch.float32, 8)] * 2
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert simulate(2)(fn)() == [(False, False, torch.bfloat16, 8)] * 2
    with torch.inference_mode():
        assert simulate(2)(fn)() == [(False, True, torch.float32, 8)] * 2
    assert simulate(2)(torch.is_grad_enabled)() == [True, True]


def test_ranks_inherit_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert simulate(2)(lambda: torch.ones(1).dtype)() == [torch.float64] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def draws() -> list[float]:
    found = [torch.rand(()).item()]
    everyone().barrier()
    return [*found, torch.rand(()).item()]


def test_each_rank_has_its_own_random_state() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(()).item(), torch.rand(()).item()]
    after = torch.rand(()).item()
    torch.manual_seed(3)
    assert simulate(3)(draws)() == [expected] * 3
    assert torch.rand(()).item() == after

    def seeded() -> list[float]:
        torch.manual_seed(3)
        return draws()

    assert simulate(3)(seeded)() == [expected] * 3


def test_nested_simulations() -> None:
    def inner() -> int:
        x = torch.tensor(current_world().rank)
        everyone().all_reduce(x)
        return int(x)

    def outer() -> list[int]:
        everyone().barrier()
        found = simulate(3)(inner)()
        everyone().barrier()
        assert current_world().size == 2
        return found

    assert simulate(2)(outer)() == [[3, 3, 3]] * 2


def test_an_exception_ends_all_ranks_and_names_its_rank() -> None:
    ended = []

    def fn() -> None:
        try:
            if current_world().rank == 2:
                raise ZeroDivisionError("by me")
            try:
                everyone().barrier()
            except Exception:
                ended.append("a handler must not see the end of the run")
        finally:
            ended.append(current_world().rank)

    with pytest.raises(ZeroDivisionError, match="by me") as caught:
        simulate(4)(fn)()
    assert caught.value.__notes__ == ["raised on rank 2 of simulate(4)"]
    assert sorted(ended) == [0, 1, 2]  # rank 3 had not begun
    assert simulate(4)(lambda: current_world().rank)() == [0, 1, 2, 3]


def test_communicating_while_unwinding_raises() -> None:
    def fn() -> None:
        try:
            if current_world().rank == 0:
                raise KeyError("first")
            everyone().barrier()
        finally:
            everyone().barrier()

    with pytest.raises((KeyError, DeadlockError)):
        simulate(3)(fn)()


def test_exit_exceptions_propagate() -> None:
    def fn() -> None:
        everyone().barrier()
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        simulate(2)(fn)()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.all_reduce(torch.zeros(2 + g.rank)),
            r"ranks \[0\] call all_reduce\(sum, float32, 2 elements\)",
        ),
        (
            lambda g: g.all_reduce(torch.zeros(2), "sum" if g.rank else "max"),
            r"ranks \[1, 2\] call all_reduce\(sum",
        ),
        (
            lambda g: g.all_reduce(torch.zeros(2).to([torch.int32, torch.int64][g.rank % 2])),
            r"\[0, 2\].*int32",
        ),
        (
            lambda g: g.all_reduce(torch.zeros(2)) if g.rank else g.barrier(),
            r"ranks \[0\] call barrier\(\)",
        ),
        (lambda g: g.broadcast(torch.zeros(2), g.rank), "src=1"),
        (
            lambda g: g.all_to_all(
                torch.zeros(3), torch.zeros(3 + g.rank), [1, 1, 1], [1, 1, 1 + g.rank]
            ),
            "rank 1 sends 2 elements to rank 2, which expects 1",
        ),
    ],
)
def test_mismatched_collectives_raise_on_all_ranks(call: object, message: str) -> None:
    seen = []

    def fn() -> None:
        with pytest.raises(CollectiveMismatchError, match=message) as caught:
            call(everyone())  # type: ignore[operator]
        seen.append(str(caught.value))
        everyone().barrier()

    simulate(3)(fn)()
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_waiting_for_a_finished_rank_raises() -> None:
    def fn() -> None:
        if current_world().rank != 1:
            everyone().all_reduce(torch.zeros(4))

    with pytest.raises(DeadlockError) as caught:
        simulate(3)(fn)()
    text = str(caught.value)
    assert (
        r"rank 0 waits in all_reduce(sum, float32, 4 elements) over ranks (0, 1, 2) for ranks [1]"
        in text
    )
    assert "rank 2 waits in" in text
    assert "ranks [1] have finished" in text


def test_deadlock_across_two_groups_raises() -> None:
    def fn() -> None:
        world = current_world()
        (world.group([0, 1]) if world.rank == 0 else everyone()).barrier()

    with pytest.raises(
        DeadlockError, match=r"rank 0 waits in barrier\(\) over ranks \(0, 1\) for ranks \[1\]"
    ):
        simulate(3)(fn)()


def test_ctrl_c_ends_a_running_rank() -> None:
    stopped = threading.Event()

    def fn() -> None:
        if current_world().rank == 0:
            everyone().barrier()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            while True:
                time.sleep(0.01)
        finally:
            stopped.set()

    with pytest.raises(KeyboardInterrupt):
        simulate(2)(fn)()
    assert stopped.wait(5)
    assert simulate(2)(lambda: 1)() == [1, 1]


def test_nothing_is_kept_after_a_run() -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    simulate(2)(lambda t: None)(thing)
    del thing
    for _ in range(100):
        if gone() is None:
            break
        time.sleep(0.01)  # a worker may still be on its way back to its gate
    assert gone() is None


def test_meshes_compare_across_ranks() -> None:
    def fn() -> object:
        return init_device_mesh("cpu", (2,), axis_names=("a",))

    first, second = simulate(2)(fn)()
    assert first is not second
    assert first == second
    assert hash(first) == hash(second)
    assert copy.deepcopy(first) is first


@pytest.mark.parametrize("n", [0, -1, 2.5, "4"])
def test_invalid_sizes_raise(n: object) -> None:
    with pytest.raises(MeshError, match="number of ranks"):
        simulate(n)  # type: ignore[arg-type]
