"""Elastic jobs on two hosts: the ranks that are left go on, to the bit as without faults, wherever
they are and whatever host served the stores; of a cut network one side goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

from shardmesh.mesh.launch.local_processes import JOINS
from tests.forked import Ended, Forked
from tests.multinode.hosts import INTERFACE, Host, NotPermitted, two_hosts
from tests.sharding.elastic import faulty_jobs
from tests.sharding.elastic.faulty_jobs import Plan, Replays, ended_by, happened
from tests.sharding.elastic.faulty_ranks import PLACES, STEPS, Fault, replay, train
from tests.sharding.elastic.test_soak import ENDING_KINDS, draw_faults, seeds_of
from tests.tiers import slow

pytestmark = [pytest.mark.xdist_group("multinode"), pytest.mark.timeout(300)]

RANKS = 4
LIMIT_S = 120.0
LOST_S = "6"


class Lab:
    """Two hosts with two ranks each, of jobs without a launcher."""

    def __init__(self, hosts: Sequence[Host], servers: Sequence[Forked]) -> None:
        self.hosts, self.servers = hosts, servers
        self._port = 29700

    def run(self, form: str, faults: Sequence[Fault], **more: str) -> list[Ended]:
        """Train as an elastic job; return how each rank has ended."""
        env = self._environment(RANKS, **more)
        return self._run([env[:2], env[2:]], form, faults)

    def run_joining(self, job: Plan, node: int) -> list[Ended]:
        """Train on three ranks, two of them on the first host, and let a process join on a host.

        Return how each rank has ended, that one as the last.
        """
        env = self._environment(3, SHARDMESH_STALL_TIMEOUT_S=faulty_jobs.STALL_S)
        joining = {**env[2 * node], JOINS: "1"}
        of_hosts = [env[:2], env[2:]]
        of_hosts[node].append(joining)
        ended = self._run(of_hosts, job.form, job.faults)
        return ended if node == 1 else [*ended[:2], ended[3], ended[2]]

    def _environment(self, size: int, **more: str) -> list[dict[str, str]]:
        self._port += 1
        return [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % 2),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(min(2, size - rank // 2 * 2)),
                "MASTER_ADDR": self.hosts[0].name,
                "MASTER_PORT": str(self._port),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "SHARDMESH_HOST_LOST_S": LOST_S,
                **more,
            }
            for rank in range(size)
        ]

    def _run(
        self, of_hosts: Sequence[list[dict[str, str]]], form: str, faults: Sequence[Fault]
    ) -> list[Ended]:
        planned = list(map(list, faults))

        def run_on(node: int) -> list[Ended]:
            server, env = self.servers[node], of_hosts[node]
            args = [[form, [] if JOINS in own else planned] for own in env]
            return server.run(train, args, env, server.new_folder(), limit_s=LIMIT_S)

        with ThreadPoolExecutor() as pool:
            return [one for ended in pool.map(run_on, (0, 1)) for one in ended]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NotPermitted as error:
            pytest.skip(f"two hosts cannot be created here: {error}")
        servers = [stack.enter_context(Forked(prefix=host.prefix)) for host in hosts]
        yield Lab(hosts, servers)


@pytest.fixture
def two(lab: Lab) -> Iterator[Lab]:
    yield lab
    for host in lab.hosts:
        host.connect()


def check(ended: list[Ended], forked: Forked, form: str, lost: set[int]) -> None:
    """Compare the ranks that are left with a run without faults on the same meshes, on one host."""
    printed = "\n".join(f"--- rank {rank}\n{one.output}" for rank, one in enumerate(ended))
    left = [rank for rank in range(RANKS) if rank not in lost]
    for rank, one in enumerate(ended):
        assert (one.status == 0) == (rank in left), printed
    values = [ended[rank].value for rank in left]
    schedule = [(0, list(range(RANKS))), *((event[0], event[2]) for event in values[0]["events"])]
    expected = forked(replay, RANKS, form, schedule, limit_s=LIMIT_S)
    for rank, value in zip(left, values, strict=True):
        assert value["losses"] == expected[rank].value["losses"], printed
        assert value["hashes"] == expected[rank].value["hashes"]
    assert schedule[-1][1] == left
    assert len(values[0]["losses"]) == STEPS


@pytest.mark.parametrize(
    ("form", "faults"),
    [
        ("ddp", [(3, 2, "backward", "kill")]),
        slow("ddp", [(0, 2, "backward", "kill")]),
        slow("ddp", [(2, 2, "data", "kill"), (3, 2, "data", "kill")]),
        slow("ddp", [(0, 2, "forward", "kill"), (1, 2, "forward", "kill")]),
        slow("hsdp", [(0, 2, "vote", "kill"), (1, 2, "vote", "kill")]),
        slow("ddp", [(0, 2, "backward", "kill"), (2, 2, "agree", "kill")]),
        slow("ddp", [(0, 2, "backward", "kill"), (3, 2, "regroup", "kill")]),
        slow("ddp", [(3, 2, "backward", "kill"), (0, 2, "exchange", "kill")]),
        slow("ddp", [(0, 1, "backward", "kill"), (1, 3, "write", "kill")]),
    ],
    ids=str,
)
def test_ranks_that_end(two: Lab, forked: Forked, form: str, faults: list[Fault]):
    check(two.run(form, faults), forked, form, {fault[0] for fault in faults})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("node", "faults"),
    [
        (1, [(2, 4, "backward", "kill")]),
        (0, [(1, 1, "exchange", "kill")]),
    ],
    ids=str,
)
def test_a_process_joins(two: Lab, forked: Forked, node: int, faults: list[Fault], tmp_path: Path):
    """On either host; then, or meanwhile, a rank ends that was there before."""
    job = Plan(3, "ddp", [(0, 1, "vote", "await"), *faults], joins_after=1)
    faulty_jobs.check(job, two.run_joining(job, node), Replays(forked, tmp_path))


@pytest.mark.slow
def test_an_error_on_another_host_is_told(two: Lab, forked: Forked):
    ended = two.run("tp", [(2, 3, "forward", "raise")])
    check(ended, forked, "tp", set())


@pytest.mark.slow
def test_a_stopped_rank_of_another_host_is_ended(two: Lab, forked: Forked):
    ended = two.run("ddp", [(3, 2, "forward", "stop")], SHARDMESH_STALL_TIMEOUT_S="10")
    check(ended, forked, "ddp", {3})


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_the_side_of_the_lowest_rank_goes_on_when_the_network_is_cut(
    two: Lab, forked: Forked, rank: int
):
    ended = two.run("ddp", [(rank, 2, "backward", "cut")])
    check(ended, forked, "ddp", {2, 3})
    for one in ended[2:]:
        assert "ranks 2, 3 cannot reach ranks 0, 1, and may be the ones that are cut off" in (
            " ".join(one.output.split())
        )


# -- random faults ---------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:  # one for five jobs on one host
        seeds = seeds_of(str(metafunc.config.getoption("--faults")))
        metafunc.parametrize("seed", range(seeds.start // 5, -(-seeds.stop // 5)))


def plan(seed: int) -> Plan:
    """Return the job of a seed: a cut network, after the loss of a rank or not; a host; ranks."""
    random = Random(seed)
    form = random.choice(["ddp", "hsdp", "tp", "two"])
    step = random.randrange(STEPS)
    draw = random.choice(["cut", "cut", "host", "ranks"])
    if draw == "ranks":
        return Plan(RANKS, form, draw_faults(random, RANKS))
    place, kind = random.choice(PLACES), random.choice(ENDING_KINDS)
    if draw == "host":  # nobody would end ranks of a host that are all stopped
        kind = random.choice(["kill", "exit"])
        ranks = random.choice([(0, 1), (2, 3)])
        return Plan(RANKS, form, [(rank, step, place, kind) for rank in ranks])
    lost, cutting = random.sample(range(RANKS), 2)
    faults: list[Fault] = [(cutting, step, place, "cut")]
    if step > 1 and random.random() < 0.5:
        faults.insert(0, (lost, step - 2, random.choice(PLACES), kind))
    return Plan(RANKS, form, faults)


def cut_off_in(job: Plan, ended: Sequence[Ended]) -> set[int]:
    """Return the ranks that must end since they are cut off from the others.

    Those of the host with fewer ranks that live, of two with as many that without the lowest one.
    """
    if not any(kind == "cut" for *_, kind in happened(job, ended)):
        return set()
    dead = {rank for rank, *_ in ended_by(job, ended)}
    hosts = [[rank for rank in ranks if rank not in dead] for ranks in ((0, 1), (2, 3))]
    return set(min(hosts, key=lambda ranks: (len(ranks), -min(ranks, default=0))))


@pytest.fixture(scope="module")
def replays(forked: Forked, tmp_path_factory: pytest.TempPathFactory) -> Replays:
    return Replays(forked, tmp_path_factory.mktemp("replays"))


@pytest.mark.slow
def test_random_faults(two: Lab, replays: Replays, seed: int):
    job = plan(seed)
    ended = two.run(job.form, job.faults, SHARDMESH_STALL_TIMEOUT_S=faulty_jobs.STALL_S)
    print(f"seed {seed}: {job.form}: {faulty_jobs.text_of(happened(job, ended))}")
    cut_off = cut_off_in(job, ended)
    for rank in cut_off:
        assert "and may be the ones that are cut off" in " ".join(ended[rank].output.split())
    faulty_jobs.check(job, ended, replays, cut_off=cut_off)
