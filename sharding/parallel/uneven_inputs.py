"""`uneven_inputs`: loops over batches that end together on all ranks, though some have fewer.

    rank 0 has [a b c], rank 1 has [d]; what each step of the loop receives, w are weights:

                    step 0        step 1             step 2
    mode="stop"     a    | d      -                  -                  all stop after the shortest
    mode="shadow"   a, w | d, w   b, 2.0 | d, 0.0    c, 2.0 | d, 0.0    rank 1 has weight 0
    mode="empty"    a    | d      b      | d[:0]     c      | d[:0]     rank 1 has no rows

Ranks that have run out run the whole body of the loop: they gather parameters, exchange
activations, reduce gradients and step the optimizer like all others. So any collectives work in the
body.

Ranks exchange whether they have a batch for the next step while the current step runs, so that no
rank waits for it:

    fetch 0, send  |  fetch 1, send  body of step 0  |  fetch 2, send  body of step 1  |  ...
                   ^ wait for 0                      ^ wait for 1, which arrived during step 0
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

from ...mesh.comm.agreement import facts_of, gather_facts
from ...mesh.comm.group import Group
from ...mesh.comm.work import Work
from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import MeshError, PeerError
from ...mesh.monitor.verdict import Observation, Verdict
from ...mesh.text import ranks_text

T = TypeVar("T")

MODES = ("stop", "shadow", "empty")
_HAS, _ENDED, _RAISED = 1, 2, 3  # not 0, which the ranks of a null world send

_log = logging.getLogger(__name__)


@overload
def uneven_inputs(
    loader: Iterable[T],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: Literal["stop", "empty"] = "stop",
) -> Iterator[T]: ...
@overload
def uneven_inputs(
    loader: Iterable[T],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: Literal["shadow"],
    count: Callable[[T], int] | None = None,
) -> Iterator[tuple[T, float]]: ...
def uneven_inputs(
    loader: Iterable[Any],
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    *,
    mode: str = "stop",
    count: Callable[[Any], int] | None = None,
) -> Iterator[Any]:
    """uneven_inputs(loader) -> the loader's batches, for the same number of steps on every rank.

        for x, y in sm.parallel.uneven_inputs(loader, mesh):  # all stop after the shortest
        for x, y in sm.parallel.uneven_inputs(loader, mesh, mode="empty"):  # become sharded tensors
            x, y = (sm.make_array_from_process_local_data(mesh, P("dp"), t) for t in (x, y))
        for (x, y), weight in sm.parallel.uneven_inputs(loader, mesh, mode="shadow"):
            (loss_of(x, y) * weight).backward()  # of each rank; gradients are averaged over ranks

    Which mode: "stop" leaves surplus batches of some ranks out of the epoch. The others use every
    sample once, while some ranks compute on nothing in the last steps; mean loss and gradients of a
    step equal those of one process that has all samples:

    - "empty", if batches become sharded tensors: a mean over a sharded dim counts the rows that
      exist, so a part without rows has no effect in any operator (losses, batch norms, routing).
      The same holds for a last batch that is short.
    - "shadow", if each rank has its own loss, which is averaged over ranks: a batch has the weight
      `samples * ranks / all samples`, 0 on a rank that has run out, so that the mean of
      `loss * weight` is the mean over all samples. Shapes do not change. A rank that has run out
      gets a copy of its first batch each time. Results that are not multiplied by `weight`
      (statistics of a batch norm, a second loss) do include that batch.

    Args:
        loader: batches: a DataLoader, a list, a generator, also an infinite one. It is read one
            batch ahead.
        mesh: the mesh whose ranks run the loop; by default that of `with mesh:` or `set_mesh`.
        axes: the axes along which batches differ, as in "dp" or ("dp", "fsdp"); optional if the
            mesh has one axis. Ranks that differ only along other axes must have the same batches;
            each step checks that all or none of them have one, and in modes other than "stop" that
            the number of samples is the same.
        mode: "stop", "shadow" or "empty".
        count: with "shadow", the number of samples in a batch, as in
            `lambda batch: int((batch["labels"] != -100).sum())`; by default the rows of its first
            tensor.

    Returns:
        An iterator over batches, in mode "shadow" over (batch, weight) with a Python float. Numbers
        that are passed to a function under `shard_map` must be the same on all ranks, so pass
        `sm.from_local(torch.tensor([weight]), mesh, P("dp"))` there, and use
        `sm.pmean(loss * weight.sum(), "dp")`. If batches differ in length, leave `in_specs` out: a
        spec without sizes would split them evenly.

    Raises:
        ValueError, TypeError, MeshError: on every rank, for wrong arguments; in the loop, if ranks
            that must have the same batch do not.
        PeerError: the loader of another rank raised an error. That rank raises its own error in the
            same step, after the steps for which all ranks had a batch. The program may catch it and
            continue.

    Communication: for each step one all_gather of 16 bytes over the mesh, which overlaps with the
        step before. If a rank has no batch at all and the mode is not "stop", one row of another
        rank's first batch, once.

    torch's `Join` is for DistributedDataParallel and ZeroRedundancyOptimizer: ranks that have run
    out take part in the all_reduces that these classes declare, with zeros. Its mean is over ranks,
    not samples, so a short batch counts as much as a full one; FSDP, tensor parallelism and
    collectives of the program hang. Accelerate's `join_uneven_inputs` uses that `Join`; its
    `even_batches` repeats samples, which then count twice. The equivalent of torch's
    `throw_on_early_termination` is `sm.parallel.check_lengths` before the loop.

    Example:
        >>> for batch in sm.parallel.uneven_inputs(loader, mesh, axes="dp"):
        ...     train_step(batch)
    """
    if mode not in MODES:
        raise ValueError(
            f"uneven_inputs(mode={mode!r}): write one of {', '.join(map(repr, MODES))}"
        )
    if count is not None and mode != "shadow":
        raise ValueError(
            f"uneven_inputs(count=..., mode={mode!r}): only mode='shadow' has weights; leave count "
            "out"
        )
    mesh = given_or_current(mesh)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"uneven_inputs(loader, mesh, axes): mesh must be a DeviceMesh, got {mesh!r}"
        )
    exchange = _StepExchange(mesh, _positions(mesh, axes))
    samples_of = (lambda batch: 0) if mode == "stop" else count or _rows_of
    return _steps(_turns(loader, samples_of), exchange, mode)


def _positions(mesh: DeviceMesh, axes: str | Sequence[str] | None) -> list[int]:
    """Return the indices of the axes. Raises: MeshError: unknown, or none of several."""
    if axes is None and mesh.ndim > 1:
        raise MeshError(
            f"uneven_inputs on {mesh!r}: pass the axes along which ranks have different batches, "
            f"as in axes={mesh.axis_names[0]!r}; along the others they have the same"
        )
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else axes
    return [mesh.axis_index(name) for name in names]


# -- this rank -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Turn:
    """A rank's input for a step.

    Attributes:
        state: `_HAS` a batch, or none because its loader `_ENDED` or `_RAISED`.
        batch, samples, error: set according to the state.
    """

    state: int
    batch: Any = None
    samples: int = 0
    error: Exception | None = None


def _turns(loader: Iterable[Any], samples_of: Callable[[Any], int]) -> Iterator[_Turn]:
    """Yield this rank's input for each step, without end."""
    try:
        for batch in loader:
            yield _Turn(_HAS, batch, int(samples_of(batch)))
    except Exception as error:  # raised when the other ranks know of it
        yield _Turn(_RAISED, error=error)
    while True:
        yield _Turn(_ENDED)


