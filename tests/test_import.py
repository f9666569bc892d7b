"""`import shardmesh` is light: what it loads, and what it leaves alone."""

import json
import subprocess
import sys
from pathlib import Path

PROBE = """
import sys, json
import torch, numpy, einops
before = set(sys.modules)
import shardmesh
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "loaded": sorted(loaded - set(sys.stdlib_module_names)),
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "threads": torch.get_num_threads() == THREADS,
}))
""".replace("import shardmesh\n", "THREADS = torch.get_num_threads()\nimport shardmesh\n")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error:::shardmesh", "-c", code], capture_output=True, text=True)


def test_import_loads_only_what_it_names():
    done = python(PROBE)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen == {"loaded": ["shardmesh"], "group": False, "cuda": False, "threads": True}


def test_import_prints_nothing():
    done = python("import shardmesh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_torch_does_not_need_stays_out():
    # triton is not in the list above where torch itself loads it, so look at the whole of what is loaded
    done = python("import sys, shardmesh; print(*{m.partition('.')[0] for m in sys.modules})")
    assert not {"triton", "rich", "matplotlib", "jax", "hypothesis", "pytest"} & set(done.stdout.split())


def test_what_is_not_used_is_not_loaded():
    done = python("import sys, shardmesh; print(*(m for m in sys.modules if m.startswith('shardmesh.')))")
    loaded = done.stdout.split()
    unused = [f"shardmesh.sharding.{folder}" for folder in ("parallel", "training", "optim", "checkpoint", "compat")]
    assert [m for m in loaded if m.startswith((*unused, "shardmesh.sharding.debug.eval_shape"))] == []
    assert len(loaded) < 270


def test_names_are_loaded_when_they_are_used():
    done = python(
        "import sys, shardmesh as sm; print(sorted(sm.__all__) == sorted(set(sm.__all__) & set(dir(sm))), sm.Muon.__module__)\n"
        "print('shardmesh.sharding.optim.shampoo' in sys.modules, 'Muon' in vars(sm))\n"
        "try: sm.no_such_name\n"
        "except AttributeError as error: print(error)"
    )
    assert done.stdout.splitlines() == [
        "True shardmesh.sharding.optim.muon", "False True", "module 'shardmesh' has no attribute 'no_such_name'"
    ], done.stderr


def test_every_public_name_exists():
    done = python("import shardmesh as sm; print([n for n in getattr(sm, '__all__', []) if not hasattr(sm, n)])")
    assert done.stdout == "[]\n", done.stderr


def test_these_tests_see_one_copy_of_the_package():
    front = str(Path(__file__).parents[1] / "__init__.py")
    names = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == front]
    assert names in ([], ["shardmesh"])
