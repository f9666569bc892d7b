"""sm.session: what is closed and in which order, how errors propagate, and that a session can be
started again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardmesh as sm
from shardmesh.mesh import DeviceMesh, MeshError, current_world, simulate
from shardmesh.mesh.errors import PeerError, WatchError
from shardmesh.mesh.launch import local_processes
from shardmesh.mesh.launch.child_process import FAILURE, RankFailure
from shardmesh.mesh.launch.session import session
from shardmesh.mesh.processes.process import process_world
from shardmesh.mesh.settings import settings
from tests.forked import by_hand
from tests.pool import Pool

LIMIT_S = 90.0


def make_mesh() -> DeviceMesh:
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))


def total(mesh: DeviceMesh) -> float:
    """Use the group of all ranks and one of each axis."""
    x = torch.tensor([1.0 + mesh.get_rank()])
    for axes in (None, "a", "b"):
        mesh.group(axes).all_reduce(x)
    return x.item()


def error_of(fn: Any) -> str:
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def without_job(fn: Any) -> Any:
    """Run a function as in a process without a default group, and leave none behind."""
    dist.destroy_process_group()
    try:
        return fn()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


# -------------------------------------------------------------------------------- jobs of their own


def reopened() -> list[tuple[float, str, str, bool]]:
    """Run two sessions with the same mesh and a tensor; return the errors of objects that outlived
    one.
    """

    def run() -> list[Any]:
        found = []
        for _ in range(2):
            with session(timeout=60):
                mesh = make_mesh()
                x = sm.ones((4, 4), device_mesh=mesh, placements=[sm.Shard(0), sm.Replicate()])
                whole = x.full_tensor().sum().item()
                group, value = mesh.group("b"), total(mesh)
            found.append(
                (
                    value + whole,
                    error_of(x.full_tensor),
                    error_of(group.barrier),
                    dist.is_initialized(),
                )
            )
        return found

    return without_job(run)


def test_session_starts_and_ends_the_job_repeatedly(world4: Pool) -> None:
    for rank, found in enumerate(world4(reopened)):
        assert len(found) == 2
        for value, of_tensor, of_group, is_left in found:
            assert (value, is_left) == (40.0 + 16.0, False)
            end = f"belongs to the session that was opened at {__file__}:"
            assert (
                f"MeshError: DeviceMesh(cpu, a=2, b=2) {end}" in of_tensor
                or "MeshError: the group of ranks" in of_tensor
            )
            pair = (0, 1) if rank < 2 else (2, 3)
            assert f"MeshError: the group of ranks {pair} {end}" in of_group
            assert "and is closed: make a new mesh" in of_group


def closing_order() -> list[Any]:
    destroyed, destroy = [], dist.destroy_process_group

    def noting(group: Any = None) -> None:
        destroyed.append(None if group is None else tuple(dist.get_process_group_ranks(group)))
        destroy(group)

    def run() -> list[Any]:
        dist.destroy_process_group = noting
        try:
            with session():
                total(make_mesh())
        finally:
            dist.destroy_process_group = destroy
        return destroyed

    return without_job(run)


def test_groups_are_closed_in_the_same_order(world4: Pool) -> None:
    ab, cd = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    assert world4(closing_order) == [
        [*sorted([ab[r // 2], cd[r % 2]]), (0, 1, 2, 3), None] for r in range(4)
    ]


def one_raises(in_collective: bool) -> tuple[str, float]:
    """Raise on rank 2, at once or while the others wait for it; return each rank's error, and the
    result of another session.
    """

    def run() -> tuple[str, float]:
        try:
            with session(timeout=60):
                mesh = make_mesh()
                total(mesh)
                if mesh.get_rank() == 2:
                    time.sleep(0.3 * in_collective)
                    raise ValueError("no more data")
                total(mesh)
        except (ValueError, PeerError) as error:
            heard = f"{type(error).__name__}: {error}"
        with session(timeout=60):
            return heard, total(make_mesh())

    return without_job(run)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("in_collective", [False, True])
def test_error_is_raised_on_all_ranks_and_a_new_session_works(
    world4: Pool, in_collective: bool
) -> None:
    found = world4(one_raises, in_collective)
    assert [heard.split(":")[0] for heard, _ in found] == [
        "PeerError",
        "PeerError",
        "ValueError",
        "PeerError",
    ]
    for heard, value in found:
        assert "no more data" in heard
        assert value == 40.0
    assert "rank 2 raised ValueError" in found[0][0]


def terminated() -> str:
    """Send SIGTERM to rank 1 while it waits for rank 0 in a collective."""

    def run() -> str:
        try:
            with session(timeout=60):
                mesh = make_mesh()
                if mesh.get_rank() == 1:
                    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
                if mesh.get_rank() != 0:
                    total(mesh)
                for _ in range(1000):
                    time.sleep(0.01)
                    current_world().monitor.check()  # type: ignore[union-attr]
        except (SystemExit, WatchError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    return without_job(run)


def test_sigterm_ends_all_ranks(world4: Pool) -> None:
    heard = world4(terminated)
    assert heard[1] == "SystemExit: 143"
    assert all("PeerError: rank 1 was ended by SIGTERM" in text for text in heard[:1] + heard[2:])


# ---------------------------------------------------------------------------- jobs that run already


def adopted() -> dict[str, Any]:
    outer = make_mesh()
    found: dict[str, Any] = {"before": total(outer)}
    with session(timeout=7, stall_warn=5):
        found["inside"] = (settings().warn, settings().timeout)
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("all",))
        some = DeviceMesh("cpu", [1, 2, 3], axis_names=("some",))
        if some.coordinate is not None:
            some.group().barrier()
        with session():
            innermost = DeviceMesh("cpu", [3, 2, 1, 0])
            innermost.group().barrier()
        mesh.group().barrier()
        found["innermost"] = error_of(innermost.group)
    found["mesh"] = error_of(mesh.group)
    found["some"] = error_of(lambda: some.group("some"))
    found["left"] = dist.is_initialized()
    again = DeviceMesh("cpu", [1, 2, 3], axis_names=("some",))
    found["new"] = again is not some
    for _ in range(100):  # more than a row of the trace buffer holds
        if again.coordinate is not None:
            again.group().barrier()
    found["after"] = total(outer)
    return found


def test_running_job_continues_after_the_session(world4: Pool) -> None:
    for rank, found in enumerate(world4(adopted)):
        assert (found["before"], found["after"], found["left"], found["new"]) == (
            40.0,
            40.0,
            True,
            True,
        )
        assert found["inside"] == (5.0, 7.0)
        for name in ("innermost", "mesh", "some"):
            assert ("is closed: make a new mesh" in found[name]) or (rank == 0 and name == "some")


def test_in_the_simulated_world() -> None:
    def fn() -> tuple[float, str, float]:
        with session():
            mesh = make_mesh()
            value = total(mesh)
        return value, error_of(mesh.group), total(make_mesh())

    for value, said, again in simulate(4)(fn)():
        assert value == again == 40.0
        assert "MeshError: DeviceMesh(cpu, a=2, b=2) belongs to the session" in said


# -------------------------------------------------------------------------------------- one process


@pytest.fixture
def alone():
    """Run in a process without a default group."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process(alone: None) -> None:
    times = settings().warn, settings().timeout
    with session(timeout=3) as here:
        mesh = sm.init_device_mesh("cpu", (1,))
        assert (mesh.group().size, settings().timeout, here.is_closed) == (1, 3.0, False)
    assert here.is_closed
    assert not dist.is_initialized()
    assert (settings().warn, settings().timeout) == times
    with pytest.raises(MeshError, match=f"opened at {__file__}:[0-9]+ and is closed"):
        mesh.group()
    assert sm.init_device_mesh("cpu", (1,)) is not mesh
    with pytest.raises(RuntimeError, match="cannot be entered again"), here:
        pytest.fail("the block must not run")


