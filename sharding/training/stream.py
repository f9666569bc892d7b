"""`DistributedStream`: each sample of an iterable dataset once, on any number of ranks and workers.

the stream           a b c d e f g h ...       the same in every process
rank 0 of 2          a   c   e   g             batches of 2: [a c] by worker 0, [e g] by worker 1
rank 1 of 2            b   d   f   h
resumed after 4 samples, on 1 rank             [e f] by worker 0, [g h] by worker 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from .sampler import data_axes


class DistributedStream(IterableDataset[Any]):
    """DistributedStream(dataset, 8, mesh=mesh, axes="dp"): this rank's samples of a stream.

    Resumable on any number of ranks, with any number of worker processes.

    Sample i after the position goes to rank i modulo the number of ranks; of a rank's batches,
    worker w loads every W-th, so that they come in the order of the stream. Every process reads the
    whole stream up to its position and leaves out what is not its own, so reading a sample should
    be cheap next to using it: decode in `collate_fn`, not in the dataset.

    Args:
        dataset: an iterable with the same samples in the same order in every process, which does
            not split them by worker itself. If it has `set_epoch`, it is called with the epoch.
        batch_size: that of the DataLoader: rows per rank and batch.
        mesh: the mesh, by default that of `with mesh:` or `set_mesh`.
        axes: the axes along which ranks have different samples, as in "dp"; optional if the mesh
            has one axis.

    Attributes:
        epoch: of the next iteration.
        consumed: the number of samples of the epoch used by all ranks together. `batches` updates
            it; in a loop of your own call `advance`.

    Raises:
        ValueError: on every rank, a batch size below 1.
        MeshError: as `DistributedSampler`.

    Communication: none. `batches` exchanges the sizes of batches, since the end of a stream is not
        known.

    Example:
        >>> stream = sm.training.DistributedStream(dataset, 8, mesh=mesh, axes="dp")
        >>> loader = DataLoader(stream, batch_size=8, num_workers=2)
        >>> for x, y in sm.training.batches(loader, mesh, P("dp")):
        ...     train_step(x, y)
        ...     save({"model": model.state_dict(), "data": stream.state_dict()})
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        mesh: DeviceMesh | None = None,
        axes: str | Sequence[str] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"DistributedStream(batch_size={batch_size}): must be at least 1")
        mesh = given_or_current(mesh)
        self.dataset = dataset
        self.batch_size = batch_size
        self.axes = data_axes("DistributedStream", mesh, axes)
        self.num_replicas = mesh.size(self.axes)
        self.rank = mesh.index_along(self.axes)
        self.epoch = self.consumed = 0
        # epoch and first sample of the next iteration, which workers that live on read as well
        self._next = torch.zeros(2, dtype=torch.int64, device="cpu").share_memory_()

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples from the position on; in a worker those of its batches."""
        worker = get_worker_info()
        workers, own = (1, 0) if worker is None else (worker.num_workers, worker.id)
        epoch, start = self._next.tolist()
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for number, sample in enumerate(self.dataset):
            row, rank = divmod(number - start, self.num_replicas)
            if row < 0 or rank != self.rank:
                continue
            if row // self.batch_size % workers == own:
                yield sample

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; do nothing if it is the current one."""
        if epoch != self.epoch:
            self._move_to(epoch, 0)

    def begin(self) -> None:
        """Begin an iteration: `consumed` is that of the loaded state, or 0."""
        self.consumed = int(self._next[1])

    def advance(self, samples: int) -> None:
        """Count samples as used, by all ranks together."""
        self.consumed += samples

    def finish(self) -> None:
        """End the epoch and begin the next one."""
        self._move_to(self.epoch + 1, 0)

    def state_dict(self) -> dict[str, Any]:
        """Return {"epoch", "consumed"}: the same on every rank, valid for any number of ranks."""
        return {"epoch": self.epoch, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: the next iteration gives the samples that were not used."""
        self._move_to(state["epoch"], state["consumed"])

    def _move_to(self, epoch: int, consumed: int) -> None:
        self.epoch, self.consumed = epoch, consumed
        self._next.copy_(torch.tensor([epoch, consumed], device="cpu"))
