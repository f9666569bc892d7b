"""`save`, and `async_save`, which writes in a thread while the program continues.

prepare   all ranks    collect the leaves, compare them, plan who writes which box; lease and folder
write     each rank    its pieces, then their list
commit    rank 0       index and manifest; the folder is renamed: from then on it is a checkpoint

`prepare_save` returns a `SaveJob`, with all that writing and committing need. `save` runs both, and
ranks agree after each (`_write_and_commit`). Of an `AsyncSave` a thread runs them, and ranks agree
in `wait` on what the threads did.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...kernels.box import Box, box_origin, slices
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.pending import Pending
from ...mesh.comm.world import World
from ...mesh.monitor import exit_status
from ...mesh.monitor.diagnosis.members import lost_ranks
from ...mesh.processes.process import ProcessWorld
from ...mesh.text import shortened
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import (
    CheckpointError,
    agree,
    all_ranks,
    is_out_of_memory,
    run_on_all_ranks,
    unless_out_of_memory,
)
from .plan import SaveState, WriteItem, make_write_plan, own_name, reduce_pending, state_of
from .staging import copy_leaves, on_host
from .storage import folder as folders
from .storage.files import Sink, serialize, write_whole
from .storage.folder import Checkpoint, remove_share
from .storage.lease import Lease, take_lease
from .storage.manifest import (
    StoredFile,
    StoredLeaf,
    StoredPiece,
    import_format,
    index_of,
    manifest_of,
)
from .tree import Path as TreePath
from .tree import PerRank, Structure, torch_paths

_log = logging.getLogger(__name__)
_failed: dict[AsyncSave, Exception] = {}  # nobody has waited for these
_POLL_S = 0.01
_LOST_S = 0.25  # how often to ask whether the rank that is waited for has died
# how long the thread of an asynchronous save waits for other ranks after the program has ended
_AFTER_END_S = 30.0


class _Committed(NamedTuple):
    """What a commit has made.

    Attributes:
        checkpoint: it is complete.
        retired: renamed folders that are to be removed.
    """

    checkpoint: Checkpoint
    retired: list[Path]


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
        tree: dicts, lists, tuples and dataclasses of leaves:

            - `ShardedTensor`s, on any meshes, of any dtype and layout; pending values are reduced
              first.
            - plain tensors, numbers, strings, None and lists of these. They must be the same on
              every rank (checked); one rank writes them.
            - `PerRank(value)`: saved by each rank.
            - objects with `state_dict()` and `load_state_dict()` (modules, optimizers, schedulers,
              data loaders, `RandomState()`): their state. For optimizers by parameter name instead
              of number see `state_dict`.
        dir: the folder of checkpoints, visible to all ranks. One job at a time saves into it: a
            lease file in it names the process.
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
    return _write_and_commit(job, job.write, job.commit, job.stopped.set)


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
        # of this rank's thread; the last two on rank 0
        self._written = threading.Event()
        self._write_error: Exception | None = None
        self._committed: _Committed | None = None
        self._commit_error: Exception | None = None
        self._raised: BaseException | None = None  # by `wait`, which raises it again
        self._thread = threading.Thread(target=self._run, name=f"save of step {job.step}")
        atexit.unregister(_report_failures)
        atexit.register(_report_failures)
        self._thread.start()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        self._write_error = _error_of(self._job.write)
        self._written.set()
        if self._job.rank == 0 and self._write_error is None:
            self._commit_error = _error_of(self._commit)
        self._job.end()
        error = self._write_error or self._commit_error
        if error is not None:
            _failed[self] = error

    def _commit(self) -> None:
        checkpoint, retired = self._job.commit()
        remove_share(retired, 0, 1)
        self._committed = _Committed(checkpoint, [])

    # -- the program -------------------------------------------------------------------------------

    def done(self) -> bool:
        """Return whether this rank's thread has ended.

        On rank 0, whether the checkpoint is complete or has failed.
        """
        return not self._thread.is_alive()

    def wait(self) -> Checkpoint:
        """Wait for the checkpoint to be complete and return it.

        Every rank calls it; later calls return or raise the same.

        Raises:
            CheckpointError: as `save`.

        Communication: two all_gathers of small objects over all ranks, the first time.
        """
        if self._raised is not None:
            raise self._raised
        return super().wait()

    result = wait
    is_completed = done

    def _complete(self) -> Checkpoint:
        try:
            return _write_and_commit(
                self._job, self._wait_for_write, self._wait_for_commit, self._stop
            )
        except BaseException as error:
            self._raised = error
            raise
        finally:
            _failed.pop(self, None)
            current_world().state(_LastSave).unfinished = None

    def _wait_for_write(self) -> None:
        self._written.wait()
        if self._write_error is not None:
            raise self._write_error

    def _wait_for_commit(self) -> _Committed | None:
        self._thread.join()
        if self._commit_error is not None:
            raise self._commit_error
        return self._committed

    def _stop(self) -> None:
        """Make the thread stop waiting for other ranks, and join it."""
        self._job.stopped.set()
        self._thread.join()


def _report_failures() -> None:
    """Log at exit the errors that no `wait()` has raised, and make the exit code 1."""
    for error in _failed.values():
        _log.error("%s", error)
    if _failed:
        exit_status.fail()


def _error_of(work: Callable[[], None]) -> Exception | None:
    """Run `work`; return its exception, or None."""
    try:
        work()
    except Exception as error:
        return error
    return None


def _write_and_commit(
    job: SaveJob,
    write: Callable[[], None],
    commit: Callable[[], _Committed | None],
    stop: Callable[[], None],
) -> Checkpoint:
    """Write on every rank, then commit on rank 0. An error of one is raised on all, after `stop`.

    Replaced checkpoints are removed last, by all ranks.

    Args:
        write, commit: do that, or wait for a thread that does.

    Communication: two all_gathers of small objects over all ranks.
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


