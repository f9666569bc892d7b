"""Where in the user's program a call comes from: the innermost frame that is neither ours nor torch's."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

# Not resolved through symbolic links, since that is how frames name their files.
_PACKAGE = Path(__file__).parent.parent
_INNER = (
    *(str(_PACKAGE / part) + "/" for part in ("mesh", "sharding", "kernels")),
    str(Path(torch.__file__).parent) + "/",
    contextlib.__file__,
)


def user_line() -> tuple[str, int]:
    """File name and line number in the user's program."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
