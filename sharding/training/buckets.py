"""Batches of a few lengths: sequences are padded to buckets, on all ranks to the same one.

    buckets 8, 16      rank 0 has sequences of 5      rank 1 of 9      both pad to 16

A graph of `sm.jit`, a compiled kernel and the caches of decisions are for one length each. With
three buckets an epoch has three of each, whatever lengths its batches have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.group import Group
from ...mesh.context import given_or_current
from ...mesh.device_mesh import Axes, DeviceMesh

Number = int | float | bool
# The entries of a batch that are padded, by key or by place, and with what.
Pad = Mapping[str, Number] | Mapping[int, Number]


@dataclass(frozen=True)
class Buckets:
    """Lengths to which batches are padded.

    Attributes:
        lengths: of the sequences, ascending.
        pad: the entries of a batch that are padded along dim 1, and with what.
    """

    lengths: tuple[int, ...]
    pad: Pad

    @classmethod
    def of(cls, lengths: Sequence[int], pad: Pad | None) -> Buckets:
        """Return the buckets. Raises: ValueError, TypeError for what are none."""
        ascending = tuple(lengths)
        are_lengths = all(type(n) is int and n > 0 for n in ascending)
        if not ascending or not are_lengths or list(ascending) != sorted(set(ascending)):
            raise ValueError(
                f"buckets={lengths!r}: write lengths in ascending order, such as (64, 128, 256)"
            )
        if not isinstance(pad, Mapping) or not pad:
            raise TypeError(
                f"pad={pad!r}: name the entries of a batch that are padded to buckets, and with "
                'what, as in pad={"input_ids": 0, "attention_mask": 0, "labels": -100}, or by '
                "place for batches that are tuples: pad={0: 0, 1: -100}"
            )
        return cls(ascending, pad)

    def length_of(self, batch: Any) -> int:
        """Return the length of the sequences of a batch, 0 if it has no rows.

        Raises: ValueError if an entry of `pad` is missing, is no array with two dims, or has
            another length than the others.
        """
        lengths = {name: self._array(batch, name).shape[1] for name in self.pad}
        if len(set(lengths.values())) > 1:
            words = ", ".join(f"{name!r} {length}" for name, length in lengths.items())
            raise ValueError(
                f"entries of a batch that are padded have the same length, not {words}"
            )
        first = next(iter(self.pad))
        return lengths[first] if len(self._array(batch, first)) else 0

    def _array(self, batch: Any, name: str | int) -> Any:
        try:
            x = batch[name]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"pad names {name!r}, and the batch, a {type(batch).__name__}, has no such entry"
            ) from None
        if not isinstance(x, (Tensor, np.ndarray)) or x.ndim < 2:
            is_array = isinstance(x, (Tensor, np.ndarray))
            shown = f"one of shape {list(x.shape)}" if is_array else f"a {type(x).__name__}"
            raise ValueError(
                f"{name!r} of a batch is padded along dim 1: it must be an array with two dims or "
                f"more, not {shown}"
            )
        return x

    def bucket_of(self, longest: int) -> int:
        """Return the smallest bucket that is long enough. Raises: ValueError if none is."""
        place = bisect_left(self.lengths, longest)
        if place == len(self.lengths):
            raise ValueError(
                f"a batch has sequences of {longest}, and the largest of buckets={self.lengths} is "
                f"{self.lengths[-1]}: add a larger one, or cut sequences"
            )
        return self.lengths[place]

    def pad_batch(self, batch: Any, group: Group | None) -> Any:
        """Return the batch with its sequences padded to the bucket of the longest ones.

        Args:
            batch: a mapping or a tuple.
            group: the ranks that pad to the same length; None for this rank alone.

        Communication: one small all_gather over the group.
        """
        longest = self.length_of(batch)
        if group is not None:
            longest = max(gather_facts(group, longest).values())
        length = self.bucket_of(longest)
        if isinstance(batch, Mapping):
            return {key: self._pad(key, x, length) for key, x in batch.items()}
        values = [self._pad(i, x, length) for i, x in enumerate(batch)]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)

    def _pad(self, name: Any, x: Any, length: int) -> Any:
        if name not in self.pad:
            return x
        rest = length - x.shape[1]
        if rest < 0:  # of a batch without rows
            return x[:, :length]
        if isinstance(x, Tensor):
            return F.pad(x, [0, 0] * (x.ndim - 2) + [0, rest], value=self.pad[name])
        widths = [(0, 0), (0, rest), *[(0, 0)] * (x.ndim - 2)]
        return np.pad(x, widths, constant_values=self.pad[name])


def pad_to_buckets(
    loader: Iterable[Any],
    buckets: Sequence[int],
    pad: Pad,
    mesh: DeviceMesh | None = None,
    axes: Axes | None = None,
) -> Iterator[Any]:
    """pad_to_buckets(loader, (64, 128), {"input_ids": 0}) -> its batches, of these lengths.

    A batch is padded to the smallest bucket that holds the sequences of all ranks. So a step under
    `sm.jit` has at most one graph for each bucket, and all ranks record in the same calls. For
    batches as `ShardedTensor`s, `batches` has the same arguments.

    Args:
        loader: batches: mappings, which become dicts, or tuples, of tensors or arrays; on all ranks
            as many.
        buckets: lengths, ascending.
        pad: the entries of a batch that are padded along dim 1, and with what: their keys, or
            places if batches are tuples. Other entries do not change. Labels are padded with what
            the loss ignores, masks with 0.
        mesh: the mesh whose ranks run the loop; by default that of `with mesh:` or `set_mesh`.
        axes: the axes along which ranks have different batches; all by default.

    Raises:
        ValueError, TypeError: for wrong arguments at once; in the loop on every rank, if a batch is
            longer than the largest bucket; on one rank, if an entry is missing or has another
            length.

    Communication: for each batch one small all_gather over the axes.

    Example:
        >>> pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        >>> for batch in sm.training.pad_to_buckets(loader, (64, 128, 256), pad, mesh):
        ...     loss = step(batch)
    """
    lengths = Buckets.of(buckets, pad)
    group = given_or_current(mesh).group(axes)
    return (lengths.pad_batch(batch, group) for batch in loader)
