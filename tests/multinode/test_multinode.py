"""A job on two hosts: it equals one process, and if a host is lost, every remaining rank soon
raises an error that names it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import pytest
import train_lm

from tests.multinode.fork_server import TorchrunJob
from tests.multinode.hosts import INTERFACE, Host, NotPermitted, processes_left, two_hosts
from tests.multinode.programs import DIVERGING_STEP, EXIT, STOP

pytestmark = pytest.mark.xdist_group("multinode")  # one worker has the hosts

ROOT = Path(__file__).parents[2]
LOST_S = 5.0
LIMIT_S = 60.0  # for what takes seconds on an idle machine
TRAIN = ["--size", "tiny", "--steps", "4", "--every", "2"]
_ports = itertools.count(29500)


def environment() -> dict[str, str]:
    import shardmesh

    path = os.pathsep.join(
        [str(Path(shardmesh.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def torchrun(node: int, hosts: Sequence[Host], port: int) -> list[str]:
    """Return the arguments of torchrun; node numbers follow the order of the hosts."""
    where = [
        "--rdzv-backend",
        "static",
        "--node-rank",
        str(node),
        "--master-addr",
        hosts[0].name,
        "--master-port",
        str(port),
    ]
    return [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--local-addr",
        hosts[node].name,
        "--monitor-interval",
        "0.1",
        *where,
    ]


@dataclass
class RunningProgram:
    """A program that runs on both hosts, with its files in a folder."""

    folder: Path
    hosts: Sequence[Host]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while missing := [name for name in names if not (self.folder / name).exists()]:
            assert time.monotonic() < deadline, f"{missing} missing\n{self.printed()}"
            time.sleep(0.02)

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while any(self.steps(rank) < count for rank in range(4)):
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)

    def steps(self, rank: int) -> int:
        path = self.folder / f"{rank}.steps"
        return int(path.read_text()) if path.exists() else 0

    def signal(self, host: Host, name: str) -> None:
        """Send a signal to all processes of the job on a host."""
        host.run("kill", f"-{name}", "--", f"-{(self.folder / f'{host.name}.pid').read_text()}")

    def results(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Wait for the results of these ranks: error, text, ranks and steps."""
        self.wait_for(*(f"{rank}.json" for rank in ranks))
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in ranks]

    def status(self, host: Host) -> int:
        """Wait for the exit status of a host's agent, which exits after its ranks."""
        (self.folder / EXIT).touch()
        self.wait_for(f"{host.name}.status")
        return int((self.folder / f"{host.name}.status").read_text())

    def printed(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log"))
        )


@dataclass
class Lab:
    """Both hosts with their fork servers."""

    hosts: list[Host]
    folder: Path
    orders: list[TextIO] = field(default_factory=list)

    def start_fork_servers(self, stack: ExitStack) -> None:
        for host in self.hosts:
            fifo = self.folder / f"{host.name}.fifo"
            os.mkfifo(fifo)
            output = stack.enter_context((self.folder / f"{host.name}.output").open("w"))
            command = [sys.executable, "-m", "tests.multinode.fork_server", str(fifo)]
            host.start(
                command,
                env={**environment(), "SHARDMESH_HOST_LOST_S": str(LOST_S)},
                stdout=output,
                stderr=output,
            )
            self.orders.append(
                stack.enter_context(os.fdopen(os.open(fifo, os.O_RDWR), "w", buffering=1))
            )

    def run(self, program: str) -> RunningProgram:
        port = next(_ports)
        run = RunningProgram(self.folder / f"{program}.{port}", self.hosts)
        run.folder.mkdir()
        for node, orders in enumerate(self.orders):
            orders.write(
                TorchrunJob(program, str(run.folder), torchrun(node, self.hosts, port)).to_json()
                + "\n"
            )
        return run


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NotPermitted as error:
            pytest.skip(f"two hosts cannot be created here: {error}")
        made = Lab(hosts, tmp_path_factory.mktemp("lab"))
        made.start_fork_servers(stack)
        yield made
    assert processes_left(hosts) == []


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Host]]:
    """Yield the hosts; after the test, reconnect them and check that no process of its job still
    runs.
    """
    yield lab.hosts
    for host in lab.hosts:
        host.connect()
        deadline = time.monotonic() + LIMIT_S
        while (processes := host.run("ps", "-eo", "args")).count("tests.multinode.fork_server") > 1:
            assert time.monotonic() < deadline, processes
            time.sleep(0.05)


