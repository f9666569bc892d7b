"""Two jobs with one checkpoint folder: nothing hangs, and no file of a live job is removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.launch.local_processes import LaunchError
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.save import async_save, save
from shardmesh.sharding.checkpoint.storage import lease as leases
from shardmesh.sharding.checkpoint.storage.folder import latest
from shardmesh.sharding.checkpoint.storage.lease import Lease, Owner, take_lease
from tests.sharding.ranks import on_mesh, same_error


@pytest.fixture
def short(monkeypatch):
    """Shorten waits to tenths of a second."""
    for name, seconds in {
        "_WAIT_S": 1.0,
        "_STALE_S": 0.4,
        "_BEAT_S": 0.05,
        "_POLL_S": 0.02,
    }.items():
        monkeypatch.setattr(leases, name, seconds)


def elsewhere(folder: Path, number: int = 1) -> Path:
    """Write the file of an owner on another machine."""
    mine = leases._self()
    card = replace(mine.card, host="far", pid=77, machine="another", job="night")
    path = folder / f".owner-{number:08d}.json"
    path.write_text(json.dumps(asdict(Owner(card, "token", mine.since))))
    return path


def owners(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob(".owner-*"))


# -- two jobs of one machine -----------------------------------------------------------------------


def tree(mesh: sm.DeviceMesh, step: int) -> dict[str, object]:
    return {
        "x": sm.distribute_tensor(torch.arange(512.0) + step, mesh, P("dp"), src_data_rank=None),
        "step": step,
    }


def save_until_stopped(folder: Path, stop: Path) -> list[int]:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
    steps, over = [], False
    while not over:
        steps.append(save(tree(mesh, len(steps)), folder, keep=2).step)
        (over, _) = mesh.group("dp").all_gather_object(stop.exists())
    return steps


def save_once(folder: Path) -> tuple[str, int]:
    """Save once; return (the error's text, the process of rank 0)."""
    leases._WAIT_S = 0.5
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
    pid = mesh.group("dp").all_gather_object(os.getpid())[0]
    try:
        save(tree(mesh, 7), folder)
    except CheckpointError as error:
        return str(error), pid
    return "", pid


def save_and_be_killed(folder: Path) -> None:
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
    save(tree(mesh, 0), folder)
    if int(os.environ["RANK"]) == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    save(tree(mesh, 1), folder)


@pytest.mark.slow
def test_second_job_raises_an_error_that_names_the_first(tmp_path):
    folder, stop, results = tmp_path / "checkpoints", tmp_path / "stop", []
    first = threading.Thread(
        target=lambda: results.append(sm.launch(save_until_stopped, 2, (folder, stop)))
    )
    first.start()
    try:
        while not owners(folder) if folder.exists() else True:
            time.sleep(0.05)
        owner = json.loads((folder / owners(folder)[0]).read_text())["card"]["pid"]
        texts = [text for text, _ in sm.launch(save_once, 2, (folder,))]
    finally:
        stop.touch()
        first.join()
    assert texts[0] == texts[1]
    assert f"another job (process {owner} on host" in texts[0]
    assert "use another folder" in texts[0]
    ((steps, again),) = results
    assert steps == again == list(range(len(steps))), "the first job has not noticed anything"
    assert owners(folder) == [], "a job that has ended holds nothing"
    assert [text for text, _ in sm.launch(save_once, 2, (folder,))] == ["", ""]


@pytest.mark.slow
def test_save_after_a_job_was_killed_in_a_save(tmp_path):
    with pytest.raises(LaunchError, match="SIGKILL"):
        sm.launch(save_and_be_killed, 2, (tmp_path,))
    assert owners(tmp_path)
    assert list(tmp_path.glob("*.tmp-*"))
    assert latest(tmp_path).step == 0
    assert [text for text, _ in sm.launch(save_once, 2, (tmp_path,))] == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000000", "step-00000001"]


# -- an owner on another machine -------------------------------------------------------------------


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
@pytest.mark.usefixtures("short")
def test_idle_owner_on_another_machine_is_replaced(tmp_path, skew):
    path = elsewhere(tmp_path)
    os.utime(path, (time.time() + skew,) * 2)
    on_mesh((2,), lambda mesh: save({"n": 1}, tmp_path))
    assert owners(tmp_path) == []


@pytest.mark.parametrize("skew", [-1e6, 1e6])
@pytest.mark.usefixtures("short")
def test_saving_owner_on_another_machine_is_respected(tmp_path, skew):
    path = elsewhere(tmp_path)
    unfinished = tmp_path / "step-00000003.tmp-aa"
    ended = threading.Event()
    unfinished.mkdir()

    def beat():
        now = time.time() + skew
        while not ended.wait(0.05):
            now += 0.1
            os.utime(path, (now, now))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        text = same_error(
            (2,), lambda mesh: save({"n": 1}, tmp_path), CheckpointError, silent=False
        )
    finally:
        ended.set()
        thread.join()
    assert "process 77 on host far of job night" in text
    assert unfinished.exists()
    on_mesh((2,), lambda mesh: save({"n": 1}, tmp_path))  # it does not touch its file any more
    assert not unfinished.exists()


def test_replaced_owner_raises(tmp_path):
    lease = take_lease(tmp_path, keep=True)
    lease.end()
    take_lease(tmp_path, keep=True).end()
    assert owners(tmp_path) == [".owner-00000001.json"]
    next(tmp_path.glob(".owner-*")).unlink()
    path = elsewhere(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"process 77 on host far of job night.* has taken"
        ):
            take_lease(tmp_path, keep=True)
    path.unlink()
    take_lease(tmp_path, keep=True).release()
    assert owners(tmp_path) == []


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False])
def test_one_of_many_replaces_a_dead_owner(tmp_path, links, monkeypatch):
    if not links:
        monkeypatch.setattr(
            os, "link", lambda *paths: (_ for _ in ()).throw(PermissionError("no hard links here"))
        )
    for last in range(20):
        if last:
            elsewhere(tmp_path, last)
        comers = [Lease(tmp_path, leases._self(), keep=False) for _ in range(4)]
        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(lambda one, last=last: one.claim(last), comers))
        assert won.count(True) == 1
        assert owners(tmp_path) == [f".owner-{last + 1:08d}.json"]


