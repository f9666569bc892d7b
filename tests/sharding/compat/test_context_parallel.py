"""`context_parallel` in torch's form: buffers, attention of plain tensors, `set_rotate_method`,
`context_parallel_unshard`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh.compat import context_parallel, context_parallel_unshard, set_rotate_method
from tests.sharding.ranks import every_rank, on_mesh

WIDTH, HEADS, VOCABULARY = 8, 2, 11


class Model(nn.Module):
    """Attention with positions from a buffer, as a model of any trainer has it."""

    def __init__(self, length: int, causal: bool, key_heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH // HEADS * key_heads)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer(
            "positions",
            torch.linspace(-1, 1, length * WIDTH, dtype=torch.float64).view(length, WIDTH),
        )
        self.causal, self.key_heads = causal, key_heads
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        q = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (
            y.unflatten(-1, (self.key_heads, -1)).transpose(1, 2)
            for y in self.key_value(x).chunk(2, -1)
        )
        grouped = self.key_heads != HEADS
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.head(y.transpose(1, 2).flatten(-2))


def made(length: int, causal: bool, key_heads: int) -> tuple[Model, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(length, causal, key_heads)
    tokens, labels = (torch.randint(VOCABULARY, (2, length)) for _ in range(2))
    return model, tokens, labels


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    ("ranks", "length", "causal", "key_heads"),
    [(2, 8, True, 2), (4, 16, False, 2), (2, 10, True, 1), (4, 13, True, 2)],
)
def test_a_model_is_not_changed(
    ranks: int, length: int, causal: bool, key_heads: int, rotate: str
) -> None:
    model, tokens, labels = made(length, causal, key_heads)
    expected = model(tokens)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    gradients = [p.grad for p in model.parameters()]

    def program(mesh: sm.DeviceMesh) -> None:
        model, tokens, labels = made(length, causal, key_heads)
        before = [x.clone() for x in (tokens, labels, model.positions)]
        buffers = [tokens, labels, model.positions]
        set_rotate_method(rotate)
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers={labels}
        ):
            assert tokens.shape[1] < length
            logits = model(tokens)
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
        (whole,) = context_parallel_unshard(mesh, [logits], [1])
        torch.testing.assert_close(whole, expected.detach(), rtol=1e-12, atol=1e-12)
        for p, grad in zip(model.parameters(), gradients, strict=True):
            total = p.grad.clone()
            mesh.group().all_reduce(total)
            torch.testing.assert_close(total, grad, rtol=1e-12, atol=1e-12)
        assert torch.equal(tokens, before[0])
        assert torch.equal(model.positions, before[2])
        assert labels.shape[1] < length
        assert torch.equal(context_parallel_unshard(mesh, [labels], [-1])[0], before[1])

    on_mesh((ranks,), program)


@pytest.mark.parametrize(
    "inside", [True, False], ids=["backward inside", "backward after the block"]
)
def test_recomputation(inside: bool) -> None:
    def step(model: Model, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")

    model, tokens, labels = made(8, True, 2)
    step(model, tokens, labels).backward()
    expected = model.query.weight.grad

    def program(mesh: sm.DeviceMesh) -> None:
        model, tokens, labels = made(8, True, 2)
        buffers = [tokens, labels, model.positions]
        kept = set(buffers)  # recomputation needs this rank's part as well
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0], no_restore_buffers=kept
        ):
            loss = checkpoint(step, model, tokens, labels, use_reentrant=False)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        q = torch.ones(1, 1, 4, 2)
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), q)
        mesh.group().all_reduce(model.query.weight.grad)
        torch.testing.assert_close(model.query.weight.grad, expected, rtol=1e-12, atol=1e-12)

    on_mesh((2,), program)


@every_rank(2)
def test_functions_that_call_attention(mesh: sm.DeviceMesh) -> None:
    """`nn.MultiheadAttention` calls it inside a function of torch's own."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    expected = module(x, x, x, need_weights=False)[0]
    part = x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        y = module(part, part, part, need_weights=False)[0]
    (whole,) = context_parallel_unshard(mesh, [y], [1])
    torch.testing.assert_close(whole, expected.detach(), rtol=1e-12, atol=1e-12)


