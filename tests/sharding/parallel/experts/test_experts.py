"""Mixtures of experts on meshes, compared with one process."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.parallel.data.fully_shard import fully_shard
from shardmesh.sharding.parallel.experts import token_dispatch
from shardmesh.sharding.parallel.experts.experts import Experts
from shardmesh.sharding.parallel.experts.moe import moe
from shardmesh.sharding.parallel.experts.router import Routing, load_balance_loss, top_k_routing
from tests.device import DEVICE
from tests.recorded_operators import RecordedOperators
from tests.sharding.ranks import AXES, collectives, launched, on_mesh, place, same_error


def randn(*shape, seed):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


B, S, D, HIDDEN, WIDTH, COUNT, K = 3, 5, 6, 7, 4, 5, 2
X, ROUTER = randn(B, S, D, seed=0), randn(D, COUNT, seed=1)
UP = randn(COUNT, D, HIDDEN, seed=2)
DOWN = randn(COUNT, HIDDEN, WIDTH, seed=3)
PULL = randn(B, S, WIDTH, seed=4)
UNPOPULAR = torch.tensor([0, -100, 0, 0, 0], dtype=torch.float64)  # nobody wants expert 1


def expert(rows, params):
    return F.silu(rows @ params["up"]) @ params["down"]


def kept(experts, count, capacity):
    """Return which choices [... k] the experts accept, one after the other: a literal
    implementation of the rule.
    """
    flat = experts.reshape(-1, experts.shape[-1])
    keep, taken = torch.ones_like(flat, dtype=torch.bool), [0] * count
    limit = math.inf if capacity is None else math.ceil(capacity * flat.numel() / count)
    for choice in range(flat.shape[1]):
        for token in range(len(flat)):
            wanted = int(flat[token, choice])
            keep[token, choice] = taken[wanted] < limit
            taken[wanted] += 1
    return keep.view_as(experts)


def dense(x, router, up, down, capacity):
    """Apply every expert to every token, with weight zero where it was not chosen or the token was
    dropped.
    """
    logits = x @ router + UNPOPULAR
    experts, weights = top_k_routing(logits, K)
    made = torch.stack([expert(x, {"up": u, "down": d}) for u, d in zip(up, down, strict=True)], -2)
    chosen = made.gather(-2, experts[..., None].expand(*experts.shape, WIDTH))
    out = (chosen * (weights * kept(experts, COUNT, capacity))[..., None]).sum(-2)
    share = experts.flatten().bincount(minlength=COUNT).double() / experts.numel()
    return out, COUNT * (share * logits.softmax(-1).flatten(0, -2).mean(0)).sum()


def expected(capacity):
    leaves = [x.clone().requires_grad_() for x in (X, ROUTER, UP, DOWN)]
    out, balance = dense(*leaves, capacity)
    return [
        out.detach(),
        balance.detach(),
        *torch.autograd.grad((out * PULL).sum() + balance, leaves),
    ]


def ours(mesh, of_x, of_params, capacity, axis="a"):
    specs = of_x, P(), of_params, of_params
    pairs = zip((X, ROUTER, UP, DOWN), specs, strict=True)
    leaves = [
        sm.distribute_tensor(x, mesh, spec, src_data_rank=None).requires_grad_()
        for x, spec in pairs
    ]
    logits = leaves[0] @ leaves[1] + place(mesh, UNPOPULAR)
    routing = top_k_routing(logits, K)
    out = moe(
        leaves[0],
        routing,
        expert,
        {"up": leaves[2], "down": leaves[3]},
        axis=axis,
        capacity=capacity,
    )
    assert out.spec.cuts[:-1] == leaves[0].spec.cuts[:-1]
    balance = load_balance_loss(logits, routing.experts)
    grads = torch.autograd.grad((out * place(mesh, PULL)).sum() + balance, leaves)
    return [x.full_tensor() for x in (out.detach(), balance.detach(), *grads)]


def close(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


CASES = {
    "one rank": ((1,), P("a"), P("a"), "a"),
    "batch": ((4,), P("a"), P("a"), "a"),
    "sequence": ((4,), P(None, "a"), P("a"), "a"),
    "a rank without tokens": ((4,), P(None, "a", sizes={"a": (2, 0, 3, 0)}), P("a"), "a"),
    "a rank without experts": ((4,), P(None, "a"), P("a", sizes={"a": (0, 4, 0, 1)}), "a"),
    "more ranks than experts": ((6,), P(None, "a"), P("a"), "a"),
    "tokens whole": ((4,), P(), P("a"), "a"),
    "experts whole": ((4,), P(None, "a"), P(), "a"),
    "batch and sequence": ((2, 2), P("b", "a"), P("a"), "a"),
    "batch over both": ((2, 2), P(("b", "a")), P("a"), "a"),
    "sequence by another axis": ((2, 2), P(None, "b"), P("a"), "a"),
    "experts split further": ((2, 2), P("b", "a"), P(("a", "b")), "a"),
    "experts split in another dim": ((2, 2), P("b", "a"), P("a", "b"), "a"),
    "features": ((2, 2), P("a", None, "b"), P("a"), "a"),
    "three axes": ((2, 1, 2), P("c", "a"), P("a"), "a"),
    "experts over two axes": ((2, 2), P(None, ("b", "a")), P(("b", "a")), ("b", "a")),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("capacity", [None, 1.0, 0.4])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_dense_mixture(case, capacity):
    shape, of_x, of_params, axis = CASES[case]
    wanted = expected(capacity)
    for found in on_mesh(shape, lambda mesh: ours(mesh, of_x, of_params, capacity, axis)):
        close(found, wanted)


def test_ranks_in_any_order():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [2, 0, 3, 1], axis_names=("a",))
        close(ours(mesh, P(None, "a"), P("a"), 1.0), expected(1.0))

    sm.simulate(4)(program)()


def test_capacity_drops_tokens():
    """Ensures that the test above is not trivial."""
    experts = top_k_routing(X @ ROUTER + UNPOPULAR, K).experts
    dropped = [int((~kept(experts, COUNT, capacity)).sum()) for capacity in (None, 1.0, 0.4)]
    assert dropped[0] == 0 < dropped[1] < dropped[2] < experts.numel()


def _on_processes():
    for shape, of_x in (((4,), P(None, "a")), ((2, 2), P("b", "a"))):
        mesh = sm.init_device_mesh(DEVICE, shape, axis_names=AXES[: len(shape)])
        for capacity in (None, 1.0):
            close(ours(mesh, of_x, P("a"), capacity), expected(capacity))


def test_on_processes(world4):
    world4(_on_processes)


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(3,), (2, 2), (2, 3)]),
    dims=st.integers(1, 3),
    of=st.permutations(range(3)),
    k=st.integers(1, 3),
    count=st.integers(3, 7),
    capacity=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    seed=st.integers(0, 99),
)
def test_the_same_tokens_are_dropped_on_every_mesh(shape, dims, of, k, count, capacity, seed):
    """The experts return identifying numbers, so the output shows which choices were accepted by
    which expert.
    """
    random = torch.Generator().manual_seed(seed)
    lead = torch.randint(1, 6, (dims,), generator=random).tolist()
    experts = torch.rand(*lead, count, generator=random).pow(3).topk(k).indices
    spec = P(*[AXES[axis] if axis < len(shape) else None for axis in of[:dims]])
    wanted = kept(experts, count, capacity) * (experts + 1) * 10.0 ** torch.arange(k)

    def program(mesh):
        put = lambda x: sm.distribute_tensor(x, mesh, spec, src_data_rank=None)  # noqa: E731
        weights = put((10.0 ** torch.arange(k)).expand(*lead, k).contiguous())
        numbers = sm.distribute_tensor(torch.arange(count) + 1.0, mesh, P("a"), src_data_rank=None)
        x = put(torch.zeros(*lead, 1))
        return moe(
            x,
            Routing(put(experts), weights),
            lambda rows, n: rows + n,
            numbers,
            axis="a",
            capacity=capacity,
        ).full_tensor()

    for found in on_mesh(shape, program):
        assert torch.equal(found[..., 0], wanted.sum(-1))


# -- what it costs ---------------------------------------------------------------------------------


def _moved(capacity):
    """Return, by rank, the communication of forward and backward, and the number of rows sent and
    received.
    """
    # 8 tokens, 2 on each of 4 ranks.
    experts = torch.tensor([[0, 2], [0, 1], [3, 0], [0, 2], [1, 0], [2, 0], [0, 1], [0, 3]])
    keep = kept(experts, 4, capacity)

    def program(mesh):
        x = sm.distribute_tensor(
            X.flatten(0, 1)[:8], mesh, P("a"), src_data_rank=None
        ).requires_grad_()
        params = [
            sm.distribute_tensor(p[:4], mesh, P("a"), src_data_rank=None).requires_grad_()
            for p in (UP, DOWN)
        ]
        weights = sm.distribute_tensor(
            torch.ones(8, 2, dtype=torch.float64), mesh, P("a"), src_data_rank=None
        ).requires_grad_()
        routing = Routing(sm.distribute_tensor(experts, mesh, P("a"), src_data_rank=None), weights)
        with collectives() as forward:
            out = moe(
                x,
                routing,
                lambda rows, p: F.silu(rows @ p[0]) @ p[1],
                params,
                axis="a",
                capacity=capacity,
            )
        with collectives() as backward:
            (out * out.detach()).sum().backward()
        return [
            (launched(r), [(one.bytes_sent, one.bytes_received) for one in r])
            for r in (forward, backward)
        ]

    found = on_mesh((4,), program)
    here = torch.arange(8)[:, None] // 2
    away = [int(((here == rank) & (experts != rank) & keep).sum()) for rank in range(4)]
    # Expert i is on rank i.
    coming = [int(((here != rank) & (experts == rank) & keep).sum()) for rank in range(4)]
    return list(zip(found, away, coming, strict=True))


@pytest.mark.parametrize(("capacity", "numbers"), [(None, 4 + 1), (0.75, 2 * (4 + 1))])
def test_bytes_of_dispatch_and_combine(capacity, numbers):
    """One exchange of counts (a number for each expert, and for none that there is; with a capacity
    for each choice), one of rows there, one back; the same two backward. Exactly the rows that go
    to other ranks travel.
    """
    for ((ops, moved), (back_ops, moved_back)), away, coming in _moved(capacity):
        assert ops == ["all_gather", "all_to_all", "all_to_all"]
        assert back_ops == ["all_to_all", "all_to_all"]
        there, back = (away * D * 8, coming * D * 8), (coming * WIDTH * 8, away * WIDTH * 8)
        assert moved == [(3 * numbers * 8, 3 * numbers * 8), there, back]
        assert moved_back == [back[::-1], there[::-1]]


def test_load_balance_loss_communicates_little():
    """Two reductions of one number per expert; in backward only the router's gradient."""

    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        router = place(mesh, ROUTER, grad=True)
        logits = x @ router
        experts = top_k_routing(logits, K).experts
        with collectives() as forward:
            loss = load_balance_loss(logits, experts)
            loss.item()
        with collectives() as backward:
            loss.backward()
        return [sum(r.bytes_received for r in records) for records in (forward, backward)]

    for forward, backward in on_mesh((3,), program):
        assert forward <= 2 * 2 * 2 * COUNT * 8 / 3 + 8
        assert backward == 2 * 2 * D * COUNT * 8 // 3


