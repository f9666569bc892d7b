"""How a save or a load ends: interrupted, out of memory, with a rank that died, and with errors
that nobody waits for.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.text import shortened
from shardmesh.sharding.checkpoint import load, plan, safetensors, save
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.storage import files, manifest, pieces, reading
from shardmesh.sharding.checkpoint.storage.folder import latest
from tests.sharding.ranks import on_mesh, same_error
from tests.tiers import slow

X = torch.arange(48.0).reshape(8, 6)


def tree(mesh, size=48):
    x = torch.arange(float(size)).reshape(-1, 6)
    return {"x": sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None), "whole": x, "step": 5}


# -- Ctrl-C ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values", [slow({"w": torch.ones(100_000), "step": 5}), {"w": torch.ones(3)}]
)
def test_ctrl_c_in_any_write(values, tmp_path, monkeypatch):
    """A signal arrives inside of `torch.save`, which replaces the KeyboardInterrupt by an error of
    its own.
    """
    sm.checkpoint.save(values, tmp_path, step=1)
    write, left = files.Sink.write, [0]

    def interrupted(self, data):
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return write(self, data)

    monkeypatch.setattr(files.Sink, "write", interrupted)
    calls = 0
    while left[0] <= 0:
        calls += 1
        left[0] = calls
        if calls > 100:
            raise AssertionError("no end")
        try:
            sm.checkpoint.save(values, tmp_path, step=2, keep=1)
        except KeyboardInterrupt:
            assert latest(tmp_path).step == 1
            continue
    assert calls > 10
    assert latest(tmp_path).step == 2


def test_an_error_while_an_interrupt_is_handled(tmp_path):
    """Programs save when they are interrupted: what fails then is no interrupt."""
    (tmp_path / "file").write_text("")
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        with pytest.raises(CheckpointError):
            sm.checkpoint.save({"n": 1}, tmp_path / "file")


# -- no memory -------------------------------------------------------------------------------------

ERRORS = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 8e9 bytes"
    ),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
]


def save_it(mesh, folder):
    sm.checkpoint.save(tree(mesh), folder / "c", step=2)


def save_later(mesh, folder):
    sm.checkpoint.async_save(tree(mesh), folder / "c", step=2).wait()


def load_it(mesh, folder):
    sm.checkpoint.load(folder / "c", tree(mesh))


def load_file(mesh, folder):
    sm.checkpoint.load_safetensors(folder / "x.safetensors", {"x": tree(mesh)["x"]})


def save_file(mesh, folder):
    sm.checkpoint.save_safetensors({"x": tree(mesh)["x"]}, folder / "x.safetensors")


PLACES = [
    (save_it, plan, "_line"),
    (save_it, save, "take_lease"),
    (save_it, save, "on_host"),
    (save_it, save, "index_of"),
    (save_later, save, "copy_leaves"),
    (save_later, save, "serialize"),
    (save_later, save, "manifest_of"),
    (load_it, manifest, "read_entries"),
    (load_it, load, "_allocate"),
    (load_it, pieces, "_read"),
    (load_it, reading, "_data"),
    (load_file, safetensors, "_header"),
    (load_file, safetensors, "_mapped_tensor"),
    (save_file, files.Sink, "write"),
]


@pytest.mark.one_in(3, each=["name"])
@pytest.mark.parametrize("error", ERRORS, ids=["Python", "torch", "CUDA"])
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize(
    ("program", "module", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value)
)
def test_out_of_memory(program, module, name, who, error, tmp_path, monkeypatch):
    """The same CheckpointError with a text on every rank, and the checkpoint of before."""
    on_mesh((2,), lambda mesh: sm.checkpoint.save(tree(mesh), tmp_path / "c", step=1))
    on_mesh((2,), lambda mesh: save_file(mesh, tmp_path))
    whole = getattr(module, name)
    rank = 0 if name in ("take_lease", "index_of", "manifest_of", "write", "serialize") else 1

    def fails(*args, **kwargs):
        if who == "one" and current_world().rank != rank:
            return whole(*args, **kwargs)
        raise error

    def in_thread(*args, **kwargs):  # the thread of an asynchronous save has no world
        if who == "one" and not threading.current_thread().name.startswith("save of step"):
            return whole(*args, **kwargs)
        raise error

    if who == "one" and name in ("serialize", "manifest_of"):
        fails = in_thread
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails)
        text = same_error((2,), lambda mesh: program(mesh, tmp_path), CheckpointError, silent=False)
    assert "out of memory" in text
    assert latest(tmp_path / "c").step == 1
    assert sorted(path.name for path in (tmp_path / "c").glob("step*")) == ["step-00000001"]
    assert not list(tmp_path.glob("*.unfinished"))
    on_mesh((2,), lambda mesh: load_it(mesh, tmp_path))


# -- what nobody waits for -------------------------------------------------------------------------

NEVER_WAITED = """
import os, sys, torch, shardmesh as sm
from shardmesh.sharding.checkpoint.storage import files
def full(path): raise OSError(28, "No space left on device")
folder, when = sys.argv[1:]
sm.checkpoint.async_save({"w": torch.ones(4)}, folder, step=1).wait()
files._Descriptor = full
saving = sm.checkpoint.async_save({"w": torch.ones(4)}, folder, step=2)
if when == "waited":
    try: saving.wait()
    except sm.errors.CheckpointError: print("raised")