# -- prepare ---------------------------------------------------------------------------------------


def prepare_save(
    tree: Any, dir: str | os.PathLike[str], step: int | None, keep: int | None, copies: bool
) -> SaveJob:
    """Return a save that is ready to write, and its folder; with `copies`, of copied tensors.

    Raises:
        CheckpointError, TypeError, ValueError: see `save`.

    Communication: see `save`.
    """
    world = current_world()
    group = all_ranks(world)
    _check_numbers(step, keep)
    # the thread of an asynchronous save may outlive the program, and could not import it then
    import_format()
    collected, failure = unless_out_of_memory(lambda: state_of(tree, world))
    lines = {} if collected is None else collected.lines
    arguments = f"dir={os.fspath(dir)!r}, step={step}, keep={keep}"
    agree(group, "save", {"": arguments, **lines}, failure)
    assert collected is not None  # noqa: S101
    state = reduce_pending(collected)
    plan = make_write_plan(state.leaves, world)
    own_leaves = _leaves_to_write(state, plan, world.rank)
    ready = None
    if copies:
        copied, failure = unless_out_of_memory(lambda: copy_leaves(own_leaves, world))
        own_leaves, ready = copied or ({}, None)
    paths = _paths_in_index(state.structure, plan)
    unfinished, number, nonce, lease = _make_folder(
        group, Path(dir), step, isinstance(world, ProcessWorld), failure
    )
    return SaveJob(
        rank=world.rank,
        world=world.size,
        step=number,
        keep=keep,
        unfinished=unfinished,
        nonce=nonce,
        plan=plan,
        leaves=own_leaves,
        structure=state.structure,
        paths=paths,
        stopped=threading.Event(),
        lease=lease,
        ready=ready,
        is_lost=partial(_is_lost, world),
        sharded=[name for name, leaf in state.leaves.items() if isinstance(leaf, ShardedTensor)],
    )


def _paths_in_index(structure: Structure, plan: Sequence[WriteItem]) -> dict[str, TreePath]:
    """Return the path of each name in torch's index; one rank's value is next to its leaf."""
    paths = dict(torch_paths(structure))
    for piece in plan:
        if piece.name not in paths:
            leaf, _, own_name = piece.name.rpartition(".")
            *above, last = paths[leaf]
            paths[piece.name] = (*above, f"{last}.{own_name}")
    return paths


def _is_lost(world: World, rank: int) -> bool:
    """Return whether the process of a rank is known to have died and will write no more."""
    monitor = world.monitor if isinstance(world, ProcessWorld) else None
    return monitor is not None and any(
        member.rank == rank for member in lost_ranks(monitor.directory)
    )


def _leaves_to_write(state: SaveState, plan: Sequence[WriteItem], rank: int) -> dict[str, Any]:
    """Return the leaves of which this rank writes a piece."""
    own = {
        own_name(name, rank): leaf.value
        for name, leaf in state.leaves.items()
        if isinstance(leaf, PerRank)
    }
    names = {piece.name for piece in plan if piece.rank == rank}
    return {name: leaf for name, leaf in {**state.leaves, **own}.items() if name in names}


