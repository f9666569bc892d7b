"""Packed rows against naive definitions, and the loss of packed rows against that of documents."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.packing import document_mask, pack

DOCUMENTS = st.lists(st.integers(0, 20), min_size=1, max_size=20)


def documents_of(lengths: list[int], draw: random.Random) -> list[dict[str, list[int]]]:
    """Return documents of different tokens, of which some are not learned."""
    counter = iter(range(1, 10_000))
    documents = []
    for length in lengths:
        ids = [next(counter) for _ in range(length)]
        labels = [token if draw.random() < 0.7 else -100 for token in ids]
        documents.append({"input_ids": ids, "labels": labels})
    return documents


def pieces_of(documents: Any, length: int, long: str) -> list[tuple[list[int], list[int]]]:
    """Return what is packed, piece by piece: tokens and labels."""
    pieces = []
    for document in documents:
        ids, labels = document["input_ids"], document["labels"]
        starts = range(0, len(ids), length) if long == "split" else range(min(len(ids), 1))
        for start in starts:
            part = ids[start : start + length]
            learned = [-100, *labels[start + 1 : start + length]]
            if set(learned) != {-100}:
                pieces.append((part, learned))
    return pieces


def naive_rows(pieces: list[Any], length: int, method: str) -> list[list[Any]]:
    rows: list[list[Any]] = []

    def space(row: list[Any]) -> int:
        return length - sum(len(ids) for ids, _ in row)

    if method == "best_fit":
        pieces = sorted(pieces, key=lambda piece: -len(piece[0]))
    for piece in pieces:
        candidates = rows if method == "best_fit" else rows[-1:]
        fitting = [row for row in candidates if space(row) >= len(piece[0])]
        if fitting:
            min(fitting, key=space).append(piece)
        else:
            rows.append([piece])
    return rows


@given(
    lengths=DOCUMENTS,
    length=st.integers(2, 12),
    method=st.sampled_from(["best_fit", "in_order"]),
    long=st.sampled_from(["split", "truncate"]),
    seed=st.integers(0, 1000),
)
def test_rows_are_those_of_the_naive_definition(lengths, length, method, long, seed):
    documents = documents_of(lengths, random.Random(seed))
    pieces = pieces_of(documents, length, long)
    if not pieces:
        with pytest.raises(ValueError, match="has a token to learn"):
            pack(documents, length, method=method, long=long)
        return
    rows = pack(documents, length, pad_id=7, method=method, long=long)
    expected = naive_rows(pieces, length, method)
    assert len(rows) == len(expected)
    for row, parts in zip(rows, expected, strict=True):
        padding = length - sum(len(ids) for ids, _ in parts)
        positions = [i for ids, _ in parts for i in range(len(ids))]
        tokens = [token for ids, _ in parts for token in ids]
        labels = [label for _, learned in parts for label in learned]
        assert row["input_ids"].tolist() == tokens + [7] * padding
        assert row["labels"].tolist() == labels + [-100] * padding
        assert row["position_ids"].tolist() == positions + list(range(padding))
    used = sum(len(ids) for ids, _ in pieces)
    assert rows.fill == pytest.approx(used / (length * len(rows)))


def test_documents_without_labels_are_learned_as_a_whole():
    (row,) = pack([[5, 6, 7], [8, 9]], 6)
    assert row["labels"].tolist() == [-100, 6, 7, -100, 9, -100]


@given(starts=st.lists(st.sets(st.integers(1, 6)), min_size=1, max_size=3))
def test_document_mask(starts):
    position_ids = torch.tensor(
        [[i - max((s for s in row if s <= i), default=0) for i in range(7)] for row in starts]
    )
    mask = document_mask(position_ids)
    assert mask.shape == (len(starts), 1, 7, 7)
    for row, cuts in enumerate(starts):
        for query in range(7):
            for key in range(7):
                is_cut = any(key < cut <= query for cut in cuts)
                assert mask[row, 0, query, key] == (key <= query and not is_cut)


def test_document_mask_of_sharded_positions():
    position_ids = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 1, 2]])

    def program():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        with sm.debug.comm_budget(bytes=0):
            mask = document_mask(sm.device_put(position_ids, mesh, P("dp"), src_data_rank=None))
        assert mask.spec.dims[0] == ("dp",)
        return mask.full_tensor()

    assert torch.equal(sm.simulate(2)(program)()[0], document_mask(position_ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1, 2]], 1), "pack(length=1): a row needs at least 2 tokens"),
        (([[1, 2]], True), "pack(length=True)"),
        (([[1]], 4), "none of 1 documents has a token to learn"),
        (([], 4), "none of 0 documents"),
        (([[1, 2], [3, -4]], 4), "document 1 has the token id -4"),
        (([["a", "b"]], 4), "input_ids of document 0 must be a list of integers"),
        (([[[1, 2]]], 4), "of shape [1, 2]"),
        (
            ([{"input_ids": [1, 2], "labels": [1]}], 4),
            "document 0 has 2 input_ids and 1 labels",
        ),
    ],
)
def test_wrong_documents(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pack(*arguments)


@pytest.mark.parametrize("option", ["method", "long"])
def test_unknown_options(option):
    with pytest.raises(ValueError, match=rf"pack\({option}='x'\): write one of"):
        pack([[1, 2]], 4, **{option: "x"})


# -- in training -----------------------------------------------------------------------------------


def test_rows_are_dealt_and_resumed_on_another_mesh():
    """Every row once, in the order of one process, on two ranks and then on three."""
    rows = pack([[i, i] for i in range(1, 13)], 2)

    def batches_on(ranks: int, state: dict[str, Any] | None, steps: int) -> Any:
        def program():
            mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("dp",))
            sampler = sm.training.DistributedSampler(rows, mesh=mesh, axes="dp", seed=3)
            if state is not None:
                sampler.load_state_dict(state)
            loader = DataLoader(rows, batch_size=6 // ranks, sampler=sampler)
            seen = []
            for batch in sm.training.batches(loader, mesh, P("dp")):
                seen.append(sorted(batch["input_ids"][:, 0].full_tensor().tolist()))
                if len(seen) == steps:
                    break
            return seen, sampler.state_dict()

        return sm.simulate(ranks)(program)()[0]

    expected, _ = batches_on(1, None, 2)
    first, state = batches_on(2, None, 1)
    second, _ = batches_on(3, state, 1)
    assert first + second == expected
    assert sorted(expected[0] + expected[1]) == list(range(1, 13))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_that_of_the_documents_one_by_one(attention):
    """No attention and no label crosses a document; on a mesh as in one process."""
    transformers = pytest.importorskip("transformers")
    draw = random.Random(0)
    documents = documents_of([9, 3, 5, 2, 7, 12], draw)
    for document in documents:
        document["input_ids"] = [token % 64 for token in document["input_ids"]]
        document["labels"] = [label % 64 if label >= 0 else -100 for label in document["labels"]]
    rows = pack(documents, 14)

    def model() -> Any:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            attn_implementation=attention,
        )
        return transformers.LlamaForCausalLM(config)

    reference = model()
    total, count = 0.0, 0
    for document in documents:
        ids, labels = (torch.tensor([document[name]]) for name in ("input_ids", "labels"))
        learned = int((labels[:, 1:] != -100).sum())
        if learned:
            total += reference(input_ids=ids, labels=labels).loss.item() * learned
            count += learned

    def program() -> float:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("fsdp", "tp"))
        sharded = sm.parallel.parallelize(model(), mesh, "auto")
        sm.parallel.fully_shard(sharded, mesh, axes="fsdp", units="auto")
        loader = DataLoader(
            rows,
            batch_size=len(rows),
            sampler=sm.training.DistributedSampler(rows, mesh=mesh, axes="fsdp"),
        )
        (batch,) = sm.training.batches(loader, mesh, P("fsdp"))
        return sm.training.evaluate_loss(sharded, [batch])

    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    assert len(rows) < len(documents)
    assert reference(**batch, use_cache=False).loss.item() == pytest.approx(total / count, 1e-5)
    assert sm.simulate(4)(program)()[0] == pytest.approx(total / count, 1e-5)
    one_by_one = [{name: x[None] for name, x in row.items()} for row in rows]
    loss = sm.training.evaluate_loss(reference, one_by_one)
    assert loss == pytest.approx(total / count, 1e-5)
