"""Muon with owners, compared with a plain reference and torch's own on one process."""

from __future__ import annotations

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.optim.muon import Muon, newton_schulz
from tests.device import DEVICE
from tests.sharding.ranks import collectives, every_rank, on_mesh, same_error

STEPS = 20
PLACES = {
    "fsdp": {
        "up": P("a"),
        "down": P("a", sizes={"a": (3, 0, 3, 1)}),
        "norm": P("a"),
        "embed": P("a"),
    },
    "tp and fsdp": {
        "up": P(("b", "a")),
        "down": P("a", "b", sizes={"a": (6, 1)}),
        "norm": P("a"),
        "embed": P(None, "b"),
    },
    "replicas": {"up": P(), "down": P("b"), "norm": P(), "embed": P()},
}
MESHES = {"fsdp": (4,), "tp and fsdp": (2, 2), "replicas": (2, 2)}


class MuonModel(nn.Module):
    def __init__(self, dtype=torch.float64):
        super().__init__()
        draw = functools.partial(
            torch.randn, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        for name, shape in {"embed": (6, 7), "up": (10, 6), "down": (7, 10), "norm": (10,)}.items():
            self.register_parameter(name, nn.Parameter((draw(shape) * 0.5).to(DEVICE, dtype)))

    def forward(self, x):
        h = F.linear(F.linear(x, self.embed), self.up)
        return F.linear(torch.tanh(h * self.norm), self.down)


def data(step, dtype=torch.float64):
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64)
    return x.to(DEVICE, dtype)


def reference_step(
    params, momenta, adam, step, *, lr, decay=0.1, momentum=0.95, rule=None, nesterov=True
):
    """Run Muon as in the papers on full matrices, and AdamW for `norm` and `embed`."""
    for name, p in params.items():
        g = p.grad
        if name in ("norm", "embed"):
            m, v = adam.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
            m.mul_(0.9).add_(0.1 * g)
            v.mul_(0.999).add_(0.001 * g * g)
            p.data *= 1 - 0.003 * decay
            p.data -= 0.003 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            continue
        m = momenta.setdefault(name, torch.zeros_like(p))
        m.mul_(momentum).add_((1 - momentum) * g)
        x = (1 - momentum) * g + momentum * m if nesterov else m
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        rows, columns = p.shape
        scale = max(1, rows / columns) ** 0.5 if rule is None else 0.2 * max(rows, columns) ** 0.5
        p.data *= 1 - lr * decay
        p.data -= lr * scale * x


def trained_reference(dtype, **options):
    model, momenta, adam, losses = MuonModel(dtype), {}, {}, []
    for step in range(STEPS):
        x = data(step, dtype)
        loss = F.mse_loss(model(x), x.flip(1))
        model.zero_grad()
        loss.backward()
        reference_step(dict(model.named_parameters()), momenta, adam, step + 1, lr=0.02, **options)
        losses.append(loss.item())
    return model, losses


def placed(mesh, specs, dtype=torch.float64):
    model = MuonModel(dtype)
    for name, spec in specs.items():
        sm.parallel.shard_parameter(model, name, mesh, spec, src_data_rank=None)
    return model


