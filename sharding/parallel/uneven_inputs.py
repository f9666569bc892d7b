"""Loops over batches that end together on all ranks, where some ranks have fewer batches.

    rank 0 has [a b c], rank 1 has [d]       what each step of the loop is given, w being weights
                        step 0               step 1              step 2
    mode="stop"         a      | d           -                   -               all stop with the shortest
    mode="shadow"       a, w   | d, w        b, 2.0 | d, 0.0     c, 2.0 | d, 0.0  rank 1 goes on with a batch of weight 0
    mode="empty"        a      | d           b      | d[:0]      c      | d[:0]   rank 1 goes on with a batch of no rows

Ranks that have run out run the whole body of the loop: they gather parameters, exchange activations, reduce gradients and step
the optimizer like all others. So it makes no difference which collectives a program calls, and for what.

Who has a batch for the next step is told while this step runs, so nobody waits for it:

    fetch 0, tell  |  fetch 1, tell  body of step 0  |  fetch 2, tell  body of step 1  |  ...
                   ^ wait for 0                      ^ wait for 1: told long ago
"""

from __future__ import annotations

import copy
import logging
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count as count_up
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...mesh.comm.group import Group
from ...mesh.comm.work import Work
from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import MeshError, PeerError
from ...mesh.monitor.verdict import Observation, Verdict
from ...mesh.text import ranks_text

T = TypeVar("T")

MODES = ("stop", "shadow", "empty")
_HAS, _ENDED, _RAISED = 1, 2, 3  # not 0, which is what the ranks of a null world tell

_log = logging.getLogger(__name__)


@overload
def join(
    loader: Iterable[T],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: Literal["stop", "empty"] = "stop",
) -> Iterator[T]: ...
@overload
def join(
    loader: Iterable[T],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: Literal["shadow"],
    count: Callable[[T], int] | None = None,
) -> Iterator[tuple[T, float]]: ...
def join(
    loader: Iterable[Any],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: str = "stop",
    count: Callable[[Any], int] | None = None,
) -> Iterator[Any]:
    """join(loader) -> the loader's batches, for as many steps on every rank, however many each rank has.

        for x, y in sm.join(loader, mesh):                                      # all stop with the shortest
        for x, y in sm.join(loader, mesh, mode="empty"):                        # then x, y go into sharded tensors
            x, y = (sm.make_array_from_process_local_data(mesh, P("dp"), t) for t in (x, y))
        for (x, y), weight in sm.join(loader, mesh, mode="shadow"):             # then each rank has a loss of its own
            (loss_of(x, y) * weight).backward()                             # and gradients are averaged over the ranks

    Which mode. "stop" leaves the surplus batches of some ranks out of the epoch. The others use every sample once, at the cost of
    some ranks computing for nothing in the last steps, and then the mean loss over all samples of a step, and its gradient, are
    those of one process that has all of them:

    - "empty", where batches become sharded tensors: a mean over a sharded dim counts the rows that there are, so a part of no
      rows is neutral in every operator (losses, batch norms, routing), also beside a last batch that is merely short.
    - "shadow", where each rank has a loss of its own, which is averaged over the ranks: the batch has weight `samples * ranks / all
      samples`, 0 on a rank that has run out, so that the mean of `loss * weight` is the mean over all samples. Shapes stay as they
      are. A rank that has run out gets its first batch again, a copy each time. What is computed from a batch without being
      multiplied by `weight` (statistics of a batch norm, a second loss) does count it.

    Args:
        loader: batches: a DataLoader, a list, a generator, also one without end. It is read one batch ahead.
        mesh: the mesh whose ranks go through the loop; by default that of `with mesh:` or `set_mesh`.
        axes: along which batches differ, as in "dp" or ("dp", "fsdp"); may be left out where the mesh has one axis. Ranks that
            differ only along other axes must have the same batches; in each step it is checked that they have one, or none, and in
            modes other than "stop" that it has as many samples.
        mode: "stop", "shadow" or "empty".
        count: with "shadow", how many samples a batch counts for, as in `lambda batch: int((batch["labels"] != -100).sum())`; by
            default the rows of its first tensor.

    Returns:
        An iterator over batches, in mode "shadow" over (batch, weight), weight being a number. Numbers that go into a function under
        `shard_map` must be the same on all ranks, so there pass `sm.from_local(torch.tensor([weight]), mesh, P("dp"))`, and use
        `sm.pmean(loss * weight.sum(), "dp")`. Where batches differ in length, leave `in_specs` out: a spec without sizes would cut
        them anew.

    Raises:
        ValueError, TypeError, MeshError: on every rank, wrong arguments; in the loop, that ranks which must have the same batch do
            not.
        PeerError: the loader of another rank raised an error. That rank raises its own error in the same step, after the steps for
            which all ranks had a batch. Nothing is broken by that: who catches it may go on.

    Communication: for each step one all_gather of 16 bytes over the mesh, which runs beside the step before. Where a rank has not
        a single batch and the mode is not "stop", one row of another rank's first batch, once.

    torch's `Join` is for DistributedDataParallel and ZeroRedundancyOptimizer: ranks that have run out answer the all_reduces that
    these classes have declared, with zeros, and the mean is over ranks, not samples, so a short batch counts as much as a full one;
    FSDP, tensor parallelism or a collective of one's own hang. Accelerate's `join_uneven_inputs` is that `Join`; its `even_batches`
    repeats samples, which then count twice. What torch calls `throw_on_early_termination` is `sm.check_lengths`, before the loop.

    Example:
        >>> for batch in sm.join(loader, mesh, axes="dp"):
        ...     train_step(batch)
    """
    if mode not in MODES:
        raise ValueError(f"join(mode={mode!r}): write one of {', '.join(map(repr, MODES))}")
    if count is not None and mode != "shadow":
        raise ValueError(f"join(count=..., mode={mode!r}): only mode='shadow' weighs batches; leave count out")
    mesh = given_or_current(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"join: the mesh comes after the loader, and then axes; got {mesh!r} for a mesh")
    board = _Board(mesh, _positions(mesh, axes))
    samples_of = (lambda batch: 0) if mode == "stop" else count or _rows_of
    return _steps(_turns(loader, samples_of), board, mode)


