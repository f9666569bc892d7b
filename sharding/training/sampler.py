"""Which samples each rank loads: all of them once, on any number of ranks, also from the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.errors import MeshError


class DistributedSampler(Sampler[int]):
    """DistributedSampler(dataset, mesh=mesh, axes="dp"): `torch.utils.data.DistributedSampler` that repeats no sample, and can go on.

        order of an epoch       3 0 6 2 5 1 4          the same on every rank, and for every number of ranks
        rank 0 of 2             3   6   5   4          one sample more than rank 1: none is repeated to make them equal
        rank 1 of 2               0   2   1
        resumed after 2 samples, on 3 ranks
        rank 0                      6     1
        rank 1                        2     4
        rank 2                          5

    Args:
        dataset: anything with a length.
        num_replicas, rank: as for torch; by default those of the mesh.
        shuffle, seed, drop_last: as for torch. With `drop_last`, what does not go round the ranks is left out; without it, some ranks
            have one sample more. `sm.batches` makes one sharded batch of theirs in any case, and `sm.join` ends loops together.
        mesh: the mesh, by default that of `with mesh:` or `set_mesh`.
        axes: along which ranks have different samples, major to minor, as in "dp" or ("dp", "fsdp"); may be left out where the mesh has
            one axis. Ranks that differ only along others have the same samples.

    Attributes:
        epoch: of the next iteration.
        consumed: how many samples of the epoch have been used, by all ranks together. `sm.batches` keeps it; in a loop of your own call
            `advance`.

    Raises:
        ValueError: on every rank, a rank that is not among `num_replicas`; both replicas and a mesh.
        MeshError: on every rank, unknown axes, or none where the mesh has several; on a rank outside the mesh.

    Communication: none.

    Example:
        >>> sampler = sm.DistributedSampler(dataset, mesh=mesh, axes="dp")
        >>> loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        >>> for epoch in range(sampler.epoch, 10):
        ...     sampler.set_epoch(epoch)
        ...     for batch in sm.batches(loader, mesh, P("dp")):
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
        if (num_replicas is None) != (rank is None) or (num_replicas is not None and (mesh is not None or axes is not None)):
            raise ValueError(
                f"DistributedSampler(num_replicas={num_replicas}, rank={rank}, mesh={mesh}, axes={axes!r}): give num_replicas and rank, "
                "or a mesh and axes"
            )
        self.dataset, self.shuffle, self.seed, self.drop_last = dataset, shuffle, seed, drop_last
        self.axes: tuple[str, ...] | None = None
        if num_replicas is None or rank is None:
            mesh = given_or_current(mesh)
            self.axes = data_axes("DistributedSampler", mesh, axes)
            num_replicas, rank = mesh.size(self.axes), mesh.index_along(self.axes)
        if not 0 <= rank < num_replicas:
            raise ValueError(f"DistributedSampler(num_replicas={num_replicas}, rank={rank}): ranks are 0 to {num_replicas - 1}")
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch = self.consumed = self._start = 0

    def __iter__(self) -> Iterator[int]:
        """This rank's samples of the epoch, or of what is left of it after `load_state_dict`."""
        yield from self._order()[self._start : self._stop].tolist()[self.rank :: self.num_replicas]
        self._start = 0

    def __len__(self) -> int:
        """How many samples this rank has in the next iteration."""
        return self.lengths()[self.rank]

    def lengths(self) -> list[int]:
        """How many samples each rank has in the next iteration."""
        count, ranks = self._stop - self._start, self.num_replicas
        return [len(range(rank, count, ranks)) for rank in range(ranks)]

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, with an order of its own; nothing happens where it is the one that is under way."""
        if epoch != self.epoch:
            self.epoch, self.consumed, self._start = epoch, 0, 0

    def begin(self) -> None:
        """An iteration begins: what has been used so far is what a loaded state says, or nothing."""
        self.consumed = self._start

    def advance(self, samples: int) -> None:
        """So many more samples have been used, by all ranks together."""
        self.consumed += samples

    def finish(self) -> None:
        """The epoch is over: the next one begins."""
        self.epoch, self.consumed, self._start = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """{"epoch", "consumed", "seed", "shuffle", "length"}: the same on every rank, and good for any number of ranks."""
        kept = {"epoch": self.epoch, "consumed": self.consumed, "seed": self.seed, "shuffle": self.shuffle}
        return {**kept, "length": len(self.dataset)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved: the next iteration gives the samples that had not been used.

        Raises: ValueError on every rank, a state of a dataset of another length.
        """
        if state["length"] != len(self.dataset):
            raise ValueError(
                f"DistributedSampler.load_state_dict: the dataset has {len(self.dataset)} samples, and the state is of one with "
                f"{state['length']}, whose order is another; load the same dataset, or begin a new epoch with "
                f"set_epoch({state['epoch'] + 1})"
            )
        self.epoch, self.seed, self.shuffle = state["epoch"], state["seed"], state["shuffle"]
        self.consumed = self._start = state["consumed"]

    @property
    def _stop(self) -> int:
        """Where the samples end that are dealt out."""
        rest = len(self.dataset) - self._start
        return len(self.dataset) - (rest % self.num_replicas if self.drop_last else 0)

    def _order(self) -> torch.Tensor:
        """The samples of the epoch, in torch's order."""
        if not self.shuffle:
            return torch.arange(len(self.dataset))
        return torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch))


def data_axes(what: str, mesh: DeviceMesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """The axes along which data differ; the mesh's one axis where none are named.

    Raises: MeshError for unknown axes, or none where there are several.
    """
    if axes is None and mesh.ndim > 1:
        raise MeshError(
            f"{what} on {mesh!r}: say along which axes ranks have different data, as in axes={mesh.axis_names[0]!r}; along the others "
            "they have the same"
        )
    names = mesh.axis_names if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    mesh.size(names)  # which knows them
    return names