def test_loss_is_one_for_balanced_experts():
    even = torch.arange(8).view(8, 1) % 4

    def program(mesh):
        experts = sm.distribute_tensor(even, mesh, P("a"), src_data_rank=None)
        flat = load_balance_loss(
            sm.distribute_tensor(torch.zeros(8, 4), mesh, P("a"), src_data_rank=None), experts
        )
        sharp = sm.distribute_tensor(
            torch.tensor([1e3, 0, 0, 0]).repeat(8, 1), mesh, P("a"), src_data_rank=None
        )
        return flat.item(), load_balance_loss(
            sharp, sm.zeros(8, 1, device_mesh=mesh, placements=P("a"), dtype=torch.int64)
        ).item()

    assert on_mesh((2,), program) == [(1.0, 4.0)] * 2


def test_weights_of_all_experts():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    chosen, weights = top_k_routing(logits, 2, normalize=False)
    torch.testing.assert_close(weights, logits.softmax(-1)[:, [1, 2]])
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(top_k_routing(logits, 2).weights.sum(-1), torch.ones(1))


# -- as a module -----------------------------------------------------------------------------------


class RoutedLayer(nn.Module):
    """A router and experts."""

    def __init__(self, experts):
        super().__init__()
        self.router, self.experts = nn.Linear(D, COUNT, dtype=torch.float64), experts

    def forward(self, x):
        logits = self.router(x)
        routing = top_k_routing(logits, K)
        return self.experts(x, routing), load_balance_loss(logits, routing.experts) if isinstance(
            x, sm.ShardedTensor
        ) else None