def _check_numbers(step: int | None, keep: int | None) -> None:
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(
            "save: step must be an integer >= 0, or None for the one after the newest, got "
            f"{step!r}"
        )
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(
            "save: keep, the number of checkpoints to keep, must be an integer >= 1, or None for "
            f"all, got {keep!r}"
        )


def _make_folder(
    group: Group, dir: Path, step: int | None, keep_lease: bool, failure: Exception | None
) -> tuple[Path, int, str, Lease | None]:
    """Return the folder to write to, step, nonce, and on rank 0, which makes them, the lease.

    An earlier failure of a rank is raised on all.

    Communication: one all_gather of small objects.
    """
    lease: Lease | None = None
    unfinished: Path | None = None

    def make_on_rank_0() -> tuple[str, int] | None:
        nonlocal lease, unfinished
        if failure is not None:
            raise failure
        if group.rank != 0:
            return None
        dir.mkdir(parents=True, exist_ok=True)
        lease = take_lease(dir, keep_lease)
        folders.clean_up(dir)
        newest = folders.latest(dir)
        number = step if step is not None else 0 if newest is None else newest.step + 1
        nonce = os.urandom(4).hex()
        unfinished = dir / folders.name(number, f"tmp-{nonce}")
        unfinished.mkdir()
        return nonce, number

    try:
        (nonce_and_step, *_) = run_on_all_ranks(group, make_on_rank_0)
        assert nonce_and_step is not None  # noqa: S101
    except BaseException:
        if unfinished is not None:
            folders.remove(unfinished)
        if lease is not None:
            lease.end()
        raise
    nonce, number = nonce_and_step
    return dir / folders.name(number, f"tmp-{nonce}"), number, nonce, lease