def _steps(turns: Iterator[_Turn], exchange: _StepExchange, mode: str) -> Iterator[Any]:
    turn = next(turns)
    exchange.send(turn)
    stand_in: Any = None
    try:
        for step in count_up():
            received = exchange.read()
            _check(exchange, turn, received, step)
            if _is_over(exchange, received, mode, step):
                return
            if step == 0 and mode != "stop":
                stand_in = _make_stand_in(_first_batch(exchange, turn, received), mode)
            item = _loop_item(turn, received, mode, stand_in)
            turn = next(turns)
            exchange.send(turn)
            yield item
    finally:
        exchange.leave()


def _loop_item(turn: _Turn, received: np.ndarray, mode: str, stand_in: Any) -> Any:
    """Return what the loop's body receives."""
    batch = turn.batch if turn.state == _HAS else pytree.tree_map(_copy_leaf, stand_in)
    if mode != "shadow":
        return batch
    everywhere = max(int(received[:, 1].sum()), 1)
    weight = turn.samples * len(received) / everywhere
    return batch, weight


# -- all ranks -------------------------------------------------------------------------------------


class _StepExchange:
    """Exchanges state and samples of all ranks for the next step while the current one runs.

    Attributes:
        group: the ranks of the mesh.
        places: the grid of the mesh with each rank's index in the group.
        along: the axes along which batches differ.
        replicated: the axes along which they are the same.
    """

    def __init__(self, mesh: DeviceMesh, along: Sequence[int]) -> None:
        self.mesh = mesh
        self.group: Group = mesh.group()
        self.places = np.searchsorted(self.group.ranks, mesh.ranks)
        self.along = along
        self.replicated = [i for i in range(mesh.ndim) if i not in along]
        self.device = torch.device("cpu") if mesh.device_type == "meta" else mesh.device
        # On its own stream, so that reading the result does not wait for the work of the step.
        self._stream: AbstractContextManager[Any] = nullcontext()
        if self.device.type != "cpu":
            self._stream = torch.Stream(self.device)
        self._work: Work | None = None

    def send(self, turn: _Turn) -> None:
        """Start sending this rank's state.

        Communication: one all_gather of 16 bytes, still under way when this returns.
        """
        with self._stream:
            self._own_state = torch.tensor(
                [turn.state, turn.samples], dtype=torch.int64, device=self.device
            )
            self._received = self._own_state.new_empty(self.group.size, 2)
            self._work = self.group.all_gather(self._received, self._own_state, async_op=True)

    def read(self) -> np.ndarray:
        """Wait for all ranks; return state and samples of each, in group order."""
        with self._stream:
            self._wait()
            received, own = self._received.cpu().numpy(), self._own_state.cpu().numpy()
        received[received[:, 0] == 0] = own  # ranks of a null world: like this one
        return received

    def leave(self) -> None:
        """Wait for the exchange under way when the loop is left: all ranks have started it."""
        with suppress(RuntimeError):  # a rank has failed, which later collectives report
            self._wait()

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

    def ranks(self, which: np.ndarray) -> list[int]:
        return [rank for rank, chosen in zip(self.group.ranks, which, strict=True) if chosen]


