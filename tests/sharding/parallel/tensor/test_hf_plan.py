"""The strings of Hugging Face's plans: the layouts of parameters, and the outputs of models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, parallelize
from tests.sharding.parallel.plans import on_axes
from tests.sharding.ranks import on_mesh


class _Attention(nn.Module):
    def __init__(self, heads, head_dim=4):
        super().__init__()
        self.head_dim, width = head_dim, heads * head_dim
        self.q_proj, self.o_proj = nn.Linear(8, width), nn.Linear(width, 8)
        self.q_norm = nn.LayerNorm(head_dim)

    def forward(self, x):
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        return self.o_proj(torch.softmax(q, -1).flatten(-2))


class _Experts(nn.Module):
    """Gate and up in one parameter, as in Mixtral."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 12, 8) / 8)
        self.down_proj = nn.Parameter(torch.randn(2, 8, 6) / 8)

    def forward(self, x):
        gate, up = torch.einsum("bsk,enk->ebsn", x, self.gate_up_proj).chunk(2, -1)
        return torch.einsum("ebsn,ekn->bsk", gate.sigmoid() * up, self.down_proj)


class _Model(nn.Module):
    _tp_plan = {  # noqa: RUF012
        "embed": "embedding_rowwise",
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.q_norm": "replicated_with_grad_allreduce",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.experts": "moe_tp_experts",
        "layers.*.experts.gate_up_proj": "packed_colwise",
        "layers.*.experts.down_proj": "rowwise",
        "layers.*.mlp.up_proj": "colwise",  # which this configuration does not have
        "head": "colwise_gather_output",
    }

    def __init__(self, heads=3):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"attention": _Attention(heads), "experts": _Experts()}) for _ in range(2)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer["attention"](x)
            x = x + layer["experts"](x)
        return self.head(x)


IDS = torch.arange(12).view(3, 4) % 11


def _model():
    torch.manual_seed(0)
    return _Model().double()


@pytest.mark.parametrize("plan", ["auto", "own", "mixed"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_with_its_own_plan(plan, tied):
    def made():
        model = _model()
        if tied:
            model.head.weight = model.embed.weight
        return model

    def program(mesh):
        model = made()
        given = {
            "auto": "auto",
            "own": model._tp_plan,
            "mixed": {**model._tp_plan, "head": colwise(out=P())},
        }[plan]
        parallelize(model, mesh, given)
        out = model(sm.device_put(IDS, mesh))
        assert out.spec == P(None, None, None)
        out.square().mean().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-10, atol=1e-12)
        return {name: p.spec for name, p in model.named_parameters()}

    reference = made()
    reference(IDS).square().mean().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    specs = on_axes((2,), ("tp",), program)[0]
    layer = {
        name.removeprefix("layers.0."): spec
        for name, spec in specs.items()
        if name.startswith("layers.0.")
    }
    # Heads stay whole: two of three, and one.
    assert layer["attention.q_proj.weight"] == P("tp", None, sizes={"tp": (8, 4)})
    assert layer["attention.o_proj.weight"] == P(None, "tp", sizes={"tp": (8, 4)})
    assert layer["attention.q_norm.weight"] == P(None)
    assert layer["experts.gate_up_proj"] == P(None, "tp", None)
    assert layer["experts.down_proj"] == P(None, None, "tp")
    assert specs["embed.weight"] == P("tp", None)


@pytest.mark.parametrize(
    "given",
    [
        "colwise_rep",
        "colwise_gather_output",
        "rowwise_rep",
        "rowwise_split_input",
        "replicate",
        "sequence_parallel",
    ],
)
def test_strings_for_one_layer(given):
    def program(mesh):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6)).double()
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 3, 4)
        expected = model(x)
        parallelize(model, mesh, {"0": given})
        torch.testing.assert_close(
            model(sm.device_put(x, mesh)).full_tensor(), expected, rtol=1e-12, atol=1e-12
        )

    on_mesh((2,), program)


@pytest.mark.parametrize(
    ("model", "plan", "text"),
    [
        (
            _Model,
            {"head": "column"},
            r"plan\['head'\] is 'column', which is unknown; write one of 'all_reduce', "
            r".*'colwise', ",
        ),
        (
            _Model,
            {"layers.*.qproj": "colwise"},
            r"'layers\.\*\.qproj' matches no module and no parameter; near it are",
        ),
        (_Model, "tp", "'auto' for the model's own, got 'tp'"),
        (lambda: nn.Linear(2, 2), "auto", r"Linear has no plan of its own \(tp_plan\)"),
    ],
)
def test_errors(model, plan, text):
    def program(mesh):
        with pytest.raises(ValueError, match=text):
            parallelize(model(), mesh, plan)

    on_mesh((2,), program)
