"""A job on two hosts: it equals one process, and if a host is lost, every remaining rank soon raises an error that names it."""

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

from tests.multinode.forker import Job
from tests.multinode.hosts import INTERFACE, Host, NotPermitted, processes_left, two_hosts
from tests.multinode.programs import DIFFERENT, ENOUGH, LEAVE

pytestmark = pytest.mark.xdist_group("multinode")  # one worker has the hosts

ROOT = Path(__file__).parents[2]
LOST_S = 5.0
PATIENCE_S = 60.0  # for what must happen soon, on a machine that may be busy
TRAIN = ["--size", "tiny", "--steps", "4", "--every", "2"]
_ports = itertools.count(29500)


def environment() -> dict[str, str]:
    import shardmesh

    path = os.pathsep.join([str(Path(shardmesh.__file__).parents[1]), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}


def torchrun(node: int, hosts: Sequence[Host], port: int) -> list[str]:
    """Its arguments, in the order of the nodes, and with ranks in the order of the hosts."""
    where = ["--rdzv-backend", "static", "--node-rank", str(node), "--master-addr", hosts[0].name, "--master-port", str(port)]
    return ["--nnodes", "2", "--nproc-per-node", "2", "--local-addr", hosts[node].name, "--monitor-interval", "0.1", *where]


@dataclass
class Run:
    """A program that runs on both hosts, its files in a folder."""

    folder: Path
    hosts: Sequence[Host]

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while missing := [name for name in names if not (self.folder / name).exists()]:
            assert time.monotonic() < deadline, f"{missing} did not come\n{self.printed()}"
            time.sleep(0.02)

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while any(self.steps(rank) < count for rank in range(4)):
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.02)

    def steps(self, rank: int) -> int:
        path = self.folder / f"{rank}.steps"
        return int(path.read_text()) if path.exists() else 0

    def signal(self, host: Host, name: str) -> None:
        """To all processes that the job has on a host."""
        host.run("kill", f"-{name}", "--", f"-{(self.folder / f'{host.name}.pid').read_text()}")

    def told(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """How these ranks say that it ended."""
        self.wait_for(*(f"{rank}.json" for rank in ranks))
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in ranks]

    def status(self, host: Host) -> int:
        """Of its agent, which ends after its ranks."""
        (self.folder / LEAVE).touch()
        self.wait_for(f"{host.name}.status")
        return int((self.folder / f"{host.name}.status").read_text())

    def printed(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))


@dataclass
class Lab:
    """Both hosts, ready to fork."""

    hosts: list[Host]
    folder: Path
    orders: list[TextIO] = field(default_factory=list)

    def start_forkers(self, stack: ExitStack) -> None:
        for host in self.hosts:
            fifo = self.folder / f"{host.name}.fifo"
            os.mkfifo(fifo)
            output = stack.enter_context((self.folder / f"{host.name}.output").open("w"))
            forker = [sys.executable, "-m", "tests.multinode.forker", str(fifo)]
            host.start(forker, env={**environment(), "SHARDMESH_HOST_LOST_S": str(LOST_S)}, stdout=output, stderr=output)
            self.orders.append(stack.enter_context(os.fdopen(os.open(fifo, os.O_RDWR), "w", buffering=1)))

    def run(self, program: str) -> Run:
        port = next(_ports)
        run = Run(self.folder / f"{program}.{port}", self.hosts)
        run.folder.mkdir()
        for node, orders in enumerate(self.orders):
            orders.write(Job(program, str(run.folder), torchrun(node, self.hosts, port)).to_json() + "\n")
        return run


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NotPermitted as error:
            pytest.skip(f"two hosts cannot be made here: {error}")
        made = Lab(hosts, tmp_path_factory.mktemp("lab"))
        made.start_forkers(stack)
        yield made
    assert processes_left(hosts) == []


@pytest.fixture
def hosts(lab: Lab) -> Iterator[list[Host]]:
    """After a test nothing of its job may still run, and no folder of a watch be left in memory but those of jobs that failed."""
    yield lab.hosts
    for host in lab.hosts:
        host.mend()
        deadline = time.monotonic() + PATIENCE_S
        while (processes := host.run("ps", "-eo", "args")).count("tests.multinode.forker") > 1:
            assert time.monotonic() < deadline, processes
            time.sleep(0.05)


