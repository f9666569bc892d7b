"""launch(): results, errors that name their rank, and no process left running."""

import atexit
import concurrent.futures
import contextlib
import functools
import operator
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardmesh as sm
from shardmesh.mesh.launch import local_processes
from shardmesh.mesh.launch.local_processes import LaunchError, LaunchTimeoutError, launch

LIMIT_S = 60.0  # for what takes seconds on an idle machine


# ------------------------------------------------------------------------------- what the ranks run


def environment() -> dict[str, str]:
    return dict(os.environ)


def all_reduced(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    dist.init_process_group("gloo")
    y = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(y)
    return y


def make_mesh_and_wait(folder: Path) -> None:
    sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
    (folder / os.environ["RANK"]).touch()
    time.sleep(LIMIT_S)


def leave_a_thread_pool() -> bool:
    """Leave a pool whose worker waits for more to do, as compilers do."""
    global _pool
    _pool = concurrent.futures.ThreadPoolExecutor(1)
    return _pool.submit(bool, 1).result()


def leave_notes(folder: Path) -> None:
    """Leave a thread and exit functions that run after the function has returned."""
    path = folder / os.environ["RANK"]
    atexit.register(
        lambda: path.with_suffix(".exit").write_text(
            path.with_suffix(".thread").read_text() + ", then exit functions"
        )
    )

    def late() -> None:
        time.sleep(0.3)
        path.with_suffix(".thread").write_text("thread")

    threading.Thread(target=late).start()
    sys.stdout.write("not flushed")


def fill_in_place(x: torch.Tensor) -> float:
    x += int(os.environ["RANK"])
    return x[0].item()


def raise_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


class Stubborn(Exception):
    """Survives no pickling."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raise_stubborn() -> None:
    raise Stubborn("this", "that")


def die_on(rank: int, number: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def fail_alone(others_return: bool) -> str:
    """Raise on rank 0 and be killed on rank 1; the others do not need them."""
    rank = os.environ["RANK"]
    if rank == "0" or not others_return:
        raise ValueError(f"the reason of rank {rank}")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return f"rank {rank}"


def die_before_my_own_child(folder: str) -> None:
    """Die before a forked child, which inherits this process's pipes and keeps them open."""
    if child := os.fork():
        Path(folder, "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LIMIT_S)


def exit_with(code: int | None) -> None:
    sys.exit(code)


def vanish() -> None:
    os._exit(7)


def return_lock() -> object:
    return threading.Lock()


def launch_again() -> None:
    launch(environment, 2)


def wait_and_tell(folder: str, ignore_term: bool = False) -> None:
    """Write this process's id to a file named after its rank, then wait forever."""
    if ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path = Path(folder) / os.environ["RANK"]
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
    while True:
        time.sleep(1)


# ------------------------------------------------------------------------------------------ results


def test_ranks_have_torchrun_environment():
    seen = launch(environment, 3, env={"SOME_SETTING": "on"})
    assert [e["RANK"] for e in seen] == [e["LOCAL_RANK"] for e in seen] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in seen} == {e["LOCAL_WORLD_SIZE"] for e in seen} == {"3"}
    assert {e["MASTER_ADDR"] for e in seen} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in seen}) == 1
    assert all(int(e["OMP_NUM_THREADS"]) >= 1 for e in seen)
    assert {e["SOME_SETTING"] for e in seen} == {"on"}
    assert not {"RANK", "MASTER_PORT", "SOME_SETTING"} & set(os.environ)


@pytest.mark.slow
def test_a_set_thread_count_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch(os.getenv, 1, ("OMP_NUM_THREADS",)) == ["5"]
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_env_init_and_tensors_by_value():
    x = torch.arange(3.0)
    first, second = launch(all_reduced, 2, (x,), kwargs={"scale": 2.0})
    assert torch.equal(first, x * 6)
    assert torch.equal(second, x * 6)
    assert launch(fill_in_place, 2, (torch.zeros(2),)) == [0.0, 1.0]  # each rank has its own copy


@pytest.mark.slow
def test_partial_and_two_concurrent_launches():
    results: dict[int, list[int]] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: results.update(
                {n: launch(functools.partial(operator.add, n), 2, (1,))}
            )
        )
        for n in (10, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {10: [11, 11], 20: [21, 21]}


@pytest.mark.slow
def test_sys_exit_zero_is_success():
    assert launch(exit_with, 2, (None,)) == [None, None]


@pytest.mark.slow
def test_threads_and_exit_functions_finish(tmp_path, capfd):
    assert launch(leave_notes, 2, (tmp_path,)) == [None, None]
    assert [(tmp_path / f"{rank}.exit").read_text() for rank in range(2)] == [
        "thread, then exit functions"
    ] * 2
    assert capfd.readouterr().out == "not flushed" * 2


def test_idle_workers_of_a_thread_pool_end():
    assert launch(leave_a_thread_pool, 1) == [True]


# ----------------------------------------------------------------------------------------- failures


def test_exception_of_a_rank_is_raised():
    with pytest.raises(
        LaunchError, match=r"^rank 1 of 3 raised ValueError: the reason\n"
    ) as caught:
        launch(raise_on, 3, (1,))
    error = caught.value
    assert (error.rank, error.signal, error.exitcode) == (1, None, None)
    assert isinstance(error.__cause__, ValueError)
    assert "in raise_on" in error.traceback
    assert error.traceback in str(error) + "\n"
    assert "child_process.py" not in error.traceback  # the user's line comes first
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank) == (str(error), 1)


