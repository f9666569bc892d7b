"""Packing: documents of many lengths in rows of one length, for causal language models.

    documents       [a a a a a]  [b b]  [c c c]  [d]             length 8

    row 0           a a a a a c c c         row 1     b b . . . . . .
    position_ids    0 1 2 3 4 0 1 2                   0 1 0 1 2 3 4 5
    labels          - a a a a - c c                   - b - - - - - -       - is -100

Positions begin at 0 in each document, which is how models of transformers tell documents of a row
apart: no token attends to another document. The first token of a document is predicted from
nothing, so it has no label, and no label crosses a document. A document of one token, such as d,
has nothing to learn and is left out.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label of a token that the loss of torch and transformers leaves out
Document = Sequence[int] | Mapping[str, Sequence[int]]
_METHODS = ("best_fit", "in_order")
_LONG = ("split", "truncate")


class _Piece(NamedTuple):
    """The tokens `start` to `stop` of all documents' tokens, one after the other."""

    start: int
    stop: int


def pack(
    documents: Iterable[Document],
    length: int,
    *,
    pad_id: int = 0,
    method: str = "best_fit",
    long: str = "split",
) -> PackedRows:
    """pack(documents, length) -> a dataset of rows of `length` tokens, each with whole documents.

    The rows depend on the documents and the arguments alone: they are the same on every rank and
    in every run. `DistributedSampler` shuffles them by a seed, deals them to ranks and remembers
    the position for a checkpoint, on any number of ranks.

    Args:
        documents: token ids of each; or mappings with "input_ids" and "labels", as `tokenize`
            returns, where a label of -100 is not learned. Without labels every token is.
        length: tokens in a row.
        pad_id: the token id that fills a row up. Padding is a document of its own without labels.
        method: "best_fit" puts the longest documents first, each into the row that it fills best
            (best-fit decreasing, as Ding et al. 2024, arXiv:2404.10830): few documents are cut
            and little is padded. "in_order" fills a row until the next document does not fit.
        long: what to do with documents that are longer than a row: "split" them into pieces of
            `length` tokens, each with positions from 0, or "truncate" them.

    Raises:
        ValueError: a length below 2; an unknown `method` or `long`; labels of another length than
            their tokens; token ids that are no integers from 0 on; no document with a label.

    Communication: none.

    Example:
        >>> rows = sm.training.pack([tokenizer(text)["input_ids"] for text in texts], 2048)
        >>> sampler = sm.training.DistributedSampler(rows, mesh=mesh, axes="fsdp", seed=0)
        >>> loader = DataLoader(rows, batch_size=4, sampler=sampler)
        >>> for batch in sm.training.batches(loader, mesh, P("fsdp")):
        ...     loss = model(**batch, use_cache=False).loss
    """
    if type(length) is not int or length < 2:
        raise ValueError(f"pack(length={length!r}): a row needs at least 2 tokens, such as 2048")
    if method not in _METHODS:
        raise ValueError(f"pack(method={method!r}): write one of {', '.join(_METHODS)}")
    if long not in _LONG:
        raise ValueError(f"pack(long={long!r}): write one of {', '.join(_LONG)}")
    tokens: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    pieces: list[_Piece] = []
    first = 0
    for number, document in enumerate(documents):
        ids, targets = _tokens_and_labels(number, document)
        if long == "truncate":
            ids, targets = ids[:length], targets[:length]
        for start in range(0, len(ids), length):
            targets[start] = IGNORED
            stop = min(start + length, len(ids))
            if (targets[start:stop] != IGNORED).any():
                pieces.append(_Piece(first + start, first + stop))
        tokens.append(ids)
        labels.append(targets)
        first += len(ids)
    if not pieces:
        raise ValueError(
            f"pack: none of {len(tokens)} documents has a token to learn; a document needs two "
            "tokens or more, and a label other than -100 after its first token"
        )
    place = _best_fit if method == "best_fit" else _in_order
    rows = place(pieces, length)
    return PackedRows(np.concatenate(tokens), np.concatenate(labels), rows, length, pad_id)