class Loop(nn.ModuleList):
    """All experts in one process."""

    def forward(self, x, routing):
        made = torch.stack([one(x) for one in self], -2)
        return (
            made.gather(-2, routing.experts[..., None].expand(*routing.experts.shape, D))
            * routing.weights[..., None]
        ).sum(-2)


def _layer():
    torch.manual_seed(0)
    ones = [
        nn.Sequential(nn.Linear(D, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, D, bias=False)).double()
        for _ in range(COUNT)
    ]
    return RoutedLayer(Loop(ones)), ones


def _trained(layer, x, steps=4):
    optimizer, losses = torch.optim.AdamW(layer.parameters(), lr=0.05), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (layer(x)[0] - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("shape", "spec"), [((4,), P(None, "a")), ((2, 2), P("b", "a"))])
def test_experts_train_as_in_one_process(shape, spec):
    layer, _ = _layer()
    wanted = _trained(layer, X)

    def program(mesh):
        sharded, ones = _layer()
        sharded.experts = Experts(ones, mesh, axis="a")
        sm.parallel.distribute_module(sharded.router, mesh)
        names = dict(sharded.named_parameters())
        assert list(names) == [
            "router.weight",
            "router.bias",
            *[f"experts.each.{n}" for n in ("0.weight", "0.bias", "2.weight")],
        ]
        assert names["experts.each.0.weight"].spec == P("a", None, None)
        assert names["experts.each.0.weight"].shape == (COUNT, HIDDEN, D)
        assert repr(sharded.experts).startswith("Experts(\n  axis=('a',), capacity=None")
        return _trained(sharded, sm.distribute_tensor(X, mesh, spec, src_data_rank=None))

    for losses in on_mesh(shape, program):
        assert losses == pytest.approx(wanted, rel=1e-12)
    assert wanted[-1] < wanted[0]


