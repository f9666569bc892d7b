"""torch's styles, as our classes of the same names and as torch's own objects: plain tensors in and
out.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from shardmesh.sharding.parallel.tensor import torch_styles as ours
from shardmesh.sharding.parallel.tensor.plan import parallelize, parallelize_module
from tests.device import DEVICE
from tests.sharding.parallel.models import ResidualMLP
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error


class TokenModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, dtype=torch.float64)
        self.layers = nn.ModuleList([ResidualMLP(8, 12).double() for _ in range(2)])
        self.head = nn.Linear(8, 12, bias=False, dtype=torch.float64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def model():
    """Return the model with the same values on every rank."""
    out, generator = TokenModel(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in out.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return out.to(DEVICE)


TOKENS = torch.tensor([[1, 11, 0, 5, 5, 7, 2, 3], [0, 4, 9, 9, 10, 1, 6, 8]])


def tensor_parallel(styles, shard, replicate):
    return {
        "embed": styles.RowwiseParallel(input_layouts=replicate()),
        "layers.*.up": styles.ColwiseParallel(),
        "layers.*.down": styles.RowwiseParallel(),
        "head": styles.ColwiseParallel(output_layouts=replicate()),
    }


def sequence_parallel(styles, shard, replicate):
    """Return the plan of torch's tutorial: activations between layers are plain parts of the
    sequence.
    """
    return {
        "embed": styles.RowwiseParallel(input_layouts=replicate(), output_layouts=shard(1)),
        "layers.*.norm": styles.SequenceParallel(),
        "layers.*.up": styles.ColwiseParallel(input_layouts=shard(1)),
        "layers.*.down": styles.RowwiseParallel(output_layouts=shard(1)),
        "head": styles.ColwiseParallel(input_layouts=shard(1), output_layouts=replicate()),
    }


OURS = (ours, Shard, Replicate)
TORCHS = (torch_parallel, torch_tensor.Shard, torch_tensor.Replicate)


def step(model, tokens):
    loss = model(tokens).square().mean()
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("names", [OURS, TORCHS], ids=["ours", "torch's"])
@pytest.mark.parametrize("make", [tensor_parallel, sequence_parallel])
def test_plain_tensors_in_and_out(make, names):
    expected = step(model(), TOKENS.to(DEVICE))

    def program(mesh):
        found = parallelize_module(model(), mesh, make(*names))
        named = {name for name, p in found.named_parameters() if isinstance(p, sm.ShardedTensor)}
        norms = {f"layers.{i}.norm.{name}" for i in range(2) for name in ("weight", "bias")}
        assert set(dict(found.named_parameters())) - named == (
            norms if make is tensor_parallel else set()
        )
        assert type(found(TOKENS.to(DEVICE))) is torch.Tensor
        check_same(step(found, TOKENS.to(DEVICE)), expected)

    on_mesh((4,), program)


def test_uneven_sequences():
    """7 positions over 4 ranks, which torch's own styles treat as 8."""
    expected = step(model(), TOKENS[:, :7].to(DEVICE))

    def program(mesh):
        check_same(
            step(
                parallelize_module(model(), mesh, sequence_parallel(*TORCHS)),
                TOKENS[:, :7].to(DEVICE),
            ),
            expected,
        )

    on_mesh((4,), program)


def beside_torch() -> None:
    """Apply the same plan by torch's function and by ours, in one process group."""
    theirs = torch_parallel.parallelize_module(
        model(), torch_tensor.init_device_mesh(DEVICE, (4,)), sequence_parallel(*TORCHS)
    )
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("tp",))
    own = parallelize_module(model(), mesh, sequence_parallel(*TORCHS))
    check_same(step(own, TOKENS.to(DEVICE)), step(theirs, TOKENS.to(DEVICE)))


def test_torch_computes_the_same(world4):
    world4(beside_torch)