@every_rank(2)
def test_buffers_are_restored(mesh: sm.DeviceMesh) -> None:
    whole = torch.arange(32.0).view(4, 8)
    column = whole[:, 1::2]  # a view that is not contiguous
    long = torch.arange(20.0)
    address = column.data_ptr()
    with (
        pytest.raises(ZeroDivisionError),
        context_parallel(mesh, buffers=[column, long], buffer_seq_dims=[0, 0]),
    ):
        index = mesh.get_local_rank()
        assert column[:, 0].tolist() == ([1.0, 25.0] if index == 0 else [9.0, 17.0])
        assert long.tolist() == (
            [0.0, 3.0] if index == 0 else [1.0, 2.0]
            # The first positions of a longer one.
        )
        column.fill_(-1)
        1 / 0
    assert column.data_ptr() == address
    assert torch.equal(column, whole[:, 1::2])
    assert torch.equal(whole, torch.arange(32.0).view(4, 8))
    assert long.tolist() == list(range(20))
    q = torch.ones(1, 1, 4, 2)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), q)  # as usual again


@every_rank(1)
def test_one_rank(mesh: sm.DeviceMesh) -> None:
    x = torch.arange(6.0)
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        assert x.tolist() == list(range(6))
        q = torch.randn(1, 1, 3, 2)
        mask = torch.ones(3, 3, dtype=torch.bool)
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert context_parallel_unshard(mesh, [x], [0])[0].tolist() == list(range(6))


@every_rank(2, 2)
def test_sharded_attention_in_the_block(mesh: sm.DeviceMesh) -> None:
    q = torch.randn(2, 2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    x = sm.parallel.balance_sequence(
        sm.distribute_tensor(q, mesh, [sm.Shard(0), sm.Shard(2)]), 2, "b"
    )
    with context_parallel(mesh["b"]):
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.testing.assert_close(
        sm.parallel.unbalance_sequence(y, 2, "b").full_tensor(), expected, rtol=1e-12, atol=1e-12
    )


def refused(case: str) -> Any:
    x = torch.arange(8.0)
    return {
        "axis": (("cp",), {}, "the form that takes an axis is sm.parallel.context_parallel"),
        "dims": ((), {"buffers": [x], "buffer_seq_dims": []}, "1 buffers and 0 buffer_seq_dims"),
        "subset": (
            (),
            {"buffers": [x], "buffer_seq_dims": [0], "no_restore_buffers": {x.clone()}},
            "must be a subset",
        ),
        "short": (
            (),
            {"buffers": [x, x[:7]], "buffer_seq_dims": [0, 0]},
            "buffer 1 has fewer positions than buffer 0",
        ),
        "parameter": (
            (),
            {"buffers": [nn.Parameter(x)], "buffer_seq_dims": [0]},
            "buffer 0 requires grad",
        ),
        "no dim": ((), {"buffers": [x], "buffer_seq_dims": [1]}, r"has shape \[8\] and no dim 1"),
    }[case]


@pytest.mark.parametrize("case", ["axis", "dims", "subset", "short", "parameter", "no dim"])
def test_refused(case: str) -> None:
    args, options, match = refused(case)

    def program(mesh: sm.DeviceMesh) -> None:
        with (
            pytest.raises((TypeError, ValueError), match=match),
            context_parallel(*(args or (mesh,)), **options),
        ):
            pass

    on_mesh((2,), program)


@every_rank(2)
def test_attention_refuses(mesh: sm.DeviceMesh) -> None:
    q, k = torch.ones(1, 2, 4, 2), torch.ones(1, 1, 4, 2)
    with context_parallel(mesh):
        with pytest.raises(ValueError, match=r"attn_mask of shape \[4, 4\]"):
            F.scaled_dot_product_attention(q, q, q, torch.ones(4, 4))
        with pytest.raises(ValueError, match=r"dropout_p=0.1"):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        with pytest.raises(ValueError, match="2 query heads and 1 key heads need enable_gqa=True"):
            F.scaled_dot_product_attention(q, k, k)
    with pytest.raises(NotImplementedError, match="write one of 'allgather', 'alltoall'"):
        set_rotate_method("ring")
    with pytest.raises(ValueError, match="1 buffers and 2 seq_dims"):
        context_parallel_unshard(mesh, [q], [0, 1])