def test_experts_sharded_further_by_data_parallelism():
    """Each rank stores a part of its experts' parameters between uses; training equals one
    process.
    """
    layer, _ = _layer()
    wanted = _trained(layer, X)

    def program(mesh):
        sharded, ones = _layer()
        sharded.experts = fully_shard(Experts(ones, mesh, axis="a"), mesh, axes="b")
        fully_shard(sharded, mesh, axes="b")
        assert all(p.spec.dims[0] == ("a", "b") for p in sharded.experts.parameters())
        return _trained(sharded, sm.distribute_tensor(X, mesh, P("b", "a"), src_data_rank=None))

    for losses in on_mesh((2, 2), program):
        assert losses == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("sizes", [(3, 12), (15, 0)])
@pytest.mark.parametrize("capacity", [None, 1.0])
def test_plain_tokens(sizes, capacity):
    """Each rank has its own tokens, on a mesh whose other axis has other experts' copies: gradients
    are the sum over that, and the mean over the axis of the experts; those of the tokens are of
    their own rank's loss.
    """
    x, experts = X.flatten(0, 1), top_k_routing((X @ ROUTER + UNPOPULAR).flatten(0, 1), K).experts
    weights = torch.rand(15, K, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    pull = PULL.flatten(0, 1)
    leaves = [t.clone().requires_grad_() for t in (x, weights, UP, DOWN)]
    made = torch.stack(
        [
            expert(leaves[0], {"up": u, "down": d})
            for u, d in zip(leaves[2], leaves[3], strict=True)
        ],
        -2,
    )
    chosen = made.gather(-2, experts[..., None].expand(*experts.shape, WIDTH))
    out = (chosen * (leaves[1] * kept(experts, COUNT, capacity))[..., None]).sum(-2)
    wanted = [out.detach(), *torch.autograd.grad((out * pull).sum(), leaves)]

    def program(mesh):
        times, here = mesh.coordinate[0] + 1, mesh.coordinate[1]
        own = [t.split(sizes)[here].clone() for t in (x, weights, experts, pull)]
        tokens, shares = own[0].requires_grad_(), own[1].requires_grad_()
        params = [
            sm.distribute_tensor(p, mesh, P(("b", "a")), src_data_rank=None).requires_grad_()
            for p in (UP, DOWN)
        ]
        found = moe(
            tokens,
            Routing(own[2], shares),
            expert,
            {"up": params[0], "down": params[1]},
            axis="b",
            capacity=capacity,
        )
        (times * found * own[3]).sum().backward()
        close(
            [found.detach(), tokens.grad / times, shares.grad / times],
            [t.split(sizes)[here] for t in wanted[:3]],
        )
        close([p.grad.full_tensor() * 2 / (1 + 2) for p in params], wanted[3:])

    on_mesh((2, 2), program)


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        ([], "no modules"),
        ([nn.Linear(2, 2), nn.Linear(2, 3)], "modules[1] has parameters"),
        ([nn.BatchNorm1d(2)], "buffers ['running_mean'"),
    ],
)
def test_modules_that_differ_raise(modules, words):
    assert words in same_error((2,), lambda mesh: Experts(modules, mesh, axis="a"), ValueError)