@pytest.mark.slow
def test_an_exception_that_cannot_be_pickled():
    with pytest.raises(LaunchError, match="raised Stubborn: this and that") as caught:
        launch(raise_stubborn, 1)
    assert caught.value.__cause__ is None


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_rank_is_reported_before_consequent_errors(number):
    with pytest.raises(LaunchError, match=f"^rank 1 of 2 was killed by {number.name}") as caught:
        launch(die_on, 2, (1, number))
    assert (caught.value.rank, caught.value.signal) == (1, number)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fn", "args", "text"), [(exit_with, (3,), "SystemExit: 3"), (vanish, (), "exited with code 7")]
)
def test_nonzero_exit_is_a_failure(fn, args, text):
    with pytest.raises(LaunchError, match=text):
        launch(fn, 1, args)


def test_ranks_of_an_elastic_job_do_not_end_each_other(capfd):
    assert launch(fail_alone, 3, (True,), elastic=True) == [None, None, "rank 2"]
    printed = capfd.readouterr().err
    assert "shardmesh: launch: rank 0 of 3 raised ValueError: the reason of rank 0\n" in printed
    assert "shardmesh: launch: rank 1 of 3 was killed by SIGKILL before" in printed


class EndedProcess:
    """A process that has ended, and its pipe, on which nothing has arrived."""

    sentinel = 0

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def poll(self) -> bool:
        return False

    def kill(self) -> None:
        pass

    join = kill


def ended_rank(rank: int, exitcode: int, result: bytes = b"") -> local_processes._LocalRank:
    process = EndedProcess(exitcode)
    return local_processes._LocalRank(rank, process, process, result=result)  # type: ignore


def test_ranks_that_a_signal_has_ended_are_not_started_again(monkeypatch):
    monkeypatch.setattr(local_processes, "wait", lambda *_: [])
    for signals, expected in (([], [0]), ([signal.SIGTERM], [])):
        started: list[int] = []
        ranks = [ended_rank(0, -signal.SIGTERM), ended_rank(1, 0, b"result")]
        local_processes._wait(ranks, None, True, 2, started.append, signals)
        assert started == expected


def test_a_signal_at_the_end_does_not_turn_an_earlier_loss_into_an_error():
    ranks = [ended_rank(0, -signal.SIGKILL), ended_rank(1, 0, b"result")]
    for rank in ranks:
        rank.update()
    assert not local_processes._has_ended_by(ranks, [signal.SIGTERM])
    assert not local_processes._has_ended_by(ranks, [])
    assert local_processes._has_ended_by(ranks, [signal.SIGKILL])


def test_the_first_failure_of_a_rank_that_was_started_again_is_raised():
    first, second = ended_rank(0, -signal.SIGKILL), ended_rank(0, 1)
    for rank in (first, second):
        rank.update()
    assert first.failure is not None
    second.before = (first.failure,)
    with pytest.raises(LaunchError, match=r"^rank 0 of 1 was killed by SIGKILL.*(\n.*)*code 1"):
        local_processes._raise_first_failure([second], [], True)


@pytest.mark.slow
def test_an_elastic_job_whose_ranks_have_all_failed_raises():
    with pytest.raises(LaunchError, match="the reason of rank"):
        launch(fail_alone, 2, (False,), elastic=True)


@pytest.mark.slow
def test_killed_rank_with_a_surviving_child(tmp_path):
    with pytest.raises(LaunchError, match="was killed by SIGKILL"):
        launch(die_before_my_own_child, 1, (str(tmp_path),))
    child = int((tmp_path / "child").read_text())
    os.kill(child, signal.SIGKILL)  # it was still there to be killed


@pytest.mark.slow
def test_unpicklable_result_raises():
    with pytest.raises(LaunchError, match="returned a lock that cannot be sent back"):
        launch(return_lock, 1)


def test_timeout_names_the_late_ranks(tmp_path):
    with pytest.raises(LaunchTimeoutError, match="of 2 ranks, not finished: 0, 1") as caught:
        launch(wait_and_tell, 2, (str(tmp_path),), timeout=0.5)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.rank == 0


@pytest.mark.slow
def test_launch_inside_a_rank():
    with pytest.raises(LaunchError, match=r"already rank 0 of 1 .*__main__"):
        launch(launch_again, 1)


# ----------------------------------------------------------------------------- mistakes in the call


@pytest.mark.parametrize("nprocs", [0, -1, 2.0, True, "4"])
def test_invalid_nprocs_raises(nprocs):
    with pytest.raises(ValueError, match="nprocs >= 1, got"):
        launch(environment, nprocs)


