"""Configuration of all tests: the device, marks, and the fixtures of `tests/ranks.py`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from shardmesh.mesh.monitor.recording.cleanup import remove_left
from shardmesh.mesh.monitor.recording.files import parent_folders
from tests import device, tiers
from tests.ranks import POOLS, forked, no_job_is_left, one_rank_job, world4, world8  # noqa: F401

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # set by shells for background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)  # for the tests of Ctrl-C

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the first kernel is defined

gc.disable()  # until all tests are collected: see `pytest_collection_finish`

torch.set_num_threads(1)  # tensors are small, and worker processes share the cores

# No deadline: a busy machine must not fail a test.
hypothesis.settings.register_profile(
    "thorough",
    max_examples=tiers.THOROUGH,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
for profile, examples in (("shardmesh", 10), ("few", 5)):
    hypothesis.settings.register_profile(
        profile, parent=hypothesis.settings.get_profile("thorough"), max_examples=examples
    )
hypothesis.settings.load_profile("shardmesh")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cpu",
        help="device of the tests' meshes and tensors: cpu (the default) or cuda",
    )
    parser.addoption(
        "--world",
        choices=["nccl", "nccl-waits"],
        help="let simulated ranks behave like NCCL's: mesh/simulated/nccl_world.py",
    )
    parser.addoption(
        "--faults",
        default="20",
        help="how many jobs with random faults the tests run, or from and to which seed: 100:600",
    )


def pytest_configure(config: pytest.Config) -> None:
    device.choose(config.getoption("--device"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Delete what the jobs of tests that kill ranks have left in shared memory, once all workers of
    `pytest -n` have ended.
    """
    if not hasattr(config, "workerinput"):
        for _ in remove_left(parent_folders()):
            pass


@pytest.fixture(scope="session", autouse=True)
def world_of_simulated_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """The world that `pytest --world` asks for."""
    world = request.config.getoption("--world")
    if world is None:
        yield
        return
    from tests.mesh.simulated.nccl_world import nccl_world

    with nccl_world(ahead=world == "nccl"):
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep millions of objects of modules and collected tests out of every later garbage
    collection, which would take seconds; of those that tests import, in all but a few collections.
    """
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if POOLS & fixtures:
            item.add_marker(pytest.mark.xdist_group("processes"))
        elif "forked" in fixtures and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("forked"))
    tiers.add_marks(items)
    if hasattr(config, "workerinput"):  # of `pytest -n`
        tiers.longest_first(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
