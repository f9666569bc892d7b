"""Rendezvous of simulated ranks at a collective: compare the arguments, then move the data.

    rank 0   Arrival("all_reduce", agree=("sum", float32, "4 elements"), buffers=(x,))  --+
    rank 1   Arrival("all_reduce", agree=("sum", float32, "4 elements"), buffers=(x,))  --+
                                                    move([arrival of 0, arrival of 1])  <-+

All ranks share the memory of one process, so the last rank to arrive moves the data of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.recording.recorder import differ, unlike
from ..monitor.diagnosis.votes import connected_components, is_divided
from . import diagnosis as verdict
from .arrival import Arrival

_FOLD = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


Move = Callable[[list[Arrival]], Any]


class Rendezvous:
    """The ranks of one group at one collective, until the last of them arrives."""

    __slots__ = ("calls", "error", "result")

    def __init__(self) -> None:
        self.calls: dict[int, Arrival] = {}
        self.result: Any = None
        self.error: Exception | None = None

    def complete(
        self, ranks: tuple[int, ...], move: Move, place_of: Callable[[int], str | None]
    ) -> None:
        """Move the data, or set the error of all ranks. Called when all have arrived."""
        calls = [self.calls[r] for r in ranks]
        try:
            problem = _disagreement(ranks, calls)
            if problem is not None:
                raise verdict.different_collectives(
                    problem, ranks, calls, list(map(place_of, ranks))
                )
            # In inference mode both inference tensors and others may be written; outside, inference
            # tensors raise.
            with torch.inference_mode():
                self.result = move(calls)
        except Exception as error:
            self.error = error


def like(x: Tensor) -> tuple[torch.dtype, str]:
    return x.dtype, f"{x.numel()} elements"


def _disagreement(ranks: tuple[int, ...], calls: list[Arrival]) -> str | None:
    """Return how the ranks' calls differ, None if they agree."""
    first = calls[0]
    if verdict.are_in_different_steps(calls):
        return "ranks call collectives of different steps"
    if any(c.op != first.op or c.agree != first.agree or c.tag != first.tag for c in calls):
        return "ranks call different collectives"
    parties = connected_components(calls, lambda one, other: not unlike(one.lineage, other.lineage))
    if is_divided(
        parties,
        lambda one, other: differ(one.lineage, one.trace_buffer, other.lineage, other.trace_buffer),
    ):
        return "ranks call the same collective for values that were made differently"
    if first.op == "all_to_all":
        return _wrong_split(ranks, calls)
    return _wrong_pair(ranks, calls) if first.op == "permute" else None


def _wrong_split(ranks: tuple[int, ...], calls: list[Arrival]) -> str | None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender.buffers[3][j], receiver.buffers[2][i]
            if sent != expected:
                return (
                    f"rank {ranks[i]} sends {sent} elements to rank {ranks[j]}, which expects "
                    f"{expected}"
                )
    return None


def _wrong_pair(ranks: tuple[int, ...], calls: list[Arrival]) -> str | None:
    for i, call in enumerate(calls):
        _, x, dst, src = call.buffers
        wrong = None if dst is None else _wrong_sent(ranks, calls, i, dst, x.numel())
        if wrong is not None:
            return wrong
        if src is not None and calls[src].buffers[2] != i:
            other = _peer_text(ranks, calls[src].buffers[2])
            return f"rank {ranks[i]} expects from rank {ranks[src]}, which sends to {other}"
    return None


def _wrong_sent(
    ranks: tuple[int, ...], calls: list[Arrival], i: int, dst: int, sent: int
) -> str | None:
    out, _, _, src = calls[dst].buffers
    if src != i:
        peer = _peer_text(ranks, src)
        return f"rank {ranks[i]} sends to rank {ranks[dst]}, which expects from {peer}"
    if sent != out.numel():
        return (
            f"rank {ranks[i]} sends {sent} elements to rank {ranks[dst]}, which expects "
            f"{out.numel()}"
        )
    return None


def _peer_text(ranks: tuple[int, ...], place: int | None) -> str:
    return "none" if place is None else f"rank {ranks[place]}"


# Each move computes all results before it writes any, because an out may overlap an x (as in an
# in-place all_gather).


def move_all_gather(calls: list[Arrival]) -> None:
    gathered = torch.cat([c.buffers[1].reshape(-1) for c in calls])
    for c in calls:
        c.buffers[0].view(-1).copy_(gathered)


def move_reduce_scatter(calls: list[Arrival]) -> None:
    op = _FOLD[calls[0].agree[0]]
    total = functools.reduce(op, [c.buffers[1].reshape(-1) for c in calls])
    for c, part in zip(
        calls, total.chunk(len(calls)) if total.numel() else [total] * len(calls), strict=True
    ):
        c.buffers[0].view(-1).copy_(part)


def move_all_reduce(calls: list[Arrival]) -> None:
    op = _FOLD[calls[0].agree[0]]
    total = functools.reduce(op, [c.buffers[0].reshape(-1) for c in calls])
    for c in calls:
        c.buffers[0].view(-1).copy_(total)


def move_all_to_all(calls: list[Arrival]) -> None:
    arrived: list[list[Tensor]] = [[] for _ in calls]
    for c in calls:
        x = c.buffers[1].reshape(-1)
        if x.numel():
            for part, inbox in zip(x.split(list(c.buffers[3])), arrived, strict=True):
                if part.numel():  # among many ranks most are empty
                    inbox.append(part)
    for c, flat in zip(
        calls, [torch.cat(parts) if parts else None for parts in arrived], strict=True
    ):
        if flat is not None:
            c.buffers[0].view(-1).copy_(flat)


def move_broadcast(calls: list[Arrival]) -> None:
    src = calls[0].buffers[1]
    for i, c in enumerate(calls):
        if i != src:
            c.buffers[0].copy_(calls[src].buffers[0])


def move_permute(calls: list[Arrival]) -> None:
    arrived = [
        None if c.buffers[3] is None else calls[c.buffers[3]].buffers[1].reshape(-1).clone()
        for c in calls
    ]
    for c, flat in zip(calls, arrived, strict=True):
        if flat is not None:
            c.buffers[0].view(-1).copy_(flat)


def move_nothing(calls: list[Arrival]) -> None:
    """Do nothing: a barrier."""


def move_bytes(calls: list[Arrival]) -> list[bytes]:
    return [c.buffers[0] for c in calls]
