"""Values of the job's store that no rank has written: each ends in one error of one line or two,
soon, whatever it is.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, Header, TraceBuffer
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.launch import job_store, rendezvous
from shardmesh.mesh.launch.local_processes import _local_store
from shardmesh.mesh.launch.preemption import _StoreAgreement
from shardmesh.mesh.launch.progress import Progress
from shardmesh.mesh.monitor.agreement import Agreement, _reason_text
from shardmesh.mesh.monitor.hosts.mirror import is_part, parts
from shardmesh.mesh.monitor.hosts.relay import Host, Relay, _checked_state, _name_of
from shardmesh.mesh.monitor.startup import rank_info, same_mesh
from shardmesh.mesh.monitor.startup.job_name import find_name
from shardmesh.mesh.monitor.startup.rank_info import RankInfo, own_rank_info
from shardmesh.mesh.monitor.store_keys import StoreKeys
from shardmesh.mesh.monitor.store_values import StoreValueError, json_object, parsed, rank_list
from shardmesh.mesh.monitor.verdict import Verdict
from tests.forked import free_port

INFO = json.loads(own_rank_info(1, {"WORLD_SIZE": "2"}, 0, {}).to_json())
VERDICT = json.loads(Verdict("lost", (1,), "", (), "rank 1 died").to_json())


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/shardmesh-was-here",)


# What may be anywhere.
ANY = {
    "bytes": b"\xff\xfe\x00\x01",
    "NUL": b"\0",
    "UTF-16": json.dumps(INFO).encode("utf-16"),
    "pickle": pickle.dumps(Shell()),
    "text": b"hello",
    "path": b"x/../../home/thesis",
    "escapes": b"\x1b]0;owned\x07\x1b[2J",
    "huge": b"a" * (2 << 20),
    "deep": b"[" * 100_000,
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "number": b"1" * 5000,
    "NaN": b"NaN",
    "other digits": "١٢٣".encode(),
}


def changed(valid: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps(valid | fields).encode()


INFOS = ANY | {
    "no fields": changed({}),
    "one more field": changed(INFO, more=1),
    "rank is text": changed(INFO, rank="1"),
    "rank is negative": changed(INFO, rank=-1),
    "rank is a bool": changed(INFO, rank=True),
    "rank is huge": changed(INFO, rank=10**30),
    "pid is a path": changed(INFO, pid="../../etc"),
    "pid is a float": changed(INFO, pid=1.5),
    "host is a list": changed(INFO, host=["a"]),
    "alike is a list": changed(INFO, alike=[]),
    "alike has numbers": changed(INFO, alike={"WORLD_SIZE": 2}),
    "job is null": changed(INFO, job=None),
}
VERDICTS = ANY | {
    "kind": changed(VERDICT, kind="new"),
    "kind is a list": changed(VERDICT, kind=[]),
    "ranks": changed(VERDICT, ranks=["1"]),
    "seen": changed(VERDICT, seen=[1]),
    "seen lacks fields": changed(VERDICT, seen=[{"rank": 1}]),
    "text": changed(VERDICT, text=None),
}
STATE: dict[str, Any] = {
    "beat": 1,
    "pages": {"2": [[0, 1]]},
    "wanted": {},
    "answers": {},
    "verdict": None,
}
STATES = ANY | {
    "beat": changed(STATE, beat="x"),
    "pages": changed(STATE, pages=[1]),
    "pages of another host": changed(STATE, pages={"0": [[0, 1]]}),
    "start": changed(STATE, pages={"2": [[-8, 1]]}),
    "start is text": changed(STATE, pages={"2": [["../x", 1]]}),
    "start is behind the end": changed(STATE, pages={"2": [[1 << 40, 1]]}),
    "three": changed(STATE, pages={"2": [[1, 2, 3]]}),
    "wanted": changed(STATE, wanted={"x": 1}),
    "answers": changed(STATE, answers={"0": {"2": "x"}}),
    "verdict": changed(STATE, verdict="{}"),
}
JOB_NAMES = ANY | {
    "upper": b"ABCDEF0123456789",
    "short": b"abc",
    "dots": b"..",
    "line": b"0123456789abcdef\n",
    "/": b"0123456789abcde/",
}

Read = Callable[[bytes], Any]


def _start_store() -> tuple[Any, Any]:
    store = HashStore()
    return store, PrefixStore("0", PrefixStore("shardmesh/start", store))


def _rendezvous(store: Any, rank: int = 1) -> Any:
    info = own_rank_info(rank, {"WORLD_SIZE": "2"}, 0, {})
    address = job_store.Address("127.0.0.1", 1, False)
    return rendezvous.StoreRendezvous(store, info, Progress(rank, 0.3), address, False).run()


def _start_key(name: str) -> Read:
    def read(value: bytes) -> Any:
        store, keys = _start_store()
        (PrefixStore("shardmesh/start", store) if name == "job" else keys).set(name, value)
        return _rendezvous(store)

    return read


def _job_key(name: str) -> Read:
    def read(value: bytes) -> Any:
        store = HashStore()
        store.set(name, value)
        return find_name(store, 1)

    return read


def _mesh_key(name: str) -> Read:
    def read(value: bytes) -> Any:
        store = HashStore()
        store.set(f"meshes/{name}", value)
        keys = StoreKeys(store, "meshes")
        if name != "first":
            keys.set("first", "0")
        call = same_mesh.MeshCall(0, "mesh", dict.fromkeys(same_mesh._FIELDS, "a"), "x.py:1")
        if name == "verdict":
            keys.append(
                "made",
                json.dumps(
                    vars(call) | {"rank": 1, "fields": dict.fromkeys(same_mesh._FIELDS, "b")}
                )
                + "\n",
            )
        return same_mesh._compare(SimpleNamespace(size=2, monitor=None), keys, "1", call, 0)  # type: ignore[arg-type]

    return read


def _step(value: bytes) -> Any:
    keys = StoreKeys(HashStore(), "preemption")
    keys.set("step1", value)  # type: ignore[arg-type]
    agreement = _StoreAgreement(keys, 0, 2, lambda: False, lambda: None)
    try:
        return agreement._step_of(1)
    finally:
        agreement.stop()


def _file(value: bytes) -> Any:
    store = HashStore()
    store.set("shardmesh/file/1", value)
    return rank_info.file_store_fault(store, 1)


KEYS: dict[str, tuple[Read, dict[str, bytes]]] = {
    "start/job": (_start_key("job"), INFOS),
    "start/0/rank1": (_start_key("rank1"), INFOS),
    "start/0/first": (_start_key("first"), INFOS),
    "start/0/came": (_start_key("came"), ANY | {"negative": b"-1 "}),
    "start/0/came/number": (
        _start_key("came/number"),
        {k: v for k, v in ANY.items() if k != "other digits"},
    ),
    "start/0/verdict": (_start_key("verdict"), ANY),
    "job/0": (_job_key("shardmesh/job/0"), JOB_NAMES),
    "job/0/rank1": (_job_key("shardmesh/job/0/rank1"), INFOS),
    "meshes/first": (_mesh_key("first"), ANY),
    "meshes/made": (_mesh_key("made"), {k: v + b"\n" for k, v in ANY.items()}),
    "meshes/verdict": (_mesh_key("verdict"), VERDICTS),
    "relay/head": (
        lambda v: parsed("k", v, lambda t: _checked_state(json_object(t), (2, 3)), 1 << 20),
        STATES,
    ),
    "relay/place": (lambda v: parsed("k", v, _name_of), ANY),
    "preemption/step": (_step, ANY),
    "file/1": (_file, INFOS),
}
CASES = [(key, name) for key, (_, values) in KEYS.items() for name in values]


def test_there_are_many() -> None:
    assert len(CASES) >= 150


@pytest.mark.one_in(4, each=["key"])
@pytest.mark.parametrize(("key", "name"), CASES)
def test_a_hostile_value_is_one_error(key: str, name: str) -> None:
    read, values = KEYS[key]
    since = time.monotonic()
    with pytest.raises(LaunchEnvironmentError) as found:
        read(values[name])
    text = str(found.value)
    assert len(text) < 25_000
    assert "\x1b" not in text
    assert "\0" not in text
    if key != "start/0/verdict":
        assert "docs/trust.md" in text
        assert len(text) < 600
        assert "\n" not in text
    assert time.monotonic() - since < 10
    assert not os.path.exists("/tmp/shardmesh-was-here")


def test_a_list_of_ranks_that_have_not_come_is_not_waited_for() -> None:
    store, keys = _start_store()
    keys.set("came", "7 ")
    info = own_rank_info(1, {"WORLD_SIZE": "2"}, 0, {})
    address = job_store.Address("127.0.0.1", 1, False)
    one = rendezvous.StoreRendezvous(store, info, Progress(1, 0.3), address, False)
    with pytest.raises(StoreValueError, match="ranks that have not come"):
        one._differences(one.store.below("0"))


def test_all_ranks_raise_the_same() -> None:
    store, keys = _start_store()
    keys.set("rank1", b"\xff")
    texts = []
    for rank in (1, 0):
        with pytest.raises(LaunchEnvironmentError) as found:
            _rendezvous(store, rank)
        texts.append(str(found.value))
    assert texts[0] == texts[1]


def test_the_reason_of_a_job_without_monitor_is_shown_without_escapes() -> None:
    texts = []
    for value in (b"\x1b[2Jgone", b"\xff"):
        store = HashStore()
        store.set("watch/without", value)
        texts.append(_reason_text(StoreKeys(store, "watch")))
    assert texts[0] == "\\x1b[2Jgone"
    assert "which no rank of this job has written" in texts[1]


@pytest.mark.parametrize(
    "named", ["/home/thesis", "../..", "/dev/shm/../../home", "", "/", "\x1b[2J", "~"]
)
def test_a_folder_of_strangers_is_not_used(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
    store = HashStore()
    PrefixStore("shardmesh/monitor/abc", store).set(f"folder/{rank_info.machine()}", named)
    agreement = Agreement(store, "abc", "stale", 0, 2)
    if not named:  # as if nobody had chosen yet
        assert agreement.folder(0) == tmp_path
        return
    with pytest.raises(OSError, match="another process has named") as found:
        agreement.folder(0)
    assert "\x1b" not in str(found.value)


# -- copies of the trace buffers of other hosts ----------------------------------------------------


def test_every_part_of_a_trace_buffer_is_one() -> None:
    buffer = TraceBuffer.private(2, 4)
    for key in range(300):
        buffer.add_group(key, f"group {key}")
    for number in range(5000):
        buffer.write_record(number, (0, 8, 8, 1, 2, 0, 0, 0))
    buffer.write_stack("stack")
    found = list(parts(buffer))
    assert len(found) > 5
    assert all(is_part(start, length) for start, length in found)


@pytest.mark.parametrize(
    ("start", "length"),
    [
        (8, 8),
        (Header.PID_SPACE * 8, 8),
        (0, 8),
        (0, 1024),
        (1, 256),
        (BUFFER_BYTES, 4096),
        (256, 64),
        (1024, 1 << 20),
    ],
)
def test_other_bytes_are_no_part(start: int, length: int) -> None:
    """Whoever writes to the words behind a header could make a copy look like a process of this
    host, and have it killed.
    """
    assert not is_part(start, length)


def test_a_page_of_strangers_turns_the_monitor_off() -> None:
    given_up: list[str] = []
    directory = SimpleNamespace(rank=0, size=4, folder=Path("x"), buffer=None)
    monitor: Any = SimpleNamespace(
        directory=directory, give_up=given_up.append, standing=lambda: None
    )
    relay = Relay(monitor, HashStore(), "here:1")
    host = Host("b", (2, 3))
    for key, data in (("page/2/152", bytes(8)), ("page/2/0", bytes(256)), ("page/2/0", b"x")):
        with pytest.raises(StoreValueError):
            relay._take(host, STATE, {key: data})
    relay._try_to(lambda: relay._take(host, STATE, {"page/2/0": b"x"}))
    assert len(given_up) == 1
    assert "docs/trust.md" in given_up[0]


# -- who reaches the store -------------------------------------------------------------------------


def _listening(port: int) -> set[str]:
    """Return the addresses on which something listens at this port."""
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/net", table).read_text().splitlines()[1:]
    ]
    return {
        line[1].partition(":")[0]
        for line in lines
        if int(line[1].rpartition(":")[2], 16) == port and line[3] == "0A"
    }


def test_the_store_of_a_local_job_listens_on_loopback_only() -> None:
    store = _local_store()
    assert _listening(store.port) == {"0100007F"}
    address = job_store.Address("127.0.0.1", free_port(), False)
    served, serves = job_store.open_store(address, 0, 2, Progress(0, 5.0))
    assert serves
    assert _listening(address.port) == {"0100007F"}
    other = TCPStore("127.0.0.1", address.port, is_master=False, timeout=timedelta(seconds=20))
    served.set("a", "1")
    assert other.get("a") == b"1"
    job_store.drop(address)


def test_a_name_that_leads_elsewhere_is_no_loopback() -> None:
    assert job_store.loopback_socket(("10.0.0.1",), 0) is None
    assert job_store.loopback_socket(("127.0.0.1", "10.0.0.1"), 0) is None
    assert job_store.loopback_socket((), 0) is None


JOB = """
import torch, shardmesh as sm
m = sm.init_device_mesh("cpu", (2,), axis_names=("x",))
y = sm.distribute_tensor(torch.ones(4), m, [sm.Shard(0)]).redistribute(placements=[sm.Replicate()])
print("FOLDER", m.world.monitor and m.world.monitor.directory.folder)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x/../../home/thesis", ".."])
def test_the_store_names_no_folder(name: str, tmp_path: Path) -> None:
    watch, victim = tmp_path / "watch", tmp_path / "home" / "thesis"
    victim.mkdir(parents=True)
    (victim / "chapter").write_text("years of work")
    port = free_port()
    env = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SHARDMESH_WATCH_DIR": str(watch),
    }

    def run(rank: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", JOB]
        return subprocess.Popen(
            command,
            env=env | {"RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    ranks, store = [run("0")], None
    while store is None:
        try:
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        except RuntimeError:
            time.sleep(0.2)
    store.set("shardmesh/epoch0/0//shardmesh/job/0", name)
    ranks.append(run("1"))
    outcomes = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert all("docs/trust.md" in errors for _, errors in outcomes)
    assert [path.name for path in victim.iterdir()] == ["chapter"]


def test_lists_of_ranks() -> None:
    assert rank_list("2 0 3 ") == {0, 2, 3}
    assert RankInfo.from_json(json.dumps(INFO)).to_json() == json.dumps(INFO)