if when == "late": saving._thread.join()
print("end of the program", flush=True)
"""


@pytest.mark.parametrize(("when", "code"), [("late", 1), slow("waited", 0), slow("soon", 1)])
def test_an_asynchronous_save_that_nobody_waits_for(when, code, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", NEVER_WAITED, tmp_path, when],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == code, run.stderr
    assert "end of the program" in run.stdout
    assert ("No space left on device" in run.stderr) == (code == 1)
    assert latest(tmp_path).step == 1


def never_wait(folder):
    """A rank of `launch` whose second save fails, and that returns."""
    sys.argv = ["", folder, "late"]
    exec(NEVER_WAITED, {})  # the program of the test above


def test_an_asynchronous_save_under_launch_that_nobody_waits_for(tmp_path):
    with pytest.raises(
        sm.errors.LaunchError, match="rank 0 of 1 exited with code 1 after its function returned"
    ):
        sm.launch(never_wait, 1, (str(tmp_path),))
    assert latest(tmp_path).step == 1


def test_a_rank_that_died_is_not_waited_for(tmp_path, monkeypatch):
    """The thread of rank 0 waits for the files of others, but not for those of a rank that is known
    to have died.
    """
    go, write = threading.Event(), save.SaveJob.write

    def late(self):
        if self.rank == 1:
            go.wait(20)
        write(self)

    monkeypatch.setattr(save.SaveJob, "write", late)
    monkeypatch.setattr(save, "_is_lost", lambda world, rank: rank == 1)

    def program(mesh):
        handle = sm.checkpoint.async_save(tree(mesh), tmp_path)
        if mesh.world.rank == 0:
            began = time.monotonic()
            handle._thread.join()
            took, error = time.monotonic() - began, str(handle._commit_error)
            go.set()
            mesh.group("a").barrier()
        else:
            mesh.group("a").barrier()
            took, error = 0, ""
        with pytest.raises(CheckpointError):
            handle.wait()
        return took, error

    took, error = on_mesh((2,), program)[0]
    assert took < 5
    assert "rank 1 died before it had written its part" in error


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb\x1b[2J", r"a\nb\x1b[2J"),
        (RuntimeError("a\n  b\x1b[2J"), r"a b\x1b[2J"),
        ("x" * 10**7, "x" * 200 + "..."),
        (OSError(2, "No such file or directory", "x"), "No such file or directory"),
        (ValueError(), "ValueError"),
        ([1, 2], "[1, 2]"),
    ],
)
def test_descriptions_are_brief(value, text):
    assert shortened(value) == text


@pytest.mark.parametrize("kind", [ValueError, TypeError, CheckpointError, RuntimeError])
def test_long_errors_are_cut(kind):
    def program(mesh):
        from shardmesh.sharding.checkpoint.agreement import all_ranks, run_on_all_ranks

        def fails():
            raise kind("x" * 10**6)

        run_on_all_ranks(all_ranks(current_world()), fails)

    assert len(same_error((2,), program, CheckpointError, silent=False)) <= 2100