def test_unpicklable_functions_and_arguments_raise():
    with pytest.raises(TypeError, match="needs a function"):
        launch(None, 2)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cannot send the function .*lambda.*top level of a module"
    ):
        launch(lambda: None, 2)
    with pytest.raises(ValueError, match=r"cannot send the arguments of _operator\.add"):
        launch(operator.add, 2, (threading.Lock(), 1))
    with pytest.raises(ValueError, match="MASTER_PORT, RANK for every rank"):
        launch(environment, 2, env={"RANK": "0", "MASTER_PORT": "1"})


# ------------------------------------------------------------------------------ scripts, no orphans


def script(folder: Path, body: str) -> Path:
    path = folder / "program.py"
    header = "import os, signal, sys\nfrom shardmesh.mesh.launch.local_processes import launch\n"
    path.write_text(header + textwrap.dedent(body))
    return path


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=LIMIT_S
    )


@pytest.mark.slow
def test_function_defined_in_the_script(tmp_path):
    path = script(
        tmp_path,
        """
        class Answer:
            rank = int(os.environ.get("RANK", -1))  # already set when the script is imported

        def answer():
            return Answer.rank, Answer()

        if __name__ == "__main__":
            ranks, objects = zip(*launch(answer, 2))
            print(ranks, isinstance(objects[0], Answer))
        """,
    )
    assert run(str(path)).stdout == "(0, 1) True\n"


@pytest.mark.slow
def test_script_without_main_guard_raises_helpful_error(tmp_path):
    done = run(str(script(tmp_path, "launch(os.getpid, 2)\n")))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, "of the parent; the ranks say nothing"
    assert "LaunchError: rank" in done.stderr
    assert "ran the script's launch() call again" in done.stderr
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_function_defined_in_a_repl():
    done = run(
        "-c",
        "from shardmesh.mesh.launch.local_processes import launch\ndef f(): pass\nlaunch(f, 2)",
    )
    assert (
        "ValueError: launch() cannot send __main__.f to another process"
        in done.stderr.splitlines()[-1]
    )
    assert "simulate" in done.stderr.splitlines()[-1]


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def await_pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if len(files := [f for f in folder.iterdir() if f.suffix == ""]) == count:
            return [int(f.read_text()) for f in files]
        time.sleep(0.05)
    pytest.fail(f"the ranks did not start within {LIMIT_S} s")


def await_end(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in pids if alive(pid)]:
        if time.monotonic() > deadline:
            pytest.fail(f"processes {left} are still running")
        time.sleep(0.05)


@pytest.fixture
def waiting(tmp_path):
    """Start a program whose two ranks wait forever; yield (the program's Popen, the pids of its
    ranks).
    """
    (tmp_path / "pids").mkdir()
    path = tmp_path / "program.py"
    path.write_text(
        "import sys\n"
        "from shardmesh.mesh.launch.local_processes import launch\n"
        "from tests.mesh.launch.test_local_processes import wait_and_tell\n"
        "if __name__ == '__main__':\n"
        "    launch(wait_and_tell, 2, (sys.argv[1],))\n"
    )
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(path), str(tmp_path / "pids")]
    with subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        try:
            yield program, await_pids(tmp_path / "pids", 2)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(program.pid, signal.SIGKILL)


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="looks at processes through /proc"
)


@needs_proc
def test_ctrl_c_deletes_the_job_s_folder_where_only_env_names_it(tmp_path, monkeypatch):
    def interrupt(ranks, *_):
        deadline = time.monotonic() + LIMIT_S
        while len(list(tmp_path.glob("[01]"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(watched.iterdir())
        raise KeyboardInterrupt

    watched = tmp_path / "watched"
    watched.mkdir()
    monkeypatch.setattr(local_processes, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch(make_mesh_and_wait, 2, (tmp_path,), env={"SHARDMESH_WATCH_DIR": str(watched)})
    assert list(watched.iterdir()) == []


@needs_proc
def test_no_orphans_after_ctrl_c(waiting):
    program, pids = waiting
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does: to the parent and to its children
    _, stderr = program.communicate(timeout=LIMIT_S)
    await_end(pids)
    assert stderr.count("KeyboardInterrupt") == 1
    assert stderr.count("Traceback") == 1  # the parent's, not one per rank


@pytest.mark.slow
@needs_proc
def test_no_orphans_after_a_killed_parent(waiting):
    program, pids = waiting
    program.kill()
    program.wait(LIMIT_S)
    await_end(pids)


@pytest.mark.slow
@needs_proc
def test_no_orphans_after_a_killed_child(waiting):
    program, pids = waiting
    os.kill(pids[0], signal.SIGKILL)
    _, stderr = program.communicate(timeout=LIMIT_S)
    await_end(pids)
    assert "was killed by SIGKILL" in stderr


@pytest.mark.slow
@needs_proc
def test_a_rank_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmesh.mesh.launch.local_processes._TERM_GRACE_S", 0.2)
    caught: list[BaseException] = []

    def call() -> None:
        try:
            launch(wait_and_tell, 2, (str(tmp_path), True))
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    pids = await_pids(tmp_path, 2)
    os.kill(pids[0], signal.SIGKILL)
    thread.join(LIMIT_S)
    await_end(pids)
    assert "was killed by SIGKILL" in str(caught[0])