def test_calls_of_a_block():
    """A plain input of `down` needs no exchange of shapes, since its weight tells its size.
    Backward: the gradient of the input of `up`, summed, and for each plain replicated output a
    check of 152 bytes that replicas agree.
    """

    def program(mesh):
        plan = {"up": ours.ColwiseParallel(), "down": ours.RowwiseParallel()}
        block = parallelize_module(ResidualMLP(8, 12).double().to(DEVICE), mesh, plan)
        x = torch.ones(2, 3, 8, dtype=torch.float64, requires_grad=True)
        with collectives() as forward:
            out = block(x)
        with collectives() as backward:
            out.sum().backward()
        assert launched(forward) == ["all_reduce"]
        assert launched(backward)[:2] == ["all_reduce", "all_reduce"]
        assert backward[0].bytes_received == 152 * 2 * 3 // 4

    on_mesh((4,), program)


# -- prepared inputs and outputs -------------------------------------------------------------------


class RecordsArguments(nn.Module):
    def forward(self, x, y=None, *, scale=None):
        self.seen = x, y, scale
        return x, y


@pytest.mark.parametrize("names", [OURS, TORCHS], ids=["ours", "torch's"])
@pytest.mark.parametrize("local", [False, True])
def test_prepare_module_input(names, local):
    styles, shard, replicate = names
    style = styles.PrepareModuleInput(
        input_layouts=(shard(0), None),
        desired_input_layouts=(replicate(), None),
        input_kwarg_layouts={"scale": replicate()},
        desired_input_kwarg_layouts={"scale": shard(-1)},
        use_local_output=local,
    )

    def program(mesh):
        module = parallelize_module(RecordsArguments(), mesh, style)
        whole, rank = torch.arange(12.0).reshape(3, 4), mesh.world.rank
        parts = whole.split((2, 1))
        module(parts[rank], "as it is", scale=whole)
        x, y, scale = module.seen
        assert y == "as it is"
        if local:
            assert torch.equal(x, whole)
            assert torch.equal(scale, whole.chunk(2, dim=1)[rank])
        else:
            assert x.is_fully_replicated
            assert scale.spec == P(None, "a")
            assert torch.equal(scale.full_tensor(), whole)

    on_mesh((2,), program)


@pytest.mark.parametrize("names", [OURS, TORCHS], ids=["ours", "torch's"])
def test_prepare_module_output(names):
    styles, shard, replicate = names

    def program(mesh):
        style = styles.PrepareModuleOutput(
            output_layouts=(shard(0), None), desired_output_layouts=(replicate(), None)
        )
        module = parallelize_module(RecordsArguments(), mesh, style)
        x, y = module(torch.full((mesh.world.rank + 1, 2), float(mesh.world.rank)).flip(0)[:1], 5)
        assert y == 5
        assert torch.equal(x, torch.tensor([[0.0, 0.0], [1.0, 1.0]]))

    on_mesh((2,), program)


@pytest.mark.parametrize("names", [OURS, TORCHS], ids=["ours", "torch's"])
def test_prepare_module_input_output(names):
    styles, shard, replicate = names
    style = styles.PrepareModuleInputOutput(
        input_layouts=shard(0),
        desired_input_layouts=replicate(),
        use_local_input=True,
        output_layouts=replicate(),
        desired_output_layouts=shard(1),
        use_local_output=False,
    )

    def program(mesh):
        module = parallelize_module(nn.Identity(), mesh, {"": style})
        out = module(torch.full((1, 4), float(mesh.world.rank)))
        assert out.spec == P(None, "a")
        assert torch.equal(out.full_tensor(), torch.tensor([[0.0] * 4, [1.0] * 4]))

    on_mesh((2,), program)