def test_owner_numbers_that_restart(tmp_path):
    """A process that looked before the owner released the folder does not win, though no file has
    its number.
    """
    elsewhere(tmp_path, 1)
    late = Lease(tmp_path, leases._self(), keep=False)
    assert not late.claim(5)
    assert owners(tmp_path) == [".owner-00000001.json"]


@pytest.mark.usefixtures("short")
def test_empty_owner_file(tmp_path):
    """Its process was killed before writing it, on a file system without hard links."""
    (tmp_path / ".owner-00000004.json").write_text("")
    on_mesh((2,), lambda mesh: save({"n": 1}, tmp_path))
    assert owners(tmp_path) == []


@pytest.mark.usefixtures("short")
def test_two_saves_of_one_process(tmp_path):
    lease = take_lease(tmp_path, keep=False)
    text = same_error((2,), lambda mesh: save({"n": 1}, tmp_path), CheckpointError, silent=False)
    assert "another save of this process" in text
    lease.end()
    on_mesh((2,), lambda mesh: save({"n": 1}, tmp_path))


def test_failed_save_releases_the_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "Input/output error"))
        )
        same_error((2,), lambda mesh: save({"n": 1}, tmp_path), CheckpointError, silent=False)
    assert owners(tmp_path) == []


def test_unfinished_folder_removed_by_another_process(tmp_path, monkeypatch):
    """Rank 0 does not wait for files that can no longer appear."""
    opened, whole = threading.Event(), os.write

    def write(fd, data):
        assert threading.current_thread().name != "of rank 1" or opened.wait(20)
        return whole(fd, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(leases, "_WAIT_S", 1.0)

    def program(mesh):
        rank = mesh.get_rank()
        x = sm.distribute_tensor(torch.arange(8.0), mesh, P("a"), src_data_rank=None)
        saving = async_save({"x": x}, tmp_path)
        saving._thread.name = f"of rank {rank}"
        if rank == 0:
            shutil.rmtree(next(tmp_path.glob("*.tmp-*")))
            saving._thread.join(20)
            assert saving.done(), "rank 0 still waits"
            opened.set()
        with pytest.raises(CheckpointError) as caught:
            saving.wait()
        return str(caught.value)

    texts = on_mesh((2,), program)
    assert texts[0] == texts[1]
    assert owners(tmp_path) == []


# -- files that are no owner's ---------------------------------------------------------------------


def _changed(folder: Path, **changes: object) -> None:
    path = elsewhere(folder)
    owner = json.loads(path.read_text())
    owner["card"].update(changes)
    path.write_text(json.dumps(owner))


DAMAGES = {
    "empty": lambda folder: (folder / ".owner-00000001.json").write_bytes(b""),
    "not text": lambda folder: (folder / ".owner-00000001.json").write_bytes(b"\xff\xfe"),
    "a list": lambda folder: (folder / ".owner-00000001.json").write_text("[]"),
    "null": lambda folder: (folder / ".owner-00000001.json").write_text(
        '{"card": null, "token": 1, "since": 2}'
    ),
    "deep": lambda folder: (folder / ".owner-00000001.json").write_text("[" * 30_000),
    "large": lambda folder: (folder / ".owner-00000001.json").write_bytes(bytes(1 << 20)),
    "pid text": lambda folder: _changed(folder, pid="1"),
    "pid negative": lambda folder: _changed(folder, pid=-1),
    "pid huge": lambda folder: _changed(folder, pid=10**30),
    "host a list": lambda folder: _changed(folder, host=["x"]),
    "one field more": lambda folder: _changed(folder, shell="x"),
    "a folder": lambda folder: (folder / ".owner-00000001.json").mkdir(),
    "a full folder": lambda folder: (folder / ".owner-00000004.json" / "x").mkdir(parents=True),
    "a FIFO": lambda folder: os.mkfifo(folder / ".owner-00000001.json"),
    "a link to itself": lambda folder: (folder / ".owner-00000001.json").symlink_to(
        ".owner-00000001.json"
    ),
    "a link to a device": lambda folder: (folder / ".owner-00000002.json").symlink_to("/dev/zero"),
    "a short number": lambda folder: (folder / ".owner-1.json").write_text(""),
    "other digits": lambda folder: (
        folder / ".owner-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661.json"
    ).write_text(""),
    "the largest number": lambda folder: (folder / f".owner-{'9' * 18}.json").mkdir(),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_owner_file_does_not_stop_later_saves(name, short, tmp_path):
    """Neither the first save nor one after it waits for an owner that is none."""
    DAMAGES[name](tmp_path)
    for step in range(3):
        on_mesh((2,), lambda mesh, step=step: save({"n": step}, tmp_path, step=step))
    assert latest(tmp_path).step == 2
