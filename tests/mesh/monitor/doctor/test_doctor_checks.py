"""`python -m shardmesh doctor`: its report for healthy and faulty hosts and jobs, given their
facts.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardmesh.mesh.doctor.bandwidth import Bandwidth
from shardmesh.mesh.doctor.checks import (
    clocks,
    collectives,
    device_of_each_rank,
    findings,
    hosts,
    speed,
    worst_findings,
)
from shardmesh.mesh.doctor.command import _mesh_of_size
from shardmesh.mesh.doctor.findings import fault, ok, size_text, warning
from shardmesh.mesh.doctor.job_checks import matches
from shardmesh.mesh.doctor.report import Report
from shardmesh.mesh.doctor.system import Leftover, Limits, Space
from shardmesh.mesh.network import Port
from tests.mesh.monitor.healthy_host import (
    ADDRESS,
    ALONE,
    BY_HAND,
    GIB,
    GPU,
    JOB,
    SLURM,
    TWO_HOSTS,
    facts,
)

MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HEALTHY = {
    "alone": facts(),
    "torchrun": facts(JOB),
    "torchrun on two hosts": facts(TWO_HOSTS),
    "by hand": facts(BY_HAND),
    "slurm with torch's variables": facts(SLURM | BY_HAND | {"RANK": "2"}),
    "a batch script of slurm": facts({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}),
    "slurm with an address": facts(SLURM | ADDRESS | {"OMP_NUM_THREADS": "4"}),
    "mpirun on nodes of slurm": facts(
        MPI | SLURM | ADDRESS | {"SLURM_STEP_NUM_TASKS": "3", "OMP_NUM_THREADS": "4"}
    ),
    "one GPU for each rank": facts(
        {**JOB, "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "1"}, usable=(GPU,)
    ),
    "four GPUs": facts(
        {**JOB, "OMP_NUM_THREADS": "1"},
        build="CUDA 12.8",
        driver=True,
        usable=(GPU,) * 4,
        nccl="2.27.3",
    ),
    "Debian's name for itself": facts(own=("127.0.1.1",), local=frozenset({"127.0.1.1"})),
    "a name that GLOO_SOCKET_IFNAME makes good for": facts(
        TWO_HOSTS | {"GLOO_SOCKET_IFNAME": "eth0"}, own=()
    ),
    "NCCL told by prefix": facts(TWO_HOSTS | {"NCCL_SOCKET_IFNAME": "eth"}),
    "NCCL told what not to take": facts(TWO_HOSTS | {"NCCL_SOCKET_IFNAME": "^lo,docker"}),
    "a container": facts(
        {"OMP_NUM_THREADS": "2"}, container=True, limits=Limits(2.0, 8 * GIB, 4096)
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_host_passes_all_checks(name):
    assert {
        check: finding
        for check, finding in findings(HEALTHY[name]).items()
        if finding.status != "ok"
    } == {}


# (what is wrong, the facts, the check that must say so, how bad it is, what must be in the finding,
# what in the fix)
FAULTY = [
    ("torch is old", facts(torch="2.4.1"), "torch", "fault", "2.4.1", "pip install"),
    (
        "torch talks to nobody",
        facts(distributed=False),
        "torch",
        "fault",
        "torch.distributed",
        "USE_DISTRIBUTED",
    ),
    ("torch lacks gloo", facts(gloo=False), "backends", "fault", "gloo", "pip install"),
    (
        "GPUs without NCCL",
        facts(usable=(GPU,), nccl=False),
        "backends",
        "fault",
        "NCCL",
        "pip install",
    ),
    (
        "GPUs without triton",
        facts(usable=(GPU,), triton=""),
        "triton",
        "warning",
        "not installed",
        "shardmesh[gpu]",
    ),
    (
        "a driver that hangs",
        facts(driver=True, build="CUDA 12.8", error="no answer within 60 s"),
        "devices",
        "fault",
        "no answer within 60 s",
        "nvidia-smi",
    ),
    (
        "a driver, but torch for CPUs",
        facts(driver=True),
        "devices",
        "warning",
        "CPU alone",
        "download.pytorch.org",
    ),
    (
        "hidden GPUs",
        facts(
            {"CUDA_VISIBLE_DEVICES": ""},
            driver=True,
            build="CUDA 12.8",
            error="No CUDA GPUs are available",
        ),
        "devices",
        "warning",
        "CUDA_VISIBLE_DEVICES= ",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (
        "no GPU behind a driver",
        facts(driver=True, build="CUDA 12.8"),
        "devices",
        "fault",
        "finds none",
        "--gpus all",
    ),
    (
        "an unknown GPU of several",
        facts(BY_HAND | {"CUDA_VISIBLE_DEVICES": "0,1"}, usable=(GPU,) * 2),
        "own device",
        "warning",
        "2 cuda devices (CUDA_VISIBLE_DEVICES='0,1'), so it is unknown",
        "torchrun",
    ),
    (
        "fewer GPUs than ranks",
        facts(JOB, usable=(GPU, GPU)),
        "devices",
        "warning",
        "2 devices for 4 ranks",
        "--nproc-per-node 2",
    ),
    (
        "a full GPU",
        facts(usable=(GPU, replace(GPU, free=GIB))),
        "devices",
        "warning",
        "device 1 (1 GiB of 80 GiB free)",
        "nvidia-smi",
    ),
    (
        "GPUs apart",
        facts(usable=(GPU, GPU), no_peers=((0, 1),)),
        "peer access",
        "warning",
        "1 of 2 pairs",
        "topo",
    ),
    (
        "a container's quota",
        facts(limits=Limits(cores=2.0)),
        "cores",
        "warning",
        "time for 2",
        "OMP_NUM_THREADS=2",
    ),
    (
        "too many threads",
        facts(JOB | {"OMP_NUM_THREADS": "16"}),
        "threads",
        "warning",
        "16 cores",
        "OMP_NUM_THREADS=4",
    ),
    (
        "threads not set",
        facts({k: v for k, v in JOB.items() if k != "OMP_NUM_THREADS"}),
        "threads",
        "warning",
        "each of 4 ranks starts 16",
        "OMP_NUM_THREADS=4",
    ),
    (
        "idle cores",
        facts(JOB | {"OMP_NUM_THREADS": "1"}),
        "threads",
        "warning",
        "12 of 16 cores idle",
        "OMP_NUM_THREADS=4",
    ),
    (
        "no number of threads",
        facts({"OMP_NUM_THREADS": "all"}),
        "threads",
        "fault",
        "'all'",
        "OMP_NUM_THREADS=16",
    ),
    (
        "hardly any memory",
        facts(JOB, available=GIB // 2),
        "memory",
        "fault",
        "512 MiB available",
        "--memory",
    ),
    (
        "little memory",
        facts(JOB, limits=Limits(memory=2 * GIB)),
        "memory",
        "warning",
        "the container's limit",
        "--memory",
    ),
    (
        "docker's shared memory",
        facts(shared=Space("/dev/shm", 64 << 20, 64 << 20)),
        "shared memory",
        "warning",
        "64 MiB free of 64 MiB",
        "--shm-size",
    ),
    (
        "docker's shared memory, with GPUs",
        facts(JOB, shared=Space("/dev/shm", 64 << 20, 64 << 20), usable=(GPU,) * 4),
        "shared memory",
        "fault",
        "4 ranks need about",
        "--shm-size",
    ),
    (
        "full shared memory",
        facts(shared=Space("/dev/shm", GIB, 0)),
        "shared memory",
        "fault",
        "0 B free of 1 GiB",
        "/dev/shm",
    ),
    (
        "no shared memory",
        facts(shared=Space("/dev/shm", 0, 0)),
        "shared memory",
        "warning",
        "not there",
        "--shm-size",
    ),
    (
        "few files",
        facts(JOB, open_files=(256, 1 << 20)),
        "open files",
        "fault",
        "at most 256",
        "ulimit -n 768",
    ),
    (
        "few files for ever",
        facts(JOB, open_files=(256, 256)),
        "open files",
        "fault",
        "at most 256",
        "limits.conf",
    ),
    ("few processes", facts(JOB, processes=128), "processes", "fault", "at most 128", "ulimit -u"),
    (
        "a container's processes",
        facts(JOB, limits=Limits(processes=100)),
        "processes",
        "fault",
        "at most 100",
        "--pids-limit",
    ),
    (
        "a dead job's files",
        facts(leftovers=(Leftover("/dev/shm/shardmesh-0-ab", 2 << 20),)),
        "left over",
        "warning",
        "1 of jobs that are dead (2 MiB)",
        "python -m shardmesh doctor --fix",
    ),
    (
        "a dead job's tensors",
        facts(leftovers=(Leftover("/dev/shm/torch_4711_1_0", 2 << 20),)),
        "left over",
        "warning",
        "1 of jobs that are dead (2 MiB)",
        "rm /dev/shm/torch_4711_1_0",
    ),
    ("half an environment", facts({"RANK": "0"}), "launcher", "fault", "WORLD_SIZE", "torchrun"),
    (
        "a rank beyond the job",
        facts(JOB | {"RANK": "4"}),
        "launcher",
        "fault",
        "RANK=4 with WORLD_SIZE=4",
        "torchrun",
    ),
    (
        "a rank in words",
        facts(JOB | {"RANK": "one"}),
        "launcher",
        "fault",
        "RANK='one'",
        "torchrun",
    ),
    (
        "a local rank in words",
        facts(JOB | {"LOCAL_RANK": "x"}),
        "launcher",
        "fault",
        "LOCAL_RANK='x'",
        "unset LOCAL_RANK",
    ),
    (
        "a local rank too far",
        facts(JOB | {"LOCAL_RANK": "4"}),
        "launcher",
        "fault",
        "LOCAL_RANK=4",
        "unset LOCAL_RANK",
    ),
    (
        "slurm alone",
        facts(SLURM),
        "launcher",
        "fault",
        "started by slurm in 4 processes",
        "export MASTER_ADDR=",
    ),
    ("MPI alone", facts(MPI), "launcher", "fault", "started by mpi in 2", "export MASTER_ADDR="),
    (
        "slurm's numbers of mpirun's daemons",
        facts(MPI | SLURM),
        "launcher",
        "fault",
        "started by mpi in 2",
        "export MASTER_ADDR=",
    ),
    (
        "too few GPUs for this rank",
        facts(JOB | {"LOCAL_RANK": "3"}, usable=(GPU,) * 2),
        "own device",
        "warning",
        "sees 2 cuda",
        "torchrun",
    ),
    (
        "slurm says otherwise",
        facts(SLURM | BY_HAND),
        "launcher",
        "fault",
        "RANK=0 but SLURM_PROCID=2",
        "export RANK=$SLURM_PROCID",
    ),
    (
        "a slow torch",
        facts({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
        "settings",
        "warning",
        "DETAIL",
        "unset TORCH_DISTRIBUTED_DEBUG",
    ),
    (
        "a slow NCCL",
        facts({"NCCL_P2P_DISABLE": "1"}),
        "settings",
        "warning",
        "NCCL_P2P_DISABLE=1",
        "unset NCCL_P2P_DISABLE",
    ),
    (
        "no such guard",
        facts({"SHARDMESH_MONITOR": "yes"}),
        "settings",
        "fault",
        "'yes'",
        "unset SHARDMESH_MONITOR",
    ),
    (
        "no such time",
        facts({"SHARDMESH_STALL_WARN_S": "1m"}),
        "settings",
        "fault",
        "'1m'",
        "unset SHARDMESH_STALL_WARN_S",
    ),
    (
        "no guard",
        facts({"SHARDMESH_MONITOR": "off"}),
        "settings",
        "warning",
        "SHARDMESH_MONITOR=off",
        "unset SHARDMESH_MONITOR",
    ),
    (
        "no such interface for gloo",
        facts({"GLOO_SOCKET_IFNAME": "ib0"}),
        "gloo interface",
        "fault",
        "no interface 'ib0', only lo (127.0.0.1, ::1), eth1 (down), eth0 (10.0.0.5)",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "gloo's is down",
        facts({"GLOO_SOCKET_IFNAME": "eth1"}),
        "gloo interface",
        "fault",
        "eth1 (down)",
        "ip link set eth1 up",
    ),
    (
        "one of gloo's is missing",
        facts({"GLOO_SOCKET_IFNAME": "eth0,ib0"}),
        "gloo interface",
        "fault",
        "'ib0'",
        "=eth0",
    ),
    (
        "gloo's leads nowhere",
        facts(TWO_HOSTS | {"GLOO_SOCKET_IFNAME": "lo"}),
        "gloo interface",
        "fault",
        "other hosts",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "no such interface for NCCL",
        facts({"NCCL_SOCKET_IFNAME": "ib"}),
        "nccl interface",
        "fault",
        "=ib names no",
        "=eth0",
    ),
    (
        "NCCL's is not whole",
        facts({"NCCL_SOCKET_IFNAME": "=eth"}),
        "nccl interface",
        "fault",
        "==eth names no",
        "=eth0",
    ),
    (
        "NCCL's is down",
        facts({"NCCL_SOCKET_IFNAME": "eth1"}),
        "nccl interface",
        "fault",
        "eth1 (down)",
        "=eth0",
    ),
    (
        "NCCL's leads nowhere",
        facts(TWO_HOSTS | {"NCCL_SOCKET_IFNAME": "lo"}),
        "nccl interface",
        "fault",
        "other hosts",
        "=eth0",
    ),
    (
        "a name that means nothing",
        facts(own=()),
        "hostname",
        "warning",
        "node1 does not resolve",
        "/etc/hosts",
    ),
    (
        "the same, on two hosts",
        facts(TWO_HOSTS, own=()),
        "hostname",
        "fault",
        "does not resolve",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "another host's name",
        facts(own=("10.0.0.9",)),
        "hostname",
        "warning",
        "10.0.0.9, which is not",
        "/etc/hosts",
    ),
    (
        "a name for this host alone",
        facts(TWO_HOSTS, own=("127.0.1.1",), local=frozenset({"127.0.1.1"})),
        "hostname",
        "fault",
        "other hosts cannot reach",
        "GLOO_SOCKET_IFNAME=eth0",
    ),
    (
        "nobody's address",
        facts(JOB, master=()),
        "master address",
        "fault",
        "does not resolve",
        "MASTER_ADDR=",
    ),
    (
        "each host's own address",
        facts(TWO_HOSTS, master=("127.0.0.1",)),
        "master address",
        "fault",
        "look for rank 0 on themselves",
        "MASTER_ADDR=",
    ),
    (
        "another host's address",
        facts(BY_HAND, master=("10.0.0.9",)),
        "master address",
        "fault",
        "where rank 0 is",
        "MASTER_ADDR=",
    ),
    (
        "a taken port",
        facts(BY_HAND, port=Port(29500, True, "python3 (process 4711)")),
        "master port",
        "fault",
        "in use by python3 (process 4711)",
        "MASTER_PORT=29501",
    ),
    (
        "a launcher that is gone",
        facts(JOB, port=Port(29500, False, "", False)),
        "master port",
        "fault",
        "nothing answers",
        "nc -vz",
    ),
    (
        "torchrun's port is taken",
        facts(port=Port(29500, True)),
        "master port",
        "warning",
        "is in use",
        "--standalone",
    ),
]


@pytest.mark.parametrize(
    ("have", "check", "status", "found", "fix"),
    [row[1:] for row in FAULTY],
    ids=[row[0] for row in FAULTY],
)
def test_faults_are_named_with_a_fix(have, check, status, found, fix):
    said = findings(have)[check]
    assert said.status == status, said
    assert found in said.facts
    assert fix in said.fix


def test_every_check_of_a_host_and_job_can_fail():
    """But `python`, which only says what there is."""
    assert {row[2] for row in FAULTY} == set(findings(ALONE)) - {"python"}


def test_failed_checks_have_a_fix_and_others_do_not():
    everything = [said for row in FAULTY for said in findings(row[1]).values()]
    assert [said for said in everything if bool(said.fix) != (said.status != "ok")] == []


# ----------------------------------------------------------------------------------- ranks together


def test_equal_reports_are_printed_once_and_others_are_named():
    same = {"a": ok("fine"), "b": fault("broken", "mend it")}
    other = {"a": warning("slow", "hurry"), "b": fault("broken", "mend it")}
    assert worst_findings([same, same]) == same
    assert worst_findings([same, other, same, other]) == {
        "a": warning("ranks 1, 3: slow", "hurry"),
        "b": fault("broken", "mend it"),
    }


def test_ranks_with_different_faults_are_listed_separately():
    found = worst_findings(
        [{"a": ok("fine")}, {"a": fault("no x", "get x")}, {"a": fault("no y", "get y")}]
    )
    assert found == {"a": fault("rank 1: no x; rank 2: no y", "get x")}


def test_hosts_and_clocks():
    assert hosts(["a", "b", "a", "b"]).facts == "a: ranks 0, 2; b: ranks 1, 3"
    assert clocks([0.0, 0.002, -0.003]).status == "ok"
    assert clocks([0.0, 0.002, -4.0]).facts == "the clock of rank 2 is 4 s behind that of rank 0"


def test_the_device_of_a_rank_is_told():
    one, other = replace(GPU, identity="GPU-a"), replace(GPU, identity="GPU-b")
    here = facts(JOB | {"CUDA_VISIBLE_DEVICES": "2,3"}, usable=(one, other))
    assert (
        findings(here)["own device"].facts
        == "cuda:1 (GPU-b): LOCAL_RANK=1, 2 cuda devices (CUDA_VISIBLE_DEVICES='2,3')"
    )
    assert (
        findings(facts(usable=(GPU,)))["own device"].facts == "cuda:0: no LOCAL_RANK, 1 cuda device"
    )


def test_ranks_that_share_a_device_are_named():
    first, second = replace(GPU, identity="GPU-a"), replace(GPU, identity="GPU-b")
    each = [facts({**JOB, "LOCAL_RANK": str(r)}, usable=(first, second)) for r in range(2)]
    assert device_of_each_rank(each, "cuda") == ok("rank 0: cuda:0; rank 1: cuda:1")
    one = [
        facts({**JOB, "LOCAL_RANK": str(r), "CUDA_VISIBLE_DEVICES": "0"}, usable=(first,))
        for r in range(2)
    ]
    said = device_of_each_rank(one, "cuda")
    assert (said.status, said.facts) == (
        "fault",
        "ranks 0, 1 use GPU-a of node1: NCCL needs one device for each rank",
    )
    assert device_of_each_rank(one, "cpu").status == "warning"
    elsewhere = [one[0], replace(one[1], network=replace(one[1].network, hostname="node2"))]
    assert device_of_each_rank(elsewhere, "cuda").status == "ok"
    assert device_of_each_rank([facts(JOB)], "cpu") == ok("none: no GPU")


@pytest.mark.parametrize(
    ("env", "count", "expected"),
    [
        (JOB, 4, "cuda"),
        (JOB, 1, "cpu"),  # one GPU for all
        ({**JOB, "CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda"),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, "cpu"),
    ],
)
def test_collectives_are_tried_on_gpus_where_each_rank_has_one(env, count, expected):
    assert _mesh_of_size(None, 4, facts(env, usable=(GPU,) * count)).device_type == expected


def row(op: str = "all_reduce", gigabytes: float = 10.0, correct: bool = True) -> Bandwidth:
    return Bandwidth("dp", 2, op, int(gigabytes * 1e9), 1.0, 1e-5, correct)


def test_wrong_results_fail():
    assert collectives([row(), row("all_to_all")]).status == "ok"
    assert (
        collectives([row(), row("all_to_all", correct=False)]).facts
        == "wrong results: all_to_all along dp"
    )


@pytest.mark.parametrize(
    ("gigabytes", "device_type", "many", "status"),
    [
        (0.5, "cpu", False, "ok"),
        (0.5, "cpu", True, "ok"),
        (0.1, "cpu", True, "warning"),
        (2.0, "cuda", False, "warning"),
        (2.0, "cuda", True, "ok"),
        (20.0, "cuda", False, "ok"),
    ],
)
def test_slow_hardware_warns(gigabytes, device_type, many, status):
    assert speed([row(gigabytes=gigabytes)], device_type, many).status == status


def test_report_as_text_and_json():
    report = Report("a host", {"a": ok("fine"), "long name": fault("broken", "mend it")}, [row()])
    assert str(report).splitlines() == [
        "shardmesh doctor: a host",
        "",
        "ok       a          fine",
        "FAULT    long name  broken",
        "                    fix: mend it",
        "",
        "axis  ranks  collective  latency  bandwidth into each rank",
        "dp    2      all_reduce  10 us    10 GB/s",
        "",
        "1 fault, no warnings, 1 ok",
    ]
    assert json.loads(report.to_json()) == {
        "version": 1,
        "subject": "a host",
        "ok": False,
        "checks": [
            {"name": "a", "status": "ok", "found": "fine", "fix": ""},
            {"name": "long name", "status": "fault", "found": "broken", "fix": "mend it"},
        ],
        "bandwidth": [
            {
                "axis": "dp",
                "ranks": 2,
                "op": "all_reduce",
                "bytes": 10**10,
                "seconds": 1.0,
                "latency_s": 1e-5,
                "gigabytes_per_second": 10.0,
            }
        ],
    }
    assert report.exit_status == 1


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("eth", "eth0", True),
        ("=eth", "eth0", False),
        ("=eth0", "eth0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=eth1", "eth10", True),
        ("ib,eth", "eth0", True),
    ],
)
def test_nccl_interface_variables(pattern, name, expected):
    assert matches(pattern, name) is expected


def test_sizes_as_text():
    assert [size_text(size) for size in (0, 1023, 64 << 20, 5 << 30, 3 << 40)] == [
        "0 B",
        "1.02e+03 B",
        "64 MiB",
        "5 GiB",
        "3 TiB",
    ]
