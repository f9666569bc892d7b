"""Shampoo with owners, compared with a reference on one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.optim.shampoo import Shampoo, blocks, inverse_fourth_root
from tests.device import DEVICE
from tests.sharding.optim.test_muon import MESHES, PLACES, MuonModel, data, placed
from tests.sharding.ranks import on_mesh, same_error

STEPS = 20


class Reference:
    """Algorithm 1 of the paper, on whole matrices cut into blocks; roots by singular values. AdamW
    is torch's.
    """

    def __init__(
        self,
        model,
        lr,
        momentum=0.0,
        weight_decay=0.0,
        epsilon=1e-4,
        update_freq=1,
        block_size=1024,
    ):
        self.matrices = [model.up, model.down]
        self.lr = lr
        self.momentum = momentum
        self.decay = weight_decay
        self.every = update_freq
        self.size = block_size
        self.epsilon, self.time, self.kept, self.buffers = (
            epsilon,
            0,
            {},
            [torch.zeros_like(p) for p in self.matrices],
        )
        self.adamw = torch.optim.AdamW([model.embed, model.norm], 0.003, weight_decay=weight_decay)

    def root(self, x):
        u, s, _ = torch.linalg.svd(x)
        return u @ torch.diag(s**-0.25) @ u.T

    def direction(self, key, g):
        left, right, roots = self.kept.get(
            key, (self.epsilon * torch.eye(len(g)), self.epsilon * torch.eye(g.shape[1]), None)
        )
        left, right = left.to(g) + g @ g.T, right.to(g) + g.T @ g
        if self.time % self.every == 0:
            roots = self.root(left), self.root(right)
        self.kept[key] = left, right, roots
        return roots[0] @ g @ roots[1]

    @torch.no_grad()
    def step(self):
        for i, p in enumerate(self.matrices):
            found, k = torch.zeros_like(p), self.size
            for a in range(0, p.shape[0], k):
                for b in range(0, p.shape[1], k):
                    found[a : a + k, b : b + k] = self.direction(
                        (i, a, b), p.grad[a : a + k, b : b + k]
                    )
            self.buffers[i] = self.momentum * self.buffers[i] + found
            p.copy_(p - self.lr * self.decay * p - self.lr * self.buffers[i])
        self.time += 1
        self.adamw.step()


def train(model, optimizer, put=lambda x: x, steps=range(STEPS)):
    losses = []
    for step in steps:
        x = put(data(step))
        loss = F.mse_loss(model(x), x.flip(1))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIONS = [
    {},
    {"block_size": 4, "momentum": 0.9, "weight_decay": 0.1},
    {"block_size": 5, "update_freq": 3, "epsilon": 1e-2},
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("where", PLACES)
def test_equals_the_reference_over_20_steps(where, options):
    model = MuonModel()
    expected = train(model, Reference(model, 0.02, **options))

    def program(mesh):
        mine = placed(mesh, PLACES[where])
        optimizer = Shampoo(mine.named_parameters(), 0.02, adamw="embed", adamw_lr=0.003, **options)
        losses = train(
            mine, optimizer, lambda x: sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None)
        )
        assert losses == pytest.approx(expected, rel=1e-9)
        for name, p in model.named_parameters():
            torch.testing.assert_close(
                mine.get_parameter(name).detach().full_tensor(), p.detach(), rtol=1e-8, atol=1e-9
            )

    on_mesh(MESHES[where], program)


def test_plain_parameters():
    model, mine = MuonModel(), MuonModel()
    options = {"block_size": 4, "update_freq": 2, "momentum": 0.5}
    optimizer = Shampoo(mine.named_parameters(), 0.02, adamw="embed", adamw_lr=0.003, **options)
    assert train(mine, optimizer) == pytest.approx(
        train(model, Reference(model, 0.02, **options)), rel=1e-9
    )


def test_two_collectives_and_memory_per_rank():
    """Two all_to_all per step of 3/4 of a gradient each; preconditioners only on their owner,
    balanced.
    """

    def program(mesh):
        params = [nn.Parameter(sm.zeros((8, 6), mesh, P("a"))) for _ in range(4)]
        optimizer = Shampoo(params)
        for _ in range(2):
            for p in params:
                p.grad = sm.ones((8, 6), mesh, P("a"))
            with sm.debug.comm_budget(launches=2) as used:
                optimizer.step()
            assert used.by_op == {"all_to_all": (2, 2 * 3 * 8 * 6 * 4 // 4)}
        return sum(
            x._local.numel()
            for p in params
            for name, x in optimizer.state[p].items()
            if name != "step"
        )

    assert on_mesh((4,), program) == [8 * 8 + 6 * 6] * 4


@pytest.mark.parametrize("other", PLACES)
def test_resumes_from_its_state_with_other_owners(other):
    """Saved in the middle from one layout, loaded into another, between two computations of
    roots.
    """
    options = {
        "block_size": 5,
        "update_freq": 4,
        "momentum": 0.9,
        "adamw": ["embed"],
        "adamw_lr": 0.003,
    }
    model = MuonModel()
    expected = train(model, Shampoo(model.named_parameters(), 0.02, **options))

    def program(mesh):
        def put(x):
            return sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None)

        specs = PLACES["tp and fsdp"]
        one = placed(mesh, specs)
        optimizer = Shampoo(one.named_parameters(), 0.02, **options)
        assert train(one, optimizer, put, range(10)) == pytest.approx(expected[:10], rel=1e-9)
        two = placed(mesh, PLACES[other] if other != "fsdp" else {**specs, "up": P("b", "a")})
        with torch.no_grad():
            for name, p in two.named_parameters():
                p.copy_(one.get_parameter(name).redistribute(p.spec))
        state = copy.copy(optimizer.state_dict())
        for p, (index, kept) in zip(optimizer.state, list(state["state"].items()), strict=True):
            target = two.get_parameter(next(name for name, q in one.named_parameters() if q is p))
            state["state"][index] = {
                n: x.redistribute(target.spec) if x.shape == p.shape else x for n, x in kept.items()
            }
        loaded = Shampoo(two.named_parameters(), 9.0, **options)
        loaded.load_state_dict(state)
        assert train(two, loaded, put, range(10, STEPS)) == pytest.approx(expected[10:], rel=1e-9)

    on_mesh((2, 2), program)


def test_preconditioners_of_16_bit_parameters_stay_in_float32():
    def program(mesh):
        p = nn.Parameter(sm.zeros((4, 4), mesh, P("a"), dtype=torch.bfloat16))
        p.grad = sm.ones((4, 4), mesh, P("a"), dtype=torch.bfloat16)
        optimizer, other = Shampoo([p]), Shampoo([p])
        optimizer.step()
        other.load_state_dict(optimizer.state_dict())
        other.step()
        return {str(other.state[p][name].dtype) for name in ("left_0", "right_0")}, str(p.dtype)

    assert on_mesh((2,), program) == [({"torch.float32"}, "torch.bfloat16")] * 2


def test_errors():
    def pending(mesh):
        w = nn.Parameter(sm.zeros((4, 2), mesh, P()))
        with sm.accumulate_grads():
            (w * sm.ones((4, 2), mesh, P("a"))).sum().backward()
            Shampoo([w]).step()

    text = same_error((2,), pending, ValueError)
    assert "Shampoo.step: param_groups[0]['params'][0].grad is f32[4, 2]" in text
    w = nn.Parameter(torch.zeros(2, 2))
    for options, said in [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"update_freq": 0}, "update_freq=0"),
        ({"block_size": 0}, "block_size=0"),
    ]:
        with pytest.raises(ValueError, match=said):
            Shampoo([w], **options)


def test_blocks_and_roots():
    assert list(blocks((5, 3), 3)) == [((0, 3), (0, 3)), ((3, 5), (0, 3))]
    assert list(blocks((0, 3), 3)) == []
    x = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        DEVICE
    )
    x = x @ x.T + 0.1 * torch.eye(5, dtype=torch.float64, device=DEVICE)
    root = inverse_fourth_root(x, 1e-4)
    torch.testing.assert_close(
        torch.linalg.matrix_power(root, 4) @ x, torch.eye(5, dtype=torch.float64, device=DEVICE)
    )