# -- ranks outside, and what cannot be -------------------------------------------------------------


def test_ranks_outside_the_mesh():
    wanted = expected(None)

    def program():
        mesh = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
        other = sm.DeviceMesh(DEVICE, [2], axis_names=("a",))
        leaf = sm.distribute_tensor(X, other, P()).requires_grad_()
        x, router = leaf.redistribute(mesh, P(None, "a")), sm.distribute_tensor(ROUTER, mesh, P())
        logits = x @ router + sm.distribute_tensor(UNPOPULAR, mesh, P())
        params = {
            "up": sm.distribute_tensor(UP, mesh, P("a")),
            "down": sm.distribute_tensor(DOWN, mesh, P("a")),
        }
        routing = top_k_routing(logits, K)
        out = moe(x, routing, expert, params, axis="a")
        loss = (out * sm.distribute_tensor(PULL, mesh, P())).sum() + load_balance_loss(
            logits, routing.experts
        )
        loss.backward()
        return None if other.coordinate is None else leaf.grad.full_tensor()

    close([sm.simulate(3)(program)()[2]], [wanted[2]])


def _call(
    mesh,
    *,
    x=X,
    experts=None,
    weights=None,
    up=UP,
    of_up=P("a"),
    axis="a",
    spec=P(None, "a"),
    **options,
):
    put = lambda t, where: (  # noqa: E731
        sm.distribute_tensor(t, mesh, where, src_data_rank=None)
        if isinstance(t, torch.Tensor)
        else t
    )
    experts = torch.zeros(B, S, K, dtype=torch.int64) if experts is None else experts
    weights = torch.ones(B, S, K, dtype=torch.float64) if weights is None else weights
    params = {"up": put(up, of_up), "down": put(DOWN, P("a"))}
    return moe(
        put(x, spec),
        Routing(put(experts, spec), put(weights, spec)),
        expert,
        params,
        axis=axis,
        **options,
    )