@pytest.mark.parametrize(
    "error", [ValueError("x"), KeyboardInterrupt(), SystemExit(0), SystemExit(3)]
)
def test_errors_propagate(alone: None, error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, session() as here:
        sm.init_device_mesh("cpu", (1,))
        raise error
    assert caught.value is error
    assert here.is_closed
    assert not dist.is_initialized()


def test_nonpositive_times_raise() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ValueError, match="timeout"), session(timeout=0):
        pytest.fail("the block must not run")
    assert signal.getsignal(signal.SIGTERM) == handler


def test_session_releases_its_world(alone: None) -> None:
    with session():
        world = sm.init_device_mesh("cpu", (1,)).world
    assert process_world() is not world


# --------------------------------------------------------------------- SIGTERM to the whole program

PROGRAM = """
    import sys, time
    from pathlib import Path
    import torch
    import shardmesh as sm
    from shardmesh.mesh.launch.preemption import reached_preemption
    from shardmesh.mesh.launch.session import session

    def train(folder, asks):
        with session():
            group = sm.init_device_mesh("cpu", (2,)).group()
            for step in range(100_000):
                if asks and reached_preemption(step):
                    return step
                group.all_reduce(torch.ones(1))
                time.sleep(0.005)
                if step == 10:
                    Path(folder, str(group.rank)).touch()

    if __name__ == "__main__":
        results = sm.launch(train, 2, (sys.argv[1], sys.argv[2] == "asks"))
        print("the same step:", results[0] == results[1] > 10)
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("asks", ["asks", "does not ask"])
def test_sigterm_to_launch(tmp_path: Path, asks: str) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), asks]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        try:
            deadline = time.monotonic() + LIMIT_S
            while (
                not all((tmp_path / str(rank)).exists() for rank in range(2))
                and program.poll() is None
            ):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            program.terminate()
            out, err = program.communicate(timeout=LIMIT_S)
        finally:
            program.kill()
    if asks == "asks":
        assert (program.returncode, out) == (0, "the same step: True\n"), err
        assert "is being preempted (SIGTERM): all ranks will stop in the same step" in err
    else:
        assert program.returncode == 143, err
        assert "SIGTERM has ended 2 of 2 ranks" in err
        assert "Traceback" not in err


# ------------------------------------------------------------------------ ends, and what they leave

BARE = """
    import sys, time
    from pathlib import Path
    import shardmesh as sm
    from shardmesh import P

    def train(folder):
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        x = sm.ones(8, device_mesh=mesh, placements=P("dp"))
        for step in range(100_000):
            x.sum().full_tensor()
            time.sleep(0.002)
            if step == 10:
                Path(folder, str(mesh.get_rank())).touch()

    if sys.argv[2] == "session":
        with sm.session():
            train(sys.argv[1])
    else:
        train(sys.argv[1])
