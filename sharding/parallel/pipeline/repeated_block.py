"""Zero-bubble schedules from a block that repeats: one microbatch's actions, then the next one's.

Let every forward, backward for inputs and backward for weights take one slot. A block says in which
slots, on every rank, the actions of microbatch 0 are; those of microbatch i are `period` slots
later each. If no two actions of a rank are in the same slot modulo the period, the blocks of all
microbatches interlock: between both ends of the step ranks are always busy, and the activations
that a rank holds are the lifespans of its forwards over the period. So the slots of a block decide
about memory and bubble (Qi et al. 2024, arXiv 2405.15362).

`schedule_blocks` turns a block into rows by list scheduling, slot by slot. On each rank

1. forwards and backwards for inputs run in the order of the block, as soon as their operands exist;
   a forward also waits until the rank holds fewer activations than its limit;
2. otherwise the rank runs a backward for weights, the oldest one;
3. otherwise it runs a forward of its first stage ahead of the order, if the block has it before the
   first backward of that stage: so many are in flight later on anyway. This fills the first wait.

Rules 1 and 2 close the gaps at both ends of the step, where a block has fewer neighbours, and rule
3 reorders the beginning (the paper's "squeezing" and "reordering").

All rows reach their ends if the limit is at least `Block.in_flight`. In the block's order, a stage
never has more microbatches between forward and backward than at the first backward, and rule 3 adds
none to them. So when a rank gets to a forward, fewer than `in_flight` are in between; the others
that it holds wait for backwards for weights, which rule 2 runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

from .actions import Action, Kind, Rows

FORWARD_OR_INPUT: tuple[Kind, ...] = ("F", "I")


@dataclass(frozen=True)
class Block:
    """Where the actions of one microbatch are.

    Attributes:
        placement: the rank of each stage.
        period: the number of slots from a microbatch to the next one: three for each stage of a
            rank.
        forward: the slot of the forward of each stage.
        backward_input: the slot of the backward for inputs of each stage.
    """

    placement: tuple[int, ...]
    period: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]

    def slot(self, action: Action) -> int:
        """Return the slot of a forward or a backward for inputs."""
        slots = self.forward if action.kind == "F" else self.backward_input
        return slots[action.stage] + self.period * action.microbatch

    def in_flight(self, rank: int) -> int:
        """Return how many microbatches are between forward and backward for inputs, at most.

        The number is summed over the stages of the rank.
        """
        stages = [stage for stage, owner in enumerate(self.placement) if owner == rank]
        lifespans = [self.backward_input[stage] - self.forward[stage] for stage in stages]
        return sum(math.ceil(lifespan / self.period) for lifespan in lifespans)


def v_placement(ranks: int) -> tuple[int, ...]:
    """v_placement(3) -> (0, 1, 2, 2, 1, 0): the ranks of stages that go down and come back."""
    return (*range(ranks), *reversed(range(ranks)))


def v_block(ranks: int, hops: tuple[int, int], turn: int = 1, gradient_turn: int = 1) -> Block:
    """Return the block of a V-shaped schedule.

    A microbatch goes down the ranks, up, and its gradient down and up again.

    Args:
        hops: the slots from a rank to the next one on the way down, and on the way up.
        turn: the slots from the last forward to the first backward, on rank 0.
        gradient_turn: the slots from the backward of stage `ranks` to that of stage `ranks - 1`,
            both on the last rank.
    """
    down, up = hops
    first_up = down * (ranks - 1) + 1
    backward = first_up + up * (ranks - 1) + turn
    last = backward + down * (ranks - 1) + gradient_turn
    return Block(
        placement=v_placement(ranks),
        period=6,
        forward=(
            *[down * rank for rank in range(ranks)],
            *[first_up + up * hop for hop in range(ranks)],
        ),
        backward_input=(
            *[last + up * (ranks - 1 - rank) for rank in range(ranks)],
            *[backward + down * (ranks - 1 - hop) for hop in range(ranks)],
        ),
    )


def schedule_blocks(block: Block, microbatches: int, limit: int) -> Rows:
    """Return the rows of a schedule; see above.

    Args:
        limit: the largest number of activations that a rank holds.

    Raises:
        ValueError: a rank of the block needs more than `limit`.
    """
    needed = max(block.in_flight(rank) for rank in block.placement)
    if limit < needed:
        raise ValueError(f"the block needs {needed} activations on a rank, more than {limit}")
    ranks = [
        _RankScheduler(block, rank, microbatches, limit) for rank in range(1 + max(block.placement))
    ]
    results: set[Action] = set()
    total = 3 * len(block.placement) * microbatches
    while sum(len(rank.row) for rank in ranks) < total:
        actions = [rank.next_action(results) for rank in ranks]
        results.update(action for action in actions if action is not None)
    return tuple(tuple(rank.row) for rank in ranks)


class _RankScheduler:
    """The row of one rank, and what decides about the next slot."""

    def __init__(self, block: Block, rank: int, microbatches: int, limit: int) -> None:
        stages = [stage for stage, owner in enumerate(block.placement) if owner == rank]
        first_backward = block.backward_input[stages[0]]
        actions = [
            Action(stage, kind, microbatch)
            for stage, kind, microbatch in product(stages, FORWARD_OR_INPUT, range(microbatches))
        ]
        self.order = deque(sorted(actions, key=block.slot))
        self.ahead = deque(
            action
            for action in self.order
            if action[:2] == (stages[0], "F") and block.slot(action) < first_backward
        )
        self.weights: deque[Action] = deque()
        self.last_stage = len(block.placement) - 1
        self.limit = limit
        self.live = 0
        self.row: list[Action] = []

    def next_action(self, results: Collection[Action]) -> Action | None:
        """Append an action to the row and return it; None if the rank is idle in this slot."""
        while self.order and self.order[0] in results:
            self.order.popleft()  # a forward that was run ahead
        while self.ahead and self.ahead[0] in results:
            self.ahead.popleft()
        if self.order and self._can_run(self.order[0], results):
            action = self.order.popleft()
        elif self.weights:
            action = self.weights.popleft()
        elif self.ahead and self._can_run(self.ahead[0], results):
            action = self.ahead.popleft()
        else:
            return None
        self.live += {"F": 1, "I": 0, "W": -1}[action.kind]
        if action.kind == "I":
            self.weights.append(action._replace(kind="W"))
        self.row.append(action)
        return action

    def _can_run(self, action: Action, results: Collection[Action]) -> bool:
        if action.kind == "F" and self.live >= self.limit:
            return False
        return all(operand in results for operand in action.operands(self.last_stage))