def train_step(model, optimizer, mesh, step, dtype=torch.float64):
    x = sm.distribute_tensor(data(step, dtype), mesh, P("a"), src_data_rank=None)
    loss = F.mse_loss(model(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    with sm.debug.comm_budget(launches=2) as used:
        optimizer.step()
    return loss.item(), used


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("where", PLACES)
def test_equals_the_reference_over_20_steps(where, dtype, rtol):
    """Losses to 1e-5 relative (float64: 1e-10); two all_to_all a step, whatever the layouts."""
    expected, losses = trained_reference(dtype)

    def program(mesh):
        model = placed(mesh, PLACES[where], dtype)
        optimizer = Muon(
            model.named_parameters(), 0.02, ns_dtype=dtype, adamw="embed", adamw_lr=0.003
        )
        for step in range(STEPS):
            loss, used = train_step(model, optimizer, mesh, step, dtype)
            assert loss == pytest.approx(losses[step], rel=rtol)
            assert set(used.by_op) == {"all_to_all"}
        for name, p in expected.named_parameters():
            torch.testing.assert_close(
                model.get_parameter(name).detach().full_tensor(), p.detach(), rtol=rtol, atol=rtol
            )
            state = optimizer.state[model.get_parameter(name)]
            assert all(
                sm.typeof(x) is sm.typeof(model.get_parameter(name))
                for x in state.values()
                if x.ndim
            )

    on_mesh(MESHES[where], program)


@pytest.mark.parametrize(
    "options",
    [{"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}, {"momentum": 0.5}],
    ids=str,
)
def test_options(options):
    named = {
        "rule": options.get("adjust_lr_fn"),
        **{k: v for k, v in options.items() if k != "adjust_lr_fn"},
    }
    _, losses = trained_reference(torch.float64, **named)

    def program(mesh):
        model = placed(mesh, PLACES["tp and fsdp"])
        optimizer = Muon(
            model.named_parameters(),
            0.02,
            ns_dtype=torch.float64,
            adamw=["em*"],
            adamw_lr=0.003,
            **options,
        )
        found = [train_step(model, optimizer, mesh, step)[0] for step in range(STEPS)]
        assert found == pytest.approx(losses, rel=1e-10)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_bitwise_equal_to_torch(rule, where):
    """In bfloat16, as torch iterates, given the same gradients; also after its state is loaded in
    the middle.
    """
    names = ["up", "down"]
    plain = MuonModel(torch.float32)
    theirs = torch.optim.Muon(
        [plain.get_parameter(name) for name in names], 0.02, adjust_lr_fn=rule
    )
    grads = [
        {name: torch.randn_like(plain.get_parameter(name)) for name in names} for _ in range(STEPS)
    ]
    middle = None
    for step, grad in enumerate(grads):
        if step == 10:
            middle = copy.deepcopy((theirs.state_dict(), plain.state_dict()))
        for name in names:
            plain.get_parameter(name).grad = grad[name]
        theirs.step()

    def program(mesh):
        def put(x, name):
            return sm.distribute_tensor(x, mesh, PLACES[where][name], src_data_rank=None)

        def stepped(model, optimizer, some):
            for grad in some:
                for name in names:
                    model.get_parameter(name).grad = put(grad[name], name)
                optimizer.step()
            for name in names:
                assert torch.equal(
                    model.get_parameter(name).detach().full_tensor(), plain.get_parameter(name)
                )

        model = placed(mesh, PLACES[where], torch.float32)
        stepped(model, Muon([model.up, model.down], 0.02, adjust_lr_fn=rule), grads)
        other = placed(mesh, PLACES[where], torch.float32)
        optimizer = Muon([other.up, other.down], 0.5)
        state, values = copy.deepcopy(middle)
        for i, name in enumerate(names):
            state["state"][i]["momentum_buffer"] = put(state["state"][i]["momentum_buffer"], name)
            with torch.no_grad():
                other.get_parameter(name).copy_(put(values[name], name))
        optimizer.load_state_dict(state)
        stepped(other, optimizer, grads[10:])

    on_mesh(MESHES[where], program)


def test_bytes_of_a_step():
    """bfloat16: what the owner lacks before, and what the others hold after, in closed form."""

    def program(mesh):
        shapes = [(8, 6)] * 4
        params = [nn.Parameter(sm.zeros(shape, mesh, P("a"))) for shape in shapes]
        for p in params:
            p.grad = sm.ones(tuple(p.shape), mesh, P("a"))
        optimizer = Muon(params)
        with sm.debug.comm_budget(launches=2) as used:
            optimizer.step()
        return used.by_op, used.bytes_sent

    # each of 4 ranks owns one matrix: it receives 3/4 of that, and a quarter of each of the three
    # others; so it sends
    one_way = 3 * 8 * 6 * 2 // 4
    assert on_mesh((4,), program) == [({"all_to_all": (2, 2 * one_way)}, 2 * one_way)] * 4


def test_matrices_with_an_owner_communicate_nothing():
    def program(mesh):
        params = [
            nn.Parameter(
                sm.ones(
                    (6, 4), mesh, P("a", sizes={"a": tuple(6 * (r == owner) for r in range(4))})
                )
            )
            for owner in (3, 1)
        ]
        for p in params:
            p.grad = torch.ones_like(p.detach())
        with sm.debug.comm_budget(launches=0):
            Muon(params).step()
        return [p.detach()._local.numel() for p in params]

    assert on_mesh((4,), program) == [[0, 0], [0, 24], [0, 0], [24, 0]]


def test_several_meshes_and_plain_matrices():
    grads = [
        torch.randn(5, 4, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(3)
    ]
    plain = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(plain, grads, strict=True):
        p.grad = g
    torch.optim.Muon(plain, 0.1).step()

    def program():
        meshes = [
            sm.init_device_mesh(DEVICE, (4,), axis_names=("a",)),
            sm.DeviceMesh(DEVICE, [1, 2], axis_names=("b",)),
        ]
        places = [(meshes[0], P("a")), (meshes[1], P(None, "b"))]
        grads_here = [
            *(
                sm.distribute_tensor(g, *at, src_data_rank=None)
                for g, at in zip(grads, places, strict=False)
            ),
            grads[2],
        ]
        params = [nn.Parameter(torch.zeros_like(g)) for g in grads_here]
        for p, g in zip(params, grads_here, strict=True):
            p.grad = g.clone()
        with collectives() as records:
            Muon(params, 0.1).step()
        for p, q in zip(params, plain, strict=True):
            if not isinstance(p, sm.ShardedTensor) or p.mesh.coordinate is not None:
                assert torch.equal(
                    p.detach().full_tensor() if isinstance(p, sm.ShardedTensor) else p.detach(),
                    q.detach(),
                )
        return len(records)

    assert sm.simulate(4)(program)() == [2, 4, 4, 2]


@every_rank(2, 2)
def test_schedulers_closures_state_and_frozen_parameters(mesh):
    model = placed(mesh, PLACES["tp and fsdp"])
    model.up.requires_grad_(False)
    optimizer = Muon(model.named_parameters(), lr=0.4, adamw=["embed"], adamw_lr=0.2)
    assert [(g["algorithm"], g["param_names"]) for g in optimizer.param_groups] == [
        ("muon", ["up", "down"]),
        ("adamw", ["embed", "norm"]),
    ]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = sm.distribute_tensor(data(0), mesh, P("a"), src_data_rank=None)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(1))
        loss.backward()
        return loss

    frozen = model.up.detach().clone()
    first = optimizer.step(closure)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.2, 0.1]
    assert torch.equal(model.up.detach()._local, frozen._local)
    other = Muon(placed(mesh, PLACES["tp and fsdp"]).named_parameters(), adamw=["embed"])
    with sm.debug.comm_budget(launches=0):
        other.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in other.param_groups] == [0.2, 0.1]
    assert [len(s) for s in other.state.values()] == [1, 3, 3]
    assert optimizer.step(closure) < first
    extra = nn.Parameter(sm.ones((4, 2), mesh, P("a")))
    optimizer.add_param_group({"params": [("extra", extra)], "lr": 0.7})
    assert optimizer.param_groups[-1]["lr"] == 0.7


def test_errors():
    def pending(mesh):
        w = nn.Parameter(sm.zeros((4, 2), mesh, P()))
        with sm.accumulate_grads():
            (w * sm.ones((4, 2), mesh, P("a"))).sum().backward()
            Muon([("layers.w", w)]).step()

    text = same_error((2,), pending, ValueError)
    assert "Muon.step: layers.w.grad is f32[4, 2]" in text

    vector = nn.Parameter(torch.zeros(3))
    for make, said in [
        (lambda: Muon([{"params": [vector], "algorithm": "muon"}]), "shape [3]"),
        (
            lambda: Muon([("w", vector)], adamw=["embed*"]),
            "no parameter matches ['embed*']; the names are ['w']",
        ),
        (lambda: Muon([vector], adamw=["embed*"]), "model.named_parameters()"),
        (lambda: Muon([{"params": [vector], "algorithm": "sgd"}]), "'muon' or 'adamw', got 'sgd'"),
        (lambda: Muon([vector], lr=-1), "Muon(lr=-1)"),
        (lambda: Muon([vector], adjust_lr_fn="rms"), "'match_rms_adamw'"),
        (lambda: Muon([vector], ns_coefficients=(1, 2)), "(1, 2)"),
        (lambda: Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))]), "complex64"),
    ]:
        with pytest.raises(ValueError, match=re.escape(said)):
            make()


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (5, 12)])
def test_newton_schulz_makes_singular_values_about_one(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    x = u @ torch.diag(torch.linspace(0.05, 1, len(s), dtype=torch.float64)) @ vh
    values = torch.linalg.svdvals(newton_schulz(x))
    assert values.min() > 0.6
    assert values.max() < 1.3


def _on_processes():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    model = placed(mesh, PLACES["tp and fsdp"])
    optimizer = Muon(
        model.named_parameters(), 0.02, ns_dtype=torch.float64, adamw="embed", adamw_lr=0.003
    )
    return [train_step(model, optimizer, mesh, step)[0] for step in range(5)]


def test_on_processes(world4):
    _, losses = trained_reference(torch.float64)
    for found in world4(_on_processes):
        assert found == pytest.approx(losses[:5], rel=1e-10)
