"""`batches`: the batches of a loader as sharded tensors; each rank loads its part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from ...mesh.device_mesh import DeviceMesh
from ..layout.spec import P
from ..parallel.uneven_inputs import uneven_inputs
from ..tensor.mesh_arguments import mesh_and_spec
from ..tensor.part_shapes import lengths_along
from ..tensor.process_data import make_array_from_process_local_data
from .buckets import Buckets, Pad
from .global_batches import GlobalBatchSampler
from .sampler import DistributedSampler
from .stream import DistributedStream


def batches(
    loader: Iterable[Any],
    mesh: DeviceMesh | P | None = None,
    spec: P | None = None,
    *,
    buckets: Sequence[int] | None = None,
    pad: Pad | None = None,
) -> Batches:
    """batches(loader, mesh, P("dp")) -> its batches as sharded tensors of each rank's rows.

        rank 0 loads rows [a b]                         x  [a b c d]  P("dp")
        rank 1 loads rows [c d]                   ->    x  [e f g]    P("dp"), in parts of 2 and 1
        last step: rank 0 loads [e f], rank 1 [g]

    The last batch may be short, and a rank may have no rows of it: no sample is repeated, and all
    ranks take the same number of steps.

    Args:
        loader: a DataLoader with a `DistributedSampler` or a `GlobalBatchSampler` along the axes of
            the batch dim, or of a `DistributedStream`; or any iterable of this rank's batches,
            which must be the same on ranks that differ only along other axes.
        mesh: the mesh; optional if one is set: `batches(loader, P("dp"))`.
        spec: the spec of a batch: dim 0, the batch dim, is split over the axes along which ranks
            load different rows. If other dims are split, as in P("dp", "cp"), each rank loads them
            whole and keeps its part. Tensors with fewer dims use the first entries.
        buckets, pad: lengths of sequences to which batches are padded, on all ranks to the same
            one, and the entries of a batch that are padded along dim 1, and with what. See
            `pad_to_buckets`.

    Returns:
        An iterable with a length, to iterate over once per epoch. In a batch (any pytree), tensors
        and arrays with dims become `ShardedTensor`s on the mesh's device; other leaves do not
        change.

    Raises:
        ValueError, TypeError: on every rank, a spec that is not a `P`, is pending or has sizes; a
            sampler for another number of ranks or other axes; a batch longer than the largest
            bucket. On one rank: a tensor whose number of rows is not the number of samples in the
            batch.

    Communication: with one of the two samplers, none. With other loaders that of `uneven_inputs`,
        and one small all_gather per batch over the axes of the batch dim. With buckets one more.

    Example:
        >>> sampler = sm.training.DistributedSampler(dataset, mesh=mesh, axes="dp")
        >>> loader = DataLoader(dataset, batch_size=8, sampler=sampler)
        >>> for x, y in sm.training.batches(loader, mesh, P("dp")):
        ...     loss = F.cross_entropy(model(x), y)
    """
    if pad is not None and buckets is None:
        raise TypeError(
            "batches(pad=...): pad says what is padded to buckets; pass buckets as well"
        )
    lengths = None if buckets is None else Buckets.of(buckets, pad)
    return Batches(loader, *mesh_and_spec(mesh, spec), lengths)


class Batches:
    """The result of `batches`.

    Attributes:
        loader, mesh, spec: as given.
        buckets: lengths to which batches are padded, None for those that they have.
    """

    def __init__(
        self, loader: Iterable[Any], mesh: DeviceMesh, spec: Any, buckets: Buckets | None = None
    ) -> None:
        if not isinstance(spec, P):
            raise TypeError(
                f"batches(spec={spec!r}): spec must be a P whose first entry has the axes of the "
                f'batch, such as P("dp")'
            )
        if spec.unreduced or spec.sizes:
            raise ValueError(
                f"batches(spec={spec}): loaded data is not pending and has the loader's sizes; "
                "write a P of axes only"
            )
        self.loader, self.mesh, self.spec, self.buckets = loader, mesh, spec, buckets
        self._axes = spec.dims[0] if spec.dims else ()
        mesh.size(self._axes) if self._axes else None
        self._sampler = _sampler_of(loader)
        self._stream = _stream_of(loader)
        if self._sampler is not None:
            _check_sampler("sampler", "DistributedSampler(dataset", self._sampler, mesh, self._axes)
        if self._stream is not None:
            made_by = "DistributedStream(dataset, batch_size"
            _check_sampler("stream", made_by, self._stream, mesh, self._axes)
            _check_stream(self._stream, loader)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration.

        Without a `DistributedSampler`, the number that this rank has.
        """
        return len(self.loader) if self._sampler is None else len(self._rows())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return (
            self._with_exchanged_sizes()
            if self._sampler is None
            else self._with_known_sizes(self._sampler)
        )

    def _with_known_sizes(self, sampler: DistributedSampler) -> Iterator[Any]:
        """Yield batches if every rank knows the rows of all."""
        rows = self._rows()
        batch = None
        sampler.begin() if rows else sampler.finish()
        coming = iter(self.loader)
        for step, sizes in enumerate(rows):
            own_rows = sizes[sampler.rank]
            if own_rows:
                batch = next(coming)
            else:  # no rows of the batch before, or of one of the first sample
                loader: Any = self.loader
                like = loader.collate_fn([loader.dataset[0]]) if batch is None else batch
                batch = pytree.tree_map(lambda x: x[:0] if _is_array(x) else x, like)
            sharded = self._to_sharded(batch, sizes, own_rows)
            # before the loop's body, which may save it
            sampler.finish() if step == len(rows) - 1 else sampler.advance(sum(sizes))
            yield sharded

    def _rows(self) -> list[tuple[int, ...]]:
        """Return by step the number of rows of each rank along the axes of the batch dim."""
        loader: Any = self.loader
        if isinstance(loader.batch_sampler, GlobalBatchSampler):
            return loader.batch_sampler.rows()
        size = loader.batch_size
        lengths = loader.sampler.lengths()
        if loader.drop_last:
            lengths = [length // size * size for length in lengths]
        starts = range(0, max(lengths, default=0), size)
        return [tuple(min(max(length - start, 0), size) for length in lengths) for start in starts]

    def _with_exchanged_sizes(self) -> Iterator[Any]:
        """Yield batches if ranks have to exchange their numbers of rows."""
        if self._stream is not None:
            self._stream.begin()
        if not self._axes:
            for batch in self.loader:
                rows = _row_count(batch)
                yield self._count_samples(self._to_sharded(batch, (), rows), rows)
        else:
            for batch in uneven_inputs(self.loader, self.mesh, self._axes, mode="empty"):
                rows = _row_count(batch)
                lengths = lengths_along(self.mesh, self._axes, rows)
                yield self._count_samples(self._to_sharded(batch, lengths, rows), sum(lengths))
        if self._stream is not None:
            self._stream.finish()

    def _count_samples(self, batch: Any, samples: int) -> Any:
        """Return the batch; its samples count before the body of the loop, which may save."""
        if self._stream is not None:
            self._stream.advance(samples)
        return batch

    def _to_sharded(self, batch: Any, sizes: Sequence[int], own_rows: int) -> Any:
        """Return the batch with arrays as sharded tensors.

        `sizes` are by position along the axes of the batch dim.
        """
        total = sum(sizes) if sizes else own_rows
        if self.buckets is not None:
            group = self.mesh.group(self._axes) if self._axes else None
            batch = self.buckets.pad_batch(batch, group)

        def place(path: Any, x: Any) -> Any:
            if not _is_array(x):
                return x
            if len(x) != own_rows:
                raise ValueError(
                    f"batches: batch{pytree.keystr(path)} of shape {list(x.shape)} has {len(x)} "
                    f"rows, but this rank's batch has {own_rows} samples; make the loader's "
                    "collate_fn return one row per sample along dim 0"
                )
            dims = self.spec.dims[: x.ndim]
            where = P(*dims, sizes={self._axes: tuple(sizes)}) if sizes else P(*dims)
            return make_array_from_process_local_data(self.mesh, where, x, (total, *x.shape[1:]))

        return pytree.tree_map_with_path(place, batch)


# --------------------------------------------------------------------------------------------------


def _sampler_of(loader: Any) -> DistributedSampler | None:
    """Return the `DistributedSampler` of a loader, also that of its `GlobalBatchSampler`."""
    if not isinstance(loader, DataLoader):
        return None
    if isinstance(loader.batch_sampler, GlobalBatchSampler):
        return loader.batch_sampler.sampler
    is_distributed = loader.batch_size is not None and isinstance(
        loader.sampler, DistributedSampler
    )
    return loader.sampler if is_distributed else None  # type: ignore[return-value]


def _stream_of(loader: Any) -> DistributedStream | None:
    """Return the dataset of a loader, if it is a `DistributedStream`."""
    is_stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, DistributedStream)
    return loader.dataset if is_stream else None  # type: ignore[return-value]


