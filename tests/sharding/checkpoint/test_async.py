"""`async_save` saves the state at the call, and raises its errors."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import async_save, save
from shardmesh.sharding.checkpoint.storage.folder import latest
from tests.device import DEVICE
from tests.sharding.ranks import collectives, launched, on_mesh

X = torch.arange(48.0).reshape(8, 6)


@pytest.fixture
def gate(monkeypatch):
    """Block writes to the disk until it is set."""
    opened, whole = threading.Event(), os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data) if opened.wait(20) else 0)
    yield opened
    opened.set()


def test_tree_may_change_after_the_call(tmp_path, gate):
    def program(mesh):
        x, plain = sm.distribute_tensor(X.clone(), mesh, P("a"), src_data_rank=None), X.clone()
        saving = async_save({"x": x, "plain": plain}, tmp_path, step=4)
        assert not saving.done()
        x.mul_(0)
        plain.zero_()
        mesh.group("a").barrier()  # the gate is for both ranks
        gate.set()
        with collectives() as records:
            assert saving.wait().step == 4
        assert launched(records) == ["all_gather_object"] * 2
        assert saving.result() == saving.wait() == latest(tmp_path)
        found = load(tmp_path, {"x": x, "plain": plain})
        assert torch.equal(found["x"].full_tensor(), X)
        assert torch.equal(found["plain"], X)

    on_mesh((2,), program)


def test_completes_without_wait(tmp_path):
    """The thread of rank 0 polls the files of the others."""

    def program(mesh):
        return async_save(
            {"x": sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)}, tmp_path
        )

    on_mesh((3,), program)[0]._thread.join(20)
    assert latest(tmp_path) == (0, tmp_path / "step-00000000")


def test_a_second_save_waits_for_the_first(tmp_path):
    def program(mesh):
        first = async_save({"n": 1}, tmp_path)
        second = async_save({"n": 2}, tmp_path)
        assert first.done()
        assert latest(tmp_path).step in (0, 1)
        assert save({"n": 3}, tmp_path).step == 2
        assert second.done()

    on_mesh((2,), program)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"step-0000000{i}" for i in range(3)
    ]


@pytest.mark.parametrize("failing", ["__1_0", "manifest"])
@pytest.mark.parametrize("wait", [True, False])
def test_errors_are_raised(wait, failing, tmp_path, monkeypatch):
    """At `wait()` or the next save, with the same text on every rank; the handle raises it
    again.
    """
    on_mesh((2,), lambda mesh: save({"n": 0}, tmp_path))
    whole = os.open

    def no_room(path, *args, **kwargs):
        if os.path.basename(path).startswith(failing):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, *args, **kwargs)

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        saving = async_save({"x": x}, tmp_path)
        with pytest.raises(CheckpointError) as caught:
            saving.wait() if wait else save({"x": x}, tmp_path)
        with pytest.raises(CheckpointError, match="No space left"):
            saving.wait()
        assert saving.done()
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_room)
        texts = on_mesh((2,), program)
    assert len(set(texts)) == 1
    assert f"rank {1 if failing == '__1_0' else 0} could not write" in texts[0]
    assert failing in texts[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]
    on_mesh((2,), lambda mesh: async_save({"n": 1}, tmp_path).wait())
    assert latest(tmp_path).step == 1


def _in_processes(folder):
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    x = sm.distribute_tensor(X, mesh, P("a", "b"), src_data_rank=None)
    for step in range(3):
        saving = async_save({"x": x + step, "step": step}, folder, step=step, keep=2)
        x.redistribute(P("b"))  # collectives of the program, while the thread writes
    saving.wait()
    found = load(folder, {"x": x.redistribute(P(None, ("b", "a"))), "step": None})
    assert torch.equal(found["x"].full_tensor(), X + 2)
    return found["step"], sorted(path.name for path in folder.glob("step-*"))


def test_in_processes(world4, tmp_path):
    assert world4(_in_processes, tmp_path) == [(2, ["step-00000001", "step-00000002"])] * 4
