"""How tests start ranks, and the fixtures for it.

    simulate     tests/sharding/ranks.py    threads of this process; the choice for everything that
                                            can be seen there, since a case takes milliseconds
    world4       tests/pool.py              gloo processes that live as long as the session: where
    world8                                  gloo, torch.distributed or processes matter
    forked       tests/forked.py            processes that end as those of a program do: ranks that
                                            die, hang, raise or exit, and what is left of them
    one_rank_job                            this process itself, as a job of one rank
    sm.launch, torchrun, python file.py     only for tests of launch, of commands and of examples

Ranks on several hosts are in `tests/multinode`, and programs with known faults in `tests/faults`,
which runs them with `forked`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.forked import Forked
from tests.pool import Pool

POOLS = frozenset({"world4", "world8"})  # fixtures that one worker of `pytest -n` has


@pytest.fixture(scope="session")
def world4() -> Iterator[Pool]:
    """Four gloo ranks in separate processes: `world4(fn, *args) -> [result by rank]`; started by
    the first call.
    """
    yield from _pool(4)


@pytest.fixture(scope="session")
def world8() -> Iterator[Pool]:
    """Eight gloo ranks, used like `world4`."""
    yield from _pool(8)


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Run jobs whose ranks start and end as programs do: `forked(program, 4) -> [how each
    ended]`.
    """
    with Forked() as forked:
        yield forked


@pytest.fixture
def one_rank_job() -> Iterator[None]:
    """End the job of one rank that the test starts, by a mesh outside of `simulate`."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """Fail the test that leaves this process in a job, in which all later tests would run."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test has started a job and not ended it: use the fixture `one_rank_job`")