def _check_stream(stream: DistributedStream, loader: Any) -> None:
    """Raise a ValueError if the loader has batches of another size than the stream."""
    if loader.batch_size != stream.batch_size:
        raise ValueError(
            f"batches: the loader has batch_size={loader.batch_size}, but its DistributedStream "
            f"has batch_size={stream.batch_size}, by which it divides samples among workers; give "
            "both the same"
        )


def _check_sampler(
    kind: str,
    made_by: str,
    sampler: DistributedSampler | DistributedStream,
    mesh: DeviceMesh,
    axes: tuple[str, ...],
) -> None:
    """Raise a ValueError if the sampler is not for the ranks along the axes."""
    ranks = mesh.size(axes) if axes else 1
    place = mesh.index_along(axes)
    alike = sampler.axes is None or sampler.num_replicas == 1 or sampler.axes == axes
    if sampler.num_replicas != ranks or sampler.rank != place or not alike:
        dealt = f"{sampler.num_replicas} ranks" + (
            f" along {sampler.axes}" if sampler.axes else f", of which this is {sampler.rank}"
        )
        raise ValueError(
            f"batches: the {kind} is for {dealt}, but the batch dim is split over {ranks} along "
            f"{axes} of {mesh!r}; make it with {made_by}, mesh=mesh, axes={axes})"
        )


def _is_array(x: Any) -> bool:
    return isinstance(x, (Tensor, np.ndarray)) and x.ndim > 0


def _row_count(batch: Any) -> int:
    """Return the rows of the first array. Raises: TypeError if there is none."""
    for x in pytree.tree_leaves(batch):
        if _is_array(x):
            return len(x)
    raise TypeError(
        f"batches: a batch of type {type(batch).__name__} has no tensor with rows; return tuples, "
        "lists or dicts"
    )