# -- a healthy job -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_example_on_two_hosts_equals_one_process(lab: Lab, hosts: list[Host], tmp_path: Path):
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:29400", "--rdzv-id", "lm"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *rendezvous]
    program = [str(ROOT / "examples" / "train_lm.py"), *TRAIN, "--out", str(tmp_path)]
    pipes: dict[str, Any] = {"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    agents = [host.start([*command, "--local-addr", host.name, *program], **pipes) for host in hosts]
    single = train_lm.train(train_lm.parse(TRAIN), None)
    printed = [agent.communicate(timeout=2 * PATIENCE_S)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    (run,) = json.loads((tmp_path / "metrics.json").read_text())["runs"]
    assert [row["step"] for row in run["rows"]] == [row.step for row in single.rows] == [1, 2, 4]
    for ours, theirs in zip(run["rows"], single.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs.loss, rel=train_lm.TOLERANCE)
        assert ours["valid_loss"] == pytest.approx(theirs.valid_loss, rel=train_lm.TOLERANCE)
    assert [host.run("ls", "/dev/shm") for host in hosts] == ["", ""], "a job that went well leaves no files"


@pytest.mark.slow
def test_temporarily_slow_host_is_waited_for(lab: Lab, hosts: list[Host]):
    run = lab.run("endure")
    run.wait_for_steps(3)
    run.signal(hosts[1], "STOP")
    time.sleep(LOST_S / 2)
    run.signal(hosts[1], "CONT")
    run.wait_for_steps(run.steps(0) + 20)
    (run.folder / ENOUGH).touch()
    told = run.told(range(4))
    assert [(t["error"], t["steps"]) for t in told] == [("NoneType", told[0]["steps"])] * 4, run.printed()
    assert [run.status(host) for host in hosts] == [0, 0]


# -- a host goes away --------------------------------------------------------------------------------------------------


def survivors_say(run: Run, fault: Callable[[], None], gone: dict[int, tuple[str, tuple[int, ...]]]) -> dict[int, dict[str, Any]]:
    """What each rank that is left says after the fault; `gone` is, for each of them, the host and the ranks that it must name."""
    run.wait_for_steps(3)
    fault()
    said = dict(zip(gone, run.told(list(gone)), strict=True))
    for rank, (host, ranks) in gone.items():
        assert said[rank]["error"] == "RankLostError", said[rank]
        assert tuple(said[rank]["ranks"]) == ranks
        assert f"{host} (ranks {ranks[0]}, {ranks[1]})" in " ".join(said[rank]["text"].split())
    return said


A, B = ("host-a", (0, 1)), ("host-b", (2, 3))


def test_a_cut_link(lab: Lab, hosts: list[Host]):
    run = lab.run("endure")
    said = survivors_say(run, hosts[1].cut, {0: B, 1: B, 2: A, 3: A})
    texts = {rank: " ".join(of["text"].split()) for rank, of in said.items()}
    assert all("while the store at host-a:" in texts[rank] for rank in (0, 1))
    assert all("host-b has no answer from the store at host-a:" in texts[rank] for rank in (2, 3))
    assert [run.status(host) for host in hosts] == [1, 1]


KILLED = [
    pytest.param(1, {0: B, 1: B}, id="without the store", marks=pytest.mark.slow),
    pytest.param(0, {2: A, 3: A}, id="with the store", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("killed", "gone"), KILLED)
def test_a_killed_host(lab: Lab, hosts: list[Host], killed, gone):
    run = lab.run("endure")
    survivors_say(run, lambda: run.signal(hosts[killed], "KILL"), gone)
    assert run.status(hosts[1 - killed]) == 1


@pytest.mark.slow
def test_frozen_host_receives_the_verdict(lab: Lab, hosts: list[Host]):
    run = lab.run("endure")
    survivors_say(run, lambda: run.signal(hosts[1], "STOP"), {0: B, 1: B})
    run.signal(hosts[1], "CONT")
    assert [(t["error"], tuple(t["ranks"])) for t in run.told((2, 3))] == [("RankLostError", (2, 3))] * 2
    assert [run.status(host) for host in hosts] == [1, 1]


# -- a rank goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_another_collective_on_another_host(lab: Lab, hosts: list[Host]):
    run = lab.run("differ")
    told = run.told(range(4))
    assert [(t["error"], t["ranks"]) for t in told] == [("CollectiveMismatchError", [3])] * 4, run.printed()
    assert all("all_reduce(max" in t["text"] and "the reduction differs" in t["text"] for t in told)


@pytest.mark.slow
def test_an_error_on_another_host(lab: Lab, hosts: list[Host]):
    run = lab.run("fail")
    *others, guilty = run.told(range(4))
    assert (guilty["error"], guilty["text"], guilty["steps"]) == ("ValueError", "the reason", DIFFERENT)
    assert [(t["error"], t["ranks"]) for t in others] == [("PeerError", [3])] * 3, run.printed()
    assert all("rank 3 raised ValueError: the reason" in t["text"] for t in others)
