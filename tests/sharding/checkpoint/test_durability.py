"""After any failure of a save, the folder has complete checkpoints of one step each, or loading
raises an error that names the file.
"""

from __future__ import annotations

import errno
import json
import os
import random
import threading

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.storage.folder import latest
from tests.sharding.ranks import on_mesh, same_error

X = torch.arange(600.0).reshape(60, 10)


def tree(mesh, step):
    return {
        "x": sm.distribute_tensor(X + step, mesh, P("a"), src_data_rank=None),
        "whole": X * step,
        "step": step,
    }


def saved(folder, *steps, keep=None):
    on_mesh(
        (2,), lambda mesh: [save(tree(mesh, step), folder, step=step, keep=keep) for step in steps]
    )


def loaded(folder, step=None):
    """Return the step that is loaded, checking everything in it."""

    def program(mesh):
        found = load(folder, tree(mesh, 0), step=step)
        assert torch.equal(found["x"].full_tensor(), X + found["step"])
        assert torch.equal(found["whole"], X * found["step"])
        return found["step"]

    return on_mesh((2,), program)[0]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_steps_and_latest(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    saved(tmp_path, 3, 12)
    assert latest(tmp_path) == (12, tmp_path / "step-00000012")
    assert loaded(tmp_path) == 12
    assert loaded(tmp_path, 3) == 3
    assert loaded(tmp_path / "step-00000003") == 3
    text = same_error(
        (2,), lambda mesh: load(tmp_path, {}, step=4), FileNotFoundError, silent=False
    )
    assert "step 4" in text
    assert "[3, 12]" in text


@pytest.mark.parametrize("writers", [1, 2, 5])
def test_replaced_files_are_removed_by_all_ranks(writers, tmp_path, monkeypatch):
    """Each rank unlinks the files of its rank number, of any world size; nothing is left."""
    for step in (0, 1):
        on_mesh((writers,), lambda mesh, step=step: save(tree(mesh, step), tmp_path, step=step))
    unlink, by = os.unlink, {}

    def told(path, *args, **kwargs):
        by.setdefault(threading.current_thread(), []).append(str(path))
        unlink(path, *args, **kwargs)

    def program(mesh):
        save(tree(mesh, 1), tmp_path, step=1, keep=1)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", told)
        on_mesh((2,), program)
    assert names(tmp_path) == ["step-00000001"]
    removed = sorted(
        sum(".distcp" in path and ".gone-" in path for path in paths) for paths in by.values()
    )
    assert sum(removed) == 2 * writers, "both folders"
    assert len([n for n in removed if n]) == min(writers, 2), "by both ranks"


def test_explicit_step(tmp_path):
    assert on_mesh((2,), lambda mesh: [save({"n": 1}, tmp_path).step for _ in range(3)])[1] == [
        0,
        1,
        2,
    ]


def test_empty_folder(tmp_path):
    assert "no complete checkpoint" in same_error(
        (2,), lambda mesh: load(tmp_path, {}), FileNotFoundError, silent=False
    )


def test_retention(tmp_path):
    saved(tmp_path, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]
    saved(tmp_path, 2, keep=2)  # back in time: the newest and the one that was just made
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_step_is_replaced(tmp_path):
    saved(tmp_path, 1)
    on_mesh((2,), lambda mesh: save({**tree(mesh, 5)}, tmp_path, step=1))
    assert names(tmp_path) == ["step-00000001"]
    assert loaded(tmp_path) == 5


def test_remains_of_crashes_are_removed(tmp_path):
    saved(tmp_path, 1, 2)
    # Killed between two renames.
    os.rename(tmp_path / "step-00000002", tmp_path / "step-00000002.old-aa")
    (tmp_path / "step-00000003.tmp-bb").mkdir()
    (tmp_path / "step-00000000.gone-cc").mkdir()
    assert loaded(tmp_path) == 2
    saved(tmp_path, 4)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000004"]
    assert loaded(tmp_path, 2) == 2


# -- links and temporary names ---------------------------------------------------------------------


def moved(folder, step, elsewhere):
    """Move a checkpoint to another disk and leave a link."""
    elsewhere.parent.mkdir(exist_ok=True)
    os.rename(folder / f"step-{step:08d}", elsewhere)
    os.symlink(elsewhere, folder / f"step-{step:08d}")
    return sorted(os.listdir(elsewhere))


@pytest.mark.parametrize("how", ["keep", "replaced", "unfinished", "retired"])
def test_a_step_that_is_a_link(how, tmp_path):
    """What the link points to stays, whatever removes the step."""
    folder, disk = tmp_path / "c", tmp_path / "disk" / "moved"
    saved(folder, 1)
    files = moved(folder, 1, disk)
    assert loaded(folder) == 1
    if how in ("unfinished", "retired"):
        state = "tmp" if how == "unfinished" else "gone"
        os.rename(folder / "step-00000001", folder / f"step-00000001.{state}-aa")
    saved(folder, 1 if how == "replaced" else 2, keep=1)
    assert names(folder) == [f"step-0000000{1 if how == 'replaced' else 2}"]
    assert sorted(os.listdir(disk)) == files
    assert loaded(disk) == 1


@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_something_else_has_the_name_of_the_step(what, tmp_path):
    (tmp_path / "c").mkdir()
    path = tmp_path / "c" / "step-00000001"
    path.write_text("") if what == "file" else path.symlink_to("nowhere")
    saved(tmp_path / "c", 1)
    assert loaded(tmp_path / "c") == 1
    assert names(tmp_path / "c") == ["step-00000001"]


def test_new_files_are_never_links(tmp_path, monkeypatch):
    """Every file of a save is created with O_EXCL and O_NOFOLLOW, and under a random name where it
    is renamed.
    """
    whole, made = os.open, []

    def told(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            made.append((os.path.basename(path), flags))
        return whole(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", told)
    saved(tmp_path / "c", 1)
    on_mesh(
        (2,),
        lambda mesh: sm.checkpoint.save_safetensors(
            {"x": X, "y": X.clone()}, tmp_path / "m.safetensors", max_shard_size=2400
        ),
    )
    assert len(made) == 9
    assert all(flags & os.O_EXCL and flags & os.O_NOFOLLOW for _, flags in made)
    assert len({name for name, _ in made}) == len(made)


# -- a disk that does not take it ------------------------------------------------------------------


@pytest.mark.parametrize("room", [0, 300, 3000, 5000, 7000, 9000])
def test_a_full_disk(room, tmp_path, monkeypatch):
    saved(tmp_path, 1)
    whole, left = os.write, [room]

    def write(fd, data):
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(data)
        return whole(fd, data)

    monkeypatch.setattr(os, "write", write)
    text = same_error(
        (2,), lambda mesh: save(tree(mesh, 2), tmp_path, step=2), CheckpointError, silent=False
    )
    monkeypatch.undo()
    assert "No space left on device" in text
    assert "could not write" in text
    assert "step-00000002.tmp-" in text
    assert names(tmp_path) == ["step-00000001"]
    assert loaded(tmp_path) == 1


def test_a_full_disk_in_the_middle_of_a_tensor(tmp_path, monkeypatch):
    """The failing write is called by torch.save."""
    saved(tmp_path, 1)
    whole, left = os.write, [3_000_000]

    def write(fd, data):
        part = bytes(data)[: left[0]]  # a disk takes what it can
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= len(part)
        return whole(fd, part)

    monkeypatch.setattr(os, "write", write)
    large = {"x": torch.zeros(500_000), "y": torch.ones(500_000)}
    text = same_error((2,), lambda mesh: save(large, tmp_path), CheckpointError, silent=False)
    monkeypatch.undo()
    assert "_0.distcp (No space left on device)" in text
    assert names(tmp_path) == ["step-00000001"]
    assert loaded(tmp_path) == 1


def test_a_full_disk_while_a_step_is_replaced(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    monkeypatch.setattr(
        os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error"))
    )
    text = same_error(
        (2,), lambda mesh: save(tree(mesh, 9), tmp_path, step=1), CheckpointError, silent=False
    )
    monkeypatch.undo()
    assert "Input/output error" in text
    assert loaded(tmp_path) == 1


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    text = same_error(
        (2,), lambda mesh: save({"n": 1}, tmp_path / "file"), CheckpointError, silent=False
    )
    assert str(tmp_path / "file") in text


def test_a_cancelled_save(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def interrupted(fd, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 2)
    monkeypatch.undo()
    assert loaded(tmp_path) == 1
    saved(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# -- files that are not what was written -----------------------------------------------------------


def error_of(folder):
    with pytest.raises(CheckpointError) as caught:
        loaded(folder)
    return str(caught.value)


FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit(name, tmp_path):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    good, rng = path.read_bytes(), random.Random(name)
    for _ in range(12):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        text = error_of(tmp_path)
        assert str(path) in text
        assert "damaged" in text
        if name.endswith("distcp"):
            assert "'x'" in text or "'whole'" in text or "'step'" in text
    assert loaded(tmp_path, 1) == 1
    path.write_bytes(good)
    assert loaded(tmp_path) == 2


@pytest.mark.parametrize("name", FILES)
def test_truncated_file(name, tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001" / name
    good = path.read_bytes()
    for length in (0, 1, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        text = error_of(tmp_path)
        assert str(path) in text
        assert not name.endswith("distcp") or f"{length} bytes of {len(good)}" in text


def test_swapped_files(tmp_path):
    saved(tmp_path, 1, 2)
    one, other = (tmp_path / "step-00000002" / name for name in FILES[:2])
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    assert "_0.distcp" in error_of(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step(name, tmp_path):
    """A file of step 1 in place of that of step 2 raises an error."""
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / name).write_bytes(
        (tmp_path / "step-00000001" / name).read_bytes()
    )
    text = error_of(tmp_path)
    assert str(tmp_path / "step-00000002") in text


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(name, tmp_path):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    path.unlink()
    if name == "manifest.json":  # the sign that a checkpoint is complete
        with pytest.warns(
            UserWarning,
            match=r"step-00000002 has no manifest.json and is skipped; step 1, .*, is loaded",
        ):
            assert loaded(tmp_path) == 1
        assert loaded(tmp_path, 1) == 1  # asked for: no warning
    else:
        assert str(path) in error_of(tmp_path)


def test_a_renamed_folder(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000007")
    with pytest.raises(CheckpointError, match=r"is of step 1 by its manifest, not 7"):
        loaded(tmp_path, 7)
    assert "not 7" in error_of(tmp_path)


def test_index_that_refers_to_code(tmp_path):
    """An index is a pickle; one that refers to classes other than torch's own index classes is
    refused.
    """
    import pickle

    saved(tmp_path, 1)
    folder = tmp_path / "step-00000001"
    (folder / "manifest.json").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(os.system))
    with pytest.raises(CheckpointError, match=r"refers to \w+.system"):
        loaded(folder)


def test_the_manifest(tmp_path):
    saved(tmp_path, 3)
    told = json.loads((tmp_path / "step-00000003" / "manifest.json").read_text())
    assert told["step"] == 3
    assert told["world"] == 2
    assert told["checksum"] == "crc32"
    assert told["versions"]["torch"] == torch.__version__
    for name, file in told["files"].items():
        assert (
            (tmp_path / "step-00000003" / name).stat().st_size
            == file["size"]
            == sum(length for _, length, _ in file["pieces"])
        )


def test_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "model.pt").write_bytes(b"")
    text = same_error(
        (2,),
        lambda mesh: sm.checkpoint.load(tmp_path / "model.pt", {}),
        FileNotFoundError,
        silent=False,
    )
    for words in (
        f"{tmp_path / 'model.pt'} is a file; pass the folder",
        "sm.checkpoint.load_safetensors",
        "sm.checkpoint.load_full_state_dict",
    ):
        assert words in text
