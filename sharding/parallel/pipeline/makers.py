"""The schedules of the literature, each a function of ranks and microbatches.

`gpipe`, `looped_bfs`, `one_f_one_b`, `interleaved`, `zb_h1` and `dualpipe_v` are written down in
closed form: how many forwards a rank is ahead, then what alternates. `zb_v`, `v_half` and `v_min`
are blocks that repeat, and list scheduling closes the gaps at both ends (`repeated_block`).

Formulas are in the costs F, I, W and B = I + W of one stage, with p ranks, m microbatches and v
stages on each rank, and without latency; "bubble" is makespan minus busy. A rank's live activations
are counted in stages and microbatches: v of them are one microbatch in all its stages. Each formula
is for the domain that is stated with it, where tests compare it with the simulation; elsewhere,
simulate.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .actions import Action, Cell, Kind, Overlap, Row, Rows
from .repeated_block import schedule_blocks, v_block, v_placement


def gpipe(ranks: int, microbatches: int) -> Rows:
    """Run all forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Bubble (p - 1)(F + B); live activations m. Any p and m. Closed form.
    """
    return looped_bfs(ranks, microbatches, stages_per_rank=1, reverse=False)


def looped_bfs(
    ranks: int, microbatches: int, stages_per_rank: int = 2, *, reverse: bool = True
) -> Rows:
    """Run all microbatches through a rank's first stage, then through its next one, and back.

    Breadth-first, so that the parameters of a stage are gathered once in each direction
    (Lamy-Poirier 2022, arXiv 2211.05953). Stages go round the ranks: stage s is on rank s mod p.

    Bubble (p - 1)(F + B) for m >= p; live activations vm. Closed form.

    Args:
        stages_per_rank: v.
        reverse: run the backwards of a stage from the last microbatch to the first one.
    """
    rows = []
    for rank in range(ranks):
        stages = [rank + ranks * chunk for chunk in range(stages_per_rank)]
        forwards = [
            Action(stage, "F", microbatch)
            for stage, microbatch in product(stages, range(microbatches))
        ]
        order = range(microbatches)[::-1] if reverse else range(microbatches)
        backwards = [
            Action(stage, "B", microbatch) for stage, microbatch in product(stages[::-1], order)
        ]
        rows.append((*forwards, *backwards))
    return tuple(rows)


def one_f_one_b(ranks: int, microbatches: int) -> Rows:
    """Alternate one forward and one backward as soon as possible (PipeDream-Flush; 1F1B).

    Bubble (p - 1)(F + B), as GPipe; live activations of rank r: min(m, p - r). Any p and m.
    (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.) Closed form.
    """
    return _alternating_rows(ranks, microbatches, stages_per_rank=1, ahead=1)


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Rows:
    """Alternate one forward and one backward over several stages on each rank.

    Stages go round the ranks: stage s is on rank s mod p. Microbatches go through them in rounds of
    m / max(1, m // p), so in rounds of p if m is a multiple of p; other m must be a multiple of the
    number of rounds, as in torch.

    Bubble (p - 1)(F + B), of stages that are v times smaller than without interleaving; live
    activations of rank r: min(vm, (v - 1)p + 2(p - 1 - r) + 1), so p + (p - 1)/v microbatches on
    rank 0. Both for m a multiple of p and v > 1. (Narayanan et al. 2021, arXiv 2104.04473, section
    2.2.) Closed form.

    Args:
        stages_per_rank: v; with one it is `one_f_one_b` with twice as many forwards ahead.

    Raises:
        ValueError: m is no multiple of max(1, m // p).
    """
    return _alternating_rows(ranks, microbatches, stages_per_rank, ahead=2)


def zb_h1(ranks: int, microbatches: int, stages_per_rank: int = 1) -> Rows:
    """Delay backwards for weights, so that they fill what 1F1B leaves idle at the end.

    Rank r delays them by r microbatches, so that every rank holds as many activations as the first
    rank does in 1F1B. With several stages on a rank, which go round the ranks, microbatches must be
    a multiple of the number of rounds, as for `interleaved`.

    Bubble (p - 1)(F + I - W) for F >= W and I >= W; live activations vp, on every rank. Both for
    m >= p, and m a multiple of p if v > 1. (ZB-H1, also ZB1P: Qi et al. 2023, arXiv 2401.10241,
    section 2.) Closed form.

    Raises:
        ValueError: with several stages, m is no multiple of max(1, m // p).
    """
    return _alternating_rows(ranks, microbatches, stages_per_rank, ahead=1, in_parts=True)


def _alternating_rows(
    ranks: int, microbatches: int, stages_per_rank: int, ahead: int, in_parts: bool = False
) -> Rows:
    """Return rows that begin with some forwards and alternate forward and backward from there.

    Args:
        ahead: how many forwards a rank begins with more than the next rank.
        in_parts: split backwards. Rank r is then r backwards for weights behind.
    """
    rounds = max(1, microbatches // ranks)
    if stages_per_rank > 1 and microbatches % rounds:
        raise ValueError(
            f"{microbatches} microbatches on {ranks} ranks: with several stages on each rank they "
            f"must divide into {microbatches} // {ranks} = {rounds} rounds of equal length, as "
            f"{microbatches - microbatches % rounds} do; a multiple of {ranks} always does"
        )
    in_round = microbatches // rounds if stages_per_rank > 1 else 1
    backward: Kind = "I" if in_parts else "B"
    rows = []
    for rank in range(ranks):
        stages = [rank + ranks * chunk for chunk in range(stages_per_rank)]
        forwards = list(_in_rounds(stages, "F", microbatches, in_round))
        backwards = list(_in_rounds(stages[::-1], backward, microbatches, in_round))
        first = min((stages_per_rank - 1) * in_round + ahead * (ranks - 1 - rank), len(forwards))
        row = forwards[:first]
        for number, action in enumerate(backwards):
            row += forwards[first + number : first + number + 1]
            row.append(action)
            if in_parts and number >= rank:
                row.append(backwards[number - rank]._replace(kind="W"))
        if in_parts:
            row += [
                action._replace(kind="W") for action in backwards[max(0, len(backwards) - rank) :]
            ]
        rows.append(tuple(row))
    return tuple(rows)


def _in_rounds(stages: list[int], kind: Kind, microbatches: int, in_round: int) -> Iterator[Action]:
    """Yield the actions of rounds: each runs its microbatches through all stages, one by one."""
    for first in range(0, microbatches, in_round):
        for stage, microbatch in product(stages, range(first, first + in_round)):
            yield Action(stage, kind, microbatch)


def zb_v(ranks: int, microbatches: int) -> Rows:
    """Run two stages per rank in a V, with backwards in parts and the memory of 1F1B.

    Stages 0 to p - 1 go down the ranks and stages p to 2p - 1 come back, so that the loss is on
    rank 0.

    Bubble (p - 1)F for m >= p; by the spans of ranks it is zero for m >= 2p - 1. Live activations
    min(2m, 2p), so those of p microbatches. All for F = I = W. (ZB-V: Qi et al. 2023, arXiv
    2401.10241, section 6, and Qi et al. 2024, arXiv 2405.15362.) List scheduling of a block that
    goes four slots from rank to rank on the way down and two on the way up.
    """
    return schedule_blocks(v_block(ranks, hops=(4, 2)), microbatches, limit=2 * ranks)


def v_half(ranks: int, microbatches: int) -> Rows:
    """Run two stages per rank in a V, with half the activations of 1F1B.

    Bubble 3p - 4 slots, one less for even p > 2, where the paper has about 3p; live activations
    those of (p + 2) // 2 microbatches. Both for F = I = W, m >= p and p > 1. (V-Half: Qi et al.
    2024, arXiv 2405.15362.) List scheduling of a block that goes two slots from rank to rank on the
    way down and one on the way up.
    """
    # so that what a rank does on the way up is three slots apart, modulo the period
    gradient_turn = 2 if ranks % 2 else 5
    block = v_block(ranks, hops=(2, 1), gradient_turn=gradient_turn)
    return schedule_blocks(block, microbatches, limit=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Rows:
    """Run two stages per rank in a V, with a third of the activations of 1F1B.

    A microbatch goes through all stages and back without a wait, which is the least that
    activations can live. Bubble 4p - 5 slots, where the paper has about 4p; live activations
    those of (p + 4) // 3 microbatches. Both for F = I = W, m >= p and p > 1. (V-Min: Qi et al.
    2024, arXiv 2405.15362.) List scheduling of a block that goes one slot from rank to rank.
    """
    # if p is a multiple of 3, two more slots: else two actions of a rank would be in one slot
    block = v_block(ranks, hops=(1, 1), turn=1 if ranks % 3 else 3)
    return schedule_blocks(block, microbatches, limit=2 * ((ranks + 4) // 3))


def dualpipe_v(ranks: int, microbatches: int) -> Rows:
    """Run two stages per rank in a V, with a forward and a backward of the two overlapped.

    Bubble (p - 1)(FB + B - 3W), where FB is the cost of a forward and a backward together, for
    F = I = W and FB = F + B; if FB < F + B, ranks are busy for different times. Live activations
    2p + 1, so those of p + 1/2 microbatches. Both for m >= 2p, the only ones that it takes.
    (DeepSeek 2025, DualPipeV, github.com/deepseek-ai/DualPipe; after DualPipe, arXiv 2412.19437.)
    Closed form.

    Raises:
        ValueError: m < 2p.
    """
    if microbatches < 2 * ranks:
        raise ValueError(
            f"dualpipe_v takes at least twice as many microbatches as ranks: {microbatches} is "
            f"less than 2 * {ranks}"
        )
    return tuple(_dualpipe_v_row(rank, ranks, microbatches) for rank in range(ranks))


def _dualpipe_v_row(rank: int, ranks: int, microbatches: int) -> Row:
    """Return the row of one rank.

    Let `down` be its stage on the way down and `up` that on the way up, `below` the number of ranks
    below it, and `above` that of the others, itself included. The rank begins with forwards until
    the first gradient arrives, overlaps forward and backward while there are forwards, and ends
    with backwards, the last of which are split.
    """
    down, up = (stage for stage, owner in enumerate(v_placement(ranks)) if owner == rank)
    below, above = ranks - 1 - rank, rank + 1
    row = _RowOfCounters()
    for _ in range(2 * below):
        row.add(down, "F")
    for _ in range(above):
        row.add(down, "F")
        row.add(up, "F")
    for _ in range(below):
        row.add(up, "I")
        row.add_weight()
        row.add(up, "F")
    for number in range(microbatches - 2 * ranks + above):
        if number == 0 and below == 0:  # the forward is late on the last rank: do not wait for it
            row.add(down, "F")
            row.add(up, "B")
        else:
            row.overlap(down, up)
        row.overlap(up, down)
    for _ in range(below):
        row.add(up, "B")
        row.overlap(up, down)
    for number in range(2 * above):
        row.add(down if number % 2 else up, "B" if number < above else "I")
    for _ in range(below):
        row.add_weight()
        row.add(down, "I")
    for _ in range(above):
        row.add_weight()
    return tuple(row.cells)


class _RowOfCounters:
    """A row in which every stage goes through the microbatches in order, in each direction."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.counts: dict[tuple[int, bool], int] = {}
        self.weights: list[Action] = []

    def add(self, stage: int, kind: Kind) -> None:
        """Append an action for the stage's next microbatch."""
        action = self._next(stage, kind)
        self.cells.append(action)
        if kind == "I":
            self.weights.append(action._replace(kind="W"))

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        """Append a forward and a whole backward that are executed together."""
        self.cells.append(Overlap(self._next(forward_stage, "F"), self._next(backward_stage, "B")))

    def add_weight(self) -> None:
        """Append the oldest backward for weights."""
        self.cells.append(self.weights.pop(0))

    def _next(self, stage: int, kind: Kind) -> Action:
        key = (stage, kind == "F")
        microbatch = self.counts.get(key, 0)
        self.counts[key] = microbatch + 1
        return Action(stage, kind, microbatch)