"""


@pytest.mark.one_in(2, each=["how"])
@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("bare", signal.SIGINT),
        ("session", signal.SIGINT),
        ("session", signal.SIGTERM),
        ("session", signal.SIGHUP),
    ],
)
def test_an_interrupted_job_says_one_line_and_leaves_nothing(
    how: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Every rank gets the signal, as from a terminal; torchrun sends it once more."""
    (tmp_path / "program.py").write_text(textwrap.dedent(BARE))
    (tmp_path / "watch").mkdir()
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), how]
    environments = by_hand(2, LOCAL_WORLD_SIZE="2", SHARDMESH_WATCH_DIR=str(tmp_path / "watch"))
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | env,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_listen_to_ctrl_c,
        )
        for env in environments
    ]
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((tmp_path / str(rank)).exists() for rank in range(2)) and all(
            rank.poll() is None for rank in ranks
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for _ in range(2 if number == signal.SIGINT else 1):
            for rank in ranks:
                rank.send_signal(number)
            time.sleep(0.02)
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    lines = "".join(said).splitlines()
    if number == signal.SIGINT:
        assert lines in ([f"shardmesh: rank {rank} was interrupted (Ctrl-C)"] for rank in range(2))
    else:
        assert sorted(lines) == [
            f"shardmesh: rank {rank}: {number.name}: ends with code {128 + number}"
            for rank in range(2)
        ]
    assert list((tmp_path / "watch").iterdir()) == []


def _listen_to_ctrl_c() -> None:
    # Shells make background processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup does


def test_a_rank_that_has_reported_its_failure_is_not_waited_for() -> None:
    """After Ctrl-C, ranks in a session raise SystemExit on SIGTERM, report that, and wait to be
    killed.
    """
    waited = []

    class Process:
        exitcode = None
        sentinel = os.open(os.devnull, os.O_RDONLY)

        def terminate(self) -> None:
            theirs.send_bytes(FAILURE + pickle.dumps(RankFailure("raised SystemExit: 143", 0.0)))

        def kill(self) -> None:
            waited.append(local.done)
            self.exitcode = -9

        def join(self) -> None: ...

    own, theirs = multiprocessing.Pipe()
    local = local_processes._LocalRank(0, Process(), own)  # type: ignore[arg-type]
    with (
        mock.patch.object(local_processes, "wait", return_value=[own]),
        mock.patch.object(local_processes, "_TERM_GRACE_S", 1e9),
    ):
        local_processes._end([local])
    assert waited == [True]
