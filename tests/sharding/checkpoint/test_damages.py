"""Every damage of a checkpoint or a safetensors file ends in one error, the same on every rank, and
touches nothing else.
"""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import resource
import shutil
import time
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.safetensors import load_safetensors
from shardmesh.sharding.checkpoint.save import save
from tests.sharding.checkpoint import damages
from tests.sharding.checkpoint.damages import (
    HEADER,
    HOSTILE,
    STEP,
    TENSORS,
    B,
    W,
    safetensors_file,
    seal,
)
from tests.sharding.ranks import on_mesh
from tests.tiers import examples

LONGEST_S, MOST_BYTES = 20.0, 300 << 20
MOST_CHARACTERS = 1500  # of an error, which has paths of pytest in it


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of two ranks; nothing in its folder may be changed by a load of a copy."""
    folder = tmp_path_factory.mktemp("good")
    on_mesh((2,), lambda mesh: save({"w": _sharded(mesh, W), "b": B, "step": 7}, folder, step=1))
    return folder


def _sharded(mesh, x):
    return sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None)


class Sandbox:
    """A folder with a copy of a checkpoint, and files next to it that must stay as they are."""

    def __init__(self, path, good=None):
        self.path, self.folder = path, path / "checkpoints"
        path.mkdir(exist_ok=True)
        if good is None:
            self.folder.mkdir()
        else:
            shutil.copytree(good, self.folder)
        for name in ("secret", "secret.safetensors"):
            (path / name).write_bytes(safetensors_file(HEADER))

    def state(self):
        files = {}
        for base, _, names in os.walk(self.path):
            for name in names:
                status = os.lstat(os.path.join(base, name))
                files[os.path.join(base, name)] = status.st_size, status.st_mtime_ns, status.st_mode
        return files, sorted(vars(pathlib.PosixPath)), sorted(vars(torch.serialization))

    def outcome(self, program, kinds):
        """Run a load on two ranks; return (class, text) of its error, ("", "") if it loaded what
        was saved.
        """
        before, started, memory = self.state(), time.monotonic(), _peak()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = on_mesh((2,), lambda mesh: _told(program, mesh, kinds))
        assert first == second, "every rank has the same"
        assert self.state() == before, "nothing is touched"
        assert time.monotonic() - started < LONGEST_S
        assert _peak() - memory < MOST_BYTES
        if first[0]:
            assert "\n" not in first[1]
            assert len(first[1]) < MOST_CHARACTERS
            assert str(self.folder) in first[1], first
        return first


def _peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _told(program, mesh, kinds):
    try:
        found = program(mesh)
    except kinds as error:
        return type(error).__name__, str(error)
    assert torch.equal(found["w"].full_tensor(), W)
    assert torch.equal(found["b"], B)
    return "", ""


def _like(mesh):
    return {"w": _sharded(mesh, torch.zeros(8, 6)), "b": torch.zeros(3).long()}


def of_checkpoint(sandbox, step=1, kinds=CheckpointError):
    sealed = (sandbox.folder / STEP / "manifest.json").exists()
    where = {"dir": sandbox.folder, "step": step} if sealed else {"dir": sandbox.folder / STEP}
    return sandbox.outcome(lambda mesh: load(like={**_like(mesh), "step": None}, **where), kinds)


def of_safetensors(sandbox, kinds=CheckpointError):
    return sandbox.outcome(lambda mesh: load_safetensors(sandbox.folder, _like(mesh)), kinds)


# What is a valid checkpoint, but of something else, is a ValueError that says what it has instead.
DIFFERENT = {"dtype complex128", "shape 10**18"}


@pytest.mark.one_in(2, each=["name", "sealed"])
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", damages.INDEX)
def test_index(name, sealed, good, tmp_path):
    sandbox = Sandbox(tmp_path / "box", good)
    damages.INDEX[name](sandbox.folder / STEP)
    if sealed:
        seal(sandbox.folder / STEP)
    else:
        (sandbox.folder / STEP / "manifest.json").unlink()
    expected = ValueError if name in DIFFERENT else CheckpointError
    kind, text = of_checkpoint(sandbox, kinds=expected)
    assert kind == expected.__name__, (kind, text)
    assert not os.path.exists("ran")


@pytest.mark.parametrize("name", damages.MANIFEST)
def test_manifest(name, good, tmp_path):
    sandbox = Sandbox(tmp_path / "box", good)
    damages.MANIFEST[name](sandbox.folder / STEP)
    kind, text = of_checkpoint(sandbox)
    assert kind == "CheckpointError"
    assert STEP in text


@pytest.mark.parametrize("name", damages.FILES)
def test_other_files(name, good, tmp_path):
    sandbox = Sandbox(tmp_path / "box", good)
    damages.FILES[name](sandbox.folder / STEP)
    assert of_checkpoint(sandbox)[0] == "CheckpointError"


def test_a_compressed_value(good, tmp_path):
    """64 MiB from 64 KiB: refused before there is memory for it."""
    sandbox = Sandbox(tmp_path / "box", good)
    (sandbox.folder / STEP / "manifest.json").unlink()
    damages.BOMBS["a compressed value"](sandbox.folder / STEP)
    assert "compressed" in of_checkpoint(sandbox)[1]


@pytest.mark.parametrize("name", damages.HEADERS)
def test_header(name, tmp_path):
    sandbox = Sandbox(tmp_path / "box")
    (sandbox.folder / "model.safetensors").write_bytes(damages.HEADERS[name])
    kind, text = of_safetensors(sandbox)
    assert kind == "CheckpointError"
    assert "model.safetensors" in text


@pytest.mark.parametrize("name", damages.INDICES)
def test_index_of_safetensors(name, tmp_path):
    sandbox = Sandbox(tmp_path / "box")
    index = damages.INDICES[name]
    (sandbox.folder / "model.safetensors").write_bytes(safetensors_file(HEADER))
    (sandbox.folder / "model.safetensors.index.json").write_bytes(
        index if isinstance(index, bytes) else json.dumps(index).encode()
    )
    assert of_safetensors(sandbox)[0] == "CheckpointError"


@pytest.mark.parametrize(
    "how",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink(path, path),
    ],
)
def test_safetensors_that_is_no_file(how, tmp_path):
    sandbox = Sandbox(tmp_path / "box")
    how(sandbox.folder / "model.safetensors")
    assert of_safetensors(sandbox)[0] == "CheckpointError"


def test_a_large_header_is_not_repeated(tmp_path):
    sandbox = Sandbox(tmp_path / "box")
    long = {**HEADER, "w" * 9_000_000: {"dtype": "F32", "shape": [1], "data_offsets": [216, 220]}}
    (sandbox.folder / "a.safetensors").write_bytes(safetensors_file(long, TENSORS + bytes(4)))
    (sandbox.folder / "b.safetensors").write_bytes(safetensors_file(long, TENSORS + bytes(4)))
    assert of_safetensors(sandbox)[0] == "CheckpointError"


def test_honest_files_load(good, tmp_path):
    """The suite tests something: what it damages loads."""
    assert of_checkpoint(Sandbox(tmp_path / "box", good)) == ("", "")
    sandbox = Sandbox(tmp_path / "other")
    (sandbox.folder / "model.safetensors").write_bytes(safetensors_file(HEADER))
    assert of_safetensors(sandbox) == ("", "")
    sandbox = Sandbox(tmp_path / "third", good)
    (sandbox.folder / STEP / "manifest.json").unlink()
    assert of_checkpoint(sandbox) == ("", "")
    damages._boxes(([0, 0], [4, 4]), ([4, 0], [4, 4]), ([0, 4], [8, 2]))(sandbox.folder / STEP)
    step = sandbox.folder / STEP
    assert torch.equal(
        on_mesh((2,), lambda mesh: load(step, {"w": torch.zeros(8, 6)})["w"])[1],
        torch.full((8, 6), 5.0),
    )


def test_the_page_has_the_count():
    count = damages.COUNT + len(test_safetensors_that_is_no_file.pytestmark[0].args[1])
    page = pathlib.Path(__file__).parents[3] / "docs" / "faults.md"
    assert count >= 300
    assert f"| all | {count} |" in page.read_text()


# -- anything in any place -------------------------------------------------------------------------

ANY = (
    st.sampled_from(HOSTILE)
    | st.integers(-(2**80), 2**80)
    | st.text(max_size=8)
    | st.lists(st.integers(-9, 99), max_size=4)
)
_settings = settings(
    max_examples=examples(400),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_counter = iter(range(10**9))


def _places(value, path=()):
    """Return the paths to everything in nested data or objects."""
    yield path
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        items = (
            list(vars(value).items())
            if hasattr(value, "__dict__") and not isinstance(value, torch.dtype | type)
            else []
        )
    for key, item in items:
        yield from _places(item, (*path, key))


def _put(value, path, item):
    """Put an item into a place of nested data or objects; return the whole."""
    if not path:
        return item
    *above, last = path
    for key in above:
        value = value[key] if isinstance(value, dict | list) else getattr(value, key)
    if isinstance(value, dict | list):
        value[last] = item
    else:
        object.__setattr__(value, last, item)
    return None


def _changed(draw, value):
    places = list(_places(value))
    for _ in range(draw.draw(st.integers(1, 3))):
        path = draw.draw(st.sampled_from(places))
        try:
            whole = _put(value, path, draw.draw(ANY))
        except (KeyError, IndexError, TypeError, AttributeError):  # the place is gone
            continue
        if not path:
            return whole
    return value


@_settings
@given(st.data())
def test_anything_in_the_index(good, tmp_path, draw):
    sandbox = Sandbox(tmp_path / str(next(_counter)), good)
    step = sandbox.folder / STEP
    index = _changed(draw, damages.index_of(step))
    try:
        (step / ".metadata").write_bytes(pickle.dumps(index))
    except (RuntimeError, AttributeError, TypeError, KeyError):  # torch's classes do not pickle it
        reject()
    if draw.draw(st.booleans()):
        seal(step)
    else:
        (step / "manifest.json").unlink()
    of_checkpoint(sandbox, kinds=(CheckpointError, ValueError))
    shutil.rmtree(sandbox.path)


@_settings
@given(st.data())
def test_any_bytes_in_the_index(good, tmp_path, draw):
    sandbox = Sandbox(tmp_path / str(next(_counter)), good)
    step = sandbox.folder / STEP
    data = bytearray((step / ".metadata").read_bytes())
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    (step / ".metadata").write_bytes(data)
    (step / "manifest.json").unlink()
    sandbox.outcome(
        lambda mesh: load(step, {**_like(mesh), "step": None}), (CheckpointError, ValueError)
    )
    shutil.rmtree(sandbox.path)


@_settings
@given(st.data())
def test_anything_in_the_manifest(good, tmp_path, draw):
    sandbox = Sandbox(tmp_path / str(next(_counter)), good)
    seal(sandbox.folder / STEP, lambda manifest: _changed(draw, manifest))
    of_checkpoint(sandbox, kinds=(CheckpointError, ValueError))
    shutil.rmtree(sandbox.path)


@_settings
@given(st.data())
def test_anything_in_a_header(tmp_path, draw):
    sandbox = Sandbox(tmp_path / str(next(_counter)))
    header = _changed(draw, json.loads(json.dumps(HEADER)))
    data = draw.draw(st.sampled_from([TENSORS, TENSORS[:-1], TENSORS + b"x", b""]))
    (sandbox.folder / "model.safetensors").write_bytes(safetensors_file(header, data))
    of_safetensors(sandbox, (CheckpointError, ValueError))
    shutil.rmtree(sandbox.path)