def test_sequence_parallel_on_another_dim():
    def program(mesh):
        for style in (
            ours.SequenceParallel(sequence_dim=0, use_local_output=True),
            torch_parallel.SequenceParallel(sequence_dim=0),
        ):
            module = parallelize_module(nn.LayerNorm(4), mesh, style)
            assert module.weight.is_fully_replicated
            out = module(torch.randn(1 + mesh.world.rank, 4).flip(0)[:1])
            assert type(out) is (torch.Tensor if style.use_local_output else sm.ShardedTensor)
            assert out.shape == (1 if style.use_local_output else 2, 4)

    on_mesh((2,), program)


# -- beside our own --------------------------------------------------------------------------------


def test_torch_styles_in_a_plan_of_ours_on_a_larger_mesh():
    """With tensors on the mesh they follow its other axes, as all styles do."""
    expected = step(model(), TOKENS.to(DEVICE))

    def program(mesh):
        mesh = sm.DeviceMesh(DEVICE, mesh.ranks, axis_names=("dp", "tp"))
        plan = tensor_parallel(*TORCHS)
        for style in plan.values():
            style.use_local_output = False
        found = parallelize(model(), mesh, plan, src_data_rank=None)
        assert found.layers[0].norm.weight.is_fully_replicated
        check_same(step(found, place(mesh, TOKENS.to(DEVICE), Shard(0), Replicate())), expected)

    on_mesh((2, 2), program)


def test_patterns_match_part_by_part():
    """As torch reads them: "*" does not match a dot."""

    def program(mesh):
        assert "near it are" in refused(parallelize_module, mesh, {"*.up": ours.ColwiseParallel()})
        found = parallelize_module(
            copy.deepcopy(model()), mesh, {"layers.[01].up": ours.ColwiseParallel()}
        )
        assert found.layers[1].up.weight.spec == P("a", None)

    def refused(function, mesh, plan):
        with pytest.raises(ValueError, match="matches no module") as error:
            function(model(), mesh, plan)
        return str(error.value)

    on_mesh((2,), program)


def test_single_style_applies_to_the_module_itself():
    def program(mesh):
        module = parallelize_module(nn.Linear(4, 4), mesh, torch_parallel.ColwiseParallel())
        assert module.weight.spec == P("a", None)

    on_mesh((2,), program)


# -- what is refused -------------------------------------------------------------------------------


def test_unsupported_torch_style_raises():
    class Special(torch_parallel.ColwiseParallel):
        pass

    def program(mesh):
        parallelize_module(nn.Linear(4, 4), mesh, {"": Special()})

    assert "torch's style " in (text := same_error((2,), program, TypeError))
    assert "is not supported; supported are ColwiseParallel, RowwiseParallel" in text


def test_wrong_number_of_layouts_raises():
    with pytest.raises(
        ValueError, match="input_layouts has 2 placements and desired_input_layouts 1"
    ):
        ours.PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Shard(0))
    with pytest.raises(
        ValueError, match=r"input_kwarg_layouts has \['x'\], desired_input_kwarg_layouts \['y'\]"
    ):
        ours.PrepareModuleInput(
            input_kwarg_layouts={"x": Shard(0)}, desired_input_kwarg_layouts={"y": Shard(0)}
        )
    with pytest.raises(
        ValueError, match="output_layouts has 1 placements and desired_output_layouts 2"
    ):
        ours.PrepareModuleInputOutput(
            output_layouts=Shard(0), desired_output_layouts=(Shard(0), Shard(0))
        )


def test_no_plan():
    def program(mesh):
        module = nn.Linear(4, 4)
        with pytest.warns(UserWarning, match="parallelize_module without a plan does nothing"):
            assert parallelize_module(module, mesh) is module
        assert not isinstance(module.weight, sm.ShardedTensor)

    on_mesh((2,), program)


def test_style_for_an_unsupported_module_raises():
    text = same_error(
        (2,),
        lambda mesh: parallelize_module(nn.LayerNorm(4), mesh, ours.RowwiseParallel()),
        ValueError,
    )
    assert (
        "which dims of the parameters of LayerNorm (weight [4], bias [4]) have those is not known"
        in text
    )
