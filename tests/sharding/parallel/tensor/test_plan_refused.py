"""parallelize: invalid plans raise the same error on every rank, before anything is communicated or
changed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.compat import PrepareModuleInput, PrepareModuleOutput, Replicate, Shard
from shardmesh.sharding.parallel.tensor.plan import parallelize
from shardmesh.sharding.parallel.tensor.styles import (
    colwise,
    prepare_inputs,
    prepare_outputs,
    rowwise,
    shard_params,
)
from tests.device import DEVICE
from tests.sharding.parallel.models import Config, gpt
from tests.sharding.parallel.plans import on_axes
from tests.sharding.ranks import same_error


def refused(plan, kind=ValueError, model=None, shape=(2, 2), names=("fsdp", "tp")):
    """Return the error of a plan, equal on every rank, raised before any communication, with the
    model unchanged.
    """

    def program(mesh):
        mesh = sm.DeviceMesh(DEVICE, mesh.ranks, axis_names=names)
        given = gpt(Config(layers=2, tied=True)) if model is None else model()
        before, hooks = list(given.parameters()), hooks_of(given)
        try:
            parallelize(given, mesh, plan)
        finally:
            assert all(x is y for x, y in zip(given.parameters(), before, strict=True))
            assert hooks_of(given) == hooks

    return same_error(shape, program, kind)


def hooks_of(model):
    return [[*m._forward_hooks.values(), *m._forward_pre_hooks.values()] for m in model.modules()]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*.q_prj", "'*.q_proj'"),
        ("layers.0.self_atn.q_proj", "'layers.0.self_attn.q_proj'"),
        ("layers.*.mlp.up", "'layers.*.mlp.up_proj'"),
        ("lm_heads", "'lm_head'"),
        ("*.weights", "'*.weight'"),
    ],
)
def test_unmatched_pattern_lists_similar_names(pattern, near):
    text = refused({pattern: colwise(), "*.o_proj": rowwise()})
    assert f"{pattern!r} matches no module and no parameter; near it are" in text
    assert near in text


def test_unmatched_pattern_without_similar_names_lists_all():
    text = refused({"zzz": colwise()}, model=lambda: nn.Sequential(nn.Linear(4, 4)))
    near = "'zzz' matches no module and no parameter; there are '0', '0.weight', '0.bias'"
    assert text == f"the plan does not fit the model, a Sequential: {near}"


def test_conflicting_patterns_for_a_parameter_raise():
    text = refused({"*.q_proj": colwise(), "layers.1.*.q_proj.weight": P(None, "tp")})
    assert "'layers.1.self_attn.q_proj.weight': plan['*.q_proj'] shards it as P('tp', None)" in text
    assert "plan['layers.1.*.q_proj.weight'] as P(None, 'tp')" in text


def test_agreeing_patterns_for_a_parameter_are_accepted():
    def program(mesh):
        model = parallelize(
            nn.Sequential(nn.Linear(4, 4)), mesh, {"0": colwise(), "0.weight": P("tp")}
        )
        assert model[0].weight.spec == P("tp", None)

    on_axes((2,), ("tp",), program)


def test_conflicting_layouts_of_a_tied_parameter_raise():
    text = refused({"embed_tokens": rowwise(), "lm_head": rowwise()})
    assert "'embed_tokens.weight' and 'lm_head.weight' are one tied parameter" in text


def test_conflicting_patterns_for_inputs_raise():
    text = refused({"*.q_proj": colwise(), "*_proj": prepare_inputs(P())})
    assert (
        "colwise() of plan['*.q_proj'] and prepare_inputs(P()) of plan['*_proj'] both give layouts "
        "for its inputs" in text
    )


@pytest.mark.parametrize(
    ("plan", "kind", "says"),
    [
        ({"*.q_proj": 7}, TypeError, "plan['*.q_proj'] is 7; write a style"),
        (
            {"*.q_proj": "column"},
            ValueError,
            "plan['*.q_proj'] is 'column', which is unknown; write one of 'all_reduce', ",
        ),
        (
            {"*.q_proj.weight": colwise()},
            ValueError,
            "is for modules, but the pattern matches only parameters; write P(...)",
        ),
        (
            {"*.q_proj": P("tp")},
            ValueError,
            "is for parameters, but the pattern matches only modules; name its parameters",
        ),
        (
            {"*.q_proj": colwise(axis="cp")},
            ValueError,
            "is for axis 'cp'; DeviceMesh(cpu, fsdp=2, tp=2) has 'fsdp', 'tp'",
        ),
        (
            {"*.mlp": colwise()},
            ValueError,
            "of the parameters of SwiGLU (none) have those is not known",
        ),
        ({"*.mlp": shard_params({"w": P()})}, ValueError, "SwiGLU has no parameter or buffer 'w'"),
        (
            {"*.q_proj": colwise(units=3)},
            ValueError,
            "units=3 does not divide the 16 features of weight",
        ),
        (
            {"*.q_proj": prepare_inputs(hidden=P())},
            ValueError,
            "has a layout for the argument 'hidden', but forward takes 'input'",
        ),
        (
            {"*.q_proj": prepare_inputs(P(), P())},
            ValueError,
            "has layouts for 2 arguments, but forward takes 1: input",
        ),
        (
            {"*.q_proj": shard_params({"weight": P(None, None, "tp")})},
            ValueError,
            "'layers.0.self_attn.q_proj.weight', [16, 16]: P(None, None",
        ),
        (
            {"*.q_proj": shard_params({"weight": P("tp", sizes={"tp": (3, 4)})})},
            ValueError,
            "7 elements in total, but dim 0",
        ),
        (
            {"*.o_proj": rowwise(out=P("sp"))},
            ValueError,
            "P('sp') has axis 'sp', but DeviceMesh(cpu, fsdp=2, tp=2) has 'fsdp'",
        ),
        ([colwise()], TypeError, "parallelize: plan must be a dict such as"),
    ],
)
def test_other_mistakes(plan, kind, says):
    assert says.replace("cpu", DEVICE) in refused(plan, kind)


def test_missing_axis_raises():
    text = refused({"*.q_proj": colwise()}, names=("dp", "cp"))
    assert "colwise() has no axis=, and no axis is called 'tp'" in text


def test_invalid_mesh_raises():
    with pytest.raises(
        TypeError,
        match=r"device_mesh must be a DeviceMesh, as sm\.init_device_mesh makes it, got 'tp'",
    ):
        parallelize(nn.Linear(4, 4), "tp", {"": colwise()})


def test_a_lazy_module():
    assert "has no shape before the first call" in refused(
        {"": colwise()}, model=lambda: nn.LazyLinear(4)
    )


def test_parameters_on_another_mesh_raise():
    def program(mesh):
        model = parallelize(nn.Linear(4, 4), mesh["b"], {"": colwise()}, src_data_rank=None)
        parallelize(model, mesh, {"weight": P("a")})

    assert "on (b=2) already, and the plan is for" in same_error((2, 2), program, ValueError)


def test_a_plain_input_on_a_larger_mesh():
    def program(mesh):
        model = parallelize(
            nn.Sequential(nn.Linear(4, 4)), mesh, {"0": colwise(axis="b")}, src_data_rank=None
        )
        model(torch.ones(2, 4))

    text = same_error((2, 2), program, TypeError)
    assert (
        "'0': colwise(axis='b') of plan['0']: argument 0 is a plain tensor [2, 4], and along 'a'"
        in text
    )
    assert (
        "sm.device_put(x, mesh, P('a')) for the whole tensor, sm.from_local(x, mesh, P('a'))"
        in text
    )


def test_incompatible_activations_raise():
    def program(mesh):
        model = parallelize(
            nn.Sequential(nn.Linear(4, 4)),
            mesh,
            {"0": colwise(out=P(None, None, None, "a"))},
            src_data_rank=None,
        )
        model(sm.device_put(torch.ones(2, 4), mesh, src_data_rank=None))

    text = same_error((2,), program, ValueError)
    assert (
        "the output is f32[2, 4] @ P(None, 'a') on (a=2) and cannot become P(None, None, None, 'a')"
        in text
    )


class Positions(nn.Module):
    """An embedding of positions that the model makes, or of numbers of its rank."""

    def __init__(self, is_of_rank: bool) -> None:
        super().__init__()
        self.table, self.is_of_rank = nn.Embedding(4, 6), is_of_rank

    def forward(self, x):
        first = sm.process_index() % 2 if self.is_of_rank else 0
        return x + self.table(torch.arange(first, first + 2))


def test_plain_positions_on_a_larger_mesh():
    """They count as replicated, as next to a `ShardedTensor` without a style."""

    def program(mesh):
        model = parallelize(
            Positions(False), mesh, {"table": colwise(out=P(), axis="b")}, src_data_rank=0
        )
        x = sm.device_put(torch.zeros(2, 2, 6), mesh, P("a"))
        loss = model(x).sum()
        loss.backward()
        table = model.table.weight
        return loss.item() - 2 * table[:2].sum().item(), table.grad.full_tensor()

    for difference, grad in sm.simulate(4)(lambda: program(sm.make_mesh((2, 2), ("a", "b"))))():
        assert abs(difference) < 1e-5
        assert grad[:2].eq(2).all()
        assert grad[2:].eq(0).all()


def test_plain_numbers_of_ranks_on_a_larger_mesh():
    def program():
        mesh = sm.make_mesh((2, 2), ("a", "b"))
        model = parallelize(
            Positions(True), mesh, {"table": colwise(out=P(), axis="b")}, src_data_rank=0
        )
        model(sm.device_put(torch.zeros(2, 2, 6), mesh, P("a")))

    with pytest.raises(sm.errors.ReplicaError, match="counts as replicated inside a prepared"):
        sm.simulate(4)(program)()


class Passed(nn.Module):
    """Returns what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x


WHOLE, ROWS = Replicate(), Shard(0)


@pytest.mark.parametrize(
    "style",
    [
        PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=ROWS),
        PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=ROWS, use_local_output=True),
        PrepareModuleInput(input_layouts=ROWS, desired_input_layouts=WHOLE),
        PrepareModuleInput(input_layouts=WHOLE, desired_input_layouts=WHOLE, use_local_output=True),
        PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=ROWS),
        prepare_outputs(P()),
    ],
    ids=repr,
)
def test_plain_integers_that_are_not_taken_whole(style):
    """What is split, passed on as a part, or returned, has to be on a mesh."""

    def program(mesh):
        model = nn.ModuleDict({"inner": Passed()})
        mesh = sm.DeviceMesh(DEVICE, mesh.ranks, axis_names=("dp", "tp"))
        parallelize(model, mesh, {"inner": style}, src_data_rank=0)
        model["inner"](torch.arange(4))

    text = same_error((2, 2), program, TypeError, silent=False)  # parallelize communicates
    assert "is a plain tensor [4], and along 'dp'" in text
