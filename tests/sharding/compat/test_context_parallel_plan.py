"""Attention modules under `_ContextParallel`, in the form of torchtitan, against one process."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental._attention import (
    _HeadTailLoadBalancer as TorchsLoadBalancer,
)
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import compat
from shardmesh.compat import Shard, parallelize_module, set_rotate_method
from tests.sharding.ranks import every_rank, on_mesh

_ContextParallel = compat._ContextParallel
_HeadTailLoadBalancer = compat._HeadTailLoadBalancer
_context_parallel_shard = compat._context_parallel_shard

WIDTH, HEADS, VOCABULARY = 16, 2, 11
SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX


class Inner(nn.Module):
    """The attention of queries, keys and values, as torchtitan's modules have it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, mask: BlockMask | None = None) -> Tensor:
        if mask is not None:
            return flex_attention(q, k, v, block_mask=mask)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    """One block with positions that are given, since a rank has a part of the sequence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(length, WIDTH)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)
        self.inner = Inner()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(positions)
        q, k, v = (
            y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.projection(x).chunk(3, -1)
        )
        y = checkpoint(self.inner, q, k, v, use_reentrant=False)
        return self.head(y.transpose(1, 2).flatten(-2))


def batch(length: int) -> tuple[Model, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Model(length)
    tokens, labels = (torch.randint(VOCABULARY, (2, length)) for _ in range(2))
    return model, tokens, labels, torch.arange(length).expand(2, length)


def loss_of(model: Model, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    logits = model(tokens, positions)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("balanced", ["ours", "torch's", "in order"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_sequences_split_over_ranks(ranks: int, balanced: str, rotate: str) -> None:
    length = 16
    model, tokens, labels, positions = batch(length)
    expected = loss_of(model, tokens, positions, labels)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]

    def program(mesh: sm.DeviceMesh) -> None:
        model, *buffers = batch(length)
        set_rotate_method(rotate)
        parallelize_module(model.inner, mesh, _ContextParallel(seq_dim=2, attention_type=SDPA))
        kinds = {"ours": _HeadTailLoadBalancer, "torch's": TorchsLoadBalancer}
        balancer = kinds[balanced](length, ranks, "cpu") if balanced in kinds else None
        tokens, labels, positions = _context_parallel_shard(mesh, buffers, (1, 1, 1), balancer)
        assert tokens.shape == (2, length // ranks)
        loss = loss_of(model, tokens, positions, labels)
        loss.backward()
        total = loss.detach().clone()
        mesh.group().all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
        for p, grad in zip(model.parameters(), gradients, strict=True):
            mesh.group().all_reduce(p.grad)
            torch.testing.assert_close(p.grad, grad, rtol=1e-11, atol=1e-12)

    on_mesh((ranks,), program)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
def test_a_loss_split_by_classes_over_another_axis(rotate: str) -> None:
    """The ranks of an attention group have losses of their own, on slices of the other axis."""
    length = 16
    model, tokens, labels, positions = batch(length)
    expected = loss_of(model, tokens, positions, labels)
    expected.backward()

    def program(mesh: sm.DeviceMesh) -> None:
        model, *buffers = batch(length)
        set_rotate_method(rotate)
        cp, tp = mesh["a"], mesh["b"]
        parallelize_module(
            model,
            tp,
            {"head": compat.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
        )
        parallelize_module(model.inner, cp, _ContextParallel(seq_dim=2, attention_type=SDPA))
        balancer = _HeadTailLoadBalancer(length, cp.size(), "cpu")
        tokens, labels, positions = _context_parallel_shard(cp, buffers, (1, 1, 1), balancer)
        with compat.loss_parallel():
            loss = loss_of(model, tokens, positions, labels)
            loss.backward()
        total = loss.detach().full_tensor()
        cp.group().all_reduce(total)
        torch.testing.assert_close(total, expected.detach(), rtol=1e-12, atol=0)
        grad = model.embed.weight.grad
        cp.group().all_reduce(grad)
        torch.testing.assert_close(grad, embedding_grad, rtol=1e-11, atol=1e-12)

    embedding_grad = model.embed.weight.grad
    on_mesh((2, 2), program)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("balanced", ["ours", "in order"])
def test_flex_attention(balanced: str) -> None:
    """Forward alone: torch has no backward of it on CPUs."""

    def of_documents(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query // 48 == key // 48)

    length, ranks = 128, 2
    mask = create_block_mask(of_documents, 2, None, length, length, device="cpu", BLOCK_SIZE=32)
    qkv = torch.randn(3, 2, HEADS, length, 8, dtype=torch.float64)
    expected = flex_attention(*qkv, block_mask=mask)

    def program(mesh: sm.DeviceMesh) -> None:
        inner = parallelize_module(Inner(), mesh, _ContextParallel(2, FLEX))
        balancer = _HeadTailLoadBalancer(length, ranks, "cpu") if balanced == "ours" else None
        parts = _context_parallel_shard(
            mesh,
            {"qkv": qkv, "mask": mask, "expected": expected},
            {"qkv": 3, "mask": 2, "expected": 2},
            balancer,
        )
        assert parts["mask"].seq_lengths == (length // ranks, length)
        result = inner(*parts["qkv"], mask=parts["mask"])
        torch.testing.assert_close(result, parts["expected"], rtol=1e-12, atol=1e-12)

    on_mesh((ranks,), program)


@every_rank(2)
def test_gradients_of_keys_that_were_gathered(mesh: sm.DeviceMesh) -> None:
    class Whole(nn.Module):
        def forward(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.softmax(q @ key.mT, -1) @ value

    torch.manual_seed(0)
    qkv = torch.randn(3, 1, 1, 8, 4, dtype=torch.float64)
    whole = qkv.clone().requires_grad_()
    Whole()(*whole).square().sum().backward()
    (part,) = _context_parallel_shard(mesh, [qkv], [3])
    part.requires_grad_()
    q, k, v = part
    parallelize_module(Whole(), mesh, _ContextParallel(2, FLEX))(
        q, k, value=v
    ).square().sum().backward()
    (expected,) = _context_parallel_shard(mesh, [whole.grad], [3])
    torch.testing.assert_close(part.grad, expected, rtol=1e-12, atol=1e-12)


def test_orders_are_those_of_torch() -> None:
    for length, ranks in ((8, 2), (24, 3)):
        ours, theirs = (
            kind(length, ranks, "cpu") for kind in (_HeadTailLoadBalancer, TorchsLoadBalancer)
        )
        for restore in (False, True):
            assert ours._generate_indices(restore).tolist() == (
                theirs._generate_indices(restore).tolist()
            )


@every_rank(2)
def test_rows_of_a_batch_in_orders_of_their_own(mesh: sm.DeviceMesh) -> None:
    class Reversed:
        def _generate_indices(self, restore: bool = False) -> Tensor:
            return torch.stack([torch.arange(4), torch.arange(3, -1, -1)])

    x = torch.arange(16).view(2, 4, 2)
    (part,) = _context_parallel_shard(mesh, [x], [-2], Reversed())
    whole = torch.stack([x[0], x[1].flip(0)])
    assert part.tolist() == whole.chunk(2, 1)[mesh.get_local_rank()].tolist()


class _Interrupted(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        raise KeyboardInterrupt


@every_rank(2)
def test_a_module_that_raises_leaves_the_block(mesh: sm.DeviceMesh) -> None:
    q = torch.randn(1, 1, 4, 2)
    _context_parallel_shard(mesh, [q], [2], _HeadTailLoadBalancer(4, 2, "cpu"))
    with pytest.raises(KeyboardInterrupt):
        parallelize_module(_Interrupted(), mesh, _ContextParallel(2, SDPA))(q)
    x = sm.distribute_tensor(q, mesh, [Shard(2)])
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    result = F.scaled_dot_product_attention(x, x, x, is_causal=True)  # in no block: in order
    torch.testing.assert_close(result.full_tensor(), expected)


def of_order(mesh: sm.DeviceMesh, balancer: Any, *buffers: Tensor) -> list[Tensor]:
    return _context_parallel_shard(mesh, buffers, [2] * len(buffers), balancer)


@every_rank(2)
def test_recomputation_has_the_order_of_its_forward(mesh: sm.DeviceMesh) -> None:
    torch.manual_seed(0)
    inner = parallelize_module(Inner(), mesh, _ContextParallel(2, SDPA))
    whole = torch.randn(1, 1, 8, 2, dtype=torch.float64).requires_grad_()
    F.scaled_dot_product_attention(whole, whole, whole, is_causal=True).sum().backward()
    balancer = _HeadTailLoadBalancer(8, 2, "cpu")
    part, expected = of_order(mesh, balancer, whole.detach(), whole.grad)
    part.requires_grad_()
    y = checkpoint(inner, part, part, part, use_reentrant=False)
    of_order(mesh, None, whole.detach())  # such as for an evaluation between
    y.sum().backward()
    torch.testing.assert_close(part.grad, expected, rtol=1e-12, atol=1e-12)


@every_rank(2)
def test_orders_are_no_part_of_a_graph(mesh: sm.DeviceMesh) -> None:
    torch.manual_seed(0)
    inner = parallelize_module(Inner(), mesh, _ContextParallel(2, SDPA))
    jitted = sm.jit(lambda q: inner(q, q, q), backend="eager")
    q = torch.randn(1, 1, 8, 2)
    y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    for balancer in (None, None, _HeadTailLoadBalancer(8, 2, "cpu"), None):
        part, expected = of_order(mesh, balancer, q, y)
        torch.testing.assert_close(jitted(part), expected)


@every_rank(2)
def test_copies_of_a_module(mesh: sm.DeviceMesh) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(parallelize_module(One(), mesh, _ContextParallel(2, SDPA)))
    (part,) = of_order(mesh, None, torch.randn(1, 1, 4, 2))
    expected = inner(part)
    for other in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert torch.equal(other(part), expected)
        inner[0].scale.data.mul_(2)
        assert torch.equal(other(part), expected)
        inner[0].scale.data.div_(2)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) * self.scale.item()


class _OtherOrder:
    def _generate_indices(self, restore: bool = False) -> Tensor:
        return torch.arange(7, -1, -1)[None]


@every_rank(2)
def test_orders_that_are_not_known(mesh: sm.DeviceMesh) -> None:
    inner = parallelize_module(Inner(), mesh, _ContextParallel(2, SDPA))
    x = torch.randn(1, 1, 8, 2)
    with pytest.raises(ValueError, match="not known; split them by _context_parallel_shard"):
        inner(x, x, x)
    for balancer in (_OtherOrder(), _HeadTailLoadBalancer(8, 4, "cpu")):
        (part,) = of_order(mesh, balancer, x)
        with pytest.raises(ValueError, match="a load balancer that is no _HeadTailLoadBalancer"):
            inner(part, part, part)
    with pytest.raises(ValueError, match="a load balancer of 16 positions for a buffer of 8"):
        of_order(mesh, _HeadTailLoadBalancer(16, 2, "cpu"), x)
    flex = parallelize_module(Inner(), mesh, _ContextParallel(2, FLEX))
    with pytest.raises(ValueError, match="got 0 by position and q, k, v"):
        flex(q=x, k=x, v=x)


@every_rank(2)
def test_errors(mesh: sm.DeviceMesh) -> None:
    x = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="2 buffers and 1 seq_dims"):
        _context_parallel_shard(mesh, [x, x], [1])
    with pytest.raises(ValueError, match=r"6 positions over 2 ranks; pad .* multiple of 4"):
        _context_parallel_shard(mesh, [x], [1], _HeadTailLoadBalancer(6, 2, "cpu"))
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=32)
    with pytest.raises(ValueError, match="96 queries in blocks of 32 over 2 ranks"):
        _context_parallel_shard(mesh, [mask], [2])
    compat._enable_context_parallel_dispatcher()
    compat._disable_context_parallel_dispatcher()


def test_placements_of_a_dim_that_two_axes_split() -> None:
    assert isinstance(Shard(0, order=1), compat._StridedShard)
    assert not isinstance(Shard(0, order=0), compat._StridedShard)
    assert not isinstance(Shard(0), compat._StridedShard)
    with pytest.raises(TypeError, match=r"write Shard\(0, order=n\)"):
        compat._StridedShard(0, 2)
