"""The wheel contains exactly the package, and works after installation."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("package")  # one worker of `pytest -n` builds the wheel
ROOT = Path(__file__).parents[1]
NOT_SHIPPED = {"tests", "examples", "benchmarks", "docs", "build"}


def pip(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *args], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def files() -> set[Path]:
    """Return every Python file of the package."""
    found = (f.relative_to(ROOT) for f in ROOT.rglob("*.py"))
    return {f for f in found if f.parts[0] not in NOT_SHIPPED and not f.parts[0].startswith(".")}


def sources() -> set[str]:
    """Return every Python file of the package as the wheel should name it."""
    return {f"shardmesh/{f.as_posix().removeprefix('shardmesh/')}" for f in files()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built without the network from a copy: a build in place would leave its folders in the
    working tree.
    """
    source = tmp_path_factory.mktemp("source")
    for name in files() | {
        Path(f) for f in ("pyproject.toml", "LICENSE", "README.md", "shardmesh/py.typed")
    }:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            (source / name).write_bytes((ROOT / name).read_bytes())
    for folder in NOT_SHIPPED:  # what must stay out has to be there for that to be seen
        (source / folder).mkdir()
        (source / folder / "__init__.py").write_text("raise ImportError\n")
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source))
    (path,) = out.glob("*.whl")
    return path


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {n for n in names if n.endswith(".py")}
    assert modules == sources()
    assert {n for n in names - modules if ".dist-info/" not in n} == {"shardmesh/py.typed"}
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert "Requires-Python: >=3.11" in lines
    required = {
        line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")
    }
    assert {r for r in required if "extra ==" not in r} == {
        "torch>=2.11",
        "numpy",
        "einops",
        "safetensors",
    }


def test_versions_agree():
    import shardmesh

    with open(ROOT / "pyproject.toml", "rb") as file:
        assert tomllib.load(file)["project"]["version"] == shardmesh.__version__


def test_installed_from_the_wheel(wheel, tmp_path):
    target = tmp_path / "site"
    pip("install", "--no-deps", "--no-index", "--target", str(target), str(wheel))
    code = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import shardmesh, shardmesh.kernels, shardmesh.sharding.ops.rules, shardmesh.parallel\n"
        "from shardmesh.mesh.launch import local_processes\n"
        "print(shardmesh.__file__, shardmesh.mesh.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    package = target / "shardmesh"
    assert done.stdout.split() == [
        str(package / "__init__.py"),
        str(package / "mesh" / "__init__.py"),
    ], done.stderr