# -- write and commit ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SaveJob:
    """A save in progress; all ranks have the same plan.

    Attributes:
        rank, world: this rank, and the number of ranks.
        step: the step of the checkpoint.
        keep: the number of complete checkpoints to keep; None for all.
        unfinished: the folder to write to.
        nonce: in its name.
        plan: all pieces with their writers.
        leaves: this rank's leaves by name; copies on the host for an asynchronous save.
        structure, paths: of the tree.
        stopped: set when rank 0 must stop waiting for others.
        lease: on rank 0, the lease of the folder of checkpoints.
        ready: waits until the leaves have their values; None if they have.
        is_lost: whether the process of a rank is known to have died.
        sharded: the names of the leaves that are `ShardedTensor`s.
    """

    rank: int
    world: int
    step: int
    keep: int | None
    unfinished: Path
    nonce: str
    plan: list[WriteItem]
    leaves: Mapping[str, Any]
    structure: Structure
    paths: Mapping[str, TreePath]
    stopped: threading.Event
    lease: Lease | None
    ready: Callable[[], None] | None = None
    is_lost: Callable[[int], bool] = lambda rank: False
    sharded: Sequence[str] = ()

    def write(self) -> None:
        """Write and sync this rank's pieces, then their list."""
        if self.ready is not None:
            self.ready()
        own_pieces = [
            (number, piece) for number, piece in enumerate(self.plan) if piece.rank == self.rank
        ]
        path = self.unfinished / _data_file(self.rank)  # of the file in work, for errors
        try:
            written: list[list[int]] = []
            if own_pieces:
                with Sink(path) as sink:
                    written = [
                        [number, *_write_piece(sink, self._data(piece))]
                        for number, piece in own_pieces
                    ]
                    sink.sync()
            path = self.unfinished / _list_file(self.rank)
            write_whole(path, json.dumps(written).encode())
        except OSError as error:
            raise CheckpointError(self._error_text(path, error)) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not made: rank {self.rank} ran out of "
                f"memory ({shortened(error)}); complete checkpoints are unchanged"
            ) from error

    def _data(self, piece: WriteItem) -> Tensor | bytes:
        leaf = self.leaves[piece.name]
        return serialize(leaf) if piece.box is None else on_host(part_of(leaf, piece.box))

    def commit(self) -> _Committed:
        """Commit on rank 0 after all have written: write index and manifest, rename the folder.

        Returns:
            The checkpoint, and the renamed folders to remove: the one it replaces, and those older
            than `keep`.
        """
        path = self.unfinished  # of the file or folder in work, for errors
        try:
            parts = {rank: json.loads(self._wait_for_rank(rank)) for rank in range(self.world)}
            entries, files = self._list_pieces(parts)
            path = self.unfinished / folders.METADATA
            index = index_of(entries, self.unfinished.parent / folders.name(self.step), self.paths)
            write_whole(path, index)
            files[folders.METADATA] = StoredFile(len(index), [(0, len(index), zlib.crc32(index))])
            for rank in range(self.world):
                (self.unfinished / _list_file(rank)).unlink()
            path = self.unfinished / folders.MANIFEST
            manifest = manifest_of(self.step, self.world, self.structure, files, self.sharded)
            write_whole(path, manifest)
            path = self.unfinished.parent
            retired = folders.commit_folder(self.unfinished, self.step, self.nonce)
            if self.keep is not None:
                retired += folders.retire_old(path, self.keep, self.step)
        except OSError as error:
            raise CheckpointError(self._error_text(path, error)) from error
        finally:
            self.end()
        return _Committed(Checkpoint(self.step, path / folders.name(self.step)), retired)

    def _wait_for_rank(self, rank: int) -> bytes:
        """Wait for a rank's list of written pieces and return it."""
        path = self.unfinished / _list_file(rank)
        program_ended: float | None = None  # when this was noticed
        asked = time.monotonic()
        while not path.exists():
            if not self.unfinished.is_dir():
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was not made: {self.unfinished} was "
                    "removed"
                )
            if time.monotonic() > asked + _LOST_S:
                asked = time.monotonic()
                if self.is_lost(rank) and not path.exists():
                    raise CheckpointError(
                        f"the checkpoint of step {self.step} was not made: rank {rank} died before "
                        "it had written its part"
                    )
            if program_ended is None and not threading.main_thread().is_alive():
                program_ended = time.monotonic()
            is_over = program_ended is not None and time.monotonic() > program_ended + _AFTER_END_S
            if self.stopped.wait(_POLL_S) or is_over:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not complete: rank {rank} has not "
                    "written its part"
                )
        return path.read_bytes()

    def _list_pieces(
        self, parts: Mapping[int, list[list[int]]]
    ) -> tuple[dict[str, StoredLeaf], dict[str, StoredFile]]:
        """Return the leaves with their pieces, and the files.

        Args:
            parts: for each rank the pieces that it has written, `[number in the plan, offset,
                length, CRC-32]`.
        """
        where: dict[int, tuple[int, int, int, int]] = {}
        for rank, written in parts.items():
            for number, offset, length, crc in written:
                where[number] = rank, offset, length, crc
        entries: dict[str, StoredLeaf] = {}
        pieces: dict[str, list[tuple[int, int, int]]] = {}
        for number, piece in enumerate(self.plan):
            entry = entries.setdefault(piece.name, StoredLeaf(piece.shape, piece.dtype))
            if number in where:
                rank, offset, length, crc = where[number]
                file = _data_file(rank)
                entry.pieces.append(StoredPiece(piece.name, piece.box, file, offset, length, crc))
                pieces.setdefault(file, []).append((offset, length, crc))
        files: dict[str, StoredFile] = {}
        for file, written in pieces.items():
            offset, length, _ = written[-1]  # a rank writes its pieces in the order of the plan
            files[file] = StoredFile(offset + length, written)
        return entries, files

    def _error_text(self, path: Path, error: OSError) -> str:
        return (
            f"the checkpoint of step {self.step} was not made: rank {self.rank} could not write "
            f"{path} ({error.strerror or error}); complete checkpoints are unchanged"
        )

    def clear(self) -> None:
        """Remove, on rank 0, the files of a failed save."""
        if self.rank == 0 and self.unfinished.exists():
            folders.remove(self.unfinished)
        self.end()

    def end(self) -> None:
        """End the save; later calls do nothing."""
        if self.lease is not None and self.lease.saving:
            self.lease.end()


def _write_piece(sink: Sink, data: Tensor | bytes) -> tuple[int, int, int]:
    """Write a piece; return (offset, length, CRC-32)."""
    start = sink.piece()
    if isinstance(data, bytes):
        sink.write(data)
    else:
        sink.save(data)
    return start, sink.position - start, sink.crc


def _data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _list_file(rank: int) -> str:
    return f"__{rank}.written.json"


def part_of(leaf: Tensor, box: Box) -> Tensor:
    """Return a box of the global tensor, as a view of this rank's part."""
    if isinstance(leaf, ShardedTensor):
        return leaf._local.detach()[slices(box, box_origin(leaf._layout.box))]
    return leaf.detach()[slices(box)]
