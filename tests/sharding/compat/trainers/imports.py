"""Run a program written for torch with its imports changed to `shardmesh.compat`, as
docs/from_dtensor.md says.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

TORCH = (
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
)
_FROM = re.compile(rf"^from ({'|'.join(map(re.escape, TORCH))}) import", re.MULTILINE)


def program(name: str, *, torch: bool) -> ModuleType:
    """Import a program of this folder, with torch's imports or with ours in their place."""
    path = Path(__file__).with_name(f"{name}.py")
    module_name = f"{__name__}.{name}_{'torch' if torch else 'shardmesh'}"
    if module_name not in sys.modules:
        source = path.read_text()
        if not torch:
            source, count = _FROM.subn("from shardmesh.compat import", source)
            assert count > 0
        module = ModuleType(module_name)
        module.__file__ = str(path)
        sys.modules[module_name] = module
        exec(compile(source, str(path), "exec"), module.__dict__)
    return sys.modules[module_name]
