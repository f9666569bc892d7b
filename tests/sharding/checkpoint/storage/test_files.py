"""Temporary files: random names, never through a link, removed after an error; two writers of one
file.
"""

from __future__ import annotations

import fcntl
import os
import threading

import pytest
import torch

import shardmesh as sm
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.storage.files import (
    Sink,
    open_regular,
    read_regular,
    remove_left_over,
    temporary_path,
    write_whole,
)
from tests.sharding.ranks import on_mesh

OLD = (1, 1)


def test_a_sink_does_not_follow_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "file").symlink_to(victim)
    with pytest.raises(FileExistsError):
        Sink(tmp_path / "file")
    assert victim.read_text() == "precious"


def test_a_whole_file_replaces_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("file", "file.unfinished"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "file", b"new")
    assert victim.read_text() == "precious"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_left_overs_are_removed_on_error(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    for name in ("write", "fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fails)
            with pytest.raises(OSError, match="No space"):
                write_whole(tmp_path / "file", b"new")
            with pytest.raises(CheckpointError, match="No space"):
                sm.checkpoint.save_safetensors({"w": torch.ones(4)}, tmp_path / "m.safetensors")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x", "x" * 255, "é" * 100])
def test_temporary_names_fit(name, tmp_path):
    path = tmp_path / name
    assert temporary_path(path) != temporary_path(path)
    write_whole(path, b"a")
    assert path.read_bytes() == b"a"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_killed_writers(tmp_path):
    """An old file that nobody has locked is removed; others, and links, are not."""
    path = tmp_path / "m.safetensors"
    dead, young, locked, link, other = (temporary_path(path) for _ in range(5))
    other = other.with_name("n" + other.name[1:])
    for file in (dead, young, locked, other):
        file.write_text("x")
    for file in (dead, locked, other):
        os.utime(file, OLD)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    os.utime(victim, OLD)
    link.symlink_to(victim)
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_left_over(path)
    assert {*tmp_path.iterdir()} == {young, locked, link, other, victim}
    assert victim.stat().st_mtime == 1


def test_files_under_way_are_locked(tmp_path):
    path = temporary_path(tmp_path / "m.safetensors")
    with Sink(path):
        os.utime(path, OLD)
        remove_left_over(tmp_path / "m.safetensors")
        assert path.exists()
    remove_left_over(tmp_path / "m.safetensors")
    assert not path.exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_not_opened(make, tmp_path):
    make(tmp_path / "x")
    with pytest.raises(OSError, match=r"regular file|Is a directory"):
        open_regular(tmp_path / "x").close()


def test_a_limit_of_length(tmp_path):
    (tmp_path / "x").write_bytes(bytes(100))
    assert len(read_regular(tmp_path / "x", 100)) == 100
    with pytest.raises(OSError, match="100 bytes"):
        read_regular(tmp_path / "x", 99)


@pytest.mark.parametrize("size", [None, 1 << 20])
def test_two_writers_of_one_model(size, tmp_path):
    """Whatever their order, every file is one writer's, and in the end all of them are."""
    path, failures = tmp_path / "m.safetensors", []
    values = {name: torch.zeros(1 << 18) for name in ("v", "w")}

    def write(number):
        for _ in range(10):
            try:
                whole = {name: x + number for name, x in values.items()}
                on_mesh(
                    (1,),
                    lambda mesh, whole=whole: sm.checkpoint.save_safetensors(
                        whole, path, max_shard_size=size
                    ),
                )
            except Exception as error:
                failures.append(error)

    write(3)
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        if size is None:  # of several files the index is missing for a moment
            loaded = on_mesh((1,), lambda mesh: sm.checkpoint.load_safetensors(path, values))[0]
            assert all((x == x[0]).all() for x in loaded.values())
            assert loaded["v"][0] == loaded["w"][0]
        writers[0].join(0.05)
    for writer in writers:
        writer.join()
    assert failures == []
    loaded = on_mesh((1,), lambda mesh: sm.checkpoint.load_safetensors(tmp_path, values))[0]
    assert loaded["v"][0] == loaded["w"][0]
    assert len(list(tmp_path.iterdir())) == (1 if size is None else 3)