def _is_over(exchange: _StepExchange, received: np.ndarray, mode: str, step: int) -> bool:
    ended = received[:, 0] == _ENDED
    if mode != "stop" or not ended.any() or ended.all():
        return bool(ended.all())
    _log.info(
        "uneven_inputs: %s had %d batches, after which all ranks stop; %s had more",
        ranks_text(exchange.ranks(ended)),
        step,
        ranks_text(exchange.ranks(~ended)),
    )
    return True


def _check(exchange: _StepExchange, turn: _Turn, received: np.ndarray, step: int) -> None:
    """Raise, on every rank, the error of a loader, or that of different batches.

    The second is a ValueError if ranks that must have the same batch do not.
    """
    if (received[:, 0] == _RAISED).any():
        _raise(exchange, turn, step)
    grid = received[exchange.places]
    for axis in exchange.replicated:
        unlike = (grid != grid.take([0], axis)).any(-1)
        if unlike.any():
            raise ValueError(_unlike(exchange, received, step, np.argwhere(unlike)[0]))


def _unlike(exchange: _StepExchange, received: np.ndarray, step: int, where: np.ndarray) -> str:
    mesh = exchange.mesh
    same = tuple(int(i) if axis in exchange.along else slice(None) for axis, i in enumerate(where))
    have = []
    for i in exchange.places[same].flatten():
        state, samples = received[i]
        if state == _ENDED:
            batch = "none"
        else:
            batch = f"a batch of {samples} samples" if samples else "a batch"
        have.append(f"rank {exchange.group.ranks[i]} has {batch}")
    who = "; ".join(have)
    split, others = (
        [mesh.axis_names[i] for i in axes] for axes in (exchange.along, exchange.replicated)
    )
    return (
        f"uneven_inputs over {split} of {mesh!r}: ranks that differ only along {others} must have "
        f"the same batches, but in step {step} {who}. Choose a rank's batches by "
        f"mesh.get_local_rank(axis) of {split}; or, if each rank has its own, pass "
        f"axes={mesh.axis_names}"
    )


def _raise(exchange: _StepExchange, turn: _Turn, step: int) -> None:
    """Raise this rank's own error, or a PeerError for those of others."""
    failures = gather_facts(
        exchange.group, None if turn.error is None else _describe_error(exchange, turn.error)
    )
    if turn.error is not None:
        turn.error.add_note(
            f"in the loader, for step {step} of sm.parallel.uneven_inputs; ranks that had a batch "
            "raise PeerError"
        )
        raise turn.error
    raise _peer_error([one for one in failures.values() if one is not None], step)


