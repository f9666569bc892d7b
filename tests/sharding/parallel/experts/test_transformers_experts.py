"""Experts of transformers by `moe`, next to the model's own experts on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import parallelize, register_moe
from shardmesh.sharding.parallel.experts.transformers_experts import why_not_moe

interface = pytest.importorskip("transformers.integrations.moe")

EXPERTS, WIDTH, HIDDEN, ROWS, CHOICES = 5, 8, 12, 12, 2


def experts_of(**flags: Any) -> Any:
    """Return experts of transformers' interface, with these flags, and random weights."""

    @interface.use_experts_implementation(**flags)
    class SomeExperts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = EXPERTS, torch.nn.functional.silu
            has_gate = flags.get("has_gate", True)
            names = {
                "gate_up_proj" if has_gate else "up_proj": (HIDDEN * (1 + has_gate), WIDTH),
                "down_proj": (WIDTH, HIDDEN),
            }
            for name, (outputs, inputs) in names.items():
                is_transposed = flags.get("is_transposed", False)
                shape = (inputs, outputs) if is_transposed else (outputs, inputs)
                self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *shape) / 4))
                if flags.get("has_bias", False):
                    bias = nn.Parameter(torch.randn(EXPERTS, outputs) / 4)
                    self.register_parameter(f"{name}_bias", bias)

        def forward(self, rows: Any, chosen: Any, weights: Any) -> Any: ...

    torch.manual_seed(0)
    return SomeExperts(SimpleNamespace(_experts_implementation="grouped_mm"))


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    scores = torch.rand(ROWS, EXPERTS, generator=generator)
    weights, chosen = scores.topk(CHOICES)
    return rows, chosen, weights


FLAGS: list[dict[str, bool]] = [
    {},
    {"is_transposed": True, "has_bias": True},
    {"has_gate": False},
]


@pytest.mark.parametrize(
    ("names", "axes", "of_rows"),
    [(("dp", "ep"), "ep", ("dp", "ep")), (("ep", "tp"), ("ep", "tp"), "ep")],
    ids=["ep", "ep and tp"],
)
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ", ".join(flags) or "plain")
def test_results_and_gradients_are_those_of_one_rank(flags, names, axes, of_rows):
    """Five experts on two ranks of ep, of which each has rows of its own; or on four of ep and tp,
    where rows are alike along tp.
    """
    experts = experts_of(**flags)
    rows, chosen, weights = inputs()
    rows.requires_grad_()
    weights.requires_grad_()
    expected = experts(rows, chosen, weights)
    expected.square().sum().backward()
    gradients = {name: x.grad for name, x in experts.named_parameters()}

    def program():
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=names)
        module = experts_of(**flags)
        plan = {name: P(axes) for name, _ in module.named_parameters()}
        module = parallelize(module, mesh, plan)
        module.config._experts_implementation = register_moe(axes)
        parts = [sm.device_put(x.detach(), mesh, P(of_rows)) for x in inputs()]
        for x in (parts[0], parts[2]):
            x.requires_grad_()
        out = module(*parts)
        torch.testing.assert_close(out.full_tensor(), expected)
        out.square().sum().backward()
        for x, plain in zip((parts[0], parts[2]), (rows, weights), strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        for name, x in module.named_parameters():
            torch.testing.assert_close(x.grad.full_tensor(), gradients[name])
            assert x.grad.spec.dims[0] == ((axes,) if axes == "ep" else axes)

    sm.simulate(4)(program)()


@pytest.mark.parametrize("rows", [ROWS - 2, 3], ids=["uneven", "a rank without rows"])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: ", ".join(flags) or "plain")
def test_each_rank_computes_its_own_rows(flags, rows):
    """Whole experts, one of them without rows, on four ranks: no rank sends rows to others."""
    experts = experts_of(**flags)

    def own_inputs() -> list[torch.Tensor]:
        some, chosen, weights = (x[:rows] for x in inputs())
        return [some, chosen.clamp(min=1), weights]

    plain = own_inputs()
    for x in (plain[0], plain[2]):
        x.requires_grad_()
    expected = experts(*plain)
    expected.square().sum().backward()

    def program():
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "fsdp"))
        module = parallelize(experts_of(**flags), mesh, {})
        module.config._experts_implementation = register_moe(None)
        parts = [sm.device_put(x, mesh, P(("dp", "fsdp"))) for x in own_inputs()]
        for x in (parts[0], parts[2]):
            x.requires_grad_()
        with sm.debug.comm_report() as report:
            out = module(*parts)
            out.square().sum().backward()
        assert report.by_operator.keys() <= {"sum", "backward"}, report
        assert out.spec == parts[0].spec
        torch.testing.assert_close(out.full_tensor(), expected)
        for x, of_one in ((parts[0], plain[0]), (parts[2], plain[2])):
            torch.testing.assert_close(x.grad.full_tensor(), of_one.grad)
        for name, x in module.named_parameters():
            whole = experts.get_parameter(name)
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
            assert not x.grad.full_tensor()[0].any()

    sm.simulate(4)(program)()


def test_plain_rows_and_whole_experts():
    experts = experts_of()
    expected = experts(*inputs())
    experts.config._experts_implementation = register_moe(None)
    torch.testing.assert_close(experts(*inputs()), expected)


def test_whole_experts_in_a_graph():
    """`sm.jit` records them, and its step has the values of eager mode."""

    def program():
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("dp",))
        module = parallelize(experts_of(), mesh, {})
        module.config._experts_implementation = register_moe(None)
        parts = [sm.device_put(x, mesh, P("dp")) for x in inputs()]
        step = sm.jit(lambda *parts: module(*parts))
        for _ in range(3):
            torch.testing.assert_close(step(*parts).full_tensor(), module(*parts).full_tensor())

    sm.simulate(2)(program)()


def test_an_axis_has_a_name_of_its_own():
    assert register_moe(None) == "moe on each rank"
    assert register_moe() == register_moe("ep") == "moe over ep"
    assert register_moe(("ep", "tp")) == "moe over ep, tp"
    assert "moe over ep, tp" in interface.ALL_EXPERTS_FUNCTIONS


def test_experts_that_moe_cannot_compute():
    assert why_not_moe(experts_of()) is None
    assert (
        why_not_moe(nn.Linear(2, 2)) == "Linear is not one of transformers' interface for experts"
    )
    normed = experts_of(has_post_expert_norm=True)
    assert why_not_moe(normed) == "SomeExperts has a norm after each expert"
    biased = experts_of()
    biased.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
    message = (
        "SomeExperts has the weights down_proj, down_proj_bias, gate_up_proj, not down_proj, "
        "gate_up_proj"
    )
    assert why_not_moe(biased) == message
    biased.config._experts_implementation = register_moe()
    with pytest.raises(ValueError, match=f"moe: {message}"):
        biased(*inputs())
