"""`convert` and its command: every format to every other, by the values that the readers see."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.__main__ import main
from shardmesh.sharding.checkpoint import convert as convert_module
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.convert import FORMATS, convert, format_of, run_conversion

WEIGHTS = {
    "model.embed.weight": torch.arange(15.0).reshape(5, 3),
    "head": torch.arange(4, dtype=torch.bfloat16),
    "scale": torch.tensor(2.5),
}


def write(folder: Path, kind: str) -> Path:
    """Write the weights as a job of two ranks would, or other programs."""
    if kind == "safetensors":
        folder.mkdir()
        sm.checkpoint.save_safetensors(WEIGHTS, folder, max_shard_size=40)
        (folder / "config.json").write_text("{}")
    elif kind == "checkpoint":

        def program() -> None:
            mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
            split = sm.device_put(WEIGHTS["model.embed.weight"], mesh, P("dp"))
            tree = {"model": {**WEIGHTS, "model.embed.weight": split}, "epoch": 3}
            sm.checkpoint.save(tree, folder, step=7)

        sm.simulate(2)(program)()
    else:
        dcp_save({"model": WEIGHTS, "epoch": 3}, folder)
    return folder


def dcp_save(tree: Any, folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tree, checkpoint_id=folder, no_dist=True)


def read(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return the weights as another program reads them."""
    like = {name: torch.zeros_like(x) for name, x in WEIGHTS.items()}
    if kind == "safetensors":
        return sm.checkpoint.load_safetensors(folder, like)
    if kind == "checkpoint":
        return sm.checkpoint.load(folder, {"model": like})["model"]
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": like}, checkpoint_id=folder, no_dist=True)
    return like


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_every_format_to_every_other(source, target, tmp_path):
    folder = write(tmp_path / "source", source)
    assert format_of(folder) == source
    done = convert(folder, tmp_path / "target", target)
    assert format_of(tmp_path / "target") == target
    assert (done.source_format, done.target_format) == (source, target)
    assert (done.tensors, done.bytes) == (3, 72)
    found = read(tmp_path / "target", target)
    assert found.keys() == WEIGHTS.keys()
    for name, x in WEIGHTS.items():
        assert found[name].dtype == x.dtype
        assert torch.equal(found[name], x), name
    if source == target == "checkpoint":
        assert done.step == 7
        assert sm.checkpoint.load(tmp_path / "target", {"epoch": None})["epoch"] == 3


def test_files_and_keys(tmp_path):
    """A file of a folder, a tree without an entry for the model, the files beside the weights."""
    folder = write(tmp_path / "hf", "safetensors")
    convert(folder, tmp_path / "flat", "checkpoint", key="", step=5)
    assert sm.checkpoint.latest(tmp_path / "flat").step == 5
    convert(tmp_path / "flat", tmp_path / "back", "safetensors", config=folder)
    assert (tmp_path / "back" / "config.json").read_text() == "{}"
    assert torch.equal(read(tmp_path / "back", "safetensors")["head"], WEIGHTS["head"])
    (one,) = [path for path in folder.glob("*.safetensors") if "00001" in path.name]
    assert convert(one, tmp_path / "one", "dcp").tensors < 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "missing"}, "missing does not exist"),
        ({"source": "empty"}, "empty is neither"),
        ({"target": "source"}, "exists already"),
        ({"key": "ema"}, r"key='ema'\): .* has no such entry; it has \['model', 'epoch'\]"),
        (
            {"key": "ema", "to": "dcp"},
            r"key='ema'\): from checkpoint to dcp all entries are written",
        ),
        ({"to": "zip"}, "write one of checkpoint, safetensors, dcp"),
        ({"config": "missing"}, "it must be a folder"),
        ({"step": 8}, "has no complete checkpoint of step 8"),
    ],
)
def test_mistakes(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "source", "checkpoint")
    (tmp_path / "empty").mkdir()
    arguments = {"source": "source", "target": "target", "to": "safetensors"} | changes
    with pytest.raises((ValueError, OSError), match=message):
        convert(**arguments)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("target", FORMATS)
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_progress_of_reading_and_writing(target, tmp_path):
    """The files in the target, also unfinished ones, tell how much is written."""
    folder = write(tmp_path / "source", "dcp")
    blocks = []

    @contextlib.contextmanager
    def progress(label, total=0, measure=None):
        before = measure and measure()
        yield
        blocks.append((label, total, before, measure and measure() >= total))

    run_conversion(folder, tmp_path / "new", target, None, None, None, None, progress)
    expected_bytes = sum(x.nbytes for x in WEIGHTS.values())
    assert blocks == [
        (f"reading {folder}", 0, None, None),
        (f"writing {tmp_path / 'new'}", expected_bytes, 0, True),
    ]