class PackedRows(Dataset[dict[str, Tensor]]):
    """The result of `pack`: a dataset whose entries are rows.

    An entry is {"input_ids", "position_ids", "labels"}, int64 tensors of shape [length]. A label is
    the token at the same place, or -100: models of transformers shift labels by one.

    Attributes:
        length: tokens in a row.
        pad_id: the token id of padding.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        labels: np.ndarray,
        rows: Sequence[Sequence[_Piece]],
        length: int,
        pad_id: int,
    ) -> None:
        self._tokens, self._labels, self._rows = tokens, labels, rows
        self.length, self.pad_id = length, pad_id

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index]
        input_ids = np.full(self.length, self.pad_id, np.int64)
        position_ids = np.empty(self.length, np.int64)
        labels = np.full(self.length, IGNORED, np.int64)
        at = 0
        for start, stop in row:
            end = at + stop - start
            input_ids[at:end] = self._tokens[start:stop]
            labels[at:end] = self._labels[start:stop]
            position_ids[at:end] = np.arange(stop - start)
            at = end
        position_ids[at:] = np.arange(self.length - at)
        columns = {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    @property
    def fill(self) -> float:
        """The fraction of tokens that are no padding, from 0 to 1."""
        used = sum(stop - start for row in self._rows for start, stop in row)
        return used / (len(self) * self.length)

    def __repr__(self) -> str:
        return f"PackedRows({len(self)} rows of {self.length} tokens, {self.fill:.1%} filled)"


def document_mask(position_ids: Tensor) -> Tensor:
    """document_mask(position_ids) -> bool [b, 1, s, s]: which key a query of a packed row sees.

    A token sees itself and earlier tokens of its own document, which begins where the position is
    0. Models of transformers make this mask themselves from `position_ids`, if they get neither an
    `attention_mask` nor a cache: pass `use_cache=False`. The mask is for
    `F.scaled_dot_product_attention` in models of your own.

    Args:
        position_ids: [b, s], of packed rows; a tensor or a `ShardedTensor`, split by rows.

    Raises: ValueError for another number of dims.

    Communication: none for rows that are whole.
    """
    if position_ids.ndim != 2:
        raise ValueError(
            f"document_mask: position_ids must have the shape [rows, length], not "
            f"{list(position_ids.shape)}"
        )
    document = (position_ids == 0).cumsum(1)
    index = torch.ones_like(position_ids).cumsum(1)
    is_same = document[:, :, None] == document[:, None, :]
    is_earlier = index[:, :, None] >= index[:, None, :]
    return (is_same & is_earlier)[:, None]


# --------------------------------------------------------------------------------------------------


def _tokens_and_labels(number: int, document: Document) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and labels of a document, as new arrays of int64. Raises: ValueError."""
    source: Any = document
    ids = source["input_ids"] if isinstance(document, Mapping) else source
    labels = source.get("labels", ids) if isinstance(document, Mapping) else ids
    arrays = np.array(ids), np.array(labels)
    for name, array in zip(("input_ids", "labels"), arrays, strict=True):
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise ValueError(
                f"pack: {name} of document {number} must be a list of integers, not an array of "
                f"{array.dtype} of shape {list(array.shape)}"
            )
    if len(arrays[0]) != len(arrays[1]):
        raise ValueError(
            f"pack: document {number} has {len(arrays[0])} input_ids and {len(arrays[1])} labels; "
            "each token has one label, -100 if it is not learned"
        )
    if len(arrays[0]) and arrays[0].min() < 0:
        raise ValueError(f"pack: document {number} has the token id {arrays[0].min()}, below 0")
    return arrays[0].astype(np.int64), arrays[1].astype(np.int64)


def _best_fit(pieces: Sequence[_Piece], length: int) -> list[list[_Piece]]:
    """Return rows: the longest pieces first, each in the row that has the least space for it.

    Of several such rows the first one.
    """
    rows: list[list[_Piece]] = []
    rows_by_space: dict[int, list[int]] = {}  # heaps
    spaces: list[int] = []  # the keys, ascending
    for piece in sorted(pieces, key=lambda piece: piece.start - piece.stop):
        size = piece.stop - piece.start
        at = bisect_left(spaces, size)
        if at == len(spaces):
            space, row = length, len(rows)
            rows.append([])
        else:
            space = spaces[at]
            row = heapq.heappop(rows_by_space[space])
            if not rows_by_space[space]:
                del rows_by_space[space], spaces[at]
        rows[row].append(piece)
        if space - size not in rows_by_space:
            rows_by_space[space - size] = []
            insort(spaces, space - size)
        heapq.heappush(rows_by_space[space - size], row)
    return rows


def _in_order(pieces: Sequence[_Piece], length: int) -> list[list[_Piece]]:
    """Return rows: the pieces in their order, as many in each row as fit."""
    rows: list[list[_Piece]] = []
    space = 0
    for piece in pieces:
        size = piece.stop - piece.start
        if size > space:
            rows.append([])
            space = length
        rows[-1].append(piece)
        space -= size
    return rows
