"""`GlobalBatchSampler`: batches of the same samples on any number of ranks, by accumulation.

order of an epoch        3 0 6 2 | 5 1 4 7        two steps of 4 samples
2 ranks, 2 rows at most  rank 0   [3 6]           one microbatch per step
                         rank 1   [0 2]
3 ranks, 1 row at most   rank 0   [3] [2]         two microbatches per step;
                         rank 1   [0] [ ]         of the second only rank 0 has a row
                         rank 2   [6] [ ]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.utils.data import Sampler

from .sampler import DistributedSampler

T = TypeVar("T")


class GlobalBatchSampler(Sampler[list[int]]):
    """GlobalBatchSampler(sampler, 64): 64 samples per step on any number of ranks.

    It is the `batch_sampler` of a DataLoader.

    The samples of a step are consecutive ones of the epoch's order, so they do not depend on the
    ranks, and neither does the position after a step. Each rank has an even share of them, in as
    many microbatches as are needed for at most `micro_batch` rows at a time; all ranks have the
    same number of microbatches. If the number of ranks changes between two steps, the next step
    has the samples that it would have had.

    Args:
        sampler: of the dataset and the ranks, without `drop_last`.
        batch_size: samples per step of all ranks together.
        micro_batch: rows that a rank has at a time; by default all of its share.
        drop_last: whether to leave out a last step with fewer samples.

    Raises:
        ValueError: on every rank, sizes below 1; a sampler with `drop_last`.

    Communication: none.

    Example:
        >>> sampler = sm.training.DistributedSampler(dataset, mesh=mesh, axes="dp")
        >>> steps = sm.training.GlobalBatchSampler(sampler, 64, micro_batch=4)
        >>> loader = DataLoader(dataset, batch_sampler=steps)
        >>> for micro_batches in steps.grouped(sm.training.batches(loader, mesh, P("dp"))):
        ...     rows = sum(len(x) for x, _ in micro_batches)
        ...     with sm.accumulate_grads():
        ...         for x, y in micro_batches:
        ...             (F.cross_entropy(model(x), y) * (len(x) / rows)).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        sampler: DistributedSampler,
        batch_size: int,
        *,
        micro_batch: int | None = None,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or (micro_batch is not None and micro_batch < 1):
            raise ValueError(
                f"GlobalBatchSampler(batch_size={batch_size}, micro_batch={micro_batch}): both "
                "must be at least 1"
            )
        if sampler.drop_last:
            raise ValueError(
                "GlobalBatchSampler of a sampler with drop_last=True, which would drop samples by "
                "the number of ranks; pass drop_last to GlobalBatchSampler instead"
            )
        self.sampler = sampler
        self.batch_size = batch_size
        self.micro_batch = micro_batch
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's microbatches that have rows."""
        order = iter(self.sampler.remaining())
        for step in self.steps():
            samples = [next(order) for _ in range(sum(map(sum, step)))]
            own = iter(samples[self.sampler.rank :: self.sampler.num_replicas])
            for rows in step:
                micro_batch = [next(own) for _ in range(rows[self.sampler.rank])]
                if micro_batch:
                    yield micro_batch
        self.sampler.rewind()

    def __len__(self) -> int:
        """Return the number of this rank's microbatches that have rows, in the next iteration."""
        return sum(rows[self.sampler.rank] > 0 for rows in self.rows())

    def steps(self) -> list[list[tuple[int, ...]]]:
        """Return for each step of the next iteration the rows of each rank, by microbatch."""
        steps: list[list[tuple[int, ...]]] = []
        left = len(self.sampler.remaining())
        while left >= (self.batch_size if self.drop_last else 1):
            count = min(self.batch_size, left)
            steps.append(self._micro_batches(count))
            left -= count
        return steps

    def _micro_batches(self, count: int) -> list[tuple[int, ...]]:
        """Return the rows of each rank in the microbatches of a step with this many samples."""
        ranks = self.sampler.num_replicas
        shares = [len(range(rank, count, ranks)) for rank in range(ranks)]
        parts = 1 if self.micro_batch is None else -(-shares[0] // self.micro_batch)
        return [
            tuple(share // parts + (part < share % parts) for share in shares)
            for part in range(parts)
        ]

    def rows(self) -> list[tuple[int, ...]]:
        """Return the rows of each rank in all microbatches of the next iteration."""
        micro_batches: list[tuple[int, ...]] = []
        for step in self.steps():
            micro_batches += step
        return micro_batches

    def grouped(self, loader: Iterable[T]) -> Iterator[list[T]]:
        """grouped(loader) -> for each step the list of its microbatches.

        Args:
            loader: the microbatches: `batches` of a loader with this sampler. On a rank without
                rows of one, a loader alone lacks it.
        """
        steps = self.steps()
        coming = iter(loader)
        for step in steps:
            yield [next(coming) for _ in step]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler: the position in the epoch."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, on any number of ranks: see `DistributedSampler`."""
        self.sampler.load_state_dict(state)
