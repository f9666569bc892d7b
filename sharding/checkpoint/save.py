"""`save`, and `async_save`, which writes in a thread while the program continues."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...mesh.comm.current_world import current_world
from ...mesh.comm.pending import Pending
from ...mesh.comm.world import World
from ...mesh.monitor import exit_status
from .agreement import all_ranks, run_on_all_ranks
from .prepare import prepare_save
from .saving import SaveJob
from .storage.folder import Checkpoint, remove_share

_log = logging.getLogger(__name__)
_failed: dict[AsyncSave, Exception] = {}  # nobody has waited for these


class _LastSave:
    """The asynchronous save of one world that is under way."""

    def __init__(self, _: World) -> None:
        self.unfinished: AsyncSave | None = None


def save(
    tree: Any, dir: str | os.PathLike[str], *, step: int | None = None, keep: int | None = None
) -> Checkpoint:
    """save(tree, dir) -> the complete checkpoint on disk, as (step, path). Every rank calls it.

        rank 0   w [0:4]   --.           step-00000012/__0_0.distcp   step-00000012/.metadata
        rank 1   w [4:8]   --+-->   dir  step-00000012/__1_0.distcp   step-00000012/manifest.json

    Each box is written by one of the ranks that hold it. The files have the format of
    torch.distributed.checkpoint, with a CRC-32 of every piece in the manifest. They are written to
    a temporary folder and synced; renaming that folder is the last step. If a rank is killed, the
    disk is full or the save is cancelled, all checkpoints that were complete before still are.

    Args:
        tree: dicts, lists, tuples and dataclasses of
            `ShardedTensor`s, on any meshes, of any dtype and layout; pending values are reduced
            first; plain tensors, numbers, strings, None and lists of these: must be the same on
            every rank (checked); one rank writes them; `PerRank(value)`: saved by each rank;
            objects with `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers,
            data loaders, `RandomState()`): their state. For optimizers by parameter name instead of
            number see `state_dict`.
        dir: the folder of checkpoints, visible to all ranks. One job at a time saves into it: a
            file in it has the process that does.
        step: its number; by default one more than the newest. A checkpoint of the same step is kept
            until the new one is complete.
        keep: the number of checkpoints to keep, including this one; older ones are removed when it
            is complete. All by default.

    Raises:
        TypeError, ValueError: a leaf that cannot be saved, two leaves with one name, an invalid
            step or keep.
        CheckpointError: ranks have different trees; a file could not be written, with the rank, the
            file and the reason: the same text on every rank. The unfinished folder is removed. Or
            the last `async_save` failed, if `wait()` was not called. Or another job that is alive
            saves into the folder and does not end within a minute; the text has its host, process
            and job.
        RankLostError, PeerError: a rank died or raised during the save.

    Communication: four all_gathers of small objects over all ranks; the reduction of pending
    values.

    Example:
        >>> state = {**state_dict(model, optimizer), "random": RandomState(), "step": step}
        >>> save(state, "checkpoints", step=step, keep=3)
    """
    _wait_for_last()
    job = prepare_save(tree, dir, step, keep, copies=False)
    return _finish(job, job.write, job.commit, job.stopped.set)


def async_save(
    tree: Any, dir: str | os.PathLike[str], *, step: int | None = None, keep: int | None = None
) -> AsyncSave:
    """async_save(tree, dir) -> a handle; a thread writes copies, and the tree may change at once.

    The pieces that this rank writes are copied to host memory, written, synced and committed as by
    `save`, also without `wait()`. On a GPU that memory is pinned and kept for the next save, and
    the program does not wait for the copies, only later work of the stream. A second save, of
    either kind, waits for the first. A process in which a save failed that nobody waited for says
    so when it ends, and its exit code is not 0.

    Args: as `save`.

    Raises: as `save`, for errors known before writing; others are raised by `wait()`, or by the
    next save.

    Communication: two all_gathers of small objects over all ranks, and two more in `wait()`. None
        in the thread: it looks in the folder for the files of other ranks.

    Example:
        >>> saving = sm.checkpoint.async_save({"model": model}, "checkpoints", step=step)
        >>> train_on()
        >>> saving.wait()
    """
    _wait_for_last()
    job = AsyncSave(prepare_save(tree, dir, step, keep, copies=True))
    current_world().state(_LastSave).unfinished = job
    return job


class AsyncSave(Pending[Checkpoint]):
    """A save under way; made by `async_save`."""

    def __init__(self, job: SaveJob) -> None:
        super().__init__(self._complete)
        self._job = job
        self._written = threading.Event()
        self._result: tuple[Checkpoint, list[Path]] | None = None
        self._write_error: Exception | None = None
        self._error: Exception | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save of step {job.step}")
        atexit.unregister(_report_failures)
        atexit.register(_report_failures)
        self._thread.start()

    def _run(self) -> None:
        self._write_error = _tried(self._job.write)
        self._written.set()
        if self._job.rank == 0 and self._write_error is None:
            self._error = _tried(self._commit)
        self._job.end()
        error = self._write_error or self._error
        if error is not None:
            _failed[self] = error

    def _commit(self) -> None:
        checkpoint, retired = self._job.commit()
        remove_share(retired, 0, 1)
        self._result = checkpoint, []

    def done(self) -> bool:
        """Return whether this rank's thread has ended: on rank 0, whether the checkpoint is
        complete or has failed.
        """
        return not self._thread.is_alive()

    def wait(self) -> Checkpoint:
        """Wait for the checkpoint to be complete and return it. Every rank calls it; later calls
        return or raise the same.

        Raises:
            CheckpointError: as `save`.

        Communication: two all_gathers of small objects over all ranks, the first time.
        """
        if self._failure is not None:
            raise self._failure
        return super().wait()

    result = wait
    is_completed = done

    def _complete(self) -> Checkpoint:
        try:
            return _finish(self._job, self._join_writing, self._join_commit, self._stop)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            _failed.pop(self, None)
            current_world().state(_LastSave).unfinished = None

    def _join_writing(self) -> None:
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def _stop(self) -> None:
        """Make the thread stop waiting for other ranks, and join it."""
        self._job.stopped.set()
        self._thread.join()

    def _join_commit(self) -> tuple[Checkpoint, list[Path]] | None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result


def _report_failures() -> None:
    """Log at exit the errors that no `wait()` has raised, and make the exit code 1."""
    for error in _failed.values():
        _log.error("%s", error)
    if _failed:
        exit_status.fail()


def _tried(work: Callable[[], None]) -> Exception | None:
    """Run `work` and return its exception."""
    try:
        work()
    except Exception as error:
        return error


def _finish(
    job: SaveJob, write: Callable[[], None], commit: Callable[[], Any], stop: Callable[[], None]
) -> Checkpoint:
    """Write on every rank, then commit on rank 0. An error of one is raised on all, after `stop`.

    Replaced checkpoints are removed last, by all ranks.
    """
    group = all_ranks(current_world())
    try:
        run_on_all_ranks(group, write)
        committed: Any = run_on_all_ranks(group, lambda: commit() if job.rank == 0 else None)[0]
    except BaseException:  # Ctrl-C, too
        stop()
        job.clear()
        raise
    checkpoint, retired = committed
    remove_share(retired, job.rank, job.world)
    return checkpoint


def _wait_for_last() -> None:
    """Wait for the last asynchronous save and raise its error."""
    last = current_world().state(_LastSave).unfinished
    if last is not None:
        last.wait()
