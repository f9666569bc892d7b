"""Runs the programs of docs/gallery.md and writes what they print into the page.

`.venv/bin/python docs/make_gallery.py [name ...]`: those whose command has one of the names, by
default all. A block of the page is a command and its output:

    ```console
    $ python examples/adamw.py
    ...
    ```

Commands run in the folder of the repository; pictures that they write are copied to docs/images.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
_PROGRAMS = {"python": [sys.executable], "shardmesh": [sys.executable, "-m", "shardmesh"]}
# where a program writes a picture, and which of docs/images it is
PICTURES = {
    Path("out/loss.png"): "train_lm.png",
    Path("out/finetune/loss.png"): "finetune_loss.png",
}


def main(names: Sequence[str]) -> None:
    """Run the commands that contain one of the names, and rewrite the page."""
    text = PAGE.read_text()
    for match in list(BLOCK.finditer(text)):
        command = match["command"]
        if names and not any(name in command for name in names):
            continue
        print(f"$ {command}")
        output = output_of(command)
        text = text.replace(match[0], f"```console\n$ {command}\n{output}```")
    PAGE.write_text(text)
    for path, picture in PICTURES.items():
        if (ROOT / path).exists():
            shutil.copyfile(ROOT / path, ROOT / "docs" / "images" / picture)


def output_of(command: str) -> str:
    """Return what a command prints to stdout.

    Raises: subprocess.CalledProcessError if it fails.
    """
    first, *rest = shlex.split(command)
    done = subprocess.run(
        [*_PROGRAMS[first], *rest],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


if __name__ == "__main__":
    main(sys.argv[1:])