def _positions(mesh: DeviceMesh, axes: str | Sequence[str] | None) -> list[int]:
    """Raises: MeshError for unknown axes, or none where there are several."""
    if axes is None and mesh.ndim > 1:
        raise MeshError(
            f"join on {mesh!r}: say along which axes ranks have different batches, as in axes={mesh.axis_names[0]!r}; along the "
            "others they have the same"
        )
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    return [mesh.axis_index(name) for name in names]


# -- this rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """What a rank has for a step.

    Attributes:
        state: `_HAS` a batch, none as its loader has `_ENDED`, or none as that has `_RAISED`.
        batch, samples, error: as the state says.
    """

    state: int
    batch: Any = None
    samples: int = 0
    error: Exception | None = None


def _turns(loader: Iterable[Any], samples_of: Callable[[Any], int]) -> Iterator[_Turn]:
    """What this rank has for each step, without end."""
    try:
        for batch in loader:
            yield _Turn(_HAS, batch, int(samples_of(batch)))
    except Exception as error:  # to be raised when the others know
        yield _Turn(_RAISED, error=error)
    while True:
        yield _Turn(_ENDED)


def _steps(turns: Iterator[_Turn], board: _Board, mode: str) -> Iterator[Any]:
    mine = next(turns)
    board.tell(mine)
    stand_in: Any = None
    try:
        for step in count_up():
            told = board.read()
            _check(board, mine, told, step)
            if _is_over(board, told, mode, step):
                return
            if step == 0 and mode != "stop":
                stand_in = _stand_in(_first_batch(board, mine, told), mode)
            given = _given(mine, told, mode, stand_in)
            mine = next(turns)
            board.tell(mine)
            yield given
    finally:
        board.leave()


def _given(mine: _Turn, told: np.ndarray, mode: str, stand_in: Any) -> Any:
    """What the loop's body gets."""
    batch = mine.batch if mine.state == _HAS else pytree.tree_map(_copied, stand_in)
    return (batch, _weight(mine.samples, told)) if mode == "shadow" else batch


