"""`import shardmesh` is light: modules it loads, state it does not change, and contents of its
namespaces.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.public import NAMESPACES

pytestmark = pytest.mark.xdist_group("package")  # one worker of `pytest -n` imports it anew
ROOT = Path(__file__).parents[1]

PROBE = """
import sys, json
import torch, numpy, einops
threads = torch.get_num_threads()
before = set(sys.modules)
import shardmesh as sm
modules = set(sys.modules)
state = {
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads() == threads,
}
errors = []
for name in ("fully_shard", "DTensor", "no_such_name"):
    try:
        getattr(sm, name)
    except AttributeError as error:
        errors.append(str(error))
print(json.dumps({
    "all": sorted(modules), "new": sorted(modules - before), "state": state, "errors": errors,
}))
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error:::shardmesh", "-c", code], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """Return what a process sees that imports shardmesh, and prints nothing else."""
    done = python(PROBE)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_import_loads_only_what_it_names(imported):
    loaded = {name.partition(".")[0] for name in imported["new"]}
    assert loaded - set(sys.stdlib_module_names) == {"shardmesh"}
    assert imported["state"] == {"group": False, "cuda": False, "threads": True}


UNCHANGED = """
import gc, sys, threading
import torch, numpy, einops
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer
import torch.distributed.tensor  # adds DTensor to the types of foreach
import torch.utils._foreach_utils, torch.utils.checkpoint

def state():
    owners = [
        torch_optimizer, torch.optim.Optimizer, torch.utils._foreach_utils, torch.utils.checkpoint,
        torch.utils.checkpoint._CheckpointFrame, torch.utils.checkpoint.CheckpointFunction,
        torch.nn.Module, torch.Tensor, torch.nn.functional,
        dist, dist.distributed_c10d, dist.ProcessGroup, dist.Work, torch.autograd.Function,
    ]
    found = {}
    for owner in owners:
        for name, value in vars(owner).items():
            shown = isinstance(value, (list, dict, set)) and not name.startswith("__")
            items = repr(list(value)) if shown else None
            found[f"{owner.__name__}.{name}"] = id(value), items
    found["meta_path"], found["path_hooks"] = list(sys.meta_path), list(sys.path_hooks)
    found["excepthooks"] = sys.excepthook, threading.excepthook
    found["gc"] = gc.isenabled(), gc.get_threshold()
    return found

def check(when):
    now = state()
    changed = [name for name in {*before, *now} if before.get(name) != now.get(name)]
    # modules of torch that are loaded by now are attributes of their packages
    changed = [name for name in changed if name not in sys.modules]
    assert not changed, (when, changed)

before = state()
import shardmesh as sm
check("import")
for name in NAMESPACES:
    getattr(sm, name)
check("namespaces")
sm.shard_map, sm.grad, sm.jit, sm.scan
check("transforms")

def program():
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
    x = sm.device_put(torch.arange(4.0), mesh, sm.P("a"))
    assert (x * 2).sum().item() == 12
    check("a mesh")

sm.simulate(2)(program)()
check("simulate")
with sm.debug.null_world(2):
    mesh = sm.init_device_mesh("cpu", (2,), axis_names=("a",))
    sm.zeros((4,), mesh, sm.P("a")) + 1
    check("null_world")
check("the end")
""".replace("NAMESPACES", repr(NAMESPACES))


def test_nothing_of_torch_and_the_interpreter_is_changed():
    """By the import, by namespaces, by meshes of simulated and null worlds and by operators on
    their tensors.
    """
    done = python(UNCHANGED)
    assert done.returncode == 0, done.stderr


STEP = """
from torch.optim import optimizer as torch_optimizer
from torch.utils import checkpoint

def is_wrapped():
    return hasattr(checkpoint._CheckpointFrame.__init__, "__wrapped__")

def is_hooked():
    return len(torch_optimizer._global_optimizer_pre_hooks) > 0

def program():
    grouping = torch_optimizer._group_tensors_by_device_and_dtype
    mesh = sm.init_device_mesh("cpu", (1,), axis_names=("a",))
    USE
    assert torch_optimizer._group_tensors_by_device_and_dtype is grouping

