"""Fixtures for all tests: pools of worker processes, where tensors lie, and what a test without a GPU skips."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import device, tiers
from tests.pool import Pool

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell does to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the tests of Ctrl-C would wait for ever

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for the kernels; read when the first of them is defined

gc.disable()  # until all tests are collected: see `pytest_collection_finish`

torch.set_num_threads(1)  # small tensors, and worker processes beside us

# No deadline: a machine that is busy with other things must not fail a test.
hypothesis.settings.register_profile(
    "thorough",
    max_examples=tiers.THOROUGH,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
for profile, examples in (("shardmesh", 15), ("few", 5)):
    hypothesis.settings.register_profile(profile, parent=hypothesis.settings.get_profile("thorough"), max_examples=examples)
hypothesis.settings.load_profile("shardmesh")


@pytest.fixture(scope="session")
def world4() -> Iterator[Pool]:
    """Four gloo ranks in processes of their own: `world4(fn, *args) -> [result by rank]`; started by the first call."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def world8() -> Iterator[Pool]:
    """Eight gloo ranks, as `world4`."""
    yield from _pool(8)


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.close()


class RootIsNoTestPackage:
    """The root's `__init__.py` is that of `shardmesh`: pytest must not import it, under the directory's name, too."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == Path(__file__).parents[1] else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where meshes and tensors of tests lie: cpu (the default) or cuda")


def pytest_configure(config: pytest.Config) -> None:
    device.choose(config.getoption("--device"))
    config.pluginmanager.register(RootIsNoTestPackage())  # as a plugin: a conftest's own hooks see no folder above it


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep millions of objects of modules and collected tests out of every later garbage collection, which would take seconds."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"world4", "world8"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("processes"))  # one worker of `pytest -n` has the pools
    tiers.sort_out(items)
    if hasattr(config, "workerinput"):  # of `pytest -n`
        tiers.longest_first(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