def _weight(samples: int, told: np.ndarray) -> float:
    return samples * len(told) / max(int(told[:, 1].sum()), 1)


# -- all ranks ---------------------------------------------------------------------------------------------------------


class _Board:
    """What all ranks have for a step, told beside the step before.

    Attributes:
        group: the ranks of the mesh.
        places: for each rank of the mesh, in its grid, the index in the group.
        along: the axes along which batches differ.
        beside: the axes along which they are the same.
    """

    def __init__(self, mesh: DeviceMesh, along: Sequence[int]) -> None:
        self.mesh = mesh
        self.group: Group = mesh.group()
        self.places = np.searchsorted(self.group.ranks, mesh.ranks)
        self.along = along
        self.beside = [i for i in range(mesh.ndim) if i not in along]
        self.device = torch.device("cpu") if mesh.device_type == "meta" else mesh.device
        # On a stream of its own, so that reading it does not wait for what the step has given the device to do.
        self._stream: AbstractContextManager[Any] = nullcontext()
        if self.device.type != "cpu":
            self._stream = torch.Stream(self.device)
        self._work: Work | None = None

    def tell(self, mine: _Turn) -> None:
        """Communication: one all_gather of 16 bytes, which is under way when this returns."""
        with self._stream:
            self._mine = torch.tensor([mine.state, mine.samples], dtype=torch.int64, device=self.device)
            self._told = self._mine.new_empty(self.group.size, 2)
            self._work = self.group.all_gather(self._told, self._mine, async_op=True)

    def read(self) -> np.ndarray:
        """State and samples of every rank, in group order; waits for the last rank to tell."""
        with self._stream:
            self._wait()
            told, mine = self._told.cpu().numpy(), self._mine.cpu().numpy()
        told[told[:, 0] == 0] = mine  # a null world's ranks: as this one
        return told

    def leave(self) -> None:
        """Ends the loop where the body left it: the others have told what they have before they began with the same step."""
        with suppress(RuntimeError):  # unless one failed, as every collective says from then on
            self._wait()

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def ranks(self, which: np.ndarray) -> list[int]:
        return [rank for rank, chosen in zip(self.group.ranks, which, strict=True) if chosen]


def _is_over(board: _Board, told: np.ndarray, mode: str, step: int) -> bool:
    ended = told[:, 0] == _ENDED
    if mode != "stop" or not ended.any() or ended.all():
        return bool(ended.all())
    _log.info(
        "join: %s had %d batches, after which all ranks stop; %s had more",
        ranks_text(board.ranks(ended)), step, ranks_text(board.ranks(~ended)),
    )  # fmt: skip
    return True


def _check(board: _Board, mine: _Turn, told: np.ndarray, step: int) -> None:
    """Raises: on every rank, what went wrong in a loader, or that ranks which must have the same batch do not."""
    if (told[:, 0] == _RAISED).any():
        _raise(board, mine, step)
    grid = told[board.places]
    for axis in board.beside:
        unlike = (grid != grid.take([0], axis)).any(-1)
        if unlike.any():
            raise ValueError(_unlike(board, told, step, np.argwhere(unlike)[0]))


def _unlike(board: _Board, told: np.ndarray, step: int, where: np.ndarray) -> str:
    mesh = board.mesh
    same = tuple(int(i) if axis in board.along else slice(None) for axis, i in enumerate(where))
    who = "; ".join(f"rank {board.group.ranks[i]} has {_words(*told[i])}" for i in board.places[same].flatten())
    split, others = ([mesh.axis_names[i] for i in axes] for axes in (board.along, board.beside))
    return (
        f"join over {split} of {mesh!r}: ranks that differ only along {others} must have the same batches, but in step {step} {who}. "
        f"Choose a rank's batches by mesh.get_local_rank(axis) of {split}; or, if each rank has its own, say axes={mesh.axis_names}"
    )


def _words(state: int, samples: int) -> str:
    if state == _ENDED:
        return "none"
    return f"a batch of {samples} samples" if samples else "a batch"


def _raise(board: _Board, mine: _Turn, step: int) -> None:
    """Raises: the own error, or that of the others."""
    told = board.group.all_gather_object(None if mine.error is None else _seen(board, mine.error))
    if mine.error is not None:
        mine.error.add_note(f"in the loader, for step {step} of sm.join; ranks that had a batch raise PeerError")
        raise mine.error
    raise _peer_error([one for one in told if one is not None], step)


