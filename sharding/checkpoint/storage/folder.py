"""The folder of checkpoints: a folder per step, renamed when complete; newest, retired, unfinished.

    checkpoints/
      step-00000100/                   complete: renamed when everything in it was on disk
        __0_0.distcp  __1_0.distcp     of ranks 0 and 1, in torch.distributed.checkpoint's format
        .metadata                      that format's index
        manifest.json                  step, files, sizes, a CRC-32 of every piece; renamed last
      step-00000200.tmp-5f3a91c2/      being written, or left by a crash; the next save removes it
      step-00000100.old-5f3a91c2/      replaced by a newer save of its step; valid until its rename
      step-00000000.gone-5f3a91c2/     being removed, a share of its files by each rank
      .owner-00000001.json             the process that saves here (lease.py)

A step may be a link, as after a checkpoint was moved to another disk: it is read like a folder, and
where a step is removed only the link is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .files import sync_folder

MANIFEST, METADATA = "manifest.json", ".metadata"
_WRITER = re.compile(r"__([0-9]{1,9})_")
_NAME = re.compile(r"step-([0-9]{1,18})(?:\.(tmp|old|gone)-\w+)?")


class Checkpoint(NamedTuple):
    """A complete checkpoint.

    Attributes:
        step: its number.
        path: its folder.
    """

    step: int
    path: Path


def latest(dir: str | os.PathLike[str]) -> Checkpoint | None:
    """latest(dir) -> the newest complete checkpoint, as (step, path); None if there is none.

    Folders left by a killed save are not complete and are skipped.

    Communication: none. (`load` looks on rank 0 for all ranks.)

    Example:
        >>> newest = sm.checkpoint.latest("checkpoints")
        >>> start = 0 if newest is None else newest.step + 1
    """
    checkpoints = complete(Path(dir))
    return checkpoints[max(checkpoints)] if checkpoints else None


def complete(folder: Path) -> dict[int, Checkpoint]:
    """Return the complete checkpoints by step.

    A checkpoint that is being replaced counts until the new one is renamed.
    """
    checkpoints: dict[int, Checkpoint] = {}
    for step, state, path in sorted(_entries(folder), key=lambda entry: entry[1] == "old"):
        if state in ("", "old") and step not in checkpoints and (path / MANIFEST).is_file():
            checkpoints[step] = Checkpoint(step, path)
    return checkpoints


def without_manifest(folder: Path) -> dict[int, Path]:
    """Return by step the folders with the name of a complete checkpoint but without a manifest."""
    return {
        step: path
        for step, state, path in _entries(folder)
        if not state and not (path / MANIFEST).is_file()
    }


def _entries(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, state, path) of every folder of a checkpoint, complete or not."""
    if not folder.is_dir():
        return []
    matched = [(_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir())]
    return [
        (int(match[1]), match[2] or "", path)
        for match, path in matched
        if match and (path.is_dir() or path.is_symlink())
    ]


def name(step: int, state: str = "") -> str:
    """Return the name of a step's folder."""
    return f"step-{step:08d}" + (f".{state}" if state else "")


def clean_up(folder: Path) -> None:
    """Clean up before a save, holding the lease.

    Remove unfinished folders, restore a checkpoint that was being replaced.
    """
    for step, state, path in _entries(folder):
        final = folder / name(step)
        if state == "old" and not final.exists() and (path / MANIFEST).is_file():
            os.rename(path, final)
        elif state:
            remove(path)


def commit_folder(unfinished: Path, step: int, nonce: str) -> list[Path]:
    """Rename a folder to the name of its step's checkpoint.

    Return the one that it replaces, if any, renamed for removal.
    """
    folder = unfinished.parent
    final, replaced = folder / name(step), folder / name(step, f"old-{nonce}")
    sync_folder(unfinished)
    if os.path.lexists(final):
        os.rename(final, replaced)
    os.rename(unfinished, final)
    sync_folder(folder)
    return [mark_for_removal(replaced)] if os.path.lexists(replaced) else []


def retire_old(folder: Path, keep: int, step: int) -> list[Path]:
    """Rename for removal all but `keep` complete checkpoints, and return the renamed ones.

    That of `step` and the newest others stay.
    """
    others = sorted(
        (checkpoint for checkpoint in complete(folder).values() if checkpoint.step != step),
        reverse=True,
    )
    return [mark_for_removal(checkpoint.path) for checkpoint in others[keep - 1 :]]


def mark_for_removal(path: Path) -> Path:
    """Rename a folder before removal, so that no half-removed one looks like a checkpoint."""
    if ".gone-" in path.name:
        return path
    gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{os.urandom(4).hex()}")
    os.rename(path, gone)
    return gone


def remove(path: Path) -> None:
    """Remove a folder with its contents; of a link only the link."""
    with contextlib.suppress(OSError):  # the next save tries again
        gone = mark_for_removal(path)
        if _is_folder(gone):
            shutil.rmtree(gone)
        else:
            os.unlink(gone)


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder itself, not a link to one."""
    return stat.S_ISDIR(os.lstat(path).st_mode)


def remove_share(paths: Iterable[Path], rank: int, world: int) -> None:
    """Remove this rank's share of the files in retired folders, and each folder once it is empty.

    Unlinking large files takes time comparable to writing them. Rank r removes the files that rank
    r wrote, so that shares do not depend on the progress of other ranks.
    """
    for path in paths:
        with contextlib.suppress(OSError):  # the next save tries again
            if not _is_folder(path):  # a link, by rank 0
                if rank == 0:
                    os.unlink(path)
                continue
            for file in os.listdir(path):
                writer = _WRITER.match(file)
                if (int(writer[1]) if writer else 0) % world == rank:
                    os.unlink(path / file)
            os.rmdir(path)
