"""Saving: `save`, and `async_save`, which lets the program go on while files are written."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...mesh.comm.current_world import current_world
from ...mesh.comm.world import World
from .agreement import everyone, everywhere
from .prepare import prepared
from .saving import Saving
from .storage.folder import Checkpoint, remove_share

_log = logging.getLogger(__name__)
_unfinished: weakref.WeakKeyDictionary[World, AsyncSave] = weakref.WeakKeyDictionary()


def save(tree: Any, dir: str | os.PathLike[str], *, step: int | None = None, keep: int | None = None) -> Checkpoint:
    """save(tree, dir) -> the checkpoint, complete and on the disk, as (step, path). Every rank of the world calls it.

        rank 0   w [0:4]   --.
        rank 1   w [4:8]   --+-->   dir/step-00000012/   __0_0.distcp   __1_0.distcp   .metadata   manifest.json

    A rank writes what it holds, each box by one of its holders. The files are those of torch.distributed.checkpoint, with a CRC-32 of
    every piece in the manifest. They are written to another folder, synced, and that folder gets its name as the last thing that
    happens: whenever a rank is killed, the disk is full or the save is cancelled, the folder holds the checkpoints that were complete.

    Args:
        tree: dicts, lists, tuples and dataclasses of
            `ShardedTensor`s, on any meshes, of any dtype and cut; what is pending is reduced first;
            plain tensors, numbers, strings, None and lists of these: the same on every rank, which is checked; one rank writes them;
            `PerRank(value)`: each rank's own;
            objects with `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers, data loaders, `RandomState()`): their
            state. For optimizers by parameter name instead of number see `state_dict`.
        dir: the folder of checkpoints, which all ranks see. One job at a time saves into it: a file in it names the process that does.
        step: its number; by default one more than the newest. A checkpoint of the same step is there until the new one is complete.
        keep: how many checkpoints to keep, this one included; older ones are removed when it is complete. All by default.

    Raises:
        TypeError, ValueError: a leaf that cannot be saved, names that clash, a step or keep that is no number.
        CheckpointError: ranks have different trees; a file could not be written, with the rank, the file and the reason: the same text on
            every rank. The unfinished folder is removed. Or the last `async_save` failed, if nobody has waited for it. Or another job that
            is alive saves into the folder, and has not ended within a minute: names its host, process and job.
        RankLostError, PeerError: a rank died or raised in the middle of it.

    Communication: four all_gathers of small objects over all ranks; the reduction of what is pending.

    Example:
        >>> sm.save({**sm.state_dict(model, optimizer), "random": sm.RandomState(), "step": step}, "checkpoints", step=step, keep=3)
    """
    _end_last()
    saving = prepared(tree, dir, step, keep, copies=False)
    return _settle(saving, saving.write, saving.commit, saving.stopped.set)


def async_save(tree: Any, dir: str | os.PathLike[str], *, step: int | None = None, keep: int | None = None) -> AsyncSave:
    """async_save(tree, dir) -> a handle; the tree may be changed at once, while a thread writes copies of it.

    What this rank writes is copied to host memory; then it is written, synced and made complete as by `save`, also if nobody waits.
    A second save, of either kind, waits for the first.

    Args: as `save`.

    Raises: as `save`, for what can be known before anything is written; the rest is raised by `wait()`, or by the next save.

    Communication: two all_gathers of small objects over all ranks, and two more in `wait()`. None in the thread: it sees in the folder
        what the others have written.

    Example:
        >>> saving = sm.async_save({"model": model}, "checkpoints", step=step)
        >>> train_on()
        >>> saving.wait()
    """
    _end_last()
    saving = AsyncSave(prepared(tree, dir, step, keep, copies=True))
    _unfinished[current_world()] = saving
    return saving


class AsyncSave:
    """A save under way; made by `async_save`."""

    def __init__(self, saving: Saving) -> None:
        self._saving = saving
        self._written = threading.Event()
        self._result: tuple[Checkpoint, list[Path]] | None = None
        self._write_error: Exception | None = None
        self._error: Exception | None = None
        self._outcome: Checkpoint | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save of step {saving.step}")
        self._thread.start()

    def _run(self) -> None:
        self._write_error = _tried(self._saving.write)
        self._written.set()
        if self._saving.rank == 0 and self._write_error is None:
            self._error = _tried(self._commit)
        self._saving.end()
        error = self._write_error or self._error
        if error is not None and not threading.main_thread().is_alive():
            _log.error("%s", error)  # nobody will ask for it any more

    def _commit(self) -> None:
        checkpoint, retired = self._saving.commit()
        remove_share(retired, 0, 1)
        self._result = checkpoint, []

    def done(self) -> bool:
        """Whether this rank's thread has ended: on rank 0, when the checkpoint is complete or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Checkpoint:
        """The checkpoint, when it is complete. Every rank calls it; again, it returns or raises the same.

        Raises:
            CheckpointError: as `save`.

        Communication: two all_gathers of small objects over all ranks, the first time.
        """
        if self._outcome is None:
            try:
                self._outcome = _settle(self._saving, self._join_writing, self._join_commit, self._stop)
            except BaseException as error:
                self._outcome = error
                raise
            finally:
                _unfinished.pop(current_world(), None)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    result = wait

    def _join_writing(self) -> None:
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def _stop(self) -> None:
        """The thread waits for nobody any more, and ends."""
        self._saving.stopped.set()
        self._thread.join()

    def _join_commit(self) -> tuple[Checkpoint, list[Path]] | None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


def _tried(work: Callable[[], None]) -> Exception | None:
    """What it raises."""
    try:
        work()
    except Exception as error:
        return error


def _settle(saving: Saving, write: Callable[[], None], commit: Callable[[], Any], stop: Callable[[], None]) -> Checkpoint:
    """Every rank writes; when all have, rank 0 makes the checkpoint of it. What fails anywhere is raised everywhere, after `stop`.

    What the checkpoint replaces is removed last, by all ranks.
    """
    group = everyone(current_world())
    try:
        everywhere(group, write)
        made: Any = everywhere(group, lambda: commit() if saving.rank == 0 else None)[0]
    except BaseException:  # Ctrl-C, too
        stop()
        saving.clear()
        raise
    checkpoint, retired = made
    remove_share(retired, saving.rank, saving.world)
    return checkpoint


def _end_last() -> None:
    """The last asynchronous save is over; raises its error."""
    last = _unfinished.get(current_world())
    if last is not None:
        last.wait()
