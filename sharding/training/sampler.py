"""`DistributedSampler`: each sample once per epoch on any number of ranks, resumable within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import MeshError


class DistributedSampler(Sampler[int]):
    """DistributedSampler(dataset, mesh=mesh, axes="dp"): resumable, without repeated samples.

    A `torch.utils.data.DistributedSampler` otherwise.

        order of an epoch       3 0 6 2 5 1 4    the same on every rank and for any number of ranks
        rank 0 of 2             3   6   5   4    one sample more than rank 1, not a repeated one
        rank 1 of 2               0   2   1
        resumed after 2 samples, on 3 ranks
        rank 0                      6     1
        rank 1                        2     4
        rank 2                          5

    Args:
        dataset: an object with a length.
        num_replicas, rank: as for torch; by default those of the mesh.
        shuffle, seed, drop_last: as for torch. With `drop_last`, all ranks have the same number;
            without it, some ranks have one sample more. `sm.training.batches` makes sharded batches
            in both cases, and `sm.parallel.uneven_inputs` ends loops together.
        mesh: the mesh, by default that of `with mesh:` or `set_mesh`.
        axes: the axes along which ranks have different samples, major to minor, as in "dp" or
            ("dp", "fsdp"); optional if the mesh has one axis. Ranks that differ only along others
            have the same samples.

    Attributes:
        epoch: of the next iteration.
        consumed: the number of samples of the epoch used by all ranks together. `batches` updates
            it; in a loop of your own call `advance`.

    Raises:
        ValueError: on every rank, a rank that is not among `num_replicas`; both replicas and a
            mesh.
        MeshError: on every rank, unknown axes, or none if the mesh has several; on a rank outside
            the mesh.

    Communication: none.

    Example:
        >>> sampler = sm.training.DistributedSampler(dataset, mesh=mesh, axes="dp")
        >>> loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        >>> for epoch in range(sampler.epoch, 10):
        ...     sampler.set_epoch(epoch)
        ...     for batch in sm.training.batches(loader, mesh, P("dp")):
        ...         train_step(batch)
        ...         save({"model": model.state_dict(), "data": sampler.state_dict()})
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        mesh: DeviceMesh | None = None,
        axes: str | Sequence[str] | None = None,
    ) -> None:
        if (num_replicas is None) != (rank is None) or (
            num_replicas is not None and (mesh is not None or axes is not None)
        ):
            raise ValueError(
                f"DistributedSampler(num_replicas={num_replicas}, rank={rank}, mesh={mesh}, "
                f"axes={axes!r}): give num_replicas and rank, or a mesh and axes"
            )
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.axes: tuple[str, ...] | None = None
        if num_replicas is None or rank is None:
            mesh = given_or_current(mesh)
            self.axes = data_axes("DistributedSampler", mesh, axes)
            num_replicas, rank = mesh.size(self.axes), mesh.index_along(self.axes)
        if not 0 <= rank < num_replicas:
            raise ValueError(
                f"DistributedSampler(num_replicas={num_replicas}, rank={rank}): ranks are 0 to "
                f"{num_replicas - 1}"
            )
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = self.consumed = self._start = 0

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's samples of the epoch, after `load_state_dict` of the rest of it."""
        yield from self.remaining()[self.rank :: self.num_replicas]
        self.rewind()

    def __len__(self) -> int:
        """Return the number of samples of this rank in the next iteration."""
        return self.lengths()[self.rank]

    def remaining(self) -> list[int]:
        """Return the samples of all ranks in the next iteration, in order."""
        return self._order()[self._start : self._stop].tolist()

    def rewind(self) -> None:
        """Let a further iteration of the epoch give all of its samples."""
        self._start = 0

    def lengths(self) -> list[int]:
        """Return the number of samples of each rank in the next iteration."""
        count, ranks = self._stop - self._start, self.num_replicas
        return [len(range(rank, count, ranks)) for rank in range(ranks)]

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, with its own order; do nothing if it is the current one."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._start = epoch, 0, 0

    def begin(self) -> None:
        """Begin an iteration: `consumed` is that of the loaded state, or 0."""
        self.consumed = self._start

    def advance(self, samples: int) -> None:
        """Count samples as used, by all ranks together."""
        self.consumed += samples

    def finish(self) -> None:
        """End the epoch and begin the next one."""
        self.epoch, self.consumed, self._start = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return {"epoch", "consumed", "seed", "shuffle", "length"}.

        The same on every rank, valid for any number of ranks.
        """
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": len(self.dataset),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: the next iteration gives the samples that were not used.

        Raises: ValueError on every rank if the state is of a dataset of another length.
        """
        if state["length"] != len(self.dataset):
            raise ValueError(
                f"DistributedSampler.load_state_dict: the dataset has {len(self.dataset)} samples, "
                f"but the state is of one with {state['length']}, which has another order; use the "
                f"same dataset, or begin a new epoch with set_epoch({state['epoch'] + 1})"
            )
        self.epoch, self.seed, self.shuffle = state["epoch"], state["seed"], state["shuffle"]
        self.consumed = self._start = state["consumed"]

    @property
    def _stop(self) -> int:
        """The end of the samples that ranks get."""
        rest = len(self.dataset) - self._start
        return len(self.dataset) - (rest % self.num_replicas if self.drop_last else 0)

    def _order(self) -> torch.Tensor:
        """Return the samples of the epoch, in torch's order."""
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        return torch.randperm(
            len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch)
        )


def data_axes(name: str, mesh: DeviceMesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the axes along which data differ; the mesh's only axis if none are given.

    Raises: MeshError for unknown axes, or none if the mesh has several.
    """
    if axes is None and mesh.ndim > 1:
        raise MeshError(
            f"{name} on {mesh!r}: pass the axes along which ranks have different data, as in "
            f"axes={mesh.axis_names[0]!r}; along the others they have the same"
        )
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    mesh.size(names)  # raises for unknown axes
    return names
