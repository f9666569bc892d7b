"""reached_preemption: all ranks stop in the same step, whichever gets the notice, and none waits
forever.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from shardmesh.mesh import current_world, simulate
from shardmesh.mesh.launch import preemption
from shardmesh.mesh.launch.preemption import _StoreAgreement, ending_in_order, reached_preemption
from shardmesh.mesh.monitor.store_keys import StoreKeys
from tests.pool import Pool

LIMIT_S = 60.0


def keys_of(store: Any) -> StoreKeys:
    return StoreKeys(store, "preemption")


def forget_everything() -> None:
    """Reset the process to its state before the first call."""
    preemption.forget(current_world())
    preemption._notice, preemption._is_listening = "", False
    preemption._reset(signal.SIGTERM)


@pytest.fixture(autouse=True)
def _clean():
    yield
    forget_everything()


# --------------------------------------------------------------- ranks as threads, random schedules


class PreemptedJob:
    """Ranks that step, synchronize now and then as in collectives, and receive the notice at some
    moment.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.size = rng.randint(2, 5)
        self.every = rng.choice([1, 1, 2, 5])
        self.gap = rng.choice([1, 10])
        self.pace = [rng.choice([0.0, 0.001, 0.004]) for _ in range(self.size)]
        noticed = rng.sample(range(self.size), rng.randint(1, min(2, self.size)))
        self.notice_after = {rank: rng.uniform(0.0, 0.06) for rank in noticed}
        self.barrier = threading.Barrier(self.size, timeout=LIMIT_S)
        self.began = time.monotonic()
        self.stopped: list[int | None] = [None] * self.size
        self.steps: list[list[int]] = [[] for _ in range(self.size)]
        store = HashStore()
        self.parts = [
            _StoreAgreement(keys_of(store), r, self.size, self.has_notice(r), lambda: None)
            for r in range(self.size)
        ]

    def has_notice(self, rank: int):
        after = self.notice_after.get(rank, float("inf"))
        return lambda: time.monotonic() - self.began > after

    def run_rank(self, rank: int) -> None:
        for step in range(0, 20_000 * self.gap, self.gap):
            if self.parts[rank].begin_step(rank, step):
                self.stopped[rank] = step
                return
            self.steps[rank].append(step)
            time.sleep(self.pace[rank])
            if step % (self.every * self.gap) == 0:
                self.barrier.wait()

    def run(self) -> None:
        threads = [
            threading.Thread(target=self.run_rank, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        for part in self.parts:
            part.stop()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", range(25))
def test_all_ranks_stop_in_the_same_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_NOTICE_POLL_S", 0.02)
    job = PreemptedJob(seed)
    job.run()
    assert job.stopped[0] is not None
    assert job.stopped == [job.stopped[0]] * job.size
    assert job.steps == [job.steps[0]] * job.size


def test_rank_that_never_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_STEP_TIMEOUT_S", 0.1)
    part = _StoreAgreement(keys_of(HashStore()), 0, 3, lambda: True, lambda: None)
    part.begin_step(0, 1)
    with pytest.raises(RuntimeError, match="ranks 1, 2 have not called it"):
        for _ in range(int(LIMIT_S / 0.01)):
            time.sleep(0.01)
            part.begin_step(0, 1)
    part.stop()


def test_waiting_ranks_raise_when_the_job_fails() -> None:
    def check() -> None:
        raise ConnectionError("rank 1 died")

    part = _StoreAgreement(keys_of(HashStore()), 0, 2, lambda: True, check)
    with pytest.raises(ConnectionError, match="rank 1 died"):
        for _ in range(int(LIMIT_S / 0.01)):
            time.sleep(0.01)
            part.begin_step(0, 1)
    part.stop()


def test_a_job_that_fails_is_not_preempted(caplog: pytest.LogCaptureFixture) -> None:
    """torchrun sends SIGTERM to the other ranks when one has died, which may be seen a little after
    the signal.
    """
    looks = 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise ConnectionError("rank 1 died")

    store = HashStore()
    part = _StoreAgreement(keys_of(store), 0, 2, lambda: True, check)
    with pytest.raises(ConnectionError, match="rank 1 died"):
        for _ in range(int(LIMIT_S / 0.01)):
            time.sleep(0.01)
            part.begin_step(0, 1)
    part.stop()
    assert "preempted" not in caplog.text
    assert not keys_of(store).has("notice")  # the other ranks see for themselves


def test_without_a_notice_calls_do_not_communicate() -> None:
    class Counting:
        asked = 0

        def check(self, keys: list[str]) -> bool:
            self.asked += 1
            return False

    store = Counting()
    part = _StoreAgreement(keys_of(store), 0, 2, lambda: False, lambda: None)
    assert not any(part.begin_step(0, step) for step in range(10_000))
    assert store.asked <= 1 + 10  # once a second, on a machine that may be very slow
    part.stop()


# ------------------------------------------------------------------------- one process, and signals


def test_sigterm_is_a_notice_after_the_first_call() -> None:
    assert [reached_preemption(step) for step in (0, 10)] == [False, False]
    os.kill(os.getpid(), signal.SIGTERM)
    assert [reached_preemption(step) for step in (20, 30)] == [True, True]


def test_the_programs_own_handler_is_still_called() -> None:
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: called.append(number))
    reached_preemption(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert reached_preemption(1)
    assert called == [signal.SIGTERM]


def test_a_file_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMESH_PREEMPTION_FILE", str(tmp_path / "soon"))
    assert not reached_preemption(0)
    (tmp_path / "soon").touch()
    assert reached_preemption(1)


def test_steps_must_increase() -> None:
    reached_preemption(99)
    with pytest.raises(
        ValueError,
        match=r"reached_preemption\(0\) after reached_preemption\(99\): step must not decrease",
    ):
        reached_preemption(0)


def stop_where() -> int:
    """Return the step in which a simulated rank stops; the notice comes while ranks are in
    different steps.
    """
    world = current_world()
    for step in range(100):
        if reached_preemption(step):
            return step
        if step == 20 + world.rank:
            preemption._notice = "test"
        if step % 10 == 9:
            world.group(range(world.size)).barrier()
    return -1


def test_simulated_ranks_stop_in_the_same_step() -> None:
    assert len(set(simulate(4)(stop_where)())) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_raises_system_exit(
    number: signal.Signals, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    of_the_run = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP
    try:
        with pytest.raises(SystemExit) as caught, ending_in_order():
            os.kill(os.getpid(), number)
            time.sleep(LIMIT_S)
        assert caught.value.code == code
        assert f"shardmesh: {number.name}: ends with code {code}" in capfd.readouterr().err
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, of_the_run)


def test_nohup_is_left_alone() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_in_order():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_forked_children_can_be_terminated() -> None:
    """As a DataLoader does with its workers."""
    program = (
        "import os, signal, time\n"
        "from shardmesh.mesh.launch.preemption import reached_preemption\n"
        "reached_preemption(0)\n"
        "ready, tell = os.pipe()\n"
        "child = os.fork()\n"
        "if child == 0:\n    os.write(tell, b'1'); time.sleep(60); os._exit(1)\n"
        "os.read(ready, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print(os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == str(int(signal.SIGTERM)), done.stderr


# ----------------------------------------------------------------------------------- real processes


def train(noticed: int, steps: int) -> tuple[int, float]:
    """Send SIGTERM to one rank in the middle of a step; return the step in which this rank stops,
    and its last reduction.
    """
    world = current_world()
    group, total = world.group(range(world.size)), torch.zeros(1)
    try:
        for step in range(steps):
            if reached_preemption(step):
                return step, total.item()
            if step == 5 and world.rank == noticed:
                os.kill(os.getpid(), signal.SIGTERM)
            x = torch.ones(1)
            group.all_reduce(x)
            total += x
            time.sleep(0.002 * world.rank)
        return -1, 0.0
    finally:
        forget_everything()


def test_notice_on_one_rank_stops_all_processes(world4: Pool) -> None:
    found = world4(train, 2, 5000)
    step = found[0][0]
    assert step > 5
    assert found == [(step, 4.0 * step)] * 4
