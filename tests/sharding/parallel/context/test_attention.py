"""Attention over a sharded sequence, compared with full attention in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.parallel.context import blockwise, flash, ring
from shardmesh.sharding.parallel.context.attention import (
    METHODS,
    context_parallel,
    context_parallel_attention,
)
from shardmesh.sharding.parallel.context.load_balance import balance_sequence, unbalance_sequence
from tests.device import DEVICE
from tests.sharding.ops.test_recomputation import in_device_thread
from tests.sharding.parallel.models import Config, gpt, loss_of, tokens
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error


def randn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


B, H, G, S, E, V = 2, 8, 4, 13, 4, 3
Q = randn(B, H, S, E, seed=0)
K = randn(B, G, S, E, seed=1)
VALUE = randn(B, G, S, V, seed=2)
PULL = randn(B, H, S, V, seed=3)
LONGER = randn(B, G, 2 * S, E, seed=4)
ORDERS = [(False, False), (True, False), (True, True)]  # is_causal, balanced


def whole(q, k, v, pull, **options):
    """Return the output of torch's own attention and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, pull)]


def ours(mesh, tensors, specs, pull, *, balanced=False, axis="a", **options):
    leaves = [
        sm.distribute_tensor(x, mesh, spec, src_data_rank=None).requires_grad_()
        for x, spec in zip(tensors, specs, strict=True)
    ]
    given = [balance_sequence(x, 2, axis) for x in leaves] if balanced else leaves
    out = context_parallel_attention(*given, axis=axis, balanced=balanced, **options)
    assert out.spec.cuts[:-1] == given[0].spec.cuts[:-1]
    out = unbalance_sequence(out, 2, axis) if balanced else out
    grads = torch.autograd.grad(out, leaves, place(mesh, pull))
    return [x.full_tensor() for x in (out.detach(), *grads)]


def close(found, expected, tolerance=1e-12):
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


SEQUENCE = P(None, None, "a")
CASES = {
    "one rank": ((1,), SEQUENCE, SEQUENCE, "a"),
    "sequence": ((4,), SEQUENCE, SEQUENCE, "a"),
    "ragged, one empty": (
        (4,),
        P(None, None, "a", sizes={"a": (6, 0, 1, 6)}),
        P(None, None, "a", sizes={"a": (0, 9, 2, 2)}),
        "a",
    ),
    "batch": ((2, 2), P("b", None, "a"), P("b", None, "a"), "a"),
    "batch of the query alone": ((2, 2), P("b", None, "a"), P(None, None, "a"), "a"),
    "heads": ((2, 2), P(None, "b", "a"), P(None, "b", "a"), "a"),
    "heads of the query alone": ((2, 3), P(None, "b", "a"), P(None, None, "a"), "a"),
    "uneven heads": ((2, 3), P(None, "b", "a"), P(None, "b", "a"), "a"),
    "heads of keys alone": ((2, 2), P(None, None, "a"), P(None, "b", "a"), "a"),
    "features": ((2, 2), P(None, None, "a", "b"), P(None, None, "a", "b"), "a"),
    "pending": ((2, 2), P(None, None, "a", unreduced={"b"}), P("b", None, "a"), "a"),
    "three axes": ((2, 1, 2), P("c", "b", "a"), P("c", "b", "a"), "a"),
    "two axes, in the other order": (
        (2, 2),
        P(None, None, ("b", "a")),
        P(None, None, ("b", "a")),
        ("b", "a"),
    ),
}


