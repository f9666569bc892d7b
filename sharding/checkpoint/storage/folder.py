"""The folder of checkpoints: one folder per step, complete or not there; the newest, the old ones, and what a crash left behind.

    checkpoints/
      step-00000100/                   complete: it got its name when everything in it was on the disk
        __0_0.distcp  __1_0.distcp     what ranks 0 and 1 wrote, in the format of torch.distributed.checkpoint
        .metadata                      that format's index
        manifest.json                  step, files, sizes, a CRC-32 of every piece; renamed to this name as the last file
      step-00000200.tmp-5f3a91c2/      being written, or left behind by a crash; the next save removes it
      step-00000100.old-5f3a91c2/      replaced by a newer save of its step; read only while that has not got its name
      step-00000000.gone-5f3a91c2/     being removed, a share of its files by each rank
      .owner-00000001.json             which process saves here (lease.py)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .files import sync_folder

MANIFEST, METADATA = "manifest.json", ".metadata"
_WRITER = re.compile(r"__(\d+)_")
_NAME = re.compile(r"step-(\d+)(?:\.(tmp|old|gone)-\w+)?")


class Checkpoint(NamedTuple):
    """A complete checkpoint.

    Attributes:
        step: its number.
        path: its folder.
    """

    step: int
    path: Path


def latest(dir: str | os.PathLike[str]) -> Checkpoint | None:
    """latest(dir) -> the newest complete checkpoint, as (step, path); None where there is none.

    What a save that was killed left behind is not complete, and is passed over.

    Communication: none: to load, every rank calls `load`, where rank 0 looks for all.

    Example:
        >>> found = sm.latest("checkpoints")
        >>> start = 0 if found is None else found.step + 1
    """
    found = complete(Path(dir))
    return found[max(found)] if found else None


def complete(folder: Path) -> dict[int, Checkpoint]:
    """The complete checkpoints by step. One that was being replaced counts until the new one has its name."""
    found: dict[int, Checkpoint] = {}
    for step, state, path in sorted(_entries(folder), key=lambda entry: entry[1] == "old"):
        if state in ("", "old") and step not in found and (path / MANIFEST).is_file():
            found[step] = Checkpoint(step, path)
    return found


def without_manifest(folder: Path) -> dict[int, Path]:
    """Return the folders that have the name of a complete checkpoint and lack the manifest, by step."""
    return {step: path for step, state, path in _entries(folder) if not state and not (path / MANIFEST).is_file()}


def _entries(folder: Path) -> list[tuple[int, str, Path]]:
    """(step, state, path) of every folder of a checkpoint, complete or not."""
    if not folder.is_dir():
        return []
    matched = [(_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    return [(int(match[1]), match[2] or "", path) for match, path in matched if match and path.is_dir()]


def name(step: int, state: str = "") -> str:
    """The name of a step's folder."""
    return f"step-{step:08d}" + (f".{state}" if state else "")


def tidy(folder: Path) -> None:
    """Before a save, by who has the lease: what crashes left behind goes, and a checkpoint that was being replaced has its name again."""
    for step, state, path in _entries(folder):
        final = folder / name(step)
        if state == "old" and not final.exists() and (path / MANIFEST).is_file():
            os.rename(path, final)
        elif state:
            remove(path)


def take_name(unfinished: Path, step: int, nonce: str) -> list[Path]:
    """Give the folder, with all that is in it, the name of its step's checkpoint. Return the one that it replaces, if any, nameless."""
    folder = unfinished.parent
    final, replaced = folder / name(step), folder / name(step, f"old-{nonce}")
    sync_folder(unfinished)
    if final.exists():
        os.rename(final, replaced)
    os.rename(unfinished, final)
    sync_folder(folder)
    return [nameless(replaced)] if replaced.exists() else []


def too_old(folder: Path, keep: int, step: int) -> list[Path]:
    """Take their names from all but `keep` complete checkpoints: the one of `step`, and the newest others. Return them."""
    others = sorted((found for found in complete(folder).values() if found.step != step), reverse=True)
    return [nameless(found.path) for found in others[keep - 1 :]]


def nameless(path: Path) -> Path:
    """Rename a folder that is to be removed, so that one half removed is never taken for a checkpoint."""
    if ".gone-" in path.name:
        return path
    gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{os.urandom(4).hex()}")
    os.rename(path, gone)
    return gone


def remove(path: Path) -> None:
    """Remove a folder and all that is in it."""
    with contextlib.suppress(OSError):  # the next save tries again
        shutil.rmtree(nameless(path))


def remove_share(paths: Iterable[Path], rank: int, world: int) -> None:
    """Remove this rank's share of the files in nameless folders; whoever removes a folder's last file removes the folder.

    Unlinking large files takes a good part of the time that writing them takes. Rank r takes what rank r wrote, so that the shares
    do not depend on what other ranks have removed already.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # the next save tries again
            for file in os.listdir(path):
                writer = _WRITER.match(file)
                if (int(writer[1]) if writer else 0) % world == rank:
                    os.unlink(path / file)
            os.rmdir(path)
