"""The worker pool used by the other tests."""

import contextlib
import os
import signal
from multiprocessing import forkserver

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, WorkerError

pytestmark = pytest.mark.xdist_group("processes")


def total(x: float) -> tuple[int, float]:
    t = torch.full((3,), x + dist.get_rank())
    dist.all_reduce(t)
    return dist.get_rank(), t[0].item()


def raise_on(ranks: set[int]) -> None:
    if dist.get_rank() in ranks:
        raise KeyError(f"only {dist.get_rank()}")


def raise_before_barrier() -> None:
    raise_on({1})
    dist.barrier()


def kill_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def barrier_without(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


def destroy() -> None:
    dist.barrier()
    dist.destroy_process_group()


def unpicklable() -> None:
    class Local(Exception):
        pass

    raise Local("bad")


def open_files() -> list[int]:
    """Return the inodes of this process's open files."""
    inodes = []
    for number in range(1024):
        with contextlib.suppress(OSError):
            inodes.append(os.fstat(number).st_ino)
    return inodes


def own_variable_and_folder() -> tuple[str | None, str]:
    return os.environ.get("POOL_TEST"), os.getcwd()


def pids(pool: Pool) -> list[int]:
    return pool(os.getpid)


@pytest.fixture(scope="module")
def pool():
    """Two ranks of our own to break: it starts again after a test that broke it."""
    pool = Pool(2)
    yield pool
    pool.close()


def test_results_are_ordered_by_rank(world4):
    assert world4(total, 1.0) == [(r, 10.0) for r in range(4)]
    assert world4(os.getenv, "OMP_NUM_THREADS") == ["1"] * 4
    assert world4(os.getenv, "LOCAL_RANK") == ["0", "1", "2", "3"]
    assert world4(torch.get_num_threads) == [1] * 4


def test_ranks_have_several_hash_seeds(world4):
    """So that ranks which follow the order of a set do not agree by chance."""
    assert len(set(world4(hash, "a"))) > 1


def test_the_fork_server_ends_with_the_tests(world4):
    """No worker has a copy of the pipe whose end it reads when the test process has ended."""
    world4(os.getpid)
    if world4.device != "cpu":
        pytest.skip("workers that use CUDA are not forked")
    alive = os.fstat(forkserver._forkserver._forkserver_alive_fd).st_ino
    assert not any(alive in files for files in world4(open_files))


def test_workers_are_reused(world4):
    assert pids(world4) == pids(world4)


@pytest.mark.slow
def test_eight_workers(world8):
    assert world8(total, 0.0) == [(r, 28.0) for r in range(8)]


@pytest.mark.slow
def test_an_error_on_every_rank_keeps_the_pool(pool):
    before = pids(pool)
    with pytest.raises(KeyError, match="only") as caught:
        pool(raise_on, {0, 1})
    assert "rank 0 of 2" in caught.value.__notes__[0]
    assert "in raise_on" in caught.value.__notes__[0]
    assert pids(pool) == before


def test_an_error_on_one_rank_restarts_the_pool(pool):
    before = pids(pool)
    with pytest.raises(KeyError, match="only 1") as caught:
        pool(raise_before_barrier)
    assert caught.value.__notes__[0].startswith("rank 1 of 2 raised")
    assert "rank 0 of 2 did not return" in caught.value.__notes__[0]
    assert not set(pids(pool)) & set(before)
    assert pool(total, 0.0) == [(0, 1.0), (1, 1.0)]


def test_a_killed_rank_is_named(pool, monkeypatch, tmp_path):
    with pytest.raises(WorkerError, match=r"rank 1 of 2 died \(exit code -9\)"):
        pool(kill_on, 1)
    monkeypatch.setenv("POOL_TEST", "1")  # what the new workers have
    monkeypatch.chdir(tmp_path)
    assert pool(total, 0.0) == [(0, 1.0), (1, 1.0)]
    assert pool(own_variable_and_folder) == [("1", str(tmp_path))] * 2


def test_a_hang_shows_where(pool):
    pool(total, 0.0)  # the workers have imported this module
    with pytest.raises(WorkerError, match=r"(?s)rank 0 of 2 did not return.*in barrier_without"):
        pool(barrier_without, 1, timeout=2.0)


@pytest.mark.slow
def test_destroyed_group_is_restored(pool):
    before = pids(pool)
    pool(destroy)
    assert pool(total, 0.0) == [(0, 1.0), (1, 1.0)]
    assert pids(pool) == before


@pytest.mark.slow
def test_an_error_that_cannot_be_pickled(pool):
    with pytest.raises(WorkerError, match=r"Local: bad"):
        pool(unpicklable)