# -- a healthy job ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_example_on_two_hosts_equals_one_process(lab: Lab, hosts: list[Host], tmp_path: Path):
    rendezvous = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{hosts[0].name}:29400",
        "--rdzv-id",
        "lm",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        *rendezvous,
    ]
    program = [str(ROOT / "examples" / "train_lm.py"), *TRAIN, "--out", str(tmp_path)]
    pipes: dict[str, Any] = {
        "env": environment(),
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }
    agents = [
        host.start([*command, "--local-addr", host.name, *program], **pipes) for host in hosts
    ]
    single = train_lm.train(train_lm.parse(TRAIN), None)
    printed = [agent.communicate(timeout=2 * LIMIT_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    (run,) = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert [row["step"] for row in run["rows"]] == [row.step for row in single.rows] == [1, 2, 4]
    for ours, theirs in zip(run["rows"], single.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs.loss, rel=train_lm.TOLERANCE)
        assert ours["valid_loss"] == pytest.approx(theirs.valid_loss, rel=train_lm.TOLERANCE)
    assert [host.run("ls", "/dev/shm") for host in hosts] == ["", ""], (
        "a successful job leaves no files"
    )


@pytest.mark.slow
def test_temporarily_slow_host_is_waited_for(lab: Lab, hosts: list[Host]):
    run = lab.run("run_until_stopped")
    run.wait_for_steps(3)
    run.signal(hosts[1], "STOP")
    time.sleep(LOST_S / 2)
    run.signal(hosts[1], "CONT")
    run.wait_for_steps(run.steps(0) + 20)
    (run.folder / STOP).touch()
    results = run.results(range(4))
    assert [(t["error"], t["steps"]) for t in results] == [("NoneType", results[0]["steps"])] * 4, (
        run.printed()
    )
    assert [run.status(host) for host in hosts] == [0, 0]


# -- a host is lost --------------------------------------------------------------------------------


def survivors_report(
    run: RunningProgram, fault: Callable[[], None], gone: dict[int, tuple[str, tuple[int, ...]]]
) -> dict[int, dict[str, Any]]:
    """Return the results of the surviving ranks after the fault; `gone` maps each to the host and
    the ranks that it must name.
    """
    run.wait_for_steps(3)
    fault()
    results = dict(zip(gone, run.results(list(gone)), strict=True))
    for rank, (host, ranks) in gone.items():
        assert results[rank]["error"] == "RankLostError", results[rank]
        assert tuple(results[rank]["ranks"]) == ranks
        assert f"{host} (ranks {ranks[0]}, {ranks[1]})" in " ".join(results[rank]["text"].split())
    return results


A, B = ("host-a", (0, 1)), ("host-b", (2, 3))


def test_disconnected_hosts_name_each_other(lab: Lab, hosts: list[Host]):
    run = lab.run("run_until_stopped")
    results = survivors_report(run, hosts[1].disconnect, {0: B, 1: B, 2: A, 3: A})
    texts = {rank: " ".join(of["text"].split()) for rank, of in results.items()}
    assert all("while the store at host-a:" in texts[rank] for rank in (0, 1))
    assert all("host-b has no answer from the store at host-a:" in texts[rank] for rank in (2, 3))
    assert [run.status(host) for host in hosts] == [1, 1]


KILLED = [
    pytest.param(1, {0: B, 1: B}, id="without the store", marks=pytest.mark.slow),
    pytest.param(0, {2: A, 3: A}, id="with the store", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("killed", "gone"), KILLED)
def test_killed_host_is_named(lab: Lab, hosts: list[Host], killed, gone):
    run = lab.run("run_until_stopped")
    survivors_report(run, lambda: run.signal(hosts[killed], "KILL"), gone)
    assert run.status(hosts[1 - killed]) == 1


@pytest.mark.slow
def test_frozen_host_receives_the_verdict(lab: Lab, hosts: list[Host]):
    run = lab.run("run_until_stopped")
    survivors_report(run, lambda: run.signal(hosts[1], "STOP"), {0: B, 1: B})
    run.signal(hosts[1], "CONT")
    assert [(t["error"], tuple(t["ranks"])) for t in run.results((2, 3))] == [
        ("RankLostError", (2, 3))
    ] * 2
    assert [run.status(host) for host in hosts] == [1, 1]


# -- a rank diverges -------------------------------------------------------------------------------


@pytest.mark.slow
def test_mismatch_on_another_host_is_named(lab: Lab, hosts: list[Host]):
    run = lab.run("diverge")
    results = run.results(range(4))
    assert [(t["error"], t["ranks"]) for t in results] == [("CollectiveMismatchError", [3])] * 4, (
        run.printed()
    )
    assert all(
        "all_reduce(max" in t["text"] and "the reduction differs" in t["text"] for t in results
    )


@pytest.mark.slow
def test_error_on_another_host_is_named(lab: Lab, hosts: list[Host]):
    run = lab.run("fail")
    *others, failed = run.results(range(4))
    assert (failed["error"], failed["text"], failed["steps"]) == (
        "ValueError",
        "the reason",
        DIVERGING_STEP,
    )
    assert [(t["error"], t["ranks"]) for t in others] == [("PeerError", [3])] * 3, run.printed()
    assert all("rank 3 raised ValueError: the reason" in t["text"] for t in others)