sm.simulate(1)(program)()
"""
USES = [
    "assert not is_hooked(); torch.nn.Parameter(sm.zeros(4, device_mesh=mesh)); assert "
    "is_hooked() and is_wrapped()",
    "x = sm.zeros(4, device_mesh=mesh); assert not is_hooked(); x.grad = x + 1; assert "
    "is_hooked(); torch.optim.AdamW([x]).step()",
    "assert not is_wrapped()\n    with mesh: assert is_wrapped()",
    "assert not is_wrapped()\n    with sm.ops.implicit_replication(): assert is_wrapped()",
]
NAMESPACE = """
import sys
assert "shardmesh.NAME" not in sys.modules
assert "NAME" in dir(sm) and "shardmesh.NAME" not in dir(sm)
namespace = sm.NAME
assert namespace is sys.modules["shardmesh.NAME"]
assert all(hasattr(namespace, name) for name in namespace.__all__)
exec(f"from shardmesh.NAME import {namespace.__all__[0]}")
"""
FORKS = """
import os, traceback
import torch, shardmesh as sm
failed = []
for program in PROGRAMS:
    pid = os.fork()
    if pid == 0:
        try:
            exec(program, {"torch": torch, "sm": sm})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        failed.append(program)
assert not failed, failed
"""


@pytest.mark.parametrize(
    "programs",
    [
        [STEP.replace("USE", use) for use in USES],
        [NAMESPACE.replace("NAME", name) for name in NAMESPACES],
    ],
    ids=["what a program needs is installed when it needs it", "a namespace is loaded when used"],
)
def test_what_importing_leaves_for_later(programs):
    """Each program runs in a child of one process that has imported shardmesh."""
    done = python(FORKS.replace("PROGRAMS", repr(programs)))
    assert done.returncode == 0, done.stderr


def test_modules_that_torch_does_not_need_are_not_loaded(imported):
    # triton is not in the list above where torch itself loads it, so look at the whole of what is
    # loaded
    loaded = {name.partition(".")[0] for name in imported["all"]}
    assert not {"triton", "rich", "matplotlib", "jax", "hypothesis", "pytest"} & loaded


def test_unused_modules_are_not_loaded(imported):
    loaded = [name for name in imported["all"] if name.startswith("shardmesh.")]
    unused = [
        f"shardmesh.sharding.{folder}"
        for folder in ("parallel", "training", "optim", "checkpoint", "compat")
    ]
    unused += [
        f"shardmesh.sharding.{module}"
        for module in ("debug.eval_shape", "jit", "functional.transforms.vmap")
    ]
    unused += [f"shardmesh.{name}" for name in NAMESPACES]
    assert [m for m in loaded if m.startswith(tuple(unused))] == []
    assert len(loaded) < 295


def test_names_that_are_elsewhere(imported):
    assert imported["errors"] == [
        "module 'shardmesh' has no attribute 'fully_shard'; did you mean "
        "shardmesh.parallel.fully_shard?",
        "module 'shardmesh' has no attribute 'DTensor'; did you mean shardmesh.compat.DTensor?",
        "module 'shardmesh' has no attribute 'no_such_name'",
    ]


def test_every_name_has_one_home():
    homes: dict[str, list[str]] = {}
    for module in ["shardmesh", *(f"shardmesh.{name}" for name in NAMESPACES if name != "compat")]:
        for name in importlib.import_module(module).__all__:
            homes.setdefault(name, []).append(module)
    double = {name: found for name, found in homes.items() if len(found) > 1}
    assert all(
        found[1:] == ["shardmesh.errors"] or found[-1] == "shardmesh.errors"
        for found in double.values()
    ), double


def test_type_checkers_know_the_namespaces(tmp_path):
    pytest.importorskip("pyright")
    program = tmp_path / "program.py"
    program.write_text(
        "import shardmesh as sm\n"
        "import shardmesh.parallel\n"
        "from shardmesh.optim import Muon, NoSuchName\n"
        "sm.parallel.fully_shard, sm.debug.explain, sm.psum, shardmesh.parallel.colwise, Muon\n"
        "sm.parallel.no_such_name\n"
        "sm.fully_shard\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT / ".venv/src")]})
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
    )
    errors = [line.split(" - ", 1)[1] for line in done.stdout.splitlines() if " - error: " in line]
    assert [
        name
        for name in ("NoSuchName", "no_such_name", "fully_shard")
        if any(name in e for e in errors)
    ] == ["NoSuchName", "no_such_name", "fully_shard"], done.stdout
    assert len(errors) == 3, done.stdout
