"""`RecordedGroup`: what is known of a group where its collectives are checked and recorded."""

from __future__ import annotations

from ..comm_context import CommContext, NoContext


class RecordedGroup:
    """The ranks of a group, and the place of this one among them.

    Attributes:
        ranks: global ranks, ascending.
        rank: index of this rank in `ranks`.
        size: number of ranks.
        comm_context: what the collectives that a thread calls on the group are part of.
    """

    __slots__ = ("comm_context", "rank", "ranks", "size")

    def __init__(
        self, ranks: tuple[int, ...], global_rank: int, comm_context: CommContext | NoContext
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.index(global_rank)
        self.size = len(ranks)
        self.comm_context = comm_context

    @property
    def global_rank(self) -> int:
        """This rank in the world."""
        return self.ranks[self.rank]

    def identity(self) -> str:
        """Return a text that tells the group from others, the same on all of its ranks."""
        return str(self.ranks)

    def description(self) -> str:
        """Return what the group is called in messages."""
        return f"ranks {','.join(map(str, self.ranks))}"