@pytest.mark.one_in(4, each=["case", "method"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", CASES)
def test_equals_full_attention(case, method):
    shape, of_q, of_k, axis = CASES[case]
    even = not of_q.sizes and "features" not in case
    for causal, balanced in ORDERS if even else ORDERS[:2]:
        # As wide as keys: then torch has a kernel.
        v, pull = (VALUE, PULL) if causal else (K + 1, Q + 1)
        expected = whole(Q, K, v, pull, is_causal=causal, scale=0.3)
        options = {
            "is_causal": causal,
            "balanced": balanced,
            "method": method,
            "axis": axis,
            "scale": 0.3,
        }

        def program(mesh, v=v, pull=pull, options=options):
            return ours(mesh, (Q, K, v), (of_q, of_k, of_k), pull, **options)

        # 4 heads of keys over 3 ranks leave one for 2.
        if method == "all_to_all" and shape == (2, 3):
            assert "of the 4 key heads" in same_error(
                shape, program, ValueError, silent=not balanced
            )
            continue
        for found in on_mesh(shape, program):
            close(found, expected)


@settings(max_examples=20)
@given(
    shape=st.sampled_from([(2, 2), (3, 2), (2, 3)]),
    split=st.tuples(*[st.integers(0, 2)] * 2),
    heads=st.integers(1, 4),
    group=st.integers(1, 3),
    length=st.integers(0, 9),
    order=st.sampled_from(ORDERS),
    method=st.sampled_from(METHODS[:2]),
)
def test_heads_and_batch_anywhere(shape, split, heads, group, length, order, method):
    """Batch, heads or neither of queries and of keys sharded over the other axis, for any sizes."""
    q = randn(3, heads * group, length, E, seed=0)
    k = randn(3, heads, length, E, seed=1)
    v = randn(3, heads, length, E, seed=2)
    of_q, of_k = (
        P(*[axis if place == dim else None for dim, axis in enumerate("bb")], "a")
        for place in split
    )
    options = {"is_causal": order[0], "balanced": order[1], "method": method}
    for found in on_mesh(
        shape, lambda mesh: ours(mesh, (q, k, v), (of_q, of_k, of_k), q + 1, **options)
    ):
        close(found, whole(q, k, v, q + 1, is_causal=order[0]))


@pytest.mark.parametrize("method", METHODS)
def test_key_lengths_that_differ_from_queries(method):
    """More keys than queries, fewer, and none."""
    pull = randn(B, H, S, E, seed=5)

    def program(mesh, k, **options):
        return ours(mesh, (Q, k, k), [SEQUENCE] * 3, pull, method=method, **options)

    for causal in (False, True):
        for k in (LONGER, LONGER[:, :, :5]):
            for found in on_mesh(
                (3,), lambda mesh, k=k, causal=causal: program(mesh, k, is_causal=causal)
            ):
                close(found, whole(Q, k, k, pull, is_causal=causal))
    for found in on_mesh((2,), lambda mesh: program(mesh, LONGER[:, :, :0])):
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_in_any_order(method):
    def program():
        mesh = sm.DeviceMesh(DEVICE, [2, 0, 3, 1], axis_names=("a",))
        return ours(
            mesh, (Q, K, VALUE), [SEQUENCE] * 3, PULL, is_causal=True, balanced=True, method=method
        )

    for found in sm.simulate(4)(program)():
        close(found, whole(Q, K, VALUE, PULL, is_causal=True))


def _on_processes():
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    for method in METHODS:
        for causal, balanced in ORDERS[1:]:
            found = ours(
                mesh,
                (Q, K, VALUE),
                [SEQUENCE] * 3,
                PULL,
                is_causal=causal,
                balanced=balanced,
                method=method,
            )
            close(found, whole(Q, K, VALUE, PULL, is_causal=causal))


def test_on_processes(world4):
    world4(_on_processes)


def test_low_precision_is_rounded_once():
    """In bfloat16, blocks are accumulated in float32: the error is that of rounding the result and
    the gradients once.
    """
    q, k, v, pull = (x.bfloat16() for x in (Q, K, VALUE, PULL))
    expected = whole(*(x.double() for x in (q, k, v, pull)), is_causal=True)
    for found in on_mesh(
        (4,), lambda mesh: ours(mesh, (q, k, v), [SEQUENCE] * 3, pull, is_causal=True)
    ):
        assert {x.dtype for x in found} == {torch.bfloat16}
        close([x.double() for x in found[:1]], expected[:1], 2**-8)
        # They go through the rounded output.
        close([x.double() for x in found[1:]], expected[1:], 2**-6)


def test_the_derivative_of_a_gradient_raises():
    """Also where nothing that arrives in backward has a history, as in a penalty on gradients."""

    def program(mesh):
        leaves = [
            sm.distribute_tensor(x, mesh, SEQUENCE, src_data_rank=None).requires_grad_()
            for x in (Q, K, VALUE)
        ]
        out = context_parallel_attention(*leaves, axis="a")
        (gradient,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="derivative of a gradient through ring attention"):
            gradient.square().sum().backward()

    on_mesh((2,), program)


def test_autocast():
    def program(mesh):
        q, k = (sm.distribute_tensor(x.float(), mesh, SEQUENCE, src_data_rank=None) for x in (Q, K))
        with torch.autocast(DEVICE, torch.bfloat16):
            return context_parallel_attention(q, k, k, axis="a").dtype

    assert on_mesh((2,), program) == [torch.bfloat16] * 2


def test_ranks_outside_the_mesh():
    """They take part in no collective, and gradients flow through them to tensors on other
    meshes.
    """
    expected = whole(Q, K, VALUE, PULL)

    def program():
        mesh = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
        other = sm.DeviceMesh(DEVICE, [2], axis_names=("a",))
        leaf = sm.distribute_tensor(Q, other, P()).requires_grad_()
        q = leaf.redistribute(mesh, SEQUENCE)
        k = sm.distribute_tensor(K, mesh, SEQUENCE)
        v = sm.distribute_tensor(VALUE, mesh, SEQUENCE)
        out = context_parallel_attention(q, k, v, axis="a")
        out.backward(PULL)
        return None if other.coordinate is None else leaf.grad.full_tensor()

    close([sm.simulate(3)(program)()[2]], [expected[1]])


# -- what it costs ---------------------------------------------------------------------------------


def _moved(shape, spec, of_k, method, causal=True, balanced=False, length=16):
    """Return, by rank, the communication of forward and backward: (collectives, bytes received)."""
    q, k = randn(B, H, length, E, seed=0), randn(B, G, length, E, seed=1)

    def program(mesh):
        leaves = [
            sm.distribute_tensor(x, mesh, s, src_data_rank=None).requires_grad_()
            for x, s in ((q, spec), (k, of_k), (k + 1, of_k))
        ]
        with collectives() as forward:
            out = context_parallel_attention(
                *leaves, axis="a", is_causal=causal, method=method, balanced=balanced
            )
        with collectives() as backward:
            torch.autograd.grad(out, leaves, out.detach())
        return [
            (launched(records), sum(r.bytes_received for r in records))
            for records in (forward, backward)
        ]

    return on_mesh(shape, program)


def test_bytes_of_a_ring():
    """n - 1 blocks of keys and values; in backward the same plus n - 1 blocks of gradients,
    independent of mask and order.
    """
    n, block = 4, 2 * B * G * (16 // 4) * E * 8
    for causal, balanced in ORDERS:
        for forward, backward in _moved((4,), SEQUENCE, SEQUENCE, "ring", causal, balanced):
            assert forward == (["permute"] * (n - 1), (n - 1) * block)
            assert backward == (["permute"] * 2 * (n - 1), 2 * (n - 1) * block)


def test_bytes_of_an_uneven_ring():
    """Of a sequence of 16 in parts of (7, 0, 5, 4): all blocks but one's own; gradients of all but
    the block of the rank before.
    """
    sizes, row = (7, 0, 5, 4), 2 * B * G * E * 8
    spec = P(None, None, "a", sizes={"a": sizes})
    for rank, (forward, backward) in enumerate(_moved((4,), SEQUENCE, spec, "ring")):
        assert forward[1] == (16 - sizes[rank]) * row
        assert backward[1] == (16 - sizes[rank]) * row + (16 - sizes[rank - 1]) * row


def test_bytes_of_all_gather():
    n, block = 4, 2 * B * G * (16 // 4) * E * 8
    for forward, backward in _moved((4,), SEQUENCE, SEQUENCE, "all_gather"):
        assert forward == (["all_gather"], (n - 1) * block)
        assert backward == (["reduce_scatter"], (n - 1) * block)


def test_bytes_of_all_to_all_over_heads():
    """(n - 1) / n of this rank's q, k and v before, and of its output after."""
    n, q, k = 4, B * H * (16 // 4) * E * 8, B * G * (16 // 4) * E * 8
    moved = (q + 2 * k + q) * (n - 1) // n
    for forward, backward in _moved((4,), SEQUENCE, SEQUENCE, "all_to_all"):
        assert forward == (["all_to_all"] * 2, moved)
        assert backward == (["all_to_all"] * 2, moved)


def test_key_heads_are_not_repeated():
    """If heads are sharded, a rank only sends the key heads that the query heads need."""
    half = 2 * B * (G // 2) * (16 // 2) * E * 8
    for of_k in (P(None, "b", "a"), P(None, None, "a")):
        for forward, _ in _moved((2, 2), P(None, "b", "a"), of_k, "ring"):
            assert forward == (["permute"], half)


def test_eval_shape_of_attention():
    """On an abstract mesh of 8 ranks, a rank needs its parts and two blocks, and no scores."""
    mesh = sm.AbstractMesh((8,), ("a",))
    x = sm.Layout.of(mesh, SEQUENCE, (1, 8, 1 << 15, 64), torch.bfloat16)
    found = sm.debug.eval_shape(
        lambda x: context_parallel_attention(x, x, x, axis="a", is_causal=True, balanced=True), x
    )
    part = 8 * 4096 * 64 * 2
    assert found.result is x
    assert found.report.by_op == {"permute": (7, 7 * 2 * part)}
    assert found.peak_bytes < 16 * part


def _products(balanced):
    """Return, by rank, the floating-point operations of the matrix products of a causal ring,
    forward and backward.
    """
    q = randn(1, 1, 32, E, seed=0)

    def program(mesh):
        x = sm.distribute_tensor(q, mesh, SEQUENCE, src_data_rank=None).requires_grad_()
        with FlopCounterMode(display=False) as forward:
            out = context_parallel_attention(x, x, x, axis="a", is_causal=True, balanced=balanced)
        with FlopCounterMode(display=False) as backward:
            out.backward(out.detach())
        return forward.get_total_flops(), backward.get_total_flops()

    return on_mesh((4,), program)


def test_balanced_ranks_have_equal_flops(monkeypatch):
    """Two products of 2 * e flops for each pair forward, five backward. A piece is 4 long: (2n + 1)
    * 4 * 4 pairs for every rank; where the sequence lies in its own order, rank i has i + 1 blocks
      of 8 * 8.
    """
    monkeypatch.setattr(blockwise, "kernel_for", lambda *_: None)  # products that torch counts
    assert _products(balanced=True) == [(9 * 16 * 2 * 2 * E, 9 * 16 * 5 * 2 * E)] * 4
    assert _products(balanced=False) == [
        ((i + 1) * 64 * 2 * 2 * E, (i + 1) * 64 * 5 * 2 * E) for i in range(4)
    ]


def test_blocks_are_sent_while_a_rank_computes(monkeypatch):
    happened = {}
    attend = ring.attend

    def noted(seen, q, *args):
        happened[q.data_ptr()].append("attend")
        attend(seen, q, *args)

    monkeypatch.setattr(ring, "attend", noted)

    def program(mesh):
        q, k = (sm.distribute_tensor(x, mesh, SEQUENCE, src_data_rank=None) for x in (Q, K))
        events = happened[q._local.data_ptr()] = []
        observers = mesh.world.observers
        observers.append(lambda record: events.append(record.op))
        context_parallel_attention(q, k, k, axis="a")
        return events

    for events in on_mesh((3,), program):
        assert events == ["permute", "attend", "permute", "attend", "attend"]


def test_backward_saves_no_block_of_other_ranks():
    """Saved are this rank's q, k, v, output and lse."""

    def program(mesh):
        leaves = [
            sm.distribute_tensor(x, mesh, SEQUENCE, src_data_rank=None).requires_grad_()
            for x in (Q, K, VALUE)
        ]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: (saved.append(x.numel()), x)[1], lambda x: x
        ):
            out = context_parallel_attention(*leaves, axis="a")
        rows = out.to_local().shape[2]
        return sum(saved), rows * B * (H * (E + V + 1) + G * (E + V))

    for kept, expected in on_mesh((4,), program):
        assert kept == expected


@pytest.mark.parametrize("scores", [3 * B * H * 4, 1 << 20], ids=["pieces", "whole"])
@pytest.mark.parametrize("width", [E, V])
def test_without_torchs_kernel(monkeypatch, width, scores):
    """Uses matrix products over chunks of queries; features of values may differ from those of
    keys.
    """
    monkeypatch.setattr(blockwise, "kernel_for", lambda *_: None)
    monkeypatch.setattr(blockwise, "_SCORES", scores)
    v, pull = K[..., :width] + 1, randn(B, H, S, width, seed=6)
    for causal, balanced in ORDERS:
        expected = whole(Q, K, v, pull, is_causal=causal)
        options = {"is_causal": causal, "balanced": balanced}
        for found in on_mesh(
            (2,),
            lambda mesh, options=options: ours(mesh, (Q, K, v), [SEQUENCE] * 3, pull, **options),
        ):
            close(found, expected)


# -- models that know nothing of it ----------------------------------------------------------------


def _model(x, weight):
    """Return the attention of a model in plain PyTorch."""
    q, k, v = (x @ weight).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


X, WEIGHT = randn(2, 12, 6, seed=7), randn(6, 24, seed=8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_unmodified_model(method, again):
    plain = [x.clone().requires_grad_() for x in (X, WEIGHT)]
    expected = torch.autograd.grad(_model(*plain).square().mean(), plain)

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P(None, "a"), src_data_rank=None).requires_grad_()
        w = place(mesh, WEIGHT, grad=True)
        with context_parallel("a", method=method, balanced=True), sm.ops.implicit_comm("forbid"):
            lying = balance_sequence(x, 1, "a")
            with collectives() as records:
                out = (
                    checkpoint(_model, lying, w, use_reentrant=False) if again else _model(lying, w)
                )
            out.square().mean().backward()
        assert (
            launched(records)
            == {
                "ring": ["permute"],
                "all_gather": ["all_gather"],
                "all_to_all": ["all_to_all"] * 2,
            }[method]
        )
        return x.grad.full_tensor(), w.grad.full_tensor()

    for found in on_mesh((2,), program):
        close(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_after_the_block_runs_as_the_forward_did(method):
    """Also inside another block, and in a thread of its own, as autograd runs the nodes of
    a GPU.
    """
    plain = [x.clone().requires_grad_() for x in (X, WEIGHT)]
    expected = torch.autograd.grad(_model(*plain).square().mean(), plain)
    other = METHODS[METHODS.index(method) - 1]

    def program(mesh, backward):
        x = sm.distribute_tensor(X, mesh, P(None, "a"), src_data_rank=None).requires_grad_()
        w = place(mesh, WEIGHT, grad=True)
        with context_parallel("a", method=method, balanced=True):
            loss = (
                checkpoint(_model, balance_sequence(x, 1, "a"), w, use_reentrant=False)
                .square()
                .mean()
            )
        backward(loss)
        assert mesh.world.attention is None
        return x.grad.full_tensor(), w.grad.full_tensor()

    def in_another_block(loss):
        with context_parallel("a", method=other):
            world = current_world()
            before = world.attention
            loss.backward()
            assert world.attention is before

    for backward in (
        lambda loss: loss.backward(),
        in_another_block,
        lambda loss: in_device_thread(loss.backward),
    ):
        for found in on_mesh((2,), lambda mesh, backward=backward: program(mesh, backward)):
            close(found, expected)


def test_recomputation_inside_a_block_of_a_forward_outside_of_it():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P(None, "a"), src_data_rank=None).requires_grad_()
        w = place(mesh, WEIGHT, grad=True)
        loss = checkpoint(_model, x, w, use_reentrant=False).square().mean()
        with context_parallel("a"):
            with collectives() as records:
                loss.backward()
            assert "permute" not in launched(records)
        return x.grad.full_tensor(), w.grad.full_tensor()

    plain = [x.clone().requires_grad_() for x in (X, WEIGHT)]
    expected = torch.autograd.grad(_model(*plain).square().mean(), plain)
    for found in on_mesh((2,), program):
        close(found, expected)


def test_a_language_model_with_rotary_positions():
    """Unmodified: its tokens, targets and rotary tables are balanced, and its attention runs on the
    ring.
    """
    config = Config(positions=12, kv_heads=2)
    inputs, targets = tokens(b=4, s=12)
    plain = gpt(config)
    loss = loss_of(plain(inputs), targets)
    loss.backward()

    def program(mesh):
        model = sm.parallel.distribute_module(gpt(config), mesh)
        x, y = (
            balance_sequence(sm.distribute_tensor(t, mesh, P("b", "a"), src_data_rank=None), 1, "a")
            for t in (inputs, targets)
        )
        model.cos, model.sin = (balance_sequence(table, 0, "a") for table in (model.cos, model.sin))
        with context_parallel("a", balanced=True), collectives() as records:
            found = loss_of(model(x), y)
        assert launched(records).count("permute") == config.layers
        found.backward()
        return [found.detach().full_tensor(), *[p.grad.full_tensor() for p in model.parameters()]]

    for found in on_mesh((2, 2), program):
        close(found, [loss.detach(), *[p.grad for p in plain.parameters()]])


def test_contexts_nest_and_end():
    def program(mesh):
        q = sm.distribute_tensor(Q, mesh, SEQUENCE, src_data_rank=None)

        def moved():
            with collectives() as records:
                F.scaled_dot_product_attention(q, q, q)
            return launched(records)

        before = moved()
        with context_parallel("a"):
            outer = moved()
            with context_parallel("a", method="all_to_all"):
                inner = moved()
            again = moved()
            with (
                pytest.raises(RuntimeError, match="left"),
                context_parallel("a", method="all_to_all"),
            ):
                raise RuntimeError("left")
            assert moved() == again
        return before == moved(), outer, inner, again

    assert on_mesh((2,), program) == [(True, ["permute"], ["all_to_all"] * 2, ["permute"])] * 2


def test_unsharded_operands_use_the_operator_rule():
    """Unsharded queries or keys, and plain tensors."""

    def program(mesh):
        split, kept = sm.distribute_tensor(Q, mesh, SEQUENCE, src_data_rank=None), place(mesh, Q)
        with context_parallel("a"), collectives() as records:
            one = F.scaled_dot_product_attention(split, kept, kept)
            two = F.scaled_dot_product_attention(kept, kept, kept, is_causal=True)
            assert torch.equal(
                F.scaled_dot_product_attention(Q, Q, Q), F.scaled_dot_product_attention(Q, Q, Q)
            )
        assert records == []
        close([one.full_tensor()], [F.scaled_dot_product_attention(Q, Q, Q)])
        close([two.full_tensor()], [F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)])

    on_mesh((2,), program)


# -- plain tensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(7, 6), (13, 0)])
def test_plain_parts(sizes):
    """Each rank passes its own rows, on a mesh whose other axis shards the batch; the loss is the
    sum over ranks.
    """
    expected = whole(Q, K, VALUE, PULL, is_causal=True)

    def program():
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "cp"))
        batch, place_in = mesh.coordinate
        q, k, v, pull = (
            x[batch : batch + 1].split(sizes, 2)[place_in].clone() for x in (Q, K, VALUE, PULL)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = context_parallel_attention(*leaves, is_causal=True, mesh=mesh)
        found = [out.detach(), *torch.autograd.grad((out * pull).sum(), leaves)]
        close(found, [x[batch : batch + 1].split(sizes, 2)[place_in] for x in expected])

    sm.simulate(4)(program)()


# -- what cannot be --------------------------------------------------------------------------------


def _given(mesh, spec=SEQUENCE, of_k=None, q=Q, k=K, v=VALUE):
    pairs = zip((q, k, v), (spec, of_k or spec, of_k or spec), strict=True)
    return [sm.distribute_tensor(x, mesh, s, src_data_rank=None) for x, s in pairs]


def _attend(mesh, spec=SEQUENCE, *, of_k=None, q=Q, k=K, v=VALUE, axis="a", **options):
    return context_parallel_attention(*_given(mesh, spec, of_k, q, k, v), axis=axis, **options)


def _in_block(mesh, *args, balanced=False, spec=SEQUENCE, **options):
    with context_parallel("a", balanced=balanced):
        F.scaled_dot_product_attention(*_given(mesh, spec, q=K), *args, **options)


ERRORS = {
    "method": (lambda mesh: _attend(mesh, method="tree"), ValueError, "write one of 'ring'"),
    "axis": (lambda mesh: _attend(mesh, axis="cp"), ValueError, "axis=('cp',)"),
    "not split": (
        lambda mesh: _attend(mesh, P("a")),
        ValueError,
        "redistribute it to P(None, None, 'a', None)",
    ),
    "keys not split": (
        lambda mesh: _attend(mesh, of_k=P()),
        ValueError,
        "f64[2, 4, 13, 4] @ P(None",
    ),
    "split further": (
        lambda mesh: _attend(mesh, P(None, None, ("a", "b"))),
        ValueError,
        "no other axis",
    ),
    "heads": (
        lambda mesh: _attend(mesh, k=K[:, :3], v=VALUE[:, :3]),
        ValueError,
        "8, must be a multiple of the number of key heads, 3",
    ),
    "features": (
        lambda mesh: _attend(mesh, k=K[..., :2]),
        ValueError,
        "the same number of features",
    ),
    "batch": (lambda mesh: _attend(mesh, k=K[:1], v=VALUE[:1]), ValueError, "[[2], [1], [1]]"),
    "dims": (
        lambda mesh: _attend(mesh, P("a"), q=Q[0, 0], k=K[0, 0], v=VALUE[0, 0]),
        ValueError,
        "at least 3",
    ),
    "dtype": (lambda mesh: _attend(mesh, k=K.float()), ValueError, "the same floating dtype"),
    "mixed": (
        lambda mesh: context_parallel_attention(Q, *_given(mesh)[1:], axis="a"),
        TypeError,
        "must all be ShardedTensors",
    ),
    "few heads": (
        lambda mesh: _attend(
            mesh, P(None, "b", "a"), k=K[:, :2], v=VALUE[:, :2], method="all_to_all"
        ),
        ValueError,
        "1 of the 2 key heads (split over ('b',)) are too few for the 2 ranks of ('a',)",
    ),
    "not balanced": (
        lambda mesh: _attend(
            mesh, P(None, None, "a", sizes={"a": (8, 5)}), is_causal=True, balanced=True
        ),
        ValueError,
        "have (8, 5) positions, but balanced parts have (7, 6)",
    ),
    "mask": (
        lambda mesh: _in_block(mesh, place(mesh, torch.ones(S, S))),
        ValueError,
        "attn_mask of shape [13, 13]",
    ),
    "dropout": (lambda mesh: _in_block(mesh, dropout_p=0.5), ValueError, "dropout_p=0.5"),
    "order not known": (
        lambda mesh: _in_block(mesh, is_causal=True, balanced=True, spec=P()),
        ValueError,
        "their order is unknown",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_unsupported_arguments_raise(name):
    call, kind, words = ERRORS[name]
    assert words in same_error((2, 2), call, kind)


def test_two_meshes():
    def program(mesh):
        q, k, _ = _given(mesh)
        other = sm.DeviceMesh(DEVICE, [1, 0, 2, 3], axis_names=("a",))
        context_parallel_attention(
            q, k, sm.distribute_tensor(VALUE, other, SEQUENCE, src_data_rank=None), axis="a"
        )

    assert "two meshes" in same_error((2, 2), program, ValueError)


def test_context_for_another_mesh():
    def program(mesh):
        with context_parallel("cp"):
            F.scaled_dot_product_attention(*_given(mesh, q=K))

    assert "has no axis 'cp'" in same_error((2, 2), program, ValueError)
    with pytest.raises(ValueError, match="write one of"), context_parallel("a", method="tree"):
        pass


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(flash.on_cuda, flash.on_cuda_grads), (flash.on_cudnn, flash.on_cudnn_grads)],
)
def test_torchs_kernels_accept_the_arguments(forward, backward):
    """Their operators are private: their arguments are checked here, on meta tensors."""
    q, k, out = (
        torch.empty(2, n, length, 64, dtype=torch.bfloat16, device="meta")
        for n, length in ((4, 256), (2, 128), (4, 256))
    )
    mix, lse = forward(q, k, k, 0.1, False)
    grads = backward(out, q, k, k, mix, lse, 0.1, False)
    assert (mix.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.parametrize(
    "choice", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_cudnns_kernel_is_used_where_torch_uses_it(choice, width, monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(
        torch,
        "_fused_sdp_choice",
        lambda *args, enable_gqa: asked.append((*args[3:], enable_gqa)) or choice.value,
    )
    with FakeTensorMode():
        q, k = (
            torch.empty(2, heads, 16, width, dtype=torch.bfloat16, device="cuda")
            for heads in (4, 2)
        )
        found = flash.kernel_for(q, k, k, True)
    is_cudnn = choice is SDPBackend.CUDNN_ATTENTION and width <= 128
    assert found == (
        (flash.on_cudnn, flash.on_cudnn_grads) if is_cudnn else (flash.on_cuda, flash.on_cuda_grads)
    )
    assert asked == ([(None, 0.0, True, True)] if width <= 128 else [])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "name"),
    [(SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.CUDNN_ATTENTION, "cudnn")],
)
def test_torchs_kernel_is_used(backend, name, causal):
    """Half precision on CUDA uses a fused kernel for each block, forward and backward, without
    storing scores.
    """
    length, heads, width = 256, 4, 64
    q, k, v, pull = (
        torch.randn(2, h, length, width, device="cuda", dtype=torch.bfloat16)
        for h in (heads, 2, 2, heads)
    )
    expected = whole(*(x.double() for x in (q, k, v, pull)), is_causal=causal)

    def program():
        mesh = sm.init_device_mesh("cuda", (4,), axis_names=("a",))
        torch.cuda.reset_peak_memory_stats()
        with torch.profiler.profile() as profile:
            found = ours(mesh, (q, k, v), [SEQUENCE] * 3, pull, is_causal=causal, balanced=causal)
        names = {event.name for event in profile.events()}
        assert f"aten::_scaled_dot_product_{name}_attention" in names
        assert f"aten::_scaled_dot_product_{name}_attention_backward" in names
        return found

    with sdpa_kernel(backend):
        all_found = sm.simulate(4)(program)()
    for found in all_found:
        for got, want in zip(found, expected, strict=True):
            assert (got.double() - want).abs().max() < 0.02 * want.abs().max()
            assert math.isfinite(got.float().sum().item())