def _seen(board: _Board, error: Exception) -> tuple[Observation, str]:
    """What other ranks are told of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    call = f"next(loader) raised {traceback.format_exception_only(error)[-1].strip()}"
    return Observation(board.group.world.rank, call, place), "".join(traceback.format_exception(error)).rstrip()


def _peer_error(told: Sequence[tuple[Observation, str]], step: int) -> PeerError:
    seen = tuple(one for one, _ in told)
    ranks = tuple(one.rank for one in seen)
    lines = [f"the loader of {ranks_text(ranks)} raised an error for step {step} of sm.join, so no rank can take that step:"]
    lines += [f"rank {one.rank}:\n{trace}" for one, trace in told]
    text = "\n".join(lines)
    return PeerError(text, Verdict("raised", ranks, "", seen, text))


# -- batches without samples -------------------------------------------------------------------------------------------


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0


def _rows_of(batch: Any) -> int:
    """How many rows the first tensor of a batch has.

    Raises: TypeError where there is none.
    """
    arrays = [leaf for leaf in pytree.tree_leaves(batch) if _is_array(leaf)]
    if not arrays:
        raise TypeError(
            f"join: a batch of type {type(batch).__name__} has no tensor with rows to count (looked for in tuples, lists and dicts); let "
            "the loader give such, as with dict(batch), or with mode='shadow' say count=lambda batch: ..., the number of samples"
        )
    return len(arrays[0])


def _stand_in(batch: Any, mode: str) -> Any:
    """What a rank is given once it has run out."""
    if mode == "shadow":
        return pytree.tree_map(_copied, batch)
    rows = _rows_of(batch)
    return pytree.tree_map(lambda leaf: _copied(leaf[:0] if _has_rows(leaf, rows) else leaf), batch)


def _copied(leaf: Any) -> Any:
    """A copy, as loops may change their batches. Not `deepcopy` for a tensor: of a view that copies all that it is a view of."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)


def _has_rows(leaf: Any, rows: int) -> bool:
    return _is_array(leaf) and len(leaf) == rows


def _first_batch(board: _Board, mine: _Turn, told: np.ndarray) -> Any:
    """This rank's first batch; where it has none, one like that of the first rank that has.

    Communication: where a rank has none, an all_gather of one row.
    """
    has = told[:, 0] == _HAS
    if has.all():
        return mine.batch
    giver = int(has.argmax())
    packed = board.group.all_gather_object(_packed(mine.batch) if board.group.rank == giver else None)[giver]
    return mine.batch if mine.state == _HAS else _unpacked(packed, board.mesh.device)


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor or numpy array on its way to a rank that has none.

    Attributes:
        value: its first row if it has one for each sample, else all of it; on the CPU.
        rows: how many rows it has of samples; None where it has none.
        was_here: whether it was on the CPU.
    """

    value: Any
    rows: int | None
    was_here: bool

    def unpacked(self, device: torch.device) -> Any:
        value = self.value if self.rows is None else self.value[[0] * self.rows]
        return value if self.was_here else value.to(device)


def _packed(batch: Any) -> Any:
    """A batch, of which only the first row is sent: what stands in for samples must be like them, but need not be many."""
    leaves, tree = pytree.tree_flatten(batch)
    rows = next((len(leaf) for leaf in leaves if _is_array(leaf)), None)
    return tree.unflatten([_packed_leaf(leaf, rows) for leaf in leaves])


def _packed_leaf(leaf: Any, rows: int | None) -> Any:
    if not isinstance(leaf, (Tensor, np.ndarray)):
        return leaf
    is_rows = rows is not None and _has_rows(leaf, rows)
    value = _copied(leaf[:1] if is_rows else leaf)
    was_here = not isinstance(value, Tensor) or value.device.type == "cpu"
    return _Array(value if was_here else value.cpu(), rows if is_rows else None, was_here)


def _unpacked(packed: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda leaf: leaf.unpacked(device) if isinstance(leaf, _Array) else leaf, packed)