def _describe_error(exchange: _StepExchange, error: Exception) -> tuple[Observation, str]:
    """Return an error for other ranks: rank, call and line, and the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    call = f"next(loader) raised {traceback.format_exception_only(error)[-1].strip()}"
    return Observation(exchange.group.world.rank, call, place), "".join(
        traceback.format_exception(error)
    ).rstrip()


def _peer_error(received: Sequence[tuple[Observation, str]], step: int) -> PeerError:
    seen = tuple(one for one, _ in received)
    ranks = tuple(one.rank for one in seen)
    lines = [
        f"the loader of {ranks_text(ranks)} raised an error for step {step} of "
        "sm.parallel.uneven_inputs, so no rank can take that step:"
    ]
    lines += [f"rank {one.rank}:\n{trace}" for one, trace in received]
    text = "\n".join(lines)
    return PeerError(text, Verdict("raised", ranks, "", seen, text))


# -- batches without samples -----------------------------------------------------------------------


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, np.ndarray)) and leaf.ndim > 0


def _rows_of(batch: Any) -> int:
    """Return the number of rows of a batch's first tensor.

    Raises: TypeError if there is none.
    """
    arrays = [leaf for leaf in pytree.tree_leaves(batch) if _is_array(leaf)]
    if not arrays:
        raise TypeError(
            f"uneven_inputs: a batch of type {type(batch).__name__} has no tensor with rows to "
            "count (looked for in tuples, lists and dicts); make the loader return one of these, "
            "as with dict(batch), or with mode='shadow' pass count=lambda batch: ..., the number "
            "of samples"
        )
    return len(arrays[0])


def _make_stand_in(batch: Any, mode: str) -> Any:
    """Return the batch for a rank that has run out."""
    if mode == "shadow":
        return pytree.tree_map(_copy_leaf, batch)
    rows = _rows_of(batch)
    return pytree.tree_map(
        lambda leaf: _copy_leaf(leaf[:0] if _has_rows(leaf, rows) else leaf), batch
    )


def _copy_leaf(leaf: Any) -> Any:
    """Return a copy, since loops may change their batches.

    For a view, `deepcopy` would copy the whole base.
    """
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return copy.deepcopy(leaf)


def _has_rows(leaf: Any, rows: int) -> bool:
    return _is_array(leaf) and len(leaf) == rows


def _first_batch(exchange: _StepExchange, turn: _Turn, received: np.ndarray) -> Any:
    """Return this rank's first batch; if it has none, one like that of the first rank that has one.

    Communication: if a rank has none, an all_gather of one row.
    """
    has = received[:, 0] == _HAS
    if has.all():
        return turn.batch
    group = exchange.group
    sender = group.ranks[int(has.argmax())]
    packed = facts_of(
        group, sender, _pack_first_row(turn.batch) if group.world.rank == sender else None
    )
    if turn.state == _HAS:
        return turn.batch
    device = exchange.mesh.device
    return pytree.tree_map(
        lambda leaf: leaf.unpack(device) if isinstance(leaf, _Array) else leaf, packed
    )


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor or numpy array sent to a rank that has none.

    Attributes:
        value: its first row if it has a row per sample, else all of it; on the CPU.
        rows: the number of sample rows; None if its rows are not samples.
        was_on_cpu: whether it was on the CPU.
    """

    value: Any
    rows: int | None
    was_on_cpu: bool

    def unpack(self, device: torch.device) -> Any:
        value = self.value if self.rows is None else self.value[[0] * self.rows]
        return value if self.was_on_cpu else value.to(device)


def _pack_first_row(batch: Any) -> Any:
    """Return a batch with the first row of each tensor only, enough to make one like it."""
    leaves, tree = pytree.tree_flatten(batch)
    rows = next((len(leaf) for leaf in leaves if _is_array(leaf)), None)
    return tree.unflatten([_packed_leaf(leaf, rows) for leaf in leaves])


def _packed_leaf(leaf: Any, rows: int | None) -> Any:
    if not isinstance(leaf, (Tensor, np.ndarray)):
        return leaf
    is_rows = rows is not None and _has_rows(leaf, rows)
    value = _copy_leaf(leaf[:1] if is_rows else leaf)
    was_on_cpu = not isinstance(value, Tensor) or value.device.type == "cpu"
    return _Array(value if was_on_cpu else value.cpu(), rows if is_rows else None, was_on_cpu)
