"""`python -m shardmesh doctor`: how it collects facts, and what it does on real ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shardmesh.mesh.doctor.command as command
from shardmesh.__main__ import main
from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, MAGIC, Header, TraceBuffer
from shardmesh.mesh.doctor.devices import Devices, parse_probe
from shardmesh.mesh.doctor.facts import Place
from shardmesh.mesh.doctor.system import Leftover, Limits, leftovers, limits, meminfo
from shardmesh.mesh.monitor.recording.files import folder_prefix
from shardmesh.mesh.monitor.recording.job_directory import born, pid_space
from shardmesh.mesh.network import can_connect, interfaces, is_in_use, listener, listening, within
from tests.mesh.monitor.healthy_host import BY_HAND, GIB, GPU, JOB, SLURM, facts

LIMIT_S = 60.0

# ------------------------------------------------------------------------------- how facts are read


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, Limits()),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "150000 100000\n"}, Limits(1.5)),
        (
            {
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "/sys/fs/cgroup/a/b/memory.max": "max\n",
                "/sys/fs/cgroup/a/memory.max": "1073741824\n",
                "/sys/fs/cgroup/a/b/pids.max": "512\n",
            },
            Limits(2.0, GIB, 512),
        ),
        (
            {
                "/proc/self/cgroup": (
                    "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n2:pids:/docker/x\n"
                ),
                # A container sees its own group as the root.
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/pids/pids.max": "max\n",
            },
            Limits(4.0),
        ),
        (
            {
                "/proc/self/cgroup": "3:cpu:/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            Limits(),
        ),
    ],
)
def test_limits_of_containers(files, expected):
    assert limits(lambda path: files.get(path, "")) == expected


def test_meminfo():
    assert meminfo("MemTotal:  1024 kB\nHugePages_Total:  0\n") == {"MemTotal": 1 << 20}
    assert meminfo("") == {}


def test_rank_of_a_process_in_its_job():
    assert Place.of({}) == Place("none", 0, 1, 0, 1, False)
    assert Place.of(JOB) == Place("torchrun", 1, 4, 1, 4, True)
    assert Place.of(SLURM | {"SLURM_STEP_NUM_NODES": "2", "WORLD_SIZE": "4"}).local_size == 2
    assert Place.of({"RANK": "x", "WORLD_SIZE": "-1"}).size == 1


def test_unresponsive_probe_is_abandoned():
    assert within(LIMIT_S, lambda: 1, 0) == 1
    assert within(0.05, lambda: time.sleep(5.0) or 1, 0) == 0
    assert within(LIMIT_S, lambda: os.listdir("/no/such/folder"), None) is None


def test_devices_that_cannot_be_queried():
    def ended(stdout: str = "", stderr: str = "", status: int = 0):
        return lambda: subprocess.CompletedProcess([], status, stdout, stderr)

    def hangs():
        raise subprocess.TimeoutExpired([], 60.0)

    assert parse_probe("CUDA 12.8", True, hangs).error == "the driver did not answer within 60 s"
    assert (
        parse_probe(
            "CUDA 12.8", True, ended("", "Traceback\nRuntimeError: driver too old\n", 1)
        ).error
        == "RuntimeError: driver too old"
    )
    assert parse_probe("CUDA 12.8", True, ended("", "", -11)).error == "exit status -11"
    printed = json.dumps(
        {"devices": [["H100", 80 * GIB, 79 * GIB]], "no_peers": [[0, 1]], "nccl": "2.27.3"}
    )
    assert parse_probe("CUDA 12.8", True, ended(printed)) == Devices(
        "CUDA 12.8", True, (GPU,), ((0, 1),), "2.27.3"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_process_that_listens_on_a_port_is_found():
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        mine.listen()
        port = mine.getsockname()[1]
        assert is_in_use(port)
        assert can_connect("127.0.0.1", port)
        assert f"(process {os.getpid()})" in listener(port)
    assert not is_in_use(port)
    assert not can_connect("127.0.0.1", port)
    assert listener(port) == ""


def test_only_listening_sockets_of_that_port_count():
    table = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1054 1 0
   1: 0100007F:733C 0100007F:1234 01 00000000:00000000 00:00000000 00000000     0        0 1055 1 0
   2: 00000000:07E8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1056 1 0
"""
    assert list(listening(table, 29500)) == ["1054"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel as Linux answers")
def test_this_host_has_a_loopback_interface():
    (loopback,) = [one for one in interfaces() if one.name == "lo"]
    assert loopback.up
    assert loopback.addresses[0] == "127.0.0.1"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_files_of_dead_jobs_are_found_and_of_live_jobs_are_not(tmp_path):
    done = subprocess.Popen(["true"])
    done.wait()
    for name, pid in (("dead", done.pid), ("alive", os.getpid())):
        write_page(tmp_path / f"{folder_prefix()}{name}", pid)
        (tmp_path / f"torch_{pid}_1_0").write_bytes(b"1234")
    (tmp_path / f"{folder_prefix()}empty").mkdir()
    (tmp_path / "torch_notes").touch()
    expected = [
        Leftover(f"{tmp_path}/{folder_prefix()}dead", BUFFER_BYTES),
        Leftover(f"{tmp_path}/torch_{done.pid}_1_0", 4),
    ]
    assert list(leftovers([tmp_path], tmp_path)) == expected


def write_page(folder: Path, pid: int) -> None:
    memory = bytearray(BUFFER_BYTES)
    words = TraceBuffer(memory).words
    words[Header.MAGIC], words[Header.PID], words[Header.BORN], words[Header.PID_SPACE] = (
        MAGIC,
        pid,
        born(pid),
        pid_space(),
    )
    folder.mkdir()
    (folder / "rank0.trace").write_bytes(memory)


# -------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nprocs", "1"], "collectives need at least 2 processes, got 1"),
        (["--mesh", "dp"], "'dp' is not a mesh"),
        (["--mesh", "dp=3", "--nprocs", "2"], "--mesh dp=3 has 3 ranks, but --nprocs is 2"),
        (["--mesh", "dp=2,tp=2", "--nprocs", "3"], "--nprocs is 3"),
    ],
)
def test_invalid_arguments_raise(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr(command, "collect_facts", facts)
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def environment() -> dict[str, str]:
    """Return this process's environment, without a job's variables."""
    return {name: value for name, value in os.environ.items() if name not in (*JOB, *BY_HAND)}


def doctor(
    *arguments: str, env: dict[str, str], before: str = ""
) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys; from shardmesh.__main__ import main; {before}; sys.exit(main(['doctor', "
        "*sys.argv[1:]]))"
    )
    start = (
        [sys.executable, "-c", code] if before else [sys.executable, "-m", "shardmesh", "doctor"]
    )
    process = subprocess.Popen(
        [*start, *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=2 * LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.mark.slow
def test_outside_a_job_it_starts_processes_and_measures():
    done = doctor("--json", "--nprocs", "2", env=environment())
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.returncode == (0 if found["ok"] else 1), done.stderr
    assert checks["collectives"]["status"] == "ok"
    assert checks["launcher"]["found"].startswith("none")
    assert [(row["axis"], row["ranks"], row["op"]) for row in found["bandwidth"]] == [
        ("ranks", 2, "all_reduce"),
        ("ranks", 2, "all_to_all"),
    ]
    for row in found["bandwidth"]:
        assert 0 < row["latency_s"] < row["seconds"]
        assert row["gigabytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)


def test_ranks_that_never_connect_time_out():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment() | BY_HAND | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = (
        "import shardmesh.mesh.doctor.command as command; command._LIMIT_S = 1.0; command._SECONDS "
        "= 0.1"
    )
    done = doctor(env=env, before=before)
    assert done.returncode == 1
    assert "FAULT    collectives" in done.stdout, done.stderr
    assert "not done within" in done.stdout


def test_faults_that_prevent_a_rendezvous_skip_it(monkeypatch, capsys):
    monkeypatch.setattr(command, "collect_facts", lambda: facts({"GLOO_SOCKET_IFNAME": "ib0"}))
    monkeypatch.setattr(command, "launch", None)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAULT    gloo interface" in shown
    assert "not tried, because of the fault in: gloo interface" in shown


def examine_as_rank(arguments: list[str]) -> tuple[int, str]:
    command._SECONDS = 0.2
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        return main(["doctor", *arguments]), shown.getvalue()


def test_in_a_job_it_uses_its_ranks_and_one_prints(world4):
    results = world4(examine_as_rank, ["--json", "--mesh", "dp=2,tp=2"])
    found = json.loads(results[0][1])
    checks = {check["name"]: check for check in found["checks"]}
    assert [shown for _, shown in results[1:]] == ["", "", ""]
    assert {status for status, _ in results} == {0 if found["ok"] else 1}
    assert [(row["axis"], row["op"]) for row in found["bandwidth"]] == [
        (axis, op) for axis in ("dp", "tp") for op in ("all_reduce", "all_to_all")
    ]
    assert checks["collectives"]["status"] == checks["clocks"]["status"] == "ok"
    # As the pool starts it.
    assert (
        checks["process group"]["found"]
        == "cpu: gloo, 300 s; cuda: gloo, 300 s; device bound: none"
    )
    assert checks["device of each rank"]["found"] == "none: no GPU"
    assert checks["hosts"]["found"] == f"{socket.gethostname()}: ranks 0, 1, 2, 3"


def refused(arguments: list[str]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), pytest.raises(SystemExit):
        main(["doctor", *arguments])
    return shown.getvalue()


def test_in_a_job_the_mesh_must_be_of_all_ranks(world4):
    assert all(
        "has 6 ranks, but the job has 4" in said for said in world4(refused, ["--mesh", "dp=6"])
    )
    assert all("a job of 4 already" in said for said in world4(refused, ["--nprocs", "2"]))
