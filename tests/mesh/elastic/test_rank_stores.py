"""Questions to the stores of ranks: answered, or given up when the host has ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore

from shardmesh.mesh.elastic import rank_stores
from shardmesh.mesh.elastic.rank_stores import (
    Connection,
    StoreAddress,
    StoreGoneError,
    serve_store,
)
from shardmesh.mesh.settings import settings
from tests.forked import free_port

SERVE = """
import json, time
from shardmesh.mesh.elastic.rank_stores import serve_store
store, address = serve_store()
print(json.dumps(address._asdict()), flush=True)
time.sleep(600)
"""


@pytest.fixture
def other_rank() -> Iterator[tuple[subprocess.Popen[str], StoreAddress]]:
    """A process that serves a store, and its address."""
    process = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    yield process, StoreAddress.from_json(process.stdout.readline())
    process.kill()
    process.wait()


def never() -> bool:
    return False


def test_ranks_read_what_others_wrote(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    _server, address = serve_store()
    assert address.host == "127.0.0.1"
    one, other = (Connection(address, "job") for _ in range(2))
    one.ask(lambda keys: keys.set("report", "1"), never)
    assert other.ask(lambda keys: keys.read("report", int), never) == 1
    one.ask(lambda keys: keys.replace("decision", "", "2"), never)
    other.ask(lambda keys: keys.replace("decision", "", "3"), never)  # it has read none
    assert one.ask(lambda keys: keys.read("decision", int), never) == 2
    other.ask(lambda keys: keys.replace("decision", "2", "3"), never)
    assert one.ask(lambda keys: keys.read("decision", int), never) == 3
    assert one.clone(never).check(["job/decision"])
    one.close()
    other.close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_question_ends_with_the_host(other_rank, number: int):
    process, address = other_rank
    connection = Connection(address, "job")
    connection.ask(lambda keys: keys.set("report", "1"), never)
    os.kill(process.pid, number)
    since = time.monotonic()
    with pytest.raises(StoreGoneError, match="the store at"):
        while True:
            connection.ask(lambda keys: keys.has("report"), lambda: time.monotonic() > since + 1)


def test_no_thread_is_in_a_call_of_torch_when_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch):
    """One that returns from it then would abort the process."""
    monkeypatch.setattr(rank_stores, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as host:
        connection = Connection(StoreAddress("127.0.0.1", host.getsockname()[1]), "job")
        with pytest.raises(StoreGoneError, match="has ended"):
            connection.ask(lambda keys: keys.has("report"), lambda: True)
        accepted = [host.accept()[0] for _ in range(2)]  # the second one is torch's
    ending = threading.Timer(0.3, lambda: [one.close() for one in accepted])
    ending.start()
    assert connection._thread.is_alive()
    rank_stores._end_threads()
    assert not connection._thread.is_alive()
    ending.join()


@pytest.mark.parametrize(
    ("exit_s", "seconds"), [(2.0, 1.6), (10.0, 8.0), (0.0, 15.0), (60.0, 15.0)]
)
def test_a_process_waits_for_threads_for_a_shorter_time_than_it_has(
    exit_s: float, seconds: float, monkeypatch: pytest.MonkeyPatch
):
    waited: list[float] = []
    thread = SimpleNamespace(join=waited.append)
    stuck = SimpleNamespace(close=lambda: None, _thread=thread)
    monkeypatch.setattr(rank_stores, "_connections", [stuck])
    monkeypatch.setattr(settings(), "exit_s", exit_s)
    rank_stores._end_threads()
    assert waited == [pytest.approx(seconds, abs=0.5)]


def test_a_store_may_begin_to_listen_later():
    address = StoreAddress("127.0.0.1", free_port())
    with pytest.raises(StoreGoneError, match="refused"):
        Connection(address, "job").ask(lambda keys: keys.has("report"), never)
    connection = Connection(address, "job", 60.0)
    tried = threading.Event()

    def listen() -> TCPStore:
        assert tried.wait(60.0)
        return TCPStore(*address, is_master=True, wait_for_workers=False)

    def look() -> bool:
        tried.set()
        return False

    with ThreadPoolExecutor() as pool:
        store = pool.submit(listen)
        assert not connection.ask(lambda keys: keys.has("report"), look)
    connection.close()
    del store


def test_a_connection_that_is_closed_waits_for_no_store():
    connection = Connection(StoreAddress("127.0.0.1", free_port()), "job", 600.0)
    with pytest.raises(StoreGoneError, match="has ended"):
        connection.ask(lambda keys: keys.has("report"), lambda: True)
    connection._thread.join(60.0)
    assert not connection._thread.is_alive()


def test_an_address_that_no_rank_wrote_is_refused():
    for text in (
        "",
        "{}",
        json.dumps({"host": 1, "port": 1}),
        json.dumps({"host": "", "port": -1}),
    ):
        with pytest.raises(ValueError, match=r"."):
            StoreAddress.from_json(text)