ERRORS = {
    "axis": (lambda mesh: _call(mesh, axis="ep"), ValueError, "axis=('ep',)"),
    "capacity": (lambda mesh: _call(mesh, capacity=0), ValueError, "capacity=0"),
    "features alone": (
        lambda mesh: _call(mesh, x=X[0, 0], spec=P()),
        ValueError,
        "[tokens ... features]",
    ),
    "experts": (
        lambda mesh: _call(mesh, experts=torch.zeros(B, S, K)),
        ValueError,
        "experts int64",
    ),
    "shapes": (
        lambda mesh: _call(mesh, weights=torch.ones(B, S, 3).double()),
        ValueError,
        "routing.weights [3, 5, 3]",
    ),
    "tokens": (lambda mesh: _call(mesh, x=X[:2]), ValueError, "[2, 5, 'k']"),
    "counts": (
        lambda mesh: _call(mesh, up=UP[:4]),
        ValueError,
        """{"params['up']": 4, "params['down']": 5}""",
    ),
    "plain": (
        lambda mesh: moe(X, Routing(X, X), expert, {}, axis="a"),
        ValueError,
        "params has no tensor",
    ),
    "plain params": (
        lambda mesh: moe(X, Routing(X, X), expert, UP, axis="a"),
        TypeError,
        "params is a plain Tensor of shape [5, 6, 7]",
    ),
    "plain x": (lambda mesh: _call(mesh, x=[X]), TypeError, "x is a plain list"),
    "cuts": (
        lambda mesh: _call(mesh, of_up=P("a", sizes={"a": (1, 4)})),
        ValueError,
        """{"params['up']": (1, 4), "params['do""",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_unsupported_arguments_raise(name):
    call, kind, words = ERRORS[name]
    assert words in same_error((2,), call, kind)


def test_an_expert_that_mixes_rows():
    def program(mesh):
        x = place(mesh, X)
        routing = Routing(
            sm.zeros(B, S, K, device_mesh=mesh, dtype=torch.int64),
            sm.ones(B, S, K, device_mesh=mesh),
        )
        moe(x, routing, lambda rows, p: rows.sum(0, keepdim=True) @ p, place(mesh, UP), axis="a")

    with pytest.raises(
        ValueError,
        match=(
            r"an expert returned \[1, 7\] for rows \[.*, 6\]; it must map \[n d\] -> \[n f\] for "
            r"any n"
        ),
    ):
        on_mesh((2,), program)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_invalid_expert_index_raises(capacity):
    """Found on one rank, raised on all."""
    experts = torch.zeros(B, S, K, dtype=torch.int64)
    experts[1, 4, 0], experts[2, 4, 1] = COUNT, -1
    text = same_error(
        (3,), lambda mesh: _call(mesh, experts=experts, capacity=capacity), ValueError, silent=False
    )
    assert "(by rank: {2: 2}); choices are from 0 to 4" in text


def test_rows_are_sorted_before_the_host_waits_for_counts(monkeypatch):
    """So that the device has work meanwhile; without a capacity also selected."""

    def program(mesh, capacity):
        x = sm.distribute_tensor(X, mesh, P("a"))
        routing = top_k_routing(x @ sm.distribute_tensor(ROUTER, mesh, P()), K)
        params = {
            "up": sm.distribute_tensor(UP, mesh, P("a")),
            "down": sm.distribute_tensor(DOWN, mesh, P("a")),
        }
        with RecordedOperators("aten") as called:
            monkeypatch.setattr(
                token_dispatch,
                "start_to_host",
                lambda counts: lambda: called.names.append("wait") or counts,
            )
            moe(x, routing, expert, params, axis="a", capacity=capacity)
        return called.names[: called.names.index("wait")]

    assert {"argsort", "sort"} & set(on_mesh((1,), partial(program, capacity=1.0))[0])
    assert "index_select" in on_mesh((1,), partial(program, capacity=None))[0]
