"""Attention with dropout and masks, and its modules, compared with one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import distribute_module, shard_parameter
from shardmesh.sharding.ops.rules.check import place
from tests.sharding.ranks import collectives, on_mesh

Q = torch.randn(2, 4, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
K = torch.randn(2, 2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
BATCH, HEADS, QUERIES = P("a"), P(None, "a"), P(None, None, "a")


@pytest.mark.parametrize(
    ("spec", "causal"), [(BATCH, False), (BATCH, True), (HEADS, True), (QUERIES, False)], ids=str
)
def test_batch_heads_and_queries_need_no_communication(spec, causal):
    def program(mesh):
        q = place(Q, mesh, spec)
        k = place(Q + 1, mesh, P() if spec == QUERIES else spec)
        mask = (
            None
            if causal
            else place(
                torch.ones(5, 5, dtype=torch.bool).tril(), mesh, P("a") if spec == QUERIES else P()
            )
        )
        with collectives() as records:
            got = F.scaled_dot_product_attention(q, k, k, mask, is_causal=causal)
        assert records == []
        torch.testing.assert_close(
            got.full_tensor(), F.scaled_dot_product_attention(Q, Q + 1, Q + 1, is_causal=True)
        )

    on_mesh((3,), program)


PADDING = torch.arange(6) < torch.tensor([[4], [6]])  # the keys that each sequence of the batch has
MASKS = {
    "padding, [b, 1, 1, k]": PADDING[:, None, None],
    "padding, expanded to queries": PADDING[:, None, None].expand(2, 1, 5, 6),
    "padding, expanded to heads": PADDING[:, None, None].expand(2, 4, 5, 6),
    "causal, [q, k]": torch.ones(5, 6, dtype=torch.bool).tril(),
    "causal, [1, 1, q, k]": torch.ones(5, 6, dtype=torch.bool).tril()[None, None],
    "causal and padding": torch.ones(5, 6, dtype=torch.bool).tril()[None, None]
    & PADDING[:, None, None],
    "of each head, [h, 1, k]": torch.arange(6) < torch.tensor([3, 4, 5, 6])[:, None, None],
}
# Of sequences, heads, queries.
SPLITS = [
    ("a", None, None),
    (None, "a", None),
    (None, None, "a"),
    ("a", "b", None),
    ("b", None, "a"),
]


@pytest.mark.one_in(5, each=["name", "split"])
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_bool_and_float_masks(name, split, added):
    """Bool masks, and additive float masks with gradients; replicated, and sharded like the
    queries.
    """
    mask = torch.where(MASKS[name], 0.0, -30.0).double() if added else MASKS[name]
    alike = P(
        *[
            axis if size > 1 else None
            for axis, size in zip((*split, None)[4 - mask.ndim :], mask.shape, strict=True)
        ]
    )

    def attention(q, k, v, mask):
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return out, lambda: torch.autograd.grad(out.square().sum(), [q, k, v, mask][: 3 + added])

    def program(mesh, spec):
        keys = P(split[0], split[1])
        operands = (
            place(Q, mesh, P(*split)),
            place(K, mesh, keys),
            place(K + 1, mesh, keys),
            place(mask, mesh, spec),
        )
        with collectives() as records:
            out, grads = attention(*[x.requires_grad_(x.is_floating_point()) for x in operands])
        assert records == []
        return [x.detach().full_tensor() for x in (out, *grads())]

    out, grads = attention(
        *[x.clone().requires_grad_(x.is_floating_point()) for x in (Q, K, K + 1, mask)]
    )
    expected = [x.detach() for x in (out, *grads())]
    for spec in {P(), alike}:
        for found in on_mesh((2, 2), lambda mesh, spec=spec: program(mesh, spec)):
            torch.testing.assert_close(found, expected)


DROPPED = {
    "plain": lambda q, k, mask: F.scaled_dot_product_attention(q, q + 1, q - 1, dropout_p=0.4),
    "causal": lambda q, k, mask: F.scaled_dot_product_attention(
        q, q + 1, q - 1, dropout_p=0.4, is_causal=True, scale=0.3
    ),
    "groups": lambda q, k, mask: F.scaled_dot_product_attention(
        q, k, k + 1, mask, 0.4, enable_gqa=True
    ),
    "nearly none": lambda q, k, mask: F.scaled_dot_product_attention(
        q, k, k + 1, mask, 1e-12, enable_gqa=True
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_dropout_does_not_depend_on_the_mesh(name):
    """The same weights are dropped on one rank and on six; and the second row, which sees nothing,
    is 0.
    """
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[1] = False

    def program(mesh, spec):
        sm.random.manual_seed(0)
        leaves = [place(x, mesh, spec).requires_grad_() for x in (Q, K)]
        out = DROPPED[name](*leaves, place(mask, mesh, P()))
        grads = torch.autograd.grad(
            out.square().sum(), leaves, materialize_grads=True, allow_unused=True
        )
        return [x.detach().full_tensor() for x in (out, *grads)]

    (alone,) = on_mesh((1,), lambda mesh: program(mesh, P()))
    if name in ("groups", "nearly none"):
        assert not alone[0][:, :, 1].any()
    if name == "nearly none":
        torch.testing.assert_close(
            alone[0], F.scaled_dot_product_attention(Q, K, K + 1, mask, enable_gqa=True)
        )
    for spec in (P("a"), P("b", "a"), P(None, ("a", "b")), P(None, None, "b")):
        for found in on_mesh((2, 3), lambda mesh, spec=spec: program(mesh, spec)):
            for got, want in zip(found, alone, strict=True):
                torch.testing.assert_close(got, want)


# -- modules ---------------------------------------------------------------------------------------

SEQ, BATCHES, WIDTH = 5, 3, 8
X = torch.randn(
    SEQ, BATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
)
MEMORY = torch.randn(
    6, BATCHES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CAUSAL = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
OF_HEADS = torch.randn(
    BATCHES * 4, SEQ, SEQ, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
)


def attention(**kwargs):
    return nn.MultiheadAttention(WIDTH, 4, **kwargs)


CALLS = {
    "self": (attention, lambda m, x, t: m(x, x, x)),
    "without weights": (attention, lambda m, x, t: m(x, x, x, need_weights=False)),
    "weights of heads": (attention, lambda m, x, t: m(x, x, x, average_attn_weights=False)),
    "cross": (attention, lambda m, x, t: m(x, t["memory"], t["memory"])),
    "padding": (attention, lambda m, x, t: m(x, x, x, key_padding_mask=t["padding"])),
    "padding and mask": (attention, lambda m, x, t: m(x, x, x, t["padding"], False, t["causal"])),
    "causal hint": (
        attention,
        lambda m, x, t: m(x, x, x, need_weights=False, attn_mask=t["causal"], is_causal=True),
    ),
    "mask of heads": (attention, lambda m, x, t: m(x, x, x, attn_mask=t["of heads"])),
    "no bias": (lambda: attention(bias=False), lambda m, x, t: m(x, x, x)),
    "learned position": (
        lambda: attention(add_bias_kv=True),
        lambda m, x, t: m(x, x, x, attn_mask=t["causal"]),
    ),
    "zero position": (
        lambda: attention(add_zero_attn=True),
        lambda m, x, t: m(x, x, x, t["padding"], False),
    ),
    "other widths": (
        lambda: attention(kdim=6, vdim=4),
        lambda m, x, t: m(x, t["memory"][..., :6], t["memory"][..., :4]),
    ),
    "batch first": (lambda: attention(batch_first=True), lambda m, x, t: m(x, x, x)),
    "one sequence": (attention, lambda m, x, t: m(x[:, 0], x[:, 1], x[:, 2])),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0),
        lambda m, x, t: m(x, t["causal"], t["padding"]),
    ),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(
            WIDTH, 4, 16, 0.0, F.gelu, batch_first=True, norm_first=True
        ),
        lambda m, x, t: m(x),
    ),
    "decoder layer": (
        lambda: nn.TransformerDecoderLayer(WIDTH, 4, 16, 0.0),
        lambda m, x, t: m(x, t["memory"], t["causal"], tgt_key_padding_mask=t["padding"]),
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0, batch_first=True), 2
        ),
        lambda m, x, t: m(x, src_key_padding_mask=None),
    ),
    "encoder, masked": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 4, 16, 0.0), 2, enable_nested_tensor=False
        ),
        lambda m, x, t: m(x, t["causal"], t["padding"], is_causal=False),
    ),
    "transformer": (
        lambda: nn.Transformer(WIDTH, 4, 1, 1, 16, 0.0),
        lambda m, x, t: m(t["memory"], x, tgt_mask=t["causal"], tgt_is_causal=False),
    ),
}
TENSORS = {"memory": MEMORY, "padding": PADDING, "causal": CAUSAL, "of heads": OF_HEADS}


def megatron(name, module, mesh):
    """Shard the projections as in Megatron: into heads, and back."""
    for parameter, spec in (
        ("in_proj_weight", P("b")),
        ("in_proj_bias", P("b")),
        ("q_proj_weight", P("b")),
        ("k_proj_weight", P("b")),
    ):
        if isinstance(module, nn.MultiheadAttention) and getattr(module, parameter) is not None:
            shard_parameter(module, parameter, mesh, spec)
    if name.endswith(("out_proj", "linear2")):
        shard_parameter(module, "weight", mesh, P(None, "b"))
    if name.endswith("linear1"):
        shard_parameter(module, "weight", mesh, P("b"))
        shard_parameter(module, "bias", mesh, P("b"))


WAYS = [
    (P(None, "a"), None),
    (P(None, "a"), megatron),
    (P(None, None, "a"), None),
    (P(), megatron),
    (P("a"), None),
]


def results(model, call, x, tensors):
    """Return the results of the module in training and in evaluation, and all gradients."""
    out = call(model, x, tensors)
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if y is not None]
    sum((y * y.detach().cos()).sum() for y in outs).backward()
    grads = [p.grad for p in model.parameters()]
    model.eval()
    with torch.no_grad():
        again = call(model, x, tensors)
    return [y.detach() for y in outs] + [
        again[0] if isinstance(again, tuple) else again,
        x.grad,
        *grads,
    ]


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", CALLS)
def test_modules_run_unchanged(name):
    make, call = CALLS[name]
    torch.manual_seed(0)
    plain = make().double()
    start = copy.deepcopy(plain.state_dict())
    wanted = results(plain, call, X.clone().requires_grad_(), TENSORS)

    def program(mesh):
        for spec, partition in WAYS:
            model = make().double()
            model.load_state_dict(start)
            distribute_module(model, mesh, partition)
            tensors = {key: place(t, mesh, P()) for key, t in TENSORS.items()}
            found = results(
                model,
                call,
                sm.distribute_tensor(X, mesh, spec, src_data_rank=None).requires_grad_(),
                tensors,
            )
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((2, 2), program)


def test_heads_stay_sharded_between_the_projections():
    """Tensor-parallel attention only communicates to shard the packed weight by heads and to sum
    the result.
    """

    def program(mesh):
        model = distribute_module(attention().double(), mesh, megatron)
        with collectives() as records:
            out, _ = model(
                place(X, mesh, P()), place(X, mesh, P()), place(X, mesh, P()), need_weights=False
            )
        assert out.spec.unreduced == (("b", "sum"),)
        weight = 3 * WIDTH * (WIDTH + 1) * 8
        assert sum(r.bytes_received for r in records) <= weight

    on_mesh((1, 2), program)


def test_dropout_in_training():
    """The weights agree between replicas and on any mesh."""

    def program(mesh):
        torch.manual_seed(0)
        model = distribute_module(attention(dropout=0.5).double(), mesh)
        sm.random.manual_seed(1)
        x = place(X, mesh, P(None, "a"))
        return [y.detach().full_tensor() for y in model(x, x, x)]

    (alone,) = on_mesh((1,), program)
    for found in on_mesh((3,), program):
        for got, want in zip(found, alone, strict=True):
            torch.testing.assert_close(got, want)
