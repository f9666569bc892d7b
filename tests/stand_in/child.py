"""Call a function in a process that has the device "standin": `call(function, *args)`; arguments
and result as JSON.

python -m tests.stand_in.child module function arguments
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stand_in import device

_ROOT = Path(__file__).parents[2]
_RESULT = "result: "
_LIMIT_S = 280


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, called in another process. It must be at the top level of its
    module.
    """
    if shutil.which("g++") is None:
        pytest.skip("the stand-in for a GPU is compiled by g++, which is not here")
    command = [
        sys.executable,
        "-m",
        "tests.stand_in.child",
        function.__module__,
        function.__name__,
        json.dumps(args),
    ]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.rpartition(_RESULT)[2])


def main(module: str, name: str, args: str) -> None:
    device.register()
    function = getattr(importlib.import_module(module), name)(*json.loads(args))
    print(_RESULT + json.dumps(function))


if __name__ == "__main__":
    main(*sys.argv[1:])