def test_the_command(tmp_path, capsys):
    folder = write(tmp_path / "source", "safetensors")
    target = str(tmp_path / "target")
    assert main(["convert", str(folder), target, "--to", "checkpoint", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tensors"], told["target_format"], told["step"]) == (3, "checkpoint", 0)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(folder), target, "--to", "checkpoint"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f" convert: error: {target} exists already" in said
    assert said.count("\n") == 1


def test_ctrl_c_ends_the_command_in_one_line(tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "source", "safetensors")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "save", interrupted)
    assert main(["convert", str(folder), str(tmp_path / "target"), "--to", "checkpoint"]) == 130
    assert capsys.readouterr().err.strip().endswith("shardmesh: interrupted")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(("to", "last"), [("dcp", "_save_dcp"), ("safetensors", "_copy_config")])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_an_interrupted_conversion_leaves_nothing(to, last, exists, tmp_path, monkeypatch):
    """Not even when all files were written: until the folder has its name, it is no checkpoint.

    It is beside the target, or in an empty folder that is there.
    """
    source = write(tmp_path / "source", "checkpoint")
    target = tmp_path / "to" / "target"
    place = target if exists else target.parent
    place.mkdir(parents=True)
    write_last = getattr(convert_module, last)
    during: list[list[str]] = []

    def interrupted(*args: Any) -> None:
        write_last(*args)
        during.append([path.name for path in place.iterdir()])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, last, interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, target, to)
    (unfinished,) = during[0]
    assert unfinished.startswith("convert." if exists else "target.")
    assert unfinished.endswith(".unfinished")
    assert list(place.iterdir()) == []
    convert(source, target, to)
    assert format_of(target) == to


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_the_current_folder_as_target(to, tmp_path, monkeypatch):
    """It stays the same folder; files that name others are the last ones there."""
    source = write(tmp_path / "source", "checkpoint")
    target = tmp_path / "target"
    target.mkdir()
    monkeypatch.chdir(target)
    moved: list[str] = []
    rename = os.rename

    def noted(old: Any, new: Any) -> None:
        if Path(new).parent == target:
            moved.append(Path(new).name)
        rename(old, new)

    monkeypatch.setattr(convert_module.os, "rename", noted)
    convert(source, ".", to, max_shard_size=40)
    assert sorted(os.listdir(".")) == sorted(moved)
    assert len(moved) > 1
    assert moved[-1] == (".metadata" if to == "dcp" else "model.safetensors.index.json")
    assert read(target, to).keys() == WEIGHTS.keys()


def test_an_error_of_the_last_step_leaves_nothing(tmp_path, monkeypatch):
    """The files that were moved into the target are removed, too."""
    source = write(tmp_path / "source", "checkpoint")
    (tmp_path / "target").mkdir()
    rename = os.rename

    def failing(old: Any, new: Any) -> None:
        if Path(new) == tmp_path / "target" / "model.safetensors.index.json":
            raise OSError(28, "No space left on device")
        rename(old, new)

    monkeypatch.setattr(convert_module.os, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        convert(source, tmp_path / "target", "safetensors", max_shard_size=40)
    assert list((tmp_path / "target").iterdir()) == []


def test_an_error_names_the_target(tmp_path, monkeypatch):
    """Not the folder that was removed."""
    source = write(tmp_path / "source", "checkpoint")
    file = tmp_path / "target" / "model.safetensors"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            convert(source, tmp_path / "target", "safetensors")
    assert str(caught.value).startswith(f"{file} could not be written")
